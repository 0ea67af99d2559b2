"""The one place that writes results: ``metrics.jsonl``, ``samples.jsonl`` and Weights & Biases; metric_names.py says what they mean.

Only the first stage's process makes a ``Tracker``; the others have nothing to write. W&B runs offline when the machine
holds no key, and never asks a question. The numbers in ``metrics.jsonl`` are the same as in W&B, one object a line, each
with its ``step``: step N means that N updates are done.
"""

from __future__ import annotations

import json
import math
import os
import resource
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import torch

from rollout import Completion


class Tracker:
    """Writes metrics of one run.

    Args:
        folder: the run's ``project_dir``; made when it does not exist.
        use_wandb: also log to W&B (offline without a key).
        config: what the run was started with and on, kept in W&B's configuration.
        run_id: the W&B run that this is or goes on with; empty: a new one.

    W&B gets every line of ``metrics.jsonl`` once, also when a process was killed, which may lose what W&B had not yet
    written: each line carries its number as ``metrics/line``, and a process that goes on starts with the first line that W&B
    lacks, be it in the file already.
    """

    def __init__(
        self, folder: Path, *, use_wandb: bool, name: str = "", config: dict | None = None, run_id: str = "",
        group: str = "", tags: list[str] | None = None,
    ):
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / "metrics.jsonl"
        kept = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        self.nonfinite = kept[-1].get("metrics/nonfinite", 0) if kept else 0
        self.file = open(path, "a", buffering=1)
        self.lines = 0
        self.run, self.held_by_wandb = None, 0
        if use_wandb:
            self.held_by_wandb = _lines_of_whole_segments(self.folder, run_id)
            described = dict(name=name or self.folder.name, config=config or {}, group=group or None, tags=tags or None)
            self.run = _start_wandb(self.folder, run_id, described)
            if self.run.resumed:  # the server knows better
                self.held_by_wandb = int(self.run.summary.get("metrics/line", -1)) + 1
        for line in kept:
            self._send(line)

    def log(self, step: int, values: dict[str, float]) -> None:
        """One line of numbers at ``step``. A value that is not finite is written as null and counted."""
        clean = {}
        for name, value in values.items():
            finite = not isinstance(value, float) or math.isfinite(value)
            self.nonfinite += not finite
            clean[name] = value if finite else None
        clean["metrics/nonfinite"] = self.nonfinite
        line = {"step": step, **clean}
        self.file.write(json.dumps(line) + "\n")
        self._send(line)

    def _send(self, line: dict) -> None:
        """One line to W&B, unless an earlier process has sent it."""
        if self.run is not None and self.lines >= self.held_by_wandb:
            self.run.log({k: v for k, v in line.items() if v is not None} | {"metrics/line": self.lines})
        self.lines += 1

    def picture(self, step: int, name: str, path: Path) -> None:
        """A PNG that belongs to ``step``, to W&B."""
        if self.run is not None:
            import wandb

            self.run.log({"step": step, name: wandb.Image(str(path))})

    def samples(self, step: int, split: str, rows: list[dict]) -> None:
        """A few completions at ``step``: lines of ``samples.jsonl`` and a table of their own in W&B (which shows only the
        first or the last rows of one that grows)."""
        with open(self.folder / "samples.jsonl", "a") as file:
            file.write("".join(json.dumps(row) + "\n" for row in rows))
        if self.run is not None and rows:
            import wandb

            table = wandb.Table(columns=list(rows[0]), data=[list(row.values()) for row in rows])
            self.run.log({"step": step, f"samples/{split}": table})

    def wandb_folder(self) -> Path | None:
        """Where the W&B run lies on disk, or None without W&B."""
        return Path(self.run.dir).parent if self.run is not None else None

    def close(self) -> None:
        self.file.close()
        if self.run is not None:
            self.run.finish()
            whole = _whole_segments(self.folder)
            whole["names"].append(self.wandb_folder().name)
            whole["lines"] = max(self.lines, self.held_by_wandb)
            (self.folder / "wandb.json").write_text(json.dumps(whole))


