"""A GRPO step of ours beside one of Hugging Face TRL's GRPOTrainer, on the CPU, on the same work.

    python bench/versus_trl.py                       # the table: some twenty minutes on two cores
    python bench/versus_trl.py --workloads ragged    # one line of it
    python bench/versus_trl.py --memory              # peak memory with 98 M parameters
    python bench/versus_trl.py --floor               # our training phase beside what its matrix products must cost

TRL gets an environment of its own (bench/requirements-trl.txt, made once). Per workload five sides are started, each
process with one thread, and take steps in turn, there and back again: TRL in one process, TRL in two (DDP), ours in one,
ours in two stages, with a copy of the model for sampling on each (``--sampler replicas --reference pipeline``) and without
any copy (``--sampler pipeline --reference pipeline``). The first step of each warms up and is left out.

Equal on both sides: the model's files, tokenizer and dtype (float32), the prompts, the number of completions and the
number of tokens of each single one, the reward function, beta (one reference pass), the loss (token mean over the step),
learning rate, AdamW, clipping at 1. Not equal: which tokens are drawn, which costs nothing.

CPU seconds are those of all the side's processes; on a machine that others use too they are what can be compared. Two
processes are compared by the wall clock, which needs both cores free. A ratio is TRL's over ours of the same turn, given
as the median and, behind it, the least and the most of all turns.

Left out: GPUs, vLLM, more than two processes.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import torch  # noqa: E402
from transformers import AutoModelForCausalLM, GenerationConfig  # noqa: E402

from same_work import PROMPTS, WORKLOADS, Workload  # noqa: E402
from tiny_model import build_tokenizer, tiny_config  # noqa: E402

FOLDER = HERE.parent / "runs" / "versus_trl"
SIDES = {  # name: whose, processes, settings
    "TRL, 1 process": ("trl", 1, []),
    "TRL, 2 processes": ("trl", 2, []),
    "ours, 1 process": ("ours", 1, []),
    "ours, 2 stages": ("ours", 2, ["--reference", "pipeline", "--sampler", "replicas"]),
    "ours, 2, no copy": ("ours", 2, ["--reference", "pipeline", "--sampler", "pipeline"]),
}
TARGETS = {"equal": 1.1, "ragged": 1.7, "prompts": 2.4, "scheduling": 5.0}
WHAT = {"equal": "equal lengths", "ragged": "ragged", "prompts": "128-token prompts", "scheduling": "scheduling",
        "large": "98 M parameters"}


# ------------------------------------------------------------------------------------------------ what both need
def trl_python() -> Path:
    """The interpreter of TRL's environment, which is made when it is not there yet."""
    folder, wanted = FOLDER / "venv", HERE / "requirements-trl.txt"
    python, complete = folder / "bin" / "python", folder / "complete"
    if not complete.exists() or complete.read_text() != wanted.read_text():
        print(f"installing {wanted.name} into {folder}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        # torch first: the others then find the pinned one in place
        subprocess.run([*pip, *re.findall(r"^torch==.*", wanted.read_text(), re.M)], check=True)
        subprocess.run([*pip, "-r", wanted], check=True)
        complete.write_text(wanted.read_text())
    return python


def make_model(work: Workload) -> Path:
    """A folder with random weights; the vocabulary is larger than the tokenizer's, as padded ones are."""
    folder = FOLDER / ("model-large" if work.large else "model-small")
    if not (folder / "generation_config.json").exists():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(tiny_config(initializer_range=0.02, **work.model), dtype=torch.float32)
        tokenizer = build_tokenizer()
        tokenizer.chat_template = None
        tokenizer.save_pretrained(folder)
        ends = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
        model.generation_config = ends
        model.save_pretrained(folder)
    return folder


def make_data(name: str) -> Path:
    path = FOLDER / f"{name}.jsonl"
    path.write_text("".join(json.dumps({"question": q, "answer": "none"}) + "\n" for q in WORKLOADS[name].prompts()))
    return path


# ------------------------------------------------------------------------------------------------ a side
class Side:
    """The processes of one side, which wait between their steps."""

    def __init__(self, name: str, kind: str, processes: int, workload: str, more: list[str]):
        model = make_model(WORKLOADS[workload])
        common = ["--workload", workload, "--model", str(model)]
        if kind == "trl":
            command = [str(trl_python()), str(HERE / "trl_step.py"), *common]
        else:
            command = [sys.executable, str(HERE / "our_step.py"), *common, "--data", str(make_data(workload)), *more]
            command += ["--project_dir", tempfile.mkdtemp()]  # one folder for all ranks
        environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
        environment |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        if processes > 1:
            with socket.socket() as s:
                s.bind(("127.0.0.1", 0))
                environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(s.getsockname()[1])}
        self.name, self.errors = name, tempfile.TemporaryFile("w+")
        self.processes = []
        for rank in range(processes):
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if processes > 1 else {}
            place |= {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)} if processes > 1 else {}
            self.processes.append(subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, text=True,
                env=environment | place,
            ))

    def step(self, first: bool = False) -> dict:
        """One step of all processes: wall and CPU seconds, completion tokens, most memory of a process, times by phase.

        Raises:
            RuntimeError: a process has ended; the message holds what it wrote.
        """
        if not first:  # the first step starts by itself
            for p in self.processes:
                p.stdin.write("go\n")
                p.stdin.flush()
        reports = [self._report(p) for p in self.processes]
        return dict(
            wall=max(r["wall"] for r in reports), cpu=sum(r["cpu"] for r in reports), tokens=sum(r["tokens"] for r in reports),
            peak=[r["peak"] for r in reports], parts=reports[0].get("parts", {}),
            train_cpu=reports[0].get("train_cpu"), train_flops=reports[0].get("train_flops"),
        )

    def _report(self, process: subprocess.Popen) -> dict:
        for line in process.stdout:
            if line.startswith("@"):
                return json.loads(line[1:])
        self.errors.seek(0)
        raise RuntimeError(f"{self.name} has ended:\n{self.errors.read()[-4000:]}")

    def close(self) -> None:
        for p in self.processes:
            p.stdin.close()
            p.stdin = None
        for p in self.processes:
            try:
                p.communicate(timeout=60)
            except subprocess.TimeoutExpired:  # TRL's process now and then hangs while Python shuts down; its steps are done
                p.kill()
                p.communicate()


