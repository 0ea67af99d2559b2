"""The whole loop: the same curve on any number of stages, failures that end the job, bad input that never starts it."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import ROOT
from ranks import model_folder, run_ranks
from safetensors.torch import load_file

from config import parse_settings
from questions import batches
from sampler import Sampler
from split import plan_stages
from stages import Stage, load_config, load_weights
from train_grpo import prepare, train


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = model_folder(tmp_path_factory.mktemp("model"))
    rows = [json.dumps({"question": f"Say {i}.", "answer": i}) for i in range(40)]
    (folder / "questions.jsonl").write_text("\n".join(rows))
    return folder


def arguments(model, folder, *more):
    flags = (
        f"--model {model} --project_dir {folder} --data {Path(model) / 'questions.jsonl'} --batch_size 4 --group_size 4 "
        "--max_completion_tokens 12 --max_steps 3 --eval_questions 8 --learning_rate 1e-2 --tracker none"
    )
    return [*flags.split(), "--verify_type", "test_train:early_letter", *more]


def early_letter(completion: str, row: dict) -> float:
    """A random model is never right, but it can learn to begin with a low code point."""
    return float(completion[:1] < "]")


def run(mesh, argv):
    trainer, questions, held_out = prepare(parse_settings(argv), mesh)
    train(trainer, questions, held_out)
    return {name: t.clone() for name, t in trainer.policy.stage.export_tensors().items()}


def run_curve(world, model, folder, *more):
    """Metrics by line, and all weights at the end."""
    stages = run_ranks(world, run, arguments(model, folder, *more))
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return lines, {name: t for stage in stages for name, t in stage.items()}


SAME_ON_ANY_LAYOUT = (
    "reward/mean", "completion/tokens", "train/tokens", "train/loss", "train/grad_norm", "train/entropy", "train/ratio_mean",
    "train/kl", "validation/accuracy", "validation/length_mean",
)


@pytest.mark.parametrize(
    "more",
    [
        (),
        ("--sampler", "pipeline", "--grpo_iterations", "2", "--schedule", "GPipe"),
        ("--beta", "0.1", "--reference_update_fraction", "0.2", "--reference_mixup", "0.5"),
        ("--beta", "0.1", "--reference", "pipeline", "--sampler", "pipeline", "--loss", "gspo"),
        ("--share_prompts", "off", "--microbatch_size", "2", "--chunk_size", "2"),
        ("--sampler", "replicas", "--chunk_size", "2", "--grpo_iterations", "2"),
    ],
)
def test_stages_draw_the_same_curve(model, tmp_path, more):
    whole, weights = run_curve(1, model, tmp_path / "1", "--dtype", "float64", *more)
    rewards = [line["reward/mean"] for line in whole if "reward/mean" in line]
    assert 0 < min(rewards) and max(rewards) < 1, "the rewards must carry a signal"
    before = load_file(model / "model.safetensors")
    assert all((weights[name] - tensor).abs().max() > 1e-3 for name, tensor in before.items()), "training must matter"
    for world in (2, 3):
        split, split_weights = run_curve(world, model, tmp_path / str(world), "--dtype", "float64", *more)
        assert len(split) == len(whole)
        for a, b in zip(whole, split):
            assert a["step"] == b["step"]
            for name in SAME_ON_ANY_LAYOUT:
                assert (name in a) == (name in b)
                if name in a:
                    assert b[name] == pytest.approx(a[name], rel=2e-5, abs=1e-9), (world, a["step"], name)
        assert split_weights.keys() == weights.keys()
        for name, tensor in weights.items():
            assert torch.allclose(split_weights[name], tensor, rtol=0, atol=2e-5), name


def draw_once(mesh, argv):
    trainer, questions, _ = prepare(parse_settings(argv), mesh)
    sampler, asked = trainer.policy.sampler, []
    inner = sampler.generate

    def generate(prompts, **more):
        asked.append((more["first_question"], len(prompts)))
        return inner(prompts, **more)

    sampler.generate = generate
    drawn = trainer.sample(1, questions[:4])
    return asked, sampler.version, [(c.question, c.sample, c.ids, c.text) for c in drawn]


def test_replicas_answer_their_share_of_the_questions(model, tmp_path):
    argv = arguments(model, tmp_path / "run", "--sampler", "replicas", "--dtype", "float64")
    [(asked, _, alone)] = run_ranks(1, draw_once, argv)
    assert asked == [(0, 4)]
    ranks = run_ranks(3, draw_once, argv)
    assert [asked for asked, _, _ in ranks] == [[(0, 1)], [(1, 1)], [(2, 2)]]
    assert [version for _, version, _ in ranks] == [0, 0, 0]
    assert ranks[0][2] == alone and len(alone) == 16


def split_of(mesh, argv):
    trainer, _, _ = prepare(parse_settings(argv), mesh)
    return [s.end_layer - s.first_layer for s in trainer.policy.plan], len(trainer.policy.stage.layers)


def test_short_answers_to_long_prompts_leave_the_last_stage_more_layers(tmp_path):
    """A head of 1000 entries, computed four times, weighs 5.5 of 8 layers, or 0.3 when it sees one token of twenty."""
    model = model_folder(tmp_path / "model", layers=8, vocabulary=1000)
    rows = [json.dumps({"question": "Say it again. " * 6 + str(i), "answer": i}) for i in range(40)]
    (model / "questions.jsonl").write_text("\n".join(rows))
    for tokens, want in (("2", [4, 4]), ("150", [6, 2])):
        argv = arguments(model, tmp_path / tokens, "--max_completion_tokens", tokens)
        assert run_ranks(2, split_of, argv) == [(want, want[0]), (want, want[1])]
    given = arguments(model, tmp_path / "given", "--max_completion_tokens", "2", "--split", "5,3")
    assert run_ranks(2, split_of, given)[0][0] == [5, 3]


def test_B12_T14_shaping_terms_are_weighted_and_raw_correctness_stands_beside_them(model, tmp_path):
    more = ("--format_weight", "0.5", "--overlong_weight", "0.25", "--overlong_margin", "6", "--repetition_weight", "0.1")
    lines, _ = run_curve(2, model, tmp_path / "run", *more)
    for line in lines:
        if "reward/mean" in line:
            added = 0.5 * line["reward/term_format"] + 0.25 * line["reward/term_overlong"] + 0.1 * line["reward/term_repetition"]
            assert line["reward/mean"] == pytest.approx(line["reward/correct"] + added)
            assert -1 <= line["reward/term_overlong"] < 0 <= line["reward/correct"]


def faulty(completion: str, row: dict) -> float:
    if int(row["answer"]) % 2:
        raise RuntimeError("no mark for odd rows")
    return early_letter(completion, row)


def test_B08_an_exception_in_a_users_verifier_is_counted_and_leaves_the_loss(model, tmp_path):
    lines, _ = run_curve(1, model, tmp_path / "run", "--verify_type", "test_train:faulty", "--batch_size", "12")
    first = next(line for line in lines if "reward/mean" in line)
    assert 0 < first["reward/unscorable"] == first["reward/fault_exception"] < 48
    assert first["train/masked_share"] == pytest.approx(1 - first["train/tokens"] / first["completion/tokens"])
    assert 0 < first["train/tokens"] < first["completion/tokens"] and first["train/loss"] is not None


def test_a_step_equals_itself_under_the_same_seed_and_differs_under_another(model, tmp_path):
    one, first = run_curve(1, model, tmp_path / "a")
    two, second = run_curve(1, model, tmp_path / "b")
    other, _ = run_curve(1, model, tmp_path / "c", "--seed", "1")
    pick = lambda lines: [line.get("train/grad_norm") for line in lines]  # noqa: E731
    assert pick(one) == pick(two) and all(torch.equal(first[n], second[n]) for n in first)
    assert pick(one) != pick(other)


def test_a_second_run_in_the_same_folder_loses_nothing_of_the_first(model, tmp_path):
    first, _ = run_curve(1, model, tmp_path / "run", "--max_steps", "1")
    for _ in range(2):
        again, _ = run_curve(1, model, tmp_path / "run", "--max_steps", "2", "--resume", "never")
        assert [line["step"] for line in again] == [0, 1, 2, 2]
    kept = [json.loads(line) for line in (tmp_path / "run" / "metrics-1.jsonl").read_text().splitlines()]
    assert kept == first
    assert all((tmp_path / "run" / name / "model.safetensors").exists() for name in ("final", "final-1", "final-2"))


def test_every_epoch_visits_every_question_once():
    for epoch in range(3):
        order = batches(10, 4, epoch, seed=0)
        assert [len(b) for b in order] == [4, 4, 2]
        assert sorted(sum(order, [])) == list(range(10))
    assert batches(10, 4, 0, 0) != batches(10, 4, 1, 0) != batches(10, 4, 1, 1)


class OwnEngine:
    """An engine of the user's own: here our sampler over a model that it holds itself."""

    def __init__(self, model, *, eos_ids, pad_id, decode, device, dtype):
        config = load_config(model)
        whole = load_weights(Stage(config, plan_stages(config, 1)[0], device=device, dtype=dtype), model)
        self.inner, self.version = Sampler(whole, eos_ids=eos_ids, pad_id=pad_id, decode=decode), 0

    def generate(self, prompts, **arguments):
        return self.inner.generate(prompts, **arguments)

    def update_weights(self, tensors, version):
        self.inner.update_weights(tensors, version)
        self.version = version


