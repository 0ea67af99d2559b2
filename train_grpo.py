"""Trains a language model with GRPO (DeepSeek-R1-Zero style), cut into one pipeline stage per process.

    python train_grpo.py --config launch/configs/quickstart.yaml                                    # one process
    torchrun --standalone --nproc_per_node=2 train_grpo.py --config launch/configs/quickstart.yaml  # two stages

One step, in the order of ``Trainer.step``:

1. sample      G completions of each question, from the policy itself                             sampler.py
2. verify      a rule gives each completion a reward; no reward model                             rewards.py
3. advantages  how much better each completion is than its group                                  grpo_loss.py
4. pack        completions into rows of one length, a group's prompt once                         rollout.py
5. score       log-probs of the old policy and of the reference, where the loss needs them        pipeline.py, reference.py
6. update      forward and backward of all rows through the stages, clip, AdamW                   pipeline.py, parallel.py
7. sync        the new weights reach the sampler                                                  parallel.py

What differs from the DeepSeek-R1 paper: no reward model, no supervised stage, one policy update per rollout by default
(the ratio is then exactly 1), token-mean loss, no KL unless ``--beta`` asks for one.
"""

from __future__ import annotations

import dataclasses
import math
import os
import random
import sys
from pathlib import Path

import torch

import metrics as m
from checkpoint import export_model
from config import Settings, SettingsError, parse_settings
from evaluate import evaluate
from grpo_loss import LossSettings, group_advantages, policy_loss, policy_metrics, token_weights
from parallel import Mesh, checksum, clip_gradients, fail_together, open_mesh, send_weights, sum_tied_gradient
from pipeline import Pipeline, theoretical_bubble
from reference import Reference
from rewards import grade, read_golds
from rollout import Completion, Rows, choose_row_length, decode, pack
from sampler import Link, Sampler, Sampling, load_engine, stop_ids
from stages import Stage, describe_plan, load_config, load_weights, plan_stages
from tasks import Question, hold_out, load_questions, render_prompts
from tiny_model import make_tiny_model

SAME = {torch.float64: 1e-8, torch.float32: 1e-4}  # how close sampler and trainer must be at step 1, by dtype


# ------------------------------------------------------------------------------------------------ questions
def prepare_questions(settings: Settings, tokenizer) -> tuple[list[Question], list[Question]]:
    """Training and held-out questions, rendered, with their golds read; every refusal names the row."""
    read = dict(columns=settings.column_names(), verify_type=settings.verify_type or None)
    questions = load_questions(settings.data, **read)
    if settings.validation_data:
        held_out = load_questions(settings.validation_data, **read)
    else:
        questions, held_out = hold_out(questions, settings.validation_share, settings.seed)
    read_golds(questions)
    read_golds(held_out)
    render = dict(
        system_prompt=settings.system_prompt or None, prompt_template=settings.prompt_template or None,
        max_prompt_tokens=settings.max_prompt_tokens, too_long=settings.long_prompts,
    )
    questions, dropped = render_prompts(questions, tokenizer, **render)
    held_out, dropped_held_out = render_prompts(held_out, tokenizer, **render)
    if dropped or dropped_held_out:
        print(f"dropped {dropped + dropped_held_out} prompts longer than {settings.max_prompt_tokens} tokens")
    if len(questions) < settings.batch_size:
        raise ValueError(
            f"the data holds {len(questions)} questions but --batch_size is {settings.batch_size}: "
            "lower it or bring more questions"
        )
    return questions, held_out[: settings.eval_questions or None]


def batches(count: int, batch_size: int, epoch: int, seed: int) -> list[list[int]]:
    """The order of one epoch: question numbers, shuffled by seed and epoch, the last batch as long as what is left."""
    order = list(range(count))
    random.Random(f"{seed} epoch {epoch}").shuffle(order)
    return [order[i : i + batch_size] for i in range(0, count, batch_size)]


