"""`open_jobs` and what it gives: enqueue, look, wait, cancel, retry.

A `Jobs` never runs a handler. It turns what callers say into values for the store, and
rows into immutable snapshots.
"""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from datetime import datetime
from typing import Any, Protocol, TypeVar, overload

import trio

from . import _lifecycle
from ._batch import Write
from ._bridge import Bridge
from ._checks import priority_of, seconds, storable
from ._clock import Clock
from ._codec import Codec
from ._errors import JobNotFound, StateError
from ._hub import Hub, Listener, join_hub, leave_hub
from ._instants import instant_of, microseconds
from ._job import Job, PastAttempt, past_attempt
from ._kinds import Kind, but_not, checked_kind
from ._lifecycle import IllegalTransition
from ._lookout import Lookout
from ._model import Instant, NewJob, Row, State
from ._store import Store
from ._waiters import Waiters
from .sqlite import SqliteStore

P = TypeVar("P")
R = TypeVar("R")

_MAX_ID = 2**63 - 1
"""SQLite's integers have 64 bits."""


class Claimant(Protocol):
    """A pool of a runner, as `Jobs` sees it."""

    def new_claim(self, asked_at: Instant) -> Write:
        """A claim that the caller is to submit at once: the pool waits for its answer."""
        ...


class Watcher(Protocol):
    """A runner, as `Jobs` sees it."""

    def claimants(self, jobs: Sequence[NewJob]) -> Sequence[Claimant]:
        """Who may take some of these, which are about to be added."""
        ...

    def heard(self, rows: Sequence[Row]) -> None:
        """These rows were committed just now, by somebody in this process."""
        ...

    def written_elsewhere(self) -> None:
        """Something was written that nobody can tell yet: look at the store."""
        ...

    def look(self) -> None:
        """Somebody else may have committed."""
        ...


# Protected: a Ctrl-C between two lines would leave the file open, or the hub telling of it. It
# comes out of the waiting in here, or of the block, whose code is not in this frame.
@asynccontextmanager
@trio.lowlevel.enable_ki_protection
async def open_jobs(
    store: str | os.PathLike[str] | Store,
    *,
    clock: Callable[[], float] | None = None,
    max_payload: int = 1_000_000,
) -> AsyncGenerator[Jobs]:
    """Open the jobs of one file: a path, `":memory:"`, or a `SqliteStore`.

    `clock` gives Unix seconds, from any thread; the default is `time.time`, or Trio's
    virtual time under `trio.testing.MockClock`; what is no Unix time before the year 10000 raises
    `ValueError` where it is read, what is no number `TypeError`. `max_payload` bounds payloads
    and results: bytes. Raises `StoreError` for a file that cannot be used (a newer schema, not a
    database, not writable). After the block every use raises `trio.ClosedResourceError`.
    """
    if isinstance(max_payload, bool) or not isinstance(max_payload, int) or max_payload < 1:
        raise ValueError(f"max_payload must be a positive number of bytes, not {max_payload!r}")
    if clock is not None and not callable(clock):
        raise TypeError(f"clock must be a callable, not {type(clock).__name__}")
    if isinstance(store, str | os.PathLike):
        store = SqliteStore(store)
    elif not hasattr(store, "transaction"):
        raise TypeError(f"store must be a path or a SqliteStore, not {type(store).__name__}")
    jobs = Jobs(store, Clock(clock), max_payload)
    await jobs._bridge.open()
    listener = Listener(jobs._heard, jobs._written_elsewhere)
    identity = store.identity
    jobs._hub = join_hub(identity, listener)
    try:
        yield jobs
    finally:
        if not jobs._bridge.is_inherited:
            leave_hub(identity, listener)
        jobs._lookout.close()
        try:
            await jobs._bridge.close()  # noqa: ASYNC102 - it shields itself, and is bounded
        finally:
            jobs._written_elsewhere()  # so that who still waits looks, and is told it is closed


