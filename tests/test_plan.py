"""The plan's memory is what is measured, its FLOPs are those of a hand count, and it needs no weights."""

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import plain
import plan
from memory import held_bytes, peak_bytes
from parallel import sum_tied_gradient
from pipeline import Pipeline
from plan import Workload, activations_by_rank, count_chunk, describe, rank_memory, row_flops
from ranks import run_ranks, small_config
from rollout import Completion, pack
from schedules import SCHEDULES, rank_of_stages, stages_per_rank
from split import plan_stages
from stages import Stage, Stages


@functools.cache
def config_of(kind="qwen2", tied=True, vocabulary=512, layers=8):
    return small_config(
        kind, tied=tied, layers=layers, vocabulary=vocabulary, hidden_size=64, intermediate_size=160, max_position_embeddings=512
    )


def full_rows(count, length=256):
    """Rows of completions behind prompts of one token: nearly every place counts in the loss."""
    g = torch.Generator().manual_seed(0)
    completions = []
    for q in range(count):
        ids = torch.randint(3, 500, (length - 1,), generator=g).tolist()
        c = Completion(q, 0, [5], ids, [-5.0] * len(ids), finished=True)
        c.advantage, c.weight = (-1.0) ** q, 1 / (count * len(ids))
        completions.append(c)
    return pack(completions, length)


def measured(mesh, config, settings, rows):
    """Bytes of weights, gradients, optimizer state, and the most that a later step takes beside them."""
    schedule, per_rank, checkpointing, dtype, compute = settings
    where = rank_of_stages(schedule, mesh.stages, per_rank)
    specs = plan_stages(config, len(where))
    torch.manual_seed(0)
    more = dict(dtype=dtype, compute_dtype=compute, activation_checkpointing=checkpointing)
    held = Stages([Stage(config, s, **more) for s, r in zip(specs, where) if r == mesh.stage])
    with torch.no_grad():
        for p in held.parameters():
            p.normal_(0, 0.05)
    pipeline, optimizer = Pipeline(held, mesh, schedule=schedule), plain.adamw(held.parameters())
    pipeline.train_step(rows, plain.loss_of_columns)
    sum_tied_gradient(held, mesh)
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    state = [v for s in optimizer.state.values() for k, v in s.items() if k != "step"]
    parameters = list(held.parameters())
    sizes = [held_bytes(x) for x in (parameters, [p.grad for p in parameters], state)]
    return sizes, peak_bytes(lambda: pipeline.train_step(rows, plain.loss_of_columns))


F32, BF16 = torch.float32, torch.bfloat16
CASES = {
    "1F1B": (2, "qwen2", True, ("1F1B", 1, False, F32, F32), 6),
    "1F1B-checkpointed": (2, "qwen3", False, ("1F1B", 1, True, F32, F32), 6),
    "1F1B-bf16-compute": (2, "llama", True, ("1F1B", 1, False, F32, BF16), 4),
    "bf16": (1, "qwen2", True, ("1F1B", 1, False, BF16, BF16), 4),
    "GPipe": (2, "qwen2", False, ("GPipe", 1, False, F32, F32), 6),
    "Interleaved1F1B": (2, "qwen2", True, ("Interleaved1F1B", 2, False, F32, F32), 6),
    "ZBVZeroBubble": (2, "qwen2", True, ("ZBVZeroBubble", 2, False, F32, F32), 6),
}


@pytest.mark.parametrize("case", CASES)
def test_predicted_peak_is_within_15_percent_of_the_measured_one(case):
    ranks, kind, tied, settings, microbatches = CASES[case]
    schedule, per_rank, checkpointing, dtype, compute = settings
    config, rows = config_of(kind, tied), full_rows(microbatches)
    work = Workload(
        ranks=ranks, schedule=schedule, per_rank=per_rank, microbatches=microbatches, row_length=256, dtype=dtype,
        compute_dtype=compute, activation_checkpointing=checkpointing, sampler="pipeline",
    )
    predicted = rank_memory(config, plan_stages(config, work.count), work)
    for rank, (sizes, activations) in zip(predicted, run_ranks(ranks, measured, config, settings, rows)):
        assert [rank.weights, rank.gradients, rank.optimizer] == sizes
        assert activations > 0.5 * sum(sizes)  # else the test would be of the weights alone
        assert rank.train_peak == pytest.approx(sum(sizes) + activations, rel=0.15)


def test_stages_of_many_layers_are_told_from_one_and_two():
    config, work = config_of(layers=6), Workload(row_length=128)
    for count, index in ((1, 0), (2, 0), (2, 1), (3, 1)):
        spec = plan_stages(config, count)[index]
        assert spec.end_layer - spec.first_layer > 1
        small = plan.stage_memory(config, [spec], work)[0]
        whole = count_chunk(config, spec, work)
        assert small.kept == whole.kept
        assert small.forward == pytest.approx(whole.forward, rel=0.02)
        assert small.backward == pytest.approx(whole.backward, rel=0.02)


