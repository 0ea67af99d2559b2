"""What both sides of bench/versus_trl.py share: the workloads, and how a step is started and reported.

Standard library only: ``trl_step.py`` imports it in the other environment. The tokens of a prompt, how many tokens each
completion gets and what a completion is worth follow from the step's number alone, so both sides do the same work
without a word to each other.

Left out: models and everything that computes.
"""

from __future__ import annotations

import json
import random
import resource
import sys
import time
from dataclasses import dataclass

PROMPTS = 8  # of a step
STORED = 512  # prompts in the data: 64 steps before they come again
BETA = 0.04
LEARNING_RATE = 1e-6


@dataclass(frozen=True)
class Workload:
    """One step: PROMPTS prompts of ``prompt_tokens``, ``group`` completions of each, of up to ``new_tokens``.

    Args:
        chance: of every token to be its completion's last, so that lengths are geometric and cut at ``new_tokens``;
            0: all completions have ``new_tokens`` tokens.
        large: the model of 98 M parameters (hidden 768, 12 layers, vocabulary 32k) instead of the one of 5 M.
    """

    prompt_tokens: int = 16
    group: int = 8
    new_tokens: int = 64
    chance: float = 0.0
    large: bool = False

    @property
    def model(self) -> dict:
        """Fields of the Qwen2 configuration."""
        if self.large:
            return dict(hidden_size=768, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=12,
                        num_key_value_heads=2, vocab_size=32_000, tie_word_embeddings=True)
        return dict(hidden_size=256, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=4,
                    num_key_value_heads=2, vocab_size=1000, tie_word_embeddings=False)

    def prompts(self) -> list[str]:
        """Letters; the tokenizer makes one token of each."""
        draw = random.Random("prompts")
        return ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=self.prompt_tokens)) for _ in range(STORED)]

    def lengths(self, step: int) -> list[int]:
        """Tokens of each completion of a step, in order of prompt and sample; the last one counts.

        They are the middles of equal shares of the distribution, shuffled: every step has the same tokens in all.
        """
        count = PROMPTS * self.group
        if not self.chance:
            return [self.new_tokens] * count
        found, length, below = [], 1, self.chance
        for i in range(count):
            while length < self.new_tokens and below < (i + 0.5) / count:
                length += 1
                below += self.chance * (1 - self.chance) ** (length - 1)
            found.append(length)
        random.Random(step).shuffle(found)
        return found


WORKLOADS = {
    "equal": Workload(),
    "ragged": Workload(chance=0.031),  # mean 28 of 64
    "prompts": Workload(prompt_tokens=128),
    "scheduling": Workload(prompt_tokens=200, group=10, new_tokens=128, chance=0.0307),  # mean 32 of 128
    "large": Workload(large=True),
}


def score(completion: str, row: dict) -> float:
    """The reward: share of even characters. Cheap, and never the same for a whole group."""
    return sum(ord(c) % 2 == 0 for c in completion) / max(1, len(completion))


class Turns:
    """One side's steps: waits for its turn, measures, and reports a line of JSON that begins with @."""

    def begin(self, wait: bool = True) -> bool:
        """Wait for the word to take a step; False: there is none any more."""
        if wait and sys.stdin.readline().strip() != "go":
            return False
        self.wall, self.cpu = time.perf_counter(), time.process_time()
        return True

    def end(self, **more) -> None:
        """Report the step: seconds, CPU seconds of this process with all its threads, the most memory so far in bytes."""
        wall, cpu = time.perf_counter() - self.wall, time.process_time() - self.cpu
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print("@" + json.dumps(dict(wall=wall, cpu=cpu, peak=peak) | more), flush=True)
