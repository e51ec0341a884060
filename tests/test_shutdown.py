"""Stopping is bounded, and leaves every row with its end or in the queue again."""

from __future__ import annotations

import contextlib
import logging
import sqlite3
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from stories import (
    STORES,
    TIMES,
    Script,
    Trouble,
    abandon,
    assert_no_transaction_is_open,
    at,
    eventually,
    finished,
    forever,
    instant,
    make_store,
    now,
    outcomes,
    row_of,
    scheduling,
    serving,
    sleeps,
    stubborn,
)
from trio.testing import MockClock

import trio_jobs
import trio_jobs._engine
from trio_jobs import (
    Attempt,
    Job,
    Jobs,
    Kind,
    Retry,
    Runner,
    SqliteStore,
    State,
    StoreBusy,
    StoreError,
)
from trio_jobs._model import Claim, Claimed

plain = Kind("plain", None)
number = Kind("number", int, int)


async def serve_for(
    seconds: float, jobs: Jobs, *handlers: trio_jobs.Handler, **settings: Any
) -> float:
    """Serve, cancel after so many seconds; how many seconds it took from then to return."""
    with trio.move_on_after(seconds):
        await trio_jobs.serve(jobs, handlers, **settings)
    return now() - seconds


# The bounds.


async def test_an_idle_runner_stops_at_once(jobs: Jobs, autojump_clock: MockClock) -> None:
    assert await serve_for(5, jobs, plain.handled_by(Script(None))) == 0


async def test_what_ends_within_the_grace_is_recorded_as_it_ended(
    jobs: Jobs, autojump_clock: MockClock
) -> None:
    kinds = [Kind(name, None, int) for name in ("returns", "raises", "later")]
    steps = [sleeps(8, 7), raises_after(9, ValueError()), raises_after(7, trio_jobs.RetryLater(1))]
    handlers = [kind.handled_by(Script(step)) for kind, step in zip(kinds, steps, strict=True)]
    enqueued = [await jobs.enqueue(kind, None) for kind in kinds]
    took = await serve_for(5, jobs, *handlers, grace=10)

    ended = [await jobs.get(job) for job in enqueued]
    assert took == 4
    assert [job.state for job in ended] == [State.SUCCEEDED, State.QUEUED, State.QUEUED]
    assert [job.attempt for job in ended] == [1, 1, 0]
    assert [await outcomes(jobs, job) for job in ended] == [[], ["failed"], ["retry later"]]


def raises_after(seconds: float, error: Exception) -> Callable[[Attempt[Any, Any]], Any]:
    async def step(attempt: Attempt[Any, Any]) -> None:
        await trio.sleep(seconds)
        raise error

    return step


@pytest.mark.parametrize("grace", [0, 0.5, 10])
async def test_when_the_grace_is_over_handlers_are_cancelled_and_handed_back(
    grace: float, jobs: Jobs, autojump_clock: MockClock
) -> None:
    job = await jobs.enqueue(plain, None)
    took = await serve_for(5, jobs, plain.handled_by(Script(forever)), grace=grace)

    row = await row_of(jobs, job)
    assert took == grace
    assert (row.state, row.attempt, row.interruptions) == (State.QUEUED, 0, 1)
    assert await outcomes(jobs, job) == ["interrupted"]


