"""Checkpoints that a run goes on from to the same bits.

    python checkpoint.py export runs/grpo/checkpoints/step-000100 my-model

A checkpoint is a folder ``project_dir/checkpoints/step-N``, N rollouts with their updates done:

    *.distcp, .metadata   torch.distributed.checkpoint: weights, AdamW state, random states, a reference that has moved
    state.json            step, validation history, settings, fingerprints of the data; readable, and all that is no tensor
    model/                config.json, tokenizer, chat template and generation config of the model the run started from
    COMPLETE              size of every file; written last. A folder without it is never read

Every rank writes its own stage. Names carry the global layer number and a tied head is stored once, so another number of
stages or another schedule reads the same checkpoint. The order of the data and the sampled tokens are functions of
(seed, epoch) and (seed, step, question, sample): the step alone says where they stand.

Left out: which checkpoint a run goes on from (resume.py); checkpoints of other programs, whose Hugging Face folders a run
starts from.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import os
import random
import shutil
import sys
import threading
import warnings
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException, FileSystemReader, FileSystemWriter

from export import COMPANIONS, copy_files, export_checkpoint, make_empty
from parallel import Mesh
from policy import Policy


@dataclass
class State:
    """Where a run stands, beside its tensors."""

    step: int = 0  # rollouts done, each with its updates
    accuracy: dict[int, float] = field(default_factory=dict)  # of the validations so far, by step

    def best(self) -> int | None:
        """The step with the highest validation accuracy, the earliest of several; None before any validation."""
        return max(self.accuracy, key=lambda step: (self.accuracy[step], -step), default=None)


# ------------------------------------------------------------------------------------------------ what is saved
def tensors_of(policy: Policy, *, saving: bool) -> dict[str, Tensor]:
    """This rank's tensors by name, sharing memory with the policy, so that loading fills them in place.

    ``model.<Hugging Face name>``, ``optimizer.<name>.exp_avg`` (and ``exp_avg_sq``, ``step``) and, when it moves,
    ``reference.<name>``. A tied copy on the last stage is read, never written.
    """
    tensors = {}
    for stage, prefix in [(policy.stage, "model")] + ([(policy.reference.copy, "reference")] if reference_moves(policy) else []):
        if stage is None:  # a whole reference lives on the first rank alone
            continue
        names = stage.export_names()
        for local, parameter in stage.named_parameters():
            if saving and parameter is stage.tied_copy:
                continue
            tensors[f"{prefix}.{names[local]}"] = parameter.detach()
            if prefix == "model":
                tensors |= {f"optimizer.{names[local]}.{k}": v for k, v in moments(policy, parameter).items()}
    return tensors


def reference_moves(policy: Policy) -> bool:
    return policy.reference is not None and policy.settings.reference_update_fraction > 0


def moments(policy: Policy, parameter: Tensor) -> dict[str, Tensor]:
    """AdamW's state of a parameter; before its first update the zeros that it would start from."""
    state = policy.optimizer.state[parameter]
    if not state:
        device = "cpu" if policy.settings.offload_optimizer else parameter.device
        state["step"] = torch.tensor(0.0)
        state |= {name: torch.zeros_like(parameter, device=device) for name in ("exp_avg", "exp_avg_sq")}
    return state


def random_states(stage: int) -> dict[str, Tensor]:
    """The states of Python's, NumPy's and torch's generators. The run itself draws from none of them; a verifier may."""
    python, numpy = random.getstate(), np.random.get_state()
    states = {
        "python": torch.tensor(python[1]), "numpy": torch.tensor([*numpy[1].tolist(), numpy[2]]), "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return {f"random.stage{stage}.{name}": state for name, state in states.items()}


def set_random_states(stage: int, states: dict[str, Tensor]) -> None:
    def of(name: str) -> Tensor:
        return states[f"random.stage{stage}.{name}"]

    random.setstate((3, tuple(of("python").tolist()), None))
    *key, place = of("numpy").tolist()
    np.random.set_state(("MT19937", np.array(key, dtype=np.uint32), place))
    torch.set_rng_state(of("torch"))
    if f"random.stage{stage}.cuda" in states:
        torch.cuda.set_rng_state(of("cuda"))


# ------------------------------------------------------------------------------------------------ folders
def is_complete(folder: Path) -> bool:
    """Whether the marker is there and every file has the size that it had when the marker was written."""
    try:
        sizes = json.loads((folder / "COMPLETE").read_text())
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError):
        return False