class Jobs:
    """The jobs of one open file. Made by `open_jobs`; used from its Trio run only, but for
    `enqueue_on`."""

    def __init__(self, store: Store, clock: Clock, max_payload: int) -> None:
        self._store = store
        self._clock = clock
        self._max_payload = max_payload
        self._bridge = Bridge(store, clock, self._tell, self._tell_unsure)
        self._lookout = Lookout(self._bridge, store, clock, self._look)
        self._version: Hashable = None
        """The store's when its ends were looked for last."""
        self._hub: Hub
        # Not sets: who hears first must not depend on where objects lie in memory.
        self._watchers: dict[Watcher, None] = {}
        self._waiters = Waiters(self._bridge, clock)

    async def enqueue(
        self,
        kind: Kind[P, R],
        payload: P,
        *,
        delay: float | None = None,
        run_at: datetime | None = None,
        deadline: datetime | None = None,
        priority: int | None = None,
        key: str | None = None,
    ) -> Job[R]:
        """Store a job; when this returns it is on disk and will run.

        It becomes due `delay` seconds from now, or at `run_at` (the past means now). At its
        `deadline` it ends failed, "deadline": unstarted, or with its handler cancelled. Under
        Trio's MockClock it is `trio_jobs.testing.EPOCH` plus `trio.current_time()`.

        A `key` that a queued or running job of this kind has gives that job, and nothing is
        inserted. Raises `PayloadError` for a payload that does not fit its type or is too
        large, `ValueError` for options that cannot be, `StoreBusy` or `StoreError` when the
        store refused: then nothing was inserted, unless the message says that the outcome is
        unknown (with a `key` the call is safe to repeat).
        """
        now = self._clock.now()
        due = self._due(now, delay, run_at)
        job = self._new_job(kind, payload, now, due, deadline, priority, key)
        [(row, _)] = await self._bridge.add([job], self._claims_for)
        return Job(row, kind.result_codec)

    async def enqueue_many(
        self,
        kind: Kind[P, R],
        payloads: Iterable[P],
        *,
        delay: float | None = None,
        run_at: datetime | None = None,
        deadline: datetime | None = None,
        priority: int | None = None,
        keys: Iterable[str | None] | None = None,
    ) -> list[Job[R]]:
        """Store all of them in one transaction, or none; the jobs come in payload order.

        Options are those of `enqueue`; `keys` are as many as payloads.
        """
        checked_kind(kind)  # there may be no payloads
        if isinstance(payloads, str | bytes):
            raise TypeError(
                f"payloads must be a list of payloads, not a {type(payloads).__name__}: "
                "a single one is for enqueue"
            )
        now = self._clock.now()
        due = self._due(now, delay, run_at)
        payloads = list(payloads)
        its_keys = [None] * len(payloads) if keys is None else list(keys)
        if isinstance(keys, str) or len(its_keys) != len(payloads):
            raise ValueError(f"{len(payloads)} payloads need as many keys, not {len(its_keys)}")
        jobs = [
            self._new_job(kind, payload, now, due, deadline, priority, key)
            for payload, key in zip(payloads, its_keys, strict=True)
        ]
        added = await self._bridge.add(jobs, self._claims_for)
        return [Job(row, kind.result_codec) for row, _ in added]

    def enqueue_on(
        self,
        connection: object,
        kind: Kind[P, R],
        payload: P,
        *,
        delay: float | None = None,
        run_at: datetime | None = None,
        deadline: datetime | None = None,
        priority: int | None = None,
        key: str | None = None,
    ) -> int:
        """Store a job inside the application's own transaction; returns its id.

        `connection` is the application's own `sqlite3` (or, with that driver, apsw)
        connection to the same file: the job exists if and only if the transaction is
        committed. `sqlite3` begins one by itself and leaves it open: use `with connection:`,
        or commit. Callable from any thread; it may wait for the file's lock as long as
        that connection does. Raises what `enqueue` raises, and `ValueError`
        for a connection to another file.
        """
        self._bridge.raise_if_closed()
        now = self._clock.now()
        due = self._due(now, delay, run_at)
        job = self._new_job(kind, payload, now, due, deadline, priority, key)
        row, is_new = self._store.add_on(connection, job)
        if is_new:
            self._hub.tell_written_elsewhere()
        return row.id

    @overload
    async def get(self, id: Job[R]) -> Job[R]: ...
    @overload
    async def get(self, id: int | Job[Any], kind: Kind[Any, R]) -> Job[R]: ...
    @overload
    async def get(self, id: int, kind: None = None) -> Job[object]: ...
    async def get(self, id: int | Job[Any], kind: Kind[Any, Any] | None = None) -> Job[Any]:
        """The job as it is now. Raises `JobNotFound`, also if it is of another kind."""
        name = None if kind is None else checked_kind(kind).name
        row = await self._row(id)
        if name is not None and name != row.kind:
            raise JobNotFound(f"job {row.id} is not of kind {name!r}")
        return Job(row, _codec_for(id, kind))

    @overload
    async def find(
        self,
        *,
        state: State | None = None,
        kind: Kind[Any, R],
        after: int | None = None,
        limit: int = 100,
    ) -> list[Job[R]]: ...
    @overload
    async def find(
        self,
        *,
        state: State | None = None,
        kind: str | None = None,
        after: int | None = None,
        limit: int = 100,
    ) -> list[Job[object]]: ...
    async def find(
        self,
        *,
        state: State | None = None,
        kind: Kind[Any, Any] | str | None = None,
        after: int | None = None,
        limit: int = 100,
    ) -> list[Job[Any]]:
        """At most `limit` jobs by id, those with an id above `after`; page with the last id.

        Raises `ValueError` for a `state` or `limit` that cannot be.
        """
        states = () if state is None else (_checked_state(state),)
        if isinstance(limit, bool) or not isinstance(limit, int) or limit < 0:
            raise ValueError(f"limit must be a whole number from 0 on, not {limit!r}")
        start = 0 if after is None else max(min(_number_of(after), _MAX_ID), -1)
        name = _name_of(kind)
        codec = kind.result_codec if isinstance(kind, Kind) else None
        rows = await self._bridge.read(
            lambda store: store.find(
                states=states, kind=name, after=start, limit=min(limit, _MAX_ID)
            )
        )
        return [Job(row, codec) for row in rows]

    async def history(self, id: int | Job[Any]) -> list[PastAttempt]:
        """Every start that did not succeed, oldest first, the newest 100. Raises `JobNotFound`."""
        number = _checked_id(id)
        past = await self._bridge.read(lambda store: store.history(number))
        if past is None:
            raise _not_found(number)
        return [past_attempt(one) for one in past]

    async def counts(self, *, kind: Kind[Any, Any] | str | None = None) -> dict[State, int]:
        """How many jobs are in each of the six states."""
        name = _name_of(kind)
        counts = await self._bridge.read(lambda store: store.counts(name))
        return {state: counts.get(state, 0) for state in State}

    @overload
    async def wait_finished(self, job_or_id: Job[R], *, poll: float = 1.0) -> Job[R]: ...
    @overload
    async def wait_finished(self, job_or_id: int, *, poll: float = 1.0) -> Job[object]: ...
    async def wait_finished(self, job_or_id: int | Job[Any], *, poll: float = 1.0) -> Job[Any]:
        """Wait until the job has ended, and return it.

        Wakes at once if it ends in this process, and on Linux also if in another one; within
        `poll` seconds otherwise.
        Cancelling the wait does not touch the job. Raises `JobNotFound`, `StoreBusy` or
        `StoreError` when the store could not be read (the call is safe to repeat), and
        `trio.ClosedResourceError` when `open_jobs` is left meanwhile.
        """
        poll = seconds(poll, "poll", above=True)
        self._bridge.raise_if_closed()
        self._bridge.raise_if_elsewhere()
        number = _checked_id(job_or_id)
        with self._lookout.wanted():
            row = _existing(await self._waiters.wait(number, poll), number)
        return Job(row, _codec_for(job_or_id, None))

    async def cancel(self, id: int | Job[Any]) -> bool:
        """End a job early. True: this call cancelled it, or it will be cancelled when its
        attempt ends; False: it had already ended. Raises `JobNotFound`.

        The handler of a running one is cancelled at once in this process, and on Linux also in
        another one; there within `poll` otherwise. A job whose runner is known to be gone ends
        at once.
        """
        number = _checked_id(id)
        while True:
            found, is_owner_dead = await self._bridge.read(lambda store: _with_owner(store, number))
            row = _existing(found, number)
            change = _lifecycle.cancelled(row, self._clock.now(), is_owner_dead=is_owner_dead)
            if change is None:
                return not row.state.is_final
            if await self._bridge.apply(change) is None:
                return True

    @overload
    async def retry(self, id: Job[R]) -> Job[R]: ...
    @overload
    async def retry(self, id: int) -> Job[object]: ...
    async def retry(self, id: int | Job[Any]) -> Job[Any]:
        """Give a failed, dead or cancelled job a new life: queued, due now, all attempts free.

        Raises `StateError` for any other, and if a live job has its key; `JobNotFound`.
        """
        row = await self._row(id)
        while True:
            try:
                change = _lifecycle.retried(row, self._clock.now())
            except IllegalTransition:
                raise StateError(
                    f"job {row.id} ({row.kind}) is {row.state.value}; "
                    "only a failed, dead or cancelled job can be retried"
                ) from None
            refused = await self._bridge.apply(change)
            if refused is None:
                return Job(change.after, _codec_for(id, None))
            now = _existing(refused.row, row.id)
            if _guard(now) == _guard(row):
                raise StateError(f"job {row.id} ({row.kind}): a live job has its key")
            row = now

    async def _row(self, id: int | Job[Any]) -> Row:
        number = _checked_id(id)
        return _existing(await self._bridge.read(lambda store: store.get(number)), number)

    def _due(self, now: Instant, delay: float | None, run_at: datetime | None) -> Instant:
        if delay is not None and run_at is not None:
            raise ValueError("delay and run_at are two ways to say one thing: give one of them")
        if delay is not None:
            return _lifecycle.later(now, microseconds(seconds(delay, "delay")))
        return now if run_at is None else max(now, instant_of(run_at, "run_at"))

    def _new_job(
        self,
        kind: Kind[Any, Any],
        payload: object,
        now: Instant,
        due: Instant,
        deadline: datetime | None,
        priority: int | None,
        key: str | None,
    ) -> NewJob:
        checked_kind(kind)
        if key is not None and not isinstance(key, str):
            raise TypeError(f"key must be a str, not {type(key).__name__}")
        return NewJob(
            kind=kind.name,
            payload=kind.payload_codec.encode(payload, self._max_payload),
            raw=kind.payload_codec.raw,
            priority=kind.priority if priority is None else priority_of(priority),
            enqueued_at=now,
            run_at=due,
            deadline=None if deadline is None else instant_of(deadline, "deadline"),
            key=None if key is None else storable(key, "key"),
        )

    def _claims_for(self, jobs: Sequence[NewJob]) -> list[Write]:
        claimants = [one for watcher in self._watchers for one in watcher.claimants(jobs)]
        if not claimants:
            return []
        # An application's clock may raise. Not after the first has made its claim.
        now = self._clock.now()
        return [claimant.new_claim(now) for claimant in claimants]

    def _tell(self, rows: Sequence[Row]) -> None:
        self._hub.tell(rows)

    def _tell_unsure(self) -> None:
        self._hub.tell_written_elsewhere()

    async def _look(self) -> None:
        """Somebody else may have committed: runners claim if so, and whoever waits for a job
        that has ended is told."""
        for watcher in tuple(self._watchers):
            watcher.look()
        if self._waiters:
            version = await self._bridge.version()
            if version != self._version:
                is_found = await self._waiters.look()
                self._version = version
                if is_found:
                    self._lookout.found()

    @contextmanager
    def _watched_by(self, watcher: Watcher) -> Iterator[None]:
        """It hears of what is committed here, and others' commits are looked for."""
        self._watchers[watcher] = None
        try:
            with self._lookout.wanted():
                yield
        finally:
            del self._watchers[watcher]

    # Called from other loops, maybe when we have closed already; nothing may be raised there.

    def _heard(self, rows: Sequence[Row]) -> None:
        self._waiters.tell(rows)
        if not self._bridge.is_closed:
            for watcher in tuple(self._watchers):
                watcher.heard(rows)

    def _written_elsewhere(self) -> None:
        self._waiters.ask_for_all()
        for watcher in tuple(self._watchers):
            watcher.written_elsewhere()


