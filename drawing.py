"""How a token is drawn: the settings of a sampler, the law they make of logits, and random numbers of each sequence's own.

A token is read off the inverse of the distribution function at a uniform number that depends on the seed, the rollout, the
question and the sample alone, so a sequence comes out the same in any batch. Left out: the model.

Legend: B sequences, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn and when a completion ends.

    The recorded log-probs are always those of the full law at ``temperature``, the one that the trainer scores,
    whatever top_k, top_p and min_new_tokens cut away.

    Raises:
        ValueError: a value outside its range.
    """

    temperature: float = 1.0  # 0: greedy (log-probs are then those at temperature 1)
    top_k: int = 0  # 0: off; more than the vocabulary: all of it
    top_p: float = 1.0
    min_new_tokens: int = 0  # no stop before this many tokens
    max_new_tokens: int = 256
    max_sequences_in_flight: int = 256  # over all lanes; bounds the memory of the caches
    stop_ids: tuple[int, ...] = ()  # besides the end-of-sequence tokens
    stop_strings: tuple[str, ...] = ()  # the token that completes one is the last

    def __post_init__(self):
        if not (self.temperature >= 0 and math.isfinite(self.temperature)):
            raise ValueError(f"temperature {self.temperature} must be 0 (greedy) or a positive number")
        if self.top_k < 0:
            raise ValueError(f"top_k {self.top_k} must be 0 (off) or positive")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p {self.top_p} must be above 0 and at most 1 (off)")
        if self.max_new_tokens < 1 or self.max_sequences_in_flight < 1:
            raise ValueError("max_new_tokens and max_sequences_in_flight must be at least 1")
        if not 0 <= self.min_new_tokens <= self.max_new_tokens:
            raise ValueError(f"min_new_tokens {self.min_new_tokens} must lie in 0..{self.max_new_tokens}, the maximum")
        if "" in self.stop_strings:
            raise ValueError("a stop string must not be empty")


def uniforms(stream: tuple[int, ...], question: int, sample: int, count: int) -> np.ndarray:
    """``count`` float64 numbers in [0, 1) that depend on nothing but the arguments; a longer call starts the same."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([*stream, question, sample]))).random(count)


def cut_law(scaled: Tensor, top_k: int, top_p: float) -> Tensor:
    """-inf for what top-k and then top-p cut away. Logits [B, V] already divided by the temperature.

    top-p keeps the fewest most likely tokens whose probabilities reach it, at least one.
    """
    if 0 < top_k < scaled.shape[-1]:
        least = scaled.topk(top_k, dim=-1).values[:, -1:]
        scaled = scaled.masked_fill(scaled < least, float("-inf"))
    if top_p < 1:
        values, order = scaled.sort(dim=-1, descending=True)
        law = values.softmax(-1)
        beyond = law.cumsum(-1) - law >= top_p
        beyond[:, 0] = False
        scaled = scaled.masked_fill(torch.zeros_like(beyond).scatter(-1, order, beyond), float("-inf"))
    return scaled


def draw(
    logits: Tensor, uniform: Tensor, sampling: Sampling, banned: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """A token for each row of ``logits`` [B, V], and its log-prob in the full law at the temperature.

    Args:
        uniform: [B] float64 in [0, 1), not used at temperature 0.
        banned: bool [B, V], tokens that must not come.
    """
    scaled = logits / sampling.temperature if sampling.temperature not in (0, 1) else logits
    law = scaled if banned is None else scaled.masked_fill(banned, float("-inf"))
    if sampling.temperature == 0:
        token, normaliser = law.argmax(-1), scaled.logsumexp(-1)
    else:
        law = cut_law(law, sampling.top_k, sampling.top_p)
        top = law.amax(-1)
        token, total = invert((law - top[:, None]).exp_(), uniform)
        normaliser = top + total.log() if law is scaled else scaled.logsumexp(-1)
    return token, scaled.gather(-1, token[:, None])[:, 0] - normaliser


def invert(mass: Tensor, uniform: Tensor, block: int = 128) -> tuple[Tensor, Tensor]:
    """The token of each row at which the running sum of ``mass`` [B, V] passes uniform * its total; and the totals.

    The sums run in float64, over blocks of the vocabulary first and then inside one of them: a running sum over all of
    it costs seven times as much. A token of mass 0 never comes out, wherever the uniform number lies.
    """
    size = mass.shape[-1]
    blocks = torch.nn.functional.pad(mass, (0, -size % block)).unflatten(-1, (-1, block))
    sums = blocks.sum(-1, dtype=torch.float64)
    running = sums.cumsum(-1)
    total = running[:, -1:]
    target = _below(uniform[:, None] * total, total)
    chosen = torch.searchsorted(running, target, right=True).clamp_(max=running.shape[-1] - 1)
    inside = blocks[torch.arange(len(mass), device=mass.device), chosen[:, 0]].cumsum(-1, dtype=torch.float64)
    rest = target - (running - sums).gather(-1, chosen)
    place = torch.searchsorted(inside, _below(rest, inside[:, -1:]), right=True)
    return (chosen * block + place)[:, 0].clamp_(max=size - 1), total[:, 0]


def _below(target: Tensor, end: Tensor) -> Tensor:
    """In [0, end), from which rounding may have led: the search to its right then ends where the running sum grows."""
    return torch.minimum(target, torch.nextafter(end, torch.zeros_like(end))).clamp_(min=0)
