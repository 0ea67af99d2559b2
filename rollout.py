"""Completions, and how they are packed into rows.

A ``Completion`` keeps the token ids that were sampled: nothing is decoded and encoded again for training. ``pack`` lays
completions into rows of at most T tokens, since padding every sequence to the longest would cost two to four times the
work. A row that is not full ends in padding, which is cut off where microbatches are made. A group's prompt stands once:

    row            [ prompt            | completion 1  | completion 2     | padding ]
    segment_ids      0  0  0  0          1  1  1         2  2  2  2         -1 -1
    position_ids     0  1  2  3          4  5  6         4  5  6  7          0  0
    group_ids        0  0  0  0          0  0  0         0  0  0  0         -1 -1
    predictor        .  .  .  .          3  4  5         3  7  8  9          .  .

``predictor`` is the place in the row whose hidden state predicts the token: the token before it, or the prompt's last.
``attention.attention_mask`` turns these integers into who sees whom, so that only [M, T] integers ever travel.

Left out: splitting one completion over two rows (T is at least the longest sequence).

Legend: M rows, T tokens in a row, G group size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

INTEGERS = ("input_ids", "position_ids", "segment_ids", "group_ids", "predictor")
MULTIPLE = 16  # lengths of rows and microbatches are multiples of it


@dataclass
class Completion:
    """One sampled answer, from the sampler to the loss."""

    question: int  # index of the question in this rollout: completions of the same question are a group
    sample: int  # index within the group
    prompt_ids: list[int]
    ids: list[int]  # sampled tokens, with the end-of-sequence token when it came
    logprobs: list[float]  # the sampler's own log-prob of each, at the sampling temperature
    finished: bool  # ended by itself; False: cut at the limit
    text: str = ""  # the ids decoded up to the first end-of-sequence token, never the prompt
    correct: float | None = None  # the verifier's result; None: it gave none
    terms: dict[str, float] = field(default_factory=dict)  # what is added to it, by name, before weighting
    reward: float | None = None  # correctness and weighted terms: what advantages are made of
    advantage: float = 0.0
    weight: float = 0.0  # of each of its tokens in the loss; 0 leaves it out

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.ids)


@dataclass
class Rows:
    """A packed rollout. Integer tensors [M, T] as in the module's picture; float tensors [M, T] for the loss.

    ``sequence`` is the completion's index in the packed list, -1 outside completions.
    """

    input_ids: Tensor
    position_ids: Tensor
    segment_ids: Tensor
    group_ids: Tensor
    predictor: Tensor
    sequence: Tensor
    advantage: Tensor
    weight: Tensor  # 0 outside completions
    sampler_logprob: Tensor
    old_logprob: Tensor | None = None
    ref_logprob: Tensor | None = None
    prompt_tokens_shared: int = 0  # prompt tokens that need not stand, since their group shares one copy

    @property
    def shape(self) -> tuple[int, int]:
        """(M, T)"""
        return tuple(self.input_ids.shape)

    def inputs(self) -> dict[str, Tensor]:
        """What every stage needs, by the names of ``Stage.forward``."""
        return {name: getattr(self, name) for name in INTEGERS}

    def to(self, device) -> Rows:
        """The same rows on another device."""
        moved = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in vars(self).items()}
        return Rows(**moved)

    def select(self, index) -> Rows:
        """Some of the rows, in the given order."""
        return Rows(**{k: v[index] if isinstance(v, Tensor) else v for k, v in vars(self).items()})

    def lengths(self, microbatch_size: int = 1) -> list[int]:
        """Of each microbatch, the tokens up to the end of its fullest row, rounded up; what follows is padding.

        Raises:
            ValueError: the rows do not divide into microbatches.
        """
        if self.shape[0] % microbatch_size:
            raise ValueError(f"{self.shape[0]} rows do not divide into microbatches of {microbatch_size}")
        filled = (self.group_ids >= 0).sum(1).view(-1, microbatch_size).amax(1).tolist()
        return [min(max(_round_up(n), MULTIPLE), self.shape[1]) for n in filled]

    def microbatches(self, size: int = 1) -> list[Rows]:
        """The rows in order, ``size`` at a time, each microbatch as long as it needs to be (see ``lengths``)."""
        lengths = self.lengths(size)
        return [self.select((slice(m * size, (m + 1) * size), slice(length))) for m, length in enumerate(lengths)]

    def padding_share(self, microbatch_size: int = 1) -> float:
        """Share of the microbatches' places that hold padding."""
        places = microbatch_size * sum(self.lengths(microbatch_size))
        return 1 - (self.group_ids >= 0).sum().item() / places

    def per_sequence(self, values: Tensor, count: int) -> Tensor:
        """Sums of ``values`` [M, T] over each of ``count`` completions -> [count]."""
        inside = self.sequence >= 0
        sums = torch.zeros(count, dtype=values.dtype, device=values.device)
        return sums.index_add_(0, self.sequence[inside], values[inside])


