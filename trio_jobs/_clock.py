"""The one clock of an open `Jobs`: Unix time, or Trio's virtual time counted from EPOCH.

Nothing else in the package reads a clock. Under `trio.testing.MockClock` leases, backoff
and `trio.sleep` move together without any set-up, and a call that works in a thread holds
the virtual clock: Trio counts a task that waits for a thread as idle, and would jump
(python-trio/trio#456).
"""

from __future__ import annotations

import functools
import math
import sys
import time
import weakref
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final, cast

import trio

from . import _checks
from ._instants import LATEST, MICROSECONDS
from ._model import Instant

if TYPE_CHECKING:
    from trio.testing import MockClock

EPOCH: Final = datetime(2020, 1, 1, tzinfo=UTC)
"""The instant at which virtual time starts."""


class Clock:
    """Gives instants, and the Trio deadlines at which to wake for them."""

    def __init__(self, source: Callable[[], float] | None = None) -> None:
        self._mock = _mock_clock()
        self.is_virtual = source is None and self._mock is not None
        """No timer is a safety net: sleep to the next instant that matters, however far."""
        self.is_mocked = self._mock is not None
        """Trio's own time is virtual; `now` need not be."""
        self._is_given = source is not None
        self._ticks = trio.lowlevel.current_clock().current_time  # what trio.current_time asks
        self._read: Callable[[], float]
        if source is not None:
            self._read = functools.partial(_sane, source)
        elif self._mock is not None:
            mock, start = self._mock, EPOCH.timestamp()
            self._read = lambda: start + mock.current_time()
        else:
            self._read = time.time

    def now(self) -> Instant:
        """Callable from any thread."""
        return round(self._read() * MICROSECONDS)

    def ticks(self) -> Instant:
        """For durations within this process: a wall clock that is set does not change it."""
        return self.now() if self._is_given else round(self._ticks() * MICROSECONDS)

    def trio_deadline(self, instant: Instant | None, poll: float) -> float:
        """When to wake for `instant` (None: there is none), as a Trio time.

        On a real clock never later than in `poll` seconds, so that a stepped wall clock
        costs one poll.
        """
        now = trio.current_time()
        wait = math.inf if instant is None else max(0, instant - self.now()) / MICROSECONDS
        if not self.is_virtual:
            wait = min(wait, poll)
        # After some centuries a microsecond is too small for the float; time has to go on.
        return max(now + wait, math.nextafter(now, math.inf)) if wait else now

    def hold(self) -> None:
        """Keep virtual time from jumping until `release`; counted over all holders."""
        if self._mock is not None:
            held = _held.setdefault(self._mock, _Hold())
            if held.count == 0:
                held.threshold = self._mock.autojump_threshold
                self._mock.autojump_threshold = math.inf
            held.count += 1

    def release(self) -> None:
        if self._mock is not None:
            held = _held[self._mock]
            held.count -= 1
            # A test that set another threshold meanwhile keeps it.
            if held.count == 0 and self._mock.autojump_threshold == math.inf:
                self._mock.autojump_threshold = held.threshold


def _sane(source: Callable[[], float]) -> float:
    # Milliseconds, most likely, or a datetime. What they make does not fit into the file, and an
    # error about that would not name the culprit.
    seconds: object = source()
    if not isinstance(seconds, int | float):
        raise TypeError(
            f"the clock given to open_jobs is wrong: {_checks.name_of(source)} returned"
            f" {type(seconds).__name__}, not Unix seconds as a float"
        )
    if not abs(seconds) * MICROSECONDS <= LATEST:  # nor is NaN
        raise ValueError(
            f"the clock given to open_jobs is wrong: {seconds!r} are no Unix seconds before the"
            " year 10000"
        )
    return seconds


def _mock_clock() -> MockClock | None:
    # Not imported for this: trio.testing brings pytest along, and whoever runs under a
    # MockClock has imported it.
    testing = sys.modules.get("trio.testing")
    clock = trio.lowlevel.current_clock()
    if testing is not None and isinstance(clock, testing.MockClock):
        return cast("MockClock", clock)
    return None


class Alarm:
    """A sleep until an instant, which others may cut short. For one sleeping task."""

    def __init__(self, clock: Clock, poll: float) -> None:
        self._clock = clock
        self._poll = poll
        self._event = trio.Event()
        self._until: Instant | None = None
        self._due = math.inf
        self.late = 0.0
        """Seconds between the latest wake-up and when it should have been."""

    async def wait(self, instant: Instant | None, *, idle: bool = False) -> bool:
        """Sleep until then, or until `ring`: False if it rang. `late` says how well that went.

        `idle`: nothing is in hand that a stepped clock could spoil, so no poll is needed.
        """
        self._event = trio.Event()
        self._until = instant
        self._due = self._clock.trio_deadline(instant, math.inf if idle else self._poll)
        with trio.move_on_at(self._due):
            await self._event.wait()
        self.late = max(0.0, trio.current_time() - self._due)
        return not self._event.is_set()

    def ring(self) -> None:
        if not self._event.is_set():
            self._due = min(self._due, trio.current_time())
            self._event.set()

    def bring_forward(self, instant: Instant) -> None:
        """Sleep no longer than until then."""
        if self._until is None or instant < self._until:
            self.ring()


class _Hold:
    count = 0
    threshold = math.inf


_held: weakref.WeakKeyDictionary[MockClock, _Hold] = weakref.WeakKeyDictionary()
