"""The pipelined step equals the step of one process: every number of it, for every stage count, schedule and shape."""

import functools
import gc
import itertools
import math
import weakref

import pytest
import torch

import plain
from grpo_loss import LossSettings
from parallel import clip_gradients, sum_tied_gradient
from pipeline import Pipeline
from ranks import random_rollout, run_ranks, small_config, stage_of, whole_model
from rollout import Rows, pack
from schedules import rank_of_stages, theoretical_bubble
from stages import Stages

SCHEDULES = ("1F1B", "GPipe")
WINDOWS = dict(use_sliding_window=True, sliding_window=5, max_window_layers=2)  # two full layers, then two sliding ones
MODELS = {
    f"{kind}-{'tied' if tied else 'untied'}": (kind, dict(tied=tied))
    for kind in ("qwen2", "qwen3", "llama") for tied in (True, False)
} | {
    "mistral-sliding": ("mistral", dict(tied=False, sliding_window=5)),
    "smollm3-tied": ("smollm3", dict(tied=True)),
    "smollm3-untied": ("smollm3", dict(tied=False)),
    "qwen2-sliding": ("qwen2", dict(tied=True, **WINDOWS)),
}
FIXED = ("qwen2", "qwen3", "llama")
CASES = [
    (model, schedule, microbatches)
    for model, schedule, microbatches in itertools.product(MODELS, SCHEDULES, (4, 7))
    if model.split("-")[0] in FIXED and not model.endswith("sliding") or (schedule, microbatches) == ("1F1B", 4)
]


@functools.cache
def model_of(name: str, dtype=torch.float64):
    kind, more = MODELS[name]
    return whole_model(small_config(kind, **more), dtype)


@functools.cache
def rows_of(microbatches: int, row_length: int = 40) -> Rows:
    """Rows longer than any window here, with old and reference log-probs far enough from the policy's to be clipped."""
    rows = pack(random_rollout(12, 4, seed=1), row_length, dtype=torch.float64)
    assert rows.shape[0] >= microbatches
    return plain.fill_columns(rows.select(slice(0, microbatches)))


@functools.cache
def expected(name: str, microbatches: int, row_length: int = 40) -> dict:
    return plain.plain_step(model_of(name), rows_of(microbatches, row_length))


def compare(stage, of, expected) -> dict:
    """Name -> relative difference, for the tensors of this stage (its copy of tied embeddings included)."""
    return {name: plain.difference(of(p), expected[name]) for name, p in by_name(stage)}


def by_name(stage):
    names = stage.export_names()
    return [(names[local], p) for local, p in stage.named_parameters()]


# ------------------------------------------------------------------------------------------------ parity
def parity_of_all_cases(mesh, cases, expectations):
    out = {}
    for case in cases:
        name, schedule, microbatches = case
        want, rows = expectations[name, microbatches], rows_of(microbatches)
        stage = stage_of(model_of(name), mesh.stages, mesh.stage)
        pipeline = Pipeline(stage, mesh, schedule=schedule)
        scored = pipeline.score(rows)
        result = pipeline.train_step(rows, plain.loss_of_columns)
        sum_tied_gradient(stage, mesh)
        got = {"gradient " + n: d for n, d in compare(stage, lambda p: p.grad, want["gradients"]).items()}
        norm, parts = clip_gradients(stage, mesh, plain.MAX_NORM)
        got["norm"] = plain.difference(norm, want["norm"])
        got["norm of the parts"] = plain.difference(math.hypot(*parts), want["norm"])
        plain.adamw(stage.parameters()).step()
        got |= {"weight " + n: d for n, d in compare(stage, lambda p: p.detach(), want["weights"]).items()}
        if mesh.is_last:
            loss, outputs = result
            got["loss"] = plain.difference(loss, want["loss"])
            for kind, values in (("trained", outputs), ("scored", scored)):
                got[kind + " logprob"] = plain.difference(values[..., 0], want["logprob"])
                got[kind + " entropy"] = plain.difference(values[..., 1], want["entropy"])
        else:
            assert result is None and scored is None
        out[case] = got
    return out


@functools.cache
def parity(stages: int) -> list[dict]:
    """All cases in one launch, by rank; what they are compared with is computed here, in one process."""
    expectations = {(name, m): expected(name, m) for name, _, m in CASES}
    return run_ranks(stages, parity_of_all_cases, CASES, expectations)


