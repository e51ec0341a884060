"""Where statements meet SQLite: one thin adapter a driver, its errors as ours, and which
files this process has open.

`execute` is the only way a statement reaches SQLite, so what stands in for a connection (a
simulator that fails, delays or cuts) has one thing to do. Nothing here knows a table.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sqlite3
import sys
import threading
import urllib.parse
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, TypeAlias

from ._errors import StoreBusy, StoreError

if TYPE_CHECKING:
    import apsw

Driver: TypeAlias = Literal["sqlite3", "apsw"]
Value: TypeAlias = int | str | bytes | None
Values: TypeAlias = Sequence[Value] | Mapping[str, Value]
Record: TypeAlias = tuple[Any, ...]
FileId: TypeAlias = tuple[int, int]
"""(device, inode)."""


class Conflict(StoreError):
    """A constraint of the schema refused the statement."""


class Connection(Protocol):
    """One connection in autocommit mode, that never waits for a lock by itself."""

    @property
    def version(self) -> tuple[int, ...]:
        """Of the SQLite library behind it, like (3, 40, 1)."""
        ...

    @property
    def in_transaction(self) -> bool: ...

    @property
    def total_changes(self) -> int:
        """Rows inserted, updated or deleted so far."""
        ...

    def execute(self, sql: str, values: Values = ()) -> list[Record]:
        """Run one statement to its end and return its rows.

        Raises `StoreBusy` for a lock, `Conflict` for a constraint, else `StoreError`, with
        SQLite's own text.
        """
        ...

    def interrupt(self) -> None:
        """End the statement that another thread is running, with an error."""
        ...

    def close(self) -> None: ...


class Sqlite3Connection:
    """The standard library's driver."""

    version: tuple[int, ...] = sqlite3.sqlite_version_info

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        try:
            # The one cursor there is: a connection remembers all that were made. Whatever class
            # and row factory the application gave its connection, this one has none of them.
            self._cursor = sqlite3.Connection.cursor(connection)
        except sqlite3.Error as error:
            raise _sqlite3_error(error) from error
        self._cursor.row_factory = None

    @property
    def in_transaction(self) -> bool:
        return self._connection.in_transaction

    @property
    def total_changes(self) -> int:
        return self._connection.total_changes

    def execute(self, sql: str, values: Values = ()) -> list[Record]:
        try:
            return self._cursor.execute(sql, values).fetchall()
        except sqlite3.Error as error:
            raise _sqlite3_error(error) from error

    def interrupt(self) -> None:
        self._connection.interrupt()

    def close(self) -> None:
        # A statement that failed is its cursor's until that goes, with whoever has the error's
        # traceback, and so long SQLite keeps the file open.
        with contextlib.suppress(sqlite3.ProgrammingError):  # closed before
            self._cursor.close()
        self._connection.close()


class ApswConnection:
    """apsw, for applications that reach the file through it."""

    def __init__(self, connection: apsw.Connection) -> None:
        import apsw

        self.version: tuple[int, ...] = tuple(map(int, apsw.sqlite_lib_version().split(".")))
        self._error = apsw.Error
        self._connection = connection
        try:
            self._cursor = apsw.Cursor(connection)
        except apsw.Error as error:
            raise _apsw_error(error) from error
        self._cursor.exec_trace = self._cursor.row_trace = None  # not even the application's

    @property
    def in_transaction(self) -> bool:
        return self._connection.in_transaction

    @property
    def total_changes(self) -> int:
        return self._connection.total_changes()

    def execute(self, sql: str, values: Values = ()) -> list[Record]:
        try:
            return self._cursor.execute(sql, values).fetchall()
        except self._error as error:
            raise _apsw_error(error) from error

    def interrupt(self) -> None:
        self._connection.interrupt()

    def close(self) -> None:
        self._connection.close()


def connect_sqlite3(path: str) -> Connection:
    try:
        native = sqlite3.connect(path, timeout=0, isolation_level=None, check_same_thread=False)
    except sqlite3.Error as error:
        raise _sqlite3_error(error) from error
    connection = Sqlite3Connection(native)
    _connections.add(connection)
    return connection


def connect_apsw(path: str) -> Connection:
    import apsw

    try:
        native = apsw.Connection(path)
        native.set_busy_timeout(0)
    except apsw.Error as error:
        raise _apsw_error(error) from error
    connection = ApswConnection(native)
    _connections.add(connection)
    return connection


def adapted(connection: object, driver: Driver) -> Connection:
    """The application's own connection. Raises TypeError when it is not one of that driver."""
    its: Driver | None = None
    if isinstance(connection, sqlite3.Connection):
        if driver == "sqlite3":
            return Sqlite3Connection(connection)
        its = "sqlite3"
    elif "apsw" in sys.modules:  # whoever has a connection of it has imported it
        import apsw

        if isinstance(connection, apsw.Connection):
            if driver == "apsw":
                return ApswConnection(connection)
            its = "apsw"
    names = {"sqlite3": "a sqlite3.Connection", "apsw": "an apsw.Connection"}
    if its is None:
        raise TypeError(f"not {names[driver]}: {type(connection).__qualname__}")
    raise TypeError(
        f"not {names[driver]} but {names[its]}: {_mixed(driver)};"
        f' this one needs a store with driver="{its}"'
    )


