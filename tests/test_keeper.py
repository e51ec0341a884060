"""Leases are kept while handlers run, and handlers that pass a limit are stopped."""

from __future__ import annotations

import time
import types
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import trio
from stories import (
    Script,
    Trouble,
    abandon,
    at,
    eventually,
    finished,
    forever,
    instant,
    make_store,
    now,
    outcomes,
    row_of,
    serving,
    sleeps,
    stubborn,
)
from trio.testing import MockClock

import trio_jobs
from trio_jobs import (
    Attempt,
    Failure,
    Jobs,
    Kind,
    Retry,
    SqliteStore,
    State,
    StoreBusy,
    constant,
)
from trio_jobs._model import Claim, Fence, Instant
from trio_jobs.testing import EPOCH

plain = Kind("plain", None, retry=Retry(attempts=5, backoff=constant(500)))
HOUR = 3600.0


class Renewals(Trouble):
    """Notes for each renewal that succeeded how many leases it renewed, and until when."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.renewals: list[tuple[int, float]] = []

    def renew(self, fences: Sequence[Fence], until: Instant) -> Any:
        held = super().renew(fences, until)
        self.renewals.append((len(held), (until - instant(0)) / 1_000_000))
        return held


# Leases.


async def test_E1_a_job_ten_leases_long_is_started_once_and_its_lease_is_always_ahead(
    jobs: Jobs, autojump_clock: MockClock
) -> None:
    handle, another = Script(sleeps(10)), Script(sleeps(10))
    ahead: list[float] = []
    async with (
        serving(jobs, plain.handled_by(handle), lease=1),
        serving(jobs, plain.handled_by(another), lease=1),
    ):
        job = await jobs.enqueue(plain, None)
        await trio.sleep(0.01)
        while now() < 9.99:
            row = await row_of(jobs, job)
            assert row.lease_until is not None
            ahead.append((row.lease_until - instant(now())) / 1_000_000)
            await trio.sleep(0.05)
        [ended] = await finished(jobs, job)

    assert len(handle.starts) + len(another.starts) == 1
    assert (ended.state, ended.attempt) == (State.SUCCEEDED, 1)
    assert min(ahead) >= 1 / 3


async def test_E1_under_the_real_clock_also_when_the_work_is_done_in_threads(
    tmp_path: Path,
) -> None:
    # Not shorter: under a busy thread each step of a statement waits 5 ms for the GIL, and
    # several times as long where other processes want the processor too.
    lease, long, busy = 3.0, 6.0, 3.6
    starts: list[str] = []

    async def in_the_loop(attempt: Attempt[None, None]) -> None:
        starts.append(attempt.kind)
        await trio.sleep(long)

    async def in_a_thread(attempt: Attempt[None, None]) -> None:
        starts.append(attempt.kind)
        await trio.to_thread.run_sync(time.sleep, long)

    def compute() -> None:
        end = time.monotonic() + busy
        while time.monotonic() < end:
            pass

    async def in_a_busy_thread(attempt: Attempt[None, None]) -> None:
        starts.append(attempt.kind)
        await trio.to_thread.run_sync(compute)

    handlers = [
        Kind(name, None).handled_by(fn)
        for name, fn in [("loop", in_the_loop), ("thread", in_a_thread), ("busy", in_a_busy_thread)]
    ]
    ahead: list[float] = []
    async with (
        trio_jobs.open_jobs(tmp_path / "jobs.db") as jobs,
        serving(jobs, *handlers, lease=lease, grace=0),
        serving(jobs, *handlers, lease=lease, grace=0),
    ):
        enqueued = [await jobs.enqueue(Kind(name, None), None) for name in ("loop", "thread")]
        enqueued.append(await jobs.enqueue(Kind("busy", None), None))
        await eventually(lambda: len(starts) == 3)
        async with trio.open_nursery() as nursery:

            async def watch() -> None:
                while True:
                    for job in enqueued:
                        looked = time.time()
                        row = await row_of(jobs, job)
                        if row.lease_until is not None:
                            ahead.append(row.lease_until / 1_000_000 - looked)
                    await trio.sleep(0.1)

            nursery.start_soon(watch)
            ended = await finished(jobs, *enqueued, within=60)
            nursery.cancel_scope.cancel()

    assert sorted(starts) == ["busy", "loop", "thread"]
    assert [(job.state, job.attempt) for job in ended] == [(State.SUCCEEDED, 1)] * 3
    assert len(ahead) > 20
    # But for a hiccup of the machine.
    ahead.sort()
    assert ahead[len(ahead) // 20] >= lease / 3
    assert ahead[0] > 0


async def test_leases_are_renewed_every_third_of_their_length_and_not_after_the_end(
    autojump_clock: MockClock,
) -> None:
    store = Renewals(":memory:")
    async with (
        trio_jobs.open_jobs(store) as jobs,
        serving(jobs, plain.handled_by(Script(sleeps(90))), lease=60),
    ):
        job = await jobs.enqueue(plain, None)
        await finished(jobs, job)
        await trio.sleep(1000)

    assert store.renewals == [(1, 80), (1, 100), (1, 120), (1, 140)]


async def test_many_leases_are_renewed_in_one_transaction(autojump_clock: MockClock) -> None:
    """Those that are nearly due come along."""
    store = Renewals(":memory:")
    async with (
        trio_jobs.open_jobs(store) as jobs,
        serving(jobs, plain.handled_by(Script(sleeps(55))), lease=60),
    ):
        await jobs.enqueue_many(plain, [None] * 5)
        await trio.sleep(4)
        await jobs.enqueue_many(plain, [None] * 5)
        await trio.sleep(46)

    assert store.renewals == [(10, 80), (10, 100)]


async def test_a_renewal_that_fails_is_repeated_and_the_handler_does_not_notice(
    autojump_clock: MockClock,
) -> None:
    store = Renewals(":memory:")
    async with (
        trio_jobs.open_jobs(store) as jobs,
        serving(jobs, plain.handled_by(Script(sleeps(60))), lease=60) as runner,
    ):
        job = await jobs.enqueue(plain, None)
        store.rule = lambda step: StoreBusy("locked") if step == "renew" else None
        await trio.sleep(45)
        trouble = runner.statistics().trouble
        store.rule = lambda step: None
        [ended] = await finished(jobs, job)

    assert trouble is not None
    assert len(store.renewals) == 1
    assert (ended.state, ended.attempt) == (State.SUCCEEDED, 1)


@pytest.mark.parametrize("where", ["file", "apsw"])
async def test_a_runner_that_cannot_renew_stops_its_handler_before_anyone_else_may_start(
    where: str, tmp_path: Path, autojump_clock: MockClock
) -> None:
    """It stops at five sixths of the lease; a healthy one on the same file starts at the end."""
    sick = make_store(where, tmp_path, Trouble)
    healthy = make_store(where, tmp_path, SqliteStore)
    stopped: list[float] = []

    async def handle(attempt: Attempt[None, None]) -> None:
        try:
            await trio.sleep_forever()
        finally:
            stopped.append(now())

    taking_over = Script(None)
    async with (
        trio_jobs.open_jobs(sick) as mine,
        trio_jobs.open_jobs(healthy) as others,
        serving(mine, plain.handled_by(handle), lease=60, grace=0),
    ):
        job = await others.enqueue(plain, None)
        await trio.sleep(0.1)
        sick.rule = lambda step: StoreBusy("locked") if step == "begin" else None
        async with serving(others, plain.handled_by(taking_over)):
            [ended] = await finished(others, job, within=100)
        history = await outcomes(others, job)

    assert stopped == [50]
    assert taking_over.starts == [60]
    assert (ended.state, ended.attempt, history) == (State.SUCCEEDED, 2, ["lost"])


async def test_a_handler_that_was_fenced_off_is_tried_again_by_its_own_runner(
    autojump_clock: MockClock,
) -> None:
    """The store refuses renewals only: so the end can be written, and counts as lost."""
    store = Trouble(":memory:")
    handle = Script(forever, None)
    async with trio_jobs.open_jobs(store) as jobs:
        async with serving(jobs, plain.handled_by(handle), lease=60) as runner:
            job = await jobs.enqueue(plain, None)
            store.rule = lambda step: StoreBusy("locked") if step == "renew" else None
            [ended] = await finished(jobs, job)
            statistics = runner.statistics()
        [past] = await jobs.history(job)

    assert handle.starts == [0, 50]
    assert (past.outcome, past.failure) == ("lost", Failure("worker lost"))
    assert (ended.state, ended.attempt) == (State.SUCCEEDED, 2)
    assert (statistics.started, statistics.succeeded, statistics.lost) == (2, 1, 1)


async def test_after_a_blocked_loop_a_lease_that_nobody_took_is_simply_kept(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    store = Renewals(":memory:")

    async def block(attempt: Attempt[None, None]) -> None:
        await trio.sleep(1)
        autojump_clock.jump(200)  # as time.sleep would, for more than three leases
        await trio.sleep(10)

    async with trio_jobs.open_jobs(store) as jobs, serving(jobs, plain.handled_by(block), lease=60):
        job = await jobs.enqueue(plain, None)
        [ended] = await finished(jobs, job)
        ended_at = now()

    assert (ended.state, ended.attempt, ended_at) == (State.SUCCEEDED, 1, 211)
    assert store.renewals == [(1, 261)]
    assert "blocked for 1" in caplog.text


async def test_after_a_blocked_loop_a_handler_whose_row_was_taken_is_stopped_first(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    store = SqliteStore(":memory:")
    stopped: list[float] = []

    async def block(attempt: Attempt[None, None]) -> None:
        await trio.sleep(1)
        autojump_clock.jump(200)
        with store.transaction():  # another runner, while our loop is blocked
            store.claim(
                Claim(
                    policies={"plain": plain.policy},
                    limit=1,
                    lost_limit=1,
                    now=instant(150),
                    lease_now=instant(150),
                    lease_until=instant(1000),
                )
            )
        try:
            await trio.sleep(0.001)
        finally:
            stopped.append(now())

    async with trio_jobs.open_jobs(store) as jobs:
        async with serving(jobs, plain.handled_by(block), lease=60) as runner:
            job = await jobs.enqueue(plain, None)
            await trio.sleep(300)
            statistics = runner.statistics()
        row = await row_of(jobs, job)

    assert stopped == [201]
    assert (row.state, row.claims, row.lease_until) == (State.RUNNING, 2, instant(1000))
    assert (statistics.running, statistics.succeeded, statistics.lost) == (0, 0, 1)
    assert caplog.text.count("lost its lease") == 1


async def test_E6_runners_with_different_leases_on_one_file_leave_each_other_alone(
    jobs: Jobs, autojump_clock: MockClock
) -> None:
    """The row stores an instant, not a duration."""
    short, long = Kind("short", None), Kind("long", None)
    async with (
        serving(jobs, short.handled_by(Script(sleeps(100))), lease=0.5, poll=0.1),
        serving(jobs, long.handled_by(Script(sleeps(100))), lease=600, poll=10),
    ):
        enqueued = [await jobs.enqueue(short, None), await jobs.enqueue(long, None)]
        await trio.sleep(1)
        both = [short.handled_by(Script(None)), long.handled_by(Script(None))]
        async with serving(jobs, *both, lease=5), serving(jobs, *both, lease=0.5):
            ended = await finished(jobs, *enqueued)

    assert [(job.state, job.attempt) for job in ended] == [(State.SUCCEEDED, 1)] * 2


# Limits.

LIMITS = {"timeout": State.QUEUED, "deadline": State.FAILED}


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("late", [0, 0.002])
async def test_K7_an_end_at_the_instant_of_a_limit_counts_and_after_it_does_not(
    limit: str, late: float, jobs: Jobs, autojump_clock: MockClock
) -> None:
    slow = Kind(
        "slow",
        None,
        retry=Retry(backoff=constant(500)),
        timeout=5 if limit == "timeout" else None,
    )
    async with serving(jobs, slow.handled_by(Script(sleeps(5 + late)))):
        deadline = at(5) if limit == "deadline" else None
        job = await jobs.enqueue(slow, None, deadline=deadline)
        await trio.sleep(10)

    assert (await jobs.get(job)).state is (LIMITS[limit] if late else State.SUCCEEDED)


@pytest.mark.parametrize("limit", LIMITS)
async def test_K7_a_handler_is_stopped_one_millisecond_after_its_limit(
    limit: str, jobs: Jobs, autojump_clock: MockClock
) -> None:
    slow = Kind("slow", None, timeout=5 if limit == "timeout" else None)
    stopped: list[float] = []

    async def handle(attempt: Attempt[None, None]) -> None:
        try:
            await trio.sleep_forever()
        finally:
            stopped.append(now())

    async with serving(jobs, slow.handled_by(handle)):
        deadline = at(5) if limit == "deadline" else None
        await jobs.enqueue(slow, None, deadline=deadline)
        await trio.sleep(6)

    assert stopped[:1] == [5.001]


async def test_a_timeout_counts_from_the_start_and_a_new_one_for_every_attempt(
    jobs: Jobs, autojump_clock: MockClock
) -> None:
    slow = Kind("slow", None, retry=Retry(attempts=3, backoff=constant(7)), timeout=5)
    handle = Script(forever, sleeps(5))
    async with serving(jobs, slow.handled_by(handle), workers=1):
        first = await jobs.enqueue(slow, None)
        [ended] = await finished(jobs, first)

    assert handle.starts == [0, 12.001]
    assert (ended.state, now()) == (State.SUCCEEDED, 17.001)


async def test_each_of_many_handlers_is_stopped_at_its_own_limit(
    jobs: Jobs, autojump_clock: MockClock
) -> None:
    stopped: list[tuple[str, float]] = []

    async def handle(attempt: Attempt[None, None]) -> None:
        try:
            await trio.sleep_forever()
        finally:
            stopped.append((attempt.kind, now()))

    once = Retry(attempts=1)
    kinds = [Kind(f"of {timeout} s", None, timeout=timeout, retry=once) for timeout in (9, 3, 6, 1)]
    async with serving(jobs, *(kind.handled_by(handle) for kind in kinds)):
        for kind in kinds:
            await jobs.enqueue(kind, None)
            await trio.sleep(1)
        await jobs.enqueue(kinds[1], None)
        await trio.sleep(10)

    limits = [("of 3 s", 4.001), ("of 1 s", 4.001), ("of 3 s", 7.001), ("of 6 s", 8.001)]
    assert sorted(stopped) == sorted([*limits, ("of 9 s", 9.001)])
    assert [at for _, at in stopped] == sorted(at for _, at in stopped)


@pytest.mark.parametrize("limit", ["timeout", "deadline", "fence"])
async def test_a_handler_that_outlives_its_limit_does_not_make_the_runner_spin(
    limit: str, autojump_clock: MockClock
) -> None:
    """Virtual time would stand still for ever while a task of the runner is never idle."""
    store = Trouble(":memory:")
    if limit == "fence":
        store.rule = lambda step: StoreBusy("locked") if step == "renew" else None
    slow = Kind("slow", None, int, timeout=5 if limit == "timeout" else None)
    steps = Steps()
    trio.lowlevel.add_instrument(steps)
    async with (
        trio_jobs.open_jobs(store) as jobs,
        serving(jobs, slow.handled_by(Script(stubborn(100, 7))), lease=30),
    ):
        deadline = at(5) if limit == "deadline" else None
        job = await jobs.enqueue(slow, None, deadline=deadline)
        other = await jobs.enqueue(slow, None, delay=50)
        await jobs.cancel(other)
        await trio.sleep(99)
        assert steps.count < 1000
        [ended] = await finished(jobs, job)

    assert ended.state is (State.FAILED if limit == "deadline" else State.SUCCEEDED)
    trio.lowlevel.remove_instrument(steps)


class Steps(trio.abc.Instrument):
    """Counts how often a task ran."""

    def __init__(self) -> None:
        self.count = 0

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        self.count += 1


# A wall clock that is set.


class WallClock:
    """Unix time as somebody sets it, beside Trio's virtual clock."""

    def __init__(self) -> None:
        self.offset = 0.0

    def __call__(self) -> float:
        return EPOCH.timestamp() + trio.current_time() + self.offset

    def instant(self) -> int:
        return round(self() * 1_000_000)


