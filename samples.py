"""A few completions to look at: a table in W&B, lines in ``samples.jsonl``, and on the console when asked.

At each write some right and some wrong completions are taken, evenly over the rollout, so that a page of them stays
bounded however large the rollout is; texts are cut at 4,000 characters.

Left out: all completions (--dump_rollouts; evaluate.py writes those of a validation).
"""

from __future__ import annotations

from rewards import extract_answer
from rollout import Completion
from tasks import Question

ROWS = 16  # at one write
CHARACTERS = 4000


def pick(completions: list[Completion], count: int = ROWS) -> list[Completion]:
    """At most ``count``: half of them right and half wrong where there are enough, evenly spaced, in their order.

    Of 100 completions of which 3 are right, 16 are 3 right and 13 wrong ones.
    """
    right = [c for c in completions if c.correct == 1.0]
    wrong = [c for c in completions if c.correct != 1.0]
    of_right = min(len(right), max(count // 2, count - len(wrong)))
    chosen = _spread(right, of_right) + _spread(wrong, min(len(wrong), count - of_right))
    return sorted(chosen, key=lambda c: (c.question, c.sample))


def _spread(completions: list[Completion], count: int) -> list[Completion]:
    return [completions[i * len(completions) // count] for i in range(count)]


def sample_rows(step: int, split: str, completions: list[Completion], questions: list[Question]) -> list[dict]:
    """One row for each of ``pick``'s completions.

    Args:
        split: "train" or "validation"; advantages are None in validation.
    """
    rows = []
    for c in pick(completions):
        question = questions[c.question]
        rows.append({
            "step": step, "split": split, "question": asked(question.question)[:CHARACTERS], "completion": c.text[:CHARACTERS],
            "answer": shown_answer(c, question), "gold": question.answer, "reward": c.reward, "correct": c.correct,
            "tokens": len(c.ids), "finished": c.finished, "advantage": c.advantage if split == "train" else None,
        })
    return rows


def asked(question: str | list[dict]) -> str:
    """What a question asks, of several messages the last."""
    return question if isinstance(question, str) else question[-1]["content"]


def shown_answer(c: Completion, question: Question) -> str | None:
    """The answer that the verifier finds in a completion, as text."""
    answer = extract_answer(c.text, question)
    return None if answer is None else str(answer)


def as_text(row: dict) -> str:
    """A row as two lines for the console."""
    verdict = {1.0: "right", None: "unscorable"}.get(row["correct"], "wrong")
    text = row["completion"].replace("\n", "\n    ")
    return f"  {row['question']!r} (gold {row['gold']})\n    {text}\n    {verdict}, {row['tokens']} tokens"
