"""Signals, lost processes, hangs, bad gradients, two runs at once, and the W&B run of a run that was interrupted."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT
from ranks import Ranks, early_letter, quick_flags, run_ranks, train_ranks, training_folder
from test_checkpoint import assert_same_end, metrics

import pipeline
import policy
import resume
import train_grpo
import watch
from chaos import kill_and_resume
from checkpoint import complete_checkpoints, is_complete

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
SIX = ("--max_steps", 6, "--save_every", 2, "--eval_every", 3)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return training_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def unbroken(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("unbroken")
    train_ranks(2, quick_flags(model, folder, *SIX), folder)
    return folder


def in_step(number: int, rank: int, act, phase: str = "train"):
    """A fault: ``act()`` when ``rank`` enters ``phase`` of step ``number``."""

    def patch(mine):
        enter = watch.Watch.enter

        def entering(self, name):
            enter(self, name)
            if mine == rank and self.step == number and name == phase:
                act()

        watch.Watch.enter = entering

    return patch


def send(number: int):
    return lambda: os.kill(os.getpid(), number)


# ------------------------------------------------------------------------------------------------ signals
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP])
@pytest.mark.parametrize("rank", [0, 3])
def test_E20_a_signal_to_one_rank_of_four_stops_all_after_the_same_step(model, tmp_path, number, rank):
    folder = tmp_path / "run"
    flags = quick_flags(model, folder, *SIX, "--schedule", "GPipe", "--eval_questions", 1)
    ranks = train_ranks(4, flags, tmp_path, code=watch.STOPPED, fault=in_step(3, rank, send(number)))
    assert [p.name for p in complete_checkpoints(folder / "checkpoints")] == ["step-000002", "step-000003"]
    assert f"stopped after step 3 of 6 by {number.name} at stage {rank}" in ranks.output(0)
    assert not list(folder.glob("checkpoints/*.partial")) and metrics(folder)[-1]["step"] == 3


@pytest.mark.parametrize("phase", ["sample", "verify", "optimizer", "sync", "validate", "save", "export"])
def test_a_signal_in_any_phase_ends_in_a_checkpoint_that_resumes_to_the_same_bits(model, unbroken, tmp_path, phase):
    step = {"validate": 3, "save": 4, "export": 6}.get(phase, 5)
    flags, folder = quick_flags(model, tmp_path / "run", *SIX), tmp_path / "run"
    # a signal while the finished model is exported comes too late to stop anything
    code = 0 if phase == "export" else watch.STOPPED
    train_ranks(2, flags, tmp_path, code=code, fault=in_step(step, 1, send(signal.SIGTERM), phase))
    stood = metrics(folder)[-1]["step"]
    assert stood == {"sample": 4, "verify": 5}.get(phase, step)  # what was sampled is dropped and sampled again
    assert is_complete(folder / f"checkpoints/step-{stood:06}")
    train_ranks(2, flags, tmp_path)
    assert_same_end(unbroken, folder)


def test_a_signal_between_two_chunks_does_not_wait_for_the_rest_of_the_rollout(model, tmp_path):
    asked = tmp_path / "asked.txt"

    def fault(rank):
        generate = policy.Policy.generate

        def noted(self, prompts, **more):
            with asked.open("a") as file:
                file.write(f"{rank}\n")
            if self.mesh.is_first and self.mesh.watch.step == 2:
                os.kill(os.getpid(), signal.SIGTERM)
            return generate(self, prompts, **more)

        policy.Policy.generate = noted

    flags = quick_flags(model, tmp_path / "run", *SIX, "--chunk_size", 1, "--validation_share", 0)
    train_ranks(2, flags, tmp_path, code=watch.STOPPED, fault=fault)
    assert asked.read_text().split().count("0") == 4 + 1
    assert is_complete(tmp_path / "run/checkpoints/step-000001")


def test_a_signal_before_the_first_step_loses_nothing(model, unbroken, tmp_path):
    flags = quick_flags(model, tmp_path / "run", *SIX)
    train_ranks(2, flags, tmp_path, code=watch.STOPPED, fault=in_step(0, 0, send(signal.SIGUSR1), "validate"))
    assert [line["step"] for line in metrics(tmp_path / "run")] == [0]
    train_ranks(2, flags, tmp_path)
    assert_same_end(unbroken, tmp_path / "run")


def test_a_signal_while_loading_ends_the_process_at_once(model, tmp_path):
    ranks = Ranks(1, quick_flags(model, tmp_path / "run", *SIX), tmp_path, fault=lambda rank: slow_loading())
    ranks.wait_for(lambda: (tmp_path / "run/lock").exists())
    time.sleep(0.3)
    ranks.signal(0, signal.SIGINT)
    assert ranks.codes(5) == [watch.STOPPED] and "SIGINT before the first step" in ranks.output(0)


def slow_loading():
    policy.Policy.load = lambda self: time.sleep(30)


def test_a_forked_helper_still_dies_of_sigterm():
    mine = watch.Watch()
    mine.enter("train")
    before = signal.getsignal(signal.SIGTERM)
    mine.catch_signals()
    try:
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.write(write, b"x")  # a signal that comes before Python has settled in the child is lost
            time.sleep(20)
            os._exit(0)
        os.read(read, 1)
        os.kill(pid, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGTERM and not mine.stop
        os.kill(os.getpid(), signal.SIGINT)
        assert mine.stop == "SIGINT"
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)
    finally:
        for number in watch.SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, before)
        signal.signal(signal.SIGINT, signal.default_int_handler)


def torchrun(argv, *, world=2, log, **environment):
    env = {k: v for k, v in os.environ.items() if not k.startswith(("WANDB", "RANK", "WORLD", "LOCAL", "MASTER", "PET_"))}
    env |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "tests")} | environment
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={world}", "train_grpo.py"]
    return subprocess.Popen([*launcher, *argv], cwd=ROOT, env=env, stdout=open(log, "w"), stderr=subprocess.STDOUT)


def wait_for_step(folder: Path, step: int, process) -> None:
    end = time.monotonic() + 60
    while not ((folder / "metrics.jsonl").exists() and len(metrics(folder)) > step):
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.parametrize(
    "number, environment, alone",
    [
        (signal.SIGTERM, {}, False),
        (signal.SIGUSR1, {"PET_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"}, False),
        (signal.SIGUSR1, {}, True),  # torchrun does not know the signal and dies of it; so does it of SIGKILL
    ],
)
def test_E18_a_signal_to_torchrun_ends_in_a_complete_checkpoint(model, tmp_path, number, environment, alone):
    folder = tmp_path / "run"
    long = ("--epochs", 400, "--save_every", 0, "--validation_share", 0)
    process = torchrun(quick_flags(model, folder, *long), log=tmp_path / "log", **environment)
    wait_for_step(folder, 2, process)
    process.send_signal(number)
    assert process.wait(20) == (-number if alone else 1)
    if alone:  # the ranks notice that their launcher has gone
        end = time.monotonic() + 20
        while "the same command goes on" not in (tmp_path / "log").read_text():
            assert time.monotonic() < end
            time.sleep(0.05)
    last = metrics(folder)[-1]["step"]
    assert is_complete(folder / f"checkpoints/step-{last:06}"), (tmp_path / "log").read_text()[-3000:]
    assert f"stopped after step {last}" in (tmp_path / "log").read_text()


# ------------------------------------------------------------------------------------------------ lost processes and hangs
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("phase", ["sample", "verify", "score", "train", "optimizer", "sync", "validate", "save"])
def test_kill_9_in_any_phase_ends_the_job_and_the_same_command_goes_on(model, unbroken, tmp_path, phase, rank):
    flags, folder = quick_flags(model, tmp_path / "run", *SIX), tmp_path / "run"
    step = {"validate": 3, "save": 4}.get(phase, 5)
    ranks = Ranks(2, flags, tmp_path, fault=in_step(step, rank, send(signal.SIGKILL), phase))
    codes = ranks.codes(30)
    assert codes[rank] == -signal.SIGKILL and codes[1 - rank] == 1, ranks.output(1 - rank)
    assert "another stage" in ranks.output(1 - rank) and "step" in ranks.output(1 - rank)
    train_ranks(2, flags, tmp_path)
    assert_same_end(unbroken, folder)


def test_a_rank_that_computes_notices_that_another_has_died(model, tmp_path):
    def fault(rank):
        if rank == 0:  # busy with something that asks no other rank
            in_step(2, 0, lambda: time.sleep(25), "verify")(rank)
        else:
            in_step(2, 1, send(signal.SIGKILL), "verify")(rank)

    began = time.monotonic()
    ranks = Ranks(2, quick_flags(model, tmp_path / "run", *SIX), tmp_path, fault=fault)
    assert ranks.codes(15) == [1, -signal.SIGKILL] and time.monotonic() - began < 15
    assert "stage 0 of 2 stops in phase verify of step 2: another stage of this machine has left" in ranks.output(0)


@pytest.mark.parametrize("act, rank", [("sleep", 1), ("stop", 0)])
def test_a_hang_is_ended_after_the_timeout_with_phase_and_rank(model, tmp_path, act, rank):
    hang = (lambda: time.sleep(60)) if act == "sleep" else send(signal.SIGSTOP)
    flags = quick_flags(model, tmp_path / "run", *SIX, "--timeout", 3)
    began = time.monotonic()
    ranks = Ranks(2, flags, tmp_path, fault=in_step(2, rank, hang, "score"))
    if act == "sleep":
        assert ranks.codes(20) == [1, 1]
        assert "stage 1 of 2 hangs: phase score of step 2 has lasted 3 s, more than --timeout 3" in ranks.output(1)
        assert "sleep" in ranks.output(1) or "<lambda>" in ranks.output(1), "the stack says where"
    else:  # a stopped process cannot speak: the others do
        ranks.processes[1].join(20)
        assert ranks.processes[1].exitcode == 1
        assert "stage 1 of 2" in ranks.output(1) and "of step 2" in ranks.output(1)
        ranks.signal(0, signal.SIGKILL)
        ranks.codes(5)
    assert time.monotonic() - began < 25


def test_random_kills_end_as_an_undisturbed_run(model, unbroken, tmp_path):
    hits = 0
    for seed in (1, 2, 3):
        hits += kill_and_resume(quick_flags(model, tmp_path / f"run-{seed}", *SIX), 2, tmp_path, seed, tmp_path / f"run-{seed}")
        assert_same_end(unbroken, tmp_path / f"run-{seed}")
    assert hits > 0


# ------------------------------------------------------------------------------------------------ bad gradients
@pytest.mark.parametrize("kind", ["gradient", "loss"])
def test_D15_too_many_bad_steps_stop_the_run_and_leave_the_rows(model, tmp_path, kind):
    def fault(rank):
        original = pipeline.Pipeline.train_step

        def train_step(self, rows, loss_fn):
            result = original(self, rows, loss_fn)
            if self.mesh.watch.step >= 3:
                if kind == "gradient" and rank == 0:
                    next(self.stage.parameters()).grad.fill_(float("nan"))
                if kind == "loss" and result is not None:
                    result = (float("inf"), result[1])
            return result

        pipeline.Pipeline.train_step = train_step

    flags = quick_flags(model, tmp_path / "run", *SIX, "--max_bad_steps", 2)
    ranks = train_ranks(2, flags, tmp_path, code=1, fault=fault)
    output = ranks.output(0) + ranks.output(1)
    assert output.count("the update is skipped") == 2 and "2 updates in a row" in output
    path = tmp_path / "run/bad_rows_step_4.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert str(path) in output and len(rows) >= 2
    for row in rows:
        assert row["finite"] and len(row["input_ids"]) == len(row["logprob"]) == len(row["advantage"])
    assert any("Say" in row["text"] for row in rows) and any(any(row["weight"]) for row in rows)
    assert [line["train/skipped_updates"] for line in metrics(tmp_path / "run") if "train/loss" in line] == [0, 0, 1]


# ------------------------------------------------------------------------------------------------ two at once
def test_a_second_run_of_the_same_folder_is_refused_while_the_first_goes_on(model, tmp_path):
    folder = tmp_path / "run"
    first = Ranks(2, quick_flags(model, folder, "--epochs", 300, "--validation_share", 0), tmp_path)
    first.wait_for(lambda: (folder / "metrics.jsonl").exists() and metrics(folder))
    second = train_ranks(2, quick_flags(model, folder, "--epochs", 300), tmp_path, code=2)
    output = second.output(0) + second.output(1)
    assert output.count("error: ") == 1 and f"is in use by process {first.processes[0].pid} on" in output
    first.signal(1, signal.SIGTERM)
    assert first.codes() == [watch.STOPPED] * 2


def test_the_lock_goes_with_its_process_and_not_to_its_children(tmp_path):
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        lock = watch.FolderLock(tmp_path)
        child = os.fork()
        if child == 0:
            time.sleep(30)
            os._exit(0)
        os.write(write, f"{child}\n".encode())
        time.sleep(30)
        os._exit(bool(lock))
    child = int(os.read(read, 20))
    try:
        with pytest.raises(ValueError, match=f"in use by process {pid} on .*choose another --project_dir"):
            watch.FolderLock(tmp_path, wait_s=0)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        assert watch.FolderLock(tmp_path, wait_s=0).owner.startswith(f"process {os.getpid()} on")
    finally:
        os.kill(child, signal.SIGKILL)


def test_E17_a_stage_that_does_not_see_the_folder_refuses(tmp_path):
    lock = watch.FolderLock(tmp_path / "here")
    assert watch.sees_lock(tmp_path / "here/lock", lock.owner, wait_s=0)
    (tmp_path / "elsewhere").mkdir()
    assert not watch.sees_lock(tmp_path / "elsewhere/lock", lock.owner, wait_s=0)

    def prepare(mesh, argv):
        if mesh.stage == 1:
            resume.sees_lock = lambda *_: False
        with pytest.raises(ValueError, match="stage 1 does not see what the first stage writes to .*--project_dir that all machines share"):
            resume.claim_folder(train_grpo.parse_settings(argv), mesh)

    run_ranks(2, prepare, quick_flags("none", tmp_path / "run"))


# ------------------------------------------------------------------------------------------------ W&B
def records(path: Path):
    """The records of a W&B file: LevelDB's log format (blocks of 32 KiB, 7 bytes before each part) behind 7 bytes."""
    content, place, whole = path.read_bytes(), 7, b""
    while place + 7 <= len(content):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
            continue
        length, kind = int.from_bytes(content[place + 4 : place + 6], "little"), content[place + 6]
        whole += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # the only part, or the last one
            yield whole
            whole = b""


