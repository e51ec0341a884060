"""Claiming ahead: for whom, how much, and what becomes of rows that wait behind a slow job."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Any

import pytest
import trio
from hypothesis import given, strategies as st
from stories import (
    Trouble,
    at,
    finished,
    now,
    outcomes,
    row_of,
    scheduling,
    second,
    serving,
    writer,
)
from trio.testing import MockClock

import trio_jobs
from trio_jobs import (
    Attempt,
    Failure,
    Job,
    Jobs,
    Kind,
    Retry,
    Runner,
    SqliteStore,
    State,
    StoreError,
)
from trio_jobs._ends import ENOUGH
from trio_jobs._model import Claim, Claimed
from trio_jobs._pace import MAX_AHEAD, NOTHING_AHEAD, PATIENCE, SHORT, Pace, ahead
from trio_jobs._workers import Workers

durations = st.integers(0, 10 * SHORT)


def pace_of(*took: int) -> Pace:
    pace = Pace()
    for duration in took:
        pace.took(duration)
    return pace


# What is short.


def test_a_kind_is_short_when_twenty_starts_were_and_not_before() -> None:
    paces = [pace_of(*[SHORT] * number) for number in (0, 19, 20, 200)]

    assert [pace.is_short for pace in paces] == [False, False, True, True]


def test_one_long_start_makes_a_kind_long_and_about_a_hundred_short_ones_make_up_for_it() -> None:
    pace = pace_of(*[0] * 20, 10 * SHORT)
    is_short_after = 0
    while not pace.is_short:
        pace.took(0)
        is_short_after += 1

    assert 50 < is_short_after < 150


@given(st.lists(durations, min_size=1, max_size=60))
def test_what_a_kind_takes_is_never_less_than_the_last_and_never_more_than_the_longest(
    took: list[int],
) -> None:
    pace = pace_of(*took)

    assert took[-1] <= pace.takes <= max(took)


def test_a_clock_that_was_set_does_no_lasting_harm() -> None:
    hour = 3_600_000_000
    back, forward = pace_of(*[SHORT] * 20, -hour), pace_of(*[SHORT] * 20, hour)
    for _ in range(1000):
        back.took(SHORT)
        forward.took(SHORT)

    assert (back.takes, forward.takes) == (SHORT, SHORT)
    assert ahead([("mail", pace_of(*[-hour] * 30))], 10).limit == MAX_AHEAD


# How much.


@given(
    st.lists(st.lists(durations, max_size=40), max_size=4),
    st.integers(0, 300),
)
def test_no_more_than_a_tenth_of_a_second_of_work_is_claimed_ahead(
    took: list[list[int]], workers: int
) -> None:
    paces = {f"kind {number}": pace_of(*some) for number, some in enumerate(took)}
    limit, kinds = ahead(paces.items(), workers)

    assert kinds == {name for name, pace in paces.items() if pace.is_short}
    assert 0 <= limit <= MAX_AHEAD
    for name in kinds:
        # With the rest of one under way it is the tenth.
        assert limit * paces[name].takes <= workers * (PATIENCE - SHORT)
    if not kinds:
        assert (limit, kinds) == NOTHING_AHEAD


# Stories. A job naps for as many seconds as its payload says.

NAP = 0.008  # eleven of them are a little less than a tenth of a second

quick = Kind("quick", float)
other = Kind("other", float)
fragile = Kind("fragile", float, on_interrupt="fail")


class Naps:
    """A handler that notes who was started when."""

    def __init__(self) -> None:
        self.starts: dict[int, float] = {}

    async def __call__(self, attempt: Attempt[float, None]) -> None:
        assert attempt.job_id not in self.starts
        self.starts[attempt.job_id] = now()
        await trio.sleep(attempt.payload)

    def order(self, jobs: Sequence[Job[Any]]) -> list[int]:
        ids = {job.id for job in jobs}
        return [id for id in self.starts if id in ids]


class Counted(SqliteStore):
    """Notes what claims took; a runner that claims without end fails its test."""

    def __init__(self) -> None:
        super().__init__(":memory:")
        self.claims = 0
        self.most_running = 0

    def claim(self, claim: Claim) -> Claimed:
        self.claims += 1
        assert self.claims < 1000, "it claims without end"
        claimed: Claimed = super().claim(claim)
        [(running,)] = writer(self).execute("SELECT count(*) FROM trio_jobs_job WHERE state = 2")
        self.most_running = max(self.most_running, running)
        return claimed


@pytest.fixture
def store() -> Counted:
    return Counted()


@pytest.fixture
async def jobs(store: Counted) -> AsyncIterator[Jobs]:
    async with trio_jobs.open_jobs(store) as opened:
        yield opened


async def seen_to_be_short(
    jobs: Jobs, *kinds: Kind[float, None], starts: int = 20, seconds: float = NAP
) -> None:
    for kind in kinds:
        await finished(jobs, *await jobs.enqueue_many(kind, [seconds] * starts))


async def running(jobs: Jobs) -> int:
    return (await jobs.counts())[State.RUNNING]


async def assert_no_trace(jobs: Jobs, given_back: Sequence[Job[Any]]) -> None:
    """They are as they were enqueued, but for `claims`."""
    for job in given_back:
        row = await row_of(jobs, job)
        assert (row.state, row.attempt, row.interruptions) == (State.QUEUED, 0, 0)
        assert (row.started_at, row.lease_until, row.failure) == (None, None, None)
        assert (await jobs.get(job)).run_at == job.run_at
        assert await jobs.history(job) == []


@pytest.mark.parametrize(("starts", "at_once"), [(19, 1), (20, 1 + 11)])
async def test_nothing_is_claimed_ahead_before_twenty_starts_were_seen(
    starts: int, at_once: int, jobs: Jobs, autojump_clock: MockClock
) -> None:
    async with serving(jobs, quick.handled_by(Naps()), workers=1):
        await seen_to_be_short(jobs, quick, starts=starts)
        await jobs.enqueue_many(quick, [NAP] * 50)
        await trio.sleep(0.001)

        assert await running(jobs) == at_once


@pytest.mark.parametrize(
    ("workers", "seconds", "most"),
    [(1, NAP, 1 + 11), (2, NAP, 2 + 22), (2, 0.0019, 2 + 94), (3, 0, 3 + 250), (300, 0, 250 + 250)],
)
async def test_what_is_claimed_ahead_is_a_tenth_of_a_second_of_work_at_most(
    workers: int, seconds: float, most: int, jobs: Jobs, store: Counted, autojump_clock: MockClock
) -> None:
    handle = Naps()
    async with serving(jobs, quick.handled_by(handle), workers=workers):
        await seen_to_be_short(jobs, quick, seconds=seconds)
        enqueued = await jobs.enqueue_many(quick, [seconds] * 600)
        ended = await finished(jobs, *enqueued)
        claims = {(await row_of(jobs, job)).claims for job in enqueued}

    waited = [handle.starts[job.id] - second(job.started_at) for job in ended]
    assert max(waited) < 0.1
    # Rows that have ended are gathered before they are written.
    assert most - 10 <= store.most_running <= most + (ENOUGH if seconds == 0 else 0)
    assert claims == {1}
    assert handle.order(enqueued) == [job.id for job in enqueued]


async def test_a_kind_that_must_not_be_interrupted_is_never_claimed_ahead(
    jobs: Jobs, store: Counted, autojump_clock: MockClock
) -> None:
    async with serving(jobs, fragile.handled_by(Naps()), workers=2):
        await seen_to_be_short(jobs, fragile, starts=100)

    assert store.most_running == 2


async def test_run_once_claims_nothing_ahead(
    jobs: Jobs, store: Counted, autojump_clock: MockClock
) -> None:
    await jobs.enqueue_many(quick, [0.001] * 60)

    assert await trio_jobs.run_once(jobs, [quick.handled_by(Naps())], workers=2) == 60
    assert store.most_running == 2


async def test_Q1_what_waits_behind_a_job_that_turns_out_slow_runs_elsewhere_and_shows_no_trace(
    jobs: Jobs, autojump_clock: MockClock
) -> None:
    here, elsewhere = Naps(), Naps()
    async with serving(jobs, quick.handled_by(here), workers=1):
        await seen_to_be_short(jobs, quick)
        start = now()
        slow = await jobs.enqueue(quick, 100)
        behind = await jobs.enqueue_many(quick, [NAP] * 3, priority=-1)
        behind += await jobs.enqueue_many(quick, [NAP] * 3, delay=0)
        await trio.sleep(0.09)
        waiting = await running(jobs)
        await trio.sleep(0.02)
        await assert_no_trace(jobs, behind)
        async with serving(jobs, quick.handled_by(elsewhere), workers=1):
            await finished(jobs, *behind, within=1)
        rows = [await row_of(jobs, job) for job in behind]

    assert waiting == 7
    assert here.starts[slow.id] == start
    assert elsewhere.order(behind) == [job.id for job in [*behind[3:], *behind[:3]]]
    assert {(row.claims, row.attempt) for row in rows} == {(2, 1)}


async def test_what_was_given_back_is_not_claimed_ahead_again_while_the_slow_one_runs(
    jobs: Jobs, store: Counted, autojump_clock: MockClock
) -> None:
    """Also not if its own kind still is a short one."""
    handle = Naps()
    async with serving(jobs, quick.handled_by(handle), other.handled_by(handle), workers=1):
        await seen_to_be_short(jobs, quick, other)
        await jobs.enqueue(quick, 100)
        behind = await jobs.enqueue_many(other, [NAP] * 5)
        await trio.sleep(50)
        await assert_no_trace(jobs, behind)
        claims = {(await row_of(jobs, job)).claims for job in behind}
        await finished(jobs, *behind)

    assert claims == {1}


@pytest.mark.parametrize("what", ["the same kind", "from outside"])
async def test_rows_that_wait_are_given_back_however_often_the_runner_is_woken(
    what: str, jobs: Jobs, autojump_clock: MockClock
) -> None:
    async with serving(jobs, quick.handled_by(Naps()), workers=1):
        await seen_to_be_short(jobs, quick)
        await jobs.enqueue(quick, 100)
        behind = await jobs.enqueue_many(quick, [NAP] * 2)
        for _ in range(4):
            await trio.sleep(0.03)
            if what == "the same kind":
                behind.append(await jobs.enqueue(quick, NAP))
            else:
                jobs._tell_unsure()

        await assert_no_trace(jobs, behind)


async def test_rows_that_wait_are_not_given_back_only_because_something_becomes_due(
    jobs: Jobs, autojump_clock: MockClock
) -> None:
    async with serving(jobs, quick.handled_by(Naps()), workers=1):
        await seen_to_be_short(jobs, quick)
        enqueued = await jobs.enqueue_many(quick, [NAP] * 3)
        for number in range(5):
            enqueued.append(await jobs.enqueue(quick, NAP, delay=0.002 * number))
        await finished(jobs, *enqueued)

        assert {(await row_of(jobs, job)).claims for job in enqueued} == {1}


async def test_a_due_row_that_may_not_be_claimed_ahead_is_not_asked_for_again_and_again(
    jobs: Jobs, store: Counted, autojump_clock: MockClock
) -> None:
    """It stands in the way of short ones, too: nothing overtakes it."""
    handle = Naps()
    async with serving(jobs, quick.handled_by(handle), other.handled_by(handle), workers=1):
        await seen_to_be_short(jobs, quick)
        before = store.claims
        enqueued = [
            await jobs.enqueue(kind, seconds)
            for kind, seconds in ((quick, NAP), (other, 5), (quick, NAP), (other, 5))
        ]
        await trio.sleep(0.005)
        waiting = await running(jobs)
        await finished(jobs, *enqueued)

    assert waiting == 1
    assert handle.order(enqueued) == [job.id for job in enqueued]
    assert store.claims < before + 20


async def test_workers_busy_with_long_jobs_do_not_count_for_what_is_claimed_ahead(
    jobs: Jobs, autojump_clock: MockClock
) -> None:
    async with serving(jobs, quick.handled_by(Naps()), other.handled_by(Naps()), workers=10):
        await seen_to_be_short(jobs, quick)
        await jobs.enqueue_many(other, [100] * 9)
        await trio.sleep(0.001)
        await jobs.enqueue_many(quick, [NAP] * 50)
        await trio.sleep(0.001)

        assert await running(jobs) == 10 + 11


async def test_while_the_store_refuses_ends_nothing_is_claimed_ahead(
    autojump_clock: MockClock,
) -> None:
    store, handle = Trouble(":memory:"), Naps()
    async with trio_jobs.open_jobs(store) as jobs:
        async with serving(jobs, quick.handled_by(handle), workers=2):
            await seen_to_be_short(jobs, quick)
            store.rule = lambda step: StoreError("disk I/O error") if step == "apply" else None
            await jobs.enqueue_many(quick, [NAP] * 100)
            await trio.sleep(30)
            started = len(handle.starts) - 20
            store.rule = lambda step: None
            await trio.sleep(10)
        counts = await jobs.counts()

    assert started <= 2 + 22
    assert counts[State.SUCCEEDED] == 120


async def test_order_is_kept_among_short_and_long_and_no_row_that_was_due_is_overtaken(
    jobs: Jobs, autojump_clock: MockClock
) -> None:
    handle, chance = Naps(), random.Random(1)
    async with serving(jobs, quick.handled_by(handle), other.handled_by(handle), workers=1):
        await seen_to_be_short(jobs, quick)
        await jobs.enqueue(quick, 1)
        await trio.sleep(0.2)  # gives back what waits
        await seen_to_be_short(jobs, quick, starts=100)
        await jobs.enqueue(other, 1)
        await trio.sleep(0.5)
        enqueued = [
            await jobs.enqueue(
                chance.choice([quick, quick, quick, other]), NAP, priority=chance.randrange(3)
            )
            for _ in range(60)
        ]
        await finished(jobs, *enqueued)

    in_order = sorted(enqueued, key=lambda job: (-job.priority, job.run_at, job.id))
    assert handle.order(enqueued) == [job.id for job in in_order]


async def test_two_runners_share_the_short_jobs(jobs: Jobs, autojump_clock: MockClock) -> None:
    here, there = Naps(), Naps()
    async with (
        serving(jobs, quick.handled_by(here), workers=3),
        serving(jobs, quick.handled_by(there), workers=3),
    ):
        await finished(jobs, *await jobs.enqueue_many(quick, [NAP] * 400))

    shares = sorted([len(here.starts), len(there.starts)])
    assert sum(shares) == 400
    assert shares[0] > 0.7 * 200


@pytest.mark.parametrize("how", ["fail", "a function"])
async def test_kinds_that_nobody_handles_are_claimed_ahead_like_any_other(
    how: str, jobs: Jobs, store: Counted, autojump_clock: MockClock
) -> None:
    taken: list[str] = []

    async def take(name: str, payload: bytes) -> None:
        taken.append(name)

    unhandled: Any = "fail" if how == "fail" else take
    async with serving(jobs, other.handled_by(Naps()), unhandled=unhandled, workers=2):
        await seen_to_be_short(jobs, quick)
        ended = await finished(jobs, *await jobs.enqueue_many(quick, [0.0] * 100))

    assert store.most_running == 100
    assert {(job.state, job.attempt) for job in ended} == {
        (State.FAILED if how == "fail" else State.SUCCEEDED, 1)
    }
    assert taken == ([] if how == "fail" else ["quick"] * 120)


def test_a_kind_that_is_adopted_while_a_claim_is_formed_does_not_disturb_it() -> None:
    """The writing thread looks at all paces, and at no moment of ours."""

    engine: Any = None
    workers = Workers(engine, 1, {"quick": quick.handled_by(Naps())}, lambda *_: None)
    looking = iter(workers._paces.items())
    workers.adopt([other.handled_by(Naps())])

    assert [name for name, _ in looking] == ["quick"]
    assert set(workers._paces) == {"quick", "other"}


# What waits, and is cancelled, or passes its deadline, or sees the runner stop.


async def test_a_row_that_waits_and_is_cancelled_or_late_is_not_started(
    jobs: Jobs, autojump_clock: MockClock
) -> None:
    handle = Naps()
    async with serving(jobs, quick.handled_by(handle), workers=1):
        await seen_to_be_short(jobs, quick)
        await jobs.enqueue(quick, NAP)
        cancelled = await jobs.enqueue(quick, NAP)
        late = await jobs.enqueue(quick, NAP, deadline=at(now() + 0.005))
        good = await jobs.enqueue(quick, NAP)
        await trio.sleep(0.001)
        waiting = await running(jobs)
        will_be = await jobs.cancel(cancelled)
        ended = await finished(jobs, cancelled, late, good, within=1)
        histories = [await outcomes(jobs, job) for job in ended]

    assert (waiting, will_be) == (4, True)
    assert [job.state for job in ended] == [State.CANCELLED, State.FAILED, State.SUCCEEDED]
    assert ended[1].failure == Failure("deadline")
    assert [job.attempt for job in ended] == [0, 0, 1]
    assert histories == [[], [], []]
    assert not {cancelled.id, late.id} & handle.starts.keys()


async def test_a_cancel_of_a_row_that_waits_behind_a_slow_one_takes_a_tenth_of_a_second(
    jobs: Jobs, autojump_clock: MockClock
) -> None:
    async with serving(jobs, quick.handled_by(Naps()), workers=1):
        await seen_to_be_short(jobs, quick)
        start = now()
        await jobs.enqueue(quick, 100)
        cancelled, late = [
            await jobs.enqueue(quick, NAP, deadline=deadline) for deadline in (None, at(start + 1))
        ]
        await trio.sleep(0.05)
        await jobs.cancel(cancelled)
        await finished(jobs, cancelled)
        cancelled_at = now()
        [ended] = await finished(jobs, late)

    assert cancelled_at == pytest.approx(start + 0.1)
    assert (ended.state, second(ended.finished_at)) == (State.FAILED, start + 1)


async def drain_behind(jobs: Jobs, seconds: float) -> tuple[Naps, list[Job[None]], float]:
    """Drain while some wait behind one of that length; when `serve` returned."""
    handle = Naps()
    async with trio.open_nursery() as nursery:
        serve = partial(trio_jobs.serve, jobs, [quick.handled_by(handle)], workers=1, lease=6)
        runner: Runner = await nursery.start(serve)
        await seen_to_be_short(jobs, quick)
        start = now()
        enqueued = await jobs.enqueue_many(quick, [seconds] + [NAP] * 5)
        await trio.sleep(0.001)
        assert await running(jobs) == 6
        runner.drain()
    return handle, enqueued, now() - start


async def test_a_drain_runs_what_was_claimed_ahead(jobs: Jobs, autojump_clock: MockClock) -> None:
    handle, enqueued, took = await drain_behind(jobs, NAP)

    assert handle.order(enqueued) == [job.id for job in enqueued]
    assert took == pytest.approx(6 * NAP)


async def test_a_drain_that_waits_for_a_slow_job_keeps_no_other_one_waiting(
    jobs: Jobs, autojump_clock: MockClock
) -> None:
    """Longer than their leases it would take them for lost."""
    handle, [slow, *behind], took = await drain_behind(jobs, 100)

    assert handle.order([slow, *behind]) == [slow.id]
    await assert_no_trace(jobs, behind)
    assert took == 100


@pytest.mark.parametrize("grace", [0, 5])
async def test_a_stop_gives_back_what_was_claimed_ahead(
    grace: float, jobs: Jobs, autojump_clock: MockClock
) -> None:
    async with trio.open_nursery() as nursery:
        serve = partial(trio_jobs.serve, jobs, [quick.handled_by(Naps())], workers=1, grace=grace)
        await nursery.start(serve)
        await seen_to_be_short(jobs, quick)
        start = now()
        _, *behind = await jobs.enqueue_many(quick, [1] + [NAP] * 5)
        await trio.sleep(0.001)
        assert await running(jobs) == 6
        nursery.cancel_scope.cancel()

    await assert_no_trace(jobs, behind)
    assert now() == pytest.approx(start + (0.001 if grace == 0 else 1))


# All of it, at random.


@pytest.mark.parametrize("seed", range(6))
def test_short_jobs_that_turn_slow_at_random_keep_none_waiting_for_long(seed: int) -> None:
    """Two runners; whoever waits for longer than a tenth of a second is given back."""

    async def main() -> None:
        handle = Naps()
        handlers = [kind.handled_by(handle) for kind in (quick, other, fragile)]
        async with trio_jobs.open_jobs(":memory:") as jobs:
            async with (
                serving(jobs, *handlers, workers=chance.randint(1, 3)),
                serving(jobs, *handlers, workers=chance.randint(1, 12)),
            ):
                enqueued: list[Job[None]] = []
                for _ in range(25):
                    kind = chance.choice([quick, quick, other, fragile])
                    naps = [chance.choice([0, 0.001, NAP]) for _ in range(chance.randrange(25))]
                    if chance.random() < 0.3:
                        naps.append(chance.choice([0.05, 0.3, 2]))
                    priority = chance.randrange(2)
                    enqueued += await jobs.enqueue_many(kind, naps, priority=priority)
                    await trio.sleep(chance.choice([0, 0.01, 0.1]))
                ended = await finished(jobs, *enqueued, within=1000)
            rows = [await row_of(jobs, job) for job in ended]
            histories = [await jobs.history(job) for job in ended]

        assert {(row.state, row.attempt, row.interruptions) for row in rows} <= {
            (State.SUCCEEDED, 1, 0)
        }
        assert not any(histories)
        waited = [handle.starts[job.id] - second(job.started_at) for job in ended]
        assert max(waited, default=0) <= 0.1 + 1e-6

    with scheduling(seed) as chance:
        trio.run(main, clock=MockClock(autojump_threshold=0))


async def test_what_is_on_its_last_attempt_is_never_claimed_ahead(
    jobs: Jobs, autojump_clock: MockClock
) -> None:
    """If its process died it would be dead without a start."""
    only_once = Kind("only once", float, retry=Retry(attempts=1))
    async with serving(jobs, only_once.handled_by(Naps()), workers=1):
        await seen_to_be_short(jobs, only_once)
        await jobs.enqueue_many(only_once, [NAP] * 50)
        await trio.sleep(0.001)

        assert await running(jobs) == 1
