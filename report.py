"""One HTML page of what a run left in its folder: curves, timeline, samples, settings; several runs over each other.

    python report.py runs/quickstart                                 # writes runs/quickstart/report.html
    python report.py runs/seed-0 runs/seed-1 --output compare.html

The page opens from disk, without a network, and holds everything: the numbers of ``metrics.jsonl`` as they are (null where
a value was not finite), the last picture of ``timeline/``, ``samples.jsonl`` and ``settings.json``. Only ``metrics.jsonl``
must be there, and it may belong to a run that goes on or was killed. ``report_template.html`` is the page without
its data: layout, and the script that draws the curves.

Model output cannot be trusted: all data is one JSON text in which no ``<`` stands, the script puts texts into the page as
text, never as markup, and the page's policy (CSP) lets no other script run and loads nothing.

Left out: W&B, checkpoints, a live view (make the page again).
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import html
import json
import re
import sys
import time
from pathlib import Path

from config import Settings

TEMPLATE = Path(__file__).with_name("report_template.html")
SAMPLES = 2000  # of a run on the page; of more, as many are taken evenly over the file
CHARACTERS = 20_000  # of one text; longer ones lose their middle
BASE, UNKNOWN = Settings(), object()  # what a setting is compared with


class ReportError(ValueError):
    """A folder that no page can be made of; the message says what to change."""


# ------------------------------------------------------------------------------------------------ reading
def number(value) -> float | int | None:
    """``value``, or None when it is no finite number."""
    numeric = isinstance(value, (int, float)) and not isinstance(value, bool)
    return value if numeric and -1e300 < value < 1e300 else None


def text(value) -> str | None:
    """``value`` as text; role/content messages as one paragraph each; the middle of long ones left out."""
    if value is None:
        return None
    if isinstance(value, list) and value and all(isinstance(m, dict) and "content" in m for m in value):
        value = "\n\n".join(f"{m.get('role', '')}: {m['content']}" for m in value)
    value = value if isinstance(value, str) else json.dumps(value)
    if len(value) <= CHARACTERS:
        return value
    head, tail = value[: CHARACTERS // 2], value[-CHARACTERS // 2 :]
    return f"{head}\n[... {len(value) - CHARACTERS:,} characters left out ...]\n{tail}"


def parse(line: str) -> dict | None:
    """The JSON object of a line that has a step; None for a torn line."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and isinstance(number(found.get("step")), int) else None


def read_metrics(path: Path) -> tuple[dict[str, dict[str, list]], int]:
    """The series of a ``metrics.jsonl``.

    Returns:
        ``{name: {"steps": [...], "values": [...]}}``, by step; a value that is not finite is None, and where a step stands
        twice the later line counts. And the number of lines that could not be read.
    """
    series: dict[str, dict[int, float | None]] = {}
    unreadable = 0
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in filter(str.strip, file):
            row = parse(line)
            unreadable += row is None
            for name, value in (row or {}).items():
                if name != "step" and (value is None or isinstance(value, (int, float))):
                    series.setdefault(name, {})[row["step"]] = number(value)
    ordered = {name: sorted(points.items()) for name, points in series.items()}
    found = {name: {"steps": [s for s, _ in points], "values": [v for _, v in points]} for name, points in ordered.items()}
    return found, unreadable