def learning_rate(settings: Settings, step: int, steps: int) -> float:
    """The rate of update ``step`` (from 0) of ``steps``: linear warm-up, then constant, linear or cosine to 0."""
    if step < settings.warmup_steps:
        return settings.learning_rate * (step + 1) / settings.warmup_steps
    done = (step - settings.warmup_steps) / max(1, steps - settings.warmup_steps)
    shape = {"constant": 1.0, "linear": 1 - done, "cosine": 0.5 * (1 + math.cos(math.pi * done))}
    return settings.learning_rate * shape[settings.lr_schedule]


# ------------------------------------------------------------------------------------------------ the trainer
class Trainer:
    """The policy's stage on this rank, and all that trains it."""

    def __init__(self, settings: Settings, mesh: Mesh, model: str, tokenizer):
        self.settings, self.mesh, self.model, self.tokenizer = settings, mesh, model, tokenizer
        s, self.config = settings, load_config(model)
        self.plan = plan_stages(self.config, mesh.stages, s.split_sizes())
        self.stop_ids = stop_ids(model, self.config, tokenizer)
        pad = tokenizer.pad_token_id
        self.pad_id = pad if pad is not None else min(self.stop_ids, default=0)

        self.stage = load_weights(self.make_stage(self.plan[mesh.stage]), model)
        pipeline = dict(schedule=s.schedule, microbatch_size=s.microbatch_size)
        self.pipeline = Pipeline(self.stage, mesh, **pipeline)
        self.reference = None
        if s.beta > 0:
            whole = s.reference == "rank0"
            spec = plan_stages(self.config, 1)[0] if whole else self.plan[mesh.stage]
            frozen = load_weights(self.make_stage(spec), model) if mesh.is_first or not whole else None
            self.reference = Reference(frozen, mesh, None if whole else Pipeline(frozen, mesh, **pipeline))
        self.sampler = self.make_sampler()
        self.loss_settings = LossSettings(
            loss=s.loss, epsilon=s.epsilon, epsilon_high=s.epsilon_high, beta=s.beta, delta=s.dual_clip or None,
            sampler_correction=s.sampler_correction, correction_cap=s.correction_cap,
        )
        self.sampling = Sampling(
            temperature=s.temperature, max_new_tokens=s.max_completion_tokens,
            max_sequences_in_flight=s.max_sequences_in_flight or max(s.batch_size * s.group_size, 256),
        )
        self.optimizer = torch.optim.AdamW(
            self.stage.parameters(), lr=s.learning_rate, betas=(s.adam_beta1, s.adam_beta2), weight_decay=s.weight_decay
        )
        self.updates = self.skipped = self.bad_in_a_row = 0

    def make_stage(self, spec) -> Stage:
        s, device = self.settings, self.mesh.device
        dtype = getattr(torch, s.dtype)
        automatic = torch.bfloat16 if device.type == "cuda" and dtype == torch.float32 else dtype
        return Stage(
            self.config, spec, device=device, dtype=dtype, temperature=s.temperature,
            compute_dtype=automatic if s.compute_dtype == "auto" else getattr(torch, s.compute_dtype),
            activation_checkpointing=s.activation_checkpointing == "full",
        )

    def make_sampler(self):
        """The engine on this rank, or None where the first stage's rank samples alone."""
        s, mesh = self.settings, self.mesh
        common = dict(eos_ids=self.stop_ids, pad_id=self.pad_id, decode=self.tokenizer.decode)
        self.landing = None  # a whole model on the first rank, where the stages' weights arrive
        if mesh.stages == 1 and s.sampler in ("rank0", "pipeline"):
            return Sampler(self.stage, **common)  # the policy itself: nothing to copy
        if s.sampler == "pipeline":
            return Sampler(self.stage, link=Link(mesh.pp_group, mesh.device), **common)
        if mesh.is_first:
            self.landing = self.make_stage(plan_stages(self.config, 1)[0])
            self.landing.requires_grad_(False)
        if s.sampler != "rank0":
            engine = load_engine(s.sampler)
            sampler = None
            if mesh.is_first:
                sampler = engine(self.model, device=mesh.device, dtype=self.stage.compute_dtype, **common)
        else:
            sampler = Sampler(self.landing, **common) if mesh.is_first else None
        return sampler

    def generate(self, prompts: list[list[int]], **arguments) -> list[Completion]:
        """Completions on the first stage's rank; call on every stage with the same arguments."""
        return [] if self.sampler is None else self.sampler.generate(prompts, **arguments)

    # -------------------------------------------------------------------------------------------- one step
    def step(self, number: int, questions: list[Question], total_updates: int) -> dict[str, float]:
        """One rollout and its updates; ``questions`` are those of the rollout, on the first stage.

        Returns:
            on the first stage all metrics of the step; elsewhere nothing of use.
        """
        clock = m.Clock()
        with clock.phase("sample"):
            completions = self.sample(number, questions)
        with clock.phase("verify"):
            values = self.verify(completions, questions)
        with clock.phase("pack"):
            rows = self.pack(completions)
        with clock.phase("score"):
            self.score(rows)
        values |= self.update(number, rows, total_updates, clock)
        with clock.phase("sync"):
            values |= self.sync()
        times = clock.metrics()
        tokens = values.get("completion/tokens", 0)
        values |= times | {"throughput/tokens_per_s": tokens / times["time/step"]}
        return values

    def sample(self, number: int, questions: list[Question]) -> list[Completion]:
        s = self.settings
        prompts = self.mesh.broadcast([q.prompt_ids for q in questions])
        chunk = s.chunk_size or len(prompts)
        completions = []
        for first in range(0, len(prompts), chunk):
            completions += self.generate(
                prompts[first : first + chunk], group_size=s.group_size, sampling=self.sampling, stream=(s.seed, number),
                first_question=first,
            )
        decode(completions, self.tokenizer, self.stop_ids)
        return completions

    def verify(self, completions: list[Completion], questions: list[Question]) -> dict[str, float]:
        """Rewards, advantages and loss weights of the completions, on the first stage; its metrics."""
        if not self.mesh.is_first:
            return {}
        s = self.settings
        rewards = grade([(c.text, questions[c.question]) for c in completions])
        groups = [c.question for c in completions]
        in_loss = [r is not None and (c.finished or not s.mask_truncated) for c, r in zip(completions, rewards)]
        lengths = [len(c.ids) if keep else 0 for c, keep in zip(completions, in_loss)]
        advantages = group_advantages(rewards, groups, s.advantage_norm)
        weights = token_weights(lengths, s.loss, max_completion_tokens=s.max_completion_tokens)
        for c, reward, advantage, weight in zip(completions, rewards, advantages, weights):
            c.reward, c.advantage, c.weight = reward, advantage, weight
        return rollout_metrics(completions)

    def pack(self, completions: list[Completion]) -> Rows:
        """The rollout's rows, packed on the first stage and sent to all."""
        s, rows = self.settings, None
        if self.mesh.is_first:
            length = s.row_length or choose_row_length(completions, self.mesh.stages, s.share_prompts, s.microbatch_size)
            rows = pack(
                completions, length, share_prompts=s.share_prompts, pad_id=self.pad_id, rows_multiple=s.microbatch_size,
                rows_at_least=self.pipeline.rows_needed(),
                dtype=torch.float64 if self.stage.dtype == torch.float64 else torch.float32,
            )
        return self.mesh.broadcast(rows).to(self.mesh.device)

    def score(self, rows: Rows) -> None:
        """Log-probs of the old policy (only when several updates follow) and of the reference, on the last stage."""
        if self.settings.grpo_iterations > 1:
            scored = self.pipeline.score(rows)
            rows.old_logprob = None if scored is None else scored[..., 0]
        if self.reference is not None:
            rows.ref_logprob = self.reference.score(rows)

    def update(self, number: int, rows: Rows, total_updates: int, clock: m.Clock) -> dict[str, float]:
        """``grpo_iterations`` updates from the same rows; metrics of the last one."""
        s, mesh, values = self.settings, self.mesh, {}
        once = s.grpo_iterations == 1

        def loss_fn(output, c):
            return policy_loss(
                output[..., 0], c["advantage"], c["weight"], None if once else c["old_logprob"], c["ref_logprob"],
                c["sampler_logprob"], c["sequence"].long(), self.loss_settings,
            )

        for iteration in range(s.grpo_iterations):
            rate = learning_rate(s, self.updates, total_updates)
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.zero_grad(set_to_none=False)
            with clock.phase("train"):
                result = self.pipeline.train_step(rows, loss_fn)
            with clock.phase("optimizer"):
                sum_tied_gradient(self.stage, mesh)
                norm, by_stage = clip_gradients(self.stage, mesh, s.max_grad_norm)
                self.apply(number, norm)
            report = self.last_stage_report(rows, result) if mesh.is_last else None
            report = mesh.broadcast(report, mesh.stages - 1)
            if number == 1 and iteration == 0:
                self.check_first_update(report)
            values = report | {"train/grad_norm": norm, "train/learning_rate": rate, "train/skipped_updates": self.skipped}
            values |= {f"train/grad_norm_stage{i}": part for i, part in enumerate(by_stage)}
        return values | self.pipeline_metrics(rows)

    def apply(self, number: int, norm: float) -> None:
        """The optimizer's step, left out on all stages when the gradient is not finite: weights must stay finite."""
        self.updates += 1
        if math.isfinite(norm):
            self.optimizer.step()
            self.bad_in_a_row = 0
            return
        self.skipped += 1
        self.bad_in_a_row += 1
        if self.mesh.is_first:
            print(f"\nstep {number}: the gradient norm is {norm}; this update is skipped", flush=True)
        if self.bad_in_a_row >= self.settings.max_bad_steps:
            raise FloatingPointError(
                f"{self.bad_in_a_row} updates in a row had a gradient that is not finite: lower --learning_rate"
            )

    def last_stage_report(self, rows: Rows, result) -> dict[str, float]:
        loss, output = result
        old = rows.old_logprob if rows.old_logprob is not None else output[..., 0]
        found = policy_metrics(
            output[..., 0], rows.advantage, rows.weight, old, rows.ref_logprob, rows.sampler_logprob, rows.sequence,
            self.loss_settings, entropy=output[..., 1],
        )
        names = {"sampler_diff_mean": "sampler/logprob_diff_mean", "sampler_diff_max": "sampler/logprob_diff_max",
                 "sampler_ratio_mean": "sampler/ratio_mean"}
        return {names.get(k, f"train/{k}"): v for k, v in found.items()} | {"train/loss": loss}

    def check_first_update(self, report: dict[str, float]) -> None:
        """What must hold before the first update; when it does not, training would go on wrong without a word.

        Raises:
            RuntimeError: names the quantity and its value.
        """
        if not report["train/tokens"]:
            return
        exact = [("train/ratio_mean", 1.0), ("train/clip_low", 0.0), ("train/clip_high", 0.0)]
        if self.reference is not None:
            exact.append(("train/kl", 0.0))
        close = SAME.get(self.stage.compute_dtype, 0.05)
        for name, wanted in exact:
            # several updates score the old policy in a pass of its own, which in bf16 may round differently
            if abs(report[name] - wanted) > (close if name == "train/kl" or self.settings.grpo_iterations > 1 else 0):
                raise RuntimeError(f"at the first update {name} must be {wanted} but is {report[name]}")
        mismatch = report.get("sampler/logprob_diff_max", 0.0)
        if self.stage.compute_dtype in SAME and mismatch > close:
            raise RuntimeError(
                f"at the first update sampler and trainer differ by {mismatch:.2e} in a log-prob (at most {close:.0e}): "
                "they do not hold the same weights or the same tokens"
            )

    def pipeline_metrics(self, rows: Rows) -> dict[str, float]:
        """The bubble of the latest train step, measured over all stages, beside the theoretical one."""
        microbatches = rows.shape[0] // self.settings.microbatch_size
        timings = self.mesh.gather(self.pipeline.timings())
        longest = max(t["step_s"] for t in timings)
        values = {
            "pipeline/bubble_theory": theoretical_bubble(self.mesh.stages, microbatches),
            "pipeline/bubble_measured": 1 - sum(t["busy_s"] for t in timings) / (longest * len(timings)),
            "pipeline/microbatches": microbatches, "pipeline/row_length": rows.shape[1],
            "pipeline/padding_share": rows.padding_share(), "pipeline/prompt_tokens_shared": rows.prompt_tokens_shared,
        }
        return values | {f"pipeline/busy_stage{i}": t["busy_s"] / longest for i, t in enumerate(timings)}

    @torch.no_grad()
    def sync(self) -> dict[str, float]:
        """The new weights reach the sampler; version and checksum say which ones it holds."""
        mesh = self.mesh
        if self.settings.sampler == "pipeline" or mesh.stages == 1 and self.landing is None:
            if self.sampler is not None:
                self.sampler.version = self.updates
            return {"sampler/weight_version": self.updates}
        send_weights(self.stage, self.landing, mesh)
        sums = mesh.gather(checksum(self.stage))
        if not mesh.is_first:
            return {}
        arrived = checksum(self.landing)
        if arrived != sum(sums) % 2**63:
            raise RuntimeError(f"the sampler's weights have checksum {arrived:x}, the stages' {sum(sums) % 2**63:x}")
        if self.landing is getattr(self.sampler, "stage", None):
            self.sampler.version = self.updates
        else:
            self.sampler.update_weights(self.landing.export_tensors(), self.updates)
        return {"sampler/weight_version": self.sampler.version, "sampler/weight_checksum": arrived % 2**31}

    def validate(self, held_out: list[Question]) -> tuple[dict[str, float], list[Completion]]:
        return evaluate(self, held_out, self.sampling, self.mesh, self.tokenizer, self.stop_ids, seed=self.settings.seed)


