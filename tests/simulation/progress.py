"""How far a long command is: a bar at a terminal, else a line now and then; and Ctrl-C, which
ends it with what is known by then."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from types import FrameType
from typing import Final

from rich.console import Console
from rich.progress import Progress

EVERY: Final = 60.0
"""Seconds from one line to the next where there is no terminal."""
INTERRUPTED: Final = 130
"""The exit code, as of a shell."""


class Told:
    """What has been said of it, and whether somebody said to stop."""

    def __init__(
        self,
        console: Console,
        bar: Progress | None,
        what: str,
        total: int | None,
        clock: Callable[[], float],
    ) -> None:
        self.is_interrupted = False
        self._console = console
        self._bar = bar
        self._what = what
        self._total = total
        self._clock = clock
        self._began = self._last = clock()
        self._task = None if bar is None else bar.add_task(what, total=total)

    def interrupt(self, number: int, frame: FrameType | None) -> None:
        self.is_interrupted = True
        signal.signal(signal.SIGINT, signal.default_int_handler)  # for who cannot wait

    def at(self, done: int, broken: int) -> None:
        now = self._clock()
        rate = f"{done / max(now - self._began, 1e-9):.1f} {self._what} a second, {broken} broken"
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=done, description=rate)
        elif now >= self._last + EVERY:
            self._last = now
            total = "" if self._total is None else f" of {self._total:,}"
            self.say(f"{done:,}{total} {self._what}, {rate}")

    def say(self, line: str) -> None:
        self._console.print(line, markup=False)


@contextlib.contextmanager
def telling(
    console: Console,
    what: str,
    total: int | None,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Told]:
    with contextlib.ExitStack() as stack:
        bar = stack.enter_context(Progress(console=console)) if console.is_terminal else None
        told = Told(console, bar, what, total, clock)
        before = signal.signal(signal.SIGINT, told.interrupt)
        stack.callback(signal.signal, signal.SIGINT, before)
        yield told


def pool(workers: int | None = None) -> ProcessPoolExecutor:
    """Not forked: a child must not inherit what this process has open. Ctrl-C at a terminal goes
    to all of them, and it is for the first to say what that means."""
    return ProcessPoolExecutor(
        workers,
        mp_context=get_context("spawn"),
        initializer=signal.signal,
        initargs=(signal.SIGINT, signal.SIG_IGN),
    )
