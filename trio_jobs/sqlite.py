"""The store on one SQLite file: its schema, its migrations and every line of SQL.

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
from typing import Any, Concatenate, Final, Literal, ParamSpec, TypeAlias, TypeVar, cast

import msgspec

from . import _drivers, _lifecycle
from ._drivers import Conflict, Connection, FileId, Record, Value, Values
from ._errors import StoreBusy, StoreError
from ._model import (
    Change,
    Claim,
    Claimed,
    ClaimedJob,
    Failure,
    Fence,
    Instant,
    NewJob,
    Outcome,
    PastStart,
    Refused,
    Row,
    State,
)

P = ParamSpec("P")
T = TypeVar("T")
Marker: TypeAlias = tuple[str, int]
"""(writer, batch): which transaction was committed last."""
Name: TypeAlias = tuple[str, str | None]
"""(kind, key)"""

# What the `state` column holds. A queued row is READY if it was due when it was enqueued, or
# when a claim found it due; else SCHEDULED. So a claim never walks over rows of the future.
READY: Final = 0
SCHEDULED: Final = 1
_CODES: Final = {
    State.QUEUED: SCHEDULED,
    State.RUNNING: 2,
    State.SUCCEEDED: 3,
    State.FAILED: 4,
    State.DEAD: 5,
    State.CANCELLED: 6,
}
_STATES: Final = {READY: State.QUEUED} | {code: state for state, code in _CODES.items()}

# A file's version is how many of these steps it has seen; a released step is never edited.
# Every index is partial, so that finished rows cost nothing; `payload` comes last, so that
# reading the rest does not touch its pages. Ids come from `next_id`: never used twice.
# `writer` and `batch` name the last transaction, which tells after a failed commit whether
# it took place.
MIGRATIONS: Final[Sequence[Sequence[str]]] = [
    [
        """
        CREATE TABLE trio_jobs_meta (
            one INTEGER PRIMARY KEY CHECK (one = 1),
            version INTEGER NOT NULL,
            next_id INTEGER NOT NULL,
            writer TEXT NOT NULL,
            batch INTEGER NOT NULL
        )
        """,
        """
        INSERT INTO trio_jobs_meta (one, version, next_id, writer, batch)
        VALUES (1, 0, 1, '', 0)
        """,
        """
        CREATE TABLE trio_jobs_job (
            id INTEGER PRIMARY KEY,
            kind TEXT NOT NULL DEFAULT '',
            state INTEGER NOT NULL DEFAULT 0,
            attempt INTEGER NOT NULL DEFAULT 0,
            claims INTEGER NOT NULL DEFAULT 0,
            interruptions INTEGER NOT NULL DEFAULT 0,
            cancel_requested INTEGER NOT NULL DEFAULT 0,
            priority INTEGER NOT NULL DEFAULT 0,
            key TEXT,
            enqueued_at INTEGER NOT NULL DEFAULT 0,
            run_at INTEGER NOT NULL DEFAULT 0,
            deadline INTEGER,
            lease_until INTEGER,
            started_at INTEGER,
            finished_at INTEGER,
            result TEXT,
            failure TEXT,
            failure_type TEXT,
            payload BLOB NOT NULL DEFAULT ''
        )
        """,
        """
        CREATE INDEX trio_jobs_ready ON trio_jobs_job (kind, priority DESC, run_at)
        WHERE state = 0
        """,
        """
        CREATE INDEX trio_jobs_scheduled ON trio_jobs_job (kind, run_at)
        WHERE state = 1
        """,
        """
        CREATE INDEX trio_jobs_lease ON trio_jobs_job
            (lease_until, kind, cancel_requested, deadline, state)
        WHERE state = 2
        """,
        """
        CREATE INDEX trio_jobs_cancel ON trio_jobs_job (claims)
        WHERE state = 2 AND cancel_requested = 1
        """,
        """
        CREATE INDEX trio_jobs_deadline ON trio_jobs_job (deadline)
        WHERE deadline IS NOT NULL AND state < 2
        """,
        """
        CREATE UNIQUE INDEX trio_jobs_key ON trio_jobs_job (kind, key)
        WHERE key IS NOT NULL AND state < 3
        """,
        """
        CREATE TABLE trio_jobs_past (
            job INTEGER NOT NULL,
            claim INTEGER NOT NULL,
            number INTEGER NOT NULL,
            started_at INTEGER NOT NULL,
            ended_at INTEGER NOT NULL,
            outcome TEXT NOT NULL,
            failure TEXT,
            failure_type TEXT,
            PRIMARY KEY (job, claim)
        ) WITHOUT ROWID
        """,
    ],
]

_MAX_PAST: Final = 100
_MAX_EXPIRED: Final = 500
_MAX_PROMOTED: Final = 1000
_MAX_LOG: Final = 4_000_000
_MAX_INTEGER: Final = 2**63 - 1
_OLDEST: Final = (3, 35)  # RETURNING

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

        # The seams: how to reach the file, and what waiting for its lock is made of.
        self.connect: Callable[[str], Connection] = (
            _drivers.connect_sqlite3 if driver == "sqlite3" else _drivers.connect_apsw
        )
        self.stat: Callable[[str], os.stat_result] = os.stat
        self.sleep: Callable[[float], None] = time.sleep
        self.random = random.Random()

        self._path = path
        self._is_memory = path == ":memory:"
        self._synchronous = synchronous
        self._busy_timeout = busy_timeout
        self._driver: _drivers.Driver = driver
        self._process: int | None = None
        self._is_closing = False
        # Each guards one connection; in memory there is only the one.
        self._writing = threading.RLock()
        self._reading = self._writing if self._is_memory else threading.RLock()
        self._writer: Connection | None = None
        self._reader: Connection | None = None
        self._checkpointer: Connection | None = None
        self._file: FileId | None = None
        self._real_path = path
        self._marker: Marker = ("", 0)
        self._next_tidy = _MAX_LOG
        self._tidy_calls = 0

    @property
    def identity(self) -> Hashable:
        return id(self) if self._file is None else self._file

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
        except BaseException as error:
            self.close()
            if isinstance(error, StoreError):
                raise self._named(error, "opening") from error
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
        # No two stores share it: not here, not after a fork, not on other machines.
        name = f"{os.getpid()}-{next(_opened)}-{self.random.getrandbits(64):x}"
        self._marker = (name, 0)

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
        with self._writing, self._reading:
            for connection in (self._reader, self._checkpointer, self._writer):
                if connection is not None:
                    connection.close()
            if self._writer is not None and self._file is not None:
                _drivers.leave_file(self._file, self._driver)
            self._reader = self._checkpointer = self._writer = self._process = None

    # Writing.

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        self._check_process()
        with self._writing:
            connection = self._begin()
            changes = connection.total_changes
            try:
                yield
                if connection.total_changes == changes:
                    _roll_back(connection)  # so that nothing is written to the log
                    return
                before = self._mark()
            except BaseException:
                _roll_back(connection)
                raise
            self._commit(before)

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
    def _mark(self) -> Marker:
        connection = self._in_transaction()
        before = _marker(connection)
        name, batch = self._marker
        self._marker = (name, batch + 1)
        connection.execute("UPDATE trio_jobs_meta SET writer = ?, batch = ?", self._marker)
        return before

    @_verb("committing")
    def _commit(self, before: Marker) -> None:
        connection = self._in_transaction()
        try:
            connection.execute("COMMIT")
            return
        except StoreError as error:
            failed = error
        try:
            _roll_back(connection)
            found = _marker(connection)
        except StoreError:
            found = None
        if found == self._marker:
            return
        if found == before:
            raise failed
        unknown = _like(failed, f"{failed}; the outcome is unknown")
        unknown.is_outcome_unknown = True
        raise unknown from failed

    @_verb("adding jobs")
    def add(self, jobs: Sequence[NewJob]) -> list[tuple[Row, bool]]:
        return _add(self._in_transaction(), jobs)

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
        try:
            [added] = _add(application, [job])
        except Conflict:
            # No transaction around the two statements: another's insert came between them.
            live = _live(application, [job])
            if not live:
                raise
            return live[_name(job)], False
        return added

    @_verb("applying changes")
    def apply(self, changes: Sequence[Change]) -> list[Refused | None]:
        connection = self._in_transaction()
        refused: list[Refused | None] = []
        for wave in _waves(changes):
            refused += _apply(connection, wave)
        return refused

    @_verb("renewing leases")
    def renew(self, fences: Sequence[Fence], until: Instant) -> dict[Fence, bool]:
        connection = self._in_transaction()
        renewed: dict[Fence, bool] = {}
        for chunk in _chunks(fences):
            for id, claims, is_requested in _array(connection, *_many(_RENEWABLE, chunk)):
                renewed[id, claims] = bool(is_requested)
        ids = _json([id for id, _ in renewed])
        connection.execute(_RENEW, {"ids": ids, "until": until})
        return renewed

    @_verb("claiming jobs")
    def claim(self, claim: Claim) -> Claimed:
        return _claim(self._in_transaction(), claim)

    # Reading.

    @_verb("reading a job")
    def get(self, id: int) -> Row | None:
        records = self._query(_GET, (_integer(id),))
        return _row(records[0]) if records else None

    @_verb("finding jobs")
    def find(
        self, *, states: Collection[State], kind: str | None, after: int, limit: int
    ) -> list[Row]:
        codes = [code for code, state in _STATES.items() if not states or state in states]
        values: dict[str, Value] = {
            "codes": _json(codes),
            "kind": kind,
            "after": _integer(after),
            "limit": _integer(limit),
        }
        return [_row(record) for record in self._query(_FIND, values)]

    @_verb("reading a job's history")
    def history(self, id: int) -> list[PastStart] | None:
        if not self._query(_GET, (_integer(id),)):
            return None
        return [_past(record) for record in self._query(_HISTORY, (_integer(id),))]

    @_verb("counting jobs")
    def counts(self, kind: str | None) -> dict[State, int]:
        counts: dict[State, int] = {}
        for code, count in self._query(_COUNTS, {"kind": kind}):
            state = _STATES[code]
            counts[state] = counts.get(state, 0) + count
        return counts

    @_verb("reading the next id")
    def next_id(self) -> int:
        [(next_id,)] = self._query("SELECT next_id FROM trio_jobs_meta")
        return int(next_id)

    @_verb("reading the kinds of queued jobs")
    def queued_kinds(self) -> set[str]:
        return {_text(kind) for (kind,) in self._query(_QUEUED_KINDS)}

    @_verb("looking at the lock")
    def is_unlocked(self) -> bool:
        if not self._writing.acquire(blocking=False):
            return False
        try:
            connection = self._need(self._writer)
            if connection.in_transaction:
                return False
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("ROLLBACK")
            return True
        except StoreBusy:
            return False
        finally:
            self._writing.release()

    # Housekeeping.

    @_verb("tidying up")
    def tidy(self) -> None:
        try:
            size = 0 if self._is_memory else self.stat(f"{self._real_path}-wal").st_size
        except OSError:
            return
        if size <= _MAX_LOG:
            self._next_tidy, self._tidy_calls = _MAX_LOG, 0
            return
        # While a reader needs the log as it is, to try on every call would be no use.
        self._tidy_calls += 1
        if size < self._next_tidy and self._tidy_calls < 1000:
            return
        try:
            self._checkpoint()
        except StoreBusy:
            return
        except StoreError as error:
            _logger.warning("%s", self._named(error, "checkpointing"))
        self._next_tidy, self._tidy_calls = size + _MAX_LOG, 0

    def _checkpoint(self) -> None:
        with self._writing:
            if self._writer is None or self._checkpointer is None:
                return  # closed meanwhile
            try:
                # With our lock on it, no commit can reset the log under the checkpoint.
                if has_reset_bug(self._writer.version):
                    self._writer.execute("BEGIN IMMEDIATE")
                self._checkpointer.execute("PRAGMA wal_checkpoint(PASSIVE)")
            finally:
                _roll_back(self._writer)

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
                if self._is_closing or waited >= self._busy_timeout:
                    raise StoreBusy(f"{error} (waited {waited:.3g} s)") from error
            # SQLite's own waiting starves the slowest of four busy processes, short random
            # sleeps do not. Who has waited for long need not look as often.
            pause = self.random.uniform(50e-6, 400e-6) * (1 + min(9.0, 20 * waited))
            self.sleep(pause)
            waited += pause

    def _check_process(self) -> None:
        if self._process not in (None, os.getpid()):
            raise StoreError(f"{self._path} was opened in another process, before a fork")

    def _named(self, error: StoreError, doing: str) -> StoreError:
        return _like(error, f"{self._path}: {doing}: {error}")


_WRITE_NOTHING: Final = "UPDATE trio_jobs_meta SET one = 1 WHERE one = 0"

_MAIN_FILE: Final = """
SELECT CAST(file AS BLOB) FROM pragma_database_list WHERE name = 'main'
"""

_OLD_SQLITE: Final = (
    "SQLite %s can corrupt a file when a checkpoint meets a commit (fixed in 3.51.3, 3.50.7 and"
    " 3.44.6). The checkpoints of trio_jobs cannot; the application's connections to its file"
    " should set PRAGMA wal_autocheckpoint = 0"
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


def _marker(connection: Connection) -> Marker:
    [(name, batch)] = connection.execute("SELECT writer, batch FROM trio_jobs_meta")
    return (name, batch)


# Reading. Text is read as a blob: bytes that are no UTF-8 (a row edited by hand) must not make
# a fetch fail.

_NUMBERS: Final = """
    id, state, attempt, claims, interruptions, cancel_requested, priority, enqueued_at, run_at,
    deadline, lease_until, started_at, finished_at"""

_ROW: Final = f"""{_NUMBERS},
    CAST(kind AS BLOB), CAST(key AS BLOB), CAST(result AS BLOB), CAST(failure AS BLOB),
    CAST(failure_type AS BLOB)"""

_GET: Final = f"SELECT {_ROW} FROM trio_jobs_job WHERE id = ?"

_FIND: Final = f"""
SELECT {_ROW}
FROM trio_jobs_job
WHERE id > :after AND state IN (SELECT value FROM json_each(:codes))
    AND (:kind IS NULL OR kind = :kind)
