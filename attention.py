"""Who sees whom in packed rows, and attention that leaves out what nobody sees.

With G completions behind one prompt most of a row's T x T pairs see nothing. PyTorch's attention on the CPU computes them all
the same, and copies keys and values for every head that shares them. Here it works on tiles of 64 tokens, each with only
the columns that one of its tokens sees; in rows of 8 completions it takes a third of the time.

Legend: R rows of a microbatch, T tokens in a row, A attention heads, K key/value heads, D size of a head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

TILE = 64  # tokens; 32 and 128 are slower


def attention_mask(
    position_ids: Tensor, segment_ids: Tensor, group_ids: Tensor, dtype: torch.dtype, window: int | None = None
) -> Tensor:
    """Who sees whom in packed rows: an additive mask [R, 1, T, T] (0 = sees, -inf = does not), shared by all layers.

    A token sees the tokens before it of its own group that are the prompt (segment 0) or its own completion, so G
    completions can stand behind one prompt. A padding token (group -1) sees itself only, since a row of the mask
    without any entry would turn into NaN. ``window`` limits the distance in positions, not in places of the row.
    """
    place = torch.arange(segment_ids.shape[-1], device=segment_ids.device)
    before = place[None, :, None] >= place[None, None, :]
    same_group = group_ids[:, :, None] == group_ids[:, None, :]
    same_text = (segment_ids[:, None, :] == 0) | (segment_ids[:, :, None] == segment_ids[:, None, :])
    sees = before & same_group & same_text & (group_ids >= 0)[:, :, None]
    if window is not None:
        sees &= position_ids[:, :, None] - position_ids[:, None, :] < window
    sees |= torch.eye(len(place), dtype=torch.bool, device=place.device)
    return torch.zeros(sees.shape, dtype=dtype, device=sees.device).masked_fill_(~sees, float("-inf"))[:, None]


@dataclass
class Tile:
    """TILE tokens, the last tile of a row perhaps fewer, and what they see."""

    tokens: slice
    columns: Tensor  # those that any of the tokens sees in any row
    mask: Tensor  # [R, 1, tokens, columns]


def cut_into_tiles(mask: Tensor) -> list[Tile]:
    """The tiles of ``mask`` [R, 1, T, T]."""
    tiles = []
    for first in range(0, mask.shape[2], TILE):
        tokens = slice(first, first + TILE)
        part = mask[:, :, tokens]
        columns = (part == 0).flatten(0, 2).any(0).nonzero()[:, 0]
        tiles.append(Tile(tokens, columns, part[..., columns]))
    return tiles


class TiledAttention(torch.autograd.Function):
    """Attention of queries [R, A, T, D] to keys and values [R, K, T, D] -> [R, T, A, D], on the CPU.

    Like FlashAttention (Dao et al. 2022, algorithms 1 and 4) it keeps its inputs, its output and one number a query, the
    log-sum-exp of its scores, and computes the scores again in backward. The A / K heads that share keys and values are
    queries of one head here.
    """

    @staticmethod
    def forward(ctx, query: Tensor, key: Tensor, value: Tensor, tiles: list[Tile], scale: float) -> Tensor:
        shape, out, log_sums = query.shape, query.new_empty(query.transpose(1, 2).shape), []
        for tile in tiles:
            part, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                *_inputs(query, key, value, tile), attn_mask=_mask(tile, query, key), scale=scale
            )
            out[:, tile.tokens] = part.reshape(shape[0], shape[1], -1, shape[3]).transpose(1, 2)
            log_sums.append(log_sum)
        ctx.save_for_backward(query, key, value, out, *log_sums)
        ctx.tiles, ctx.scale = tiles, scale
        return out

    @staticmethod
    def backward(ctx, gradient: Tensor):
        query, key, value, out, *log_sums = ctx.saved_tensors
        wide = torch.promote_types(key.dtype, torch.float32)  # a sum over many tiles in bfloat16 would lose the small ones
        to_query = torch.empty_like(query)
        to_key, to_value = torch.zeros_like(key, dtype=wide), torch.zeros_like(value, dtype=wide)
        for tile, log_sum in zip(ctx.tiles, log_sums):
            parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                _fold(gradient.transpose(1, 2), key, tile), *_inputs(query, key, value, tile),
                _fold(out.transpose(1, 2), key, tile), log_sum, 0.0, False, attn_mask=_mask(tile, query, key),
                scale=ctx.scale,
            )
            to_query[:, :, tile.tokens] = parts[0].reshape(to_query[:, :, tile.tokens].shape)
            to_key.index_add_(2, tile.columns, parts[1].to(wide))
            to_value.index_add_(2, tile.columns, parts[2].to(wide))
        return to_query, to_key.to(key.dtype), to_value.to(value.dtype), None, None


def _fold(heads: Tensor, key: Tensor, tile: Tile) -> Tensor:
    """[R, A, T, D] -> the tile's [R, K, A / K * tokens, D]."""
    return heads[:, :, tile.tokens].reshape(key.shape[0], key.shape[1], -1, key.shape[3])


def _inputs(query: Tensor, key: Tensor, value: Tensor, tile: Tile) -> tuple[Tensor, Tensor, Tensor]:
    return _fold(query, key, tile), key[:, :, tile.columns], value[:, :, tile.columns]


def _mask(tile: Tile, query: Tensor, key: Tensor) -> Tensor:
    return tile.mask.repeat(1, 1, query.shape[1] // key.shape[1], 1)


def attend(module, query: Tensor, key: Tensor, value: Tensor, attention_mask, scaling: float, **more):
    """What transformers' layers call: its own "sdpa" attention, or tile by tile where the mask is a list of tiles."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if isinstance(attention_mask, list):
        # autocast casts for PyTorch's own attention: rotary angles leave queries and keys in float32
        query, key, value = (x.to(attention_mask[0].mask.dtype) for x in (query, key, value))
        return TiledAttention.apply(query, key, value, attention_mask, scaling), None
    return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **more)
