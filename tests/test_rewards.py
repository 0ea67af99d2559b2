"""Verify types, golds, grading, shaping terms and the command: known faults of other graders, then the whole kind."""
import concurrent.futures
import doctest
import json
import logging
import math
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import reward_terms
import rewards
import verify_types
from reward_terms import format_term, overlong_term, repetition_term, shaped_reward
from rewards import extract_answer, grade, lenient, read_golds, take_faults
from verify_types import VERIFIERS, Verifier

ROOT = os.path.dirname(os.path.abspath(rewards.__file__))


@dataclass
class Question:
    answer: str
    verify_type: str = "LAST_NUMBER"
    row: dict = field(default_factory=dict)
    place: str = "train.jsonl row 3"
    gold: object = None


def question(gold, verify_type="LAST_NUMBER", **row):
    made = Question(gold, verify_type, row)
    read_golds([made])
    return made


def score(text, gold, verify_type="LAST_NUMBER", **row):
    reward, = grade([(text, question(gold, verify_type, **row))])
    return reward


def refusal(gold, verify_type="LAST_NUMBER", **row):
    with pytest.raises(ValueError) as error:
        question(gold, verify_type, **row)
    message = str(error.value)
    assert message.startswith("train.jsonl row 3: ") and "\n" not in message
    return message


# ---- area a: answers in completions ---------------------------------------------------------------------------------

@pytest.mark.parametrize("text", ["That makes 14 marbles, all told.", "It takes 14 days."])
def test_A01_punctuation_and_words_after_the_number(text):
    assert score(text, "14") == 1.0


@pytest.mark.parametrize("text, verify_type", [("\\boxed{8,250}", "BOXED_NUMERICAL"), ("\\boxed{8,250}", "LAST_NUMBER"),
                                               ("so it costs $8{,}250.", "LAST_NUMBER"), ("\\boxed{8{,}250}", "MATH")])
def test_A03_thousands_marks(text, verify_type):
    assert score(text, "8250", verify_type) == 1.0 and score(text, "250", verify_type) == 0.0


def test_A05_equal_by_value_not_by_text():
    assert [score("The total is $29.00.", "29"), score("It is 14.", "14"), score("14", "14.0")] == [1.0] * 3
    assert score("0.1", "0.10000000000000000001") == 0.0  # equal as floats


def test_A06_last_number_by_the_letter():
    assert score("... #### 18", "18") == 1.0  # what comes before the first end-of-sequence token
    assert score("... #### 18 Question: next... #### 7", "18") == 0.0
    assert score("... #### 18 Question: next... #### 7", "7") == 1.0


@pytest.mark.parametrize("verify_type", ["BOXED_NUMERICAL", "ANSWER_TAG", "HASH_NUMBER"])
def test_A08_no_marker_no_reward(verify_type):
    assert score("Maybe 3, maybe 14", "14", verify_type) == 0.0
    assert score("Maybe 3, maybe 14", "14") == 1.0


@pytest.mark.parametrize("verify_type", ["LAST_NUMBER", "BOXED_NUMERICAL", "ANSWER_TAG", "HASH_NUMBER", "EXACT", "MATH",
                                         "INTERVAL"])
@pytest.mark.parametrize("text", ["<answer></answer>", "", " \n", "\\boxed{}", "####", "<answer> </answer>"])
def test_A10_an_empty_answer_never_scores(text, verify_type):
    assert score(text, "14 ± 1" if verify_type == "INTERVAL" else "14", verify_type) == 0.0


@pytest.mark.parametrize("verify_type, frame", [("LAST_NUMBER", "The answer is {}"),
                                                ("BOXED_NUMERICAL", "\\boxed{{{}}}"), ("EXACT", "{}"),
                                                ("ANSWER_TAG", "<answer>{}</answer>"), ("HASH_NUMBER", "#### {}"),
                                                ("MATH", "{}")])
@pytest.mark.parametrize("said, gold", [("14", "1"), ("100", "10"), ("21", "1"), ("1", "14")])
def test_A11_a_part_of_a_number_is_not_the_number(said, gold, verify_type, frame):
    assert score(frame.format(said), gold, verify_type) == 0.0


def test_A12_unfinished_thought_is_read_by_the_letter():
    text = "<think> it could be 14, let me"
    assert score(text, "14") == 1.0 and format_term(text) == 0.0
    assert score(text, "14", "ANSWER_TAG") == 0.0


def test_A13_format_needs_each_tag_once():
    text = "<think>a</think><think>b</think><think>c</think><answer>13</answer><answer>14</answer>"
    assert format_term(text) == 0.0 and score(text, "14") == 1.0 and score(text, "14", "ANSWER_TAG") == 0.0


