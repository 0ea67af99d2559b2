"""Built-in tasks: gold answers by a second method that reads the question's text, determinism, splits, difficulty."""

import ast
import inspect
import itertools
import json
import re
import sys
import types
from fractions import Fraction
from pathlib import Path

import pytest

import generators
from generators import GENERATORS, score_reasoning_gym
from tasks import load_questions

DATA = Path(__file__).parent / "data"
HARDER = {
    "multiplication": dict(min_a=100, max_a=199, min_b=11, max_b=40),
    "char_count": dict(min_words=3, max_words=5),
    "scheduling": dict(min_tasks=8, max_tasks=14, max_duration=30, max_deps=3),
    "chain_sum": dict(min_terms=5, max_terms=9, digits=4),
    "countdown": dict(min_numbers=5, max_numbers=5, max_number=99, max_target=500),
    "sorting": dict(min_length=8, max_length=12, digits=4),
    "gsm8k_style": dict(min_steps=5, max_steps=9, max_start=900),
}


def both_difficulties(name, n=150):
    return GENERATORS[name](n=n, seed=3) + GENERATORS[name](n=n, seed=4, **HARDER[name])


# ------------------------------------------------------------------------------------------------ golds, recomputed
def days_by_simulation(question):
    """Counts days one by one; reads the tasks from the question's text."""
    tasks = {
        name: [int(duration), set(re.findall(r"T\d+", before))]
        for name, duration, before in re.findall(r"(T\d+)\(duration=(\d+), deps=\[(.*?)\]\)", question)
    }
    done, days = set(), 0
    while len(done) < len(tasks):
        working = [name for name, (_, before) in tasks.items() if name not in done and before <= done]
        assert working, "nobody can work: the prerequisites are circular"
        for name in working:
            tasks[name][0] -= 1
        done |= {name for name in working if tasks[name][0] == 0}
        days += 1
    return days


def test_scheduling_example_rows_have_14_and_16():
    rows = [json.loads(line) for line in (DATA / "scheduling_example.jsonl").read_text().splitlines()]
    durations = [[4, 1, 2, 10], [1, 3, 2, 5, 10]]
    prerequisites = [[[], [], [0], [0]], [[], [0], [1, 0], [], [0, 1, 3, 2]]]
    assert [generators.smallest_total_time(*pair) for pair in zip(durations, prerequisites)] == [14, 16]
    assert [days_by_simulation(row["question"]) for row in rows] == [14, 16]
    assert [row["answer"] for row in rows] == ["14", "16"]


def test_scheduling_asks_in_the_words_of_the_examples():
    example = json.loads((DATA / "scheduling_example.jsonl").read_text().splitlines()[0])
    introduction = example["question"][: example["question"].index("T0(")]
    task_list = re.compile(r"(T\d+\(duration=\d+, deps=\[(None|T\d+(, T\d+)*)\]\)\n)+")
    assert task_list.fullmatch(example["question"].removeprefix(introduction))
    for row in both_difficulties("scheduling"):
        assert row["question"].startswith(introduction)
        assert task_list.fullmatch(row["question"].removeprefix(introduction))
        assert row["verify_type"] == example["verify_type"]


def test_scheduling_golds_by_simulation():
    rows = both_difficulties("scheduling")
    assert [row["answer"] for row in rows] == [str(days_by_simulation(row["question"])) for row in rows]
    # Some answers must differ from both simple readings: all tasks one after the other, and the longest task alone.
    plain = [list(map(int, re.findall(r"duration=(\d+)", row["question"]))) for row in rows]
    assert sum(int(row["answer"]) not in (sum(days), max(days)) for row, days in zip(rows, plain)) > len(rows) / 3


def test_multiplication_golds_by_repeated_addition():
    for row in both_difficulties("multiplication"):
        a, b = map(int, re.fullmatch(r"What is (\d+) \* (\d+)\?", row["question"]).groups())
        assert row["answer"] == str(sum([a] * b))


