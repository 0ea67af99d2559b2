"""Built-in tasks: question generators whose right answers are known because they made the question.

`GENERATORS[name](n=1000, seed=0, split=None, **difficulty)` returns n data rows (dicts with `question`, `answer`,
`verify_type`), always the same ones for the same arguments, never the same question twice. `split="train"` and
`split="validation"` share no question, whatever their seeds and difficulty: a fixed hash of the question's text puts
about 20 % of all questions into validation.

| task | asks for | difficulty (defaults) |
|---|---|---|
| multiplication | 34 * 7 | min_a=10 max_a=99 min_b=2 max_b=9 (720 pairs, 144 of them validation) |
| char_count | how often a letter occurs in some words | min_words=1 max_words=2 |
| scheduling | the least total time of tasks with prerequisites | min_tasks=3 max_tasks=6 max_duration=10 max_deps=4 |
| chain_sum | 12 + 7 - 30 | min_terms=2 max_terms=4 digits=2 |
| countdown | an expression that hits a target | min_numbers=3 max_numbers=4 max_number=50 max_target=100 |
| sorting | numbers in order | min_length=3 max_length=6 digits=2 |
| gsm8k_style | a word problem of a few steps | min_steps=2 max_steps=4 max_start=40 |

The tasks of the reasoning-gym package, where it is installed, come through `reasoning_gym_rows` and are graded by its
own scorers.
Left out: reading of files and prompts (tasks.py), grading (rewards.py).
"""

import functools
import hashlib
import inspect
import itertools
import random
from fractions import Fraction

SCHEDULING_TEXT = (
    "Below is a list of tasks, each with a duration (in days) and a set of prerequisite tasks. Tasks can only start"
    " once their prerequisites finish, but they can run in parallel if no dependencies are blocking them. What is the"
    " smallest total number of days required to complete every task?\nTasks:\n"
)
WORDS = """
    apple banana orange strawberry blueberry cherry lemon grape melon papaya carrot onion potato tomato pepper
    cucumber balloon bicycle bottle button candle carpet castle chair coffee curtain dragon elephant engine
    feather finger flower forest garden giraffe guitar hammer harbor helmet island jacket kettle kitchen ladder
    letter library lighthouse market meadow mirror mountain needle notebook ocean paper parrot pencil piano
    pillow planet pocket pumpkin rabbit railway river rocket saddle school shadow shoulder silver sparrow spoon
    squirrel station summer table teacher telephone theater thunder ticket tunnel turtle umbrella valley village
    violin wagon whistle window winter yellow zebra
""".split()
NAMES = (
    "Ana Ben Chloe David Ella Farid Grace Hugo Ines Jonas Kira Liam Mona Noah Olga Pavel Rosa Samir Tara Victor".split()
)
ITEMS = "marbles stamps shells stickers cards coins beads pencils apples buttons".split()
# These reasoning-gym scorers hand the model's text to Python's eval, directly or through sympy's parse_expr.
EVALUATING_SCORERS = frozenset(
    "binary_matrix countdown intermediate_integration n_queens polynomial_multiplication puzzle24 "
    "simple_integration spiral_matrix string_insertion".split()
)
ANY_ANSWER = "(whatever the scorer accepts)"  # the answer in the row where reasoning-gym knows no single one
REPEATS_IN_A_ROW = 10_000  # after that many draws without a new question a generator counts as exhausted


def in_validation(question):
    """True for the fifth of all questions that belongs to split=validation; depends on the question's text alone.

    The 9 makes the 720 default multiplication questions divide into exactly 144 and 576.
    """
    return int(hashlib.sha256(f"9 {question}".encode()).hexdigest(), 16) % 5 == 0


def _different(n, split, rows, what):
    """The first n rows of the split with questions that differ; ValueError when there seem to be no more."""
    if split not in (None, "train", "validation"):
        raise ValueError(
            f"split={split} of {what} is unknown: use split=train or split=validation, or leave it out for all"
            " questions."
        )
    if not isinstance(n, int) or n < 1:
        raise ValueError(f"{what} needs a whole number of at least 1 for n, not {n!r}.")
    found, repeats = {}, 0
    for row in rows:
        if row["question"] in found or (split and in_validation(row["question"]) != (split == "validation")):
            repeats += 1
        else:
            found[row["question"]], repeats = row, 0
        if len(found) == n:
            return list(found.values())
        if repeats == REPEATS_IN_A_ROW:
            break
    raise ValueError(
        f"{what} has only {len(found)} different questions{f' in split={split}' if split else ''} at this difficulty, "
        f"fewer than n={n}: lower n or widen the difficulty."
    )


def _check_difficulty(what, options, known):
    for name, value in options.items():
        if name not in known:
            raise ValueError(f"{what} has no parameter {name!r}: it takes n, seed, split, {', '.join(known)}.")
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{what} needs a whole number of at least 1 for {name}, not {value!r}.")
    options = known | options
    for name in known:
        high = name.replace("min_", "max_")
        if name.startswith("min_") and options[name] > options[high]:
            raise ValueError(
                f"{what} has {name}={options[name]} above {high}={options[high]}: raise the one or lower the other."
            )