@pytest.mark.parametrize("stages", (1, 2, 3, 4))
@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(map(str, c)))
def test_parity_with_one_process(stages, case):
    ranks = [rank[case] for rank in parity(stages)]
    want = expected(case[0], case[2])
    everything = {"norm", "norm of the parts", "loss"}
    everything |= {f"{kind} {what}" for kind in ("trained", "scored") for what in ("logprob", "entropy")}
    everything |= {f"{kind} {name}" for kind in ("gradient", "weight") for name in want["weights"]}
    assert set().union(*ranks) == everything
    worst = {name: d for rank in ranks for name, d in rank.items() if not d < 1e-10}
    assert not worst


def test_the_parity_cases_can_fail():
    """The step moves every weight, clips the gradient and the ratio, and stands far from zero."""
    for name, microbatches in {(c[0], c[2]) for c in CASES}:
        want, rows = expected(name, microbatches), rows_of(microbatches)
        before = dict(model_of(name).named_parameters())
        assert want["norm"] > 2 * plain.MAX_NORM and abs(want["loss"]) > 0.01
        assert all(gradient.abs().max() > 1e-5 for gradient in want["gradients"].values())
        assert all(plain.difference(w, before[n].detach()) > 1e-4 for n, w in want["weights"].items())
        inside = rows.sequence >= 0
        ratio = (want["logprob"] - rows.old_logprob)[inside].exp()
        assert 0.1 < (ratio > 1 + plain.EPSILON_HIGH).float().mean() < 0.5
        assert 0.1 < (ratio < 1 - plain.EPSILON).float().mean() < 0.5
        assert 0 < rows.padding_share() < 0.5


# ------------------------------------------------------------------------------------------------ splits
def step(mesh, stage, pipeline, rows, loss=plain.loss_of_columns):
    """Everything of one step, this stage's share: (loss, outputs, gradient norm, gradients by name)."""
    stage.zero_grad()
    result = pipeline.train_step(rows, loss)
    sum_tied_gradient(stage, mesh)
    norm, _ = clip_gradients(stage, mesh, 0)
    return result, norm, {name: p.grad for name, p in by_name(stage)}


def worst(got: dict, want: dict) -> float:
    return max(plain.difference(gradient, want[name]) for name, gradient in got.items())


def ways_to_pack(completions, microbatch_size):
    """The same completions in other rows. Each is packed for 1F1B on up to four stages."""
    longest = max(len(c) for c in completions)
    g = torch.Generator().manual_seed(5)
    order = torch.randperm(len(completions), generator=g).tolist()
    common = dict(dtype=torch.float64, rows_multiple=microbatch_size, rows_at_least=4 * microbatch_size)
    ways = {
        "shared prompts": (completions, pack(completions, 64, **common)),
        "split groups": (completions, pack(completions, 32, **common)),
        "unshared": (completions, pack(completions, 64, share_prompts=False, **common)),
        "one sequence a row": (completions, pack(completions, longest, share_prompts=False, **common)),
    }
    permuted = [completions[i] for i in order]
    return ways | {"permuted": (permuted, pack(permuted, 48, **common))}


def steps_of_all_ways(mesh, model, completions, microbatch_size, settings, columns):
    out = {}
    for way, (order, rows) in ways_to_pack(completions, microbatch_size).items():
        of = {id(c): i for i, c in enumerate(completions)}
        place = [of[id(c)] for c in order]
        for name, parts in columns.items():
            setattr(rows, name, plain.put_by_completion(rows, [parts[i] for i in place]))
        stage = stage_of(model, mesh.stages, mesh.stage)
        pipeline = Pipeline(stage, mesh, microbatch_size=microbatch_size)
        loss = functools.partial(plain.loss_of_columns, settings=settings)
        result, norm, gradients = step(mesh, stage, pipeline, rows, loss)
        logprobs = None
        if result:
            parts = plain.by_completion(rows, result[1][..., 0], len(completions))
            logprobs = [parts[place.index(i)].tolist() for i in range(len(completions))]
        gradients = {n: g.tolist() for n, g in gradients.items()}
        out[way] = (rows.shape, result and result[0], logprobs, norm, gradients)
    return out