ORDER BY id LIMIT :limit
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


def _row(record: Record) -> Row:
    return Row(
        id=record[0],
        state=_STATES[record[1]],
        attempt=record[2],
        claims=record[3],
        interruptions=record[4],
        cancel_requested=bool(record[5]),
        priority=record[6],
        enqueued_at=record[7],
        run_at=record[8],
        deadline=record[9],
        lease_until=record[10],
        started_at=record[11],
        finished_at=record[12],
        kind=_text(record[13]),
        key=None if record[14] is None else _text(record[14]),
        result=record[15],
        failure=_failure(record[16], record[17]),
    )


def _past(record: Record) -> PastStart:
    return PastStart(
        claim=record[0],
        number=record[1],
        started_at=record[2],
        ended_at=record[3],
        outcome=cast(Outcome, _text(record[4])),
        failure=_failure(record[5], record[6]),
    )


def _failure(message: bytes | None, type: bytes | None) -> Failure | None:
    if message is None:
        return None
    return Failure(_text(message), None if type is None else _text(type))


def _text(stored: bytes) -> str:
    return stored.decode(errors="replace")


def _integer(value: int) -> int:
    """No row lies beyond SQLite's integers; to ask for one there is no error."""
    return max(-_MAX_INTEGER, min(value, _MAX_INTEGER))


