"""Blocking calls off the Trio thread: gathering, outcomes, cancellation, closing, held time."""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import random
import signal
import sqlite3
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import outcome
import pytest
import trio
import trio.testing
from stories import PassThrough, is_cancelled_after
from trio.testing import MockClock

import trio_jobs
from trio_jobs import (
    Job,
    Jobs,
    Kind,
    SqliteStore,
    State,
    StoreBusy,
    StoreError,
    _bridge,
    _hub,
    _lifecycle,
    testing,
)
from trio_jobs._batch import MAX_BATCH, Write
from trio_jobs._bridge import Bridge, bridges_here
from trio_jobs._clock import Clock
from trio_jobs._drivers import Connection, Driver, Record, Values
from trio_jobs._hub import Hub, join_hub, leave_hub
from trio_jobs._lookout import Lookout
from trio_jobs._model import Change, Claim, Claimed, NewJob, Policy, Row

LONG = 10.0
"""Seconds after which something hangs."""

kind = Kind("k", int)


def new_job(number: int = 0, *, key: str | None = None, priority: int = 0) -> NewJob:
    return NewJob(
        kind="k",
        payload=b"%d" % number,
        raw=False,
        priority=priority,
        enqueued_at=0,
        run_at=0,
        deadline=None,
        key=key,
    )


class GatedStore(SqliteStore):
    """Notes what goes into each transaction, and holds it there while the gate is closed."""

    def __init__(self, path: str | Path, **settings: Any) -> None:
        super().__init__(path, **settings)
        self.batches: list[list[tuple[str, int]]] = []
        self.is_inside = threading.Event()
        self.gate = threading.Event()
        self.gate.set()

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        with super().transaction():
            self.batches.append([])
            yield
            self.is_inside.set()
            if not self.gate.wait(LONG):
                raise RuntimeError("the gate was never opened")

    def add(self, jobs: Sequence[NewJob]) -> list[tuple[Row, bool]]:
        self.batches[-1].append(("add", len(jobs)))
        return super().add(jobs)

    def apply(self, changes: Sequence[Change]) -> list[Any]:
        self.batches[-1].append(("apply", len(changes)))
        return super().apply(changes)

    def claim(self, claim: Claim) -> Claimed:
        self.batches[-1].append(("claim", claim.limit))
        return super().claim(claim)

    @contextlib.asynccontextmanager
    async def closed_gate(self, first: Callable[[], Awaitable[object]]) -> AsyncIterator[None]:
        """While the block runs, a transaction with what `first` writes is under way."""
        self.is_inside.clear()
        self.gate.clear()
        async with trio.open_nursery() as nursery:
            try:
                nursery.start_soon(first)
                inside = await trio.to_thread.run_sync(self.is_inside.wait, LONG)
                assert inside
                yield
            finally:
                self.gate.set()


@contextlib.asynccontextmanager
async def open_bridge(
    store: SqliteStore, tell: Callable[[Sequence[Row]], None] = lambda rows: None
) -> AsyncIterator[Bridge]:
    bridge = Bridge(store, Clock(), tell)
    with trio.fail_after(LONG):
        await bridge.open()
        try:
            yield bridge
        finally:
            await bridge.close()


@pytest.fixture
def gated(tmp_path: Path) -> GatedStore:
    return GatedStore(tmp_path / "jobs.db")


def stored_keys(path: Path) -> list[str | None]:
    with contextlib.closing(sqlite3.connect(path)) as connection:
        return [key for (key,) in connection.execute("SELECT key FROM trio_jobs_job ORDER BY id")]


# Gathering.


async def test_writes_gather_while_a_commit_is_under_way(gated: GatedStore) -> None:
    async with (
        open_bridge(gated) as bridge,
        trio.open_nursery() as nursery,
        gated.closed_gate(lambda: bridge.add([new_job()])),
    ):
        for number in range(20):
            nursery.start_soon(bridge.add, [new_job(number)])
        await trio.testing.wait_all_tasks_blocked()

    assert gated.batches == [[("add", 1)], [("add", 20)]]


async def test_writes_of_one_tick_go_together_when_they_are_made_inline() -> None:
    store = GatedStore(":memory:")

    async with open_bridge(store) as bridge, trio.open_nursery() as nursery:
        for number in range(20):
            nursery.start_soon(bridge.add, [new_job(number)])

    assert store.batches == [[("add", 20)]]


async def test_a_lonely_write_waits_for_no_company(
    store: SqliteStore, autojump_clock: MockClock
) -> None:
    async with open_bridge(store) as bridge:
        await bridge.add([new_job()])

    assert trio.current_time() == 0


@pytest.mark.parametrize("path", [":memory:", "file"])
async def test_a_batch_is_bounded_and_all_that_is_left_goes_into_the_next(
    path: str, tmp_path: Path
) -> None:
    store = GatedStore(path if path == ":memory:" else tmp_path / path)

    async with open_bridge(store) as bridge:
        writes = [Write("add", [new_job(number)]) for number in range(2 * MAX_BATCH + 1)]
        bridge.submit(*writes)
        added = [await bridge.outcome_of(write) for write in writes]

    assert store.batches == [[("add", MAX_BATCH)], [("add", MAX_BATCH)], [("add", 1)]]
    assert [row.id for [(row, _)] in added] == list(range(1, len(writes) + 1))


async def test_a_claim_sees_the_ends_and_adds_of_its_batch(store: SqliteStore) -> None:
    policy = Policy(attempts=1, on_interrupt="retry", wait=lambda job_id, attempt: 0)
    claim = Claim(policies={"k": policy}, limit=5, lost_limit=0, now=5, lease_now=5, lease_until=10)

    async with open_bridge(store) as bridge:
        writes = [Write("claim", claim), Write("add", [new_job()])]
        bridge.submit(*writes)
        claimed, [(row, _)] = [await bridge.outcome_of(write) for write in writes]

    assert [job.row.id for job in claimed.jobs] == [row.id]


async def test_what_a_write_says_is_asked_for_when_its_batch_is_formed(gated: GatedStore) -> None:
    asked = threading.Event()

    def items() -> list[NewJob]:
        asked.set()
        return [new_job(key="late")]

    async with open_bridge(gated) as bridge:
        async with gated.closed_gate(lambda: bridge.add([new_job()])):
            write = Write("add", items)
            bridge.submit(write)
            await trio.testing.wait_all_tasks_blocked()
            asked_early = asked.is_set()
        [(row, is_new)] = await bridge.outcome_of(write)

    assert not asked_early
    assert (row.key, is_new) == ("late", True)


async def test_a_look_claims_only_if_somebody_else_has_committed(tmp_path: Path) -> None:
    path = tmp_path / "jobs.db"

    policy = Policy(attempts=1, on_interrupt="retry", wait=lambda job_id, attempt: 0)
    claim = Claim(policies={"k": policy}, limit=5, lost_limit=0, now=5, lease_now=5, lease_until=10)

    async def look(unless: Hashable) -> tuple[Any, object]:
        write = Write("claim", claim)
        write.unless = unless
        bridge.submit(write)
        return await bridge.outcome_of(write), write.version

    async with open_bridge(SqliteStore(path)) as bridge, open_bridge(SqliteStore(path)) as other:
        first, version = await look(())
        await bridge.add([new_job()])  # told by other ways
        second, same = await look(version)
        await other.add([new_job()])
        third, changed = await look(version)

    assert first.jobs == []
    assert (second, same) == (None, version)
    assert len(third.jobs) == 2
    assert changed != version


