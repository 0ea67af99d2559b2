"""Questions: load and check data sets, hold out a validation share, render prompts; write built-in tasks to a file.

    python tasks.py scheduling --n 1000 --out tasks.jsonl
    python tasks.py "scheduling?min_tasks=8&max_tasks=12&split=train" --n 1000 --seed 1 --out harder.jsonl

A data row has the fields `question` (text, or a list of role/content messages), `answer` and `verify_type`; every
other field is kept for the verifier. A row that cannot be used is refused by its number, before any model is loaded.
Left out: reading golds, which each verify type does by its own rule (rewards.py), reading files (sources.py), making
questions (generators.py).
"""

import argparse
import hashlib
import json
import math
import re
import unicodedata
from dataclasses import dataclass, field
from datetime import date
from decimal import Decimal
from pathlib import Path

from generators import GENERATORS
from sources import read_rows


@dataclass
class Question:
    question: str | list[dict]  # text, or messages {"role": ..., "content": ...}
    answer: str                 # the gold answer as given, as text: "14" whether the file holds 14 or "14"
    verify_type: str            # as given; rewards.read_golds() normalises and checks it
    row: dict                   # every field of the data row: a verifier may need more than the answer
    place: str                  # where it came from, for messages: "train.jsonl row 3"
    gold: object = None         # filled by rewards.read_golds()
    prompt_text: str = ""       # filled by render_prompts(): what the model sees
    prompt_ids: list[int] = field(default_factory=list)  # its token ids, never re-encoded later


# ------------------------------------------------------------------------------------------------ loading
def load_questions(spec, *, columns=None, verify_type=None):
    """All questions of one source, in its order.

    spec: a .jsonl, .json, .csv or .parquet file; a folder of such files (sub-folders too, in the order of their
    names); a folder written by datasets' save_to_disk; a hub name "org/name", "org/name:config" or
    "org/name:config:split" (train unless given, the config may be empty); or a built-in task:
    "task:multiplication?n=500&seed=0&split=train" with the parameters of generators.py,
    "task:reasoning_gym/<name>?n=500" with that package's.
    columns: our field name -> the data's, {"question": "problem", "answer": "solution"}. Built-in tasks need and use
    none.
    verify_type: the type of the rows that have none of their own (no such column, or a blank in it).

    GSM8K-format files load as they are with verify_type="HASH_NUMBER", and MATH-format files with verify_type="MATH"
    and the columns above: their golds are whole worked solutions, from which those two types read the answer.
    Raises ValueError that names the row and what to change.
    """
    spec = str(spec)
    columns = {} if spec.startswith("task:") else columns or {}
    questions = [_read_row(row, place, columns, verify_type) for place, row in read_rows(spec)]
    if not questions:
        raise ValueError(f"{spec} has no rows: give data with at least one question.")
    return questions


def _read_row(row, place, columns, verify_type):
    if not isinstance(row, dict):
        raise ValueError(f"{place} is a {type(row).__name__}: write an object with the fields question and answer.")
    wanted = {name: columns.get(name, name) for name in ("question", "answer", "verify_type", *columns)}
    if verify_type and "verify_type" not in columns:
        del wanted["verify_type"]
    missing = dict.fromkeys(theirs for theirs in wanted.values() if theirs not in row)
    if missing:
        raise ValueError(
            f"{place} has no {_listed(missing)}, it has {_listed(row) or 'no fields'}: rename columns, map them with "
            "--columns question=...,answer=..., or give --verify_type where only that column is missing."
        )
    row = row | {ours: row[theirs] for ours, theirs in wanted.items()}
    kind = verify_type if _is_blank(row.get("verify_type")) else row["verify_type"]
    if not isinstance(kind, str) or not kind.strip():
        raise ValueError(f"{place} has a blank verify_type: fill it in or give --verify_type.")
    return Question(_read_question(row["question"], place), _read_answer(row["answer"], place), kind, row, place)


def _listed(names):
    return ", ".join(repr(name) for name in names)


def _is_blank(value):
    """None, white space, or the NaN that other tools write for an empty cell."""
    return value is None or value != value or (isinstance(value, str) and not value.strip())


def _read_answer(value, place):
    if _is_blank(value):
        raise ValueError(f"{place} has a blank answer: fill it in or remove the row.")
    if isinstance(value, bool) or not isinstance(value, (str, int, float, Decimal)):
        raise ValueError(f"{place} has a {type(value).__name__} as its answer: write it as text or as a number.")
    return format(value, "f") if isinstance(value, Decimal) else str(value)


