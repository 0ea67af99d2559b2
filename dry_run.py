"""One step on made-up rollouts of full length, to see what it takes before queue time is spent.

    torchrun --nproc_per_node=4 train_grpo.py --config my.yaml --dry_run on

Every prompt is the longest of the data and every completion runs to ``max_completion_tokens``; every second one counts as
right, so that all of the step's work is done. Nothing is written. Memory is the most of each phase, for each rank: tensors
on GPUs, the process's resident memory on CPUs.

Left out: validation and checkpoints.
"""

from __future__ import annotations

import dataclasses


def dry_run(trainer, questions: list) -> str:
    """Run the step and print a table of seconds and MiB by phase and rank; call on every stage.

    Args:
        trainer: train_grpo.Trainer, loaded.
        questions: on the first stage.

    Returns:
        the table, on the first stage; "" elsewhere.
    """
    s, mesh = trainer.settings, trainer.mesh
    trainer.sampling = dataclasses.replace(trainer.sampling, min_new_tokens=s.max_completion_tokens, stop_strings=())
    trainer.grade = lambda graded: [float(i % 2) for i in range(len(graded))]
    trainer.peaks = {}
    longest = [max(questions, key=lambda q: len(q.prompt_ids))] * s.batch_size if questions else []
    times = trainer.step(1, longest, 1)
    ranks = mesh.gather(trainer.peaks)
    if not mesh.is_first:
        return ""
    lines = [
        f"dry run: {s.batch_size} x {s.group_size} completions of {s.max_completion_tokens} tokens behind prompts of "
        f"{len(longest[0].prompt_ids)}; {times['pipeline/microbatches']:.0f} microbatches of "
        f"{s.microbatch_size} x {times['pipeline/row_length']:.0f} tokens",
        f"{'phase':<10} {'seconds':>8}  " + "".join(f"{f'rank {r} MiB':>14}" for r in range(len(ranks))),
    ]
    for phase in trainer.peaks:
        lines.append(f"{phase:<10} {times[f'time/{phase}']:>8.2f}  " + "".join(f"{p[phase] / 2**20:>14,.0f}" for p in ranks))
    most = "".join(f"{max(p.values()) / 2**20:>14,.0f}" for p in ranks)
    lines.append(f"{'step':<10} {times['time/step']:>8.2f}  {most}")
    print("\n".join(lines), flush=True)
    return "\n".join(lines)
