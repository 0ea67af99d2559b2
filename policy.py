"""The policy on this rank: the stage that is trained, the sampler that draws from it, and its frozen reference.

Which of them lives where follows from the settings. ``--sampler rank0`` keeps a second, whole copy of the weights on the
first stage's rank, refreshed after every update; ``--sampler replicas`` keeps one on every rank, each of which answers its
share of the questions; ``--sampler pipeline`` samples with the training stages themselves. With one stage the sampler is
the policy. The reference stands beside any of them, and only when ``beta`` asks for one.
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
from rollout import Completion, round_up_to_bucket
from sampler import Link, Sampler, stop_ids
from plan import Workload, describe
from schedules import microbatches_run, rank_of_stages, stages_per_rank
from split import StageSpec, attention_cost, plan_stages
from stages import Stage, Stages, load_config, load_weights


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
        per_rank = stages_per_rank(settings.schedule, settings.stages_per_rank)
        self.ranks = rank_of_stages(settings.schedule, mesh.stages, per_rank)
        self.recomputes = settings.activation_checkpointing == "full"
        self.balance(prompt_tokens=0)
        self.attention_cost = attention_cost(self.config)
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.stop_ids = stop_ids(model, self.config, self.tokenizer)
        pad = self.tokenizer.pad_token_id
        self.pad_id = pad if pad is not None else min(self.stop_ids, default=0)
        self.landing: Stage | None = None  # a whole model, where the stages' weights arrive
        self.samples_itself = settings.sampler == "pipeline" or (
            len(self.plan) == 1 and settings.sampler in ("rank0", "replicas")
        )
        self.reference: Reference | None = None
        self.updates = self.skipped = self.bad_in_a_row = 0

    def balance(self, prompt_tokens: float) -> None:
        """Plan the stages for prompts of so many tokens and completions of half their limit; before ``load``."""
        s = self.settings
        completions = s.group_size * s.max_completion_tokens / 2
        prompts = prompt_tokens * (1 if s.share_prompts else s.group_size)
        self.plan = plan_stages(
            self.config, len(self.ranks), s.split_sizes(), activation_checkpointing=self.recomputes,
            head_share=completions / (prompts + completions),
        )

    def load(self) -> None:
        """Allocate and fill what this rank holds.

        Raises:
            ValueError: a checkpoint that lacks a tensor or holds another shape.
        """
        s, mesh, model = self.settings, self.mesh, self.model
        self.stage = load_weights(self.make_held(), model)
        pipeline = dict(schedule=s.schedule, microbatch_size=s.microbatch_size)
        self.pipeline = Pipeline(self.stage, mesh, **pipeline)
        if s.beta > 0:
            whole = s.reference == "rank0"
            frozen = None
            if mesh.is_first or not whole:
                frozen = load_weights(self.make_stage(plan_stages(self.config, 1)[0]) if whole else self.make_held(), model)
            scoring = None if whole else Pipeline(frozen, mesh, **pipeline)
            self.reference = Reference(
                frozen, mesh, scoring, last_rank=self.pipeline.last_rank, offload=s.offload_reference
            )
        self.sampler = self.make_sampler()
        optimizer = OffloadedAdamW if s.offload_optimizer else torch.optim.AdamW
        self.optimizer = optimizer(
            self.stage.parameters(), lr=s.learning_rate, betas=(s.adam_beta1, s.adam_beta2), weight_decay=s.weight_decay
        )
        check_tied_copies(self.stage, mesh)
        self.sync()

    def load_for_sampling(self) -> None:
        """Only what answers questions, in the compute dtype: no gradients, no optimizer, no second copy.

        Raises:
            ValueError: as ``load``.
        """
        self.stage = load_weights(self.make_held(in_compute_dtype=True), self.model).requires_grad_(False)
        self.sampler = self.make_sampler()
        self.sync()

    def describe_plan(self, longest: int) -> str:
        """Split, memory and bubbles as expected, for rows that hold one sequence of ``longest`` tokens.

        The rows of a rollout are chosen later and may be longer; four microbatches a rank are assumed.
        """
        s, mesh = self.settings, self.mesh
        questions = s.chunk_size or s.batch_size  # that are answered at once
        if s.sampler == "replicas":
            questions = math.ceil(questions / mesh.stages)
        work = Workload(
            ranks=mesh.stages, schedule=s.schedule, per_rank=len(self.ranks) // mesh.stages,
            microbatches=microbatches_run(s.schedule, mesh.stages, 4 * mesh.stages), microbatch_size=s.microbatch_size,
            row_length=s.row_length or round_up_to_bucket(longest), dtype=self.stage.dtype,
            compute_dtype=self.stage.compute_dtype, activation_checkpointing=self.recomputes,
            offload_optimizer=s.offload_optimizer and mesh.device.type == "cuda", sampler=s.sampler,
            sequences=min(s.max_sequences_in_flight or 10**9, questions * s.group_size),
            sequence_length=longest, reference=s.reference if s.beta > 0 else "",
            offload_reference=s.offload_reference and mesh.device.type == "cuda",
        )
        gpu = torch.cuda.get_device_properties(mesh.device).total_memory / 2**30 if mesh.device.type == "cuda" else 0.0
        return describe(self.config, self.plan, work, round(gpu, 1))

    def make_held(self, **more) -> Stage | Stages:
        """The unfilled stages of this rank; ``more`` as of ``make_stage``."""
        parts = [self.make_stage(spec, **more) for spec, rank in zip(self.plan, self.ranks) if rank == self.mesh.stage]
        return parts[0] if len(parts) == 1 else Stages(parts)

    def make_stage(self, spec: StageSpec, *, in_compute_dtype: bool = False) -> Stage:
        """An unfilled stage as the settings want it; ``in_compute_dtype`` for copies that are never trained."""
        s, device = self.settings, self.mesh.device
        dtype = getattr(torch, s.dtype)
        automatic = torch.bfloat16 if device.type == "cuda" and dtype == torch.float32 else dtype
        compute_dtype = automatic if s.compute_dtype == "auto" else getattr(torch, s.compute_dtype)
        return Stage(
            self.config, spec, device=device, dtype=compute_dtype if in_compute_dtype else dtype,
            compute_dtype=compute_dtype, temperature=s.temperature,
            activation_checkpointing=self.recomputes,
        )

    def make_sampler(self):
        """The engine on this rank, or None where the first stage's rank samples alone."""
        s, mesh = self.settings, self.mesh
        common = dict(eos_ids=self.stop_ids, pad_id=self.pad_id, decode=self.tokenizer.decode)
        if self.samples_itself:  # nothing to copy
            link = Link(mesh.pp_group, mesh.device, mesh.control_group) if mesh.stages > 1 else None
            return Sampler(self.stage, link=link, **common)
        engine = Sampler if s.sampler in ("rank0", "replicas") else load_engine(s.sampler)
        if not mesh.is_first and s.sampler != "replicas":
            return None
        self.landing = self.make_stage(plan_stages(self.config, 1)[0], in_compute_dtype=True).requires_grad_(False)
        if engine is Sampler:
            return Sampler(self.landing, **common)
        return engine(self.model, device=mesh.device, dtype=self.landing.dtype, **common)

    def generate(self, prompts: list[list[int]], *, first_question: int = 0, **arguments) -> list[Completion]:
        """Completions on the first stage's rank; call on every stage with the same arguments, which are ``Sampler.generate``'s.

        Replicas take consecutive questions each. Every sequence has random numbers of its own, so who draws it changes
        nothing.
        """
        if self.samples_itself or self.settings.sampler != "replicas":
            return [] if self.sampler is None else self.sampler.generate(prompts, first_question=first_question, **arguments)
        first, end = (len(prompts) * place // self.mesh.stages for place in (self.mesh.stage, self.mesh.stage + 1))
        drawn = self.sampler.generate(prompts[first:end], first_question=first_question + first, **arguments)
        return [c for share in self.mesh.gather(drawn) for c in share]

    def optimize(self, total_updates: int, loss: float | None = None) -> dict[str, float]:
        """One update from the gradients of all stages; left out everywhere when they or the loss are not finite.

        Args:
            loss: on the rank of the last stage.

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
        losses = [found for found in self.mesh.gather(loss) if found is not None]
        if math.isfinite(norm) and all(map(math.isfinite, losses)):
            self.optimizer.step()
            self.bad_in_a_row = 0
        else:
            self.skipped += 1
            self.bad_in_a_row += 1
            if self.mesh.is_first:
                loss_too = "".join(f" and the loss {found}" for found in losses if not math.isfinite(found))
                print(f"\nupdate {self.updates}: the gradient norm is {norm}{loss_too}; the update is skipped", flush=True)
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
        if self.samples_itself:
            self.sampler.version = self.updates
            return {"sampler/weight_version": self.updates}
        send_weights(self.stage, self.landing, mesh, to_all=self.settings.sampler == "replicas")
        sent = sum(mesh.gather(checksum(self.stage))) % 2**63
        if self.landing is None:
            return {}
        arrived = checksum(self.landing)
        if self.landing.dtype == self.stage.dtype and arrived != sent:
            raise RuntimeError(f"the sampler's weights have checksum {arrived:x}, the stages' {sent:x}")
        if isinstance(self.sampler, Sampler):
            self.sampler.version = self.updates
        else:
            self.sampler.update_weights(self.landing.export_tensors(), self.updates)
        return {"sampler/weight_version": self.updates, "sampler/weight_checksum": arrived % 2**31}


class OffloadedAdamW(torch.optim.AdamW):
    """AdamW whose state lies in CPU memory between updates and visits the device one parameter at a time.

    The arithmetic is the same, on the same device; an update moves 16 bytes a parameter over the bus.
    """

    @torch.no_grad()
    def step(self, closure=None):
        groups = self.param_groups
        for group in groups:
            for p in group["params"]:
                self.param_groups = [group | {"params": [p]}]
                self._move_state(p, p.device)
                super().step()
                self._move_state(p, torch.device("cpu"))
        self.param_groups = groups

    def _move_state(self, parameter, device: torch.device) -> None:
        state = self.state.get(parameter, {})
        for name, value in state.items():
            if name != "step":  # a number, which AdamW keeps on the CPU
                state[name] = value.to(device)


def learning_rate(settings: Settings, step: int, steps: int) -> float:
    """The rate of update ``step`` (from 0) of ``steps``: linear warm-up, then constant, linear or cosine to 0."""
    if step < settings.warmup_steps:
        return settings.learning_rate * (step + 1) / settings.warmup_steps
    done = (step - settings.warmup_steps) / max(1, steps - settings.warmup_steps)
    shape = {"constant": 1.0, "linear": 1 - done, "cosine": 0.5 * (1 + math.cos(math.pi * done))}
    return settings.learning_rate * shape[settings.lr_schedule]
