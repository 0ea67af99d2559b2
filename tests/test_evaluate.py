"""Accuracies against brute force, the same on any number of stages, and the command."""

import itertools
import json
import os
import subprocess
import sys

import pytest
from conftest import ROOT
from ranks import early_letter, model_folder, quick_flags, run_ranks, train_ranks, training_folder  # noqa: F401

from accuracy import interval, majority, pass_at_k
from config import parse_settings
from evaluate import accuracy_metrics, compare, difficulty, evaluate, main, sampling_of
from policy import Policy
from rewards import read_golds
from rollout import Completion
from tasks import Question, render_prompts


# ------------------------------------------------------------------------------------------------ statistics
@pytest.mark.parametrize("samples, right, k", [(n, c, k) for n in (1, 4, 6) for c in range(n + 1) for k in range(1, n + 1)])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample(samples, right, k):
    subsets = list(itertools.combinations([1] * right + [0] * (samples - right), k))
    assert pass_at_k(samples, right, k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-12)


def test_pass_at_more_than_the_samples_is_refused():
    with pytest.raises(ValueError, match="pass@5 needs at least 5 samples a question, not 4"):
        pass_at_k(4, 1, 5)


@pytest.mark.parametrize("answers, winner", [
    ([3, 5, 5], 1), ([5, 3, 3, 5], 0), ([3, 5, 5, 3], 0), ([None, None, 7], 2), ([None, None], None), ([None, 2, None, None], 1),
])
def test_majority_takes_the_most_frequent_and_of_equals_the_first(answers, winner):
    assert majority(answers) == winner


def test_the_interval_is_that_of_a_binomial_and_repeats_itself():
    values = [1.0] * 60 + [0.0] * 140  # standard error sqrt(0.3 * 0.7 / 200) = 0.0324
    low, high = interval(values)
    assert low == pytest.approx(0.3 - 1.96 * 0.0324, abs=0.012) and high == pytest.approx(0.3 + 1.96 * 0.0324, abs=0.012)
    assert interval(values) == (low, high) != interval(values, seed=1)
    assert interval([1.0] * 5) == (1.0, 1.0)


# ------------------------------------------------------------------------------------------------ metrics
def question(i, gold="4", verify_type="LAST_NUMBER", **row):
    return Question(f"question {i}", gold, verify_type, row, f"row {i}", prompt_ids=[1])


def answered(q, texts, right, finished=True):
    return [
        Completion(q, s, [1], [5] * len(text.split()), [0.0], finished, text=text, correct=value, reward=value)
        for s, (text, value) in enumerate(zip(texts, right))
    ]


def test_metrics_of_four_samples_by_hand():
    questions = [question(0, level=1), question(1, level=2), question(2, level=2)]
    read_golds(questions)
    completions = (
        answered(0, ["4", "4", "5", "6"], [1, 1, 0, 0]) + answered(1, ["5", "5", "4", "none"], [0, 0, 1, 0])
        + answered(2, ["none", "no", "a b c", "x"], [0, 0, 0, None], finished=False)
    )
    found = accuracy_metrics(completions, questions, [None] * 12)
    assert found["accuracy"] == found["avg_at_4"] == found["pass_at_1"] == pytest.approx((0.5 + 0.25) / 3)
    assert found["pass_at_2"] == pytest.approx((5 / 6 + 1 / 2) / 3) and found["pass_at_4"] == pytest.approx(2 / 3)
    assert found["maj_at_4"] == pytest.approx(1 / 3), "4 wins the first, 5 the second, nobody votes in the third"
    assert (found["accuracy_difficulty_1"], found["accuracy_difficulty_2"]) == (0.5, 0.125)
    assert found["truncated_share"] == pytest.approx(1 / 3) and found["length_mean"] == pytest.approx(14 / 12)
    assert found["accuracy_low"] <= found["accuracy"] <= found["accuracy_high"] and "accuracy_type_LAST_NUMBER" not in found


def test_strict_lenient_and_types_share_the_denominator_of_all_questions():
    questions = [question(0, verify_type="ANSWER_TAG"), question(1, verify_type="ANSWER_TAG"), question(2)]
    read_golds(questions)
    completions = answered(0, ["it is 4"], [0.0]) + answered(1, ["?"], [None]) + answered(2, ["4"], [1.0])
    found = accuracy_metrics(completions, questions, [1.0, None, None])
    assert found["accuracy"] == pytest.approx(1 / 3) and found["accuracy_lenient"] == pytest.approx(2 / 3)
    assert found["accuracy_type_ANSWER_TAG"] == 0.0 and found["accuracy_type_LAST_NUMBER"] == 1.0
    assert not any(name.startswith(("pass", "maj", "avg")) for name in found)


