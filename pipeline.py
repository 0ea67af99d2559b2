"""Runs packed rows through the stages: ``train_step`` (forward, loss, backward) and ``score`` (forward only).

The schedule is ``torch.distributed.pipelining``'s own, through its public API. Three things are done on purpose:

* Static shapes. ``PipelineStage`` is given meta tensors of what it receives and sends, so there is no probing pass; when
  M or T changes, fresh stage and schedule objects are made over the same modules, which costs milliseconds.
* ``scale_grads=False``. The loss of a microbatch is a sum whose denominator is that of the whole optimizer step (it
  stands in the tokens' weights), so losses and gradients of microbatches add up, whatever their number or order.
* A stateless loss. All it needs travels as the schedule's ``target``, one tensor [M, T, columns] that the schedule
  splits exactly as it splits the rows.

Every chunk's forward and backward is timed where it runs, so that the bubble is measured beside the theoretical one.

Left out: schedules with several stages on a rank.

Legend: M rows, R rows of a microbatch, T tokens in a row, H hidden size.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Callable

import torch
from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import Schedule1F1B, ScheduleGPipe

from parallel import Mesh
from rollout import Rows
from stages import Stage

SCHEDULES = {"1F1B": Schedule1F1B, "GPipe": ScheduleGPipe}
# The columns of the target, in order; ``old_logprob`` and ``ref_logprob`` are 0 where a run has none.
COLUMNS = ("advantage", "weight", "old_logprob", "ref_logprob", "sampler_logprob", "sequence")

LossFunction = Callable[[Tensor, dict[str, Tensor]], Tensor]


@dataclass
class Chunk:
    """One microbatch's forward or backward on this stage; seconds since the step began."""

    kind: str  # "forward" or "backward"
    microbatch: int
    start: float
    end: float


class _TimedStage(PipelineStage):
    """A ``PipelineStage`` that notes when it computes, which is all it does beside waiting."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.chunks_run: list[tuple] = []

    def _timed(self, kind: str, microbatch: int, run):
        start = _now(self.device)
        result = run()
        self.chunks_run.append((kind, microbatch, start, _now(self.device)))
        return result

    def forward_one_chunk(self, fwd_chunk_id, *args, **kwargs):
        run = super().forward_one_chunk
        return self._timed("forward", fwd_chunk_id, lambda: run(fwd_chunk_id, *args, **kwargs))

    def backward_one_chunk(self, bwd_chunk_id, *args, **kwargs):
        run = super().backward_one_chunk
        return self._timed("backward", bwd_chunk_id, lambda: run(bwd_chunk_id, *args, **kwargs))


def _now(device: torch.device):
    """A point in time: the clock on a CPU, an event on the stream of a GPU."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _seconds(start, end) -> float:
    """Between two points of ``_now``; on a GPU both must have been reached."""
    return end - start if isinstance(start, float) else start.elapsed_time(end) / 1e3


def theoretical_bubble(stages: int, microbatches: int) -> float:
    """Idle share of a 1F1B or GPipe step with equal stages: (stages - 1) / (microbatches + stages - 1).

    >>> round(theoretical_bubble(2, 8), 4)
    0.1111
    """
    return (stages - 1) / (microbatches + stages - 1)