@pytest.mark.parametrize("world", [1, 2])
def test_an_engine_of_ones_own_gets_every_new_weight(model, tmp_path, world):
    own, weights = run_curve(world, model, tmp_path / "own", "--sampler", "test_train:OwnEngine")
    ours, same = run_curve(world, model, tmp_path / "ours")
    for a, b in zip(own, ours, strict=True):
        for name in ("reward/mean", "completion/tokens", "train/grad_norm", "validation/length_mean"):
            assert a.get(name) == b.get(name), name
    assert all(torch.equal(weights[name], same[name]) for name in weights)
    assert own[-2]["sampler/weight_version"] == 3


# ------------------------------------------------------------------------------------------------ as a command
def command(argv, *, world=1, script="train_grpo.py", timeout=60, **environment):
    env = {k: v for k, v in os.environ.items() if not k.startswith(("WANDB", "RANK", "WORLD", "LOCAL", "MASTER"))}
    env |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "tests")} | environment
    launcher = [sys.executable]
    if world > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={world}"]
    return subprocess.run(
        [*launcher, script, *argv], cwd=ROOT, env=env, capture_output=True, text=True, timeout=timeout,
        stdin=subprocess.DEVNULL,
    )


def test_H01_H03_T39_two_ranks_without_a_key_make_one_offline_run_and_ask_nothing(model, tmp_path):
    folder = tmp_path / "run"
    argv = arguments(model, folder, "--tracker", "wandb", "--max_steps", "2")
    done = command(argv, world=2, HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(list(folder.glob("wandb/offline-run-*"))) == 1
    assert "held-out accuracy before" in done.stdout and "wandb sync" in done.stdout
    assert "step    2/2" in done.stdout
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "validation/accuracy" in line] == [0, 2]


