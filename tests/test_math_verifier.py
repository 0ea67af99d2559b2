"""The MATH worker processes: what is equal, what is never computed, and what becomes of a stuck worker."""
import doctest
import os
import random
import signal
import subprocess
import sys
import threading
import time

import pytest

import math_verifier
from math_verifier import MathPool, last_boxed, math_answer, to_latex

# These read as powers whose comparison never ends, and pass the guard against towers of plain numbers.
STUCK = ["(x+1)^{9999}", "\\binom{99999}{50000}", "e^{10000000}"]


@pytest.fixture(scope="module")
def pool():
    pool = MathPool(2)
    yield pool
    pool.close()


@pytest.mark.parametrize("gold, answer, equal", [
    ("\\frac{1}{2}", "0.5", True), ("\\frac{1}{2}", "1/2", True), ("x^2-1", "(x+1)(x-1)", True),
    ("x^2-1", "x**2 - 1", True),
    ("\\frac{8}{3}", "2 2/3", True), ("2", "2 2/3", False), ("2\\sqrt{2}", "sqrt(8)", True),
    ("\\frac{\\sqrt{2}}{2}", "sin(pi/4)", True),
    ("5", "x=5", True), ("x=5", "5", True), ("(1,2)", "(1,2)", True), ("(1,2)", "(2,1)", False),
    ("\\{1,2\\}", "2, 1", True),
    ("28", "28\\%", True), ("0.28", "28%", False), ("8250", "8{,}250", True), ("8250", "250", False),
    ("350", "3.5e2", True),
    ("\\text{Friday}", "Friday", True), ("Friday", "yadirF", False), ("14", "14 \\text{ cm}", True),
    ("14", "15", False), ("\\pi", "pi", True)])
def test_equality(pool, gold, answer, equal):
    assert pool.run([(to_latex(gold), to_latex(answer))]) == [equal]


def test_which_golds_can_be_read(pool):
    assert pool.run([("\\frac{1}{2}", None), ("\\frac{1}{", None), ("((((", None), ("x+1", None)]) == [True, False,
        False, True]


@pytest.mark.parametrize("text, latex", [
    ("so \\boxed{\\frac{1}{2}}.", "\\frac{1}{2}"), ("\\boxed{1} or \\boxed{2}", "2"), ("\\boxed{14", None),
    ("1 \\boxed{", None),
    ("<answer>x+1</answer>", "x+1"), ("So $y$ is $\\frac{1}{2}$.", "\\frac{1}{2}"), ("\\[\n\\frac12\n\\]", "\\frac12"),
    ("We get #### 14", "14"), ("It is Friday.", "\\text{Friday}"), ("The trip took them 14 days", "\\frac{14}{1}"),
    ("", None), ("\n\n", None)])
def test_the_answer_of_a_completion(text, latex):
    assert math_answer(text) == latex


@pytest.mark.parametrize("answer", ["9**9**9", "5^{5^{5^{5^5}}}", "2**30**5", "2^{2^{2^{2^{2^{2}}}}}", "10^{10000000}",
                                    "(9^9)^{(9^9)}",
                                    "100000!", "3!!!", "9" * 2000])
def test_towers_and_long_answers_are_turned_away_unread(answer):
    assert to_latex(answer) is None


def test_powers_that_people_write_are_kept():
    assert [to_latex(answer) for answer in ("2^{2^3}", "2^{100}", "x^{100000}", "12!", "1^{99999999}")].count(None) == 0


def test_a_stuck_worker_is_ended_and_replaced_and_the_others_are_scored(pool):
    before, start = pool.stuck, time.monotonic()
    jobs = [("(x+2)^{9999}", STUCK[0]), ("14", "14"), ("1", "2"), ("(x+2)^{9999}", STUCK[1]), ("2", "2.0"),
            ("x^2", "x*x")]
    assert pool.run(jobs) == [False, True, False, False, True, True]
    assert pool.stuck > before and time.monotonic() - start < 20
    assert pool.run([("2", "4/2")]) == [True]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_worker_that_somebody_ends_costs_no_answer(how):
    pool = MathPool(1)
    assert pool.run([("2", "4/2")]) == [True]
    os.kill(pool._all[0].process.pid, how)
    assert pool.run([("3", "6/2"), ("3", "7/2")]) == [True, False] and pool.stuck == 0
    pool.close()


def test_a_worker_that_stands_still_is_ended_at_the_wall_limit(monkeypatch):
    pool = MathPool(1)
    assert pool.run([("2", "4/2")]) == [True]
    worker = pool._all[0]
    os.kill(worker.process.pid, signal.SIGSTOP)
    monkeypatch.setattr(math_verifier, "WALL_SECONDS", 1.0)
    timer = threading.Timer(0.2, monkeypatch.setattr, (math_verifier, "WALL_SECONDS",
                                                       30.0))  # for the worker that replaces it
    timer.start()
    assert pool.run([("3", "6/2"), ("4", "8/2")]) == [False, True] and pool.stuck == 1
    assert worker.process.poll() == -signal.SIGKILL
    pool.close()


def test_workers_end_with_their_parent():
    program = ("import os, math_verifier; pool = math_verifier.MathPool(1); pool.run([('1', '2/2')]); "
               "print(pool._all[0].process.pid, flush=True); os.kill(os.getpid(), 9)")
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True,
                            cwd=os.path.dirname(math_verifier.__file__)).stdout
    for _ in range(100):
        if not _runs(int(output)):
            break
        time.sleep(0.1)
    assert not _runs(int(output))


def _runs(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_missing_library_is_named(monkeypatch, tmp_path):
    (tmp_path / "math_verify.py").write_text("raise ImportError('not here')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(ValueError, match="pip install math-verify"):
        MathPool(1).run([("1", "2")])


def test_1000_different_completions_take_seconds(pool):
    rng = random.Random(0)
    jobs = [(f"{i}x+\\frac{{{i}}}{{7}}", rng.choice([f"\\frac{{{i}+{7 * i}x}}{{7}}", f"{i}x"])) for i in range(1, 1001)]
    start = time.monotonic()
    results = pool.run(jobs)
    assert time.monotonic() - start < 60  # about 4 s on two idle cores
    assert results == ["frac" in answer for _, answer in jobs]


def test_docstring_examples():
    assert doctest.testmod(math_verifier).failed == 0
    assert last_boxed("\\boxed{\\{1\\}}") == "\\{1\\}"
