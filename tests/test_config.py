"""Settings: one sentence for everything that cannot work, before anything is loaded."""

import dataclasses

import pytest

from config import Settings, SettingsError, make_parser, parse_settings


def refusal(*argv) -> str:
    with pytest.raises(SettingsError) as error:
        parse_settings(list(argv))
    sentence = str(error.value)
    assert "\n" not in sentence and len(sentence) < 250
    return sentence


def yaml_file(tmp_path, text):
    path = tmp_path / "settings.yaml"
    path.write_text(text)
    return str(path)


def test_flags_override_yaml_and_yaml_overrides_defaults(tmp_path):
    path = yaml_file(tmp_path, "group_size: 4\nlearning_rate: 1e-3\nshare_prompts: off\n")
    settings = parse_settings(["--config", path, "--group_size", "6"])
    assert (settings.group_size, settings.learning_rate, settings.share_prompts) == (6, 1e-3, False)
    assert settings.batch_size == Settings().batch_size


def test_a_flag_can_restore_a_value_that_yaml_changed(tmp_path):
    path = yaml_file(tmp_path, "share_prompts: off\nbeta: 0.1\n")
    settings = parse_settings(["--config", path, "--share_prompts", "on", "--beta", "0"])
    assert settings.share_prompts is True and settings.beta == 0.0


def test_unknown_key_in_yaml_names_the_nearest(tmp_path):
    assert "did you mean group_size?" in refusal("--config", yaml_file(tmp_path, "grop_size: 4\n"))


@pytest.mark.parametrize("line", ["group_size: many", "group_size: 2.5", "share_prompts: 3", "epsilon: [1]", "group_size: true"])
def test_wrong_type_in_yaml_is_refused(tmp_path, line):
    sentence = refusal("--config", yaml_file(tmp_path, line + "\n"))
    assert line.split(":")[0] in sentence and "give a value of type" in sentence


def test_missing_or_broken_yaml_is_refused(tmp_path):
    assert "does not exist" in refusal("--config", str(tmp_path / "none.yaml"))
    assert "is not YAML" in refusal("--config", yaml_file(tmp_path, "a: [1\n"))
    assert "not a mapping" in refusal("--config", yaml_file(tmp_path, "- 1\n"))


def test_unknown_flag_and_abbreviation_are_refused():
    assert "--grop_size" in refusal("--grop_size", "4")
    assert "--group" in refusal("--group", "4")


@pytest.mark.parametrize(
    "flags, part",
    [
        (("--group_size", "1"), "at least 2"),
        (("--group_size", "0"), "at least 2"),
        (("--temperature", "0"), "above 0"),
        (("--temperature", "-1"), "above 0"),
        (("--batch_size", "8", "--chunk_size", "3"), "not divisible"),
        (("--batch_size", "0"), "at least 1"),
        (("--learning_rate", "0"), "positive"),
        (("--learning_rate", "nan"), "not a number"),
        (("--epsilon", "1.5"), "between 0 and 1"),
        (("--dual_clip", "1.1"), "above 1 + epsilon_high"),
        (("--loss", "cispo", "--dual_clip", "3"), "leave it out"),
        (("--validation_share", "1"), "from 0"),
        (("--reference_update_fraction", "0.5"), "set --beta above 0"),
        (("--sampler", "vllm"), "module:Class"),
        (("--row_length", "64", "--max_completion_tokens", "64"), "must exceed"),
        (("--split", "2,2"), "start as many processes"),
        (("--split", "a"), "16,8"),
        (("--columns", "question"), "question=problem"),
        (("--seed", "-1"), "cannot be negative"),
    ],
)
def test_B10_D08_what_cannot_work_is_refused(flags, part):
    sentence = refusal(*flags)
    assert part in sentence and flags[-2] in sentence


def test_split_must_name_as_many_stages_as_processes(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert parse_settings(["--split", "2,2"]).split_sizes() == [2, 2]
    assert "3 stages but 2 processes" in refusal("--split", "1,1,2")


def test_help_names_every_setting_with_its_default():
    text = " ".join(make_parser().format_help().split())
    for f in dataclasses.fields(Settings):
        assert f"--{f.name}" in text and f.metadata["help"].split()[0] in text
    assert "(default: 0.28)" in text and "(default: on)" in text


def test_design_defaults():
    s = Settings()
    assert (s.loss, s.advantage_norm, s.epsilon, s.epsilon_high, s.beta) == ("token_mean", "group", 0.2, 0.28, 0.0)
    assert (s.grpo_iterations, s.temperature, s.learning_rate, s.weight_decay) == (1, 1.0, 1e-6, 0.001)
    assert (s.adam_beta1, s.adam_beta2, s.max_grad_norm, s.warmup_steps, s.schedule) == (0.9, 0.95, 1.0, 10, "1F1B")