def rollout_metrics(completions: list[Completion]) -> dict[str, float]:
    """Rewards and lengths of a rollout; the reward is the raw one, before any normalisation."""
    rewards = [c.reward for c in completions if c.reward is not None]
    groups: dict[int, list[float]] = {}
    for c in completions:
        if c.reward is not None:
            groups.setdefault(c.question, []).append(c.reward)
    lengths = [len(c.ids) for c in completions]
    advantages = [c.advantage for c in completions]
    count = max(1, len(groups))
    return {
        "reward/mean": sum(rewards) / max(1, len(rewards)),
        "reward/unscorable": len(completions) - len(rewards),
        "reward/groups_all_right": sum(min(g) == 1 for g in groups.values()) / count,
        "reward/groups_all_wrong": sum(max(g) == 0 for g in groups.values()) / count,
        "reward/groups_without_signal": sum(min(g) == max(g) for g in groups.values()) / count,
        "advantage/mean": sum(advantages) / len(advantages),
        "advantage/max": max(advantages), "advantage/min": min(advantages),
        "completion/length_mean": sum(lengths) / len(lengths), "completion/length_max": max(lengths),
        "completion/truncated_share": sum(not c.finished for c in completions) / len(completions),
        "completion/tokens": sum(lengths),
    }


# ------------------------------------------------------------------------------------------------ the run
def train(settings: Settings, mesh: Mesh) -> None:
    from transformers import AutoTokenizer

    model = settings.model
    if model == "tiny":
        built = make_tiny_model(Path(settings.project_dir).parent / f"tiny-model-{settings.seed}", settings.seed) if mesh.is_first else None
        model = str(mesh.broadcast(built))
    tokenizer = AutoTokenizer.from_pretrained(model)
    questions, held_out = prepare_questions(settings, tokenizer) if mesh.is_first else ([], [])
    trainer = Trainer(settings, mesh, model, tokenizer)
    per_epoch = mesh.broadcast(math.ceil(len(questions) / settings.batch_size))
    steps = settings.epochs * per_epoch
    steps = min(steps, settings.max_steps) if settings.max_steps else steps
    validating = mesh.broadcast(bool(held_out))
    trainer.sync()
    if settings.reference_update_fraction:
        refresh_every = max(1, round(settings.reference_update_fraction * per_epoch))

    folder, tracker, progress = Path(settings.project_dir), None, None
    if mesh.is_first:
        print_start(trainer, questions, held_out, steps)
        tracker = m.Tracker(folder, use_wandb=settings.tracker == "wandb", name=settings.run_name, settings=dataclasses.asdict(settings))
        progress = m.Progress(steps)
    accuracy: dict[int, float] = {}

    def validate(step: int) -> None:
        if not validating:
            return
        values, samples = trainer.validate(held_out)
        if mesh.is_first:
            accuracy[step] = values["validation/accuracy"]
            tracker.log(step, values)
            progress.say(f"step {step:>4}  validation accuracy {accuracy[step]:.1%} on {len(held_out)} held-out questions")
            for c in samples[: settings.show_samples]:
                progress.say(f"  {held_out[c.question].question!r} -> {c.text!r}  reward {c.reward}")

    validate(0)
    for step in range(1, steps + 1):
        epoch, place = divmod(step - 1, per_epoch)
        chosen = batches(len(questions), settings.batch_size, epoch, settings.seed)[place] if mesh.is_first else []
        values = trainer.step(step, [questions[i] for i in chosen], steps * settings.grpo_iterations)
        if settings.reference_update_fraction and step % refresh_every == 0:
            trainer.reference.update(trainer.stage, settings.reference_mixup)
        if mesh.is_first:
            tracker.log(step, values)
            progress.show(step, values["reward/mean"], values["throughput/tokens_per_s"])
        if settings.eval_every and step % settings.eval_every == 0 and step < steps:
            validate(step)
    validate(steps)
    exported = export_model(trainer.stage, mesh, model, folder / "final") if settings.export else None
    if mesh.is_first:
        wandb_folder = tracker.wandb_folder()
        tracker.close()
        print_end(folder, exported, wandb_folder, accuracy)


