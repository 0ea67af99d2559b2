"""The questions of a run as its settings want them: loaded, split, graded rules read, rendered; and their order."""

from __future__ import annotations

import random

from config import Settings
from rewards import read_golds
from tasks import Question, hold_out, load_questions, render_prompts


def load(spec: str, settings: Settings) -> list[Question]:
    """The questions that ``spec`` names, with their golds read.

    Raises:
        ValueError: a row that cannot be used, named.
    """
    questions = load_questions(spec, columns=settings.column_names(), verify_type=settings.verify_type or None)
    read_golds(questions)
    return questions


def render(questions: list[Question], settings: Settings, tokenizer) -> list[Question]:
    """The questions with their prompts; those that are too long are refused or dropped, as the settings say."""
    if not settings.chat_template:
        tokenizer.chat_template = None
    questions, dropped = render_prompts(
        questions, tokenizer, system_prompt=settings.system_prompt or None, prompt_template=settings.prompt_template or None,
        max_prompt_tokens=settings.max_prompt_tokens, too_long=settings.long_prompts,
    )
    if dropped:
        print(f"dropped {dropped} prompts longer than {settings.max_prompt_tokens} tokens")
    return questions


def training_and_held_out(settings: Settings, tokenizer) -> tuple[list[Question], list[Question]]:
    """Questions to train on, and held-out ones: those of ``validation_data``, or a share of the data.

    Raises:
        ValueError: fewer questions than a rollout takes.
    """
    questions = load(settings.data, settings)
    if settings.validation_data:
        held_out = load(settings.validation_data, settings)
    else:
        questions, held_out = hold_out(questions, settings.validation_share, settings.seed)
    questions, held_out = render(questions, settings, tokenizer), render(held_out, settings, tokenizer)
    if len(questions) < settings.batch_size:
        raise ValueError(
            f"the data holds {len(questions)} questions but --batch_size is {settings.batch_size}: "
            "lower it or bring more questions"
        )
    return questions, held_out[: settings.eval_questions or None]


def batches(count: int, batch_size: int, epoch: int, seed: int) -> list[list[int]]:
    """The order of one epoch: question numbers, shuffled by seed and epoch, the last batch as long as what is left."""
    order = list(range(count))
    random.Random(f"{seed} epoch {epoch}").shuffle(order)
    return [order[i : i + batch_size] for i in range(0, count, batch_size)]
