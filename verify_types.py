r"""The verify types: how the gold answer is read and how a completion is graded, by name. Rules only; no I/O.

A verify type is a name in VERIFIERS or `module:function`. Names are trimmed and case does not matter. One example each,
gold -> a completion worth 1.0:

    LAST_NUMBER      14              `It takes 14 days.`          the last number, wherever it stands
    BOXED_NUMERICAL  \frac{1}{2}     `so \boxed{0.5}`             the one number in the last `\boxed{}`
    ANSWER_TAG       14              `<answer>14 days</answer>`   the one number inside the one `<answer>`
    HASH_NUMBER      6+8=14 #### 14  `... #### 14`                the first number on the line after the last `####`
    EXACT            Paris           `I say:\n Paris`             text of the last `<answer>`, else of the last line
    CHOICE           B               `Answer: (B)`                the last letter in one of the usual forms
    MATH             x^2-1           `\boxed{(x+1)(x-1)}`         mathematical equality, see math_verifier.py
    COUNTDOWN        24              `<answer>3*8*1</answer>`     each number of the row's field `numbers` used once
    INTERVAL         3.14 ± 0.01     `about 3.1416`               the last number; also `± 1%`, or a field `tolerance`
    my_rules:score   (whatever)      whatever score(completion, row) likes

Numbers are compared exactly by value (numbers_in_text.py says what a number is). In BOXED_NUMERICAL and ANSWER_TAG
units may follow the number, but two numbers to choose from, or an expression, are no answer. A verifier sees the
completion alone, as cut at its first end-of-sequence token.

A completion is worth 1.0 or 0.0 (a user's verifier may give any finite number), or None: unscorable, so that the
trainer leaves it out. Model text is never evaluated, never makes a verifier raise, and is read in linear time. Nothing
here depends on the thread or process.

Left out: whether two formulas are equal, which math_verifier.py's worker processes decide.
"""
from __future__ import annotations

import importlib
import operator
import os
import re
import sys
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from math_verifier import last_boxed, last_line, last_tagged, math_answer
from numbers_in_text import first_number, last_number, only_number, stated_number

LONGEST_CONTENT = 2000  # characters of a box, a tag or a line that may be an answer; longer ones are none


@dataclass(frozen=True)
class Verifier:
    """How one verify type grades.

    read_gold(answer, row): the gold, read once at load; raises ValueError with the reason when it cannot be read.
    find(completion): the answer in a completion; None when there is none (worth 0.0).
    equal(found, gold): whether the answer is right.
    has_format: the answer needs a marker, so that accuracy is reported with it (strict) and without (lenient: the last
    number counts too).
    """
    read_gold: Callable[[str, dict], object]
    find: Callable[[str], object]
    equal: Callable[[object, object], bool] = operator.eq
    has_format: bool = False


def _gold_number(text: str) -> Fraction:
    number = stated_number(text)
    if number is None:
        raise ValueError("it states no number; give a number, or worked text that ends in one")
    return number


def _gold_after(find: Callable[[str], str | None]) -> Callable[[str, dict], Fraction]:
    """Reads golds that may be whole solutions, with the marker, or the bare number."""
    def read(answer, row):
        marked = find(answer)
        return _gold_number(answer if marked is None else marked)
    return read


def _number_in(content: str | None) -> Fraction | None:
    return only_number(content) if content and len(content) <= LONGEST_CONTENT else None


def _the_one_tagged(text: str) -> str | None:
    return last_tagged(text) if text.count("<answer>") == text.count("</answer>") == 1 else None


def _after_hashes(text: str) -> str | None:
    _, marker, rest = text.rpartition("####")
    return rest.lstrip().partition("\n")[0] if marker else None


def _fold(text: str | None) -> str | None:
    """NFC, trimmed, white space folded; None when nothing is left. Longer text is no answer: NFC takes quadratic time
    on hostile text."""
    words = " ".join((text or "").split())
    return unicodedata.normalize("NFC", words) if 0 < len(words) <= LONGEST_CONTENT else None


def _stated_text(text: str) -> str | None:
    tagged = last_tagged(text)
    return _fold(last_line(text) if tagged is None else tagged)