def test_A14_newlines_inside_the_tags():
    text = "<think>\n6 and 8\n</think>\n<answer>\n14\n</answer>"
    assert format_term(text) == 1.0
    assert score(text, "14") == score(text, "14", "ANSWER_TAG") == score(text, "14", "EXACT") == 1.0


@pytest.mark.parametrize("verify_type", ["LAST_NUMBER", "ANSWER_TAG", "EXACT", "MATH"])
def test_A16_the_answer_not_the_thought(verify_type):
    assert score("<think>14</think><answer>15</answer>", "14", verify_type) == 0.0


def test_A17_towers_of_powers_are_not_computed():
    texts = ["Answer: 9**9**9", "\\boxed{5^{5^{5^{5^5}}}}", "2**30**5", "14", "\\boxed{14}", "15", "7+7", "28/2"]
    asked = question("14", "MATH")
    grade([("7+7", asked)])
    start = time.monotonic()
    assert grade([(text, asked) for text in texts]) == [0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 1.0, 1.0]
    assert time.monotonic() - start < 3
    assert [score(text, "14") for text in texts[:3]] == [0.0] * 3
    assert [score(text, "14", "BOXED_NUMERICAL") for text in texts[:3]] == [0.0] * 3


def test_A19_text_cut_at_the_length_limit_takes_linear_time():
    text = "<answer>" * 5000 + "1," * 50_000
    for verify_type, gold in GOLDS.items():
        asked = question(gold, verify_type, **ROW)
        assert _seconds(text, asked) < 0.1 and grade([(text, asked)]) == [0.0], verify_type


@pytest.mark.parametrize("verify_type", ["LAST_NUMBER", "MATH"])
def test_A20_T29_the_same_in_any_thread(verify_type):
    asked = question("14", verify_type)
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        results = list(threads.map(lambda text: grade([(text, asked)]), ["14", "28/2", "15", "13"] * 5))
    assert results == [grade([(text, asked)]) for text in ["14", "28/2", "15", "13"] * 5]
    assert results[0] == [1.0] and results[2] == [0.0]


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_A20_the_same_in_any_process(method):
    assert score("28/2", "14", "MATH") == 1.0  # the parent has workers running that a forked child must not use
    with multiprocessing.get_context(method).Pool(1) as processes:
        assert processes.apply(_score_in_a_process) == [1.0, 0.0, 1.0]
    assert score("28/2", "14", "MATH") == 1.0


def _score_in_a_process():
    return [score("28/2", "14", "MATH"), score("27/2", "14", "MATH"), score("It is 14", "14")]


def test_A21_signs_of_golds():
    assert score("It falls to -3.", "... #### -3") == 1.0 and score("It falls to 3.", "... #### -3") == 0.0
    assert score("-1234.5", "-1,234.5") == 1.0 and score("-1,234.5", "-1234.5") == 1.0


def test_A23_unicode_minus_is_a_sign_and_an_en_dash_is_not():
    assert score("The result is \u22123", "-3") == 1.0 and score("The result is \u22123", "3") == 0.0
    assert score("The result is \u20133", "-3") == 0.0 and score("The result is \u20133", "3") == 1.0


def test_A24_mixed_numbers_are_whole():
    assert [score("It is 2 2/3", gold) for gold in ("2", "3", "8/3", "2/3")] == [0.0, 0.0, 1.0, 0.0]
    assert [score("4 10/3", gold) for gold in ("10", "3", "22/3")] == [0.0, 0.0, 1.0]


@pytest.mark.parametrize("text", ["The chance is 2/3", "\\frac{2}{3}", "\\boxed{\\frac{2}{3}}"])
def test_A25_fractions_are_whole(text):
    assert [score(text, gold) for gold in ("2/3", "\\frac{2}{3}", "3", "2")] == [1.0, 1.0, 0.0, 0.0]


def test_A26_braces_are_balanced_and_an_open_box_is_no_answer():
    assert score("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}", "BOXED_NUMERICAL") == 1.0
    assert score("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}", "MATH") == 1.0
    assert score("\\boxed{14", "14", "BOXED_NUMERICAL") == score("\\boxed{14", "14", "MATH") == 0.0
    assert score("\\boxed{14", "14") == 1.0
    assert score("\\boxed{14} then \\boxed{15}", "14", "BOXED_NUMERICAL") == 0.0