def test_difficulty_is_read_from_either_column():
    rows = ({"difficulty": "hard"}, {"level": 3}, {}, {"difficulty": None, "level": 2})
    assert [difficulty(question(0, **row)) for row in rows] == ["hard", "3", "", "2"]


def test_a_difficulty_of_many_values_gives_no_metrics():
    questions = [question(i, difficulty=i / 7) for i in range(30)]
    read_golds(questions)
    found = accuracy_metrics([c for i in range(30) for c in answered(i, ["4"], [1.0])], questions, [None] * 30)
    assert not any(name.startswith("accuracy_difficulty") for name in found) and found["accuracy"] == 1.0


def test_the_timeout_is_for_a_part_of_the_questions_and_parts_change_nothing(tmp_path):
    model = model_folder(tmp_path / "model")
    flags = ["--model", str(model), "--sampler", "pipeline", "--max_completion_tokens", "6", "--eval_samples", "3", "--dtype", "float64"]
    whole, parts = (run_ranks(2, evaluated, [*flags, "--max_sequences_in_flight", n])[0] for n in ("100", "4"))
    assert whole[:2] == parts[:2] and (whole[2], parts[2]) == (1, 5)


# ------------------------------------------------------------------------------------------------ ranks
def row_says(completion: str, row: dict) -> float:
    return float(row["right"])


def evaluated(mesh, argv):
    settings = parse_settings(argv)
    policy = Policy(settings, mesh, settings.model)
    policy.load_for_sampling()
    assert not any(p.requires_grad for p in policy.stage.parameters())
    questions = [question(i, verify_type="test_evaluate:row_says", right=i in (1, 2, 3)) for i in range(5)]
    read_golds(questions)
    questions, _ = render_prompts(questions, policy.tokenizer)
    entered, enter = [], mesh.watch.enter
    mesh.watch.enter = lambda phase: (entered.append(phase), enter(phase))
    metrics, completions = evaluate(
        policy, questions if mesh.is_first else [], sampling_of(settings), seed=0, samples=settings.eval_samples
    )
    return metrics, [(c.question, c.sample, c.ids) for c in completions], entered.count("validate")


def test_E14_three_of_five_are_0_6_on_1_2_and_4_ranks(tmp_path):
    model = model_folder(tmp_path / "model")
    flags = ["--model", str(model), "--sampler", "pipeline", "--max_completion_tokens", "6", "--eval_samples", "3", "--dtype", "float64"]
    found = [run_ranks(world, evaluated, flags) for world in (1, 2, 4)]
    for ranks in found:
        assert ranks[0][0]["validation/accuracy"] == ranks[0][0]["validation/pass_at_3"] == 0.6
        assert ranks[0] == found[0][0] and len(ranks[0][1]) == 15
        assert all(rank == ({}, [], 1) for rank in ranks[1:])
        assert "validation/maj_at_3" not in ranks[0][0], "there is nothing to extract"


def test_E12_all_ranks_validate_at_the_same_steps(tmp_path):
    model = training_folder(tmp_path / "model")

    def note(rank):
        import train_grpo

        validate = train_grpo.Trainer.validate

        def noted(self, held_out):
            print("validating at", self.state.step, flush=True)
            return validate(self, held_out)

        train_grpo.Trainer.validate = noted

    flags = quick_flags(model, tmp_path / "run", "--max_steps", 5, "--eval_every", 2, "--eval_samples", 2, "--save_every", 0)
    ranks = train_ranks(2, flags, tmp_path, fault=note)
    for rank in (0, 1):
        assert [int(line.split()[-1]) for line in ranks.output(rank).splitlines() if line.startswith("validating at")] == [0, 2, 4, 5]
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    validated = [line for line in lines if "validation/accuracy" in line]
    assert [line["step"] for line in validated] == [0, 2, 4, 5]
    assert all(line["validation/pass_at_2"] >= line["validation/pass_at_1"] == line["validation/accuracy"] for line in validated)


# ------------------------------------------------------------------------------------------------ the command
def command(world, *arguments):
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={world}"] if world > 1 else []
    return subprocess.run(
        [sys.executable, *launcher, "evaluate.py", *map(str, arguments)], cwd=ROOT, capture_output=True, text=True, timeout=120,
        env=os.environ | {"PYTHONPATH": str(ROOT / "tests"), "OMP_NUM_THREADS": "1"}, stdin=subprocess.DEVNULL,
    )