def _endless(make):
    """Turns make(rng, **difficulty), which draws one row, into a generator of this module's signature."""
    known = {name: p.default for name, p in inspect.signature(make).parameters.items() if name != "rng"}

    @functools.wraps(make)
    def rows(n=1000, seed=0, split=None, **difficulty):
        _check_difficulty(make.__name__, difficulty, known)
        rng = random.Random(f"{make.__name__} {seed}")
        return _different(n, split, (make(rng, **difficulty) for _ in itertools.count()), make.__name__)

    return rows


def _row(question, answer, verify_type, **more):
    return {"question": question, "answer": str(answer), "verify_type": verify_type, **more}


def multiplication(n=None, seed=0, split=None, **difficulty):
    """The first n products of the ranges in an order shuffled by the seed; n=None: every one of the split."""
    known = {"min_a": 10, "max_a": 99, "min_b": 2, "max_b": 9}
    _check_difficulty("multiplication", difficulty, known)
    d = known | difficulty
    rows = [
        _row(f"What is {a} * {b}?", a * b, "LAST_NUMBER")
        for a in range(d["min_a"], d["max_a"] + 1)
        for b in range(d["min_b"], d["max_b"] + 1)
    ]
    random.Random(seed).shuffle(rows)
    if n is None:
        n = sum(split is None or in_validation(row["question"]) == (split == "validation") for row in rows)
    return _different(n, split, rows, "multiplication")


@_endless
def char_count(rng, min_words=1, max_words=2):
    text = " ".join(rng.choices(WORDS, k=rng.randint(min_words, max_words)))
    # One question in five asks for any letter, so that 0 is a possible answer.
    letter = rng.choice("abcdefghijklmnopqrstuvwxyz" if rng.random() < 0.2 else text.replace(" ", ""))
    return _row(f'How many times does the letter "{letter}" occur in "{text}"?', text.count(letter), "LAST_NUMBER")


def smallest_total_time(durations, prerequisites):
    """Days until every task is done, each starting when its prerequisites (indices of earlier tasks) have finished.

    durations [4, 1, 2, 10] with prerequisites [[], [], [0], [0]] take 14 days: task 0, then task 3.
    """
    finish = []
    for duration, before in zip(durations, prerequisites, strict=True):
        finish.append(duration + max((finish[i] for i in before), default=0))
    return max(finish)


@_endless
def scheduling(rng, min_tasks=3, max_tasks=6, max_duration=10, max_deps=4):
    count = rng.randint(min_tasks, max_tasks)
    durations = [rng.randint(1, max_duration) for _ in range(count)]
    prerequisites = [rng.sample(range(i), rng.randint(0, min(i, max_deps))) for i in range(count)]
    lines = [
        f"T{i}(duration={durations[i]}, deps=[{', '.join(f'T{j}' for j in before) or None}])\n"
        for i, before in enumerate(prerequisites)
    ]
    return _row(SCHEDULING_TEXT + "".join(lines), smallest_total_time(durations, prerequisites), "LAST_NUMBER")


@_endless
def chain_sum(rng, min_terms=2, max_terms=4, digits=2):
    terms = [rng.randint(10 ** (digits - 1), 10**digits - 1) for _ in range(rng.randint(min_terms, max_terms))]
    signs = [1] + [rng.choice((1, -1)) for _ in terms[1:]]
    text = str(terms[0]) + "".join(f" {'+' if s > 0 else '-'} {t}" for s, t in zip(signs[1:], terms[1:]))
    return _row(f"What is {text}?", sum(s * t for s, t in zip(signs, terms)), "LAST_NUMBER")


@_endless
def countdown(rng, min_numbers=3, max_numbers=4, max_number=50, max_target=100):
    """The answer is the target; `numbers`, each to be used exactly once, and one `solution` stand beside it."""
    for _ in range(10_000):
        numbers = [rng.randint(1, max_number) for _ in range(rng.randint(min_numbers, max_numbers))]
        parts = [(Fraction(number), str(number)) for number in numbers]
        while len(parts) > 1:
            (a, a_text), (b, b_text) = (parts.pop(rng.randrange(len(parts))) for _ in range(2))
            operator = rng.choice("+-*/" if b else "+-*")
            value = {"+": a + b, "-": a - b, "*": a * b, "/": a / b if b else None}[operator]
            parts.append((value, f"({a_text} {operator} {b_text})"))
        ((target, solution),) = parts
        if target.denominator == 1 and 1 <= target <= max_target:
            return _row(
                f"Use the numbers {', '.join(map(str, numbers))}, each exactly once, with + - * / and parentheses to"
                f" make {target}. Write the expression between <answer> and </answer>.",
                target,
                "COUNTDOWN",
                numbers=numbers,
                solution=solution,
            )
    raise ValueError(
        f"countdown found no numbers that make a target of at most {max_target}: raise max_target or lower max_numbers."
    )


