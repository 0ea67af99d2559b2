"""Questions: load and check data sets, render prompts, hold out a validation share; also a command that writes built-in tasks to a file.

    python tasks.py scheduling --n 1000 --out tasks.jsonl
    python tasks.py "scheduling?min_tasks=8&max_tasks=12&split=train" --n 1000 --seed 1 --out harder.jsonl

A data row has the fields `question` (text, or a list of role/content messages), `answer` and `verify_type`; every other field is
kept for the verifier. Nothing is guessed or converted on the way: CSV cells stay text, "007", "NA" and "None" included.
Left out: reading the golds, which each verify type does by its own rule (rewards.py), and making questions (generators.py).
"""
import argparse
import csv
import hashlib
import json
import math
import re
import unicodedata
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from urllib.parse import parse_qsl

from generators import GENERATORS, reasoning_gym_rows

SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")
SPLIT_NAMES = {"train": "train", "test": "test", "valid": "validation", "validation": "validation", "val": "validation",
               "dev": "validation", "eval": "validation"}


@dataclass
class Question:
    question: str | list[dict]      # text, or messages {"role": ..., "content": ...}
    answer: str                     # the gold answer as given, as text: "14" whether the file holds 14 or "14"
    verify_type: str                # as given; rewards.read_golds() normalises and checks it
    row: dict                       # every field of the data row: a verifier may need more than the answer
    place: str                      # where it came from, for messages: "train.jsonl row 3"
    gold: object = None             # filled by rewards.read_golds()
    prompt_text: str = ""           # filled by render_prompts(): what the model sees
    prompt_ids: list[int] = field(default_factory=list)   # its token ids, never re-encoded later


# Reading -------------------------------------------------------------------------------------------------------------------------

def load_questions(spec, *, columns=None, verify_type=None):
    """All questions of one source, in its order.

    spec: a .jsonl, .json, .csv or .parquet file; a folder of such files (with sub-folders, in the order of their names); a folder
    written by datasets' save_to_disk; a hub name "org/name", "org/name:config" or "org/name:config:split" (split train, config may be
    empty); or a built-in task "task:multiplication?n=500&seed=0&split=train", "task:reasoning_gym/<name>?n=500".
    columns: our field name -> the data's, {"question": "problem", "answer": "solution"}; a built-in task needs and uses none.
    verify_type: the type of every row that has none itself (no such column, or a blank there).

    GSM8K-format files load as they are with verify_type="HASH_NUMBER", MATH-format files with verify_type="MATH" and
    columns={"question": "problem", "answer": "solution"}: their golds are whole worked solutions, which those two types read.
    A row's number counts data rows from 1; in a .jsonl file it is the line's number. Raises ValueError that names the row.
    """
    if spec.startswith("task:"):
        rows, columns = _task_rows(spec), {}
    elif Path(spec).is_dir():
        rows = _folder_rows(Path(spec))
    elif Path(spec).is_file():
        rows = _file_rows(Path(spec), Path(spec).name)
    elif spec.endswith(SUFFIXES) or not re.fullmatch(r"[\w.-]+/[\w.-]+(:[\w.-]*){0,2}", spec) or spec.startswith("."):
        raise ValueError(f"There is no data at {spec!r}: give a file, a folder, a hub name like org/name:config:split or "
                         f"task:NAME with one of {', '.join(GENERATORS)}.")
    else:
        rows = _hub_rows(spec)
    questions = [_question(row, place, columns or {}, verify_type) for place, row in rows]
    if not questions:
        raise ValueError(f"{spec} has no rows: give data with at least one question.")
    return questions