def run_in_turns(sides: list[Side], turns: int) -> dict[str, list[dict]]:
    """The steps of each side, of which all have taken ``turns`` after one that warms up."""
    steps: dict[str, list[dict]] = {side.name: [] for side in sides}
    for side in sides:
        side.step(first=True)
    for turn in range(turns):
        for side in sides if turn % 2 == 0 else sides[::-1]:
            steps[side.name].append(side.step())
    for side in sides:
        side.close()
    return steps


# ------------------------------------------------------------------------------------------------ the tables
def ratio(theirs: list[dict], ours: list[dict], of: str) -> tuple[float, float, float]:
    """Median, least and most of TRL's over ours of the same turns."""
    found = [a[of] / b[of] for a, b in zip(theirs, ours, strict=True)]
    return statistics.median(found), min(found), max(found)


def compare(name: str, turns: int) -> None:
    steps = run_in_turns([Side(side, kind, n, name, more) for side, (kind, n, more) in SIDES.items()], turns)
    work = WORKLOADS[name]
    tokens = {side: [s["tokens"] for s in taken] for side, taken in steps.items()}
    assert len(set(map(tuple, tokens.values()))) == 1, f"the sides did not do the same work: {tokens}"
    print(f"\n{WHAT[name]}: {PROMPTS} prompts of {work.prompt_tokens} tokens, G={work.group}, "
          f"mean {statistics.mean(work.lengths(1)):.0f} of {work.new_tokens} new tokens; {turns} turns")
    print(f"{'':<18} {'CPU s':>7} {'wall s':>7} {'tokens/s':>9} {'peak MiB':>9}   TRL's CPU s / ours      TRL's wall s / ours")
    for side, taken in steps.items():
        cpu, wall = (statistics.median(s[of] for s in taken) for of in ("cpu", "wall"))
        peak = max(taken[-1]["peak"]) / 2**20
        line = f"{side:<18} {cpu:>7.2f} {wall:>7.2f} {tokens[side][0] / wall:>9.0f} {peak:>9.0f}"
        if SIDES[side][0] == "ours":
            theirs = steps["TRL, 1 process" if SIDES[side][1] == 1 else "TRL, 2 processes"]
            for of in ("cpu", "wall"):
                line += "   {:>5.2f}x ({:.2f}-{:.2f})  ".format(*ratio(theirs, taken, of))
        print(line, flush=True)
    one = ratio(steps["TRL, 1 process"], steps["ours, 1 process"], "cpu")[0]
    two = ratio(steps["TRL, 2 processes"], steps["ours, 2 stages"], "wall")[0]
    for what, value in (("one process, CPU seconds", one), ("two ranks, wall seconds", two)):
        verdict = "met" if value >= TARGETS[name] else "missed"
        print(f"    {what}: {value:.2f}x, target {TARGETS[name]}x {verdict}")
    for side in (name for name, (kind, _, _) in SIDES.items() if kind == "ours"):
        phases = {k: statistics.median(s["parts"].get(k, 0) for s in steps[side]) for k in steps[side][0]["parts"]}
        shown = "  ".join(f"{k.removeprefix('time/')} {v:.2f}" for k, v in phases.items() if k.startswith("time/"))
        print(f"    {side}, wall seconds: {shown}")
        shape = "  ".join(f"{k.removeprefix('pipeline/')} {v:.2f}" for k, v in phases.items() if k.startswith("pipeline/"))
        print(f"    {' ' * len(side)}  {shape}", flush=True)


