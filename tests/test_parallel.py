"""What crosses processes beside the schedule: norms, tied gradients, weights on their way, and how a failure ends."""

import math
import multiprocessing
import os

import pytest
import torch

import parallel
from parallel import (
    Mesh, checksum, choose_device, clip_gradients, fail_together, gradient_norms, open_mesh, send_weights,
    sum_tied_gradient,
)
from ranks import run_ranks, small_config, stage_of, whole_model


def fill_gradients(stage, norms):
    """Gradients of the given norm over the whole stage, spread over all its tensors."""
    g = torch.Generator().manual_seed(stage.spec.index)
    for p in stage.parameters():
        p.grad = torch.randn(p.shape, generator=g, dtype=p.dtype)
    total = math.sqrt(sum(p.grad.pow(2).sum().item() for p in stage.parameters()))
    for p in stage.parameters():
        p.grad *= norms[stage.spec.index] / total


def norm_of(stage):
    return math.sqrt(sum(p.grad.pow(2).sum().item() for p in stage.parameters()))


# ------------------------------------------------------------------------------------------------ norm and clip
def clipped(mesh, model, norms, max_norms):
    """By max_norm: the norm, its parts, this stage's norm after, smallest and largest factor on a gradient."""
    stage, out = stage_of(model, mesh.stages, mesh.stage), {}
    for max_norm in max_norms:
        fill_gradients(stage, norms)
        before = [p.grad.clone() for p in stage.parameters()]
        total, parts = clip_gradients(stage, mesh, max_norm)
        factors = torch.cat([(p.grad / b).flatten() for p, b in zip(stage.parameters(), before)])
        out[max_norm] = total, parts, norm_of(stage), factors.min().item(), factors.max().item()
    return out


def test_E05_stage_norms_3_and_4_are_a_norm_of_5_on_all_stages_and_every_gradient_is_scaled_alike():
    model = whole_model(small_config(tied=False))
    ranks = run_ranks(2, clipped, model, (3.0, 4.0), (1.0,))
    for rank, want in zip(ranks, (0.6, 0.8)):
        total, parts, after, smallest, largest = rank[1.0]
        assert total == pytest.approx(5.0, rel=1e-12) and parts == pytest.approx([3.0, 4.0], rel=1e-12)
        assert after == pytest.approx(want, rel=1e-6)
        assert smallest == pytest.approx(0.2, rel=1e-6) and largest == pytest.approx(0.2, rel=1e-6)


@pytest.mark.parametrize("stages, norms", [(1, (2.0,)), (3, (1.0, 2.0, 2.0)), (4, (1.0, 1.0, 1.0, 1.0))])
def test_E05_any_number_of_stages(stages, norms):
    ranks = run_ranks(stages, clipped, whole_model(small_config(tied=False)), norms, (0, 0.5, 100.0))
    want = math.hypot(*norms)
    for rank, norm in zip(ranks, norms):
        for max_norm, (total, parts, after, smallest, largest) in rank.items():
            assert total == pytest.approx(want, rel=1e-12) and parts == pytest.approx(list(norms), rel=1e-12)
            if max_norm == 0.5:
                assert after == pytest.approx(norm * 0.5 / want, rel=1e-5)
                assert [smallest, largest] == pytest.approx([0.5 / want] * 2, rel=1e-5)
            else:
                assert smallest == largest == 1.0  # untouched, to the bit


def bad_gradients(mesh, model):
    stage, out = stage_of(model, mesh.stages, mesh.stage), []
    for value in (math.nan, math.inf, -math.inf):
        for where in range(mesh.stages):
            fill_gradients(stage, (1.0,) * mesh.stages)
            if mesh.stage == where:
                list(stage.parameters())[3].grad.view(-1)[0] = value
            before = [p.grad.clone() for p in stage.parameters()]
            total, _ = clip_gradients(stage, mesh, 0.1)
            same = [torch.equal(p.grad.nan_to_num(7), b.nan_to_num(7)) for p, b in zip(stage.parameters(), before)]
            out.append((total, all(same)))
    return out


def test_D15_a_bad_gradient_on_one_stage_is_seen_by_all_and_nothing_is_scaled():
    for rank in run_ranks(3, bad_gradients, whole_model(small_config(tied=False))):
        assert len(rank) == 9 and all(not math.isfinite(total) and untouched for total, untouched in rank)


