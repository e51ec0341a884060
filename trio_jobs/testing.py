"""For the tests of an application: a handler alone, a quiet moment, the start of virtual time."""

from __future__ import annotations

from typing import Any, TypeVar, cast

import trio
import trio.testing

from ._bridge import bridges_here
from ._clock import EPOCH as EPOCH
from ._handler import Attempt
from ._jobs import Jobs
from ._kinds import Handler, Kind, checked_handler, checked_kind

__all__ = ["EPOCH", "attempt", "run", "settled"]

P = TypeVar("P")
R = TypeVar("R")

_MAX_BYTES = 1_000_000


def attempt(
    kind: Kind[P, R], payload: P, *, number: int = 1, published: R | None = None
) -> Attempt[P, R]:
    """An attempt for calling a handler by hand: `await handler(attempt(kind, payload))`.

    The payload goes through the codec as in earnest. What the handler publishes is checked
    and shows in `attempt.published`; there are no `attempt.jobs`. Raises `PayloadError`.
    """
    checked_kind(kind)
    stored = kind.payload_codec.encode(payload, _MAX_BYTES)
    results = kind.result_codec
    latest = None if published is None else results.encode(published, _MAX_BYTES)

    async def publish(value: R) -> None:
        nonlocal latest
        latest = results.encode(value, _MAX_BYTES)
        await trio.lowlevel.checkpoint()

    return Attempt(
        payload=cast("P", kind.payload_codec.decode(stored)),
        number=number,
        job_id=1,
        kind=kind.name,
        token=number,
        jobs=cast("Jobs", _NoJobs()),
        publish=publish,
        read_published=lambda: None if latest is None else cast("R", results.decode(latest)),
    )


async def run(handler: Handler, payload: object) -> object:
    """Run a handler alone, without a store: its result, or what it raises.

    Raises `PayloadError` if the payload or the result does not fit its type.
    """
    kind = checked_handler(handler).kind
    result = await handler(attempt(kind, payload))
    await trio.lowlevel.checkpoint()
    return kind.result_codec.decode(kind.result_codec.encode(result, _MAX_BYTES))


async def settled() -> None:
    """Wait until no call to a store is under way and every task is blocked.

    What `trio.testing.wait_all_tasks_blocked` is without threads: it does not count a task
    that waits for a thread as busy.
    """
    while True:
        await trio.testing.wait_all_tasks_blocked()
        waits = [await bridge.wait_quiet() for bridge in bridges_here()]
        if not any(waits):
            return


class _NoJobs:
    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("an attempt made by trio_jobs.testing.attempt has no jobs")
