"""One read of the store for all who wait (what they are promised is in test_jobs)."""

from __future__ import annotations

import contextlib
import math
import signal
import threading
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import trio
from stories import Script, Trouble, eventually, finished, serving, writer
from trio.testing import MockClock, wait_all_tasks_blocked

import trio_jobs
from trio_jobs import JobNotFound, Jobs, Kind, SqliteStore, State, StoreBusy
from trio_jobs._bridge import Bridge
from trio_jobs._clock import Clock
from trio_jobs._model import Row
from trio_jobs._store import Store
from trio_jobs._waiters import Waiters
from trio_jobs.testing import EPOCH

plain = Kind("plain", None)


def opened(store: Trouble) -> Any:
    """With a clock that is not Trio's, so that everybody polls, on virtual time."""
    return trio_jobs.open_jobs(store, clock=EPOCH.timestamp)


def counted(store: Trouble) -> list[str]:
    """Its reads, from now on."""
    reads: list[str] = []
    store.rule = lambda step: reads.append(step) if step in ("get", "finished") else None
    return reads


async def test_a_thousand_who_wait_read_the_store_once_a_poll(autojump_clock: MockClock) -> None:
    store = Trouble(":memory:")
    async with opened(store) as jobs, trio.open_nursery() as nursery:
        reads = counted(store)
        for job in await jobs.enqueue_many(plain, [None] * 1000):
            nursery.start_soon(jobs.wait_finished, job)
            nursery.start_soon(trio.sleep, job.id / 1000)
        await trio.sleep(10.5)
        nursery.cancel_scope.cancel()

    assert 10 <= len(reads) <= 12


async def test_a_thousand_who_wait_for_what_runs_here_read_the_store_once(
    autojump_clock: MockClock,
) -> None:
    store = Trouble(":memory:")
    async with (
        trio_jobs.open_jobs(store) as jobs,
        serving(jobs, plain.handled_by(Script(None))),
    ):
        reads = counted(store)
        async with trio.open_nursery() as waiting:
            for job in await jobs.enqueue_many(plain, [None] * 1000, delay=10):
                waiting.start_soon(jobs.wait_finished, job)

    assert reads == ["finished"]


async def test_the_shortest_poll_is_that_of_all_and_ends_with_who_asked_for_it(
    autojump_clock: MockClock,
) -> None:
    store = Trouble(":memory:")
    async with opened(store) as jobs, trio.open_nursery() as nursery:
        job = await jobs.enqueue(plain, None)
        nursery.start_soon(lambda: jobs.wait_finished(job, poll=100))
        await trio.sleep(0.5)
        reads = counted(store)
        with trio.move_on_after(10.5):
            await jobs.wait_finished(job, poll=1)
        hasty = len(reads)
        await trio.sleep(900)
        nursery.cancel_scope.cancel()

    assert 10 <= hasty <= 12
    assert 8 <= len(reads) - hasty <= 10


