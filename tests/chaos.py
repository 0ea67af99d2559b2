"""Kills a training run at random points until it has finished all the same, and compares its end with an undisturbed run.

    python tests/chaos.py --runs 50                  # forked processes; --torchrun starts each attempt with torchrun
    python tests/chaos.py --runs 1 --seed 17         # one run again

A run is repeated with the same command until it ends with 0. Every attempt but the last is hit once: a random rank gets
SIGKILL (or, one time in five, SIGTERM) at a random time after the start or after a random step. All processes must have ended
30 s later. At the end all weights, all of AdamW's state, and all metrics that no clock measured must equal those of a run that
nobody disturbed.
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent))
os.environ.setdefault("OMP_NUM_THREADS", "1")

from ranks import Ranks  # noqa: E402

VARIANTS = [
    (),
    ("--async_checkpoint", "on"),
    ("--sampler", "pipeline", "--chunk_size", "2"),
    ("--grpo_iterations", "2", "--beta", "0.1", "--reference_update_fraction", "0.2", "--lr_schedule", "linear"),
]


class Torchrun:
    """The same processes under torchrun, with the same methods as ``Ranks``."""

    def __init__(self, world, argv, folder):
        self.log = Path(folder) / f"torchrun-{os.urandom(4).hex()}.txt"
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={world}"]
        root = Path(__file__).resolve().parent.parent
        self.launcher = subprocess.Popen(
            [*launcher, "train_grpo.py", *argv], cwd=root, stdout=open(self.log, "w"), stderr=subprocess.STDOUT,
            env=os.environ | {"PYTHONPATH": str(root / "tests")},
        )

    def output(self, rank=0):
        return self.log.read_text()

    def running(self):
        return self.launcher.poll() is None

    def signal(self, rank, number):
        found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(self.launcher.pid)], capture_output=True, text=True).stdout
        pids = sorted(map(int, found.split()))
        if rank < len(pids):
            os.kill(pids[rank], number)

    def end_waiting_starts(self):
        pass  # torchrun does

    def codes(self, timeout):
        try:
            return [self.launcher.wait(timeout)]
        except subprocess.TimeoutExpired:
            raise AssertionError(f"torchrun still runs {timeout} s after the kill:\n{self.output()[-3000:]}") from None


def lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def kill_and_resume(argv, world, folder, seed, project_dir, *, start_s=0.6, launch=Ranks, say=None) -> int:
    """Repeat the command until it ends with 0, with up to five hits; returns how many hit a process that still ran.

    Args:
        start_s: about how long a start takes.
    """
    generator, hits = random.Random(seed), 0
    while True:
        last = hits >= 1 and (hits >= 5 or generator.random() < 0.3)
        ranks = launch(world, argv, folder)
        rank, wanted = generator.randrange(world), generator.randrange(-2, 5)
        delay = generator.uniform(0, start_s if wanted < 0 else 0.3)
        number = signal.SIGTERM if generator.random() < 0.2 else signal.SIGKILL
        if last:
            codes = ranks.codes(120)
            assert set(codes) == {0}, f"seed {seed}: {codes}\n{ranks.output()[-3000:]}"
            return hits
        seen, end = lines(project_dir / "metrics.jsonl"), time.monotonic() + 60
        while wanted >= 0 and lines(project_dir / "metrics.jsonl") in range(seen, seen + wanted + 1) and time.monotonic() < end:
            if not ranks.running():
                break
            time.sleep(0.002)
        time.sleep(delay)
        try:
            ranks.signal(rank, number)
        except ProcessLookupError:
            pass
        began = time.monotonic()
        if wanted < 0:
            ranks.end_waiting_starts()
        codes = ranks.codes(30)
        hit = set(codes) != {0}
        hits += hit
        if say:
            point = f"{delay:.2f} s after " + ("the start" if wanted < 0 else f"{wanted + 1} more lines")
            say(f"  {number.name} to rank {rank} {point}: ended {time.monotonic() - began:.1f} s later with {codes}")
        if not hit:
            return hits


def main():
    from ranks import quick_flags, train_ranks, training_folder
    from test_checkpoint import assert_same_end

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0, help="of the first run; the others count up")
    parser.add_argument("--minutes", type=float, default=1e9, help="start no further run after so many minutes")
    parser.add_argument("--torchrun", action="store_true")
    parser.add_argument("--quiet", action="store_true")
    arguments = parser.parse_args()
    began, done, hits = time.monotonic(), 0, 0
    launch, start_s = (Torchrun, 8.0) if arguments.torchrun else (Ranks, 0.6)
    with tempfile.TemporaryDirectory() as top:
        top = Path(top)
        model = training_folder(top / "model")
        undisturbed = {}
        for seed in range(arguments.seed, arguments.seed + arguments.runs):
            if time.monotonic() - began > 60 * arguments.minutes:
                break
            world, variant = 2 + seed % 2, seed // 2 % len(VARIANTS)
            flags = ("--max_steps", 6, "--save_every", 1, "--eval_every", 2, *VARIANTS[variant])
            key, folder = (world, variant), top / f"run-{seed}"
            if key not in undisturbed:
                undisturbed[key] = top / f"undisturbed-{world}-{variant}"
                train_ranks(world, quick_flags(model, undisturbed[key], *flags), top)
            say = None if arguments.quiet else print
            argv = quick_flags(model, folder, *flags)
            hit = kill_and_resume(argv, world, top, seed, folder, start_s=start_s, launch=launch, say=say)
            assert_same_end(undisturbed[key], folder)
            done, hits = done + 1, hits + hit
            print(f"seed {seed}: {world} ranks {' '.join(VARIANTS[variant])}: {hit} hits, same end", flush=True)
    print(f"{done} runs, {hits} hits, all ended as an undisturbed run, {(time.monotonic() - began) / 60:.1f} minutes")


if __name__ == "__main__":
    main()
