"""The store on one SQLite file: its verbs, and its transactions, which know their outcome.

The statements that write are in `_writes`, `_claims` and `_owners`, the tables in `_schema`;
`_connections` has the file open, `_checkpoints` keep it in shape.

Values reach a statement as parameters only. The tables are prefixed, and nothing else in the
file is touched: the application keeps its own tables there.

A step of a statement gives up the GIL and may wait 5 ms to get it back from a busy loop.
So a verb makes few steps, whatever the number of rows: many rows go in as one `VALUES`,
many ids as one JSON array.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import math
import os
import random
import time
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from typing import Concatenate, Final, Literal, ParamSpec, TypeAlias, TypeVar

from . import _claims, _drivers, _identity, _writes
from ._checkpoints import Checkpoints
from ._connections import (
    WRITE_NOTHING,
    Connections,
    dotted,
    has_reset_bug,
    need,
    roll_back,
    say_once,
)
from ._drivers import Conflict, Connection, Value
from ._errors import StoreBusy, StoreError
from ._identity import Process
from ._model import (
    Change,
    Claim,
    Claimed,
    Fence,
    Instant,
    NewJob,
    PastStart,
    Refused,
    Row,
    State,
)
from ._owners import OWNER_OF, Owners
from ._rows import GET, ROW, STATE, as_json, integer, meta_of, past_of, row_of, text_of
from ._schema import STATES

P = ParamSpec("P")
T = TypeVar("T")
Marker: TypeAlias = tuple[str, int]
"""(writer, batch): which transaction was committed last."""

_LEAVE_TRIES: Final = 20
"""Closing does not wait for a lock, but may be lucky within some 5 ms."""

_logger: Final = logging.getLogger("trio_jobs")
_opened: Final = itertools.count(1)


def _verb(
    doing: str,
) -> Callable[[Callable[Concatenate[SqliteStore, P], T]], Callable[Concatenate[SqliteStore, P], T]]:
    """Refuse in a forked process, and let errors say which file it was and what was done."""

    def decorate(
        verb: Callable[Concatenate[SqliteStore, P], T],
    ) -> Callable[Concatenate[SqliteStore, P], T]:
        @functools.wraps(verb)
        def checked(self: SqliteStore, /, *args: P.args, **kwargs: P.kwargs) -> T:
            self._check_process()
            try:
                return verb(self, *args, **kwargs)
            except StoreError as error:
                raise self._named(error, doing) from error

        return checked

    return decorate


class SqliteStore:
    """Keeps jobs in the SQLite file at `path`, or in memory for `":memory:"`.

    `synchronous="normal"` is faster, and may lose what was acknowledged last when the
    power fails. `busy_timeout` is how many seconds a call waits for the write lock before
    it raises `StoreBusy`. `driver="apsw"` is for applications that use apsw: all of a
    process must reach one file through the same driver.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        synchronous: Literal["full", "normal"] = "full",
        busy_timeout: float = 5.0,
        driver: Literal["sqlite3", "apsw"] = "sqlite3",
    ) -> None:
        path = os.fspath(path)
        if not isinstance(path, str):
            raise TypeError(f"path must be a str or a path of str, not {type(path).__name__}")
        if not path or "\0" in path:
            raise ValueError("path must be the name of a file")
        if synchronous not in ("full", "normal"):
            raise ValueError(f'synchronous must be "full" or "normal", not {synchronous!r}')
        if driver not in ("sqlite3", "apsw"):
            raise ValueError(f'driver must be "sqlite3" or "apsw", not {driver!r}')
        if not 0 <= busy_timeout < math.inf:
            raise ValueError(f"busy_timeout must be seconds from 0 up, not {busy_timeout!r}")
        self.inline = path == ":memory:"

        # The seams: how to reach the file, what waiting for its lock is made of, and which
        # process this is and whether another one is gone.
        self.connect: Callable[[str], Connection] = (
            _drivers.connect_sqlite3 if driver == "sqlite3" else _drivers.connect_apsw
        )
        self.stat: Callable[[str], os.stat_result] = os.stat
        self.sleep: Callable[[float], None] = time.sleep
        self.random = random.Random()
        self.this_process: Callable[[], Process | None] = _identity.this_process
        self.is_dead: Callable[[Process, Process], bool] = _identity.is_dead

        self._connections = Connections(
            path, synchronous=synchronous, busy_timeout=busy_timeout, driver=driver, seams=self
        )
        self._checkpoints = Checkpoints(self._connections, self._write_little, self._warn)
        self._driver: _drivers.Driver = driver
        self._process: int | None = None
        self._name = ""
        self._owners = Owners(None, self.is_dead)
        self._batch = 0
        """That of the transaction, once it is marked."""

    @property
    def identity(self) -> Hashable:
        file = self._connections.file
        return id(self) if file is None else file

    @property
    def log(self) -> str | None:
        return None if self._connections.is_memory else self._connections.log

    # Opening and closing.

    @property
    def is_open(self) -> bool:
        return self._process == os.getpid()

    def open(self) -> None:
        self._check_process()
        if self.is_open:
            raise StoreError(f"{self._connections.path} is open already")
        self._process = os.getpid()
        try:
            self._open()
        except StoreError as error:
            self.close()
            raise self._named(error, "opening") from error
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        self._connections.open()
        here = None if self._connections.is_memory else self.this_process()
        self._owners = Owners(here, self.is_dead)
        # No two stores share it: not here, not after a fork, not on other machines.
        self._name = f"{os.getpid()}-{next(_opened)}-{self.random.getrandbits(64):x}"

    def close(self) -> None:
        if self._process in (None, os.getpid()):  # else it is the parent's
            self._connections.close(self._leave)
            self._process = None

    def _leave(self) -> None:
        # Without it only others could take our row away, when this process is gone. While the
        # file is locked or broken they have to.
        for _ in range(_LEAVE_TRIES if self._owners.is_any_left else 0):
            try:
                with self.transaction():
                    self._owners.leave(self._connections.in_transaction())
                return
            except StoreBusy:
                self.sleep(self.random.uniform(50e-6, 400e-6))
            except StoreError:
                return

    # Writing.

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        self._check_process()
        with self._connections.writing:
            connection = self._begin()
            self._batch = 0
            try:
                self._owners.begin()
                changes = connection.total_changes
                yield
                if connection.total_changes == changes:
                    return  # rolled back, so that nothing is written to the log
                self._commit()
                self._owners.committed()
            finally:
                self._connections.end(connection)

    @_verb("beginning a transaction")
    def _begin(self) -> Connection:
        return self._connections.begin()

    @_verb("committing")
    def _commit(self) -> None:
        connection = self._connections.in_transaction()
        if not self._batch:
            self._mark()
        mark = (self._name, self._batch)
        try:
            connection.execute("COMMIT")
            return
        except StoreError as error:
            failed = error
        found: Marker | None = None
        with contextlib.suppress(StoreError):
            roll_back(connection)
            writer, batch = meta_of(connection.execute("SELECT writer, batch FROM trio_jobs_meta"))
            found = (writer, batch)
        if found == mark:
            return
        if found is not None and found[1] <= mark[1]:
            raise failed  # nobody has come after us, or somebody in our place
        # No StoreBusy, whatever it was: that says that nothing was written.
        unknown = StoreError(f"{failed}; the outcome is unknown")
        unknown.is_permanent = failed.is_permanent
        unknown.is_outcome_unknown = True
        raise unknown from failed

    def _mark(self, ids: int = 0) -> int:
        """Put the transaction's own mark in the file, and take so many ids; returns the first."""
        connection = self._connections.in_transaction()
        self._batch, next_id = meta_of(connection.execute(_MARK, (self._name, ids)))
        return int(next_id) - ids

    @_verb("adding jobs")
    def add(self, jobs: Sequence[NewJob]) -> list[tuple[Row, bool]]:
        return _writes.add(self._connections.in_transaction(), jobs, self._mark)

    @_verb("adding a job on the application's connection")
    def add_on(self, connection: object, job: NewJob) -> tuple[Row, bool]:
        application = _drivers.adapted(connection, self._driver)
        if self._connections.is_memory:
            raise ValueError("jobs in memory are no file that another connection could reach")
        version = need(self._connections.writer).version
        [(path,)] = application.execute(_MAIN_FILE)
        file = self._connections.file
        if file is None or _drivers.file_of(path, self.stat) != file:
            raise ValueError(f"the main database of the connection is not {self._connections.path}")
        if has_reset_bug(version) and application.execute("PRAGMA wal_autocheckpoint") != [(0,)]:
            say_once(logging.WARNING, _OLD_SQLITE_AUTOCHECKPOINT, dotted(version))
        # A write comes first: before it sqlite3 begins the application's transaction, and with
        # the lock it takes, what is read after it stays true.
        application.execute(WRITE_NOTHING)

        def reserve(ids: int) -> int:
            (next_id,) = meta_of(application.execute(_RESERVE, (ids,)))
            return int(next_id) - ids

        try:
            [added] = _writes.add(application, [job], reserve)
        except Conflict:
            # No transaction around the two statements: another's insert came between them.
            live = _writes.live_of(application, [job])
            if not live:
                raise
            return live[_writes.name_of(job)], False
        return added

    @_verb("applying changes")
    def apply(self, changes: Sequence[Change]) -> list[Refused | None]:
        return _writes.apply(self._connections.in_transaction(), changes)

    @_verb("renewing leases")
    def renew(self, fences: Sequence[Fence], until: Instant) -> dict[Fence, bool]:
        return _writes.renew(self._connections.in_transaction(), fences, until)

    @_verb("claiming jobs")
    def claim(self, claim: Claim) -> Claimed:
        connection = self._connections.in_transaction()
        self._owners.look(connection, claim.lease_now)
        return _claims.claim_rows(connection, claim, self._owners)

    @_verb("looking for commits of others")
    def version(self, now: Instant) -> Hashable:
        connection = self._connections.in_transaction()
        self._owners.look(connection, now)
        # Commits of this connection do not change it.
        [(version,)] = connection.execute("PRAGMA data_version")
        return (version, tuple(self._owners.dead))

    # Reading.

    @_verb("reading a job")
    def get(self, id: int) -> Row | None:
        records = self._connections.query(GET, (integer(id),))
        return row_of(records[0]) if records else None

    @_verb("reading who holds a job")
    def is_owner_dead(self, fence: Fence) -> bool:
        id, claims = fence
        records = self._connections.query(OWNER_OF, (integer(id), integer(claims)))
        return self._owners.is_known_dead(records)

    @_verb("looking for the ends of jobs")
    def finished(self, ids: Collection[int]) -> dict[int, Row | None]:
        wanted = {integer(id): id for id in ids}
        return {
            wanted[record[0]]: None if record[1] is None else row_of(record[1:])
            for record in self._connections.query(_FINISHED, (as_json(list(wanted)),))
        }

    @_verb("finding jobs")
    def find(
        self, *, states: Collection[State], kind: str | None, after: int, limit: int
    ) -> list[Row]:
        codes = [code for code, state in STATES.items() if not states or state in states]
        values: dict[str, Value] = {
            "codes": as_json(codes),
            "kind": kind,
            "after": integer(after),
            "limit": integer(limit),
        }
        return [row_of(record) for record in self._connections.query(_FIND, values)]

    @_verb("reading a job's history")
    def history(self, id: int) -> list[PastStart] | None:
        if not self._connections.query(GET, (integer(id),)):
            return None
        return [past_of(record) for record in self._connections.query(_HISTORY, (integer(id),))]

    @_verb("counting jobs")
    def counts(self, kind: str | None) -> dict[State, int]:
        counts: dict[State, int] = {}
        for code, count in self._connections.query(_COUNTS, {"kind": kind}):
            state = STATES.get(code, State.FAILED)
            counts[state] = counts.get(state, 0) + count
        return counts

    @_verb("reading the next id")
    def next_id(self) -> int:
        (next_id,) = meta_of(self._connections.query("SELECT next_id FROM trio_jobs_meta"))
        return int(next_id)

    @_verb("reading the kinds of queued jobs")
    def queued_kinds(self) -> set[str]:
        return {text_of(kind) for (kind,) in self._connections.query(_QUEUED_KINDS)}

    @_verb("looking at the lock")
    def is_unlocked(self) -> bool:
        return self._connections.is_unlocked()

    # Housekeeping.

    @_verb("tidying up")
    def tidy(self, now: Instant) -> bool:
        return self._checkpoints.tidy(now)

    @_verb("checkpointing")
    def checkpoint(self) -> None:
        self._checkpoints.run()

    def _write_little(self) -> None:
        with self.transaction():
            self._connections.in_transaction().execute("UPDATE trio_jobs_meta SET one = 1")

    def _warn(self, error: StoreError) -> None:
        _logger.warning("%s", self._named(error, "checkpointing"))

    # Helpers.

    def _check_process(self) -> None:
        if self._process not in (None, os.getpid()):
            raise StoreError(
                f"{self._connections.path} was opened in another process, before a fork"
            )

    def _named(self, error: StoreError, doing: str) -> StoreError:
        return _like(error, f"{self._connections.path}: {doing}: {error}")