def long_completions():
    """16 completions of which no two fit one row, so that packed unshared into the shortest rows each has its own."""
    completions = random_rollout(4, 4, seed=3)
    for c in completions:
        c.prompt_ids = (c.prompt_ids * 8)[:9]
        c.ids, c.logprobs = (c.ids * 9)[:9] + c.ids[:7], [-4.5] * (9 + len(c.ids[:7]))
    assert 2 * min(map(len, completions)) > max(map(len, completions))
    total = sum(len(c.ids) for c in completions)
    for c in completions:
        c.weight = 1 / total
    return completions


LOSSES = {
    "token_mean": LossSettings(epsilon=plain.EPSILON, epsilon_high=plain.EPSILON_HIGH, beta=plain.BETA),
    "gspo": LossSettings(loss="gspo", epsilon_high=0.2, beta=plain.BETA),
    "sequence_mask": LossSettings(sampler_correction="sequence_mask", correction_cap=3.0),
}


def columns_of(completions) -> dict:
    g = torch.Generator().manual_seed(11)
    noise = lambda c, s: s * torch.randn(len(c.ids), generator=g, dtype=torch.float64) - 4.6  # noqa: E731
    return {name: [noise(c, 0.3) for c in completions] for name in ("old_logprob", "ref_logprob", "sampler_logprob")}


@pytest.mark.parametrize("loss, stages, microbatch_size", [
    ("token_mean", 1, 1), ("token_mean", 2, 1), ("token_mean", 3, 2), ("gspo", 2, 2), ("sequence_mask", 2, 2),
])
def test_C01_C26_the_same_batch_in_any_rows_gives_the_same_step(loss, stages, microbatch_size):
    completions = long_completions()
    columns = columns_of(completions)
    model = model_of("qwen2-tied")
    # One process, each sequence on its own, no packing: the log-probs, and the gradient of the loss through them.
    model.zero_grad()
    sequences = [plain.sequence_logprobs(model, c) for c in completions]
    longest = max(len(s) for s in sequences)
    grid = lambda parts: torch.stack([torch.cat([p, p.new_zeros(longest - len(p))]) for p in parts])  # noqa: E731
    column = {name: grid(parts) for name, parts in columns.items()}
    for name in ("advantage", "weight"):
        column[name] = grid([torch.full((len(c.ids),), getattr(c, name), dtype=torch.float64) for c in completions])
    column["sequence"] = grid([torch.full((len(c.ids),), i + 1.0) for i, c in enumerate(completions)]) - 1
    want = plain.loss_of_columns(grid(sequences)[..., None], column, LOSSES[loss])
    if loss == "token_mean":  # the project's own loss function against the plain formula, once
        names = ("advantage", "weight", "old_logprob", "ref_logprob")
        formula = plain.plain_loss(grid(sequences), *(column[n] for n in names))
        assert plain.difference(want.detach(), formula.detach()) < 1e-12
    want.backward()
    gradients = plain.gradients(model)
    norm = torch.nn.utils.get_total_norm(gradients.values()).item()

    ranks = run_ranks(stages, steps_of_all_ways, model, completions, microbatch_size, LOSSES[loss], columns)
    shapes = {way: result[0] for way, result in ranks[-1].items()}
    assert len(set(shapes.values())) >= 4
    assert shapes["one sequence a row"][0] == 16 and shapes["split groups"][0] > shapes["shared prompts"][0]
    for way in shapes:
        _, value, logprobs, _, _ = ranks[-1][way]
        assert plain.difference(value, want.detach()) < 1e-6, way
        for got, sequence in zip(logprobs, sequences):
            assert plain.difference(torch.tensor(got, dtype=torch.float64), sequence.detach()) < 1e-6, way
        got = {}
        for rank in ranks:
            assert plain.difference(rank[way][3], norm) < 1e-6, way
            got |= rank[way][4]
        assert set(got) == set(gradients)
        got = {n: torch.tensor(g, dtype=torch.float64) for n, g in got.items()}
        assert worst(got, gradients) < 1e-6, way


def norms_and_losses(mesh, model, rows, sizes, schedule):
    out = {}
    for size in sizes:
        stage = stage_of(model, mesh.stages, mesh.stage)
        result, norm, _ = step(mesh, stage, Pipeline(stage, mesh, schedule=schedule, microbatch_size=size), rows)
        out[size] = (norm, mesh.broadcast(result and result[0], source=mesh.stages - 1))
    return out