async def test_rows_are_told_before_their_writers_go_on(store: SqliteStore) -> None:
    events: list[str] = []

    async with open_bridge(store, lambda rows: events.append(f"told {len(rows)}")) as bridge:
        await bridge.add([new_job(key="a"), new_job(key="b")])
        events.append("added")
        await bridge.add([new_job(key="a")])
        events.append("found")

    assert events == ["told 2", "added", "found"]


# Outcomes.


async def test_each_of_many_callers_gets_its_own_outcome(store: SqliteStore) -> None:
    results: dict[int, list[Row]] = {}

    async def add(bridge: Bridge, number: int) -> None:
        jobs = [new_job(key=f"{number}/{index}") for index in range(number % 4)]
        results[number] = [row for row, _ in await bridge.add(jobs)]

    async with open_bridge(store) as bridge, trio.open_nursery() as nursery:
        for number in range(300):
            nursery.start_soon(add, bridge, number)

    assert {number: [row.key for row in rows] for number, rows in results.items()} == {
        number: [f"{number}/{index}" for index in range(number % 4)] for number in range(300)
    }


class PickyStore(GatedStore):
    """Refuses jobs with the key "bad", in whatever way it is told to."""

    error: Exception = StoreError("no such column: luck")

    def add(self, jobs: Sequence[NewJob]) -> list[tuple[Row, bool]]:
        added = super().add(jobs)
        if any(job.key == "bad" for job in jobs):
            raise self.error
        return added


@pytest.mark.parametrize("error", [StoreError("no such column: luck"), ZeroDivisionError("odd")])
@pytest.mark.parametrize("path", [":memory:", "file"])
async def test_a_bad_write_does_not_hurt_its_neighbours(
    path: str, tmp_path: Path, error: Exception
) -> None:
    store = PickyStore(path if path == ":memory:" else tmp_path / path)
    store.error = error

    async with open_bridge(store) as bridge:
        writes = [
            Write("add", [new_job(key="bad" if number == 7 else f"good {number}")])
            for number in range(20)
        ]
        bridge.submit(*writes)
        outcomes = [await outcome.acapture(bridge.outcome_of, write) for write in writes]
        stored = await bridge.read(
            lambda store: store.find(states=(), kind=None, after=0, limit=100)
        )

    failed = [index for index, one in enumerate(outcomes) if isinstance(one, outcome.Error)]
    assert failed == [7]
    with pytest.raises(type(error), match=str(error)):
        outcomes[7].unwrap()
    assert {row.key for row in stored} == {f"good {n}" for n in range(20) if n != 7}
    assert {row.id for row in stored} == {
        row.id for one in outcomes if isinstance(one, outcome.Value) for row, _ in one.unwrap()
    }


async def test_a_value_that_sqlite_cannot_hold_fails_only_its_own_call(
    store: SqliteStore,
) -> None:
    async with open_bridge(store) as bridge:
        writes = [Write("add", [new_job(priority=priority)]) for priority in (1, 2**70, 3)]
        bridge.submit(*writes)
        outcomes = [await outcome.acapture(bridge.outcome_of, write) for write in writes]

    # An error that its caller keeps (it did, here) does not keep the file from closing.
    assert [type(one) for one in outcomes] == [outcome.Value, outcome.Error, outcome.Value]


async def test_items_that_raise_fail_only_their_own_call(store: SqliteStore) -> None:
    def items() -> list[NewJob]:
        raise ZeroDivisionError

    async with open_bridge(store) as bridge:
        writes = [Write("add", [new_job()]), Write("add", items), Write("add", [new_job()])]
        bridge.submit(*writes)
        outcomes = [await outcome.acapture(bridge.outcome_of, write) for write in writes]

    assert [type(one) for one in outcomes] == [outcome.Value, outcome.Error, outcome.Value]


class FaultyConnection(PassThrough):
    """A connection that does something else on its next COMMITs."""

    def __init__(self, real: Connection, faults: list[str]) -> None:
        super().__init__(real)
        self._faults = faults
        self._is_blind = False

    def execute(self, sql: str, values: Values = ()) -> list[Record]:
        if self._is_blind and sql.startswith("SELECT"):
            self._is_blind = False
            raise StoreError("disk I/O error")
        fault = self._faults.pop(0) if sql == "COMMIT" and self._faults else ""
        if "before" in fault:
            self.real.execute("ROLLBACK")
        elif "after" in fault:
            self.real.execute(sql, values)
        if not fault:
            return self.real.execute(sql, values)
        self._is_blind = "blind" in fault
        raise StoreError("disk I/O error")


def make_faulty(store: SqliteStore) -> list[str]:
    """Let the store's connections fail; what is put into the list is the next fault."""
    faults: list[str] = []
    connect = store.connect
    store.connect = lambda path: FaultyConnection(connect(path), faults)
    return faults


async def add_together(bridge: Bridge, number: int) -> list[outcome.Outcome[Any]]:
    writes = [Write("add", [new_job(key=str(index))]) for index in range(number)]
    bridge.submit(*writes)
    return [await outcome.acapture(bridge.outcome_of, write) for write in writes]


async def keys_in(bridge: Bridge) -> list[str | None]:
    rows = await bridge.read(lambda store: store.find(states=(), kind=None, after=0, limit=100))
    return [row.key for row in rows]


@pytest.mark.parametrize("took_place", [True, False])
async def test_after_a_commit_that_failed_once_each_write_is_done_once_whether_it_took_place_or_not(
    store: SqliteStore, took_place: bool
) -> None:
    faults = make_faulty(store)

    async with open_bridge(store) as bridge:
        faults.append("after" if took_place else "before")
        outcomes = await add_together(bridge, 3)
        keys = await keys_in(bridge)

    assert [type(one) for one in outcomes] == [outcome.Value] * 3
    assert keys == ["0", "1", "2"]


async def test_commits_that_go_on_failing_raise_and_leave_nothing(store: SqliteStore) -> None:
    faults = make_faulty(store)

    async with open_bridge(store) as bridge:
        faults.extend(["before"] * 4)
        outcomes = await add_together(bridge, 3)
        keys = await keys_in(bridge)
        again = await add_together(bridge, 3)

    for one in outcomes:
        with pytest.raises(StoreError, match="disk I/O error") as caught:
            one.unwrap()
        assert not caught.value.is_outcome_unknown
    assert keys == []
    assert [type(one) for one in again] == [outcome.Value] * 3


@pytest.mark.parametrize(
    ("fault", "stored"), [("before and blind", []), ("after and blind", ["0", "1", "2"])]
)
async def test_a_commit_nobody_knows_the_end_of_says_so_and_is_not_repeated(
    store: SqliteStore, fault: str, stored: list[str]
) -> None:
    faults = make_faulty(store)

    async with open_bridge(store) as bridge:
        faults.append(fault)
        outcomes = await add_together(bridge, 3)
        keys = await keys_in(bridge)

    errors = []
    for one in outcomes:
        with pytest.raises(StoreError, match="outcome is unknown") as caught:
            one.unwrap()
        assert caught.value.is_outcome_unknown
        errors.append(caught.value)
    assert len(set(map(id, errors))) == 3
    assert keys == stored