def _task_rows(spec):
    name, _, query = spec.removeprefix("task:").partition("?")
    pairs = parse_qsl(query, keep_blank_values=True)
    options = {key: _number_or_text(value) for key, value in pairs}
    if len(options) < len(pairs):
        raise ValueError(f"{spec} gives a parameter twice: keep one of the two.")
    if not isinstance(options.get("seed", 0), int):
        raise ValueError(f"{spec} needs a whole number as seed, not {options['seed']!r}.")
    if name.startswith("reasoning_gym/"):
        rows = reasoning_gym_rows(name.removeprefix("reasoning_gym/"), **options)
    elif name in GENERATORS:
        rows = GENERATORS[name](**options)
    else:
        raise ValueError(f"There is no built-in task {name!r}: use one of {', '.join(GENERATORS)}, or reasoning_gym/<name>.")
    for number, row in enumerate(rows, 1):
        yield f"{spec} row {number}", row


def _number_or_text(text):
    for convert in (int, float):
        try:
            return convert(text)
        except ValueError:
            pass
    return {"true": True, "false": False}.get(text.lower(), text)


def _folder_rows(folder):
    if (folder / "dataset_dict.json").is_file():
        splits = json.loads((folder / "dataset_dict.json").read_text())["splits"]
        raise ValueError(f"{folder} holds several splits: give one of {', '.join(str(folder / split) for split in splits)}.")
    if (folder / "dataset_info.json").is_file() and (folder / "state.json").is_file():
        import datasets
        # with_format(None): a saved torch or numpy format would turn the values into tensors.
        for number, row in enumerate(datasets.load_from_disk(str(folder)).with_format(None), 1):
            yield f"{folder.name} row {number}", row
        return
    paths = [path for path in sorted(folder.rglob("*")) if path.suffix in SUFFIXES and path.is_file()
             and not any(part.startswith(".") for part in path.relative_to(folder).parts)]
    if not paths:
        raise ValueError(f"The folder {folder} has no file that ends in {', '.join(SUFFIXES)}: give the folder that holds the data.")
    names = {path: path.relative_to(folder).as_posix() for path in paths}
    # Reading train.jsonl and test.jsonl together would train on the test questions without a word.
    splits = {SPLIT_NAMES[word] for name in names.values() for word in re.split(r"[^a-z]+", name.lower()) if word in SPLIT_NAMES}
    if len(splits) > 1:
        raise ValueError(f"The folder {folder} mixes the splits {' and '.join(sorted(splits))}: give one file or a folder of one split.")
    for path in paths:
        yield from _file_rows(path, names[path])