@pytest.mark.parametrize("verify_type, text", [("LAST_NUMBER", "a 28% rise"), ("BOXED_NUMERICAL", "\\boxed{28\\%}"),
                                               ("MATH", "\\boxed{28\\%}")])
def test_A28_percent_signs_are_ignored(verify_type, text):
    assert [score(text, gold, verify_type) for gold in ("28", "28%", "0.28")] == [1.0, 1.0, 0.0]


@pytest.mark.parametrize("verify_type", ["LAST_NUMBER", "BOXED_NUMERICAL", "ANSWER_TAG", "HASH_NUMBER", "INTERVAL"])
def test_A30_T28_a_gold_that_cannot_be_read_never_pays(verify_type, caplog):
    assert "'forty-two'" in refusal("forty-two", verify_type) and verify_type in refusal("forty-two", verify_type)
    take_faults()
    unread = Question("forty-two", verify_type)
    with caplog.at_level(logging.WARNING):
        assert grade([("42", unread), ("7", unread), ("", unread)]) == [None, None, None]
    assert take_faults() == {"no_gold": 3} and "train.jsonl row 3" in caplog.text


def test_A32_other_digits():
    assert score("The area is 14 m\u00b2", "14") == 1.0
    assert score("\uff11\uff14", "14") == score("\u0661\u0664", "14") == score("step \u2462", "3") == 0.0


def test_A34_european_commas():
    assert score("1,000", "1000") == 1.0
    assert score("20,00", "2000") == score("20,00", "20") == 0.0
    assert [score("Es sind 1.234,5 Euro", gold) for gold in ("5", "1", "1.234", "234")] == [0.0] * 4


def test_A35_exponents():
    assert score("It is 3.5e2", "350") == 1.0 and score("It is 3.5e2", "2") == 0.0 and score("1.2e+3", "1200") == 1.0
    assert score("1e999999999", "14") == 0.0
    refusal("1e999999999")


# ---- each verify type -----------------------------------------------------------------------------------------------

@pytest.mark.parametrize("text, reward", [
    ("\\boxed{14}", 1.0), ("\\boxed{14 \\text{ m}^2}", 1.0), ("\\boxed{x = 14}", 1.0), ("\\boxed{\\$14.00}", 1.0),
    ("\\boxed{\\text{14}}", 1.0),
    ("\\boxed{13 \\text{ or } 14}", 0.0), ("\\boxed{14\\pi}", 0.0), ("\\boxed{\\sqrt{14}}", 0.0),
    ("\\boxed{28 - 14}", 0.0), ("\\boxed{2^{14}}", 0.0),
    ("\\boxed{13} 14", 0.0), ("\\boxed{14} 13", 1.0), ("\\boxed{\\boxed{14}}", 1.0)])
def test_boxed_numerical(text, reward):
    assert score(text, "14", "BOXED_NUMERICAL") == reward
    assert score(text, "A worked text with 3, so \\boxed{14}.", "BOXED_NUMERICAL") == reward


@pytest.mark.parametrize("text, reward", [
    ("<answer>14</answer>", 1.0), ("<answer>6+8=14 days</answer>", 1.0),
    ("<answer>14</answer><answer>14</answer>", 0.0), ("</answer>14<answer>", 0.0),
    ("<answer>14", 0.0), ("<answer>13, 14</answer>", 0.0), ("<answer>" + "14 " * 2000 + "</answer>", 0.0),
    ("<answer>13</answer>14", 0.0)])
def test_answer_tag(text, reward):
    assert score(text, "14", "ANSWER_TAG") == reward


@pytest.mark.parametrize("text, reward", [
    ("so #### 14", 1.0), ("####14", 1.0), ("#### $14.00", 1.0), ("#### 13\n#### 14", 1.0), ("#### 14 or 15", 1.0),
    ("#### 13 14", 0.0),
    ("14 ####", 0.0), ("### 14", 0.0), ("####\n14", 1.0)])
def test_hash_number(text, reward):
    assert score(text, "He has 6+8=<<6+8=14>>14.\n#### 14", "HASH_NUMBER") == score(text, "14", "HASH_NUMBER") == reward


@pytest.mark.parametrize("text, reward", [
    ("caf\u00e9  au lait", 1.0), ("cafe\u0301 au\tlait\n", 1.0), ("I say:\n caf\u00e9 au lait \n\n", 1.0),
    ("<answer>caf\u00e9\nau lait</answer> or tea", 1.0),
    ("cafe au lait", 0.0), ("Caf\u00e9 au lait", 0.0), ("a caf\u00e9 au lait", 0.0),
    ("<answer>tea</answer>\ncaf\u00e9 au lait", 0.0)])
