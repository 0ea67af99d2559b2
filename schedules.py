"""The pipeline schedules by name: what each accepts, which stage stands on which rank, and its bubble in theory.

The schedules themselves are ``torch.distributed.pipelining``'s. Their order of work can be asked for without processes
(``order``) and played through with equal stages (``simulate``), which gives the bubble one has to expect and a picture
to hold beside the measured one.

    name                   stages a rank   microbatches               backward
    1F1B                   1               at least the ranks         whole
    GPipe                  1               any                        whole
    LoopedBFS              any (2)         any                        whole
    Interleaved1F1B        any (2)         a multiple of the ranks    whole
    InterleavedZeroBubble  any (2)         a multiple of the ranks    inputs first, weights later
    ZBVZeroBubble          2               any                        inputs first, weights later
    DualPipeV              2               at least 2 x the ranks     inputs first, weights later

In the last two the stages run down the ranks and up again (a V), so that the first and the last are both on rank 0.

Left out: schedules of one's own, read from a file.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from types import SimpleNamespace

KINDS = {  # by torch's names
    "FORWARD": "forward", "FULL_BACKWARD": "backward", "BACKWARD_INPUT": "backward_input",
    "BACKWARD_WEIGHT": "backward_weight",
}
COST = {"forward": 1.0, "backward": 2.0, "backward_input": 1.0, "backward_weight": 1.0}  # in forwards of one stage


@dataclass(frozen=True)
class ScheduleKind:
    """What a schedule asks for."""

    stages_per_rank: int = 1  # when the user names no number
    any_number: bool = False  # of stages on a rank
    v_layout: bool = False
    least_per_rank: int = 0  # fewest microbatches, in ranks
    in_multiples: bool = False  # of the ranks


SCHEDULES = {
    "1F1B": ScheduleKind(least_per_rank=1),
    "GPipe": ScheduleKind(),
    "LoopedBFS": ScheduleKind(2, any_number=True),
    "Interleaved1F1B": ScheduleKind(2, any_number=True, in_multiples=True),
    "InterleavedZeroBubble": ScheduleKind(2, any_number=True, in_multiples=True),
    "ZBVZeroBubble": ScheduleKind(2, v_layout=True),
    "DualPipeV": ScheduleKind(2, v_layout=True, least_per_rank=2),
}


@dataclass
class Chunk:
    """One microbatch's forward or backward on one stage; seconds since the step began (stage forwards in a simulation)."""

    kind: str  # a key of COST
    microbatch: int
    start: float
    end: float
    stage: int = 0


def stages_per_rank(schedule: str, wanted: int = 0) -> int:
    """How many stages stand on a rank; ``wanted`` 0 leaves it to the schedule.

    Raises:
        ValueError: a number that the schedule does not take.
    """
    kind = SCHEDULES[schedule]
    if wanted and not kind.any_number and wanted != kind.stages_per_rank:
        raise ValueError(
            f"--schedule {schedule} takes {kind.stages_per_rank} stage{'s' * (kind.stages_per_rank > 1)} on a rank, "
            f"not {wanted}: leave --stages_per_rank at 0 or choose another schedule"
        )
    return wanted or kind.stages_per_rank


def rank_of_stages(schedule: str, ranks: int, per_rank: int) -> list[int]:
    """The rank of each stage: in turn, or down the ranks and up again.

    >>> rank_of_stages("Interleaved1F1B", 2, 2), rank_of_stages("ZBVZeroBubble", 2, 2)
    ([0, 1, 0, 1], [0, 1, 1, 0])
    """
    down = list(range(ranks))
    return down + down[::-1] if SCHEDULES[schedule].v_layout else down * per_rank


def microbatches_needed(schedule: str, ranks: int) -> tuple[int, int]:
    """(fewest, multiple) of microbatches that the schedule runs; a rollout with less is filled up with empty rows."""
    kind = SCHEDULES[schedule]
    return max(1, kind.least_per_rank * ranks), ranks if kind.in_multiples else 1


