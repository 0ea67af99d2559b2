"""TRL's side of bench/versus_trl.py: GRPOTrainer on the CPU, one step each time it is told to. Runs in TRL's environment.

A step goes from the end of an optimizer step to the end of the next: fetching, generation, the reference's forward pass,
rewards, forward and backward, clipping, AdamW. float32 without activation checkpointing, since ours has neither bfloat16
nor checkpointing on a CPU by default, and the whole step as one batch, which is TRL's fastest way here. Two processes
(RANK and WORLD_SIZE in the environment) are TRL's DDP over gloo: each has half of the sequences and the whole model.

Left out: vLLM, which needs a GPU; saving and logging.
"""

from __future__ import annotations

import argparse
import os
import tempfile

from same_work import BETA, LEARNING_RATE, PROMPTS, WORKLOADS, Turns, score

os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "ACCELERATE_USE_CPU": "true"}

import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from transformers import AutoTokenizer, LogitsProcessor, LogitsProcessorList, TrainerCallback  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402


class GivenLengths(LogitsProcessor):
    """Ends each sequence at its length and nowhere else; made anew for every step."""

    def __init__(self, lengths: list[int], prompt: int, eos: int):
        self.lengths, self.prompt, self.eos = torch.tensor(lengths), prompt, eos

    def __call__(self, input_ids, scores):
        ends = self.lengths <= input_ids.shape[1] - self.prompt + 1
        scores[:, self.eos] = torch.where(ends, 1e4, -torch.inf)
        return scores


class Gate(TrainerCallback):
    """Between two steps: report the one, wait for the other."""

    def __init__(self, turns: Turns):
        self.turns, self.step, self.tokens = turns, 1, 0

    def on_step_end(self, args, state, control, **_):
        self.turns.end(tokens=self.tokens)
        control.should_training_stop = not self.turns.begin()
        self.step += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workload", choices=WORKLOADS, required=True)
    parser.add_argument("--model", required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    work = WORKLOADS[options.workload]
    world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    share = PROMPTS * work.group // world
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    gate = Gate(Turns())

    def reward(completions, **_):
        return [score(text, {}) for text in completions]

    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(), use_cpu=True, bf16=False, gradient_checkpointing=False,
        per_device_train_batch_size=share, gradient_accumulation_steps=1, num_generations=work.group,
        max_completion_length=work.new_tokens, beta=BETA, loss_type="dapo", learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant", max_grad_norm=1.0, max_steps=10_000, shuffle_dataset=False,
        logging_strategy="no", save_strategy="no", report_to="none", disable_tqdm=True,
        ddp_find_unused_parameters=False,  # on by default without checkpointing, and slower
    )
    trainer = GRPOTrainer(
        model=options.model, reward_funcs=reward, args=config, train_dataset=Dataset.from_dict({"prompt": work.prompts()}),
        processing_class=tokenizer, callbacks=[gate],
    )
    generate = trainer.model.generate

    def generate_given_lengths(*args, **kwargs):
        lengths = work.lengths(gate.step)[rank * share : (rank + 1) * share]
        gate.tokens = sum(lengths)
        prompt = kwargs["input_ids"].shape[1]
        assert prompt == work.prompt_tokens, f"a prompt has {prompt} tokens instead of {work.prompt_tokens}"
        out = generate(
            *args, logits_processor=LogitsProcessorList([GivenLengths(lengths, prompt, tokenizer.eos_token_id)]), **kwargs
        )
        ends = (out[:, prompt:] == tokenizer.eos_token_id).int().argmax(-1) + 1
        assert ends.tolist() == lengths, "a completion does not have the length it was given"
        return out

    trainer.model.generate = generate_given_lengths
    gate.turns.begin(wait=False)
    trainer.train()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
