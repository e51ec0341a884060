"""What the stories about runners share: instants, scripted handlers, and stores in trouble.

Under `autojump_clock` virtual time starts at `EPOCH`, so a story is told in seconds from it.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import trio
from simulation.chance import scheduling as scheduling

import trio_jobs
from trio_jobs import Attempt, Handler, Job, Jobs, Kind, Runner, SqliteStore, StoreError
from trio_jobs._batch import Write
from trio_jobs._connections import need
from trio_jobs._drivers import Connection, Record, Values
from trio_jobs._model import Claim, Claimed, ClaimedJob, NewJob, Row
from trio_jobs.testing import EPOCH

S = TypeVar("S", bound=SqliteStore)

Does: TypeAlias = Callable[[Attempt[Any, Any]], Awaitable[Any]]

STORES = ["memory", "file"]
LONG = 20.0
"""Seconds after which something hangs."""


def make_store(where: str, folder: Path, cls: type[S], **settings: Any) -> S:
    """A store of some class at each of the places of the `store` fixture."""
    if where == "memory":
        return cls(":memory:", **settings)
    if where == "apsw":
        return cls(folder / "jobs.db", driver="apsw", **settings)
    return cls(folder / "jobs.db", **settings)


# Instants.


def at(seconds: float) -> datetime:
    """The instant so many seconds after virtual time started."""
    return EPOCH + timedelta(seconds=seconds)


def now() -> float:
    """Seconds since virtual time started."""
    return round(trio.current_time(), 6)


def second(moment: datetime | None) -> float:
    """What `at` makes of it."""
    assert moment is not None
    return (moment - EPOCH).total_seconds()


def instant(seconds: float) -> int:
    """The same as the store keeps it."""
    return round((EPOCH.timestamp() + seconds) * 1_000_000)


# Runners.


@contextlib.asynccontextmanager
async def serving(jobs: Jobs, *handlers: Handler, **settings: Any) -> AsyncIterator[Runner]:
    """A runner for the length of a block; it is cancelled at the end."""
    async with trio.open_nursery() as nursery:
        runner: Runner = await nursery.start(partial(trio_jobs.serve, jobs, handlers, **settings))
        yield runner
        nursery.cancel_scope.cancel()


async def finished(jobs: Jobs, *of: Job[Any], within: float = 400 * 86_400) -> list[Job[Any]]:
    """Wait until all have ended; a job that is stuck fails the test instead of hanging it."""
    with trio.fail_after(within):
        return [await jobs.wait_finished(job) for job in of]


async def eventually(condition: Callable[[], object], within: float = 30) -> None:
    """Wait for what threads or a runner bring about, and nobody tells."""
    with trio.fail_after(within):
        while not condition():  # noqa: ASYNC110 - there is no event to wait for
            await trio.sleep(0.005)


class Script:
    """A handler that does one thing after another, and notes when it was started.

    Each start takes the next of `steps`, and the last one again and again: an exception is
    raised, a function is called with the attempt, anything else is returned.
    """

    def __init__(self, *steps: object) -> None:
        self.steps = list(steps)
        self.starts: list[float] = []
        self.numbers: list[int] = []

    async def __call__(self, attempt: Attempt[Any, Any]) -> Any:
        step = self.steps[min(len(self.starts), len(self.steps) - 1)]
        self.starts.append(now())
        self.numbers.append(attempt.number)
        await trio.lowlevel.checkpoint()
        if isinstance(step, BaseException):
            raise step
        return await step(attempt) if callable(step) else step


def sleeps(seconds: float, value: object = None) -> Does:
    """A step that takes its time."""

    async def step(attempt: Attempt[Any, Any]) -> Any:
        await trio.sleep(seconds)
        return value

    return step


def stubborn(seconds: float, value: object = None) -> Does:
    """A step that cannot be cancelled for so long."""

    async def step(attempt: Attempt[Any, Any]) -> Any:
        with trio.CancelScope(shield=True):
            await trio.sleep(seconds)
        return value

    return step


async def forever(attempt: Attempt[Any, Any]) -> None:
    """A step that only a cancellation ends."""
    await trio.sleep_forever()


# Threads.


def in_threads(calls: Sequence[Callable[[], object]]) -> None:
    """Run them all at once; the first error is raised."""
    errors: list[BaseException] = []

    def run(call: Callable[[], object]) -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=[call]) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG)
    if errors:
        raise errors[0]


@contextlib.contextmanager
def real_timeout(seconds: float) -> Iterator[None]:
    """`trio.fail_after` of the wall clock, for a virtual one that may stand still for ever."""
    token = trio.lowlevel.current_trio_token()
    scope = trio.CancelScope()
    timer = threading.Timer(seconds, token.run_sync_soon, [scope.cancel])
    timer.start()
    try:
        with scope:
            yield
    finally:
        timer.cancel()
    if scope.cancelled_caught:
        raise trio.TooSlowError


# Cancelling.


class CancelAfterSteps(trio.abc.Instrument):
    """Cancels a scope after so many steps of one task."""

    def __init__(self, steps: int) -> None:
        self.scope = trio.CancelScope()
        self.steps_left = steps
        self.task: trio.lowlevel.Task | None = None

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        if task is self.task:
            self.steps_left -= 1
            if self.steps_left == 0:
                self.scope.cancel()


async def is_cancelled_after(
    steps: int, call: Callable[[], Awaitable[object]]
) -> tuple[bool, bool]:
    """Run the call and cancel it after so many steps: (was it cancelled, was there time)."""
    instrument = CancelAfterSteps(steps)

    async def run() -> None:
        instrument.task = trio.lowlevel.current_task()
        with instrument.scope:
            await call()

    if steps == 0:
        instrument.scope.cancel()
    trio.lowlevel.add_instrument(instrument)
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run)
    finally:
        trio.lowlevel.remove_instrument(instrument)
    return instrument.scope.cancelled_caught, instrument.steps_left <= 0


# Rows.


def new_job(kind: str = "mail", **fields: Any) -> NewJob:
    defaults: dict[str, Any] = {
        "payload": b"[1]",
        "raw": False,
        "priority": 0,
        "enqueued_at": 100,
        "run_at": 100,
        "deadline": None,
        "key": None,
    }
    return NewJob(kind=kind, **{**defaults, **fields})


async def row_of(jobs: Jobs, job: Job[Any] | int) -> Row:
    id = job if isinstance(job, int) else job.id
    row = await jobs._bridge.read(lambda store: store.get(id))
    assert row is not None
    return row


async def outcomes(jobs: Jobs, job: Job[Any]) -> list[str]:
    return [past.outcome for past in await jobs.history(job)]


def writer(store: SqliteStore) -> Connection:
    """The connection that writes, for looking into the file and editing it by hand."""
    return need(store._connections.writer)


def reader(store: SqliteStore) -> Connection:
    return need(store._connections.reader)


def assert_no_transaction_is_open(store: SqliteStore) -> None:
    """Another connection gets the write lock at once."""
    if store.inline:
        assert not writer(store).in_transaction
    elif store._driver == "sqlite3":
        other = sqlite3.connect(store._connections.real_path, timeout=0, isolation_level=None)
        try:
            other.execute("BEGIN IMMEDIATE")
            other.execute("ROLLBACK")
        finally:
            other.close()
    else:
        import apsw

        another = apsw.Connection(store._connections.real_path)
        try:
            another.execute("BEGIN IMMEDIATE")
            another.execute("ROLLBACK")
        finally:
            another.close()


# Runners that died, and stores in trouble.


async def abandon(
    jobs: Jobs,
    *kinds: Kind[Any, Any],
    limit: int = 1000,
    lost_limit: int = 0,
    lease: float = 0.0,
) -> list[ClaimedJob]:
    """Claim what is due as a runner does, and then be gone: the rows are lost after `lease`."""
    here = jobs._clock.now()
    claim = Claim(
        policies={kind.name: kind.policy for kind in kinds},
        limit=limit,
        lost_limit=lost_limit,
        now=here,
        lease_now=here,
        lease_until=here + round(lease * 1_000_000),
    )
    write = Write("claim", claim)
    jobs._bridge.submit(write)
    claimed: Claimed = await jobs._bridge.outcome_of(write)
    return claimed.jobs


class PassThrough:
    """A connection that does what the real one does, but for what a test changes."""

    def __init__(self, real: Connection) -> None:
        self.real = real

    @property
    def version(self) -> tuple[int, ...]:
        return self.real.version

    @property
    def in_transaction(self) -> bool:
        return self.real.in_transaction

    @property
    def total_changes(self) -> int:
        return self.real.total_changes

    def execute(self, sql: str, values: Values = ()) -> list[Record]:
        return self.real.execute(sql, values)

    def interrupt(self) -> None:
        self.real.interrupt()

    def close(self) -> None:
        self.real.close()


class Trouble(SqliteStore):
    """A store that fails when it is told to.

    `rule` is asked at every step of every transaction ("begin", the verbs, "commit",
    "committed") and before every reading verb; what it returns is raised. An error after
    "committed" is a commit that took place and could not be told from one that did not.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.rule: Callable[[str], StoreError | None] = lambda step: None

    def _meet(self, step: str) -> None:
        error = self.rule(step)
        if error is not None:
            raise error

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        self._meet("begin")
        with super().transaction():
            yield
            self._meet("commit")
        self._meet("committed")

    def add(self, jobs: Sequence[Any]) -> Any:
        self._meet("add")
        return super().add(jobs)

    def apply(self, changes: Sequence[Any]) -> Any:
        self._meet("apply")
        return super().apply(changes)

    def renew(self, fences: Sequence[Any], until: int) -> Any:
        self._meet("renew")
        return super().renew(fences, until)

    def claim(self, claim: Any) -> Any:
        self._meet("claim")
        return super().claim(claim)

    def version(self, now: int) -> Any:
        self._meet("look")
        return super().version(now)

    def get(self, id: int) -> Row | None:
        self._meet("get")
        return super().get(id)

    def finished(self, ids: Any) -> dict[int, Row | None]:
        self._meet("finished")
        return super().finished(ids)

    def queued_kinds(self) -> set[str]:
        self._meet("queued_kinds")
        return super().queued_kinds()


def unknown(text: str = "disk I/O error; the outcome is unknown") -> StoreError:
    """What a store raises that cannot find out whether its commit took place."""
    error = StoreError(text)
    error.is_outcome_unknown = True
    return error


# Chance.

TIMES = int(os.environ.get("TRIO_JOBS_TEST_TIMES", "1"))
"""How many times as many seeds and examples as on every push: 1, or 20 for a night."""
