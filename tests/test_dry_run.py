"""The dry run does a whole step at full length, writes nothing, and its figures are those of the step."""

import re

import torch
from ranks import quick_flags, train_ranks, training_folder

from metrics import PeakMemory


def test_peak_memory_starts_again_after_a_reset():
    peak = PeakMemory(torch.device("cpu"))
    held = torch.ones(100 * 2**18)
    high = peak.read()
    del held
    peak.reset()
    low = peak.read()
    assert high - low > 80 * 2**20
    held = torch.ones(50 * 2**18)
    assert 40 * 2**20 < peak.read() - low < 60 * 2**20


def test_a_step_of_full_length_is_measured_and_nothing_written(tmp_path):
    model = training_folder(tmp_path / "model")
    flags = quick_flags(model, tmp_path / "run", "--dry_run", "on", "--beta", 0.1)
    ranks = train_ranks(2, flags, tmp_path)
    text = ranks.output(0)
    assert "dry run: 4 x 4 completions of 12 tokens" in text
    for phase in ("sample", "verify", "pack", "score", "train", "optimizer", "sync", "step"):
        found = re.search(rf"^{phase} +(\d+\.\d\d) +(\d+) +(\d+)$", text, re.M)
        assert found and int(found[2]) > 50 and int(found[3]) > 50, text
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["lock"]
    assert ranks.output(1) == ""
