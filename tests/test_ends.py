"""Ends are written while their workers go on, many in one write, and none hurts another."""

from __future__ import annotations

import signal
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from stories import (
    Script,
    Trouble,
    eventually,
    finished,
    now,
    outcomes,
    row_of,
    scheduling,
    serving,
    sleeps,
    unknown,
    writer,
)
from trio.testing import MockClock

import trio_jobs
import trio_jobs._engine
from trio_jobs import (
    Attempt,
    Kind,
    Retry,
    RetryLater,
    Runner,
    State,
    StoreError,
    _lifecycle,
    constant,
)
from trio_jobs._batch import Write
from trio_jobs._model import Change
from trio_jobs._pool import Pool

number = Kind("number", int, int)


async def same(attempt: Attempt[int, int]) -> int:
    """All that start together end in one tick, a second later."""
    await trio.sleep(1)
    return attempt.payload


class Ends(Trouble):
    """Notes how many changes each write had; what is to happen just before one is told."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.sizes: list[int] = []
        self.refused_id = 0
        self.just_before: Callable[[], object] = lambda: None

    def apply(self, changes: Sequence[Change]) -> Any:
        self.sizes.append(len(changes))
        just_before, self.just_before = self.just_before, lambda: None
        just_before()
        if any(change.before.id == self.refused_id for change in changes):
            raise StoreError("disk I/O error")
        return super().apply(changes)

    def change(self, sql: str, *values: int) -> None:
        writer(self).execute(sql, values)


# One write.


async def test_ends_of_one_tick_are_one_write(autojump_clock: MockClock) -> None:
    store = Ends(":memory:")
    async with (
        trio_jobs.open_jobs(store) as jobs,
        serving(jobs, number.handled_by(same), workers=10),
    ):
        await finished(jobs, *await jobs.enqueue_many(number, range(30)))

    assert store.sizes == [10, 10, 10]


async def test_whoever_hears_of_the_first_end_of_a_write_finds_all_of_them_counted(
    autojump_clock: MockClock,
) -> None:
    async with (
        trio_jobs.open_jobs(":memory:") as jobs,
        serving(jobs, number.handled_by(same)) as runner,
    ):
        enqueued = await jobs.enqueue_many(number, range(10))
        counts: list[tuple[int, int]] = []

        async def watch(job: trio_jobs.Job[int]) -> None:
            await finished(jobs, job)
            statistics = runner.statistics()
            counts.append((statistics.running, statistics.succeeded))

        async with trio.open_nursery() as nursery:
            for job in enqueued:
                nursery.start_soon(watch, job)

    assert counts == [(0, 10)] * 10


async def test_workers_go_on_with_what_is_claimed_ahead_while_ends_are_written(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    store, handle = Ends(tmp_path / "jobs.db"), Script(7)
    are_started, was_in_time = threading.Event(), []
    async with (
        trio_jobs.open_jobs(store) as jobs,
        serving(jobs, number.handled_by(handle), workers=2),
    ):
        await finished(jobs, *await jobs.enqueue_many(number, range(20)))
        store.just_before = lambda: was_in_time.append(are_started.wait(30))
        enqueued = await jobs.enqueue_many(number, range(80))
        while len(handle.starts) < 100:
            await trio.lowlevel.checkpoint()
        are_started.set()
        ended = await finished(jobs, *enqueued)

    assert was_in_time == [True]
    assert {(job.state, job.attempt) for job in ended} == {(State.SUCCEEDED, 1)}


# One of them fails.


async def test_an_end_that_cannot_be_written_hurts_no_other_and_is_tried_until_its_lease_ends(
    autojump_clock: MockClock,
) -> None:
    store = Ends(":memory:")
    async with (
        trio_jobs.open_jobs(store) as jobs,
        serving(jobs, number.handled_by(same), lease=6) as runner,
    ):
        enqueued = await jobs.enqueue_many(number, range(10))
        store.refused_id = enqueued[4].id
        others = [*enqueued[:4], *enqueued[5:]]
        await finished(jobs, *others)
        written_at = now()
        await trio.sleep(3)
        during = runner.statistics()
        store.refused_id = 0
        [late] = await finished(jobs, enqueued[4])
        after = runner.statistics()

    assert written_at == 1
    assert (during.running, during.succeeded, during.trouble) == (0, 9, "disk I/O error")
    assert (late.state, late.attempt, late.result) == (State.SUCCEEDED, 1, 4)
    assert (after.started, after.succeeded, after.lost, after.trouble) == (10, 10, 0, None)


@pytest.mark.parametrize("place", ["commit", "committed"])
async def test_ends_whose_outcome_is_unknown_are_written_once_and_none_is_taken_for_lost(
    place: str, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    store = Ends(":memory:")
    kind = Kind("kind", int, int, retry=Retry(backoff=constant(3)))
    handle = Script(*[sleeps(1, 7)] * 4, *[RetryLater(3), ValueError()] * 3, sleeps(1, 7))
    async with (
        trio_jobs.open_jobs(store) as jobs,
        serving(jobs, kind.handled_by(handle)) as runner,
    ):
        enqueued = await jobs.enqueue_many(kind, range(10))
        await trio.sleep(0.5)
        fail_once = [unknown()]
        store.rule = lambda step: fail_once.pop() if fail_once and step == place else None
        ended = await finished(jobs, *enqueued)
        await trio.sleep(1)
        statistics = runner.statistics()

    assert {job.state for job in ended} == {State.SUCCEEDED}
    assert len(handle.starts) == 16
    assert (statistics.succeeded, statistics.retried, statistics.lost) == (10, 6, 0)
    assert (statistics.trouble, "lost" in caplog.text) == (None, False)


@pytest.mark.parametrize("place", ["commit", "committed"])
async def test_one_of_many_whose_outcome_is_unknown_hurts_no_other(
    place: str, autojump_clock: MockClock
) -> None:
    """The first commit fails, so that each is written by itself; and the third of those."""
    store = Ends(":memory:")
    async with (
        trio_jobs.open_jobs(store) as jobs,
        serving(jobs, number.handled_by(same)) as runner,
    ):
        enqueued = await jobs.enqueue_many(number, range(6))
        await trio.sleep(0.5)
        commits = 0

        def rule(step: str) -> StoreError | None:
            nonlocal commits
            commits += step == "commit"
            if step == "commit" and commits == 1:
                return StoreError("disk I/O error")
            return unknown() if step == place and commits == 5 else None

        store.rule = rule
        ended = await finished(jobs, *enqueued)
        await trio.sleep(1)
        statistics = runner.statistics()

    assert {(job.state, job.attempt) for job in ended} == {(State.SUCCEEDED, 1)}
    assert (statistics.succeeded, statistics.lost, statistics.trouble) == (6, 0, None)


# Some are refused.


async def test_of_ends_that_are_refused_each_is_what_has_become_of_its_row(
    autojump_clock: MockClock,
) -> None:
    """Just before they are written one job is cancelled, one is taken, one is gone."""
    store = Ends(":memory:")
    async with (
        trio_jobs.open_jobs(store) as jobs,
        serving(jobs, number.handled_by(same), poll=1000) as runner,
    ):
        enqueued = await jobs.enqueue_many(number, range(8))
        cancelled, taken, gone = (job.id for job in enqueued[2:5])

        def meanwhile() -> None:
            row = store.get(cancelled)
            assert row is not None
            change = _lifecycle.cancelled(row, jobs._clock.now())
            assert change is not None
            assert store.apply([change]) == [None]
            store.change("UPDATE trio_jobs_job SET claims = claims + 1 WHERE id = ?", taken)
            store.change("DELETE FROM trio_jobs_job WHERE id = ?", gone)

        store.just_before = meanwhile
        await finished(jobs, *enqueued[:3], *enqueued[5:])
        rows = [await row_of(jobs, job) for job in (cancelled, taken)]
        history = await outcomes(jobs, enqueued[2])
        statistics = runner.statistics()

    assert [(row.state, row.claims) for row in rows] == [(State.CANCELLED, 1), (State.RUNNING, 2)]
    assert history == ["cancelled"]
    assert (statistics.running, statistics.succeeded, statistics.lost) == (0, 5, 2)


# A stop comes while they wait.


@pytest.mark.parametrize("how", ["drain", "cancel"])
async def test_ends_that_wait_for_the_store_at_the_stop_are_all_written(
    how: str, autojump_clock: MockClock
) -> None:
    store = Ends(":memory:")
    async with trio_jobs.open_jobs(store) as jobs, trio.open_nursery() as nursery:
        runner: Runner = await nursery.start(
            partial(trio_jobs.serve, jobs, [number.handled_by(same)])
        )
        enqueued = await jobs.enqueue_many(number, range(10))
        store.rule = lambda step: StoreError("disk I/O error") if step == "apply" else None
        await trio.sleep(5)
        if how == "drain":
            runner.drain()
        else:
            nursery.cancel_scope.cancel()
        with trio.CancelScope(shield=True):
            await trio.sleep(5)
            store.rule = lambda step: None
            ended = await finished(jobs, *enqueued)

    assert {(job.state, job.attempt) for job in ended} == {(State.SUCCEEDED, 1)}
    assert runner.statistics().succeeded == 10


async def test_a_Jobs_that_closes_while_ends_wait_ends_its_runner_and_their_leases_have_to_end(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    store = Ends(tmp_path / "jobs.db")
    with pytest.RaisesGroup(trio.ClosedResourceError):
        async with trio.open_nursery() as nursery, trio_jobs.open_jobs(store) as jobs:
            await nursery.start(partial(trio_jobs.serve, jobs, [number.handled_by(same)]))
            enqueued = await jobs.enqueue_many(number, range(3))
            store.rule = lambda step: StoreError("disk I/O error") if step == "apply" else None
            await trio.sleep(5)
    ended_at = now()
    async with (
        trio_jobs.open_jobs(tmp_path / "jobs.db") as again,
        serving(again, number.handled_by(same)),
    ):
        ended = [await again.wait_finished(job.id) for job in enqueued]

    assert ended_at == pytest.approx(5)
    assert {(job.state, job.attempt) for job in ended} == {(State.SUCCEEDED, 2)}


async def test_an_answer_that_comes_when_the_runner_is_over_is_taken_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trio_jobs._engine, "FINAL_WRITES", 0.05)
    store = Ends(tmp_path / "jobs.db")
    is_writing, may_go_on = threading.Event(), threading.Event()

    def hold() -> None:
        is_writing.set()
        assert may_go_on.wait(30)

    async with trio_jobs.open_jobs(store) as jobs:
        enqueued = await jobs.enqueue_many(number, range(5))
        store.just_before = hold
        async with trio.open_nursery() as nursery:
            serve = partial(trio_jobs.serve, jobs, [number.handled_by(Script(7))], grace=0)
            runner: Runner = await nursery.start(serve)
            await eventually(is_writing.is_set)
            nursery.cancel_scope.cancel()
        before = runner.statistics().succeeded
        may_go_on.set()
        ended = await finished(jobs, *enqueued, within=30)
        after = runner.statistics().succeeded

    assert (before, after) == (0, 5)
    assert {(job.state, job.attempt) for job in ended} == {(State.SUCCEEDED, 1)}


async def test_B1_a_keyboard_interrupt_in_the_tick_of_other_ends_costs_none_of_them(
    autojump_clock: MockClock,
) -> None:
    async def interrupted(attempt: Attempt[int, int]) -> int:
        await trio.sleep(1)
        if attempt.payload == 3:
            raise KeyboardInterrupt
        return attempt.payload

    async with trio_jobs.open_jobs(":memory:") as jobs:
        enqueued = await jobs.enqueue_many(number, range(8))
        with pytest.raises(KeyboardInterrupt):
            await trio_jobs.serve(jobs, [number.handled_by(interrupted)])
        rows = [await row_of(jobs, job) for job in enqueued]

    assert Counter(row.state for row in rows) == {State.SUCCEEDED: 7, State.QUEUED: 1}
    assert (rows[3].attempt, rows[3].interruptions) == (0, 1)
    assert now() == 1


# run_once.


@pytest.mark.parametrize("workers", [1, 4])
async def test_run_once_starts_none_again_that_is_due_at_once_also_if_its_end_was_refused_first(
    workers: int, autojump_clock: MockClock
) -> None:
    store = Ends(":memory:")
    kind = Kind("kind", int, int, retry=Retry(backoff=constant(0)))
    handle = Script(RetryLater(0), ValueError())
    async with trio_jobs.open_jobs(store) as jobs:
        enqueued = await jobs.enqueue_many(kind, range(9))
        store.just_before = lambda: store.change(
            "UPDATE trio_jobs_job SET cancel_requested = 1 WHERE state = 2"
        )
        started = await trio_jobs.run_once(jobs, [kind.handled_by(handle)], workers=workers)
        states = Counter([(await jobs.get(job)).state for job in enqueued])

    assert (started, len(handle.starts)) == (9, 9)
    assert states == {State.CANCELLED: workers, State.QUEUED: 9 - workers}


# The next claim.


@pytest.mark.parametrize("seed", range(4))
def test_a_retry_that_is_due_at_once_is_claimed_though_the_next_claim_was_made_before_its_end(
    seed: int,
) -> None:
    """So many other writes wait that the end is in one transaction, the claim in the next."""
    kind = Kind("kind", int, int, retry=Retry(backoff=constant(0)))
    starts: list[int] = []

    async def main() -> None:
        async with trio_jobs.open_jobs(":memory:") as jobs:

            async def fail_among_many(attempt: Attempt[int, int]) -> int:
                starts.append(attempt.payload)
                if len(starts) == 1:
                    for _ in range(249):
                        jobs._bridge.submit(Write("apply", []))
                    raise ValueError
                return 7

            enqueued = await jobs.enqueue_many(kind, [1, 2])
            async with serving(jobs, kind.handled_by(fail_among_many), workers=1):
                await finished(jobs, *enqueued)

    with scheduling(seed):
        trio.run(main, clock=MockClock(autojump_threshold=0))

    assert starts == [1, 2, 1]


async def test_an_enqueue_from_another_loop_does_not_keep_the_runner_from_claiming(
    tmp_path: Path,
) -> None:
    """It is refused before a claim is made that would go along with it."""
    async with (
        trio_jobs.open_jobs(tmp_path / "jobs.db") as jobs,
        serving(jobs, number.handled_by(Script(7))),
    ):
        await trio_jobs.testing.settled()

        def elsewhere() -> None:
            with pytest.raises(RuntimeError, match=r"another trio\.run"):
                trio.run(jobs.enqueue, number, 1)

        await trio.to_thread.run_sync(elsewhere)
        [ended] = await finished(jobs, await jobs.enqueue(number, 1), within=30)

    assert ended.state is State.SUCCEEDED


def test_B1_a_ctrl_c_in_the_middle_of_an_enqueue_does_not_leave_its_claim_unmade(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The stop would wait for it."""
    took: list[float] = []
    new_claim = Pool.new_claim

    def interrupted(pool: Pool, at: int) -> Write:
        claim = new_claim(pool, at)
        signal.raise_signal(signal.SIGINT)
        return claim

    async def main() -> None:
        async with trio_jobs.open_jobs(":memory:") as jobs:
            try:
                async with serving(jobs, number.handled_by(Script(sleeps(1, 7)))):
                    await trio.sleep(5)
                    monkeypatch.setattr(Pool, "new_claim", interrupted)
                    await jobs.enqueue(number, 1)
                    await trio.lowlevel.checkpoint()
            finally:
                took.append(now() - 5)

    with pytest.raises((KeyboardInterrupt, BaseExceptionGroup)):
        trio.run(main, clock=MockClock(autojump_threshold=0))
    assert took[0] <= 1
