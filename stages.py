"""Cuts a Hugging Face causal language model into pipeline stages.

A stage is a run of decoder layers; the first stage also holds the token embeddings, the last one the final norm and
the LM head. Only a stage's own layers are ever allocated, and only its own tensors are read from the checkpoint. The
layers themselves are transformers' own modules, so a stage computes exactly what the whole model computes there.

What stands where it is needed:
* ``Stage``          the module: ``forward`` for packed rows (training and scoring), ``embed``/``run_layers``/``logits``
                     for decoding with a cache
* ``Stages``         the several stages of one rank, under schedules that want them
* ``load_weights``   this stage's tensors from a folder or a hub name, sharded or not
* ``export_names``   local parameter names to Hugging Face names with global layer numbers, and back

Left out: architectures whose layers share caches or whose head scales its logits (Gemma, Granite), mixtures of experts.

Legend: R rows of a microbatch, T tokens in a row, H hidden size, V vocabulary.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from attention import Tile, attention_mask, cut_into_tiles
from grpo_loss import token_logprobs
from split import StageSpec, check_architecture, config_of_layers, skeleton

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


class Stage(nn.Module):
    """One pipeline stage, allocated but not filled: see ``load_weights`` and ``load_tensors``.

    Args:
        config: the whole model's Hugging Face configuration.
        spec: which layers; ``plan_stages(config, 1)[0]`` gives the whole model as one stage.
        dtype: of the parameters and of the activations sent between stages.
        compute_dtype: of the matrix products; bfloat16 under float32 parameters runs them under autocast.
        temperature: the sampling temperature; log-probs are those of the law that was sampled from.
    """

    def __init__(
        self,
        config,
        spec: StageSpec,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        compute_dtype: torch.dtype | None = None,
        temperature: float = 1.0,
        activation_checkpointing: bool = False,
        head_chunk: int = 128,
    ):
        super().__init__()
        part = config_of_layers(config, spec.first_layer, spec.end_layer)
        empty = skeleton(part)
        self.config, self.spec, self.dtype = config, spec, dtype
        self.compute_dtype = compute_dtype or dtype
        self.temperature, self.head_chunk = temperature, head_chunk
        self.activation_checkpointing = activation_checkpointing
        self.in_tiles = torch.device(device).type == "cpu"
        self.layer_types = getattr(part, "layer_types", None) or ["full_attention"] * part.num_hidden_layers
        self.window = getattr(config, "sliding_window", None)
        if config.model_type == "mistral" and self.window is not None:  # its configuration lists no layer types
            self.layer_types = ["sliding_attention"] * part.num_hidden_layers
        self.embed_tokens = empty.model.embed_tokens if spec.is_first else None
        self.layers = empty.model.layers
        self.norm = empty.model.norm if spec.is_last else None
        self.lm_head = empty.lm_head if spec.is_last else None
        self.to_empty(device=device).to(dtype)
        if spec.is_first and spec.is_last and config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight  # allocating the meta tensors has undone the tie
        # The rotary frequencies are no parameters: they stay float32 whatever the dtype, as in transformers.
        self.rotary_emb = type(empty.model.rotary_emb)(config=part).to(device)
        self.eval()  # no dropout in any pass, the training pass included

    @property
    def device(self) -> torch.device:
        return self.layers[0].input_layernorm.weight.device

    @property
    def parts(self) -> list[Stage]:
        """The stages held here: this one alone (see ``Stages``)."""
        return [self]

    @property
    def holds_tied_copy(self) -> bool:
        """True on a last stage whose head repeats the embeddings of the first stage."""
        return self.spec.is_last and not self.spec.is_first and self.config.tie_word_embeddings

    @property
    def tied_weight(self) -> nn.Parameter | None:
        """The tied embeddings, where another stage holds a copy of them: on a first or a last stage, not on both in one."""
        if not self.config.tie_word_embeddings or self.spec.is_first == self.spec.is_last:
            return None
        return self.embed_tokens.weight if self.spec.is_first else self.lm_head.weight

    @property
    def tied_copy(self) -> nn.Parameter | None:
        """That of the last stage, which the first stage answers for."""
        return self.lm_head.weight if self.holds_tied_copy else None

    def forward(
        self, x: Tensor, *, input_ids: Tensor, position_ids: Tensor, segment_ids: Tensor, group_ids: Tensor,
        predictor: Tensor,
    ) -> Tensor:
        """Packed rows through this stage.

        Args:
            x: token ids [R, T] on the first stage, hidden states [R, T, H] elsewhere.
            input_ids, position_ids, segment_ids, group_ids, predictor: [R, T] integers of the rows (``rollout.Rows``).

        Returns:
            hidden states [R, T, H]; on the last stage [R, T, 2]: log-prob and entropy (nats) of each completion token,
            0 elsewhere. The log-prob of token t stands at t, though another position predicts it.
        """
        hidden = self.run_rows(x, position_ids, segment_ids, group_ids)
        if not self.spec.is_last:
            return hidden
        row, place = (segment_ids > 0).nonzero(as_tuple=True)
        logprob, entropy = self.score(hidden, row, predictor[row, place], input_ids[row, place])
        out = torch.zeros(*segment_ids.shape, 2, dtype=logprob.dtype, device=logprob.device)
        return out.index_put((row, place), torch.stack([logprob, entropy], dim=-1))

    def run_rows(self, x: Tensor, position_ids: Tensor, segment_ids: Tensor, group_ids: Tensor) -> Tensor:
        """What arrives -> hidden states [R, T, H] behind this stage's layers."""
        hidden = self.embed(x) if self.spec.is_first else x
        masks = {
            kind: attention_mask(
                position_ids, segment_ids, group_ids, self.compute_dtype,
                self.window if kind == "sliding_attention" else None,
            )
            for kind in set(self.layer_types)
        }
        if self.in_tiles:
            masks = {kind: cut_into_tiles(mask) for kind, mask in masks.items()}
        return self.run_layers(hidden, position_ids, masks)

    def score(self, hidden: Tensor, row: Tensor, predictor: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Log-prob and entropy [N] of N tokens, ``targets``, which the hidden states at (row, predictor) predict."""
        # Only positions that predict a completion token go through the head. They are gathered behind the norm: it runs
        # in float32, so that a prompt's last token, which predicts G first tokens, would be rounded G times before it.
        predicting = self.norm(hidden)[row, predictor]
        return token_logprobs(
            predicting.to(self.compute_dtype), self.lm_head.weight, targets,
            temperature=self.temperature, chunk_tokens=self.head_chunk,
        )

    def embed(self, input_ids: Tensor) -> Tensor:
        """Token ids [..., T] -> hidden states [..., T, H]; first stage only."""
        return self.embed_tokens(input_ids)

    def run_layers(
        self, hidden: Tensor, position_ids: Tensor, masks: dict[str, Tensor | list[Tile]], cache=None
    ) -> Tensor:
        """Hidden states [R, T, H] through this stage's layers.

        Args:
            masks: additive masks [R, 1, T, S], or tiles, by layer type (the distinct entries of ``self.layer_types``).
            cache: an object with ``update(keys, values, layer)`` returning the keys and values to attend to.
        """
        rotary = self.rotary_emb(hidden, position_ids)
        with torch.autocast(hidden.device.type, self.compute_dtype, enabled=self.compute_dtype != self.dtype):
            for layer, kind in zip(self.layers, self.layer_types):
                arguments = dict(
                    attention_mask=masks[kind], position_embeddings=rotary, position_ids=position_ids, cache=cache,
                    use_cache=cache is not None,
                )
                if self.activation_checkpointing and torch.is_grad_enabled():
                    hidden = checkpoint(layer, hidden, use_reentrant=False, **arguments)
                else:
                    hidden = layer(hidden, **arguments)
        return hidden.to(self.dtype)

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [..., H] -> logits [..., V] in float32 (float64 for a float64 model); last stage only.

        The temperature is not applied.
        """
        hidden = self.norm(hidden).to(self.compute_dtype)
        logits = hidden @ self.lm_head.weight.to(self.compute_dtype).T
        return logits if logits.dtype == torch.float64 else logits.float()

    # -------------------------------------------------------------------------------------------- names
    def export_names(self) -> dict[str, str]:
        """Local parameter name -> Hugging Face name. A tied head is the embeddings under another name."""
        return {local: self._export_name(local) for local, _ in self.named_parameters()}

    def _export_name(self, local: str) -> str:
        if local == HEAD:
            return EMBEDDING if self.config.tie_word_embeddings else HEAD
        return "model." + re.sub(r"^layers\.(\d+)", lambda m: f"layers.{int(m[1]) + self.spec.first_layer}", local)

    def export_tensors(self) -> dict[str, Tensor]:
        """The parameters this stage answers for, by Hugging Face name; a tied copy is left to the first stage."""
        return {
            self._export_name(local): parameter.detach()
            for local, parameter in self.named_parameters()
            if not (self.holds_tied_copy and local == HEAD)
        }

    @torch.no_grad()
    def load_tensors(self, tensors) -> None:
        """Fill the parameters from ``tensors``: a mapping of Hugging Face names to tensors (more may be in it).

        Raises:
            ValueError: a tensor is missing or has another shape; the message names it and both shapes.
        """
        for local, parameter in self.named_parameters():
            name = self._export_name(local)
            if name not in tensors:
                raise ValueError(f"the checkpoint has no tensor {name!r}, which stage {self.spec.index} needs")
            tensor = tensors[name]
            if tensor.shape != parameter.shape:
                raise ValueError(
                    f"tensor {name!r} has shape {list(tensor.shape)} in the checkpoint "
                    f"but {list(parameter.shape)} in the model's configuration"
                )
            parameter.copy_(tensor)


class Stages(nn.Module):
    """The stages of one rank where a schedule puts several there; takes the place of the one ``Stage`` elsewhere.

    Where the first and the last stage stand on the same rank, tied embeddings are one parameter that both use: there
    is no copy, nothing to add up between ranks, and half the optimizer state.

    Args:
        parts: in the order of their ``spec.index``.
    """

    def __init__(self, parts: list[Stage]):
        super().__init__()
        self.parts = nn.ModuleList(parts)
        first, last = parts[0], parts[-1]
        self.config, self.dtype, self.compute_dtype = first.config, first.dtype, first.compute_dtype
        self.both_ends = first.spec.is_first and last.spec.is_last
        if self.both_ends and last.holds_tied_copy:
            last.lm_head.weight = first.embed_tokens.weight
        self.eval()

    @property
    def device(self) -> torch.device:
        return self.parts[0].device

    @property
    def tied_weight(self) -> nn.Parameter | None:
        """As of ``Stage``: None where no other rank holds a copy."""
        found = [part.tied_weight for part in self.parts if part.tied_weight is not None]
        return found[0] if found and not self.both_ends else None

    @property
    def tied_copy(self) -> nn.Parameter | None:
        return None if self.both_ends else self.parts[-1].tied_copy

    def export_names(self) -> dict[str, str]:
        """Local parameter name -> Hugging Face name."""
        names = {f"parts.{i}.{k}": name for i, part in enumerate(self.parts) for k, name in part.export_names().items()}
        return {local: names[local] for local, _ in self.named_parameters()}

    def export_tensors(self) -> dict[str, Tensor]:
        """The parameters that this rank answers for, by Hugging Face name."""
        return {name: tensor for part in self.parts for name, tensor in part.export_tensors().items()}

    def load_tensors(self, tensors) -> None:
        """As of ``Stage``."""
        for part in self.parts:
            part.load_tensors(tensors)


# ------------------------------------------------------------------------------------------------ loading
def find_file(model: str, name: str) -> Path | None:
    """The local path of file ``name`` of a model folder or hub name, or None where the model has no such file.

    Raises:
        ValueError: neither a folder nor a hub name that can be reached.
    """
    if Path(model).is_dir():
        path = Path(model) / name
        return path if path.exists() else None
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(model, name))
    except EntryNotFoundError as error:
        if not isinstance(error, LocalEntryNotFoundError):
            return None
        reason = "it is not in the cache and the hub cannot be reached"
    except (OSError, ValueError) as error:  # no such repository, no access, no valid name
        reason = str(error).strip().splitlines()[0]
    raise ValueError(f"model {model} is neither a folder nor a hub model that can be read ({reason}): check the name")