_MARK: Final = """
UPDATE trio_jobs_meta SET writer = ?, batch = batch + 1, next_id = next_id + ? WHERE one = 1
RETURNING batch, next_id
"""

_RESERVE: Final = "UPDATE trio_jobs_meta SET next_id = next_id + ? RETURNING next_id"

_MAIN_FILE: Final = """
SELECT CAST(file AS BLOB) FROM pragma_database_list WHERE name = 'main'
"""

_OLD_SQLITE_AUTOCHECKPOINT: Final = (
    "This connection checkpoints by itself, which with SQLite %s can corrupt the file: set PRAGMA"
    " wal_autocheckpoint = 0 on the application's connections (trio_jobs checkpoints for them)"
)


def _like(error: StoreError, text: str) -> StoreError:
    kind = StoreBusy if isinstance(error, StoreBusy) else StoreError
    other = kind(text)
    other.is_permanent = error.is_permanent
    other.is_outcome_unknown = error.is_outcome_unknown
    return other


# Reading.

_FIND: Final = f"""
SELECT {ROW}
FROM trio_jobs_job
WHERE id > :after AND {STATE} IN (SELECT value FROM json_each(:codes))
    AND (:kind IS NULL OR kind = :kind)
ORDER BY id LIMIT :limit
"""

_FINISHED: Final = f"""
SELECT wanted, {ROW}
FROM (SELECT value AS wanted FROM json_each(?)) LEFT JOIN trio_jobs_job ON id = wanted
WHERE id IS NULL OR state NOT IN (0, 1, 2)
"""

