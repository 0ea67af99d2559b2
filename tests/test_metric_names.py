"""The names of metrics are frozen, each has a meaning, and alarms fire when and only when they should."""

import json

import pytest
from conftest import ROOT
from ranks import quick_flags, train_ranks, training_folder

import metric_names
from metric_names import ALARMS, METRICS, Alarm, Alarms, as_markdown, meaning_of

# What a run of two stages with reference, several samples and terms writes, spelled out: a change here breaks dashboards.
FROZEN = """
step advantage/max advantage/mean advantage/min
completion/length_max completion/length_mean completion/terminated_length_mean completion/tokens completion/truncated_share
memory/peak_stage0 memory/peak_stage1 metrics/nonfinite
pipeline/bubble_measured pipeline/bubble_theory pipeline/busy_stage0 pipeline/busy_stage1 pipeline/microbatches
pipeline/padding_share pipeline/prompt_tokens_shared pipeline/row_length
reward/correct reward/groups_all_right reward/groups_all_wrong reward/groups_without_signal reward/mean reward/term_overlong
reward/unscorable
sampler/logprob_diff_max sampler/logprob_diff_mean sampler/ratio_mean sampler/weight_checksum sampler/weight_version
throughput/mfu throughput/sample_tokens_per_s throughput/tokens_per_s throughput/train_tokens_per_s
time/optimizer time/other time/pack time/sample time/score time/step time/sync time/train time/verify
train/clip_high train/clip_low train/entropy train/grad_norm train/grad_norm_stage0 train/grad_norm_stage1 train/kl
train/learning_rate train/loss train/loss_kl train/loss_policy train/masked_share train/ratio_max train/ratio_mean
train/ratio_min train/skipped_updates train/tokens
""".split()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The lines of a run, and its folder."""
    folder = tmp_path_factory.mktemp("run")
    model = training_folder(tmp_path_factory.mktemp("model"))
    more = ("--max_steps", 2, "--beta", 0.1, "--overlong_weight", 0.1, "--overlong_margin", 4, "--peak_tflops", 0.1, "--samples_every", 1)
    train_ranks(2, quick_flags(model, folder / "run", *more), folder)
    return [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()], folder / "run"


def test_a_run_writes_the_frozen_names_and_no_others(run):
    lines, _ = run
    written = {name for line in lines for name in line if not name.startswith("validation/")}
    assert written == set(FROZEN)
    assert {name for line in lines for name in line if meaning_of(name) is None} == set()


def test_phases_add_up_to_the_step_and_mfu_is_a_share(run):
    for line in run[0]:
        if "time/step" in line:
            phases = sum(v for k, v in line.items() if k.startswith("time/") and k != "time/step")
            assert phases == pytest.approx(line["time/step"]) and line["time/other"] < 0.5 * line["time/step"]
            assert 0 < line["throughput/mfu"] < 1
            assert line["memory/peak_stage0"] > 100  # torch alone is more


def test_settings_packages_commit_and_plan_stand_beside_the_metrics(run):
    about = json.loads((run[1] / "settings.json").read_text())
    assert about["settings"]["beta"] == 0.1 and about["packages"]["torch"].startswith("2.13.0")
    assert "stage" in about["plan"] and len((about["git_commit"] or "0" * 40).removesuffix("-dirty")) == 40


def test_samples_of_both_splits_are_written(run):
    rows = [json.loads(line) for line in (run[1] / "samples.jsonl").read_text().splitlines()]
    assert {(row["step"], row["split"]) for row in rows} == {(0, "validation"), (1, "train"), (2, "train"), (2, "validation")}
    assert all(len(row) == 11 and (row["advantage"] is None) == (row["split"] == "validation") for row in rows)


def test_every_name_stands_once_with_a_meaning_and_every_alarm_names_one():
    names = [m.name for m in METRICS]
    assert len(set(names)) == len(names) and all(m.meaning for m in METRICS)
    assert {a.name.removesuffix("_new") for a in ALARMS} <= set(names)


def test_the_page_of_the_documentation_is_the_catalogue():
    assert (ROOT / "docs/metrics.md").read_text() == as_markdown() + "\n", "run python metric_names.py > docs/metrics.md"


def test_an_alarm_fires_once_after_its_steps_and_again_when_it_was_over():
    alarms = Alarms([Alarm("train/entropy", False, 0.1, 3, "lower the rate")])
    values = [0.5, 0.05, 0.04, 0.03, 0.02, 0.5, 0.09, 0.09, 0.09]
    fired = [bool(alarms.check({"train/entropy": v})) for v in values]
    assert fired == [False, False, False, True, False, False, False, False, True]
    assert Alarms([Alarm("a", True, 1.0, 1, "do this")]).check({"a": 2.0}) == ["a is 2, above 1: do this"]


@pytest.mark.parametrize("alarm", ALARMS, ids=lambda a: a.name)
def test_each_alarm_is_silent_at_its_level_and_fires_beyond_it(alarm):
    def fired(value):
        alarms, name = Alarms([alarm]), alarm.name.removesuffix("_new")
        return sum((alarms.check({name: value}) for _ in range(alarm.steps)), [])

    assert not fired(alarm.level) and not Alarms([alarm]).check({})
    sentences = fired(alarm.level + (1 if alarm.above else -0.005))
    assert len(sentences) == 1 and alarm.cause in sentences[0] and "_new" not in sentences[0]


def test_skipped_updates_raise_the_alarm_each_time_they_grow():
    alarms = Alarms()
    assert [len(alarms.check({"train/skipped_updates": n})) for n in (0, 1, 1, 2, 2)] == [0, 1, 0, 1, 0]


def test_H13_a_step_without_a_token_in_the_loss_is_said_and_not_a_plain_zero():
    sentences = Alarms().check({"train/tokens": 0.0, "train/loss": 0.0})
    assert len(sentences) == 1 and "no completion token is in the loss" in sentences[0]


def test_the_command_prints_the_page(capsys, monkeypatch):
    assert metric_names.meaning_of("time/step").name == "time/step" and metric_names.meaning_of("time/sample").name == "time/*"
    assert metric_names.meaning_of("unknown") is None
