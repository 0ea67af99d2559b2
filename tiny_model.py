"""Makes the built-in tiny Qwen2 model and tokenizer, for the offline quickstart and the tests.

    python tiny_model.py --out runs/tiny-model --seed 0

The model is a Qwen2 with tied embeddings and 0.6 M parameters, the tokenizer one token per byte with a chat template. A short
supervised warm-up, apart from all reinforcement learning, teaches it to multiply two digits by one digit the way it is done on paper:

    What is 34 * 7?
    4*7=28          units: 8, carry 2
    3*7=21          tens
    1+2=3           their units and the carry
    2+0=2           their tens and the carry of that
    238             the answer, the last number of the text

Every step of a demonstration is wrong with probability WRONG_STEP, as in data scraped from people who make mistakes; what follows
goes on from the wrong value. So the model knows the method and what is most probably right, but a sampled answer is right in less than half
of all cases, also for questions it has never seen. To be right nearly always is left to GRPO.

Left out: evaluation (evaluate.py), any other task, any way to train a model of one's own by supervision.
"""
import argparse
import hashlib
import json
import math
import os
import random
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast, Qwen2Config
from transformers.utils import logging as transformers_logging

from tasks import fingerprint, load_questions, render_prompts

DEMONSTRATIONS = "task:multiplication?split=train"
WRONG_STEP = 0.17
STEPS = 370
BATCH = 64
LEARNING_RATE = 3e-3
WARMUP_SHARE = 0.1
THREADS = 2  # fixed: sums are cut up by thread, so another number of threads would give other last bits

PAD, END = "<|pad|>", "<|end|>"
SPECIAL_TOKENS = [PAD, END, "<|system|>", "<|user|>", "<|assistant|>"]
VOCABULARY = SPECIAL_TOKENS + sorted(pre_tokenizers.ByteLevel.alphabet())  # 5 + 256 tokens; a token's id is its place
CHAT_TEMPLATE = ("{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
                 "{% if add_generation_prompt %}<|assistant|>{% endif %}")
MARKER = "tiny_model.json"


def build_tokenizer():
    """The tokenizer: every byte a token, so any text encodes without an unknown token and decodes to itself.

    `What is 34 * 7?` as a chat prompt is `<|user|>What is 34 * 7?<|end|><|assistant|>`, 18 tokens; an answer ends with `<|end|>`.
    """
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(VOCABULARY)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=END, chat_template=CHAT_TEMPLATE,
                                   additional_special_tokens=SPECIAL_TOKENS[2:], model_max_length=2048,
                                   clean_up_tokenization_spaces=False)


def tiny_config(**overrides):
    """The model's Qwen2Config, with any of its fields replaced: tiny_config(num_hidden_layers=2, tie_word_embeddings=False).

    A small rotary base and a larger initial spread than a big model's: sequences are short and steps few.
    """
    fields = dict(
        vocab_size=len(VOCABULARY), hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True, max_position_embeddings=2048, initializer_range=0.05,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
        pad_token_id=VOCABULARY.index(PAD), eos_token_id=VOCABULARY.index(END), bos_token_id=None)
    return Qwen2Config(**(fields | overrides))


def worked_solution(a, b, rng, wrong_step=0.0):
    """The text that multiplies a (10..99) by b (2..9) digit by digit; each of its four steps is wrong with probability wrong_step.

    worked_solution(34, 7, rng) is "4*7=28\\n3*7=21\\n1+2=3\\n2+0=2\\n238". A wrong step has one wrong digit, and what follows goes
    on from it: "4*7=26\\n3*7=21\\n1+2=3\\n2+0=2\\n236".
    """
    def step(value):
        if rng.random() >= wrong_step:
            return value
        digits = list(str(value))
        i = rng.randrange(len(digits))
        digits[i] = rng.choice([digit for digit in "123456789" if digit != digits[i]])
        return int("".join(digits))

    tens, units = divmod(a, 10)
    low = step(units * b)
    high = step(tens * b)
    carry, ones = divmod(low, 10)
    front, rest = divmod(high, 10)
    middle = step(rest + carry)
    more, ten = divmod(middle, 10)
    hundred = step(front + more)
    answer = 100 * hundred + 10 * ten + ones
    return f"{units}*{b}={low}\n{tens}*{b}={high}\n{rest}+{carry}={middle}\n{front}+{more}={hundred}\n{answer}"


