"""The frozen reference policy of the KL term, in one of two places.

``rank0``: a full copy on the first stage's rank, which scores the rows and sends the log-probs to the last stage.
``pipeline``: each rank keeps its own stage's frozen weights and scores through the same schedule, so that no rank ever
needs the whole model. Both give the same numbers; with ``beta`` 0 there is no reference at all.
"""

from __future__ import annotations

from contextlib import contextmanager

import torch
from torch import Tensor

from parallel import Mesh, send_weights
from pipeline import Pipeline
from rollout import Rows
from stages import Stage, Stages


class Reference:
    """Args: ``copy`` is the frozen stage held here: the whole model on the first rank (``rank0``; None elsewhere) or this
    rank's own stage or stages, under ``pipeline``; ``last_rank`` is the rank of the policy's last stage; with ``offload``
    the weights lie in CPU memory while they do not score."""

    def __init__(
        self, copy: Stage | Stages | None, mesh: Mesh, pipeline: Pipeline | None = None, *,
        last_rank: int | None = None, offload: bool = False,
    ):
        self.copy, self.mesh, self.pipeline = copy, mesh, pipeline
        self.last_rank = mesh.stages - 1 if last_rank is None else last_rank
        self.at_home: dict = {}  # parameter -> its place in CPU memory
        if copy is not None:
            copy.requires_grad_(False)
            if offload:
                self.at_home = {p: p.data.cpu().pin_memory() if p.is_cuda else p.data for p in copy.parameters()}
                for p, place in self.at_home.items():
                    p.data = place

    @contextmanager
    def _on_device(self, changes: bool = False):
        """The weights on the device for a while; ``changes`` are written back."""
        for p, place in self.at_home.items():
            p.data = place.to(self.mesh.device, non_blocking=True)
        yield
        for p, place in self.at_home.items():
            if changes:
                place.copy_(p.data)
            p.data = place

    @torch.no_grad()
    def score(self, rows: Rows) -> Tensor | None:
        """Log-probs [M, T] of the completion tokens under the reference, on the last stage; None elsewhere."""
        if self.pipeline is not None:
            with self._on_device():
                scored = self.pipeline.score(rows)
            return None if scored is None else scored[..., 0]
        logprob = None
        if self.mesh.is_first:
            logprob = torch.zeros(rows.shape, dtype=rows.weight.dtype, device=self.mesh.device)
            with self._on_device():
                for m, part in enumerate(rows.microbatches()):
                    logprob[m, : part.shape[1]] = self.copy(part.input_ids, **part.inputs())[0, :, 0]
        if self.last_rank != 0:
            logprob = self.mesh.broadcast_tensor(logprob, rows.shape, rows.weight.dtype, source=0)
        return logprob.to(self.mesh.device) if self.mesh.stage == self.last_rank else None

    @torch.no_grad()
    def update(self, policy: Stage | Stages, mixup: float) -> None:
        """Move the reference towards the policy: reference = (1 - mixup) * reference + mixup * policy."""
        with self._on_device(changes=True):
            if self.pipeline is None:
                send_weights(policy, self.copy, self.mesh, mixup)
            else:
                for mine, new in zip(self.copy.parameters(), policy.parameters()):
                    mine.lerp_(new, mixup)
