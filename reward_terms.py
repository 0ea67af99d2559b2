"""Terms that may be added to a reward: format, overlong completions, repetition. Pure functions, each logged on its own
by the caller.

The raw correctness is never changed by them: shaped_reward() combines, and both are kept. What an all-wrong group makes
of small differences between terms is the advantage formula's business (grpo_loss.py). Left out: weights, which are
settings.
"""
from collections.abc import Hashable, Sequence


def format_term(completion: str, prompt_text: str = "", tags: Sequence[str] = ("think", "answer")) -> float:
    """1.0 when each tag opens and closes exactly once, in order, else 0.0. A first tag that the prompt's end has opened
    already counts as open.

    >>> format_term("<think>a</think> <answer>9</answer>"), format_term("a</think><answer>9</answer>", "..<think>")
    (1.0, 1.0)
    """
    if prompt_text.rstrip().endswith(f"<{tags[0]}>"):
        completion = f"<{tags[0]}>{completion}"
    marks = [mark for tag in tags for mark in (f"<{tag}>", f"</{tag}>")]
    places = [completion.find(mark) for mark in marks]
    return float(all(completion.count(mark) == 1 for mark in marks) and places == sorted(places))


def overlong_term(length: int, limit: int, margin: int) -> float:
    """DAPO's soft penalty for long completions (2503.14476, equation 13): 0 up to limit - margin tokens, then falling
    evenly to -1 at the limit.

    length, limit, margin in tokens.

    >>> overlong_term(80, 100, 20), overlong_term(90, 100, 20), overlong_term(100, 100, 20)
    (0.0, -0.5, -1.0)
    """
    if not 0 < margin <= limit:
        raise ValueError(f"The margin of the length penalty is {margin} tokens: set it from 1 to the limit of {limit}.")
    return max(-1.0, min(0.0, (limit - margin - length) / margin))


def repetition_term(ids: Sequence[Hashable], n: int = 4) -> float:
    """Minus the share of n-grams of the completion's tokens that had occurred before: 0 when all differ, towards -1 for
    a loop (2502.03373).

    >>> repetition_term([1, 2, 3, 4, 5]), repetition_term([7] * 8, n=4)
    (0.0, -0.8)
    """
    if n < 1:
        raise ValueError(f"The repetition penalty counts runs of {n} tokens: set 1 or more.")
    grams = [tuple(ids[start:start + n]) for start in range(len(ids) - n + 1)]
    return len(set(grams)) / len(grams) - 1.0 if grams else 0.0


def shaped_reward(correctness: float | None, terms: dict[str, float], weights: dict[str, float]) -> float | None:
    """weight of `correctness` (1 when not given) * correctness + the sum of weight * term; a term without a weight
    counts 0. None stays None.

    >>> shaped_reward(1.0, {"format": 0.5, "overlong": -1.0}, {"format": 0.2})
    1.1
    """
    unknown = sorted(weights.keys() - terms.keys() - {"correctness"})
    if unknown:
        raise ValueError(f"There is no reward term {', '.join(unknown)} to weight: use "
                         f"{', '.join(sorted({'correctness', *terms}))}.")
    if correctness is None:
        return None
    added = sum(weights.get(name, 0.0) * value for name, value in terms.items())
    return weights.get("correctness", 1.0) * correctness + added