@pytest.mark.parametrize("step", [-HOUR, HOUR], ids=["back", "forward"])
async def test_C1_a_wall_clock_set_by_an_hour_costs_two_polls_and_no_attempt(
    step: float, autojump_clock: MockClock
) -> None:
    clock = WallClock()
    handle, long = Script(None), Script(sleeps(300))
    slow = Kind("slow", None)
    async with (
        trio_jobs.open_jobs(":memory:", clock=clock) as jobs,
        serving(jobs, plain.handled_by(handle), slow.handled_by(long), lease=60),
    ):
        running = await jobs.enqueue(slow, None)
        delayed = await jobs.enqueue(plain, None, delay=HOUR / 2)
        await trio.sleep(10)
        clock.offset += step
        immediate = [await jobs.enqueue(plain, None) for _ in range(5)]
        await finished(jobs, *immediate, within=2)
        await trio.sleep(20)
        row = await row_of(jobs, running)
        [ended] = await finished(jobs, running, within=300)
        state = (await jobs.get(delayed)).state

    assert len(long.starts) == 1
    assert (ended.state, ended.attempt) == (State.SUCCEEDED, 1)
    assert row.lease_until is not None
    assert 0 < row.lease_until - instant(now_of(clock, 30)) <= 60_000_000
    assert state is (State.QUEUED if step < 0 else State.SUCCEEDED)
    assert ended.started_at is not None
    assert ended.finished_at is not None


