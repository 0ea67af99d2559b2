"""Advantages, weights, policy loss, metrics and token log-probs against hand-computed values, golden numbers and gradients."""

import json
import math
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings as hypothesis_settings, strategies as st
from torch.autograd import gradcheck
from torch.testing import assert_close

from grpo_loss import (
    CORRECTIONS, LOSSES, LossSettings, group_advantages, policy_loss, policy_metrics, token_logprobs, token_weights,
    zero_spread_share,
)

GOLDEN = json.loads((Path(__file__).parent / "golden_losses.json").read_text())
NAN, INF = math.nan, math.inf


def close(got, want, atol=1e-5):
    assert_close(torch.as_tensor(got, dtype=torch.float64), torch.as_tensor(want, dtype=torch.float64), rtol=0, atol=atol)


def symmetric(**changes):
    """Settings with PPO's symmetric clip of 0.2, which the hand-computed and golden numbers use."""
    return LossSettings(**{"epsilon": 0.2, "epsilon_high": 0.2, **changes})


def one_token(log_ratio=0.0, advantage=0.0, settings=None, ref_gap=None, sampler_gap=None, dtype=torch.float32):
    """Loss and d loss / d logprob of one token of weight 1, logprob -1."""
    logprob = torch.tensor([[-1.0]], dtype=dtype, requires_grad=True)
    shifted = lambda gap: None if gap is None else logprob.detach() + gap  # noqa: E731
    loss = policy_loss(
        logprob, torch.full_like(logprob, advantage), torch.ones_like(logprob), shifted(-log_ratio), shifted(ref_gap),
        shifted(None if sampler_gap is None else -log_ratio - sampler_gap), torch.zeros(1, 1, dtype=torch.long),
        settings or symmetric(),
    )
    loss.backward()
    return loss.item(), logprob.grad.item()


def batch(lengths, advantages, mode, *, seed=0, dtype=torch.float64, max_completion_tokens=8, gap=0.3):
    """Random columns of completions, one a row: logprob, advantage, weight, old, ref, sampler, sequence, all [R, T]."""
    generator = torch.Generator().manual_seed(seed)
    rows, width = len(lengths), max(lengths)
    logprob = -torch.rand(rows, width, generator=generator, dtype=dtype) - 0.1
    old, ref, sampler = (logprob + gap * torch.randn(rows, width, generator=generator, dtype=dtype) for _ in range(3))
    inside = torch.arange(width) < torch.tensor(lengths)[:, None]
    weights = token_weights(lengths, mode, max_completion_tokens=max_completion_tokens)
    weight = torch.where(inside, torch.tensor(weights, dtype=dtype)[:, None], 0)
    advantage = torch.where(inside, torch.tensor(advantages, dtype=dtype)[:, None], 0)
    sequence = torch.where(inside, torch.arange(rows)[:, None], -1)
    return [logprob, advantage, weight, old, ref, sampler, sequence]


def loss_and_grad(columns, settings):
    logprob = columns[0].clone().requires_grad_()
    loss = policy_loss(logprob, *columns[1:], settings)
    (grad,) = torch.autograd.grad(loss, logprob)
    return loss.detach(), grad


# ---------------------------------------------------------------------------------------------------------- advantages


def test_B01_equal_rewards_give_exactly_zero():
    groups = [0] * 4 + [1] * 4
    for norm in ("group", "batch", "none"):
        assert group_advantages([1.0] * 4 + [0.0] * 4, groups, norm) == [0.0] * 8
        assert group_advantages([0.1] * 3 + [0.7] * 5, [0] * 3 + [1] * 5, norm) == [0.0] * 8
    assert zero_spread_share([1.0] * 4 + [0.0, 0.0, 0.0, 1.0], groups) == 0.5
    assert zero_spread_share([], []) == 0.0


def test_B03_no_floor_besides_eps():
    rewards, groups = [1.00000, 1.00001, 2.00000, 2.00001], [0, 0, 1, 1]
    close(group_advantages(rewards, groups, eps=1e-6), [-0.6195, 0.6195, -0.6195, 0.6195], atol=1e-4)
    close(group_advantages(rewards, groups), [-0.0467, 0.0467, -0.0467, 0.0467], atol=1e-4)


def test_B04_mean_and_spread_are_the_groups_own():
    got = group_advantages([1, 0, 0, 0, 1, 1, 1, 0], [0] * 4 + [1] * 4)
    close(got, [1.4997, -0.4999, -0.4999, -0.4999, 0.4999, 0.4999, 0.4999, -1.4997], atol=5e-5)


def test_B06_groups_may_stand_in_any_order():
    rewards = [1.0, 3.0, 0.0, 5.0, 0.5, 4.0]
    together = group_advantages([1.0, 0.0, 0.5, 3.0, 5.0, 4.0], [7, 7, 7, 2, 2, 2])
    mixed = group_advantages(rewards, [7, 2, 7, 2, 7, 2])
    assert mixed == [together[i] for i in (0, 3, 1, 4, 2, 5)]


@pytest.mark.parametrize("missing", [None, NAN, INF, -INF])
def test_B08_unscorable_rewards_leave_the_statistics(missing):
    close(group_advantages([1, 0, missing, 1], [0] * 4), [0.577, -1.155, 0, 0.577], atol=5e-4)


