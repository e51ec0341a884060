"""Every decision about a job, and nothing else: a row and an instant in, a change out.

The table below is the whole life of a job. No other module assigns a state: `_move` is
the one place that does, and it refuses what the table does not hold. Nothing here reads
a clock, a database or a setting; policy arrives as a value.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any, Final, TypeAlias

import msgspec
from msgspec.structs import replace

from ._instants import LATEST
from ._model import Change, Failure, Instant, Outcome, PastStart, Policy, Row, State


class Event(enum.Enum):
    __hash__ = object.__hash__  # members are singletons, and Enum's own is no C

    CLAIMED = "claimed"
    RETURNED = "returned a value that fits"
    RAISED = "raised, or timed out"
    REFUSED = "failed for good"
    RETRY_LATER = "retry later"
    INTERRUPTED = "interrupted by shutdown"
    HANDED_BACK = "handed back before it was started"
    LOST = "lost"
    CANCELLED = "cancel"
    DEADLINE = "deadline passed"
    RETRIED = "retried by hand"


TRANSITIONS: Final[Mapping[tuple[State, Event], frozenset[State]]] = {
    (State.QUEUED, Event.CLAIMED): frozenset({State.RUNNING}),
    (State.QUEUED, Event.CANCELLED): frozenset({State.CANCELLED}),
    (State.QUEUED, Event.DEADLINE): frozenset({State.FAILED}),
    (State.RUNNING, Event.RETURNED): frozenset({State.SUCCEEDED}),
    (State.RUNNING, Event.RAISED): frozenset({State.QUEUED, State.DEAD}),
    (State.RUNNING, Event.REFUSED): frozenset({State.FAILED}),
    (State.RUNNING, Event.RETRY_LATER): frozenset({State.QUEUED}),
    (State.RUNNING, Event.INTERRUPTED): frozenset({State.QUEUED, State.FAILED, State.DEAD}),
    (State.RUNNING, Event.HANDED_BACK): frozenset({State.QUEUED}),
    (State.RUNNING, Event.LOST): frozenset({State.QUEUED, State.FAILED, State.DEAD}),
    (State.RUNNING, Event.CANCELLED): frozenset({State.CANCELLED}),
    (State.RUNNING, Event.DEADLINE): frozenset({State.FAILED}),
    (State.FAILED, Event.RETRIED): frozenset({State.QUEUED}),
    (State.DEAD, Event.RETRIED): frozenset({State.QUEUED}),
    (State.CANCELLED, Event.RETRIED): frozenset({State.QUEUED}),
}

_ALLOWED: Final = frozenset(
    (before, event, to) for (before, event), states in TRANSITIONS.items() for to in states
)

MAX_INTERRUPTIONS: Final = 10
"""In a row; each further one uses up an attempt, so that no job can be handed on for ever."""

WORKER_LOST: Final = Failure("worker lost")
INTERRUPTED: Final = Failure("interrupted")
INTERRUPTED_BY_RESTART: Final = Failure("interrupted by restart")
DEADLINE: Final = Failure("deadline")
TIMED_OUT: Final = Failure("timed out")


class IllegalTransition(Exception):
    """The table does not hold this event for a row in this state; nothing was changed."""

    def __init__(self, row: Row, event: Event) -> None:
        super().__init__(f"job {row.id} is {row.state.value}: {event.value} is not possible")


# How an attempt ended, as its runner saw it.


class Returned(msgspec.Struct, frozen=True):
    result: bytes


class Raised(msgspec.Struct, frozen=True):
    failure: Failure
    outcome: Outcome = "failed"


class RefusedForGood(msgspec.Struct, frozen=True):
    failure: Failure


class RetryAfter(msgspec.Struct, frozen=True):
    wait: int
    """Microseconds."""


class InterruptedByShutdown(msgspec.Struct, frozen=True):
    pass


class NeverStarted(msgspec.Struct, frozen=True):
    was: Row
    """The row before the claim."""


class LeaseOver(msgspec.Struct, frozen=True):
    pass


class DeadlinePassed(msgspec.Struct, frozen=True):
    pass


End: TypeAlias = (
    Returned
    | Raised
    | RefusedForGood
    | RetryAfter
    | InterruptedByShutdown
    | NeverStarted
    | LeaseOver
    | DeadlinePassed
)


def claimed(row: Row, now: Instant, lease_until: Instant) -> Row:
    """A due row was taken for a start: the attempt counts from here, also if the process dies."""
    return _move(
        row,
        Event.CLAIMED,
        State.RUNNING,
        attempt=row.attempt + 1,
        claims=row.claims + 1,
        lease_until=lease_until,
        started_at=now,
    )


def ended(row: Row, end: End, policy: Policy, now: Instant) -> Change:
    """An attempt ended while its fence held. A requested cancel comes before everything else."""
    if row.cancel_requested and isinstance(end, NeverStarted):
        return Change(before=row, after=_before_claim(row, end.was, Event.CANCELLED, now))
    if row.cancel_requested:
        return _finish(row, Event.CANCELLED, State.CANCELLED, now, outcome="cancelled")
    match end:
        case Returned(result):
            after = _move(
                row,
                Event.RETURNED,
                State.SUCCEEDED,
                finished_at=now,
                lease_until=None,
                result=result,
                failure=None,
            )
            return _with_result(row, after)
        case Raised(failure, outcome):
            if row.attempt >= policy.attempts:
                return _finish(row, Event.RAISED, State.DEAD, now, outcome, failure)
            return _requeue(
                row,
                Event.RAISED,
                now,
                outcome,
                failure,
                run_at=later(now, policy.wait(row.id, row.attempt)),
            )
        case RefusedForGood(failure):
            return _finish(row, Event.REFUSED, State.FAILED, now, "failed", failure)
        case RetryAfter(wait):
            return _requeue(
                row,
                Event.RETRY_LATER,
                now,
                "retry later",
                run_at=later(now, wait),
                attempt=row.attempt - 1,
            )
        case InterruptedByShutdown():
            return _interrupted(row, policy, now)
        case NeverStarted(was):
            return Change(before=row, after=_before_claim(row, was, Event.HANDED_BACK))
        case LeaseOver():
            return lost(row, policy, now)
        case DeadlinePassed():
            return _finish(row, Event.DEADLINE, State.FAILED, now, "deadline", DEADLINE)


def lost(row: Row, policy: Policy, now: Instant) -> Change:
    """A running row whose runner is gone. The lost attempt counts: a job that kills its
    process comes to an end."""
    if row.cancel_requested:
        return _finish(row, Event.CANCELLED, State.CANCELLED, now, "cancelled")
    if row.deadline is not None and row.deadline <= now:
        return _finish(row, Event.DEADLINE, State.FAILED, now, "deadline", DEADLINE)
    if policy.on_interrupt == "fail":
        return _finish(row, Event.LOST, State.FAILED, now, "lost", INTERRUPTED_BY_RESTART)
    if row.attempt >= policy.attempts:
        return _finish(row, Event.LOST, State.DEAD, now, "lost", WORKER_LOST)
    return _requeue(row, Event.LOST, now, "lost", WORKER_LOST, run_at=row.run_at)


def expired(
    row: Row, now: Instant, lease_now: Instant | None = None, *, is_owner_dead: bool = False
) -> Change | None:
    """A queued row at its deadline fails; a lost one too, or is cancelled if that was asked for.

    None when neither applies. Any runner may do this, whatever kinds it serves. `lease_now`
    decides what is lost, where that is another clock than `now`; `is_owner_dead` as in `is_lost`.
    """
    passed = row.deadline is not None and row.deadline <= now
    if row.state is State.QUEUED and passed:
        after = _final(row, Event.DEADLINE, State.FAILED, now, failure=DEADLINE)
        return Change(before=row, after=after)
    if is_lost(row, now if lease_now is None else lease_now, is_owner_dead=is_owner_dead):
        if row.cancel_requested:
            return _finish(row, Event.CANCELLED, State.CANCELLED, now, "cancelled")
        if passed:
            return _finish(row, Event.DEADLINE, State.FAILED, now, "deadline", DEADLINE)
    return None


def cancelled(row: Row, now: Instant, *, is_owner_dead: bool = False) -> Change | None:
    """A user asks for the end: at once if no handler runs, else when its attempt ends.

    None when there is nothing to change: it has ended, or was asked before. `is_owner_dead` as
    in `is_lost`.
    """
    if row.state is State.QUEUED:
        return Change(before=row, after=_final(row, Event.CANCELLED, State.CANCELLED, now))
    if row.state is State.RUNNING:
        if is_lost(row, now, is_owner_dead=is_owner_dead):
            change = _finish(row, Event.CANCELLED, State.CANCELLED, now, "cancelled")
            # Its holder may be late, and renew it before this is written.
            return replace(change, lease_over=row.lease_until)
        if not row.cancel_requested:
            return Change(before=row, after=replace(row, cancel_requested=True))
    return None


def retried(row: Row, now: Instant) -> Change:
    """A user gives an ended job a new life. Raises IllegalTransition for any other."""
    after = _move(
        row,
        Event.RETRIED,
        State.QUEUED,
        attempt=0,
        interruptions=0,
        cancel_requested=False,
        run_at=now,
        finished_at=None,
    )
    return Change(before=row, after=after)


def published(row: Row, result: bytes) -> Change:
    """A partial result of a running attempt."""
    return _with_result(row, replace(row, result=result))


def _with_result(row: Row, after: Row) -> Change:
    # Another publication may be under way; so the result is written also where it seems to be
    # there already.
    before = row if row.result is None else replace(row, result=None)
    return Change(before=before, after=after)


def is_lost(row: Row, now: Instant, *, is_owner_dead: bool = False) -> bool:
    """Its lease has ended, or it is known for certain that the process that had it is gone."""
    if row.state is not State.RUNNING or row.lease_until is None:
        return False
    return is_owner_dead or row.lease_until <= now


def is_suspect(row: Row) -> bool:
    """It was lost the last time, too: maybe it is the job that takes its runners with it."""
    return row.failure == WORKER_LOST


def later(now: Instant, wait: int) -> Instant:
    return min(now + wait, LATEST)


def _interrupted(row: Row, policy: Policy, now: Instant) -> Change:
    if policy.on_interrupt == "fail":
        return _finish(
            row, Event.INTERRUPTED, State.FAILED, now, "interrupted", INTERRUPTED_BY_RESTART
        )
    uses_up = row.interruptions >= MAX_INTERRUPTIONS
    if uses_up and row.attempt >= policy.attempts:
        return _finish(row, Event.INTERRUPTED, State.DEAD, now, "interrupted", INTERRUPTED)
    return _requeue(
        row,
        Event.INTERRUPTED,
        now,
        "interrupted",
        run_at=row.run_at,
        attempt=row.attempt if uses_up else row.attempt - 1,
        interruptions=row.interruptions + 1,
    )


def _before_claim(row: Row, was: Row, event: Event, finished_at: Instant | None = None) -> Row:
    # Everything but `claims` is as before the claim: a fence must not be handed out twice.
    return _move(
        row,
        event,
        State.QUEUED if finished_at is None else State.CANCELLED,
        attempt=was.attempt,
        started_at=was.started_at,
        finished_at=finished_at,
        lease_until=None,
    )


def _requeue(
    row: Row,
    event: Event,
    now: Instant,
    outcome: Outcome,
    failure: Failure | None = None,
    *,
    run_at: Instant,
    attempt: int | None = None,
    interruptions: int = 0,
) -> Change:
    after = _move(
        row,
        event,
        State.QUEUED,
        run_at=run_at,
        attempt=row.attempt if attempt is None else attempt,
        interruptions=interruptions,
        lease_until=None,
        failure=row.failure if failure is None else failure,
    )
    return Change(before=row, after=after, past=_past(row, now, outcome, failure))


def _finish(
    row: Row,
    event: Event,
    to: State,
    now: Instant,
    outcome: Outcome,
    failure: Failure | None = None,
) -> Change:
    after = _final(row, event, to, now, failure=row.failure if failure is None else failure)
    return Change(before=row, after=after, past=_past(row, now, outcome, failure))


def _final(row: Row, event: Event, to: State, now: Instant, **fields: Any) -> Row:
    return _move(row, event, to, finished_at=now, lease_until=None, **fields)


def _past(row: Row, now: Instant, outcome: Outcome, failure: Failure | None) -> PastStart:
    return PastStart(
        number=row.attempt,
        claim=row.claims,
        started_at=now if row.started_at is None else row.started_at,
        ended_at=now,
        outcome=outcome,
        failure=failure,
    )


def _move(row: Row, event: Event, to: State, **fields: Any) -> Row:
    if (row.state, event, to) not in _ALLOWED:
        raise IllegalTransition(row, event)
    return replace(row, state=to, **fields)
