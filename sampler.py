"""Samples completions: one decode engine over a chain of stages.

The chain is either one stage, a full copy of the model on one rank, or the training stages themselves, where every rank
decodes with its own layers and keeps the caches of those layers only: no rank ever needs the whole model and there is
nothing to keep in step with the training. The same code runs on every rank of the chain.

How it works:
* Sequences step together in *lanes*, as many as there are stages: while the last stage works on one lane, the stage
  before it works on the next. A lane visits the stages in turn; the last one draws a token for each of its sequences
  and tells every stage, so that all of them make the same changes to their caches without a word more.
* A sequence owns one slot of its lane's cache, and its token number k stands in column k whatever the others do.
  There is no padding on the left, so prompts of different lengths are exact; a finished sequence's slot goes to the
  last one of the lane (the batch that is computed holds live sequences only) or to one that waits.
* A prompt is run once for its whole group and its keys and values are copied into the group's slots.
* Every sequence has random numbers of its own, made of (seed, rollout, question, sample), and its next token is read
  off the inverse of the distribution function. So a sequence comes out the same, up to the rounding of the
  probabilities, on any number of stages, in any batch, on any machine.

Left out: a prompt's cache shared by its group instead of copied, paged caches, beam search, speculative decoding,
CUDA graphs. Who needs those brings an engine of their own: see ``engines.py``.

Legend: B live sequences of a lane, P prompts, T tokens of the longest prompt, H hidden size, V vocabulary.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from drawing import Sampling, draw, uniforms
from rollout import Completion
from stages import Stage, find_file

PREFILL_TOKENS = 2048  # prompt tokens, padding included, that pass through the layers at once
DRAW_ELEMENTS = 2**24  # logits that are turned into tokens at once; bounds memory for large vocabularies


def stop_ids(model: str, config, tokenizer=None) -> set[int]:
    """Every id that ends a sequence: the union of generation config, model config and tokenizer.

    They often differ (Qwen2.5: the configuration says 151643, the chat tokenizer 151645), and a sampler that honours
    only one of them runs on into an invented next turn.

    Args:
        model: folder or hub name, looked up for its ``generation_config.json``.
    """
    found = [getattr(config, "eos_token_id", None), getattr(tokenizer, "eos_token_id", None)]
    if find_file(model, "generation_config.json") is not None:
        from transformers import GenerationConfig

        found.append(GenerationConfig.from_pretrained(model).eos_token_id)
    ids: set[int] = set()
    for entry in found:
        ids.update(entry if isinstance(entry, (list, tuple)) else [] if entry is None else [entry])
    return ids


# ------------------------------------------------------------------------------------------------ between stages
class Link:
    """What a stage sends to the next one, and the last one to all others.

    Hidden states travel through ``group`` (NCCL on GPUs), what was drawn travels from host to host through ``control``,
    a gloo group of the same ranks. Sends never block: gloo's plain ``send`` waits for its receiver, and two stages that
    send to each other would wait forever.
    """

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device | str = "cpu", control: dist.ProcessGroup | None = None
    ):
        self.index, self.count, self.device = dist.get_rank(group), dist.get_world_size(group), device
        # Without a group for it every process of the job has to make its link now.
        self.control = control or dist.new_group(dist.get_process_group_ranks(group), backend="gloo")
        self.forward = group
        self.waited = 0.0  # seconds spent waiting for others

    def send_hidden(self, hidden: Tensor) -> list:
        return [(dist.isend(hidden, group=self.forward, group_dst=self.index + 1), hidden)]

    def receive_hidden(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return self._receive(torch.empty(shape, dtype=dtype, device=self.device), self.forward, self.index - 1)

    def send_results(self, results: Tensor) -> list:
        return [(dist.isend(results, group=self.control, group_dst=to), results) for to in range(self.count - 1)]

    def receive_results(self, count: int) -> Tensor:
        return self._receive(torch.empty(3, count, dtype=torch.float64), self.control, self.count - 1)

    def _receive(self, into: Tensor, group: dist.ProcessGroup, source: int) -> Tensor:
        start = time.perf_counter()
        dist.recv(into, group=group, group_src=source)
        self.waited += time.perf_counter() - start
        return into


# ------------------------------------------------------------------------------------------------ caches
class _PromptCache:
    """Handed to the layers while prompts run: puts their keys and values into the slots of their groups."""

    def __init__(self, store: Tensor, slots: slice, rows: Tensor):
        self.store, self.slots, self.rows = store, slots, rows

    def update(self, keys: Tensor, values: Tensor, layer: int, **_) -> tuple[Tensor, Tensor]:
        for into, new in zip(self.store[layer], (keys, values)):
            into[self.slots, :, : new.shape[2]] = new[self.rows]
        return keys, values


class _TokenCache:
    """Handed to the layers while sequences step: appends one column to each and gives back what they look at."""

    def __init__(self, store: Tensor, length: Tensor, columns: int):
        self.store, self.length, self.columns = store, length, columns
        self.slot = torch.arange(len(length), device=store.device)

    def update(self, keys: Tensor, values: Tensor, layer: int, **_) -> tuple[Tensor, Tensor]:
        for into, new in zip(self.store[layer], (keys, values)):
            into[self.slot, :, self.length] = new[:, :, 0].to(into.dtype)
        keys, values = self.store[layer, :, : len(self.slot), :, : self.columns]
        return keys, values


# ------------------------------------------------------------------------------------------------ a call's state
@dataclass
class _Job:
    """What one call of ``generate`` knows. A unit is a run of samples of one question that enter a lane together."""

    prompts: list[list[int]]
    group_size: int
    sampling: Sampling
    uniforms: Tensor | None  # [sequences, max_new_tokens] on the last stage
    waiting: deque[range] = field(default_factory=deque)  # units of sequences that no lane has taken yet

    def __post_init__(self):
        sequences = len(self.prompts) * self.group_size
        self.prompt_length = torch.tensor([len(p) for p in self.prompts]).repeat_interleave(self.group_size)
        self.ids = torch.zeros(sequences, self.sampling.max_new_tokens, dtype=torch.long)
        self.logprobs = torch.zeros(sequences, self.sampling.max_new_tokens, dtype=torch.float64)
        self.count = torch.zeros(sequences, dtype=torch.long)
        self.finished = torch.zeros(sequences, dtype=torch.bool)


@dataclass
class _Chunk:
    """Prompts that run at once, and the slots of the sequences that start with them."""

    prompts: list[list[int]]
    slots: slice
    rows: Tensor  # [sequences] which of the prompts each starts with


class _Lane:
    """Sequences that step together. They fill the first ``live`` slots without gaps; all state is on the host."""

    def __init__(self, capacity: int, store: Tensor):
        self.capacity, self.store = capacity, store  # store [layers, 2, slots, key/value heads, columns, head size]
        self.live = 0
        self.sequence = torch.zeros(capacity, dtype=torch.long)
        self.length = torch.zeros(capacity, dtype=torch.long)  # tokens in the cache
        self.token = torch.zeros(capacity, dtype=torch.long)  # drawn last and not in the cache yet
        self.open, self.in_transit = True, False
        self.results: Tensor | None = None  # kept on the last stage until the lane's next turn
        self.sends: list = []

    def admit(self, job: _Job) -> list[_Chunk]:
        """Take waiting units while there are slots. Prompts of like length share a chunk."""
        units = []
        room = self.capacity - self.live
        while job.waiting and len(job.waiting[0]) <= room:
            units.append(job.waiting.popleft())
            room -= len(units[-1])
        units.sort(key=lambda unit: -int(job.prompt_length[unit[0]]))
        chunks = []
        while units:
            longest = int(job.prompt_length[units[0][0]])
            part, units = units[: max(1, PREFILL_TOKENS // longest)], units[max(1, PREFILL_TOKENS // longest) :]
            sequences = torch.tensor([i for unit in part for i in unit])
            slots = slice(self.live, self.live + len(sequences))
            self.sequence[slots] = sequences
            self.length[slots] = job.prompt_length[sequences]
            self.live = slots.stop
            rows = torch.arange(len(part)).repeat_interleave(torch.tensor([len(unit) for unit in part]))
            chunks.append(_Chunk([job.prompts[unit[0] // job.group_size] for unit in part], slots, rows))
        return chunks

    def retire(self, done: Tensor) -> None:
        """Drop the sequences that are ``done`` [B]; the last of the others move into the gaps."""
        left = self.live - int(done.sum())
        gaps = done[:left].nonzero()[:, 0].tolist()
        movers = ((~done[left:]).nonzero()[:, 0] + left).tolist()
        for to, of in zip(gaps, movers):
            columns = int(self.length[of])
            self.store[:, :, to, :, :columns] = self.store[:, :, of, :, :columns]
            for state in (self.sequence, self.length, self.token):
                state[to] = state[of]
        self.live = left


# ------------------------------------------------------------------------------------------------ the engine
class Sampler:
    """Completions from prompts, by ``stage`` alone or together with the other ranks of ``link``.

    Args:
        stage: the whole model as one stage, or this rank's stage of the chain. Its weights may change between calls.
        eos_ids: ids that end a sequence (``stop_ids``).
        link: the other stages; None for a chain of one.
        decode: ids -> text, needed for stop strings only.

    Attributes:
        version: of the weights in ``stage``, for the log; whoever writes them counts it up.
        seconds, waited: of the last call, all of it and the part spent waiting for other stages.
    """

    def __init__(
        self, stage: Stage, *, eos_ids: Iterable[int], link: Link | None = None, pad_id: int = 0,
        decode: Callable[[list[int]], str] | None = None,
    ):
        index, count = (link.index, link.count) if link else (0, 1)
        if (stage.spec.index, stage.spec.count) != (index, count):
            raise ValueError(
                f"stage {stage.spec.index} of {stage.spec.count} cannot stand at place {index} of a chain of {count}"
            )
        self.stage, self.link, self.decode = stage, link, decode
        self.eos_ids, self.pad_id = frozenset(eos_ids), pad_id
        self.version = 0
        self.seconds = self.waited = 0.0

    @property
    def idle_share(self) -> float:
        """Share of the last call that this rank spent waiting for other stages."""
        return self.waited / self.seconds if self.seconds else 0.0

    def cache_bytes(self, longest_prompt: int, sampling: Sampling) -> int:
        """The most that this rank's caches take, for prompts of up to ``longest_prompt`` tokens."""
        attention, columns = self.stage.layers[0].self_attn, _round_up(longest_prompt + sampling.max_new_tokens)
        per_token = 2 * len(self.stage.layers) * self.stage.config.num_key_value_heads * attention.head_dim
        return per_token * columns * sampling.max_sequences_in_flight * self.stage.compute_dtype.itemsize

    def update_weights(self, tensors: Mapping[str, Tensor], version: int) -> None:
        """Take new weights, by Hugging Face name (for a chain of one; the training stages are always up to date)."""
        self.stage.load_tensors(tensors)
        self.version = version

    def generate(
        self, prompts: list[list[int]], *, group_size: int, sampling: Sampling, stream: tuple[int, ...],
        first_question: int = 0,
    ) -> list[Completion]:
        """``group_size`` completions of each prompt, in order of question and then sample, on every rank of the chain.

        Every rank calls it with the same arguments. ``text`` is left empty.

        Args:
            prompts: token ids.
            stream: non-negative integers that start every sequence's random numbers, say (seed, rollout); another
                replica of the model, which has other prompts, goes on counting ``first_question``.
            first_question: number of the first prompt within the rollout.

        Raises:
            ValueError: an empty prompt, an id outside the vocabulary, too many tokens for the model's positions.
            FloatingPointError: the policy's logits are not finite.
        """
        self._check(prompts, group_size, sampling)
        start, self.waited = time.perf_counter(), 0.0
        if self.link:
            self.link.waited = 0.0
        stage = self.stage
        # An outer autocast keeps the cast weights for the whole call instead of casting them at every step.
        with torch.inference_mode(), torch.autocast(
            stage.device.type, stage.compute_dtype, enabled=stage.compute_dtype != stage.dtype
        ):
            job = _Job(prompts, group_size, sampling, None)
            if stage.spec.is_last and sampling.temperature > 0:
                job.uniforms = torch.from_numpy(np.stack([
                    uniforms(stream, first_question + i // group_size, i % group_size, sampling.max_new_tokens)
                    for i in range(len(prompts) * group_size)
                ])) if prompts else None
            self._run(job)
        self.seconds = time.perf_counter() - start
        self.waited = self.link.waited if self.link else 0.0
        return [
            Completion(
                question=first_question + i // group_size, sample=i % group_size,
                prompt_ids=list(prompts[i // group_size]),
                ids=job.ids[i, :n].tolist(), logprobs=job.logprobs[i, :n].tolist(), finished=bool(job.finished[i]),
            )
            for i, n in enumerate(job.count.tolist())
        ]

    def _check(self, prompts: list[list[int]], group_size: int, sampling: Sampling) -> None:
        config = self.stage.config
        if group_size < 1:
            raise ValueError(f"group_size {group_size} must be at least 1")
        if sampling.stop_strings and self.decode is None:
            raise ValueError("stop strings need a decode function: give the sampler the tokenizer's")
        for i, prompt in enumerate(prompts):
            if not prompt:
                raise ValueError(f"prompt {i} is empty: a completion needs at least one token to follow")
            if not 0 <= min(prompt) <= max(prompt) < config.vocab_size:
                raise ValueError(f"prompt {i} holds an id outside the model's vocabulary of {config.vocab_size}")
            if len(prompt) + sampling.max_new_tokens > config.max_position_embeddings:
                raise ValueError(
                    f"prompt {i} of {len(prompt)} tokens and {sampling.max_new_tokens} new ones do not fit the model's "
                    f"{config.max_position_embeddings} positions: shorten one of them"
                )

    def _run(self, job: _Job) -> None:
        lanes = self._make_lanes(job)
        # Every stage takes the same turns in the same order, and all that it decides follows from what was drawn.
        while any(lane.open for lane in lanes):
            for lane in lanes:
                if lane.open:
                    self._turn(lane, job)
        for lane in lanes:
            _finish(lane.sends)

    def _make_lanes(self, job: _Job) -> list[_Lane]:
        """Split the work so that every stage has a lane to work on, and no lane is much larger than another."""
        sequences, size = len(job.ids), job.group_size
        if not sequences:
            return []
        limit = job.sampling.max_sequences_in_flight
        count = min(self.link.count if self.link else 1, limit, sequences)
        share = min(limit // count, math.ceil(sequences / count))
        unit = min(size, share)
        if share > unit:
            share -= share % unit
            # Rounding down must not leave a group to wait for a slot that memory allows.
            if share * count < sequences and (share + unit) * count <= limit:
                share += unit
        for question in range(len(job.prompts)):
            pieces = math.ceil(size / unit)
            cuts = [question * size + size * piece // pieces for piece in range(pieces + 1)]
            job.waiting.extend(range(a, b) for a, b in zip(cuts, cuts[1:]))
        stage = self.stage
        attention = stage.layers[0].self_attn
        columns = _round_up(int(job.prompt_length.max()) + job.sampling.max_new_tokens)
        shape = (len(stage.layers), 2, share, stage.config.num_key_value_heads, columns, attention.head_dim)
        # Zeros, since a column that is masked out still counts as 0 * value, and 0 * NaN is NaN.
        return [
            _Lane(share, torch.zeros(shape, dtype=stage.compute_dtype, device=stage.device)) for _ in range(count)
        ]

    def _turn(self, lane: _Lane, job: _Job) -> None:
        """Take in what was drawn for the lane, change who is in it, and run its next step through this stage."""
        earlier, lane.sends = lane.sends, []
        if lane.in_transit:
            self._collect(lane, job)
        stepping = lane.live
        chunks = lane.admit(job)
        lane.open = lane.in_transit = lane.live > 0
        if not lane.open:
            lane.sends = earlier
            return
        out = []
        if stepping:
            out.append(self._step(lane, stepping))
        for chunk in chunks:
            out.append(self._prefill(lane, chunk))
        if self.stage.spec.is_last:
            lane.results = self._draw(torch.cat(out), lane, job)
            if self.link:
                lane.sends += self.link.send_results(lane.results)
        _finish(earlier)  # over already: this turn's messages are the answer to them

    def _step(self, lane: _Lane, live: int) -> Tensor | None:
        """One token of each live sequence through this stage -> its hidden state [B, H] on the last stage."""
        device, length = self.stage.device, lane.length[:live].to(self.stage.device)
        columns = min(_round_up(int(lane.length[:live].max()) + 1), lane.store.shape[-2])
        distance = length[:, None] - torch.arange(columns, device=device)
        masks = {}
        for kind in set(self.stage.layer_types):
            hidden_columns = distance < 0
            if kind == "sliding_attention":
                hidden_columns |= distance >= self.stage.window
            mask = torch.zeros(live, columns, dtype=lane.store.dtype, device=device)
            masks[kind] = mask.masked_fill_(hidden_columns, float("-inf"))[:, None, None]
        cache = _TokenCache(lane.store, length, columns)
        hidden = self._through(lane, lane.token[:live, None], length[:, None], masks, cache)
        lane.length[:live] += 1
        return hidden[:, 0] if self.stage.spec.is_last else hidden

    def _prefill(self, lane: _Lane, chunk: _Chunk) -> Tensor | None:
        """Prompts through this stage -> the hidden state each sequence starts from, [sequences, H], on the last stage.

        The prompts are padded on the right, where no real token looks, so that causal attention needs no mask.
        """
        device = self.stage.device
        longest = max(map(len, chunk.prompts))
        ids = torch.tensor([p + [self.pad_id] * (longest - len(p)) for p in chunk.prompts])
        positions = torch.arange(longest, device=device).expand(len(ids), -1)
        masks = dict.fromkeys(self.stage.layer_types)
        if "sliding_attention" in masks and longest > self.stage.window:
            sees = torch.ones(longest, longest, dtype=torch.bool, device=device).tril_().triu_(1 - self.stage.window)
            mask = torch.zeros(1, 1, longest, longest, dtype=lane.store.dtype, device=device)
            masks["sliding_attention"] = mask.masked_fill_(~sees, float("-inf"))
        rows = chunk.rows.to(device)
        hidden = self._through(lane, ids, positions, masks, _PromptCache(lane.store, chunk.slots, rows))
        if not self.stage.spec.is_last:
            return None
        last = torch.tensor([len(p) - 1 for p in chunk.prompts], device=device)
        return hidden[rows, last[rows]]

    def _through(self, lane: _Lane, ids: Tensor, positions: Tensor, masks: dict, cache) -> Tensor:
        """Embed or receive, run this stage's layers, and pass the hidden states on unless this is the last stage."""
        stage = self.stage
        if stage.spec.is_first:
            hidden = stage.embed(ids.to(stage.device))
        else:
            hidden = self.link.receive_hidden((*ids.shape, stage.config.hidden_size), stage.dtype)
        hidden = stage.run_layers(hidden, positions, masks, cache)
        if not stage.spec.is_last:
            lane.sends += self.link.send_hidden(hidden.contiguous())
        return hidden

    def _draw(self, hidden: Tensor, lane: _Lane, job: _Job) -> Tensor:
        """Hidden states [B, H] -> tokens, log-probs, whether each ends by itself: float64 [3, B] on the host."""
        stage, sampling = self.stage, job.sampling
        sequence = lane.sequence[: lane.live]
        index = lane.length[: lane.live] - job.prompt_length[sequence]  # of the new token in its completion
        uniform = torch.zeros(lane.live, dtype=torch.float64) if job.uniforms is None else job.uniforms[sequence, index]
        uniform = uniform.to(stage.device)
        stops = torch.tensor(sorted({*self.eos_ids, *sampling.stop_ids}), dtype=torch.long)
        early = index + 1 < sampling.min_new_tokens  # a completion of exactly min_new_tokens may end with a stop
        tokens, logprobs = [], []
        rows = max(1, DRAW_ELEMENTS // stage.config.vocab_size)
        for part in range(0, lane.live, rows):
            logits = stage.logits(hidden[part : part + rows])
            banned = None
            if early.any():
                banned = torch.zeros_like(logits, dtype=torch.bool)
                banned[:, stops] = early[part : part + rows, None].to(stage.device)
            token, logprob = draw(logits, uniform[part : part + rows], sampling, banned)
            tokens.append(token)
            logprobs.append(logprob)
        results = torch.stack([torch.cat(tokens).double(), torch.cat(logprobs).double()]).cpu()
        if not results[1].isfinite().all():
            raise FloatingPointError("the policy's logits are not finite: its weights or activations have overflowed")
        tokens = results[0].long()
        ends = torch.isin(tokens, stops)
        if sampling.stop_strings:
            ends |= self._completes_stop_string(sequence, index, tokens, job) & ~early
        return torch.cat([results, ends[None].double()])

    def _completes_stop_string(self, sequence: Tensor, index: Tensor, tokens: Tensor, job: _Job) -> Tensor:
        """Whether a stop string stands in the decoded end of each sequence.

        A stop string of n bytes spans at most n tokens; some more are decoded, since the first may decode otherwise
        than it does further inside a text.
        """
        window = max(len(s.encode()) for s in job.sampling.stop_strings) + 8
        found = []
        for s, n, token in zip(sequence.tolist(), index.tolist(), tokens.tolist()):
            text = self.decode([*job.ids[s, max(0, n - window) : n].tolist(), token])
            found.append(any(stop in text for stop in job.sampling.stop_strings))
        return torch.tensor(found)

    def _collect(self, lane: _Lane, job: _Job) -> None:
        """Write down what the last stage has drawn for the lane, and drop the sequences that are done."""
        results = lane.results if self.stage.spec.is_last else self.link.receive_results(lane.live)
        live, tokens = slice(lane.live), results[0].long()
        sequence = lane.sequence[live]
        index = lane.length[live] - job.prompt_length[sequence]
        job.ids[sequence, index], job.logprobs[sequence, index] = tokens, results[1]
        job.count[sequence] = index + 1
        ended = results[2].bool()
        job.finished[sequence] = ended
        lane.token[live] = tokens
        lane.retire(ended | (index + 1 == job.sampling.max_new_tokens))


def _finish(sends: list) -> None:
    for work, _ in sends:
        work.wait()


def _round_up(columns: int, multiple: int = 8) -> int:
    """GPU attention kernels want masks whose rows start at multiples of 8 entries."""
    return -(-columns // multiple) * multiple