def _checked_id(id: int | Job[Any]) -> int:
    number = _number_of(id)
    if not 0 <= number <= _MAX_ID:
        raise _not_found(number)
    return number


def _number_of(id: int | Job[Any]) -> int:
    number = id.id if isinstance(id, Job) else id
    if isinstance(number, bool) or not isinstance(number, int):
        raise TypeError(f"a job's id must be an int, not {type(number).__name__}")
    return number


def _checked_state(state: State) -> State:
    try:
        return State(state)
    except ValueError:
        words = ", ".join(one.value for one in State)
        raise ValueError(f"state must be one of {words}, not {state!r}") from None


def _name_of(kind: Kind[Any, Any] | str | None) -> str | None:
    if isinstance(kind, Kind):
        return kind.name
    if kind is not None and not isinstance(kind, str):
        raise TypeError(f"kind must be a Kind or its name, {but_not(kind)}")
    return None if kind is None else storable(kind, "kind")


def _codec_for(job_or_id: int | Job[Any], kind: Kind[Any, Any] | None) -> Codec | None:
    if kind is not None:
        codec: Codec = kind.result_codec
        return codec
    return job_or_id._result_codec if isinstance(job_or_id, Job) else None


def _with_owner(store: Store, id: int) -> tuple[Row | None, bool]:
    """The row, and whether it is running and its runner known to be gone."""
    row = store.get(id)
    if row is None or row.state is not State.RUNNING:
        return row, False
    return row, store.is_owner_dead(row.fence)


def _guard(row: Row) -> tuple[object, ...]:
    return (row.state, row.claims, row.cancel_requested)


def _existing(row: Row | None, id: int) -> Row:
    if row is None:
        raise _not_found(id)
    return row


def _not_found(id: int) -> JobNotFound:
    return JobNotFound(f"there is no job {id}")
