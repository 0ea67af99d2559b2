"""Rollouts on disk: what a step was trained on, one completion a line, and back, so that the step can be run again.

    python train_grpo.py ... --dump_rollouts on                  # writes project_dir/rollouts/step-000001.jsonl, ...
    python train_grpo.py ... --replay runs/grpo/rollouts         # the same steps without sampling or grading

Floats are written so that the same bits are read. Advantages and loss weights are worked out anew from the rewards, so
that a rollout can be replayed under another loss; under the same settings they come out the same.

Left out: rollouts of other programs; tokens are those of the tokenizer they were written with.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sys
from pathlib import Path

import torch

from rollout import Completion, Rows


def rollout_path(folder: Path, step: int) -> Path:
    return Path(folder) / f"step-{step:06}.jsonl"


def dump_rollout(path: Path, completions: list[Completion]) -> Path:
    """Write the completions of one rollout; the file appears when it is whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text("".join(json.dumps(dataclasses.asdict(c)) + "\n" for c in completions))
    os.replace(partial, path)
    return path


def load_rollout(path: Path) -> list[Completion]:
    """The completions of one rollout.

    Raises:
        ValueError: a line that is no completion; the message names it.
    """
    completions = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            completions.append(Completion(**json.loads(line)))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path} line {number} is no completion of a rollout ({error}): name a file that --dump_rollouts wrote") from None
    if not completions:
        raise ValueError(f"{path} is empty: name a file that --dump_rollouts wrote")
    return completions


def replay_files(spec: str) -> list[Path]:
    """The rollouts that ``--replay`` names, in the order of their steps: one file, or a folder of them.

    Raises:
        ValueError: nothing to replay.
    """
    path = Path(spec)
    found = sorted(path.glob("step-*.jsonl")) if path.is_dir() else [path] if path.is_file() else []
    if not found:
        raise ValueError(f"--replay {spec} holds no rollout: name a file or folder that --dump_rollouts wrote")
    return found


def write_bad_rows(path: Path, rows: Rows, output: torch.Tensor, tokenizer) -> None:
    """The rows of a step without a finite gradient, one JSON object a line, with the log-probs that the policy gave them."""
    lists = {name: getattr(rows, name).tolist() for name in ("input_ids", "segment_ids", "advantage", "weight")}
    with open(path, "w") as file:
        for i, logprob in enumerate(output[..., 0].cpu()):
            row = {name: values[i] for name, values in lists.items()}
            text = tokenizer.decode([token for token, segment in zip(row["input_ids"], row["segment_ids"]) if segment >= 0])
            finite = [value if math.isfinite(value) else None for value in logprob.tolist()]
            file.write(json.dumps({"row": i, "finite": None not in finite, "text": text, **row, "logprob": finite}) + "\n")
    print(f"the rows of this step are in {path}", file=sys.stderr, flush=True)
