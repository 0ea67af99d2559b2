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
import sys
from pathlib import Path

import torch

from checkpoint import Checkpoints, State, read_state
from config import Settings, parse_settings
from console import Progress, print_end, print_start
from dry_run import dry_run
from evaluate import evaluate, sampling_of
from export import export_checkpoint, export_model
from grpo_loss import LossSettings, group_advantages, policy_loss, policy_metrics, token_weights
from metric_names import Alarms
from metrics import Clock, PeakMemory, rollout_metrics, speed_metrics
from parallel import Mesh, agree_to_stop, fail_together, open_mesh, refuse_in_one_sentence, refuse_together, start_watch
from plan import peak_flops, row_flops
from policy import Policy
from questions import batches, training_and_held_out
from replay import dump_rollout, load_rollout, replay_files, rollout_path, write_bad_rows
from resume import check_same_data, claim_folder, open_tracker
from reward_terms import format_term, overlong_term, repetition_term, shaped_reward
from rewards import grade, lenient, take_faults
from rollout import Completion, Rows, choose_row_length, decode, pack
from samples import as_text, sample_rows
from tasks import Question, fingerprint
from tiny_model import make_tiny_model
from watch import STOPPED, Interrupted

SAME = {torch.float64: 1e-8, torch.float32: 1e-4}  # how close sampler and trainer must be at step 1, by dtype


