"""The file stays in shape while it is worked on: the log is bounded, and old rows may go."""

from __future__ import annotations

import contextlib
import logging
import sqlite3
import threading
from pathlib import Path
from typing import Any, Literal

import apsw
import pytest
import trio
from stories import finished, serving

import trio_jobs
from trio_jobs import Attempt, Jobs, Kind, SqliteStore

data = Kind("data", bytes)
quick = Kind("quick", int, int)


@quick.handled_by
async def at_once(attempt: Attempt[int, int]) -> int:
    return attempt.payload


def connect(path: Path, driver: str) -> Any:
    return sqlite3.connect(path) if driver == "sqlite3" else apsw.Connection(str(path))


def size_of(file: Path) -> int:
    return file.stat().st_size


async def write(jobs: Jobs, log: Path, rows: int) -> int:
    """30,000 rows are some 36 MB of log; the largest it was."""
    largest = 0
    for _ in range(rows // 250):
        await jobs.enqueue_many(data, [bytes(1000)] * 250)
        largest = max(largest, size_of(log))
    return largest


@pytest.mark.parametrize("driver", ["sqlite3", "apsw"])
async def test_Q6_the_log_stays_bounded_beside_readers_and_is_cut_when_one_lets_go(
    tmp_path: Path, driver: Literal["sqlite3", "apsw"], caplog: pytest.LogCaptureFixture
) -> None:
    path, log = tmp_path / "jobs.db", tmp_path / "jobs.db-wal"
    store = SqliteStore(path, driver=driver, synchronous="normal")
    clock = [1e9]
    async with (
        trio_jobs.open_jobs(store, clock=lambda: clock[0]) as jobs,
        trio.open_nursery() as nursery,
    ):

        async def dashboard() -> None:
            while True:
                await jobs.counts()
                await jobs.find(limit=20)
                await trio.sleep(0.001)

        nursery.start_soon(dashboard)
        largest = await write(jobs, log, 30_000)
        with contextlib.closing(connect(path, driver)) as outside:
            outside.execute("BEGIN")
            outside.execute("SELECT count(*) FROM trio_jobs_job").fetchall()
            with caplog.at_level(logging.WARNING, "trio_jobs"):
                pinned = await write(jobs, log, 20_000)
            outside.execute("ROLLBACK")
        # Nothing is written any more, but a runner looks.
        async with serving(jobs, at_once, poll=0.02):
            with trio.move_on_after(30):
                while size_of(log) >= 16_000_000:
                    clock[0] += 5
                    await trio.sleep(0.1)
        released = size_of(log)
        nursery.cancel_scope.cancel()

    assert largest < 16_000_000 < pinned
    assert released < 16_000_000
    assert len([one for one in caplog.records if "reading transaction" in one.message]) == 1


async def test_Q5_nobody_waits_while_a_hundred_thousand_old_rows_are_deleted(
    tmp_path: Path,
) -> None:
    path = tmp_path / "jobs.db"
    store = SqliteStore(path, synchronous="normal")
    waits: list[float] = []
    sleep = store.sleep

    def wait(seconds: float) -> None:
        waits[-1] += seconds
        sleep(seconds)

    store.sleep = wait
    begin = store._begin

    def begin_counted() -> Any:
        waits.append(0.0)
        return begin()

    store._begin = begin_counted  # type: ignore[method-assign]
    async with trio_jobs.open_jobs(store) as jobs, serving(jobs, at_once, workers=4):
        fill(path, 100_000)
        kept = await jobs.enqueue(data, b"queued")
        thread = threading.Thread(target=delete_old, args=[path])
        thread.start()
        done = 0
        while thread.is_alive():
            await finished(jobs, *await jobs.enqueue_many(quick, range(20)))
            done += 20
        thread.join()
        left = await jobs.find(limit=1_000_000)

    assert done >= 20
    assert len(left) == done + 1
    assert kept.id in {job.id for job in left}
    assert max(waits) < 1
    assert sorted(waits)[len(waits) * 99 // 100] < 0.25


def fill(path: Path, rows: int) -> None:
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA wal_autocheckpoint = 0")
        connection.execute("BEGIN IMMEDIATE")
        connection.execute(
            """
            WITH RECURSIVE number(id) AS (
                SELECT 1 UNION ALL SELECT id + 1 FROM number WHERE id < ?
            )
            INSERT INTO trio_jobs_job (id, kind, state, finished_at, payload)
            SELECT id, 'quick', 3, 1, '1' FROM number
            """,
            (rows,),
        )
        connection.execute("UPDATE trio_jobs_meta SET next_id = ?", (rows + 1,))
        connection.execute("COMMIT")


def delete_old(path: Path) -> None:
    """As an application would, until there is a way to ask for it."""
    with contextlib.closing(sqlite3.connect(path, isolation_level=None, timeout=60)) as connection:
        connection.execute("PRAGMA wal_autocheckpoint = 0")
        connection.execute("PRAGMA synchronous = NORMAL")
        while connection.execute(
            """
            DELETE FROM trio_jobs_job WHERE id IN (
                SELECT id FROM trio_jobs_job WHERE finished_at = 1 AND state >= 3
                    AND id < 100001 LIMIT 500
            )
            """
        ).rowcount:
            pass
