"""How fast the pipeline is, as ratios of runs that take turns, so that a busy machine slows both sides alike.

    python bench/pipeline.py                              # half an hour on two cores
    python bench/pipeline.py --only speed-up --schedules 1F1B,GPipe
    python bench/pipeline.py --quick                      # two minutes: a smaller model, whose messages weigh more

Every measurement is a training step (forward, loss, backward of all rows; no optimizer) in float32 with one thread a
process. The one-process side runs the same rows through the same ``Pipeline`` with a single stage.

    speed-up        one process / pipeline, same rows, by schedule; the theory beside it is ranks x (1 - bubble). "no pipeline":
                    so many steps at once as there are ranks, which shows what cores that share memory and clock can give
    split           equal number of layers / split by cost, on a model with a large vocabulary
    packing         every sequence padded to the longest / packed rows, log-normal lengths
    shapes          M and T of every step another / always the same, same work

Each table is printed as soon as it is measured.

Left out: GPUs, more than one machine.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import sys
import time
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.multiprocessing as mp  # noqa: E402
from transformers import Qwen2Config  # noqa: E402

from parallel import Mesh, open_mesh  # noqa: E402
from pipeline import Pipeline  # noqa: E402
from rollout import Completion, Rows, choose_row_length, pack  # noqa: E402
from schedules import SCHEDULES, bubble, rank_of_stages, stages_per_rank, theoretical_bubble  # noqa: E402
from split import attention_cost, plan_stages  # noqa: E402
from stages import Stage, Stages  # noqa: E402


def model(quick: bool, vocabulary: int = 32_000, layers: int = 12) -> Qwen2Config:
    """Qwen2-shaped: 12 layers of hidden size 768 and a vocabulary of 32k are 98 M parameters."""
    hidden, intermediate, heads = (256, 704, 4) if quick else (768, 2048, 12)
    return Qwen2Config(
        hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=2, vocab_size=vocabulary // (4 if quick else 1), tie_word_embeddings=True,
        max_position_embeddings=8192, bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )


def completions_of(lengths: list[int], vocabulary: int) -> list[Completion]:
    g = torch.Generator().manual_seed(0)
    out, total = [], sum(lengths)
    for q, n in enumerate(lengths):
        ids = torch.randint(3, vocabulary, (n,), generator=g).tolist()
        c = Completion(q, 0, [5, 6, 7, 8], ids, [-5.0] * n, finished=True)
        c.advantage, c.weight = (-1.0) ** q, 1 / total
        out.append(c)
    return out


def full_rows(count: int, length: int, vocabulary: int) -> Rows:
    return pack(completions_of([length - 4] * count, vocabulary), length)


def loss(output, c):
    return -(output[..., 0] * c["advantage"] * c["weight"]).sum()


class Runner:
    """Pipelines over one mesh, made when first asked for; a step of any of them is timed from barrier to barrier."""

    def __init__(self, mesh: Mesh):
        self.mesh, self.held, self.made = mesh, {}, {}

    def pipeline(self, config, schedule: str, split=None) -> Pipeline:
        """Schedules of the same layout share the stages."""
        where = rank_of_stages(schedule, self.mesh.stages, stages_per_rank(schedule))
        layout = (id(config), tuple(where), tuple(split or ()))
        if layout not in self.held:
            parts = [
                Stage(config, s) for s, r in zip(plan_stages(config, len(where), split), where) if r == self.mesh.stage
            ]
            g = torch.Generator().manual_seed(0)
            with torch.no_grad():
                for p in (p for part in parts for p in part.parameters()):
                    p.normal_(0, 0.02, generator=g) if p.ndim > 1 else p.fill_(1.0)
            self.held[layout] = Stages(parts) if len(parts) > 1 else parts[0]
        return self.made.setdefault((layout, schedule), Pipeline(self.held[layout], self.mesh, schedule=schedule))

    def seconds(self, pipeline: Pipeline, rows: Rows) -> float:
        self.mesh.barrier()
        began = time.perf_counter()
        pipeline.train_step(rows, loss)
        self.mesh.barrier()
        return time.perf_counter() - began


def alone(mesh: Mesh) -> Mesh:
    """A pipeline of one stage on this rank, beside the real one."""
    group = [dist.new_group([rank]) for rank in range(mesh.stages)][mesh.stage]
    return Mesh(0, 1, mesh.device, group, group, None)


def speed_up(mesh: Mesh, both: Runner, quick: bool, schedules: list[str], turns: int) -> str:
    """A turn is one process once, one on every rank at the same time, then every schedule; the first turn warms up."""
    one, config = Runner(alone(mesh)), model(quick)
    rows = full_rows(16, 128 if quick else 256, config.vocab_size)
    ratios, idles, copies = {name: [] for name in schedules}, {name: [] for name in schedules}, []
    for turn in range(turns + 1):
        alone_s = mesh.broadcast(one.seconds(one.pipeline(config, "1F1B"), rows) if mesh.is_first else None)
        together_s = max(mesh.gather(one.seconds(one.pipeline(config, "1F1B"), rows)))
        copies += [mesh.stages * alone_s / together_s] if turn else []
        for name in schedules:
            pipeline = both.pipeline(config, name)
            ratio = alone_s / both.seconds(pipeline, rows)
            lanes = mesh.gather((pipeline.timeline, pipeline.step_s))
            if turn:
                ratios[name].append(ratio)
                idles[name].append(bubble([c for c, _ in lanes], max(s for _, s in lanes)))
    lines = [f"{'speed-up, 16 rows':<22} {'ratio':>6}  {'spread':>11}  {'theory':>6}  {'bubble':>7}  {'theory':>6}"]
    for name in schedules:
        theory, found = theoretical_bubble(mesh.stages, 16, name, stages_per_rank(name)), ratios[name]
        lines.append(
            f"{name:<22} {statistics.median(found):>5.2f}x  {min(found):.2f} - {max(found):.2f}  {mesh.stages * (1 - theory):>5.2f}x"
            f"  {statistics.median(idles[name]):>7.1%}  {theory:>6.1%}"
        )
    return "\n".join([*lines, row("no pipeline", copies, "a whole step on every rank at once: the most this machine gives")])


def split(mesh: Mesh, both: Runner, quick: bool, turns: int) -> str:
    """As many layers on each stage, or by cost; the head of 100k entries costs as much as eleven of the twelve layers."""
    large, layers = model(quick, vocabulary=100_000), 12
    rows = full_rows(8, 128 if quick else 256, large.vocab_size)
    equal = [layers // mesh.stages] * mesh.stages
    ratios = []
    for turn in range(turns + 1):
        times = [both.seconds(both.pipeline(large, "1F1B", sizes), rows) for sizes in (equal, None)]
        ratios += [times[0] / times[1]] if turn else []
    chosen = [s.end_layer - s.first_layer for s in plan_stages(large, mesh.stages)]
    return row("split", ratios, f"layers {equal} against {chosen}")


def packing(mesh: Mesh, both: Runner, quick: bool, turns: int) -> str:
    """Log-normal lengths, cut at 8 times the median."""
    config, middle = model(quick), 24 if quick else 48
    g = torch.Generator().manual_seed(1)
    lengths = (torch.randn(64, generator=g).exp() * middle).clamp(4, 8 * middle).long().tolist()
    completions = completions_of(lengths, config.vocab_size)
    longest = max(len(c) for c in completions)
    packed = pack(
        completions, choose_row_length(completions, mesh.stages, False, attention_cost=attention_cost(config)),
        share_prompts=False, rows_at_least=mesh.stages,
    )
    single = [pack([c], longest, share_prompts=False) for c in completions]
    padded = Rows(**{
        k: torch.cat([getattr(p, k) for p in single]) if isinstance(v, torch.Tensor) else v for k, v in vars(single[0]).items()
    })
    pipeline = both.pipeline(config, "1F1B")
    ratios = [both.seconds(pipeline, padded) / both.seconds(pipeline, packed) for _ in range(max(1, turns - 1))]
    return row("packing", ratios, f"{padded.shape[0]} rows of {padded.shape[1]} against {packed.shape[0]} of {packed.shape[1]}")


def shapes(mesh: Mesh, both: Runner, quick: bool, turns: int) -> str:
    """The same rows, whose number and length change at every step or stay."""
    config, length = model(quick), 128 if quick else 256
    pipeline = both.pipeline(config, "1F1B")
    several = [full_rows(m, length // 2 + 16 * i, config.vocab_size) for i, m in enumerate((8, 10, 8, 12))]
    for rows in several:
        both.seconds(pipeline, rows)
    ratios = []
    for _ in range(turns):
        changing = staying = 0.0
        for rows in several:
            changing += both.seconds(pipeline, rows)  # another shape than the step before
            staying += both.seconds(pipeline, rows)  # the same as the step before
        ratios.append(changing / staying)
    return row("shapes", ratios, "each step against the same step again")


def row(name: str, ratios: list[float], note: str) -> str:
    return f"{name:<22} {statistics.median(ratios):>5.2f}x  {min(ratios):.2f} - {max(ratios):.2f}  {note}"


def run(rank: int, ranks: int, port: int, settings) -> None:
    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }
    mesh = open_mesh("cpu", timeout_s=3600)
    quick, turns = settings.quick, settings.turns
    parts = {
        "speed-up": lambda both: speed_up(mesh, both, quick, settings.schedules.split(","), turns),
        "split": lambda both: split(mesh, both, quick, turns),
        "packing": lambda both: packing(mesh, both, quick, turns),
        "shapes": lambda both: shapes(mesh, both, quick, turns),
    }
    for name, part in parts.items():
        if name in settings.only.split(","):
            text = part(Runner(mesh))  # a runner of its own: the models of the part before are freed
            if rank == 0:
                print(text, flush=True)
    mesh.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a smaller model")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--turns", type=int, default=3, help="measurements of each pair")
    parser.add_argument("--only", default="speed-up,split,packing,shapes", help="parts to measure")
    parser.add_argument("--schedules", default=",".join(SCHEDULES), help="of the speed-up")
    settings = parser.parse_args()
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    quick = ", quick" if settings.quick else ""
    print(f"{settings.ranks} processes x 1 thread, {os.cpu_count()} cores, load before {os.getloadavg()[0]:.1f}{quick}", flush=True)
    mp.spawn(run, args=(settings.ranks, port, settings), nprocs=settings.ranks)


if __name__ == "__main__":
    main()
