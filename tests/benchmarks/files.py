"""A fresh database file, connections to it, and rows by the hundred thousand."""

from __future__ import annotations

import sqlite3
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias

Driver: TypeAlias = Literal["sqlite3", "apsw"]
Durability: TypeAlias = Literal["full", "normal"]


class Connection(Protocol):
    """What the connections of both drivers have in common."""

    def execute(self, sql: str, values: Sequence[Any] = ..., /) -> Iterable[Any]: ...

    def executemany(self, sql: str, values: Iterable[Sequence[Any]], /) -> Iterable[Any]: ...

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


def multiply(path: Path, driver: Driver, count: int, **changed: str) -> None:
    """Make so many jobs of the one that is in this file, which nobody has open.

    They are copies, whatever columns there are; `changed` says in SQL how some differ (`n` is
    the number of the copy, from 1).
    """
    with connection(path, driver, "normal") as opened:
        columns = _columns(opened, "trio_jobs_job")
        values: Mapping[str, str] = {"id": "id + n"} | changed
        copied = ", ".join(values.get(column, column) for column in columns)
        rows(opened, "BEGIN")
        rows(
            opened,
            f"""
            WITH RECURSIVE copy(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM copy WHERE n < ?)
            INSERT INTO trio_jobs_job ({", ".join(columns)})
            SELECT {copied} FROM (SELECT * FROM trio_jobs_job LIMIT 1), copy
            """,
            (count - 1,),
        )
        if "next_id" in _columns(opened, "trio_jobs_meta"):
            next_id = "(SELECT max(id) + 1 FROM trio_jobs_job)"
            rows(opened, f"UPDATE trio_jobs_meta SET next_id = {next_id}")
        rows(opened, "COMMIT")
        rows(opened, "PRAGMA wal_checkpoint(TRUNCATE)")


def _columns(opened: Connection, table: str) -> list[str]:
    return [column[1] for column in rows(opened, f"PRAGMA table_info({table})")]
