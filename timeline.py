"""The pipeline's timeline as a picture (PNG) and as a trace that opens in Perfetto (https://ui.perfetto.dev).

Ranks are lanes, time runs to the right, blocks are forwards, backwards and, where a schedule splits them, gradients of
weights, each with the number of its microbatch; what stays hatched is idle time. The blocks are measured
(``Pipeline.timeline``) or played through (``schedules.simulate``).

Left out: messages between ranks; what a rank does while it waits is not measured.
"""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from schedules import Chunk, bubble

COLOURS = {  # block, text
    "forward": ((72, 118, 196), "white"),
    "backward": ((74, 146, 84), "white"),
    "backward_input": ((74, 146, 84), "white"),
    "backward_weight": ((238, 178, 60), "black"),
}
NAMES = {"forward": "forward", "backward": "backward", "backward_input": "backward (inputs)", "backward_weight": "weight gradients"}
WIDTH, LANE, GAP, LEFT, RIGHT, TOP = 1800, 34, 6, 74, 66, 62
SMALLEST = 15  # pixels of a usual forward; a step of many is drawn in several bands, one below the other
INK, GRAY, IDLE, STRIPE = (30, 30, 30), (110, 110, 110), (242, 242, 242), (214, 214, 214)


def draw(ranks: list[list[Chunk]], path: Path, *, title: str = "", span: float | None = None, unit: str = "ms") -> Path:
    """Write the picture of one step.

    Args:
        ranks: for each rank its chunks, on one clock, in seconds.
        span: of the whole step, seconds; by default to the end of the last chunk.
        unit: "ms", or "forwards" for chunks of ``simulate``.

    Returns:
        ``path``.
    """
    end = max([c.end for rank in ranks for c in rank] + [span or 0.0])
    forward = statistics.median(c.end - c.start for rank in ranks for c in rank if c.kind == "forward")
    bands = max(1, min(8, math.ceil(end / forward * SMALLEST / (WIDTH - LEFT - RIGHT))))
    band_height = len(ranks) * (LANE + GAP) + 34
    image = Image.new("RGB", (WIDTH, TOP + bands * band_height + 4), "white")
    pen = ImageDraw.Draw(image)
    large, small, tiny = (ImageFont.load_default(size) for size in (17, 13, 11))
    pen.text((LEFT, 8), title, fill=INK, font=large)
    _legend(pen, ranks, small)
    several = len({c.stage for rank in ranks for c in rank}) > len(ranks)
    for band in range(bands):
        # a band runs on a little into the next one, so that every number stands whole in one of them
        y0, t0, t1 = TOP + band * band_height, end * band / bands, min(end, end * (band + 1) / bands + forward)
        scale = (WIDTH - LEFT - RIGHT) / (t1 - t0)

        def x_of(t: float) -> float:
            return LEFT + (min(max(t, t0), t1) - t0) * scale

        for r, rank in enumerate(ranks):
            y = y0 + r * (LANE + GAP)
            pen.text((8, y + LANE / 2), f"rank {r}", fill=INK, font=small, anchor="lm")
            _idle(image, (LEFT, y, WIDTH - RIGHT, y + LANE))
            local = sorted({c.stage for c in rank})
            for c in rank:
                if c.end > t0 and c.start < t1:
                    _block(pen, c, (x_of(c.start), y, x_of(c.end), y + LANE), local.index(c.stage), (small, tiny))
            if band == bands - 1:
                busy = sum(c.end - c.start for c in rank) / end
                pen.text((WIDTH - RIGHT + 6, y + LANE / 2), f"{busy:.0%} busy", fill=GRAY, font=tiny, anchor="lm")
        _axis(pen, t0, t1, y0 + len(ranks) * (LANE + GAP) + 1, x_of, unit, tiny)
    if several:
        pen.text((WIDTH - RIGHT, 40), "lighter: the rank's later stages", fill=GRAY, font=small, anchor="rt")
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path)
    return path


def _legend(pen: ImageDraw.ImageDraw, ranks, font) -> None:
    kinds, x = {c.kind for rank in ranks for c in rank}, LEFT
    for kind in COLOURS:
        if kind in kinds:
            pen.rectangle((x, 40, x + 16, 53), fill=COLOURS[kind][0])
            pen.text((x + 22, 40), NAMES[kind], fill=INK, font=font)
            x += 44 + pen.textlength(NAMES[kind], font=font)
    pen.rectangle((x, 40, x + 16, 53), fill=IDLE, outline=STRIPE)
    pen.line((x, 53, x + 13, 40), fill=STRIPE)
    pen.text((x + 22, 40), f"idle {bubble(ranks):.1%} from the first block to the last", fill=INK, font=font)


def _idle(image: Image.Image, box) -> None:
    x0, y0, x1, y1 = box
    lane = Image.new("RGB", (x1 - x0, y1 - y0), IDLE)
    stripes = ImageDraw.Draw(lane)
    for x in range(-(y1 - y0), x1 - x0, 10):
        stripes.line((x, y1 - y0, x + y1 - y0, 0), fill=STRIPE)
    image.paste(lane, (x0, y0))


def _block(pen: ImageDraw.ImageDraw, c: Chunk, box, local: int, fonts) -> None:
    x0, y0, x1, y1 = box
    colour, ink = COLOURS[c.kind]
    if local:  # a rank's later stages are lighter
        share = 1 - 0.55**local
        colour, ink = tuple(round(v + (255 - v) * share) for v in colour), "black"
    pen.rectangle((x0, y0, max(x0, x1 - 1), y1), fill=colour)
    if x1 - x0 > 4:
        pen.line((x1 - 1, y0, x1 - 1, y1), fill="white")
    text = str(c.microbatch)
    for font in fonts:
        if pen.textlength(text, font=font) + 1 <= x1 - x0:
            pen.text(((x0 + x1 - 1) / 2, (y0 + y1) / 2), text, fill=ink, font=font, anchor="mm")
            break


def _axis(pen: ImageDraw.ImageDraw, t0: float, t1: float, y: float, x_of, unit: str, font) -> None:
    """Ticks at round times, about a dozen."""
    factor = 1e3 if unit == "ms" else 1.0
    rough = (t1 - t0) * factor / 12
    power = 10.0 ** math.floor(math.log10(rough))
    tick = next(m * power for m in (1, 2, 5, 10) if m * power >= rough)
    pen.line((x_of(t0), y, x_of(t1), y), fill=GRAY)
    for n in range(math.ceil(t0 * factor / tick), math.floor(t1 * factor / tick + 1e-9) + 1):
        x = x_of(n * tick / factor)
        pen.line((x, y, x, y + 4), fill=GRAY)
        pen.text((x, y + 6), f"{n * tick:g}", fill=GRAY, font=font, anchor="mt")
    pen.text((WIDTH - RIGHT + 16, y + 6), unit, fill=GRAY, font=font, anchor="lt")


def trace(ranks: list[list[Chunk]], path: Path, *, title: str = "") -> Path:
    """Write the step as Chrome trace events: a thread for each rank, times in microseconds."""
    events = [{"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "args": {"name": title or "pipeline"}}]
    for r, rank in enumerate(ranks):
        events.append({"ph": "M", "name": "thread_name", "pid": 0, "tid": r, "args": {"name": f"rank {r}"}})
        events += [
            {"ph": "X", "name": f"{NAMES[c.kind]} {c.microbatch}", "cat": c.kind, "pid": 0, "tid": r,
             "ts": c.start * 1e6, "dur": (c.end - c.start) * 1e6, "args": {"microbatch": c.microbatch, "stage": c.stage}}
            for c in rank
        ]
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
    return path
