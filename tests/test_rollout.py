"""Packing: every token once, behind its own prompt, in rows of one length, with as little padding as can be had."""

import itertools
import math

import pytest
import torch

from ranks import random_rollout
from rollout import (
    Completion, Rows, block_length, choose_row_length, decode, first_fit_decreasing, make_blocks, pack,
    round_up_to_bucket,
)


def completion(question, prompt, ids, sample=0, **more):
    return Completion(question, sample, prompt, ids, [-float(i) for i in range(len(ids))], finished=True, **more)


def read_back(rows: Rows, completions) -> list[tuple]:
    """(index, prompt, ids) of every completion, found by following ``predictor`` and the mask's integers alone."""
    found = []
    for m in range(rows.shape[0]):
        column = {name: getattr(rows, name)[m].tolist() for name in (*rows.inputs(), "sequence")}
        for index in sorted({s for s in column["sequence"] if s >= 0}):
            places = [t for t, s in enumerate(column["sequence"]) if s == index]
            (group,) = {column["group_ids"][t] for t in places}
            (segment,) = {column["segment_ids"][t] for t in places}
            assert segment > 0
            prompt = [
                t for t in range(rows.shape[1]) if column["group_ids"][t] == group and column["segment_ids"][t] == 0
            ]
            assert prompt == list(range(prompt[0], prompt[-1] + 1)) and prompt[-1] < places[0]
            assert [column["position_ids"][t] for t in prompt + places] == list(range(len(prompt) + len(places)))
            assert [column["predictor"][t] for t in places] == [prompt[-1], *places[:-1]]
            # nobody else of this group carries the same segment, so the completion sees only its prompt and itself
            labels = list(zip(column["group_ids"], column["segment_ids"]))
            assert [t for t, label in enumerate(labels) if label == (group, segment)] == places
            ids = column["input_ids"]
            found.append((index, [ids[t] for t in prompt], [ids[t] for t in places]))
    return sorted(found)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("row_length, share", [
    (20, True), (20, False), (37, True), (64, True), (64, False), (300, True),
])
def test_every_completion_stands_once_and_whole_behind_its_prompt(seed, row_length, share):
    completions = random_rollout(7, 5, seed=seed)
    rows = pack(completions, row_length, share_prompts=share, dtype=torch.float64)
    assert rows.shape[1] == row_length
    assert read_back(rows, completions) == [(i, c.prompt_ids, c.ids) for i, c in enumerate(completions)]
    for i, c in enumerate(completions):
        here = rows.sequence == i
        assert rows.sampler_logprob[here].tolist() == c.logprobs
        assert rows.advantage[here].tolist() == [c.advantage] * len(c.ids)
        assert rows.weight[here].tolist() == [c.weight] * len(c.ids)
    outside = rows.sequence < 0
    for column in (rows.weight, rows.advantage, rows.sampler_logprob):
        assert not column[outside].any()
    padding = rows.group_ids < 0
    assert torch.equal(padding, rows.segment_ids < 0)
    blocks = make_blocks(completions, row_length, share)
    assert rows.prompt_tokens_shared == sum(len(completions[b[0]].prompt_ids) * (len(b) - 1) for b in blocks)
    stands = sum(map(len, completions)) - rows.prompt_tokens_shared
    filled = (rows.group_ids >= 0).sum(1).tolist()
    assert rows.lengths() == [min(row_length, max(16, math.ceil(n / 16) * 16)) for n in filled]
    assert rows.padding_share() == pytest.approx(1 - stands / sum(rows.lengths()))
    if not share:
        assert rows.prompt_tokens_shared == 0


