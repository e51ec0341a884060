"""An application's clock that fails: the runner stops in order, and says what failed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import trio
from stories import now
from trio.testing import MockClock

import trio_jobs
from trio_jobs import Attempt, Jobs, Kind, State
from trio_jobs.testing import EPOCH

GRACE = 20.0
LEASE = 12.0

nap = Kind("nap", float, timeout=60)


@nap.handled_by
async def take_nap(attempt: Attempt[float, None]) -> None:
    await trio.sleep(attempt.payload)


class FailingClock:
    """Fails each reading for which `fails` says so; they are counted from 1."""

    def __init__(self, fails: Callable[[int], bool]) -> None:
        self.fails = fails
        self.readings = 0

    def __call__(self) -> float:
        self.readings += 1
        if self.fails(self.readings):
            raise LookupError("the time server does not answer")
        return EPOCH.timestamp() + trio.current_time()


async def serve_some(jobs: Jobs) -> None:
    async with trio.open_nursery() as nursery:
        serve = partial(
            trio_jobs.serve, jobs, [take_nap], workers=3, lease=LEASE, grace=GRACE, poll=1
        )
        await nursery.start(serve)
        for seconds in (1.0, 7.0, 30.0, 2.0):
            await jobs.enqueue(nap, seconds)
        await trio.sleep(1.5)
        await jobs.enqueue(nap, 1.0)
        await trio.sleep(60)
        nursery.cancel_scope.cancel()


def fail_at(number: int) -> int:
    """Fail once, at that reading; returns how many there were."""
    clock = FailingClock(lambda reading: reading == number)

    async def main() -> None:
        async with trio_jobs.open_jobs(":memory:", clock=clock) as jobs:
            try:
                with trio.fail_after(200):
                    await serve_some(jobs)
            except* LookupError as errors:
                [error] = errors.exceptions  # plain, and no group in a group
                assert isinstance(error, LookupError), number
            clock.fails = lambda reading: False
            assert now() <= 60 + 1.5 + GRACE, number
            states = {job.state for job in await jobs.find()}
            assert states <= {State.QUEUED, State.SUCCEEDED}, number

    trio.run(main, clock=MockClock(autojump_threshold=0))
    return clock.readings


def test_a_clock_that_fails_once_leaves_nothing_running_wherever_that_is() -> None:
    readings = fail_at(0)
    assert readings > 300

    for number in [*range(2, 60), *range(60, readings, 7)]:
        fail_at(number)


async def test_D2_a_clock_that_stays_broken_leaves_no_handler_running_when_its_lease_ends(
    autojump_clock: MockClock,
) -> None:
    """Nobody renews, and nobody sees that a lease ends."""
    cancelled_at: list[float] = []
    is_broken = False
    clock = FailingClock(lambda reading: is_broken)

    @nap.handled_by
    async def sleep(attempt: Attempt[float, None]) -> None:
        try:
            await trio.sleep_forever()
        finally:
            cancelled_at.append(now())

    async with trio_jobs.open_jobs(":memory:", clock=clock) as jobs:
        with pytest.RaisesGroup(LookupError):
            async with trio.open_nursery() as nursery:
                serve = partial(trio_jobs.serve, jobs, [sleep], lease=LEASE, grace=600)
                await nursery.start(serve)
                await jobs.enqueue(nap, 0.0)
                await trio.sleep(0.5)
                is_broken = True

    [at] = cancelled_at
    assert at < LEASE