async def test_a_cancelled_handler_has_two_seconds_for_its_clean_up(
    jobs: Jobs, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    cleaned: list[float] = []

    async def handle(attempt: Attempt[int, int]) -> int:
        try:
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                await trio.sleep(1.9)
            cleaned.append(now())
        return 0

    job = await jobs.enqueue(number, 1)
    took = await serve_for(5, jobs, number.handled_by(handle), grace=3)

    assert cleaned == [9.9]
    assert took == pytest.approx(4.9)
    assert (await jobs.get(job)).state is State.QUEUED
    assert caplog.records == []


async def test_a_value_that_is_returned_during_the_clean_up_is_stored(
    jobs: Jobs, autojump_clock: MockClock
) -> None:
    async def handle(attempt: Attempt[int, int]) -> int:
        with trio.move_on_after(100):
            await trio.sleep_forever()
        return 7

    async def swallow(attempt: Attempt[None, None]) -> None:
        try:
            await trio.sleep_forever()
        except trio.Cancelled:
            pass

    enqueued: list[Job[Any]] = [await jobs.enqueue(number, 1), await jobs.enqueue(plain, None)]
    await serve_for(5, jobs, number.handled_by(handle), plain.handled_by(swallow), grace=1)

    states = [(await jobs.get(job)).state for job in enqueued]
    assert states == [State.QUEUED, State.SUCCEEDED]


@pytest.mark.parametrize("ending", ["returns", "raises", "notices the cancel"])
async def test_H3_a_handler_that_cannot_be_cancelled_is_waited_for_logged_and_kept(
    ending: str, jobs: Jobs, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """Its lease is renewed as long as it runs here, and its end is written like any other."""

    async def handle(attempt: Attempt[int, int]) -> int:
        with trio.CancelScope(shield=True):
            await trio.sleep(100)
        if ending == "raises":
            raise ValueError
        if ending == "notices the cancel":
            await trio.sleep_forever()
        return 7

    leases: list[float] = []

    async def watch() -> None:
        while True:
            await trio.sleep(1)
            row = await row_of(jobs, job)
            if row.lease_until is not None:
                leases.append((row.lease_until - instant(now())) / 1_000_000)

    job = await jobs.enqueue(number, 1)
    other = Script(7)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch)
        # Somebody else would take it up if its lease ended.
        async with serving(jobs, number.handled_by(other)) as another:
            another.drain()
            await trio.sleep(0.5)
            took = await serve_for(4.5, jobs, number.handled_by(handle), grace=3, lease=6)
        nursery.cancel_scope.cancel()

    row = await row_of(jobs, job)
    assert took == pytest.approx(95.5, abs=1)
    assert min(leases) >= 2
    assert row.state is (State.SUCCEEDED if ending == "returns" else State.QUEUED)
    assert await outcomes(jobs, job) == ([] if ending == "returns" else ["interrupted"])
    [record] = [one for one in caplog.records if one.levelno == logging.ERROR]
    assert f"job {job.id} (number)" in record.getMessage()
    assert "cannot be cancelled" in record.getMessage()


async def test_H3_the_log_names_it_after_the_grace_and_two_seconds(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[float] = []

    class Ear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.levelno == logging.ERROR:
                told.append(now())

    logger, ear = logging.getLogger("trio_jobs"), Ear()
    logger.addHandler(ear)
    try:
        async with trio_jobs.open_jobs(":memory:") as jobs:
            await jobs.enqueue(plain, None)
            await serve_for(5, jobs, plain.handled_by(Script(stubborn(50))), grace=3)
    finally:
        logger.removeHandler(ear)

    assert told == [10]


async def test_the_others_are_handed_back_while_one_cannot_be_cancelled(
    jobs: Jobs, autojump_clock: MockClock
) -> None:
    stuck, good = Kind("stuck", None), Script(forever)
    await jobs.enqueue(stuck, None)
    job = await jobs.enqueue(plain, None)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(
            partial(
                serve_for, 5, jobs, stuck.handled_by(Script(stubborn(90))), plain.handled_by(good)
            )
        )
        await trio.sleep(5 + 10 + 0.5)
        state = (await jobs.get(job)).state
        another = Script(None)
        async with serving(jobs, plain.handled_by(another)):
            await finished(jobs, job, within=1)

    assert state is State.QUEUED
    assert another.starts == [15.5]


@pytest.mark.parametrize("error", [StoreBusy("locked"), StoreError("disk I/O error")], ids=repr)
async def test_final_writes_have_two_seconds_then_the_lease_has_to_end(
    error: StoreError, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    store = Trouble(":memory:")
    async with trio_jobs.open_jobs(store) as jobs:
        job = await jobs.enqueue(plain, None)

        def refuse_ends(step: str) -> StoreError | None:
            return error if step == "apply" else None

        async with trio.open_nursery() as nursery:
            nursery.start_soon(
                partial(serve_for, 5, jobs, plain.handled_by(Script(forever)), grace=1, lease=60)
            )
            await trio.sleep(4)
            store.rule = refuse_ends
        stopped_at = now()
        row = await row_of(jobs, job)
        store.rule = lambda step: None
        handle = Script(None)
        async with serving(jobs, plain.handled_by(handle)):
            [ended] = await finished(jobs, job)

    assert stopped_at == 5 + 1 + 2
    assert row.state is State.RUNNING
    assert "could not be written in time" in caplog.text
    assert (handle.starts, ended.attempt) == ([60], 2)


async def test_final_writes_have_two_seconds_also_after_a_handler_that_could_not_be_cancelled(
    autojump_clock: MockClock,
) -> None:
    store = Trouble(":memory:")
    async with trio_jobs.open_jobs(store) as jobs:
        await jobs.enqueue(plain, None)
        async with trio.open_nursery() as nursery:
            stuck = plain.handled_by(Script(stubborn(100)))
            nursery.start_soon(partial(serve_for, 5, jobs, stuck, grace=1, lease=60))
            await trio.sleep(50)
            store.rule = lambda step: StoreBusy("locked") if step == "apply" else None

    assert now() == 102


async def test_final_writes_that_succeed_late_but_in_time_are_all_stored(
    autojump_clock: MockClock,
) -> None:
    store = Trouble(":memory:")
    async with trio_jobs.open_jobs(store) as jobs:
        returned = await jobs.enqueue(number, 1)
        interrupted = await jobs.enqueue(plain, None)
        handlers = [number.handled_by(Script(sleeps(5.5, 7))), plain.handled_by(Script(forever))]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(serve_for, 5, jobs, *handlers, grace=1))
            await trio.sleep(4)
            store.rule = lambda step: StoreBusy("locked") if step == "begin" else None
            await trio.sleep(3)
            store.rule = lambda step: None
        states = [(await jobs.get(job)).state for job in (returned, interrupted)]

    assert states == [State.SUCCEEDED, State.QUEUED]
    assert now() <= 8


# No new claims.


async def test_no_job_starts_after_the_stop_was_asked_for(
    jobs: Jobs, autojump_clock: MockClock
) -> None:
    handle = Script(sleeps(8))
    enqueued = await jobs.enqueue_many(plain, [None] * 10)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(serve_for, 5, jobs, plain.handled_by(handle), workers=4))
        await trio.sleep(6)
        enqueued.append(await jobs.enqueue(plain, None))

    rows = [await row_of(jobs, job) for job in enqueued]
    assert handle.starts == [0] * 4
    assert [row.state for row in rows] == [State.SUCCEEDED] * 4 + [State.QUEUED] * 7
    assert [(row.attempt, row.claims) for row in rows[4:]] == [(0, 0)] * 7
    assert now() == 8


class SlowClaim(SqliteStore):
    """A claim that gets something waits with its answer until it may go on."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.is_waiting = threading.Event()
        self.may_go_on = threading.Event()

    def claim(self, claim: Claim) -> Claimed:
        claimed = super().claim(claim)
        if claimed.jobs and not self.is_waiting.is_set():
            self.is_waiting.set()
            assert self.may_go_on.wait(30)
        return claimed


@pytest.mark.parametrize("where", ["file", "apsw"])
async def test_a_claim_under_way_at_the_stop_is_handed_back_without_a_trace_but_claims(
    where: str, tmp_path: Path
) -> None:
    """Under the real clock: the claim is inside its transaction when the stop comes."""
    store = make_store(where, tmp_path, SlowClaim)
    handle = Script(None)
    async with trio_jobs.open_jobs(store) as jobs:
        enqueued = await jobs.enqueue_many(plain, [None] * 3, priority=4)
        await stop_in_the_middle_of_a_claim(jobs, store, handle)
        rows = [await row_of(jobs, job) for job in enqueued]
        histories = [await jobs.history(job) for job in enqueued]

    assert handle.starts == []
    for row, job in zip(rows, enqueued, strict=True):
        assert (row.state, row.claims, row.attempt, row.interruptions) == (State.QUEUED, 1, 0, 0)
        assert (row.started_at, row.lease_until, row.priority) == (None, None, 4)
        assert row.run_at == job._row.run_at
    assert histories == [[]] * 3


@pytest.mark.parametrize("where", ["file", "apsw"])
async def test_a_lost_job_that_was_claimed_at_the_stop_has_lost_that_one_attempt_only(
    where: str, tmp_path: Path
) -> None:
    store = make_store(where, tmp_path, SlowClaim)
    handle = Script(None)
    async with trio_jobs.open_jobs(store) as jobs:
        job = await jobs.enqueue(plain, None)
        store.is_waiting.set()  # not in this claim
        await abandon(jobs, plain)
        store.is_waiting.clear()
        await stop_in_the_middle_of_a_claim(jobs, store, handle)
        row = await row_of(jobs, job)
        history = await outcomes(jobs, job)

    assert handle.starts == []
    assert (row.state, row.claims, row.attempt, row.lease_until) == (State.QUEUED, 2, 1, None)
    assert history == ["lost"]


async def stop_in_the_middle_of_a_claim(jobs: Jobs, store: SlowClaim, handle: Script) -> None:
    async with trio.open_nursery() as nursery:
        await nursery.start(partial(trio_jobs.serve, jobs, [plain.handled_by(handle)]))
        await eventually(store.is_waiting.is_set)
        nursery.cancel_scope.cancel()
        # A claim that is answered in the very tick of the cancellation may still come first.
        with trio.CancelScope(shield=True):
            await trio.testing.wait_all_tasks_blocked()
        store.may_go_on.set()


@pytest.mark.parametrize("where", ["file", "apsw"])
async def test_a_claim_that_is_answered_after_the_runner_gave_up_is_handed_back(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file was locked for longer than the stop may take."""
    monkeypatch.setattr(trio_jobs._engine, "FINAL_WRITES", 0.05)
    store = make_store(where, tmp_path, SlowClaim)
    handle = Script(None)
    async with trio_jobs.open_jobs(store) as jobs:
        job = await jobs.enqueue(plain, None)
        async with trio.open_nursery() as nursery:
            serve = partial(trio_jobs.serve, jobs, [plain.handled_by(handle)], grace=0)
            await nursery.start(serve)
            await eventually(store.is_waiting.is_set)
            nursery.cancel_scope.cancel()
        store.may_go_on.set()
        await trio_jobs.testing.settled()
        row = await row_of(jobs, job)
        async with serving(jobs, plain.handled_by(handle)):
            [ended] = await finished(jobs, job, within=10)

    assert (row.state, row.claims, row.attempt) == (State.QUEUED, 1, 0)
    assert (ended.state, ended.attempt) == (State.SUCCEEDED, 1)


async def test_a_poller_that_was_looking_around_at_the_stop_claims_no_more(tmp_path: Path) -> None:
    """So that no transaction of a runner is under way when `run_once` has returned."""
    store = Trouble(tmp_path / "jobs.db")
    is_looking, may_go_on = threading.Event(), threading.Event()
    claims: list[str] = []

    def hold_the_look(step: str) -> None:
        if step == "queued_kinds":
            is_looking.set()
            assert may_go_on.wait(30)
        if step == "claim":
            claims.append(step)

    store.rule = hold_the_look
    async with trio_jobs.open_jobs(store) as jobs:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio_jobs.run_once, jobs, [plain.handled_by(Script(None))])
            await eventually(is_looking.is_set)
            nursery.cancel_scope.cancel()
            with trio.CancelScope(shield=True):
                await trio.testing.wait_all_tasks_blocked(0.01)
            may_go_on.set()
        await trio_jobs.testing.settled()

    assert claims == []