def _code(row: Row) -> int:
    if row.state is State.QUEUED and row.run_at <= row.enqueued_at:
        return READY
    return _CODES[row.state]


# Writing many rows in few steps.
#
# How a row is found is never left to the planner. Where the application ran ANALYZE while
# there was one job, SQLite 3.54 plans to walk over the table, and goes on doing so when there
# are a million. So indexes are named, a row by its id is a subquery of its own, and rows are
# updated by an upsert, which always seeks (and takes 20 % less time than UPDATE ... FROM).


def _many(sql: str, rows: Sequence[Sequence[Value]]) -> tuple[str, list[Value]]:
    """Put as many rows of parameters in the statement's place for VALUES."""
    row = "(" + ", ".join("?" * len(rows[0])) + ")"
    return sql.format(rows="VALUES " + ", ".join([row] * len(rows))), [*itertools.chain(*rows)]


def _chunks(items: Sequence[T]) -> Iterator[Sequence[T]]:
    """Chunks of few sizes, so that there are few statements, which the driver keeps prepared."""
    start = 0
    while start < len(items):
        size = min(64, 1 << ((len(items) - start).bit_length() - 1))
        yield items[start : start + size]
        start += size


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()


def _array(connection: Connection, sql: str, values: Values = ()) -> list[Any]:
    """What the statement gives as one JSON array, in one step."""
    [(array,)] = connection.execute(sql, values)
    found: list[Any] = msgspec.json.decode(array)
    return found