def test_a_rank_that_raises_at_step_2_ends_the_job_with_its_traceback(model, tmp_path):
    began = time.monotonic()
    argv = arguments(model, tmp_path / "run")
    done = command(argv, world=2, script="tests/faulty_train.py", FAULT="raise", FAULT_RANK="1", FAULT_STEP="2")
    assert done.returncode != 0
    assert "the injected fault of step 2" in done.stderr and "Traceback" in done.stderr
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 1]
    assert time.monotonic() - began < 45  # start of two interpreters included; the end itself takes a second


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_rank_that_raises_while_sampling_through_the_pipeline_ends_the_job(model, tmp_path, rank):
    began = time.monotonic()
    argv = arguments(model, tmp_path / "run", "--sampler", "pipeline")
    done = command(argv, world=2, script="tests/faulty_train.py", FAULT="sample", FAULT_RANK=rank, FAULT_STEP="9")
    assert done.returncode != 0 and "the injected fault of pass 9" in done.stderr
    assert time.monotonic() - began < 45


def test_D08_validation_may_be_greedy_and_stop_at_a_text(model, tmp_path):
    more = ("--eval_temperature", "0", "--max_steps", "1", "--stop_strings", "!|e")
    lines, _ = run_curve(2, model, tmp_path / "a", *more)
    again, _ = run_curve(1, model, tmp_path / "b", *more, "--seed", "0", "--eval_top_k", "1", "--eval_temperature", "0.5")
    assert lines[0]["validation/length_mean"] == again[0]["validation/length_mean"]  # the likeliest token, twice
    free, _ = run_curve(1, model, tmp_path / "c", "--max_steps", "1")
    assert lines[1]["completion/length_mean"] < free[1]["completion/length_mean"] == 12


def test_D15_a_step_with_a_nan_gradient_is_skipped_on_all_stages_and_weights_stay_finite(model, tmp_path):
    argv = arguments(model, tmp_path / "run", "--max_steps", "4")
    done = command(argv, world=2, script="tests/faulty_train.py", FAULT="nan", FAULT_RANK="1", FAULT_STEP="3")
    assert done.returncode == 0, done.stderr[-2000:]
    assert "the gradient norm is nan; the update is skipped" in done.stdout
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    norms = [line["train/grad_norm"] for line in lines if "train/grad_norm" in line]
    assert norms[2] is None and all(n is not None for i, n in enumerate(norms) if i != 2)
    assert lines[-1]["validation/accuracy"] is not None
    skipped = [line["train/skipped_updates"] for line in lines if "train/skipped_updates" in line]
    assert skipped == [0, 0, 1, 1]
    from transformers import AutoModelForCausalLM

    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "final")
    assert all(torch.isfinite(p).all() for p in exported.parameters())


@pytest.mark.parametrize(
    "more, sentence",
    [
        (("--data", "task:char_count?n=3", "--validation_share", "0", "--batch_size", "8"), "3 questions but --batch_size is 8"),
        (("--data", "no_such_file.jsonl"), "no_such_file.jsonl"),
        (("--group_size", "1"), "give at least 2"),
        (("--verify_type", "LAST_NUMBERS"), "LAST_NUMBERS"),
        (("--split", "3"), "add up to the model's 4 layers"),
        (("--model", "no-such-folder/config"), "no-such-folder"),
    ],
)
def test_E08_T33_G04_bad_input_is_one_sentence_and_exit_2(model, tmp_path, more, sentence):
    done = command(arguments(model, tmp_path / "run", *more))
    assert done.returncode == 2
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and sentence in errors[0] and "Traceback" not in done.stderr
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_more_stages_than_layers_are_refused_with_the_numbers(model, tmp_path):
    def refused(mesh, argv):
        with pytest.raises(ValueError, match="4 layers cannot fill 5 stages"):
            prepare(parse_settings(argv), mesh)

    run_ranks(5, refused, arguments(model, tmp_path))