def test_char_count_golds_by_deleting_the_letter():
    rows = both_difficulties("char_count")
    for row in rows:
        letter, text = re.fullmatch(r'How many times does the letter "(.)" occur in "(.+)"\?', row["question"]).groups()
        assert row["answer"] == str(len(text) - len(re.sub(letter, "", text)))
    assert len({row["answer"] for row in rows}) > 3 and "0" in {row["answer"] for row in rows}


def test_chain_sum_golds_from_the_text():
    rows = both_difficulties("chain_sum")
    for row in rows:
        text = row["question"].removeprefix("What is ").removesuffix("?")
        plus, minus = re.findall(r"(?:^|\+ )(\d+)", text), re.findall(r"- (\d+)", text)
        assert len(plus) + len(minus) == len(re.findall(r"\d+", text))
        assert row["answer"] == str(sum(map(int, plus)) - sum(map(int, minus)))
    assert any(row["answer"].startswith("-") for row in rows)


def test_sorting_golds_are_ordered_and_complete():
    for row in both_difficulties("sorting"):
        order, given = re.match(r"Sort these numbers from (.*?): ([\d, ]+)\.", row["question"]).groups()
        given, answer = list(map(int, given.split(", "))), list(map(int, row["answer"].split(", ")))
        for number in given:
            assert answer.count(number) == given.count(number)
        assert len(answer) == len(given)
        steps = list(itertools.pairwise(answer if order == "smallest to largest" else answer[::-1]))
        assert all(first <= second for first, second in steps)


def reachable(numbers):
    """Every value that an expression over all the numbers, each used once, can have."""
    if len(numbers) == 1:
        return {numbers[0]}
    values = set()
    for i, j in itertools.permutations(range(len(numbers)), 2):
        rest = [number for k, number in enumerate(numbers) if k not in (i, j)]
        a, b = numbers[i], numbers[j]
        for value in {a + b, a - b, a * b} | ({a / b} if b else set()):
            values |= reachable([*rest, value])
    return values


def value_of(tree):
    if isinstance(tree, ast.Constant):
        return Fraction(tree.value)
    a, b = value_of(tree.left), value_of(tree.right)
    return {ast.Add: a + b, ast.Sub: a - b, ast.Mult: a * b, ast.Div: a / b if b else None}[type(tree.op)]


def test_countdown_targets_are_reachable_by_search():
    for row in GENERATORS["countdown"](n=25, seed=5):
        assert int(row["answer"]) in reachable([Fraction(number) for number in row["numbers"]]), row


def test_countdown_solutions_use_the_numbers_of_the_text_once_and_hit_the_target():
    for row in both_difficulties("countdown"):
        numbers, target = re.match(r"Use the numbers ([\d, ]+), each.* to make (\d+)\.", row["question"]).groups()
        assert row["answer"] == target and list(map(int, numbers.split(", "))) == row["numbers"]
        assert sorted(map(int, re.findall(r"\d+", row["solution"]))) == sorted(row["numbers"])
        assert value_of(ast.parse(row["solution"], mode="eval").body) == int(target)


def story_answer(question):
    """Acts the story out, sentence by sentence, with a heap of things."""
    start, *events, asked = re.split(r"(?<=[.?]) ", re.sub(r"(\$\d+ each)\. How", r"\1, how", question))
    heap = [1] * int(re.search(r"has (\d+)", start)[1])
    for event in events:
        numbers = list(map(int, re.findall(r"\d+", event)))
        if "more" in event:
            heap += [1] * numbers[0]
        elif "packs" in event:
            heap += [1] * numbers[1] * numbers[0]
        elif "doubles" in event:
            heap += heap
        elif "loses half" in event:
            assert len(heap) % 2 == 0
            heap = heap[::2]
        else:
            assert "gives" in event and numbers[0] < len(heap)
            heap = heap[numbers[0] :]
    return sum(heap) * (int(re.search(r"\$(\d+) each", asked)[1]) if "$" in asked else 1)


def test_gsm8k_style_golds_by_acting_the_story_out():
    rows = both_difficulties("gsm8k_style")
    assert [row["answer"] for row in rows] == [str(story_answer(row["question"])) for row in rows]