def _file_rows(path, name):
    """(place, row) for each row of one file."""
    if path.suffix not in SUFFIXES:
        raise ValueError(f"{path} is no data file: its name has to end in {', '.join(SUFFIXES)}.")
    if path.suffix == ".parquet":
        import pyarrow.parquet
        try:
            rows = pyarrow.parquet.ParquetFile(path).read().to_pylist()
        except (pyarrow.ArrowException, OSError) as error:
            raise ValueError(f"{name} cannot be read as Parquet: {error}.") from error
        yield from ((f"{name} row {number}", row) for number, row in enumerate(rows, 1))
        return
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not UTF-8 text (byte {error.start}): save it as UTF-8.") from None
    if path.suffix == ".csv":
        yield from _csv_rows(text, name)
        return
    if path.suffix == ".json":
        try:
            rows = _read_json(text)
            rows = rows if isinstance(rows, list) else [rows]
            yield from ((f"{name} row {number}", row) for number, row in enumerate(rows, 1))
            return
        except json.JSONDecodeError as error:
            # Many files with this ending hold one object a line.
            if not text.lstrip().startswith("{"):
                raise ValueError(f"{name} line {error.lineno} is not valid JSON: {error.msg}.") from None
    # Not splitlines(): that also cuts at U+2028 and its like, which JSON allows inside a string.
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                yield f"{name} row {number}", _read_json(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{name} row {number} is not valid JSON: {error.msg} at character {error.pos + 1}.") from None


class _SpelledFloat(float):
    """A number with a decimal point or exponent that remembers how the file spelled it: a gold of twenty digits is compared exactly."""

    def __new__(cls, spelling):
        number = super().__new__(cls, spelling)
        number.spelling = spelling
        return number

    def __str__(self):
        return str(self.spelling)


def _read_json(text):
    return json.loads(text, parse_float=_SpelledFloat)


def _csv_rows(text, name):
    csv.field_size_limit(2 ** 31 - 1)
    # strict: an unclosed quote is an error instead of a cell that swallows the rest of the file.
    reader = csv.reader(text.splitlines(keepends=True), strict=True)
    try:
        header = next(reader, [])
        if len(set(header)) < len(header):
            raise ValueError(f"{name} has two columns of one name in {header}: rename one.")
        for number, cells in enumerate(filter(None, reader), 1):
            if len(cells) != len(header):
                raise ValueError(f"{name} row {number} has {len(cells)} cells where the header has {len(header)}: quote cells that hold "
                                 "commas or line breaks.")
            yield f"{name} row {number}", dict(zip(header, cells))
    except csv.Error as error:
        raise ValueError(f"{name} line {reader.line_num} is not valid CSV: {error}.") from None


def _hub_rows(spec):
    import datasets
    name, config, split = (spec.split(":") + ["", ""])[:3]
    try:
        dataset = datasets.load_dataset(name, config or None, split=split or "train")
    except Exception as error:  # whatever the hub client raises, the user has to check the same things
        raise ValueError(f"There is no file or folder {spec!r}, and as a hub name it cannot be loaded (name {name}, config {config or 'none'}, "
                         f"split {split or 'train'}): {error}.") from error
    for number, row in enumerate(dataset, 1):
        yield f"{spec} row {number}", row


# One row -------------------------------------------------------------------------------------------------------------------------

def _question(row, place, columns, verify_type):
    if not isinstance(row, dict):
        raise ValueError(f"{place} is a {type(row).__name__}, not an object with the fields question and answer.")
    wanted = {name: columns.get(name, name) for name in ("question", "answer", "verify_type", *columns)}
    if verify_type is not None and "verify_type" not in columns:
        del wanted["verify_type"]
    missing = [theirs for theirs in wanted.values() if theirs not in row]
    if missing:
        raise ValueError(f"{place} has no {_listed(missing)}; it has {_listed(row) or 'no fields'}: rename the columns, name them with "
                         "--columns question=...,answer=..., or give --verify_type for data without that column.")
    row = row | {ours: row[theirs] for ours, theirs in wanted.items()}
    given = row.get("verify_type")
    if _is_blank(given):
        given = verify_type
    if not isinstance(given, str) or not given.strip():
        raise ValueError(f"{place} has a blank or unreadable verify_type ({row.get('verify_type')!r}): fill it in or give --verify_type.")
    return Question(_read_question(row["question"], place), _read_answer(row["answer"], place), given, row, place)


def _listed(names):
    return ", ".join(repr(name) for name in names)


def _is_blank(value):
    """None, white space, or the NaN that other tools write for an empty cell."""
    return value is None or (isinstance(value, str) and not value.strip()) or (isinstance(value, float) and math.isnan(value))


def _read_answer(value, place):
    if _is_blank(value):
        raise ValueError(f"{place} has a blank answer: fill it in or remove the row.")
    if isinstance(value, str):
        return value
    if isinstance(value, bool) or not isinstance(value, (int, float, Decimal)):
        raise ValueError(f"{place} has a {type(value).__name__} as its answer: write it as text or as a number.")
    return format(value, "f") if isinstance(value, Decimal) else str(value)


def _read_question(value, place):
    if _is_blank(value):
        raise ValueError(f"{place} has a blank question: fill it in or remove the row.")
    if isinstance(value, str):
        # A message list that went through a text column arrives in its JSON or its Python form; only the first can be read back for sure.
        if re.match(r"\s*\[\s*\{\s*['\"](role|content)['\"]", value) and value.rstrip().endswith("]"):
            try:
                return _read_question(json.loads(value), place)
            except json.JSONDecodeError:
                raise ValueError(f"{place} has the printed form of a message list as its question: write the list as JSON.") from None
        return value
    if not isinstance(value, list):
        raise ValueError(f"{place} has a {type(value).__name__} as its question: give text or a list of role/content messages.")
    messages = []
    for message in value:
        if not isinstance(message, dict) or any(not isinstance(message.get(key), str) for key in ("role", "content")):
            raise ValueError(f"{place} has a question with a message that lacks a role or a content in text form.")
        messages.append({"role": message["role"], "content": message["content"]})
    if not messages or messages[-1]["role"] == "assistant" or not any(m["role"] == "user" and m["content"].strip() for m in messages):
        raise ValueError(f"{place} has a question whose messages do not ask the model anything: end them with a user message.")
    return messages


# Held-out share and identity -----------------------------------------------------------------------------------------------------

def _content(question):
    """What makes two questions the same: roles and words, whatever the white space and the Unicode form."""
    messages = question.question if isinstance(question.question, list) else [{"role": "user", "content": question.question}]
    return "\0".join(f"{m['role']}\0{' '.join(unicodedata.normalize('NFC', m['content']).split())}" for m in messages)


def hold_out(questions, share, seed):
    """(train, validation), both in the data's order; validation gets round(share * len(questions)) of them, at least one.

    All occurrences of a question go to the same side, so that validation may get a few more where questions repeat. Which questions are
    held out depends on their text and the seed alone, not on the order of the data. share 0 holds out nothing.
    Raises ValueError for a share outside [0, 1) and when nothing would be left to train on.
    """
    if not 0 <= share < 1:
        raise ValueError(f"The held-out share is {share}: give a number from 0 up to, but not including, 1.")
    if share == 0:
        return list(questions), []
    places = {}
    for index, question in enumerate(questions):
        places.setdefault(_content(question), []).append(index)
    wanted, held = max(1, round(share * len(questions))), set()
    for content in sorted(places, key=lambda text: hashlib.sha256(f"{seed}\0{text}".encode()).digest()):
        if len(held) >= wanted:
            break
        held.update(places[content])
    if len(held) == len(questions):
        raise ValueError(f"Holding out {share} of {len(questions)} questions ({len(places)} different ones) leaves none to train on: lower the "
                         "share or give --validation_data.")
    return ([q for i, q in enumerate(questions) if i not in held], [q for i, q in enumerate(questions) if i in held])


def fingerprint(questions):
    """16 hex digits of every row's content and of their order; the same in every process, whatever was rendered or graded since."""
    digest = hashlib.sha256()
    for q in questions:
        # type name, not repr, for what JSON cannot hold: the repr of an object or a set may change from process to process
        row = json.dumps([q.question, q.answer, q.verify_type, q.row], sort_keys=True, default=lambda value: type(value).__name__)
        digest.update(row.encode() + b"\n")
    return digest.hexdigest()[:16]


# Prompts -------------------------------------------------------------------------------------------------------------------------

def chat_template_note(tokenizer):
    """The line to print at start where the tokenizer has no chat template, else None."""
    if tokenizer.chat_template:
        return None
    return "note: the tokenizer has no chat template, so each prompt is the question itself followed by a newline (or --prompt_template as it is)"


def render_prompts(questions, tokenizer, *, system_prompt=None, prompt_template=None, max_prompt_tokens=None, too_long="refuse"):
    """Fills prompt_text and prompt_ids of each question; returns (the questions kept, how many were dropped as too long).

    With a chat template, the prompt is what the template makes of the messages, opened for the assistant's turn, its default system text
    included; the template alone decides about the beginning-of-sequence token. Without one it is the question followed by a newline
    (several messages: their contents, one after the other), with the one beginning-of-sequence token that the tokenizer itself puts first.
    prompt_template: text with {question} in it, which stands in for the question or, in a message list, for its last user message;
    without a chat template no newline is added to it. system_prompt: a first system message, unless the question brings its own.
    max_prompt_tokens counts final token ids; longer prompts are refused, or left out with too_long="drop".
    Raises ValueError, naming the row, when a prompt lacks the question's text, or when a question under a chat template holds one of the
    tokenizer's special tokens (it would end or open a turn).
    """
    if too_long not in ("refuse", "drop"):
        raise ValueError(f"too_long is {too_long!r}: use refuse or drop.")
    if prompt_template is not None and "{question}" not in prompt_template:
        raise ValueError("The prompt template has no {question} in it: write {question} where the question's text belongs.")
    if not questions:
        return [], 0
    for q in questions:
        q.prompt_text = _render(q, tokenizer, system_prompt, prompt_template)
    # verbose=False: the tokenizer's own length warning would come before our message.
    encoded = tokenizer([q.prompt_text for q in questions], add_special_tokens=False, verbose=False)["input_ids"]
    first = [] if tokenizer.chat_template else _first_token(tokenizer)
    for q, ids in zip(questions, encoded, strict=True):
        q.prompt_ids = ids if ids[:1] == first else first + ids
        if not ids:
            raise ValueError(f"{q.place} gives a prompt without tokens: the tokenizer knows nothing of {q.prompt_text[:80]!r}.")
    limit = math.inf if max_prompt_tokens is None else max_prompt_tokens
    long = [q for q in questions if len(q.prompt_ids) > limit]
    if long and (too_long == "refuse" or len(long) == len(questions)):
        raise ValueError(f"{len(long)} of {len(questions)} prompts are longer than {limit} tokens, the first of them {long[0].place} with "
                         f"{len(long[0].prompt_ids)}: raise the limit on prompt tokens or shorten the data{'' if too_long == 'drop' else ', or drop long prompts'}.")
    return [q for q in questions if len(q.prompt_ids) <= limit], len(long)


def _first_token(tokenizer):
    """[id] of the beginning-of-sequence token where the tokenizer puts one before plain text, else []."""
    ids = tokenizer("a")["input_ids"]
    return ids[:1] if tokenizer.bos_token_id is not None and ids[:1] == [tokenizer.bos_token_id] else []


def _render(q, tokenizer, system_prompt, prompt_template):
    messages = [{"role": "user", "content": q.question}] if isinstance(q.question, str) else [dict(m) for m in q.question]
    if tokenizer.chat_template:
        for token in tokenizer.all_special_tokens:
            if any(token in m["content"] for m in messages):
                raise ValueError(f"{q.place} has the tokenizer's special token {token!r} in its question: remove it, and give a conversation as "
                                 "role/content messages instead.")
    if prompt_template is not None:
        last = [m for m in messages if m["role"] == "user"][-1]
        last["content"] = prompt_template.replace("{question}", last["content"])
    if system_prompt and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system_prompt})
    if not tokenizer.chat_template:
        return "\n".join(m["content"] for m in messages) + ("\n" if prompt_template is None else "")
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # templates raise what they like, and jinja its own errors
        raise ValueError(f"{q.place} cannot be rendered by the tokenizer's chat template: {error}.") from error
    for message in messages:
        # What the assistant said before may be cut by the template on purpose (its reasoning is), everything else has to be there.
        if message["role"] != "assistant" and message["content"].strip() not in text:
            raise ValueError(f"{q.place} gives a prompt without the text of its {message['role']} message: the tokenizer's chat template dropped "
                             f"{message['content'].strip()[:80]!r}.")
    return text


# The command ---------------------------------------------------------------------------------------------------------------------

def main(arguments=None):
    parser = argparse.ArgumentParser(prog="tasks.py", description="Write the questions of a built-in task as JSON lines.")
    parser.add_argument("task", help=f"one of {', '.join(GENERATORS)}, or reasoning_gym/<name>; difficulty as in 'scheduling?max_tasks=9'")
    parser.add_argument("--n", type=int, default=1000, help="how many questions")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", help="file to write (default: print)")
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
