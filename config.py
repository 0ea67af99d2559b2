"""Every setting, once: a dataclass read from flags and YAML, checked before anything is loaded.

A field's metadata holds its help line and its group in ``--help``. ``--config file.yaml`` gives values, flags override
them, and an unknown key or an impossible combination is refused in one sentence that says what to change.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import os
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from schedules import SCHEDULES, stages_per_rank


class SettingsError(ValueError):
    """A setting that cannot work; the message says what to change."""


def _setting(default, group: str, help: str, choices: tuple | None = None):
    return field(default=default, metadata={"group": group, "help": help, "choices": choices})


@dataclass
class Settings:
    # model
    model: str = _setting("tiny", "model", "local folder or hub name of a Qwen2, Qwen3, Llama, Mistral or SmolLM3 model; tiny: the built-in one")
    split: str = _setting("", "model", "layers per stage, e.g. 16,8; empty: by cost")
    device: str = _setting("auto", "model", "auto takes CUDA when there is a GPU for every local process", ("auto", "cpu", "cuda"))
    dtype: str = _setting("float32", "model", "of the master weights and the optimizer state", ("float32", "float64", "bfloat16"))
    compute_dtype: str = _setting("auto", "model", "of the matrix products; auto: bfloat16 on CUDA, dtype on the CPU", ("auto", "float32", "float64", "bfloat16"))
    activation_checkpointing: str = _setting("none", "model", "full: recompute each decoder layer in backward", ("none", "full"))
    offload_optimizer: bool = _setting(False, "model", "keep the optimizer state in CPU memory between updates")
    # data
    data: str = _setting("task:multiplication?split=train", "data", "questions: a .jsonl/.json/.csv/.parquet file or folder, a hub name, or task:NAME?n=1000&seed=0")
    validation_data: str = _setting("", "data", "held-out questions, named like --data; empty: a share of the data is held out")
    validation_share: float = _setting(0.1, "data", "share of the data held out when there is no --validation_data; 0: none")
    columns: str = _setting("", "data", "column names, e.g. question=problem,answer=solution")
    verify_type: str = _setting("", "data", "verify type for data without that column")
    system_prompt: str = _setting("", "data", "system turn put before every question")
    prompt_template: str = _setting("", "data", "text around the question, e.g. '{question} Think step by step.'")
    chat_template: bool = _setting(True, "data", "render prompts with the tokenizer's chat template; off: the bare question or prompt template")
    max_prompt_tokens: int = _setting(1024, "data", "longest prompt in tokens")
    long_prompts: str = _setting("refuse", "data", "what to do with longer prompts", ("refuse", "drop"))
    # reward
    format_weight: float = _setting(0.0, "reward", "added for the format tags, each once and in order, times 1 or 0")
    format_tags: str = _setting("think,answer", "reward", "the tags of the format, in order")
    overlong_weight: float = _setting(0.0, "reward", "added for overlong completions, times 0 down to -1 at the limit")
    overlong_margin: int = _setting(64, "reward", "tokens before the limit in which that penalty grows")
    repetition_weight: float = _setting(0.0, "reward", "added for repetition, times minus the share of 4-grams seen before")
    # sampling
    batch_size: int = _setting(8, "sampling", "questions per rollout")
    group_size: int = _setting(8, "sampling", "completions per question")
    chunk_size: int = _setting(0, "sampling", "questions sampled at once, to bound the caches; 0: all of a rollout")
    max_completion_tokens: int = _setting(256, "sampling", "longest completion in tokens")
    min_completion_tokens: int = _setting(0, "sampling", "no end of sequence before this many tokens")
    stop_strings: str = _setting("", "sampling", "texts that end a completion, separated by |, e.g. '</answer>|Question:'")
    temperature: float = _setting(1.0, "sampling", "sampling temperature; log-probs are taken at the same one")
    sampler: str = _setting("rank0", "sampling", "rank0: a full model on the first stage; replicas: one on every rank, each answers its share of the questions; pipeline: the training stages themselves; module:Class: your own")
    max_sequences_in_flight: int = _setting(0, "sampling", "sequences decoded at the same time; 0: all of a chunk")
    # loss
    loss: str = _setting("token_mean", "loss", "how token losses are put together", ("token_mean", "seq_mean", "dr_grpo", "gspo", "cispo"))
    advantage_norm: str = _setting("group", "loss", "what the advantage is divided by: the group's spread, the batch's, or nothing", ("group", "batch", "none"))
    epsilon: float = _setting(0.2, "loss", "clip range below 1")
    epsilon_high: float = _setting(0.28, "loss", "clip range above 1")
    dual_clip: float = _setting(0.0, "loss", "upper bound of the ratio for negative advantages (dual clip); 0: off")
    beta: float = _setting(0.0, "loss", "weight of the KL to the reference; 0: no reference is kept")
    grpo_iterations: int = _setting(1, "loss", "updates per rollout")
    sampler_correction: str = _setting("none", "loss", "importance correction for sampler and trainer that differ", ("none", "token_truncate", "sequence_mask"))
    correction_cap: float = _setting(2.0, "loss", "cap of that correction")
    mask_truncated: bool = _setting(False, "loss", "leave completions cut at the limit out of the loss")
    reference: str = _setting("rank0", "loss", "where the reference scores: a full copy on the first stage, or each stage's own frozen copy", ("rank0", "pipeline"))
    offload_reference: bool = _setting(False, "loss", "keep the reference's weights in CPU memory while it does not score")
    reference_update_fraction: float = _setting(0.0, "loss", "each time this fraction of an epoch is trained the reference becomes the policy; 0: never")
    reference_mixup: float = _setting(1.0, "loss", "share of the policy in the updated reference; 1: a plain copy")
    # optimizer
    learning_rate: float = _setting(1e-6, "optimizer", "AdamW learning rate")
    lr_schedule: str = _setting("constant", "optimizer", "after the warm-up", ("constant", "linear", "cosine"))
    warmup_steps: int = _setting(10, "optimizer", "steps of linear warm-up")
    weight_decay: float = _setting(0.001, "optimizer", "AdamW weight decay")
    adam_beta1: float = _setting(0.9, "optimizer", "AdamW first moment")
    adam_beta2: float = _setting(0.95, "optimizer", "AdamW second moment")
    max_grad_norm: float = _setting(1.0, "optimizer", "clip the gradient norm over all stages; 0: off")
    max_bad_steps: int = _setting(3, "optimizer", "stop after this many steps in a row with a non-finite gradient")
    # pipeline
    schedule: str = _setting("1F1B", "pipeline", "pipeline schedule", tuple(SCHEDULES))
    stages_per_rank: int = _setting(0, "pipeline", "stages of each process, for the schedules that take several; 0: as many as the schedule wants (1 or 2)")
    microbatch_size: int = _setting(1, "pipeline", "packed rows of a microbatch")
    share_prompts: bool = _setting(True, "pipeline", "a group's prompt stands once in a row")
    row_length: int = _setting(0, "pipeline", "tokens of a packed row at most; 0: chosen for each rollout")
    timeline_every: int = _setting(0, "pipeline", "every so many steps a picture of the measured pipeline goes to project_dir/timeline and to W&B; 0: never")
    timeout: float = _setting(600.0, "pipeline", "seconds that a phase of a step, or a collective, may last before the job ends")
    # run
    epochs: int = _setting(1, "run", "passes over the data")
    max_steps: int = _setting(0, "run", "stop after this many rollouts; 0: after the epochs")
    seed: int = _setting(0, "run", "of the order of the data and of every sampled token")
    project_dir: str = _setting("runs/grpo", "run", "where everything of this run is written")
    eval_every: int = _setting(0, "run", "validate every so many steps; the start and the end always are")
    eval_questions: int = _setting(0, "run", "held-out questions used for validation; 0: all")
    eval_samples: int = _setting(1, "run", "completions of each held-out question; above 1 also pass@k and majority votes")
    eval_temperature: float = _setting(1.0, "run", "temperature of validation; 0: greedy")
    eval_top_p: float = _setting(1.0, "run", "validation samples from the likeliest tokens of this total probability; 1: all")
    eval_top_k: int = _setting(0, "run", "validation samples from this many likeliest tokens; 0: all")
    show_samples: int = _setting(0, "run", "print this many completions at every validation")
    tracker: str = _setting("wandb", "run", "where metrics go beside metrics.jsonl", ("wandb", "none"))
    run_name: str = _setting("", "run", "name of the run in W&B; empty: the folder's name")
    run_group: str = _setting("", "run", "W&B groups runs by this, e.g. one word for all seeds; empty: the model's name")
    run_tags: str = _setting("", "run", "further W&B tags, separated by commas")
    samples_every: int = _setting(10, "run", "every so many steps some completions go to samples.jsonl and W&B, and at every validation; 0: never")
    peak_tflops: float = _setting(0.0, "run", "peak of a device in the compute dtype, for throughput/mfu; 0: looked up, where it is known")
    dump_rollouts: bool = _setting(False, "run", "write every rollout to project_dir/rollouts")
    replay: str = _setting("", "run", "train from rollouts that dump_rollouts wrote (a file or a folder), without sampling or grading")
    dry_run: bool = _setting(False, "run", "one step on made-up rollouts of full length: prints memory and time of each phase, writes nothing")
    export: bool = _setting(True, "run", "write the trained model as a Hugging Face folder at the end")
    # checkpoints
    resume: str = _setting("auto", "checkpoints", "auto: go on from the newest complete checkpoint of project_dir; never: start over; or a checkpoint's path")
    save_every: int = _setting(25, "checkpoints", "save a checkpoint every so many steps; 0: only for a new best, on a signal and at the end")
    keep_checkpoints: int = _setting(2, "checkpoints", "how many of the newest are kept; the best always is")
    async_checkpoint: bool = _setting(False, "checkpoints", "write checkpoints in the background, from a copy in CPU memory")
    allow_data_change: bool = _setting(False, "checkpoints", "go on from a checkpoint although the data has changed")

    def split_sizes(self) -> list[int] | None:
        return [int(n) for n in self.split.split(",")] if self.split else None

    def reward_weights(self) -> dict[str, float]:
        """Weights of the terms that are added to correctness, by term; empty where none is."""
        weights = {"format": self.format_weight, "overlong": self.overlong_weight, "repetition": self.repetition_weight}
        return {name: weight for name, weight in weights.items() if weight}

    def column_names(self) -> dict[str, str]:
        return dict(pair.split("=", 1) for pair in self.columns.split(",")) if self.columns else {}


# ------------------------------------------------------------------------------------------------ checks
def check_settings(s: Settings, world_size: int) -> None:
    """Refuse what cannot work, before anything is loaded.

    Raises:
        SettingsError: one sentence that names the setting and what to change.
    """

    def refuse(wrong: bool, sentence: str) -> None:
        if wrong:
            raise SettingsError(sentence)

    for f in dataclasses.fields(Settings):
        value, choices = getattr(s, f.name), f.metadata["choices"]
        refuse(bool(choices) and value not in choices, f"--{f.name} {value} is unknown: choose one of {', '.join(choices or ())}")
        refuse(isinstance(value, float) and value != value, f"--{f.name} is not a number: give a finite value")
    for name in ("batch_size", "max_completion_tokens", "max_prompt_tokens", "microbatch_size", "grpo_iterations", "epochs", "max_bad_steps", "keep_checkpoints", "eval_samples"):
        refuse(getattr(s, name) < 1, f"--{name} is {getattr(s, name)}: give at least 1")
    for name in ("chunk_size", "max_sequences_in_flight", "warmup_steps", "max_steps", "eval_every", "eval_questions",
                 "show_samples", "samples_every", "peak_tflops", "save_every", "row_length", "stages_per_rank", "timeline_every", "eval_top_k", "format_weight", "overlong_weight", "repetition_weight", "beta", "dual_clip", "weight_decay", "max_grad_norm", "seed"):
        refuse(getattr(s, name) < 0, f"--{name} is {getattr(s, name)}: it cannot be negative")
    refuse(s.group_size < 2, f"--group_size is {s.group_size}: advantages compare the completions of a question, give at least 2")
    refuse(s.temperature <= 0, f"--temperature is {s.temperature}: training samples from the policy, give a temperature above 0")
    refuse(s.eval_temperature < 0, f"--eval_temperature is {s.eval_temperature}: give 0 for greedy, or a temperature")
    refuse(not 0 < s.eval_top_p <= 1, f"--eval_top_p is {s.eval_top_p}: give a probability above 0 and at most 1")
    refuse(not 0 <= s.min_completion_tokens <= s.max_completion_tokens, f"--min_completion_tokens {s.min_completion_tokens} does not lie between 0 and --max_completion_tokens {s.max_completion_tokens}")
    refuse(s.learning_rate <= 0, f"--learning_rate is {s.learning_rate}: give a positive rate")
    refuse(not 0 < s.epsilon < 1, f"--epsilon is {s.epsilon}: give a clip range between 0 and 1")
    refuse(s.epsilon_high <= 0, f"--epsilon_high is {s.epsilon_high}: give a positive clip range")
    refuse(0 < s.dual_clip <= 1 + s.epsilon_high, f"--dual_clip is {s.dual_clip}: it must be above 1 + epsilon_high, or 0 for off")
    refuse(s.dual_clip > 0 and s.loss == "cispo", "--dual_clip has no meaning for --loss cispo, which clips on one side only: leave it out")
    refuse(s.correction_cap <= 0, f"--correction_cap is {s.correction_cap}: give a positive cap")
    refuse(not 0 <= s.validation_share < 1, f"--validation_share is {s.validation_share}: give a share from 0 up to, not including, 1")
    refuse(not 0 <= s.reference_update_fraction <= 1, f"--reference_update_fraction is {s.reference_update_fraction}: give a fraction of an epoch, from 0 (never) to 1")
    refuse(not 0 < s.reference_mixup <= 1, f"--reference_mixup is {s.reference_mixup}: give a share above 0 and at most 1")
    refuse(s.reference_update_fraction > 0 and s.beta == 0, "--reference_update_fraction needs a reference: set --beta above 0")
    refuse(s.overlong_weight > 0 and not 0 < s.overlong_margin <= s.max_completion_tokens, f"--overlong_margin is {s.overlong_margin}: give 1 to --max_completion_tokens {s.max_completion_tokens}")
    refuse(s.chunk_size and s.batch_size % s.chunk_size, f"--batch_size {s.batch_size} is not divisible by --chunk_size {s.chunk_size}: choose a divisor")
    refuse(s.sampler not in ("rank0", "replicas", "pipeline") and ":" not in s.sampler, f"--sampler {s.sampler} is unknown: give rank0, replicas, pipeline or module:Class")
    refuse(s.row_length and s.row_length <= s.max_completion_tokens, f"--row_length {s.row_length} must exceed --max_completion_tokens {s.max_completion_tokens} by the longest prompt, or be 0")
    refuse(bool(s.columns) and any("=" not in pair for pair in s.columns.split(",")), f"--columns {s.columns} is not of the form question=problem,answer=solution")
    try:
        per_rank = stages_per_rank(s.schedule, s.stages_per_rank)
    except ValueError as error:
        raise SettingsError(str(error)) from None
    stages, each = world_size * per_rank, f", of {per_rank} stages each" if per_rank > 1 else ""
    refuse(s.sampler == "pipeline" and per_rank > 1, f"--sampler pipeline decodes with one stage on a rank, but --schedule {s.schedule} has {per_rank}: use --sampler rank0, replicas or another schedule")
    if s.split:
        refuse(not all(n.strip().isdigit() for n in s.split.split(",")), f"--split {s.split} is not a list of layer counts such as 16,8")
        refuse(len(s.split_sizes()) != stages, f"--split {s.split} names {len(s.split_sizes())} stages but {world_size} processes run{each}: " + ("name as many numbers as stages" if each else "start as many processes as numbers"))


# ------------------------------------------------------------------------------------------------ reading
def _kind(f: dataclasses.Field) -> type:
    return type(f.default)


def _switch(text: str) -> bool:
    known = {"on": True, "true": True, "yes": True, "1": True, "off": False, "false": False, "no": False, "0": False}
    if text.lower() not in known:
        raise argparse.ArgumentTypeError(f"{text} is neither on nor off")
    return known[text.lower()]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str):
        raise SettingsError(message[0].upper() + message[1:] if message else "unreadable arguments")


def make_parser() -> argparse.ArgumentParser:
    """The command line: one flag per setting, grouped as in ``Settings``."""
    parser = _Parser(
        description="Train a language model with GRPO, cut into one pipeline stage per process.", allow_abbrev=False,
        formatter_class=argparse.HelpFormatter,
    )
    parser.add_argument("--config", help="YAML file with any of the settings below; flags override it")
    groups: dict[str, argparse._ArgumentGroup] = {}
    for f in dataclasses.fields(Settings):
        group = groups.setdefault(f.metadata["group"], parser.add_argument_group(f.metadata["group"]))
        kind, default = _kind(f), f.default
        shown = {True: "on", False: "off"}[default] if kind is bool else default
        text = f.metadata["help"] + (f" (default: {shown})" if shown != "" else "")
        group.add_argument(
            f"--{f.name}", type=_switch if kind is bool else kind, choices=f.metadata["choices"], default=None,
            help=text.replace("%", "%%"), metavar="on|off" if kind is bool else None if f.metadata["choices"] else kind.__name__.upper(),
        )
    return parser


def read_yaml(path: str) -> dict:
    """The settings of a YAML file, each of the type its field has.

    Raises:
        SettingsError: no such file, not a mapping, an unknown key (the nearest known one is named), or a wrong type.
    """
    if not Path(path).is_file():
        raise SettingsError(f"--config {path} does not exist: give the path of a YAML file")
    try:
        values = yaml.safe_load(Path(path).read_text()) or {}
    except yaml.YAMLError as error:
        line = error.problem_mark.line + 1 if getattr(error, "problem_mark", None) else 1
        raise SettingsError(f"--config {path} is not YAML: look at line {line}") from None
    if not isinstance(values, dict):
        raise SettingsError(f"--config {path} is not a mapping of settings: write lines such as 'group_size: 8'")
    fields = {f.name: f for f in dataclasses.fields(Settings)}
    for name, value in values.items():
        if name not in fields:
            near = difflib.get_close_matches(str(name), fields, 1)
            hint = f": did you mean {near[0]}?" if near else ": see --help for the known ones"
            raise SettingsError(f"{path} sets {name}, which is no setting{hint}")
        values[name] = _typed(name, value, _kind(fields[name]), path)
    return values


def _typed(name: str, value, kind: type, path: str):
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if kind is float and isinstance(value, str):  # YAML 1.1 reads 1e-6 as text
        try:
            return float(value)
        except ValueError:
            pass
    if kind is float and number:
        return float(value)
    if kind is int and number and value == int(value):
        return int(value)
    if kind is str and (number or isinstance(value, str)):
        return str(value)
    if kind is bool and isinstance(value, bool):
        return value
    raise SettingsError(f"{path} sets {name} to {value!r}: give a value of type {kind.__name__}")


def parse_settings(argv: list[str] | None = None) -> Settings:
    """Settings from the command line and its YAML file, checked against the number of processes torchrun started.

    Raises:
        SettingsError: one sentence that says what to change.
    """
    flags = vars(make_parser().parse_args(argv))
    path = flags.pop("config")
    values = read_yaml(path) if path else {}
    values |= {name: value for name, value in flags.items() if value is not None}
    settings = Settings(**values)
    if "WANDB_SWEEP_ID" in os.environ:  # the runs of a sweep differ by their settings: each needs a folder of its own
        settings.project_dir = str(Path(settings.project_dir) / os.environ.get("WANDB_RUN_ID", "run"))
    check_settings(settings, int(os.environ.get("WORLD_SIZE", "1")))
    return settings
