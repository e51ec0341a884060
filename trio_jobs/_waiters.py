"""Those who wait for the ends of jobs, and one read of the store for all of them.

Who comes is looked for at once, with all others who came in that tick; whoever is still there
is looked for again, all together, once a `poll` and when somebody may have written. So a
thousand who wait cost one statement, and nobody but those whose job has ended is woken.
"""

from __future__ import annotations

import contextvars
import math
from collections.abc import Iterable, Mapping, Sequence

import outcome
import trio

from ._batch import copy_of
from ._bridge import Bridge
from ._clock import Clock
from ._model import Row


class Waiters:
    """The tasks that wait for ends in one `Jobs`."""

    def __init__(self, bridge: Bridge, clock: Clock) -> None:
        self._bridge = bridge
        self._clock = clock
        # Not that of who waits first: it reads for others, too.
        self._context = contextvars.copy_context()
        # Not sets: who is woken first must not depend on where objects lie in memory.
        self._waiters: dict[int, dict[_Waiter, None]] = {}
        self._asked: dict[int, None] = {}
        """Ids to look for as soon as may be."""
        self._poll_at = math.inf
        """When to look for all, as a Trio time."""
        self._bell = trio.Event()
        self._is_reading = False
        self._reads = 0

    def __len__(self) -> int:
        return len(self._waiters)

    @trio.lowlevel.enable_ki_protection
    async def wait(self, id: int, poll: float) -> Row | None:
        """The row once it has ended, None if there is none. Raises what reading it raises."""
        waiter = _Waiter(poll, self._reads)
        self._waiters.setdefault(id, {})[waiter] = None
        self._poll_at = min(self._poll_at, self._clock.trio_deadline(None, poll))
        self._ask([id])
        # Who waits has no nursery to give, and the read for all must not end with one of them.
        if not self._is_reading:
            self._is_reading = True
            trio.lowlevel.spawn_system_task(
                self._read_for_all, name="trio_jobs waiters", context=self._context
            )
        try:
            await waiter.event.wait()
        finally:
            if waiter in self._waiters.get(id, ()):
                self._drop(id, waiter)
            if not self._waiters:
                self._bell.set()  # there is no poll to sleep until
        return waiter.result.unwrap()

    def tell(self, rows: Iterable[Row]) -> None:
        """These rows were committed just now."""
        if self._waiters:
            self._answer({row.id: row for row in rows if row.state.is_final}, math.inf)

    def ask_for_all(self) -> None:
        """Something was written, or no more can be, and nobody can tell what."""
        self._ask(self._waiters)

    async def look(self) -> bool:
        """Look for all now; whether any has ended. What reading raises, those who wait do not
        hear of."""
        number, ids = self._next_read(), list(self._waiters)
        found = await self._bridge.read(lambda store: store.finished(ids))
        if found:
            await self._bridge.wait_told()
        self._answer(found, number)
        return bool(found)

    def _ask(self, ids: Iterable[int]) -> None:
        self._asked.update(dict.fromkeys(ids))
        self._bell.set()

    async def _read_for_all(self) -> None:
        try:
            while self._waiters:
                ids = self._whom_to_look_for()
                if ids:
                    await self._read(ids)
                else:
                    self._bell = trio.Event()
                    with trio.move_on_at(self._poll_at):
                        await self._bell.wait()
        finally:
            self._is_reading = False
            self._poll_at = math.inf

    def _whom_to_look_for(self) -> list[int]:
        asked, self._asked = self._asked, {}
        if trio.current_time() < self._poll_at:
            return [id for id in asked if id in self._waiters]
        poll = min(waiter.poll for its in self._waiters.values() for waiter in its)
        self._poll_at = self._clock.trio_deadline(None, poll)
        return list(self._waiters)

    async def _read(self, ids: Sequence[int]) -> None:
        number = self._next_read()
        try:
            found = await self._bridge.read(lambda store: store.finished(ids))
        except Exception as error:  # here it would end the whole program
            for id in ids:
                for waiter in self._taken(id, number):
                    waiter.hears(outcome.Error(copy_of(error)))
        else:
            if found:
                await self._bridge.wait_told()
            self._answer(found, number)

    def _next_read(self) -> int:
        self._reads += 1
        return self._reads

    def _answer(self, found: Mapping[int, Row | None], read: float) -> None:
        for id, row in found.items():
            for waiter in self._taken(id, read):
                waiter.hears(outcome.Value(row))

    def _taken(self, id: int, read: float) -> list[_Waiter]:
        """Those who wait for it, and did when that read began: what it saw may be an earlier
        life of the job than somebody waits for who came since."""
        taken = [one for one in self._waiters.get(id, ()) if one.came_after < read]
        for waiter in taken:
            self._drop(id, waiter)
        return taken

    def _drop(self, id: int, waiter: _Waiter) -> None:
        del self._waiters[id][waiter]
        if not self._waiters[id]:
            del self._waiters[id]


class _Waiter:
    def __init__(self, poll: float, came_after: int) -> None:
        self.poll = poll
        self.came_after = came_after
        """How many reads had begun."""
        self.event = trio.Event()
        self.result: outcome.Outcome[Row | None]

    def hears(self, result: outcome.Outcome[Row | None]) -> None:
        self.result = result
        self.event.set()
