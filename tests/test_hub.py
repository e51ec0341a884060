"""Every `Jobs` on a file hears of every other one of its process, in its own thread."""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from collections.abc import AsyncIterator, Callable, Hashable, Sequence
from pathlib import Path

import pytest
import trio
import trio.testing
from trio.testing import MockClock

import trio_jobs
from trio_jobs import Attempt, Jobs, Kind, SqliteStore, State
from trio_jobs._hub import Hub, Listener, _hubs, join_hub, leave_hub
from trio_jobs._model import Row

kind = Kind("k", int, int)


@kind.handled_by
async def doubles(attempt: Attempt[int, int]) -> int:
    return attempt.payload * 2


class Ear:
    """A listener that notes what it hears, and in which thread."""

    def __init__(self) -> None:
        self.rows: list[Sequence[Row]] = []
        self.elsewhere = 0
        self.threads: set[threading.Thread] = set()
        self.listener = Listener(self._heard, self._written_elsewhere)

    def _heard(self, rows: Sequence[Row]) -> None:
        self.rows.append(rows)
        self.threads.add(threading.current_thread())

    def _written_elsewhere(self) -> None:
        self.elsewhere += 1
        self.threads.add(threading.current_thread())


async def test_whoever_is_told_in_the_trio_thread_hears_it_at_once() -> None:
    hub, ear = Hub(), Ear()
    hub.join(ear.listener)

    hub.tell([])
    hub.tell_written_elsewhere()

    assert (ear.rows, ear.elsewhere) == ([[]], 1)


async def test_what_another_thread_tells_is_heard_in_the_trio_thread() -> None:
    hub, ear = Hub(), Ear()
    hub.join(ear.listener)

    await trio.to_thread.run_sync(hub.tell, [])
    await trio.to_thread.run_sync(hub.tell_written_elsewhere)
    await trio.testing.wait_all_tasks_blocked()

    assert (ear.rows, ear.elsewhere) == ([[]], 1)
    assert ear.threads == {threading.current_thread()}