@pytest.mark.parametrize("schedule, sizes", [("1F1B", (1, 2, 4)), ("GPipe", (1, 2, 4, 8))])
def test_C26_gradient_norm_does_not_depend_on_the_number_of_microbatches(schedule, sizes):
    rows = plain.fill_columns(pack(random_rollout(12, 4, seed=1), 40, dtype=torch.float64).select(slice(0, 8)))
    want = plain.plain_step(model_of("qwen2-tied"), rows)
    for rank in run_ranks(2, norms_and_losses, model_of("qwen2-tied"), rows, sizes, schedule):
        for norm, loss in rank.values():
            assert norm == pytest.approx(want["norm"], rel=1e-6)
            assert loss == pytest.approx(want["loss"], rel=1e-6)


def token_means(mesh, rows_by_split, model):
    out = {}
    # advantage holds each token's loss; the log-prob takes part with factor 0, so that there is a gradient to send back
    loss = lambda output, c: (c["weight"] * (c["advantage"] + 0 * output[..., 0])).sum()  # noqa: E731
    policy = lambda output, c: -(c["weight"] * c["advantage"] * output[..., 0]).sum()  # noqa: E731
    for split, rows in rows_by_split.items():
        stage = stage_of(model, mesh.stages, mesh.stage)
        pipeline = Pipeline(stage, mesh, schedule="GPipe")
        value = step(mesh, stage, pipeline, rows, loss)[0]
        gradients = step(mesh, stage, pipeline, rows, policy)[2]
        out[split] = (value and value[0], {n: g.tolist() for n, g in gradients.items()})
    return out


def test_C01_token_mean_is_0_8_however_the_12_tokens_are_split():
    """3 tokens of loss 2.0 and 9 of 0.4: the mean of microbatch means is 1.2, the token mean 0.8."""
    completions = random_rollout(2, 1, seed=4)
    for c, n, value in zip(completions, (3, 9), (2.0, 0.4)):
        c.prompt_ids, c.ids, c.logprobs = [5, 6, 7], list(range(10, 10 + n)), [-4.0] * n
        c.advantage, c.weight = value, 1 / 12
    model = model_of("llama-untied")
    splits = {
        "1x12": pack(completions, 24, dtype=torch.float64),
        "3+9": pack(completions, 12, dtype=torch.float64),
        "3+9+nothing": pack(completions, 12, rows_at_least=4, dtype=torch.float64),
    }
    assert [r.shape[0] for r in splits.values()] == [1, 2, 4]
    for stages in (1, 2):
        ranks = run_ranks(stages, token_means, splits, model)
        for split in splits:
            assert ranks[-1][split][0] == pytest.approx(0.8, abs=1e-12)
            for rank in ranks:
                for name, gradient in rank[split][1].items():
                    one = torch.tensor(rank["1x12"][1][name], dtype=torch.float64)
                    assert one.abs().max() > 0
                    assert plain.difference(torch.tensor(gradient, dtype=torch.float64), one) < 1e-6


def float32_gradients(mesh, model, rows):
    stage = stage_of(model, mesh.stages, mesh.stage)
    return {n: g.tolist() for n, g in step(mesh, stage, Pipeline(stage, mesh), rows)[2].items()}


def test_C24_gradients_in_float32_are_those_of_one_stage_before_clipping():
    model, rows = model_of("qwen2-tied", torch.float32), pack(random_rollout(12, 4, seed=1), 40)
    plain.fill_columns(rows)
    (one,) = run_ranks(1, float32_gradients, model, rows)
    for stages in (2, 4):
        for rank in run_ranks(stages, float32_gradients, model, rows):
            for name, gradient in rank.items():
                assert plain.difference(torch.tensor(gradient), torch.tensor(one[name])) < 1e-5


# ------------------------------------------------------------------------------------------------ E03
def eight_rows_in_threes(mesh, model, rows, padded):
    stage = stage_of(model, mesh.stages, mesh.stage)
    pipeline = Pipeline(stage, mesh, microbatch_size=3)
    messages = []
    for call in (lambda: pipeline.train_step(rows, plain.loss_of_columns), lambda: pipeline.score(rows)):
        with pytest.raises(ValueError) as refused:
            call()
        messages.append(str(refused.value))
    result, norm, _ = step(mesh, stage, pipeline, padded)
    return messages, pipeline.rows_needed(), norm, result and result[0]