# Draining.


async def test_drain_finishes_what_is_in_hand_claims_no_more_and_returns(
    jobs: Jobs, autojump_clock: MockClock
) -> None:
    handle = Script(sleeps(100))
    enqueued = await jobs.enqueue_many(plain, [None] * 5)
    async with trio.open_nursery() as nursery:
        serve = partial(trio_jobs.serve, jobs, [plain.handled_by(handle)], workers=2, grace=1)
        runner: Runner = await nursery.start(serve)
        await trio.sleep(5)
        runner.drain()
        runner.drain()
        enqueued.append(await jobs.enqueue(plain, None))

    states = [(await jobs.get(job)).state for job in enqueued]
    assert states == [State.SUCCEEDED] * 2 + [State.QUEUED] * 4
    assert now() == 100
    runner.drain()
    assert runner.statistics().succeeded == 2


async def test_an_idle_runner_drains_at_once(jobs: Jobs, autojump_clock: MockClock) -> None:
    async with trio.open_nursery() as nursery:
        runner: Runner = await nursery.start(
            trio_jobs.serve, jobs, [plain.handled_by(Script(None))]
        )
        await trio.sleep(5)
        runner.drain()

    assert now() == 5


async def test_a_cancel_on_top_of_a_drain_brings_the_grace(
    jobs: Jobs, autojump_clock: MockClock
) -> None:
    job = await jobs.enqueue(plain, None)
    async with trio.open_nursery() as nursery:
        serve = partial(trio_jobs.serve, jobs, [plain.handled_by(Script(forever))], grace=3)
        runner: Runner = await nursery.start(serve)
        await trio.sleep(5)
        runner.drain()
        await trio.sleep(100)
        nursery.cancel_scope.cancel()

    assert now() == 108
    assert (await jobs.get(job)).state is State.QUEUED


