"""A client in a real process: each call is told before it is made, and its answer after.

A call without an answer (the process was killed, or the call cancelled) has an unknown outcome;
so has one whose error says so.
"""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime, timedelta
from itertools import count
from pathlib import Path
from typing import Any, Final, Literal, Protocol, TypeAlias, TypeVar

from trio_jobs import Job, Jobs, Kind, StoreError, TrioJobsError
from trio_jobs._codec import Codec

T = TypeVar("T")

CANARY: Final = "canary"
"""Is in every payload, and must be seen nowhere else."""

MAX_BYTES: Final = 1_000_000
"""The library's own bound for what it stores."""

LOCK_TIMEOUT: Final = 0.3
"""Seconds an own connection waits for the lock, and holds up everything here meanwhile."""


class Say(Protocol):
    def __call__(self, event: str, **fields: object) -> None: ...


OwnConnection: TypeAlias = tuple[Any, type[Exception]]
"""A connection of the application, and the error it raises."""


class Client:
    """Calls `Jobs`, tells of it, and lives with every answer."""

    def __init__(self, jobs: Jobs, say: Say, name: str) -> None:
        self._jobs = jobs
        self._say = say
        self._name = name
        self._calls = count(1)
        self._tags = count(1)
        self._known: list[int] = []

    def new_tag(self) -> str:
        return f"{CANARY} {self._name} {next(self._tags)}"

    async def enqueue(
        self,
        kind: Kind[Any, Any],
        payload: object,
        *,
        delay: float | None = None,
        deadline: float | None = None,
        priority: int | None = None,
        key: str | None = None,
    ) -> int | None:
        """The job's id, None if it was refused. `deadline` is in seconds from now."""
        until = None if deadline is None else datetime.now(UTC) + timedelta(seconds=deadline)
        job = await self._call(
            "enqueue",
            lambda: self._jobs.enqueue(
                kind, payload, delay=delay, deadline=until, priority=priority, key=key
            ),
            lambda job: {"ids": [job.id]},
            **_stored(kind, [payload]),
            keys=[key],
        )
        if job is None:
            return None
        self._known.append(job.id)
        return job.id

    async def enqueue_many(self, kind: Kind[Any, Any], payloads: Sequence[object]) -> None:
        found = await self._call(
            "enqueue_many",
            lambda: self._jobs.enqueue_many(kind, payloads),
            lambda jobs: {"ids": [job.id for job in jobs]},
            **_stored(kind, payloads),
        )
        self._known += [job.id for job in found or []]

    def enqueue_on(
        self,
        own: OwnConnection,
        kind: Kind[Any, Any],
        payload: object,
        *,
        commit: bool,
        ballast: int,
    ) -> None:
        """As a part of a transaction of the application, committed or rolled back, which fills
        its own table too."""
        connection, sqlite_error = own
        number = self._begins("enqueue_on", **_stored(kind, [payload]))
        try:
            connection.execute("BEGIN IMMEDIATE")
            id = self._jobs.enqueue_on(connection, kind, payload)
            if ballast:
                connection.execute(f"INSERT INTO ballast VALUES (zeroblob({ballast}))")
            connection.execute("COMMIT" if commit else "ROLLBACK")
        except (sqlite_error, StoreError) as error:
            # Not even that a COMMIT failed means that it did not take place.
            self._say("answer", number=number, outcome="unknown", error=type(error).__name__)
        else:
            if commit:
                self._known.append(id)
                self._say("answer", number=number, outcome="ok", ids=[id])
            else:
                self._say("answer", number=number, outcome="fail", error="rolled back")
        finally:
            connection.close()

    async def cancel(self, dice: random.Random) -> None:
        if self._known:
            id = dice.choice(self._known[-12:])
            await self._call(
                "cancel",
                lambda: self._jobs.cancel(id),
                lambda answer: {"answer": answer},
                job=id,
            )

    async def retry(self, dice: random.Random) -> None:
        if self._known:
            id = dice.choice(self._known[-40:])
            await self._call("retry", lambda: self._jobs.retry(id), lambda _: {}, job=id)

    async def get(self, dice: random.Random) -> None:
        if self._known:
            id = dice.choice(self._known)

            def seen(job: Job[object]) -> dict[str, object]:
                return {"ids": [job.id], "states": [job.state.value]}

            await self._call("get", lambda: self._jobs.get(id), seen, job=id)

    async def _call(
        self,
        what: str,
        call: Callable[[], Awaitable[T]],
        told: Callable[[T], dict[str, object]],
        **asked: object,
    ) -> T | None:
        number = self._begins(what, **asked)
        try:
            answer = await call()
        except TrioJobsError as error:
            is_unknown = isinstance(error, StoreError) and error.is_outcome_unknown
            outcome = "unknown" if is_unknown else "fail"
            self._say("answer", number=number, outcome=outcome, error=type(error).__name__)
        else:
            self._say("answer", number=number, outcome="ok", **told(answer))
            return answer
        return None

    def _begins(self, what: str, **asked: object) -> str:
        number = f"{self._name}/{next(self._calls)}"
        self._say("call", number=number, verb=what, **asked)
        return number


def _stored(kind: Kind[Any, Any], payloads: Sequence[object]) -> dict[str, object]:
    """What will be told of jobs before they are there: by their payloads they can be found."""
    texts = [encoded(kind.payload_codec, payload) for payload in payloads]
    return {"kind": kind.name, "payloads": texts}


def encoded(codec: Codec, value: object) -> str:
    """As the library stores it."""
    return codec.encode(value, MAX_BYTES).decode()


def own_connection(database: Path, driver: Literal["sqlite3", "apsw"]) -> OwnConnection:
    """The application's own, prepared as README asks."""
    if driver == "sqlite3":
        own = sqlite3.connect(database, isolation_level=None, timeout=LOCK_TIMEOUT)
        own.execute("PRAGMA wal_autocheckpoint = 0")
        return own, sqlite3.Error
    import apsw

    connection = apsw.Connection(str(database))
    connection.set_busy_timeout(int(1000 * LOCK_TIMEOUT))
    connection.execute("PRAGMA wal_autocheckpoint = 0")
    return connection, apsw.Error
