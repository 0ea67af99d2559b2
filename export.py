"""Writes what was trained as a Hugging Face folder, from the stages that hold it or from a checkpoint.

Tensors get their Hugging Face names and the dtype that the model's configuration names (float32 where it names none); a tied
head is stored once, as the embeddings. Tokenizer, chat template and generation configuration are the files of the model the
run started from, byte for byte, so that what stopped before still stops. The folder is written beside its place and renamed
when it is whole.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader

from parallel import Mesh, check_tied_copies
from stages import Stage, find_file

# What a model folder may hold beside weights and config.json.
COMPANIONS = (
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json",
)
SHARD_BYTES = 4 * 2**30  # of one file of an exported model


def make_empty(folder: Path) -> None:
    """``folder`` without what may have been in it."""
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)


def copy_files(model: str, names: tuple[str, ...], folder: Path) -> None:
    """Those of ``names`` that the folder or hub name ``model`` has, byte for byte."""
    for name in names:
        if (source := find_file(model, name)) is not None:
            shutil.copyfile(source, folder / name)


def export_model(stage: Stage, mesh: Mesh, model: str, folder: Path) -> Path:
    """Write ``folder`` for ``AutoModelForCausalLM.from_pretrained``; call on every stage.

    Every stage writes its own tensors; nothing is gathered.

    Args:
        model: folder or hub name that the run started from, for the configuration and the tokenizer.

    Returns:
        the folder.

    Raises:
        RuntimeError: the two copies of tied embeddings differ.
    """
    check_tied_copies(stage, mesh)
    partial = Path(f"{folder}.partial")
    if mesh.is_first:
        make_empty(partial)
    mesh.barrier()
    dtype = export_dtype(model)
    file = "model.safetensors" if mesh.stages == 1 else f"model-{mesh.stage + 1:05}-of-{mesh.stages:05}.safetensors"
    parts = mesh.gather(_write_shard(partial / file, stage.export_tensors(), dtype))
    if mesh.is_first:
        _finish_export(partial, Path(folder), parts, model, dtype)
    mesh.barrier()
    return Path(folder)


def export_checkpoint(checkpoint: Path, folder: Path, mesh: Mesh | None = None) -> Path:
    """The same from a complete checkpoint, a few GiB at a time; with ``mesh`` the stages share the work."""
    checkpoint, partial = Path(checkpoint), Path(f"{folder}.partial")
    stage, stages = (mesh.stage, mesh.stages) if mesh else (0, 1)
    if stage == 0:
        make_empty(partial)
    if mesh:
        mesh.barrier()
    metadata = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    model = str(checkpoint / "model")
    dtype = export_dtype(model)
    shards, size = [[]], 0
    for name in (n for n in metadata if n.startswith("model.")):
        bytes_ = metadata[name].size.numel() * dtype.itemsize
        if shards[-1] and size + bytes_ > SHARD_BYTES:
            shards, size = [*shards, []], 0
        shards[-1].append(name)
        size += bytes_
    parts = []
    for i in range(stage, len(shards), stages):
        tensors = {name: torch.empty(metadata[name].size, dtype=metadata[name].properties.dtype) for name in shards[i]}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.load(tensors, storage_reader=FileSystemReader(checkpoint), no_dist=True)
        file = "model.safetensors" if len(shards) == 1 else f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
        parts.append(_write_shard(partial / file, {n.removeprefix("model."): t for n, t in tensors.items()}, dtype))
    parts = list(itertools.chain(*mesh.gather(parts))) if mesh else parts
    if stage == 0:
        _finish_export(partial, Path(folder), parts, model, dtype)
    if mesh:
        mesh.barrier()
    return Path(folder)


def export_dtype(model: str) -> torch.dtype:
    config = json.loads(find_file(model, "config.json").read_text())
    return getattr(torch, config.get("dtype") or config.get("torch_dtype") or "float32")


def _write_shard(path: Path, tensors: dict[str, Tensor], dtype: torch.dtype) -> tuple[str, list[str], int]:
    from safetensors.torch import save_file

    tensors = {name: tensor.to(dtype).cpu().contiguous() for name, tensor in tensors.items()}
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(path.parent.stat().st_mode & 0o666)  # safetensors lets nobody but the owner read: what the umask gives the folder
    return path.name, list(tensors), sum(t.numel() * t.element_size() for t in tensors.values())


def _finish_export(partial: Path, folder: Path, parts: list, model: str, dtype: torch.dtype) -> None:
    if len(parts) > 1:
        weight_map = {key: file for file, keys, _ in parts for key in keys}
        index = {"metadata": {"total_size": sum(size for _, _, size in parts)}, "weight_map": weight_map}
        (partial / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    config = json.loads(find_file(model, "config.json").read_text())
    config.pop("torch_dtype", None)
    (partial / "config.json").write_text(json.dumps(config | {"dtype": str(dtype).removeprefix("torch.")}, indent=2))
    copy_files(model, COMPANIONS, partial)
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(partial, folder)
