"""What a run will cost, before anything is loaded: the split, FLOPs, memory and bubbles, from the configuration alone.

    python stages.py --plan --model Qwen/Qwen2.5-1.5B --stages 4 --microbatches 16 --gpu_memory 24

Activations are counted, not estimated by formula: one microbatch runs forward and backward through the stage on tensors
that have shapes and no storage, and what would be allocated is added up. How many microbatches are alive at the same
time follows from the schedule's order.

Left out: the allocator's fragmentation, the libraries' own buffers (about 1 GiB on a GPU), W&B.
"""

from __future__ import annotations

import argparse
import dataclasses
import weakref
from dataclasses import dataclass

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from schedules import SCHEDULES, microbatches_run, order, rank_of_stages, stages_per_rank, theoretical_bubble
from split import StageSpec, describe_plan, plan_stages
from stages import Stage, load_config


@dataclass(frozen=True)
class Workload:
    """What a step consists of; the defaults are those of the command line."""

    ranks: int = 1
    schedule: str = "1F1B"
    per_rank: int = 1
    microbatches: int = 16
    microbatch_size: int = 1
    row_length: int = 2048
    dtype: torch.dtype = torch.float32
    compute_dtype: torch.dtype = torch.float32
    activation_checkpointing: bool = False
    offload_optimizer: bool = False
    sampler: str = "rank0"  # replicas or pipeline
    sequences: int = 64  # decoded at the same time
    sequence_length: int = 1024  # prompt and completion
    reference: str = ""  # rank0, pipeline, or none
    offload_reference: bool = False

    @property
    def count(self) -> int:
        return self.ranks * self.per_rank


