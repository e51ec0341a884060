"""The values that cross the store's seam, and nothing that acts.

Every instant in here is an integer of microseconds since the Unix epoch, UTC; every
encoded value is the bytes that are stored. A row is what the store keeps of a job; a
change is what a decision makes of it.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from typing import Annotated, Final, Literal, TypeAlias

import msgspec

Instant: TypeAlias = int
"""Microseconds since 1970-01-01T00:00:00Z."""

MAX_COUNT: Final = 2**62
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNT)]
"""One more is still an integer that can be stored."""

Fence: TypeAlias = tuple[int, int]
"""(id, claims): identifies one claim for ever, because `claims` never goes down."""

Outcome: TypeAlias = Literal[
    "failed", "timed out", "retry later", "interrupted", "lost", "cancelled", "deadline"
]
"""How a start ended that did not succeed."""


class State(enum.Enum):
    """Where a job stands. The value is the word users, JSON and the command see."""

    QUEUED = "queued"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    DEAD = "dead"
    CANCELLED = "cancelled"

    __hash__ = object.__hash__  # members are singletons, and Enum's own is no C

    @property
    def is_final(self) -> bool:
        """True when only a retry by hand can move the job again."""
        return self is not State.QUEUED and self is not State.RUNNING


class Failure(msgspec.Struct, frozen=True):
    """Why a job, or one start of it, did not succeed; always safe to show.

    `type` is the exception's type name (for a group with its leaves), and None for the
    text of a `Fail` and for the runner's own messages.
    """

    message: str
    type: str | None = None


class Row(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What the store keeps of a job, without its payload (which only a claim needs).

    As an array, because claims decode it from one: `_rows.QUEUED_AS_JSON` has the same order.
    """

    id: int
    kind: str
    state: State
    attempt: Count
    claims: Count
    interruptions: Count
    cancel_requested: bool
    priority: int
    key: str | None
    enqueued_at: Instant
    run_at: Instant
    deadline: Instant | None
    lease_until: Instant | None
    started_at: Instant | None
    finished_at: Instant | None
    result: bytes | None
    failure: Failure | None

    @property
    def fence(self) -> Fence:
        return (self.id, self.claims)


class NewJob(msgspec.Struct, frozen=True, kw_only=True):
    """A job about to be inserted; `raw` payloads are stored as a blob, others as JSON text."""

    kind: str
    payload: bytes
    raw: bool
    priority: int
    enqueued_at: Instant
    run_at: Instant
    deadline: Instant | None
    key: str | None


class PastStart(msgspec.Struct, frozen=True, kw_only=True):
    """The record of one start that did not succeed."""

    number: int
    claim: int
    started_at: Instant
    ended_at: Instant
    outcome: Outcome
    failure: Failure | None


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """A decision: `before` becomes `after`, if the stored row is still what `before` says.

    "Still" means the same id, state, claims and cancel_requested: the fence, and the one
    field that others may change under it. The lease, which its holder renews meanwhile, counts
    only where the decision was made because it was over.
    """

    before: Row
    after: Row
    past: PastStart | None = None
    lease_over: Instant | None = None
    """The lease that was found to be over, by somebody who is not its holder."""


class Refused(msgspec.Struct, frozen=True):
    """A change that was not made: the row as it is now, None if there is none."""

    row: Row | None


class Policy(msgspec.Struct, frozen=True):
    """What a runner's kind says about ends: the claiming runner's word counts, not the row's.

    `wait(job_id, attempt)` is the backoff in microseconds after that attempt failed.
    """

    attempts: int
    on_interrupt: Literal["retry", "fail"]
    wait: Callable[[int, int], int]


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """What a runner asks of the store when it has room, or when an instant has come."""

    policies: Mapping[str, Policy]
    """The kinds it serves."""
    limit: int
    """At most so many rows are taken; 0 still ends what a deadline or a loss ends."""
    ahead_limit: int = 0
    """At most so many more, as long as the next in order is of `ahead_kinds`, not lost, and not
    on its last attempt."""
    ahead_kinds: frozenset[str] = frozenset()
    lost_limit: int
    """At most so many of them may be lost rows."""
    takes_suspect: bool = True
    """One of them may be a suspect (a row that was lost before), and then it is the only one."""
    now: Instant
    """Decides what a deadline ends, and what is due unless `due_by` does."""
    lease_now: Instant
    """Decides which leases are over."""
    lease_until: Instant
    """The new leases."""
    held: frozenset[int] = frozenset()
    """Ids this runner still has in hand: never lost to itself, never claimed twice."""
    below: int | None = None
    """Only ids below this one (`run_once`: what is enqueued meanwhile waits)."""
    stays_due: bool = True
    """What was due when it was enqueued is due: the clock may have been set back since."""
    due_by: Instant | None = None
    """Only rows due at this instant (`run_once`: what becomes due meanwhile waits)."""


class ClaimedJob(msgspec.Struct, frozen=True, kw_only=True):
    """One row that was taken: `row` as it is now, `was` as it was when it was due."""

    row: Row
    was: Row
    payload: bytes
    taken_up: bool
    """It was lost: another start of it was under way when its runner went."""
    is_suspect: bool = False
    """It was lost, and not for the first time."""


class Claimed(msgspec.Struct, frozen=True, kw_only=True):
    """The store's answer to a `Claim`."""

    jobs: list[ClaimedJob]
    """In claim order: highest priority, then oldest run_at, then lowest id."""
    settled: list[Change]
    """Rows the claim itself ended or took up: deadlines and losses, for log and waiters."""
    lost_waiting: bool
    """Lost rows are left that `lost_limit` or `takes_suspect` held back."""
    more: bool
    """There may be due rows that were not taken."""
    next_due: Instant | None
    """When the next served row becomes due, or the next lease ends (lost rows that wait are
    `lost_waiting`); None while there are `more`."""
    next_deadline: Instant | None
    """When the next queued row of any kind reaches its deadline."""
    cancelled: list[Fence]
    """Running rows, whoever's, whose cancellation was requested."""
