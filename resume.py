"""Whether and from where a run goes on: the checkpoint to take, and what must be as it was.

Left out: reading the checkpoint itself (checkpoint.py).
"""

from __future__ import annotations

import dataclasses
import json
import os
import secrets
import shutil
import sys
from pathlib import Path

from checkpoint import complete_checkpoints, is_complete, read_state, set_aside, write_synced
from config import Settings
from parallel import Mesh, refuse_together
from watch import FolderLock, sees_lock

# Settings that a resumed run may change: they leave the numbers as they are, up to the rounding of another layout. What
# the data settings name is compared by its content instead.
FREE = {
    "project_dir", "run_name", "tracker", "export", "timeout", "device", "split", "schedule", "microbatch_size",
    "share_prompts", "row_length", "activation_checkpointing", "chunk_size", "max_sequences_in_flight", "sampler", "reference",
    "epochs", "max_steps", "eval_every", "show_samples", "max_bad_steps", "save_every", "keep_checkpoints", "resume",
    "async_checkpoint", "allow_data_change", "data", "validation_data", "validation_share", "columns", "verify_type",
    "eval_questions", "long_prompts", "max_prompt_tokens", "stages_per_rank", "timeline_every", "offload_optimizer",
    "offload_reference",
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
    record = {"wandb_id": secrets.token_hex(4), "data": fingerprints, "settings": dataclasses.asdict(settings)}
    write_synced(path.with_suffix(".new"), json.dumps(record, indent=1))
    os.replace(path.with_suffix(".new"), path)
    return record["wandb_id"], False
