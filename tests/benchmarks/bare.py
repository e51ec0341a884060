"""The yardsticks: Trio without jobs, and SQLite without Trio."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from typing import Final

import trio

from .files import Connection, Driver, Durability, connection, fresh_file, rows
from .names import MAX, P50, P99
from .rounds import Sample, Watch, percentile

BATCH: Final = 100
PAUSE: Final = 0.004
"""Seconds between two jobs of an idle runner: the end of the one before is long written."""
LEASE: Final = 60_000_000  # microseconds, as all instants here


def tasks(count: int, at_a_time: int) -> Sample:
    """Bare Trio: each task is spawned, sets a deadline, takes one checkpoint and ends."""
    return trio.run(_tasks, count, at_a_time)


async def _tasks(count: int, at_a_time: int) -> Sample:
    left = count

    async def task() -> None:
        nonlocal left
        with trio.CancelScope(deadline=trio.current_time() + 60):
            await trio.lowlevel.checkpoint()
        if left > 0:
            left -= 1
            nursery.start_soon(task)

    watch = Watch()
    async with trio.open_nursery() as nursery:
        left -= at_a_time
        for _ in range(at_a_time):
            nursery.start_soon(task)
    return watch.sample(count)


async def tick(late: list[float]) -> None:
    """Note how late, in ms, a task is that wants to run every millisecond; until cancelled."""
    while True:
        due = trio.current_time() + 0.001
        await trio.sleep_until(due)
        late.append((trio.current_time() - due) * 1000)


def lateness(late: list[float]) -> Sample:
    return {P50: percentile(late, 50), P99: percentile(late, 99), MAX: max(late)}


def ticker_beside_tasks(count: int, at_a_time: int) -> Sample:
    """What bare Trio alone makes a ticker wait, with so many tasks at a time."""

    async def main() -> Sample:
        late: list[float] = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(tick, late)
            rate = await _tasks(count, at_a_time)
            nursery.cancel_scope.cancel()
        return {**rate, **lateness(late)}

    return trio.run(main)


# SQLite. The table and its statements are what a job's life needs: an index of the ready rows
# in their order, one of the leases, a fence, a result. They are written down here once more, so
# that the yardstick stays the same when the library's own change.

_TABLES: Final = (
    """
    CREATE TABLE job (
        id INTEGER PRIMARY KEY,
        kind TEXT NOT NULL,
        state INTEGER NOT NULL DEFAULT 0,
        attempt INTEGER NOT NULL DEFAULT 0,
        claims INTEGER NOT NULL DEFAULT 0,
        priority INTEGER NOT NULL DEFAULT 0,
        enqueued_at INTEGER NOT NULL,
        run_at INTEGER NOT NULL,
        lease_until INTEGER,
        started_at INTEGER,
        finished_at INTEGER,
        result TEXT,
        payload TEXT NOT NULL
    )
    """,
    "CREATE INDEX ready ON job (kind, priority DESC, run_at) WHERE state = 0",
    "CREATE INDEX lease ON job (lease_until) WHERE state = 2",
)

INSERT: Final = "INSERT INTO job (kind, enqueued_at, run_at, payload) VALUES ('noop', ?, ?, ?)"

_CLAIM: Final = f"""
UPDATE job SET
    state = 2, attempt = attempt + 1, claims = claims + 1, lease_until = ?, started_at = ?
WHERE id IN (
    SELECT id FROM job WHERE state = 0 AND kind = 'noop' AND run_at <= ?
    ORDER BY priority DESC, run_at, id LIMIT {BATCH}
)
RETURNING id, claims, attempt, payload
"""

_FINISH: Final = """
UPDATE job SET state = 3, lease_until = NULL, finished_at = ?, result = 'null'
FROM json_each(?) AS ended
WHERE job.id = json_extract(ended.value, '$[0]')
    AND job.claims = json_extract(ended.value, '$[1]') AND job.state = 2
"""


def synchronizations(count: int) -> Sample:
    """What the disk makes of a commit: a page is written and brought to the disk."""
    page = bytes(4096)
    with fresh_file() as path, path.open("wb", buffering=0) as file:
        watch = Watch()
        for _ in range(count):
            file.write(page)
            os.fsync(file.fileno())
        return watch.sample(count)


def inserts(count: int, driver: Driver, durability: Durability) -> Sample:
    """One INSERT a transaction, again and again."""
    with fresh_file() as path, connection(path, driver, durability) as opened:
        make_tables(opened)
        watch = Watch()
        for number in range(count):
            now = instant()
            opened.execute(INSERT, (now, now, payload(number)))
        return watch.sample(count)


def insert_latency(count: int) -> Sample:
    """How long one INSERT takes now and then: the disk's part of every latency."""
    took: list[float] = []
    with fresh_file() as path, connection(path, "sqlite3", "full") as opened:
        make_tables(opened)
        for number in range(count):
            time.sleep(PAUSE)
            start = time.monotonic()
            opened.execute(INSERT, (instant(), instant(), payload(number)))
            took.append((time.monotonic() - start) * 1000)
    return {P50: percentile(took, 50), P99: percentile(took, 99)}


def life_cycles(count: int, driver: Driver, durability: Durability) -> Sample:
    """The end of a batch of jobs and the claim of the next in one transaction, to the last."""
    with fresh_file() as path, connection(path, driver, durability) as opened:
        make_tables(opened)
        rows(opened, "BEGIN")
        now = instant()
        for number in range(count):
            opened.execute(INSERT, (now, now, payload(number)))
        rows(opened, "COMMIT")
        done = 0
        watch = Watch()
        claimed = _fused(opened, [])
        while claimed:
            done += len(claimed)
            claimed = _fused(opened, claimed)
        assert done == count
        return watch.sample(count)


def _fused(opened: Connection, ended: list[tuple[int, int]]) -> list[tuple[int, int]]:
    now = instant()
    rows(opened, "BEGIN IMMEDIATE")
    if ended:
        finish(opened, now, ended)
    claimed = claim(opened, now)
    rows(opened, "COMMIT")
    return claimed


def finish(opened: Connection, now: int, fences: Sequence[tuple[int, int]]) -> None:
    rows(opened, _FINISH, (now, json.dumps(fences)))


def claim(opened: Connection, now: int) -> list[tuple[int, int]]:
    """Returns the fences of the claimed rows."""
    claimed = rows(opened, _CLAIM, (now + LEASE, now, now))
    return [(id, claims) for id, claims, _, _ in claimed]


def make_tables(opened: Connection) -> None:
    for statement in _TABLES:
        rows(opened, statement)


def payload(number: int) -> str:
    return json.dumps({"number": number, "text": "a short text"})


def instant() -> int:
    return time.time_ns() // 1000
