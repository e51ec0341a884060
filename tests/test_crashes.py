"""What is left in the file when a process dies in the middle of a transaction."""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
from collections import Counter
from pathlib import Path
from typing import Any

import trio
from stories import TIMES, PassThrough, abandon, at
from trio.testing import MockClock

import trio_jobs
from trio_jobs import Attempt, Handler, Kind, Retry, SqliteStore, StoreError, constant
from trio_jobs._drivers import Connection, Record, Values

due = Kind("due", int, int, retry=Retry(backoff=constant(0)))
foreign = Kind("foreign", int, int)

DUE = 503
STRIDE = max(1, 7 // TIMES)
"""Every seventh statement on a push; the sweep of tests/simulation takes them all."""
ALL = "SELECT * FROM trio_jobs_job ORDER BY id"


class Power:
    """Goes off at the statement with that number: no statement after it does anything."""

    def __init__(self, off_at: int | None) -> None:
        self.off_at = off_at
        self.statements = 0
        self.is_off = False


class PoweredConnection(PassThrough):
    def __init__(self, real: Connection, power: Power) -> None:
        super().__init__(real)
        self._power = power

    @property
    def in_transaction(self) -> bool:
        return not self._power.is_off and super().in_transaction

    def execute(self, sql: str, values: Values = ()) -> list[Record]:
        self._power.statements += 1
        if self._power.statements == self._power.off_at:
            self._power.is_off = True
            self.real.close()  # nothing is committed by that
        if self._power.is_off:
            raise StoreError("the process is gone")
        return super().execute(sql, values)


def powered(path: Path, power: Power) -> SqliteStore:
    store = SqliteStore(path)
    store.inline = True  # statements come in one order
    connect = store.connect
    store.connect = lambda path: PoweredConnection(connect(path), power)
    return store


def handler(starts: Counter[int], *, fails_first: bool) -> Handler:
    async def handle(attempt: Attempt[int, int]) -> int:
        starts[attempt.payload] += 1
        if fails_first and attempt.payload % 5 == 0 and attempt.number == 1:
            raise ValueError
        return attempt.payload

    return due.handled_by(handle)


async def prepare(path: Path) -> None:
    """Due rows of all sorts (ready, scheduled, lost), and others that are none."""
    async with trio_jobs.open_jobs(path) as jobs:
        await jobs.enqueue_many(due, range(3))
        await abandon(jobs, due)
        await jobs.enqueue_many(due, range(3, 103), delay=1)
        await jobs.enqueue_many(due, range(103, DUE))
        await jobs.enqueue_many(due, range(DUE, DUE + 20), run_at=at(10_000))
        await jobs.enqueue_many(foreign, range(30))
        await trio.sleep(2)


async def work(path: Path, power: Power) -> None:
    """Take up lost rows, move scheduled ones, start, requeue and finish them."""
    with contextlib.suppress(StoreError):
        async with trio_jobs.open_jobs(powered(path, power)) as jobs:
            await trio_jobs.run_once(
                jobs, [handler(Counter(), fails_first=True)], workers=DUE, now=at(5)
            )


def rows(path: Path, which: str) -> list[Any]:
    with contextlib.closing(sqlite3.connect(path)) as connection:
        return connection.execute(ALL.replace("ORDER", f"WHERE {which} ORDER")).fetchall()


async def test_L3_a_process_that_dies_at_any_statement_leaves_every_move_whole_or_undone(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    await prepare(tmp_path / "before.db")
    untouched = f"kind = 'foreign' OR run_at >= {round(at(10_000).timestamp() * 1_000_000)}"
    path = tmp_path / "jobs.db"
    shutil.copy(tmp_path / "before.db", path)
    counting = Power(None)
    await work(path, counting)
    assert counting.statements > 60, "there were fewer moves than this test wants to break"

    for number in range(1, counting.statements + 1, STRIDE):
        shutil.copy(tmp_path / "before.db", path)
        await work(path, Power(number))
        left = rows(path, "true")
        starts: Counter[int] = Counter()
        async with trio_jobs.open_jobs(path) as jobs:
            unfinished = {row[0] for row in rows(path, f"state < 3 AND NOT ({untouched})")}
            await trio.sleep(60)  # what was claimed by the dead process
            payload_of = {
                job.id: number for number, job in enumerate(await jobs.find(kind=due, limit=DUE))
            }
            while await trio_jobs.run_once(
                jobs, [handler(starts, fails_first=False)], workers=DUE, now=at(100)
            ):
                pass

        assert len(left) == DUE + 20 + 30
        assert rows(path, untouched) == rows(tmp_path / "before.db", untouched)
        assert rows(path, f"state < 3 AND NOT ({untouched})") == []
        assert starts == Counter(payload_of[id] for id in unfinished)
        with contextlib.closing(sqlite3.connect(path)) as connection:
            assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
