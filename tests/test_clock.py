"""The one clock: real, virtual or passed; holding virtual time; the alarm."""

from __future__ import annotations

import gc
import math
import time
import weakref
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import trio
import trio.testing
from trio.testing import MockClock

import trio_jobs
from trio_jobs import Jobs, Kind, State
from trio_jobs._clock import EPOCH, Alarm, Clock
from trio_jobs._instants import LATEST, MICROSECONDS, datetime_of, instant_of

HOUR = 3600 * MICROSECONDS


# Which clock it is.


def test_the_epoch_is_an_aware_datetime() -> None:
    assert datetime(2020, 1, 1, tzinfo=UTC) == EPOCH
    assert EPOCH.utcoffset() == timedelta(0)


async def test_without_a_mock_clock_it_is_unix_time() -> None:
    clock = Clock()

    before, now, after = time.time(), clock.now(), time.time()

    assert not clock.is_virtual
    assert before - 1e-6 <= now / MICROSECONDS <= after + 1e-6


async def test_under_a_mock_clock_it_starts_at_the_epoch_and_moves_with_trio(
    autojump_clock: MockClock,
) -> None:
    clock = Clock()

    first = clock.now()
    await trio.sleep(3600)

    assert clock.is_virtual
    assert datetime_of(first) == EPOCH
    assert clock.now() - first == HOUR


async def test_a_passed_clock_is_used_and_is_never_taken_for_a_virtual_one(
    autojump_clock: MockClock,
) -> None:
    clock = Clock(lambda: 1000.25)

    assert clock.now() == 1_000_250_000
    assert not clock.is_virtual


async def test_C4_a_stored_instant_is_unix_time_and_not_that_of_trio() -> None:
    async with trio_jobs.open_jobs(":memory:") as jobs:
        before = datetime.now(UTC)
        job = await jobs.enqueue(Kind("k", None), None, delay=2)
        after = datetime.now(UTC)

    rounding = timedelta(microseconds=1)
    assert before - rounding <= job.enqueued_at <= after + rounding
    assert job.run_at - job.enqueued_at == timedelta(seconds=2)


async def test_it_can_be_read_in_any_thread(autojump_clock: MockClock) -> None:
    clock = Clock()
    await trio.sleep(5)

    assert await trio.to_thread.run_sync(clock.now) == clock.now()


