"""Our side of bench/versus_trl.py: ``Trainer.step`` of train_grpo.py, one each time it is told to.

Everything is made as ``train_grpo.py`` makes it, from settings to the first step, and nothing of a step is left out:
what is added is that every completion gets the length that TRL's gets. Any further flags are settings.

Left out: logging, validation and checkpoints between the steps.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from config import parse_settings  # noqa: E402
from parallel import open_mesh, start_watch  # noqa: E402
from pipeline import Pipeline  # noqa: E402
from rollout import Rows  # noqa: E402
from same_work import BETA, LEARNING_RATE, PROMPTS, WORKLOADS, Turns  # noqa: E402
from train_grpo import Trainer, prepare  # noqa: E402


def give_lengths(trainer: Trainer, lengths: list[int]) -> None:
    """Completions end at their lengths and nowhere else: the test for stop strings asks for the length instead."""
    mesh, sampler = trainer.mesh, trainer.policy.sampler
    if trainer.settings.sampler == "replicas":  # which count the sequences of their own questions
        share = len(lengths) // mesh.stages
        lengths = lengths[mesh.stage * share : (mesh.stage + 1) * share]
    wanted = torch.tensor(lengths)
    if sampler is not None:
        sampler.eos_ids = frozenset()
        sampler._completes_stop_string = lambda sequence, index, tokens, job: index + 1 == wanted[sequence]


def training_flops(config, rows: Rows) -> float:
    """Floating-point operations that forward and backward of ``rows`` cannot do without: its matrix products.

    Per token of a row, padding aside, six for every matrix parameter of the layers; per pair of a token and one that it
    sees, twelve for every entry of a head, in every layer; per completion token six for every parameter of the LM head.
    Norms, activations, softmax and what is computed twice are not in it.
    """
    head_dim = config.hidden_size // config.num_attention_heads
    attention = 2 * config.hidden_size * head_dim * (config.num_attention_heads + config.num_key_value_heads)
    layer = attention + 3 * config.hidden_size * config.intermediate_size
    real = rows.group_ids >= 0
    pairs = (rows.position_ids + 1)[real].sum().item()  # a token sees as many as its position says, and itself
    completion_tokens = (rows.sequence >= 0).sum().item()
    layers = config.num_hidden_layers * (6 * layer * real.sum().item() + 12 * config.hidden_size * pairs)
    return float(layers + 6 * config.hidden_size * config.vocab_size * completion_tokens)


class TimedPipeline:
    """Stands in for the policy's pipeline and notes what ``train_step`` costs."""

    def __init__(self, pipeline: Pipeline):
        self.inner = pipeline

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def train_step(self, rows: Rows, loss_fn):
        self.flops = training_flops(self.inner.stage.config, rows)
        began = time.process_time()
        result = self.inner.train_step(rows, loss_fn)
        self.cpu = time.process_time() - began
        return result


def settings_of(name: str, model: str, data: str, more: list[str]) -> list[str]:
    work = WORKLOADS[name]
    return [
        "--model", model, "--data", data, "--validation_share", "0", "--verify_type", "same_work:score",
        "--chat_template", "off", "--prompt_template", "{question}", "--device", "cpu", "--tracker", "none",
        "--resume", "never", "--batch_size", str(PROMPTS),
        "--group_size", str(work.group), "--max_completion_tokens", str(work.new_tokens), "--beta", str(BETA),
        "--learning_rate", str(LEARNING_RATE), "--warmup_steps", "0", "--stop_strings", "by length" * bool(work.chance),
        *more,
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workload", choices=WORKLOADS, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True)
    options, more = parser.parse_known_args()
    torch.set_num_threads(1)
    work = WORKLOADS[options.workload]
    settings = parse_settings(settings_of(options.workload, options.model, options.data, more))
    mesh = open_mesh(settings.device, settings.timeout)
    start_watch(mesh)
    trainer, questions, _ = prepare(settings, mesh)
    trainer.policy.pipeline = timed = TimedPipeline(trainer.policy.pipeline)
    turns, step = Turns(), 1
    while turns.begin(wait=step > 1):
        lengths = work.lengths(step)
        give_lengths(trainer, lengths)
        first = (step - 1) * PROMPTS % max(1, len(questions))
        values = trainer.step(step, questions[first : first + PROMPTS], 10_000)
        turns.end(
            tokens=sum(lengths) if mesh.is_first else 0, train_cpu=timed.cpu, train_flops=timed.flops,
            parts={k: v for k, v in values.items() if k.startswith(("time/", "pipeline/"))},
        )
        if mesh.is_first:
            assert values["completion/tokens"] == sum(lengths), "completions do not have the lengths they were given"
        mesh.watch.enter("start")  # waiting for its turn is not a phase that may last too long
        step += 1
    mesh.watch.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
