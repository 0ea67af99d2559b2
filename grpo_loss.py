"""GRPO's mathematics as pure functions: advantages, token log-probs, the policy loss and its metrics.

Each completion is compared with the others of its group, and the log-prob of its tokens is pushed up or down by that
difference, not further than a clip allows (DeepSeekMath, 2402.03300, eq. 3):

    A    = (r - mean(r)) / (std(r) + 1e-4)               over the G completions of one prompt
    ρ    = exp(logprob - old_logprob)                    per token
    loss = Σ weight * [ -min(ρ A, clip(ρ, 1-ε, 1+ε_high) A) + β KL ]

Three things to know before reading on:

* Everything is per token, [R, T]. How tokens are averaged is baked into ``weight`` before the first microbatch runs:
  losses and gradients of microbatches ADD up to those of the whole step, however it was cut or ordered.
* A token is in the loss where its weight is not 0. All other places may hold anything, NaN and inf included: they are
  replaced before any exponential sees them, since 0 * NaN is NaN in the value and 0 * inf is NaN in the gradient.
* With one update per rollout the old policy is the policy: ρ is exactly 1, nothing is clipped, and the loss is near zero
  by construction. The gradient is not: it is -A * weight for each token's log-prob.

Left out: distributed code, the model, sampling, an entropy bonus, KL estimators other than k3.

Legend: R rows, T tokens in a row, N predictors (places whose next token is scored), H hidden, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

LOSSES = ("token_mean", "seq_mean", "dr_grpo", "gspo", "cispo")
CORRECTIONS = ("none", "token_truncate", "sequence_mask")
MAX_LOG_RATIO = 20.0  # exp(20) = 4.85e8: far outside any clip, far inside float32, whose exp overflows at 89

# ---------------------------------------------------------------------------------------- before the first microbatch


def group_advantages(
    rewards: list[float | None], groups: list[int], norm: str = "group", eps: float = 1e-4
) -> list[float]:
    """How much better each completion is than its group: (r - mean of the group) / (spread + eps).

    The spread is the sample standard deviation (ddof 1) of the group (``norm="group"``, 2402.03300), of all rewards
    (``"batch"``, 2508.08221), or the division is left out (``"none"``, Dr. GRPO, 2503.20783). A reward that is None or
    not finite is unscorable: it leaves the statistics and gets 0. Equal rewards, or a single scorable one, give
    exactly 0.

        [1, 0, 0, 0]                -> [1.4997, -0.4999, -0.4999, -0.4999]
        [1, 0, None, 1]             -> [0.577, -1.155, 0, 0.577]
        [1, 0, 0, 1], [2, 2, 2, 2]  -> ±0.865875 and 0 by "group", ±0.564012 and 0 by "batch", ±0.5 and 0 by "none"

    Args:
        rewards: one per completion, in any order; groups: the group of each, any labels.

    Raises:
        ValueError: lists of different lengths, or an unknown ``norm``.
    """
    if norm not in ("group", "batch", "none"):
        raise ValueError(f"advantage norm {norm!r} is unknown: use group, batch or none")
    scored = _scored_by_group(rewards, groups)
    everything = [r for group in scored.values() for r in group]
    batch_spread = stdev(everything) if norm == "batch" and len(everything) > 1 else 0.0
    baseline, divisor = {}, {}
    for label, group in scored.items():
        if len(set(group)) > 1:
            baseline[label] = fmean(group)
            divisor[label] = 1.0 if norm == "none" else (stdev(group) if norm == "group" else batch_spread) + eps
    return [
        (r - baseline[label]) / divisor[label] if _scorable(r) and label in baseline else 0.0
        for r, label in zip(rewards, groups)
    ]


def zero_spread_share(rewards: list[float | None], groups: list[int]) -> float:
    """Share of the groups that give no signal: rewards all equal (compared exactly), or fewer than two scorable.

    [1, 0, 0, 1], [2, 2, 2, 2] -> 0.5, whatever the advantages were divided by. 0.0 without groups.
    """
    scored = _scored_by_group(rewards, groups).values()
    return sum(len(set(group)) < 2 for group in scored) / len(scored) if scored else 0.0


def _scorable(reward: float | None) -> bool:
    return reward is not None and math.isfinite(reward)


def _scored_by_group(rewards: list[float | None], groups: list[int]) -> dict[int, list[float]]:
    if len(rewards) != len(groups):
        raise ValueError(f"{len(rewards)} rewards need as many group numbers, not {len(groups)}")
    scored: dict[int, list[float]] = {label: [] for label in groups}
    for reward, label in zip(rewards, groups):
        if _scorable(reward):
            scored[label].append(reward)
    return scored


def token_weights(lengths: list[int], mode: str, *, max_completion_tokens: int) -> list[float]:
    """Weight of each token of each completion in the loss of one optimizer step.

        token_mean, cispo   1 / Σ lengths                      each token counts the same (DAPO, 2503.14476, eq. 8)
        seq_mean, gspo      1 / (n * length)                   each completion counts the same (2402.03300, eq. 3)
        dr_grpo             1 / (B * max_completion_tokens)    a constant divisor (2503.20783)

    n is the number of completions with length > 0, B that of all. Advantages +1 and -1 with lengths 2 and 8, at ρ = 1:
    the loss is -(2 - 8) / 10 = +0.6 by token_mean and 0.0 by seq_mean; the gradient is not zero in either.

    Args:
        lengths: completion tokens of ALL completions of the optimizer step, over all microbatches and ranks; 0 takes a
            completion (unscorable, or cut at the limit and masked) out of the loss.
        max_completion_tokens: the sampling limit; used by dr_grpo only.
    """
    _check_name("loss", mode, LOSSES)
    if mode in ("token_mean", "cispo"):
        divisors = [sum(lengths)] * len(lengths)
    elif mode == "dr_grpo":
        divisors = [len(lengths) * max_completion_tokens] * len(lengths)
    else:
        divisors = [sum(n > 0 for n in lengths) * n for n in lengths]
    return [1 / divisor if n else 0.0 for n, divisor in zip(lengths, divisors)]


def _check_name(setting: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"{setting} {value!r} is unknown: use one of {', '.join(known)}")


# ---------------------------------------------------------------------------------------------------- token log-probs


def token_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float = 1.0, chunk_tokens: int = 128
) -> tuple[Tensor, Tensor]:
    """Log-prob of each target and entropy of the law it was drawn from, without ever holding [N, V] logits.

        logits = hidden @ weightᵀ / temperature,   logprob = logits[target] - logsumexp(logits)
        entropy = -Σ p log p   in nats, without gradient

    The temperature is the sampling temperature: what was sampled is what is scored. Logits [0, 1] at temperature 0.5
    give token 1 the log-prob -0.126928 (-0.313262 at temperature 1).

    The head runs over ``chunk_tokens`` predictors at a time, and backward computes their logits again: at V = 152k the
    float32 logits of 8192 tokens are 5 GB, those of 128 tokens 78 MB. Matrix products run in the dtype of ``hidden``
    (bf16 beside a float32 ``weight``), whatever autocast says; all else runs in float32, or float64 for float64.

    Args:
        hidden: [N, H], N may be 0.
        weight: [V, H] of the LM head.
        targets: [N] token ids.

    Returns:
        logprob [N] and entropy [N].

    Raises:
        ValueError: a temperature or ``chunk_tokens`` that is not positive, or another number of targets than of rows.
    """
    if not temperature > 0:
        raise ValueError(f"temperature {temperature} gives no log-probs: use a value above 0")
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens {chunk_tokens} is too small: use at least 1")
    if targets.shape != hidden.shape[:1]:
        raise ValueError(f"hidden {tuple(hidden.shape)} needs one target a row, not {tuple(targets.shape)}")
    return TokenLogprobs.apply(hidden, weight, targets, temperature, chunk_tokens)


class TokenLogprobs(torch.autograd.Function):
    """``token_logprobs`` with its backward written out: d logprob / d logits = onehot(target) - p.

    Only hidden, weight, targets and the logsumexp [N] are kept for backward. If one chunk holds all predictors its
    probabilities are kept instead: backward would need that memory anyway, and a matrix product is saved.
    """

    @staticmethod
    def forward(ctx, hidden, weight, targets, temperature, chunk_tokens):
        logprob, entropy, logsumexp = hidden.new_empty(3, len(targets), dtype=_at_least_float32(hidden.dtype))
        probs = None
        for part in _chunks(len(targets), chunk_tokens):
            logits = _logits(hidden[part], weight, temperature)
            top = logits.amax(-1, keepdim=True)
            logits -= top
            probs = logits.exp()
            total = probs.sum(-1, keepdim=True)
            probs /= total
            log_total = total.log()
            logprob[part] = (logits.gather(1, targets[part, None]) - log_total).squeeze(1)
            entropy[part] = log_total.squeeze(1) - torch.linalg.vecdot(probs, logits)
            logsumexp[part] = (top + log_total).squeeze(1)
        kept_probs = probs if len(targets) <= chunk_tokens else None
        ctx.save_for_backward(hidden, weight, targets, logsumexp, kept_probs)
        ctx.temperature, ctx.chunk_tokens = temperature, chunk_tokens
        ctx.mark_non_differentiable(entropy)
        return logprob, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx, d_logprob, _):
        hidden, weight, targets, logsumexp, kept_probs = ctx.saved_tensors
        want_hidden, want_weight = ctx.needs_input_grad[:2]
        d_hidden = torch.empty_like(hidden) if want_hidden else None
        # Every chunk adds to d_weight: in bf16 the later ones would be lost to rounding.
        d_weight = torch.zeros_like(weight, dtype=_at_least_float32(weight.dtype)) if want_weight else None
        for part in _chunks(len(targets), ctx.chunk_tokens):
            scale = d_logprob[part, None] / ctx.temperature
            if kept_probs is not None:
                d_logits = kept_probs * -scale
            else:
                logits = _logits(hidden[part], weight, ctx.temperature)
                d_logits = logits.sub_(logsumexp[part, None]).exp_().mul_(-scale)
            d_logits = d_logits.scatter_add_(1, targets[part, None], scale).to(hidden.dtype)
            if want_hidden:
                d_hidden[part] = d_logits @ weight.to(hidden.dtype)
            if want_weight and hidden.dtype == d_weight.dtype:
                d_weight.addmm_(d_logits.T, hidden[part])
            elif want_weight:
                d_weight += d_logits.T @ hidden[part]
        return d_hidden, d_weight.to(weight.dtype) if want_weight else None, None, None, None


def _chunks(count: int, size: int) -> list[slice]:
    return [slice(start, start + size) for start in range(0, count, size)]


def _at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _logits(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    """[n, H] -> [n, V], a tensor of its own that the caller may write into."""
    # Backward runs outside of autocast: without this its logits would not be those of forward.
    with torch.autocast(hidden.device.type, enabled=False):
        logits = (hidden @ weight.to(hidden.dtype).T).to(_at_least_float32(hidden.dtype))
    return logits if temperature == 1.0 else logits.div_(temperature)


# ---------------------------------------------------------------------------------------------------- the policy loss


@dataclass(frozen=True)
class LossSettings:
    """What ``policy_loss`` needs to know besides its tensors."""

    loss: str = "token_mean"  # one of LOSSES; the averaging itself is in the weights
    epsilon: float = 0.2  # ρ is clipped to [1 - epsilon, 1 + epsilon_high]
    epsilon_high: float = 0.28  # DAPO's clip-higher (2503.14476)
    beta: float = 0.0  # factor of the KL term; 0: no reference needed
    delta: float | None = None  # dual clip: bound on ρ where the advantage is negative; None: off
    sampler_correction: str = "none"  # one of CORRECTIONS
    correction_cap: float = 2.0  # token_truncate cuts to it, sequence_mask drops completions above it
    correction_floor: float = 0.0  # sequence_mask drops completions below it

    def __post_init__(self):
        _check_name("loss", self.loss, LOSSES)
        _check_name("sampler_correction", self.sampler_correction, CORRECTIONS)
        if self.delta is not None and (self.loss == "cispo" or not self.delta > 1 + self.epsilon_high):
            raise ValueError(
                f"delta {self.delta} must be above 1 + epsilon_high = {1 + self.epsilon_high}, and left out for cispo"
            )


def policy_loss(
    logprob: Tensor, advantage: Tensor, weight: Tensor, old_logprob: Tensor | None, ref_logprob: Tensor | None,
    sampler_logprob: Tensor | None, sequence: Tensor | None, settings: LossSettings,
) -> Tensor:
    """The loss of one microbatch, Σ weight * (c * policy term + β KL), to be added to those of the others.

    Policy term of a token, ρ = exp(logprob - old_logprob):

        token_mean, seq_mean, dr_grpo   -min(ρ A, clip(ρ, 1-ε, 1+ε_high) A)                PPO, 1707.06347, eq. 7
        gspo                            the same, ρ = exp(completion's mean of log ρ)      2507.18071
        cispo                           -stop_gradient(min(ρ, 1+ε_high)) A logprob         MiniMax-M1, 2506.13585

    At ε = ε_high = 0.2, (ρ, A) = (1.5, 1), (1.5, -1), (0.5, 1), (0.5, -1) give -1.2, 1.5, -0.5, 0.8. One side is left
    open on purpose: ρ = 50, A = -1 gives 50. ``delta`` closes it (dual clip, 1912.09729): 3 at delta 3. cispo clips the
    ratio but no token's gradient; as in its paper's experiments there is no lower clip.

    KL is k3 (joschu.net/blog/kl-approx.html): exp(d) - d - 1, d = ref_logprob - logprob; 0.7183 at d = 1, 0.3679 at -1.
    It stays where all advantages of a group are 0.

    Every log ratio is bounded at 20 before exp. Nothing changes below; above, a token gives a large constant (4.85e8)
    and no gradient, where the exact formula overflows to inf and NaN.

    c weighs the tokens of a sampler whose log-probs are not quite the old policy's. It carries no gradient, leaves KL
    alone, and the denominators stay those of all tokens:

        token_truncate   min(exp(old - sampler), cap)                  truncated importance sampling (Ionides, 2008)
        sequence_mask    s = exp(completion's sum of (old - sampler)) where floor <= s <= cap, else 0

    s is the ratio of whole completions: a difference of 0.01 on each of 100 tokens makes it e = 2.718, not 1.01.

    Equal to TRL 1.16.0 in value and gradient (its grpo is seq_mean, its dapo token_mean, its sequence-level grpo gspo),
    but on purpose: completions out of the loss do not count in seq_mean's n; KL is never multiplied by a ratio, in gspo
    neither; log ratios are bounded; cispo's cap is 1 + ε_high instead of ε_high; ε_high is 0.28 by default.

    Args:
        logprob: [R, T] of the policy, float32 or float64, at the sampling temperature.
        advantage, weight: [R, T]; weight 0 outside completions.
        old_logprob: [R, T], or None with one update per rollout: ``logprob.detach()``.
        ref_logprob: [R, T], needed when beta > 0; sampler_logprob: [R, T], needed by a sampler correction.
        sequence: [R, T] completion numbers (whole, small, distinct within a row), -1 outside; needed by gspo and
            sequence_mask. A completion lies in one row.

    Returns:
        a scalar; exactly 0, with zero gradients, where no token has weight.

    Raises:
        ValueError: a tensor is None that the settings need.
    """
    ref_logprob = ref_logprob if settings.beta > 0 else None
    terms = _token_terms(logprob, advantage, weight, old_logprob, ref_logprob, sampler_logprob, sequence, settings)
    token_loss = terms.policy if terms.kl is None else terms.policy + settings.beta * terms.kl
    return (token_loss * weight).sum()


class _Terms(NamedTuple):
    """Per token [R, T], before weighting. Finite, and of no meaning, where the weight is 0."""

    policy: Tensor  # with the correction in it
    kl: Tensor | None
    ratio: Tensor
    low: Tensor  # bool: gradient taken away by the lower clip
    high: Tensor  # bool: by the upper clip
    gap: Tensor | None  # old - sampler
    correction: Tensor | float


def _token_terms(logprob, advantage, weight, old_logprob, ref_logprob, sampler_logprob, sequence, settings) -> _Terms:
    s: LossSettings = settings
    if s.beta > 0 and ref_logprob is None:
        raise ValueError(f"beta {s.beta} needs the reference's log-probs: pass ref_logprob, or set beta to 0")
    if s.sampler_correction != "none" and sampler_logprob is None:
        raise ValueError(f"sampler_correction {s.sampler_correction} needs sampler_logprob: pass it, or use none")
    if (s.loss == "gspo" or s.sampler_correction == "sequence_mask") and sequence is None:
        raise ValueError("loss gspo and sampler_correction sequence_mask work on whole completions: pass sequence")
    valid = weight != 0
    old_logprob = logprob.detach() if old_logprob is None else old_logprob
    advantage = torch.where(valid, advantage, 0)

    log_ratio = torch.where(valid, logprob - old_logprob, 0)
    if s.loss == "gspo":
        lengths = _sum_per_sequence(valid.to(log_ratio.dtype), sequence, valid).clamp(min=1)
        log_ratio = _sum_per_sequence(log_ratio, sequence, valid) / lengths
    ratio = _bounded_exp(log_ratio)
    low, high = ratio < 1 - s.epsilon, ratio > 1 + s.epsilon_high
    if s.loss == "cispo":
        low = torch.zeros_like(high)
        policy = -ratio.clamp(max=1 + s.epsilon_high).detach() * advantage * torch.where(valid, logprob, 0)
    else:
        low, high = low & (advantage < 0), high & (advantage > 0)
        # delta is above 1 + epsilon_high, so with a positive advantage the clip comes first.
        open_ratio = ratio if s.delta is None else ratio.clamp(max=s.delta)
        clipped_ratio = ratio.clamp(1 - s.epsilon, 1 + s.epsilon_high)
        policy = -torch.minimum(open_ratio * advantage, clipped_ratio * advantage)

    gap = None if sampler_logprob is None else torch.where(valid, (old_logprob - sampler_logprob).detach(), 0)
    correction = 1.0
    if s.sampler_correction == "token_truncate":
        correction = _bounded_exp(gap).clamp(max=s.correction_cap)
    elif s.sampler_correction == "sequence_mask":
        correction = _bounded_exp(_sum_per_sequence(gap, sequence, valid))
        correction = torch.where((correction >= s.correction_floor) & (correction <= s.correction_cap), correction, 0)

    kl = None
    if ref_logprob is not None:
        d = torch.where(valid, ref_logprob - logprob, 0).clamp(max=MAX_LOG_RATIO)
        kl = torch.expm1(d) - d  # exp(d) - 1 leaves only rounding noise of a small d, of either sign
    return _Terms(policy * correction, kl, ratio, low, high, gap, correction)


def _bounded_exp(log_ratio: Tensor) -> Tensor:
    # Bounded before exp: cutting the result instead would leave exp's infinite gradient times 0, which is NaN.
    return log_ratio.clamp(max=MAX_LOG_RATIO).exp()


def _sum_per_sequence(values: Tensor, sequence: Tensor, valid: Tensor) -> Tensor:
    """Sum of ``values`` [R, T] over the tokens of each completion, standing at each of its tokens."""
    place = torch.where(valid, sequence.long() + 1, 0)
    sums = values.new_zeros(len(values), int(place.max()) + 1).scatter_add(1, place, values)
    return sums.gather(1, place)


@torch.no_grad()
def policy_metrics(
    logprob: Tensor, advantage: Tensor, weight: Tensor, old_logprob: Tensor | None, ref_logprob: Tensor | None,
    sampler_logprob: Tensor | None, sequence: Tensor | None, settings: LossSettings, entropy: Tensor | None = None,
) -> dict[str, float]:
    """What to log about one step, from the tensors [M, T] of all its rows, as ``policy_loss`` takes them.

    Means are over the tokens in the loss, each counting the same. Clipped means that the clip took the gradient away:
    ρ < 1-ε with A < 0, or ρ > 1+ε_high with A > 0. (ρ = 1.3 with A < 0 is not clipped. For cispo, clip_high is the
    share of capped ratios, and clip_low is 0.)

    Returns:
        tokens                                number in the loss; at 0 every other value is 0.0 and says nothing
        masked_share                          (with sequence) share of completion tokens that are out of the loss
        loss, loss_policy, loss_kl            loss = loss_policy + loss_kl
        ratio_mean, ratio_min, ratio_max      of ρ
        clip_low, clip_high                   shares of the tokens; of the completions in gspo
        kl                                    (with ref_logprob) k3, also when beta is 0
        entropy                               (with entropy [M, T]) nats
        sampler_diff_mean, sampler_diff_max   (with sampler_logprob) |old - sampler|, in log-prob
        sampler_ratio_mean                    (with sampler_logprob) exp(old - sampler), before any cap
        correction_mean                       (with a sampler correction) the factor c
    """
    terms = _token_terms(logprob, advantage, weight, old_logprob, ref_logprob, sampler_logprob, sequence, settings)
    valid = weight != 0
    tokens = valid.sum()

    def mean(x: Tensor) -> Tensor:
        return torch.where(valid, x, 0).sum() / tokens.clamp(min=1)

    def largest(x: Tensor) -> Tensor:
        return torch.where(valid, x, -math.inf).max().where(tokens > 0, 0)

    out = {"tokens": tokens}
    if sequence is not None:
        inside = sequence >= 0
        out["masked_share"] = (inside & ~valid).sum() / inside.sum().clamp(min=1)
    out["loss_policy"] = (terms.policy * weight).sum()
    out["loss_kl"] = (settings.beta * terms.kl * weight).sum() if settings.beta > 0 else torch.zeros_like(tokens)
    out["loss"] = out["loss_policy"] + out["loss_kl"]
    out |= {"ratio_mean": mean(terms.ratio), "ratio_min": -largest(-terms.ratio), "ratio_max": largest(terms.ratio)}
    # gspo's weights give each completion the same sum: a mean weighted by them counts completions.
    share = weight / weight.sum() if settings.loss == "gspo" else 1 / tokens
    out["clip_low"] = torch.where(valid & terms.low, share, 0).sum()
    out["clip_high"] = torch.where(valid & terms.high, share, 0).sum()
    if terms.kl is not None:
        out["kl"] = mean(terms.kl)
    if entropy is not None:
        out["entropy"] = mean(entropy)
    if terms.gap is not None:
        gap = terms.gap.abs()
        out |= {"sampler_diff_mean": mean(gap), "sampler_diff_max": largest(gap)}
        out["sampler_ratio_mean"] = mean(_bounded_exp(terms.gap))
    if settings.sampler_correction != "none":
        out["correction_mean"] = mean(terms.correction)
    # One copy from the device instead of one for each value.
    return dict(zip(out, torch.stack([value.double() for value in out.values()]).tolist()))
