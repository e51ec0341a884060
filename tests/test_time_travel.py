"""Under Trio's virtual clock a year of jobs is over in no time, always with the same outcome."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import trio
from stories import (
    Script,
    Trouble,
    abandon,
    at,
    finished,
    make_store,
    now,
    serving,
    sleeps,
)
from trio.testing import MockClock

import trio_jobs
from trio_jobs import Attempt, Fail, Jobs, Kind, Retry, RetryLater, SqliteStore, State, constant
from trio_jobs._model import Change, Claim, Claimed, NewJob
from trio_jobs.testing import EPOCH, settled

DAY = 86_400.0
YEAR = 365 * DAY

plain = Kind("plain", None)


async def test_virtual_time_starts_at_EPOCH(jobs: Jobs, autojump_clock: MockClock) -> None:
    job = await jobs.enqueue(plain, None)

    assert (job.enqueued_at, job.run_at) == (EPOCH, EPOCH)


async def test_a_year_of_retries_deadlines_and_leases_takes_well_under_a_second(
    jobs: Jobs, autojump_clock: MockClock
) -> None:
    """With `autojump_clock` and nothing else set up."""
    monthly = Kind("monthly", None, retry=Retry(attempts=13, backoff=constant(30 * DAY)))
    asking = Kind("asking", None)
    doomed = Kind("doomed", None, retry=Retry(attempts=100, backoff=constant(20 * DAY)))
    bill, ask, fail, last = Script(*[Fail("no money")] * 12, None), Script(), Script(), Script()
    ask.steps = [*[RetryLater(36.5 * DAY)] * 10, sleeps(600)]
    fail.steps = [ValueError()]
    last.steps = [sleeps(600)]
    began = time.process_time()
    lost = await jobs.enqueue(plain, None)
    await abandon(jobs, plain, lease=100 * DAY)
    handlers = [monthly.handled_by(bill), asking.handled_by(ask), doomed.handled_by(fail)]
    async with serving(jobs, *handlers, plain.handled_by(last)):
        ended = await finished(
            jobs,
            await jobs.enqueue(monthly, None),
            await jobs.enqueue(asking, None),
            await jobs.enqueue(doomed, None, deadline=at(300 * DAY)),
            lost,
            await jobs.enqueue(plain, None, delay=YEAR),
        )
    took = time.process_time() - began

    assert bill.starts == [30 * DAY * count for count in range(13)]
    assert ask.starts == [36.5 * DAY * count for count in range(11)]
    assert fail.starts == [20 * DAY * count for count in range(15)]
    assert last.starts == [100 * DAY, YEAR]
    states = [job.state for job in ended]
    assert states == [State.SUCCEEDED] * 2 + [State.FAILED] + [State.SUCCEEDED] * 2
    assert took < 1


async def test_a_waiter_does_not_ask_the_store_while_a_year_goes_by(
    autojump_clock: MockClock,
) -> None:
    store = Trouble(":memory:")
    reads: list[str] = []
    async with trio_jobs.open_jobs(store) as jobs, serving(jobs, plain.handled_by(Script(None))):
        job = await jobs.enqueue(plain, None, delay=YEAR)
        store.rule = lambda step: reads.append(step) if step in ("get", "finished") else None
        await finished(jobs, job)

    assert len(reads) <= 2
    assert now() == YEAR


async def test_with_a_clock_of_ones_own_every_sleep_is_bounded_by_poll(
    autojump_clock: MockClock,
) -> None:
    """Whatever Trio's clock is: nobody knows when the other one will be there."""
    store = Trouble(":memory:")
    steps: list[str] = []
    clock = [EPOCH.timestamp()]
    async with trio_jobs.open_jobs(store, clock=lambda: clock[0]) as jobs:
        store.rule = steps.append
        handle = Script(None)
        async with serving(jobs, plain.handled_by(handle), poll=5):
            job = await jobs.enqueue(plain, None, delay=YEAR)
            await trio.sleep(100)
            looks, claims = steps.count("look"), steps.count("claim")
            clock[0] += YEAR
            await finished(jobs, job, within=5)

    assert 18 <= looks <= 22
    assert claims <= 3  # nobody else has written anything


# Threads.


class Slow(SqliteStore):
    """A store whose calls take real time."""

    def add(self, jobs: Sequence[NewJob]) -> Any:
        time.sleep(0.02)
        return super().add(jobs)

    def apply(self, changes: Sequence[Change]) -> Any:
        time.sleep(0.02)
        return super().apply(changes)

    def claim(self, claim: Claim) -> Claimed:
        time.sleep(0.02)
        return super().claim(claim)

    def get(self, id: int) -> Any:
        time.sleep(0.02)
        return super().get(id)


@pytest.mark.parametrize("where", ["file", "apsw"])
async def test_virtual_time_stands_still_while_a_store_works(
    where: str, tmp_path: Path, autojump_clock: MockClock
) -> None:
    """Trio counts a task that waits for a thread as idle and would jump (python-trio/trio#456)."""
    handle = Script(None)
    async with (
        trio_jobs.open_jobs(make_store(where, tmp_path, Slow)) as jobs,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(trio.sleep, 3600)  # something to jump to
        await nursery.start(trio_jobs.serve, jobs, [plain.handled_by(handle)])
        for _ in range(5):
            await jobs.wait_finished(await jobs.enqueue(plain, None))
        async with trio.open_nursery() as callers:
            for _ in range(5):
                callers.start_soon(jobs.enqueue, plain, None)
        await settled()
        at_the_end = now()
        nursery.cancel_scope.cancel()

    assert at_the_end == 0
    assert handle.starts == [0] * 10
    assert autojump_clock.autojump_threshold == 0


async def test_two_stores_that_work_at_once_hold_the_clock_together(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with (
        trio_jobs.open_jobs(Slow(tmp_path / "one.db")) as one,
        trio_jobs.open_jobs(Slow(tmp_path / "two.db")) as two,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(trio.sleep, 3600)
        async with trio.open_nursery() as callers:
            for jobs in (one, two, one, two):
                callers.start_soon(jobs.enqueue, plain, None)
        at_the_end = now()
        nursery.cancel_scope.cancel()

    assert at_the_end == 0
    assert autojump_clock.autojump_threshold == 0


async def test_a_handler_that_works_in_a_thread_keeps_its_lease_though_the_clock_jumps(
    jobs: Jobs, autojump_clock: MockClock
) -> None:
    """The handler's own thread does not hold the clock: that is between it and Trio."""
    release = threading.Event()

    async def handle(attempt: Attempt[None, None]) -> None:
        starts.append(now())
        await trio.to_thread.run_sync(release.wait, 10)

    starts: list[float] = []
    async with serving(jobs, plain.handled_by(handle), lease=6):
        job = await jobs.enqueue(plain, None)
        await trio.sleep(60)  # ten leases, while the thread is waiting
        release.set()
        [ended] = await finished(jobs, job)

    assert starts == [0]
    assert (ended.state, ended.attempt) == (State.SUCCEEDED, 1)