def test_E03_rows_that_do_not_divide_are_refused_and_padded_ones_are_exact():
    completions = random_rollout(12, 4, seed=1)
    rows = plain.fill_columns(pack(completions, 40, dtype=torch.float64).select(slice(0, 8)))
    nothing = pack([], 40, dtype=torch.float64)
    padded = plain.fill_columns(Rows(**{
        k: torch.cat([v, getattr(nothing, k)]) if isinstance(v, torch.Tensor) and getattr(nothing, k) is not None else v
        for k, v in vars(rows).items() if k not in ("old_logprob", "ref_logprob")
    }))
    want = plain.plain_step(model_of("qwen3-untied"), padded)
    ranks = run_ranks(3, eight_rows_in_threes, model_of("qwen3-untied"), rows, padded)
    for messages, needed, norm, _ in ranks:
        assert messages == ["8 rows do not divide into microbatches of 3"] * 2
        assert needed == 9
        assert norm == pytest.approx(want["norm"], rel=1e-6)
    assert ranks[-1][3] == pytest.approx(want["loss"], rel=1e-6)
    assert pack(completions, 40, rows_multiple=3, rows_at_least=9).shape[0] % 3 == 0


# ------------------------------------------------------------------------------------------------ changing shapes
SHAPES = ((4, 40), (7, 48), (4, 40), (7, 40), (4, 48), (4, 40))


def changing_shapes(mesh, name, expectations):
    stage = stage_of(model_of(name), mesh.stages, mesh.stage)
    pipeline = Pipeline(stage, mesh)
    gaps, alive, made = {}, [], weakref.WeakSet()
    make = pipeline._pipeline_stage
    pipeline._pipeline_stage = lambda *a, **k: (stage := make(*a, **k), made.add(stage))[0]
    gc.disable()  # what reference counting does not free would stay for an unknown time
    for turn, shape in enumerate(SHAPES):
        rows, want = rows_of(*shape), expectations[shape]
        before = pipeline.score(rows) if turn % 2 == 0 else None
        result, norm, gradients = step(mesh, stage, pipeline, rows)
        after = pipeline.score(rows) if turn % 3 else None
        gaps[turn, "gradients"] = worst(gradients, want["gradients"])
        gaps[turn, "norm"] = plain.difference(norm, want["norm"])
        if mesh.is_last:
            gaps[turn, "loss"] = plain.difference(result[0], want["loss"])
            for kind, values in (("before", before), ("trained", result[1]), ("after", after)):
                if values is not None:
                    gaps[turn, kind] = plain.difference(values[..., 0], want["logprob"])
        alive.append(len(made))
    # the same shape again and again, as in a run: nothing may pile up
    sizes = []
    for _ in range(3):
        pipeline.score(rows)
        step(mesh, stage, pipeline, rows)
        sizes.append(sorted((len(s.chunks_run), len(s.fwd_cache), len(s.output_chunks)) for s in made))
    return gaps, alive, sizes


@pytest.mark.parametrize("stages", (1, 2, 4))
def test_rows_and_row_length_may_change_from_step_to_step(stages):
    expectations = {shape: expected("qwen2-tied", *shape) for shape in SHAPES}
    for gaps, alive, sizes in run_ranks(stages, changing_shapes, "qwen2-tied", expectations):
        assert all(gap < 1e-10 for gap in gaps.values()), gaps
        assert alive[0] and max(alive) <= 2, alive  # the latest for training and the latest for scoring
        assert sizes[0] == sizes[1] == sizes[2]
        assert all(cache == 0 and outputs == 0 for s in sizes for _, cache, outputs in s), sizes


