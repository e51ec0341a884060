"""Rows as SQLite keeps them, and values and statements for many of them at once."""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Iterator, Sequence
from typing import Any, Final, TypeVar, cast

import msgspec

from ._drivers import Connection, Record, Value, Values, permanent
from ._model import MAX_COUNT, Failure, Instant, Outcome, PastStart, Row, State
from ._schema import CODES, READY, STATES

T = TypeVar("T")

MAX_INTEGER: Final = 2**63 - 1
FAR: Final[float] = 2**62
"""Beyond every instant that means something, and a float."""
_UNKNOWN_CLAIMS: Final = 2**32
"""More than there can have been: a fence must not be handed out twice."""

_log: Final = logging.getLogger("trio_jobs")

# Reading. SQLite keeps anything in any column, and a row that somebody edited by hand must not
# stop a runner, or hide the others. So what no job can have is read as what comes nearest (no
# number as 0 or None, no state as failed, no lease as one that is over); claims and changes that
# meet such a row `mend` it.
# Text is read as a blob: bytes that are no UTF-8 must not make a fetch fail.

STATE: Final = "iif(state IN (0, 1, 2, 3, 4, 5, 6), state, 4)"

ROW: Final = f"""
    id, {STATE}, attempt, claims, interruptions, cancel_requested, priority, enqueued_at, run_at,
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


def as_instant(value: Any) -> Instant | None:
    """None for what is no number, as an instant like "2030-01-01 12:00:00"."""
    if isinstance(value, float):
        value = int(max(-FAR, min(value, FAR)))
    return value if isinstance(value, int) else None


def meta_of(records: Sequence[Record]) -> Record:
    """The one row of trio_jobs_meta; it can only be missing by hand."""
    if len(records) != 1:
        raise permanent("trio_jobs_meta must have one row, and somebody has removed it")
    return records[0]


def row_of(record: Record) -> Row:
    lease_until = as_instant(record[10])
    if lease_until is None and STATES[record[1]] is State.RUNNING:
        lease_until = 0
    return Row(
        id=record[0],
        state=STATES[record[1]],
        attempt=_count(record[2], 0),
        claims=_count(record[3], _UNKNOWN_CLAIMS),
        interruptions=_count(record[4], 0),
        cancel_requested=record[5] != 0,
        priority=record[6] if isinstance(record[6], int) else 0,
        enqueued_at=as_instant(record[7]) or 0,
        run_at=as_instant(record[8]) or 0,
        deadline=as_instant(record[9]),
        lease_until=lease_until,
        started_at=as_instant(record[11]),
        finished_at=as_instant(record[12]),
        kind=text_of(record[13]),
        key=None if record[14] is None else text_of(record[14]),
        result=record[15],
        failure=_failure_of(record[16], record[17]),
    )


def _count(value: Any, otherwise: int) -> int:
    return value if isinstance(value, int) and 0 <= value <= MAX_COUNT else otherwise


def past_of(record: Record) -> PastStart:
    return PastStart(
        claim=_count(record[0], 0),
        number=_count(record[1], 0),
        started_at=as_instant(record[2]) or 0,
        ended_at=as_instant(record[3]) or 0,
        outcome=cast(Outcome, text_of(record[4])),
        failure=_failure_of(record[5], record[6]),
    )


def _failure_of(message: bytes | None, type: bytes | None) -> Failure | None:
    if message is None:
        return None
    return Failure(text_of(message), None if type is None else text_of(type))


_NUMBERS: Final = (
    "state",
    "attempt",
    "claims",
    "interruptions",
    "cancel_requested",
    "priority",
    "enqueued_at",
    "run_at",
    "deadline",
    "lease_until",
    "started_at",
    "finished_at",
)
_WITH_STATE: Final = f"SELECT {ROW}, state FROM trio_jobs_job WHERE id = ?"
_MEND: Final = f"""
UPDATE trio_jobs_job SET {", ".join(f"{name} = ?" for name in _NUMBERS)} WHERE id = ?
"""


def is_sane(record: Record, row: Row) -> bool:
    """Whether the row is what is stored, but for its state."""
    return list(record[2 : 1 + len(_NUMBERS)]) == _numbers(row)


def mend(connection: Connection, id: int) -> bool:
    """Store what a row is read as, if somebody wrote by hand what no job can have; whether that
    was so. (Statements and indexes see what is stored.)"""
    records = connection.execute(_WITH_STATE, (id,))
    if not records:
        return False
    record, row = records[0], row_of(records[0])
    stored = [record[-1], *record[2 : 1 + len(_NUMBERS)]]
    mended = [record[-1] if record[-1] in STATES else CODES[row.state], *_numbers(row)]
    wrong = [name for name, was, is_ in zip(_NUMBERS, stored, mended, strict=True) if was != is_]
    if wrong:
        connection.execute(_MEND, (*mended, id))
        _log.warning(
            "job %d: somebody wrote what no job can have, which is mended: %s", id, ", ".join(wrong)
        )
    return bool(wrong)


def _numbers(row: Row) -> list[Value]:
    return [
        int(row.cancel_requested) if n == "cancel_requested" else getattr(row, n)
        for n in _NUMBERS[1:]
    ]


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
