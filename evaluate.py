"""Accuracy on held-out questions: during training, and as a command for any model, so that before and after are judged alike.

    python evaluate.py --model Qwen/Qwen2.5-0.5B-Instruct --data "task:chain_sum?n=200&split=validation" --output runs/before
    torchrun --nproc_per_node=2 evaluate.py --config my.yaml --held_out on --model runs/grpo/final --output runs/after
    python evaluate.py --compare runs/before runs/after

Every question has random streams of its own that do not depend on the step or the number of stages, so that two validations
differ by the weights alone. The denominator is always the number of questions: an unscorable completion is wrong, and no
question is repeated to fill a batch.

Left out: benchmarks with graders of their own (lm-evaluation-harness takes the exported folder).
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from accuracy import interval, majority, pass_at_k
from config import Settings, parse_settings
from drawing import Sampling
from parallel import Mesh, fail_together, open_mesh, refuse_in_one_sentence, refuse_together
from policy import Policy
from provenance import provenance
from questions import load, render, training_and_held_out
from resume import number_aside
from rewards import extract_answer, grade, lenient, take_faults
from rollout import Completion, decode
from samples import asked, shown_answer
from tasks import Question, fingerprint

VALIDATION_STREAM = 2**31  # no rollout has this number
SHOWN = 10  # questions that changed sides, of each kind
KINDS = 20  # no accuracies by difficulty where it has more values than this


# ------------------------------------------------------------------------------------------------ measuring
def evaluate(
    policy: Policy, questions: list[Question], sampling: Sampling, *, seed: int, samples: int = 1
) -> tuple[dict[str, float], list[Completion]]:
    """Sample ``samples`` completions of each question and grade them; call on every stage.

    Args:
        questions: on the first stage; the others may pass an empty list.

    Returns:
        On the first stage the metrics as ``validation/<name>`` (see ``accuracy_metrics``) and the completions; empty
        elsewhere.
    """
    prompts = policy.mesh.broadcast([q.prompt_ids for q in questions])
    at_once, completions = max(1, sampling.max_sequences_in_flight // samples), []
    for first in range(0, len(prompts), at_once):
        policy.mesh.watch.enter("validate")  # --timeout is for each part, however many questions there are
        completions += policy.generate(
            prompts[first : first + at_once], group_size=samples, sampling=sampling, stream=(seed, VALIDATION_STREAM),
            first_question=first,
        )
        policy.mesh.barrier()  # stages that do not sample wait here, not for the whole evaluation
    if not policy.mesh.is_first:
        return {}, []
    decode(completions, policy.tokenizer, policy.stop_ids)
    graded = [(c.text, questions[c.question]) for c in completions]
    for c, reward in zip(completions, grade(graded)):
        c.correct = c.reward = reward
    metrics = accuracy_metrics(completions, questions, lenient(graded, [c.correct for c in completions]), seed)
    metrics |= {f"fault_{kind}": count for kind, count in take_faults().items()}
    return {f"validation/{name}": value for name, value in metrics.items()}, completions


def accuracy_metrics(
    completions: list[Completion], questions: list[Question], judged: list[float | None], seed: int = 0
) -> dict[str, float]:
    """All shares and means of an evaluation.

    Args:
        completions: graded, the same number for each question.
        judged: ``rewards.lenient``'s result for each completion.

    Returns:
        accuracy, accuracy_low, accuracy_high   mean over questions of the share of right samples, with its 95 % interval
        accuracy_lenient                        what it would be if only the answer counted (types with a format)
        avg_at_k, pass_at_j, maj_at_k           with k samples above 1; j = 1, 2, 4, ... and k. Majority votes need an answer
                                                to extract, so they are left out where the verifier is the user's own
        accuracy_type_*, accuracy_difficulty_*  where there are several verify types, or the rows hold a difficulty or level
        length_mean, truncated_share            tokens; share of completions cut at the limit
    """
    groups: list[list[int]] = [[] for _ in questions]
    for i, c in enumerate(completions):
        groups[c.question].append(i)
    samples = len(groups[0])
    right = [sum(completions[i].correct == 1.0 for i in group) for group in groups]
    shares = [count / samples for count in right]

    def mean(values) -> float:
        values = list(values)
        return sum(values) / len(values)

    low, high = interval(shares, seed)
    out = {"accuracy": mean(shares), "accuracy_low": low, "accuracy_high": high}
    if any(value is not None for value in judged):
        # of a type without a format, right is right
        out["accuracy_lenient"] = mean(c.correct == 1.0 if v is None else v == 1.0 for c, v in zip(completions, judged))
    if samples > 1:
        out[f"avg_at_{samples}"] = out["accuracy"]
        ks = sorted({2**n for n in range(samples.bit_length()) if 2**n <= samples} | {samples})
        out |= {f"pass_at_{k}": mean(pass_at_k(samples, count, k) for count in right) for k in ks}
        if not any(callable(q.gold) for q in questions):
            winners = [majority([extract_answer(completions[i].text, q) for i in g]) for g, q in zip(groups, questions)]
            out[f"maj_at_{samples}"] = mean(
                w is not None and completions[g[w]].correct == 1.0 for g, w in zip(groups, winners)
            )
    for kind, names in (("type", [q.verify_type for q in questions]), ("difficulty", list(map(difficulty, questions)))):
        known = sorted(set(filter(None, names)))
        if (kind == "type") < len(known) <= KINDS:
            out |= {f"accuracy_{kind}_{name}": mean(s for s, n in zip(shares, names) if n == name) for name in known}
    out["length_mean"] = mean(len(c.ids) for c in completions)
    out["truncated_share"] = mean(not c.finished for c in completions)
    return out


def difficulty(question: Question) -> str:
    """The row's ``difficulty`` or ``level`` as text; "" where it has none."""
    found = [question.row[name] for name in ("difficulty", "level") if question.row.get(name) is not None]
    return str(found[0]).replace("/", "_") if found else ""