def test_the_picture_of_the_docstring():
    completions = [completion(0, [11, 12, 13, 14], [21, 22, 23]), completion(0, [11, 12, 13, 14], [31, 32, 33, 34])]
    rows = pack(completions, 13, pad_id=9)
    assert rows.input_ids.tolist() == [[11, 12, 13, 14, 21, 22, 23, 31, 32, 33, 34, 9, 9]]
    assert rows.segment_ids.tolist() == [[0] * 4 + [1] * 3 + [2] * 4 + [-1] * 2]
    assert rows.position_ids.tolist() == [[0, 1, 2, 3, 4, 5, 6, 4, 5, 6, 7, 0, 0]]
    assert rows.group_ids.tolist() == [[0] * 11 + [-1] * 2]
    assert rows.predictor[0, 4:11].tolist() == [3, 4, 5, 3, 7, 8, 9]
    assert rows.prompt_tokens_shared == 4
    assert rows.padding_share() == pytest.approx(2 / 13)


# ------------------------------------------------------------------------------------------------ masks go by position
@pytest.mark.parametrize("pad", (0, 2), ids=("pad=0", "pad=eos"))
def test_C04_C05_C07_T21_weights_cover_all_tokens_up_to_and_with_the_end_of_sequence(pad):
    """By position, never by token value: end-of-sequence is 2, and the prompt holds that id too."""
    eos = 2
    completions = [
        completion(0, [7, eos, 8], [5, eos], weight=0.25), completion(0, [7, eos, 8], [5, 6, 7, eos], weight=0.25),
        completion(1, [eos], [5, 6, eos], weight=0.25), completion(2, [eos, eos], [eos], weight=0.25),
    ]
    rows = pack(completions, 12, pad_id=pad)
    assert rows.per_sequence(rows.weight, 4).tolist() == [0.5, 1.0, 0.75, 0.25]
    assert rows.per_sequence(torch.ones(rows.shape), 4).tolist() == [2, 4, 3, 1]
    assert read_back(rows, completions) == [(i, c.prompt_ids, c.ids) for i, c in enumerate(completions)]
    assert (rows.weight > 0).sum() == 10
    scored = rows.input_ids[rows.weight > 0].tolist()
    assert scored.count(eos) == 4  # every end-of-sequence token sampled is learned, none of the prompts' and no padding
    assert (rows.input_ids[rows.group_ids < 0] == pad).all() and (rows.group_ids < 0).any()
    # every real token can be attended to: it has a group, whatever its value
    real = sum(len(c.ids) for c in completions) + 3 + 1 + 2
    assert (rows.group_ids >= 0).sum() == real


def test_T21_C05_ids_that_equal_the_padding_are_no_padding():
    rows = pack([completion(0, [1, 1], [1, 1, 1], weight=0.5)], 8, pad_id=1)
    assert rows.weight.tolist() == [[0, 0, 0.5, 0.5, 0.5, 0, 0, 0]]
    assert rows.group_ids.tolist() == [[0] * 5 + [-1] * 3]


class Letters:
    """Token 3 is 'a', 4 is 'b', ...; 0 to 2 are special and show as <0>, unless skipped."""

    def decode(self, ids, skip_special_tokens=False):
        shown = [i for i in ids if i > 2 or not skip_special_tokens]
        return "".join(chr(94 + i) if i > 2 else f"<{i}>" for i in shown)


def test_T21_A06_decode_cuts_at_the_first_end_of_sequence_and_never_shows_the_prompt():
    cases = [
        ([5, 2, 7], "c"), ([5, 6], "cd"), ([2], ""), ([2, 5], ""), ([5, 1, 6, 2], "c"), ([5, 0, 6], "cd"), ([], ""),
    ]
    completions = [completion(0, [8, 9], ids) for ids, _ in cases]
    decode(completions, Letters(), stop_ids={1, 2})
    assert [c.text for c in completions] == [text for _, text in cases]
    assert [c.ids for c in completions] == [ids for ids, _ in cases]  # the ids themselves are kept


