"""The frozen reference policy of the KL term, in one of two places.

``rank0``: a full copy on the first stage's rank, which scores the rows and sends the log-probs to the last stage.
``pipeline``: each rank keeps its own stage's frozen weights and scores through the same schedule, so that no rank ever
needs the whole model. Both give the same numbers; with ``beta`` 0 there is no reference at all.
"""

from __future__ import annotations

import torch
from torch import Tensor

from parallel import Mesh, send_weights
from pipeline import Pipeline
from rollout import Rows
from stages import Stage


class Reference:
    """Args: ``copy`` is the frozen stage held here: the whole model on the first rank (``rank0``; None elsewhere) or this
    rank's own stage, under ``pipeline``."""

    def __init__(self, copy: Stage | None, mesh: Mesh, pipeline: Pipeline | None = None):
        self.copy, self.mesh, self.pipeline = copy, mesh, pipeline
        if copy is not None:
            copy.requires_grad_(False)

    @torch.no_grad()
    def score(self, rows: Rows) -> Tensor | None:
        """Log-probs [M, T] of the completion tokens under the reference, on the last stage; None elsewhere."""
        if self.pipeline is not None:
            scored = self.pipeline.score(rows)
            return None if scored is None else scored[..., 0]
        logprob = None
        if self.mesh.is_first:
            parts = [rows.select(slice(m, m + 1)) for m in range(rows.shape[0])]
            logprob = torch.cat([self.copy(part.input_ids, **part.inputs())[..., 0] for part in parts])
        if self.mesh.stages > 1:
            logprob = self.mesh.broadcast_tensor(logprob, rows.shape, rows.weight.dtype, source=0)
        return logprob.to(self.mesh.device) if self.mesh.is_last else None

    @torch.no_grad()
    def update(self, policy: Stage, mixup: float) -> None:
        """Move the reference towards the policy: reference = (1 - mixup) * reference + mixup * policy."""
        if self.pipeline is None:
            send_weights(policy, self.copy, self.mesh, mixup)
        else:
            for mine, new in zip(self.copy.parameters(), policy.parameters()):
                mine.lerp_(new, mixup)