def sampling_of(settings: Settings) -> Sampling:
    """How validation samples: as in training, but with its own temperature, top-p and top-k."""
    s = settings
    return Sampling(
        temperature=s.eval_temperature, top_p=s.eval_top_p, top_k=s.eval_top_k, min_new_tokens=s.min_completion_tokens,
        max_new_tokens=s.max_completion_tokens, stop_strings=tuple(filter(None, s.stop_strings.split("|"))),
        max_sequences_in_flight=s.max_sequences_in_flight or max(s.batch_size * s.group_size, 256),
    )


# ------------------------------------------------------------------------------------------------ the command
def completion_rows(completions: list[Completion], questions: list[Question]) -> list[dict]:
    """Everything about each completion, for ``completions.jsonl``."""
    judged = lenient([(c.text, questions[c.question]) for c in completions], [c.correct for c in completions])
    rows = []
    for c, value in zip(completions, judged):
        q = questions[c.question]
        rows.append({
            "number": c.question, "sample": c.sample, "question": q.question, "completion": c.text,
            "answer": shown_answer(c, q), "gold": q.answer, "verify_type": q.verify_type,
            "difficulty": difficulty(q), "correct": c.correct, "lenient": value, "tokens": len(c.ids), "finished": c.finished,
        })
    return rows