@pytest.mark.parametrize(
    ("instant", "real", "virtual"),
    [
        (None, 1.0, math.inf),
        (HOUR, 1.0, 3600),
        (MICROSECONDS // 4, 0.25, 0.25),
        (-HOUR, 0, 0),
        (LATEST, 1.0, 7980 * 365.2425 * 86_400),
    ],
    ids=["never", "an hour", "a quarter", "past", "year 9999"],
)
async def test_only_a_virtual_clock_sleeps_longer_than_a_poll(
    mock_clock: MockClock, instant: int | None, real: float, virtual: float
) -> None:
    start = EPOCH.timestamp()
    at = instant if instant in (None, LATEST) else instant_of(EPOCH, "now") + (instant or 0)
    passed = Clock(lambda: start + mock_clock.current_time())

    assert passed.trio_deadline(at, poll=1.0) == real
    assert Clock().trio_deadline(at, poll=1.0) == pytest.approx(virtual, rel=1e-3)


async def test_under_a_passed_clock_a_runner_looks_once_a_poll(
    autojump_clock: MockClock,
) -> None:
    # The clock jumps an hour ahead, and no timer of Trio's knows of it.
    offset = 0.0
    kind = Kind("k", None)

    @kind.handled_by
    async def done(attempt: trio_jobs.Attempt[None, None]) -> None:
        pass

    def clock() -> float:
        return 1e9 + offset

    async with trio_jobs.open_jobs(":memory:", clock=clock) as jobs, trio.open_nursery() as nursery:
        await nursery.start(trio_jobs.serve, jobs, [done])
        job = await jobs.enqueue(kind, None, delay=3600)
        await trio.sleep(10)
        state_before = (await jobs.get(job)).state
        offset = 3600.0
        jumped_at = trio.current_time()
        ended = await jobs.wait_finished(job)
        waited = trio.current_time() - jumped_at
        nursery.cancel_scope.cancel()

    assert state_before is State.QUEUED
    assert ended.state is State.SUCCEEDED
    assert waited <= 1
    assert ended.enqueued_at == datetime.fromtimestamp(1e9, UTC)


async def test_C1_after_a_clock_was_set_back_an_hour_a_new_job_starts_at_once(
    autojump_clock: MockClock,
) -> None:
    offset = 0.0
    kind = Kind("k", None)

    @kind.handled_by
    async def done(attempt: trio_jobs.Attempt[None, None]) -> None:
        pass

    def clock() -> float:
        return 1e9 + offset + autojump_clock.current_time()

    async with trio_jobs.open_jobs(":memory:", clock=clock) as jobs, trio.open_nursery() as nursery:
        await nursery.start(trio_jobs.serve, jobs, [done])
        await jobs.wait_finished(await jobs.enqueue(kind, None))
        offset = -3600.0
        job = await jobs.enqueue(kind, None)
        with trio.fail_after(2):
            ended = await jobs.wait_finished(job)
        nursery.cancel_scope.cancel()

    assert ended.state is State.SUCCEEDED
    assert ended.started_at is not None
    assert ended.finished_at is not None
    assert ended.enqueued_at <= ended.started_at <= ended.finished_at


@pytest.mark.parametrize("wrong", [5.0, "now", EPOCH])
async def test_a_clock_that_cannot_be_called_is_refused(wrong: Any) -> None:
    with pytest.raises(TypeError, match="clock must be a callable"):
        async with trio_jobs.open_jobs(":memory:", clock=wrong):
            pass


@pytest.mark.parametrize("wrong", [1e14, -1e14, 1.7e12, 10**30, math.inf, -math.inf, math.nan])
async def test_a_clock_that_gives_no_unix_seconds_is_named_by_who_reads_it(wrong: float) -> None:
    kind = Kind("k", None)
    seconds = 0.0
    async with trio_jobs.open_jobs(":memory:", clock=lambda: seconds) as jobs:
        await jobs.enqueue(kind, None)
        seconds = wrong
        with pytest.raises(ValueError, match=r"the clock given to open_jobs is wrong: -?[0-9in]"):
            await jobs.enqueue(kind, None)
        seconds = datetime(9999, 12, 31, tzinfo=UTC).timestamp()
        assert (await jobs.enqueue(kind, None)).enqueued_at.year == 9999


@pytest.mark.parametrize(
    ("wrong", "type"),
    [("1.5", "str"), (None, "NoneType"), (EPOCH, "datetime"), (1j, "complex"), ([1.5], "list")],
)
async def test_a_clock_that_gives_no_number_is_named_with_what_it_returned(
    wrong: Any, type: str
) -> None:
    kind = Kind("k", None)
    returned: Any = 0.0

    def wall_clock() -> Any:
        return returned

    async with trio_jobs.open_jobs(":memory:", clock=wall_clock) as jobs:
        await jobs.enqueue(kind, None)
        returned = wrong
        with pytest.raises(TypeError, match=f"given to open_jobs .*wall_clock returned {type},"):
            await jobs.enqueue(kind, None)
        returned = 1
        assert (await jobs.enqueue(kind, None)).id == 2


# Holding virtual time.


async def test_a_held_clock_does_not_jump_until_the_last_holder_lets_go(
    autojump_clock: MockClock,
) -> None:
    one, other = Clock(), Clock()
    autojump_clock.autojump_threshold = 0.125

    one.hold()
    one.hold()
    other.hold()
    held = autojump_clock.autojump_threshold
    one.release()
    other.release()
    still_held = autojump_clock.autojump_threshold
    one.release()

    assert held == still_held == math.inf
    assert autojump_clock.autojump_threshold == 0.125


async def test_a_clock_can_be_held_again_after_it_was_let_go(autojump_clock: MockClock) -> None:
    clock = Clock()

    for threshold in (0.0, 0.5, 0.0):
        autojump_clock.autojump_threshold = threshold
        clock.hold()
        assert autojump_clock.autojump_threshold == math.inf
        clock.release()
        assert autojump_clock.autojump_threshold == threshold


async def test_a_threshold_set_while_the_clock_is_held_is_kept(autojump_clock: MockClock) -> None:
    clock = Clock()

    clock.hold()
    autojump_clock.autojump_threshold = 0.25
    clock.release()

    assert autojump_clock.autojump_threshold == 0.25


async def test_a_clock_without_autojump_stays_without_it(mock_clock: MockClock) -> None:
    clock = Clock()

    clock.hold()
    clock.release()

    assert mock_clock.autojump_threshold == math.inf


async def test_holding_a_real_clock_does_nothing() -> None:
    clock = Clock()

    clock.hold()
    clock.release()

    assert not clock.is_virtual


def test_a_mock_clock_that_was_held_is_not_kept_alive() -> None:
    async def hold() -> None:
        clock = Clock()
        clock.hold()
        clock.release()

    mock = MockClock()
    trio.run(hold, clock=mock)
    reference = weakref.ref(mock)
    del mock
    gc.collect()

    assert reference() is None


async def test_a_passed_clock_holds_trio_s_virtual_time_too(autojump_clock: MockClock) -> None:
    # A sleep must not jump over a call that works in a thread, whoever tells the time.
    clock = Clock(time.time)

    clock.hold()
    held = autojump_clock.autojump_threshold
    clock.release()

    assert held == math.inf


async def test_virtual_time_does_not_pass_while_a_file_is_used(
    jobs: Jobs, autojump_clock: MockClock
) -> None:
    kind = Kind("k", int)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.sleep, 1e6)
        job = await jobs.enqueue(kind, 0)
        await jobs.enqueue_many(kind, range(100))
        await jobs.find(limit=1000)
        await jobs.counts()
        await jobs.history(job.id)
        await jobs.cancel(job.id)
        await jobs.retry(job.id)
        passed = trio.current_time()
        nursery.cancel_scope.cancel()

    assert passed == 0
    assert autojump_clock.autojump_threshold == 0


