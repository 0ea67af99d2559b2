"""The policy on this rank: the stage that is trained, the sampler that draws from it, and its frozen reference.

Which of them lives where follows from the settings. ``--sampler rank0`` keeps a second, whole copy of the weights on the
first stage's rank, refreshed after every update; ``--sampler pipeline`` samples with the training stages themselves. With
one stage the sampler is the policy. The reference stands beside either, and only when ``beta`` asks for one.
"""

from __future__ import annotations

import math

import torch
from transformers import AutoTokenizer

from config import Settings
from engines import load_engine
from parallel import Mesh, check_tied_copies, checksum, clip_gradients, send_weights, sum_tied_gradient
from pipeline import Pipeline
from reference import Reference
from rollout import Completion
from sampler import Link, Sampler, stop_ids
from stages import Stage, StageSpec, attention_cost, load_config, load_weights, plan_stages


class Policy:
    """The plan is made and checked at once; ``load`` allocates and fills the stages.

    Args:
        model: folder or hub name of the starting weights, which all of the roles start from.

    Raises:
        ValueError: a model that cannot be cut into ``mesh.stages`` stages.
    """

    def __init__(self, settings: Settings, mesh: Mesh, model: str):
        self.settings, self.mesh, self.model = settings, mesh, model
        self.config = load_config(model)
        self.plan = plan_stages(self.config, mesh.stages, settings.split_sizes())
        self.attention_cost = attention_cost(self.config)
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.stop_ids = stop_ids(model, self.config, self.tokenizer)
        pad = self.tokenizer.pad_token_id
        self.pad_id = pad if pad is not None else min(self.stop_ids, default=0)
        self.landing: Stage | None = None  # a whole model on the first rank, where the stages' weights arrive
        self.reference: Reference | None = None
        self.updates = self.skipped = self.bad_in_a_row = 0

    def load(self) -> None:
        """Allocate and fill what this rank holds.

        Raises:
            ValueError: a checkpoint that lacks a tensor or holds another shape.
        """
        s, mesh, model = self.settings, self.mesh, self.model
        self.stage = load_weights(self.make_stage(self.plan[mesh.stage]), model)
        pipeline = dict(schedule=s.schedule, microbatch_size=s.microbatch_size)
        self.pipeline = Pipeline(self.stage, mesh, **pipeline)
        if s.beta > 0:
            whole = s.reference == "rank0"
            spec = plan_stages(self.config, 1)[0] if whole else self.plan[mesh.stage]
            frozen = load_weights(self.make_stage(spec), model) if mesh.is_first or not whole else None
            self.reference = Reference(frozen, mesh, None if whole else Pipeline(frozen, mesh, **pipeline))
        self.sampler = self.make_sampler()
        self.optimizer = torch.optim.AdamW(
            self.stage.parameters(), lr=s.learning_rate, betas=(s.adam_beta1, s.adam_beta2), weight_decay=s.weight_decay
        )
        check_tied_copies(self.stage, mesh)
        self.sync()

    def make_stage(self, spec: StageSpec, *, in_compute_dtype: bool = False) -> Stage:
        """An unfilled stage as the settings want it; ``in_compute_dtype`` for copies that are never trained."""
        s, device = self.settings, self.mesh.device
        dtype = getattr(torch, s.dtype)
        automatic = torch.bfloat16 if device.type == "cuda" and dtype == torch.float32 else dtype
        compute_dtype = automatic if s.compute_dtype == "auto" else getattr(torch, s.compute_dtype)
        return Stage(
            self.config, spec, device=device, dtype=compute_dtype if in_compute_dtype else dtype,
            compute_dtype=compute_dtype, temperature=s.temperature,
            activation_checkpointing=s.activation_checkpointing == "full",
        )

    def make_sampler(self):
        """The engine on this rank, or None where the first stage's rank samples alone."""
        s, mesh = self.settings, self.mesh
        common = dict(eos_ids=self.stop_ids, pad_id=self.pad_id, decode=self.tokenizer.decode)
        if mesh.stages == 1 and s.sampler in ("rank0", "pipeline"):
            return Sampler(self.stage, **common)  # the policy itself: nothing to copy
        if s.sampler == "pipeline":
            return Sampler(self.stage, link=Link(mesh.pp_group, mesh.device, mesh.control_group), **common)
        engine = Sampler if s.sampler == "rank0" else load_engine(s.sampler)
        if not mesh.is_first:
            return None
        self.landing = self.make_stage(plan_stages(self.config, 1)[0], in_compute_dtype=True).requires_grad_(False)
        if engine is Sampler:
            return Sampler(self.landing, **common)
        return engine(self.model, device=mesh.device, dtype=self.landing.dtype, **common)

    def generate(self, prompts: list[list[int]], **arguments) -> list[Completion]:
        """Completions on the first stage's rank; call on every stage with the same arguments."""
        return [] if self.sampler is None else self.sampler.generate(prompts, **arguments)

    def optimize(self, total_updates: int) -> dict[str, float]:
        """One update from the gradients of all stages; left out everywhere when they are not finite.

        Raises:
            FloatingPointError: ``max_bad_steps`` updates in a row were left out.
        """
        s = self.settings
        sum_tied_gradient(self.stage, self.mesh)
        norm, by_stage = clip_gradients(self.stage, self.mesh, s.max_grad_norm)
        rate = learning_rate(s, self.updates, total_updates)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.updates += 1
        if math.isfinite(norm):
            self.optimizer.step()
            self.bad_in_a_row = 0
        else:
            self.skipped += 1
            self.bad_in_a_row += 1
            if self.mesh.is_first:
                print(f"\nupdate {self.updates}: the gradient norm is {norm}; the update is skipped", flush=True)
        if self.bad_in_a_row >= s.max_bad_steps:
            raise FloatingPointError(
                f"{self.bad_in_a_row} updates in a row had a gradient that is not finite: lower --learning_rate"
            )
        values = {"train/grad_norm": norm, "train/learning_rate": rate, "train/skipped_updates": self.skipped}
        return values | {f"train/grad_norm_stage{i}": part for i, part in enumerate(by_stage)}

    def sync(self) -> dict[str, float]:
        """The new weights reach the sampler; version and checksum say which ones it holds.

        Raises:
            RuntimeError: the weights that arrived are not those that were sent.
        """
        mesh = self.mesh
        if self.settings.sampler == "pipeline" or (mesh.stages == 1 and self.settings.sampler == "rank0"):
            self.sampler.version = self.updates
            return {"sampler/weight_version": self.updates}
        send_weights(self.stage, self.landing, mesh)
        sent = sum(mesh.gather(checksum(self.stage))) % 2**63
        if not mesh.is_first:
            return {}
        arrived = checksum(self.landing)
        if self.landing.dtype == self.stage.dtype and arrived != sent:
            raise RuntimeError(f"the sampler's weights have checksum {arrived:x}, the stages' {sent:x}")
        if isinstance(self.sampler, Sampler):
            self.sampler.version = self.updates
        else:
            self.sampler.update_weights(self.landing.export_tensors(), self.updates)
        return {"sampler/weight_version": self.updates, "sampler/weight_checksum": arrived % 2**31}


def learning_rate(settings: Settings, step: int, steps: int) -> float:
    """The rate of update ``step`` (from 0) of ``steps``: linear warm-up, then constant, linear or cosine to 0."""
    if step < settings.warmup_steps:
        return settings.learning_rate * (step + 1) / settings.warmup_steps
    done = (step - settings.warmup_steps) / max(1, steps - settings.warmup_steps)
    shape = {"constant": 1.0, "linear": 1 - done, "cosine": 0.5 * (1 + math.cos(math.pi * done))}
    return settings.learning_rate * shape[settings.lr_schedule]