# ------------------------------------------------------------------------------------------------ shared behaviour
@pytest.mark.parametrize("name", GENERATORS)
def test_same_seed_same_rows_other_seed_others(name):
    first = GENERATORS[name](n=60, seed=1)
    assert first == GENERATORS[name](n=60, seed=1)
    assert [row["question"] for row in first] != [row["question"] for row in GENERATORS[name](n=60, seed=2)]
    assert GENERATORS[name](n=20, seed=1) == first[:20]


def test_rows_of_a_seed_never_change():
    # Written down once: another process, machine or version of Python has to make the very same questions.
    firsts = {name: make(n=1, seed=0)[0] for name, make in GENERATORS.items() if name != "scheduling"}
    assert {name: (row["question"], row["answer"]) for name, row in firsts.items()} == FIRSTS


@pytest.mark.parametrize("name", GENERATORS)
def test_splits_share_no_question_whatever_seed_and_difficulty(name):
    def asked(split, seed, **difficulty):
        return {row["question"] for row in GENERATORS[name](n=100, seed=seed, split=split, **difficulty)}

    train, held_out = asked("train", 0) | asked("train", 1), asked("validation", 0) | asked("validation", 7)
    harder = HARDER[name]
    assert not train & held_out
    assert not asked("train", 0, **harder) & asked("validation", 1, **harder)
    # And both are really cut from one source: without a split, about a fifth belongs to validation.
    questions = {row["question"] for row in GENERATORS[name](n=500, seed=0)}
    assert len(questions) == 500
    assert 0.12 < sum(map(generators.in_validation, questions)) / 500 < 0.28


def test_multiplication_is_720_pairs_144_of_them_validation():
    every = {(a, b) for a in range(10, 100) for b in range(2, 10)}

    def pairs(**options):
        rows = GENERATORS["multiplication"](**options)
        return [tuple(map(int, re.findall(r"\d+", row["question"]))) for row in rows]

    assert set(pairs()) == every and len(pairs()) == 720
    train, held_out = pairs(split="train", seed=3), pairs(split="validation", seed=8)
    assert (len(train), len(held_out)) == (576, 144) and set(train) | set(held_out) == every
    assert sorted(train) == sorted(pairs(split="train", seed=4)) and train != pairs(split="train", seed=4)
    assert pairs(split="train", seed=3, n=50) == train[:50]


@pytest.mark.parametrize("name", GENERATORS)
def test_difficulty_parameters_change_the_questions(name):
    def size(rows):
        return sum(len(row["question"]) for row in rows) / len(rows)

    assert size(GENERATORS[name](n=100, **HARDER[name])) > size(GENERATORS[name](n=100)) + 1


def test_every_difficulty_parameter_is_in_the_table_with_its_default():
    for name, make in GENERATORS.items():
        line = next(line for line in generators.__doc__.splitlines() if line.startswith(f"| {name} |"))
        known = {"min_a": 10, "max_a": 99, "min_b": 2, "max_b": 9}
        if name != "multiplication":
            known = {key: p.default for key, p in inspect.signature(make).parameters.items() if key != "rng"}
        assert re.findall(r"(\w+)=(\d+)", line) == [(key, str(value)) for key, value in known.items()]


@pytest.mark.parametrize(
    "query, message",
    [
        ("multiplication?n=145&split=validation", "has only 144 different questions in split=validation"),
        (
            "chain_sum?digits=1&max_terms=2&n=200",
            "has only 162 different questions at this difficulty, fewer than n=200",
        ),
        ("scheduling?tasks=3", "no parameter 'tasks': it takes n, seed, split, min_tasks, max_tasks"),
        ("scheduling?min_tasks=9", "min_tasks=9 above max_tasks=6"),
        ("scheduling?max_duration=0", "a whole number of at least 1 for max_duration, not 0"),
        ("scheduling?max_duration=2.5", "a whole number of at least 1 for max_duration, not 2.5"),
        ("scheduling?n=0", "a whole number of at least 1 for n, not 0"),
        ("scheduling?n=many", "a whole number of at least 1 for n, not 'many'"),
        ("scheduling?seed=x", "a whole number as seed, not 'x'"),
        ("scheduling?split=test", "split=test of scheduling is unknown: use split=train or split=validation"),
        ("scheduling?n=3&n=4", "gives a parameter twice"),
        ("countdown?min_numbers=1&max_numbers=1&max_number=50&max_target=1&n=2", "has only 1 different questions"),
        ("juggling?n=3", "no built-in task 'juggling': use one of multiplication, char_count, scheduling"),
    ],
)
def test_wrong_parameters_are_refused_with_what_to_change(query, message):
    with pytest.raises(ValueError) as error:
        load_questions(f"task:{query}")
    assert message in str(error.value)