def now_of(clock: WallClock, seconds: float) -> float:
    return seconds + clock.offset


async def test_C1_a_clock_set_back_while_claims_are_refused_stops_no_runner(
    autojump_clock: MockClock,
) -> None:
    """The wait after a refusal would last an hour longer."""
    clock = WallClock()
    store = Trouble(":memory:")
    handle = Script(None)
    async with (
        trio_jobs.open_jobs(store, clock=clock) as jobs,
        serving(jobs, plain.handled_by(handle)),
    ):
        job = await jobs.enqueue(plain, None, delay=1)
        store.rule = lambda step: StoreBusy("locked") if step == "claim" else None
        await trio.sleep(10)
        clock.offset -= HOUR
        store.rule = lambda step: None
        # Its due time is the wall clock's, so it is another that tells.
        [ended] = await finished(jobs, await jobs.enqueue(plain, None), within=10)
        waiting = await jobs.get(job)

    assert ended.state is State.SUCCEEDED
    assert waiting.state is State.QUEUED


async def test_C1_what_a_runner_leaves_behind_after_a_step_back_is_taken_up_within_two_leases(
    autojump_clock: MockClock,
) -> None:
    """The live job's next renewal, and every later claim, count from the new time."""
    clock = WallClock()
    store = Trouble(":memory:")
    handle = Script(forever, None)
    async with trio_jobs.open_jobs(store, clock=clock) as jobs:
        job = await jobs.enqueue(plain, None)
        async with serving(jobs, plain.handled_by(handle), lease=6, grace=0):
            await trio.sleep(10)
            clock.offset -= HOUR
            await trio.sleep(5)
            store.rule = lambda step: StoreBusy("killed") if step == "apply" else None
        store.rule = lambda step: None
        killed_at = now()
        async with serving(jobs, plain.handled_by(handle), lease=6):
            [ended] = await finished(jobs, job, within=100)

    assert (ended.state, ended.attempt) == (State.SUCCEEDED, 2)
    assert handle.starts[1] - killed_at <= 12