# ------------------------------------------------------------------------------------------------ tied embeddings
def tied_sum(mesh, model):
    stage = stage_of(model, mesh.stages, mesh.stage)
    ends = [p for n, p in stage.named_parameters() if n in ("embed_tokens.weight", "lm_head.weight")]
    for p in stage.parameters():
        p.grad = torch.zeros_like(p)
    for p in ends:
        p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(mesh.stage), dtype=p.dtype)
    own = [p.grad.tolist() for p in ends]
    sum_tied_gradient(stage, mesh)
    total = [p.grad.tolist() for p in ends]
    norms, norm = gradient_norms(stage, mesh), clip_gradients(stage, mesh, 1.0)[0]
    return own + total, norms, norm, [p.grad.tolist() for p in ends]


@pytest.mark.parametrize("stages", (2, 3, 4))
def test_tied_gradients_are_summed_on_both_ends_and_counted_once(stages):
    ranks = run_ranks(stages, tied_sum, whole_model(small_config(tied=True)))
    (own_first, first), (own_last, last) = ranks[0][0], ranks[-1][0]
    total = torch.tensor(own_first, dtype=torch.float64) + torch.tensor(own_last, dtype=torch.float64)
    assert first == last == total.tolist()
    assert all(rank[0] == [] for rank in ranks[1:-1])
    assert ranks[0][3] == ranks[-1][3] != [first]  # clipped, and still equal to the last bit
    for _, norms, norm, _ in ranks:
        assert norms == pytest.approx([total.norm().item()] + [0.0] * (stages - 1))
        assert norm == pytest.approx(total.norm().item())


def untied_and_missing(mesh, untied, tied):
    separate = stage_of(untied, mesh.stages, mesh.stage)
    for p in separate.parameters():
        p.grad = torch.full_like(p, 1.0 + mesh.stage)
    sum_tied_gradient(separate, mesh)
    same = all((p.grad == 1.0 + mesh.stage).all() for p in separate.parameters())
    stage = stage_of(tied, mesh.stages, mesh.stage)  # no backward has run on the first stage
    if mesh.is_last:
        stage.lm_head.weight.grad = torch.ones_like(stage.lm_head.weight)
    sum_tied_gradient(stage, mesh)
    tied_weight = stage.embed_tokens.weight if mesh.is_first else stage.lm_head.weight
    return bool(same), bool((tied_weight.grad == 1).all())


def test_untied_gradients_stay_apart_and_a_missing_one_counts_as_zero():
    models = whole_model(small_config(tied=False)), whole_model(small_config(tied=True))
    assert run_ranks(2, untied_and_missing, *models) == [(True, True)] * 2


# ------------------------------------------------------------------------------------------------ weights on their way
def sent(mesh, cases, to_all):
    out = []
    for policy, old, mixup, dtype in cases:
        stage = stage_of(policy, mesh.stages, mesh.stage)
        target = stage_of(old).to(dtype) if mesh.is_first or to_all else None
        if target is not None:
            target.dtype = dtype
        before = [p.clone() for p in stage.parameters()]
        send_weights(stage, target, mesh, mixup, to_all=to_all)
        assert all(torch.equal(p, b) for p, b in zip(stage.parameters(), before))  # the policy itself is not touched
        sums = mesh.gather(checksum(stage))
        got = None
        if target is not None:
            want = dict(policy.named_parameters())
            start = dict(old.named_parameters())
            arrived = target.export_tensors()
            assert set(arrived) == set(want)
            worst = 0.0
            for name, tensor in arrived.items():
                if mixup == 1:
                    assert torch.equal(tensor, want[name].detach().to(dtype)), name
                mixed = (1 - mixup) * start[name].detach().to(dtype) + mixup * want[name].detach().to(dtype)
                worst = max(worst, (tensor - mixed).abs().max().item())
            if old.config.tie_word_embeddings:
                assert target.lm_head.weight is target.embed_tokens.weight
            got = (worst, checksum(target))
        out.append((got, sum(sums) % 2**63))
    return out