def run(settings: Settings, mesh: Mesh, output: Path, held_out: bool) -> None:
    """Load the model and the questions, evaluate, print, and write ``summary.json`` and ``completions.jsonl``.

    Raises:
        ValueError: data or a model that cannot be used, before any weight is loaded.
    """
    policy = Policy(settings, mesh, settings.model)

    def read_questions() -> list[Question]:
        if not mesh.is_first:
            return []
        if held_out:
            found = training_and_held_out(settings, policy.tokenizer)[1]
        else:
            found = render(load(settings.validation_data or settings.data, settings), settings, policy.tokenizer)
            found = found[: settings.eval_questions or None]
        if not found:
            raise ValueError("there is no question to evaluate: give --data, or --validation_share above 0 with --held_out on")
        return found

    questions = refuse_together(mesh, read_questions)
    policy.load_for_sampling()
    metrics, completions = evaluate(
        policy, questions, sampling_of(settings), seed=settings.seed, samples=settings.eval_samples
    )
    if not mesh.is_first:
        return
    output.mkdir(parents=True, exist_ok=True)
    number_aside(output, ["summary.json", "completions.jsonl"])
    metrics = {name.removeprefix("validation/"): value for name, value in metrics.items()}
    about = {
        "model": settings.model, "data": settings.validation_data or settings.data, "held_out": held_out,
        "questions": len(questions), "samples": settings.eval_samples, "temperature": settings.eval_temperature,
        "seed": settings.seed, "fingerprint": fingerprint(questions), **provenance(),
    }
    rows = completion_rows(completions, questions)
    (output / "completions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (output / "summary.json").write_text(json.dumps(about | {"metrics": metrics}, indent=1))  # last: the folder is whole
    print(table(about, metrics))
    print(f"written to {output}: summary.json, completions.jsonl")


def table(about: dict, metrics: dict[str, float]) -> str:
    """The evaluation as text; shares in percent."""
    drawn = f"temperature {about['temperature']:g}" if about["temperature"] else "greedy"
    several = "s" * (about["samples"] > 1)
    lines = [
        f"{about['model']}: {about['questions']} questions, {about['samples']} sample{several} each, {drawn}",
        f"accuracy               {metrics['accuracy']:>7.1%}  (95 % interval {metrics['accuracy_low']:.1%} to {metrics['accuracy_high']:.1%})",
    ]
    for name, value in metrics.items():
        if name.startswith("fault_") or name == "length_mean":
            lines.append(f"{name:<22} {value:>7.1f}")
        elif name not in ("accuracy", "accuracy_low", "accuracy_high"):
            lines.append(f"{name:<22} {value:>7.1%}")
    return "\n".join(lines)


# ------------------------------------------------------------------------------------------------ comparing
def compare(one: Path, other: Path) -> str:
    """The paired difference of two evaluations of the same questions, and the questions that changed sides, as text.

    Raises:
        ValueError: a folder that holds no whole evaluation, or other questions.
    """
    before, after = read_shares(one), read_shares(other)
    if before.keys() != after.keys():
        differ = len(before.keys() ^ after.keys())
        raise ValueError(f"{one} and {other} hold other questions ({differ} differ): evaluate both on the same --data and --seed")
    keys = list(before)
    changes = [after[key] - before[key] for key in keys]
    low, high = interval(changes)
    count = len(keys)
    lines = [
        f"{count} questions: {sum(before.values()) / count:.1%} -> {sum(after.values()) / count:.1%}, difference "
        f"{100 * sum(changes) / count:+.1f} points (95 % interval {100 * low:+.1f} to {100 * high:+.1f})"
    ]
    for title, sign in (("better", 1), ("worse", -1)):
        changed = sorted((sign * change, key) for change, key in zip(changes, keys) if sign * change > 0)[::-1]
        lines.append(f"{title}: {len(changed)}" + (f", the first {SHOWN}:" if len(changed) > SHOWN else ":" * bool(changed)))
        lines += [f"  {before[key]:.0%} -> {after[key]:.0%}  {key[1]} (gold {key[2]})" for _, key in changed[:SHOWN]]
    return "\n".join(lines)


def read_shares(folder: Path) -> dict[tuple[int, str, str], float]:
    """The share of right samples by (number, question, gold).

    Raises:
        ValueError: not all that the summary counts is there.
    """
    right: dict[tuple, list[bool]] = {}
    try:
        about = json.loads((Path(folder) / "summary.json").read_text())
        rows = [json.loads(line) for line in (Path(folder) / "completions.jsonl").read_text().splitlines()]
    except (OSError, ValueError):
        about, rows = {"questions": 1, "samples": 1}, []
    if len(rows) != about["questions"] * about["samples"]:
        raise ValueError(f"{folder} holds no whole evaluation: give a folder that evaluate.py --output wrote to its end")
    for row in rows:
        right.setdefault((row["number"], asked(row["question"]), row["gold"]), []).append(row["correct"] == 1.0)
    return {key: sum(found) / len(found) for key, found in right.items()}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description="Accuracy of a model on questions with verifiable answers.", allow_abbrev=False,
        epilog="All settings of train_grpo.py --help that concern model, data, sampling and validation are taken too "
        "(--model, --data, --verify_type, --eval_samples, --eval_temperature, --max_completion_tokens, ...), also from --config.",
    )
    parser.add_argument("--output", type=Path, default=Path("runs/evaluation"), help="folder for summary.json and completions.jsonl")
    parser.add_argument("--held_out", choices=("on", "off"), default="off",
                        help="on: the questions that a training run with these settings holds out; off: all of --data")
    parser.add_argument("--compare", nargs=2, type=Path, metavar=("A", "B"), help="two output folders: paired difference")
    own, rest = parser.parse_known_args(argv)
    with refuse_in_one_sentence(say=os.environ.get("RANK", "0") == "0"):
        if own.compare:
            print(compare(*own.compare))
            return
        settings = parse_settings(rest)
        if ":" not in settings.sampler:
            settings.sampler = "pipeline"  # the same completions, and nothing held twice
    with refuse_in_one_sentence():
        mesh = open_mesh(settings.device, settings.timeout)
    with fail_together(mesh), refuse_in_one_sentence(mesh):
        run(settings, mesh, own.output, own.held_out == "on")


if __name__ == "__main__":
    main()
