"""The store on one SQLite file: connections, transactions, locks and housekeeping.

The statements of the verbs are in `_writes`, `_claims` and `_rows`, the tables in `_schema`.

One connection writes, one reads, one checkpoints; they wait for locks here and not inside
SQLite. Values reach a statement as parameters only. The tables are prefixed, and nothing
else in the file is touched: the application keeps its own tables there.

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
import threading
import time
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from typing import Concatenate, Final, Literal, ParamSpec, TypeAlias, TypeVar

from . import _claims, _drivers, _identity, _writes
from ._drivers import Conflict, Connection, FileId, Record, Value, Values
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
from ._owners import Owners
from ._rows import GET, ROW, as_json, integer, past_of, row_of, text_of
from ._schema import MIGRATIONS, STATES

P = ParamSpec("P")
T = TypeVar("T")
Marker: TypeAlias = tuple[str, int]
"""(writer, batch): which transaction was committed last."""

_MAX_LOG: Final = 4_000_000
"""Bytes of the write-ahead log above which a checkpoint is due."""
_TOO_LONG: Final = 4 * _MAX_LOG
"""Bytes above which the log is worth a warning."""
_LONG_READ: Final = 0.02
"""Seconds that a checkpoint waits for a read of this store."""
_TRY_EVERY: Final[Instant] = 5_000_000
"""Microseconds until a checkpoint that emptied nothing is tried again."""
_OLDEST: Final = (3, 35)  # RETURNING
_LEAVE_TRIES: Final = 20
"""Closing does not wait for a lock, but may be lucky within some 5 ms."""

_logger: Final = logging.getLogger("trio_jobs")
_said: Final[set[str]] = set()
_opened: Final = itertools.count(1)


def has_reset_bug(version: tuple[int, ...]) -> bool:
    """Whether a checkpoint may corrupt the file while a commit of another connection resets
    the log (https://www.sqlite.org/wal.html#walresetbug)."""
    if (3, 44, 6) <= version < (3, 45) or (3, 50, 7) <= version < (3, 51):
        return False
    return (3, 7, 0) <= version < (3, 51, 3)


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

        self._path = path
        self._is_memory = path == ":memory:"
        self._synchronous = synchronous
        self._busy_timeout = busy_timeout
        self._driver: _drivers.Driver = driver
        self._process: int | None = None
        self._is_closing = False
        self._has_lock = False
        self._is_waiting = False
        # Each guards one connection; in memory there is only the one.
        self._writing = threading.RLock()
        self._reading = self._writing if self._is_memory else threading.RLock()
        self._checkpointing = threading.RLock()
        self._writer: Connection | None = None
        self._reader: Connection | None = None
        self._checkpointer: Connection | None = None
        self._file: FileId | None = None
        self._real_path = path
        self._name = ""
        self._owners = Owners(None, self.is_dead)
        self._batch = 0
        """That of the transaction, once it is marked."""
        self._next_tidy = _MAX_LOG
        self._tidied_at: Instant = 0
        self._is_pinned = False

    @property
    def identity(self) -> Hashable:
        return id(self) if self._file is None else self._file

    @property
    def log(self) -> str | None:
        return None if self._is_memory else self._log

    @property
    def _log(self) -> str:
        return f"{self._real_path}-wal"

    # Opening and closing.

    def open(self) -> None:
        self._check_process()
        if self._writer is not None:
            raise StoreError(f"{self._path} is open already")
        self._process = os.getpid()
        self._is_closing = False
        try:
            with self._writing, self._reading:
                self._open()
        except StoreError as error:
            self.close()
            raise self._named(error, "opening") from error
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        if self._is_memory:
            self._writer = self._reader = self.connect(self._path)
        else:
            self._real_path = os.path.realpath(self._path)
            _explain_missing(self._real_path)
            self._writer, self._file = _drivers.enter_file(
                self._real_path, self._driver, self.connect, self.stat
            )
        version = self._writer.version
        if version < _OLDEST:
            raise _drivers.permanent(f"SQLite {_dotted(version)} is older than {_dotted(_OLDEST)}")
        self._schema_version(self._writer)  # a newer one: leave the file alone
        self._prepare(self._writer)
        self._migrate(self._writer)
        if not self._is_memory:
            self._reader = self.connect(self._real_path)
            self._prepare(self._reader)
            self._reader.execute("PRAGMA query_only = 1")
            self._checkpointer = self.connect(self._real_path)
            self._prepare(self._checkpointer)
            if has_reset_bug(version):
                _say_once(logging.INFO, _OLD_SQLITE, _dotted(version))
        self._owners = Owners(None if self._is_memory else self.this_process(), self.is_dead)
        # No two stores share it: not here, not after a fork, not on other machines.
        self._name = f"{os.getpid()}-{next(_opened)}-{self.random.getrandbits(64):x}"

    def _schema_version(self, connection: Connection) -> int:
        exists = "SELECT count(*) FROM sqlite_master WHERE name = 'trio_jobs_meta'"
        if self._patiently(connection, exists) == [(0,)]:
            return 0
        [(version,)] = self._patiently(connection, "SELECT version FROM trio_jobs_meta")
        if version > len(MIGRATIONS):
            raise _drivers.permanent("the file was written by a newer version of trio_jobs")
        return int(version)

    def _prepare(self, connection: Connection) -> None:
        # This is BUSY at once while another connection writes, whatever its timeout.
        [(mode,)] = self._patiently(connection, "PRAGMA journal_mode = WAL")
        if mode != ("memory" if self._is_memory else "wal"):
            raise _drivers.permanent(f"a write-ahead log is not possible here, only {mode!r}")
        [(encoding,)] = self._patiently(connection, "PRAGMA encoding")
        if encoding != "UTF-8":
            raise _drivers.permanent(f"the file keeps text as {encoding}, it must be UTF-8")
        for setting in (
            f"synchronous = {self._synchronous}",
            "fullfsync = 1",  # on macOS; means nothing elsewhere
            "wal_autocheckpoint = 0",
            f"journal_size_limit = {_MAX_LOG}",
        ):
            self._patiently(connection, f"PRAGMA {setting}")

    def _migrate(self, connection: Connection) -> None:
        if self._schema_version(connection) == len(MIGRATIONS):
            # Nothing to write, but a file that cannot be written is refused now.
            with contextlib.suppress(StoreBusy):
                connection.execute(_WRITE_NOTHING)
            return
        self._patiently(connection, "BEGIN IMMEDIATE")
        try:
            for step in MIGRATIONS[self._schema_version(connection) :]:
                for statement in step:
                    connection.execute(statement)
            connection.execute("UPDATE trio_jobs_meta SET version = ?", (len(MIGRATIONS),))
            connection.execute("COMMIT")
        except BaseException:
            _roll_back(connection)
            raise

    def close(self) -> None:
        if self._process not in (None, os.getpid()):
            return  # it is the parent's
        self._is_closing = True  # ends a wait for the lock in another thread
        with self._writing, self._reading, self._checkpointing:
            self._leave()
            for connection in (self._reader, self._checkpointer, self._writer):
                if connection is not None:
                    connection.close()
            if self._writer is not None and self._file is not None:
                _drivers.leave_file(self._file, self._driver)
            self._reader = self._checkpointer = self._writer = self._process = None

    def _leave(self) -> None:
        # Without it only others could take our row away, when this process is gone. While the
        # file is locked or broken they have to.
        for _ in range(_LEAVE_TRIES if self._owners.is_any_left else 0):
            try:
                with self.transaction():
                    self._owners.leave(self._in_transaction())
                return
            except StoreBusy:
                self.sleep(self.random.uniform(50e-6, 400e-6))
            except StoreError:
                return

    # Writing.

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        self._check_process()
        with self._writing:
            try:
                connection = self._begin()
            finally:
                self._is_waiting = False
            self._has_lock = True
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
                _roll_back(connection)
                self._has_lock = False

    @_verb("beginning a transaction")
    def _begin(self) -> Connection:
        connection = self._need(self._writer)
        _roll_back(connection)  # an interrupt may have left one open
        self._patiently(connection, "BEGIN IMMEDIATE")
        # SQLite goes on writing to a file that was unlinked: the jobs would be gone.
        if self._file is not None and _drivers.file_of(self._real_path, self.stat) != self._file:
            _roll_back(connection)
            raise _drivers.permanent("the file was deleted or replaced while it was open")
        return connection

    @_verb("committing")
    def _commit(self) -> None:
        connection = self._in_transaction()
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
            _roll_back(connection)
            [found] = connection.execute("SELECT writer, batch FROM trio_jobs_meta")
        if found == mark:
            return
        if found is not None and found[1] <= mark[1]:
            raise failed  # nobody has come after us, or somebody in our place
        unknown = _like(failed, f"{failed}; the outcome is unknown")
        unknown.is_outcome_unknown = True
        raise unknown from failed

    def _mark(self, ids: int = 0) -> int:
        """Put the transaction's own mark in the file, and take so many ids; returns the first."""
        [(self._batch, next_id)] = self._in_transaction().execute(_MARK, (self._name, ids))
        return int(next_id) - ids

    @_verb("adding jobs")
    def add(self, jobs: Sequence[NewJob]) -> list[tuple[Row, bool]]:
        return _writes.add(self._in_transaction(), jobs, self._mark)

    @_verb("adding a job on the application's connection")
    def add_on(self, connection: object, job: NewJob) -> tuple[Row, bool]:
        application = _drivers.adapted(connection, self._driver)
        version = self._need(self._writer).version
        [(path,)] = application.execute(_MAIN_FILE)
        if self._file is None or _drivers.file_of(path, self.stat) != self._file:
            raise ValueError(f"the main database of the connection is not {self._path}")
        if has_reset_bug(version) and application.execute("PRAGMA wal_autocheckpoint") != [(0,)]:
            _say_once(logging.WARNING, _OLD_SQLITE_AUTOCHECKPOINT, _dotted(version))
        # A write comes first: before it sqlite3 begins the application's transaction, and with
        # the lock it takes, what is read after it stays true.
        application.execute(_WRITE_NOTHING)

        def reserve(ids: int) -> int:
            [(next_id,)] = application.execute(_RESERVE, (ids,))
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
        return _writes.apply(self._in_transaction(), changes)

    @_verb("renewing leases")
    def renew(self, fences: Sequence[Fence], until: Instant) -> dict[Fence, bool]:
        return _writes.renew(self._in_transaction(), fences, until)

    @_verb("claiming jobs")
    def claim(self, claim: Claim) -> Claimed:
        connection = self._in_transaction()
        self._owners.look(connection, claim.lease_now)
        return _claims.claim_rows(connection, claim, self._owners)

    @_verb("looking for commits of others")
    def version(self, now: Instant) -> Hashable:
        connection = self._in_transaction()
        self._owners.look(connection, now)
        # Commits of this connection do not change it.
        [(version,)] = connection.execute("PRAGMA data_version")
        return (version, tuple(self._owners.dead))

    # Reading.

    @_verb("reading a job")
    def get(self, id: int) -> Row | None:
        records = self._query(GET, (integer(id),))
        return row_of(records[0]) if records else None

    @_verb("looking for the ends of jobs")
    def finished(self, ids: Collection[int]) -> list[Row]:
        wanted = as_json([integer(id) for id in ids])
        return [row_of(record) for record in self._query(_FINISHED, (wanted,))]

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
        return [row_of(record) for record in self._query(_FIND, values)]

    @_verb("reading a job's history")
    def history(self, id: int) -> list[PastStart] | None:
        if not self._query(GET, (integer(id),)):
            return None
        return [past_of(record) for record in self._query(_HISTORY, (integer(id),))]

    @_verb("counting jobs")
    def counts(self, kind: str | None) -> dict[State, int]:
        counts: dict[State, int] = {}
        for code, count in self._query(_COUNTS, {"kind": kind}):
            state = STATES[code]
            counts[state] = counts.get(state, 0) + count
        return counts

    @_verb("reading the next id")
    def next_id(self) -> int:
        [(next_id,)] = self._query("SELECT next_id FROM trio_jobs_meta")
        return int(next_id)

    @_verb("reading the kinds of queued jobs")
    def queued_kinds(self) -> set[str]:
        return {text_of(kind) for (kind,) in self._query(_QUEUED_KINDS)}

    @_verb("looking at the lock")
    def is_unlocked(self) -> bool:
        # Our own writing thread may be at it: what it holds nobody else does, and while it
        # waits somebody else does. In between it takes no time.
        while not self._writing.acquire(timeout=0.001):
            if self._has_lock or self._is_waiting:
                return self._has_lock
        try:
            connection = self._need(self._writer)
            if connection.in_transaction:
                return True
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("ROLLBACK")
            return True
        except StoreBusy:
            return False
        finally:
            self._writing.release()

    # Housekeeping.

    @_verb("tidying up")
    def tidy(self, now: Instant) -> bool:
        try:
            size = 0 if self._is_memory else self.stat(self._log).st_size
        except OSError:
            return False
        if size <= _MAX_LOG:
            self._next_tidy, self._is_pinned = _MAX_LOG, False
            return False
        # While a reader needs the log as it is, to try on every call would be no use.
        last = self._tidied_at
        if size < self._next_tidy and last <= now < last + _TRY_EVERY:
            return False
        # Past that size those who write wait, and the log cannot run away from a checkpoint.
        is_safe_beside = not has_reset_bug(self._need(self._writer).version)
        if is_safe_beside and size <= 3 * _MAX_LOG:
            self._next_tidy, self._tidied_at = size + _MAX_LOG, now
            return True
        try:
            self._checkpoint_under_lock(size)
        except StoreBusy:
            return False
        except StoreError as error:
            _logger.warning("%s", self._named(error, "checkpointing"))
        self._next_tidy, self._tidied_at = size + _MAX_LOG, now
        return False

    @_verb("checkpointing")
    def checkpoint(self) -> None:
        try:
            with self._checkpointing:
                if self._checkpointer is not None:
                    self._move_log()
            # Under load it does not begin anew by itself, because something was written
            # meanwhile. That is little; so now and then those who write may wait for it.
            size = self.stat(self._log).st_size
            if size > 2 * _MAX_LOG:
                self._checkpoint_under_lock(size)
        except (StoreBusy, OSError):
            pass
        except StoreError as error:
            _logger.warning("%s", self._named(error, "checkpointing"))

    def _checkpoint_under_lock(self, size: int) -> None:
        with self._writing, self._without_own_reader(size), self._checkpointing:
            if self._writer is None or self._checkpointer is None:
                return  # closed meanwhile
            try:
                # With our lock on it, no commit can reset the log under the checkpoint.
                self._writer.execute("BEGIN IMMEDIATE")
                is_emptied = self._move_log()
            finally:
                _roll_back(self._writer)
            if is_emptied and size > 2 * _MAX_LOG:
                # It begins anew, and is cut, with the first commit that meets no reader.
                with self.transaction():
                    self._writer.execute("UPDATE trio_jobs_meta SET one = 1")
            elif is_emptied is False and size > _TOO_LONG and not self._is_pinned:
                self._is_pinned = True
                _logger.warning("%s: " + _PINNED, self._path, size // 1_000_000)

    @contextlib.contextmanager
    def _without_own_reader(self, size: int) -> Iterator[None]:
        """A dashboard that always reads kept the log from ever beginning anew: it grew by all
        that was written. Nobody waits here for a read that takes long."""
        is_held = size > 2 * _MAX_LOG and self._reading.acquire(timeout=_LONG_READ)
        try:
            yield
        finally:
            if is_held:
                self._reading.release()

    def _move_log(self) -> bool | None:
        """Move what is in the log to the file. False: somebody reads who needs what is left, or
        it was just written. None: another process is at it."""
        assert self._checkpointer is not None
        [(is_busy, pages, moved)] = self._checkpointer.execute("PRAGMA wal_checkpoint(PASSIVE)")
        return None if is_busy else moved >= pages

    # Helpers.

    def _query(self, sql: str, values: Values = ()) -> list[Record]:
        with self._reading:
            return self._patiently(self._need(self._reader), sql, values)

    def _in_transaction(self) -> Connection:
        connection = self._need(self._writer)
        if not connection.in_transaction:
            raise StoreError("no transaction is open, or SQLite has rolled it back")
        return connection

    def _need(self, connection: Connection | None) -> Connection:
        if connection is None:
            raise StoreError("the store is not open")
        return connection

    def _patiently(self, connection: Connection, sql: str, values: Values = ()) -> list[Record]:
        """Run a statement that may meet others' locks, outside a transaction."""
        waited = 0.0
        while True:
            try:
                return connection.execute(sql, values)
            except StoreBusy as error:
                self._is_waiting = self._is_waiting or connection is self._writer
                if self._is_closing or waited >= self._busy_timeout:
                    raise StoreBusy(f"{error} (waited {waited:.3g} s)") from error
            # SQLite's own waiting starves the slowest of four busy processes, short random
            # sleeps do not. Who has waited for a second does not wait for one of those.
            pause = self.random.uniform(50e-6, 400e-6) * (1 if waited < 1 else 10)
            self.sleep(pause)
            waited += pause

    def _check_process(self) -> None:
        if self._process not in (None, os.getpid()):
            raise StoreError(f"{self._path} was opened in another process, before a fork")

    def _named(self, error: StoreError, doing: str) -> StoreError:
        return _like(error, f"{self._path}: {doing}: {error}")


_MARK: Final = """
UPDATE trio_jobs_meta SET writer = ?, batch = batch + 1, next_id = next_id + ? WHERE one = 1
RETURNING batch, next_id
"""

_RESERVE: Final = "UPDATE trio_jobs_meta SET next_id = next_id + ? RETURNING next_id"

_WRITE_NOTHING: Final = "UPDATE trio_jobs_meta SET one = 1 WHERE one = 0"

_MAIN_FILE: Final = """
SELECT CAST(file AS BLOB) FROM pragma_database_list WHERE name = 'main'
"""

_OLD_SQLITE: Final = (
    "SQLite %s can corrupt a file when a checkpoint meets a commit (fixed in 3.51.3, 3.50.7 and"
    " 3.44.6). The checkpoints of trio_jobs cannot; the application's connections to its file"
    " should set PRAGMA wal_autocheckpoint = 0"
)
_PINNED: Final = (
    "the write-ahead log has %d MB and cannot be emptied: somebody has had a reading transaction"
    " open for long"
)
_OLD_SQLITE_AUTOCHECKPOINT: Final = (
    "This connection checkpoints by itself, which with SQLite %s can corrupt the file: set PRAGMA"
    " wal_autocheckpoint = 0 on the application's connections (trio_jobs checkpoints for them)"
)


def _say_once(level: int, text: str, *args: object) -> None:
    if text not in _said:
        _said.add(text)
        _logger.log(level, text, *args)


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _explain_missing(path: str) -> None:
    # SQLite says of all of these that it is unable to open the file.
    folder = os.path.dirname(path)
    if os.path.isdir(path):
        raise _drivers.permanent("it is a directory")
    try:
        os.stat(folder)
    except OSError as error:
        raise _drivers.permanent(f"{error.strerror}: {folder}") from error


def _like(error: StoreError, text: str) -> StoreError:
    kind = StoreBusy if isinstance(error, StoreBusy) else StoreError
    other = kind(text)
    other.is_permanent = error.is_permanent
    other.is_outcome_unknown = error.is_outcome_unknown
    return other


def _roll_back(connection: Connection) -> None:
    # After a full disk or an I/O error SQLite has done it already. If this fails, the error
    # that brought us here says more.
    if connection.in_transaction:
        with contextlib.suppress(StoreError):
            connection.execute("ROLLBACK")


# Reading.

_FIND: Final = f"""
SELECT {ROW}
FROM trio_jobs_job
WHERE id > :after AND state IN (SELECT value FROM json_each(:codes))
    AND (:kind IS NULL OR kind = :kind)
ORDER BY id LIMIT :limit
"""

_FINISHED: Final = f"""
SELECT {ROW}
FROM trio_jobs_job
WHERE id IN (SELECT value FROM json_each(?)) AND state >= 3
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
