"""What a handler sees: its attempt, and what it may raise to say how that ends."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Generic, TypeVar

from . import _checks

if TYPE_CHECKING:
    from ._jobs import Jobs

P = TypeVar("P")
R = TypeVar("R")


class Fail(Exception):
    """Raise it in a handler to fail with a text that is stored and may be shown to anyone.

    `retry=False` fails the job for good, whatever attempts are left.
    """

    def __init__(self, message: str, *, retry: bool = True) -> None:
        if not isinstance(message, str):
            raise TypeError(f"the message of a Fail must be a str, not {type(message).__name__}")
        super().__init__(message)
        self.message = message
        self.retry = retry


class RetryLater(Exception):
    """Raise it in a handler to be started again in so many seconds; uses up no attempt."""

    def __init__(self, seconds: float) -> None:
        self.seconds = _checks.seconds(seconds, "the seconds of a RetryLater")
        super().__init__(self.seconds)


class Attempt(Generic[P, R]):
    """What a handler gets: its payload, where it stands, and a way to publish."""

    __slots__ = (
        "_publish",
        "_read_published",
        "job_id",
        "jobs",
        "kind",
        "number",
        "payload",
        "token",
    )

    def __init__(
        self,
        *,
        payload: P,
        number: int,
        job_id: int,
        kind: str,
        token: int,
        jobs: Jobs,
        publish: Callable[[R], Awaitable[None]],
        read_published: Callable[[], R | None],
    ) -> None:
        self.payload = payload
        self.number = number
        """Which attempt of this job it is, from 1."""
        self.job_id = job_id
        """The same in every attempt: an idempotency key for the outside."""
        self.kind = kind
        """The name of the kind."""
        self.token = token
        """Larger in every later start of this job: with it others can refuse a stale writer."""
        self.jobs = jobs
        """For a handler that enqueues."""
        self._publish = publish
        self._read_published = read_published

    @property
    def published(self) -> R | None:
        """What was published last, by this attempt or an earlier one; None if nothing was,
        or if it does not fit the result type any more. A copy: changing it publishes nothing."""
        return self._read_published()

    async def publish(self, value: R) -> None:
        """Store a partial result; when this returns it is on disk and readers see it.

        Raises `LeaseLost` if this attempt is over (then nothing was written), `PayloadError`
        for a value that does not fit the result type, `StoreError` if the store refused.
        """
        await self._publish(value)

    def __repr__(self) -> str:
        return f"<Attempt {self.number} of job {self.job_id} {self.kind!r}>"