# ------------------------------------------------------------------------------------------------ the trainer
class Trainer:
    """The steps of GRPO over a policy; every method is called on every stage."""

    def __init__(self, settings: Settings, policy: Policy):
        self.settings, self.policy, self.mesh = settings, policy, policy.mesh
        self.state = State()
        self.grade = grade
        self.replay: list[Path] = []  # rollouts to train from instead of sampling, on every stage
        self.memory = PeakMemory(self.mesh.device)
        self.peaks: dict[str, int] | None = None  # the most bytes of every phase, where a dry run asks for them
        s = settings
        self.loss_settings = LossSettings(
            loss=s.loss, epsilon=s.epsilon, epsilon_high=s.epsilon_high, beta=s.beta, delta=s.dual_clip or None,
            sampler_correction=s.sampler_correction, correction_cap=s.correction_cap,
        )
        self.eval_sampling = sampling_of(s)
        self.sampling = dataclasses.replace(self.eval_sampling, temperature=s.temperature, top_p=1.0, top_k=0)

    # -------------------------------------------------------------------------------------------- one step
    def step(self, number: int, questions: list[Question], total_updates: int) -> dict[str, float]:
        """One rollout and its updates; ``questions`` are those of the rollout, on the first stage.

        Returns:
            on the first stage all metrics of the step; elsewhere nothing of use.

        Raises:
            Interrupted: a stage was asked to stop and nothing of this step has been applied yet.
        """
        self.mesh.watch.step = number
        clock = Clock(self.enter, self.leave)
        with clock.phase("sample"):
            completions = self.read_rollout(number) if self.replay else self.sample(number, questions)
        with clock.phase("verify"):
            values = self.verify(completions, questions)
        self.rollout = completions
        with clock.phase("pack"):
            rows = self.pack(completions)
        with clock.phase("score"):
            self.score(rows)
        values |= self.update(number, rows, total_updates, clock)
        with clock.phase("sync"):
            values |= self.policy.sync()
        values |= clock.metrics()
        values |= speed_metrics(values) | self.utilisation(rows, values["time/train"])
        peaks = self.mesh.gather(self.memory.read() / 2**20)
        if self.mesh.device.type == "cuda":
            self.memory.reset()
        return values | {f"memory/peak_stage{i}": peak for i, peak in enumerate(peaks)}

    def enter(self, phase: str) -> None:
        self.mesh.watch.enter(phase)
        if self.peaks is not None:
            self.memory.reset()

    def leave(self, phase: str) -> None:
        if self.peaks is not None:
            self.peaks[phase] = max(self.peaks.get(phase, 0), self.memory.read())

    def read_rollout(self, number: int) -> list[Completion]:
        return load_rollout(self.replay[number - 1]) if self.mesh.is_first else []

    def sample(self, number: int, questions: list[Question]) -> list[Completion]:
        s = self.settings
        prompts = self.mesh.broadcast([q.prompt_ids for q in questions])
        chunk = s.chunk_size or len(prompts)
        completions = []
        for first in range(0, len(prompts), chunk):
            completions += self.policy.generate(
                prompts[first : first + chunk], group_size=s.group_size, sampling=self.sampling, stream=(s.seed, number),
                first_question=first,
            )
            if agree_to_stop(self.mesh):
                raise Interrupted
        decode(completions, self.policy.tokenizer, self.policy.stop_ids)
        return completions

    def verify(self, completions: list[Completion], questions: list[Question]) -> dict[str, float]:
        """Rewards, advantages and loss weights of the completions, on the first stage; its metrics."""
        if not self.mesh.is_first:
            return {}
        s, judged = self.settings, []
        if not self.replay:
            graded = [(c.text, questions[c.question]) for c in completions]
            correct = self.grade(graded)
            judged = lenient(graded, correct)
            for c, value in zip(completions, correct):
                c.correct, c.terms = value, reward_terms(c, questions[c.question], s)
        for c in completions:
            c.reward = shaped_reward(c.correct, c.terms, s.reward_weights())
        rewards = [c.reward for c in completions]
        in_loss = [r is not None and (c.finished or not s.mask_truncated) for c, r in zip(completions, rewards)]
        lengths = [len(c.ids) if keep else 0 for c, keep in zip(completions, in_loss)]
        advantages = group_advantages(rewards, [c.question for c in completions], s.advantage_norm)
        weights = token_weights(lengths, s.loss, max_completion_tokens=s.max_completion_tokens)
        for c, advantage, weight in zip(completions, advantages, weights):
            c.advantage, c.weight = advantage, weight
        faults = {f"reward/fault_{kind}": count for kind, count in take_faults().items()}
        return rollout_metrics(completions, judged) | faults

    def pack(self, completions: list[Completion]) -> Rows:
        """The rollout's rows, packed on the first stage and sent to all."""
        s, rows = self.settings, None
        if self.mesh.is_first:
            length = s.row_length or choose_row_length(
                completions, self.mesh.stages, s.share_prompts, microbatch_size=s.microbatch_size,
                attention_cost=self.policy.attention_cost,
            )
            rows = pack(
                completions, length, share_prompts=s.share_prompts, pad_id=self.policy.pad_id,
                rows_multiple=self.policy.pipeline.rows_multiple(), rows_at_least=self.policy.pipeline.rows_needed(),
                dtype=torch.float64 if self.policy.stage.dtype == torch.float64 else torch.float32,
            )
        return self.mesh.broadcast(rows).to(self.mesh.device)

    def score(self, rows: Rows) -> None:
        """Log-probs of the old policy (only when several updates follow) and of the reference, on the last stage."""
        if self.settings.grpo_iterations > 1:
            scored = self.policy.pipeline.score(rows)
            rows.old_logprob = None if scored is None else scored[..., 0]
        if self.policy.reference is not None:
            rows.ref_logprob = self.policy.reference.score(rows)

    def update(self, number: int, rows: Rows, total_updates: int, clock: Clock) -> dict[str, float]:
        """``grpo_iterations`` updates from the same rows; metrics of the last one."""
        s, mesh, policy, values = self.settings, self.mesh, self.policy, {}
        once = s.grpo_iterations == 1

        def loss_fn(output, c):
            return policy_loss(
                output[..., 0], c["advantage"], c["weight"], None if once else c["old_logprob"], c["ref_logprob"],
                c["sampler_logprob"], c["sequence"].long(), self.loss_settings,
            )

        for iteration in range(s.grpo_iterations):
            policy.optimizer.zero_grad(set_to_none=False)
            with clock.phase("train"):
                result = policy.pipeline.train_step(rows, loss_fn)
            with clock.phase("optimizer"):
                try:
                    values = policy.optimize(total_updates, result[0] if result else None)
                except FloatingPointError:
                    if result:
                        write_bad_rows(Path(s.project_dir) / f"bad_rows_step_{number}.jsonl", rows, result[1], policy.tokenizer)
                    mesh.barrier()  # no stage leaves before the file is written
                    raise
            report = self.last_stage_report(rows, result) if policy.pipeline.holds_last else None
            report = mesh.broadcast(report, policy.pipeline.last_rank)
            if policy.updates == 1:
                self.check_first_update(report)
            values |= report
        return values | self.pipeline_metrics(rows)

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
        if self.policy.reference is not None:
            exact.append(("train/kl", 0.0))
        close = SAME.get(self.policy.stage.compute_dtype, 0.05)
        for name, wanted in exact:
            # several updates score the old policy in a pass of its own, which in bf16 may round differently
            if abs(report[name] - wanted) > (close if name == "train/kl" or self.settings.grpo_iterations > 1 else 0):
                raise RuntimeError(f"at the first update {name} must be {wanted} but is {report[name]}")
        mismatch = report.get("sampler/logprob_diff_max", 0.0)
        if self.policy.stage.compute_dtype in SAME and mismatch > close:
            raise RuntimeError(
                f"at the first update sampler and trainer differ by {mismatch:.2e} in a log-prob (at most {close:.0e}): "
                "they do not hold the same weights or the same tokens"
            )

    def pipeline_metrics(self, rows: Rows) -> dict[str, float]:
        """The bubble of the latest train step, measured over all stages, beside the theoretical one."""
        microbatches = rows.shape[0] // self.settings.microbatch_size
        timings = self.mesh.gather(self.policy.pipeline.timings())
        longest = max(t["step_s"] for t in timings)
        values = {
            "pipeline/bubble_theory": self.policy.pipeline.theoretical_bubble(microbatches),
            "pipeline/bubble_measured": 1 - sum(t["busy_s"] for t in timings) / (longest * len(timings)),
            "pipeline/microbatches": microbatches, "pipeline/row_length": rows.shape[1],
            "pipeline/padding_share": rows.padding_share(self.settings.microbatch_size), "pipeline/prompt_tokens_shared": rows.prompt_tokens_shared,
        }
        return values | {f"pipeline/busy_stage{i}": t["busy_s"] / longest for i, t in enumerate(timings)}

    def utilisation(self, rows: Rows, train_s: float) -> dict[str, float]:
        """FLOPs of forward and backward over what all devices could do in that time; nothing where their peak is unknown."""
        peak = self.settings.peak_tflops * 1e12 or peak_flops(self.mesh.device, self.policy.stage.compute_dtype)
        if not peak:
            return {}
        size = self.settings.microbatch_size
        flops = size * sum(row_flops(self.policy.config, spec, *rows.lengths(size)) for spec in self.policy.plan)
        return {"throughput/mfu": flops * self.settings.grpo_iterations / (train_s * peak * self.mesh.stages)}

    def validate(self, held_out: list[Question]) -> tuple[dict[str, float], list[Completion]]:
        s = self.settings
        return evaluate(self.policy, held_out, self.eval_sampling, seed=s.seed, samples=s.eval_samples)


