"""The quickstart itself: the tiny model learns, and two stages draw the curve of one process."""

import json
import os
import subprocess
import sys

import pytest
from conftest import ROOT

from tiny_model import make_tiny_model


@pytest.fixture(scope="module")
def tiny():
    """The tiny model of seed 0, made once and kept where the quickstart keeps it."""
    return make_tiny_model(ROOT / "runs" / "tiny-model-0", 0)


def quickstart(tiny, folder, *more, world=2):
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={world}"] if world > 1 else []
    flags = ["--config", "launch/configs/quickstart.yaml", "--model", str(tiny), "--project_dir", str(folder), *more]
    env = {k: v for k, v in os.environ.items() if not k.startswith("WANDB")} | {"OMP_NUM_THREADS": "1", "HOME": str(folder)}
    done = subprocess.run(
        [sys.executable, *launcher, "train_grpo.py", *flags], cwd=ROOT, env=env, capture_output=True, text=True, timeout=420,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    accuracy = {line["step"]: line["validation/accuracy"] for line in lines if "validation/accuracy" in line}
    return lines, accuracy, done.stdout


def test_the_quickstart_learns(tiny, tmp_path):
    lines, accuracy, output = quickstart(tiny, tmp_path / "run", "--max_steps", "60")
    assert 0.30 <= accuracy[0] <= 0.60
    assert accuracy[60] >= 0.80 and accuracy[60] - accuracy[0] >= 0.25
    rewards = [line["reward/mean"] for line in lines if "reward/mean" in line]
    assert sum(rewards[-10:]) / 10 > sum(rewards[:3]) / 3 + 0.2
    assert len(list((tmp_path / "run").glob("wandb/offline-run-*"))) == 1
    for word in ("held-out accuracy before", "metrics.jsonl", "wandb leet", "wandb sync", "final", "left"):
        assert word in output
    for line in lines:  # what must hold at every step of an on-policy run
        if "train/loss" in line:
            assert line["train/ratio_mean"] == 1.0 and line["train/clip_high"] == line["train/clip_low"] == 0.0
            assert line["sampler/logprob_diff_max"] < 1e-4 and line["train/skipped_updates"] == 0


def test_two_stages_and_one_process_draw_the_same_curve(tiny, tmp_path):
    more = ("--max_steps", "5", "--dtype", "float64", "--tracker", "none", "--eval_questions", "40")
    one, accuracy_one, _ = quickstart(tiny, tmp_path / "1", *more, world=1)
    two, accuracy_two, _ = quickstart(tiny, tmp_path / "2", *more, world=2)
    assert accuracy_one == accuracy_two
    names = ("reward/mean", "completion/tokens", "train/loss", "train/grad_norm", "train/entropy")
    steps = [(a, b) for a, b in zip(one, two, strict=True) if "reward/mean" in a]
    assert len(steps) == 5
    for a, b in steps:
        for name in names:
            assert b[name] == pytest.approx(a[name], rel=1e-5, abs=1e-9), (a["step"], name)
