"""Rollouts on disk: trained from again they give the same bits."""

import dataclasses
import json
import math

import pytest
from ranks import quick_flags, train_ranks, training_folder
from test_checkpoint import assert_same_end

from replay import dump_rollout, load_rollout, replay_files
from rollout import Completion

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return training_folder(tmp_path_factory.mktemp("model"))


def test_a_completion_comes_back_with_every_bit(tmp_path):
    written = [
        Completion(3, 1, [1, 2], [5, 9], [-0.1, math.nextafter(-1 / 3, 0)], False, "a\u2028b", 1.0, {"format": 0.1}, 1.01, 0.7, 1 / 3),
        Completion(3, 2, [1, 2], [5], [-1e-300], True, correct=None),
    ]
    path = dump_rollout(tmp_path / "deep/step-000001.jsonl", written)
    assert load_rollout(path) == written and [p.name for p in path.parent.iterdir()] == ["step-000001.jsonl"]


@pytest.mark.parametrize("world, more", [(1, ()), (2, ("--grpo_iterations", 2, "--beta", 0.1)), (2, ("--sampler", "pipeline", "--overlong_weight", 0.5, "--overlong_margin", 6))])
def test_a_replayed_run_ends_with_the_same_bits(model, tmp_path, world, more):
    steps = ("--max_steps", 3, "--eval_every", 2, *more)
    train_ranks(world, quick_flags(model, tmp_path / "first", *steps, "--dump_rollouts", "on"), tmp_path)

    def no_sampling(rank):
        import train_grpo

        def refuse(*_):
            raise AssertionError("a replay does not sample or grade for training")

        train_grpo.Trainer.sample = refuse
        train_grpo.grade = refuse

    replayed = quick_flags(model, tmp_path / "second", *steps, "--replay", tmp_path / "first/rollouts")
    train_ranks(world, replayed, tmp_path, fault=no_sampling)
    assert_same_end(tmp_path / "first", tmp_path / "second", step=3)


def test_advantages_follow_the_settings_of_the_replay(model, tmp_path):
    train_ranks(1, quick_flags(model, tmp_path / "first", "--max_steps", 1, "--dump_rollouts", "on"), tmp_path)
    path = tmp_path / "first/rollouts/step-000001.jsonl"
    train_ranks(1, quick_flags(model, tmp_path / "second", "--replay", path, "--advantage_norm", "none", "--dump_rollouts", "on"), tmp_path)
    first, second = load_rollout(path), load_rollout(tmp_path / "second/rollouts/step-000001.jsonl")
    assert len(json.loads((tmp_path / "second/metrics.jsonl").read_text().splitlines()[1])) > 30
    assert [dataclasses.replace(c, advantage=0, weight=0) for c in first] == [dataclasses.replace(c, advantage=0, weight=0) for c in second]
    means = {q: sum(c.reward for c in second if c.question == q) / 4 for q in range(4)}
    assert [c.advantage for c in second] == pytest.approx([c.reward - means[c.question] for c in second])
    assert any(c.advantage for c in second)


def test_what_is_no_rollout_is_refused_with_its_line(tmp_path):
    (tmp_path / "step-000001.jsonl").write_text('{"question": 1}\n')
    with pytest.raises(ValueError, match="step-000001.jsonl line 1 is no completion"):
        load_rollout(tmp_path / "step-000001.jsonl")
    (tmp_path / "empty").write_text("")
    with pytest.raises(ValueError, match="is empty"):
        load_rollout(tmp_path / "empty")
    with pytest.raises(ValueError, match="holds no rollout: name a file or folder"):
        replay_files(str(tmp_path / "nowhere"))
    assert replay_files(str(tmp_path)) == [tmp_path / "step-000001.jsonl"]


def test_a_replay_that_names_nothing_is_refused_at_start(model, tmp_path):
    ranks = train_ranks(2, quick_flags(model, tmp_path / "run", "--replay", tmp_path / "nowhere"), tmp_path, code=2)
    assert ranks.output(0).count("error: --replay") == 1 and "error" not in ranks.output(1)