def memory() -> None:
    """Most memory of a process from its start to the end of the second step, by when the optimizer's state is there."""
    print("\npeak memory of a process, MiB: 98 M parameters, 32k vocabulary, equal lengths, beta > 0")
    names = ["TRL, 1 process", "ours, 2, no copy"]
    steps = run_in_turns([Side(name, *SIDES[name][:2], "large", SIDES[name][2]) for name in names], 1)
    peaks = {name: steps[name][-1]["peak"] for name in names}
    for name in names:
        print(f"{name:<18} " + "  ".join(f"{peak / 2**20:>6.0f}" for peak in peaks[name]), flush=True)
    share = max(peaks[names[1]]) / max(peaks[names[0]])
    print(f"largest rank of two stages: {share:.0%} of TRL's process, target 60 % {'met' if share <= 0.6 else 'missed'}")


def matrix_rate(seconds: float = 1.0) -> float:
    """float32 operations per CPU second of one thread, in products of the large model's shapes; the best of a few."""
    a, b = torch.randn(512, 768), torch.randn(768, 2048)
    best, until = 0.0, time.process_time() + seconds
    while time.process_time() < until:
        began = time.process_time()
        for _ in range(20):
            a @ b
        best = max(best, 20 * 2 * a.shape[0] * b.numel() / (time.process_time() - began))
    return best


def floor(turns: int) -> None:
    """The matrix rate is measured before and after every step."""
    torch.set_num_threads(1)
    print("\ntraining phase (forward, loss, backward; ours, 1 process) beside its matrix products at the measured rate")
    print(f"{'':<18} {'GFLOP':>7} {'GFLOP/s':>8} {'floor, CPU s':>13} {'measured':>9}   floor / measured")
    for name in [*TARGETS, "large"]:
        side = Side("ours, 1 process", "ours", 1, name, [])
        side.step(first=True)
        found, before = [], matrix_rate()
        for _ in range(turns):
            step = side.step()
            after = matrix_rate()
            found.append(((before + after) / 2, step["train_flops"], step["train_cpu"]))
            before = after
        side.close()
        rate, flops, cpu = (statistics.median(column) for column in zip(*found))
        shares = [f / r / c for r, f, c in found]
        share = statistics.median(shares)
        verdict = ("" if name != "large" else ", target 70 % met" if share >= 0.7 else ", target 70 % missed")
        print(f"{WHAT[name]:<18} {flops / 1e9:>7.1f} {rate / 1e9:>8.1f} {flops / rate:>13.2f} {cpu:>9.2f}   "
              f"{share:.0%} ({min(shares):.0%}-{max(shares):.0%}){verdict}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workloads", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--memory", action="store_true", help="peak memory of the large model instead")
    parser.add_argument("--floor", action="store_true", help="our training phase beside its floor instead")
    options = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, torch {torch.__version__}, float32, one thread a process")
    began = time.monotonic()
    if options.memory:
        memory()
    elif options.floor:
        floor(options.turns)
    else:
        for name in options.workloads:
            compare(name, options.turns)
    print(f"\n{time.monotonic() - began:.0f} s, load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