# The alarm.


async def slept(alarm: Alarm, instant: int | None, **kwargs: Any) -> tuple[float, bool]:
    """For how long, and whether it was the timer that ended it."""
    start = trio.current_time()
    was_timer = await alarm.wait(instant, **kwargs)
    return trio.current_time() - start, was_timer


async def test_an_alarm_sleeps_until_its_instant(autojump_clock: MockClock) -> None:
    clock = Clock()
    alarm = Alarm(clock, poll=1.0)

    assert await slept(alarm, clock.now() + HOUR) == (3600, True)
    assert await slept(alarm, clock.now()) == (0, True)
    assert await slept(alarm, clock.now() - HOUR) == (0, True)
    assert alarm.late == 0


async def test_a_bell_ends_the_sleep(autojump_clock: MockClock) -> None:
    alarm = Alarm(Clock(), poll=1.0)

    async def ring() -> None:
        await trio.sleep(7)
        alarm.ring()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ring)
        result = await slept(alarm, None)

    assert result == (7, False)
    assert alarm.late == 0


@pytest.mark.parametrize(
    ("until", "forward", "woken"),
    [(HOUR, HOUR // 2, True), (None, HOUR, True), (HOUR, HOUR, False), (HOUR, 2 * HOUR, False)],
)
async def test_only_an_earlier_instant_wakes_an_alarm(
    autojump_clock: MockClock, until: int | None, forward: int, woken: bool
) -> None:
    clock = Clock()
    alarm = Alarm(clock, poll=1.0)
    now = clock.now()

    async def bring_forward() -> None:
        await trio.sleep(1)
        alarm.bring_forward(now + forward)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(bring_forward)
        result = await slept(alarm, None if until is None else now + until)

    assert result == ((1, False) if woken else (3600, True))


async def test_an_alarm_that_rang_while_nobody_slept_does_not_wake_the_next_sleep(
    autojump_clock: MockClock,
) -> None:
    clock = Clock()
    alarm = Alarm(clock, poll=1.0)

    alarm.ring()

    assert await slept(alarm, clock.now() + HOUR) == (3600, True)


async def test_on_a_real_clock_an_alarm_sleeps_no_longer_than_a_poll_unless_it_is_idle(
    autojump_clock: MockClock,
) -> None:
    clock = Clock(lambda: 1e9)
    alarm = Alarm(clock, poll=1.0)
    later = clock.now() + HOUR

    assert await slept(alarm, later) == (1, True)
    assert await slept(alarm, None) == (1, True)
    assert await slept(alarm, later, idle=True) == (3600, True)


@pytest.mark.parametrize("rings", [False, True])
async def test_E3_an_alarm_says_how_late_its_sleeper_was_woken(
    mock_clock: MockClock, rings: bool
) -> None:
    clock = Clock()
    alarm = Alarm(clock, poll=1.0)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(alarm.wait, clock.now() + MICROSECONDS)
        await trio.testing.wait_all_tasks_blocked()
        if rings:
            alarm.ring()
        mock_clock.jump(31)  # the loop is blocked: nobody is woken meanwhile

    assert alarm.late == (31 if rings else 30)