def reward_terms(c: Completion, question: Question, settings: Settings) -> dict[str, float]:
    """The terms that the settings give a weight, before weighting."""
    terms = {
        "format": lambda: format_term(c.text, question.prompt_text, settings.format_tags.split(",")),
        "overlong": lambda: overlong_term(len(c.ids), settings.max_completion_tokens, settings.overlong_margin),
        "repetition": lambda: repetition_term(c.ids),
    }
    return {name: terms[name]() for name in settings.reward_weights()}


# ------------------------------------------------------------------------------------------------ the run
def prepare(settings: Settings, mesh: Mesh) -> tuple[Trainer, list[Question], list[Question]]:
    """Everything up to the first step; the questions and the held-out ones on the first stage, empty lists elsewhere.

    Raises:
        ValueError: data, a model or a checkpoint that cannot be used, in one sentence.
    """
    lock, checkpoint = claim_folder(settings, mesh)
    replayed = refuse_together(mesh, lambda: replay_files(settings.replay) if settings.replay and mesh.is_first else [])
    model = settings.model
    if model == "tiny":
        folder = Path(settings.project_dir).parent / f"tiny-model-{settings.seed}"
        model = mesh.broadcast(str(make_tiny_model(folder, settings.seed)) if mesh.is_first else None)
    policy = Policy(settings, mesh, model)
    fingerprints: dict[str, str] = {}

    def read_questions():
        if not mesh.is_first:
            return [], []
        questions, held_out = training_and_held_out(settings, policy.tokenizer)
        fingerprints.update(training=fingerprint(questions), held_out=fingerprint(held_out))
        if checkpoint is not None:
            check_same_data(read_state(checkpoint)["data"], fingerprints, checkpoint, settings.allow_data_change)
        return questions, held_out

    questions, held_out = refuse_together(mesh, read_questions)
    lengths = [len(q.prompt_ids) for q in questions]
    policy.balance(mesh.broadcast(sum(lengths) / max(1, len(lengths))))
    policy.load()
    trainer = Trainer(settings, policy)
    trainer.replay = mesh.broadcast(replayed)
    trainer.lock, trainer.resumed, trainer.fingerprints = lock, checkpoint, fingerprints
    trainer.checkpoints = Checkpoints(
        Path(settings.project_dir) / "checkpoints", mesh, keep=settings.keep_checkpoints, background=settings.async_checkpoint
    )
    if checkpoint is not None:
        trainer.state = refuse_together(mesh, lambda: trainer.checkpoints.load(policy, checkpoint))
    return trainer, questions, held_out