def read_samples(path: Path) -> tuple[list[dict], int, int]:
    """At most ``SAMPLES`` lines of a ``samples.jsonl``, how many it holds, and how many of those taken are unreadable."""
    with open(path, encoding="utf-8", errors="replace") as file:
        total = sum(1 for line in file if line.strip())
        file.seek(0)
        lines = (line for line in file if line.strip())
        kept = min(total, SAMPLES)
        taken = [line for i, line in enumerate(lines) if (i + 1) * kept // total > i * kept // total]
    found = [row for row in map(parse, taken) if row is not None]
    samples = [
        {name: text(row.get(name)) for name in ("split", "question", "completion", "answer", "gold")}
        | {name: number(row.get(name)) for name in ("step", "reward", "correct", "tokens", "advantage")}
        | {"finished": row.get("finished") is not False}
        for row in found
    ]
    return samples, total, len(taken) - len(found)


def read_settings(path: Path) -> dict:
    """The ``settings.json`` of a run, with the names of the settings that differ from the default in ``changed``.

    Raises:
        ValueError: it is not JSON, or not of that form.
    """
    found = json.loads(path.read_text(encoding="utf-8"))
    settings, packages = (found.get("settings", {}), found.get("packages", {})) if isinstance(found, dict) else (None, None)
    if not isinstance(settings, dict) or not isinstance(packages, dict):
        raise ValueError
    return {
        "settings": {name: show_setting(value) for name, value in settings.items()},
        "changed": [name for name, value in settings.items() if getattr(BASE, name, UNKNOWN) != value],
        "git_commit": text(found.get("git_commit")), "plan": text(found.get("plan")),
        "packages": {name: text(version) for name, version in packages.items()},
    }


def show_setting(value) -> str:
    """As it is given on the command line."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else text(value) or ""


def last_picture(folder: Path) -> dict | None:
    """The picture of the latest step, base64, and its name."""
    def by_number(path: Path):
        return [int(part) for part in re.findall(r"\d+", path.stem)], path.stem

    latest = max(folder.glob("*.png"), key=by_number, default=None)
    return latest and {"name": latest.stem, "png": base64.b64encode(latest.read_bytes()).decode()}


def summary(metrics: dict[str, dict[str, list]]) -> dict:
    """The head line: first and last accuracy with its 95 % interval where it is known, steps, seconds, tokens, means."""
    def points(name: str) -> list[tuple[int, float]]:
        found = metrics.get(name, {"steps": [], "values": []})
        return [(s, v) for s, v in zip(found["steps"], found["values"]) if v is not None]

    def mean(values: list[float]) -> float | None:
        return sum(values) / len(values) if values else None

    def of(name: str) -> list[float]:
        return [v for _, v in points(name)]

    ends = {end: dict(points(f"validation/accuracy_{end}")) for end in ("low", "high")}
    accuracy = [
        {"step": step, "value": value, **{end: known.get(step) for end, known in ends.items()}}
        for step, value in points("validation/accuracy")
    ]
    seconds, tokens = sum(of("time/step")), sum(of("completion/tokens"))
    return {
        "steps": max((series["steps"][-1] for series in metrics.values()), default=0),
        "accuracy": accuracy[:1] + accuracy[1:][-1:], "reward": mean(of("reward/mean")[-10:]),
        "seconds": seconds, "tokens": tokens, "tokens_per_s": tokens / seconds if seconds else None,
        "bubble": mean(of("pipeline/bubble_measured")), "bubble_theory": mean(of("pipeline/bubble_theory")),
    }


def read_run(folder: Path) -> dict:
    """Everything that the page shows of one run.

    Raises:
        ReportError: no such folder, or no readable line of metrics in it.
    """
    if not folder.is_dir():
        raise ReportError(f"{folder} is not a folder: give the --project_dir of a run")
    path = folder / "metrics.jsonl"
    if not path.is_file():
        raise ReportError(f"{folder} holds no metrics.jsonl: give the --project_dir of a run")
    metrics, unreadable = read_metrics(path)
    if not metrics:
        raise ReportError(f"{path} holds no readable line yet: try again after the run's first step")
    notes = [f"metrics.jsonl: {count(unreadable, 'unreadable line')} passed over"] * (unreadable > 0)
    samples, path = [], folder / "samples.jsonl"
    if path.is_file():
        samples, total, unreadable = read_samples(path)
        notes += [f"samples.jsonl: {count(unreadable, 'unreadable line')} passed over"] * (unreadable > 0)
        evenly = f"samples.jsonl: {SAMPLES:,} of {total:,} samples are on this page, evenly over the run"
        notes += [evenly] * (total > SAMPLES)
    about, path = None, folder / "settings.json"
    if path.is_file():
        try:
            about = read_settings(path)
        except ValueError:
            notes.append("settings.json cannot be read and is left out")
    return {
        "name": folder.resolve().name, "path": str(folder), "summary": summary(metrics), "metrics": metrics,
        "samples": samples, "about": about, "timeline": last_picture(folder / "timeline"), "notes": notes,
    }


def count(number: int, noun: str) -> str:
    """
    >>> count(1, "line"), count(2, "line")
    ('1 line', '2 lines')
    """
    return f"{number:,} {noun}{'s' * (number != 1)}"


# ------------------------------------------------------------------------------------------------ writing
def make_page(runs: list[dict]) -> str:
    """The page of the runs; of runs with the same name the whole paths tell them apart."""
    names = [run["name"] for run in runs]
    runs = [run | {"name": run["path"]} if names.count(run["name"]) > 1 else run for run in runs]
    data = {"made": time.strftime("%Y-%m-%d %H:%M"), "runs": runs}
    as_json = json.dumps(data, allow_nan=False).replace("<", "\\u003c")  # no text can end the element that it stands in
    title = runs[0]["name"] if len(runs) == 1 else f"{len(runs)} runs: " + ", ".join(run["name"] for run in runs)
    page = TEMPLATE.read_text(encoding="utf-8")
    script = re.search(r"<script>(.*?)</script>", page, re.DOTALL).group(1)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    parts = {"DIGEST": digest, "TITLE": html.escape(title), "DATA": as_json}
    # in one pass: the data may hold such words
    return re.sub("@(DIGEST|TITLE|DATA)@", lambda found: parts[found.group(1)], page)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Make one HTML page of what one or several runs left in their folders.")
    parser.add_argument("project_dir", nargs="+", type=Path, help="folder of a run; several are compared")
    parser.add_argument("--output", type=Path, help="where the page goes (default: report.html in the first folder)")
    args = parser.parse_args(argv)
    output = args.output or args.project_dir[0] / "report.html"
    try:
        page = make_page([read_run(folder) for folder in dict.fromkeys(args.project_dir)])
        output.write_text(page, encoding="utf-8", errors="xmlcharrefreplace")
    except (ReportError, OSError) as error:
        reason = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else error
        print(f"error: {reason}", file=sys.stderr)
        sys.exit(2)
    print(f"{output}  ({len(page) / 2**20:.1f} MiB; open it in a browser)")


if __name__ == "__main__":
    main()