class _Checkpoint:
    """The safetensors files of a model as a mapping that reads one tensor at a time."""

    def __init__(self, model: str):
        self.model, self.files = model, {}
        index = find_file(model, "model.safetensors.index.json")
        if index is not None:
            self.where = json.loads(index.read_text())["weight_map"]
        elif find_file(model, "model.safetensors") is not None:
            self.where = dict.fromkeys(self._open("model.safetensors").keys(), "model.safetensors")
        else:
            raise ValueError(f"{model} holds no model.safetensors: save it with save_pretrained(safe_serialization=True)")

    def _open(self, file: str):
        if file not in self.files:
            from safetensors import safe_open

            path = find_file(self.model, file)
            if path is None:
                raise ValueError(f"{self.model} names {file} in its index but does not hold it: download it again")
            self.files[file] = safe_open(path, "pt")
        return self.files[file]

    def __contains__(self, name: str) -> bool:
        return name in self.where

    def __getitem__(self, name: str) -> Tensor:
        return self._open(self.where[name]).get_tensor(name)


def load_weights(stage: Stage | Stages, model: str) -> Stage | Stages:
    """Fill ``stage`` from a folder or hub name, reading only its own tensors.

    Raises:
        ValueError: no safetensors, a missing tensor, or a shape that does not match.
    """
    stage.load_tensors(_Checkpoint(model))
    return stage


def load_config(model: str):
    """The Hugging Face configuration of a folder or hub name, checked to be of a supported architecture."""
    from transformers import AutoConfig

    if find_file(model, "config.json") is None:
        raise ValueError(f"{model} holds no config.json: name a Hugging Face model folder or hub model")
    config = AutoConfig.from_pretrained(model)
    check_architecture(config)
    return config


if __name__ == "__main__":
    from plan import main

    main()