# ------------------------------------------------------------------------------------------------ blocks
def test_a_group_too_long_for_a_row_is_split_and_its_prompt_repeated():
    prompt = [10, 11, 12, 13]
    completions = [completion(0, prompt, [20 + s] * 3, s) for s in range(5)]
    assert make_blocks(completions, 19, True) == [[0, 1, 2, 3, 4]]
    assert make_blocks(completions, 18, True) == [[0, 1, 2, 3], [4]]
    assert make_blocks(completions, 10, True) == [[0, 1], [2, 3], [4]]
    assert make_blocks(completions, 10, False) == [[i] for i in range(5)]
    rows = pack(completions, 10)
    assert rows.shape == (3, 10)
    assert all(prompt in row.unfold(0, 4, 1).tolist() for row in rows.input_ids)
    assert rows.prompt_tokens_shared == 2 * 4
    assert read_back(rows, completions) == [(i, prompt, c.ids) for i, c in enumerate(completions)]


def test_groups_stay_apart_though_their_prompts_are_equal():
    completions = [completion(q, [10, 11], [20 + q, 30]) for q in (0, 1)]
    rows = pack(completions, 16)
    assert rows.shape[0] == 1 and rows.prompt_tokens_shared == 0
    assert rows.group_ids[0, :8].tolist() == [0] * 4 + [1] * 4


def test_completions_of_a_group_need_not_stand_together():
    completions = [completion(q, [10 + q], [20 + i]) for i, q in enumerate((0, 1, 0, 1, 0))]
    assert make_blocks(completions, 10, True) == [[0, 2, 4], [1, 3]]
    rows = pack(completions, 10)
    assert read_back(rows, completions) == [(i, c.prompt_ids, c.ids) for i, c in enumerate(completions)]


def test_completions_without_tokens_are_left_out_and_keep_their_number():
    cases = (0, [5], [6]), (0, [5], []), (1, [7, 7], []), (1, [7, 7], [8, 9])
    completions = [completion(*case) for case in cases]
    rows = pack(completions, 6)
    assert rows.per_sequence(torch.ones(rows.shape), 4).tolist() == [1, 0, 0, 2]
    nothing = pack(completions[1:3], 6)
    assert nothing.shape == (1, 6) and nothing.padding_share() == 1 and not (nothing.sequence >= 0).any()
    assert pack([], 16).shape == (1, 16)


def test_a_sequence_longer_than_the_row_is_refused_with_the_numbers():
    completions = [completion(0, [5] * 4, [6] * 4)]
    assert pack(completions, 8).padding_share() == 0
    for share in (True, False):
        with pytest.raises(ValueError, match="sequence of 8 tokens does not fit a row of 7"):
            pack(completions, 7, share_prompts=share)


def test_an_empty_prompt_is_refused_since_nothing_predicts_its_first_token():
    with pytest.raises(ValueError, match="question 3 .*prompt"):
        pack([completion(3, [], [6, 7])], 8)


# ------------------------------------------------------------------------------------------------ rows
def test_first_fit_decreasing():
    assert first_fit_decreasing([3, 7, 5, 2], 10) == [[1, 0], [2, 3]]
    assert first_fit_decreasing([], 10) == []
    assert first_fit_decreasing([10, 10], 10) == [[0], [1]]
    assert first_fit_decreasing([6, 6, 4, 4], 10) == [[0, 2], [1, 3]]  # in order of arrival it would take three rows
    g = torch.Generator().manual_seed(0)
    for _ in range(20):
        lengths = torch.randint(1, 51, (60,), generator=g).tolist()
        rows = first_fit_decreasing(lengths, 50)
        assert sorted(itertools.chain(*rows)) == list(range(60))
        used = [sum(lengths[i] for i in row) for row in rows]
        assert max(used) <= 50
        assert len(rows) <= 11 / 9 * math.ceil(sum(lengths) / 50) + 6 / 9 + 3  # its known bound, over a lower bound


