"""What an application writes down: kinds, and the handlers bound to them.

All of it is inert: a web process imports kinds to enqueue, and never a handler.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, overload

from ._checks import (
    is_async,
    is_async_generator,
    name_of,
    priority_of,
    refuses_one_argument,
    seconds,
    text,
)
from ._codec import Codec
from ._instants import microseconds
from ._model import Policy
from ._retry import Retry

if TYPE_CHECKING:
    from typing_extensions import TypeForm

    from ._handler import Attempt

P = TypeVar("P")
R = TypeVar("R")


class Kind(Generic[P, R]):
    """A named type of job: what goes in, what comes out, and what happens when it fails.

    `timeout` (seconds) bounds one attempt. `on_interrupt` says what becomes of a job whose
    runner stopped or died under it: "retry" it, or "fail" it ("interrupted by restart")
    when its work must not be repeated. `queue` groups kinds for `serve(queues=...)`.
    Higher `priority` runs first. Raises `TypeError` for a payload or result type that
    cannot be stored, `ValueError` for settings that cannot work, and `AttributeError` when
    a setting is assigned later.
    """

    __slots__ = (
        "name",
        "on_interrupt",
        "payload_codec",
        "policy",
        "priority",
        "queue",
        "result_codec",
        "retry",
        "timeout",
    )

    @overload
    def __init__(
        self: Kind[P, None],
        name: str,
        payload: TypeForm[P],
        *,
        retry: Retry = ...,
        timeout: float | None = None,
        on_interrupt: Literal["retry", "fail"] = "retry",
        queue: str = "default",
        priority: int = 0,
    ) -> None: ...
    @overload
    def __init__(
        self,
        name: str,
        payload: TypeForm[P],
        result: TypeForm[R],
        *,
        retry: Retry = ...,
        timeout: float | None = None,
        on_interrupt: Literal["retry", "fail"] = "retry",
        queue: str = "default",
        priority: int = 0,
    ) -> None: ...
    def __init__(
        self,
        name: str,
        payload: object,
        result: object = None,
        *,
        retry: Retry | None = None,
        timeout: float | None = None,
        on_interrupt: Literal["retry", "fail"] = "retry",
        queue: str = "default",
        priority: int = 0,
    ) -> None:
        self.name = text(name, "the name of a kind")
        self.retry = Retry() if retry is None else retry
        if not isinstance(self.retry, Retry):
            raise TypeError(f"retry of kind {name!r} must be a Retry, not {type(retry).__name__}")
        self.timeout = (
            None if timeout is None else seconds(timeout, f"timeout of kind {name!r}", above=True)
        )
        if on_interrupt not in ("retry", "fail"):
            raise ValueError(
                f'on_interrupt of kind {name!r} must be "retry" or "fail", not {on_interrupt!r}'
            )
        self.on_interrupt: Literal["retry", "fail"] = on_interrupt
        self.queue = text(queue, f"queue of kind {name!r}")
        self.priority = priority_of(priority)
        self.payload_codec = Codec(payload, f"payload of kind {name!r}")
        self.result_codec = Codec(result, f"result of kind {name!r}", allow_raw=False)
        self.policy = policy_of(self.retry, self.on_interrupt)

    if not TYPE_CHECKING:  # a checker would take it that anything can be assigned

        def __setattr__(self, name: str, value: object) -> None:
            # Runners have read it, and would go by the old one. Once for each: copies are made so.
            if hasattr(self, name):
                raise AttributeError(f"{name} of {self!r} cannot be changed; make another Kind")
            super().__setattr__(name, value)

    def __repr__(self) -> str:
        return f"<Kind {self.name!r}>"

    def handled_by(self, fn: Callable[[Attempt[P, R]], Awaitable[R]]) -> Handler:
        """Bind this kind to the async function that does it; usable as a decorator.

        Bound methods and partials are welcome: that is how a handler carries what it needs.
        Raises `TypeError` for a function that is not async, or does not take one argument.
        """
        return Handler(self, fn)


class Handler:
    """A kind bound to the async function that does it; what `serve` takes a list of."""

    __slots__ = ("fn", "kind")

    # One class for every payload and result: the fit was checked by `handled_by`, and a
    # list of handlers with different type arguments has no useful type in any checker.
    def __init__(
        self, kind: Kind[Any, Any], fn: Callable[[Attempt[Any, Any]], Awaitable[Any]]
    ) -> None:
        if not is_async(fn):
            hint = ": write `async def`" if callable(fn) else ""
            if is_async_generator(fn):
                hint = ", an async generator: it has a `yield`"
            raise TypeError(
                f"the handler of kind {kind.name!r} must be an async function, "
                f"not {name_of(fn)}{hint}"
            )
        why = refuses_one_argument(fn)
        if why is not None:
            raise TypeError(
                f"the handler of kind {kind.name!r} must take one argument, the attempt; "
                f"{name_of(fn)}: {why}"
            )
        self.kind = kind
        self.fn = fn

    async def __call__(self, attempt: Attempt[Any, Any]) -> Any:
        """Call the function itself, as a test does; see `trio_jobs.testing.attempt`."""
        return await self.fn(attempt)

    def __repr__(self) -> str:
        return f"<Handler of {self.kind.name!r}: {name_of(self.fn)}>"


def checked_kind(kind: object) -> Kind[Any, Any]:
    """It, or `TypeError` for anything else."""
    if not isinstance(kind, Kind):
        raise TypeError(f"kind must be a Kind, {but_not(kind)}")
    return kind


def but_not(kind: object) -> str:
    """The end of a message about something that is no kind."""
    hint = ": use handler.kind" if isinstance(kind, Handler) else ""
    return f"not {type(kind).__name__}{hint}"


def checked_handler(handler: object) -> Handler:
    """It, or `TypeError` for anything else."""
    if not isinstance(handler, Handler):
        raise TypeError(
            f"{name_of(handler)!r} is no Handler: bind a function with @kind.handled_by"
        )
    return handler


def policy_of(retry: Retry, on_interrupt: Literal["retry", "fail"]) -> Policy:
    """The values of a kind that the pure lifecycle decides by."""
    return Policy(
        attempts=retry.attempts,
        on_interrupt=on_interrupt,
        wait=lambda job_id, attempt: microseconds(retry.wait(job_id, attempt)),
    )