# A block is what must stand in one row: a prompt and the completions behind it.
Block = list[int]


def make_blocks(completions: list[Completion], row_length: int, share_prompts: bool) -> list[Block]:
    """Completions (by index) that stand behind one copy of their prompt.

    With shared prompts a block is a whole group; a group too long for one row is split over several and its prompt
    repeated. Without, every completion is a block of its own. Completions without tokens are left out.

    Raises:
        ValueError: a sequence longer than the row, or an empty prompt (no token would predict the first one sampled).
    """
    groups: dict[int, list[int]] = {}
    for index, completion in enumerate(completions):
        if not completion.ids:
            continue
        if len(completion) > row_length:
            raise ValueError(f"a sequence of {len(completion)} tokens does not fit a row of {row_length}")
        if not completion.prompt_ids:
            raise ValueError(f"question {completion.question} has an empty prompt: give it at least one token")
        groups.setdefault(completion.question if share_prompts else index, []).append(index)
    blocks: list[Block] = []
    for members in groups.values():
        room = row_length - len(completions[members[0]].prompt_ids)
        parts = first_fit_decreasing([len(completions[i].ids) for i in members], room)
        blocks += [sorted(members[i] for i in part) for part in parts]
    return blocks


def block_length(block: Block, completions: list[Completion]) -> int:
    """Tokens of a block: its prompt once, and its completions."""
    return len(completions[block[0]].prompt_ids) + sum(len(completions[i].ids) for i in block)


def first_fit_decreasing(lengths: list[int], row_length: int) -> list[list[int]]:
    """Indices of ``lengths`` put into rows of ``row_length``, longest first, each into the first row with room.

    >>> first_fit_decreasing([3, 7, 5, 2], 10)
    [[1, 0], [2, 3]]
    """
    rows: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        for row, free in enumerate(room):
            if lengths[index] <= free:
                break
        else:
            row = len(rows)
            rows.append([])
            room.append(row_length)
        rows[row].append(index)
        room[row] -= lengths[index]
    return rows


def lay_out(completions: list[Completion], row_length: int, share_prompts: bool) -> tuple[list[Block], list[list[int]], list[int]]:
    """Which blocks there are, which of them (by index) stand in each row, and the tokens of each row.

    Small rows stand at both ends of the list: the first and the last microbatches of a schedule are those that other
    stages wait for, and neighbours are of like size.

    Raises:
        ValueError: a sequence longer than the row, or an empty prompt.
    """
    blocks = make_blocks(completions, row_length, share_prompts)
    lengths = [block_length(block, completions) for block in blocks]
    rows = first_fit_decreasing(lengths, row_length)
    by_size = sorted(rows, key=lambda row: sum(lengths[b] for b in row))
    rows = by_size[0::2] + by_size[1::2][::-1]
    return blocks, rows, [sum(lengths[b] for b in row) for row in rows]