@pytest.mark.parametrize("norm", ["group", "batch", "none"])
def test_B10_a_group_of_one_gets_zero(norm):
    assert group_advantages([1.0], [0], norm) == [0.0]
    assert group_advantages([1.0, 5.0], [0, 1], norm) == [0.0, 0.0]


def test_B12_formula_value_of_tiny_spreads():
    got = group_advantages([-0.01, -0.02, -0.03, -0.04], [0] * 4)
    close(got, [1.153, 0.384, -0.384, -1.153], atol=5e-4)


def test_B13_sample_standard_deviation():
    close(group_advantages([1, 0], [0, 0]), [0.70701, -0.70701])


def test_T09_batch_norm_divides_by_the_spread_of_all_rewards():
    got = group_advantages([1, 0, 0, 1, 2, 2, 2, 2], [0] * 4 + [1] * 4, "batch")
    close(got, [0.564012, -0.564012, -0.564012, 0.564012, 0, 0, 0, 0])
    assert got[4:] == [0.0] * 4


def test_T10_share_of_groups_without_spread_is_about_groups():
    assert zero_spread_share([1, 0, 0, 1, 2, 2, 2, 2], [0] * 4 + [1] * 4) == GOLDEN["advantages"]["zero_spread_share"]
    assert zero_spread_share([1, None, 0, 1, None, 2], [0, 0, 1, 1, 2, 2]) == pytest.approx(2 / 3)


def test_T11_unscorable_does_not_become_a_reward_of_zero():
    close(group_advantages([-1, None, -1, -0.5], [0] * 4), [-0.57715, 0, -0.57715, 1.154301])


@pytest.mark.parametrize("norm", ["group", "batch", "none"])
def test_T12_all_unscorable(norm):
    assert group_advantages([None] * 4, [0] * 4, norm) == [0.0] * 4
    assert group_advantages([1, None, None, None], [0] * 4, norm) == GOLDEN["advantages"]["one_scorable"]
    assert group_advantages([], [], norm) == []
    assert zero_spread_share([None] * 4, [0] * 4) == 1.0


@pytest.mark.parametrize("norm", ["group", "none"])
def test_golden_advantages(norm):
    close(group_advantages([1, 0, 0, 1, 2, 2, 2, 2], [0] * 4 + [1] * 4, norm), GOLDEN["advantages"][norm])


@hypothesis_settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.none() | st.floats(-1e3, 1e3), st.integers(0, 3)), max_size=20),
    st.sampled_from(["group", "batch", "none"]),
)
def test_advantages_are_finite_and_centred_in_every_group(pairs, norm):
    rewards, groups = [r for r, _ in pairs], [g for _, g in pairs]
    got = group_advantages(rewards, groups, norm)
    assert all(map(math.isfinite, got))
    assert all(a == 0 for a, r in zip(got, rewards) if r is None)
    for label in set(groups):
        assert abs(sum(a for a, g in zip(got, groups) if g == label)) < 1e-6


def test_advantages_refuse_bad_input():
    with pytest.raises(ValueError, match="'std' is unknown: use group, batch or none"):
        group_advantages([1.0], [0], "std")
    with pytest.raises(ValueError, match="2 rewards need as many group numbers, not 1"):
        group_advantages([1.0, 0.0], [0])


# ------------------------------------------------------------------------------------------------------------- weights


@pytest.mark.parametrize("mode", LOSSES)
def test_weights_by_hand(mode):
    want = {
        "token_mean": [1 / 6, 1 / 6], "cispo": [1 / 6, 1 / 6], "seq_mean": [1 / 8, 1 / 4], "gspo": [1 / 8, 1 / 4],
        "dr_grpo": [1 / 20, 1 / 20],
    }[mode]
    close(token_weights([4, 2], mode, max_completion_tokens=10), want, 1e-12)


@pytest.mark.parametrize("mode", LOSSES)
def test_completions_out_of_the_loss_weigh_nothing(mode):
    weights = token_weights([4, 0, 2], mode, max_completion_tokens=10)
    assert weights[1] == 0.0
    # dr_grpo's divisor is a constant; in the means, those out of the loss count neither above nor below.
    want = 6 / 30 if mode == "dr_grpo" else 1.0
    assert 4 * weights[0] + 2 * weights[2] == pytest.approx(want)
    assert token_weights([0, 0], mode, max_completion_tokens=10) == [0.0, 0.0]
    assert token_weights([], mode, max_completion_tokens=10) == []


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="loss 'bnpo' is unknown: use one of token_mean"):
        token_weights([1], "bnpo", max_completion_tokens=1)
    with pytest.raises(ValueError, match="loss 'ppo' is unknown"):
        LossSettings(loss="ppo")
    with pytest.raises(ValueError, match="sampler_correction 'token_mask' is unknown"):
        LossSettings(sampler_correction="token_mask")
    for bad in (dict(delta=1.28), dict(delta=3.0, loss="cispo")):
        with pytest.raises(ValueError, match="delta .* must be above 1 \\+ epsilon_high = 1.28"):
            LossSettings(**bad)


# -------------------------------------------------------------------------------- independence of the split into microbatches


def microbatches(columns, sizes):
    return zip(*(column.split(sizes) for column in columns))