# Primary result codes, https://www.sqlite.org/rescode.html.
_BUSY: Final = frozenset({5, 6, 15})  # BUSY, LOCKED, PROTOCOL: others were in the way
_PERMANENT: Final = frozenset({3, 8, 11, 14, 26})  # PERM READONLY CORRUPT CANTOPEN NOTADB
_CONSTRAINT: Final = 19


def _sqlite3_error(error: sqlite3.Error) -> StoreError:
    return _error(error, getattr(error, "sqlite_errorcode", 0))


def _apsw_error(error: apsw.Error) -> StoreError:
    return _error(error, getattr(error, "result", 0))


def _error(error: Exception, code: int) -> StoreError:
    primary = code & 0xFF
    if primary in _BUSY:
        return StoreBusy(str(error))
    mapped = Conflict(str(error)) if primary == _CONSTRAINT else StoreError(str(error))
    mapped.is_permanent = primary in _PERMANENT
    return mapped


def permanent(text: str) -> StoreError:
    """An error that waiting cannot mend."""
    error = StoreError(text)
    error.is_permanent = True
    return error


# Which files this process has open. POSIX locks belong to the process and the inode, so a
# second copy of SQLite (apsw carries its own) does not see the locks of the first: measured,
# both held the write lock at once and the file was corrupt without one error.

_lock = threading.Lock()
_open: dict[FileId, list[Driver]] = {}
_inherited: set[FileId] = set()
_connections: weakref.WeakSet[Sqlite3Connection | ApswConnection] = weakref.WeakSet()
_hook_is_installed = False


def enter_file(
    path: str,
    driver: Driver,
    connect: Callable[[str], Connection],
    stat: Callable[[str], os.stat_result],
) -> tuple[Connection, FileId]:
    """Connect to a file, unless this process may not: then nothing is opened, because closing
    it again would drop the locks of whoever has it open."""
    with _lock:
        if driver == "apsw":
            _install_hook()
        with contextlib.suppress(OSError):
            _check(_file_id(stat(path)), driver)
        connection = connect(path)
        try:
            file = _file_id(stat(path))
        except OSError as error:
            connection.close()
            raise StoreError(str(error)) from error
        _open.setdefault(file, []).append(driver)
    return connection, file


def leave_file(file: FileId, driver: Driver) -> None:
    with _lock:
        drivers = _open.get(file, [])
        if driver in drivers:
            drivers.remove(driver)
        if not drivers:
            _open.pop(file, None)


def file_of(
    path: str | bytes | None, stat: Callable[[Any], os.stat_result] = os.stat
) -> FileId | None:
    """Which file that is; None for memory and for what is no longer there."""
    try:
        return _file_id(stat(path)) if path else None
    except (OSError, ValueError):
        return None


def _file_id(status: os.stat_result) -> FileId:
    return (status.st_dev, status.st_ino)


def _check(file: FileId, driver: Driver) -> None:
    if file in _inherited:
        raise permanent(
            "this process was forked while the file was open, and SQLite cannot open it a"
            " second time safely: start the process by 'spawn', or fork before opening"
        )
    if any(other != driver for other in _open.get(file, ())):
        raise permanent(_mixed(driver))
    apsw = sys.modules.get("apsw")
    if driver == "sqlite3" and apsw is not None:
        for connection in apsw.connections():
            with contextlib.suppress(apsw.Error):
                if file_of(connection.filename) == file:
                    raise permanent(_mixed(driver))


def _mixed(driver: Driver) -> str:
    other = "apsw" if driver == "sqlite3" else "sqlite3"
    return (
        f"{other} has the file open in this process, and {driver} is another copy of SQLite:"
        " together they would corrupt it. Use one of them for all connections to the file"
    )


def _install_hook() -> None:
    global _hook_is_installed
    if not _hook_is_installed:
        _hook_is_installed = True
        sys.addaudithook(_audit)  # for ever: there is no way to remove one


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if event != "sqlite3.connect" or not _open:
        return
    try:
        path = os.fsdecode(args[0])
        # Whether `uri=True` was given is not told. A file really called "file:..." is rare.
        if path.startswith("file:"):
            path = urllib.parse.unquote(urllib.parse.urlsplit(path).path)
    except Exception:
        return  # sqlite3 itself says what is wrong with it
    file = file_of(path)
    if file is not None and "apsw" in _open.get(file, ()):
        raise permanent(_mixed("sqlite3"))


def _after_fork_in_child() -> None:
    # A new connection to a file that was open at the fork would take the inherited locks for
    # its own: measured, the parent's close then deletes the log under it and a commit is lost.
    global _lock
    _lock = threading.Lock()
    _inherited.update(_open)
    _open.clear()
    # Closing an inherited connection touches what is the parent's, and hangs if a thread of the
    # parent was inside SQLite at the fork. So it is never closed, not even at the end of the
    # interpreter, when apsw's module would close all there are.
    for connection in _connections:
        _keep_for_ever(connection)
        if isinstance(connection, ApswConnection):
            _keep_for_ever(sys.modules["apsw"])


def _keep_for_ever(thing: object) -> None:
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