def history(folder: Path) -> tuple[set[str], list[int]]:
    """Run ids and the logged steps of all offline segments, in the order in which they were written."""
    from wandb.proto import wandb_internal_pb2

    ids, steps = set(), []
    for path in sorted(folder.glob("wandb/offline-run-*/run-*.wandb"), key=lambda p: p.stat().st_mtime):
        for data in records(path):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "run":
                ids.add(record.run.run_id)
            elif record.WhichOneof("record_type") == "history":
                values = {item.key or item.nested_key[0]: item.value_json for item in record.history.item}
                if "metrics/line" in values:  # not a picture or a table
                    steps.append(int(values["step"]))
    return ids, steps


def test_H05_H07_H08_one_id_from_the_first_start_and_every_step_logged_once(model, tmp_path):
    folder = tmp_path / "run"
    flags = quick_flags(model, folder, *SIX, "--tracker", "wandb", "--save_every", 4)

    def segment(code, fault=None):
        ranks = Ranks(2, flags, tmp_path, fault=fault, HOME=str(tmp_path), WANDB_MODE="offline")
        assert ranks.codes(90)[0] == code, ranks.output(0)[-3000:]
        return json.loads((folder / "run.json").read_text())["wandb_id"]

    ids = {
        segment(watch.STOPPED, in_step(2, 1, send(signal.SIGTERM))),
        segment(-signal.SIGKILL, in_step(6, 0, send(signal.SIGKILL))),  # step 5 is logged and not saved
        segment(0),
    }
    time.sleep(1)  # the writer of the killed process ends by itself
    found, steps = history(folder)
    assert len(ids) == 1 and found == ids
    assert steps == [0, 1, 2, 3, 3, 4, 5, 6, 6], "3 and 6 are validated too"
    assert [line["step"] for line in metrics(folder)] == steps


