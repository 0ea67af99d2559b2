"""Memory stays bounded: by the head's chunks, by the stages and not the microbatches, by one layer when recomputed."""

import copy

import pytest
import torch

import plain
from memory import peak_bytes
from parallel import sum_tied_gradient
from pipeline import Pipeline
from policy import OffloadedAdamW
from ranks import random_rollout, run_ranks, small_config, stage_of, whole_model
from reference import Reference
from rollout import Rows, pack
from split import plan_stages
from stages import Stage
from test_plan import full_rows


def random_stage(config, spec, **more):
    torch.manual_seed(spec.index)
    stage = Stage(config, spec, **more)
    with torch.no_grad():
        for p in stage.parameters():
            p.normal_(0, 0.05)
    return stage


# ------------------------------------------------------------------------------------------------ the head
LARGE = 152_064  # Qwen2.5-7B's


def step_with_a_large_vocabulary(mesh, length):
    config = small_config(vocabulary=LARGE, layers=1, tied=False, max_position_embeddings=4096)
    stage = random_stage(config, plan_stages(config, 1)[0])
    rows = full_rows(1, length)
    pipeline = Pipeline(stage, mesh)
    peak = peak_bytes(lambda: pipeline.train_step(rows, plain.loss_of_columns))
    scored = peak_bytes(lambda: pipeline.score(rows))
    return peak, scored, sum(p.numel() for p in stage.parameters()) * 4


def test_full_logits_never_exist():
    """152k entries and rows of 2048: the logits alone would be 1.25 GB, and as much again for their gradient."""
    (short,), (long,) = (run_ranks(1, step_with_a_large_vocabulary, length) for length in (1024, 2048))
    assert 4 * LARGE * 2048 > 1.2e9
    for peak, scored, weights in (short, long):
        assert peak < 0.3e9  # gradients of the weights, 39 MB, included
        assert scored < 0.3e9
    # the mask and the attention of one layer over T x T pairs, nothing of T x V
    assert long[0] - short[0] < 0.02 * 4 * LARGE * 1024 + 4 * 8 * 2048 * 2048


# ------------------------------------------------------------------------------------------------ microbatches
def peaks_by_microbatches(mesh, schedule, counts):
    config = small_config(layers=4, hidden_size=64, intermediate_size=160, vocabulary=512)
    stage = random_stage(config, plan_stages(config, mesh.stages)[mesh.stage])
    out = []
    for count in counts:
        rows, pipeline = full_rows(count, 128), Pipeline(stage, mesh, schedule=schedule)
        pipeline.train_step(rows, plain.loss_of_columns)
        of_rows = sum(t.numel() * t.element_size() for t in vars(rows).values() if isinstance(t, torch.Tensor))
        peak = peak_bytes(lambda: pipeline.train_step(rows, plain.loss_of_columns))
        scored = peak_bytes(lambda: pipeline.score(rows))
        out.append((peak, scored, of_rows))
    return out


@pytest.mark.parametrize("ranks", (2, 3))
def test_peak_does_not_grow_with_the_microbatches_under_1F1B(ranks):
    for few, many in run_ranks(ranks, peaks_by_microbatches, "1F1B", (6, 24)):
        # what is left: the integers and log-probs of the rows, of which a step makes its own pieces
        assert many[0] - few[0] < 2 * (many[2] - few[2])
        assert many[0] < 1.15 * few[0]
        assert many[1] - few[1] < 2 * (many[2] - few[2])


def test_peak_grows_with_the_microbatches_under_GPipe():
    for few, many in run_ranks(2, peaks_by_microbatches, "GPipe", (6, 24)):
        assert many[0] > 3 * few[0]


# ------------------------------------------------------------------------------------------------ layers
def peaks_by_layers(mesh, checkpointing):
    out = []
    for layers in (2, 6):
        config = small_config(layers=layers, hidden_size=64, intermediate_size=160, vocabulary=512)
        stage = random_stage(config, plan_stages(config, 1)[0], activation_checkpointing=checkpointing)
        rows, pipeline = full_rows(1, 256), Pipeline(stage, mesh)
        pipeline.train_step(rows, plain.loss_of_columns)
        out.append(peak_bytes(lambda: pipeline.train_step(rows, plain.loss_of_columns)))
    return out


def test_recomputed_layers_cost_one_hidden_state_each():
    hidden = 256 * 64 * 4
    (with_two, with_six), = run_ranks(1, peaks_by_layers, True)
    assert with_six - with_two < 4 * 1.1 * hidden
    assert with_six < 1.3 * with_two
    (with_two, with_six), = run_ranks(1, peaks_by_layers, False)
    assert with_six - with_two > 4 * 10 * hidden


def gradients_with_checkpointing(mesh, model, rows, schedule):
    out = []
    for checkpointing in (False, True):
        stage = stage_of(model, mesh.stages, mesh.stage, activation_checkpointing=checkpointing)
        result = Pipeline(stage, mesh, schedule=schedule).train_step(rows, plain.loss_of_columns)
        sum_tied_gradient(stage, mesh)
        out.append((result and result[0], [p.grad.tolist() for p in stage.parameters()]))
    return out


