"""Who claims: one row for each open store that took a job, so that others can see it is dead.

A running row names its owner. That the owner's process is gone is asked of the system, not of
a clock, and only now and then: a claim is short. An owner's row goes when no running row names
it any more: at an orderly close, or when somebody sees that it is dead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from ._drivers import Connection, Record
from ._identity import Process
from ._model import Instant
from ._rows import as_json, meta_of, text_of

LOOK_EVERY: Final[Instant] = 500_000
"""A look takes some 10 us for each owner there is, under the write lock."""

_FIND: Final = "SELECT id, CAST(place AS BLOB), pid, started FROM trio_jobs_owner"

OWNER_OF: Final = """
SELECT owner.id, CAST(owner.place AS BLOB), owner.pid, owner.started
FROM trio_jobs_job AS job JOIN trio_jobs_owner AS owner ON owner.id = job.owner
WHERE job.id = ? AND job.claims = ? AND job.state = 2
"""
"""Of a running row, by its fence."""

_RESERVE: Final = "UPDATE trio_jobs_meta SET next_owner = next_owner + 1 RETURNING next_owner - 1"

_ENTER: Final = """
INSERT OR REPLACE INTO trio_jobs_owner (id, place, pid, started) VALUES (?, ?, ?, ?)
"""

# Those of them that no running row names.
_REMOVE: Final = """
DELETE FROM trio_jobs_owner
WHERE id IN (SELECT value FROM json_each(:ids)) AND id NOT IN (
    SELECT owner FROM trio_jobs_job INDEXED BY trio_jobs_lease
    WHERE state = 2 AND owner IS NOT NULL
)
RETURNING id
"""


class Owners:
    """The owners of running rows, as one open store sees them. `here` is None in memory, and
    where processes cannot be told apart: then there are none."""

    def __init__(self, here: Process | None, is_dead: Callable[[Process, Process], bool]) -> None:
        self.dead: list[int] = []
        """Running rows of these are lost. Ids are never used again, so this never gets wrong."""
        self._here = here
        self._is_dead = is_dead
        self._id: int | None = None
        self._uncommitted: int | None = None
        self._looked_at: Instant | None = None

    # Called inside transactions.

    def begin(self) -> None:
        """A transaction begins: what an earlier one has not committed is gone."""
        self._uncommitted = None

    def committed(self) -> None:
        if self._uncommitted is not None:
            self._id = self._uncommitted

    def own_id(self, connection: Connection) -> int | None:
        """What this store's running rows are marked with."""
        if self._here is not None and self._id is None and self._uncommitted is None:
            (id,) = meta_of(connection.execute(_RESERVE))
            self._enter(connection, id, self._here)
            self._uncommitted = id
        return self._uncommitted if self._id is None else self._id

    def look(self, connection: Connection, now: Instant) -> None:
        """See who is dead, if that was not done just now."""
        last, here = self._looked_at, self._here
        if here is None or (last is not None and last <= now < last + LOOK_EVERY):
            return
        self._looked_at = now
        owners = _processes(connection.execute(_FIND))
        gone = [id for id, process in owners.items() if self._is_gone(process, here)]
        # Nobody here will ever know that one of another place is dead, nor one of this process
        # that could not leave when it closed. If it lives it enters again when it looks; so it
        # must not be driven out again and again.
        strangers = [
            id
            for id, process in owners.items()
            if last is None
            and (process.place != here.place or (process == here and id != self._id))
        ]
        left = self._remove(connection, [*gone, *strangers])
        self.dead = [id for id in gone if id not in left]
        if self._id is not None and self._id not in owners:
            self._enter(connection, self._id, here)

    def is_known_dead(self, found: Sequence[Record]) -> bool:
        """The owner that `OWNER_OF` has found. Called from any thread, outside a transaction."""
        here = self._here
        return here is not None and any(
            self._is_gone(process, here) for process in _processes(found).values()
        )

    def leave(self, connection: Connection) -> None:
        """The store closes."""
        self._remove(connection, self._leavers())

    @property
    def is_any_left(self) -> bool:
        """There are rows that an orderly close takes away, if no running row names them."""
        return bool(self._leavers())

    def _is_gone(self, process: Process, here: Process) -> bool:
        return process != here and self._is_dead(process, here)

    def _leavers(self) -> list[int]:
        return self.dead if self._id is None else [self._id, *self.dead]

    def _enter(self, connection: Connection, id: int, here: Process) -> None:
        connection.execute(_ENTER, (id, here.place, here.pid, here.started))

    def _remove(self, connection: Connection, ids: list[int]) -> set[int]:
        if not ids:
            return set()
        return {id for (id,) in connection.execute(_REMOVE, {"ids": as_json(ids)})}


def _processes(records: Sequence[Record]) -> dict[int, Process]:
    return {
        id: Process(text_of(place), pid, started)
        for id, place, pid, started in records
        if isinstance(pid, int) and 0 < pid < 2**31  # else it was edited by hand
    }