def train(trainer: Trainer, questions: list[Question], held_out: list[Question]) -> bool:
    """All steps that are left, validation before, between and after them, checkpoints, and the export of the trained model.

    Returns:
        False when the run was stopped by a signal; the same command then goes on.
    """
    settings, policy, mesh = trainer.settings, trainer.policy, trainer.mesh
    per_epoch, validating = mesh.broadcast((math.ceil(len(questions) / settings.batch_size), bool(held_out)))
    steps = settings.epochs * per_epoch
    steps = min(steps, settings.max_steps or steps, len(trainer.replay) or steps)
    refresh_every = max(1, round(settings.reference_update_fraction * per_epoch))
    folder, state, checkpoints = Path(settings.project_dir), trainer.state, trainer.checkpoints
    more = {"data": trainer.fingerprints}
    if mesh.is_first:
        plan = policy.describe_plan(max(len(q.prompt_ids) for q in questions) + settings.max_completion_tokens)
        print_start(trainer, questions, held_out, steps, plan)
        tracker, more["wandb_id"] = open_tracker(trainer, steps, plan, questions[0].prompt_text)
        progress, alarms = Progress(steps), Alarms()

    def validate(step: int) -> None:
        if not validating:
            return
        values, samples = trainer.validate(held_out)
        state.accuracy[step] = mesh.broadcast(values.get("validation/accuracy"))
        if values:
            tracker.log(step, values)
            progress.say(
                f"step {step:>4}  validation accuracy {state.accuracy[step]:.1%} "
                f"({values['validation/accuracy_low']:.1%} to {values['validation/accuracy_high']:.1%}) on {len(held_out)} held-out questions"
            )
            rows = sample_rows(step, "validation", samples, held_out)
            if settings.samples_every:
                tracker.samples(step, "validation", rows)
            for row in rows[: settings.show_samples]:
                progress.say(as_text(row))

    def save() -> None:
        mesh.watch.enter("save")
        checkpoints.save(policy, state, more | {"epoch": state.step // per_epoch, "batch": state.step % per_epoch})

    if trainer.resumed is None:
        validate(0)
    mesh.watch.enter("begin")
    stopped = agree_to_stop(mesh)
    while state.step < steps and not stopped:
        step = state.step + 1
        epoch, place = divmod(state.step, per_epoch)
        order = batches(len(questions), settings.batch_size, epoch, settings.seed) if mesh.is_first else []
        asked = [questions[i] for i in order[place]] if order else []
        try:
            values = trainer.step(step, asked, steps * settings.grpo_iterations)
        except Interrupted:
            stopped = agree_to_stop(mesh)
            break
        state.step = step
        if settings.reference_update_fraction and step % refresh_every == 0:
            policy.reference.update(policy.stage, settings.reference_mixup)
        drawn = settings.timeline_every and step % settings.timeline_every == 0
        picture = policy.pipeline.draw_timeline(folder / "timeline", step) if drawn else None
        if mesh.is_first:
            tracker.log(step, values)
            if picture is not None:
                tracker.picture(step, "pipeline/timeline", picture)
            if settings.samples_every and step % settings.samples_every == 0 and not trainer.replay:
                tracker.samples(step, "train", sample_rows(step, "train", trainer.rollout, asked))
            if settings.dump_rollouts:
                dump_rollout(rollout_path(folder / "rollouts", step), trainer.rollout)
            progress.show(step, values["reward/mean"], values["throughput/tokens_per_s"])
            for sentence in alarms.check(values):
                progress.say(f"warning: {sentence}")
        if step == steps or settings.eval_every and step % settings.eval_every == 0:
            validate(step)
        stopped = agree_to_stop(mesh)
        due = settings.save_every and step % settings.save_every == 0
        if due or stopped or step == steps or (step in state.accuracy and step == state.best()):
            save()
    if stopped:
        save()
    checkpoints.wait()
    if not stopped:
        mesh.watch.enter("export")
        exported = export(trainer) if settings.export else {}
    if mesh.is_first:
        wandb_folder = tracker.wandb_folder()
        tracker.close()
        if stopped:
            print(f"\nstopped after step {state.step} of {steps} by {stopped}; the same command goes on from there", flush=True)
        else:
            print_end(folder, exported, wandb_folder, state.accuracy)
    return not stopped


def export(trainer: Trainer) -> dict[str, Path]:
    """Hugging Face folders of the final model and of the best one by validation; {name: folder}."""
    policy, mesh, state, folder = trainer.policy, trainer.mesh, trainer.state, Path(trainer.settings.project_dir)
    exported = {"model": folder / "final"}
    best = trainer.checkpoints.folder / f"step-{state.best() or 0:06}"
    export_model(policy.stage, mesh, policy.model, exported["model"])
    if state.best() and mesh.broadcast(best.exists()):
        exported["best"] = folder / "best"
        export_checkpoint(best, exported["best"], mesh)
    return exported


def main(argv: list[str] | None = None) -> None:
    with refuse_in_one_sentence(say=os.environ.get("RANK", "0") == "0"):
        settings = parse_settings(argv)
    torch.manual_seed(settings.seed)
    with refuse_in_one_sentence():
        mesh = open_mesh(settings.device, settings.timeout)
    with fail_together(mesh):
        start_watch(mesh)
        with refuse_in_one_sentence(mesh):
            prepared = prepare(settings, mesh)
        if prepared[0].settings.dry_run:
            dry_run(prepared[0], prepared[1])
            return
        finished = train(*prepared)
    if not finished:
        sys.exit(STOPPED)


if __name__ == "__main__":
    main()
