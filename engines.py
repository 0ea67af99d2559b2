"""Engines other than our own: what ``--sampler module:Class`` must offer, and how it is found."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from drawing import Sampling
from rollout import Completion


class Engine(Protocol):
    """What ``--sampler module:Class`` must offer; it lives on the first stage's rank, like the chain of one stage.

    ``__init__(model, *, eos_ids, pad_id, decode, device, dtype)`` gets the folder or hub name of the starting weights.
    """

    version: int

    def generate(
        self, prompts: list[list[int]], *, group_size: int, sampling: Sampling, stream: tuple[int, ...],
        first_question: int = 0,
    ) -> list[Completion]:
        """As ``Sampler.generate``: ids with the end-of-sequence token, log-probs of the full law at the temperature."""

    def update_weights(self, tensors: Mapping[str, Tensor], version: int) -> None:
        """Take the weights of the whole model, by Hugging Face name."""


def load_engine(name: str) -> type[Engine]:
    """The class that ``module:Class`` names.

    Raises:
        ValueError: no such module or class, or it lacks one of the two methods.
    """
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise ValueError(f"sampler {name!r} must be rank0, replicas, pipeline or module:Class")
    try:
        engine = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"sampler {name!r} cannot be loaded: {error}") from error
    for method in ("generate", "update_weights"):
        if not callable(getattr(engine, method, None)):
            raise ValueError(f"sampler {name!r} has no method {method}()")
    return engine
