"""What may go wrong around a process: signals, hangs, lost processes, and a second run in the same folder.

* A signal only leaves a note. Where the loop asks, all stages compare their notes, so that all stop at the same point.
* A thread watches three things while the main thread computes or waits: how long the current phase lasts, whether another
  stage of this machine has died, and whether the launcher has.
* A lock on ``project_dir`` that the kernel releases with the process, however it ends.

Left out: watching processes of other machines. There gloo reports a closed connection, and NCCL its timeout.
"""

from __future__ import annotations

import fcntl
import faulthandler
import os
import select
import signal
import socket
import threading
import time
from pathlib import Path

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
STOPPED = 75  # exit code after a stop that was asked for: the same command goes on from the checkpoint
LOST = 2.0  # seconds in which the main thread may itself report that another stage has left


class Interrupted(Exception):
    """All stages have agreed to stop in the middle of a step, before anything of it was applied."""


class Watch:
    """Where this process is and whether it should stop.

    Attributes:
        stop: what asked this process to stop ("SIGTERM"), or "".
        phase, step: where the main thread is.
    """

    def __init__(self, stage: int = 0, stages: int = 1, timeout_s: float = 600.0):
        self.stage, self.stages, self.timeout_s = stage, stages, timeout_s
        self.stop = ""
        self.step = 0
        self.enter("start")
        self._process = os.getpid()
        self._closed = threading.Event()

    def enter(self, phase: str) -> None:
        """The main thread begins ``phase``; the time it may last starts again. Loading may take as long as it likes."""
        self.phase, self.since = phase, float("inf") if phase == "start" else time.monotonic()

    def where(self) -> str:
        return f"phase {self.phase}" + (f" of step {self.step}" if self.step else "")

    # -------------------------------------------------------------------------------------------- signals
    def catch_signals(self) -> None:
        """Note signals instead of dying of them; a second SIGINT interrupts at once."""
        for number in SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame) -> None:
        if os.getpid() != self._process:  # a forked helper: it has nothing to save
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        if self.phase == "start":  # there is nothing to save yet, and loading may take long
            os.write(2, f"\nstage {self.stage}: {signal.Signals(number).name} before the first step\n".encode())
            os._exit(STOPPED)
        if self.stop and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._ask_to_stop(signal.Signals(number).name)

    def _ask_to_stop(self, reason: str) -> None:
        if not self.stop:
            self.stop = reason
            # os.write: a handler may run in the middle of a print
            os.write(2, f"\nstage {self.stage}: {reason}, will save and stop when all stages can\n".encode())

    # -------------------------------------------------------------------------------------------- the thread
    def start(self, others: list[int], *, launched: bool) -> None:
        """Watch the clock, the processes ``others`` of this machine and, when ``launched``, the parent process."""
        try:
            peers = {os.pidfd_open(pid) for pid in others}
            parent = os.pidfd_open(os.getppid()) if launched else None
        except (AttributeError, OSError):  # an older kernel: connections that close are then the only sign
            peers, parent = set(), None
        threading.Thread(target=self._watch, args=(peers, parent), daemon=True, name="watch").start()

    def close(self) -> None:
        """From here on other stages may leave."""
        self._closed.set()

    def _watch(self, peers: set[int], parent: int | None) -> None:
        poll = select.poll()
        for descriptor in peers | ({parent} - {None}):
            poll.register(descriptor, select.POLLIN)
        while not self._closed.is_set():
            lost = False
            for descriptor, _ in poll.poll(250):
                poll.unregister(descriptor)
                if descriptor == parent:
                    self._ask_to_stop("the launcher has gone")
                else:
                    lost = not self._closed.wait(LOST)
            lasted = time.monotonic() - self.since
            if self._closed.is_set():
                return
            if lasted > self.timeout_s:
                faulthandler.dump_traceback(all_threads=True)
                self._leave(f"hangs: {self.where()} has lasted {lasted:.0f} s, more than --timeout {self.timeout_s:g}")
            if lost:
                self._leave(f"stops in {self.where()}: another stage of this machine has left")

    def _leave(self, sentence: str) -> None:
        os.write(2, f"\nstage {self.stage} of {self.stages} {sentence}\n".encode())
        os._exit(1)


# ------------------------------------------------------------------------------------------------ the folder's lock
class FolderLock:
    """Held until the process ends; a forked child does not hold it (POSIX record locks are not inherited).

    Raises:
        ValueError: another process holds it, named with its machine.
    """

    def __init__(self, folder: Path, wait_s: float = 5.0):
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "lock"
        self.file = open(self.path, "a+")
        end = time.monotonic() + wait_s  # processes of a run that was just killed may take a moment to leave
        while True:
            try:
                fcntl.lockf(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if time.monotonic() > end:
                    self.file.seek(0)
                    raise ValueError(
                        f"{folder} is in use by {self.file.read().strip() or 'another run'}: "
                        "wait for it, or choose another --project_dir"
                    ) from None
                time.sleep(0.1)
        self.owner = f"process {os.getpid()} on {socket.gethostname()}, since {time.strftime('%Y-%m-%d %H:%M:%S')}"
        self.file.truncate(0)
        self.file.write(self.owner + "\n")
        self.file.flush()


def sees_lock(path: Path, owner: str, wait_s: float = 10.0) -> bool:
    """Whether this machine sees what the first stage wrote into its lock; file systems of a network may lag."""
    end = time.monotonic() + wait_s
    while not (path.is_file() and path.read_text().strip() == owner):
        if time.monotonic() > end:
            return False
        time.sleep(0.2)
    return True


def processes_here(everyone: list[tuple[str, int]]) -> list[int]:
    """The other processes of this machine, from the (machine, process) of every stage."""
    return [pid for machine, pid in everyone if machine == machine_name() and pid != os.getpid()]


def machine_name() -> str:
    """Host name and boot: two containers may share the first."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    namespace = os.readlink("/proc/self/ns/pid") if os.path.exists("/proc/self/ns/pid") else ""
    return f"{socket.gethostname()} {boot.read_text().strip() if boot.is_file() else ''} {namespace}"