async def test_limits_and_cancels_go_on_while_a_runner_drains(
    jobs: Jobs, autojump_clock: MockClock
) -> None:
    slow = Kind("slow", None, timeout=50, retry=Retry(attempts=1))
    timed_out = await jobs.enqueue(slow, None)
    cancelled = await jobs.enqueue(plain, None)
    expired = await jobs.enqueue(plain, None, deadline=at(60))
    handlers = [plain.handled_by(Script(forever)), slow.handled_by(Script(forever))]
    async with trio.open_nursery() as nursery:
        runner: Runner = await nursery.start(trio_jobs.serve, jobs, handlers)
        await trio.sleep(5)
        runner.drain()
        await trio.sleep(25)
        await jobs.cancel(cancelled)

    ended = [await jobs.get(job) for job in (timed_out, cancelled, expired)]
    assert [job.state for job in ended] == [State.DEAD, State.CANCELLED, State.FAILED]
    assert now() == 60.001


# Nested, and cancelled at odd moments.


async def test_serve_that_is_cancelled_before_it_starts_takes_nothing(
    jobs: Jobs, autojump_clock: MockClock
) -> None:
    handle = Script(None)
    job = await jobs.enqueue(plain, None)
    with trio.CancelScope() as scope:
        scope.cancel()
        await trio_jobs.serve(jobs, [plain.handled_by(handle)])
    async with trio.open_nursery() as nursery:
        nursery.cancel_scope.cancel()
        nursery.start_soon(trio_jobs.serve, jobs, [plain.handled_by(handle)])

    assert scope.cancelled_caught
    assert handle.starts == []
    assert ((await jobs.get(job)).state, now()) == (State.QUEUED, 0)