@dataclass(frozen=True)
class RankMemory:
    """Bytes on one rank."""

    weights: int
    gradients: int
    optimizer: int
    copies: int  # of the sampler and of the reference
    activations: int  # of a train step, with messages and what is there for a moment only
    caches: int  # of sampling

    @property
    def train_peak(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.copies + self.activations

    @property
    def peak(self) -> int:
        """Sampling and training take turns."""
        return self.train_peak - self.activations + max(self.activations, self.caches)


# ------------------------------------------------------------------------------------------------ counting
class _Allocations(TorchDispatchMode):
    """Adds up the bytes of the storages that operations make, and takes them off when they are freed."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self.known: dict[int, weakref.ref] = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        torch.utils._pytree.tree_map_only(torch.Tensor, self._count, out)
        return out

    def _count(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self.known:
            return
        size = storage.nbytes()

        def freed(_, key=key, size=size):
            self.known.pop(key, None)
            self.now -= size

        self.known[key] = weakref.ref(storage, freed)
        self.now += size
        self.peak = max(self.peak, self.now)


@dataclass(frozen=True)
class ChunkMemory:
    """Bytes of one microbatch on one stage, beside weights and gradients."""

    kept: int  # from forward to backward
    forward: int  # the most during forward
    backward: int  # the most during backward, what was kept included


def count_chunk(config, spec: StageSpec, work: Workload) -> ChunkMemory:
    """Run one microbatch through a stage without storage; every token of it is a completion token."""
    rows, length = work.microbatch_size, work.row_length
    stage = Stage(
        config, spec, device="meta", dtype=work.dtype, compute_dtype=work.compute_dtype,
        activation_checkpointing=work.activation_checkpointing,
    )
    with FakeTensorMode(), _Allocations() as memory:
        for module in stage.modules():  # autocast knows CPU tensors, not meta ones
            for name, p in module.named_parameters(recurse=False):
                setattr(module, name, torch.nn.Parameter(torch.empty(p.shape, dtype=p.dtype)))
            for name, b in module.named_buffers(recurse=False):
                setattr(module, name, torch.empty(b.shape, dtype=b.dtype))
        if stage.lm_head is not None and stage.embed_tokens is not None and config.tie_word_embeddings:
            stage.lm_head.weight = stage.embed_tokens.weight
        for p in stage.parameters():
            p.grad = torch.zeros_like(p)
        ids = torch.zeros(rows, length, dtype=torch.long)
        hidden = torch.zeros(rows, length, config.hidden_size, dtype=work.dtype, requires_grad=True)
        x = ids if spec.is_first else hidden
        before, memory.peak = memory.now - (0 if spec.is_first else _bytes(hidden)), memory.now
        out = stage.run_rows(x, ids, ids, ids)
        if spec.is_last:
            row = ids.flatten()
            out = stage.score(out, row, row, row)[0]
        del x, hidden
        kept, forward = memory.now - before, memory.peak - before
        memory.peak = memory.now
        gradient = torch.zeros_like(out)
        out.backward(gradient)
        return ChunkMemory(kept, forward, memory.peak - before)


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def stage_memory(config, specs: list[StageSpec], work: Workload) -> list[ChunkMemory]:
    """``count_chunk`` of every stage. Layers are alike, so stages of one and of two layers tell those of more."""
    counted: dict[tuple, tuple[ChunkMemory, ChunkMemory]] = {}
    out = []
    for spec in specs:
        ends = (spec.is_first, spec.is_last)
        if ends not in counted:
            small = [dataclasses.replace(spec, first_layer=0, end_layer=n) for n in (1, 2)]
            counted[ends] = tuple(count_chunk(_two_layers(config), s, work) for s in small)
        one, two = counted[ends]
        more = spec.end_layer - spec.first_layer - 1
        out.append(ChunkMemory(*(
            getattr(one, f.name) + more * (getattr(two, f.name) - getattr(one, f.name)) for f in dataclasses.fields(one)
        )))
    return out


def _two_layers(config):
    import copy

    small = copy.deepcopy(config)
    small.num_hidden_layers = max(2, config.num_hidden_layers)
    return small


def activations_by_rank(chunks: list[ChunkMemory], work: Workload) -> list[int]:
    """The most bytes of activations at any moment of the schedule, for each rank."""
    out = []
    for actions in order(work.schedule, work.ranks, work.per_rank, work.microbatches):
        kept = most = 0
        for kind, stage, _ in actions:
            chunk = chunks[stage]
            if kind == "forward":
                most = max(most, kept + chunk.forward)
                kept += chunk.kept
            else:
                most = max(most, kept - chunk.kept + chunk.backward)
                kept -= 0 if kind == "backward_input" else chunk.kept
        out.append(most)
    return out


def rank_memory(config, specs: list[StageSpec], work: Workload) -> list[RankMemory]:
    """Predicted memory of each rank."""
    size, small = work.dtype.itemsize, work.compute_dtype.itemsize
    where = rank_of_stages(work.schedule, work.ranks, work.per_rank)
    activations = activations_by_rank(stage_memory(config, specs, work), work)
    whole = plan_stages(config, 1)[0].parameters
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    cache_of_a_layer = 2 * config.num_key_value_heads * head_dim * work.sequence_length * work.sequences * small
    out = []
    for rank in range(work.ranks):
        held = [s for s, r in zip(specs, where) if r == rank]
        parameters = sum(s.parameters for s in held)
        if config.tie_word_embeddings and len(held) > 1 and held[0].is_first and held[-1].is_last:
            parameters -= config.vocab_size * config.hidden_size  # one parameter, used twice
        own_model = work.sampler == "pipeline" or work.count == 1
        has_copy = not own_model and (rank == 0 or work.sampler == "replicas")
        copies = whole * small * has_copy
        if work.reference and not work.offload_reference:
            copies += parameters * size if work.reference == "pipeline" else whole * size * (rank == 0)
        layers = sum(s.end_layer - s.first_layer for s in held) if own_model else config.num_hidden_layers * has_copy
        out.append(RankMemory(
            weights=parameters * size, gradients=parameters * size,
            optimizer=0 if work.offload_optimizer else 2 * parameters * size,
            copies=copies, activations=activations[rank], caches=layers * cache_of_a_layer,
        ))
    return out


# ------------------------------------------------------------------------------------------------ FLOPs
def row_flops(config, spec: StageSpec, *lengths: int) -> float:
    """Of packed rows of so many tokens, forward and backward (twice the forward): matrix products and attention of all pairs."""
    whole = plan_stages(config, 1)[0]
    head = config.vocab_size * config.hidden_size
    embeddings = head * (1 if config.tie_word_embeddings else 2)
    layer = (whole.parameters - config.hidden_size - embeddings) / config.num_hidden_layers
    layers = spec.end_layer - spec.first_layer
    matrices = layers * layer + head * spec.is_last
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    scores = 2 * config.num_attention_heads * head_dim * layers
    return sum(3 * 2 * (matrices + scores * n) * n for n in lengths)


# Dense matrix products of the compute dtype, without sparsity, from the makers' data sheets; by part of the device's name.
PEAK_TFLOPS = {"H100 PCIe": 756, "H100": 989, "H200": 989, "A100": 312, "L40S": 362, "L40": 181, "L4": 121, "A10": 125, "4090": 165,
               "V100": 125, "T4": 65}


def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a GPU in bfloat16 (float16 where it has no bfloat16); 0 where it is not known, as on CPUs."""
    if device.type != "cuda" or dtype == torch.float32:
        return 0.0
    name = torch.cuda.get_device_name(device)
    return next((tflops * 1e12 for part, tflops in PEAK_TFLOPS.items() if part in name), 0.0)


# ------------------------------------------------------------------------------------------------ printing
def describe(config, specs: list[StageSpec], work: Workload, gpu_memory: float = 0.0) -> str:
    """The plan as text: split, FLOPs and memory by rank, bubbles by schedule, and whether it fits.

    Args:
        gpu_memory: GiB of each GPU; 0: not asked.
    """
    where = rank_of_stages(work.schedule, work.ranks, work.per_rank)
    memory = rank_memory(config, specs, work)
    checkpointing = ", layers recomputed" if work.activation_checkpointing else ""
    lines = [
        describe_plan(specs, config),
        "",
        f"{work.schedule}, {work.microbatches} microbatches of {work.microbatch_size} x {work.row_length} tokens, "
        f"{_name(work.dtype)} weights, {_name(work.compute_dtype)} compute{checkpointing}",
        "rank  stages    TFLOPs a step    weights  gradients  optimizer     copies  activations     caches       peak",
    ]
    for rank, m in enumerate(memory):
        held = [s for s, r in zip(specs, where) if r == rank]
        work_done = sum(row_flops(config, s, work.row_length) for s in held) * work.microbatches * work.microbatch_size
        sizes = [m.weights, m.gradients, m.optimizer, m.copies, m.activations, m.caches, m.peak]
        columns = "".join(f"{_size(v):>{w}}" for v, w in zip(sizes, (11, 11, 11, 11, 13, 11, 11)))
        lines.append(f"{rank:<4}  {','.join(str(s.index) for s in held):<8}  {work_done / 1e12:>13.3g}{columns}")
    bubbles = []
    for name in SCHEDULES:
        per_rank = work.per_rank if SCHEDULES[name].any_number and work.per_rank > 1 else stages_per_rank(name)
        count = microbatches_run(name, work.ranks, work.microbatches)
        bubbles.append(f"{name} {theoretical_bubble(work.ranks, count, name, per_rank):.1%}")
    lines.append(f"bubble in theory: {', '.join(bubbles)}")
    if gpu_memory:
        worst = max(range(work.ranks), key=lambda r: memory[r].peak)
        need = memory[worst].peak / 2**30
        verdict = "fits" if need < 0.92 * gpu_memory else "does not fit"
        lines.append(f"{verdict}: rank {worst} needs {need:.1f} GiB of {gpu_memory:g} (8 % are left to the libraries)")
    return "\n".join(lines)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _size(count: float) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def main(argv: list[str] | None = None) -> str:
    """The command line; prints the plan and returns it.

    Raises:
        SystemExit: a flag or a model that cannot be used, in one sentence.
    """
    parser = argparse.ArgumentParser(prog="python stages.py", description="Print what a run will cost, without loading weights.")
    parser.add_argument("--plan", action="store_true", required=True, help="print the plan")
    parser.add_argument("--model", required=True, help="folder or hub name; only its config.json is read")
    parser.add_argument("--stages", type=int, required=True, help="processes, each with one stage or --stages_per_rank")
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--gpu_memory", type=float, default=0.0, help="GiB of each GPU: says whether it fits")
    parser.add_argument("--schedule", default="1F1B", choices=tuple(SCHEDULES))
    parser.add_argument("--stages_per_rank", type=int, default=0)
    parser.add_argument("--split", default="", help="layers per stage, e.g. 16,8")
    parser.add_argument("--microbatch_size", type=int, default=1)
    parser.add_argument("--row_length", type=int, default=2048)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--compute_dtype", default="bfloat16", choices=("float32", "bfloat16"))
    parser.add_argument("--activation_checkpointing", default="none", choices=("none", "full"))
    parser.add_argument("--offload_optimizer", action="store_true")
    parser.add_argument("--sampler", default="rank0", choices=("rank0", "replicas", "pipeline"))
    parser.add_argument("--sequences", type=int, default=64, help="decoded at the same time by one engine")
    parser.add_argument("--sequence_length", type=int, default=1024, help="prompt and completion, for the caches")
    parser.add_argument("--reference", default="", choices=("", "rank0", "pipeline"))
    parser.add_argument("--offload_reference", action="store_true")
    a = parser.parse_args(argv)
    try:
        config = load_config(a.model)
        per_rank = stages_per_rank(a.schedule, a.stages_per_rank)
        split = [int(n) for n in a.split.split(",")] if a.split else None
        recomputes = a.activation_checkpointing == "full"
        specs = plan_stages(config, a.stages * per_rank, split, activation_checkpointing=recomputes)
        work = Workload(
            ranks=a.stages, schedule=a.schedule, per_rank=per_rank,
            microbatches=microbatches_run(a.schedule, a.stages, a.microbatches), microbatch_size=a.microbatch_size,
            row_length=a.row_length, dtype=getattr(torch, a.dtype), compute_dtype=getattr(torch, a.compute_dtype),
            activation_checkpointing=recomputes, offload_optimizer=a.offload_optimizer, sampler=a.sampler,
            sequences=a.sequences, sequence_length=a.sequence_length, reference=a.reference,
            offload_reference=a.offload_reference,
        )
        text = describe(config, specs, work, a.gpu_memory)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None
    print(text)
    return text