@pytest.mark.parametrize("to_all", (False, True))
@pytest.mark.parametrize("stages", (1, 2, 3, 4))
def test_weights_arrive_bit_equal_or_mixed_from_any_number_of_stages(stages, to_all):
    models = {
        (kind, tied, seed, dtype): whole_model(small_config(kind, tied=tied), dtype, seed=seed)
        for kind, tied in (("qwen2", True), ("qwen3", False))
        for seed in (0, 5) for dtype in (torch.float64, torch.float32)
    }
    cases = []
    for kind, tied in (("qwen2", True), ("qwen3", False)):
        for mixup, dtype in ((1.0, torch.float64), (0.25, torch.float64), (0.0, torch.float64), (0.6, torch.float64)):
            cases.append((models[kind, tied, 0, dtype], models[kind, tied, 5, dtype], mixup, dtype))
        for dtype in (torch.float32, torch.bfloat16):
            cases.append((models[kind, tied, 0, torch.float32], models[kind, tied, 5, torch.float32], 1.0, dtype))
    ranks = run_ranks(stages, sent, cases, to_all)
    for place, rank in enumerate(ranks):
        assert all((got is not None) == (to_all or place == 0) for got, _ in rank)
        for (got, _), (_, _, mixup, dtype) in zip(rank, cases):
            if got is not None:
                assert got[0] < 1e-14 if dtype == torch.float64 else got[0] == 0
    arrived = [(pair, case) for rank in (ranks if to_all else ranks[:1]) for pair, case in zip(rank, cases)]
    for (got, total), (policy, old, mixup, dtype) in arrived:
        if mixup == 1 and dtype == policy.dtype:  # the same bits: the sum over the stages is that of the whole
            assert got[1] == total == checksum(stage_of(policy))
        elif mixup == 0:
            assert got[1] == checksum(stage_of(old)) != total
        else:
            assert got[1] != total


def into_nan(mesh, model):
    stage = stage_of(model, mesh.stages, mesh.stage)
    target = stage_of(model) if mesh.is_first else None
    if target is not None:
        with torch.no_grad():
            for p in target.parameters():
                p.fill_(float("nan"))  # as allocated memory may be
    send_weights(stage, target, mesh)
    return target is None or checksum(target) == checksum(stage_of(model))


def test_a_copy_overwrites_whatever_the_target_held():
    assert run_ranks(2, into_nan, whole_model(small_config())) == [True, True]


@pytest.mark.parametrize("dtype", (torch.float64, torch.float32, torch.bfloat16))
@pytest.mark.parametrize("tied", (True, False))
def test_checksum(dtype, tied):
    model = whole_model(small_config(tied=tied), dtype)
    whole = checksum(stage_of(model))
    assert 0 <= whole < 2**63
    for stages in (2, 3, 4):
        assert sum(checksum(stage_of(model, stages, i)) for i in range(stages)) % 2**63 == whole
    stage = stage_of(model)
    for p in stage.parameters():
        with torch.no_grad():  # the last bit of one weight
            flat, before = p.view(-1), p.view(-1)[-1].clone()
            flat[-1] = torch.nextafter(before, torch.tensor(9.0, dtype=dtype))
            assert checksum(stage) != whole
            flat[-1] = before
    assert checksum(stage) == whole
    with torch.no_grad():  # tensors of one shape that have changed places
        a, b = (stage.layers[i].mlp.up_proj.weight for i in (0, 3))
        a[:], b[:] = b.clone(), a.clone()
    assert checksum(stage) != whole


# ------------------------------------------------------------------------------------------------ devices and processes
def with_gpus(monkeypatch, count):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


@pytest.mark.parametrize("wanted, gpus, local_rank, local_ranks, want", [
    ("auto", 0, 0, 1, "cpu"), ("auto", 1, 0, 1, "cuda:0"), ("auto", 1, 1, 2, "cpu"), ("auto", 4, 3, 4, "cuda:3"),
    ("auto", 8, 1, 2, "cuda:1"), ("cpu", 4, 0, 1, "cpu"), ("cuda", 2, 1, 2, "cuda:1"),
])
def test_choose_device(monkeypatch, wanted, gpus, local_rank, local_ranks, want):
    with_gpus(monkeypatch, gpus)
    assert choose_device(wanted, local_rank, local_ranks) == torch.device(want)