# Adding.

_RESERVE: Final = "UPDATE trio_jobs_meta SET next_id = next_id + ? RETURNING next_id + 0"

_INSERT: Final = """
WITH new(id, kind, state, priority, key, enqueued_at, run_at, deadline, is_raw, payload)
AS ({rows})
INSERT INTO trio_jobs_job
    (id, kind, state, priority, key, enqueued_at, run_at, deadline, payload)
SELECT id, kind, state, priority, key, enqueued_at, run_at, deadline,
    CASE WHEN is_raw THEN payload ELSE CAST(payload AS TEXT) END
FROM new
"""

_LIVE: Final = f"""
WITH wanted(wanted_kind, wanted_key) AS ({{rows}})
SELECT {_ROW}
FROM wanted CROSS JOIN trio_jobs_job INDEXED BY trio_jobs_key
WHERE kind = wanted_kind AND key = wanted_key AND key IS NOT NULL AND state < 3
"""


def _add(connection: Connection, jobs: Sequence[NewJob]) -> list[tuple[Row, bool]]:
    holders = _live(connection, jobs)
    names = set(holders)
    is_new: list[bool] = []
    for job in jobs:
        is_new.append(job.key is None or _name(job) not in names)
        names.add(_name(job))
    inserted = iter(
        _insert(connection, [job for job, new in zip(jobs, is_new, strict=True) if new])
    )
    added: list[tuple[Row, bool]] = []
    for job, new in zip(jobs, is_new, strict=True):
        if new:
            holders[_name(job)] = next(inserted)
        added.append((holders[_name(job)], new))
    return added


