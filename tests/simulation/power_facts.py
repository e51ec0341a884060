"""What somebody was told while the power was on, and what a file found afterwards says of it.

A fact has a position: so many operations had reached the disk when it became known. A cut at
or after that position must not make it untrue. It is about one row, and of the kind that stays
true for good ("has had at least three claims"), or until somebody retries the job.

Beside facts, the whole contents of the file are noted after every commit as a digest. So it can
be said which commit a file that was found is at: all up to it are there, and nothing of others.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import apsw
import trio

from trio_jobs import Job, State
from trio_jobs._schema import STATES

from .vfs import Operation

_TABLES: Final = ("trio_jobs_meta", "trio_jobs_job", "trio_jobs_owner", "trio_jobs_past")

_ROWS: Final = """
SELECT id, kind, key, state, attempt, claims, cancel_requested, payload, result,
    started_at IS NOT NULL, finished_at IS NOT NULL, lease_until IS NOT NULL
FROM trio_jobs_job
"""


@dataclass(frozen=True)
class Found:
    """A job as the tables have it."""

    id: int
    kind: str
    key: str | None
    state: State | None
    attempt: int
    claims: int
    cancel_requested: bool
    payload: object
    result: Any
    has_started: bool
    has_finished: bool
    has_lease: bool

    @property
    def is_whole(self) -> bool:
        """What goes together is there together."""
        if self.state is None:
            return False
        is_running = self.state is State.RUNNING
        return (
            self.has_lease == is_running
            and self.has_finished == self.state.is_final
            and (self.has_started or not is_running)
            and self.attempt <= self.claims
        )


@dataclass(frozen=True)
class Contents:
    """What there is in a file that was found."""

    digest: str
    rows: Sequence[Found]
    integrity: str
    """"ok", or what is wrong."""


NOTHING: Final = Contents("", (), "ok")


class Commit(NamedTuple):
    position: int
    digest: str
    """Of what the file holds then."""
    at: float
    """Virtual time."""


@dataclass(frozen=True)
class Fact:
    position: int
    job: int
    says: str
    holds: Callable[[Found], bool]
    until_retry_since: int | None = None
    """A retry that was asked for at this position or later may have undone it."""
    token: int | None = None
    """Of a start."""

    def carried(self) -> Fact:
        """The same at the start of the next life."""
        since = None if self.until_retry_since is None else 0
        return replace(self, position=0, until_retry_since=since)


class Facts:
    """Everything that has become known while a list of operations grew."""

    def __init__(
        self,
        operations: Sequence[Operation],
        start: Contents,
        earlier: Sequence[Fact],
        began_at: float,
    ) -> None:
        self._operations = operations
        self.facts = list(earlier)
        self.commits = [Commit(0, start.digest, began_at)]
        """Every one there was, after what there was at the start."""
        self.retries: list[tuple[int, int]] = []
        """(position, job) of every retry that was asked for."""
        self.groups: list[list[int]] = []
        """Jobs that were added in one call: at no time only some of them are there."""
        self.starts = {(fact.job, fact.token) for fact in earlier if fact.token is not None}
        self.wrong: list[str] = []

    @property
    def position(self) -> int:
        return len(self._operations)

    def _add(
        self,
        job: int,
        says: str,
        holds: Callable[[Found], bool],
        until_retry_since: int | None = None,
        token: int | None = None,
    ) -> None:
        self.facts.append(Fact(self.position, job, says, holds, until_retry_since, token))

    def committed(self, connection: apsw.Connection) -> None:
        self.commits.append(Commit(self.position, digest_of(connection), trio.current_time()))

    def added(self, job: int, kind: str, key: str | None, payload: object) -> None:
        self._add(
            job,
            f"was added as {payload}, with key {key!r}",
            lambda row: (row.kind, row.key, row.payload) == (kind, key, payload),
        )

    def started(self, job: int, token: int) -> None:
        if (job, token) in self.starts:
            self.wrong.append(f"job {job} was started twice under token {token}")
        self.starts.add((job, token))
        self._add(
            job, f"was started under token {token}", lambda row: row.claims >= token, token=token
        )

    def published(self, job: int, value: list[int]) -> None:
        """Of one job a later value must be greater than an earlier one, the last one too."""
        self._add(
            job, f"published {value}", lambda row: row.result is not None and row.result >= value
        )

    def ended(self, job: Job[Any]) -> None:
        end = (job.state, job.attempt, job.result)
        self._add(
            job.id,
            f"ended as {end}",
            lambda row: (row.state, row.attempt, row.result) == end,
            self.position,
        )

    def cancelled(self, job: int, asked_at: int) -> None:
        self._add(
            job,
            "was cancelled",
            lambda row: (
                row.state is State.CANCELLED
                or (row.state is State.RUNNING and row.cancel_requested)
            ),
            asked_at,
        )

    def retrying(self, job: int) -> None:
        self.retries.append((self.position, job))

    def retried(self, job: int, claims: int) -> None:
        """After it had been claimed so often."""
        self._add(
            job,
            f"was retried after {claims} claims",
            lambda row: row.claims > claims or row.state is State.QUEUED,
        )

    def known_at(self, position: int, asked_until: int) -> list[Fact]:
        """What was known at a position, and nothing asked for until the other could undo."""
        return [
            fact
            for fact in self.facts
            if fact.position <= position
            and not (
                fact.until_retry_since is not None
                and any(
                    job == fact.job and fact.until_retry_since <= when <= asked_until
                    for when, job in self.retries
                )
            )
        ]


def torn(groups: Sequence[Sequence[int]], rows: Sequence[Found]) -> list[str]:
    """Jobs that are not whole, and groups of which only some are there."""
    ids = {row.id for row in rows}
    return [
        *(f"half a job: {row}" for row in rows if not row.is_whole),
        *(
            f"of jobs {group} only {sorted(ids.intersection(group))}"
            for group in groups
            if not (ids.issuperset(group) or ids.isdisjoint(group))
        ),
    ]


def untrue(facts: Sequence[Fact], rows: Sequence[Found]) -> list[str]:
    """Those of the facts that the rows deny."""
    by_id = {row.id: row for row in rows}
    wrong = []
    for fact in facts:
        row = by_id.get(fact.job)
        if row is None:
            wrong.append(f"job {fact.job} {fact.says}, and is gone")
        elif not fact.holds(row):
            wrong.append(f"job {fact.job} {fact.says}, but now is {row}")
    return wrong


def contents_of(connection: apsw.Connection) -> Contents:
    """Raises `apsw.Error` where the file is so broken that it cannot be read."""
    [(integrity,), *_] = connection.execute("PRAGMA integrity_check").fetchall()
    if integrity != "ok":
        return Contents("", (), str(integrity))
    digest = digest_of(connection)
    return Contents(digest, _rows_of(connection) if digest else (), "ok")


def digest_of(connection: apsw.Connection) -> str:
    """Of all rows of all tables; empty while there are no tables."""
    query = "SELECT name FROM sqlite_master WHERE name = 'trio_jobs_meta'"
    if not connection.execute(query).fetchall():
        return ""
    content = [connection.execute(f"SELECT * FROM {table}").fetchall() for table in _TABLES]
    return hashlib.blake2b(repr(content).encode(), digest_size=16).hexdigest()


def _rows_of(connection: apsw.Connection) -> list[Found]:
    return [
        Found(
            id,
            kind,
            key,
            STATES.get(state),
            attempt,
            claims,
            bool(cancel_requested),
            _decoded(payload),
            _decoded(result),
            *map(bool, has),
        )
        for (
            id, kind, key, state, attempt, claims, cancel_requested, payload, result, *has,
        ) in connection.execute(_ROWS)
    ]  # fmt: skip


@functools.lru_cache
def _decoded(text: str | bytes | None) -> Any:
    """Itself, if it is no JSON: what a liar of a disk has left is compared, not understood."""
    try:
        return None if text is None else json.loads(text)
    except ValueError:
        return text
