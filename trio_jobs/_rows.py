"""Rows as SQLite keeps them, and values and statements for many of them at once."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Final, TypeVar, cast

import msgspec

from ._drivers import Connection, Record, Value, Values
from ._model import Failure, Outcome, PastStart, Row, State
from ._schema import CODES, READY, STATES

T = TypeVar("T")

MAX_INTEGER: Final = 2**63 - 1

# Reading. Text is read as a blob: bytes that are no UTF-8 (a row edited by hand) must not make
# a fetch fail.

ROW: Final = """
    id, state, attempt, claims, interruptions, cancel_requested, priority, enqueued_at, run_at,
    deadline, lease_until, started_at, finished_at,
    CAST(kind AS BLOB), CAST(key AS BLOB), CAST(result AS BLOB), CAST(failure AS BLOB),
    CAST(failure_type AS BLOB)"""

# What `Row` is made from by its decoder, in a third of the time; without the result.
QUEUED_AS_JSON: Final = """
    json_array(
        id, CAST(kind AS TEXT), CASE WHEN state < 2 THEN 'queued' END, attempt, claims,
        interruptions, json(iif(cancel_requested, 'true', 'false')), priority,
        CAST(key AS TEXT), enqueued_at, run_at, deadline, lease_until, started_at, finished_at,
        NULL, CASE WHEN failure IS NOT NULL THEN json_object(
            'message', CAST(failure AS TEXT), 'type', CAST(failure_type AS TEXT)
        ) END
    )"""

GET: Final = f"SELECT {ROW} FROM trio_jobs_job WHERE id = ?"


def as_number(value: Any) -> Any:
    """None for what is no number: SQLite keeps any text in a column of integers, and an instant
    that somebody wrote by hand ("2030-01-01 12:00:00") must not stop a runner."""
    return value if isinstance(value, int | float) else None


def row_of(record: Record) -> Row:
    return Row(
        id=record[0],
        state=STATES[record[1]],
        attempt=record[2],
        claims=record[3],
        interruptions=record[4],
        cancel_requested=bool(record[5]),
        priority=record[6],
        enqueued_at=record[7],
        run_at=as_number(record[8]) or 0,
        deadline=as_number(record[9]),
        lease_until=as_number(record[10]),
        started_at=record[11],
        finished_at=record[12],
        kind=text_of(record[13]),
        key=None if record[14] is None else text_of(record[14]),
        result=record[15],
        failure=_failure_of(record[16], record[17]),
    )


def past_of(record: Record) -> PastStart:
    return PastStart(
        claim=record[0],
        number=record[1],
        started_at=record[2],
        ended_at=record[3],
        outcome=cast(Outcome, text_of(record[4])),
        failure=_failure_of(record[5], record[6]),
    )


def _failure_of(message: bytes | None, type: bytes | None) -> Failure | None:
    if message is None:
        return None
    return Failure(text_of(message), None if type is None else text_of(type))


def text_of(stored: bytes) -> str:
    return stored.decode(errors="replace")


def integer(value: int) -> int:
    """No row lies beyond SQLite's integers; to ask for one there is no error."""
    return max(-MAX_INTEGER, min(value, MAX_INTEGER))


def code_of(row: Row) -> int:
    if row.state is State.QUEUED and row.run_at <= row.enqueued_at:
        return READY
    return CODES[row.state]


# Writing many rows in few steps.
#
# How a row is found is never left to the planner. Where the application ran ANALYZE while
# there was one job, SQLite 3.54 plans to walk over the table, and goes on doing so when there
# are a million. So indexes are named, a row by its id is a subquery of its own, and rows are
# updated by an upsert, which always seeks (and takes 20 % less time than UPDATE ... FROM).


def many(sql: str, rows: Sequence[Sequence[Value]]) -> tuple[str, list[Value]]:
    """Put as many rows of parameters in the statement's place for VALUES."""
    return _with_rows(sql, len(rows), len(rows[0])), [*itertools.chain(*rows)]


@functools.cache  # so few there are: `chunks`
def _with_rows(sql: str, rows: int, columns: int) -> str:
    row = "(" + ", ".join("?" * columns) + ")"
    return sql.format(rows="VALUES " + ", ".join([row] * rows))


def chunks(items: Sequence[T]) -> Iterator[Sequence[T]]:
    """Chunks of few sizes, so that there are few statements, which the driver keeps prepared."""
    start = 0
    while start < len(items):
        size = min(64, 1 << ((len(items) - start).bit_length() - 1))
        yield items[start : start + size]
        start += size


def as_json(value: object) -> str:
    return msgspec.json.encode(value).decode()


def array(connection: Connection, sql: str, values: Values = ()) -> list[Any]:
    """What the statement gives as one JSON array, in one step."""
    [(array,)] = connection.execute(sql, values)
    found: list[Any] = msgspec.json.decode(array)
    return found