def test_small_rows_stand_at_both_ends():
    completions = random_rollout(12, 4, seed=2)
    rows = pack(completions, 40)
    used = (rows.group_ids >= 0).sum(1).tolist()
    assert len(used) > 8
    peak = used.index(max(used))
    assert used[: peak + 1] == sorted(used[: peak + 1]) and used[peak:] == sorted(used[peak:], reverse=True)
    assert 0 < peak < len(used) - 1
    assert {min(used), sorted(used)[1]} == {used[0], used[-1]}
    # rows of nothing, added for the schedule, are the smallest of all and stand at an end too
    more = pack(completions, 40, rows_at_least=len(used) + 3)
    assert (more.group_ids >= 0).sum(1).tolist() == used + [0] * 3
    assert more.padding_share() > rows.padding_share()


@pytest.mark.parametrize("multiple, at_least, want", [(1, 1, 3), (2, 1, 4), (4, 1, 4), (1, 5, 5), (2, 5, 6), (3, 3, 3)])
def test_the_number_of_rows(multiple, at_least, want):
    completions = [completion(q, [5] * 4, [6] * 5) for q in range(3)]
    rows = pack(completions, 10, rows_multiple=multiple, rows_at_least=at_least)
    assert rows.shape == (want, 10)
    assert rows.per_sequence(torch.ones(rows.shape), 3).tolist() == [5, 5, 5]


def test_padding_stays_small_on_lengths_as_they_come():
    """Against padding every sequence to the longest, on a spread of lengths with a long tail."""
    g = torch.Generator().manual_seed(1)
    completions = []
    for q in range(16):
        for s in range(8):
            n = int(torch.empty(1).log_normal_(3.5, 0.8, generator=g).clamp(1, 256))
            completions.append(completion(q, [5] * 40, [6] * n, s))
    shared = pack(completions, choose_row_length(completions, 4, True))
    plain = pack(completions, choose_row_length(completions, 4, False), share_prompts=False)
    padded = len(completions) * max(map(len, completions))
    assert shared.padding_share() < 0.06 and plain.padding_share() < 0.1
    assert sum(plain.lengths()) < 0.4 * padded
    assert sum(shared.lengths()) < 0.7 * sum(plain.lengths())