def microbatches_run(schedule: str, ranks: int, wanted: int) -> int:
    """How many microbatches run where a rollout has ``wanted``: those and the empty ones that the schedule needs beside them.

    >>> microbatches_run("Interleaved1F1B", 4, 9), microbatches_run("DualPipeV", 4, 3)
    (12, 8)
    """
    least, multiple = microbatches_needed(schedule, ranks)
    return max(least, -(-wanted // multiple) * multiple)


def make_schedule(schedule: str, stages: list, microbatches: int, loss_fn=None):
    """torch's schedule over this rank's ``PipelineStage`` objects.

    ``scale_grads`` is off: losses and gradients of microbatches add up, their denominators are in the token weights.
    """
    from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

    kind = get_schedule_class(schedule)
    what = stages[0] if issubclass(kind, PipelineScheduleSingle) else stages
    return kind(what, microbatches, loss_fn=loss_fn, scale_grads=False)


# ------------------------------------------------------------------------------------------------ on paper
def order(schedule: str, ranks: int, per_rank: int, microbatches: int) -> list[list[tuple[str, int, int]]]:
    """For each rank its (kind, stage, microbatch) one after the other, without any process.

    torch works the order out of a few numbers of its stage objects; objects that hold only those stand in for them.
    """
    if schedule == "1F1B":  # torch 2.13 runs this order, but lists another one, without the last rank's first forward
        return [_one_forward_one_backward(ranks, rank, microbatches) for rank in range(ranks)]
    from torch.nn import Identity

    stages = [
        SimpleNamespace(
            stage_index=i, is_first=False, is_last=False, num_stages=ranks * per_rank, group_size=ranks, group_rank=0,
            group=None, device="cpu", submod=Identity(), has_backward=True,
        )
        for i in range(per_rank)
    ]
    actions = make_schedule(schedule, stages, microbatches).pipeline_order
    out = []
    for rank in range(ranks):
        flat = [part for a in actions[rank] if a is not None for part in (a.sub_actions or (a,))]
        out.append([
            (KINDS[a.computation_type.name], a.stage_index, a.microbatch_index)
            for a in flat if a.computation_type.name in KINDS
        ])
    return out


def _one_forward_one_backward(ranks: int, rank: int, microbatches: int) -> list[tuple[str, int, int]]:
    ahead = min(microbatches, ranks - rank)  # forwards before the first backward
    out = [("forward", rank, m) for m in range(ahead)]
    for m in range(microbatches):
        out.append(("backward", rank, m))
        if m + ahead < microbatches:
            out.append(("forward", rank, m + ahead))
    return out


def simulate(schedule: str, ranks: int, per_rank: int, microbatches: int, cost: dict | None = None) -> list[list[Chunk]]:
    """Every rank's chunks when stages are equal, messages take no time, and a rank works on whatever is next in its
    order as soon as its input is there. Times are in forwards of a stage.

    Args:
        cost: of each kind of chunk; ``COST`` by default.
    """
    cost, last = cost or COST, ranks * per_rank - 1
    waiting = order(schedule, ranks, per_rank, microbatches)
    done: dict[tuple, float] = {}
    chunks, free, place = [[] for _ in range(ranks)], [0.0] * ranks, [0] * ranks

    def inputs(kind, stage, m):
        if kind == "forward":
            return [("forward", stage - 1, m)] if stage else []
        if kind == "backward_weight":
            return [("backward_input", stage, m)]
        return [("forward", stage, m)] + ([("backward_input", stage + 1, m)] if stage < last else [])

    while any(place[r] < len(waiting[r]) for r in range(ranks)):
        moved = False
        for r in range(ranks):
            while place[r] < len(waiting[r]):
                action = waiting[r][place[r]]
                if not all(i in done for i in inputs(*action)):
                    break
                kind, stage, m = action
                start = max([free[r]] + [done[i] for i in inputs(*action)])
                free[r] = start + cost[kind]
                chunks[r].append(Chunk(kind, m, start, free[r], stage))
                done["backward_input" if kind == "backward" else kind, stage, m] = free[r]
                place[r] += 1
                moved = True
        if not moved:
            raise RuntimeError(f"{schedule} with {ranks} ranks and {microbatches} microbatches waits for itself")
    return chunks


def bubble(chunks: list[list[Chunk]], span: float | None = None) -> float:
    """Idle share of all ranks' time, from the first chunk's start to the last one's end or over ``span``."""
    if span is None:
        span = max(c.end for rank in chunks for c in rank) - min(c.start for rank in chunks for c in rank)
    return 1 - sum(c.end - c.start for rank in chunks for c in rank) / (span * len(chunks))


@functools.lru_cache(maxsize=256)
def theoretical_bubble(ranks: int, microbatches: int, schedule: str = "1F1B", per_rank: int = 1) -> float:
    """Idle share of a step with equal stages, a backward costing two forwards.

    1F1B and GPipe: (ranks - 1) / (microbatches + ranks - 1), as in 2104.04473; the others are played through.

    >>> round(theoretical_bubble(2, 8), 4)
    0.1111
    """
    if per_rank == 1 and schedule in ("1F1B", "GPipe"):
        return (ranks - 1) / (microbatches + ranks - 1)
    return bubble(simulate(schedule, ranks, per_rank, microbatches))