@pytest.mark.parametrize("fault", ["before and blind", "after and blind"])
async def test_with_a_key_an_enqueue_of_unknown_outcome_is_safe_to_repeat(
    store: SqliteStore, fault: str
) -> None:
    faults = make_faulty(store)

    async with trio_jobs.open_jobs(store) as jobs:
        faults.append(fault)
        with pytest.raises(StoreError, match="outcome is unknown"):
            await jobs.enqueue(kind, 1, key="once")
        job = await jobs.enqueue(kind, 1, key="once")
        found = await jobs.find()

    assert [one.id for one in found] == [job.id]


async def test_M1_a_lock_that_others_keep_is_StoreBusy_for_everybody_after_one_patience(
    tmp_path: Path,
) -> None:
    path = tmp_path / "jobs.db"
    store = GatedStore(path, busy_timeout=0.2)

    async with open_bridge(store) as bridge:
        with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as outside:
            outside.execute("BEGIN IMMEDIATE")
            start = time.monotonic()
            outcomes = await add_together(bridge, 30)
            waited = time.monotonic() - start
            outside.execute("ROLLBACK")
        keys = await keys_in(bridge)
        again = await add_together(bridge, 1)

    errors: list[BaseException] = []
    for one in outcomes:
        with pytest.raises(StoreBusy) as caught:
            one.unwrap()
        errors.append(caught.value)
    assert len(set(map(id, errors))) == 30
    assert keys == []
    assert 0.2 <= waited < 30 * 0.2
    assert isinstance(again[0], outcome.Value)


async def test_M1_a_lock_that_is_given_back_in_time_is_no_error(tmp_path: Path) -> None:
    path = tmp_path / "jobs.db"
    tries = 0

    def sleep(seconds: float) -> None:
        nonlocal tries
        tries += 1
        if tries == 20:
            outside.execute("ROLLBACK")
        time.sleep(seconds)

    store = SqliteStore(path, busy_timeout=LONG)
    async with open_bridge(store) as bridge:
        store.sleep = sleep
        with contextlib.closing(
            sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        ) as outside:
            outside.execute("BEGIN IMMEDIATE")
            [(row, is_new)] = await bridge.add([new_job(key="patient")])

    assert tries == 20
    assert (row.key, is_new) == ("patient", True)


# Cancelling.


async def test_a_write_that_is_cancelled_before_it_is_taken_is_withdrawn(
    gated: GatedStore,
) -> None:
    async with open_bridge(gated) as bridge:
        async with gated.closed_gate(lambda: bridge.add([new_job(key="first")])):
            with trio.CancelScope() as scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(bridge.add, [new_job(key="cancelled")])
                    nursery.start_soon(bridge.add, [new_job(key="cancelled too")])
                    await trio.testing.wait_all_tasks_blocked()
                    scope.cancel()
            # Here, while the first is still under way.
            is_first_under_way = not gated.gate.is_set()
        keys = await keys_in(bridge)

    assert is_first_under_way
    assert scope.cancelled_caught
    assert keys == ["first"]


async def test_many_writes_are_withdrawn_at_once_without_a_search_for_each(
    gated: GatedStore,
) -> None:
    """With a search 20,000 of them kept the loop busy for four seconds."""
    writes = [Write("add", [new_job()]) for _ in range(20_000)]
    async with open_bridge(gated) as bridge:
        async with gated.closed_gate(lambda: bridge.add([new_job(key="first")])):
            bridge.submit(*writes)
            start = time.thread_time()
            withdrawn = [bridge.withdraw(write) for write in reversed(writes)]
            took = time.thread_time() - start
        keys = await keys_in(bridge)

    assert all(withdrawn)
    assert took < 1
    assert keys == ["first"]


async def test_a_write_that_is_cancelled_after_it_was_taken_gives_its_outcome(
    gated: GatedStore,
) -> None:
    results: list[Any] = []
    scope = trio.CancelScope()

    async def add() -> None:
        with scope:
            results.append(await bridge.add([new_job(key="taken")]))

    async with open_bridge(gated) as bridge:
        async with gated.closed_gate(add):
            scope.cancel()
            await trio.testing.wait_all_tasks_blocked()
            results_before = list(results)
        keys = await keys_in(bridge)

    assert results_before == []
    assert [row.key for [(row, _)] in results] == ["taken"]
    assert not scope.cancelled_caught
    assert keys == ["taken"]


async def test_while_somebody_else_has_the_lock_writes_gather_and_can_be_withdrawn(
    tmp_path: Path,
) -> None:
    """So a stop is bounded, however long the lock is waited for."""
    path = tmp_path / "jobs.db"
    store = GatedStore(path, busy_timeout=LONG)
    waits = threading.Event()
    sleep = store.sleep

    def wait(seconds: float) -> None:
        waits.set()
        sleep(seconds)

    store.sleep = wait
    async with open_bridge(store) as bridge:
        with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            async with trio.open_nursery() as nursery:
                with trio.move_on_after(LONG) as scope:
                    nursery.start_soon(bridge.add, [new_job(key="first")])
                    await trio.to_thread.run_sync(waits.wait, LONG)
                    nursery.start_soon(bridge.add, [new_job(key="second")])
                    scope.cancel()
                    await bridge.add([new_job(key="cancelled")])
                await trio.testing.wait_all_tasks_blocked()
                with trio.move_on_after(0) as withdrawn:
                    await bridge.add([new_job(key="withdrawn")])
                other.execute("ROLLBACK")
        keys = await keys_in(bridge)

    assert scope.cancelled_caught
    assert withdrawn.cancelled_caught
    assert keys == ["first", "second"]
    assert store.batches == [[("add", 2)]]