def test_exact(text, reward):
    assert score(text, "  caf\u00e9 au lait ", "EXACT") == reward


@pytest.mark.parametrize("text", [
    "(B)", "B", "B.", "B) 12 apples", "Answer: B", "answer: B", "The answer is B", "The answer is: **B**",
    "ANSWER: (B)", "\\boxed{B}", "\\boxed{\\text{B}}",
    "\\boxed{b}", "\\boxed{(B)}", "<answer>B</answer>", "<answer> b. </answer>",
    "I choose option B because A dog barks", "(A) is wrong, so (B) it is",
    "A. 1\nB. 2\nThe answer is B, I think", "**B**", "Answer: I think it is B", "$\\boxed{B}$.",
    "so it must be clearly B\n"])
def test_choice_forms(text):
    assert score(text, "B", "CHOICE") == score(text, "(B)", "CHOICE") == 1.0
    assert score(text, "A", "CHOICE") == 0.0


@pytest.mark.parametrize("text", ["", "Between us", "BB.", "A Big B-movie", "answer: Bob", "answer: I'd say nothing",
                                  "(12)", "\u0392."])
def test_choice_not_a_letter(text):
    assert score(text, "B", "CHOICE") == 0.0 and score(text, "I", "CHOICE") == 0.0


@pytest.mark.parametrize("expression, reward", [
    ("<answer>3*8*1</answer>", 1.0), ("<answer>(3 * 8) / 1 = 24</answer>", 1.0), ("\\boxed{3 \\times 8 \\div 1}", 1.0),
    ("So: 8*3*1", 1.0), ("3×8÷1", 1.0),
    ("8-(-3*1)", 0.0), ("(-1+3)*8", 0.0), ("3*8", 0.0), ("3*8*1*1", 0.0), ("24", 0.0), ("3*8*1=25", 0.0),
    ("24 = 3*8*1", 0.0), ("38-1", 0.0),
    ("3**8*1", 0.0), ("3//8*1", 0.0), ("3 8 1", 0.0), ("3*8*1)", 0.0), ("(3*8*1", 0.0), ("3*8/(1-1)", 0.0),
    ("3(8)1", 0.0), ("*3*8*1", 0.0), ("3*8*1+", 0.0),
    ("()3*8*1", 0.0), ("3*-8*-1", 0.0), ("__import__('os').getpid()", 0.0), ("3*8*int('1')", 0.0), ("", 0.0),
    ("((((((3*8*1))))))", 1.0), ("(3*)8*1", 0.0), ("**3*8*1**", 1.0), ("3*8*1**", 0.0), ("3*8*1.0", 1.0)])
def test_countdown(expression, reward):
    assert score(expression, "24", "COUNTDOWN", numbers=[3, 8, 1]) == reward


def test_countdown_is_exact_and_reads_numbers_in_the_usual_spellings():
    assert score("8/(3-8/3)", "24", "COUNTDOWN", numbers=[3, 3, 8, 8]) == 1.0
    assert score("-3+8", "5", "COUNTDOWN", numbers=[3, 8]) == 1.0
    for numbers in ([3, 8, 1], "[3, 8, 1]", "3 8 1", ("3", "8", "1")):
        assert score("3*8*1", "24", "COUNTDOWN", nums=numbers) == 1.0
    assert "numbers" in refusal("24", "COUNTDOWN")
    assert "-3" in refusal("24", "COUNTDOWN", numbers=[-3, 8]) and "[]" in refusal("24", "COUNTDOWN", numbers=[])


@settings(max_examples=200, deadline=None)
@given(st.recursive(st.integers(1, 20).map(str), max_leaves=6, extend=lambda part: st.tuples(
    part, st.sampled_from("+-*/"), part).map(lambda parts: f"({' '.join(parts)})")))
def test_countdown_agrees_with_python_on_well_formed_expressions(expression):
    import ast
    import re
    numbers = [node.value for node in ast.walk(ast.parse(expression)) if isinstance(node, ast.Constant)]
    try:
        value = eval(re.sub(r"(\d+)", r"Fraction(\1)", expression))
    except ZeroDivisionError:
        assert score(expression, "24", "COUNTDOWN", numbers=numbers) == 0.0
        return
    assert score(expression, str(value), "COUNTDOWN", numbers=numbers) == 1.0
    assert score(expression, str(value + 1), "COUNTDOWN", numbers=numbers) == 0.0