def _gold_text(answer: str, row: dict) -> str:
    if (text := _fold(answer)) is None:
        raise ValueError(f"it is empty or longer than {LONGEST_CONTENT} characters; give the text that is right")
    return text


# Each form starts with a fixed character or class and repeats at most a few times: quick and linear.
_CHOICES = [re.compile(pattern, re.MULTILINE) for pattern in (
    r"\\boxed\{\s{0,3}(?:\\(?:text|mathrm|textbf|mathbf)\{)?\s{0,3}\(?([A-Za-z])\)?[.:]?\s{0,3}\}",
    r"<answer>\s{0,3}\(?([A-Za-z])\)?[.:]?\s{0,3}</answer>",
    r"(?:[Aa]nswer|ANSWER|[Cc]hoice|[Oo]ption)(?:\s{1,3}is)?[\s:*(\[$]{1,8}([A-Z])(?![\w'’])",
    r"([A-Z])(?<![\w.'’-][A-Z])(?=(?:\*\*)?(?:[.):\]]|[ \t]{0,3}$))",
)]


def _last_choice(text: str) -> str | None:
    ends = []
    for form in _CHOICES:
        match = None
        for match in form.finditer(text):
            pass
        if match:
            ends.append((match.start(1), match[1].upper()))
    return max(ends)[1] if ends else None


def _gold_choice(answer: str, row: dict) -> str:
    letter = answer.strip().upper() if len(answer.strip()) == 1 else _last_choice(answer)
    if letter is None or not "A" <= letter <= "Z":
        raise ValueError("it is not a single letter A-Z; give the letter of the right choice")
    return letter


def _gold_math(answer: str, row: dict) -> str:
    if (latex := math_answer(answer)) is None:
        raise ValueError("it is not one formula, or too large a number; give LaTeX, a plain formula, or a solution "
                         "with a \\boxed{}")
    return latex


_EXPRESSION_SPELLINGS = {"×": "*", "\\times": "*", "\\cdot": "*", "·": "*", "÷": "/", "\\div": "/", "\u2212": "-",
                         "\\left": "", "\\right": "", "$": ""}
_EXPRESSION_TOKEN = re.compile(r"\s*(?:([0-9]+(?:\.[0-9]+)?)|([-+*/()]))")
_PRECEDENCE = {"+": 1, "-": 1, "*": 2, "/": 2}
_APPLY = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}


def _gold_countdown(answer: str, row: dict) -> tuple[Fraction, list[Fraction]]:
    numbers = row.get("numbers", row.get("nums"))
    if numbers is None:
        raise ValueError("COUNTDOWN also needs the row's field numbers, a list such as [3, 8, 1]")
    spelled = re.findall(r"[^\s,;\[\]()]+", numbers) if isinstance(numbers, str) else list(map(str, numbers))
    if not spelled or not all(re.fullmatch(r"[0-9]{1,100}(\.[0-9]{1,100})?", number) for number in spelled):
        raise ValueError(f"its numbers {str(numbers):.200} are not all plain numbers without sign; "
                         "give a list such as [3, 8, 1]")
    return _gold_number(answer), sorted(map(Fraction, spelled))


def _expression(text: str) -> str | None:
    """The expression of a COUNTDOWN completion: the last `<answer>`, else the last box, else the last line after its
    last colon."""
    found = last_tagged(text)
    if found is None:
        found = last_boxed(text) if "\\boxed{" in text else last_line(text).rpartition(":")[2]
    if not found or len(found) > LONGEST_CONTENT:
        return None
    for spelling, plain in _EXPRESSION_SPELLINGS.items():
        found = found.replace(spelling, plain)
    found = found.strip(" .\n")
    return found[2:-2] if found.startswith("**") and found.endswith("**") else found or None


