"""What a run finds in its folder: the checkpoint to go on from, what must be as it was, the metrics and the W&B run so far.

Left out: reading the checkpoint itself (checkpoint.py).
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import secrets
import shutil
import sys
from pathlib import Path

from checkpoint import complete_checkpoints, is_complete, read_state, replace_synced, set_aside
from config import Settings
from metrics import Tracker, cut_lines
from parallel import Mesh, refuse_together
from provenance import provenance
from watch import FolderLock, sees_lock

# Settings that a resumed run may change: they leave the numbers as they are, up to the rounding of another layout. What
# the data settings name is compared by its content instead.
FREE = {
    "project_dir", "run_name", "tracker", "export", "timeout", "device", "split", "schedule", "microbatch_size",
    "share_prompts", "row_length", "activation_checkpointing", "chunk_size", "max_sequences_in_flight", "sampler", "reference",
    "epochs", "max_steps", "eval_every", "show_samples", "max_bad_steps", "save_every", "keep_checkpoints", "resume",
    "async_checkpoint", "allow_data_change", "data", "validation_data", "validation_share", "columns", "verify_type",
    "eval_questions", "long_prompts", "max_prompt_tokens", "stages_per_rank", "timeline_every", "offload_optimizer",
    "offload_reference", "run_group", "run_tags", "samples_every", "peak_tflops", "dump_rollouts", "dry_run",
}


def claim_folder(settings: Settings, mesh: Mesh) -> tuple[FolderLock | None, Path | None]:
    """The lock on ``project_dir`` (on the first stage) and the checkpoint to go on from, if any.

    Raises:
        ValueError: another run is in the folder, a machine does not see it, or the checkpoint was made with other settings.
    """

    def lock_and_find():
        if not mesh.is_first:
            return None, None
        lock, checkpoint = FolderLock(Path(settings.project_dir)), find_checkpoint(settings)
        if checkpoint is not None:
            check_same_settings(read_state(checkpoint)["settings"], settings, checkpoint)
        return lock, checkpoint

    def look() -> None:
        if not mesh.is_first and not sees_lock(Path(settings.project_dir) / "lock", owner):
            raise ValueError(
                f"stage {mesh.stage} does not see what the first stage writes to {settings.project_dir}: "
                "give a --project_dir that all machines share"
            )

    lock, checkpoint = refuse_together(mesh, lock_and_find)
    owner, checkpoint = mesh.broadcast((lock.owner, checkpoint) if mesh.is_first else None)
    refuse_together(mesh, look)
    return lock, checkpoint


def find_checkpoint(settings: Settings) -> Path | None:
    """The checkpoint that ``--resume`` asks for, or None for a start from the beginning. On the first stage only.

    Raises:
        ValueError: a path that holds no complete checkpoint.
    """
    folder = Path(settings.project_dir) / "checkpoints"
    if settings.resume == "never":
        return None
    for path in sorted(folder.glob("step-*")):
        if path.suffix == ".pruned":
            shutil.rmtree(path, ignore_errors=True)
        elif path.suffix != ".aside" and not is_complete(path):
            set_aside(path, "is not complete: the run ended while it was written")
    if settings.resume == "auto":
        return next(reversed(complete_checkpoints(folder)), None)
    named = Path(settings.resume)
    if is_complete(named):
        chosen = named.resolve()
    else:
        found = complete_checkpoints(named / "checkpoints") or complete_checkpoints(named)
        if not found:
            raise ValueError(f"--resume {named} is no complete checkpoint: name a folder that holds a file COMPLETE, auto or never")
        chosen = found[-1].resolve()
    for path in complete_checkpoints(folder):
        if path.parent.resolve() == chosen.parent and path.name > chosen.name:
            set_aside(path, f"lies after {chosen.name}, from which --resume goes on")
    return chosen


def changed_settings(saved: dict, settings: Settings) -> list[str]:
    """Every setting that makes another run of ``settings`` than the saved ones did, with both values."""
    compared = {f.name: f.default for f in dataclasses.fields(settings) if f.name not in FREE}
    if settings.lr_schedule != "constant":  # the rate of every update depends on how many there will be
        compared |= {"epochs": 1, "max_steps": 0}
    return [
        f"{name} {saved.get(name, default)!r} -> {getattr(settings, name)!r}" for name, default in compared.items()
        if saved.get(name, default) != getattr(settings, name)
    ]


def check_same_settings(saved: dict, settings: Settings, checkpoint: Path) -> None:
    """Refuse to go on with settings that would give another run.

    Raises:
        ValueError: one sentence with every field that differs, both values shown.
    """
    if changes := changed_settings(saved, settings):
        raise ValueError(
            f"{checkpoint} was made with other settings ({', '.join(changes)}): "
            "give the old ones, choose another --project_dir, or start over with --resume never"
        )


def check_same_data(saved: dict[str, str], now: dict[str, str], checkpoint: Path, allowed: bool) -> None:
    """Refuse to go on with data of another content or order.

    Raises:
        ValueError: one sentence with both fingerprints.
    """
    changes = [f"{name} {saved.get(name)} -> {now[name]}" for name in now if saved.get(name) != now[name]]
    if changes and not allowed:
        raise ValueError(
            f"the data is not what {checkpoint} was made with (fingerprints: {', '.join(changes)}): "
            "bring back the old data, or go on all the same with --allow_data_change on"
        )
    if changes:
        print(f"warning: the data has changed since {checkpoint} (fingerprints: {', '.join(changes)})", file=sys.stderr)


def run_identity(settings: Settings, fingerprints: dict[str, str], resumed: bool) -> tuple[str, bool]:
    """The W&B id of the run in ``project_dir``, kept there in ``run.json`` from its first start on.

    Returns:
        the id, and whether a process of this run was here before: one with the same settings and data, or the one that is
        resumed.
    """
    path = Path(settings.project_dir) / "run.json"
    if path.exists() and settings.resume != "never":
        found = json.loads(path.read_text())
        if resumed or found["data"] == fingerprints and not changed_settings(found["settings"], settings):
            return found["wandb_id"], True
    # a sweep names its runs itself
    new_id = os.environ.get("WANDB_RUN_ID") or secrets.token_hex(4)
    record = {"wandb_id": new_id, "data": fingerprints, "settings": dataclasses.asdict(settings)}
    replace_synced(path, json.dumps(record, indent=1))
    return record["wandb_id"], False


def open_tracker(trainer, steps: int, plan: str, first_prompt: str) -> tuple[Tracker, str]:
    """The tracker of a run that starts or goes on, and the run's id."""
    s, folder, resumed = trainer.settings, Path(trainer.settings.project_dir), trainer.resumed is not None
    run_id, again = run_identity(s, trainer.fingerprints, resumed)
    if again:
        for name in ("metrics.jsonl", "samples.jsonl"):
            cut_lines(folder / name, trainer.state.step if resumed else -1)
    else:
        others = ["metrics.jsonl", "samples.jsonl", "timeline", "rollouts", "wandb.json", "final", "best"]
        number_aside(folder, others + ["checkpoints"] * (s.resume == "never"))
    settings, about = dataclasses.asdict(s), {"first_prompt": first_prompt, "plan": plan, **provenance()}
    (folder / "settings.json").write_text(json.dumps({"settings": settings} | about, indent=1))
    policy = trainer.policy
    tags = [policy.config.model_type, s.loss, s.schedule, f"{trainer.mesh.stages} stages", *filter(None, s.run_tags.split(","))]
    tracker = Tracker(
        folder, use_wandb=s.tracker == "wandb" and trainer.state.step < steps, name=s.run_name, run_id=run_id,
        config=settings | about, group=s.run_group or Path(s.model).name, tags=tags,
    )
    return tracker, run_id


def number_aside(folder: Path, names: list[str]) -> None:
    """Move what another run left in ``folder`` to numbered names beside it: nothing is written over."""
    for path in (folder / name for name in names):
        if path.exists():
            number = next(n for n in itertools.count(1) if not path.with_name(f"{path.stem}-{n}{path.suffix}").exists())
            path.rename(path.with_name(f"{path.stem}-{number}{path.suffix}"))
            print(f"{path} of an earlier run is now {path.stem}-{number}{path.suffix}")
