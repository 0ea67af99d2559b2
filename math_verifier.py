r"""Mathematical equality of LaTeX or plain answers, decided by the math-verify library in worker processes.

The library's symbolic algebra can run for ever on a hostile answer, inside code that no Python signal or thread can
interrupt. So it runs in processes of its own, started as `python math_verifier.py SECONDS` and spoken to in JSON lines.
A worker sets a processor-time limit per answer after which the kernel ends it; the pool then scores that answer as
wrong, counts it, and starts another worker. Processor time, because the same answer then gets the same mark on a busy
machine. Nothing depends on the thread or process that asks. A worker whose parent dies ends too.

Model text is never evaluated: answers reach the library as LaTeX only, for its grammar (its reader of plain
expressions, which calls Python's own parser, is not used), and towers of powers or large factorials are turned away
unread. Percent signs are dropped on both sides, so that 28% is 28 here as it is for the other verify types.

Left out: choosing among several answers; the last one counts.
"""
import json
import os
import re
import resource
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from functools import lru_cache

from numbers_in_text import last_number

MATH_SECONDS = 1.0     # processor time for one answer
WALL_SECONDS = 30.0    # for a worker that neither answers nor computes, and for one that starts
WORKER_BYTES = 2 << 30  # address space of one worker
LONGEST_ANSWER = 1000  # characters; no gold is longer
LARGEST_POWER = 5000   # digits that a written-out power may have

_PLAIN_WORDS = {"sin", "cos", "tan", "log", "ln", "exp", "pi", "sqrt", "infty"}
_MATH_SEGMENT = re.compile(r"\$([^$]+)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]")
_BRACES = re.compile(r"\\[\\{}]|[{}]")
_UNICODE = str.maketrans({"\u2212": "-", "×": r"\times ", "÷": "/", "·": r"\cdot ", "π": r"\pi ", "∞": r"\infty ",
                          "≤": r"\leq ", "≥": r"\geq ", "\n": " ", "\r": " ", "$": "", "%": ""})


# ---- the answer in a completion -------------------------------------------------------------------------------------

def last_boxed(text: str) -> str | None:
    r"""What stands in the last `\boxed{...}`, braces balanced; None without a box or when the last one is not closed.

    >>> last_boxed(r"so \boxed{\frac{1}{2}}.")
    '\\frac{1}{2}'
    """
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth = 0
    for match in _BRACES.finditer(text, start + len("\\boxed")):
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if depth == 0:
            return text[start + len("\\boxed{"):match.start()]
    return None


def last_tagged(text: str) -> str | None:
    """What stands in the last closed `<answer>...</answer>`; None without one."""
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, max(end, 0))
    return text[start + len("<answer>"):end] if start >= 0 else None


def last_line(text: str) -> str:
    """The last line that is not blank."""
    return text.rstrip().rpartition("\n")[2].strip()


def math_answer(text: str) -> str | None:
    r"""The answer of a completion, or of a worked gold, as LaTeX; None when there is none that can be read.

    The last `\boxed{}`, else the last `<answer>`, else what follows the last `####`, else the last formula (`$...$`,
    `\(...\)`) of the last line, else what that line says after its last "is", "equals" or colon, else its last number.
    A box that is not closed is no answer.

    >>> math_answer("So the chance is 1/2.")
    '1/2'
    """
    if "\\boxed{" in text:
        return to_latex(last_boxed(text) or "")
    if (tagged := last_tagged(text)) is not None:
        return to_latex(tagged)
    line = last_line(text[-2 * LONGEST_ANSWER:])
    if line in ("\\]", "$$"):
        line = text[-2 * LONGEST_ANSWER:].replace("\n", " ")
    line = line.rpartition("####")[2].strip()
    formulas = _MATH_SEGMENT.findall(line.replace("$$", "$"))
    if formulas:
        return to_latex("".join(formulas[-1]))
    said = re.split(r":\s|\s(?:is|are|equals)\s", line)[-1].strip(" .,;!*")
    if "\\" in said or not (set(re.findall(r"[A-Za-z]{3,}", said)) - _PLAIN_WORDS) or len(said.split()) == 1:
        return to_latex(said)
    number = last_number(said)
    return None if number is None else f"{'-' * (number < 0)}\\frac{{{abs(number.numerator)}}}{{{number.denominator}}}"


def to_latex(answer: str) -> str | None:
    r"""One answer in the form that the library reads: no dollars, no percent signs, plain spellings as LaTeX; None when
    too long or too large.

    >>> to_latex("2 2/3"), to_latex("x**2"), to_latex("3.5e2"), to_latex("9**9**9")
    ('2\\frac{2}{3}', 'x^2', '3.5\\cdot 10^{2}', None)
    """
    if len(answer) > LONGEST_ANSWER:
        return None
    answer = re.sub(r"\\[$%!]", "", answer).translate(_UNICODE).replace("**", "^").strip(" .,;")
    if "\\" not in answer:
        answer = re.sub(r"([0-9]) +([0-9]+)/([0-9]+)", r"\1\\frac{\2}{\3}", answer)
        answer = re.sub(r"([0-9])[eE]([-+]?[0-9]+)", r"\1\\cdot 10^{\2}", answer)
        answer = re.sub(r"(?<![A-Za-z\\])(sin|cos|tan|log|ln|exp|pi|infty)(?![A-Za-z])", r"\\\1 ", answer)
        # A word, not a product of letters.
        answer = re.sub(r"(?<![A-Za-z\\])(?!sqrt|frac|cdot|infty)[A-Za-z]{4,}", r"\\text{\g<0>}", answer)
    return answer if answer and not _too_large(answer) else None