@pytest.mark.parametrize("gold, row, inside, outside", [
    ("3.14 ± 0.01", {}, ["3.13", "3.15", "about 3.1416"], ["3.1299999", "3.1500001", "none", ""]),
    ("100 +- 5%", {}, ["95", "105"], ["94.9", "106"]), ("-100 \\pm 5%", {}, ["-95", "-105"], ["95", "-106"]),
    ("1e3 +/- 1", {}, ["999", "1,001"], ["998"]), ("3.14", {"tolerance": 0.01}, ["3.13"], ["3.12"]),
    ("50", {"tolerance": "10%"}, ["45"], ["44"]),
    ("2/3", {"tolerance": 0}, ["4/6"], ["0.6667"])])
def test_interval(gold, row, inside, outside):
    assert [score(text, gold, "INTERVAL",
                  **row) for text in inside + outside] == [1.0] * len(inside) + [0.0] * len(outside)


def test_interval_without_a_tolerance_is_refused():
    assert "tolerance" in refusal("3.14", "INTERVAL") and "tolerance" in refusal("3.14 ± -1", "INTERVAL")


# ---- verifiers of the user ------------------------------------------------------------------------------------------

RULES = '''
import math, sys
def score(completion, row): return len(completion) / row["longest"]
def fails(completion, row): return 1 / 0
def leaves(completion, row): sys.exit(3)
def nothing(completion, row): return None
def not_finite(completion, row): return math.inf if "inf" in completion else math.nan
def a_list(completion, row): return [1.0]
def yes(completion, row): return True
number = 3
'''


@pytest.fixture
def rules(tmp_path, monkeypatch):
    (tmp_path / "my_rules.py").write_text(RULES)
    monkeypatch.syspath_prepend(tmp_path)
    take_faults()
    yield tmp_path
    sys.modules.pop("my_rules", None)


def test_a_verifier_of_the_user_sees_the_completion_and_the_row(rules):
    assert score("1234", "", "my_rules:score", longest=8) == 0.5 and score("", "", " my_rules:yes ") == 1.0


def test_B08_T11_T12_an_unscorable_completion_is_none_counted_and_named(rules, caplog):
    with caplog.at_level(logging.WARNING):
        assert grade([("x", question("", f"my_rules:{name}")) for name in ("fails", "leaves", "nothing", "not_finite",
            "yes")]) == [None] * 4 + [1.0]
        assert grade([("inf", question("", "my_rules:not_finite"))]) == [None]
    assert take_faults() == {"exception": 2, "not_a_number": 3} and take_faults() == {}
    assert "train.jsonl row 3" in caplog.text and "ZeroDivisionError" in caplog.text


def test_T13_a_list_in_place_of_a_number_is_never_spread_over_the_group(rules, caplog):
    asked = question("", "my_rules:a_list")
    assert grade([("a", asked), ("b", asked), ("c", asked)]) == [None] * 3
    assert take_faults() == {"exception": 3} and "my_rules:a_list" in caplog.text


def test_verifiers_that_cannot_be_imported_are_refused(rules):
    assert "no_such_module" in refusal("", "no_such_module:score")
    assert "no_such_function" in refusal("", "my_rules:no_such_function")
    assert "not a function" in refusal("", "my_rules:number")
    (rules / "broken_rules.py").write_text("1 / 0")
    assert "ZeroDivisionError" in refusal("", "broken_rules:score")


def test_a_verify_type_can_be_added_in_a_few_lines(monkeypatch):
    def last_word(completion):
        return completion.split()[-1] if completion.split() else None
    monkeypatch.setitem(VERIFIERS, "LAST_WORD", Verifier(lambda answer, row: answer.strip(), last_word))
    assert score("it is blue", "blue", "last_word") == 1.0 and score("", "blue", "last_word") == 0.0


# ---- area g: golds and verify types at load -------------------------------------------------------------------------

@pytest.mark.parametrize("name", ["LAST_NUMBERS", "", " ", None, "LAST NUMBER", "eval"])
def test_G04_unknown_verify_types_are_refused_at_load(name):
    message = refusal("14", name)
    assert repr(name) in message and all(known in message for known in VERIFIERS) and "module:function" in message


@pytest.mark.parametrize("name", [" last_number ", "Last_Number", "LAST_NUMBER\n", "\tlast_NUMBER"])
def test_G05_verify_types_are_trimmed_and_case_folded(name):
    asked = question("14", name)
    assert asked.verify_type == "LAST_NUMBER" and grade([("14", asked)]) == [1.0]


