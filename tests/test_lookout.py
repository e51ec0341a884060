"""Commits of other processes and connections are seen soon, and what is not theirs costs little.

Real time, because it is about the operating system; each bound is far from what is usual.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
import sys
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest
import trio
from stories import Script, Trouble, eventually, finished, forever, serving
from trio.testing import MockClock

import trio_jobs
from trio_jobs import Kind, SqliteStore, State, StoreError, _lookout
from trio_jobs._bridge import Bridge
from trio_jobs._clock import Clock
from trio_jobs._lookout import LONGEST, Lookout

if sys.platform != "linux":
    pytest.skip("only Linux has inotify", allow_module_level=True)

SOON = 10.0
"""Seconds in which it happens on the busiest machine."""
NEVER = 1000.0
"""A `poll` that brings nothing in this test."""

plain = Kind("plain", None)
strange = Kind("strange", None)


class Logged(SqliteStore):
    """A store in memory, whose log is any file."""

    def __init__(self, log: Path) -> None:
        super().__init__(":memory:")
        self._watched = str(log)

    @property
    def log(self) -> str | None:
        return self._watched


class Elsewhere(Trouble):
    """Stands for another process: nobody in this one hears of its writes."""

    @property
    def identity(self) -> object:
        return self


class Looks:
    """Notes when it was asked to look."""

    def __init__(self, then: Callable[[], None] = lambda: None) -> None:
        self.number = 0
        self._then = then

    async def __call__(self) -> None:
        self.number += 1
        await trio.lowlevel.checkpoint()
        self._then()


@pytest.fixture
def log(tmp_path: Path) -> Path:
    log = tmp_path / "log"
    log.write_text("")
    return log


@contextlib.asynccontextmanager
async def lookout(log: Path, look: Callable[[], Awaitable[None]]) -> AsyncIterator[Lookout]:
    store, clock = Logged(log), Clock()
    bridge = Bridge(store, clock, lambda rows: None)
    await bridge.open()
    lookout = Lookout(bridge, store, clock, look)
    try:
        yield lookout
    finally:
        lookout.close()
        await bridge.close()


def write(log: Path) -> None:
    with log.open("a") as file:
        file.write("x")


@contextlib.contextmanager
def writing_all_the_time(log: Path) -> Iterator[None]:
    stop = threading.Event()

    def go_on() -> None:
        with log.open("ab", buffering=0) as file:
            while not stop.wait(0.0002):
                file.write(b"x")

    thread = threading.Thread(target=go_on)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


# When it looks.


async def test_it_looks_when_the_log_was_written_to(log: Path) -> None:
    look = Looks()
    async with lookout(log, look) as out:
        with out.wanted():
            await trio.sleep(0.05)
            before = look.number
            write(log)
            await eventually(lambda: look.number == 1, SOON)

    assert before == 0


async def test_it_looks_only_while_somebody_wants_to_know(log: Path) -> None:
    look = Looks()
    async with lookout(log, look) as out:
        with out.wanted():
            pass
        for _ in range(3):
            write(log)
            await trio.sleep(0.05)
        before = look.number
        with out.wanted():
            await eventually(lambda: look.number > before, SOON)

    assert before <= 1  # it waits already, and then sees that nobody wants it


@pytest.mark.parametrize("finds", [False, True])
async def test_a_stream_of_writes_that_brings_nothing_is_looked_at_now_and_then(
    log: Path, finds: bool
) -> None:
    look = Looks(lambda: out.found() if finds else None)
    async with lookout(log, look) as out:
        with out.wanted(), writing_all_the_time(log):
            await eventually(lambda: look.number > 10, SOON)  # the first pauses are shorter
            before, started = look.number, trio.current_time()
            await eventually(lambda: look.number > before + 5, SOON)
            took = trio.current_time() - started

    if finds:
        assert took < SOON
    else:
        assert took > 5 * LONGEST


async def test_a_look_that_meets_trouble_is_repeated_without_a_further_event_and_without_a_word(
    log: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fail_three_times() -> None:
        if look.number <= 3:
            raise StoreError("disk I/O error")

    look = Looks(fail_three_times)
    async with lookout(log, look) as out:
        with out.wanted():
            write(log)
            await eventually(lambda: look.number == 4, SOON)
            await trio.sleep(5 * LONGEST)

    assert look.number == 4
    assert not caplog.records


@pytest.mark.parametrize("error", [ZeroDivisionError, SystemExit, KeyboardInterrupt])
async def test_an_error_ends_the_watch_and_nothing_else(
    log: Path, caplog: pytest.LogCaptureFixture, error: type[BaseException]
) -> None:
    def fail() -> None:
        raise error("of an application's clock")

    before = descriptors()
    async with lookout(log, Looks(fail)) as out:
        with out.wanted(), caplog.at_level(logging.ERROR, "trio_jobs"):
            write(log)
            await eventually(lambda: descriptors() == before, SOON)

    [record] = caplog.records
    assert "watched no longer" in record.message


# Whole `Jobs`. With such a `poll` nothing but a look brings it.


async def test_a_job_that_somebody_else_enqueued_starts_at_once(tmp_path: Path) -> None:
    path = tmp_path / "jobs.db"
    handle = Script(None)
    async with (
        trio_jobs.open_jobs(path) as jobs,
        trio_jobs.open_jobs(Elsewhere(path)) as outside,
        serving(jobs, plain.handled_by(handle), poll=NEVER),
    ):
        for starts in range(3):
            await outside.enqueue(plain, None)
            await eventually(lambda: len(handle.starts) > starts, SOON)  # noqa: B023


async def test_whoever_waits_hears_at_once_of_an_end_elsewhere(tmp_path: Path) -> None:
    path = tmp_path / "jobs.db"
    async with (
        trio_jobs.open_jobs(path) as jobs,
        trio_jobs.open_jobs(Elsewhere(path)) as outside,
    ):
        mine, other = await jobs.enqueue_many(plain, [None, None])
        heard: list[State] = []

        async def wait() -> None:
            heard.append((await jobs.wait_finished(mine, poll=NEVER)).state)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait)
            await outside.cancel(other.id)
            await trio.sleep(0.1)
            before = list(heard)
            await outside.cancel(mine.id)
            await eventually(lambda: heard, SOON)

    assert (before, heard) == ([], [State.CANCELLED])


@pytest.mark.parametrize("workers", [1, 2])
async def test_K1_a_cancel_from_elsewhere_reaches_the_handler_at_once(
    tmp_path: Path, workers: int
) -> None:
    path = tmp_path / "jobs.db"
    async with (
        trio_jobs.open_jobs(path) as jobs,
        trio_jobs.open_jobs(Elsewhere(path)) as outside,
        serving(jobs, plain.handled_by(Script(forever)), workers=workers, poll=NEVER) as runner,
    ):
        job = await jobs.enqueue(plain, None)
        await eventually(lambda: runner.statistics().running == 1)
        await outside.cancel(job.id)
        [ended] = await finished(jobs, job, within=SOON)

    assert ended.state is State.CANCELLED


async def test_a_transaction_of_the_application_that_nobody_told_of_is_seen(tmp_path: Path) -> None:
    """The event comes when the log is written to, long before this commit can be seen."""
    path = tmp_path / "jobs.db"
    handle = Script(None)
    async with (
        trio_jobs.open_jobs(path) as jobs,
        trio_jobs.open_jobs(Elsewhere(path)) as outside,
        serving(jobs, plain.handled_by(handle), poll=NEVER),
    ):
        with contextlib.closing(sqlite3.connect(path)) as connection:
            connection.execute("PRAGMA cache_size = 1")
            connection.execute("CREATE TABLE filler (data BLOB)")
            outside.enqueue_on(connection, plain, None)
            # More than the cache holds: this is written to the log now.
            connection.executemany(
                "INSERT INTO filler VALUES (?)", [(bytes(5000),) for _ in range(50)]
            )
            await trio.sleep(0.2)
            before = len(handle.starts)
            connection.commit()
        await eventually(lambda: handle.starts, SOON)

    assert before == 0


async def test_kinds_that_others_enqueue_and_nobody_here_handles_are_seen(tmp_path: Path) -> None:
    path = tmp_path / "jobs.db"
    async with (
        trio_jobs.open_jobs(path) as jobs,
        trio_jobs.open_jobs(Elsewhere(path)) as outside,
        serving(jobs, plain.handled_by(Script(None)), poll=0.1) as runner,
    ):
        await trio.sleep(0.3)
        await outside.enqueue(strange, None)
        await eventually(lambda: runner.statistics().unhandled == {"strange"}, SOON)


# What costs nothing.


async def a_while() -> None:
    await trio.sleep(0.3)


async def count_claims(store: Trouble, meanwhile: Callable[[], Awaitable[None]]) -> int:
    return (await count_steps(store, meanwhile))["claim"]


async def count_steps(store: Trouble, meanwhile: Callable[[], Awaitable[None]]) -> Counter[str]:
    """All that it brings, and nothing that came before."""
    steps: list[str] = []
    store.rule = lambda step: steps.append(step)
    await no_more_claims(steps)
    steps.clear()
    await meanwhile()
    await no_more_claims(steps)
    store.rule = lambda step: None
    return Counter(steps)


async def no_more_claims(steps: list[str]) -> None:
    """Until a runner has heard of everything: several times the longest pause without a claim,
    and none under way, however long that takes."""
    with trio.fail_after(SOON):
        while True:
            before = steps.count("claim")
            await trio.sleep(6 * LONGEST)
            await trio_jobs.testing.settled()
            if steps.count("claim") == before:
                return


async def test_runners_beside_each_other_do_not_keep_each_other_awake(tmp_path: Path) -> None:
    path = tmp_path / "jobs.db"
    stores = [Elsewhere(path), Elsewhere(path)]
    async with (
        trio_jobs.open_jobs(stores[0]) as one,
        trio_jobs.open_jobs(stores[1]) as other,
        serving(one, plain.handled_by(Script(None)), poll=0.02),
        serving(other, plain.handled_by(Script(None)), poll=0.02),
    ):
        await finished(one, await one.enqueue(plain, None))
        claims = [await count_claims(store, a_while) for store in stores]

    assert claims == [0, 0]


async def test_jobs_that_nobody_here_serves_are_looked_at_now_and_then(tmp_path: Path) -> None:
    path = tmp_path / "jobs.db"
    store = Trouble(path)
    async with (
        trio_jobs.open_jobs(store) as jobs,
        trio_jobs.open_jobs(Elsewhere(path, synchronous="normal")) as outside,
        serving(jobs, plain.handled_by(Script(None)), poll=NEVER),
    ):

        async def enqueue() -> None:
            end = trio.current_time() + 0.5
            while trio.current_time() < end:
                await outside.enqueue(strange, None)

        claims = await count_claims(store, enqueue)

    assert 1 <= claims <= 30


async def test_while_no_worker_is_free_there_is_no_hurry(tmp_path: Path) -> None:
    path = tmp_path / "jobs.db"
    store = Trouble(path)
    handle = Script(forever)
    async with (
        trio_jobs.open_jobs(store) as jobs,
        trio_jobs.open_jobs(Elsewhere(path, synchronous="normal")) as outside,
        serving(jobs, plain.handled_by(handle), workers=1, poll=NEVER, grace=0),
    ):
        await jobs.enqueue(plain, None)
        await eventually(lambda: handle.starts)

        async def enqueue() -> None:
            end = trio.current_time() + 0.5
            while trio.current_time() < end:
                await outside.enqueue(strange, None)

        steps = await count_steps(store, enqueue)

    assert 1 <= steps["look"] <= 6


async def test_a_lock_that_is_only_held_wakes_nobody(tmp_path: Path) -> None:
    path = tmp_path / "jobs.db"
    store = Trouble(path)
    async with (
        trio_jobs.open_jobs(store) as jobs,
        serving(jobs, plain.handled_by(Script(None)), poll=NEVER) as runner,
    ):

        async def lock() -> None:
            with contextlib.closing(sqlite3.connect(path)) as connection:
                for _ in range(3):
                    connection.execute("BEGIN IMMEDIATE")
                    await trio.sleep(0.05)
                    connection.execute("ROLLBACK")

        claims = await count_claims(store, lock)
        trouble = runner.statistics().trouble

    assert (claims, trouble) == (0, None)


# Its life.


async def test_a_Jobs_that_was_closed_leaves_no_descriptor(tmp_path: Path) -> None:
    before = descriptors()
    for _ in range(3):
        async with (
            trio_jobs.open_jobs(tmp_path / "jobs.db") as jobs,
            serving(jobs, plain.handled_by(Script(None))),
        ):
            await finished(jobs, await jobs.enqueue(plain, None))
    async with trio_jobs.open_jobs(tmp_path / "jobs.db") as jobs:
        pass
    with pytest.raises(trio.ClosedResourceError):
        await jobs.wait_finished(1)
    await eventually(lambda: descriptors() <= before, SOON)


async def test_a_Jobs_that_only_enqueues_watches_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(_lookout, "open_watch", asked.append)
    async with trio_jobs.open_jobs(tmp_path / "jobs.db") as jobs:
        job = await jobs.enqueue(plain, None)
        await jobs.cancel(job)
        unwatched = list(asked)
        await jobs.wait_finished(job)

    assert unwatched == []
    assert asked == [f"{tmp_path / 'jobs.db'}-wal"]


async def test_where_nothing_can_be_watched_a_poll_brings_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_lookout, "open_watch", lambda path: None)
    path = tmp_path / "jobs.db"
    async with (
        trio_jobs.open_jobs(path) as jobs,
        trio_jobs.open_jobs(Elsewhere(path)) as outside,
        serving(jobs, plain.handled_by(Script(None)), poll=0.1) as runner,
    ):
        await trio.sleep(0.3)
        await outside.enqueue(strange, None)
        job = await outside.enqueue(plain, None)
        with trio.fail_after(SOON):
            ended = await outside.wait_finished(job, poll=0.1)
        await eventually(lambda: runner.statistics().unhandled == {"strange"}, SOON)

    assert ended.state is State.SUCCEEDED


async def test_nothing_is_watched_under_a_virtual_clock(
    tmp_path: Path, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(_lookout, "open_watch", asked.append)
    for clock in (None, lambda: 1e9):
        async with (
            trio_jobs.open_jobs(tmp_path / "jobs.db", clock=clock) as jobs,
            serving(jobs, plain.handled_by(Script(None))),
        ):
            await finished(jobs, await jobs.enqueue(plain, None))

    assert asked == []