def print_start(trainer: Trainer, questions: list[Question], held_out: list[Question], steps: int) -> None:
    s = trainer.settings
    print(f"{s.model}: {trainer.config.model_type}, {trainer.config.num_hidden_layers} layers, {trainer.mesh.stages} stage(s) on {trainer.mesh.device.type}")
    print(describe_plan(trainer.plan, trainer.config))
    print(f"{len(questions)} questions, {len(held_out)} held out, {steps} steps of {s.batch_size} x {s.group_size} completions")
    if not getattr(trainer.tokenizer, "chat_template", None):
        print("the tokenizer has no chat template: a prompt is the question followed by a newline")
    print(f"first prompt: {questions[0].prompt_text!r}", flush=True)


def print_end(folder: Path, exported: Path | None, wandb_folder: Path | None, accuracy: dict[int, float]) -> None:
    print()
    if accuracy:
        first, last = min(accuracy), max(accuracy)
        print(f"held-out accuracy before {accuracy[first]:.1%}, after {accuracy[last]:.1%}")
    if exported:
        print(f"model    {exported}  (a Hugging Face folder)")
    print(f"metrics  {folder / 'metrics.jsonl'}")
    if wandb_folder:
        print(f"W&B run  {wandb_folder}")
        print(f"         look at it in the terminal: wandb leet {wandb_folder}")
        print(f"         send it to the W&B UI:      wandb sync {wandb_folder}")


def main(argv: list[str] | None = None) -> None:
    first = os.environ.get("RANK", "0") == "0"
    try:
        settings = parse_settings(argv)
    except SettingsError as error:
        if first:
            print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    torch.manual_seed(settings.seed)
    mesh = open_mesh(settings.device, settings.timeout)
    with fail_together(mesh):
        train(settings, mesh)


if __name__ == "__main__":
    main()
