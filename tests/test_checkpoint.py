"""Checkpoints: a resumed run equals an unbroken one to the last bit, and no damage to a checkpoint goes unseen."""

import json
import os
import re
import shutil
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from ranks import Ranks, quick_flags, run_ranks, train_ranks, training_folder
from safetensors.torch import load_file

import checkpoint
import export
import resume
import train_grpo
from checkpoint import State, complete_checkpoints, is_complete, read_state
from config import parse_settings

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
TIMES = re.compile(r"time/|throughput/|pipeline/(busy|bubble_measured)|memory/|gpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return training_folder(tmp_path_factory.mktemp("model"))


def tensors(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint but the random states."""
    found = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    out = {n: torch.empty(m.size, dtype=m.properties.dtype) for n, m in found.items() if not n.startswith("random")}
    dcp.load(out, storage_reader=dcp.FileSystemReader(path), no_dist=True)
    return out


def metrics(folder: Path) -> list[dict]:
    """The lines without what a clock measured."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if not TIMES.match(name)} for line in lines]


def assert_same_end(one: Path, other: Path, step: int = 6):
    a, b = tensors(one / f"checkpoints/step-{step:06}"), tensors(other / f"checkpoints/step-{step:06}")
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
    assert metrics(one) == metrics(other)


@pytest.fixture(scope="module")
def unbroken(model, tmp_path_factory):
    """Six steps in one go on two stages, saved after every step, the sampled tokens noted."""
    folder = tmp_path_factory.mktemp("unbroken")
    train_ranks(2, quick_flags(model, folder, "--max_steps", 6, "--save_every", 1, "--keep_checkpoints", 6, "--eval_every", 3), folder)
    return folder


# ------------------------------------------------------------------------------------------------ exactness
def note_tokens(path):
    """A fault that changes nothing: every completion's ids go to ``path``."""

    def patch(rank):
        sample = train_grpo.Trainer.sample

        def noted(self, number, questions):
            completions = sample(self, number, questions)
            with open(path, "a") as file:
                for c in completions:
                    file.write(json.dumps([number, c.question, c.sample, c.ids, c.logprobs]) + "\n")
            return completions

        train_grpo.Trainer.sample = noted

    return patch


@pytest.mark.parametrize(
    "more",
    [
        ("--save_every", "3"),
        # nine steps an epoch of 36 questions: with batches of 12 the save falls on the end of an epoch
        ("--batch_size", "12", "--epochs", "2", "--grpo_iterations", "2", "--beta", "0.1", "--reference_update_fraction", "0.3",
         "--lr_schedule", "cosine", "--warmup_steps", "4", "--save_every", "3"),
        ("--sampler", "pipeline", "--chunk_size", "2", "--save_every", "3", "--beta", "0.1", "--reference", "pipeline",
         "--reference_update_fraction", "0.2", "--reference_mixup", "0.5"),
        ("--async_checkpoint", "on", "--save_every", "3", "--dtype", "float64"),
    ],
)
def test_F05_six_steps_equal_three_and_a_resume_and_three_bit_for_bit(model, tmp_path, more):
    flags = ("--max_steps", "6", "--eval_every", "3", *more)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train_ranks(2, quick_flags(model, whole, *flags), tmp_path, fault=note_tokens(tmp_path / "whole.txt"))

    def stop_after_three(rank):
        note_tokens(tmp_path / "parts.txt")(rank)
        step = train_grpo.Trainer.step

        def stopping(self, number, *arguments):
            result = step(self, number, *arguments)
            if number == 3 and rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            return result

        train_grpo.Trainer.step = stopping

    train_ranks(2, quick_flags(model, parts, *flags), tmp_path, fault=stop_after_three, code=75)
    assert [p.name for p in complete_checkpoints(parts / "checkpoints")] == ["step-000003"]
    second = train_ranks(2, quick_flags(model, parts, *flags), tmp_path, fault=note_tokens(tmp_path / "parts.txt"))
    assert "goes on after step 3" in second.output(0)
    assert_same_end(whole, parts)
    first, then = ((tmp_path / f"{name}.txt").read_text() for name in ("whole", "parts"))
    assert sorted(first.splitlines()) == sorted(then.splitlines()) and len(first.splitlines()) > 6 * 16 - 1
    assert (whole / "final/model-00001-of-00002.safetensors").read_bytes() == (parts / "final/model-00001-of-00002.safetensors").read_bytes()
    rates = [line["train/learning_rate"] for line in metrics(parts) if "train/learning_rate" in line]
    assert len(rates) == 6


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("before, after, schedule", [(3, 1, "GPipe"), (1, 2, "1F1B"), (2, 4, "GPipe")])
def test_E07_F07_a_checkpoint_loads_on_another_number_of_stages(tmp_path, tied, before, after, schedule):
    model = training_folder(tmp_path / "model", tied=tied)
    flags = quick_flags(model, tmp_path / "run", "--dtype", "float64", "--eval_questions", "1", "--max_steps")
    train_ranks(before, [*flags, "2"], tmp_path)
    saved = tensors(tmp_path / "run/checkpoints/step-000002")
    assert ("model.lm_head.weight" in saved) == (not tied)
    assert "optimizer.model.layers.3.mlp.up_proj.weight.exp_avg" in saved

    def load(mesh, argv):
        trainer, *_ = train_grpo.prepare(parse_settings(argv), mesh)
        stage, names = trainer.policy.stage, trainer.policy.stage.export_names()
        state = {}
        for local, p in stage.named_parameters():
            state[f"model.{names[local]}"] = p.detach().clone()
            state |= {f"optimizer.{names[local]}.{k}": v.clone() for k, v in trainer.policy.optimizer.state[p].items()}
        return trainer.state.step, trainer.policy.updates, state

    loaded = run_ranks(after, load, [*flags, "3", "--schedule", schedule])
    assert all((step, updates) == (2, 2) for step, updates, _ in loaded)
    assert set().union(*(state for *_, state in loaded)) == saved.keys()
    for *_, state in loaded:
        for name, tensor in state.items():
            assert torch.equal(tensor, saved[name]), name
    if tied and after > 1:
        assert "model.model.embed_tokens.weight" in loaded[-1][2], "the last stage's copy is filled too"
    train_ranks(after, [*flags, "3", "--schedule", schedule], tmp_path)
    train_ranks(1, quick_flags(model, tmp_path / "one", "--dtype", "float64", "--eval_questions", "1", "--max_steps", 3), tmp_path)
    there, here = (tensors(tmp_path / name / "checkpoints/step-000003") for name in ("run", "one"))
    assert all(torch.allclose(there[n], here[n], rtol=0, atol=1e-5) for n in here if n.startswith("model."))


def test_F03_F15_resumed_twice_the_data_goes_on_where_it_stood(model, tmp_path):
    flags = ("--batch_size", "1", "--validation_share", "0", "--save_every", "1", "--keep_checkpoints", "2")
    rows = []
    for name, stops in (("whole", [6]), ("parts", [3, 4, 6])):
        noted = tmp_path / f"{name}.txt"

        def note(rank, noted=noted):
            step = train_grpo.Trainer.step

            def seen(self, number, questions, total):
                noted.open("a").write(f"{number} {[q.place for q in questions]}\n")
                return step(self, number, questions, total)

            train_grpo.Trainer.step = seen

        for steps in stops:
            train_ranks(1, quick_flags(model, tmp_path / name, *flags, "--max_steps", steps), tmp_path, fault=note)
        rows.append(noted.read_text().splitlines())
    assert rows[0] == rows[1] and len(rows[0]) == 6
    assert [line["step"] for line in metrics(tmp_path / "parts")] == [1, 2, 3, 4, 5, 6]
    assert [p.name for p in complete_checkpoints(tmp_path / "parts/checkpoints")] == ["step-000005", "step-000006"]


def test_random_states_and_counters_come_back(model, tmp_path):
    def draw(mesh, argv, save):
        import random

        import numpy

        trainer, *_ = train_grpo.prepare(parse_settings(argv), mesh)
        if save:
            random.seed(7 + mesh.stage), numpy.random.seed(8), torch.manual_seed(9)
            random.random(), numpy.random.rand(3), torch.rand(3)
            trainer.policy.updates, trainer.policy.skipped, trainer.policy.bad_in_a_row = 5, 2, 1
            trainer.checkpoints.save(trainer.policy, State(4, {0: 0.5, 4: 0.25}), {"data": trainer.fingerprints})
        p = trainer.policy
        return random.random(), numpy.random.rand(), torch.rand(2), (p.updates, p.skipped, p.bad_in_a_row), trainer.state.accuracy

    argv = quick_flags(model, tmp_path / "run")
    first, second = run_ranks(2, draw, argv, True), run_ranks(2, draw, argv, False)
    for a, b in zip(first, second):
        assert a[:2] == b[:2] and torch.equal(a[2], b[2]) and b[3] == (5, 2, 1) and b[4] == {0: 0.5, 4: 0.25}


# ------------------------------------------------------------------------------------------------ damage
def resumed_from(model, folder, *more, steps: int = 6, code: int = 0) -> str:
    """Both outputs of a run in ``folder`` on two stages."""
    ranks = train_ranks(2, quick_flags(model, folder, "--max_steps", steps, "--eval_every", 3, *more), folder, code=code)
    return ranks.output(0) + ranks.output(1)


def copy_until(unbroken, folder, last: int) -> Path:
    """The unbroken run as it stood after step ``last``, as far as checkpoints go."""
    shutil.copytree(unbroken, folder)
    for path in complete_checkpoints(folder / "checkpoints"):
        if int(path.name[5:]) > last:
            shutil.rmtree(path)
    return folder


@pytest.mark.parametrize("when", ["tensors", "state", "rename", "marker", "between"])
def test_F01_F14_a_kill_while_saving_step_4_resumes_from_step_2_with_a_warning(model, unbroken, tmp_path, when):
    def kill(rank):
        def die(*_, **__):
            os.kill(os.getpid(), signal.SIGKILL)

        def when_step_4(original):
            return lambda *a, **k: die() if any("000004" in str(x) for x in a) else original(*a, **k)

        if when == "tensors" and rank == 1:
            original = checkpoint.Checkpoints._write

            def write(self, tensors, record, *more):
                if record["step"] == 4:
                    checkpoint.FileSystemWriter.write_data = die
                return original(self, tensors, record, *more)

            checkpoint.Checkpoints._write = write
        elif when == "state":
            checkpoint.write_synced = when_step_4(checkpoint.write_synced)
        elif when == "rename":
            checkpoint._sync = when_step_4(checkpoint._sync)
        elif when == "marker":
            checkpoint.mark_complete = when_step_4(checkpoint.mark_complete)
        elif when == "between":
            checkpoint.os = type("os", (), {**vars(os), "replace": staticmethod(when_step_4(os.replace))})

    flags = quick_flags(model, tmp_path, "--max_steps", 6, "--save_every", 2, "--eval_every", 3)
    ranks = Ranks(2, flags, tmp_path, fault=kill)
    codes = ranks.codes(30)
    assert -signal.SIGKILL in codes and 0 not in codes
    assert [p.name for p in complete_checkpoints(tmp_path / "checkpoints")] == ["step-000002"]
    output = resumed_from(model, tmp_path, "--save_every", 2)
    assert re.search(r"warning: \S*step-000004\S* is not complete", output) and "goes on after step 2" in output
    assert_same_end(unbroken, tmp_path)
    assert is_complete(tmp_path / "checkpoints/step-000004") and len(list((tmp_path / "checkpoints").glob("*.aside"))) == 1


@pytest.mark.parametrize("damage", ["no marker", "short file", "lost file", "empty marker"])
def test_F01_damage_to_the_newest_checkpoint_leads_to_the_one_before(model, unbroken, tmp_path, damage):
    folder = copy_until(unbroken, tmp_path / "run", 5)
    newest = folder / "checkpoints/step-000005"
    part = newest / "__1_0.distcp"
    {
        "no marker": lambda: (newest / "COMPLETE").unlink(), "short file": lambda: os.truncate(part, 100),
        "lost file": part.unlink, "empty marker": lambda: (newest / "COMPLETE").write_text(""),
    }[damage]()
    assert resume.find_checkpoint(parse_settings(quick_flags(model, folder))).name == "step-000004"
    assert (folder / "checkpoints/step-000005.aside").is_dir() and not newest.exists()


@pytest.mark.parametrize("background", ["off", "on"])
def test_a_failed_write_on_any_rank_keeps_the_older_checkpoint_and_training_goes_on(model, unbroken, tmp_path, background):
    def full_disk(rank):
        original = checkpoint.FileSystemWriter.write_data

        def write(self, *arguments):
            if rank == 1 and "000004" in str(self.path):
                raise OSError(28, "No space left on device")
            return original(self, *arguments)

        checkpoint.FileSystemWriter.write_data = write

    flags = quick_flags(
        model, tmp_path, "--max_steps", 6, "--save_every", 2, "--eval_every", 3, "--keep_checkpoints", 9, "--async_checkpoint", background
    )
    output = train_ranks(2, flags, tmp_path, fault=full_disk).output(0)
    assert re.search(r"warning: no checkpoint at \S*step-000004 \(.*No space left on device", output)
    names = [p.name for p in (tmp_path / "checkpoints").iterdir()]
    assert "step-000002" in names and "step-000006" in names and not [n for n in names if "000004" in n]
    assert_same_end(unbroken, tmp_path)


def test_pruning_keeps_the_newest_and_the_best(model, tmp_path):
    def scores(rank):
        given = iter([0.1, 0.9, 0.5, 0.5, 0.2, 0.3])
        train_grpo.evaluate = lambda *a, **k: (dict.fromkeys(["validation/accuracy", "validation/accuracy_low", "validation/accuracy_high"], next(given)), [])

    folder = tmp_path / "run"
    flags = quick_flags(model, folder, "--max_steps", 5, "--save_every", 1, "--eval_every", 1, "--learning_rate", 1e-3)
    output = train_ranks(1, flags, tmp_path, fault=scores).output()
    assert [p.name for p in complete_checkpoints(folder / "checkpoints")] == ["step-000001", "step-000004", "step-000005"]
    best = load_file(folder / "best/model.safetensors")
    saved = tensors(folder / "checkpoints/step-000001")
    assert all(torch.equal(best[name], saved[f"model.{name}"]) for name in best) and "best " in output
    final = load_file(folder / "final/model.safetensors")
    assert any(not torch.equal(best[name], final[name]) for name in best)


# ------------------------------------------------------------------------------------------------ which one, and whether
def refused(model, folder, *more, world: int = 1) -> str:
    ranks = train_ranks(world, quick_flags(model, folder, "--max_steps", 6, "--eval_every", 3, *more), folder, code=2)
    errors = [line for rank in range(world) for line in ranks.output(rank).splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and "Traceback" not in ranks.output()
    return errors[0]


def test_changed_settings_are_refused_with_both_values_and_free_ones_are_not(model, unbroken, tmp_path):
    folder = copy_until(unbroken, tmp_path / "run", 3)
    sentence = refused(model, folder, "--learning_rate", 0.5, "--seed", 3, "--loss", "gspo", world=2)
    assert "learning_rate 0.01 -> 0.5" in sentence and "seed 0 -> 3" in sentence and "loss 'token_mean' -> 'gspo'" in sentence
    assert "epsilon" not in sentence and "step-000003" in sentence
    schedule = refused(model, folder, "--lr_schedule", "linear", "--max_steps", 9)
    assert "lr_schedule 'constant' -> 'linear'" in schedule and "max_steps 6 -> 9" in schedule
    free = ("--schedule", "GPipe", "--sampler", "pipeline", "--microbatch_size", 2, "--save_every", 0, "--timeout", 300)
    assert "goes on after step 3" in resumed_from(model, folder, *free)


def test_every_setting_is_either_compared_or_a_known_free_one():
    import dataclasses

    names = {f.name for f in dataclasses.fields(parse_settings([]))}
    assert resume.FREE <= names
    must = {"learning_rate", "seed", "batch_size", "group_size", "model", "loss", "beta", "temperature", "dtype", "grpo_iterations"}
    assert not must & resume.FREE


def test_F16_changed_data_is_refused_with_both_fingerprints(model, unbroken, tmp_path):
    folder = copy_until(unbroken, tmp_path / "run", 3)
    data = tmp_path / "questions.jsonl"
    lines = (model / "questions.jsonl").read_text().splitlines()
    data.write_text("\n".join(lines))
    saved = read_state(folder / "checkpoints/step-000003")["data"]["training"]
    train_ranks(1, quick_flags(model, tmp_path / "same", "--data", data, "--max_steps", 1), tmp_path)
    assert read_state(tmp_path / "same/checkpoints/step-000001")["data"]["training"] == saved, "the name of the file is free"
    data.write_text("\n".join(lines[::-1]))
    sentence = refused(model, folder, "--data", data)
    assert f"training {saved} -> " in sentence and "--allow_data_change on" in sentence
    output = resumed_from(model, folder, "--data", data, "--allow_data_change", "on")
    assert "warning: the data has changed since" in output and saved in output and "goes on after step 3" in output


def test_F09_another_hidden_size_is_refused_with_the_tensor_and_both_shapes(unbroken, model, tmp_path):
    folder = copy_until(unbroken, tmp_path / "run", 3)
    other = training_folder(tmp_path / "model", hidden_size=48)
    for path in complete_checkpoints(folder / "checkpoints"):
        state = read_state(path)
        state["settings"]["model"] = str(other)
        (path / "state.json").write_text(json.dumps(state))
        sizes = json.loads((path / "COMPLETE").read_text()) | {"state.json": (path / "state.json").stat().st_size}
        (path / "COMPLETE").write_text(json.dumps(sizes))
    sentence = refused(other, folder, "--data", model / "questions.jsonl")
    assert re.search(r"tensor 'model\.\S+' has shape \[.*32.*\] in \S+ but \[.*48.*\]", sentence)


def test_resume_by_path_goes_back_and_never_starts_over(model, unbroken, tmp_path):
    folder = copy_until(unbroken, tmp_path / "run", 6)
    output = resumed_from(model, folder)
    assert "nothing is left to train" in output
    assert_same_end(unbroken, folder)
    output = resumed_from(model, folder, "--resume", folder / "checkpoints/step-000004")
    assert "goes on after step 4" in output and "lies after step-000004" in output
    assert_same_end(unbroken, folder)
    branch = tmp_path / "branch"
    branch.mkdir()
    train_ranks(2, quick_flags(model, branch, "--max_steps", 6, "--resume", folder), branch)
    assert not (branch / "checkpoints/step-000006").exists(), "nothing was left of the other run"
    never = train_ranks(2, quick_flags(model, folder, "--max_steps", 1, "--resume", "never"), tmp_path).output()
    assert "goes on" not in never and "checkpoints-1" in never
    assert [p.name for p in complete_checkpoints(folder / "checkpoints")] == ["step-000001"]
    assert is_complete(folder / "checkpoints-1/step-000006") and metrics(folder)[-1]["step"] == 1
    assert "is no complete checkpoint" in refused(model, folder, "--resume", tmp_path / "nowhere")


# ------------------------------------------------------------------------------------------------ export
def test_F10_F12_an_exported_checkpoint_is_the_model_with_its_stop_tokens(tmp_path, monkeypatch):
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    model = training_folder(tmp_path / "model", dtype=torch.bfloat16)
    GenerationConfig(eos_token_id=[1, 4], pad_token_id=0).save_pretrained(model)
    train_ranks(2, quick_flags(model, tmp_path / "run", "--max_steps", 2, "--eval_questions", 1), tmp_path)
    path = tmp_path / "run/checkpoints/step-000002"
    monkeypatch.setattr(export, "SHARD_BYTES", 20_000)
    shutil.move(model, tmp_path / "moved")  # a checkpoint needs nothing but itself
    out = export.export_checkpoint(path, tmp_path / "out")
    assert len(list(out.glob("model-*.safetensors"))) > 2
    exported = AutoModelForCausalLM.from_pretrained(out, dtype="auto")
    assert exported.dtype == torch.bfloat16 and exported.lm_head.weight is exported.model.embed_tokens.weight
    saved = tensors(path)
    for name, tensor in exported.named_parameters():
        assert torch.equal(tensor, saved[f"model.{name}"].bfloat16()), name
    final = AutoModelForCausalLM.from_pretrained(tmp_path / "run/final", dtype="auto")
    assert all(torch.equal(a, b) for a, b in zip(exported.parameters(), final.parameters()))
    assert GenerationConfig.from_pretrained(out).eos_token_id == [1, 4]
    assert AutoTokenizer.from_pretrained(out).chat_template == AutoTokenizer.from_pretrained(tmp_path / "moved").chat_template


def test_the_export_command(unbroken, tmp_path, monkeypatch, capsys):
    arguments = ["checkpoint.py", "export", str(unbroken / "checkpoints/step-000006"), str(tmp_path / "out")]
    monkeypatch.setattr("sys.argv", arguments)
    checkpoint.main()
    assert (tmp_path / "out/config.json").exists() and str(tmp_path / "out") in capsys.readouterr().out
    with pytest.raises(SystemExit, match="exists: name another"):
        checkpoint.main()
    monkeypatch.setattr("sys.argv", [*arguments[:2], str(tmp_path), str(tmp_path / "more")])
    with pytest.raises(SystemExit, match="no complete checkpoint"):
        checkpoint.main()