def _name(job: NewJob) -> Name:
    return (job.kind, job.key)


def _live(connection: Connection, jobs: Sequence[NewJob]) -> dict[Name, Row]:
    """The queued and running rows that have the key of one of these."""
    names = list(dict.fromkeys(_name(job) for job in jobs if job.key is not None))
    rows = [
        _row(record)
        for chunk in _chunks(names)
        for record in connection.execute(*_many(_LIVE, chunk))
    ]
    return {(row.kind, row.key): row for row in rows}


def _insert(connection: Connection, jobs: Sequence[NewJob]) -> list[Row]:
    if not jobs:
        return []
    [(next_id,)] = connection.execute(_RESERVE, (len(jobs),))
    rows = [_new_row(id, job) for id, job in enumerate(jobs, next_id - len(jobs))]
    for chunk in _chunks(list(zip(rows, jobs, strict=True))):
        values = [
            (
                row.id,
                row.kind,
                _code(row),
                row.priority,
                row.key,
                row.enqueued_at,
                row.run_at,
                row.deadline,
                job.raw,
                job.payload,
            )
            for row, job in chunk
        ]
        connection.execute(*_many(_INSERT, values))
    return rows


def _new_row(id: int, job: NewJob) -> Row:
    return Row(
        id=id,
        kind=job.kind,
        state=State.QUEUED,
        attempt=0,
        claims=0,
        interruptions=0,
        cancel_requested=False,
        priority=job.priority,
        key=job.key,
        enqueued_at=job.enqueued_at,
        run_at=job.run_at,
        deadline=job.deadline,
        lease_until=None,
        started_at=None,
        finished_at=None,
        result=None,
        failure=None,
    )


# Applying.

# Those whose row is no longer what the decision was made on.
_STALE: Final = """
WITH before(id, state, claims, cancel_requested) AS ({rows})
SELECT json_group_array(before.id) FROM before
WHERE (before.state, before.claims, before.cancel_requested) IS NOT (
    SELECT max(job.state, 1), job.claims, job.cancel_requested
    FROM trio_jobs_job AS job WHERE job.id = before.id
)
"""

_UPDATE: Final = """
WITH new(
    id, state, attempt, claims, interruptions, cancel_requested, run_at, lease_until, started_at,
    finished_at, result, failure, failure_type
) AS ({rows})
INSERT INTO trio_jobs_job AS job (
    id, state, attempt, claims, interruptions, cancel_requested, run_at, lease_until, started_at,
    finished_at, result, failure, failure_type
)
SELECT * FROM new WHERE true
ON CONFLICT (id) DO UPDATE SET
    state = excluded.state,
    attempt = excluded.attempt,
    claims = excluded.claims,
    interruptions = excluded.interruptions,
    cancel_requested = excluded.cancel_requested,
    run_at = excluded.run_at,
    lease_until = CASE WHEN job.state = 2 AND excluded.state = 2 THEN job.lease_until
        ELSE excluded.lease_until END,
    started_at = excluded.started_at,
    finished_at = excluded.finished_at,
    result = ifnull(CAST(excluded.result AS TEXT), job.result),
    failure = excluded.failure,
    failure_type = excluded.failure_type
"""

_INSERT_PAST: Final = """
INSERT OR REPLACE INTO trio_jobs_past
    (job, claim, number, started_at, ended_at, outcome, failure, failure_type)
{rows}
"""

_PRUNE: Final = f"""
DELETE FROM trio_jobs_past
WHERE job = :job AND claim <= (
    SELECT claim FROM trio_jobs_past WHERE job = :job
    ORDER BY claim DESC LIMIT 1 OFFSET {_MAX_PAST}
)
"""

_HOLDER: Final = """
SELECT id FROM trio_jobs_job INDEXED BY trio_jobs_key
WHERE key IS NOT NULL AND state < 3
    AND kind = (SELECT kind FROM trio_jobs_job WHERE id = :id)
    AND key = (SELECT key FROM trio_jobs_job WHERE id = :id)
"""


def _waves(changes: Sequence[Change]) -> Iterator[list[Change]]:
    """Changes that may be made in any order: none is of a job, or takes a key, that another of
    its wave is about."""
    wave: list[Change] = []
    ids: set[int] = set()
    for change in changes:
        if change.before.id in ids or (wave and _takes_key(wave[-1])) or _takes_key(change):
            yield wave
            wave, ids = [], set()
        wave.append(change)
        ids.add(change.before.id)
    yield wave


