"""What a person sees: the plan at the start, one line of progress, what was reached and where it lies at the end."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from sampler import Sampler
from tasks import Question, chat_template_note


class Progress:
    """The console's line: rewritten in place on a terminal, one line every few seconds elsewhere."""

    def __init__(self, steps: int, every_s: float = 5.0):
        self.steps, self.every_s = steps, every_s
        self.began = self.printed = time.perf_counter()
        self.first_step: int | None = None
        self.terminal = sys.stdout.isatty()
        self.open_line = False

    def show(self, step: int, reward: float, tokens_per_s: float, note: str = "") -> None:
        """After ``step`` of ``steps``: mean reward of the rollout, tokens/s end to end, time left."""
        now = time.perf_counter()
        if self.first_step is None:
            self.first_step = step - 1
        done = step - self.first_step
        left = (now - self.began) / done * (self.steps - step)
        if not self.terminal and step not in (self.first_step + 1, self.steps) and now - self.printed < self.every_s:
            return
        self.printed = now
        line = f"step {step:>4}/{self.steps}  reward {reward:.3f}  {tokens_per_s:>7,.0f} tokens/s  {clock_time(left)} left{note}"
        print(f"\r\033[K{line}" if self.terminal else line, end="" if self.terminal else "\n", flush=True)
        self.open_line = self.terminal

    def say(self, text: str) -> None:
        """A line of its own, below whatever stands there."""
        print(("\n" if self.open_line else "") + text, flush=True)
        self.open_line = False


def clock_time(seconds: float) -> str:
    """
    >>> clock_time(75), clock_time(3700)
    ('1:15', '1:01:40')
    """
    minutes, s = divmod(int(round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{s:02}" if hours else f"{minutes}:{s:02}"


def print_start(trainer, questions: list[Question], held_out: list[Question], steps: int, plan: str) -> None:
    """What will run: the model, its stages with their memory, the data and the first prompt as the model sees it."""
    s, policy, mesh = trainer.settings, trainer.policy, trainer.mesh
    layers = f"{policy.config.model_type}, {policy.config.num_hidden_layers} layers"
    print(f"{s.model}: {layers}, {mesh.stages} stage{'s' * (mesh.stages > 1)} on {mesh.device.type}")
    if trainer.resumed is not None:
        done = "; nothing is left to train: --resume never starts over" * (trainer.state.step >= steps)
        print(f"goes on after step {trainer.state.step}, from {trainer.resumed}{done}")
    print(plan)
    print(f"{len(questions)} questions, {len(held_out)} held out, {steps} steps of {s.batch_size} x {s.group_size} completions")
    if isinstance(policy.sampler, Sampler):
        longest = max(len(q.prompt_ids) for q in questions)
        cache = policy.sampler.cache_bytes(longest, trainer.sampling) / 2**20
        print(f"sampling with {s.sampler}: caches of at most {cache:,.0f} MiB on this rank")
    if note := chat_template_note(policy.tokenizer):
        print(note)
    print(f"first prompt: {questions[0].prompt_text!r}", flush=True)


def print_end(folder: Path, exported: dict[str, Path], wandb_folder: Path | None, accuracy: dict[int, float]) -> None:
    """What was reached, where it lies, and the commands that show it."""
    print()
    if accuracy:
        first, last = min(accuracy), max(accuracy)
        print(f"held-out accuracy before {accuracy[first]:.1%}, after {accuracy[last]:.1%}")
    for name, path in exported.items():
        print(f"{name:<8} {path}  (a Hugging Face folder)")
    print(f"metrics  {folder / 'metrics.jsonl'}")
    print(f"report   python report.py {folder}  (one HTML page)")
    if wandb_folder:
        print(f"W&B run  {wandb_folder}")
        print(f"         look at it in the terminal: wandb leet {wandb_folder}")
        segments = f"offline-run-*-{wandb_folder.name.split('-')[-1]}"  # one for each process that the run has had
        several = len(list(wandb_folder.parent.glob(segments))) > 1
        print(f"         send it to the W&B UI:      wandb sync {wandb_folder.with_name(segments) if several else wandb_folder}")
