"""Runners on a store that refuses: nothing is lost, nothing is stuck, and the log stays short."""

from __future__ import annotations

import contextlib
import itertools
import logging
import sqlite3
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest
import trio
from stories import (
    STORES,
    Script,
    Trouble,
    assert_no_transaction_is_open,
    at,
    eventually,
    finished,
    forever,
    instant,
    make_store,
    now,
    row_of,
    serving,
    sleeps,
    unknown,
    writer,
)
from trio.testing import MockClock

import trio_jobs
from trio_jobs import (
    Attempt,
    Fail,
    Job,
    Jobs,
    Kind,
    Retry,
    RetryLater,
    Runner,
    SqliteStore,
    State,
    StoreBusy,
    StoreError,
    constant,
)
from trio_jobs._model import Change

T = TypeVar("T")

plain = Kind("plain", None, int | None, retry=Retry(attempts=3, backoff=constant(5)))


def busy() -> StoreError:
    return StoreBusy("database is locked")


def io_error() -> StoreError:
    return StoreError("disk I/O error")


# Final writes.


@pytest.mark.parametrize("error", [busy, io_error])
@pytest.mark.parametrize("where", STORES)
async def test_L5_an_end_that_could_not_be_written_is_written_as_soon_as_it_can_be(
    where: str, error: Callable[[], StoreError], tmp_path: Path, autojump_clock: MockClock
) -> None:
    store = make_store(where, tmp_path, Trouble)
    handle = Script(sleeps(1, 7))
    async with (
        trio_jobs.open_jobs(store) as jobs,
        serving(jobs, plain.handled_by(handle), workers=1) as runner,
    ):
        job = await jobs.enqueue(plain, None)
        following = await jobs.enqueue(plain, None)
        store.rule = lambda step: error() if step == "apply" else None
        await trio.sleep(10)
        during = runner.statistics()
        store.rule = lambda step: None
        [ended] = await finished(jobs, job)
        written_at = now()
        await finished(jobs, following)
        statistics = runner.statistics()

    assert (during.running, during.succeeded, during.trouble is None) == (0, 0, False)
    assert (ended.state, ended.attempt, ended.result) == (State.SUCCEEDED, 1, 7)
    assert 10 <= written_at <= 12
    assert len(handle.starts) == 2
    assert (statistics.succeeded, statistics.lost, statistics.trouble) == (2, 0, None)


