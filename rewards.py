r"""Rewards: reads the gold answer of each question once and grades completions by their verify type (verify_types.py).
No model, no tensors.

A completion is worth 1.0 or 0.0 (a user's verifier may give any finite number), or None: unscorable, so that the
trainer leaves it out and counts it.

By hand:
    python rewards.py --verify_type LAST_NUMBER --answer 14 "It takes 14 days." python rewards.py --verify_type
    COUNTDOWN --answer 24 --row '{"numbers": [3, 8, 1]}' "<answer>3*8*1</answer>" python rewards.py --file rows.jsonl
    # one object with completion, answer, verify_type a line; further keys are the row

Left out: data files and prompts (tasks.py), shaping (reward_terms.py), advantages (grpo_loss.py), learned reward
models.
"""
from __future__ import annotations

import argparse
import json
import logging
import math
import os
import sys
import threading
from collections import Counter
from collections.abc import Hashable
from types import SimpleNamespace
from typing import TYPE_CHECKING

from math_verifier import MathPool, math_answer
from numbers_in_text import last_number
from verify_types import VERIFIERS, import_verifier

if TYPE_CHECKING:
    from tasks import Question

logger = logging.getLogger(__name__)


def read_golds(questions: list[Question], workers: int | None = None) -> None:
    """Normalises each question's verify_type and reads its gold answer into `gold`, in place.

    Raises ValueError naming the first row whose verify_type is not known or whose gold its type cannot read. workers:
    as for grade().
    """
    for question in questions:
        name = str(question.verify_type or "").strip()
        if ":" in name:
            try:
                question.verify_type, question.gold = name, import_verifier(name)
            except ValueError as error:
                raise ValueError(f"{question.place}: verify_type {name!r}: {error}.") from error
            continue
        if name.upper() not in VERIFIERS:
            raise ValueError(f"{question.place}: verify_type {question.verify_type!r} is not known; use one of "
                             f"{', '.join(VERIFIERS)}, or module:function for a verifier of your own.")
        question.verify_type = name.upper()
        try:
            question.gold = VERIFIERS[question.verify_type].read_gold(str(question.answer), question.row)
        except ValueError as error:
            raise _unreadable(question, error) from error
    formulas = [question for question in questions if question.verify_type == "MATH"]
    for question, readable in zip(formulas, _math_pool(workers).run([(question.gold, None) for question in formulas])):
        if not readable:
            raise _unreadable(question, "the math-verify library does not understand it; give LaTeX or a plain formula")


def _unreadable(question: Question, reason: object) -> ValueError:
    return ValueError(f"{question.place}: the answer {str(question.answer)!r:.200} cannot be read as "
                      f"{question.verify_type}: {reason}.")


# ---- grading --------------------------------------------------------------------------------------------------------

_faults: Counter[str] = Counter()
_lock = threading.Lock()
_pools: dict[int, MathPool] = {}


def _forget_after_fork() -> None:
    """A forked child must neither talk to its parent's workers nor find the lock held."""
    global _lock
    _lock = threading.Lock()
    _pools.clear()


os.register_at_fork(after_in_child=_forget_after_fork)


def _math_pool(workers: int | None) -> MathPool:
    size = workers or len(os.sched_getaffinity(0))
    with _lock:
        return _pools.setdefault(size, MathPool(size))


def take_faults() -> dict[str, int]:
    """What went wrong in grading since the last call, counted, for the metrics: `exception` and `not_a_number` (a
    user's verifier), `no_gold` (never read) make a completion unscorable; `math_stuck` (an answer over the time limit
    of MATH) was graded 0.0."""
    with _lock:
        faults = dict(_faults)
        _faults.clear()
    return faults


def _grade_one(text: str, question: Question) -> tuple[float | None, str, str]:
    """(reward, kind of fault, what happened); MATH is worth 1.0 here only when spelled like the gold."""
    if question.gold is None:
        return None, "no_gold", "its gold answer was never read"
    try:
        if callable(question.gold):
            given = question.gold(text, question.row)
            reward = math.nan if given is None else float(given)
            if math.isfinite(reward):
                return reward, "", ""
            return None, "not_a_number", f"{question.verify_type} returned {given!r:.80}"
        verifier = VERIFIERS[question.verify_type]
        found = verifier.find(text)
        return float(found is not None and verifier.equal(found, question.gold)), "", ""
    except (Exception, SystemExit) as error:  # the verifier's own fault: counted and named, never a wrong answer
        return None, "exception", f"{question.verify_type} raised {type(error).__name__}: {error!s:.200}"


