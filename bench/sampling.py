"""Measures the sampler: against transformers' generate, one chain against the other, and memory per rank.

    python bench/sampling.py            # some ten minutes on two cores
    python bench/sampling.py --quick    # one minute, small model only

Every comparison runs its two sides in turns, several times, and reports the median of the ratios of neighbours, so that
a machine that others use at the same time does not decide. Both sides of the first table use one thread, where CPU
seconds are what counts; the second compares wall clocks, of one process with one thread and of two with one thread
each. Beside it stands the ratio of CPU seconds, one stage's over the busiest stage's of the pipeline: what the wall
clock would come to if no stage ever waited.

Random Qwen2-shaped weights in float32. For ragged lengths so many tokens of the vocabulary end a sequence that the mean
is about 28 of 64. transformers is made to draw the sampler's tokens, so that both do the same work.
"""

from __future__ import annotations

import argparse
import os
import resource
import socket
import statistics
import sys
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.multiprocessing as mp  # noqa: E402
from transformers import AutoModelForCausalLM, LogitsProcessor, LogitsProcessorList, Qwen2Config  # noqa: E402

from drawing import Sampling  # noqa: E402
from sampler import Link, Sampler  # noqa: E402
from split import plan_stages  # noqa: E402
from stages import Stage  # noqa: E402

SHAPES = {  # hidden, intermediate, layers, heads, key/value heads, vocabulary
    "5 M": (256, 704, 6, 4, 2, 2048),
    "100 M": (768, 2560, 12, 12, 2, 16384),
}
NEW_TOKENS, GROUP = 64, 8


def config_of(size: str) -> Qwen2Config:
    hidden, intermediate, layers, heads, kv_heads, vocabulary = SHAPES[size]
    return Qwen2Config(
        hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, vocab_size=vocabulary, tie_word_embeddings=True, max_position_embeddings=1024,
        bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )


def stage_of(config, index: int = 0, count: int = 1) -> Stage:
    """A stage with small random weights; only the shapes matter for speed."""
    stage = Stage(config, plan_stages(config, count)[index])
    torch.manual_seed(0)
    with torch.no_grad():
        for p in stage.parameters():
            p.normal_(0, 0.02) if p.dim() > 1 else p.fill_(1)
    return stage


def prompts_of(count: int, length: int, vocabulary: int) -> list[list[int]]:
    return torch.randint(vocabulary, (count, length), generator=torch.Generator().manual_seed(1)).tolist()


def stops_of(vocabulary: int, ragged: bool) -> set[int]:
    return set(range(0, vocabulary, 35)) if ragged else set()


class GivenTokens(LogitsProcessor):
    """Raises one logit of each row so far that the token drawn next is the given one."""

    def __init__(self, tokens: torch.Tensor, prompt: int):
        self.tokens, self.prompt, self.rows = tokens, prompt, torch.arange(len(tokens))

    def __call__(self, input_ids, scores):
        scores[self.rows, self.tokens[:, input_ids.shape[1] - self.prompt]] = 1e4
        return scores


def against_transformers(size: str, prompt: int, ragged: bool, repeats: int) -> str:
    config = config_of(size)
    stage = stage_of(config)
    stops = stops_of(config.vocab_size, ragged)
    sampler = Sampler(stage, eos_ids=stops)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    model.load_state_dict(stage.export_tensors(), strict=False)
    prompts = prompts_of(8, prompt, config.vocab_size)
    out = []

    def ours():
        out[:] = sampler.generate(
            prompts, group_size=GROUP, sampling=Sampling(max_new_tokens=NEW_TOKENS), stream=(0,)
        )

    def theirs():
        tokens = torch.zeros(len(out), NEW_TOKENS, dtype=torch.long)
        for i, c in enumerate(out):
            tokens[i, : len(c.ids)] = torch.tensor(c.ids)
        ids = torch.tensor(prompts)
        result = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=True, num_return_sequences=GROUP,
            max_new_tokens=NEW_TOKENS, eos_token_id=sorted(stops) or None, pad_token_id=0, top_k=0,
            logits_processor=LogitsProcessorList([GivenTokens(tokens, prompt)]),
        )
        assert all(result[i, prompt : prompt + len(c.ids)].tolist() == c.ids for i, c in enumerate(out))

    pairs = interleave(ours, theirs, repeats, time.process_time)
    tokens = sum(len(c.ids) for c in out)
    a, b = (statistics.median(side) for side in zip(*pairs))
    ratio = statistics.median(y / x for x, y in pairs)
    return (
        f"{size:>6}  {prompt:>6}  {tokens / len(out):>11.1f}  {a:>7.2f}  {b:>12.2f}"
        f"  {ratio:>6.2f}x  {tokens / a:>12.0f}"
    )


def interleave(first, second, repeats: int, clock) -> list[tuple[float, float]]:
    """Seconds of both, taken in turns; one run of each before that warms up."""
    pairs = []
    for _ in range(repeats + 1):
        start = clock()
        first()
        middle = clock()
        second()
        pairs.append((middle - start, clock() - middle))
    return pairs[1:]