def _takes_key(change: Change) -> bool:
    revives = change.before.state.is_final and not change.after.state.is_final
    return revives and change.before.key is not None


def _apply(connection: Connection, wave: Sequence[Change]) -> list[Refused | None]:
    refused: dict[int, Refused] = {}
    for chunk in _chunks([change.before for change in wave]):
        guards = [(row.id, _CODES[row.state], row.claims, row.cancel_requested) for row in chunk]
        for id in _array(connection, *_many(_STALE, guards)):
            records = connection.execute(_GET, (id,))
            refused[id] = Refused(_row(records[0]) if records else None)
    for change in wave:
        if _takes_key(change) and connection.execute(_HOLDER, {"id": change.before.id}):
            refused.setdefault(change.before.id, Refused(change.before))
    _write(connection, [change for change in wave if change.before.id not in refused])
    return [refused.get(change.before.id) for change in wave]


def _write(connection: Connection, changes: Sequence[Change]) -> None:
    for chunk in _chunks(changes):
        connection.execute(*_many(_UPDATE, [_changed(change) for change in chunk]))
    pasts = [(change.after.id, change.past) for change in changes if change.past is not None]
    for some in _chunks(pasts):
        connection.execute(*_many(_INSERT_PAST, [_past_values(id, past) for id, past in some]))
    for id, past in pasts:
        if past.claim > _MAX_PAST:
            connection.execute(_PRUNE, {"job": id})


def _changed(change: Change) -> tuple[Value, ...]:
    after = change.after
    return (
        after.id,
        _code(after),
        after.attempt,
        after.claims,
        after.interruptions,
        after.cancel_requested,
        after.run_at,
        after.lease_until,
        after.started_at,
        after.finished_at,
        None if after.result == change.before.result else after.result,
        None if after.failure is None else after.failure.message,
        None if after.failure is None else after.failure.type,
    )


def _past_values(id: int, past: PastStart) -> tuple[Value, ...]:
    return (
        id,
        past.claim,
        past.number,
        past.started_at,
        past.ended_at,
        past.outcome,
        None if past.failure is None else past.failure.message,
        None if past.failure is None else past.failure.type,
    )


# Renewing.

_RENEWABLE: Final = """
WITH fence(id, claims) AS ({rows}),
renewable(id, claims, cancel_requested) AS (
    SELECT fence.id, fence.claims, (
        SELECT job.cancel_requested FROM trio_jobs_job AS job
        WHERE job.id = fence.id AND job.claims = fence.claims AND job.state = 2
    )
    FROM fence
)
SELECT json_group_array(json_array(id, claims, cancel_requested))
FROM renewable WHERE cancel_requested IS NOT NULL
"""

_RENEW: Final = """
INSERT INTO trio_jobs_job (id) SELECT value FROM json_each(:ids) WHERE true
ON CONFLICT (id) DO UPDATE SET lease_until = :until
"""

# Claiming. A claim over many kinds is one seek in an index for each, never a walk over rows of
# others or of the future.

_EXPIRED: Final = f"""
SELECT {_ROW}
FROM trio_jobs_job INDEXED BY trio_jobs_deadline
WHERE deadline IS NOT NULL AND state < 2 AND deadline <= :now
ORDER BY deadline LIMIT {_MAX_EXPIRED}
"""

_LOST: Final = f"""
SELECT {_ROW}
FROM trio_jobs_job INDEXED BY trio_jobs_lease
WHERE state = 2 AND lease_until <= :lease_now
    AND (kind IN (SELECT value FROM json_each(:kinds)) OR cancel_requested OR deadline <= :now)
    AND id NOT IN (SELECT value FROM json_each(:held))
"""

_DUE_SCHEDULED: Final = f"""
SELECT '[' || ifnull(group_concat((
    SELECT json_group_array(id) FROM (
        SELECT id FROM trio_jobs_job INDEXED BY trio_jobs_scheduled
        WHERE state = 1 AND kind = served.value AND run_at <= :due_by AND id < :below
        ORDER BY run_at LIMIT {_MAX_PROMOTED}
    )
)), '') || ']'
FROM json_each(:kinds) AS served
"""

_PROMOTE: Final = """
INSERT INTO trio_jobs_job (id) SELECT value FROM json_each(?) WHERE true
ON CONFLICT (id) DO UPDATE SET state = 0
"""

