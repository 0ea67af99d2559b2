"""Processes, their groups, and everything that crosses them outside the pipeline schedule itself.

``Mesh`` holds the process groups; no other module asks for the world or for rank 0 when it means "the first stage of
this pipeline". Beside it stand the three sums that make a step over several stages equal to a step in one process: the
gradient of tied embeddings, the global gradient norm, and the weights on their way to the sampler.

Left out: data and tensor parallelism.
"""

from __future__ import annotations

import datetime
import os
import sys
import traceback
import zlib
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from watch import Watch, machine_name, processes_here


@dataclass
class Mesh:
    """This process's place: ``stage`` of ``stages`` in the pipeline, and the groups to talk through.

    Where a schedule puts several stages on a rank (``stages.Stages``), these count ranks: ``is_first`` is then the rank of
    the first stage, and ``pipeline.holds_last`` tells where the last one is.

    Tensors of the model travel through ``pp_group`` (nccl on GPUs, gloo on CPUs); Python objects and small numbers
    through ``control_group``, which is always gloo and on the CPU.
    """

    stage: int
    stages: int
    device: torch.device
    pp_group: dist.ProcessGroup
    control_group: dist.ProcessGroup
    ends_group: dist.ProcessGroup | None  # first and last stage, for tied embeddings; None with one stage
    timeout: datetime.timedelta = datetime.timedelta(seconds=600)  # of every collective
    watch: Watch = field(default_factory=Watch)

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.stages - 1

    def broadcast(self, value, source: int = 0):
        """The Python object of stage ``source``, on every stage."""
        box = [value]
        dist.broadcast_object_list(box, group_src=source, group=self.control_group)
        return box[0]

    def gather(self, value) -> list:
        """The Python objects of all stages, in order, on every stage."""
        out = [None] * self.stages
        dist.all_gather_object(out, value, group=self.control_group)
        return out

    def broadcast_tensor(self, tensor: Tensor | None, shape, dtype: torch.dtype, source: int) -> Tensor:
        """The CPU tensor of stage ``source`` on every stage; shape and dtype are known everywhere (gloo checks neither)."""
        if self.stage != source:
            tensor = torch.empty(shape, dtype=dtype)
        elif tuple(tensor.shape) != tuple(shape) or tensor.dtype != dtype:
            raise ValueError(f"broadcast of {list(tensor.shape)} {tensor.dtype}, announced as {list(shape)} {dtype}")
        tensor = tensor.cpu().contiguous()
        dist.broadcast(tensor, group_src=source, group=self.control_group)
        return tensor

    def barrier(self) -> None:
        dist.barrier(group=self.control_group)


