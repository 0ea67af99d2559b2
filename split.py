"""Decides which decoder layers of a model go to which pipeline stage, and what each stage then costs.

All of it follows from the configuration of the model: no weight is loaded, and the modules that count parameters
have no storage.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch

from attention import attend

SUPPORTED = ("qwen2", "qwen3", "llama", "mistral", "smollm3")


@dataclass(frozen=True)
class StageSpec:
    """Layers [first_layer, end_layer) of the model on stage ``index`` of ``count``."""

    index: int
    count: int
    first_layer: int
    end_layer: int
    parameters: int  # held by this stage; a tied head on another stage than the embeddings counts as its own copy
    cost: float  # share of the whole model's matrix work, 0..1

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.count - 1


def check_architecture(config) -> None:
    """Raise ValueError unless ``config`` is of a model type that can be cut here."""
    if config.model_type not in SUPPORTED:
        raise ValueError(
            f"model type {config.model_type!r} cannot be cut into stages; choose a model of type {', '.join(SUPPORTED)}"
        )


def plan_stages(
    config, count: int, split: list[int] | None = None, *, activation_checkpointing: bool = False, head_share: float = 1.0
) -> list[StageSpec]:
    """Spread the layers over ``count`` stages so that the slowest stage is as fast as it can be.

    The cost of a part is its number of matrix parameters, which is its FLOPs per token but for attention scores; the
    embedding is a look-up and costs nothing. The head counts 4/3, since it is computed again in backward: four products
    where a layer has three, unless layers are recomputed too. Layers are all alike, so giving each next layer to the stage
    that is cheapest so far is optimal, and no layer is ever dropped: 5 layers on 2 stages are 3 + 2, 30 on 4 are
    8 + 8 + 7 + 7 (small vocabulary); Qwen2.5-0.5B, whose head weighs 12.2 layers, becomes 18 + 6.

    Args:
        split: layers per stage given by hand, e.g. ``[16, 8]``; they must add up.
        activation_checkpointing: the layers are recomputed in backward.
        head_share: of the tokens in packed rows, those that go through the head: completion tokens. Short answers to long
            prompts make the head cheap.

    Raises:
        ValueError: unsupported architecture, fewer layers than stages, or a split that does not fit.
    """
    check_architecture(config)
    layers = config.num_hidden_layers
    if count < 1 or layers < count:
        raise ValueError(f"{layers} layers cannot fill {count} stages: start at most {layers} processes for this model")
    layer, head = _parameters_of_a_layer(config), config.vocab_size * config.hidden_size
    head_cost = head_share * (head if activation_checkpointing else head * 4 / 3)
    if split is None:
        sizes = [1] * count
        costs = [float(layer)] * count
        costs[-1] += head_cost
        for _ in range(layers - count):
            cheapest = costs.index(min(costs))
            sizes[cheapest] += 1
            costs[cheapest] += layer
    else:
        sizes = list(split)
        if len(sizes) != count or sum(sizes) != layers or min(sizes) < 1:
            raise ValueError(
                f"split {','.join(map(str, split))} does not fit: {count} stages need {count} numbers of at least 1 "
                f"that add up to the model's {layers} layers"
            )
    whole = layer * layers + head_cost
    specs, first = [], 0
    for index, size in enumerate(sizes):
        is_first, is_last = index == 0, index == count - 1
        parameters = size * layer
        if is_first:
            parameters += head
        if is_last:
            parameters += config.hidden_size + (0 if is_first and config.tie_word_embeddings else head)
        cost = (size * layer + (head_cost if is_last else 0)) / whole
        specs.append(StageSpec(index, count, first, first + size, parameters, cost))
        first += size
    return specs


def _parameters_of_a_layer(config) -> int:
    one_layer = config_of_layers(config, 0, 1)
    return sum(p.numel() for p in skeleton(one_layer).model.layers[0].parameters())


def attention_cost(config) -> float:
    """What attending to one more column costs a token, relative to the matrix products of a layer."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_attention_heads * head_dim / _parameters_of_a_layer(config)


def describe_plan(specs: list[StageSpec], config) -> str:
    """The plan as a small table for the console; memory is weights + gradients + AdamW state in float32."""
    lines = ["stage  layers    parameters  share of cost  weights+grads+AdamW"]
    for s in specs:
        what = f"{s.first_layer}-{s.end_layer - 1}"
        memory = s.parameters * 16 / 2**20
        size = f"{memory / 1024:.2f} GiB" if memory >= 1024 else f"{memory:.1f} MiB"
        lines.append(f"{s.index:<5}  {what:<8}  {s.parameters / 1e6:>8.2f} M  {s.cost:>12.0%}  {size:>19}")
    tied = " (tied to the head: first and last stage each hold a copy)" if config.tie_word_embeddings else ""
    return "\n".join(lines) + f"\nembeddings {config.vocab_size} x {config.hidden_size}{tied}"


# ------------------------------------------------------------------------------------------------ parts of a model
def config_of_layers(config, first: int, end: int):
    """A copy of ``config`` that describes only layers [first, end): transformers looks per-layer lists up by place."""
    part = copy.deepcopy(config)
    for name, value in list(vars(part).items()):
        if isinstance(value, (list, tuple)) and len(value) == config.num_hidden_layers and name != "architectures":
            setattr(part, name, list(value[first:end]))
    part.num_hidden_layers = end - first
    part.attention_dropout = 0.0  # with dropout the ratio of an on-policy update would not be 1
    return part


def skeleton(config):
    """transformers' model of ``config`` without storage."""
    from transformers import AttentionInterface, AutoModelForCausalLM

    AttentionInterface.register("tiled", attend)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, attn_implementation="tiled")