# A sum as limit, because for a parameter alone new versions prepare the statement every time.
_DUE: Final = """
SELECT '[' || ifnull(group_concat((
    SELECT json_group_array(json_array(-priority, run_at, id)) FROM (
        SELECT priority, run_at, id FROM trio_jobs_job INDEXED BY trio_jobs_ready
        WHERE state = 0 AND kind = served.value AND id < :below
            AND (run_at <= :due_by OR run_at <= enqueued_at)
            AND (deadline IS NULL OR deadline > :now)
            AND id NOT IN (SELECT value FROM json_each(:held))
        ORDER BY priority DESC, run_at, id LIMIT :limit + 0
    )
)), '') || ']'
FROM json_each(:kinds) AS served
"""

_TAKE: Final = """
INSERT INTO trio_jobs_job (id) SELECT value FROM json_each(:ids) WHERE true
ON CONFLICT (id) DO UPDATE SET
    state = 2, attempt = attempt + 1, claims = claims + 1,
    lease_until = :lease_until, started_at = :now
"""

# The next row of a served kind that is scheduled, the next end of a lease that a claim would
# look at, the next deadline.
_NEXT: Final = """
SELECT
    (
        SELECT min((
            SELECT run_at FROM trio_jobs_job INDEXED BY trio_jobs_scheduled
            WHERE state = 1 AND kind = served.value AND id < :below
                AND id NOT IN (SELECT value FROM json_each(:held))
            ORDER BY run_at LIMIT 1
        ))
        FROM json_each(:kinds) AS served
    ),
    (
        SELECT min(
            CASE WHEN cancel_requested OR kind IN (SELECT value FROM json_each(:kinds))
            THEN lease_until ELSE max(lease_until, deadline) END
        )
        FROM trio_jobs_job INDEXED BY trio_jobs_lease
        WHERE state = 2 AND id NOT IN (SELECT value FROM json_each(:held))
    ),
    (
        SELECT min(deadline) FROM trio_jobs_job INDEXED BY trio_jobs_deadline
        WHERE deadline IS NOT NULL AND state < 2
    )
"""

# Only asked for when every due row was taken: then few are left, after a clock stepped back.
_NEXT_READY: Final = """
SELECT min((
    SELECT min(run_at) FROM trio_jobs_job INDEXED BY trio_jobs_ready
    WHERE state = 0 AND kind = served.value AND run_at > max(:now, enqueued_at)
        AND id < :below AND id NOT IN (SELECT value FROM json_each(:held))
))
FROM json_each(:kinds) AS served
"""

_CANCELLED: Final = """
SELECT json_group_array(json_array(id, claims))
FROM trio_jobs_job INDEXED BY trio_jobs_cancel WHERE state = 2 AND cancel_requested = 1
"""


def _claim(connection: Connection, claim: Claim) -> Claimed:
    # What any of the statements asks for; each takes what it names.
    values: dict[str, Value] = {
        "kinds": _json(list(claim.policies)),
        "held": _json(list(claim.held)),
        "now": claim.now,
        "lease_now": claim.lease_now,
        "lease_until": claim.lease_until,
        "due_by": claim.now if claim.due_by is None else claim.due_by,
        "below": _MAX_INTEGER if claim.below is None else claim.below,
        "limit": claim.limit + 1,  # the one more tells whether there are more
    }
    settled = _expired(connection, claim, values)
    ended, retryable = _lost(connection, claim, values)
    lost = {change.after.id: change for change in _gently(retryable, claim)}
    due, is_all = _due(connection, values)
    due = sorted([*due, *(_place(change.after) for change in lost.values())])
    taken = [id for _, _, id in due[: claim.limit]]
    left = due[claim.limit :]
    settled += [*ended, *(lost[id] for id in taken if id in lost)]
    _write(connection, settled)
    found: dict[int, tuple[Row, bytes]] = {}
    if taken:
        found = _with_payloads(connection, taken)
        connection.execute(_TAKE, values | {"ids": _json(taken)})
    values["held"] = _json([*claim.held, *taken])
    next_due, next_deadline = _next(connection, values, left)
    return Claimed(
        jobs=[
            ClaimedJob(
                row=_lifecycle.claimed(was, claim.now, claim.lease_until),
                was=was,
                payload=payload,
                taken_up=was.id in lost,
                is_suspect=was.id in lost and _lifecycle.is_suspect(lost[was.id].before),
            )
            for was, payload in (found[id] for id in taken)
        ],
        settled=settled,
        lost_waiting=len(retryable) > len(lost),
        more=bool(left) or not is_all,
        next_due=next_due,
        next_deadline=next_deadline,
        cancelled=[(id, claims) for id, claims in _array(connection, _CANCELLED)],
    )


