"""What a result was made with: the commit of this code and the versions of its packages."""

from __future__ import annotations

import importlib.metadata
import subprocess
from pathlib import Path

PACKAGES = ("torch", "transformers", "datasets", "wandb", "numpy")


def provenance() -> dict:
    """``git_commit`` (with -dirty where files were changed; None outside a repository) and ``packages`` by name."""
    return {"git_commit": git_commit(Path(__file__).resolve().parent), "packages": {p: importlib.metadata.version(p) for p in PACKAGES}}


def git_commit(folder: Path) -> str | None:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