@pytest.mark.parametrize("schedule, ranks, alive", [
    ("1F1B", 4, [4, 3, 2, 1]), ("GPipe", 4, [16, 16, 16, 16]), ("LoopedBFS", 2, [32, 32]),
])
def test_microbatches_alive_at_once(schedule, ranks, alive):
    per_rank = stages_per_rank(schedule)
    work = Workload(ranks=ranks, schedule=schedule, per_rank=per_rank, microbatches=16)
    chunk = plan.ChunkMemory(kept=1000, forward=1000, backward=1000)
    assert activations_by_rank([chunk] * work.count, work) == [1000 * n for n in alive]


def test_no_schedule_ends_with_activations_left():
    for schedule in SCHEDULES:
        work = Workload(ranks=2, schedule=schedule, per_rank=stages_per_rank(schedule), microbatches=8)
        chunk = plan.ChunkMemory(kept=1000, forward=1000, backward=1000)
        most = activations_by_rank([chunk] * work.count, work)
        assert all(1000 <= m <= 1000 * 8 * work.per_rank for m in most)


def test_checkpointed_layers_keep_their_input_alone():
    config, spec = config_of(), plan_stages(config_of(), 3)[1]
    work = Workload(row_length=128, activation_checkpointing=True)
    layers, one = spec.end_layer - spec.first_layer, 128 * 64 * 4
    kept = count_chunk(config, spec, work).kept
    # each layer's input, what goes out, and what all layers share: mask, rotary angles
    shared = 128 * 128 * 4 + 4 * 128 * 8 * 4
    assert (layers + 1) * one <= kept <= (layers + 1) * one + 1.5 * shared
    assert count_chunk(config, spec, Workload(row_length=128)).kept > 5 * kept


def test_flops_of_a_row_by_hand():
    """Hidden 64, 4 heads of 16 and 2 of them for keys and values, intermediate 160: q, k, v, o and the three of the MLP;
    two products over 128 x 128 pairs; the head; all of it three times, since backward costs two forwards."""
    config = config_of(layers=3, tied=False)
    layer = 64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 160
    small = 64 + 2 * 32 + 2 * 64  # biases and norms, counted among the layer's parameters
    by_hand = 3 * 2 * 128 * (3 * (layer + small + 2 * 128 * 64) + 512 * 64)
    assert row_flops(config, plan_stages(config, 1)[0], 128) == pytest.approx(by_hand, rel=1e-12)
    parts = [row_flops(config, s, 128) for s in plan_stages(config, 3)]
    assert sum(parts) == pytest.approx(by_hand, rel=1e-12)


def test_the_command_needs_a_configuration_alone_and_says_whether_it_fits(tmp_path):
    config_of().save_pretrained(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["config.json"]
    root = Path(__file__).resolve().parent.parent
    command = [sys.executable, "stages.py", "--plan", "--model", str(tmp_path), "--stages", "4", "--microbatches", "16"]
    done = subprocess.run([*command, "--gpu_memory", "24"], cwd=root, capture_output=True, text=True, env=dict(os.environ))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines[1:5]] == ["0", "1", "2", "3"]
    assert "1F1B 15.8%" in done.stdout and "DualPipeV 3.0%" in done.stdout
    assert lines[-1].startswith("fits: rank 0 needs")
    wrong = subprocess.run([*command[:-4], "--stages", "9"], cwd=root, capture_output=True, text=True, env=dict(os.environ))
    assert wrong.returncode == 1 and wrong.stderr.strip() == (
        "error: 8 layers cannot fill 9 stages: start at most 8 processes for this model"
    )


def test_what_does_not_fit_is_said():
    config, specs = config_of(), plan_stages(config_of(), 2)
    work = Workload(ranks=2, row_length=256)
    need = max(m.peak for m in rank_memory(config, specs, work)) / 2**30
    assert "does not fit: rank 0" in describe(config, specs, work, need / 0.95)
    assert "\nfits: rank 0" in describe(config, specs, work, need / 0.9)


def test_copies_and_caches_stand_where_the_settings_put_them():
    config, specs = config_of(), plan_stages(config_of(), 2)
    whole = plan_stages(config, 1)[0].parameters

    def memory(**more):
        return rank_memory(config, specs, Workload(ranks=2, row_length=64, sequences=4, sequence_length=32, **more))

    cache = 2 * 2 * 16 * 4 * 32 * 4  # keys and values of a layer: 2 heads of 16, 4 sequences of 32, float32
    first, last = memory()
    assert (first.copies, last.copies, first.caches, last.caches) == (whole * 4, 0, 8 * cache, 0)
    first, last = memory(sampler="replicas")
    assert (first.copies, last.copies, first.caches, last.caches) == (whole * 4, whole * 4, 8 * cache, 8 * cache)
    first, last = memory(sampler="pipeline", reference="pipeline")
    assert (first.copies, last.copies) == (first.weights, last.weights)
    assert (first.caches, last.caches) == tuple((s.end_layer - s.first_layer) * cache for s in specs)
    first, last = memory(sampler="pipeline", reference="rank0")
    assert (first.copies, last.copies) == (whole * 4, 0)
    first, last = memory(sampler="pipeline", reference="pipeline", offload_reference=True, offload_optimizer=True)
    assert (first.copies, last.copies, first.optimizer, last.optimizer) == (0, 0, 0, 0)