def lengths_run(mesh, schedule, per_rank, rows):
    """The length of each row batch that enters each stage here, in training and in scoring; and what is behind the cut."""
    ranks = rank_of_stages(schedule, mesh.stages, per_rank)
    parts = [stage_of(model_of("qwen2-tied"), len(ranks), i) for i, rank in enumerate(ranks) if rank == mesh.stage]
    held, seen = parts[0] if per_rank == 1 else Stages(parts), {}
    for part in parts:
        part.register_forward_pre_hook(
            lambda part, args, kwargs: seen.setdefault(part.spec.index, []).append((args[0].shape[1], *{
                kwargs[name].shape[1] for name in kwargs
            })), with_kwargs=True,
        )
    pipeline, found = Pipeline(held, mesh, schedule=schedule, microbatch_size=2), []
    for run in (lambda: pipeline.train_step(rows, plain.loss_of_columns), lambda: pipeline.score(rows)):
        seen.clear()
        result = run()
        outputs = result[1] if isinstance(result, tuple) else result
        if outputs is not None:
            assert outputs.shape == (*rows.shape, 2) and not outputs[rows.sequence < 0].any()
        found.append({index: sorted(lengths) for index, lengths in seen.items()})
    return found


@pytest.mark.parametrize("schedule, per_rank", [("1F1B", 1), ("GPipe", 1), ("Interleaved1F1B", 2), ("ZBVZeroBubble", 2)])
def test_no_stage_computes_the_padding_behind_a_microbatch(schedule, per_rank):
    rows = plain.fill_columns(pack(random_rollout(9, 5, seed=6), 100, dtype=torch.float64, rows_at_least=12, rows_multiple=4))
    want = sorted((n, n) for n in rows.lengths(2))
    assert min(want) < max(want) <= (100, 100)
    for rank in run_ranks(2, lengths_run, schedule, per_rank, rows):
        for stages in rank:
            assert len(stages) == per_rank and all(lengths == want for lengths in stages.values()), stages


def accumulated(mesh, model, first, second):
    stage = stage_of(model, mesh.stages, mesh.stage)
    pipeline = Pipeline(stage, mesh)
    for rows in (first, second):  # another shape, so the schedule is made anew between the two
        pipeline.train_step(rows, plain.loss_of_columns)
        pipeline.score(rows)
    sum_tied_gradient(stage, mesh)
    return {name: p.grad.tolist() for name, p in by_name(stage)}


def test_gradients_of_two_train_steps_add_up():
    want = [expected("qwen2-tied", *shape)["gradients"] for shape in ((4, 40), (7, 48))]
    for rank in run_ranks(2, accumulated, model_of("qwen2-tied"), rows_of(4, 40), rows_of(7, 48)):
        for name, gradient in rank.items():
            total = want[0][name] + want[1][name]
            assert plain.difference(torch.tensor(gradient, dtype=torch.float64), total) < 1e-10


