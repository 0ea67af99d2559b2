"""Where data rows come from: files, folders, data sets saved by `datasets`, the hub, built-in tasks.

A row comes with its place, for messages: "train.jsonl row 3" counts data rows from 1 (lines, in a .jsonl file).
Values stay what the file holds: CSV cells are text ("007", "NA" and "None" too), JSON and Parquet values keep their
own types row by row. Only the hub's own reader (`datasets`) may have turned a CSV file's cells into numbers before we
see them.
Left out: what the rows mean (tasks.py), how built-in questions are made (generators.py).
"""

import csv
import io
import json
import re
from pathlib import Path
from urllib.parse import parse_qsl

from generators import GENERATORS, reasoning_gym_rows

SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")
SPLIT_WORDS = {"train": "train", "training": "train", "test": "test"} | dict.fromkeys(
    ("valid", "validation", "val", "dev", "eval"), "validation"
)


def read_rows(spec):
    """(place, row) of every row that `spec` names; see tasks.load_questions for what it may be. Raises ValueError."""
    path = Path(spec).expanduser()
    if spec.startswith("task:"):
        return _task_rows(spec)
    if spec and path.is_dir():  # Path("") would be the current folder
        return _folder_rows(path)
    if path.is_file():
        return _file_rows(path, path.name)
    if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+(:[\w.-]*){0,2}", spec) and not spec.endswith(SUFFIXES):
        return _hub_rows(spec)
    raise ValueError(
        f"There is no data at {spec!r}: give a file, a folder, a hub name like org/name:config:split, or "
        f"task:NAME with one of {', '.join(GENERATORS)}."
    )


def _numbered(name, rows):
    return ((f"{name} row {number}", row) for number, row in enumerate(rows, 1))


def _task_rows(spec):
    name, _, query = spec.removeprefix("task:").partition("?")
    pairs = parse_qsl(query, keep_blank_values=True)
    options = {key: _read_option(value) for key, value in pairs}
    if len(options) < len(pairs):
        raise ValueError(f"{spec} gives a parameter twice: keep one of the two.")
    if not isinstance(options.get("seed", 0), int):
        raise ValueError(f"{spec} needs a whole number as seed, not {options['seed']!r}.")
    if name.startswith("reasoning_gym/"):
        return _numbered(spec, reasoning_gym_rows(name.removeprefix("reasoning_gym/"), **options))
    if name not in GENERATORS:
        raise ValueError(
            f"There is no built-in task {name!r}: use one of {', '.join(GENERATORS)}, reasoning_gym/<name>."
        )
    return _numbered(spec, GENERATORS[name](**options))


def _read_option(text):
    for convert in (int, float):
        try:
            return convert(text)
        except ValueError:
            pass
    return {"true": True, "false": False}.get(text.lower(), text)


def _folder_rows(folder):
    if (folder / "dataset_dict.json").is_file():
        splits = json.loads((folder / "dataset_dict.json").read_text(encoding="utf-8"))["splits"]
        raise ValueError(f"{folder} holds several splits: give one of {', '.join(str(folder / s) for s in splits)}.")
    if (folder / "dataset_info.json").is_file() and (folder / "state.json").is_file():
        import datasets

        # with_format(None): a torch or numpy format saved with the data would turn its values into tensors.
        return _numbered(folder.name, datasets.load_from_disk(str(folder)).with_format(None))
    names = {
        path.relative_to(folder).as_posix(): path
        for path in sorted(folder.rglob("*"))
        if path.suffix in SUFFIXES and path.is_file()
    }
    names = {name: path for name, path in names.items() if not name.startswith(".") and "/." not in name}
    if not names:
        raise ValueError(
            f"The folder {folder} has no file that ends in {', '.join(SUFFIXES)}: give the one with the data."
        )
    # Reading train.jsonl and test.jsonl together would train on the test questions without a word.
    words = {word for name in names for word in re.split(r"[^a-z]+", name.lower())}
    splits = sorted({SPLIT_WORDS[word] for word in words if word in SPLIT_WORDS})
    if len(splits) > 1:
        raise ValueError(
            f"The folder {folder} mixes {' and '.join(splits)} data: give one file, or a folder of one split."
        )
    return (pair for name, path in names.items() for pair in _file_rows(path, name))


def _file_rows(path, name):
    if path.suffix not in SUFFIXES:
        raise ValueError(f"{path} is no data file: its name has to end in {', '.join(SUFFIXES)}.")
    if path.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        try:
            return _numbered(name, pyarrow.parquet.ParquetFile(path).read().to_pylist())
        except (pyarrow.ArrowException, OSError) as error:
            raise ValueError(f"{name} cannot be read as Parquet: {error}.") from error
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not UTF-8 text (see byte {error.start}): save it as UTF-8.") from None
    if path.suffix == ".csv":
        return _csv_rows(text, name)
    if path.suffix == ".json":
        try:
            rows = _read_json(text)
            return _numbered(name, rows if isinstance(rows, list) else [rows])
        except json.JSONDecodeError as error:
            if not text.lstrip().startswith("{"):
                raise ValueError(f"{name} line {error.lineno} is not valid JSON: {error.msg}.") from None
            # Else it is one object a line, as many files of this ending are.
    return _jsonl_rows(text, name)


def _jsonl_rows(text, name):
    # Not splitlines(): that cuts at U+2028 and its like too, which JSON allows inside a string.
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                yield f"{name} row {number}", _read_json(line)
            except json.JSONDecodeError as error:
                raise ValueError(
                    f"{name} row {number} is not valid JSON: {error.msg}, character {error.pos + 1}."
                ) from None


class SpelledFloat(float):
    """A JSON number whose str() is the file's own spelling: golds are compared exactly, not as floats."""

    def __new__(cls, spelling):
        number = super().__new__(cls, spelling)
        number.spelling = str(spelling)
        return number

    def __str__(self):
        return self.spelling


def _read_json(text):
    return json.loads(text, parse_float=SpelledFloat)


def _csv_rows(text, name):
    csv.field_size_limit(2**31 - 1)
    # strict: an unclosed quote is an error, not a cell that swallows the rest of the file.
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        header = next(reader, [])
        if len(set(header)) < len(header):
            raise ValueError(f"{name} has two columns of the same name in {header}: rename one.")
        for number, cells in enumerate(filter(None, reader), 1):
            if len(cells) != len(header):
                raise ValueError(
                    f"{name} row {number} has {len(cells)} cells where the header has {len(header)}: put cells "
                    "that hold commas, quotes or line breaks between quotes."
                )
            yield f"{name} row {number}", dict(zip(header, cells))
    except csv.Error as error:
        raise ValueError(f"{name} line {reader.line_num} is not valid CSV: {error}.") from None


def _hub_rows(spec):
    import datasets

    name, config, split = (spec.split(":") + ["", ""])[:3]
    try:
        return _numbered(spec, datasets.load_dataset(name, config or None, split=split or "train"))
    except Exception as error:  # the hub client raises many kinds; what to check is the same for all of them
        raise ValueError(
            f"There is no file or folder {spec!r}, and the hub data set {name!r} (config {config or 'default'}, "
            f"split {split or 'train'}) cannot be loaded: {error}."
        ) from error
