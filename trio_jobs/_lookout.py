"""To see soon what other processes and other connections have committed.

Each of their commits appends to the write-ahead log, and so do our own, so an event says only
that it may be worth a look. It comes when the log is written to: before the fsync, before
anybody can see the commit. So whoever looks takes the write lock first; with that, the commit
is over.

Where the log cannot be watched, runners and waiters look once a `poll`, as they do here too:
an event is only ever a hint. To ask for SQLite's `data_version` more often is no way out, every
5 ms it would cost 6 % of a core.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterator
from typing import Final

import trio

from ._bridge import Bridge
from ._clock import Clock
from ._errors import StoreError
from ._inotify import Watch, open_watch
from ._instants import MICROSECONDS
from ._store import Store

_log = logging.getLogger("trio_jobs")

SHORTEST: Final = 0.0005
"""Seconds between two looks while they find something."""
LONGEST: Final = 0.032
"""Seconds between two looks in a stream of commits that bring nothing: our own, or those of
processes that take all the jobs themselves. A look takes the write lock, and some 0.1 ms."""
_SILENCE: Final = 4
"""So many times the pause without an event, and the next is met at once again."""


class Lookout:
    """Calls `look` soon after somebody may have written, while somebody wants to know.

    Not used under a virtual clock: there it would be up to the operating system what happens
    when, and Trio counts a task that waits for a descriptor as idle.
    """

    def __init__(
        self, bridge: Bridge, store: Store, clock: Clock, look: Callable[[], Awaitable[None]]
    ) -> None:
        self._bridge = bridge
        self._store = store
        self._clock = clock
        self._look = look
        self._wanting = 0
        self._is_wanted = trio.Event()
        self._has_found = False
        self._scope: trio.CancelScope | None = None

    @contextlib.contextmanager
    def wanted(self) -> Iterator[None]:
        """Somebody wants to know, inside the block."""
        self._wanting += 1
        try:
            self._is_wanted.set()
            if self._scope is None:
                self._start()
            yield
        finally:
            self._wanting -= 1

    def found(self) -> None:
        """A look was worth it."""
        self._has_found = True

    @trio.lowlevel.enable_ki_protection
    def _start(self) -> None:
        self._scope = trio.CancelScope()
        log = None if self._clock.is_mocked else self._store.log
        watch = None if log is None else open_watch(log)
        if watch is not None:
            # Who waits for a job has no nursery to give, and one of `open_jobs` would put what
            # its block raises into a group.
            trio.lowlevel.spawn_system_task(self._run, watch, self._scope, name="trio_jobs lookout")

    def close(self) -> None:
        if self._scope is None:
            self._scope = trio.CancelScope()  # so that it does not start any more
        self._scope.cancel()

    async def _run(self, watch: Watch, scope: trio.CancelScope) -> None:
        try:
            with scope:
                await self._watch(watch)
        except trio.ClosedResourceError:
            pass  # its `Jobs` has closed
        except trio.Cancelled:
            raise
        except BaseException:  # noqa: ASYNC103 - an application's clock raises anything
            # Out of a system task it would end the program.
            _log.exception("the log is watched no longer; other processes are heard within `poll`")
        finally:
            watch.close()

    async def _watch(self, watch: Watch) -> None:
        pause = SHORTEST
        is_missed = False
        while True:
            if not self._wanting:
                self._is_wanted = trio.Event()
                await self._is_wanted.wait()
            before = self._clock.ticks()
            if not is_missed:
                await trio.lowlevel.wait_readable(watch.descriptor)
            if self._bridge.is_inherited:
                return  # a forked process: the events are the parent's
            was_silent = self._clock.ticks() - before >= _SILENCE * pause * MICROSECONDS
            # What this process is just writing is what was heard, most of the time. And then
            # the claims that the last look brought are answered.
            with trio.move_on_after(LONGEST):
                await self._bridge.wait_quiet()
            if was_silent or self._has_found:
                pause = SHORTEST
            self._has_found = False
            watch.forget()
            try:
                await self._look()
                is_missed = False
            except StoreError:
                is_missed = True  # those who claim tell of it
            await trio.sleep(pause)
            pause = min(2 * pause, LONGEST)