def test_the_verifiers_pay_for_every_gold_and_for_no_other():
    rewards = pytest.importorskip("rewards")
    for name in GENERATORS:
        questions = load_questions(f"task:{name}?n=20&seed=9")
        rewards.read_golds(questions)
        texts = [
            f"<answer>{q.row['solution']}</answer>" if name == "countdown" else f"So:\n{q.answer}" for q in questions
        ]
        assert rewards.grade(list(zip(texts, questions))) == [1.0] * 20, name
        wrong = [text.replace("</answer>", " + 1</answer>") if name == "countdown" else text + "1" for text in texts]
        assert rewards.grade(list(zip(wrong, questions))) == [0.0] * 20, name


# ------------------------------------------------------------------------------------------------ reasoning-gym
class FakeDataset:
    """Question i depends on seed + i alone, as in the package."""

    def __init__(self, seed, size, **config):
        self.rows = [
            {
                "question": f"What follows {(seed + i) % 10_000}?",
                "answer": str((seed + i) % 10_000 + 1),
                "metadata": {"pair": (1, 2), **config},
            }
            for i in range(size)
        ]

    def __iter__(self):
        return iter(self.rows)


def fake_scorer(answer, entry):
    if not answer.isdigit():
        raise ValueError("invalid literal")
    gold = entry["answer"]
    return 1.0 if int(answer) == int(gold) else 0.5 if gold in answer else 0.01


@pytest.fixture
def fake_reasoning_gym(monkeypatch):
    module = types.ModuleType("reasoning_gym")

    def create_dataset(name, seed, size, **config):
        if name not in ("successor", "yes_man", "open_ended"):
            raise ValueError(f"Dataset '{name}' not registered")
        dataset = FakeDataset(seed, size, **config)
        if name == "open_ended":
            dataset.rows = [row | {"answer": None} for row in dataset.rows]
        return dataset

    scorers = {
        "successor": fake_scorer,
        "yes_man": lambda answer, entry: 1.0,
        "open_ended": lambda answer, entry: float(entry["answer"] is None and answer == "fine"),
    }
    module.create_dataset, module.get_score_answer_fn = create_dataset, scorers.__getitem__
    monkeypatch.setitem(sys.modules, "reasoning_gym", module)
    generators._reasoning_gym_scorer.cache_clear()
    yield
    generators._reasoning_gym_scorer.cache_clear()


def test_reasoning_gym_rows_keep_what_the_scorer_needs(fake_reasoning_gym):
    questions = load_questions("task:reasoning_gym/successor?n=30&seed=5&level=3&easy=true&ratio=0.5&kind=a")
    assert len({q.question for q in questions}) == 30
    assert questions[0].row["metadata"] == {"pair": (1, 2), "level": 3, "easy": True, "ratio": 0.5, "kind": "a"}
    assert {q.verify_type for q in questions} == {"generators:score_reasoning_gym"}
    assert questions[2].place == "task:reasoning_gym/successor?n=30&seed=5&level=3&easy=true&ratio=0.5&kind=a row 3"


def test_reasoning_gym_neighbouring_seeds_and_splits_share_nothing(fake_reasoning_gym):
    def asked(query):
        return {q.question for q in load_questions(f"task:reasoning_gym/successor?n=100&{query}")}

    assert not asked("seed=0") & asked("seed=1")
    assert not asked("seed=0&split=train") & asked("seed=0&split=validation")