def test_per_sequence_sums_each_completion_and_nothing_else():
    completions = random_rollout(5, 3, seed=6)
    rows = pack(completions, 48, dtype=torch.float64)
    values = torch.randn(rows.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    values[rows.sequence < 0] = float("nan")  # prompts and padding must not reach the sums
    pairs = list(zip(values.flatten().tolist(), rows.sequence.flatten().tolist()))
    want = [sum(v for v, s in pairs if s == i) for i in range(15)]
    assert rows.per_sequence(values, 15).tolist() == pytest.approx(want, rel=1e-12)
    got = rows.per_sequence(rows.sampler_logprob, 15).tolist()
    assert got == pytest.approx([sum(c.logprobs) for c in completions])
    assert rows.per_sequence(values, 17)[15:].tolist() == [0, 0]


@pytest.mark.parametrize("size", (1, 2, 3))
def test_microbatches_hold_all_tokens_and_end_with_their_fullest_row(size):
    alone = [completion(q, [5] * 40, [6] * (12 + 6 * q)) for q in range(9)]  # no two of them fit one row
    rows = pack(alone, 100, rows_multiple=6, rows_at_least=24)
    parts, at = rows.microbatches(size), 0
    assert [p.shape for p in parts] == [(size, n) for n in rows.lengths(size)] and len(parts) == rows.shape[0] // size
    assert {16, 64, 80, 96, 100} >= set(rows.lengths(size)) > {16, 100}  # empty ones, and some of many lengths
    for part in parts:
        filled = (rows.group_ids[at : at + size] >= 0).sum(1).max().item()
        assert filled <= part.shape[1] < max(filled, 1) + 16
        for name, value in vars(part).items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(value, getattr(rows, name)[at : at + size, : part.shape[1]]), name
        at += size
    assert sum((p.group_ids >= 0).sum() for p in parts) == (rows.group_ids >= 0).sum()
    with pytest.raises(ValueError, match="24 rows do not divide into microbatches of 7"):
        rows.microbatches(7)


def test_select_and_to_carry_every_column():
    rows = pack(random_rollout(5, 3, seed=6), 40)
    rows.old_logprob = torch.randn(rows.shape)
    part = rows.select(slice(1, 3))
    assert part.shape == (2, 40) and part.ref_logprob is None
    for name, value in vars(rows).items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(getattr(part, name), value[1:3]), name
    moved = rows.to("cpu")
    assert moved is not rows and torch.equal(moved.old_logprob, rows.old_logprob)
    assert moved.prompt_tokens_shared == rows.prompt_tokens_shared > 0


# ------------------------------------------------------------------------------------------------ the length of a row
def test_buckets():
    sizes = [round_up_to_bucket(n) for n in range(1, 400)]
    assert sorted(set(sizes)) == [16, 32, 48, 64, 96, 128, 192, 256, 384, 512]
    assert all(size >= n for n, size in enumerate(sizes, 1))
    assert all(round_up_to_bucket(size) == size for size in sizes)
    assert round_up_to_bucket(5, 4) == 8 and round_up_to_bucket(9, 4) == 12


@pytest.mark.parametrize("stages", (1, 2, 4))
@pytest.mark.parametrize("share", (True, False))
@pytest.mark.parametrize("attention_cost", (1e-5, 1e-3, 1e-1))
def test_the_chosen_row_length_is_the_cheapest_size_cut_to_its_fullest_row(stages, share, attention_cost):
    completions = random_rollout(10, 6, seed=8, longest=60)
    longest = max(map(len, completions))
    chosen = choose_row_length(completions, stages, share, attention_cost=attention_cost)
    assert chosen >= longest and chosen % 16 == 0

    def rows(length):  # that ``pack`` really makes
        return pack(completions, length, share_prompts=share, rows_at_least=stages)

    def cost(length):  # the docstring's formula
        each = rows(length).lengths()
        return sum(n * (1 + attention_cost * n) + 64 for n in each) * (1 + (stages - 1) / len(each))

    fullest = (rows(chosen).group_ids >= 0).sum(1).max().item()
    assert chosen - fullest < 16
    sizes = [math.ceil(longest / 16) * 16]
    while len(sizes) < 24 and sizes[-1] < sum(map(len, completions)):
        sizes.append(math.ceil(sizes[-1] * 9 / 8 / 16) * 16)
    assert cost(chosen) <= min(map(cost, sizes)) * (1 + 1e-12)


def test_rows_of_whole_groups_hold_no_padding():
    groups = [completion(q, [5] * 16, [6] * 64, s) for q in range(8) for s in range(8)]
    length = choose_row_length(groups, 1, True, attention_cost=5e-4)
    assert length == 528 and pack(groups, length).padding_share() == 0


def test_row_length_follows_its_reasons():
    completions = random_rollout(10, 6, seed=8, longest=60)
    length = lambda stages=2, **more: choose_row_length(completions, stages, True, **more)  # noqa: E731
    assert length(attention_cost=1e-1) < length(attention_cost=1e-6)  # costly attention: short rows
    assert length(8) < length(1)  # many stages: short rows, so that there are microbatches enough
    assert length(8, microbatch_size=4) <= length(8)
    assert choose_row_length([], 4, True) == 16
    assert choose_row_length([completion(0, [5], [])], 4, True) == 16
    one = [completion(0, [5] * 100, [6] * 50)]
    assert choose_row_length(one, 4, True) == 160
    assert choose_row_length(one + [completion(1, [5] * 500, [])], 4, True) == 160  # what is left out needs no room
    assert length() == length()


def test_block_length_counts_the_prompt_once():
    completions = [completion(0, [5] * 4, [6] * 3), completion(0, [5] * 4, [6] * 2)]
    assert block_length([0, 1], completions) == 9
    assert block_length([1], completions) == 6