@pytest.mark.parametrize("where", STORES)
async def test_L5_an_end_that_fails_for_longer_than_the_lease_is_given_up_and_the_job_starts_again(
    where: str, tmp_path: Path, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    store = make_store(where, tmp_path, Trouble)
    handle = Script(sleeps(1, 7))
    async with (
        trio_jobs.open_jobs(store) as jobs,
        serving(jobs, plain.handled_by(handle), lease=6) as runner,
    ):
        job = await jobs.enqueue(plain, None)
        store.rule = lambda step: io_error() if step == "apply" else None
        await trio.sleep(5.5)
        row = await row_of(jobs, job)
        await trio.sleep(1)
        store.rule = lambda step: None
        [ended] = await finished(jobs, job, within=10)
        statistics = runner.statistics()

    # Nothing renewed the lease of an attempt that is over.
    assert (row.state, row.lease_until) == (State.RUNNING, instant(6))
    assert handle.starts == [0, 6]
    assert (ended.state, ended.attempt) == (State.SUCCEEDED, 2)
    assert (statistics.started, statistics.succeeded, statistics.lost) == (2, 1, 1)
    assert caplog.text.count("given up") == 1


@pytest.mark.parametrize("where", STORES)
async def test_L5_the_late_end_of_a_row_that_another_runner_took_is_refused(
    where: str, tmp_path: Path, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    store = make_store(where, tmp_path, Trouble)
    first, second = Script(sleeps(1, 1)), Script(sleeps(10, 2))
    async with (
        trio_jobs.open_jobs(store) as jobs,
        serving(jobs, plain.handled_by(first), lease=6) as runner,
    ):
        job = await jobs.enqueue(plain, None)
        await trio.sleep(0.5)
        store.rule = lambda step: io_error() if step == "apply" else None
        async with serving(jobs, plain.handled_by(second), lease=6) as another:
            await trio.sleep(6.9)
            store.rule = lambda step: None
            [ended] = await finished(jobs, job, within=20)
            statistics = runner.statistics(), another.statistics()

    assert (first.starts, second.starts) in (([0], [6]), ([0, 6], []))
    assert (ended.state, ended.attempt) == (State.SUCCEEDED, 2)
    assert [one.succeeded for one in statistics] == [len(second.starts) ^ 1, len(second.starts)]
    assert sum(one.lost for one in statistics) == 1


class PickyTrouble(Trouble):
    """Refuses to write anything about one job."""

    refused = 0

    def apply(self, changes: Sequence[Change]) -> Any:
        if any(change.before.id == self.refused for change in changes):
            raise io_error()
        return super().apply(changes)


async def test_a_worker_whose_end_cannot_be_written_goes_on_with_what_was_claimed_for_it(
    autojump_clock: MockClock,
) -> None:
    """Its end and the next claim go to the store together; the claim succeeds alone."""
    store = PickyTrouble(":memory:")
    first, second = Script(sleeps(5)), Script(sleeps(5))
    async with trio_jobs.open_jobs(store) as jobs, trio.open_nursery() as nursery:
        stuck = await jobs.enqueue(plain, None)
        nursery.start_soon(
            partial(trio_jobs.serve, jobs, [plain.handled_by(first)], workers=1, lease=60)
        )
        await trio.sleep(4)
        store.refused = stuck.id
        following = await jobs.enqueue(plain, None)
        [ended] = await finished(jobs, following, within=7)
        waiting = await jobs.enqueue(plain, None)
        async with serving(jobs, plain.handled_by(second)):
            await finished(jobs, waiting, within=6)
        store.refused = 0
        [written] = await finished(jobs, stuck, within=10)
        nursery.cancel_scope.cancel()

    # The end that waits counts as a worker's, so no further job was claimed for it.
    assert (first.starts, second.starts) == ([0, 5], [10])
    assert (ended.state, ended.attempt) == (State.SUCCEEDED, 1)
    assert (written.state, written.attempt) == (State.SUCCEEDED, 1)


ENDS = {"a value": 7, "an error": ValueError(), "later": RetryLater(5), "Fail": Fail("no")}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("place", ["commit", "committed"])
async def test_L5_an_end_whose_outcome_is_unknown_is_not_taken_for_a_lost_lease(
    end: str, place: str, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """A commit reported an error, and so did the look at what became of it."""
    store = Trouble(":memory:")
    once = Kind("once", None, int, retry=Retry(attempts=1))
    handle = Script(ENDS[end], 7)
    async with trio_jobs.open_jobs(store) as jobs, serving(jobs, once.handled_by(handle)) as runner:
        job = await jobs.enqueue(once, None)
        store.rule = first(place, after="apply", error=unknown)
        [ended] = await finished(jobs, job, within=100)
        # The waiter reads by itself; the runner asks again a moment later.
        await trio.sleep(1)
        statistics = runner.statistics()

    state = State.DEAD if end in ("an error", "Fail") else State.SUCCEEDED
    assert (ended.state, ended.attempt) == (state, 1)
    assert len(handle.starts) == (2 if end == "later" else 1)
    assert statistics.lost == 0
    assert statistics.succeeded + statistics.failed == 1
    assert statistics.retried == (1 if end == "later" else 0)
    assert "lost" not in caplog.text


def first(
    place: str, *, after: str, error: Callable[[], StoreError]
) -> Callable[[str], StoreError | None]:
    """A rule: fail once, at that step of the first transaction in which `after` is called."""
    seen: list[str] = []

    def rule(step: str) -> StoreError | None:
        if step == after or seen:
            seen.append(step)
        if step == place and seen and "fired" not in seen:
            seen.append("fired")
            return error()
        return None

    return rule


# A store that is locked for long.


def lock(store: SqliteStore) -> Callable[[], None]:
    """Hold the write lock as another process would; returns what gives it back."""
    connection: Any
    if store._driver == "sqlite3":
        connection = sqlite3.connect(store._connections.real_path, isolation_level=None)
    else:
        import apsw

        connection = apsw.Connection(store._connections.real_path)
    connection.execute("BEGIN EXCLUSIVE")

    def release() -> None:
        connection.execute("ROLLBACK")
        connection.close()

    return release


@pytest.mark.parametrize("start", ["before", "during"])
@pytest.mark.parametrize("where", ["file", "apsw"])
async def test_L7_a_runner_outlives_a_lock_three_times_as_long_as_the_busy_timeout(
    start: str, where: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Under the real clock, with a real lock."""
    store = make_store(where, tmp_path, SqliteStore, busy_timeout=0.1)
    async with trio_jobs.open_jobs(store) as jobs, trio.open_nursery() as nursery:
        serve = partial(trio_jobs.serve, jobs, [plain.handled_by(Script(7))], poll=0.1)
        if start == "before":
            runner: Runner = await nursery.start(serve)
            await trio_jobs.testing.settled()
        release = lock(store)
        if start == "during":
            runner = await nursery.start(serve)
        with pytest.raises(StoreBusy):
            await jobs.enqueue(plain, None)
        await eventually(lambda: runner.statistics().trouble is not None)
        await trio.sleep(0.3)
        during = runner.statistics().trouble
        release()
        job = await jobs.enqueue(plain, None)
        [ended] = await finished(jobs, job, within=30)
        await eventually(lambda: runner.statistics().trouble is None)
        nursery.cancel_scope.cancel()

    assert during is not None
    assert "locked" in during
    assert (ended.state, ended.attempt) == (State.SUCCEEDED, 1)
    assert len(warnings_of(caplog)) <= 2


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]


async def test_L7_half_a_minute_of_trouble_is_a_few_lines_in_the_log(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """With jobs that end, run on, are due and are enqueued meanwhile."""
    store = Trouble(":memory:")
    tries = itertools.count()

    def locked(step: str) -> StoreError | None:
        if step in ("begin", "queued_kinds"):
            # As the real one, which says how long it waited.
            return StoreBusy(f"jobs.db: {step}: database is locked (waited {next(tries)} s)")
        return None

    handle = Script(*[sleeps(seconds, 7) for seconds in range(1, 11)], sleeps(90, 7))
    async with (
        trio_jobs.open_jobs(store) as jobs,
        serving(jobs, plain.handled_by(handle), workers=15) as runner,
    ):
        started = [await jobs.enqueue(plain, None) for _ in range(15)]
        due = [await jobs.enqueue(plain, None, delay=seconds) for seconds in (5, 10)]
        await trio.sleep(0.5)
        store.rule = locked
        await trio.sleep(30)
        trouble = runner.statistics().trouble
        store.rule = lambda step: None
        lines = warnings_of(caplog)
        ended = await finished(jobs, *started, *due)
        after = runner.statistics()

    assert trouble is not None
    assert 1 <= len(lines) <= 10
    assert {(job.state, job.attempt) for job in ended} == {(State.SUCCEEDED, 1)}
    assert (after.started, after.succeeded, after.lost, after.trouble) == (17, 17, 0, None)


class CountsTransactions(SqliteStore):
    """Counts how often somebody wants to write."""

    begun = 0

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        self.begun += 1
        with super().transaction():
            yield


@pytest.mark.parametrize(
    ("lasts", "attempt"), [(30, 1), (80, 2)], ids=["a while", "beyond the lease"]
)
async def test_M5_on_a_full_disk_callers_are_told_and_what_is_in_hand_gets_its_end(
    autojump_clock: MockClock,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    lasts: float,
    attempt: int,
) -> None:
    large = Kind("large", None, str)
    may_end = trio.Event()

    async def handle(attempt: Attempt[None, str]) -> str:
        await may_end.wait()
        return "x" * 100_000  # an end that needs space

    store = CountsTransactions(tmp_path / "jobs.db")
    async with (
        trio_jobs.open_jobs(store) as jobs,
        serving(jobs, large.handled_by(handle), workers=4, lease=60) as runner,
    ):
        in_hand = await jobs.enqueue_many(large, [None] * 4)
        await eventually(lambda: runner.statistics().running == 4)
        [(pages,)] = writer(store).execute("PRAGMA page_count")
        writer(store).execute(f"PRAGMA max_page_count = {pages}")
        may_end.set()
        await eventually(lambda: runner.statistics().trouble is not None)
        before = store.begun
        with pytest.raises(StoreError, match="adding jobs: database or disk is full"):
            await jobs.enqueue_many(plain, [None] * 10_000)
        await trio.sleep(lasts)
        trouble, tries = runner.statistics().trouble, store.begun - before
        lines = warnings_of(caplog)
        writer(store).execute("PRAGMA max_page_count = 1000000")
        ended = await finished(jobs, *in_hand)
        everything = await jobs.find()

    assert attempt > 1 or (trouble is not None and "database or disk is full" in trouble)
    assert tries <= 4 * lasts, "it is tried again, but not all the time"
    assert 1 <= len(lines) <= 10
    assert {(job.state, job.attempt) for job in ended} == {(State.SUCCEEDED, attempt)}
    assert [job.id for job in everything] == [job.id for job in in_hand]
    with contextlib.closing(sqlite3.connect(tmp_path / "jobs.db")) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


async def test_L7_trouble_that_comes_again_is_told_again(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """Once for each step that it hinders: claims, and ends."""
    store = Trouble(":memory:")
    lines: list[int] = []
    async with (
        trio_jobs.open_jobs(store) as jobs,
        serving(jobs, plain.handled_by(Script(sleeps(1, 7)))),
    ):
        for _ in range(3):
            job = await jobs.enqueue(plain, None)
            await trio.sleep(0.5)
            store.rule = lambda step: busy() if step == "begin" else None
            await trio.sleep(10)
            store.rule = lambda step: None
            await finished(jobs, job)
            lines.append(len(warnings_of(caplog)))
            caplog.clear()

    assert all(1 <= count <= 2 for count in lines)


async def test_a_store_that_waiting_cannot_mend_ends_serve_with_its_error(
    autojump_clock: MockClock,
) -> None:
    store = Trouble(":memory:")
    corrupt = StoreError("database disk image is malformed")
    corrupt.is_permanent = True
    async with trio_jobs.open_jobs(store) as jobs:
        job = await jobs.enqueue(plain, None)
        store.rule = lambda step: corrupt if step == "claim" else None
        with pytest.raises(StoreError, match="malformed"), trio.fail_after(30):
            await trio_jobs.serve(jobs, [plain.handled_by(Script(forever))])
        store.rule = lambda step: None

        assert (await jobs.get(job)).state is State.QUEUED


# Every single step fails once.

KINDS = {
    "returns": Kind("returns", None, int),
    "retried": Kind("retried", None, int, retry=Retry(backoff=constant(3))),
    "later": Kind("later", None, int),
    "dies": Kind("dies", None, int, retry=Retry(attempts=2, backoff=constant(1))),
    "refused": Kind("refused", None, int),
    "publishes": Kind("publishes", None, int, retry=Retry(attempts=9, backoff=constant(1))),
    "long": Kind("long", None, int),
    "cancelled": Kind("cancelled", None, int),
    "expires": Kind("expires", None, int),
}
ENDED = {
    "returns": State.SUCCEEDED,
    "retried": State.SUCCEEDED,
    "later": State.SUCCEEDED,
    "dies": State.DEAD,
    "refused": State.FAILED,
    "publishes": State.SUCCEEDED,
    "long": State.SUCCEEDED,
    "cancelled": State.CANCELLED,
    "expires": State.FAILED,
}


async def publish_twice(attempt: Attempt[Any, Any]) -> int:
    await attempt.publish(1)
    await attempt.publish(2)
    return 3


def handlers() -> list[trio_jobs.Handler]:
    steps: dict[str, list[object]] = {
        "returns": [1],
        "retried": [ValueError(), 1],
        "later": [RetryLater(4), 1],
        "dies": [ValueError()],
        "refused": [Fail("no", retry=False)],
        "publishes": [publish_twice],
        "long": [sleeps(10, 1)],
        "cancelled": [forever],
        "expires": [1],
    }
    return [KINDS[name].handled_by(Script(*steps[name])) for name in KINDS]


async def surely(call: Callable[[], Awaitable[T]]) -> T:
    """What an application does that has to get through: ask again."""
    while True:
        try:
            return await call()
        except StoreError:
            await trio.sleep(1)


async def a_day_at_work(jobs: Jobs) -> tuple[dict[str, Job[int]], Any]:
    """One job of every kind, enqueued with a key, until all have ended."""
    async with serving(jobs, *handlers(), lease=6, workers=3) as runner:
        enqueued: dict[str, Job[int]] = {}
        for name, kind in KINDS.items():
            deadline, delay = (at(30), 60) if name == "expires" else (None, None)
            enqueued[name] = await surely(
                partial(jobs.enqueue, kind, None, key="k", deadline=deadline, delay=delay)
            )
        await trio.sleep(2)
        await surely(partial(jobs.cancel, enqueued["cancelled"]))
        ended = {}
        for name, job in enqueued.items():
            with trio.fail_after(200):
                ended[name] = await surely(partial(jobs.wait_finished, job))
        await trio.sleep(1)
        statistics = runner.statistics()
    return ended, statistics


def steps_of_a_day() -> list[str]:
    steps: list[str] = []

    async def main() -> None:
        store = Trouble(":memory:")
        store.rule = lambda step: steps.append(step)
        async with trio_jobs.open_jobs(store) as jobs:
            await a_day_at_work(jobs)

    trio.run(main, clock=MockClock(autojump_threshold=0))
    return steps


FAULTS: dict[str, tuple[Callable[[], StoreError], Callable[[str], bool]]] = {
    "busy": (busy, lambda step: step not in ("commit", "committed")),
    "error": (io_error, lambda step: step != "committed"),
    "unknown, not done": (unknown, lambda step: step == "commit"),
    "unknown, done": (unknown, lambda step: step == "committed"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_store_that_fails_at_any_one_step_loses_nothing_and_leaves_nothing_stuck(
    fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, "trio_jobs")
    error, applies = FAULTS[fault]
    steps = steps_of_a_day()
    assert len(steps) > 100

    for number in range(sum(map(applies, steps)) + 2):
        trio.run(partial(day_with_a_fault, number, error, applies), clock=autojump())


def autojump() -> MockClock:
    return MockClock(autojump_threshold=0)


async def day_with_a_fault(
    number: int, error: Callable[[], StoreError], applies: Callable[[str], bool]
) -> None:
    """The step of that number fails, counting those that can fail so."""
    store = Trouble(":memory:")
    taken: list[str] = []
    failed: list[int] = []
    fitting = itertools.count()

    def rule(step: str) -> StoreError | None:
        taken.append(step)
        if applies(step) and next(fitting) == number:
            failed.append(len(taken))
            return error()
        return None

    store.rule = rule
    async with trio_jobs.open_jobs(store) as jobs:
        ended, statistics = await a_day_at_work(jobs)
        store.rule = lambda step: None
        counts = await jobs.counts()
        rows = [await row_of(jobs, job) for job in ended.values()]
        records = {name: await jobs.history(job) for name, job in ended.items()}
        assert_no_transaction_is_open(store)

    [failed_at] = failed or [len(taken)]
    where = f"step {failed_at}: {taken[max(0, failed_at - 3) : failed_at + 3]}"
    assert {name: job.state for name, job in ended.items()} == ENDED, where
    # A repeated enqueue finds the job that is there as long as that has not ended.
    doubles = sum(counts.values()) - len(KINDS)
    assert 0 <= doubles <= (error is unknown), where
    assert all(row.lease_until is None for row in rows), where
    assert statistics.running == 0, where
    assert statistics.trouble is None, where
    # What a claim of unknown outcome has ended (a deadline) is nobody's to count.
    uncounted = 8 + doubles - statistics.succeeded - statistics.failed
    assert 0 <= uncounted <= (error is unknown), where
    assert statistics.succeeded == counts[State.SUCCEEDED], where
    # What a claim of unknown outcome took is lost until its lease ends, nothing else is.
    lost = sum(past.outcome == "lost" for record in records.values() for past in record)
    assert lost == statistics.lost <= (3 if error is unknown else 0), where