def _reaches(expression: str, gold: tuple[Fraction, list[Fraction]]) -> bool:
    """Whether the expression (`3*8*1`, or `3*8*1 = 24`) has the target's value and uses each given number once.

    Grammar: + - * / and brackets over plain numbers, a minus at the start of an expression or bracket; exact fractions,
    two stacks, no recursion.
    """
    target, given = gold
    expression, equals, claimed = expression.partition("=")
    if equals and only_number(claimed) != target:
        return False
    tokens, position, expression = [], 0, expression.rstrip()
    while position < len(expression):
        match = _EXPRESSION_TOKEN.match(expression, position)
        if not match:
            return False
        tokens.append(Fraction(match[1]) if match[1] else match[2])
        position = match.end()
    if sorted(token for token in tokens if isinstance(token, Fraction)) != given:
        return False
    values, waiting, operand_next = [], [], True

    def apply_down_to(precedence):
        while waiting and waiting[-1] != "(" and _PRECEDENCE[waiting[-1]] >= precedence:
            right, left = values.pop(), values.pop()
            values.append(_APPLY[waiting.pop()](left, right))

    try:
        for before, token in zip(["(", *tokens], tokens):
            if isinstance(token, Fraction) or token == "(":
                if not operand_next:
                    return False
                (waiting if token == "(" else values).append(token)
                operand_next = token == "("
            elif token == ")":
                if operand_next:
                    return False
                apply_down_to(1)
                if not waiting:
                    return False
                waiting.pop()
            elif operand_next:
                if token != "-" or before != "(":
                    return False
                values.append(Fraction(0))
                waiting.append("-")
            else:
                apply_down_to(_PRECEDENCE[token])
                waiting.append(token)
                operand_next = True
        if operand_next:
            return False
        apply_down_to(1)
    except ZeroDivisionError:
        return False
    return not waiting and values == [target]


def _gold_interval(answer: str, row: dict) -> tuple[Fraction, Fraction]:
    """(low, high), both inside. The tolerance stands in the answer (`3.14 ± 0.01`, `+-`, `+/-`, `\\pm`) or the row's
    field `tolerance`."""
    middle, *after = re.split(r"±|\+/?-|\\pm", answer, maxsplit=1)
    tolerance = after[0] if after else str(row.get("tolerance", ""))
    value, width = _gold_number(middle), stated_number(tolerance)
    if width is None or width < 0:
        raise ValueError("INTERVAL also needs a tolerance of 0 or more: write 3.14 ± 0.01 or 3.14 ± 1%, "
                         "or give the row a field tolerance")
    if "%" in tolerance:
        width *= abs(value) / 100
    return value - width, value + width


VERIFIERS: dict[str, Verifier] = {
    "LAST_NUMBER": Verifier(lambda answer, row: _gold_number(answer), last_number),
    "BOXED_NUMERICAL": Verifier(_gold_after(last_boxed), lambda text: _number_in(last_boxed(text)), has_format=True),
    "ANSWER_TAG": Verifier(_gold_after(last_tagged), lambda text: _number_in(_the_one_tagged(text)), has_format=True),
    "HASH_NUMBER": Verifier(_gold_after(_after_hashes), lambda text: first_number(_after_hashes(text) or ""),
                            has_format=True),
    "EXACT": Verifier(_gold_text, _stated_text),
    "CHOICE": Verifier(_gold_choice, _last_choice),
    "MATH": Verifier(_gold_math, math_answer),  # equality is decided in the worker processes
    "COUNTDOWN": Verifier(_gold_countdown, _expression, _reaches),
    "INTERVAL": Verifier(_gold_interval, last_number, lambda found, gold: gold[0] <= found <= gold[1]),
}


def import_verifier(name: str) -> Callable[[str, dict], float]:
    """The user's verifier `module:function`; ValueError with the reason when there is none."""
    module, _, function = name.partition(":")
    if os.getcwd() not in sys.path:  # torchrun puts the script's folder there, not the one that the user stands in
        sys.path.append(os.getcwd())
    try:
        found = getattr(importlib.import_module(module), function)
    except Exception as error:
        raise ValueError(f"it cannot be imported ({type(error).__name__}: {error}); check the name and that its folder "
                         "is on PYTHONPATH") from error
    if not callable(found):
        raise ValueError(f"{function} is not a function; name one that takes (completion, row)")
    return found