def test_a_ctrl_c_while_the_first_begins_to_wait_leaves_nobody_after_it_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever came later counted on a read for all that had never begun."""
    spawn = trio.lowlevel.spawn_system_task

    def interrupted(*args: Any, **settings: Any) -> trio.lowlevel.Task:
        signal.raise_signal(signal.SIGINT)
        return spawn(*args, **settings)

    ended: list[State] = []

    async def main() -> None:
        async with trio_jobs.open_jobs(":memory:") as jobs:
            job, other = await jobs.enqueue(plain, None), await jobs.enqueue(plain, None)
            await jobs.cancel(other)
            monkeypatch.setattr(trio.lowlevel, "spawn_system_task", interrupted)
            try:
                await jobs.wait_finished(job)
            except KeyboardInterrupt:
                monkeypatch.undo()
                with trio.fail_after(30):
                    ended.append((await jobs.wait_finished(other)).state)

    trio.run(main)
    assert ended == [State.CANCELLED]


async def test_when_the_last_has_gone_nothing_is_left_to_wait_for(mock_clock: MockClock) -> None:
    async with opened(Trouble(":memory:")) as jobs:
        job = await jobs.enqueue(plain, None)
        before = trio.lowlevel.current_statistics().tasks_living
        async with trio.open_nursery() as nursery:
            nursery.start_soon(jobs.wait_finished, job)
            await wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
        await wait_all_tasks_blocked()
        after = trio.lowlevel.current_statistics()

        assert (after.tasks_living, after.seconds_to_next_deadline) == (before, math.inf)


async def test_a_job_that_is_deleted_meanwhile_is_not_found_within_a_poll(
    autojump_clock: MockClock,
) -> None:
    store = Trouble(":memory:")
    async with opened(store) as jobs, trio.open_nursery() as nursery:
        deleted, other = await jobs.enqueue_many(plain, [None, None])

        async def delete() -> None:
            await trio.sleep(0.5)
            writer(store).execute("DELETE FROM trio_jobs_job WHERE id = ?", (deleted.id,))

        nursery.start_soon(delete)
        nursery.start_soon(jobs.wait_finished, other)
        with trio.fail_after(2), pytest.raises(JobNotFound, match=f"no job {deleted.id}$"):
            await jobs.wait_finished(deleted)
        nursery.cancel_scope.cancel()


async def test_a_read_that_fails_is_told_to_each_who_waits_and_to_none_who_comes_later(
    autojump_clock: MockClock,
) -> None:
    store = Trouble(":memory:")
    told: list[StoreBusy] = []

    async def wait(jobs: Jobs, id: int) -> None:
        with pytest.raises(StoreBusy) as caught:
            await jobs.wait_finished(id)
        told.append(caught.value)

    async with opened(store) as jobs:
        made = await jobs.enqueue_many(plain, [None] * 3)
        async with trio.open_nursery() as nursery:
            for job in made:
                nursery.start_soon(wait, jobs, job.id)
            await trio.sleep(0.5)
            store.rule = lambda step: StoreBusy("locked") if step == "finished" else None
        store.rule = lambda step: None
        await jobs.cancel(made[0])
        [ended] = await finished(jobs, made[0])

    assert len(set(map(id, told))) == 3
    assert ended.state is State.CANCELLED


class SlowReads:
    """In the place of a bridge: a read sees what is there when it begins, and takes its time."""

    def __init__(self, row: Row) -> None:
        self.row = row
        self.go_on = trio.Event()

    def finished(self, ids: object) -> dict[int, Row]:
        return {self.row.id: self.row} if self.row.state.is_final else {}

    async def read(self, call: Callable[[Store], object]) -> object:
        seen = call(cast(Store, self))
        await self.go_on.wait()
        return seen

    async def wait_told(self) -> None:
        await trio.lowlevel.checkpoint()


async def test_what_a_read_saw_before_somebody_came_is_no_answer_to_him(
    autojump_clock: MockClock,
) -> None:
    """The job may have got a new life in between."""
    async with trio_jobs.open_jobs(":memory:") as jobs:
        job = await jobs.enqueue(plain, None)
        await jobs.cancel(job)
        bridge = SlowReads((await jobs.get(job))._row)
        live = (await jobs.retry(job))._row
    waiters = Waiters(cast(Bridge, bridge), Clock())

    async def go_on() -> None:
        await wait_all_tasks_blocked()
        bridge.go_on.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(waiters.wait, job.id, 1.0)
        await wait_all_tasks_blocked()
        bridge.row = live
        nursery.start_soon(go_on)
        with trio.move_on_after(5) as scope:
            await waiters.wait(job.id, 1.0)

    assert scope.cancelled_caught
    assert not waiters


class LateToTell(SqliteStore):
    """Its commits take place, and for a while nobody here hears of them."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.may_tell = threading.Event()
        self.is_committed = threading.Event()
        self.is_read = threading.Event()

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        with super().transaction():
            yield
        with self._connections.reading:
            is_done = bool(super().finished([1]))
        if is_done:
            self.is_committed.set()
            self.may_tell.wait(10)

    def finished(self, ids: Collection[int]) -> dict[int, Row | None]:
        found = super().finished(ids)
        self.is_read.set()
        return found


async def test_who_reads_of_an_end_before_it_is_told_is_not_ahead_of_the_runner(
    tmp_path: Path,
) -> None:
    store = LateToTell(tmp_path / "jobs.db")
    succeeded: list[int] = []

    async with (
        trio_jobs.open_jobs(store) as jobs,
        serving(jobs, plain.handled_by(Script(None))) as (runner),
    ):
        job = await jobs.enqueue(plain, None)
        await eventually(store.is_committed.is_set)

        async def wait() -> None:
            await jobs.wait_finished(job)
            succeeded.append(runner.statistics().succeeded)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait)
            await eventually(store.is_read.is_set)
            await wait_all_tasks_blocked(0.05)
            store.may_tell.set()

    assert succeeded == [1]
