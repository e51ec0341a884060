"""Nothing is left of a job that has ended: not an object, wherever one might be kept.

Counted are the blocks that Python has allocated, so it does not matter what is kept, nor by
whom: one int a job in some set shows. What a job leaves in SQLite is not counted.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, TypeAlias

import pytest
import trio
from stories import at, eventually, finished, instant, now, serving, sleeps, writer
from trio.testing import MockClock

import trio_jobs
from trio_jobs import (
    Attempt,
    Fail,
    Job,
    Jobs,
    Kind,
    Retry,
    RetryLater,
    SqliteStore,
    State,
    constant,
)
from trio_jobs._attempt import Execution
from trio_jobs._batch import Write
from trio_jobs._ends import Ending
from trio_jobs._model import Change, Claimed, ClaimedJob, NewJob, PastStart, Refused, Row
from trio_jobs.testing import settled

JOBS = 200

number = Kind("number", int, int, retry=Retry(attempts=3, backoff=constant(1)))
hasty = Kind("hasty", int, int, retry=Retry(attempts=2, backoff=constant(1)), timeout=2)
long = Kind("long", int, int)
raw = Kind("raw", bytes)


@pytest.fixture(autouse=True)
def nothing_is_logged() -> Iterator[None]:
    """pytest keeps every record for its report."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


async def does(attempt: Attempt[int, Any]) -> int:
    """What becomes of a job is said by its payload."""
    await trio.lowlevel.checkpoint()
    match attempt.payload % 8:
        case 0:
            await attempt.publish(attempt.payload)
        case 1 if attempt.number == 1:
            raise ValueError
        case 2:
            raise Fail("no")
        case 3 if attempt.token == 1:
            raise RetryLater(1)
        case 4:
            raise Fail("for good", retry=False)
        case 5:
            await trio.sleep(5)
    return attempt.payload


async def run_them(jobs: Jobs, count: int) -> None:
    """Some succeed, are retried, die, wait, fail, or pass their timeout."""
    some = await jobs.enqueue_many(number, range(100_000, 100_000 + count // 2))
    some += await jobs.enqueue_many(hasty, range(count - count // 2))
    await finished(jobs, *some)


async def run_long(jobs: Jobs, count: int) -> None:
    """So that their leases are renewed."""
    await finished(jobs, *await jobs.enqueue_many(long, [7] * count))


async def wait_for_each(jobs: Jobs, count: int) -> None:
    async with trio.open_nursery() as nursery:
        for index in range(count):
            job = await jobs.enqueue(number, 8 * index + 6, key=f"key {index}", delay=1)
            nursery.start_soon(jobs.wait_finished, job)


async def give_up_waiting(jobs: Jobs, count: int) -> None:
    some = await jobs.enqueue_many(number, [6] * count, delay=10)
    with trio.move_on_after(5):
        async with trio.open_nursery() as nursery:
            for job in some:
                nursery.start_soon(jobs.wait_finished, job)
    await finished(jobs, *some)


async def cancel_each(jobs: Jobs, count: int) -> None:
    """Before they start, and while they run; some get a new life."""
    some = await jobs.enqueue_many(number, [5] * (count // 2), delay=1000)
    some += await jobs.enqueue_many(number, [5] * (count - count // 2))
    await trio.sleep(1)
    for index, job in enumerate(some):
        await jobs.cancel(job)
        if index % 10 == 0:
            await jobs.wait_finished(job)
            await jobs.retry(job)
    await finished(jobs, *some)


async def let_deadlines_pass(jobs: Jobs, count: int) -> None:
    """While they wait, and while they run."""
    deadline = at(now() + 2.5)
    some = await jobs.enqueue_many(number, [5] * (count // 2), deadline=deadline)
    some += await jobs.enqueue_many(number, [5] * (count - count // 2), delay=9, deadline=deadline)
    await finished(jobs, *some)


async def take_from_it(jobs: Jobs, count: int) -> None:
    """Somebody else has their rows, so their ends are refused."""
    some = await jobs.enqueue_many(number, [5] * count)
    connection = writer(jobs._store)  # type: ignore[arg-type]
    while (await jobs.get(some[-1])).state is not State.SUCCEEDED:
        await trio.sleep(1)
        await settled()
        connection.execute(
            "UPDATE trio_jobs_job SET claims = claims + 1, state = 3, finished_at = ?"
            " WHERE state = 2",
            (instant(now()),),
        )
        await trio.sleep(4)


async def wait_unhandled(jobs: Jobs, count: int) -> None:
    await finished(jobs, *await jobs.enqueue_many(raw, [b"payload"] * count))


Way: TypeAlias = Callable[[Jobs, int], Awaitable[None]]

WAYS: dict[str, Way] = {
    way.__name__: way
    for way in (
        run_them,
        run_long,
        wait_for_each,
        give_up_waiting,
        cancel_each,
        let_deadlines_pass,
        take_from_it,
        wait_unhandled,
    )
}


# Counting.


def blocks() -> int:
    gc.collect()  # empties free lists, too
    return sys.getallocatedblocks()


PER_JOB = (
    *(Row, Change, NewJob, PastStart, Claimed, ClaimedJob, Refused, Write),
    *(Execution, Ending, Attempt, Job),
)


def objects() -> Counter[str]:
    """How many there are of what is made for a job."""
    gc.collect()
    return Counter(type(one).__name__ for one in gc.get_objects() if type(one) in PER_JOB)


@contextlib.asynccontextmanager
async def busy(store: SqliteStore) -> AsyncIterator[Jobs]:
    handlers = [number.handled_by(does), hasty.handled_by(does), long.handled_by(sleeps(50, 7))]
    async with (
        trio_jobs.open_jobs(store) as jobs,
        serving(jobs, *handlers, workers=40, unhandled="fail"),
    ):
        yield jobs


@pytest.mark.parametrize("way", WAYS)
async def test_nothing_grows_with_the_number_of_jobs_that_have_ended(
    way: str, autojump_clock: MockClock
) -> None:
    async with busy(SqliteStore(":memory:")) as jobs:
        for _ in range(2):  # there are caches to fill, and tables to grow
            await WAYS[way](jobs, JOBS)
        await settled()
        before = blocks()
        for _ in range(3):
            await WAYS[way](jobs, JOBS)
        await settled()
        kept = (blocks() - before) / (3 * JOBS)

    # One object kept of each would be 1. Of what is not of a job it was up to 0.2: Trio forgets
    # a deadline that did not pass when there are many.
    assert kept < 0.5


@pytest.mark.parametrize("way", [run_them, run_long])
async def test_an_idle_runner_holds_no_rows_payloads_and_results_not_even_the_last(
    way: Way, store: SqliteStore, autojump_clock: MockClock
) -> None:
    """They may be large, and the next job may come tomorrow."""
    before = objects()  # of other tests
    async with busy(store) as jobs:
        await way(jobs, JOBS)
        await settled()

        # The writing thread may not have put away yet what was delivered.
        await eventually(lambda: not objects() - before, within=1)
