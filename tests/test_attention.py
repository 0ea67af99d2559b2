"""Who sees whom, and attention in tiles against transformers' own, values and gradients."""

from types import SimpleNamespace

import pytest
import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import attention
import plain
from attention import TiledAttention, attend, attention_mask, cut_into_tiles
from ranks import random_rollout, small_config, stage_of, whole_model
from rollout import pack


@pytest.mark.parametrize("window", (None, 1, 4, 9))
def test_the_mask_shows_each_token_its_prompt_and_its_own_completion(window):
    rows = pack(random_rollout(6, 3, seed=5), 64)
    assert 0 < rows.padding_share() and rows.group_ids.max() >= 1 and rows.segment_ids.max() == 3
    mask = attention_mask(rows.position_ids, rows.segment_ids, rows.group_ids, torch.float64, window)
    assert mask.shape == (rows.shape[0], 1, 64, 64) and mask.dtype == torch.float64
    for m in range(rows.shape[0]):
        sees = plain.who_sees_whom(rows, m, window)
        assert torch.equal(mask[m] == 0, sees[0]) and torch.equal(mask[m].isneginf(), ~sees[0])
    assert (mask == 0).any(-1).all()  # a row without any entry would be NaN


def test_the_window_is_a_distance_in_positions_and_not_in_places():
    """A second completion stands far behind its prompt in the row, but near it in the sequence."""
    prompt, completions = [5] * 3, random_rollout(1, 2, seed=0)
    for c in completions:
        c.prompt_ids, c.ids, c.logprobs = prompt, [6] * 6, [-4.0] * 6
    rows = pack(completions, 16)
    mask = attention_mask(rows.position_ids, rows.segment_ids, rows.group_ids, torch.float32, 4)[0, 0] == 0
    assert mask[9, :3].tolist() == [True, True, True]  # the first token of completion 2, at position 3, place 9
    assert mask[9].sum() == 4
    assert mask[11, :3].tolist() == [False, False, True]
    assert mask[14].sum() == 4 and not mask[14, :3].any()


# ------------------------------------------------------------------------------------------------ tiles
def packed_mask(dtype=torch.float64, rows=2):
    packed = pack(random_rollout(12, 6, seed=5), 144)
    assert packed.padding_share() > 0
    return attention_mask(packed.position_ids, packed.segment_ids, packed.group_ids, dtype)[:rows]


def test_tiles_hold_every_pair_that_sees_and_no_column_that_none_does():
    mask = packed_mask()
    tiles = cut_into_tiles(mask)
    assert [t.tokens.start for t in tiles] == [0, 64, 128] and sum(len(t.columns) for t in tiles) < 3 * 144
    whole = torch.full_like(mask, float("-inf"))
    for tile in tiles:
        assert (tile.mask == 0).any(2).any(0).all()
        whole[:, :, tile.tokens, tile.columns] = tile.mask
    assert torch.equal(whole, mask)


@pytest.mark.parametrize("dtype, within", [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("heads, of_keys", [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("tile", (1, 7, 64, 1000))
def test_tiled_attention_is_transformers_attention_and_its_gradients(tile, heads, of_keys, dtype, within, monkeypatch):
    monkeypatch.setattr(attention, "TILE", tile)
    mask, g = packed_mask(dtype), torch.Generator().manual_seed(0)
    shapes = [(2, heads, 144, 8), (2, of_keys, 144, 8), (2, of_keys, 144, 8)]
    qkv = [torch.randn(s, generator=g, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]
    weights = torch.randn(2, 144, heads, 8, generator=g, dtype=torch.float64).to(dtype)
    module = SimpleNamespace(num_key_value_groups=heads // of_keys, is_causal=True)

    def numbers(masked):
        out = attend(module, *qkv, masked, scaling=0.3)[0]
        return out, *torch.autograd.grad((out * weights).sum(), qkv)

    for got, want in zip(numbers(cut_into_tiles(mask)), numbers(mask), strict=True):
        assert got.dtype == dtype and got.shape == want.shape
        assert (got - want).abs().max() < within * want.abs().max()
    want = sdpa_attention_forward(module, *qkv, mask, scaling=0.3)[0]
    assert torch.equal(attend(module, *qkv, mask, scaling=0.3)[0], want)


def test_the_gradients_of_tiled_attention_are_those_of_finite_differences():
    g = torch.Generator().manual_seed(1)
    mask = packed_mask(rows=1)[:, :, :20, :20]
    qkv = [torch.randn(1, heads, 20, 8, generator=g, dtype=torch.float64, requires_grad=True) for heads in (2, 1, 1)]
    assert torch.autograd.gradcheck(lambda *x: TiledAttention.apply(*x, cut_into_tiles(mask), 0.3), qkv)


def test_between_forward_and_backward_tiles_keep_no_more_than_queries_keys_values_and_output():
    kept = []
    mask, qkv = packed_mask(torch.float32), [torch.randn(2, heads, 144, 8, requires_grad=True) for heads in (4, 2, 2)]
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        TiledAttention.apply(*qkv, cut_into_tiles(mask), 0.3)
    assert sum(kept) == 2 * 144 * 8 * (4 + 2 + 2 + 4) + 2 * 144 * 4  # and the log-sum-exp of each query


@pytest.mark.parametrize("kind, more", [
    ("qwen2", {}), ("qwen3", {}), ("mistral", dict(sliding_window=5)),
    ("qwen2", dict(use_sliding_window=True, sliding_window=4, max_window_layers=1)),
])
def test_stages_attend_in_tiles_on_the_cpu(kind, more, monkeypatch):
    model = whole_model(small_config(kind, **more), torch.float32)
    rows, calls = pack(random_rollout(12, 6, seed=5), 144), []
    inner = TiledAttention.apply
    monkeypatch.setattr(TiledAttention, "apply", lambda *a: calls.append(len(a[3])) or inner(*a))
    stage = stage_of(model)
    with torch.no_grad():
        in_tiles = stage(rows.input_ids, **rows.inputs())
        assert calls == [3] * len(stage.layers)
        stage.in_tiles = False
        whole = stage(rows.input_ids, **rows.inputs())
    assert len(calls) == len(stage.layers)
    assert (in_tiles - whole).abs().max() < 1e-5 and not torch.equal(in_tiles, whole)
