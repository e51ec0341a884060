"""How long a failed job waits: the formulas, what is wrong with a backoff, and whole stories."""

from __future__ import annotations

import datetime
import logging
import math
from collections import Counter
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import pytest
import trio
from hypothesis import given, strategies as st
from msgspec.structs import replace
from trio.testing import MockClock

import trio_jobs
from trio_jobs import (
    Attempt,
    Fail,
    Handler,
    Job,
    Jobs,
    Kind,
    Retry,
    RetryLater,
    State,
    constant,
    exponential,
    quadratic,
)
from trio_jobs._model import Change
from trio_jobs._retry import DAY, MAX_BACKOFF

UTC = datetime.UTC


def first_waits(backoff: Callable[[int], float], number: int = 5) -> list[float]:
    return [backoff(attempt) for attempt in range(1, number + 1)]


def test_quadratic_grows_with_the_square_of_the_attempt_up_to_the_cap() -> None:
    assert first_waits(quadratic(5.0)) == [5, 20, 45, 80, 125]
    assert first_waits(quadratic(5.0, cap=30)) == [5, 20, 30, 30, 30]


def test_exponential_multiplies_by_the_factor_up_to_the_cap() -> None:
    assert first_waits(exponential(3)) == [3, 6, 12, 24, 48]
    assert first_waits(exponential(3, factor=10, cap=1000)) == [3, 30, 300, 1000, 1000]
    assert first_waits(exponential(8, factor=0.5)) == [8, 4, 2, 1, 0.5]


def test_constant_is_the_same_every_time() -> None:
    assert first_waits(constant(7), 3) == [7, 7, 7]


@pytest.mark.parametrize(
    ("backoff", "most"),
    [
        (exponential(1, cap=3600), 3600),
        (exponential(1, factor=10, cap=3600), 3600),
        (exponential(1), DAY),
        (exponential(1, factor=10), DAY),
        (exponential(1e300, factor=1e300, cap=1e308), MAX_BACKOFF),
        (exponential(0, factor=10), 0),
        (quadratic(5.0), DAY),
        (quadratic(1e308, cap=1e308), MAX_BACKOFF),
        (constant(1e308), MAX_BACKOFF),
    ],
    ids=lambda value: None if callable(value) else str(value),
)
def test_R1_no_backoff_overflows_or_passes_its_cap_at_attempt_5000(
    backoff: Callable[[int], float], most: float
) -> None:
    retry = Retry(attempts=10_000, backoff=backoff)

    waits = [retry.wait(1, attempt) for attempt in range(1, 5001)]

    assert all(0 <= wait <= most for wait in waits)
    assert waits[-1] == most


@pytest.mark.parametrize(
    "call",
    [
        lambda bad: quadratic(bad),
        lambda bad: quadratic(5, cap=bad),
        lambda bad: exponential(bad),
        lambda bad: exponential(5, factor=bad),
        lambda bad: exponential(5, cap=bad),
        lambda bad: constant(bad),
        lambda bad: Retry(jitter=bad),
    ],
    ids=["quadratic", "its cap", "exponential", "factor", "its cap", "constant", "jitter"],
)
@pytest.mark.parametrize("bad", [-1, math.nan, math.inf, -math.inf, 10**400, "5", None, True])
def test_seconds_that_cannot_be_are_refused_at_once(
    call: Callable[[object], object], bad: object
) -> None:
    with pytest.raises((ValueError, TypeError)):
        call(bad)