def _too_large(answer: str) -> bool:
    """Whether a power or factorial of plain numbers in it would have more digits than are worth computing."""
    bare = re.sub(r"[{}()\s]|\\left|\\right", "", answer)
    if re.search(r"[0-9]{5,}!", bare) or "!!!" in bare:
        return True
    for chain in re.findall(r"[0-9]+(?:\^[-+]?[0-9]+)+", bare):
        *bases, size = (int(number.lstrip("-+")[:9]) for number in chain.split("^"))
        for base in reversed(bases):
            if base > 1 and size * len(str(base)) > LARGEST_POWER:
                return True
            size = base ** size
    return False


# ---- the pool, in the process that trains ---------------------------------------------------------------------------

class _Worker:
    def __init__(self, seconds: float):
        self.process = subprocess.Popen([sys.executable, os.path.abspath(__file__), str(seconds)],
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                                        start_new_session=True)  # a Ctrl-C is the trainer's to handle
        self.job = None  # index of the job at hand, -1 while starting, None when idle
        self.expect(-1)

    def expect(self, job: int) -> None:
        self.job, self.deadline = job, time.monotonic() + WALL_SECONDS

    def end(self) -> int:
        self.process.kill()
        self.process.stdin.close()
        self.process.stdout.close()
        return self.process.wait()


class MathPool:
    """Worker processes that compare answers; they start at the first call and stay. One call at a time (calls from
    other threads wait).

    seconds: processor time per answer. `stuck` counts the answers that were given up: over the limit, or twice the end
    of their worker.
    """

    def __init__(self, workers: int, seconds: float = MATH_SECONDS):
        self.workers, self.seconds, self.stuck, self._failed_starts = workers, seconds, 0, 0
        self._all: list[_Worker] = []
        self._lock = threading.Lock()

    def run(self, jobs: list[tuple[str, str | None]]) -> list[bool]:
        """For each (gold, answer) whether they are equal; for (gold, None) whether the gold can be read. In order."""
        with self._lock:
            distinct = list(dict.fromkeys(jobs))
            results = dict(zip(distinct, self._run(distinct)))
            return [results[job] for job in jobs]

    def _run(self, jobs):
        results, lost = [False] * len(jobs), set()
        waiting = deque(range(len(jobs)))
        while waiting or any(worker.job is not None and worker.job >= 0 for worker in self._all):
            while len(self._all) < min(self.workers, len(jobs)):
                self._all.append(_Worker(self.seconds))
            for worker in list(self._all):
                if worker.job is None and waiting:
                    worker.expect(waiting.popleft())
                    try:
                        worker.process.stdin.write(json.dumps(jobs[worker.job]).encode() + b"\n")
                        worker.process.stdin.flush()
                    except BrokenPipeError:
                        pass  # it died while idle: reading finds out
            for worker in self._heard():
                line = worker.process.stdout.readline() if time.monotonic() < worker.deadline else b""
                if line:
                    if worker.job >= 0:
                        results[worker.job] = line == b"1\n"
                    worker.job, self._failed_starts = None, 0
                    continue
                self._all.remove(worker)
                status = worker.end()
                if worker.job < 0:
                    self._failed_starts += 1
                    if self._failed_starts >= 3:
                        raise ValueError("The workers of MATH do not start: install the math-verify package "
                                         "(pip install math-verify).")
                elif status == -signal.SIGPROF or time.monotonic() >= worker.deadline or worker.job in lost:
                    self.stuck += 1
                else:  # it died of something else, perhaps not of this answer: once more with another
                    lost.add(worker.job)
                    waiting.appendleft(worker.job)
        return results

    def _heard(self) -> list[_Worker]:
        """Waits; the busy workers that have written, ended, or run out of time."""
        busy = [worker for worker in self._all if worker.job is not None]
        with selectors.DefaultSelector() as selector:
            for worker in busy:
                selector.register(worker.process.stdout, selectors.EVENT_READ, worker)
            first = min(worker.deadline for worker in busy)
            ready = [key.data for key, _ in selector.select(max(0.0, first - time.monotonic()))]
        return ready or [worker for worker in busy if worker.deadline <= time.monotonic()]

    def close(self) -> None:
        """Ends the workers; a later call starts new ones."""
        with self._lock:
            while self._all:
                self._all.pop().end()


# ---- the worker -----------------------------------------------------------------------------------------------------

def _work(seconds: float) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (WORKER_BYTES, WORKER_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # whatever the library prints must not be taken for an answer
    import logging

    from math_verify import LatexExtractionConfig, parse, verify
    logging.disable(logging.CRITICAL)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # the kernel's own end of the process, not a Python handler

    @lru_cache(maxsize=4096)
    def read(latex):
        return parse(f"${latex}$", [LatexExtractionConfig()], fallback_mode="no_fallback", parsing_timeout=None)

    def answer(gold, given):
        try:
            return bool(read(gold)) if given is None else verify(read(gold), read(given), timeout_seconds=None)
        except (Exception, RecursionError):
            return False

    # The library's parser is slow on each kind of expression it meets first: that must not count against the first
    # answers.
    for gold, given in [("\\frac{1}{2}", "0.5"), ("(x+1)(x-1)", "x^2-1"), ("(1,2)", "\\{1,2\\}"),
                        ("\\sqrt{2}+\\pi", "2"), ("x=5", "1<x<2")]:
        answer(gold, given)
    answers.write(b"ready\n")
    for line in sys.stdin.buffer:
        gold, given = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, seconds)
        equal = answer(gold, given)
        signal.setitimer(signal.ITIMER_PROF, 0)
        answers.write(b"1\n" if equal else b"0\n")


if __name__ == "__main__":
    _work(float(sys.argv[1]))