_HISTORY: Final = """
SELECT claim, number, started_at, ended_at, CAST(outcome AS BLOB), CAST(failure AS BLOB),
    CAST(failure_type AS BLOB)
FROM trio_jobs_past INDEXED BY sqlite_autoindex_trio_jobs_past_1
WHERE job = ? ORDER BY claim
"""

_COUNTS: Final = """
SELECT state, count(*) FROM trio_jobs_job WHERE :kind IS NULL OR kind = :kind GROUP BY state
"""

# One seek a kind: the smallest, then the smallest after it, and so on.
_QUEUED_KINDS: Final = """
WITH RECURSIVE
ready(kind) AS (
    SELECT min(kind) FROM trio_jobs_job INDEXED BY trio_jobs_ready WHERE state = 0
    UNION ALL
    SELECT (
        SELECT min(kind) FROM trio_jobs_job INDEXED BY trio_jobs_ready
        WHERE state = 0 AND kind > ready.kind
    )
    FROM ready WHERE ready.kind IS NOT NULL
),
scheduled(kind) AS (
    SELECT min(kind) FROM trio_jobs_job INDEXED BY trio_jobs_scheduled WHERE state = 1
    UNION ALL
    SELECT (
        SELECT min(kind) FROM trio_jobs_job INDEXED BY trio_jobs_scheduled
        WHERE state = 1 AND kind > scheduled.kind
    )
    FROM scheduled WHERE scheduled.kind IS NOT NULL
)
SELECT CAST(kind AS BLOB) FROM ready WHERE kind IS NOT NULL
UNION
SELECT CAST(kind AS BLOB) FROM scheduled WHERE kind IS NOT NULL
"""
