"""What is measured is what happened, and the picture and the trace show it."""

import json
import time

import pytest
import torch
from PIL import Image

import pipeline as pipeline_module
import timeline
from pipeline import Pipeline, _TimedStage
from ranks import random_rollout, run_ranks, small_config
from rollout import pack
from schedules import SCHEDULES, Chunk, bubble, rank_of_stages, simulate, stages_per_rank, theoretical_bubble
from split import plan_stages
from stages import Stage, Stages
from timeline import COLOURS, draw, trace

FORWARD_S = 0.030
TRIES = 4


CONFIG = small_config(layers=4)


class _Slow(torch.autograd.Function):
    """Identity that takes 30 ms forward and 60 ms backward without using the processor."""

    @staticmethod
    def forward(ctx, x):
        time.sleep(FORWARD_S)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(2 * FORWARD_S)
        return gradient.clone()


class SlowStage(Stage):
    def run_layers(self, hidden, *more, **kw):
        return _Slow.apply(super().run_layers(hidden, *more, **kw))


def slow_pipeline(mesh, schedule):
    per_rank = stages_per_rank(schedule)
    where = rank_of_stages(schedule, mesh.stages, per_rank)
    torch.manual_seed(0)
    held = [SlowStage(CONFIG, s) for s, r in zip(plan_stages(CONFIG, len(where)), where) if r == mesh.stage]
    for p in (p for stage in held for p in stage.parameters()):
        p.data.normal_(0, 0.05)
    return Pipeline(Stages(held) if len(held) > 1 else held[0], mesh, schedule=schedule)


def measure(mesh, schedules, rows, folder):
    """Per schedule: the quickest of a few steps (another program may hold up any one), and when each step began here.

    The beginnings are on this host's own clock, which its processes share.
    """
    clock, out = pipeline_module._now, {}
    for schedule in schedules:
        pipeline, tries, began = slow_pipeline(mesh, schedule), [], []
        for step in range(TRIES):
            read = []
            pipeline_module._now = lambda device: read.append(clock(device)) or read[-1]
            pipeline.train_step(rows, lambda output, c: (output[..., 0] * c["weight"]).sum())
            pipeline_module._now = clock
            began.append(min(read))
            tries.append((max(mesh.gather(pipeline.step_s)), step, pipeline.timeline, pipeline.step_s))
        _, step, pipeline.timeline, pipeline.step_s = min(tries)
        path = pipeline.draw_timeline(folder / schedule, 7)
        assert (path is None) == (not mesh.is_first)
        out[schedule] = pipeline.timeline, pipeline.step_s, pipeline.theoretical_bubble(rows.shape[0]), step, began
    return out


WHOLE = ("1F1B", "GPipe", "Interleaved1F1B")  # the others would need a sleep in gradients of weights


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    folder = tmp_path_factory.mktemp("timeline")
    rows = pack(random_rollout(8, 4, seed=1), 40, rows_at_least=8).select(slice(0, 8))
    return run_ranks(2, measure, WHOLE, rows, folder), folder


@pytest.mark.parametrize("schedule", WHOLE)
def test_measured_bubble_of_equal_stages_is_the_theoretical_one(measured, schedule):
    ranks = [rank[schedule] for rank in measured[0]]
    chunks, span, theory = [r[0] for r in ranks], max(r[1] for r in ranks), ranks[0][2]
    assert theory == pytest.approx(theoretical_bubble(2, 8, schedule, stages_per_rank(schedule)))
    assert abs(bubble(chunks, span) - theory) < 0.05
    work = 8 * stages_per_rank(schedule) * 3 * FORWARD_S
    for rank in chunks:
        assert work <= sum(c.end - c.start for c in rank) < 1.3 * work


@pytest.mark.parametrize("schedule", WHOLE)
def test_no_chunk_starts_before_its_input_was_made_on_another_rank(measured, schedule):
    """What a stage works on has left the one before, on the clock that both processes share."""
    ends, starts = {}, {}
    for rank in measured[0]:
        chunks, _, _, step, began = rank[schedule]
        assert [c.start for c in chunks] == sorted(c.start for c in chunks)
        for c in chunks:
            place = c.kind, c.stage, c.microbatch
            starts[place], ends[place] = began[step] + c.start, began[step] + c.end
    stages = 2 * stages_per_rank(schedule)
    assert len(starts) == 2 * stages * 8
    for m in range(8):
        for s in range(stages - 1):
            assert starts["forward", s + 1, m] > ends["forward", s, m]
            assert starts["backward", s, m] > ends["backward", s + 1, m]
        assert all(starts["backward", s, m] > ends["forward", s, m] for s in range(stages))


