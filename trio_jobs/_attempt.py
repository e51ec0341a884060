"""One attempt, from its claim to its settled change, read from top to bottom.

`Execution` is the runner's side of it (the handler sees an `Attempt`): it starts the handler,
knows why it was stopped, decides by the pure table what that comes to, and knows by the
store's answer whether that was the end of it.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import msgspec
import trio

from . import _checks, _lifecycle
from ._bridge import Bridge
from ._clock import Clock
from ._codec import safe_text
from ._errors import LeaseLost, PayloadError, StoreError
from ._handler import Attempt, Fail, RetryLater
from ._instants import MICROSECONDS, microseconds
from ._kinds import Handler, Kind
from ._lifecycle import End
from ._model import Change, ClaimedJob, Failure, Fence, Instant, Refused, Row, State
from ._repeats import Repeats

if TYPE_CHECKING:
    from ._jobs import Jobs

_log = logging.getLogger("trio_jobs")

# Timeouts and deadlines act strictly after their instant: an end at it counts.
STRICTLY_AFTER: Final = 1_000

_INTERNAL_ERROR: Final = "internal error"
_NOT_DECODED: Final = Failure("payload does not decode")
_NO_FIT: Final = Failure("result does not fit")


class Stop(enum.Enum):
    """Why we cancelled a handler's scope. `_verdict` has the precedence, in which a returned value
    comes before TIMEOUT; CANCEL comes before all, and the pure table sees to that."""

    CANCEL = enum.auto()
    DEADLINE = enum.auto()
    TIMEOUT = enum.auto()
    FENCE = enum.auto()
    SHUTDOWN = enum.auto()


@dataclass(frozen=True, slots=True)
class Host:
    """What all executions of a runner share."""

    jobs: Jobs
    bridge: Bridge
    clock: Clock
    max_payload: int
    lease: int
    """Microseconds."""
    decision_now: Callable[[], Instant]
    """The instant that ends are decided by."""
    watches_deadlines: bool
    is_cancelled: Callable[[], bool]
    """Something went wrong in the runner itself, and Trio cancels all of it."""


class Execution:
    """One claimed job in the hands of a runner."""

    __slots__ = (
        "_host",
        "_is_last_try",
        "_may_be_written",
        "_payload",
        "_repeats",
        "_scope",
        "_stops",
        "_timeout_at",
        "_was",
        "began_at",
        "came_at",
        "fence",
        "handler",
        "is_handling",
        "is_over",
        "kept_from",
        "keyboard_interrupt",
        "row",
    )

    def __init__(
        self,
        claimed: ClaimedJob,
        handler: Handler,
        host: Host,
        kept_from: Instant,
        came_at: Instant,
    ) -> None:
        row = claimed.row
        self.row = row
        self.fence: Fence = (row.id, row.claims)
        self.handler = handler
        self.is_handling = False
        """The handler is under way."""
        self.is_over = False
        """The attempt has its end, or has lost its fence: it writes nothing any more."""
        self.kept_from = kept_from
        """The instant the newest committed lease was computed from."""
        self.came_at = came_at
        """From when it waits for a worker, in `Clock.ticks`; so is `began_at`."""
        self.began_at: Instant | None = None
        self.keyboard_interrupt: BaseException | None = None
        self._payload: bytes | None = claimed.payload
        self._was = claimed.was
        self._host = host
        self._scope: trio.CancelScope | None = None
        self._stops: set[Stop] = set()
        self._timeout_at: Instant | None = None
        self._may_be_written = False
        self._is_last_try = False
        self._repeats: Repeats | None = None

    @property
    def lease_until(self) -> Instant:
        return self.kept_from + self._host.lease

    # What the runner's loops do to it.

    def stop(self, why: Stop) -> None:
        """Cancel the handler's scope, or keep it from starting."""
        self._stops.add(why)
        if self._scope is not None:
            self._scope.cancel()

    def cancel_was_requested(self) -> None:
        if not self.row.cancel_requested:
            self.row = msgspec.structs.replace(self.row, cancel_requested=True)
            self.stop(Stop.CANCEL)

    def lose(self) -> None:
        """Somebody else has the row: whatever this attempt comes to, it is not written."""
        if not self.is_over:
            self.is_over = True
            _log.warning("%s has lost its lease; the attempt is stopped", self)
            self.stop(Stop.FENCE)

    def first_limit(self, now: Instant) -> Instant:
        """When `check` may first have something to do, at the start."""
        if self._timeout_at is not None or self.row.deadline is not None:
            return min(at for _, at in self._limits(now))
        return self.lease_until - self._host.lease // 6

    def next_limit(self, now: Instant) -> Instant | None:
        """When `check` will have something to do; None if nothing is left to act on."""
        return min((at for _, at in self._limits(now) if at > now), default=None)

    def check(self, now: Instant) -> None:
        """Stop the handler if its timeout, deadline or fence has passed."""
        for why, at in self._limits(now):
            # Before the lease ends nobody else can have the row, so stopping now is in time.
            # After it (the loop was blocked, the machine asleep) only the store knows: then
            # the lease keeper asks, and a row that nobody took is simply kept.
            if at <= now and not (why is Stop.FENCE and now >= self.lease_until):
                self.stop(why)

    def _limits(self, now: Instant) -> list[tuple[Stop, Instant]]:
        """Each limit that has not been acted on, with the first instant to act on it."""
        limits = [(Stop.FENCE, self.lease_until - self._host.lease // 6)]
        if self._timeout_at is not None:
            left = self._timeout_at - self._host.clock.ticks()
            limits.append((Stop.TIMEOUT, now + left + STRICTLY_AFTER))
        if self.row.deadline is not None and self._host.watches_deadlines:
            limits.append((Stop.DEADLINE, self.row.deadline + STRICTLY_AFTER))
        return [limit for limit in limits if limit[0] not in self._stops]

    # What a worker does with it.

    async def run(
        self, scope: trio.CancelScope, begins: Callable[[Execution, Instant], None]
    ) -> End:
        """Start the handler and see how it ends; `begins` is called if it does start.

        It is stopped by cancelling `scope`, the innermost one around this call.
        """
        row, host, kind = self.row, self._host, self.handler.kind
        now = host.clock.now()
        late = row.deadline is not None and row.deadline <= host.decision_now()
        # With half of its lease over it might be stopped before that is renewed. Where all of the
        # runner is cancelled nothing could be written any more.
        is_stopped = self._stops or host.is_cancelled()
        if late or is_stopped or now >= self.kept_from + host.lease // 2:
            return _lifecycle.NeverStarted(self._was)
        assert self._payload is not None
        try:
            payload = kind.payload_codec.decode(self._payload)
        except BaseException as error:  # noqa: ASYNC103 - a payload type runs code, too
            _log.error("%s: %s", self, _safe_to_log(error))
            return _lifecycle.RefusedForGood(_NOT_DECODED)  # noqa: ASYNC104
        self._payload = None
        attempt = Attempt(
            payload=payload,
            number=row.attempt,
            job_id=row.id,
            kind=row.kind,
            token=row.claims,
            jobs=host.jobs,
            publish=self._publish,
            read_published=self._published_so_far,
        )
        if kind.timeout is not None:
            self._timeout_at = host.clock.ticks() + microseconds(kind.timeout)
        returned = False
        value: object = None
        raised: BaseException | None = None
        self.began_at = host.clock.ticks()
        self.is_handling = True
        try:
            begins(self, now)
            self._scope = scope
            try:
                value = await _call(self.handler.fn, attempt)
                returned = True
            except BaseException as error:  # noqa: ASYNC103 - each is this attempt's end
                raised = error
        finally:
            self._scope = None
            self.is_handling = False
        if not (returned or self._stops) and host.is_cancelled():
            self._stops.add(Stop.SHUTDOWN)
        try:
            return self._verdict(kind, returned, value, raised)
        except BaseException as error:  # noqa: ASYNC103 - none is so exotic that it hurts others
            _log.error("%s ended with something that cannot be looked at", self, exc_info=error)
            return _lifecycle.Raised(Failure(_INTERNAL_ERROR, "unknown"))  # noqa: ASYNC104

    # What its pool does with its end.

    def not_started(self) -> End:
        """The end that gives the row back as it was before the claim."""
        return _lifecycle.NeverStarted(self._was)

    def took(self) -> int | None:
        """Microseconds since the handler began, if it did."""
        return None if self.began_at is None else self._host.clock.ticks() - self.began_at

    def decide(self, end: End) -> Change:
        """What its end makes of the row as it is known here."""
        return _lifecycle.ended(self.row, end, self.handler.kind.policy, self._host.decision_now())

    def is_written(self, change: Change, refused: Refused | None) -> bool:
        """Whether this was the end of it. If not: `lose` was called if somebody else has the
        row, else it is to be decided again (a cancel was requested)."""
        if refused is None or self._is_own_end(change.after, refused.row):
            self.is_over = True
        elif refused.row is not None and self._is_held(refused.row):
            self.row = refused.row
            return False
        else:
            self.lose()
            return False
        return True

    def was_not_written(self, error: StoreError) -> bool:
        """The store refused. True: after `wait_for_store` it is tried again. False: the lease is
        over, and the row belongs to whoever claims it."""
        self._may_be_written = self._may_be_written or error.is_outcome_unknown
        if not self._is_last_try:
            return True
        self.is_over = True
        _log.error("%s: its end could not be written, given up: %s", self, error)
        return False

    async def wait_for_store(self) -> None:
        """Longer each time, and at most until the lease ends: then it is tried once more."""
        left = (self.lease_until - self._host.clock.now()) / MICROSECONDS
        self._repeats = self._repeats or Repeats()
        await trio.sleep(max(0, min(self._repeats.next(), left)))
        self._is_last_try = left <= 0

    async def _publish(self, value: object) -> None:
        codec = self.handler.kind.result_codec
        data = codec.encode(value, self._host.max_payload)

        def written() -> None:
            # In commit order: tasks that publish at the same time are woken in any.
            self.row = msgspec.structs.replace(self.row, result=data)

        while self.is_handling and not self.is_over:
            change = _lifecycle.published(self.row, data)
            refused = await self._host.bridge.apply(change, written)
            if refused is None:
                return
            if refused.row is None or not self._is_held(refused.row):
                self.lose()
                continue
            self.row = refused.row
            if self.row.cancel_requested:
                self.cancel_was_requested()
        # Shielded: `lose` has cancelled this scope, and it is LeaseLost that tells why.
        await trio.lowlevel.cancel_shielded_checkpoint()
        raise LeaseLost(f"this attempt of job {self.row.id} ({self.row.kind}) is over")

    def _published_so_far(self) -> object:
        if self.row.result is None:
            return None
        try:
            return self.handler.kind.result_codec.decode(self.row.result)
        except PayloadError as error:
            _log.warning("%s cannot read what was published before: %s", self, error)
            return None

    def _verdict(
        self, kind: Kind[Any, Any], returned: bool, value: object, raised: BaseException | None
    ) -> End:
        """What the attempt comes to. Once we stopped it, an exception counts as our reason."""
        if raised is not None:
            interrupt = next(
                (e for e in leaves_of(raised) if isinstance(e, KeyboardInterrupt)), None
            )
            if interrupt is not None:
                self.keyboard_interrupt = interrupt
                self._stops.add(Stop.SHUTDOWN)
            elif self._stops and not all(isinstance(e, trio.Cancelled) for e in leaves_of(raised)):
                _log.warning("%s raised while it was stopped", self, exc_info=raised)
        if Stop.DEADLINE in self._stops:
            return _lifecycle.DeadlinePassed()
        if returned:
            return self._returned(kind, value)
        if Stop.TIMEOUT in self._stops:
            return _lifecycle.Raised(_lifecycle.TIMED_OUT, "timed out")
        if Stop.FENCE in self._stops:
            return _lifecycle.LeaseOver()
        if self._stops:
            return _lifecycle.InterruptedByShutdown()
        assert raised is not None
        return self._raised(raised)

    def _returned(self, kind: Kind[Any, Any], value: object) -> End:
        try:
            return _lifecycle.Returned(kind.result_codec.encode(value, self._host.max_payload))
        except BaseException as error:  # noqa: ASYNC103 - a value runs code when it is encoded
            _log.error("%s: %s", self, _safe_to_log(error))
            return _lifecycle.RefusedForGood(_NO_FIT)  # noqa: ASYNC104

    def _raised(self, error: BaseException) -> End:
        leaves = leaves_of(error)
        fails = [leaf for leaf in leaves if isinstance(leaf, Fail)]
        if len(fails) == len(leaves):
            failure = Failure(safe_text(fails[0].message))
            if all(fail.retry for fail in fails):
                return _lifecycle.Raised(failure)
            return _lifecycle.RefusedForGood(failure)
        postponed = [leaf for leaf in leaves if isinstance(leaf, RetryLater)]
        if len(postponed) == len(leaves):
            # Checked again: the handler may have set it since.
            wait = max(_checks.seconds(leaf.seconds, "seconds") for leaf in postponed)
            return _lifecycle.RetryAfter(microseconds(wait))
        _log.error("%s raised", self, exc_info=error)
        return _lifecycle.Raised(Failure(_INTERNAL_ERROR, safe_text(_type_name(error), 1_000)))

    def _is_held(self, now: Row) -> bool:
        return now.state is State.RUNNING and now.fence == self.fence

    def _is_own_end(self, mine: Row, now: Row | None) -> bool:
        # Only after a commit of unknown outcome: then the refusal may be our own doing.
        return (
            self._may_be_written
            and now is not None
            and now.fence == mine.fence
            and now.state is mine.state
        )

    def __str__(self) -> str:
        return f"job {self.row.id} ({self.row.kind}), attempt {self.row.attempt}"


@trio.lowlevel.disable_ki_protection
async def _call(fn: Callable[[Attempt[Any, Any]], Awaitable[Any]], attempt: Any) -> Any:
    return await fn(attempt)


def _safe_to_log(error: BaseException) -> str:
    return str(error) if isinstance(error, PayloadError) else type(error).__name__


def leaves_of(error: BaseException) -> list[BaseException]:
    """The exceptions of a group, at any depth, or itself."""
    # A loop with a bound: how deep a handler nests its groups, or whether a group of its own
    # making holds itself, is no concern of ours.
    leaves, todo, left = [], [error], 10_000
    while todo and (left := left - 1):
        one = todo.pop()
        if isinstance(one, BaseExceptionGroup):
            todo.extend(reversed(one.exceptions))
        else:
            leaves.append(one)
    return leaves


def _type_name(error: BaseException) -> str:
    name = type(error).__name__
    if isinstance(error, BaseExceptionGroup):
        return f"{name}({', '.join(type(leaf).__name__ for leaf in leaves_of(error))})"
    return name