async def test_an_abandoned_row_is_taken_up_when_its_lease_ends_and_not_before(
    jobs: Jobs, autojump_clock: MockClock
) -> None:
    await jobs.enqueue(plain, None)
    [claimed] = await abandon(jobs, plain, lease=42)
    handle = Script(None)
    async with serving(jobs, plain.handled_by(handle)):
        [ended] = await finished(jobs, await jobs.get(claimed.row.id))

    assert handle.starts == [42]
    assert (ended.attempt, await outcomes(jobs, ended)) == (2, ["lost"])


@pytest.mark.parametrize("step", [-3600.0, 3600.0])
async def test_a_wall_clock_that_is_set_moves_no_timeout(
    step: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offset = 0.0
    monkeypatch.setattr(
        trio_jobs._clock, "time", types.SimpleNamespace(time=lambda: time.time() + offset)
    )
    late = Kind("late", None, timeout=0.3, retry=Retry(attempts=1))
    in_time = Kind("in time", None, int, timeout=300)

    @late.handled_by
    async def set_clock_and_sleep(attempt: Attempt[None, None]) -> None:
        nonlocal offset
        offset = step
        await trio.sleep_forever()

    @in_time.handled_by
    async def sleep_and_return(attempt: Attempt[None, int]) -> int:
        while not offset:  # noqa: ASYNC110
            await trio.sleep(0.01)
        await trio.sleep(0.1)
        return 7

    async with (
        trio_jobs.open_jobs(tmp_path / "jobs.db") as jobs,
        serving(jobs, set_clock_and_sleep, sleep_and_return),
    ):
        first = await jobs.enqueue(late, None)
        second = await jobs.enqueue(in_time, None)
        [timed_out, returned] = await finished(jobs, first, second, within=20)

    assert timed_out.failure == Failure("timed out")
    assert (returned.unwrap(), returned.attempt) == (7, 1)


async def test_a_wall_clock_that_is_set_while_nothing_runs_delays_no_timeout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The watchdog still sleeps until the limit of a job that has ended; after the step that is
    earlier than any new limit, so that these do not ring it."""
    offset = 0.0
    monkeypatch.setattr(
        trio_jobs._clock, "time", types.SimpleNamespace(time=lambda: time.time() + offset)
    )
    late = Kind("late", None, timeout=0.1, retry=Retry(attempts=1))

    async with (
        trio_jobs.open_jobs(tmp_path / "jobs.db") as jobs,
        serving(jobs, plain.handled_by(Script(None)), late.handled_by(Script(forever)), poll=0.1),
    ):
        await finished(jobs, await jobs.enqueue(plain, None))
        offset = HOUR
        [timed_out] = await finished(jobs, await jobs.enqueue(late, None), within=20)

    assert timed_out.failure == Failure("timed out")


async def test_a_lost_row_ends_at_its_deadline_also_while_no_worker_is_free_here(
    tmp_path: Path,
) -> None:
    """The end of a lease is no commit that a runner without a free worker would hear of."""
    busy, late = Kind("busy", None), Kind("late", None)
    async with trio_jobs.open_jobs(tmp_path / "jobs.db") as jobs:
        soon = datetime.now(UTC) + timedelta(seconds=0.4)
        lost = await jobs.enqueue(late, None, deadline=soon)
        await abandon(jobs, late, lease=0.5)
        with trio.move_on_after(20) as scope:
            async with serving(
                jobs, busy.handled_by(Script(sleeps(20))), workers=1, poll=0.1, grace=0
            ):
                await jobs.enqueue(busy, None)
                ended = await jobs.wait_finished(lost)
                scope.cancel()

    assert ended.failure == Failure("deadline")