def cut_lines(path: Path, last_step: int) -> None:
    """Take the lines after ``last_step``, and a torn one, out of a file of JSON lines: a resumed run writes them again."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text().splitlines():
        try:
            if json.loads(line)["step"] <= last_step:
                kept.append(line + "\n")
        except ValueError:
            continue
    partial = path.with_name(path.name + ".new")
    partial.write_text("".join(kept))
    os.replace(partial, path)


def _whole_segments(folder: Path) -> dict:
    """The W&B folders of processes that ended in order, and how many lines they hold together."""
    path = folder / "wandb.json"
    return json.loads(path.read_text()) if path.exists() else {"names": [], "lines": 0}


def _lines_of_whole_segments(folder: Path, run_id: str) -> int:
    """How many lines of this run W&B's offline folders hold for certain.

    A killed process leaves a folder with only a part of its lines. It is renamed, so that ``wandb sync`` passes it over; its
    lines are sent again from ``metrics.jsonl``.
    """
    whole = _whole_segments(folder)
    found = [path for path in folder.glob(f"wandb/offline-run-*-{run_id}") if run_id]
    for path in found:
        if path.name not in whole["names"]:
            path.rename(path.with_name(f"cut-{path.name}"))
    return whole["lines"] if any(path.name in whole["names"] for path in found) else 0


def _start_wandb(folder: Path, run_id: str, described: dict):
    """A W&B run that cannot ask or hang: offline unless a key is there, or the mode is set by WANDB_MODE."""
    os.environ.setdefault("WANDB_SILENT", "true")
    import wandb

    mode = os.environ.get("WANDB_MODE")
    if mode is None:
        mode = "online" if wandb.login(prompt=False) else "offline"
    quiet = wandb.Settings(console="off", init_timeout=60)
    again = dict(id=run_id or None, resume="allow" if run_id and mode == "online" else None)
    common = dict(project=os.environ.get("WANDB_PROJECT", "grpo"), dir=str(folder), settings=quiet) | described
    try:
        run = wandb.init(mode=mode, **again, **common)
    except Exception as error:  # a key without a network, a server that refuses: the run itself must go on
        print(f"W&B cannot be reached ({error}): logging offline", file=sys.stderr)
        run = wandb.init(mode="offline", id=again["id"], **common)
    run.define_metric("step")
    run.define_metric("*", step_metric="step")
    return run


def rollout_metrics(completions: list[Completion], lenient: list[float | None]) -> dict[str, float]:
    """Rewards and lengths of a rollout, before any normalisation.

    ``reward/mean`` is what advantages are made of; ``reward/correct`` is the verifier's result alone, without added terms;
    ``reward/lenient`` (types with a format only) also counts answers that lack the format.

    Args:
        lenient: for each completion, ``rewards.lenient``'s result.
    """
    scored = [c for c in completions if c.correct is not None]
    groups: dict[int, list[Completion]] = {}
    for c in scored:
        groups.setdefault(c.question, []).append(c)
    lengths = [len(c.ids) for c in completions]
    advantages = [c.advantage for c in completions]

    def mean(values) -> float:
        values = list(values)
        return sum(values) / max(1, len(values))

    out = {
        "reward/mean": mean(c.reward for c in scored),
        "reward/correct": mean(c.correct for c in scored),
        "reward/unscorable": len(completions) - len(scored),
        "reward/groups_all_right": mean(min(c.correct for c in g) == 1 for g in groups.values()),
        "reward/groups_all_wrong": mean(max(c.correct for c in g) == 0 for g in groups.values()),
        "reward/groups_without_signal": mean(len({c.reward for c in g}) == 1 for g in groups.values()),
        "advantage/mean": mean(advantages), "advantage/max": max(advantages), "advantage/min": min(advantages),
        "completion/length_mean": mean(lengths), "completion/length_max": max(lengths),
        "completion/terminated_length_mean": mean(len(c.ids) for c in completions if c.finished),
        "completion/truncated_share": mean(not c.finished for c in completions),
        "completion/tokens": sum(lengths),
    }
    out |= {f"reward/term_{name}": mean(c.terms[name] for c in completions) for name in completions[0].terms}
    judged = [value for value in lenient if value is not None]
    return out | ({"reward/lenient": mean(judged)} if judged else {})


def speed_metrics(values: dict[str, float]) -> dict[str, float]:
    """Completion tokens per second of the whole step, of sampling alone and of forward and backward alone."""
    tokens = values.get("completion/tokens", 0)
    names = {"tokens_per_s": "step", "sample_tokens_per_s": "sample", "train_tokens_per_s": "train"}
    return {f"throughput/{name}": tokens / max(values[f"time/{phase}"], 1e-9) for name, phase in names.items()}


class PeakMemory:
    """The most memory since ``reset``, or so far, in bytes: resident memory of this process (CPU), or its tensors (GPU)."""

    def __init__(self, device: torch.device):
        self.device = device

    def reset(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            try:
                Path("/proc/self/clear_refs").write_text("5")  # proc(5): sets the peak back to what is held now
            except OSError:  # not everywhere allowed: the figure is then that of the whole run so far
                pass

    def read(self) -> int:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        status = Path("/proc/self/status")
        if status.is_file():
            return next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmHWM")) * 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class Clock:
    """Seconds by phase of one step; phases do not nest, and what no phase covers is ``time/other``.

    Args:
        note: called with the name of every phase that begins.
        ended: called with the name of every phase that ends.
    """

    def __init__(self, note: Callable[[str], None] | None = None, ended: Callable[[str], None] | None = None):
        self.note, self.ended = note, ended
        self.start = time.perf_counter()
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str):
        if self.note is not None:
            self.note(name)
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began
            if self.ended is not None:
                self.ended(name)

    def total(self) -> float:
        return time.perf_counter() - self.start

    def metrics(self) -> dict[str, float]:
        """``time/<phase>`` for each phase, ``time/other`` and ``time/step``, in seconds."""
        total = self.total()
        out = {f"time/{name}": seconds for name, seconds in self.seconds.items()}
        return out | {"time/other": total - sum(self.seconds.values()), "time/step": total}