def complete_checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints of ``project_dir/checkpoints``, oldest first."""
    return [path for path in sorted(folder.glob("step-*")) if path.name[5:].isdigit() and is_complete(path)]


def set_aside(path: Path, why: str) -> None:
    """Rename ``path`` so that nothing takes it for a checkpoint; of those only the latest is kept, for the disk's sake."""
    for old in path.parent.glob("*.aside"):
        shutil.rmtree(old, ignore_errors=True)
    target = path.with_name(path.name + ".aside")
    path.rename(target)
    print(f"warning: {path} {why}; it is now {target.name}", file=sys.stderr, flush=True)


def read_state(checkpoint: Path) -> dict:
    return json.loads((checkpoint / "state.json").read_text())


# ------------------------------------------------------------------------------------------------ saving and loading
class Checkpoints:
    """Saves and loads the checkpoints of one run; call every method on every stage.

    Args:
        folder: ``project_dir/checkpoints``.
        keep: how many of the newest stay; the one with the best validation always does.
        background: write in a thread, from a copy in CPU memory, so that training waits for the copy alone.
    """

    def __init__(self, folder: Path, mesh: Mesh, *, keep: int = 2, background: bool = False):
        self.folder, self.mesh, self.keep, self.background = folder, mesh, keep, background
        # collectives of a thread must not mix with those of the main thread
        self.group = dist.new_group(backend="gloo", timeout=mesh.timeout) if background else mesh.control_group
        self.thread: _Thread | None = None
        self.newest: int | None = None  # the step of the latest checkpoint that was saved or loaded
        logging.getLogger("torch.distributed.checkpoint").setLevel(logging.ERROR)

    def save(self, policy: Policy, state: State, more: dict) -> None:
        """Save the run at ``state.step``. A save that fails says so and leaves the older checkpoints as they are.

        Args:
            more: what else state.json shall hold.
        """
        self.wait()
        if self.newest == state.step:
            return
        tensors = tensors_of(policy, saving=True) | random_states(self.mesh.stage)
        if self.background:
            tensors = {name: torch.empty_like(t, device="cpu").copy_(t) for name, t in tensors.items()}
        record = {
            "step": state.step, "accuracy": state.accuracy, "updates": policy.updates, "skipped": policy.skipped,
            "bad_in_a_row": policy.bad_in_a_row, "stages": self.mesh.stages, "torch": torch.__version__,
            "settings": dataclasses.asdict(policy.settings), **more,
        }
        arguments = (tensors, record, state.best(), policy.model)
        if self.background:
            self.thread = _Thread(self._write, arguments)
            self.thread.start()
        else:
            self._write(*arguments)

    def wait(self) -> None:
        """Until a save in the background has ended; what ended it in another way than a failed write is raised."""
        if self.thread is not None:
            thread, self.thread = self.thread, None
            thread.join()
            if thread.error is not None:
                raise thread.error

    def _write(self, tensors: dict[str, Tensor], record: dict, best: int | None, model: str) -> None:
        """Write beside, check, rename, and mark as complete when all ranks have confirmed."""
        folder = self.folder / f"step-{record['step']:06}"
        partial = folder.with_name(folder.name + ".partial")
        try:
            self._on_first(lambda: make_empty(partial))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                dcp.save(tensors, storage_writer=FileSystemWriter(partial), process_group=self.group)
            names = set().union(*self._gather(list(tensors)))
            self._on_first(lambda: self._finish(partial, folder, record, names, model))
            self.newest = record["step"]
            self._on_first(lambda: self._prune(best))
        except (OSError, CheckpointException) as error:  # what one rank meets is raised on all, here as in dcp.save
            if self.mesh.is_first:
                print(
                    f"\nwarning: no checkpoint at {folder} ({_reason(error)}); training goes on, older checkpoints are as they were",
                    file=sys.stderr, flush=True,
                )
                shutil.rmtree(partial, ignore_errors=True)

    def _finish(self, partial: Path, folder: Path, record: dict, names: set[str], model: str) -> None:
        (partial / "model").mkdir()
        copy_files(model, ("config.json", *COMPANIONS), partial / "model")
        write_synced(partial / "state.json", json.dumps(record, indent=1))
        written = set(FileSystemReader(partial).read_metadata().state_dict_metadata)
        if written != names:
            raise OSError(f"{len(names - written)} tensors are missing")
        sizes = {str(p.relative_to(partial)): p.stat().st_size for p in sorted(partial.rglob("*")) if p.is_file()}
        _sync(partial)
        if folder.exists():
            set_aside(folder, "stands where a new checkpoint goes")
        partial.rename(folder)
        _sync(self.folder)
        mark_complete(folder, sizes)

    def _prune(self, best: int | None) -> None:
        found = complete_checkpoints(self.folder)
        for path in found[: -self.keep]:
            if int(path.name[5:]) != best:
                gone = path.with_name(path.name + ".pruned")
                path.rename(gone)  # at once, so that half of a checkpoint is never seen
                shutil.rmtree(gone, ignore_errors=True)

    def _gather(self, value) -> list:
        out = [None] * self.mesh.stages
        dist.all_gather_object(out, value, group=self.group)
        return out

    def _on_first(self, function) -> None:
        """``function()`` on the first stage; all wait for it, and its error is raised on all."""
        error = None
        if self.mesh.is_first:
            try:
                function()
            except Exception as met:
                error = _reason(met)
        error = self._gather(error)[0]
        if error is not None:
            raise OSError(error)

    def load(self, policy: Policy, checkpoint: Path) -> State:
        """Fill the policy from ``checkpoint``, whatever number of stages wrote it.

        Raises:
            ValueError: a tensor is missing or has another shape; the message names it and both shapes.
        """
        metadata = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
        tensors = tensors_of(policy, saving=False)
        for name, tensor in tensors.items():
            if name not in metadata:
                raise ValueError(f"{checkpoint} has no tensor {name!r}")
            if metadata[name].size != tensor.shape:
                raise ValueError(
                    f"tensor {name!r} has shape {list(metadata[name].size)} in {checkpoint} but {list(tensor.shape)} in this model"
                )
        record, mine = read_state(checkpoint), random_states(self.mesh.stage)
        states = mine if record["stages"] == self.mesh.stages and mine.keys() <= metadata.keys() else {}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.load(tensors | states, storage_reader=FileSystemReader(checkpoint), process_group=self.mesh.control_group)
        if states:
            set_random_states(self.mesh.stage, states)
        policy.updates, policy.skipped, policy.bad_in_a_row = record["updates"], record["skipped"], record["bad_in_a_row"]
        policy.sync()
        if checkpoint.parent == self.folder.resolve():
            self.newest = record["step"]
        return State(record["step"], {int(step): value for step, value in record["accuracy"].items()})