@pytest.mark.parametrize("schedule", WHOLE)
def test_the_ranks_begin_their_clocks_within_a_millisecond(measured, schedule):
    """The lanes of one picture have a common zero: the barrier before the step lets both ranks go together."""
    assert min(abs(a - b) for a, b in zip(*(rank[schedule][4] for rank in measured[0]))) < 1e-3


def test_timing_a_chunk_costs_microseconds():
    """1 % of a chunk of 5 ms would be 50."""
    class Nothing:
        device, chunks_run, stage_index = torch.device("cpu"), [], 0

    began = time.perf_counter()
    for m in range(10_000):
        _TimedStage._timed(Nothing, "forward", m, lambda: None)
    assert (time.perf_counter() - began) / 10_000 < 50e-6


# ------------------------------------------------------------------------------------------------ trace
def test_the_trace_holds_every_chunk_where_it_was(measured):
    ranks, folder = measured
    for schedule in WHOLE:
        events = json.loads((folder / schedule / "step-000007.json").read_text())["traceEvents"]
        blocks = [e for e in events if e["ph"] == "X"]
        want = sorted((r, c.start * 1e6, (c.end - c.start) * 1e6, c.microbatch, c.stage, c.kind) for r, rank in enumerate(ranks) for c in rank[schedule][0])
        got = sorted((e["tid"], e["ts"], e["dur"], e["args"]["microbatch"], e["args"]["stage"], e["cat"]) for e in blocks)
        assert got == want
        names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
        assert names == {0: "rank 0", 1: "rank 1"}


# ------------------------------------------------------------------------------------------------ picture
def lane(image, r, ranks, band=0):
    """The colours along the upper edge of a rank's lane, where no number is written."""
    height = ranks * (timeline.LANE + timeline.GAP) + 34
    y = timeline.TOP + band * height + r * (timeline.LANE + timeline.GAP) + 2
    return [image.getpixel((x, y)) for x in range(timeline.LEFT, timeline.WIDTH - timeline.RIGHT)]


def share(pixels, kind):
    return sum(p == COLOURS[kind][0] for p in pixels) / len(pixels)


def test_the_picture_shows_time_to_scale(tmp_path):
    """One rank works 1 s of forward, waits 1 s, works 2 s of backward; the other is idle for the last half."""
    first = [Chunk("forward", 0, 0, 1), Chunk("backward", 0, 2, 4)]
    second = [Chunk("forward", 0, 0, 1, 1), Chunk("backward", 0, 1, 2, 1)]
    image = Image.open(draw([first, second], tmp_path / "p.png", title="by hand"))
    assert share(lane(image, 0, 2), "forward") == pytest.approx(1 / 4, abs=0.01)
    assert share(lane(image, 0, 2), "backward") == pytest.approx(2 / 4, abs=0.01)
    assert share(lane(image, 1, 2), "forward") == share(lane(image, 1, 2), "backward") == pytest.approx(1 / 4, abs=0.01)
    last = lane(image, 1, 2)[len(lane(image, 1, 2)) // 2 + 3 :]
    assert set(last) <= {timeline.IDLE, timeline.STRIPE}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("ranks, microbatches", [(2, 4), (4, 16), (8, 64)])
def test_every_number_finds_room_in_its_block(tmp_path, monkeypatch, schedule, ranks, microbatches):
    """Every chunk's number is written, whole inside its block, at a size that can be read."""
    written = []
    block = timeline._block

    def watch(pen, c, box, local, fonts):
        class Pen:
            def text(self, place, text, **more):
                written.append((c.kind, c.stage, c.microbatch))
                assert text == str(c.microbatch)
                left, _, right, _ = pen.textbbox(place, text, font=more["font"], anchor="mm")
                assert left >= box[0] - 1 and right <= box[2] + 1
                pen.text(place, text, **more)

            def __getattr__(self, name):
                return getattr(pen, name)

        block(Pen(), c, box, local, fonts)

    monkeypatch.setattr(timeline, "_block", watch)
    chunks = simulate(schedule, ranks, stages_per_rank(schedule), microbatches)
    image = Image.open(draw(chunks, tmp_path / "p.png", unit="forwards"))
    wanted = {(c.kind, c.stage, c.microbatch) for rank in chunks for c in rank}
    assert set(written) == wanted
    assert image.width == timeline.WIDTH and image.height < 2000


def test_a_trace_without_chunks_is_still_one(tmp_path):
    assert json.loads(trace([[], []], tmp_path / "t.json").read_text())["traceEvents"][0]["name"] == "process_name"