async def test_a_nursery_that_crashes_stops_the_runner_in_order(
    jobs: Jobs, autojump_clock: MockClock
) -> None:
    """Handlers under way have their grace, and the crash is what is raised."""
    quick, slow = Script(sleeps(8)), Script(forever)
    kinds = Kind("quick", None), Kind("slow", None)
    enqueued = [await jobs.enqueue(kind, None) for kind in kinds]

    async def crash() -> None:
        await trio.sleep(5)
        raise OSError("the application has a bug")

    with pytest.RaisesGroup(pytest.RaisesExc(OSError, match="has a bug")):
        async with trio.open_nursery() as nursery:
            handlers = [kinds[0].handled_by(quick), kinds[1].handled_by(slow)]
            await nursery.start(trio_jobs.serve, jobs, handlers)
            nursery.start_soon(crash)

    states = [(await jobs.get(job)).state for job in enqueued]
    assert states == [State.SUCCEEDED, State.QUEUED]
    assert now() == 15


async def test_an_outer_shield_keeps_the_runner_until_its_own_scope_is_cancelled(
    jobs: Jobs, autojump_clock: MockClock
) -> None:
    handle = Script(None)
    with trio.move_on_after(5):
        with trio.CancelScope(shield=True) as inner:
            async with trio.open_nursery() as nursery:
                await nursery.start(trio_jobs.serve, jobs, [plain.handled_by(handle)])
                await trio.sleep(10)
                await finished(jobs, await jobs.enqueue(plain, None))
                inner.cancel()

    assert handle.starts == [10]


