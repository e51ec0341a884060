"""A fresh database file and connections to it, by the driver that is measured."""

from __future__ import annotations

import sqlite3
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias

Driver: TypeAlias = Literal["sqlite3", "apsw"]
Durability: TypeAlias = Literal["full", "normal"]


class Connection(Protocol):
    """What the connections of both drivers have in common."""

    def execute(self, sql: str, values: Sequence[Any] = ..., /) -> Iterable[Any]: ...

    def close(self) -> None: ...


@contextmanager
def fresh_file() -> Iterator[Path]:
    """A path in a folder of its own, which is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        yield Path(folder) / "jobs.db"


@contextmanager
def connection(path: Path, driver: Driver, durability: Durability) -> Iterator[Connection]:
    """In autocommit mode, with a write-ahead log."""
    with closing(_connect(path, driver)) as opened:
        rows(opened, "PRAGMA journal_mode = WAL")
        rows(opened, f"PRAGMA synchronous = {durability}")
        yield opened


def rows(connection: Connection, sql: str, values: Sequence[Any] = ()) -> list[Any]:
    """Run a statement to its end."""
    return list(connection.execute(sql, values))


def _connect(path: Path, driver: Driver) -> Connection:
    if driver == "sqlite3":
        return sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    import apsw

    return apsw.Connection(str(path))