def test_reasoning_gym_pays_full_marks_only_for_the_extracted_answer(fake_reasoning_gym):
    row = {"answer": "14", "reasoning_gym": "successor"}
    assert score_reasoning_gym("I think <answer> 14 </answer>", row) == 1.0
    assert score_reasoning_gym("<answer>014</answer>", row) == 1.0  # by the scorer, not by the text
    assert score_reasoning_gym("13 or so\n14\n\n", row) == 1.0
    for text in ("<answer>114</answer>", "14\n15", "is it 14", "", "\n", "<answer></answer>", "<answer>14",
                 "14</answer>",
                 "<answer>14</answer><answer>15</answer>", "<answer>14</answer><answer>14</answer>",
                 "</answer>14<answer>", "<answer>" * 20_000, "x" * 100_000):  # fmt: skip
        assert score_reasoning_gym(text, row) == 0.0, text[:50]


def test_reasoning_gym_reads_as_many_lines_as_the_gold_has(fake_reasoning_gym):
    row = {"answer": "1 2\n\n3 4", "reasoning_gym": "successor"}
    assert score_reasoning_gym("The grid:\n1 2\n\n3 4\n", row) == 1.0
    assert score_reasoning_gym("The grid: 1 2\n\n3 4", row) == 0.0


def test_reasoning_gym_without_one_gold_is_left_to_the_scorer(fake_reasoning_gym):
    question = load_questions("task:reasoning_gym/open_ended?n=1")[0]
    assert score_reasoning_gym("<answer>fine</answer>", question.row) == 1.0
    assert score_reasoning_gym(question.answer, question.row) == 0.0


@pytest.mark.parametrize(
    "name, message",
    [
        ("nothing", "cannot make 'nothing' with its defaults: Dataset 'nothing' not registered"),
        ("countdown", "its scorer runs the model's text as Python"),
        ("yes_man", "its scorer pays for any text"),
    ],
)
def test_reasoning_gym_refusals(fake_reasoning_gym, name, message):
    with pytest.raises(ValueError) as error:
        load_questions(f"task:reasoning_gym/{name}?n=5")
    assert message in str(error.value)


def test_reasoning_gym_missing_says_how_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ValueError, match="pip install reasoning-gym"):
        load_questions("task:reasoning_gym/chain_sum?n=5")


def test_real_reasoning_gym():
    pytest.importorskip("reasoning_gym")
    from reasoning_gym.factory import DATASETS

    # No other scorer of the installed version may evaluate what the model wrote.
    evaluating = {
        name
        for name, (dataset, _) in DATASETS.items()
        if re.search(
            r"\b(eval|exec|sympify|parse_expr)\((answer|user)", inspect.getsource(sys.modules[dataset.__module__])
        )
    }
    assert evaluating <= generators.EVALUATING_SCORERS
    for name in ("chain_sum", "spell_backward", "mini_sudoku", "prime_factorization"):
        for question in load_questions(f"task:reasoning_gym/{name}?n=5&seed=1"):
            saved = json.loads(json.dumps(question.row))
            assert score_reasoning_gym(f"<answer>{question.answer}</answer>", saved) == 1.0
            assert score_reasoning_gym(f"<answer>{question.answer}</answer>", question.row) == 1.0
            assert score_reasoning_gym(f"<answer>{question.answer} or not</answer>", question.row) == 0.0
    with pytest.raises(ValueError, match="pays for any text"):
        load_questions("task:reasoning_gym/game_of_life_halting?n=20")


FIRSTS = {
    "multiplication": ("What is 48 * 4?", "192"),
    "char_count": ('How many times does the letter "l" occur in "letter"?', "1"),
    "chain_sum": ("What is 98 - 84 - 53 - 17?", "-56"),
    "countdown": (
        (
            "Use the numbers 43, 10, 14, each exactly once, with + - * / and parentheses to make 39. Write the "
            "expression between <answer> and </answer>."
        ),
        "39",
    ),
    "sorting": (
        (
            "Sort these numbers from smallest to largest: 6, 44, 21, 6, 29, 89. Write the sorted numbers alone on "
            "the last line, with a comma and a space between them."
        ),
        "6, 6, 21, 29, 44, 89",
    ),
    "gsm8k_style": (
        (
            "Rosa has 15 beads. Rosa buys 2 packs with 4 beads in each. Rosa buys 2 packs with 7 beads in "
            "each. Kira gives Rosa 15 more. How many beads does Rosa have now?"
        ),
        "52",
    ),
}