async def test_a_runner_can_be_started_again_on_the_same_Jobs(
    jobs: Jobs, autojump_clock: MockClock
) -> None:
    job = await jobs.enqueue(plain, None)
    handle = Script(forever, forever, None)
    for _ in range(2):
        await serve_for(5, jobs, plain.handled_by(handle), grace=0)
        await trio.sleep(-now() % 5)
    async with serving(jobs, plain.handled_by(handle)):
        [ended] = await finished(jobs, job)

    assert (ended.state, ended.attempt) == (State.SUCCEEDED, 1)


# D3: the stop comes in the instant of completion.


@pytest.mark.parametrize("where", STORES)
def test_D3_handlers_released_in_the_tick_of_the_stop_are_stored_or_handed_back(
    where: str, tmp_path: Path
) -> None:
    """20 handlers, and many an order in which the tasks may run."""
    seen: set[int] = set()

    async def main(seed: int) -> None:
        store = make_store(where, folder, SqliteStore)
        release = trio.Event()
        returned: list[int] = []

        async def handle(attempt: Attempt[int, int]) -> int:
            await release.wait()
            for _ in range(attempt.payload % 3):
                await trio.lowlevel.checkpoint()
            returned.append(attempt.job_id)
            return attempt.payload

        async with trio_jobs.open_jobs(store) as jobs:
            enqueued = await jobs.enqueue_many(number, range(20))
            async with trio.open_nursery() as nursery:
                serve = partial(
                    trio_jobs.serve, jobs, [number.handled_by(handle)], workers=20, grace=0
                )
                runner: Runner = await nursery.start(serve)
                await eventually(lambda: runner.statistics().running == 20)
                release.set()
                for _ in range(chance.randrange(5)):
                    await trio.lowlevel.checkpoint()
                nursery.cancel_scope.cancel()
            rows = [await row_of(jobs, job) for job in enqueued]
            assert_no_transaction_is_open(store)

        stored = {row.id for row in rows if row.state is State.SUCCEEDED}
        assert (seed, stored) == (seed, set(returned))
        others = {(row.state, row.attempt) for row in rows if row.id not in stored}
        assert others <= {(State.QUEUED, 0)}
        seen.add(len(stored))

    enough = (50 if where == "memory" else 30) * TIMES
    for seed in range(10 * enough):
        folder = tmp_path / str(seed)
        folder.mkdir()
        with scheduling(seed) as chance:
            trio.run(main, seed, clock=MockClock(autojump_threshold=0))
        if seed + 1 >= enough and len(seen) > 2:  # most stops come when all is stored
            break
    assert len(seen) > 2


