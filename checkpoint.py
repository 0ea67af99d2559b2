"""Writes the trained model as a Hugging Face folder.

Every stage writes its own tensors under their Hugging Face names; nothing is gathered. Tokenizer, chat template and
generation configuration are the files of the model the run started from, byte for byte, so that what stopped before
still stops.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import torch

from parallel import Mesh, check_tied_copies
from stages import Stage, find_file

# What a model folder may hold beside weights and config.json.
COMPANIONS = (
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json",
)


def export_model(stage: Stage, mesh: Mesh, model: str, folder: Path) -> Path:
    """Write ``folder`` for ``AutoModelForCausalLM.from_pretrained``; call on every stage.

    Tensors get the dtype that the model's configuration names (float32 where it names none). A tied head is stored once,
    as the embeddings. The folder is written beside its place and renamed when it is whole.

    Args:
        model: folder or hub name that the run started from, for the configuration and the tokenizer.

    Returns:
        the folder.
    """
    from safetensors.torch import save_file

    check_tied_copies(stage, mesh)
    folder = Path(folder)
    partial = folder.with_name(folder.name + ".partial")
    if mesh.is_first:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    mesh.barrier()
    config = json.loads(find_file(model, "config.json").read_text())
    name = config.get("dtype") or config.get("torch_dtype") or "float32"
    dtype = getattr(torch, name)
    tensors = {key: value.to(dtype).cpu().contiguous() for key, value in stage.export_tensors().items()}
    file = "model.safetensors" if mesh.stages == 1 else f"model-{mesh.stage + 1:05}-of-{mesh.stages:05}.safetensors"
    save_file(tensors, partial / file, metadata={"format": "pt"})
    size = sum(t.numel() * t.element_size() for t in tensors.values())
    parts = mesh.gather((file, list(tensors), size))
    if mesh.is_first:
        if mesh.stages > 1:
            weight_map = {key: file for file, keys, _ in parts for key in keys}
            index = {"metadata": {"total_size": sum(size for _, _, size in parts)}, "weight_map": weight_map}
            (partial / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
        config.pop("torch_dtype", None)
        (partial / "config.json").write_text(json.dumps(config | {"dtype": name}, indent=2))
        for companion in COMPANIONS:
            source = find_file(model, companion)
            if source is not None:
                shutil.copyfile(source, partial / companion)
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(partial, folder)
    mesh.barrier()
    return folder
