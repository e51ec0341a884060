"""How much a run does; one that does the same for ever is broken off.

A spin takes no virtual time, so no instant ever comes at which somebody could look. What is
counted is every step that is asked for of a task of a process, and every statement. A loop that
does neither is not seen, and hangs.
"""

from __future__ import annotations

import contextlib
import gc
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any, Final

import trio
import trio._core._run as trio_run

MOST: Final = 75_000
"""Steps and statements of one run. Of 1,500 seeds most took some 1,000, and none took 6,000."""
_LAST: Final = 1_000
"""So many of them say what the spin is."""
_TOLD: Final = 4
_WAITS: Final = 100


class Endless(BaseException):
    """The run is broken off. Who catches it meets it again."""


class _Stopped(trio.abc.Clock):
    """What Trio itself asks for the time, and nobody there swallows what is raised: tasks may, and
    then wait for each other."""

    def start_clock(self) -> None:
        raise Endless

    def current_time(self) -> float:
        raise Endless

    def deadline_to_sleep_time(self, deadline: float) -> float:
        raise Endless


class Work:
    def __init__(self, break_off: Callable[[], None]) -> None:
        """`break_off` is called once, when it was too much."""
        self.endless = ""
        """What was done over and over, if it was too much."""
        self._break_off = break_off
        self._done = 0
        self._last: Counter[tuple[str, str]] = Counter()
        self._began = 0.0
        self._runner: trio_run.Runner | None = None

    def add(self, process: str, what: str) -> None:
        """Raise Endless if that is too much."""
        self._done += 1
        if self._done <= MOST - _LAST:
            return
        if self._done <= MOST:
            if not self._last:
                self._began = trio.current_time()
            self._last[process, what] += 1
            return
        if not self.endless:
            self._runner = trio_run.GLOBAL_RUN_CONTEXT.runner
            self.endless = self._story(trio.current_time() - self._began)
            self._break_off()
            self._runner.clock = _Stopped()
        raise Endless

    def _story(self, seconds: float) -> str:
        often = (
            f"{count:,} of {process}: {' '.join(what.split())[:60]}"
            for (process, what), count in self._last.most_common(_TOLD)
        )
        return (
            f"{MOST:,} steps and statements are no end,"
            f" and the last {_LAST:,} took {seconds:.6f} s: {', '.join(often)}"
        )

    def close(self) -> None:
        """End what a run that was broken off has left, before another one begins."""
        runner, self._runner = self._runner, None
        if runner is None:
            return
        # All there are: its task may have left it already.
        nurseries = [thing for thing in gc.get_objects() if isinstance(thing, trio.Nursery)]
        for task in list(runner.tasks):
            _end(task.coro)
        for nursery in nurseries:
            if nursery.parent_task._runner is runner:
                nursery._children.clear()  # else it complains


_never_end: Final[list[Coroutine[Any, Any, Any]]] = []
"""Those that go on whatever comes: if they were collected, Python would complain."""


def _end(coroutine: Coroutine[Any, Any, Any]) -> None:
    """Its clean-up finds no Trio; it may wait, and each wait of it ends at once."""
    with contextlib.suppress(BaseException):
        for _ in range(_WAITS):
            coroutine.throw(Endless())  # GeneratorExit would leave what waits in the middle of it
        _never_end.append(coroutine)
