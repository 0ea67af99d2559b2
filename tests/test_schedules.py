"""Schedules with several stages on a rank: the same numbers as one process, whatever the layout, and what is refused."""

import functools
import itertools
import math

import pytest
import torch

import plain
from config import Settings, SettingsError, check_settings
from grpo_loss import LossSettings, policy_loss
from parallel import check_tied_copies, checksum, clip_gradients, sum_tied_gradient
from pipeline import Pipeline
from ranks import random_rollout, run_ranks, small_config, whole_model
from rollout import pack
from schedules import (
    SCHEDULES, bubble, make_schedule, microbatches_needed, order, rank_of_stages, simulate, stages_per_rank,
    theoretical_bubble,
)
from split import plan_stages
from stages import Stage, Stages
from test_train import SAME_ON_ANY_LAYOUT, model, run_curve  # noqa: F401 - model is a fixture

SEVERAL = ("LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
MODELS = {"qwen2-tied": ("qwen2", True), "qwen3-untied": ("qwen3", False)}
SHAPES = ((8, 40), (12, 48), (8, 40))  # (microbatches, row length) of one step after the other


@functools.cache
def model_of(name, dtype=torch.float64):
    kind, tied = MODELS[name]
    return whole_model(small_config(kind, tied=tied, layers=9), dtype)


@functools.cache
def rows_of(microbatches, row_length=40, rows_each=1):
    rows = pack(
        random_rollout(12, 8, seed=1), row_length, dtype=torch.float64, rows_at_least=microbatches * rows_each
    )
    return plain.fill_columns(rows.select(slice(0, microbatches * rows_each)))


@functools.cache
def expected(name, microbatches, row_length=40):
    return plain.plain_step(model_of(name), rows_of(microbatches, row_length))


def stages_on(model, mesh, schedule, per_rank, **more):
    """This rank's stages with the weights of transformers' ``model``."""
    ranks = rank_of_stages(schedule, mesh.stages, per_rank)
    specs = plan_stages(model.config, len(ranks))
    held = Stages([Stage(model.config, s, dtype=model.dtype, **more) for s, r in zip(specs, ranks) if r == mesh.stage])
    held.load_tensors(model.state_dict())
    return held


def one_step(held, mesh, pipeline, rows, want):
    """Name -> relative difference of everything that one scored and trained step gives on this rank."""
    names = held.export_names()
    held.zero_grad()
    before = pipeline.score(rows)
    result = pipeline.train_step(rows, plain.loss_of_columns)
    after = pipeline.score(rows)
    sum_tied_gradient(held, mesh)
    got = {f"gradient {names[n]}": plain.difference(p.grad, want["gradients"][names[n]]) for n, p in held.named_parameters()}
    norm, parts = clip_gradients(held, mesh, plain.MAX_NORM)
    got["norm"] = plain.difference(norm, want["norm"])
    got["norm of the parts"] = plain.difference(math.hypot(*parts), want["norm"])
    assert (result is not None) == (before is not None) == pipeline.holds_last
    if result is not None:
        got["loss"] = plain.difference(result[0], want["loss"])
        for kind, values in (("before", before), ("trained", result[1]), ("after", after)):
            got[kind + " logprob"] = plain.difference(values[..., 0], want["logprob"])
            got[kind + " entropy"] = plain.difference(values[..., 1], want["entropy"])
    return got


def parity_of_all(mesh, cases, expectations):
    out = {}
    for name, schedule, per_rank in cases:
        held = stages_on(model_of(name), mesh, schedule, per_rank)
        pipeline = Pipeline(held, mesh, schedule=schedule)
        for turn, shape in enumerate(SHAPES):
            got = one_step(held, mesh, pipeline, rows_of(*shape), expectations[name, shape])
            out |= {(name, schedule, per_rank, turn, key): value for key, value in got.items()}
        names = held.export_names()
        plain.adamw(held.parameters()).step()
        for local, p in held.named_parameters():
            want = expectations[name, SHAPES[-1]]["weights"][names[local]]
            out[name, schedule, per_rank, "weight", names[local]] = plain.difference(p.detach(), want)
        check_tied_copies(held, mesh)
    return out


def cases(ranks):
    more = [("qwen2-tied", "Interleaved1F1B", 3), ("qwen2-tied", "LoopedBFS", 1)] if ranks == 2 else []
    return [(name, schedule, 2) for name, schedule in itertools.product(MODELS, SEVERAL)] + more


@pytest.mark.parametrize("ranks", (1, 2, 4))
def test_every_schedule_gives_the_step_of_one_process_while_shapes_change(ranks):
    expectations = {(n, shape): expected(n, *shape) for n in MODELS for shape in set(SHAPES)}
    results = run_ranks(ranks, parity_of_all, cases(ranks), expectations)
    everything = set().union(*results)
    for name, schedule, per_rank in cases(ranks):
        keys = {k[3:] for k in everything if k[:3] == (name, schedule, per_rank)}
        tensors = expectations[name, SHAPES[0]]["weights"]
        assert {("weight", t) for t in tensors} | {(2, f"gradient {t}") for t in tensors} <= keys
        assert {(t, k) for t in range(3) for k in ("norm", "loss", "before logprob", "after logprob", "trained logprob")} <= keys
    wrong = {key: d for rank in results for key, d in rank.items() if not d < 1e-10}
    assert not wrong


def microbatches_of_two_rows(mesh, model, rows, schedule):
    held = stages_on(model, mesh, schedule, 2, activation_checkpointing=True)
    pipeline = Pipeline(held, mesh, schedule=schedule, microbatch_size=2)
    result = pipeline.train_step(rows, plain.loss_of_columns)
    sum_tied_gradient(held, mesh)
    names = held.export_names()
    return result and result[0], {names[n]: p.grad.tolist() for n, p in held.named_parameters()}, pipeline.rows_needed()


@pytest.mark.parametrize("schedule", ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"))
def test_split_backwards_with_checkpointed_layers_and_two_rows_a_microbatch(schedule):
    rows = rows_of(8)
    want = expected("qwen2-tied", 8)
    for rank, (loss, gradients, needed) in enumerate(run_ranks(2, microbatches_of_two_rows, model_of("qwen2-tied"), rows, schedule)):
        assert needed == 2 * microbatches_needed(schedule, 2)[0]
        assert loss is None or plain.difference(loss, want["loss"]) < 1e-6
        for name, gradient in gradients.items():
            assert plain.difference(torch.tensor(gradient, dtype=torch.float64), want["gradients"][name]) < 1e-6, name


def held_names(mesh, model):
    out = {}
    for schedule in SEVERAL:
        held = stages_on(model, mesh, schedule, 2)
        out[schedule] = (set(held.export_tensors()), sum(p.numel() for p in held.parameters()), checksum(held))
    return out


@pytest.mark.parametrize("name", MODELS)
def test_ranks_together_answer_for_every_tensor_once_and_a_V_holds_tied_embeddings_once(name):
    model = model_of(name)
    whole = Stages([Stage(model.config, plan_stages(model.config, 1)[0], dtype=model.dtype)])
    whole.load_tensors(model.state_dict())
    results = run_ranks(2, held_names, model)
    for schedule in SEVERAL:
        names, sizes, sums = zip(*(rank[schedule] for rank in results))
        assert not names[0] & names[1] and names[0] | names[1] == set(whole.export_tensors())
        extra = model.config.vocab_size * 32 if name == "qwen2-tied" and not SCHEDULES[schedule].v_layout else 0
        assert sum(sizes) == sum(p.numel() for p in model.parameters()) + extra
        assert sum(sums) % 2**63 == checksum(whole)


# ------------------------------------------------------------------------------------------------ the whole loop
@pytest.mark.parametrize("more", [
    ("--schedule", "Interleaved1F1B", "--grpo_iterations", "2"),
    ("--schedule", "ZBVZeroBubble", "--beta", "0.1", "--reference", "pipeline", "--offload_reference", "on",
     "--offload_optimizer", "on"),
    ("--schedule", "DualPipeV", "--beta", "0.1", "--timeline_every", "2"),
], ids=lambda more: more[1])
def test_a_run_draws_the_curve_of_one_process(model, tmp_path, more):
    plainly = more[more.index("--beta") : more.index("--beta") + 2] if "--beta" in more else more[2:]
    whole, weights = run_curve(1, model, tmp_path / "1", "--dtype", "float64", *plainly)
    split, split_weights = run_curve(2, model, tmp_path / "2", "--dtype", "float64", *more)
    assert len(whole) == len(split) and split_weights.keys() == weights.keys()
    for a, b in zip(whole, split):
        for name in SAME_ON_ANY_LAYOUT:
            assert (name in a) == (name in b)
            if name in a:
                assert b[name] == pytest.approx(a[name], rel=2e-5, abs=1e-9), (a["step"], name)
    for name, tensor in weights.items():
        assert torch.allclose(split_weights[name], tensor, rtol=0, atol=2e-5), name
    drawn = sorted(p.name for p in (tmp_path / "2" / "timeline").glob("*"))
    assert drawn == (["step-000002.json", "step-000002.png"] if "--timeline_every" in more else [])


def with_and_without_old_logprobs(mesh, name, rows, schedule):
    held = stages_on(model_of(name), mesh, schedule, 2)
    pipeline, out = Pipeline(held, mesh, schedule=schedule), []
    for scored_before in (True, False):
        held.zero_grad()
        scored = pipeline.score(rows) if scored_before else None
        rows.old_logprob = None if scored is None else scored[..., 0]

        def loss(output, c):
            old = c["old_logprob"] if scored_before else None
            return policy_loss(
                output[..., 0], c["advantage"], c["weight"], old, None, c["sampler_logprob"], c["sequence"].long(),
                LossSettings(),
            )

        result = pipeline.train_step(rows, loss)
        out.append((result and result[0], [p.grad.tolist() for p in held.parameters()]))
    return out


@pytest.mark.parametrize("schedule", ("Interleaved1F1B", "ZBVZeroBubble"))
def test_leaving_out_the_old_log_probs_changes_nothing_with_one_update(schedule):
    rows = rows_of(4).select(slice(0, 4))
    for scored, left_out in run_ranks(2, with_and_without_old_logprobs, "qwen2-tied", rows, schedule):
        assert scored == left_out
        assert any(torch.tensor(g).abs().max() > 1e-3 for g in scored[1])


# ------------------------------------------------------------------------------------------------ constraints
def test_stages_stand_in_turn_or_in_a_V():
    assert rank_of_stages("LoopedBFS", 4, 2) == [0, 1, 2, 3, 0, 1, 2, 3]
    assert rank_of_stages("DualPipeV", 4, 2) == [0, 1, 2, 3, 3, 2, 1, 0]
    assert rank_of_stages("1F1B", 3, 1) == [0, 1, 2]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("ranks", (1, 2, 3, 4, 8))
def test_the_number_of_microbatches_that_is_asked_for_is_accepted(schedule, ranks):
    """torch itself is asked, through ``order``: it refuses in the schedule's constructor."""
    least, multiple = microbatches_needed(schedule, ranks)
    per_rank = stages_per_rank(schedule)
    for wanted in (1, least, least + 1, 3 * ranks + 1, 5 * ranks):
        count = max(least, math.ceil(wanted / multiple) * multiple)
        work = order(schedule, ranks, per_rank, count)
        for kind in ("forward", "backward"):
            done = sorted((s, m) for rank in work for k, s, m in rank if k == kind or (kind, k) == ("backward", "backward_input"))
            assert done == list(itertools.product(range(ranks * per_rank), range(count)))
        split = [sorted((s, m) for rank in work for k, s, m in rank if k == f"backward_{w}") for w in ("input", "weight")]
        assert split[0] == split[1]
        where = rank_of_stages(schedule, ranks, per_rank)
        assert all(where[s] == r for r, rank in enumerate(work) for _, s, _ in rank)


def test_fewer_microbatches_than_asked_for_would_be_refused_by_torch():
    for schedule, ranks, count in (("DualPipeV", 2, 3), ("Interleaved1F1B", 2, 5), ("InterleavedZeroBubble", 4, 9)):
        with pytest.raises(ValueError):
            order(schedule, ranks, 2, count)
    with pytest.raises(ValueError):
        from types import SimpleNamespace

        make_schedule("1F1B", [SimpleNamespace(num_stages=4, is_first=True, is_last=False, group_size=4, group_rank=0)], 3)


@pytest.mark.parametrize("wrong, sentence", [
    (dict(schedule="1F1B", stages_per_rank=2), "--schedule 1F1B takes 1 stage on a rank, not 2"),
    (dict(schedule="ZBVZeroBubble", stages_per_rank=3), "--schedule ZBVZeroBubble takes 2 stages on a rank, not 3"),
    (dict(schedule="DualPipeV", stages_per_rank=1), "--schedule DualPipeV takes 2 stages on a rank, not 1"),
    (dict(schedule="Interleaved1F1B", sampler="pipeline"), "--sampler pipeline"),
    (dict(schedule="Interleaved1F1B", split="2,2"), "--split 2,2 names 2 stages but"),
    (dict(schedule="1F1B", stages_per_rank=-1), "--stages_per_rank is -1"),
    (dict(schedule="Chimera"), "--schedule Chimera is unknown"),
])
def test_what_a_schedule_cannot_do_is_refused_at_start_in_one_sentence(wrong, sentence):
    with pytest.raises(SettingsError, match=sentence) as refused:
        check_settings(Settings(**wrong), 2)
    assert "\n" not in str(refused.value)


def test_the_same_settings_are_taken_where_they_fit():
    check_settings(Settings(schedule="Interleaved1F1B", split="2,1,1,1"), 2)
    check_settings(Settings(schedule="LoopedBFS", stages_per_rank=3), 2)
    check_settings(Settings(schedule="ZBVZeroBubble", stages_per_rank=2), 2)


# ------------------------------------------------------------------------------------------------ bubbles
@pytest.mark.parametrize("ranks, microbatches", [(2, 2), (2, 9), (3, 7), (4, 16), (8, 64)])
def test_played_through_1F1B_and_GPipe_have_the_bubble_of_the_formula(ranks, microbatches):
    formula = (ranks - 1) / (microbatches + ranks - 1)
    for schedule in ("1F1B", "GPipe"):
        assert bubble(simulate(schedule, ranks, 1, microbatches)) == pytest.approx(formula)
        assert theoretical_bubble(ranks, microbatches, schedule) == pytest.approx(formula)


@pytest.mark.parametrize("ranks, microbatches", [(2, 8), (4, 16), (8, 32)])
def test_more_stages_on_a_rank_divide_the_bubble(ranks, microbatches):
    """Interleaving: (ranks - 1) / (v M + ranks - 1), 2104.04473 section 2.2; its zero-bubble form has idle only where
    forward and backward of inputs are waited for: (ranks - 1) / (3 v M + ranks - 1), 2401.10241."""
    for v in (1, 2, 3):
        for schedule in ("Interleaved1F1B", "LoopedBFS"):
            formula = (ranks - 1) / (v * microbatches + ranks - 1)
            assert theoretical_bubble(ranks, microbatches, schedule, v) == pytest.approx(formula)
    formula = (ranks - 1) / (6 * microbatches + ranks - 1)
    assert theoretical_bubble(ranks, microbatches, "InterleavedZeroBubble", 2) == pytest.approx(formula)
    assert theoretical_bubble(ranks, microbatches, "ZBVZeroBubble", 2) == pytest.approx(formula)
    one = theoretical_bubble(ranks, microbatches)
    assert all(theoretical_bubble(ranks, microbatches, s, 2) < one for s in SEVERAL)