class Pipeline:
    """This rank's stage under a schedule.

    Args:
        microbatch_size: packed rows R of a microbatch.
    """

    def __init__(self, stage: Stage, mesh: Mesh, *, schedule: str = "1F1B", microbatch_size: int = 1):
        self.stage, self.mesh = stage, mesh
        self.schedule, self.microbatch_size = schedule, microbatch_size
        self.timeline: list[Chunk] = []  # of the latest train_step on this stage
        self.step_s = 0.0  # seconds from the first chunk's start on this stage to the end of the schedule
        self._runners: dict[str, tuple] = {}

    def rows_needed(self) -> int:
        """The fewest rows the schedule accepts: 1F1B wants at least as many microbatches as stages."""
        return self.microbatch_size * (self.mesh.stages if self.schedule == "1F1B" else 1)

    def train_step(self, rows: Rows, loss_fn: LossFunction) -> tuple[float, Tensor] | None:
        """Forward, loss and backward of all rows; gradients are added to the parameters' ``.grad``.

        Args:
            rows: the same on every stage, on this stage's device.
            loss_fn: (output [R, T, 2] of the last stage, columns [R, T] by name) -> scalar. Called on the last stage.

        Returns:
            On the last stage the loss (a sum over microbatches) and the outputs [M, T, 2], else None.
        """
        outputs: list[Tensor] = []

        def loss_of_chunk(output: Tensor, target: Tensor) -> Tensor:
            outputs.append(output.detach())
            return loss_fn(output, dict(zip(COLUMNS, target.unbind(-1))))

        runner = self._runner("train", rows)
        schedule, stage, holder = runner
        holder[0] = loss_of_chunk
        stage.chunks_run.clear()
        began = _now(self.mesh.device)
        losses: list[Tensor] | None = [] if self.mesh.is_last else None
        target = {"target": self._target(rows)} if self.mesh.is_last else {}
        args = (rows.input_ids,) if self.mesh.is_first else ()
        schedule.step(*args, **target, losses=losses, return_outputs=False, **rows.inputs())
        self._note_timeline(stage.chunks_run, began)
        holder[0] = None
        if not self.mesh.is_last:
            return None
        return sum(loss.item() for loss in losses), torch.cat(outputs)

    @torch.no_grad()
    def score(self, rows: Rows) -> Tensor | None:
        """Log-prob and entropy [M, T, 2] of the completion tokens, on the last stage; None elsewhere."""
        schedule, stage, _ = self._runner("score", rows)
        args = (rows.input_ids,) if self.mesh.is_first else ()
        scored = schedule.eval(*args, **rows.inputs())
        stage.clear_runtime_states()  # it would keep every microbatch's activations until the next call
        stage.chunks_run.clear()
        return scored

    def timings(self) -> dict[str, float]:
        """Seconds this stage computed in the latest train_step, and seconds the step took."""
        return {"busy_s": sum(c.end - c.start for c in self.timeline), "step_s": self.step_s}

    # -------------------------------------------------------------------------------------------- inside
    def _target(self, rows: Rows) -> Tensor:
        nothing = torch.zeros_like(rows.weight)
        columns = [getattr(rows, name) for name in COLUMNS]
        return torch.stack([(nothing if c is None else c).to(rows.weight.dtype) for c in columns], dim=-1)

    def _runner(self, kind: str, rows: Rows):
        """A schedule over this stage for the shape of ``rows``; only the latest of each kind is kept."""
        shape = rows.shape
        if kind not in self._runners or self._runners[kind][0] != shape:
            if shape[0] % self.microbatch_size:
                raise ValueError(f"{shape[0]} rows do not divide into microbatches of {self.microbatch_size}")
            holder: list = [None]
            stage = self._pipeline_stage(shape[1], training=kind == "train")
            schedule = SCHEDULES[self.schedule](
                stage, shape[0] // self.microbatch_size,
                loss_fn=(lambda output, target: holder[0](output, target)) if kind == "train" else None,
                scale_grads=False,
            )
            self._runners[kind] = (shape, (schedule, stage, holder))
        return self._runners[kind][1]

    def _pipeline_stage(self, row_length: int, training: bool) -> _TimedStage:
        """A stage object with static shapes: meta tensors say what arrives and what leaves."""
        rows, spec = self.microbatch_size, self.stage.spec

        def real(width: int, dtype: torch.dtype) -> Tensor:
            return torch.empty(rows, row_length, width, dtype=dtype, device="meta", requires_grad=training)

        ids = torch.empty(rows, row_length, dtype=torch.long, device="meta")
        hidden = real(self.stage.config.hidden_size, self.stage.dtype)
        logprobs = real(2, torch.float64 if self.stage.dtype == torch.float64 else torch.float32)
        return _TimedStage(
            self.stage, spec.index, spec.count, self.mesh.device,
            input_args=(ids if spec.is_first else hidden,),
            output_args=(logprobs if spec.is_last else hidden,),
            group=self.mesh.pp_group,
        )

    def _note_timeline(self, chunks: list[tuple], began) -> None:
        end = _now(self.mesh.device)
        if self.mesh.device.type == "cuda":
            end.synchronize()
        self.timeline = [Chunk(kind, m, _seconds(began, a), _seconds(began, b)) for kind, m, a, b in chunks]
        self.step_s = _seconds(began, end)
