"""Statistics of graded answers: pass@k, majority votes, and intervals over questions. Pure functions.

Left out: tests of significance; compare intervals of the paired difference instead (``evaluate.py --compare``).
"""

from __future__ import annotations

import math
from collections.abc import Hashable

import numpy as np

RESAMPLES = 2000


def pass_at_k(samples: int, right: int, k: int) -> float:
    """The chance that at least one of k samples, drawn without replacement from ``samples`` of which ``right`` are right,
    is right: 1 - C(samples - right, k) / C(samples, k), unbiased (Chen et al. 2021, arXiv 2107.03374, equation 1).

    >>> pass_at_k(4, 1, 2), pass_at_k(4, 0, 2), pass_at_k(4, 3, 2)
    (0.5, 0.0, 1.0)

    Raises:
        ValueError: k is not between 1 and ``samples``.
    """
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} needs at least {k} samples a question, not {samples}")
    return 1.0 - math.comb(samples - right, k) / math.comb(samples, k)


def majority(answers: list[Hashable | None]) -> int | None:
    """The index of the first sample that gives the most frequent answer; of equally frequent ones, that which came first.
    Samples without an answer (None) do not vote; None when nobody votes.

    >>> majority([4, 7, None, 7, 4]), majority([None, 3]), majority([None])
    (0, 1, None)
    """
    counts: dict[Hashable, int] = {}
    for answer in answers:
        if answer is not None:
            counts[answer] = counts.get(answer, 0) + 1
    return answers.index(max(counts, key=counts.get)) if counts else None


def interval(values: list[float], seed: int = 0) -> tuple[float, float]:
    """The 95 % bootstrap interval of the mean of ``values``, one value a question (percentiles of 2,000 resamples).

    Questions are drawn anew, not samples: those of one question are not independent. Where all values are equal the
    interval is that one point.
    """
    data = np.asarray(values, dtype=float)
    generator = np.random.default_rng(seed)
    means = [data[generator.integers(0, len(data), len(data))].mean() for _ in range(RESAMPLES)]
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)