def _expired(connection: Connection, claim: Claim, values: Values) -> list[Change]:
    rows = [_row(record) for record in connection.execute(_EXPIRED, values)]
    changes = [_lifecycle.expired(row, claim.now) for row in rows]
    return [change for change in changes if change is not None]


def _lost(
    connection: Connection, claim: Claim, values: Values
) -> tuple[list[Change], list[Change]]:
    """The lost rows that end, whatever their kind; and those that may start again, in order."""
    ended: list[Change] = []
    retryable: list[Change] = []
    for record in connection.execute(_LOST, values):
        row = _row(record)
        policy = claim.policies.get(row.kind)
        if policy is None:
            change = _lifecycle.expired(row, claim.now, claim.lease_now)
        else:
            change = _lifecycle.lost(row, policy, claim.now)
        if change is None:
            continue
        if change.after.state is not State.QUEUED:
            ended.append(change)
        elif claim.below is None or row.id < claim.below:
            retryable.append(change)
    retryable.sort(key=lambda change: _place(change.after))
    return ended, retryable


def _gently(retryable: Sequence[Change], claim: Claim) -> Sequence[Change]:
    """Which lost rows may be taken: a suspect alone, or some that are none."""
    first = [change for change in retryable if not _lifecycle.is_suspect(change.before)]
    if claim.takes_suspect and retryable and (not first or first[0] is not retryable[0]):
        return retryable[: min(1, claim.lost_limit)]
    return first[: max(0, claim.lost_limit)]


def _due(connection: Connection, values: Values) -> tuple[list[list[int]], bool]:
    """The places of the first due rows of each kind, and whether all were looked at."""
    scheduled = _array(connection, _DUE_SCHEDULED, values)
    if any(scheduled):
        connection.execute(_PROMOTE, (_json([*itertools.chain(*scheduled)]),))
    is_all = all(len(ids) < _MAX_PROMOTED for ids in scheduled)
    return [*itertools.chain(*_array(connection, _DUE, values))], is_all


def _next(
    connection: Connection, values: Values, left: Sequence[list[int]]
) -> tuple[Instant | None, Instant | None]:
    [(run_at, lease_until, deadline)] = connection.execute(_NEXT, values)
    if left:
        ready = min(run_at for _, run_at, _ in left)
    else:
        [(ready,)] = connection.execute(_NEXT_READY, values)
    due = min((at for at in (run_at, lease_until, ready) if at is not None), default=None)
    return due, deadline


def _place(row: Row) -> list[int]:
    """Rows are taken in this order."""
    return [-row.priority, row.run_at, row.id]


# Rows and payloads in one step, if they are small: of each its numbers and the lengths of its
# texts as a JSON array, then the texts; and all rows one after the other. With a busy loop
# 0.3 ms for 100 rows, against 3 to 400 ms row by row.
_PACKED: Final = f"""
SELECT CAST(group_concat((
    SELECT
        json_array({_NUMBERS},
            length(CAST(kind AS BLOB)), length(CAST(key AS BLOB)), length(CAST(result AS BLOB)),
            length(CAST(failure AS BLOB)), length(CAST(failure_type AS BLOB)),
            length(CAST(payload AS BLOB))
        ) || CAST(kind AS BLOB) || ifnull(CAST(key AS BLOB), '')
        || ifnull(CAST(result AS BLOB), '') || ifnull(CAST(failure AS BLOB), '')
        || ifnull(CAST(failure_type AS BLOB), '') || CAST(payload AS BLOB)
    FROM trio_jobs_job
    WHERE id = wanted.value AND length(payload) + ifnull(length(result), 0) <= 10000
), '') AS BLOB)
FROM json_each(?) AS wanted
"""

_WITH_PAYLOAD: Final = f"SELECT {_ROW}, CAST(payload AS BLOB) FROM trio_jobs_job WHERE id = ?"


def _with_payloads(connection: Connection, ids: Sequence[int]) -> dict[int, tuple[Row, bytes]]:
    [(packed,)] = connection.execute(_PACKED, (_json(ids),))
    records = {record[0]: record for record in _unpacked(packed or b"")}
    for id in ids:
        if id not in records:
            [records[id]] = connection.execute(_WITH_PAYLOAD, (id,))
    return {id: (_row(record), record[-1]) for id, record in records.items()}


def _unpacked(packed: bytes) -> Iterator[Record]:
    numbers = 13
    start = 0
    while start < len(packed):
        end = packed.index(b"]", start) + 1
        values = msgspec.json.decode(packed[start:end])
        record = values[:numbers]
        start = end
        for length in values[numbers:]:
            record.append(None if length is None else packed[start : start + length])
            start += length or 0
        yield record