def test_G07_worked_golds_are_reduced_by_the_rule_of_the_type():
    for verify_type, frame in (("LAST_NUMBER", "{}"), ("HASH_NUMBER", "#### {}"), ("ANSWER_TAG", "<answer>{}</answer>"),
                               ("MATH", "{}")):
        assert score(frame.format("14"), "6+8=14, so #### 14", verify_type) == 1.0
        assert score(frame.format("8"), "6+8=14, so #### 14", verify_type) == 0.0
    gold = ("Natalia sold 48/2 = <<48/2=24>>24 clips in May.\n"
            "Natalia sold 48+24 = <<48+24=72>>72 clips altogether.\n#### 72")
    assert score("72", gold) == score("#### 72", gold, "HASH_NUMBER") == score("72", gold, "MATH") == 1.0
    solution = "We have $x+7 = 2\\cdot 7$, so $x = \\boxed{7}$."
    assert score("\\boxed{7}", solution, "BOXED_NUMERICAL") == score("\\boxed{7}", solution, "MATH") == 1.0


@pytest.mark.parametrize("gold", ["yes", "x+1", "", "\\sqrt{2}", "2\\pi", "6+8", "1.234,5", "5/0", "\u0661\u0664"])
def test_G08_golds_that_are_no_number_are_refused_at_load(gold):
    assert repr(gold)[1:-1] in refusal(gold)


def test_G08_fractions_are_numbers():
    assert question("2/3").gold == Fraction(2, 3)


@pytest.mark.parametrize("verify_type, gold", [("CHOICE", "1"), ("CHOICE", "yes"), ("EXACT", " \n"), ("MATH", ""),
                                               ("MATH", "\\frac{1}{"),
                                               ("MATH", "\\boxed{1"), ("MATH", "9^{9^9}"), ("COUNTDOWN", "x"),
                                               ("HASH_NUMBER", "#### none")])
def test_G08_golds_that_their_type_cannot_read_are_refused_at_load(verify_type, gold):
    assert verify_type in refusal(gold, verify_type, numbers=[1, 2])


@settings(max_examples=600, deadline=None)
@given(st.lists(st.sampled_from([*"7788+-*/()= ", "**", "7+7", "(7*8)"]), max_size=12).map("".join))
def test_no_expression_makes_countdown_raise(text):
    assert score(text, "14", "COUNTDOWN", numbers=[7, 7]) in (0.0, 1.0)
    assert score(text, "56", "COUNTDOWN", numbers=[7, 8]) in (0.0, 1.0)


# ---- the whole kind: any text, any type -----------------------------------------------------------------------------

GOLDS = {name: "B" if name == "CHOICE" else "14 ± 1/2" if name == "INTERVAL" else "14" for name in VERIFIERS}
ROW = {"numbers": [7, 7]}
PIECES = ["<answer>", "</answer>", "<think>", "\\boxed{", "}", "{", "####", "\n", " ", "14", "1,", "2/3", "\\frac{",
          "-", "**", "^", "(B)", "B", "answer: ",
          "\\", "$", "\\[", "\\]", "is ", "=", "\u22123", "\ud800", "\x00", "\u0301", "1e9", "(", ")"]


@settings(max_examples=250, deadline=None)
@given(st.one_of(st.text(), st.lists(st.sampled_from(PIECES), max_size=30).map("".join)))
def test_no_text_makes_a_verifier_raise(text):
    asked = [question(gold, name, **ROW) for name, gold in GOLDS.items() if name != "MATH"]
    take_faults()
    assert all(reward in (0.0, 1.0) for reward in grade([(text, each) for each in asked]))
    assert take_faults() == {}
    VERIFIERS["MATH"].find(text)
    format_term(text)


def test_no_text_makes_the_math_workers_raise():
    import random
    rng = random.Random(0)
    texts = ["".join(rng.choices(PIECES, k=rng.randint(1, 25))) for _ in range(150)]
    assert set(grade([(text, question("14", "MATH")) for text in texts])) <= {0.0, 1.0}


@pytest.mark.parametrize("unit", PIECES + ["1 ", "B.", "B ", "answer is ", "answer ", "<answer>B", "\\boxed{B",
                                           "\\boxed{}", "a\u0301\u0316", "B\n", "(B",
                                           "<answer>1</answer>", "$1$", "\\(", "is 1 ", "((7*", "7+", ": "])