class SlowCommit(SqliteStore):
    """The commit of an end or a claim waits until it may go on."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.armed = ""
        self.is_waiting = threading.Event()
        self.may_go_on = threading.Event()

    def apply(self, changes: Any) -> Any:
        refused = super().apply(changes)
        self._wait_after("apply")
        return refused

    def claim(self, claim: Claim) -> Claimed:
        claimed = super().claim(claim)
        self._wait_after("claim")
        return claimed

    def _wait_after(self, verb: str) -> None:
        if self.armed == verb:
            self.armed = ""
            self.is_waiting.set()
            assert self.may_go_on.wait(30)


@pytest.mark.parametrize("where", ["file", "apsw"])
@pytest.mark.parametrize("grace", [0, 5])
async def test_D3_a_stop_in_the_middle_of_a_commit_loses_no_end(
    where: str, grace: float, tmp_path: Path
) -> None:
    """Under the real clock: 20 handlers returned, and their ends are being written."""
    store = make_store(where, tmp_path, SlowCommit)
    release = trio.Event()

    async def handle(attempt: Attempt[int, int]) -> int:
        await release.wait()
        return attempt.payload

    async with trio_jobs.open_jobs(store) as jobs:
        enqueued = await jobs.enqueue_many(number, range(20))
        async with trio.open_nursery() as nursery:
            serve = partial(
                trio_jobs.serve, jobs, [number.handled_by(handle)], workers=20, grace=grace
            )
            runner: Runner = await nursery.start(serve)
            await eventually(lambda: runner.statistics().running == 20)
            store.armed = "apply"
            release.set()
            await eventually(store.is_waiting.is_set)
            nursery.cancel_scope.cancel()
            store.may_go_on.set()
        states = {(await jobs.get(job)).state for job in enqueued}
        assert_no_transaction_is_open(store)

    assert states == {State.SUCCEEDED}


@pytest.mark.parametrize("stop", ["drain", "cancel"])
async def test_a_jobs_that_closes_while_the_last_claim_is_written_does_not_hold_up_the_stop(
    stop: str, tmp_path: Path
) -> None:
    """The block of open_jobs ends while serve lives in a nursery around it."""
    store = SlowCommit(tmp_path / "jobs.db")
    is_over = trio.Event()
    handler = plain.handled_by(Script(None))

    async def serve(jobs: Jobs, task_status: trio.TaskStatus[Runner]) -> None:
        try:
            await trio_jobs.serve(jobs, [handler], grace=600, task_status=task_status)
        finally:
            is_over.set()

    async with trio.open_nursery() as nursery:
        async with trio_jobs.open_jobs(store) as jobs:
            runner: Runner = await nursery.start(serve, jobs)
            store.armed = "claim"
            nursery.start_soon(jobs.enqueue, plain, None)
            await eventually(store.is_waiting.is_set)
            if stop == "drain":
                runner.drain()
            else:
                nursery.cancel_scope.cancel()
                with trio.CancelScope(shield=True):
                    await trio.testing.wait_all_tasks_blocked()
            trio.lowlevel.current_trio_token().run_sync_soon(store.may_go_on.set)
        with trio.move_on_after(10, shield=True) as patience:
            await is_over.wait()
        runner._engine.progress()  # it would sleep for ever

    assert not patience.cancelled_caught


# Ctrl-C, wherever it hits.


def test_B1_a_ctrl_c_in_the_runners_own_code_stops_it_in_order_too() -> None:
    """It is delivered at each reading of the clock in turn; only this can be hit so exactly."""
    import signal

    from trio_jobs.testing import EPOCH

    async def main(hit: int) -> int:
        readings = 0

        def clock() -> float:
            nonlocal readings
            readings += 1
            if readings == hit:
                signal.raise_signal(signal.SIGINT)
            return EPOCH.timestamp() + trio.current_time()

        async with trio_jobs.open_jobs(":memory:", clock=clock) as jobs:
            enqueued = await jobs.enqueue_many(plain, [None] * 3, deadline=at(1000))
            before = readings
            interrupted = False
            try:
                async with serving(jobs, plain.handled_by(Script(sleeps(5))), lease=3, workers=2):
                    await trio.sleep(14)
            except BaseException as error:
                interrupted = True
                leaves = [error]
                while isinstance(leaves[0], BaseExceptionGroup):
                    leaves = [*leaves[0].exceptions]
                assert isinstance(leaves[0], KeyboardInterrupt), hit
            reading = readings
            states = {(await jobs.get(job)).state for job in enqueued}
            assert states <= {State.QUEUED, State.SUCCEEDED}, hit
            assert interrupted == (before < hit <= reading), hit
        return reading

    total = trio.run(main, -1, clock=MockClock(autojump_threshold=0))
    assert total > 20
    for hit in range(5, total):
        try:
            trio.run(main, hit, clock=MockClock(autojump_threshold=0))
        except KeyboardInterrupt:
            pass


async def test_serve_ends_when_the_caller_does_not_take_that_it_has_started(
    jobs: Jobs, autojump_clock: MockClock
) -> None:
    class Started:
        def started(self, value: object = None) -> None:
            raise RuntimeError("called twice")

    with pytest.RaisesGroup(pytest.RaisesExc(RuntimeError, match="called twice")):
        await trio_jobs.serve(jobs, [plain.handled_by(Script(None))], task_status=Started())
    await jobs.enqueue(plain, None)
    await trio.sleep(10)

    assert (await jobs.counts())[State.QUEUED] == 1


@pytest.mark.parametrize("stop", ["drain", "cancel"])
async def test_a_stop_does_not_wait_for_the_lock_that_a_claim_waits_for(
    stop: str, tmp_path: Path
) -> None:
    store = SqliteStore(tmp_path / "jobs.db", busy_timeout=600)
    async with trio_jobs.open_jobs(store) as jobs:
        with contextlib.closing(
            sqlite3.connect(tmp_path / "jobs.db", isolation_level=None)
        ) as other:
            other.execute("BEGIN IMMEDIATE")
            with trio.fail_after(30):
                async with trio.open_nursery() as nursery:
                    handler = plain.handled_by(Script(None))
                    runner = await nursery.start(
                        partial(trio_jobs.serve, jobs, [handler], grace=600)
                    )
                    await eventually(lambda: store._connections._is_waiting)
                    if stop == "drain":
                        runner.drain()
                    else:
                        nursery.cancel_scope.cancel()


async def test_a_ctrl_c_in_a_handler_is_not_lost_when_its_jobs_closes_meanwhile(
    autojump_clock: MockClock,
) -> None:
    with pytest.RaisesGroup(KeyboardInterrupt):
        async with trio.open_nursery() as nursery, trio_jobs.open_jobs(":memory:") as jobs:
            handlers = [
                plain.handled_by(Script(KeyboardInterrupt())),
                number.handled_by(Script(sleeps(5, 7))),
            ]
            await nursery.start(partial(trio_jobs.serve, jobs, handlers, grace=2))
            await jobs.enqueue(number, 1)
            await trio.sleep(1)
            await jobs.enqueue(plain, None)
            await trio.sleep(1)


async def test_a_jobs_that_closes_under_its_runner_ends_it_and_hurts_nobody_else(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """The block of open_jobs ends while serve lives in a nursery around it."""
    with pytest.RaisesGroup(trio.ClosedResourceError):
        async with (
            trio.open_nursery() as nursery,
            trio_jobs.open_jobs(tmp_path / "jobs.db") as jobs,
        ):
            handler = plain.handled_by(Script(sleeps(1)))
            await nursery.start(partial(trio_jobs.serve, jobs, [handler], grace=0))
            await jobs.enqueue_many(plain, [None] * 30)
            await trio.sleep(0.5)

    assert now() < 10
