"""What callers get to see of a job, immutable: as it is, and its past attempts."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Generic, TypeVar, cast

from ._codec import Codec, decode_plain
from ._errors import JobFailed, PayloadError, StateError
from ._instants import datetime_of
from ._model import Failure, Instant, Outcome, PastStart, Row, State

R = TypeVar("R")


@dataclass(frozen=True, repr=False)
class Job(Generic[R]):
    """A job as it was when it was read; it never changes, read it again to see more.

    `result` is the value published last while the job runs, and the final one afterwards.
    It is decoded when it is read: PayloadError if what is stored does not fit (any more).
    """

    _row: Row
    _result_codec: Codec | None = field(compare=False)

    @property
    def id(self) -> int:
        return self._row.id

    @property
    def kind(self) -> str:
        """The name of its kind."""
        return self._row.kind

    @property
    def state(self) -> State:
        return self._row.state

    @property
    def attempt(self) -> int:
        """How many starts were counted in this life of the job."""
        return self._row.attempt

    @property
    def priority(self) -> int:
        return self._row.priority

    @property
    def key(self) -> str | None:
        return self._row.key

    @property
    def enqueued_at(self) -> datetime:
        return datetime_of(self._row.enqueued_at)

    @property
    def run_at(self) -> datetime:
        """When it is or was due: for a job that waits for a retry, the instant of that."""
        return datetime_of(self._row.run_at)

    @property
    def deadline(self) -> datetime | None:
        return _datetime_or_none(self._row.deadline)

    @property
    def started_at(self) -> datetime | None:
        """When its latest start was."""
        return _datetime_or_none(self._row.started_at)

    @property
    def finished_at(self) -> datetime | None:
        return _datetime_or_none(self._row.finished_at)

    @property
    def failure(self) -> Failure | None:
        """Why it failed last; None after a success."""
        return self._row.failure

    @property
    def result(self) -> R | None:
        data = self._row.result
        if data is None:
            return None
        decode = decode_plain if self._result_codec is None else self._result_codec.decode
        return cast("R", decode(data))

    def unwrap(self) -> R:
        """The final result. Raises `JobFailed` with the stored message if it ended without
        one, `StateError` if it has not ended."""
        if self.state is State.SUCCEEDED:
            return cast("R", self.result)  # a stored null decodes to R too
        if not self.state.is_final:
            raise StateError(f"job {self.id} ({self.kind}) has not ended: it is {self.state.value}")
        raise JobFailed(_why(self._row))

    def to_dict(self) -> dict[str, object]:
        """Everything as JSON-ready values; `result` is None where it cannot be decoded."""
        try:
            result = None if self._row.result is None else decode_plain(self._row.result)
        except PayloadError:
            result = None
        row = self._row
        return {
            "id": row.id,
            "kind": row.kind,
            "status": row.state.value,
            "result": result,
            "error": None if row.failure is None else row.failure.message,
            "error_type": None if row.failure is None else row.failure.type,
            "attempt": row.attempt,
            "priority": row.priority,
            "key": row.key,
            "enqueued_at": self.enqueued_at.isoformat(),
            "run_at": self.run_at.isoformat(),
            "deadline": _iso_or_none(row.deadline),
            "started_at": _iso_or_none(row.started_at),
            "finished_at": _iso_or_none(row.finished_at),
        }

    def __repr__(self) -> str:
        return f"<Job {self.id} {self.kind!r}: {self.state.value}, attempt {self.attempt}>"


@dataclass(frozen=True)
class PastAttempt:
    """One start of a job that did not succeed."""

    number: int
    """The attempt as it was counted at its claim."""
    claim: int
    """Which claim of the job it was; never repeats, also after a retry by hand."""
    started_at: datetime
    ended_at: datetime
    outcome: Outcome
    failure: Failure | None


def _why(row: Row) -> str:
    if row.state is State.CANCELLED:
        return f"job {row.id} ({row.kind}) was cancelled"
    reason = "no message" if row.failure is None else row.failure.message
    if row.failure is not None and row.failure.type is not None:
        reason = f"{reason} ({row.failure.type})"
    return f"job {row.id} ({row.kind}) {row.state.value}: {reason}"


def _datetime_or_none(instant: Instant | None) -> datetime | None:
    return None if instant is None else datetime_of(instant)


def _iso_or_none(instant: Instant | None) -> str | None:
    return None if instant is None else datetime_of(instant).isoformat()


def past_attempt(past: PastStart) -> PastAttempt:
    return PastAttempt(
        number=past.number,
        claim=past.claim,
        started_at=datetime_of(past.started_at),
        ended_at=datetime_of(past.ended_at),
        outcome=past.outcome,
        failure=past.failure,
    )