def _read_question(value, place):
    if _is_blank(value):
        raise ValueError(f"{place} has a blank question: fill it in or remove the row.")
    if isinstance(value, str):
        # A message list that went through a text column arrives printed: as JSON, which can be read back, or as
        # Python, which cannot.
        if not re.match(r"\s*\[\s*\{\s*['\"](role|content)['\"]\s*:", value):
            return value
        try:
            value = json.loads(value)
        except json.JSONDecodeError:
            raise ValueError(
                f"{place} has the printed form of a message list as its question: write it as JSON."
            ) from None
    if not isinstance(value, list):
        raise ValueError(
            f"{place} has a {type(value).__name__} as its question: give text or a list of role/content messages."
        )
    for message in value:
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise ValueError(f"{place} has a question with a message that lacks a role or a content in text form.")
    asked = [m["content"] for m in value if m["role"] == "user" and m["content"].strip()]
    if not asked or value[-1]["role"] == "assistant":
        raise ValueError(f"{place} has messages that ask the model nothing: end them with a user message.")
    return [{"role": m["role"], "content": m["content"]} for m in value]


# ------------------------------------------------------------------------------------------------ held-out share
def _messages(question):
    value = question.question
    return [dict(m) for m in value] if isinstance(value, list) else [{"role": "user", "content": value}]


def _content(question):
    """What makes two questions the same: roles and words, whatever their white space and Unicode form."""
    folded = (
        f"{m['role']}\0{' '.join(unicodedata.normalize('NFC', m['content']).split())}" for m in _messages(question)
    )
    return "\0".join(folded)


def hold_out(questions, share, seed):
    """(train, validation), both in the data's order; validation gets round(share * len(questions)), at least one.

    All occurrences of a question go to the same side, so validation may get a few more where questions repeat. Which
    are held out depends on their text and the seed alone, not on the order of the data. share 0 holds out nothing.
    Raises ValueError for a share outside [0, 1) and when nothing would be left to train on.
    """
    if not 0 <= share < 1:
        raise ValueError(f"The held-out share is {share}: give a number from 0 up to, but not including, 1.")
    if share == 0:
        return list(questions), []
    groups = {}
    for index, question in enumerate(questions):
        groups.setdefault(_content(question), []).append(index)
    wanted, held = max(1, round(share * len(questions))), set()
    for content in sorted(groups, key=lambda text: hashlib.sha256(f"{seed}\0{text}".encode()).digest()):
        if len(held) < wanted:
            held.update(groups[content])
    if len(held) == len(questions):
        raise ValueError(
            f"Holding out {share} of {len(questions)} questions, {len(groups)} of them different, leaves none to train "
            "on: lower the share or give validation data of its own."
        )
    return [q for i, q in enumerate(questions) if i not in held], [q for i, q in enumerate(questions) if i in held]


def _plain(value):
    # Of unknown values only the type's name: the repr of an object or a set may change from process to process.
    return str(value) if isinstance(value, (Decimal, date)) else type(value).__name__


def fingerprint(questions):
    """16 hex digits of the rows' content and order: the same in every process, whatever was rendered since."""
    digest = hashlib.sha256()
    for q in questions:
        content = [q.question, q.answer, q.verify_type, q.row]
        digest.update(json.dumps(content, sort_keys=True, default=_plain).encode() + b"\n")
    return digest.hexdigest()[:16]


# ------------------------------------------------------------------------------------------------ prompts
def chat_template_note(tokenizer):
    """The line to print at start where the tokenizer has no chat template, else None."""
    if tokenizer.chat_template:
        return None
    return "note: no chat template in the tokenizer; prompts are the question and a newline, or the prompt template"