@pytest.mark.parametrize(
    ("settings", "error", "text"),
    [
        ({"attempts": 0}, ValueError, "attempts must be 1 or more"),
        ({"attempts": -3}, ValueError, "attempts must be 1 or more"),
        ({"attempts": 2.0}, TypeError, "attempts must be an int"),
        ({"attempts": math.inf}, TypeError, "attempts must be an int"),
        ({"attempts": True}, TypeError, "attempts must be an int"),
        ({"backoff": 5.0}, TypeError, "backoff must be a callable"),
        ({"jitter": -0.1}, ValueError, "jitter must be finite and 0 or more"),
    ],
)
def test_a_retry_that_cannot_work_is_refused_at_once(
    settings: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        Retry(**settings)


def test_the_default_waits_5_20_45_and_80_seconds() -> None:
    retry = Retry()

    assert retry.attempts == 5
    assert [retry.wait(1, attempt) for attempt in (1, 2, 3, 4)] == [5, 20, 45, 80]


def test_jitter_is_a_pure_function_of_job_and_attempt() -> None:
    retry = Retry(backoff=constant(60), jitter=0.5)

    waits = {(job, attempt): retry.wait(job, attempt) for job in range(50) for attempt in (1, 2)}

    assert {at: Retry(backoff=constant(60), jitter=0.5).wait(*at) for at in waits} == waits
    assert len(set(waits.values())) == len(waits)


def test_R2_jitter_spreads_1000_failures_of_one_second_evenly() -> None:
    retry = Retry(backoff=constant(60), jitter=0.5)

    waits = [retry.wait(job, 1) for job in range(1, 1001)]

    bins = Counter(math.floor(wait) for wait in waits)
    assert min(waits) >= 60
    assert max(waits) < 90
    assert max(waits) - min(waits) >= 6
    assert len(bins) == 30
    assert max(bins.values()) <= 2 * 1000 / 30


def raises(attempt: int) -> float:
    raise RuntimeError("no idea")


async def is_async(attempt: int) -> float:
    return 1.0


def leave(attempt: int) -> float:
    raise SystemExit(attempt)


NONSENSE: list[Any] = [
    raises,
    lambda: 1.0,
    lambda attempt: None,
    lambda attempt: "soon",
    lambda attempt: "7",
    lambda attempt: -1.0,
    lambda attempt: math.nan,
    lambda attempt: -math.inf,
    lambda attempt: datetime.timedelta(seconds=7),
    lambda attempt: [7],
    lambda attempt: Decimal("NaN"),
    leave,
]


@pytest.mark.parametrize("backoff", NONSENSE)
def test_a_backoff_that_raises_or_returns_nonsense_is_replaced_by_the_default(
    backoff: Any, caplog: pytest.LogCaptureFixture
) -> None:
    retry = Retry(backoff=backoff)

    waits = [retry.wait(9, attempt) for attempt in (1, 2, 3)]

    assert waits == [5, 20, 45]
    assert "backoff after attempt 3 of job 9" in caplog.messages[2]


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
def test_an_async_backoff_is_replaced_by_the_default() -> None:
    retry = Retry(backoff=is_async)  # type: ignore[arg-type]

    assert retry.wait(1, 1) == 5


@pytest.mark.parametrize("wait", [math.inf, 1e308, 10**400, 366 * DAY])
def test_no_wait_is_longer_than_365_days(wait: float) -> None:
    retry = Retry(backoff=lambda attempt: wait, jitter=1e300)

    assert retry.wait(1, 1) == MAX_BACKOFF == 365 * 86_400


@given(
    st.integers(1, 2**63 - 1),
    st.integers(1, 10**9),
    st.floats(0, 1e308),
    st.floats(0, 1e308),
)
def test_a_wait_is_always_a_finite_number_of_seconds_from_the_backoff_on(
    job_id: int, attempt: int, base: float, jitter: float
) -> None:
    wait = Retry(backoff=lambda attempt: base, jitter=jitter).wait(job_id, attempt)

    assert min(base, MAX_BACKOFF) <= wait <= MAX_BACKOFF


# Stories about time.


async def run_to_the_end(jobs: Jobs, handlers: list[Handler], job: Job[Any]) -> Job[Any]:
    async with trio.open_nursery() as nursery:
        await nursery.start(trio_jobs.serve, jobs, handlers)
        finished = await jobs.wait_finished(job)
        nursery.cancel_scope.cancel()
    return finished


async def test_a_job_that_always_fails_starts_after_5_20_45_and_80_seconds_and_is_dead(
    jobs: Jobs, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    kind = Kind("resize", str)
    starts: list[tuple[float, int]] = []

    @kind.handled_by
    async def fails(attempt: Attempt[str, None]) -> None:
        starts.append((trio.current_time(), attempt.number))
        raise Fail(f"no luck {attempt.number}")

    job = await jobs.enqueue(kind, "cat.jpg")
    ended = await run_to_the_end(jobs, [fails], job)

    assert starts == [(0, 1), (5, 2), (25, 3), (70, 4), (150, 5)]
    assert (ended.state, ended.attempt) == (State.DEAD, 5)
    assert ended.failure == trio_jobs.Failure("no luck 5", None)
    [warning] = [one for one in caplog.records if one.levelno == logging.WARNING]
    assert warning.getMessage() == f"job {job.id} (resize) is dead after 5 attempts: no luck 5"
    assert [(past.number, past.outcome) for past in await jobs.history(job.id)] == [
        (number, "failed") for number in (1, 2, 3, 4, 5)
    ]


async def test_a_job_that_fails_twice_shows_when_it_will_run_again(
    jobs: Jobs, autojump_clock: MockClock
) -> None:
    kind = Kind("flaky", None, int)

    @kind.handled_by
    async def succeeds_at_last(attempt: Attempt[None, int]) -> int:
        if attempt.number < 3:
            raise ValueError
        return attempt.number

    job = await jobs.enqueue(kind, None)
    async with trio.open_nursery() as nursery:
        await nursery.start(trio_jobs.serve, jobs, [succeeds_at_last])
        await trio.sleep(6)
        waiting = await jobs.get(job)
        ended = await jobs.wait_finished(job)
        nursery.cancel_scope.cancel()

    assert (waiting.state, waiting.attempt) == (State.QUEUED, 2)
    assert waiting.run_at - job.enqueued_at == datetime.timedelta(seconds=25)
    assert (ended.unwrap(), ended.attempt, ended.failure) == (3, 3, None)


@pytest.mark.parametrize("backoff", NONSENSE)
async def test_a_broken_backoff_does_not_hurt_the_job(
    autojump_clock: MockClock, backoff: Any
) -> None:
    kind = Kind("flaky", None, retry=Retry(attempts=3, backoff=backoff))
    starts: list[float] = []

    @kind.handled_by
    async def fails(attempt: Attempt[None, None]) -> None:
        starts.append(trio.current_time())
        raise Fail("no")

    async with trio_jobs.open_jobs(":memory:") as jobs:
        ended = await run_to_the_end(jobs, [fails], await jobs.enqueue(kind, None))

    assert starts == [0, 5, 25]
    assert ended.state is State.DEAD


async def test_R1_a_job_at_attempt_2000_is_queued_again(
    jobs: Jobs, autojump_clock: MockClock
) -> None:
    kind = Kind("endless", None, retry=Retry(attempts=5000, backoff=exponential(1, cap=60)))

    @kind.handled_by
    async def fails(attempt: Attempt[None, None]) -> None:
        raise Fail("no")

    job = await jobs.enqueue(kind, None)
    before = job._row
    await jobs._bridge.apply(Change(before=before, after=replace(before, attempt=1999)))
    await trio_jobs.run_once(jobs, [fails])

    found = await jobs.get(job)
    assert (found.state, found.attempt) == (State.QUEUED, 2000)
    assert found.run_at - job.enqueued_at == datetime.timedelta(seconds=60)


async def test_R2_1000_jobs_that_fail_at_one_instant_come_back_spread(
    autojump_clock: MockClock,
) -> None:
    kind = Kind("herd", None, retry=Retry(backoff=constant(60), jitter=0.5))

    @kind.handled_by
    async def fails(attempt: Attempt[None, None]) -> None:
        raise Fail("no")

    async with trio_jobs.open_jobs(":memory:") as jobs:
        await jobs.enqueue_many(kind, [None] * 1000)
        await trio_jobs.run_once(jobs, [fails], workers=100)
        waits = [
            (job.run_at - job.enqueued_at).total_seconds() for job in await jobs.find(limit=1000)
        ]

    bins = Counter(math.floor(wait) for wait in waits)
    assert len(waits) == 1000
    assert 60 <= min(waits) < max(waits) < 90
    assert len(bins) == 30
    assert max(bins.values()) <= 5 * 1000 / 30


async def test_retry_later_waits_as_told_and_uses_up_no_attempt(
    jobs: Jobs, autojump_clock: MockClock
) -> None:
    kind = Kind("patient", None, retry=Retry(attempts=1))
    starts: list[tuple[float, int]] = []

    @kind.handled_by
    async def waits(attempt: Attempt[None, None]) -> None:
        starts.append((trio.current_time(), attempt.number))
        if len(starts) < 8:
            raise RetryLater(100)

    ended = await run_to_the_end(jobs, [waits], await jobs.enqueue(kind, None))

    assert starts == [(100 * index, 1) for index in range(8)]
    assert (ended.state, ended.attempt) == (State.SUCCEEDED, 1)
    history = await jobs.history(ended.id)
    assert [(past.number, past.outcome, past.failure) for past in history] == (
        [(1, "retry later", None)] * 7
    )


async def test_retry_later_out_of_a_child_task_arrives_in_a_group_and_counts_the_same(
    jobs: Jobs, autojump_clock: MockClock
) -> None:
    kind = Kind("patient", None, retry=Retry(attempts=1))
    starts: list[float] = []

    async def child() -> None:
        if len(starts) < 3:
            raise RetryLater(50)

    @kind.handled_by
    async def waits(attempt: Attempt[None, None]) -> None:
        starts.append(trio.current_time())
        async with trio.open_nursery() as nursery:
            nursery.start_soon(child)
            nursery.start_soon(trio.sleep, 1)

    ended = await run_to_the_end(jobs, [waits], await jobs.enqueue(kind, None))

    assert starts == [0, 50, 100]
    assert ended.state is State.SUCCEEDED


async def test_a_year_of_retry_later_does_not_end_the_job(autojump_clock: MockClock) -> None:
    kind = Kind("yearly", None)
    starts: list[float] = []

    @kind.handled_by
    async def waits(attempt: Attempt[None, None]) -> None:
        starts.append(trio.current_time())
        if len(starts) < 3:
            raise RetryLater(365 * DAY)

    async with trio_jobs.open_jobs(":memory:") as jobs:
        ended = await run_to_the_end(jobs, [waits], await jobs.enqueue(kind, None))

    assert starts == [0, 365 * DAY, 730 * DAY]
    assert ended.state is State.SUCCEEDED


@pytest.mark.parametrize("bad", [-1, math.nan, math.inf, "5", None, True])
def test_retry_later_with_seconds_that_cannot_be_is_refused_where_it_is_written(bad: Any) -> None:
    with pytest.raises((ValueError, TypeError), match="seconds of a RetryLater"):
        RetryLater(bad)