def demonstration_batch(questions, tokenizer, rng, size):
    """input_ids and labels, both [B, T], of demonstrations drawn with replacement, each with mistakes of its own.

    Padded on the right; labels are -100 everywhere but on the solution and its end-of-sequence token. questions come from render_prompts().
    """
    rows = []
    for q in rng.choices(questions, k=size):
        a, b = map(int, re.findall(r"\d+", q.question))
        solution = tokenizer.encode(worked_solution(a, b, rng, WRONG_STEP), add_special_tokens=False)
        rows.append((q.prompt_ids, solution + [tokenizer.eos_token_id]))
    T = max(len(prompt) + len(solution) for prompt, solution in rows)
    padding = [T - len(prompt) - len(solution) for prompt, solution in rows]
    input_ids_BT = torch.tensor([p + s + [tokenizer.pad_token_id] * n for (p, s), n in zip(rows, padding, strict=True)])
    labels_BT = torch.tensor([[-100] * len(p) + s + [-100] * n for (p, s), n in zip(rows, padding, strict=True)])
    return input_ids_BT, labels_BT


def warm_up(tokenizer, questions, seed, steps):
    """A freshly initialised model after `steps` AdamW steps on demonstrations: the same bits for the same seed on the same machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = AutoModelForCausalLM.from_config(tiny_config(), dtype=torch.float32)
        rng = random.Random(seed)
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.01)
        started = time.monotonic()
        for step in range(1, steps + 1):
            rate = min(step / (WARMUP_SHARE * steps), 0.5 + 0.5 * math.cos(math.pi * step / steps))
            optimizer.param_groups[0]["lr"] = LEARNING_RATE * rate
            input_ids_BT, labels_BT = demonstration_batch(questions, tokenizer, rng, BATCH)
            # Causal attention never looks right, so padding on the right needs no mask.
            logits_BTV = model(input_ids=input_ids_BT[:, :-1], use_cache=False).logits
            loss = F.cross_entropy(logits_BTV.flatten(0, 1), labels_BT[:, 1:].flatten())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if step % 20 == 0 or step == steps:
                print(f"\rtiny model: supervised warm-up, step {step}/{steps}, loss {loss.item():.3f}, "
                      f"{time.monotonic() - started:.0f} s", end="\n" if step == steps else "", file=sys.stderr, flush=True)
        return model.eval()
    finally:
        torch.set_num_threads(threads)


def recipe(questions, seed, steps):
    """What decides the model's weights, as a hash: this file's own text, the demonstrations' questions, the seed and the number of steps."""
    parts = [Path(__file__).read_text(encoding="utf-8"), fingerprint(questions), seed, steps]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def is_complete(folder, wanted):
    try:
        return json.loads((folder / MARKER).read_text(encoding="utf-8")) == {"recipe": wanted}
    except (FileNotFoundError, ValueError):
        return False


def make_tiny_model(folder, seed=0, *, steps=STEPS):
    """The folder, holding model, tokenizer and generation config for from_pretrained(); made now unless this very model is there already.

    About a minute on two cores. Written beside the folder and renamed at the end, the marker file last: a folder with the marker is
    whole. An older recipe's folder is replaced; any other folder that is not empty raises ValueError and is left alone.
    """
    folder = Path(folder)
    questions = load_questions(DEMONSTRATIONS)
    wanted = recipe(questions, seed, steps)
    if is_complete(folder, wanted):
        return folder
    if folder.exists() and not (folder.is_dir() and ((folder / MARKER).is_file() or not any(folder.iterdir()))):
        raise ValueError(f"{folder} holds something else than a built-in tiny model: name another folder, or remove it.")
    tokenizer = build_tokenizer()
    render_prompts(questions, tokenizer)
    model = warm_up(tokenizer, questions, seed, steps)
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    folder.parent.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        os.chmod(beside, 0o755)  # mkdtemp's folders are closed to everyone else
        transformers_logging.disable_progress_bar()  # of a file that is written at once
        model.save_pretrained(beside)
        tokenizer.save_pretrained(beside)
        (beside / MARKER).write_text(json.dumps({"recipe": wanted}), encoding="utf-8")
        if folder.exists():
            shutil.rmtree(folder)
        beside.rename(folder)
    except OSError:
        if not is_complete(folder, wanted):  # otherwise another process was faster, with the same model
            raise
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return folder


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Makes the built-in tiny Qwen2 model and its tokenizer.")
    parser.add_argument("--out", required=True, help="folder to write; kept as it is when it holds this very model already")
    parser.add_argument("--seed", type=int, default=0, help="seed of the initial weights and of the demonstrations")
    options = parser.parse_args()
    print(f"tiny model: in {make_tiny_model(options.out, options.seed)}")
