"""Reading numbers out of text: every accepted spelling, exactly, anywhere; nothing raises; linear time."""
import doctest
import time
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import numbers_in_text
from numbers_in_text import MAX_DIGITS, first_number, last_number, only_number, stated_number

SPELLED = [
    ("14", 14), ("-3", -3), ("\u22123", -3), ("+3", 3), ("007", 7), ("29.00", 29), (".5", "1/2"), ("-.5", "-1/2"),
    ("8,250", 8250), ("8{,}250", 8250), ("10,\\!080", 10080), ("-1,234.5", "-2469/2"),
    ("1,234,567.89", "123456789/100"),
    ("3.5e2", 350), ("1.2e+3", 1200), ("5E-1", "1/2"), ("2/3", "2/3"), ("-4/6", "-2/3"), ("2 / 3", "2/3"),
    ("2/-3", "-2/3"), ("2 2/3", "8/3"), ("-2 1/2", "-5/2"), ("4 10/3", "22/3"), ("\\frac{2}{3}", "2/3"),
    ("\\dfrac{2}{3}", "2/3"), ("\\frac12", "1/2"), ("-\\frac{1}{2}", "-1/2"), ("\\frac{-1}{2}", "-1/2"),
    ("2\\frac{2}{3}", "8/3"), ("2 \\tfrac{2}{3}", "8/3"), ("28%", 28), ("$5", 5), ("-$5", -5), ("\\$5", 5),
    ("0e999999999999", 0), ("1" + "0" * 900, 10 ** 900),
]


@pytest.mark.parametrize("text, value", SPELLED)
@pytest.mark.parametrize("frame", ["{}", "It is {}.", "It is {}, all told", "({})", "**{}**", "\\boxed{{{}}}", "x={}\n",
                                   "<b>{}</b>"])
def test_accepted_spellings(text, value, frame):
    assert last_number(frame.format(text)) == first_number(frame.format(text)) == Fraction(value)


@pytest.mark.parametrize("text, value", [
    ("10-3", 3), ("10 - 3", 3), ("10 -3", -3), ("x-3", 3), ("(2)-3", 3), ("[2]\u22123", 3), ("it is \u20133", 3),
    ("- 3", 3),
    ("20,00", 0), ("1,2", 2), ("1234,567", 567), ("0,123", 123), ("1,2345", 2345), ("1,234, 5", 5), ("14 m\u00b2", 14),
    ("14\u00b2", 14),
    ("...5", 5), ("No.5", 5), ("14.Then", 14), ("14days", 14), ("T3", 3), ("10:30", 30)])
def test_what_stands_around_a_number(text, value):
    assert last_number(text) == value


@pytest.mark.parametrize("text", ["", "none", "\uff11\uff14", "\u0661\u0664", "\u2462", "1.234,5", "3 or 1.234,5",
                                  "1.2.3", "3 or 1.2.3",
                                  "1/2/2024", "5/0", "2 1/0", "\\frac{1}{0}", "1e999999999", "1e-999999999",
                                  "1e" + "9" * 5000, "9" * 5000])
def test_no_value(text):
    assert last_number(text) is None


@st.composite
def spelled_numbers(draw):
    """(text, value): an integer, decimal, exponent, fraction or mixed number in one of its spellings."""
    sign = draw(st.sampled_from(["", "", "+", "-", "\u2212"]))
    whole = draw(st.integers(0, 10 ** 12))
    comma = draw(st.sampled_from(["", ",", "{,}", ",\\!"]))
    text, value = f"{whole:,}".replace(",", comma) if whole > 999 else str(whole), Fraction(whole)
    kind = draw(st.sampled_from(["integer", "decimal", "exponent", "fraction", "mixed"]))
    top, bottom = draw(st.integers(0, 10 ** 4)), draw(st.integers(1, 10 ** 4))
    if kind in ("decimal", "exponent"):
        decimals = draw(st.text("0123456789", min_size=1, max_size=12))
        text, value = f"{text}.{decimals}", value + Fraction(int(decimals), 10 ** len(decimals))
    if kind == "exponent":
        power = draw(st.integers(-30, 30))
        text, value = f"{text}{draw(st.sampled_from('eE'))}{power}", value * Fraction(10) ** power
    if kind == "fraction":
        text = draw(st.sampled_from([f"{text}/{bottom}", f"\\frac{{{text}}}{{{bottom}}}",
                                     f"\\dfrac{{{text}}}{{{bottom}}}"]))
        value /= bottom
    if kind == "mixed":
        text += draw(st.sampled_from([f" {top}/{bottom}", f"\\frac{{{top}}}{{{bottom}}}",
                                      f" \\tfrac{{{top}}}{{{bottom}}}"]))
        value += Fraction(top, bottom)
    return sign + text, -value if sign in ("-", "\u2212") else value