@pytest.mark.parametrize("sizes", [[12], [3, 9], [4, 4, 4], [1] * 12])
def test_C01_loss_does_not_depend_on_the_split(sizes):
    # At ratio 1 a token's loss is -A: three tokens of 2.0 and nine of 0.4 have the token mean 0.8.
    advantage = torch.tensor([-2.0] * 3 + [-0.4] * 9)
    logprob = torch.full((12,), -0.5, requires_grad=True)
    weight = torch.tensor(token_weights([3, 9], "token_mean", max_completion_tokens=9)).repeat_interleave(
        torch.tensor([3, 9])
    )
    total = 0.0
    for lp, a, w in microbatches([logprob, advantage, weight], sizes):
        loss = policy_loss(lp[None], a[None], w[None], None, None, None, None, LossSettings())
        loss.backward()
        total += loss.item()
    close(total, 0.8, 1e-6)
    close(logprob.grad, [2.0 / 12] * 3 + [0.4 / 12] * 9, 1e-6)


@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("mode", LOSSES)
def test_C21_T03_T04_loss_and_gradient_of_microbatches_add_up(mode, correction):
    lengths = [4, 2, 7, 1, 5, 3, 6, 8]
    columns = batch(lengths, [1.0, -0.5, 0.25, 2.0, -1.0, 0.0, 0.7, -0.3], mode)
    settings = LossSettings(loss=mode, beta=0.04, sampler_correction=correction)
    whole_loss, whole_grad = loss_and_grad(columns, settings)
    assert whole_grad.abs().sum() > 0
    for sizes in ([1] * 8, [2] * 4, [4, 4], [3, 5], [7, 1]):
        parts = [loss_and_grad(part, settings) for part in microbatches(columns, sizes)]
        close(sum(loss for loss, _ in parts), whole_loss, 1e-12)
        close(torch.cat([grad for _, grad in parts]), whole_grad, 1e-12)
    order = torch.tensor([5, 2, 7, 0, 1, 6, 4, 3])
    loss, grad = loss_and_grad([column[order] for column in columns], settings)
    close(loss, whole_loss, 1e-12)
    close(grad, whole_grad[order], 1e-12)


@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("mode", LOSSES)
def test_packing_completions_into_one_row_changes_nothing(mode, correction):
    lengths = [4, 2, 7]
    columns = batch(lengths, [1.0, -0.5, 0.25], mode)
    settings = LossSettings(loss=mode, beta=0.04, sampler_correction=correction)
    loss, grad = loss_and_grad(columns, settings)
    inside = columns[-1] >= 0
    packed_loss, packed_grad = loss_and_grad([column[inside][None] for column in columns], settings)
    close(packed_loss, loss, 1e-12)
    close(packed_grad[0], grad[inside], 1e-12)
    as_float = [column[inside][None] for column in columns[:-1]] + [columns[-1][inside][None].double()]
    close(loss_and_grad(as_float, settings)[1], packed_grad, 0)


@pytest.mark.parametrize("mode,want", [("seq_mean", 0.0), ("token_mean", 0.6)])
def test_C02_first_loss_of_unequal_lengths(mode, want):
    loss, grad = loss_and_grad(_on_policy(batch([2, 8], [1.0, -1.0], mode)), LossSettings(loss=mode))
    close(loss, want, 1e-12)
    assert grad.abs().sum() > 0.9


def _on_policy(columns):
    return columns[:3] + [None] + columns[4:]


def test_T03_the_denominator_is_that_of_the_whole_step():
    # Equal lengths in eight microbatches: each brings its share of the token mean, neither 1/2 nor 4 times it.
    columns = _on_policy(batch([4] * 8, [1.0] * 8, "token_mean"))
    parts = [loss_and_grad([None if c is None else c[i : i + 1] for c in columns], LossSettings()) for i in range(8)]
    close([loss for loss, _ in parts], [-1 / 8] * 8, 1e-12)


def test_T08_gspo_counts_every_completion_the_same():
    columns = _on_policy(batch([4, 2], [1.0, 1.0], "gspo"))
    _, grad = loss_and_grad(columns, LossSettings(loss="gspo"))
    close(grad.sum(1), [-0.5, -0.5], 1e-12)


# --------------------------------------------------------------------------------------------------------- policy loss


def golden_columns(dtype, mode, on_policy=False):
    g = GOLDEN["inputs"]
    mask = torch.tensor(g["mask"], dtype=torch.bool)
    tensor = lambda name: torch.tensor(g[name], dtype=dtype)  # noqa: E731
    weights = token_weights(
        mask.sum(1).tolist(), mode, max_completion_tokens=GOLDEN["settings"]["max_completion_tokens"]
    )
    weight = torch.where(mask, torch.tensor(weights, dtype=dtype)[:, None], 0)
    advantage = tensor("advantages")[:, None].expand(3, 4)
    sequence = torch.where(mask, torch.arange(3)[:, None], -1)
    old = None if on_policy else tensor("old")
    return [tensor("new"), advantage, weight, old, tensor("ref"), tensor("sampler"), sequence], tensor("entropy")