async def test_who_comes_late_has_the_whole_timeout_to_wait_for_the_lock(tmp_path: Path) -> None:
    path = tmp_path / "jobs.db"
    store = GatedStore(path, busy_timeout=0.05)
    pauses: list[float] = []
    late = threading.Event()

    def wait(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 50:
            trio.from_thread.run_sync(late.set, trio_token=token)
            gathered.wait(LONG)

    store.sleep = wait
    token = trio.lowlevel.current_trio_token()
    gathered = threading.Event()
    refused: list[str] = []

    async def add(key: str) -> None:
        try:
            await bridge.add([new_job(key=key)])
        except StoreBusy:
            refused.append(key)

    async with open_bridge(store) as bridge:
        with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            async with trio.open_nursery() as nursery:
                nursery.start_soon(add, "early")
                await trio.to_thread.run_sync(late.wait, LONG)
                nursery.start_soon(add, "late")
                await trio.testing.wait_all_tasks_blocked()
                gathered.set()

    assert sorted(refused) == ["early", "late"]
    assert sum(pauses) >= 0.1


ENDLESS = """
WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n WHERE x > 0) SELECT max(x) FROM n
"""


@pytest.mark.parametrize("driver", ["sqlite3", "apsw"])
@pytest.mark.parametrize("is_cancelled", [True, False])
async def test_a_read_without_end_holds_up_neither_its_caller_nor_the_end_of_the_block(
    tmp_path: Path, driver: Driver, is_cancelled: bool
) -> None:
    begun = threading.Event()

    def read(store: Any) -> object:
        begun.set()
        return store._connections.query(ENDLESS)

    ends: list[str] = []

    async def reader(jobs: Jobs, scope: trio.CancelScope) -> None:
        with scope:
            try:
                await jobs._bridge.read(read)
            except trio.ClosedResourceError:
                ends.append("closed")
        if scope.cancelled_caught:
            ends.append("cancelled")

    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            store = SqliteStore(tmp_path / "jobs.db", driver=driver)
            async with trio_jobs.open_jobs(store) as jobs:
                scope = trio.CancelScope()
                nursery.start_soon(reader, jobs, scope)
                await trio.to_thread.run_sync(begun.wait)
                if is_cancelled:
                    scope.cancel()
                    while not ends:
                        await trio.lowlevel.checkpoint()

    assert ends == ["cancelled" if is_cancelled else "closed"]


async def test_in_a_cancelled_scope_nothing_is_written(store: SqliteStore) -> None:
    async with open_bridge(store) as bridge:
        with trio.CancelScope() as scope:
            scope.cancel()
            await bridge.add([new_job()])
        keys = await keys_in(bridge)

    assert scope.cancelled_caught
    assert keys == []


async def test_what_fails_on_hearing_of_a_commit_keeps_nobody_from_hearing_of_it(
    store: SqliteStore, caplog: pytest.LogCaptureFixture
) -> None:
    """Trio itself calls it, so what was raised ended the whole program."""

    def fail(*args: object) -> None:
        raise ZeroDivisionError("theirs")

    async with trio_jobs.open_jobs(store) as jobs:
        job = await jobs.enqueue(kind, 0)
        change = _lifecycle.cancelled((await jobs.get(job))._row, 1)
        assert change is not None
        jobs._bridge._tell = fail
        with trio.fail_after(30):
            assert await jobs._bridge.apply(change, fail) is None
            await jobs.enqueue(kind, 0)

    assert caplog.messages == ["what was to hear of a commit failed"] * 3


async def test_whoever_stops_waiting_for_what_was_submitted_does_not_stop_it(
    gated: GatedStore,
) -> None:
    async with open_bridge(gated) as bridge:
        async with gated.closed_gate(lambda: bridge.add([new_job(key="first")])):
            write = Write("add", [new_job(key="second")])
            bridge.submit(write)
            with trio.move_on_after(0) as scope:
                await bridge.outcome_of(write)
        [(row, is_new)] = await bridge.outcome_of(write)
        keys = await keys_in(bridge)

    assert scope.cancelled_caught
    assert (row.key, is_new) == ("second", True)
    assert keys == ["first", "second"]


async def _keys(jobs: Jobs, start: str) -> int:
    return sum((job.key or "").startswith(start) for job in await jobs.find(limit=10_000))


Call = Callable[[Jobs, Job[Any], str], Awaitable[Any]]

CALLS: dict[str, tuple[Call, Call, object, object]] = {
    # what to call, what to look at, what is seen if it did not take place, and if it did
    "enqueue": (
        lambda jobs, job, name: jobs.enqueue(kind, 1, key=name),
        lambda jobs, job, name: _keys(jobs, name),
        0,
        1,
    ),
    "enqueue_many": (
        lambda jobs, job, name: jobs.enqueue_many(
            kind, range(100), keys=[f"{name}/{number}" for number in range(100)]
        ),
        lambda jobs, job, name: _keys(jobs, name + "/"),
        0,
        100,
    ),
    "cancel": (
        lambda jobs, job, name: jobs.cancel(job),
        lambda jobs, job, name: _state(jobs, job),
        State.QUEUED,
        State.CANCELLED,
    ),
    "retry": (
        lambda jobs, job, name: jobs.retry(job),
        lambda jobs, job, name: _state(jobs, job),
        State.CANCELLED,
        State.QUEUED,
    ),
}


async def _state(jobs: Jobs, job: Job[Any]) -> State:
    return (await jobs.get(job)).state


def write_from_outside(store: SqliteStore, path: Path) -> None:
    """Take the lock as another process would; fails if it is not free within a second."""
    if store._driver == "apsw":
        apsw = pytest.importorskip("apsw")
        connection = apsw.Connection(str(path))
        connection.set_busy_timeout(1000)
    else:
        connection = sqlite3.connect(path, timeout=1, isolation_level=None)
    with contextlib.closing(connection):
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("ROLLBACK")


@pytest.mark.parametrize("name", CALLS)
async def test_M4_a_call_cancelled_at_any_point_took_place_if_it_returned_and_only_then(
    store: SqliteStore, tmp_path: Path, name: str
) -> None:
    call, look, absent, present = CALLS[name]
    returned: list[bool] = []

    async with trio_jobs.open_jobs(store) as jobs:
        was_in_time = True
        while was_in_time:
            step = f"step {len(returned)}"
            job = await jobs.enqueue(kind, 0)
            if name == "retry":
                await jobs.cancel(job)
            was_cancelled, was_in_time = await is_cancelled_after(
                len(returned), functools.partial(call, jobs, job, step)
            )

            assert await look(jobs, job, step) == (absent if was_cancelled else present)
            assert not await bridges_here()[0].wait_quiet()
            if not store.inline:
                write_from_outside(store, tmp_path / "jobs.db")
            returned.append(not was_cancelled)

    assert not returned[0]
    assert returned[-1]


@pytest.mark.parametrize("name", CALLS)
async def test_M4_a_call_cancelled_in_the_middle_of_its_transaction_returns_what_it_did(
    gated: GatedStore, tmp_path: Path, name: str
) -> None:
    call, look, _, present = CALLS[name]
    scope = trio.CancelScope()
    returned: list[object] = []

    async with trio_jobs.open_jobs(gated) as jobs:
        job = await jobs.enqueue(kind, 0)
        if name == "retry":
            await jobs.cancel(job)

        async def run() -> None:
            with scope:
                returned.append(await call(jobs, job, "under way"))

        async with gated.closed_gate(run):
            scope.cancel()
            await trio.testing.wait_all_tasks_blocked()
            returned_before = list(returned)

        assert await look(jobs, job, "under way") == present
        write_from_outside(gated, tmp_path / "jobs.db")

    assert returned_before == []
    assert len(returned) == 1
    assert not scope.cancelled_caught


READS: dict[str, Call] = {
    "get": lambda jobs, job, name: jobs.get(job),
    "find": lambda jobs, job, name: jobs.find(),
    "history": lambda jobs, job, name: jobs.history(job),
    "counts": lambda jobs, job, name: jobs.counts(),
    "wait_finished": lambda jobs, job, name: jobs.wait_finished(job),
}


@pytest.mark.parametrize("name", READS)
async def test_M4_a_read_cancelled_at_any_point_leaves_nothing_behind(
    store: SqliteStore, tmp_path: Path, name: str
) -> None:
    steps, was_in_time = 0, True

    async with trio_jobs.open_jobs(store) as jobs:
        job = await jobs.enqueue(kind, 0)
        await jobs.cancel(job)
        while was_in_time:
            _, was_in_time = await is_cancelled_after(
                steps, functools.partial(READS[name], jobs, job, "")
            )
            steps += 1

            assert not jobs._waiters
            if name == "wait_finished":
                await testing.settled()  # the read is for all who wait, and goes on
            assert not await bridges_here()[0].wait_quiet()
            if not store.inline:
                write_from_outside(store, tmp_path / "jobs.db")

    assert steps >= 3


async def test_M4_a_wait_cancelled_at_any_point_while_its_job_ends_leaves_nothing_behind(
    store: SqliteStore,
) -> None:
    returned: list[bool] = []
    was_in_time = True

    async with trio_jobs.open_jobs(store) as jobs:

        async def wait() -> None:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(end)
                waited = await jobs.wait_finished(job)
            assert waited.state is State.CANCELLED

        async def end() -> None:
            with trio.CancelScope(shield=True):
                await jobs.cancel(job)

        while was_in_time:
            job = await jobs.enqueue(kind, 0)
            was_cancelled, was_in_time = await is_cancelled_after(len(returned), wait)
            returned.append(not was_cancelled)

            assert await _state(jobs, job) is State.CANCELLED
            assert not jobs._waiters
            await testing.settled()  # who waits also has the log watched, which may go on

    assert not returned[0]
    assert returned[-1]


async def test_M4_50_tasks_that_are_cancelled_at_random_disturb_nobody(
    store: SqliteStore, tmp_path: Path
) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    returned: set[str] = set()
    cancelled: set[str] = set()
    waiting: dict[int, trio.CancelScope] = {}

    async def enqueue(jobs: Jobs, task: int) -> None:
        for number in range(10):
            if waiting and dice.random() < 0.1:  # in the tick in which others begin to wait, too
                dice.choice([*waiting.values()]).cancel()
            with trio.CancelScope() as scope:
                if number:  # not the first, or on a busy disk none would ever return
                    waiting[task] = scope
                await jobs.enqueue(kind, number, key=f"{task}/{number}")
                returned.add(f"{task}/{number}")
            waiting.pop(task, None)
            if scope.cancelled_caught:
                cancelled.add(f"{task}/{number}")

    async def cancel_some() -> None:
        while len(returned) + len(cancelled) < 500:
            for scope in dice.sample([*waiting.values()], min(len(waiting), 5)):
                scope.cancel()
            for _ in range(dice.randrange(5)):
                await trio.lowlevel.checkpoint()

    async with trio_jobs.open_jobs(store) as jobs, trio.open_nursery() as nursery:
        nursery.start_soon(cancel_some)
        async with trio.open_nursery() as tasks:
            for task in range(50):
                tasks.start_soon(enqueue, jobs, task)
        stored = [job.key for job in await jobs.find(limit=1000)]
        if not store.inline:
            write_from_outside(store, tmp_path / "jobs.db")

    assert returned | cancelled == {f"{task}/{n}" for task in range(50) for n in range(10)}
    assert sorted(filter(None, stored)) == sorted(returned - cancelled)
    assert cancelled
    assert returned


# Reading.


async def test_a_read_sees_only_what_is_committed_and_waits_for_no_write(
    gated: GatedStore,
) -> None:
    async with open_bridge(gated) as bridge:
        await bridge.add([new_job(key="committed")])
        async with gated.closed_gate(lambda: bridge.add([new_job(key="under way")])):
            during = await keys_in(bridge)
        after = await keys_in(bridge)

    assert during == ["committed"]
    assert after == ["committed", "under way"]


async def test_threads_of_the_application_do_not_keep_the_store_waiting(
    store: SqliteStore,
) -> None:
    release = threading.Event()

    async with open_bridge(store) as bridge, trio.open_nursery() as nursery:
        for _ in range(int(trio.to_thread.current_default_thread_limiter().total_tokens)):
            nursery.start_soon(trio.to_thread.run_sync, release.wait, LONG)
        await trio.testing.wait_all_tasks_blocked()
        await bridge.add([new_job(key="a")])
        keys = await keys_in(bridge)
        release.set()

    assert keys == ["a"]


async def test_what_a_read_raises_reaches_its_caller_and_nobody_else(store: SqliteStore) -> None:
    def divide(store: object) -> float:
        return 1 / 0

    async with open_bridge(store) as bridge:
        with pytest.raises(ZeroDivisionError):
            await bridge.read(divide)

        assert await keys_in(bridge) == []
        assert not await bridge.wait_quiet()


# Closing.


async def test_closing_finishes_the_commit_under_way_and_refuses_what_waits(
    gated: GatedStore, tmp_path: Path
) -> None:
    outcomes: dict[str, outcome.Outcome[Any]] = {}

    async def add(key: str) -> None:
        outcomes[key] = await outcome.acapture(bridge.add, [new_job(key=key)])

    with trio.fail_after(LONG):
        bridge = Bridge(gated, Clock(), lambda rows: None)
        await bridge.open()
        async with (
            trio.open_nursery() as nursery,
            gated.closed_gate(lambda: add("under way")),
        ):
            nursery.start_soon(add, "waiting")
            nursery.start_soon(add, "waiting too")
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(bridge.close)
            await trio.testing.wait_all_tasks_blocked()
            refused_at_once = set(outcomes)

    assert refused_at_once == {"waiting", "waiting too"}
    assert isinstance(outcomes["under way"], outcome.Value)
    for key in refused_at_once:
        with pytest.raises(trio.ClosedResourceError):
            outcomes[key].unwrap()
    assert stored_keys(tmp_path / "jobs.db") == ["under way"]


async def test_a_write_that_was_taken_when_the_store_closed_took_place_or_says_that_it_did_not(
    tmp_path: Path,
) -> None:
    # The writing thread has the write in hand, but has not begun its transaction.
    is_before, gate = threading.Event(), threading.Event()

    class LateStore(SqliteStore):
        @contextlib.contextmanager
        def transaction(self) -> Iterator[None]:
            is_before.set()
            assert gate.wait(LONG)
            with super().transaction():
                yield

    store = LateStore(tmp_path / "jobs.db")
    outcomes: list[outcome.Outcome[Any]] = []

    async def add() -> None:
        outcomes.append(await outcome.acapture(bridge.add, [new_job(key="taken")]))

    with trio.fail_after(LONG):
        bridge = Bridge(store, Clock(), lambda rows: None)
        await bridge.open()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(add)
            await trio.to_thread.run_sync(is_before.wait)
            nursery.start_soon(bridge.close)
            await trio.testing.wait_all_tasks_blocked()
            gate.set()

    [result] = outcomes
    assert stored_keys(tmp_path / "jobs.db") == ["taken"] * isinstance(result, outcome.Value)
    if isinstance(result, outcome.Error):
        assert isinstance(result.error, StoreError | trio.ClosedResourceError)


async def test_closing_does_not_wait_for_a_lock_of_others(tmp_path: Path) -> None:
    path = tmp_path / "jobs.db"
    outcomes: list[outcome.Outcome[Any]] = []

    async def add() -> None:
        outcomes.append(await outcome.acapture(bridge.add, [new_job()]))

    with trio.fail_after(LONG):
        bridge = Bridge(SqliteStore(path, busy_timeout=1000), Clock(), lambda rows: None)
        await bridge.open()
        with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as outside:
            outside.execute("BEGIN IMMEDIATE")
            async with trio.open_nursery() as nursery:
                nursery.start_soon(add)
                await trio.testing.wait_all_tasks_blocked()
                await bridge.close()

    with pytest.raises((StoreError, trio.ClosedResourceError)):
        outcomes[0].unwrap()
    assert stored_keys(path) == []


async def test_a_closed_bridge_refuses_everything_and_has_no_thread_left(
    store: SqliteStore,
) -> None:
    async with open_bridge(store) as bridge:
        await bridge.add([new_job()])

    with pytest.raises(trio.ClosedResourceError):
        await bridge.add([new_job()])
    with pytest.raises(trio.ClosedResourceError):
        await keys_in(bridge)
    with pytest.raises(trio.ClosedResourceError):
        bridge.submit(Write("add", [new_job()]))
    assert bridges_here() == []
    assert not [one for one in threading.enumerate() if "trio_jobs" in one.name]


async def test_closing_in_a_cancelled_scope_is_complete(store: SqliteStore) -> None:
    with trio.CancelScope() as scope:
        async with trio_jobs.open_jobs(store) as jobs:
            await jobs.enqueue(kind, 1)
            scope.cancel()
            await trio.lowlevel.checkpoint()

    assert scope.cancelled_caught
    assert bridges_here() == []
    assert not [one for one in threading.enumerate() if "trio_jobs" in one.name]


async def test_a_store_that_cannot_be_opened_leaves_nothing_behind(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    with pytest.raises(StoreError):
        async with trio_jobs.open_jobs(tmp_path / "no folder" / "jobs.db"):
            pass

    assert autojump_clock.autojump_threshold == 0
    assert not [one for one in threading.enumerate() if "trio_jobs" in one.name]


class Impatient(SqliteStore):
    """Lets `when_waiting` know of its first wait for a lock, and adds up how long it waits."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.when_waiting: Callable[[], object] = lambda: None
        self.waited = 0.0
        self.sleep = self._sleep

    def _sleep(self, seconds: float) -> None:
        if not self.waited:
            self.when_waiting()
        self.waited += seconds
        time.sleep(seconds)


class Belated(Impatient):
    """Begins to open only when it was told to close."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.when_called: Callable[[], object] = lambda: None
        self.was_told = threading.Event()

    def open(self) -> None:
        self.when_called()
        assert self.was_told.wait(LONG)
        super().open()

    def close(self) -> None:
        super().close()
        self.was_told.set()


@contextlib.contextmanager
def locked(path: Path, *, is_log: bool) -> Iterator[None]:
    """Somebody else keeps a new file locked, before or after its switch to a log."""
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as holder:
        if is_log:
            holder.execute("PRAGMA journal_mode = WAL")
        holder.execute("BEGIN EXCLUSIVE")
        yield
        holder.execute("ROLLBACK")


@pytest.mark.parametrize("is_log", [True, False])
async def test_opening_that_waits_for_a_lock_of_others_ends_when_it_is_cancelled(
    tmp_path: Path, is_log: bool
) -> None:
    path = tmp_path / "jobs.db"
    store = Impatient(path)
    token = trio.lowlevel.current_trio_token()

    with locked(path, is_log=is_log), trio.CancelScope() as scope:
        store.when_waiting = lambda: token.run_sync_soon(scope.cancel)
        async with trio_jobs.open_jobs(store):
            raise AssertionError("it is locked")
    was_closed = store._connections.writer is None
    async with trio_jobs.open_jobs(store) as jobs:
        job = await jobs.enqueue(kind, 1)

    assert scope.cancelled_caught
    assert 0 < store.waited < 5, "as long as nobody is cancelled"
    assert was_closed
    assert job.id == 1


@pytest.mark.parametrize("is_locked", [True, False])
async def test_opening_that_is_cancelled_before_its_thread_runs_leaves_nothing_open(
    tmp_path: Path, is_locked: bool
) -> None:
    path = tmp_path / "jobs.db"
    store = Belated(path)
    token = trio.lowlevel.current_trio_token()

    with contextlib.ExitStack() as stack:
        if is_locked:
            stack.enter_context(locked(path, is_log=True))
        scope = stack.enter_context(trio.CancelScope())
        store.when_called = lambda: token.run_sync_soon(scope.cancel)
        async with trio_jobs.open_jobs(store):
            raise AssertionError("it was cancelled")
    was_closed = store._connections.writer is None
    store.when_called = lambda: None
    async with trio_jobs.open_jobs(store) as jobs:
        job = await jobs.enqueue(kind, 1)

    assert scope.cancelled_caught
    assert store.waited < 5, "as long as nobody is cancelled"
    assert was_closed
    assert job.id == 1


async def test_opening_a_store_that_is_open_closes_nothing_even_when_it_is_cancelled(
    tmp_path: Path,
) -> None:
    class Watched(SqliteStore):
        when_called: Callable[[], object] = staticmethod(lambda: None)

        def open(self) -> None:
            self.when_called()
            super().open()

    store = Watched(tmp_path / "jobs.db")
    token = trio.lowlevel.current_trio_token()

    async with trio_jobs.open_jobs(store) as jobs:
        with trio.CancelScope() as scope:
            store.when_called = lambda: token.run_sync_soon(scope.cancel)
            with pytest.raises(StoreError, match="open already; every open_jobs needs one"):
                async with trio_jobs.open_jobs(store):
                    raise AssertionError("it is open")
            await trio.lowlevel.checkpoint()
        job = await jobs.enqueue(kind, 1)

    assert job.id == 1
    assert not scope.cancelled_caught
    assert not store.is_open


async def test_opening_a_store_that_somebody_is_opening_is_refused(tmp_path: Path) -> None:
    class Gated(SqliteStore):
        gate: threading.Event | None = threading.Event()

        def open(self) -> None:
            gate, self.gate = self.gate, None
            if gate is not None:
                trio.from_thread.run_sync(called.set)
                assert gate.wait(LONG)
            super().open()

    store = Gated(tmp_path / "jobs.db")
    gate = store.gate
    assert gate is not None
    called = trio.Event()

    async def open_too() -> None:
        await called.wait()
        with pytest.raises(StoreError, match="open already"):
            async with trio_jobs.open_jobs(store):
                raise AssertionError("somebody else does")
        gate.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(open_too)
        async with trio_jobs.open_jobs(store) as jobs:
            job = await jobs.enqueue(kind, 1)

    assert job.id == 1
    assert not store.is_open


def test_ctrl_c_while_opening_waits_for_a_lock_of_others_leaves_nothing_open(
    tmp_path: Path,
) -> None:
    path = tmp_path / "jobs.db"
    store = Impatient(path)
    store.when_waiting = lambda: signal.raise_signal(signal.SIGINT)

    async def main() -> None:
        async with trio_jobs.open_jobs(store):
            raise AssertionError("it is locked")

    with locked(path, is_log=True), pytest.raises(KeyboardInterrupt):
        trio.run(main)

    assert 0 < store.waited < 5, "as long as nobody interrupts"
    assert store._connections.writer is None


def interrupt_threads(monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    """Ctrl-C before each of the next threads that are asked for."""
    run_sync: Any = trio.to_thread.run_sync

    async def interrupted(*arguments: Any, **options: Any) -> Any:
        nonlocal times
        if times > 0:
            times -= 1
            signal.raise_signal(signal.SIGINT)
        return await run_sync(*arguments, **options)

    monkeypatch.setattr(trio.to_thread, "run_sync", interrupted)


def test_one_ctrl_c_after_another_while_opening_waits_leaves_nothing_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "jobs.db"
    store = Impatient(path)

    def interrupt() -> None:
        signal.raise_signal(signal.SIGINT)
        interrupt_threads(monkeypatch, 4)

    store.when_waiting = interrupt
    opening: list[int] = []

    async def main() -> None:
        bridge = Bridge(store, Clock(), lambda rows: None)
        try:
            await bridge.open()
        finally:
            opening.append(bridge._readers.borrowed_tokens)

    with locked(path, is_log=True), pytest.raises(KeyboardInterrupt):
        trio.run(main)

    assert opening == [0], "a thread goes on"
    assert store._connections.writer is None


# Virtual time.


class SlowStore(SqliteStore):
    """Takes so long in real time that a clock nobody holds would jump."""

    def open(self) -> None:
        time.sleep(0.02)
        super().open()

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        time.sleep(0.005)
        with super().transaction():
            yield

    def get(self, id: int) -> Row | None:
        time.sleep(0.005)
        return super().get(id)

    def close(self) -> None:
        time.sleep(0.02)
        super().close()


async def test_virtual_time_never_jumps_while_a_call_is_in_flight(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.sleep, 3600)
        async with trio_jobs.open_jobs(SlowStore(tmp_path / "jobs.db")) as jobs:
            after_open = trio.current_time()
            for number in range(10):
                job = await jobs.enqueue(kind, number)
                await jobs.get(job)
            after_use = trio.current_time()
        after_close = trio.current_time()
        threshold = autojump_clock.autojump_threshold
        nursery.cancel_scope.cancel()

    assert (after_open, after_use, after_close) == (0, 0, 0)
    assert threshold == 0


async def test_virtual_time_goes_on_between_the_calls(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with trio_jobs.open_jobs(SlowStore(tmp_path / "jobs.db")) as jobs:
        await jobs.enqueue(kind, 1)
        await trio.sleep(3600)
        job = await jobs.enqueue(kind, 1)

    assert trio.current_time() == 3600
    assert (job.enqueued_at - testing.EPOCH).total_seconds() == 3600


async def test_virtual_time_goes_on_after_a_write_was_withdrawn(
    gated: GatedStore, autojump_clock: MockClock
) -> None:
    async with open_bridge(gated) as bridge:
        async with gated.closed_gate(lambda: bridge.add([new_job()])):
            with trio.CancelScope() as scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(bridge.add, [new_job()])
                    await trio.lowlevel.checkpoint()
                    scope.cancel()
        threshold = autojump_clock.autojump_threshold

    assert threshold == 0


async def test_an_inline_store_holds_nothing(autojump_clock: MockClock) -> None:
    thresholds: set[float] = set()

    class Spy(SqliteStore):
        def add(self, jobs: Sequence[NewJob]) -> list[tuple[Row, bool]]:
            thresholds.add(autojump_clock.autojump_threshold)
            return super().add(jobs)

    async with open_bridge(Spy(":memory:")) as bridge:
        await bridge.add([new_job()])

    assert thresholds == {0}
    assert math.inf not in thresholds


async def test_an_inline_store_is_tidied_up_without_a_thread(tmp_path: Path) -> None:
    threads: list[threading.Thread] = []

    class Grown(SqliteStore):
        def tidy(self, now: int) -> bool:
            return True

        def checkpoint(self) -> None:
            threads.append(threading.current_thread())
            super().checkpoint()

    store = Grown(tmp_path / "jobs.db")
    store.inline = True
    async with open_bridge(store) as bridge:
        await bridge.add([new_job()])

    assert threads == [threading.current_thread()]


# What must not end the writing thread, nor lose an answer.


@pytest.mark.parametrize("error", [StoreError("disk I/O error"), OSError("odd")])
async def test_housekeeping_that_fails_does_not_end_the_writing(
    tmp_path: Path, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    class Untidy(SqliteStore):
        def tidy(self, now: int) -> bool:
            raise error

    async with open_bridge(Untidy(tmp_path / "jobs.db")) as bridge:
        for number in range(3):
            await bridge.add([new_job(key=str(number))])
        keys = await keys_in(bridge)

    assert keys == ["0", "1", "2"]


class Slowly(SqliteStore):
    """Always has something to tidy up, which takes until `go_on` is set."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.is_at_it = threading.Event()
        self.go_on = threading.Event()
        self.threads: list[threading.Thread] = []

    def tidy(self, now: int) -> bool:
        return True

    def checkpoint(self) -> None:
        self.threads.append(threading.current_thread())
        self.is_at_it.set()
        assert self.go_on.wait(LONG)


async def test_housekeeping_that_may_go_on_beside_the_writing_holds_up_no_commit(
    tmp_path: Path,
) -> None:
    store = Slowly(tmp_path / "jobs.db")
    async with open_bridge(store) as bridge:
        await bridge.add([new_job()])
        assert await trio.to_thread.run_sync(store.is_at_it.wait, LONG)
        for _ in range(10):
            await bridge.add([new_job()])
        at_the_same_time = len(store.threads)
        store.go_on.set()

    assert at_the_same_time == 1
    assert not [thread for thread in store.threads if thread.is_alive()]


async def test_such_housekeeping_that_fails_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Failing(Slowly):
        def checkpoint(self) -> None:
            raise OSError("no space")

    async with open_bridge(Failing(tmp_path / "jobs.db")) as bridge:
        await bridge.add([new_job()])
        await bridge.add([new_job()])

    assert {record.message for record in caplog.records} == {"the store could not be tidied up"}


async def test_a_closed_loop_does_not_keep_its_writing_thread_alive(tmp_path: Path) -> None:
    def run() -> None:
        async def main() -> None:
            async with trio_jobs.open_jobs(tmp_path / "jobs.db") as jobs:
                await jobs.enqueue(kind, 1)
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            trio.run(main)

    await trio.to_thread.run_sync(run)

    assert not [one for one in threading.enumerate() if one.name == "trio_jobs writer"]


@pytest.mark.parametrize("path", [":memory:", "file"])
def test_ctrl_c_in_the_middle_of_a_write_loses_no_answer(path: str, tmp_path: Path) -> None:
    answered: list[str | None] = []

    class Interrupted(SqliteStore):
        def add(self, jobs: Sequence[NewJob]) -> list[tuple[Row, bool]]:
            signal.raise_signal(signal.SIGINT)
            return super().add(jobs)

    async def main() -> None:
        store = Interrupted(path if path == ":memory:" else tmp_path / path)
        async with trio_jobs.open_jobs(store) as jobs:
            try:
                answered.append((await jobs.enqueue(kind, 1, key="a")).key)
                await trio.sleep(LONG)
            finally:
                with trio.CancelScope(shield=True):
                    answered.extend([job.key for job in await jobs.find()])

    with pytest.raises(KeyboardInterrupt):
        trio.run(main)

    assert answered == ["a", "a"]


@pytest.mark.parametrize("path", [":memory:", "file"])
def test_ctrl_c_in_the_middle_of_closing_leaves_nobody_waiting_and_nothing_open(
    path: str, tmp_path: Path
) -> None:
    store = SqliteStore(path if path == ":memory:" else tmp_path / path)
    write = Write("add", [new_job()])

    async def main() -> None:
        bridge = Bridge(store, Clock(), lambda rows: None)
        await bridge.open()
        notify = bridge._gathered.notify

        def interrupted(n: int = 1) -> None:
            if bridge.is_closed:  # and it has just taken all that waits
                signal.raise_signal(signal.SIGINT)
                notify(n)

        # The writing thread does not hear of it.
        bridge._gathered.notify = interrupted  # type: ignore[method-assign]
        bridge.submit(write)
        await bridge.close()

    with pytest.raises(KeyboardInterrupt):
        trio.run(main)

    assert write.result is not None
    with pytest.raises(trio.ClosedResourceError):
        write.result.unwrap()
    assert store._connections.writer is None


def test_one_ctrl_c_after_another_while_closing_leaves_nothing_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SqliteStore(tmp_path / "jobs.db")

    async def main() -> None:
        async with trio_jobs.open_jobs(store):
            interrupt_threads(monkeypatch, 4)

    with pytest.raises(KeyboardInterrupt):
        trio.run(main)

    assert store._connections.writer is None
    assert not [one for one in threading.enumerate() if one.name == "trio_jobs writer"]


# No more threads.


def no_thread(*args: object, **kwargs: object) -> NoReturn:
    raise RuntimeError("can't start new thread")


async def test_without_a_thread_that_writes_the_store_is_closed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def start_others(thread: threading.Thread) -> None:
        (no_thread if thread.name == "trio_jobs writer" else start)(thread)

    store = SqliteStore(tmp_path / "jobs.db")
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start_others)
        with pytest.raises(StoreError, match="can't start new thread") as caught:
            async with trio_jobs.open_jobs(store):
                raise AssertionError("not reached")

    assert isinstance(caught.value.__cause__, RuntimeError)
    assert store._connections.writer is None
    async with trio_jobs.open_jobs(store) as jobs:
        await jobs.enqueue(kind, 1)


async def test_without_a_thread_of_trio_calls_are_refused_and_the_store_is_closed_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SqliteStore(tmp_path / "jobs.db")
    with monkeypatch.context() as patch:
        patch.setattr(trio.to_thread, "run_sync", no_thread)
        with pytest.raises(StoreError, match="can't start new thread"):
            async with trio_jobs.open_jobs(store):
                raise AssertionError("not reached")
    async with trio_jobs.open_jobs(store) as jobs:
        monkeypatch.setattr(trio.to_thread, "run_sync", no_thread)
        job = await jobs.enqueue(kind, 1)
        with pytest.raises(StoreError, match="can't start new thread"):
            await jobs.get(job)

    assert store._connections.writer is None
    assert jobs._bridge._thread is not None
    assert not jobs._bridge._thread.is_alive()


async def test_a_runtime_error_of_a_read_itself_is_not_taken_for_a_want_of_threads(
    tmp_path: Path,
) -> None:
    async with trio_jobs.open_jobs(tmp_path / "jobs.db") as jobs:
        with pytest.raises(RuntimeError, match="can't start new thread"):
            await jobs._bridge.read(no_thread)


async def test_without_a_thread_for_checkpoints_the_writing_one_makes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start
    made_in: list[str] = []

    def start_others(thread: threading.Thread) -> None:
        (no_thread if thread.name == "trio_jobs checkpointer" else start)(thread)

    class Long(SqliteStore):
        def tidy(self, now: int) -> bool:
            return True

        def checkpoint(self) -> None:
            made_in.append(threading.current_thread().name)

    monkeypatch.setattr(threading.Thread, "start", start_others)
    async with trio_jobs.open_jobs(Long(tmp_path / "jobs.db")) as jobs:
        await jobs.enqueue(kind, 1)
        await jobs.enqueue(kind, 2)

    assert "trio_jobs writer" in made_in


def test_ctrl_c_in_any_line_of_opening_and_closing_leaves_nothing_open(tmp_path: Path) -> None:
    code = {
        inspect.unwrap(function).__code__
        for function in (
            trio_jobs.open_jobs, Bridge.open, Bridge.close, _bridge._closed, join_hub, leave_hub,
            Hub.join, Hub.leave, Lookout.wanted, Lookout._start, Lookout.close,
        )
    }  # fmt: skip
    path = tmp_path / "jobs.db"
    already = open_files(path)
    lines = hit = 0

    def count(frame: FrameType, event: str, _: object) -> Any:
        nonlocal lines
        if event == "line" and frame.f_code in code:
            lines += 1
            if lines == hit:
                signal.raise_signal(signal.SIGINT)
        return count if frame.f_code in code else None

    async def main() -> None:
        async with trio_jobs.open_jobs(path) as jobs:
            job = await jobs.enqueue(kind, 1)
            with trio.move_on_after(0):
                await jobs.wait_finished(job)

    while lines >= hit:
        lines, hit = 0, hit + 1
        before = sys.gettrace()
        sys.settrace(count)
        try:
            trio.run(main)
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        assert open_files(path) == already, hit
        assert not _hub._hubs, hit
        assert not [one for one in threading.enumerate() if one.name == "trio_jobs writer"], hit

    assert hit > 50


def open_files(path: Path) -> list[str]:
    """What of this database this process has open, and whether it watches any file."""
    if not Path("/proc/self/fd").exists():
        return []
    links = [one for one in Path("/proc/self/fd").iterdir() if one.is_symlink()]
    named = [str(one.readlink()) for one in links if one.is_symlink()]
    return [name for name in named if name.startswith(str(path)) or "inotify" in name]


def test_ctrl_c_at_a_random_moment_loses_no_answer_and_hangs_nothing(tmp_path: Path) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    answered: set[str | None] = set()

    async def enqueue(jobs: Jobs, name: str) -> None:
        for number in range(1_000_000):
            answered.add((await jobs.enqueue(kind, number, key=f"{name}/{number}")).key)

    async def main(round: int) -> None:
        thread = threading.main_thread().ident
        assert thread is not None
        async with trio_jobs.open_jobs(tmp_path / "jobs.db") as jobs:
            timer = threading.Timer(
                dice.uniform(0, 0.03), signal.pthread_kill, [thread, signal.SIGINT]
            )
            timer.start()
            async with trio.open_nursery() as nursery:
                for task in range(5):
                    nursery.start_soon(enqueue, jobs, f"{round}/{task}")

    for round in range(20):
        with pytest.raises((KeyboardInterrupt, BaseExceptionGroup)) as caught:
            trio.run(main, round)
        assert is_only(caught.value, KeyboardInterrupt)

    stored = set(stored_keys(tmp_path / "jobs.db"))
    assert answered <= stored
    # Each task of a round may have had one answer under way that it did not get to note.
    assert len(stored - answered) <= 20 * 5
    assert not [one for one in threading.enumerate() if "trio_jobs" in one.name]


def is_only(error: BaseException, type: type[BaseException]) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return all(is_only(part, type) for part in error.exceptions)
    return isinstance(error, type)


async def test_the_writing_thread_outlives_whatever_housekeeping_raises(tmp_path: Path) -> None:
    class Exits(SqliteStore):
        def tidy(self, now: int) -> bool:
            raise SystemExit("a clock")

    async with open_bridge(Exits(tmp_path / "jobs.db")) as bridge:
        await bridge.add([new_job()])
        with trio.fail_after(LONG):
            await bridge.add([new_job()])


async def test_a_read_in_memory_that_was_under_way_at_the_end_is_told_that_it_is_closed() -> None:
    async def read() -> None:
        with pytest.raises(trio.ClosedResourceError):
            await bridge.read(lambda store: store.next_id())

    for _ in range(20):  # Trio chooses who comes first
        async with trio.open_nursery() as nursery, open_bridge(SqliteStore(":memory:")) as bridge:
            nursery.start_soon(read)
            await trio.lowlevel.checkpoint()