@pytest.mark.parametrize("schedule", ("1F1B", "GPipe"))
def test_recomputed_layers_give_the_same_bits(schedule):
    rows = plain.fill_columns(pack(random_rollout(6, 4, seed=2), 40, dtype=torch.float64, rows_at_least=4))
    for plainly, recomputed in run_ranks(2, gradients_with_checkpointing, whole_model(small_config()), rows, schedule):
        assert plainly == recomputed
        assert any(any(map(bool, torch.tensor(g).flatten().tolist())) for g in plainly[1])


# ------------------------------------------------------------------------------------------------ precision
def small_updates(mesh, model, rows, dtype):
    stage = stage_of(model, mesh.stages, mesh.stage, compute_dtype=torch.bfloat16).to(dtype)
    stage.dtype = dtype
    pipeline = Pipeline(stage, mesh)
    optimizer = torch.optim.AdamW(stage.parameters(), lr=1e-6, weight_decay=0.0)
    before = [p.detach().clone() for p in stage.parameters()]
    for _ in range(3):
        optimizer.zero_grad()
        pipeline.train_step(rows, plain.loss_of_columns)
        optimizer.step()
    gradients = {p.grad.dtype for p in stage.parameters()}
    state = {v.dtype for s in optimizer.state.values() for k, v in s.items() if k != "step"}
    moved = [(p.detach() != b).double().mean().item() for p, b in zip(stage.parameters(), before) if p.ndim > 1]
    return gradients, state, sum(moved) / len(moved)


def test_float32_masters_under_bfloat16_compute_keep_updates_that_bfloat16_weights_lose():
    rows = plain.fill_columns(pack(random_rollout(6, 4, seed=2), 40, rows_at_least=2))
    model = whole_model(small_config(tied=False), torch.float32)
    for gradients, state, moved in run_ranks(2, small_updates, model, rows, torch.float32):
        assert gradients == state == {torch.float32}
        assert moved > 0.7
    for gradients, state, moved in run_ranks(2, small_updates, model, rows, torch.bfloat16):
        assert gradients == state == {torch.bfloat16}
        assert moved < 0.1


# ------------------------------------------------------------------------------------------------ in CPU memory
def trained_with(mesh, model, rows, offloaded):
    stage = stage_of(model, mesh.stages, mesh.stage)
    pipeline = Pipeline(stage, mesh)
    kind = OffloadedAdamW if offloaded else torch.optim.AdamW
    optimizer = kind(stage.parameters(), lr=1e-2, weight_decay=0.1)
    for step in range(4):
        if step == 2:  # a saved state goes on, in either kind
            state = copy.deepcopy(optimizer.state_dict())
            optimizer = (torch.optim.AdamW if offloaded else OffloadedAdamW)(stage.parameters())
            optimizer.load_state_dict(state)
        optimizer.zero_grad()
        pipeline.train_step(rows, plain.loss_of_columns)
        sum_tied_gradient(stage, mesh)
        optimizer.step()
    assert [len(g["params"]) for g in optimizer.param_groups] == [len(list(stage.parameters()))]
    return [p.tolist() for p in stage.parameters()]


def test_an_offloaded_optimizer_gives_the_same_bits_and_takes_over_a_saved_state():
    rows = plain.fill_columns(pack(random_rollout(6, 4, seed=2), 40, dtype=torch.float64, rows_at_least=2))
    model = whole_model(small_config())
    assert run_ranks(2, trained_with, model, rows, True) == run_ranks(2, trained_with, model, rows, False)


def test_an_offloaded_optimizer_steps_each_parameter_once_with_its_groups_settings():
    def train(kind):
        g = torch.Generator().manual_seed(0)
        parameters = [torch.nn.Parameter(torch.randn(4, 3, generator=g)) for _ in range(4)]
        optimizer = kind([dict(params=parameters[:2]), dict(params=parameters[2:], lr=0.1, weight_decay=0.5)], lr=1e-2)
        for _ in range(3):
            for p in parameters[:3]:  # the last never has a gradient
                p.grad = torch.randn(4, 3, generator=g)
            optimizer.step()
        steps = [optimizer.state[p]["step"].item() for p in parameters if p in optimizer.state and optimizer.state[p]]
        return [p.tolist() for p in parameters], steps

    assert train(OffloadedAdamW) == train(torch.optim.AdamW)
    assert train(OffloadedAdamW)[1] == [3, 3, 3]


def scores_of_references(mesh, frozen, policy, rows):
    stage = stage_of(policy, mesh.stages, mesh.stage)
    out = []
    for offload in (False, True):
        got = []
        for whole in (True, False):
            own = stage_of(frozen) if whole else stage_of(frozen, mesh.stages, mesh.stage)
            held = own if mesh.is_first or not whole else None
            reference = Reference(held, mesh, None if whole else Pipeline(own, mesh), offload=offload)
            for _ in range(2):
                scored = reference.score(rows)
                got.append(None if scored is None else scored.tolist())
                reference.update(stage, 0.5)
        out.append(got)
    return out


def test_an_offloaded_reference_scores_and_moves_alike():
    rows: Rows = pack(random_rollout(6, 4, seed=2), 40, dtype=torch.float64, rows_at_least=2)
    frozen, policy = whole_model(small_config(), seed=0), whole_model(small_config(), seed=7)
    ranks = run_ranks(2, scores_of_references, frozen, policy, rows)
    for plainly, offloaded in ranks:
        assert plainly == offloaded
    before, after = ranks[-1][0][:2]
    assert before != after