def test_H05_online_the_server_says_which_lines_it_holds(tmp_path, monkeypatch):
    class Run:
        resumed, summary, dir = True, {"metrics/line": 2}, str(tmp_path / "wandb/run-1-abc/files")

        def __init__(self):
            self.got = []

        def log(self, values):
            self.got.append((values["metrics/line"], values["step"]))

        def finish(self):
            pass

    import metrics as module

    run = Run()
    monkeypatch.setattr(module, "_start_wandb", lambda *_: run)
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps({"step": s}) + "\n" for s in range(8)))
    module.cut_lines(tmp_path / "metrics.jsonl", 4)
    tracker = module.Tracker(tmp_path, use_wandb=True, run_id="abc")
    assert run.got == [(3, 3), (4, 4)], "the file holds what the server lost"
    tracker.log(5, {})
    assert run.got[-1] == (5, 5)
    run.got, run.summary = [], {"metrics/line": 6}
    tracker = module.Tracker(tmp_path, use_wandb=True, run_id="abc")
    for step in (6, 7):
        tracker.log(step, {})
    assert run.got == [(7, 7)], "line 6 had arrived before the process was lost"


def test_H07_killed_before_the_first_checkpoint_keeps_the_id_and_other_settings_do_not(model, tmp_path):
    folder = tmp_path / "run"
    identity = lambda: json.loads((folder / "run.json").read_text())["wandb_id"]  # noqa: E731
    flags = quick_flags(model, folder, "--max_steps", 2, "--eval_every", 1)
    Ranks(1, flags, tmp_path, fault=in_step(1, 0, send(signal.SIGKILL))).codes()
    first = identity()
    train_ranks(1, flags, tmp_path)
    assert identity() == first and not (folder / "metrics-1.jsonl").exists()
    assert [line["step"] for line in metrics(folder)] == [0, 1, 1, 2, 2]
    train_ranks(1, [*flags, "--resume", "never"], tmp_path)
    assert identity() != first and (folder / "metrics-1.jsonl").exists()


def test_the_test_model_can_learn():
    assert early_letter("A", {}) == 1.0 != early_letter("z", {})