def choose_device(wanted: str, local_rank: int, local_ranks: int) -> torch.device:
    """``auto`` takes CUDA when there is a GPU for every process of this node, else the CPU.

    Raises:
        ValueError: CUDA was asked for and there are too few GPUs.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted == "cuda" and gpus < local_ranks:
        raise ValueError(f"--device cuda needs a GPU for each of the {local_ranks} processes of this node, found {gpus}")
    if wanted == "cuda" or (wanted == "auto" and gpus >= local_ranks):
        return torch.device("cuda", local_rank)
    return torch.device("cpu")


def open_mesh(device: str = "auto", timeout_s: float = 600.0) -> Mesh:
    """Join the other processes started by torchrun; without torchrun, a pipeline of one stage in this process."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    rank = int(os.environ.get("RANK", "0"))
    place = choose_device(device, int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    timeout = datetime.timedelta(seconds=timeout_s + 5)  # the watch, which knows the phase, shall speak first
    common = dict(timeout=timeout)
    if "RANK" not in os.environ:
        common |= dict(store=dist.HashStore(), rank=0, world_size=1)
    if place.type == "cuda":
        torch.cuda.set_device(place)
        dist.init_process_group("nccl", device_id=place, **common)
    else:
        dist.init_process_group("gloo", **common)
    everyone = list(range(world))
    pp_group = dist.group.WORLD
    control_group = dist.new_group(everyone, backend="gloo", timeout=timeout) if place.type == "cuda" else pp_group
    ends_group = dist.new_group([0, world - 1], timeout=timeout) if world > 1 else None
    return Mesh(rank, world, place, pp_group, control_group, ends_group, timeout, Watch(rank, world, timeout_s))


def start_watch(mesh: Mesh) -> None:
    """Catch signals, and watch the clock and the other processes of this machine from here on."""
    mesh.watch.catch_signals()
    others = processes_here(mesh.gather((machine_name(), os.getpid())))
    mesh.watch.start(others, launched="TORCHELASTIC_RUN_ID" in os.environ)


def agree_to_stop(mesh: Mesh) -> str:
    """Which stages were asked to stop by what, the same text on every stage; "" when none was."""
    asked: dict[str, list[int]] = {}
    for stage, reason in enumerate(mesh.gather(mesh.watch.stop)):
        if reason:
            asked.setdefault(reason, []).append(stage)
    return ", ".join(f"{reason} at stage {' and '.join(map(str, stages))}" for reason, stages in asked.items())


class Refused(ValueError):
    """What one stage refuses and all know of: the first one says it."""


def refuse_together(mesh: Mesh, function):
    """``function()`` on every stage; the ValueError of one is raised on all, so that none waits for another."""
    result = message = None
    try:
        result = function()
    except ValueError as error:
        message = str(error)
    found = [m for m in mesh.gather(message) if m is not None]
    if found:
        raise Refused(found[0])
    return result


@contextmanager
def refuse_in_one_sentence(mesh: Mesh | None = None, *, say: bool = True):
    """A ValueError in here is bad input: its sentence says it all, and the process ends with code 2.

    Args:
        mesh: None before the processes have met; afterwards the process leaves at once, and what all know of is said by the
            first stage alone.
        say: whether this process prints.
    """
    try:
        yield
    except ValueError as error:
        known_to_all = mesh is not None and not mesh.is_first and isinstance(error, Refused)
        if say and not known_to_all:
            print(f"error: {error}", file=sys.stderr, flush=True)
        if mesh is None:
            sys.exit(2)
        os._exit(2)


@contextmanager
def fail_together(mesh: Mesh):
    """Leave the process at once when something raises: other stages wait in a collective and must be taken down.

    torchrun ends the other processes as soon as one has left; waiting for a clean shutdown of the process groups here
    would wait for them instead.
    """
    try:
        yield
    except BaseException as error:
        if isinstance(error, SystemExit) and not error.code:
            raise
        sys.stdout.flush()
        # torch raises RuntimeError; a ConnectionError is a server's, of W&B or of a reward, and must be shown in full
        gone = "onnection closed by peer" in str(error) or "Connection reset by peer" in str(error)
        if isinstance(error, RuntimeError) and gone:
            print(f"stage {mesh.stage} of {mesh.stages} stops in {mesh.watch.where()}: another stage has left", file=sys.stderr)
        else:
            print(f"\nstage {mesh.stage} of {mesh.stages} failed in {mesh.watch.where()}:", file=sys.stderr)
            traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    mesh.barrier()
    mesh.watch.close()
    dist.destroy_process_group()


# ------------------------------------------------------------------------------------------------ gradients
def sum_tied_gradient(stage, mesh: Mesh) -> None:
    """Add up the two gradients of tied embeddings, which stand as a copy on the first and on the last stage.

    In one process, or where one rank holds both stages, the parameter is used twice and autograd adds the two; elsewhere
    a sum over just those two ranks does it.
    Both copies start equal and see the same gradient, so they stay equal. Call before clipping.
    """
    weight = stage.tied_weight
    if weight is None:
        return
    if weight.grad is None:  # frozen by the user, or no backward has run
        weight.grad = torch.zeros_like(weight)
    dist.all_reduce(weight.grad, group=mesh.ends_group)


def gradient_norms(stage, mesh: Mesh) -> list[float]:
    """The gradient norm of every stage, on every stage; a tied copy counts once, on the first stage."""
    copy = stage.tied_copy
    counted = [p.grad for p in stage.parameters() if p.grad is not None and p is not copy]
    norm = torch.nn.utils.get_total_norm(counted).double().item() if counted else 0.0
    return mesh.gather(norm)


def clip_gradients(stage, mesh: Mesh, max_norm: float) -> tuple[float, list[float]]:
    """Scale all gradients so that their norm over all stages is at most ``max_norm`` (0: leave them).

    Stage norms 3 and 4 are a norm of 5 everywhere, and with ``max_norm`` 1 every gradient is scaled by 0.2.

    Returns:
        the norm before clipping, and its parts by stage. A non-finite norm leaves the gradients as they are.
    """
    parts = gradient_norms(stage, mesh)
    total = sum(n * n for n in parts) ** 0.5
    if max_norm and total > max_norm and total < float("inf"):
        gradients = [p.grad for p in stage.parameters() if p.grad is not None]
        torch._foreach_mul_(gradients, max_norm / (total + 1e-6))
    return total, parts


# ------------------------------------------------------------------------------------------------ weights
@torch.no_grad()
def send_weights(stage, target, mesh: Mesh, mixup: float = 1.0, *, to_all: bool = False) -> None:
    """Move ``target``, a one-stage model on the first stage's rank (None on the others), to the stages' weights.

    target = (1 - mixup) * target + mixup * stages; the default is a plain copy. Every stage sends one flat buffer, in the
    target's dtype, so that a few large messages do the work of hundreds.

    Args:
        to_all: every rank has a ``target``.
    """
    dtype = mesh.broadcast(target.dtype if mesh.is_first else None)
    tensors = stage.export_tensors()
    destination = {} if target is None else target.export_tensors()
    for source in range(mesh.stages):
        mine = source == mesh.stage
        names, sizes = mesh.broadcast((list(tensors), [t.numel() for t in tensors.values()]) if mine else None, source)
        if mine:
            flat = torch.cat([t.to(dtype).flatten() for t in tensors.values()])
        elif target is not None:
            flat = torch.empty(sum(sizes), dtype=dtype, device=mesh.device)
        else:
            continue
        if to_all:
            dist.broadcast(flat, group_src=source, group=mesh.pp_group)
        elif mine and not mesh.is_first:
            dist.send(flat, group_dst=0, group=mesh.pp_group)
        elif not mine:
            dist.recv(flat, group_src=source, group=mesh.pp_group)
        for name, part in zip(names, flat.split(sizes)) if target is not None else ():
            _move(destination[name], part.view_as(destination[name]), mixup)


def _move(target: Tensor, source: Tensor, mixup: float) -> None:
    if mixup == 1:  # a target not yet filled may hold NaN, of which lerp would keep 0 * NaN
        target.copy_(source)
    else:
        target.lerp_(source, mixup)


def checksum(stage: nn.Module) -> int:
    """A 63-bit checksum of the weights, the same for the same bits under the same names, however they are cut.

    It adds bits up, so that the stages' checksums add up to the whole model's; an order within a tensor is not seen.
    """
    # a factor by name, so that swapped tensors do not go unseen
    return sum((zlib.crc32(name.encode()) | 1) * _sum_of_bits(t) for name, t in stage.export_tensors().items()) % 2**63


def _sum_of_bits(tensor: Tensor) -> int:
    return tensor.view({8: torch.int64, 4: torch.int32, 2: torch.int16}[tensor.element_size()]).sum(dtype=torch.int64).item()


def check_tied_copies(stage, mesh: Mesh) -> None:
    """Tied embeddings stand on the first and the last stage; both must hold the same weight.

    Raises:
        RuntimeError: they differ.
    """
    mine = stage.tied_weight
    sums = mesh.gather(None if mine is None else _sum_of_bits(mine.detach()))
    if sums[0] != sums[-1]:
        raise RuntimeError(f"the tied embeddings differ between the first stage ({sums[0]:x}) and the last ({sums[-1]:x})")
