"""What is written, and that nothing that is written can end a run."""

import json
import math

import pytest
import torch

from metrics import Clock, PeakMemory, Tracker, cut_lines, rollout_metrics, speed_metrics
from rollout import Completion


def completion(question, correct, tokens=4, finished=True, **more):
    return Completion(question, 0, [1], [5] * tokens, [0.0] * tokens, finished, correct=correct, reward=correct, **more)


def test_B15_the_logged_reward_is_the_raw_one():
    rollout = [completion(0, r, advantage=a) for r, a in zip([1.0, 0.0, 0.0, 0.0], [1.4997, -0.4999, -0.4999, -0.4999])]
    values = rollout_metrics(rollout, [None] * 4)
    assert values["reward/mean"] == values["reward/correct"] == 0.25
    assert abs(values["advantage/mean"]) < 1e-9 and values["advantage/max"] == 1.4997
    assert "reward/lenient" not in values


def test_B01_groups_without_signal_are_counted():
    rollout = [completion(q, r) for q, group in enumerate([(1, 1), (0, 0), (1, 0), (0.5, 0.5)]) for r in map(float, group)]
    values = rollout_metrics(rollout, [None] * 8)
    assert (values["reward/groups_all_right"], values["reward/groups_all_wrong"]) == (0.25, 0.25)
    assert values["reward/groups_without_signal"] == 0.75


def test_B08_unscorable_completions_leave_the_means():
    rollout = [completion(0, 1.0), completion(0, None, tokens=8, finished=False), completion(0, 0.0)]
    values = rollout_metrics(rollout, [1.0, None, 1.0])
    assert values["reward/mean"] == 0.5 and values["reward/unscorable"] == 1 and values["reward/lenient"] == 1.0
    assert values["completion/truncated_share"] == pytest.approx(1 / 3)
    assert (values["completion/tokens"], values["completion/length_max"]) == (16, 8)
    assert values["completion/terminated_length_mean"] == 4


def test_T12_a_rollout_without_any_result_has_finite_metrics():
    values = rollout_metrics([completion(0, None), completion(0, None)], [None, None])
    assert values["reward/mean"] == 0.0 and values["reward/unscorable"] == 2
    assert all(math.isfinite(v) for v in values.values())


def test_H11_values_that_are_not_finite_are_written_as_null_and_counted(tmp_path):
    tracker = Tracker(tmp_path / "run", use_wandb=False)
    tracker.log(1, {"a": float("nan"), "b": float("inf"), "c": 1.5})
    tracker.log(2, {"a": 0.0})
    tracker.close()
    first, second = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert first == {"step": 1, "a": None, "b": None, "c": 1.5, "metrics/nonfinite": 2}
    assert second == {"step": 2, "a": 0.0, "metrics/nonfinite": 2}


def test_H11_wandb_takes_the_same_numbers(tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    tracker = Tracker(tmp_path / "run", use_wandb=True, config={"group_size": 4}, group="seeds", tags=["qwen2", "1F1B"])
    tracker.log(3, {"a": float("nan"), "b": 2.0})
    folder = tracker.wandb_folder()
    assert tracker.run.summary["b"] == 2.0 and tracker.run.summary["step"] == 3
    assert tracker.run.config["group_size"] == 4 and tracker.run.offline
    assert tracker.run.group == "seeds" and tracker.run.tags == ("qwen2", "1F1B")
    tracker.close()
    assert folder.is_dir() and folder.parent.parent == tmp_path / "run"


def test_every_line_is_on_disk_at_once(tmp_path):
    tracker = Tracker(tmp_path, use_wandb=False)
    tracker.log(1, {"a": 1})
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["a"] == 1
    tracker.close()


def test_the_phases_of_a_step_add_up():
    clock = Clock()
    for _ in range(2):
        with clock.phase("sample"):
            math.factorial(2000)
    with clock.phase("train"):
        math.factorial(2000)
    values = clock.metrics()
    assert set(values) == {"time/sample", "time/train", "time/other", "time/step"} and min(values.values()) >= 0
    assert sum(v for k, v in values.items() if k != "time/step") == pytest.approx(values["time/step"])


def test_H09_a_table_of_samples_is_written_anew_at_each_step(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    tracker = Tracker(tmp_path / "run", use_wandb=False)
    logged = []
    tracker.run = type("Run", (), {"log": lambda self, values: logged.append(values)})()
    for step in (1, 2, 3):
        tracker.samples(step, "train", [{"step": step, "question": "q", "completion": "c"}])
    tables = [values["samples/train"] for values in logged]
    assert [table.data for table in tables] == [[[step, "q", "c"]] for step in (1, 2, 3)] and len(set(map(id, tables))) == 3
    assert [values["step"] for values in logged] == [1, 2, 3]
    lines = (tmp_path / "run/samples.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3]


def test_lines_after_a_step_and_torn_ones_are_cut(tmp_path):
    path = tmp_path / "samples.jsonl"
    path.write_text('{"step": 1}\n{"step": 4}\n{"step": 5}\n{"st')
    cut_lines(path, 4)
    assert path.read_text() == '{"step": 1}\n{"step": 4}\n'


def test_speeds_are_tokens_over_the_time_of_their_phase():
    times = {"time/sample": 2.0, "time/train": 5.0, "time/step": 10.0}
    assert speed_metrics(times | {"completion/tokens": 100}) == {
        "throughput/tokens_per_s": 10.0, "throughput/sample_tokens_per_s": 50.0, "throughput/train_tokens_per_s": 20.0,
    }


def test_peak_memory_sees_what_was_allocated():
    memory = PeakMemory(torch.device("cpu"))
    before = memory.read() / 2**20
    held = torch.ones(int(before + 200) * 2**18)  # MiB of float32: more than the process ever held
    assert memory.read() / 2**20 > before + 100
    del held