WITHOUT_DIGITS = st.text(st.characters(blacklist_categories=["Nd", "Cs"]), max_size=60)


@settings(max_examples=400, deadline=None)
@given(spelled_numbers(), WITHOUT_DIGITS, WITHOUT_DIGITS, st.sampled_from(["\n", " ", ": ", "= ", "**", "(", "$",
    "\""]),
       st.sampled_from(["", "\n", ", ", ". ", ") ", "**", "%", " days ", "$", "!", "?"]))
def test_any_spelling_in_any_text_reads_as_its_value(number, before, after, opening, closing):
    text, value = number
    assert last_number(before + opening + text + closing + after) == value
    assert first_number(before + opening + text + closing + after) == value


@settings(max_examples=300, deadline=None)
@given(st.lists(spelled_numbers(), min_size=1, max_size=6))
def test_the_last_of_several_numbers_counts(numbers):
    assert last_number(" and ".join(text for text, _ in numbers)) == numbers[-1][1]
    assert first_number(" and ".join(text for text, _ in numbers)) == numbers[0][1]


@settings(max_examples=400, deadline=None)
@given(st.one_of(st.text(), st.lists(st.sampled_from(list("0123456789+-\u2212.,{}!/ eE\\()=^x$%") + ["\\frac",
    "\\boxed{", "1,000"])).map("".join)))
def test_no_text_raises(text):
    for read in (last_number, first_number, stated_number, only_number):
        assert read(text) is None or isinstance(read(text), Fraction)


@pytest.mark.parametrize("text, value", [
    ("yes", None), ("x+1", None), ("x + 1", None), ("6+8", None), ("2^3", None), ("2x", None), ("x^2", None),
    ("5!", None),
    ("2\\pi", None), ("\\sqrt{2}", None), ("\\frac{\\pi}{2}", None), ("x-1", None), ("1-x", None), ("2*(3)", None),
    ("6+8=14", 14), ("6+8=14, so #### 14", 14), ("It takes 14 days.", 14), ("14 cm^2", 14), ("14\\text{ m}^{2}", 14),
    ("x = -3", -3),
    ("14 = x", 14), ("Answer - 14", 14), ("**14**", 14), ("\\text{14}", 14), ("90^\\circ", 90), ("28\\%", 28),
    ("14 m/s", 14), ("2/3", "2/3")])
def test_a_part_of_an_expression_is_not_stated(text, value):
    assert stated_number(text) == (value if value is None else Fraction(value))


def test_two_numbers_to_choose_from_are_not_the_only_one():
    assert only_number("13 or 14") is None and stated_number("13 or 14") == 14 and only_number("14") == 14


def test_a_number_longer_than_the_limit_never_leaves_a_fragment():
    for size in range(MAX_DIGITS, 8 * MAX_DIGITS, 777):
        assert last_number("1" + "0" * size) in (None, 10 ** MAX_DIGITS)
        assert last_number("3/" * size + "3") is None


HOSTILE = ["1,1,1,", "1", "1 ", "-", "1/", "1.", "1e", "\\frac{1", "\\frac ", "1,111", ",111", "1,111,", "1.111,",
           "1 1/", "1 11", "=", "1+",
           "x^", "\\boxed{", "1 \\frac", "(", "\\!,", "1{,}111", " ", "\n", "{", "<answer>", "a\u0301"]


@pytest.mark.parametrize("unit", HOSTILE)
@pytest.mark.parametrize("head, tail", [("", ""), ("1", "1"), ("\\frac{", "")])
def test_100000_hostile_characters_take_under_a_tenth_of_a_second(unit, head, tail):
    text = head + unit * (100_000 // len(unit)) + tail
    for read in (last_number, first_number):
        assert min(_seconds(read, text) for _ in range(3)) < 0.1


def _seconds(function, text):
    start = time.perf_counter()
    function(text)
    return time.perf_counter() - start


def test_docstring_examples():
    assert doctest.testmod(numbers_in_text).failed == 0
