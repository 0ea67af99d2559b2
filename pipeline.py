"""Runs packed rows through the stages: ``train_step`` (forward, loss, backward) and ``score`` (forward only).

The schedule is ``torch.distributed.pipelining``'s own, through its public API. Four things are done on purpose:

* Static shapes. ``PipelineStage`` is given meta tensors of what it receives and sends, so there is no probing pass; when
  M or T changes, fresh stage and schedule objects are made over the same modules, which costs milliseconds.
* Microbatches without their padding. T is the most; each microbatch is cut to its fullest row where it enters a stage.
* ``scale_grads=False``. The loss of a microbatch is a sum whose denominator is that of the whole optimizer step (it
  stands in the tokens' weights), so losses and gradients of microbatches add up, whatever their number or order.
* A stateless loss. All it needs travels as the schedule's ``target``, one tensor [M, T, columns] that the schedule
  splits exactly as it splits the rows.

Every chunk's forward and backward is timed where it runs, so that the bubble is measured beside the theoretical one.

``score`` is a loop of its own over plain sends and receives, for any layout of the stages: torch's forward-only step
fails where the stages form a V, and keeps the activations of all microbatches.

Legend: M rows, R rows of a microbatch, T tokens in a row, H hidden size.
"""

from __future__ import annotations

import time
from collections import deque
from pathlib import Path
from typing import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.pipelining import PipelineStage

from parallel import Mesh
from rollout import Rows
from schedules import Chunk, bubble, make_schedule, microbatches_needed, rank_of_stages, theoretical_bubble
from stages import Stage, Stages
from timeline import draw, trace

# The columns of the target, in order; ``old_logprob`` and ``ref_logprob`` are 0 where a run has none.
COLUMNS = ("advantage", "weight", "old_logprob", "ref_logprob", "sampler_logprob", "sequence")

LossFunction = Callable[[Tensor, dict[str, Tensor]], Tensor]


class _TimedStage(PipelineStage):
    """A ``PipelineStage`` that notes when it computes, which is all it does beside waiting.

    It also cuts what enters to the microbatch's own length, and holds the buffers of messages only while they are in use.
    torch 2.13 allocates one for every microbatch and direction and keeps them all, so that memory would grow with M.
    """

    def __init__(self, *args, chunks_run: list[tuple], lengths: list[int], **kwargs):
        super().__init__(*args, **kwargs)
        self.chunks_run, self.lengths = chunks_run, lengths
        self._runtime_validate = False  # under TORCH_DISTRIBUTED_DEBUG=DETAIL it wants all microbatches to be alike

    def _timed(self, kind: str, microbatch: int, run):
        start = _now(self.device)
        result = run()
        self.chunks_run.append((kind, microbatch, start, _now(self.device), self.stage_index))
        return result

    def forward_one_chunk(self, fwd_chunk_id, args, kwargs=None, save_forward_output=True):
        run, end = super().forward_one_chunk, self.lengths[fwd_chunk_id]
        args = tuple(rows[:, :end] for rows in args)
        kwargs = {name: rows[:, :end] for name, rows in kwargs.items()}
        return self._timed("forward", fwd_chunk_id, lambda: run(fwd_chunk_id, args, kwargs, save_forward_output))

    def backward_one_chunk(self, bwd_chunk_id, loss=None, full_backward: bool = True, last_backward=False):
        run = super().backward_one_chunk
        kind = "backward" if full_backward else "backward_input"
        self._timed(kind, bwd_chunk_id, lambda: run(bwd_chunk_id, loss, full_backward, last_backward))
        _drop_buffers(self.args_recv_info, bwd_chunk_id)
        _drop_buffers(self.grad_recv_info, bwd_chunk_id)
        if loss is not None and full_backward:
            loss.detach_()  # the schedule keeps the losses, and their graphs would keep what arrived

    def backward_weight_one_chunk(self, bwd_chunk_id, last_backward=False):
        run = super().backward_weight_one_chunk
        self._timed("backward_weight", bwd_chunk_id, lambda: run(bwd_chunk_id, last_backward))

    # What follows leans on torch's names of 2.13 that are not public.
    def _setup_forward_recv_info(self, num_microbatches, has_backward):
        super()._setup_forward_recv_info(num_microbatches, has_backward)
        _drop_buffers(self.args_recv_info)

    def _setup_backward_recv_info(self, num_microbatches):
        super()._setup_backward_recv_info(num_microbatches)
        _drop_buffers(self.grad_recv_info)

    def get_fwd_recv_ops(self, fwd_chunk_id):
        self._make_buffers(self.args_recv_info[fwd_chunk_id], fwd_chunk_id)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id):
        self._make_buffers(self.grad_recv_info[bwd_chunk_id], bwd_chunk_id)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def _make_buffers(self, infos, chunk: int) -> None:
        for info in infos:
            if info.source is not None and info.buffer is None:
                rows, _, hidden = info.tensor_meta.shape
                shape = (rows, self.lengths[chunk], hidden)
                info.buffer = torch.empty(shape, dtype=info.tensor_meta.dtype, device=self.device)