def two_updates(mesh, model, rows):
    stage = stage_of(model, mesh.stages, mesh.stage)
    pipeline, optimizer = Pipeline(stage, mesh), plain.adamw(stage.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        pipeline.train_step(rows, plain.loss_of_columns)
        sum_tied_gradient(stage, mesh)
        clip_gradients(stage, mesh, plain.MAX_NORM)
        optimizer.step()
    tied = stage.embed_tokens.weight if mesh.is_first else stage.lm_head.weight
    return tied.tolist()


def test_tied_copies_stay_equal_to_the_last_bit_over_several_updates():
    first, last = run_ranks(2, two_updates, model_of("qwen2-tied"), rows_of(7))
    assert first == last
    assert plain.difference(torch.tensor(first), model_of("qwen2-tied").lm_head.weight.detach()) > 1e-3


# ------------------------------------------------------------------------------------------------ nothing to train on
def nothing_to_train_on(mesh, model, cases):
    out = {}
    for name, rows in cases.items():
        for schedule in SCHEDULES:
            stage = stage_of(model, mesh.stages, mesh.stage)
            pipeline = Pipeline(stage, mesh, schedule=schedule)
            scored = pipeline.score(rows)
            result, norm, gradients = step(mesh, stage, pipeline, rows)
            finite = scored is None or bool(torch.isfinite(scored).all() and torch.isfinite(result[1]).all())
            out[name, schedule] = (result and result[0], norm, finite, {n: g.tolist() for n, g in gradients.items()})
    return out


@pytest.mark.parametrize("stages", (1, 2, 3))
def test_masked_microbatches_give_finite_numbers_and_no_gradient(stages):
    rows = rows_of(4)
    masked = rows.select(slice(0, 4))
    masked.weight = rows.weight.clone()
    masked.weight[1] = 0
    unweighted = rows.select(slice(0, 4))
    unweighted.weight = torch.zeros_like(rows.weight)
    hole = Rows(**vars(rows))  # one microbatch of nothing but padding
    emptied = pack([], rows.shape[1], dtype=torch.float64)
    for name, value in vars(rows).items():
        if isinstance(value, torch.Tensor):
            setattr(hole, name, value.clone())
            blank = getattr(emptied, name)
            getattr(hole, name)[1] = 0 if blank is None else blank[0]
    nothing = pack([], 40, rows_at_least=4, dtype=torch.float64)
    plain.fill_columns(nothing)
    cases = {"masked": masked, "hole": hole, "unweighted": unweighted, "nothing": nothing}
    model = model_of("qwen2-tied")
    want = plain.plain_step(model, masked)
    ranks = run_ranks(stages, nothing_to_train_on, model, cases)
    for rank in ranks:
        for (name, schedule), (loss, norm, finite, gradients) in rank.items():
            assert finite
            for n, g in gradients.items():
                g = torch.tensor(g, dtype=torch.float64)
                if name in ("masked", "hole"):  # a masked row and no row at all are the same to the gradient
                    assert plain.difference(g, want["gradients"][n]) < 1e-10
                else:
                    assert not g.any()
            assert norm == (0 if name in ("unweighted", "nothing") else pytest.approx(want["norm"], rel=1e-10))
            assert loss in (None, 0.0) or loss == pytest.approx(want["loss"], rel=1e-10)
    assert ranks[-1]["unweighted", "1F1B"][0] == ranks[-1]["nothing", "1F1B"][0] == 0.0
    assert ranks[-1]["masked", "1F1B"][0] != 0.0


# ------------------------------------------------------------------------------------------------ the step's timeline
def timelines(mesh, model, rows):
    out = {}
    for schedule in SCHEDULES:
        pipeline = Pipeline(stage_of(model, mesh.stages, mesh.stage), mesh, schedule=schedule)
        pipeline.score(rows)
        assert pipeline.timeline == []
        for _ in range(2):
            pipeline.train_step(rows, plain.loss_of_columns)
            pipeline.score(rows)  # does not disturb what the step has noted
        out[schedule] = ([(c.kind, c.microbatch, c.start, c.end) for c in pipeline.timeline], pipeline.timings())
    return out


def test_the_timeline_shows_each_chunk_once_in_the_schedules_order():
    stages, microbatches = 3, 7
    for index, rank in enumerate(run_ranks(stages, timelines, model_of("qwen2-tied"), rows_of(microbatches))):
        for schedule, (chunks, timings) in rank.items():
            kinds = "".join(kind[0] for kind, *_ in chunks)
            warmup = stages - index  # forwards before the first backward, under 1F1B
            steady = "f" * (warmup - 1) + "fb" * (microbatches - warmup + 1) + "b" * (warmup - 1)
            assert kinds == (steady if schedule == "1F1B" else "f" * microbatches + "b" * microbatches)
            for kind in ("forward", "backward"):
                assert [m for k, m, *_ in chunks if k == kind] == list(range(microbatches))
            edges = [0.0] + [moment for *_, start, end in chunks for moment in (start, end)] + [timings["step_s"]]
            assert edges == sorted(edges)
            assert timings["busy_s"] == pytest.approx(sum(end - start for *_, start, end in chunks))
            assert 0 < timings["busy_s"] < timings["step_s"]


def test_theoretical_bubble():
    assert theoretical_bubble(1, 5) == 0
    assert theoretical_bubble(2, 8) == pytest.approx(1 / 9)
    assert theoretical_bubble(4, 16) == pytest.approx(3 / 19)


def rows_needed(mesh, model):
    stage = stage_of(model, mesh.stages, mesh.stage)
    return {
        (schedule, size): Pipeline(stage, mesh, schedule=schedule, microbatch_size=size).rows_needed()
        for schedule in SCHEDULES for size in (1, 2)
    }


def test_rows_needed_are_what_the_schedule_accepts():
    for rank in run_ranks(3, rows_needed, model_of("qwen2-tied")):
        assert rank == {("1F1B", 1): 3, ("1F1B", 2): 6, ("GPipe", 1): 1, ("GPipe", 2): 2}