class _Thread(threading.Thread):
    """Keeps the error that ends it."""

    def __init__(self, function, arguments):
        super().__init__(name="checkpoint", daemon=True)
        self.function, self.arguments, self.error = function, arguments, None

    def run(self) -> None:
        try:
            self.function(*self.arguments)
        except Exception as error:
            self.error = error


def mark_complete(folder: Path, sizes: dict[str, int]) -> None:
    replace_synced(folder / "COMPLETE", json.dumps(sizes, indent=1))
    _sync(folder)


def write_synced(path: Path, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def replace_synced(path: Path, text: str) -> None:
    """The file is either as it was or whole."""
    partial = path.with_name(path.name + ".new")
    write_synced(partial, text)
    os.replace(partial, path)


def _sync(folder: Path) -> None:
    """Names of a folder reach the disk apart from the files' content."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _reason(error: BaseException) -> str:
    """One line; of a CheckpointException the first rank's own error."""
    for inner, _ in getattr(error, "failures", {}).values():
        return _reason(inner)
    return f"{type(error).__name__}: {error}".strip().splitlines()[0]


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a checkpoint's model as a Hugging Face folder.")
    commands = parser.add_subparsers(required=True)
    export = commands.add_parser("export", help="write the model of a checkpoint for AutoModelForCausalLM.from_pretrained")
    export.add_argument("checkpoint", help="a folder such as runs/grpo/checkpoints/step-000100")
    export.add_argument("folder", help="where to write; must not exist")
    arguments = parser.parse_args()
    try:
        if Path(arguments.folder).exists():
            raise ValueError(f"{arguments.folder} exists: name another folder")
        if not is_complete(Path(arguments.checkpoint)):
            raise ValueError(f"{arguments.checkpoint} is no complete checkpoint: name a folder that holds a file COMPLETE")
        print(export_checkpoint(Path(arguments.checkpoint), Path(arguments.folder)))
    except ValueError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