def _drop_buffers(infos: dict, chunk: int | None = None) -> None:
    for one in infos.values() if chunk is None else [infos[chunk]]:
        for info in one:
            info.buffer = None


def _join(outputs: list[Tensor], rows: Rows) -> Tensor:
    """What the last stage made of each microbatch, [R, length, 2] -> [M, T, 2] with zeros where padding was cut off."""
    return torch.cat([F.pad(output, (0, 0, 0, rows.shape[1] - output.shape[1])) for output in outputs])


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


class Pipeline:
    """This rank's stages under a schedule.

    Args:
        stage: the one stage of this rank, or its several ``Stages``.
        microbatch_size: packed rows R of a microbatch.

    ``last_rank`` is the rank of the last stage, where losses and log-probs appear: 0 where the stages form a V.
    """

    def __init__(self, stage: Stage | Stages, mesh: Mesh, *, schedule: str = "1F1B", microbatch_size: int = 1):
        self.stage, self.mesh = stage, mesh
        self.schedule, self.microbatch_size = schedule, microbatch_size
        self.ranks = rank_of_stages(schedule, mesh.stages, len(stage.parts))
        self.last_rank = self.ranks[-1]
        self.timeline: list[Chunk] = []  # of the latest train_step on this rank
        self.step_s = 0.0  # seconds from the common start of the latest train_step to its end on this rank
        self._runner: tuple | None = None

    @property
    def holds_last(self) -> bool:
        return self.mesh.stage == self.last_rank

    def rows_needed(self) -> int:
        """The fewest rows the schedule accepts: 1F1B wants at least as many microbatches as ranks."""
        return self.microbatch_size * microbatches_needed(self.schedule, self.mesh.stages)[0]

    def rows_multiple(self) -> int:
        """The number of rows must be a multiple of this."""
        return self.microbatch_size * microbatches_needed(self.schedule, self.mesh.stages)[1]

    def theoretical_bubble(self, microbatches: int) -> float:
        return theoretical_bubble(self.mesh.stages, microbatches, self.schedule, len(self.stage.parts))

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
            return loss_fn(output, dict(zip(COLUMNS, target[:, : output.shape[1]].unbind(-1))))

        schedule, chunks_run, lengths, holder = self._runner_for(rows)
        holder[0] = loss_of_chunk
        lengths[:] = rows.lengths(self.microbatch_size)
        chunks_run.clear()
        inputs = {"target": self._target(rows)} if self.holds_last else {}
        losses: list[Tensor] | None = [] if self.holds_last else None
        args = (rows.input_ids,) if self.mesh.is_first else ()
        self.mesh.barrier()  # all ranks' clocks start here: one that comes late is not the bubble of the others
        began = _now(self.mesh.device)
        schedule.step(*args, **inputs, losses=losses, return_outputs=False, **rows.inputs())
        self._note_timeline(chunks_run, began)
        holder[0] = None
        if not self.holds_last:
            return None
        return sum(loss.item() for loss in losses), _join(outputs, rows)

    @torch.no_grad()
    def score(self, rows: Rows) -> Tensor | None:
        """Log-prob and entropy [M, T, 2] of the completion tokens, on the last stage's rank; None elsewhere.

        Each of this rank's stages in turn takes all microbatches. Sends do not block, and no more than a few wait.
        """
        parts = rows.microbatches(self.microbatch_size)
        group, ranks, mine = self.mesh.pp_group, self.ranks, self.mesh.stage
        sending: deque = deque()

        def send(hidden: Tensor, to: int) -> None:
            sending.append((dist.isend(hidden, group=group, group_dst=to), hidden))

        outputs: list[Tensor] = []
        for stage in self.stage.parts:
            index, inputs, outputs = stage.spec.index, outputs, []
            here = index > 0 and ranks[index - 1] == mine  # the stage before stands here too
            goes_on = not stage.spec.is_last and ranks[index + 1] != mine
            # Back to an earlier rank, messages wait until all have come: two ranks share one channel under NCCL, and
            # answers between the messages that it still has to receive would block it.
            later = goes_on and ranks[index + 1] < mine and ranks[index - 1] < mine
            for m, part in enumerate(parts):
                if stage.spec.is_first:
                    x = part.input_ids
                elif here:
                    x, inputs[m] = inputs[m], None
                else:
                    x = torch.empty(*part.shape, stage.config.hidden_size, dtype=stage.dtype, device=self.mesh.device)
                    dist.recv(x, group=group, group_src=ranks[index - 1])
                y = stage(x, **part.inputs())
                if goes_on and not later:
                    send(y.contiguous(), ranks[index + 1])
                    while len(sending) > 2 * self.mesh.stages:
                        sending.popleft()[0].wait()
                else:
                    outputs.append(y)
            if later:
                for y in outputs:
                    send(y.contiguous(), ranks[index + 1])
        for work, _ in sending:
            work.wait()
        return _join(outputs, rows) if self.holds_last else None

    def timings(self) -> dict[str, float]:
        """Seconds this rank computed in the latest train_step, and seconds the step took."""
        return {"busy_s": sum(c.end - c.start for c in self.timeline), "step_s": self.step_s}

    def draw_timeline(self, folder: Path, step: int) -> Path | None:
        """The latest train_step as ``folder``/step-N.png and, for Perfetto, step-N.json; call on every rank.

        Returns:
            the picture's path on the first rank, None elsewhere.
        """
        lanes = self.mesh.gather((self.timeline, self.step_s))
        if not self.mesh.is_first:
            return None
        chunks, span = [lane for lane, _ in lanes], max(s for _, s in lanes)
        microbatches, row_length = self._runner[0][0] // self.microbatch_size, self._runner[0][1]
        theory = self.theoretical_bubble(microbatches)
        title = (
            f"step {step}: {self.schedule}, {len(self.ranks)} stages on {len(lanes)} ranks, {microbatches} microbatches of "
            f"{self.microbatch_size} x {row_length} tokens at most, {span:.3g} s, bubble {bubble(chunks, span):.1%} (theory {theory:.1%})"
        )
        trace(chunks, Path(folder) / f"step-{step:06}.json", title=title)
        return draw(chunks, Path(folder) / f"step-{step:06}.png", title=title, span=span)

    # -------------------------------------------------------------------------------------------- inside
    def _target(self, rows: Rows) -> Tensor:
        nothing = torch.zeros_like(rows.weight)
        columns = [getattr(rows, name) for name in COLUMNS]
        return torch.stack([(nothing if c is None else c).to(rows.weight.dtype) for c in columns], dim=-1)

    def _runner_for(self, rows: Rows):
        """A schedule over this rank's stages for the shape of ``rows``; only the latest is kept."""
        if self._runner is None or self._runner[0] != rows.shape:
            holder, chunks_run, lengths = [None], [], rows.lengths(self.microbatch_size)
            stages = [self._pipeline_stage(part, rows.shape[1], chunks_run, lengths) for part in self.stage.parts]
            schedule = make_schedule(
                self.schedule, stages, len(lengths), loss_fn=lambda output, target: holder[0](output, target)
            )
            self._runner = (rows.shape, (schedule, chunks_run, lengths, holder))
        return self._runner[1]

    def _pipeline_stage(self, stage: Stage, row_length: int, chunks_run: list[tuple], lengths: list[int]) -> _TimedStage:
        """A stage object with static shapes: meta tensors say what arrives and what leaves."""
        rows, spec = self.microbatch_size, stage.spec

        def real(width: int, dtype: torch.dtype) -> Tensor:
            return torch.empty(rows, row_length, width, dtype=dtype, device="meta", requires_grad=True)

        ids = torch.empty(rows, row_length, dtype=torch.long, device="meta")
        hidden = real(stage.config.hidden_size, stage.dtype)
        logprobs = real(2, torch.float64 if stage.dtype == torch.float64 else torch.float32)
        return _TimedStage(
            stage, spec.index, spec.count, self.mesh.device,
            input_args=(ids if spec.is_first else hidden,),
            output_args=(logprobs if spec.is_last else hidden,),
            group=self.mesh.pp_group, chunks_run=chunks_run, lengths=lengths,
        )

    def _note_timeline(self, chunks: list[tuple], began) -> None:
        end = _now(self.mesh.device)
        if self.mesh.device.type == "cuda":
            end.synchronize()
        self.timeline = [Chunk(kind, m, _seconds(began, a), _seconds(began, b), i) for kind, m, a, b, i in chunks]
        self.step_s = _seconds(began, end)