@_endless
def sorting(rng, min_length=3, max_length=6, digits=2):
    numbers = [rng.randrange(10**digits) for _ in range(rng.randint(min_length, max_length))]
    descending = rng.random() < 0.5
    order = "largest to smallest" if descending else "smallest to largest"
    return _row(
        f"Sort these numbers from {order}: {', '.join(map(str, numbers))}. Write the sorted numbers alone on the last"
        " line, with a comma and a space between them.",
        ", ".join(map(str, sorted(numbers, reverse=descending))),
        "EXACT",
    )


@_endless
def gsm8k_style(rng, min_steps=2, max_steps=4, max_start=40):
    """One person's belongings through a few events; the answer is the number alone, not a worked solution."""
    name, friend = rng.sample(NAMES, 2)
    items = rng.choice(ITEMS)
    have = rng.randint(1, max_start)
    sentences = [f"{name} has {have} {items}."]
    for _ in range(rng.randint(min_steps, max_steps)):
        events = ["gets", "packs", "doubles"] + ["gives"] * (have > 1) + ["halves"] * (have % 2 == 0)
        event = rng.choice(events)
        if event == "gets":
            k = rng.randint(2, 20)
            have += k
            sentences.append(f"{friend} gives {name} {k} more.")
        elif event == "packs":
            k, each = rng.randint(2, 6), rng.randint(2, 12)
            have += k * each
            sentences.append(f"{name} buys {k} packs with {each} {items} in each.")
        elif event == "doubles":
            have *= 2
            sentences.append(f"Then {name} doubles the number of {items}.")
        elif event == "gives":
            k = rng.randint(1, have - 1)
            have -= k
            sentences.append(f"{name} gives {k} {items} to {friend}.")
        else:
            have //= 2
            sentences.append(f"{name} loses half of all the {items}.")
    if rng.random() < 0.5:
        sentences.append(f"How many {items} does {name} have now?")
    else:
        price = rng.randint(2, 9)
        have *= price
        sentences.append(f"{name} sells all of them for ${price} each. How many dollars does {name} get?")
    return _row(" ".join(sentences), have, "LAST_NUMBER")


GENERATORS = {
    make.__name__: make for make in (multiplication, char_count, scheduling, chain_sum, countdown, sorting, gsm8k_style)
}


def reasoning_gym_rows(name, n=1000, seed=0, split=None, **config):
    """n rows of the reasoning-gym data set `name`, with the `metadata` its scorer needs; config goes to the package.

    Raises ValueError when the package is missing or does not know the name or config, when the scorer would run the
    model's text, and when it gives full marks for nonsense (as one does that takes any text for a yes).
    """
    try:
        import reasoning_gym
    except ImportError as error:
        raise ValueError(f"reasoning_gym/{name} needs the package: pip install reasoning-gym ({error}).") from None
    if name in EVALUATING_SCORERS:
        raise ValueError(
            f"reasoning_gym/{name} is refused, its scorer runs the model's text as Python: use another task."
        )
    try:
        # The package seeds question i with seed + i: neighbouring seeds would give nearly the same questions, so ours
        # are spread out.
        spread = random.Random(f"reasoning_gym {name} {seed}").randrange(2**31)
        dataset = reasoning_gym.create_dataset(name, seed=spread, size=10 * n + 100, **config)
    except (ValueError, TypeError, AssertionError) as error:
        raise ValueError(f"reasoning-gym cannot make {name!r} with {config or 'its defaults'}: {error}.") from error
    rows = _different(n, split, dataset, f"reasoning_gym/{name}")
    rows = [
        row
        | {
            "answer": ANY_ANSWER if row["answer"] is None else row["answer"],
            "verify_type": "generators:score_reasoning_gym",
            "reasoning_gym": name,
        }
        for row in rows
    ]
    if any(score_reasoning_gym("I do not know", row) for row in rows[:20]):
        raise ValueError(f"reasoning_gym/{name} is refused, its scorer pays for any text: use another task.")
    return rows


@functools.cache
def _reasoning_gym_scorer(name):
    import reasoning_gym

    return reasoning_gym.get_score_answer_fn(name)


def score_reasoning_gym(completion, row):
    """1.0 where the package's own scorer gives the extracted answer full marks, else 0.0.

    Its scorers pay parts for near misses and for a right answer inside other text, which a policy would learn to
    collect. The answer is the content of the one <answer> tag or, without a tag, as many of the last lines as the gold
    has. The gold's own text always counts, also where a trip through JSON turned tuples in the metadata into lists.
    """
    opened, closed = completion.count("<answer>"), completion.count("</answer>")
    gold = None if row["answer"] == ANY_ANSWER else row["answer"]
    if opened or closed:
        answer = completion.partition("<answer>")[2].partition("</answer>")[0].strip() if opened == closed == 1 else ""
    else:
        count = len(gold.strip().splitlines()) if gold else 1
        answer = "\n".join(completion.rstrip().splitlines()[-count:]).strip()
    if not answer:
        return 0.0
    if gold is not None and answer == gold.strip():
        return 1.0
    try:
        return float(_reasoning_gym_scorer(row["reasoning_gym"])(answer, row | {"answer": gold}) == 1.0)
    except ValueError:  # some scorers read the answer with int() or float(); text that is no number is a wrong answer
        return 0.0