def test_the_command_judges_a_model_alike_on_one_process_and_on_two(tmp_path):
    model = training_folder(tmp_path / "model")
    flags = ("--model", model, "--data", model / "questions.jsonl", "--verify_type", "ranks:early_letter", "--max_completion_tokens", 8,
             "--eval_samples", 4, "--eval_questions", 10, "--dtype", "float64")
    for world in (1, 2):
        done = command(world, *flags, "--output", tmp_path / str(world))
        assert done.returncode == 0, done.stderr[-2000:]
        assert "10 questions, 4 samples each, temperature 1" in done.stdout and "pass_at_4" in done.stdout
    one, two = ((tmp_path / world / "completions.jsonl").read_text() for world in "12")
    rows = [json.loads(line) for line in one.splitlines()]
    assert one == two and len(rows) == 40 and {row["number"] for row in rows} == set(range(10))
    assert all(early_letter(row["completion"], {}) == row["correct"] for row in rows)
    summary = json.loads((tmp_path / "1/summary.json").read_text())
    assert summary["metrics"]["accuracy"] == sum(row["correct"] for row in rows) / 40 and summary["packages"]["torch"]


def test_the_held_out_questions_of_a_run_give_its_own_accuracy(tmp_path):
    model = training_folder(tmp_path / "model")
    flags = quick_flags(model, tmp_path / "run", "--max_steps", 2)
    train_ranks(2, flags, tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    last = [line["validation/accuracy"] for line in lines if "validation/accuracy" in line][-1]
    flags[flags.index("--model") + 1] = str(tmp_path / "run/final")
    done = command(1, *flags, "--held_out", "on", "--output", tmp_path / "after")
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads((tmp_path / "after/summary.json").read_text())["metrics"]["accuracy"] == last


@pytest.mark.parametrize("more, sentence", [
    (("--eval_samples", "0"), "--eval_samples is 0: give at least 1"),
    (("--model", "nowhere/at/all"), "nowhere/at/all"),
    (("--data", "none.jsonl"), "none.jsonl"),
    (("--held_out", "on", "--validation_share", "0"), "there is no question to evaluate"),
    (("--device", "cuda"), "--device cuda needs a GPU for each"),
])
def test_bad_input_is_one_sentence_and_exit_2(tmp_path, more, sentence):
    model = training_folder(tmp_path / "model")
    done = command(1, "--model", model, "--data", model / "questions.jsonl", "--verify_type", "ranks:early_letter", "--batch_size", 4, *more)
    assert done.returncode == 2 and sentence in done.stderr and "Traceback" not in done.stderr


def written(folder, shares):
    folder.mkdir()
    rows = [
        {"number": i, "question": f"q{i}", "gold": "4", "correct": float(s < round(share * 4))}
        for i, share in enumerate(shares) for s in range(4)
    ]
    (folder / "completions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "summary.json").write_text(json.dumps({"questions": len(shares), "samples": 4}))
    return folder


def test_compare_pairs_the_questions_and_names_those_that_changed(tmp_path, capsys):
    a = written(tmp_path / "a", [0.0, 0.5, 1.0, 0.25])
    b = written(tmp_path / "b", [1.0, 0.5, 0.5, 0.5])
    main(["--compare", str(a), str(b)])
    text = capsys.readouterr().out
    assert "4 questions: 43.8% -> 62.5%, difference +18.8 points" in text
    assert "better: 2:\n  0% -> 100%  q0 (gold 4)\n  25% -> 50%  q3 (gold 4)\nworse: 1:\n  100% -> 50%  q2 (gold 4)" in text
    c = written(tmp_path / "c", [0.0, 0.5, 1.0])
    with pytest.raises(ValueError, match="hold other questions .1 differ."):
        compare(a, c)
    with pytest.raises(SystemExit, match="2"):
        main(["--compare", str(a), str(tmp_path / "nowhere")])
    assert "holds no whole evaluation" in capsys.readouterr().err
    for damage in (lambda text: text[:-30], lambda text: "".join(text.splitlines(True)[:-1])):
        (c / "completions.jsonl").write_text(damage((b / "completions.jsonl").read_text()))
        with pytest.raises(ValueError, match="c holds no whole evaluation"):
            compare(b, c)