def render_prompts(
    questions, tokenizer, *, system_prompt=None, prompt_template=None, max_prompt_tokens=None, too_long="refuse"
):
    """Fills prompt_text and prompt_ids of each question; returns (the questions kept, the number dropped as too long).

    With a chat template, a prompt is what the template makes of the messages, its own default system text included,
    opened for the assistant's turn; the template alone decides about a beginning-of-sequence token. Without one, it
    is the question followed by a newline (of several messages: their contents in order), after the one
    beginning-of-sequence token that the tokenizer puts first, if it does.
    prompt_template: text around {question}, put in the question's place or, in a message list, in its last user
    message's; without a chat template it is the whole prompt and gets no newline. system_prompt: a first system
    message, unless the question brings its own. max_prompt_tokens counts final token ids; longer prompts are refused,
    or left out with too_long="drop".
    Raises ValueError that names the row when a prompt lacks the text of its question, or when a question holds a
    special token of a chat model: it would end or open a turn.
    """
    if too_long not in ("refuse", "drop"):
        raise ValueError(f"too_long is {too_long!r}: use refuse or drop.")
    if prompt_template and "{question}" not in prompt_template:
        raise ValueError("The prompt template lacks {question}: write {question} where the question's text belongs.")
    if not questions:
        return [], 0
    special = tokenizer.all_special_tokens if tokenizer.chat_template else []
    for q in questions:
        q.prompt_text = _render(q, tokenizer, special, system_prompt, prompt_template)
    # verbose=False: the tokenizer's own warning about long texts would come before our message.
    encoded = tokenizer([q.prompt_text for q in questions], add_special_tokens=False, verbose=False)["input_ids"]
    first = [] if tokenizer.chat_template else _first_token(tokenizer)
    for q, ids in zip(questions, encoded, strict=True):
        if not ids:
            raise ValueError(
                f"{q.place} gives a prompt without tokens: the tokenizer has none for {q.prompt_text[:80]!r}."
            )
        q.prompt_ids = ids if ids[: len(first)] == first else first + ids
    limit = math.inf if max_prompt_tokens is None else max_prompt_tokens
    kept = [q for q in questions if len(q.prompt_ids) <= limit]
    dropped = len(questions) - len(kept)
    if dropped and (too_long == "refuse" or not kept):
        long = next(q for q in questions if len(q.prompt_ids) > limit)
        raise ValueError(
            f"{dropped} of {len(questions)} prompts exceed the limit of {limit} tokens, first {long.place} with "
            f"{len(long.prompt_ids)}: raise the limit, shorten the data or, where some fit, drop the long ones."
        )
    return kept, dropped


def _first_token(tokenizer):
    """[id] of the beginning-of-sequence token if the tokenizer puts it before plain text, else []."""
    first = tokenizer("a")["input_ids"][:1]
    return first if first == [tokenizer.bos_token_id] else []


def _render(q, tokenizer, special, system_prompt, prompt_template):
    messages = _messages(q)
    found = [token for token in special if any(token in m["content"] for m in messages)]
    if found:
        raise ValueError(
            f"{q.place} holds {found[0]!r}, a special token of this tokenizer, in its question: remove it; a "
            "conversation is given as role/content messages."
        )
    if prompt_template:
        last = [m for m in messages if m["role"] == "user"][-1]
        last["content"] = prompt_template.replace("{question}", last["content"])
    if system_prompt and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system_prompt})
    if not tokenizer.chat_template:
        return "\n".join(m["content"] for m in messages) + ("" if prompt_template else "\n")
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # a template raises what it likes, and so does its engine
        raise ValueError(f"{q.place} cannot be rendered by the tokenizer's chat template: {error}.") from error
    for message in messages:
        # A template may cut what the assistant said before (its reasoning, say); everything else has to be there.
        content = message["content"].strip()
        if message["role"] != "assistant" and content not in text:
            raise ValueError(
                f"{q.place} gives a prompt without its {message['role']} message: the tokenizer's chat template drops "
                f"{content[:80]!r}."
            )
    return text


# ------------------------------------------------------------------------------------------------ the command
def main(arguments=None):
    parser = argparse.ArgumentParser(
        prog="tasks.py", description="Writes the questions of a built-in task as JSON lines."
    )
    parser.add_argument(
        "task", help=f"one of {', '.join(GENERATORS)}, reasoning_gym/<name>; difficulty as in 'sorting?digits=3'"
    )
    parser.add_argument("--n", type=int, default=1000, help="how many questions (default: 1000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", help="file to write (default: the console)")
    args = parser.parse_args(arguments)
    try:
        questions = load_questions(f"task:{args.task}{'&' if '?' in args.task else '?'}n={args.n}&seed={args.seed}")
    except ValueError as error:
        parser.error(str(error))
    text = "".join(json.dumps(q.row, ensure_ascii=False) + "\n" for q in questions)
    if args.out:
        Path(args.out).write_text(text, encoding="utf-8")
        print(f"{len(questions)} questions written to {args.out}")
    else:
        print(text, end="")


if __name__ == "__main__":
    main()