@pytest.mark.parametrize("gpus, ranks", [(0, 1), (1, 2), (3, 4)])
def test_choose_device_refuses_cuda_with_too_few_gpus(monkeypatch, gpus, ranks):
    with_gpus(monkeypatch, gpus)
    with pytest.raises(ValueError, match=f"{ranks} processes.*found {gpus}"):
        choose_device("cuda", 0, ranks)


def place_and_talk(mesh):
    everyone = mesh.gather({"stage": mesh.stage})
    from_last = mesh.broadcast(f"stage {mesh.stage}", source=mesh.stages - 1)
    tensor = torch.arange(6.0).view(2, 3) + mesh.stage if mesh.stage == 1 else None
    moved = mesh.broadcast_tensor(tensor, (2, 3), torch.float32, source=1)
    refused = None
    if mesh.is_first:
        try:
            mesh.broadcast_tensor(torch.zeros(2, 3), (3, 2), torch.float32, source=0)
        except ValueError as error:
            refused = str(error)
    mesh.barrier()
    place = (mesh.stage, mesh.stages, str(mesh.device), mesh.is_first, mesh.is_last)
    return place, everyone, from_last, moved.tolist(), refused


def test_mesh_places_and_messages():
    for stage, (place, everyone, from_last, moved, refused) in enumerate(run_ranks(3, place_and_talk)):
        assert place == (stage, 3, "cpu", stage == 0, stage == 2)
        assert everyone == [{"stage": s} for s in range(3)] and from_last == "stage 2"
        assert moved == [[1, 2, 3], [4, 5, 6]]
        assert (refused is None) == (stage != 0)
        if refused:
            assert "[2, 3]" in refused and "[3, 2]" in refused


def child(function, *arguments):
    """``function`` in a process of its own: its exit code."""
    process = multiprocessing.get_context("fork").Process(target=function, args=arguments)
    process.start()
    process.join(30)
    assert process.exitcode is not None, "still running after 30 s"
    return process.exitcode


def alone():
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    mesh = open_mesh("cpu")
    assert (mesh.stage, mesh.stages, mesh.ends_group) == (0, 1, None) and mesh.is_first and mesh.is_last
    assert mesh.gather(7) == [7] and mesh.broadcast("x") == "x"
    stage = stage_of(whole_model(small_config()))
    for p in stage.parameters():
        p.grad = torch.ones_like(p)
    sum_tied_gradient(stage, mesh)
    assert all((p.grad == 1).all() for p in stage.parameters())
    with fail_together(mesh):
        pass
    assert not torch.distributed.is_initialized()


def test_without_torchrun_a_pipeline_of_one_stage():
    assert child(alone) == 0


def failing(error):
    parallel.dist.destroy_process_group = lambda: None
    with fail_together(Mesh(2, 4, torch.device("cpu"), None, None, None)):
        raise error
    os._exit(7)


@pytest.mark.parametrize("error, code, shown, hidden", [
    (RuntimeError("the reward has failed"), 1, ["stage 2 of 4 failed", "Traceback", "the reward has failed"], []),
    (KeyboardInterrupt(), 1, ["stage 2 of 4 failed", "KeyboardInterrupt"], []),
    (SystemExit(3), 1, ["stage 2 of 4 failed"], []),
    (SystemExit(0), 0, [], ["failed"]),
    (RuntimeError("Connection closed by peer [127.0.0.1]:1"), 1, ["stage 2 of 4 stops in phase start: another stage has left"], ["Traceback"]),
    (ConnectionResetError(104, "Connection reset by peer"), 1, ["stage 2 of 4 failed", "Traceback"], ["another stage"]),
], ids=("error", "interrupt", "exit 3", "exit 0", "peer gone", "server gone"))
def test_an_error_ends_the_process_at_once_and_is_shown(capfd, error, code, shown, hidden):
    assert child(failing, error) == code
    text = capfd.readouterr().err
    assert all(word in text for word in shown) and not any(word in text for word in hidden)


def test_E10_T35_a_metric_that_one_rank_lacks_neither_hangs_nor_mixes():
    def gathered(mesh):
        return mesh.gather({"loss": float(mesh.stage), **({"format": 0.5} if mesh.is_first else {})})

    for found in run_ranks(3, gathered):
        assert found == [{"loss": 0.0, "format": 0.5}, {"loss": 1.0}, {"loss": 2.0}]
