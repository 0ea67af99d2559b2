"""Which completions are shown, and how."""

import pytest

import rewards
from rollout import Completion
from samples import CHARACTERS, as_text, pick, sample_rows
from tasks import Question


def completion(i, correct, text="It is 4."):
    return Completion(i, 0, [1], [5, 6], [0.0, 0.0], True, text=text, correct=correct, reward=correct, advantage=0.5)


@pytest.mark.parametrize("right, wrong, shown", [(3, 97, (3, 13)), (50, 50, (8, 8)), (100, 0, (16, 0)), (2, 3, (2, 3)), (0, 0, (0, 0)), (97, 3, (13, 3))])
def test_half_are_right_where_there_are_enough(right, wrong, shown):
    chosen = pick([completion(i, float(i < right)) for i in range(right + wrong)])
    assert (sum(c.correct == 1 for c in chosen), sum(c.correct == 0 for c in chosen)) == shown
    assert len({c.question for c in chosen}) == len(chosen) and chosen == sorted(chosen, key=lambda c: c.question)


def test_H09_rows_are_bounded_and_hold_what_the_verifier_saw():
    questions = [Question("What is 2 + 2?", "4", "LAST_NUMBER", {}, "row 1"), Question([{"role": "user", "content": "2 + 3?"}], "5", "LAST_NUMBER", {}, "row 2")]
    rewards.read_golds(questions)
    rows = sample_rows(7, "train", [completion(0, 1.0), completion(1, 0.0, "x" * 9999)], questions)
    assert rows[0] == {
        "step": 7, "split": "train", "question": "What is 2 + 2?", "completion": "It is 4.", "answer": "4", "gold": "4", "reward": 1.0,
        "correct": 1.0, "tokens": 2, "finished": True, "advantage": 0.5,
    }
    assert rows[1]["question"] == "2 + 3?" and rows[1]["answer"] is None and len(rows[1]["completion"]) == CHARACTERS
    many = [completion(0, float(i % 2)) for i in range(1000)]
    assert len(sample_rows(7, "validation", many, questions)) == 16 and sample_rows(7, "validation", many, questions)[0]["advantage"] is None


def test_a_row_on_the_console():
    row = {"question": "q", "gold": "4", "completion": "It\nis 4.", "correct": None, "tokens": 2}
    assert as_text(row) == "  'q' (gold 4)\n    It\n    is 4.\n    unscorable, 2 tokens"