def _compare_chains(rank: int, world: int, port: int, size: str, prompts: int, length: int, ragged: bool, repeats: int):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    config = config_of(size)
    stops = stops_of(config.vocab_size, ragged)
    chain = Sampler(stage_of(config, rank, world), eos_ids=stops, link=Link(dist.group.WORLD))
    alone = Sampler(stage_of(config), eos_ids=stops) if rank == 0 else None
    arguments = dict(
        prompts=prompts_of(prompts, length, config.vocab_size), group_size=GROUP, stream=(0,),
        sampling=Sampling(max_new_tokens=NEW_TOKENS),
    )
    idle, cpu = [], []

    def whole():
        start = time.process_time()
        if alone:
            alone.generate(**arguments)
        cpu.append((time.process_time() - start, 0.0))
        dist.barrier()

    def pipelined():
        start = time.process_time()
        chain.generate(**arguments)
        cpu[-1] = (cpu[-1][0], time.process_time() - start)
        idle.append(chain.idle_share)
        dist.barrier()

    pairs = interleave(whole, pipelined, repeats, time.perf_counter)
    mine = (statistics.median(idle[1:]), *(statistics.median(side) for side in zip(*cpu[1:])))
    everyone = [None] * world
    dist.all_gather_object(everyone, mine)
    if rank == 0:
        a, b = (statistics.median(side) for side in zip(*pairs))
        ratio = statistics.median(x / y for x, y in pairs)
        shares = " ".join(f"{share:>4.0%}" for share, _, _ in everyone)
        bound = everyone[0][1] / max(second for _, _, second in everyone)
        print(
            f"{size:>6}  {world:>6}  {prompts * GROUP:>9}  {'ragged' if ragged else 'equal':>7}  {a:>7.2f}  {b:>8.2f}"
            f"  {ratio:>5.2f}x  {bound:>11.2f}x  {shares:>14}", flush=True,
        )
    dist.destroy_process_group()


def _measure_memory(rank: int, world: int, port: int, size: str, prompts: int, length: int):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    link = Link(dist.group.WORLD) if world > 1 else None
    config = config_of(size)
    stage_of(config_of("5 M"))  # loads the modules that building a stage needs
    before = resident()
    chain = Sampler(stage_of(config, rank, world), eos_ids=(), link=link)
    sampling = Sampling(max_new_tokens=NEW_TOKENS, max_sequences_in_flight=prompts * GROUP)
    chain.generate(
        prompts_of(prompts, length, config.vocab_size), group_size=GROUP, sampling=sampling, stream=(0,)
    )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    weights = sum(p.numel() * p.element_size() for p in chain.stage.parameters())
    mine = (weights / 2**20, chain.cache_bytes(length, sampling) / 2**20, (peak - before) / 2**20)
    everyone = [None] * world
    dist.all_gather_object(everyone, mine)
    if rank == 0:
        name = "pipeline" if world > 1 else "rank0"
        for place, (weights, caches, peak) in enumerate(everyone):
            print(f"{size:>6}  {name:>8}  {place:>4}  {weights:>11.0f}  {caches:>10.0f}  {peak:>19.0f}", flush=True)
    dist.destroy_process_group()


def resident() -> int:
    """Bytes of this process in memory now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def spawn(function, world: int, *arguments) -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    mp.spawn(function, (world, port, *arguments), nprocs=world)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="the small model only, and fewer repeats")
    parser.add_argument("--only", choices=("transformers", "chains", "memory"), help="one of the tables")
    options = parser.parse_args()
    torch.set_num_threads(1)
    sizes, repeats = (["5 M"], 2) if options.quick else (list(SHAPES), 5)
    if options.only in (None, "transformers"):
        print("\nagainst transformers' generate: 8 prompts x 8 samples, up to 64 new tokens, one thread, CPU seconds")
        print("  size  prompt  mean length  sampler  transformers   ratio  tokens per s")
        for size in sizes:
            for prompt, ragged in ((16, False), (128, True)):
                print(against_transformers(size, prompt, ragged, repeats if size == "5 M" else 3), flush=True)
    if options.only in (None, "chains"):
        print("\npipeline chain against rank-0 chain: 16-token prompts, 64 new tokens, one thread each, wall seconds")
        print("  size  stages  sequences  lengths  1 stage  pipeline   ratio  CPU seconds  idle per stage")
        for size in sizes[-1:]:
            for prompts, ragged in ((16, False), (16, True), (8, False)):
                spawn(_compare_chains, 2, size, prompts, 16, ragged, 2 if options.quick else 3)
    if options.only in (None, "memory"):
        print("\npeak memory in MiB: 128 sequences, 16-token prompts, 64 new tokens")
        print("  size     chain  rank  its weights  its caches  growth by sampling")
        for world in (1, 2):
            spawn(_measure_memory, world, sizes[-1], 16, 16)


if __name__ == "__main__":
    main()