@pytest.mark.parametrize("is_elsewhere", [True, False])
async def test_what_a_listener_raises_ends_nothing_and_the_others_hear(
    is_elsewhere: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(rows: object = None) -> None:
        raise SystemExit("a clock")

    hub, ear = Hub(), Ear()
    hub.join(Listener(fail, fail))
    hub.join(ear.listener)

    if is_elsewhere:
        await trio.to_thread.run_sync(hub.tell, [])
        await trio.to_thread.run_sync(hub.tell_written_elsewhere)
    else:
        hub.tell([])
        hub.tell_written_elsewhere()
    await trio.testing.wait_all_tasks_blocked()

    assert (ear.rows, ear.elsewhere) == ([[]], 1)
    assert len(caplog.records) == 2


async def test_who_has_left_hears_nothing_more() -> None:
    hub, ear, other = Hub(), Ear(), Ear()
    hub.join(ear.listener)
    hub.join(other.listener)

    hub.leave(ear.listener)
    hub.tell([])
    hub.leave(other.listener)

    assert (ear.rows, other.rows) == ([], [[]])
    assert hub.is_empty


async def test_a_listener_may_leave_while_it_is_told() -> None:
    hub, other = Hub(), Ear()
    leaver = Listener(lambda rows: hub.leave(leaver), lambda: None)
    hub.join(leaver)
    hub.join(other.listener)

    hub.tell([])
    hub.tell([])

    assert other.rows == [[], []]


async def test_a_file_has_a_hub_only_while_somebody_listens() -> None:
    one, other = Ear(), Ear()
    identity: Hashable = object()

    first = join_hub(identity, one.listener)
    second = join_hub(identity, other.listener)
    leave_hub(identity, one.listener)
    between = identity in _hubs
    leave_hub(identity, other.listener)

    assert first is second
    assert between
    assert identity not in _hubs


async def test_jobs_that_were_closed_leave_nothing_behind(store: SqliteStore) -> None:
    before = dict(_hubs)

    async with trio_jobs.open_jobs(store):
        pass

    assert _hubs == before


def test_a_listener_whose_loop_is_over_is_passed_over() -> None:
    hub = Hub()

    async def join() -> Ear:
        ear = Ear()
        hub.join(ear.listener)
        return ear

    ear = trio.run(join)
    hub.tell([])
    hub.tell_written_elsewhere()

    assert (ear.rows, ear.elsewhere) == ([], 0)


# Through whole `Jobs`.


@contextlib.asynccontextmanager
async def two_jobs(path: Path, link: Path | None = None) -> AsyncIterator[tuple[Jobs, Jobs]]:
    async with (
        trio_jobs.open_jobs(path) as one,
        trio_jobs.open_jobs(path if link is None else link) as other,
    ):
        yield one, other


async def test_a_runner_starts_at_once_what_another_jobs_of_the_process_enqueued(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with two_jobs(tmp_path / "a.db") as (mine, theirs), trio.open_nursery() as nursery:
        await nursery.start(trio_jobs.serve, mine, [doubles])
        await trio.sleep(100)
        job = await theirs.enqueue(kind, 4)
        with trio.fail_after(1000):
            ended = await theirs.wait_finished(job)
        nursery.cancel_scope.cancel()

    assert ended.unwrap() == 8
    assert ended.enqueued_at == ended.started_at == ended.finished_at
    # Nobody has a timer that would have saved it: virtual time stood still.


async def test_a_file_is_the_same_under_another_name(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    link = tmp_path / "link.db"
    link.symlink_to(tmp_path / "a.db")

    async with (
        two_jobs(tmp_path / "a.db", link) as (mine, theirs),
        trio.open_nursery() as nursery,
    ):
        await nursery.start(trio_jobs.serve, mine, [doubles])
        await trio.sleep(100)
        with trio.fail_after(1000):
            ended = await theirs.wait_finished(await theirs.enqueue(kind, 4))
        nursery.cancel_scope.cancel()

    assert ended.started_at == ended.enqueued_at


async def test_jobs_in_memory_are_strangers_to_each_other(autojump_clock: MockClock) -> None:
    async with (
        trio_jobs.open_jobs(":memory:") as mine,
        trio_jobs.open_jobs(":memory:") as theirs,
        trio.open_nursery() as nursery,
    ):
        await nursery.start(trio_jobs.serve, mine, [doubles])
        job = await theirs.enqueue(kind, 4)
        await trio.sleep(100)
        state = (await theirs.get(job)).state
        nursery.cancel_scope.cancel()

    assert state is State.QUEUED


async def test_a_cancel_from_another_jobs_reaches_the_handler_at_once(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    started = trio.Event()
    sleeps = Kind("sleeps", None)

    @sleeps.handled_by
    async def sleep(attempt: Attempt[None, None]) -> None:
        started.set()
        await trio.sleep_forever()

    async with two_jobs(tmp_path / "a.db") as (mine, theirs), trio.open_nursery() as nursery:
        await nursery.start(trio_jobs.serve, mine, [sleep])
        job = await theirs.enqueue(sleeps, None)
        await started.wait()
        await trio.sleep(0.25)
        cancelled = await theirs.cancel(job)
        with trio.fail_after(1000):
            ended = await theirs.wait_finished(job)
        at = trio.current_time()
        nursery.cancel_scope.cancel()

    assert cancelled
    assert ended.state is State.CANCELLED
    assert at == 0.25


async def test_jobs_in_two_trio_loops_of_one_process_wake_each_other(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    ready = threading.Event()
    stop: list[Callable[[], object]] = []

    async def serve_there() -> None:
        async with trio_jobs.open_jobs(path) as jobs, trio.open_nursery() as nursery:
            # With a poll this long only the hub can tell it in time.
            runner = await nursery.start(_serve_with_long_poll, jobs)
            token = trio.lowlevel.current_trio_token()
            stop.append(lambda: token.run_sync_soon(runner.drain))
            ready.set()

    thread = threading.Thread(target=trio.run, args=[serve_there])
    thread.start()
    try:
        await trio.to_thread.run_sync(ready.wait, 10)
        async with trio_jobs.open_jobs(path) as jobs:
            with trio.fail_after(10):
                ended = await jobs.wait_finished(await jobs.enqueue(kind, 4), poll=1000)
    finally:
        stop[0]()
        await trio.to_thread.run_sync(thread.join, 10)

    assert ended.unwrap() == 8


async def _serve_with_long_poll(
    jobs: Jobs, *, task_status: trio.TaskStatus[trio_jobs.Runner]
) -> None:
    await trio_jobs.serve(jobs, [doubles], poll=1000, task_status=task_status)


@pytest.mark.parametrize("commits", [True, False])
async def test_every_runner_of_the_process_hears_of_a_transaction_of_the_application(
    tmp_path: Path, autojump_clock: MockClock, commits: bool
) -> None:
    path = tmp_path / "a.db"
    async with two_jobs(path) as (mine, theirs), trio.open_nursery() as nursery:
        await nursery.start(trio_jobs.serve, mine, [doubles])
        await trio.sleep(100)
        with contextlib.closing(sqlite3.connect(path)) as connection:
            id = theirs.enqueue_on(connection, kind, 4)
            await trio.sleep(100)
            if commits:
                connection.commit()
            else:
                connection.rollback()
        await trio.sleep(1)
        found = await theirs.find()
        nursery.cancel_scope.cancel()

    assert [(job.id, job.state) for job in found] == [(id, State.SUCCEEDED)] * commits


async def test_a_jobs_that_was_closed_is_not_missed(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    path = tmp_path / "a.db"
    async with trio_jobs.open_jobs(path) as mine, trio.open_nursery() as nursery:
        async with trio_jobs.open_jobs(path) as theirs:
            job = await theirs.enqueue(kind, 4)
        await nursery.start(trio_jobs.serve, mine, [doubles])
        with trio.fail_after(1000):
            ended = await mine.wait_finished(job)
        nursery.cancel_scope.cancel()

    assert ended.unwrap() == 8