def grade(completions: list[tuple[str, Question]], workers: int | None = None) -> list[float | None]:
    """Raw correctness of each (completion text, question), in order: 1.0 or 0.0, a finite number of a user's verifier,
    None when unscorable.

    workers: processes for MATH, by default one for each core. Never raises for what a model wrote; unscorable
    completions are counted (take_faults) and logged with the row they belong to. Questions must have passed through
    read_golds().
    """
    rewards: list[float | None] = [None] * len(completions)
    faults, messages, formulas = Counter(), [], []
    for index, (text, question) in enumerate(completions):
        rewards[index], kind, message = _grade_one(text, question)
        if question.verify_type == "MATH" and rewards[index] == 0.0 and (found := math_answer(text)) is not None:
            formulas.append((index, (question.gold, found)))
        if kind:
            faults[kind] += 1
            messages.append(f"{question.place}: {message}")
    if formulas:
        pool = _math_pool(workers)
        stuck = pool.stuck
        for (index, _), equal in zip(formulas, pool.run([job for _, job in formulas])):
            rewards[index] = float(equal)
        if pool.stuck > stuck:
            faults["math_stuck"] += pool.stuck - stuck
    if messages:
        logger.warning("%d of %d completions are unscorable: %s", len(messages), len(completions),
                       "; ".join(list(dict.fromkeys(messages))[:3]))
    with _lock:
        _faults.update(faults)
    return rewards


def lenient(completions: list[tuple[str, Question]], rewards: list[float | None]) -> list[float | None]:
    """Correctness without the marker, where the verify type needs one: 1.0 also when just the last number is right.
    None for the other types.

    rewards: what grade() gave (the strict side). A model that only learns the format raises the strict accuracy and
    leaves the lenient one alone.
    """
    with_format = {name for name, verifier in VERIFIERS.items() if verifier.has_format}
    return [None if reward is None or question.verify_type not in with_format
            else max(reward, float(last_number(text) == question.gold))
            for (text, question), reward in zip(completions, rewards, strict=True)]


def extract_answer(completion: str, question: Question) -> Hashable | None:
    """The answer that the question's verify type finds, for majority votes; None when there is none or the verifier is
    the user's own."""
    return None if callable(question.gold) else VERIFIERS[question.verify_type].find(completion)


# ---- by hand --------------------------------------------------------------------------------------------------------

def _grade_rows(rows: list[tuple[str, dict | None]]) -> list[str]:
    """One line for each (place, row): the reward, `none`, or `refused: <reason>`."""
    lines, accepted = [], []
    for place, row in rows:
        lines.append("")
        try:
            if not isinstance(row, dict):
                raise ValueError(f"{place} is not a JSON object; write one object a line.")
            user = ":" in str(row.get("verify_type"))
            for field in ("completion", "verify_type") if user else ("completion", "answer", "verify_type"):
                if isinstance(row.get(field), (bool, list, dict, type(None))):
                    raise ValueError(f"{place} has no {field}; give it as text.")
            question = SimpleNamespace(answer=str(row.get("answer", "")), verify_type=row["verify_type"], row=row,
                                       place=place, gold=None)
            read_golds([question])
            accepted.append((len(lines) - 1, (str(row["completion"]), question)))
        except ValueError as error:
            lines[-1] = "refused: " + " ".join(str(error).split())
    for (index, _), reward in zip(accepted, grade([pair for _, pair in accepted])):
        lines[index] = "none" if reward is None else str(reward)
    return lines


def _parse_line(line: str) -> dict | None:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser("python rewards.py", allow_abbrev=False, description="Grades completions by hand.")
    parser.add_argument("--verify_type", help=f"{', '.join(VERIFIERS)}, or module:function")
    parser.add_argument("--answer", help="the gold answer")
    parser.add_argument("--row", default="{}", help='further fields of the row as JSON: \'{"numbers": [3, 8, 1]}\'')
    parser.add_argument("--file", help="JSONL with completion, answer and verify_type a line; prints one line a row")
    parser.add_argument("completion", nargs="?", help="the completion to grade")
    # Golds and completions may start with a minus, which argparse takes for an option.
    if "--answer" in argv[:-1]:
        place = argv.index("--answer")
        argv = [*argv[:place], f"--answer={argv[place + 1]}", *argv[place + 2:]]
    known, rest = parser.parse_known_args(argv)
    if known.completion is None and len(rest) == 1:
        known.completion, rest = rest[0], []
    if rest or (known.file is None) == (known.completion is None):
        parser.error("give either --file, or --verify_type, --answer and one completion (in quotes)")
    if known.file is not None:
        with open(known.file, encoding="utf-8", errors="replace") as file:
            rows = [(f"{known.file} row {number}", _parse_line(line))
                    for number, line in enumerate(file, 1) if line.strip()]
        print(*_grade_rows(rows), sep="\n")
        return 0
    row = _parse_line(known.row)
    if not isinstance(row, dict):
        parser.error("--row must be a JSON object")
    row |= {"completion": known.completion, "verify_type": known.verify_type}
    row |= {} if known.answer is None else {"answer": known.answer}
    line, = _grade_rows([("The command line", row)])
    print(line)
    return int(line.startswith("refused"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
