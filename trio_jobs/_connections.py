"""The connections of one store to its file: what they are set to, and who may use which when.

One writes, one reads, one checkpoints; each has a guard. They wait for locks here and not
inside SQLite, so that the waiting is fair, and ends when the store closes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import threading
from collections.abc import Callable, Iterator
from typing import Final, Literal, Protocol

from . import _drivers
from ._drivers import Connection, Driver, FileId, Record, Values
from ._errors import StoreBusy, StoreError
from ._rows import meta_of
from ._schema import MIGRATIONS

MAX_LOG: Final = 4_000_000
"""Bytes of the write-ahead log above which a checkpoint is due."""
_OLDEST: Final = (3, 35)  # RETURNING

_logger: Final = logging.getLogger("trio_jobs")
_said: Final[set[str]] = set()


class Seams(Protocol):
    """How to reach the file, and what waiting for its lock is made of."""

    connect: Callable[[str], Connection]
    stat: Callable[[str], os.stat_result]
    sleep: Callable[[float], None]
    random: random.Random


class Connections:
    """To the file at `path`; in memory there is only the one."""

    def __init__(
        self,
        path: str,
        *,
        synchronous: Literal["full", "normal"],
        busy_timeout: float,
        driver: Driver,
        seams: Seams,
    ) -> None:
        self.is_memory = path == ":memory:"
        self.real_path = path
        self.file: FileId | None = None
        self.writing = threading.RLock()
        self.reading = self.writing if self.is_memory else threading.RLock()
        self.checkpointing = threading.RLock()
        self.writer: Connection | None = None
        self.reader: Connection | None = None
        self.checkpointer: Connection | None = None
        self.path = path
        self._synchronous = synchronous
        self._busy_timeout = busy_timeout
        self._driver: Driver = driver
        self._seams = seams
        self._is_closing = False
        self._has_lock = False
        self._is_waiting = False

    @property
    def log(self) -> str:
        """The write-ahead log."""
        return f"{self.real_path}-wal"

    def log_size(self) -> int:
        """Bytes; 0 if there is none."""
        try:
            return 0 if self.is_memory else self._seams.stat(self.log).st_size
        except OSError:
            return 0

    # Opening and closing.

    def open(self) -> None:
        self._is_closing = False
        with self.writing, self.reading:
            if self.is_memory:
                self.writer = self.reader = self._seams.connect(self.path)
            else:
                self.real_path = os.path.realpath(self.path)
                _explain_missing(self.real_path)
                self.writer, self.file = _drivers.enter_file(
                    self.real_path, self._driver, self._seams.connect, self._seams.stat
                )
            version = self.writer.version
            if version < _OLDEST:
                raise _drivers.permanent(
                    f"SQLite {dotted(version)} is older than {dotted(_OLDEST)}"
                )
            self._schema_version(self.writer)  # a newer one: leave the file alone
            self._prepare(self.writer)
            self._migrate(self.writer)
            if not self.is_memory:
                self.reader = self._seams.connect(self.real_path)
                self._prepare(self.reader)
                self.reader.execute("PRAGMA query_only = 1")
                self.checkpointer = self._seams.connect(self.real_path)
                self._prepare(self.checkpointer)
                if has_reset_bug(version):
                    say_once(logging.INFO, _OLD_SQLITE, dotted(version))

    def _schema_version(self, connection: Connection) -> int:
        exists = "SELECT count(*) FROM sqlite_master WHERE name = 'trio_jobs_meta'"
        if self.patiently(connection, exists) == [(0,)]:
            return 0
        (version,) = meta_of(self.patiently(connection, "SELECT version FROM trio_jobs_meta"))
        if not isinstance(version, int):
            raise _drivers.permanent("trio_jobs_meta does not say which version wrote the file")
        if version > len(MIGRATIONS):
            raise _drivers.permanent("the file was written by a newer version of trio_jobs")
        return version

    def _prepare(self, connection: Connection) -> None:
        # This is BUSY at once while another connection writes, whatever its timeout.
        [(mode,)] = self.patiently(connection, "PRAGMA journal_mode = WAL")
        if mode != ("memory" if self.is_memory else "wal"):
            raise _drivers.permanent(f"a write-ahead log is not possible here, only {mode!r}")
        [(encoding,)] = self.patiently(connection, "PRAGMA encoding")
        if encoding != "UTF-8":
            raise _drivers.permanent(f"the file keeps text as {encoding}, it must be UTF-8")
        for setting in (
            f"synchronous = {self._synchronous}",
            "fullfsync = 1",  # on macOS; means nothing elsewhere
            "wal_autocheckpoint = 0",
            f"journal_size_limit = {MAX_LOG}",
        ):
            self.patiently(connection, f"PRAGMA {setting}")

    def _migrate(self, connection: Connection) -> None:
        if self._schema_version(connection) == len(MIGRATIONS):
            # Nothing to write, but a file that cannot be written is refused now.
            with contextlib.suppress(StoreBusy):
                connection.execute(WRITE_NOTHING)
            return
        self.patiently(connection, "BEGIN IMMEDIATE")
        try:
            for step in MIGRATIONS[self._schema_version(connection) :]:
                for statement in step:
                    connection.execute(statement)
            connection.execute("UPDATE trio_jobs_meta SET version = ?", (len(MIGRATIONS),))
            connection.execute("COMMIT")
        except BaseException:
            roll_back(connection)
            raise

    def close(self, leave: Callable[[], None]) -> None:
        """End every wait for a lock and every read, and call `leave` before the file is let go."""
        self._is_closing = True
        with self.writing, self._reading_ended(), self.checkpointing:
            leave()
            # In memory one of them is all.
            for connection in dict.fromkeys((self.reader, self.checkpointer, self.writer)):
                if connection is not None:
                    connection.close()
            if self.writer is not None and self.file is not None:
                _drivers.leave_file(self.file, self._driver)
            self.reader = self.checkpointer = self.writer = None

    @contextlib.contextmanager
    def _reading_ended(self) -> Iterator[None]:
        # Again and again: what is interrupted before it has begun does not hear of it.
        while not self.reading.acquire(timeout=0.05):
            need(self.reader).interrupt()
        try:
            yield
        finally:
            self.reading.release()

    # Using them.

    def begin(self) -> Connection:
        """Take the write lock; the caller holds `writing`, and calls `end`."""
        connection = need(self.writer)
        roll_back(connection)  # an interrupt may have left one open
        try:
            self.patiently(connection, "BEGIN IMMEDIATE")
        finally:
            self._is_waiting = False
        # SQLite goes on writing to a file that was unlinked: the jobs would be gone.
        stat = self._seams.stat
        if self.file is not None and _drivers.file_of(self.real_path, stat) != self.file:
            roll_back(connection)
            raise _drivers.permanent("the file was deleted or replaced while it was open")
        self._has_lock = True
        return connection

    def end(self, connection: Connection) -> None:
        roll_back(connection)
        self._has_lock = False

    def in_transaction(self) -> Connection:
        connection = need(self.writer)
        if not connection.in_transaction:
            raise StoreError("no transaction is open, or SQLite has rolled it back")
        return connection

    def query(self, sql: str, values: Values = ()) -> list[Record]:
        with self.reading:
            return self.patiently(need(self.reader), sql, values)

    def is_unlocked(self) -> bool:
        # Our own writing thread may be at it: what it holds nobody else does, and while it
        # waits somebody else does. In between it takes no time.
        while not self.writing.acquire(timeout=0.001):
            if self._has_lock or self._is_waiting:
                return self._has_lock
        try:
            connection = need(self.writer)
            if connection.in_transaction:
                return True
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("ROLLBACK")
            return True
        except StoreBusy:
            return False
        finally:
            self.writing.release()

    def patiently(self, connection: Connection, sql: str, values: Values = ()) -> list[Record]:
        """Run a statement that may meet others' locks, outside a transaction."""
        waited = 0.0
        waits_to_write = connection is self.writer
        while True:
            try:
                return connection.execute(sql, values)
            except StoreBusy as error:
                self._is_waiting = self._is_waiting or waits_to_write
                if self._is_closing or waited >= self._busy_timeout:
                    who = _HOLDER if waits_to_write and not self._is_closing else ""
                    raise StoreBusy(f"{error} (waited {waited:.3g} s){who}") from error
            # SQLite's own waiting starves the slowest of four busy processes, short random
            # sleeps do not. Who has waited for a second does not wait for one of those.
            pause = self._seams.random.uniform(50e-6, 400e-6) * (1 if waited < 1 else 10)
            self._seams.sleep(pause)
            waited += pause