@pytest.mark.parametrize("verify_type", VERIFIERS)
def test_100000_hostile_characters_take_under_a_tenth_of_a_second(unit, verify_type):
    asked = question(GOLDS[verify_type], verify_type, **ROW)
    body = unit * (100_000 // len(unit))
    for text in (body, f"<answer>{body}</answer>", f"\\boxed{{{body}", f"#### {body}"):
        assert _seconds(text, asked) < 0.1


def _seconds(text, asked):
    """The best of three, in this process (MATH hands answers of at most 1,000 characters to its workers)."""
    def once():
        start = time.perf_counter()
        rewards._grade_one(text, asked)
        format_term(text)
        return time.perf_counter() - start
    best = once()
    return best if best < 0.05 else min(best, once(), once())


def test_one_result_for_each_completion_in_order_also_when_types_are_mixed():
    asked = [question(gold, name, **ROW) for name, gold in GOLDS.items()]
    right = {"BOXED_NUMERICAL": "\\boxed{14}", "ANSWER_TAG": "<answer>14</answer>", "HASH_NUMBER": "#### 14",
             "CHOICE": "(B)", "COUNTDOWN": "7+7",
             "MATH": "7+7"}
    pairs = [(text, each) for each in asked for text in (right.get(each.verify_type, "14"), "wrong", "\\boxed{28/2 }")]
    half = ("LAST_NUMBER", "BOXED_NUMERICAL", "MATH", "INTERVAL")
    expected = [reward for each in asked for reward in (1.0, 0.0, float(each.verify_type in half))]
    assert grade(pairs) == expected and grade([]) == []
    assert all(type(reward) is float for reward in grade(pairs))


def test_1000_math_completions_take_seconds_off_the_main_thread():
    asked = [question(f"\\frac{{{number}}}{{7}}", "MATH") for number in range(1, 101)]
    pairs = [(f"so \\boxed{{{number}/7 + {extra % 2}}}", each)
             for number, each in enumerate(asked, 1) for extra in range(10)]
    results = []
    thread = threading.Thread(target=lambda: results.extend(grade(pairs, workers=2)))
    start = time.monotonic()
    thread.start()
    thread.join()
    assert time.monotonic() - start < 30 and results == [1.0, 0.0] * 500


def test_the_answer_is_what_a_majority_votes_on():
    asked = question("14", "BOXED_NUMERICAL")
    assert extract_answer("\\boxed{14.0}", asked) == extract_answer("\\boxed{14}", asked) == 14
    assert extract_answer("14", asked) is None
    assert len({extract_answer(text, question("x", "EXACT")) for text in ("a  b", "a b ", "<answer>a b</answer>")}) == 1


# ---- strict and lenient ---------------------------------------------------------------------------------------------

def test_a_format_gain_does_not_look_like_a_reasoning_gain():
    asked = question("14", "BOXED_NUMERICAL")
    before, after = [("It is 14", asked), ("It is 13", asked)], [("It is \\boxed{14}", asked),
                                                                 ("It is \\boxed{13}", asked)]
    assert grade(before) == [0.0, 0.0] and grade(after) == [1.0, 0.0]
    assert lenient(before, grade(before)) == lenient(after, grade(after)) == [1.0, 0.0]


def test_lenient_is_never_below_strict_and_absent_without_a_format():
    pairs = [("\\boxed{14} of 20", question("14", "BOXED_NUMERICAL")), ("14", question("14")),
             ("14", Question("14", "ANSWER_TAG"))]
    assert lenient(pairs, grade(pairs)) == [1.0, None, None]


# ---- added terms ----------------------------------------------------------------------------------------------------

def test_T25_a_think_tag_that_the_prompt_has_opened():
    assert format_term("reasoning</think>answer", "Question<think>\n", tags=("think",)) == 1.0
    assert format_term("reasoning</think><answer>9</answer>", "Question<think>\n") == 1.0
    assert format_term("<think>reasoning</think><answer>9</answer>", "Question<think>\n") == 0.0
    assert format_term("reasoning</think><answer>9</answer>", "Question") == 0.0


def test_T26_text_between_the_tags_may_hold_newlines():
    assert format_term("<think>a\nb</think>\n<answer>9</answer>") == 1.0


@pytest.mark.parametrize("text", ["", "<answer>9</answer><think>a</think>", "<think>a<answer>9</answer></think>",
                                  "<think>a</think>", "<answer>9</answer>",
                                  "<think>a</think><answer>9", "</think>a<think><answer>9</answer>"])
def test_format_out_of_order_or_incomplete(text):
    assert format_term(text) == 0.0


def test_overlong_is_dapos_soft_penalty():
    assert [overlong_term(length, 20480, 4096) for length in (0, 16384, 18432, 20480, 30000)] == [0.0, 0.0, -0.5, -1.0,
        -1.0]
    for margin in (0, 21):
        with pytest.raises(ValueError, match=str(margin)):
            overlong_term(1, 20, margin)


def test_repetition():
    assert [repetition_term(ids) for ids in ([], [1, 2, 3], [1, 2, 3, 4], list(range(50)))] == [0.0] * 4
    assert repetition_term([1, 2] * 4, n=2) == pytest.approx(2 / 7 - 1)
    assert repetition_term([7] * 10_003) == pytest.approx(-0.9999)
    with pytest.raises(ValueError, match="0"):
        repetition_term([1], n=0)


def test_T14_weights_enter_the_reward_once():
    assert shaped_reward(1.0, {"format": 0.0}, {"correctness": 0.7, "format": 0.3}) == pytest.approx(0.7)
    terms = {"format": 1.0, "overlong": -0.5}
    assert shaped_reward(0.0, terms, {"format": 0.2, "overlong": 1.0}) == pytest.approx(-0.3)
    assert shaped_reward(1.0, terms, {}) == 1.0 and shaped_reward(None, terms, {"format": 1.0}) is None
    with pytest.raises(ValueError, match="fromat.*format"):
        shaped_reward(1.0, {"format": 1.0}, {"fromat": 0.5})


def test_shaping_leaves_the_correctness_alone():
    asked, text = question("14"), "<think>a</think><answer>13</answer>"
    correctness, = grade([(text, asked)])
    assert (correctness, shaped_reward(correctness, {"format": format_term(text)}, {"format": 0.5})) == (0.0, 0.5)


# ---- the command ----------------------------------------------------------------------------------------------------

def command(*arguments, cwd=ROOT):
    done = subprocess.run([sys.executable, os.path.join(ROOT, "rewards.py"), *arguments], capture_output=True,
                          text=True, cwd=cwd, timeout=60)
    return done.stdout, done.returncode


def test_the_command_grades_one_completion():
    assert command("--verify_type", "LAST_NUMBER", "--answer", "14", "It takes 14 days.") == ("1.0\n", 0)
    assert command("--verify_type", "last_number", "--answer", "-1,234.5", "-1234.5") == ("1.0\n", 0)
    assert command("--verify_type", "MATH", "--answer", "-\\frac{1}{2}", "-0.5") == ("1.0\n", 0)
    assert command("--verify_type", "COUNTDOWN", "--answer", "24", "--row", '{"numbers": [3, 8, 1]}',
                   "3*8*1") == ("1.0\n", 0)
    assert command("--verify_type", "LAST_NUMBER", "--answer", "14", "") == ("0.0\n", 0)


def test_the_command_refuses_with_the_reason():
    output, code = command("--verify_type", "LAST_NUMBER", "--answer", "forty-two", "42")
    assert code == 1 and output.startswith("refused: ") and "forty-two" in output and output.count("\n") == 1
    assert command("--verify_type", "LAST_NUMBER", "42")[0].startswith("refused: ")
    assert command("42")[0].startswith("refused: ")
    assert command()[1] == command("a", "b")[1] == 2


def test_the_command_prints_one_line_for_each_row_of_a_file(tmp_path):
    (tmp_path / "mine.py").write_text("def half(completion, row): return row['weight'] / 2\n"
                                      "def fails(completion, row): raise KeyError")
    rows = [{"completion": "14 days", "answer": 14, "verify_type": "LAST_NUMBER"},
            {"completion": "15", "answer": "14.0", "verify_type": "LAST_NUMBER"},
            {"completion": "x", "answer": "yes", "verify_type": "LAST_NUMBER"},
            {"completion": "7+7", "answer": "14", "verify_type": "MATH"},
            {"completion": "x", "verify_type": "mine:half", "weight": 3},
            {"completion": "x", "answer": "", "verify_type": "mine:fails"},
            {"completion": "x", "verify_type": "LAST_NUMBER"}, [1], {"completion": "7*2", "answer": "14",
                                                                     "verify_type": "COUNTDOWN", "numbers": [2, 7]}]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n\nnot json\n")
    output, code = command("--file", "rows.jsonl", cwd=tmp_path)
    lines = output.splitlines()
    assert code == 0 and [line.partition(":")[0] for line in lines] == [
        "1.0", "0.0", "refused", "1.0", "1.5", "none", "refused", "refused", "1.0", "refused"]
    assert "rows.jsonl row 3" in lines[2] and "'yes'" in lines[2] and "answer" in lines[6] and "row 11" in lines[9]


def test_docstring_examples():
    for module in (rewards, reward_terms, verify_types):
        assert doctest.testmod(module).failed == 0
    assert math.isclose(shaped_reward(1.0, {"a": 1.0}, {"a": 0.1}), 1.1)
