"""The processes of one round: forked, signalled, started again, never left behind.

They are forked from a process with one thread that has everything imported, which takes a few
milliseconds where a new interpreter takes half a second.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from . import child
from .child import Settings


@dataclass
class Process:
    """One life of one member."""

    settings: Settings
    pid: int
    log: Path
    started_at: int
    """Nanoseconds since 1970, as all instants here."""
    signalled: tuple[signal.Signals, ...] = ()
    signalled_at: int | None = None
    """When it was first asked to stop."""
    killed_at: int | None = None
    ended_at: int | None = None
    code: int | None = None
    listens_since: int | None = None
    """From when on it listens to signals; this and the next are known by its own words."""
    killed_itself: bool = False

    @property
    def name(self) -> str:
        return self.settings.name

    @property
    def is_orderly(self) -> bool:
        """It stopped by its own runner's rules."""
        return self.code == 0

    @property
    def is_alive(self) -> bool:
        return self.ended_at is None


class Fleet:
    """As a context manager: at its end every process is gone."""

    def __init__(self) -> None:
        self.all: list[Process] = []

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.alive:
            self.kill(process)
            self.wait(process, within=10)

    @property
    def alive(self) -> Sequence[Process]:
        return [process for process in self.all if process.is_alive]

    def start(self, settings: Settings, log: Path) -> Process:
        started_at = time.time_ns()
        # In what Python does after a fork it would swallow the KeyboardInterrupt.
        held_back = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        pid = os.fork()
        if pid == 0:
            _become(lambda: child.main(settings), log, held_back)
        signal.pthread_sigmask(signal.SIG_SETMASK, held_back)
        process = Process(settings, pid, log, started_at)
        self.all.append(process)
        return process

    def send(self, process: Process, number: signal.Signals) -> None:
        """Ask it to stop."""
        if process.is_alive:
            process.signalled_at = process.signalled_at or time.time_ns()
            process.signalled += (number,)
            os.kill(process.pid, number)

    def kill(self, process: Process) -> None:
        if process.is_alive:
            process.killed_at = process.killed_at or time.time_ns()
            os.kill(process.pid, signal.SIGKILL)

    def freeze(self, process: Process) -> None:
        if process.is_alive:
            os.kill(process.pid, signal.SIGSTOP)

    def thaw(self, process: Process) -> None:
        if process.is_alive:
            os.kill(process.pid, signal.SIGCONT)

    def ask_where(self, process: Process) -> None:
        """It has not ended: its log will tell where it is."""
        os.kill(process.pid, child.TELL_WHERE)
        time.sleep(0.3)

    def reap(self) -> list[Process]:
        """Those that have ended since the last call."""
        return [process for process in self.alive if self._has_ended(process)]

    def wait(self, process: Process, *, within: float) -> bool:
        """Whether it has ended in time."""
        end = time.monotonic() + within
        while process.is_alive and not self._has_ended(process):
            if time.monotonic() > end:
                return False
            time.sleep(0.003)
        return True

    def _has_ended(self, process: Process) -> bool:
        # It is not reaped before its end is noted: until then its pid is nobody else's.
        pid, status = os.waitpid(process.pid, os.WNOHANG)
        if pid == 0:
            return False
        process.code = os.waitstatus_to_exitcode(status)
        process.ended_at = time.time_ns()
        return True


def _become(main: Callable[[], int], log: Path, signals: Iterable[int]) -> None:
    """Be the forked process, and end like any other."""
    code = 1
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, signals)
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        code = main()
    except KeyboardInterrupt:
        code = child.INTERRUPTED  # before Trio ran, or after it
    except BaseException:  # also one that ends interpreters: nothing of ours may run on
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