def need(connection: Connection | None) -> Connection:
    if connection is None:
        raise StoreError("the store is not open")
    return connection


def roll_back(connection: Connection) -> None:
    # After a full disk or an I/O error SQLite has done it already. If this fails, the error
    # that brought us here says more.
    if connection.in_transaction:
        with contextlib.suppress(StoreError):
            connection.execute("ROLLBACK")


def has_reset_bug(version: tuple[int, ...]) -> bool:
    """Whether a checkpoint may corrupt the file while a commit of another connection resets
    the log (https://www.sqlite.org/wal.html#walresetbug)."""
    if (3, 44, 6) <= version < (3, 45) or (3, 50, 7) <= version < (3, 51):
        return False
    return (3, 7, 0) <= version < (3, 51, 3)


WRITE_NOTHING: Final = "UPDATE trio_jobs_meta SET one = 1 WHERE one = 0"

_HOLDER: Final = (
    ": another connection has a transaction open, perhaps one of this process that waits for this"
    " call"
)

_OLD_SQLITE: Final = (
    "SQLite %s: give connections of your own to the file PRAGMA wal_autocheckpoint = 0 (see README)"
)


def say_once(level: int, text: str, *args: object) -> None:
    if text not in _said:
        _said.add(text)
        _logger.log(level, text, *args)


def dotted(version: tuple[int, ...]) -> str:
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