GOLDEN_SETTINGS = {
    "grpo on-policy": symmetric(loss="seq_mean"),
    "dr_grpo on-policy": symmetric(loss="dr_grpo"),
    "dapo on-policy": symmetric(loss="token_mean"),
    "grpo": symmetric(loss="seq_mean"),
    "dr_grpo": symmetric(loss="dr_grpo"),
    "dapo": symmetric(loss="token_mean"),
    "gspo = grpo, sequence": symmetric(loss="gspo"),
    "dapo epsilon_high=0.28": LossSettings(loss="token_mean"),
    "grpo beta=0.04 k3 on-policy": symmetric(loss="seq_mean", beta=0.04),
    "grpo beta=0.04 k3": symmetric(loss="seq_mean", beta=0.04),
    "dapo token_truncate": symmetric(
        loss="token_mean", sampler_correction="token_truncate", correction_cap=GOLDEN["settings"]["correction_cap"]
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", GOLDEN["losses"])
def test_golden_loss_gradient_and_metrics(name, dtype):
    want, settings = GOLDEN["losses"][name], GOLDEN_SETTINGS[name]
    columns, entropy = golden_columns(dtype, settings.loss, "on-policy" in name)
    loss, grad = loss_and_grad(columns, settings)
    assert loss.dtype == dtype
    close(loss, want["loss"], 2e-6)
    close(grad, want["grad"], 2e-6)
    metrics = policy_metrics(*columns, settings, entropy)
    close(metrics["loss"], want["loss"], 2e-6)
    for key, value in want["metrics"].items():
        close(metrics[key], value, 2e-6)


def test_golden_sampler_ratios():
    columns, _ = golden_columns(torch.float64, "token_mean")
    columns[1] = torch.ones(3, 4, dtype=torch.float64)  # at ratio 1 and A = 1 the gradient is minus the correction
    columns[2] = (columns[-1] >= 0).double()
    columns[0], columns[3] = columns[3], None
    cap = GOLDEN["settings"]["correction_cap"]
    _, grad = loss_and_grad(columns, symmetric(sampler_correction="token_truncate", correction_cap=cap))
    inside = columns[-1] >= 0
    close(-grad[inside], torch.tensor(GOLDEN["sampler_ratios"]["token_truncate"])[inside], 1e-6)

    ratio = torch.tensor(GOLDEN["sampler_ratios"]["sequence_truncate"]).expand(3, 4)  # 1.0, above the cap, 0.418952
    _, grad = loss_and_grad(columns, symmetric(sampler_correction="sequence_mask", correction_cap=cap))
    close(-grad[inside], torch.where(ratio < cap - 1e-3, ratio, 0)[inside], 1e-6)

    masked = torch.tensor(GOLDEN["sampler_ratios"]["sequence_mask"]).expand(3, 4)
    floored = symmetric(sampler_correction="sequence_mask", correction_cap=cap, correction_floor=0.5)
    _, grad = loss_and_grad(columns, floored)
    close(-grad[inside], masked[inside], 1e-6)


def test_gspo_adds_the_same_kl_as_seq_mean():
    columns, _ = golden_columns(torch.float64, "gspo")
    with_kl, without = (loss_and_grad(columns, symmetric(loss="gspo", beta=beta)) for beta in (0.04, 0.0))
    seq_with, seq_without = (loss_and_grad(columns, symmetric(loss="seq_mean", beta=beta)) for beta in (0.04, 0.0))
    close(with_kl[0] - without[0], seq_with[0] - seq_without[0], 1e-12)
    close(with_kl[1] - without[1], seq_with[1] - seq_without[1], 1e-12)


@pytest.mark.parametrize("ratio,advantage,want", [(1.5, 1, -1.2), (1.5, -1, 1.5), (0.5, 1, -0.5), (0.5, -1, 0.8)])
def test_C13_clip_is_applied_to_the_product(ratio, advantage, want):
    loss, grad = one_token(math.log(ratio), advantage)
    close(loss, want, 1e-6)
    clipped = (ratio > 1) == (advantage > 0)
    close(grad, 0.0 if clipped else -ratio * advantage, 1e-6)


def test_C15_dual_clip_is_an_option():
    close(one_token(math.log(50), -1.0), (50.0, 50.0), 1e-4)
    close(one_token(math.log(50), -1.0, symmetric(delta=3.0)), (3.0, 0.0), 1e-6)
    close(one_token(math.log(2), -1.0, symmetric(delta=3.0)), (2.0, 2.0), 1e-6)
    close(one_token(math.log(50), 1.0, symmetric(delta=3.0)), (-1.2, 0.0), 1e-6)
    close(one_token(math.log(0.5), -1.0, symmetric(delta=3.0)), (0.8, 0.0), 1e-6)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("gap", [30.0, 100.0, 1e4, -100.0, -1e4])
def test_C15_far_off_tokens_stay_finite(gap, correction, loss):
    """Whatever tensor is far off, and whichever branch of the minimum is taken, value and gradient are finite."""
    settings = LossSettings(loss=loss, beta=0.04, sampler_correction=correction)
    for advantage in (1.0, -1.0, 0.0):
        assert all(map(math.isfinite, one_token(gap, advantage, settings, ref_gap=0.0, sampler_gap=0.0)))
        assert all(map(math.isfinite, one_token(0.0, advantage, settings, ref_gap=gap, sampler_gap=0.0)))
        assert all(map(math.isfinite, one_token(0.0, advantage, settings, ref_gap=0.0, sampler_gap=gap)))


@pytest.mark.parametrize("mode", ["token_mean", "seq_mean", "dr_grpo", "gspo"])
def test_C18_on_policy_loss_is_zero_and_gradient_is_not(mode):
    columns = _on_policy(batch([4, 4], [1.0, -1.0], mode))
    loss, grad = loss_and_grad(columns, LossSettings(loss=mode))
    close(loss, 0.0, 1e-12)
    close(grad, -columns[1] * columns[2], 1e-12)
    metrics = policy_metrics(*columns, LossSettings(loss=mode))
    assert metrics["ratio_min"] == metrics["ratio_mean"] == metrics["ratio_max"] == 1.0
    assert metrics["clip_low"] == metrics["clip_high"] == 0.0
    # An old policy passed in that equals the policy is the same thing.
    close(loss_and_grad(columns[:3] + [columns[0]] + columns[4:], LossSettings(loss=mode))[1], grad, 0)


@pytest.mark.parametrize("d,want", [(1.0, 0.7183), (-1.0, 0.3679), (20.0, 4.85e8), (100.0, 4.85e8), (0.0, 0.0)])
def test_C10_k3_value_and_gradient(d, want):
    loss, grad = one_token(settings=LossSettings(beta=1.0), ref_gap=d)
    assert loss == pytest.approx(want, rel=1e-3)
    if d < 20:
        close(grad, 1 - math.exp(d), 1e-5)
    assert math.isfinite(grad)


def test_C10_k3_is_never_negative():
    d = torch.cat([torch.linspace(-90, 120, 4001), torch.logspace(-12, 1, 4001), -torch.logspace(-12, 1, 4001)])[None]
    logprob = torch.zeros_like(d, requires_grad=True)
    metric = policy_metrics(
        logprob.detach(), torch.zeros_like(d), torch.ones_like(d), None, d, None, None, LossSettings(beta=1.0)
    )
    assert metric["kl"] > 0
    for value in d[0, ::7]:
        assert one_token(settings=LossSettings(beta=1.0), ref_gap=value.item())[0] >= 0


def test_T01_policy_far_below_the_reference():
    logprob = torch.tensor([[-100.0]], requires_grad=True)
    zero, one = torch.zeros(1, 1), torch.ones(1, 1)
    loss = policy_loss(logprob, zero, one, None, zero, None, None, LossSettings(beta=0.04))
    loss.backward()
    assert 0 < loss.item() < INF and math.isfinite(logprob.grad.item())
    below = one_token(settings=LossSettings(beta=0.04), ref_gap=19.9, dtype=torch.float64)
    close(below, (0.04 * (math.exp(19.9) - 20.9), 0.04 * (1 - math.exp(19.9))), 1e-4)


@pytest.mark.parametrize("mode", LOSSES)
def test_B11_T20_kl_stays_where_the_group_has_no_spread(mode):
    advantages = group_advantages([1.0, 1.0, 1.0], [0, 0, 0])
    columns = batch([4, 2, 3], advantages, mode)
    _, grad = loss_and_grad(columns, LossSettings(loss=mode, beta=0.04))
    d = columns[4] - columns[0]
    close(grad, 0.04 * columns[2] * (1 - d.exp()), 1e-12)
    assert grad.abs().sum() > 0


def test_cispo_caps_the_ratio_and_keeps_every_gradient():
    settings = LossSettings(loss="cispo")
    for ratio, factor in ((0.5, 0.5), (1.0, 1.0), (1.2, 1.2), (5.0, 1.28)):
        for advantage in (2.0, -1.0):
            loss, grad = one_token(math.log(ratio), advantage, settings)  # at logprob -1
            close((loss, grad), (factor * advantage, -factor * advantage), 1e-6)


def test_gspo_by_hand():
    # log-ratios 0.3 and -0.1 of one completion: ρ = exp(0.1) for both, so the gradient of each is -A ρ / 2.
    logprob = torch.tensor([[-1.0, -1.0]], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([[-1.3, -0.9]], dtype=torch.float64)
    half, sequence = torch.full((1, 2), 0.5, dtype=torch.float64), torch.zeros(1, 2, dtype=torch.long)
    loss = policy_loss(logprob, 4 * half, half, old, None, None, sequence, symmetric(loss="gspo"))
    loss.backward()
    close(loss.item(), -2 * math.exp(0.1), 1e-12)
    close(logprob.grad, [[-math.exp(0.1)] * 2], 1e-12)


def test_T18_the_ratio_of_a_completion_is_that_of_the_sum():
    logprob = torch.full((1, 100), -1.0, dtype=torch.float64)
    ones, sequence = torch.ones_like(logprob), torch.zeros(1, 100, dtype=torch.long)
    settings = LossSettings(sampler_correction="sequence_mask", correction_cap=3.0)
    metrics = policy_metrics(logprob, ones, ones / 100, None, None, logprob - 0.01, sequence, settings)
    close(metrics["correction_mean"], math.e, 1e-6)
    close(metrics["loss"], -math.e, 1e-6)
    close(metrics["sampler_ratio_mean"], math.exp(0.01), 1e-6)
    tighter = LossSettings(sampler_correction="sequence_mask", correction_cap=2.7)
    assert policy_metrics(logprob, ones, ones / 100, None, None, logprob - 0.01, sequence, tighter)["loss"] == 0.0


def test_corrections_leave_the_kl_term_alone():
    columns = batch([4, 2, 3], [0.0] * 3, "token_mean")
    want = loss_and_grad(columns, LossSettings(beta=0.1))[1]
    for correction in CORRECTIONS:
        settings = LossSettings(beta=0.1, sampler_correction=correction, correction_cap=1e-6)
        close(loss_and_grad(columns, settings)[1], want, 0)


@pytest.mark.parametrize("extra", [{}, {"delta": 1.4}, {"sampler_correction": "token_truncate", "correction_cap": 1.1},
                                   {"sampler_correction": "sequence_mask"}])
@pytest.mark.parametrize("beta", [0.0, 0.3])
@pytest.mark.parametrize("mode", ["token_mean", "seq_mean", "dr_grpo", "gspo"])
def test_gradient_equals_finite_differences(mode, beta, extra):
    # Tokens are on both sides of the clip, none of them within the step of 1e-6 of a kink.
    columns = batch([4, 2, 7, 5], [1.0, -0.5, 0.25, -2.0], mode, seed=3, gap=0.5)
    settings = LossSettings(loss=mode, beta=beta, **extra)
    metrics = policy_metrics(*columns, settings)
    if mode != "gspo":
        assert 0 < metrics["clip_low"] < 1 and 0 < metrics["clip_high"] < 1
    assert gradcheck(lambda x: policy_loss(x, *columns[1:], settings), columns[0].clone().requires_grad_())


# ----------------------------------------------------------------------------------------------------- masked positions


@pytest.mark.parametrize("garbage", [NAN, INF, -INF, 1e30])
@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("mode", LOSSES)
def test_what_stands_outside_completions_cannot_matter(mode, correction, garbage):
    columns = batch([4, 2, 7], [1.0, -0.5, 0.25], mode)
    settings = LossSettings(loss=mode, beta=0.04, sampler_correction=correction)
    entropy = columns[0].abs()
    loss, grad = loss_and_grad(columns, settings)
    metrics = policy_metrics(*columns, settings, entropy)
    outside = columns[-1] < 0
    dirty = [c if i in (2, 6) else torch.where(outside, garbage, c) for i, c in enumerate(columns)]
    for cols in (dirty, _on_policy(dirty)):
        dirty_loss, dirty_grad = loss_and_grad(cols, settings)
        assert dirty_loss.isfinite() and dirty_grad.isfinite().all()
        assert (dirty_grad[outside] == 0).all()
    close(loss_and_grad(dirty, settings)[0], loss, 0)
    close(loss_and_grad(dirty, settings)[1], grad, 0)
    assert policy_metrics(*dirty, settings, torch.where(outside, garbage, entropy)) == metrics


@pytest.mark.parametrize("garbage", [0.0, NAN, INF])
@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("mode", LOSSES)
def test_C11_all_masked_is_exactly_zero_with_zero_gradients(mode, correction, garbage):
    settings = LossSettings(loss=mode, beta=0.04, sampler_correction=correction)
    bad = torch.full((2, 5), garbage)
    columns = [bad, bad, torch.zeros(2, 5), bad, bad, bad, torch.full((2, 5), -1)]
    for cols in (columns, _on_policy(columns)):
        loss, grad = loss_and_grad(cols, settings)
        assert loss == 0.0 and (grad == 0).all()


def test_C11_mean_kl_is_over_valid_tokens_and_the_masked_share_is_told():
    # Half of the completions are out of the loss; every token in the loss has KL exp(-d) + d - 1.
    logprob = torch.zeros(4, 3)
    weight = torch.tensor([[1 / 6], [0], [1 / 6], [0]]).expand(4, 3)
    ref = torch.where(weight > 0, -1.8414056604, 50.0)  # exp(d) - d - 1 = 1.0
    sequence = torch.arange(4)[:, None].expand(4, 3)
    metrics = policy_metrics(logprob, torch.ones(4, 3), weight, None, ref, None, sequence, LossSettings(beta=0.5))
    close(metrics["kl"], 1.0, 1e-6)
    close(metrics["loss_kl"], 0.5, 1e-6)
    assert metrics["tokens"] == 6 and metrics["masked_share"] == 0.5


def test_missing_tensors_are_named():
    x = torch.zeros(1, 1)
    cases = [
        (LossSettings(beta=0.1), "needs the reference's log-probs: pass ref_logprob"),
        (LossSettings(sampler_correction="token_truncate"), "needs sampler_logprob"),
        (LossSettings(loss="gspo"), "pass sequence"),
    ]
    for settings, message in cases:
        with pytest.raises(ValueError, match=message):
            policy_loss(x, x, x, None, None, None, None, settings)
    with pytest.raises(ValueError, match="pass sequence"):
        policy_loss(x, x, x, None, None, x, None, LossSettings(sampler_correction="sequence_mask"))
    with pytest.raises(ValueError, match="pass ref_logprob"):
        policy_metrics(x, x, x, None, None, None, None, LossSettings(beta=0.1))


# ------------------------------------------------------------------------------------------------------------- metrics


def test_T37_a_token_counts_as_clipped_only_when_its_gradient_is_gone():
    ratio = torch.tensor([[1.3, 1.3, 0.7, 0.7, 1.0, 1.0, 1.0, 1.0]], dtype=torch.float64)
    advantage = torch.tensor([[-1.0, 1.0, 1.0, -1.0, 1.0, -1.0, 1.0, -1.0]], dtype=torch.float64)
    weight, logprob = torch.full_like(ratio, 1 / 8), torch.zeros_like(ratio)
    columns = [logprob, advantage, weight, -ratio.log(), None, None, None]
    metrics = policy_metrics(*columns, symmetric())
    assert metrics["clip_high"] == metrics["clip_low"] == 1 / 8
    _, grad = loss_and_grad(columns, symmetric())
    assert (grad == 0).tolist() == [[False, True, False, True, False, False, False, False]]
    close([metrics["ratio_min"], metrics["ratio_mean"], metrics["ratio_max"]], [0.7, 1.0, 1.3], 1e-12)
    cispo = policy_metrics(*columns, LossSettings(loss="cispo"))
    assert cispo["clip_high"] == 2 / 8 and cispo["clip_low"] == 0.0


def test_metrics_of_the_sampler_and_the_loss_parts():
    logprob = torch.tensor([[-1.0, -2.0, 0.0]], dtype=torch.float64)
    sampler = torch.tensor([[-1.1, -1.7, 99.0]], dtype=torch.float64)
    weight = torch.tensor([[0.5, 0.5, 0.0]], dtype=torch.float64)
    settings = LossSettings(sampler_correction="token_truncate", correction_cap=1.05, beta=0.2)
    entropy = torch.tensor([[0.4, 0.8, 7.0]], dtype=torch.float64)
    got = policy_metrics(logprob, torch.ones_like(weight), weight, None, logprob + 1, sampler, None, settings, entropy)
    want = {
        "tokens": 2, "sampler_diff_mean": 0.2, "sampler_diff_max": 0.3,
        "sampler_ratio_mean": (math.exp(0.1) + math.exp(-0.3)) / 2, "correction_mean": (1.05 + math.exp(-0.3)) / 2,
        "loss_policy": -(1.05 + math.exp(-0.3)) / 2, "loss_kl": 0.2 * (math.e - 2), "kl": math.e - 2, "entropy": 0.6,
        "ratio_mean": 1, "ratio_min": 1, "ratio_max": 1, "clip_low": 0, "clip_high": 0,
    }
    want["loss"] = want["loss_policy"] + want["loss_kl"]
    assert got == pytest.approx(want)
    assert all(type(value) is float for value in got.values())


@pytest.mark.parametrize("mode", LOSSES)
def test_C11_metrics_without_valid_tokens_are_finite_and_say_so(mode):
    settings = LossSettings(loss=mode, beta=0.04, sampler_correction="sequence_mask")
    bad, sequence = torch.full((2, 3), NAN), torch.zeros(2, 3, dtype=torch.long)
    got = policy_metrics(bad, bad, torch.zeros(2, 3), bad, bad, bad, sequence, settings, bad)
    assert got.pop("masked_share") == 1.0
    assert set(got.values()) == {0.0} and got["tokens"] == 0
    valid = batch([2, 3], [1.0, -1.0], mode)
    assert set(policy_metrics(*valid, settings, valid[0])) == set(got) | {"masked_share"}


# ----------------------------------------------------------------------------------------------------- token log-probs


def head(n=11, h=6, v=9, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(n, h, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(v, h, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(v, (n,), generator=generator)


def plain_logprobs(hidden, weight, targets, temperature=1.0):
    logits = (hidden @ weight.T) / temperature
    logprobs = torch.log_softmax(logits, -1)
    entropy = -(logprobs.exp() * logprobs).sum(-1).detach()
    return logprobs.gather(1, targets[:, None]).squeeze(1), entropy


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk", [1, 4, 11, 128])
def test_token_logprobs_equal_plain_autograd(chunk, temperature):
    hidden, weight, targets = head()
    coefficients = torch.linspace(-1, 2, len(targets), dtype=torch.float64)
    want, want_entropy = plain_logprobs(hidden, weight, targets, temperature)
    got, entropy = token_logprobs(hidden, weight, targets, temperature, chunk)
    assert not entropy.requires_grad
    close(got.detach(), want.detach(), 1e-12)
    close(entropy, want_entropy, 1e-12)
    for ours, theirs in zip(
        torch.autograd.grad(got @ coefficients, (hidden, weight)),
        torch.autograd.grad(want @ coefficients, (hidden, weight)),
    ):
        close(ours, theirs, 1e-12)


@pytest.mark.parametrize("chunk", [3, 128])
def test_token_logprobs_gradcheck(chunk):
    hidden, weight, targets = head()
    assert gradcheck(lambda h, w: token_logprobs(h, w, targets, 0.7, chunk)[0], (hidden, weight))
    assert gradcheck(lambda h: token_logprobs(h, weight.detach(), targets, 0.7, chunk)[0], hidden)
    assert gradcheck(lambda w: token_logprobs(hidden.detach(), w, targets, 0.7, chunk)[0], weight)


def test_T15_C08_log_probs_are_those_of_the_sampling_temperature():
    hidden, weight = torch.eye(2), torch.tensor([[0.0, 2.0], [1.0, 0.0]])  # rows of logits: [0, 1] and [2, 0]
    targets = torch.tensor([1, 0])
    close(token_logprobs(hidden, weight, targets, 0.5)[0], [-0.126928, -0.018150], 1e-6)
    close(token_logprobs(hidden, weight, targets, 1.0)[0], [-0.313262, -0.126928], 1e-6)
    close(token_logprobs(hidden, weight, 1 - targets, 0.5)[0], [-2.126928, -4.018150], 1e-6)


@pytest.mark.parametrize("chunk", [4, 128])
def test_huge_logits_stay_finite(chunk):
    hidden, weight, targets = head(dtype=torch.float32)
    logprob, entropy = token_logprobs(hidden * 1e4, weight, targets, 0.1, chunk)
    logprob.sum().backward()
    for x in (logprob, entropy, hidden.grad, weight.grad):
        assert x.isfinite().all()
    assert (logprob <= 0).all() and (entropy >= 0).all()


@pytest.mark.parametrize("chunk", [4, 128])
def test_bf16_hidden_beside_float32_weight(chunk):
    hidden, weight, targets = head(n=64, h=32, v=50, dtype=torch.float32)
    half = hidden.detach().bfloat16().requires_grad_()
    want, want_entropy = plain_logprobs(hidden, weight, targets)
    got, entropy = token_logprobs(half, weight, targets, 1.0, chunk)
    assert got.dtype == entropy.dtype == torch.float32
    assert (got - want).abs().mean() < 0.03 and (entropy - want_entropy).abs().mean() < 0.03
    got.sum().backward()
    want.sum().backward()
    assert half.grad.dtype == torch.bfloat16 and weight.grad.dtype == torch.float32
    cosine = torch.cosine_similarity(half.grad.float().flatten(), hidden.grad.flatten(), 0)
    assert cosine > 0.999


def test_bf16_weight_gradient_is_summed_in_float32():
    # 2048 equal contributions: summed in bf16 one by one they stop growing at 256.
    hidden = torch.ones(2048, 1, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    token_logprobs(hidden, weight, torch.zeros(2048, dtype=torch.long), 1.0, 1)[0].sum().backward()
    assert weight.grad.dtype == torch.bfloat16
    close(weight.grad, [[1024.0], [-1024.0]], 0)


@pytest.mark.parametrize("chunk", [4, 128])
def test_autocast_changes_neither_dtype_nor_gradient(chunk):
    hidden, weight, targets = head(dtype=torch.float32)
    want = torch.autograd.grad(token_logprobs(hidden, weight, targets, 1.0, chunk)[0].sum(), (hidden, weight))
    with torch.autocast("cpu", torch.bfloat16):
        logprob, _ = token_logprobs(hidden, weight, targets, 1.0, chunk)
    got = torch.autograd.grad(logprob.sum(), (hidden, weight))
    for ours, theirs in zip(got, want):
        close(ours, theirs, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_no_predictors_give_zero_gradients(dtype):
    hidden, weight, targets = head(n=0, dtype=dtype)
    logprob, entropy = token_logprobs(hidden, weight, targets)
    assert logprob.shape == entropy.shape == (0,)
    logprob.sum().backward()
    assert hidden.grad.shape == (0, 6) and (weight.grad == 0).all()


@pytest.mark.parametrize("chunk", [4, 128])
def test_gradients_can_be_taken_in_two_phases(chunk):
    hidden, weight, targets = head()
    want = torch.autograd.grad(token_logprobs(hidden, weight, targets, 1.0, chunk)[0].sum(), (hidden, weight))
    total = token_logprobs(hidden, weight, targets, 1.0, chunk)[0].sum()
    first = torch.autograd.grad(total, hidden, retain_graph=True)[0]
    second = torch.autograd.grad(total, weight)[0]
    close(first, want[0], 0)
    close(second, want[1], 0)


def test_only_wanted_gradients_are_formed():
    hidden, weight, targets = head()
    token_logprobs(hidden, weight.detach(), targets)[0].sum().backward()
    assert hidden.grad is not None and weight.grad is None
    hidden.grad = None
    token_logprobs(hidden.detach(), weight, targets)[0].sum().backward()
    assert hidden.grad is None and weight.grad is not None


def test_many_chunks_keep_no_logits_for_backward():
    hidden, weight, targets = head(n=64, v=500)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.numel()) or x, lambda x: x):
        token_logprobs(hidden, weight, targets, 1.0, 8)
    assert saved and max(saved) <= weight.numel() < len(targets) * len(weight)


def test_one_chunk_is_about_as_fast_as_plain_autograd():
    hidden, weight, targets = head(n=512, h=128, v=2000, dtype=torch.float32)

    def seconds(run):
        start = time.perf_counter()
        run()[0].sum().backward()
        return time.perf_counter() - start

    # In turn, so that whatever else the machine does falls on both.
    pairs = [
        (
            seconds(lambda: token_logprobs(hidden, weight, targets, 1.0, 512)),
            seconds(lambda: plain_logprobs(hidden, weight, targets)),
        )
        for _ in range(9)
    ]
    ours, plain = map(min, zip(*pairs))
    assert ours < 1.5 * plain


@pytest.mark.parametrize("change,message", [
    (dict(temperature=0.0), "temperature 0.0 gives no log-probs: use a value above 0"),
    (dict(temperature=NAN), "use a value above 0"),
    (dict(chunk_tokens=0), "chunk_tokens 0 is too small: use at least 1"),
    (dict(targets=torch.zeros(3, dtype=torch.long)), r"hidden \(11, 6\) needs one target a row, not \(3,\)"),
])
def test_token_logprobs_refuse_bad_input(change, message):
    hidden, weight, targets = head()
    with pytest.raises(ValueError, match=message):
        token_logprobs(**{"hidden": hidden, "weight": weight, "targets": targets, **change})