def choose_row_length(
    completions: list[Completion], stages: int, share_prompts: bool, *, microbatch_size: int = 1, attention_cost: float = 1e-4,
) -> int:
    """T for a rollout: of two dozen sizes from the longest sequence up, the one whose step is cheapest.

    Long rows hold whole groups, so fewer prompts are repeated; short rows cost less attention and make more microbatches
    M, so less bubble. With the length L of each microbatch (``Rows.lengths``):

        cost(T) = sum of (microbatch_size * L * (1 + attention_cost * L) + 64) * (1 + (stages - 1) / M)

    64 stands for what a microbatch costs beside its tokens. Each size is an eighth above the one before, and is then cut
    to its fullest row: groups of 528 tokens get rows of 528. All are multiples of 16.

    Args:
        attention_cost: of one more column, relative to the matrix products of a token (``split.attention_cost``).
    """
    lengths = [len(c) for c in completions if c.ids]
    if not lengths:
        return MULTIPLE
    most = sum(lengths)  # one row holds everything

    def fill(row_length: int) -> list[int]:
        return lay_out(completions, row_length, share_prompts)[2]

    def cost(filled: list[int]) -> float:
        each = [_round_up(max(filled[m : m + microbatch_size])) for m in range(0, len(filled), microbatch_size)]
        each += [MULTIPLE] * (stages - len(each))
        tokens = sum(microbatch_size * n * (1 + attention_cost * n) + 64 for n in each)
        return tokens * (1 + (stages - 1) / len(each))

    sizes = [_round_up(max(lengths))]
    while sizes[-1] < most and len(sizes) < 24:
        sizes.append(_round_up(sizes[-1] * 9 / 8))
    # packed again at the length of the fullest row, the rows stay the same
    return _round_up(max(min(map(fill, sizes), key=cost)))


def _round_up(length: float) -> int:
    return math.ceil(length / MULTIPLE) * MULTIPLE


def round_up_to_bucket(length: int, multiple: int = 16) -> int:
    """The smallest of multiple * {1, 2, 3, 4, 6, 8, 12, 16, 24, ...} that is at least ``length``."""
    size = multiple
    while size < length:
        if size * 3 // 2 >= length and size > multiple:
            return size * 3 // 2
        size *= 2
    return size


def pack(
    completions: list[Completion], row_length: int, *, share_prompts: bool = True, pad_id: int = 0,
    rows_multiple: int = 1, rows_at_least: int = 1, dtype: torch.dtype = torch.float32,
) -> Rows:
    """Completions into rows [M, T] with T = ``row_length``.

    M is a multiple of ``rows_multiple`` (rows of a microbatch) and at least ``rows_at_least``; rows that are not needed
    hold padding and weigh nothing.

    Raises:
        ValueError: a sequence longer than the row.
    """
    blocks, rows, _ = lay_out(completions, row_length, share_prompts)
    count = max(len(rows), rows_at_least, 1)
    count = math.ceil(count / rows_multiple) * rows_multiple

    def full(value, kind):
        return torch.full((count, row_length), value, dtype=kind)

    out = Rows(
        input_ids=full(pad_id, torch.long), position_ids=full(0, torch.long), segment_ids=full(-1, torch.long),
        group_ids=full(-1, torch.long), predictor=full(0, torch.long), sequence=full(-1, torch.long),
        advantage=full(0.0, dtype), weight=full(0.0, dtype), sampler_logprob=full(0.0, dtype),
    )
    for m, row in enumerate(rows):
        t = 0
        for group, b in enumerate(row):
            first = completions[blocks[b][0]]
            prompt, p = first.prompt_ids, len(first.prompt_ids)
            out.prompt_tokens_shared += p * (len(blocks[b]) - 1)
            out.input_ids[m, t : t + p] = torch.tensor(prompt, dtype=torch.long)
            out.position_ids[m, t : t + p] = torch.arange(p)
            out.segment_ids[m, t : t + p] = 0
            out.group_ids[m, t : t + p] = group
            last_of_prompt = t + p - 1
            t += p
            for segment, index in enumerate(blocks[b], start=1):
                c = completions[index]
                n = len(c.ids)
                here = slice(t, t + n)
                out.input_ids[m, here] = torch.tensor(c.ids, dtype=torch.long)
                out.position_ids[m, here] = torch.arange(p, p + n)
                out.segment_ids[m, here] = segment
                out.group_ids[m, here] = group
                out.predictor[m, here] = torch.tensor([last_of_prompt, *range(t, t + n - 1)])
                out.sequence[m, here] = index
                out.advantage[m, here] = c.advantage
                out.weight[m, here] = c.weight
                out.sampler_logprob[m, here] = torch.tensor(c.logprobs, dtype=dtype)
                t += n
    return out


def decode(completions: list[Completion], tokenizer, stop_ids: set[int]) -> None:
    """Fill ``text`` with what a verifier may see: the completion alone, up to its first end-of-sequence token."""
    for c in completions:
        end = next((i for i, token in enumerate(c.ids) if token in stop_ids), len(c.ids))
        c.text = tokenizer.decode(c.ids[:end], skip_special_tokens=True)
