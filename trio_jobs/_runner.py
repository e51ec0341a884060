"""`serve` and `run_once`: what users ask of a runner, checked, and handed to the engine."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from datetime import datetime
from typing import Final

import trio

from ._checks import is_async, name_of, seconds
from ._engine import Engine, Once
from ._instants import instant_of
from ._jobs import Jobs
from ._kinds import Handler, checked_handler
from ._statistics import Statistics
from ._unhandled import Unhandled

_log = logging.getLogger("trio_jobs")

SHORTEST_LEASE: Final = 0.5
"""Seconds; a third of it must be enough for a renewal on a busy machine."""
MOST_WORKERS: Final = 10_000
"""Each is a task from the start; more would be a slip of the finger."""


async def serve(  # noqa: ASYNC128 - the engine says that it has started
    jobs: Jobs,
    handlers: Iterable[Handler],
    *,
    workers: int = 10,
    queues: Collection[str] | Mapping[str, int] | None = None,
    poll: float = 1.0,
    lease: float = 60.0,
    grace: float = 10.0,
    unhandled: Unhandled = "leave",
    task_status: trio.TaskStatus[Runner] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Run jobs until cancelled or drained: `runner = await nursery.start(serve, jobs, [...])`.

    At most `workers` (1 to 10,000) handlers run at a time. `queues` chooses among the handlers
    by `kind.queue`: names, or a mapping from name to its own number of workers. The store is
    looked at every `poll` seconds, and at once when this process enqueues; on Linux also when
    another one does. A claim is valid for `lease` seconds and renewed while its handler runs.

    Cancelling it stops in order: no new claims, `grace` seconds for handlers to end, then
    they are cancelled and have 2 s to clean up, then 2 s for the last writes. What did not
    end is handed back. A handler that cannot be cancelled (a thread, a shield) is logged,
    and serve returns after it.

    `unhandled`: "leave" jobs of kinds nobody gave a handler for, "fail" them, or an async
    function `(name, payload)` that takes any. Raises `ValueError` or `TypeError` for
    settings that cannot work, `StoreError` when the file is beyond waiting (corrupt,
    read-only), `KeyboardInterrupt` when a handler raised it.
    """
    pools, known = pools_of(handlers, workers, queues, unhandled)
    engine = Engine(
        jobs,
        pools,
        known,
        poll=seconds(poll, "poll", above=True),
        lease=lease_of(lease),
        grace=seconds(grace, "grace"),
        unhandled=unhandled,
    )
    await engine.run(lambda: task_status.started(Runner(engine)))


async def run_once(
    jobs: Jobs,
    handlers: Iterable[Handler],
    *,
    now: datetime | None = None,
    workers: int = 1,
    queues: Collection[str] | Mapping[str, int] | None = None,
    unhandled: Unhandled = "leave",
) -> int:
    """Run each job that is due at the call, at most once and in claim order; how many started.

    What becomes due meanwhile waits for the next call. `now` (an aware datetime) decides
    what is due, backoff and deadlines; leases are kept on the real clock.

    Cancelling it stops in order as for `serve`, with a `grace` of 10 s: a handler under way has
    that long to end before it is cancelled, and only then this returns. Raises what
    `serve` raises, and `StoreBusy` or `StoreError` when jobs cannot be claimed.
    """
    pools, known = pools_of(handlers, workers, queues, unhandled)
    instant = None if now is None else instant_of(now, "now")
    due_by = jobs._clock.now() if instant is None else instant
    once = Once(instant, due_by, await jobs._bridge.read(lambda store: store.next_id()))
    engine = Engine(
        jobs, pools, known, poll=1.0, lease=60.0, grace=10.0, unhandled=unhandled, once=once
    )
    await engine.run(lambda: None)
    return engine.statistics().started


class Runner:
    """What `await nursery.start(serve, ...)` returns: the running service, from outside."""

    __slots__ = ("_engine",)

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def drain(self) -> None:
        """Finish what is in hand, claim no more; then `serve` returns."""
        self._engine.drain()

    def statistics(self) -> Statistics:
        """Counts since the start, and how it is now."""
        return self._engine.statistics()

    def __repr__(self) -> str:
        now = self.statistics()
        return f"<Runner: {now.running} running, {now.started} started>"


# What can be checked before there is a `Jobs`.


def lease_of(lease: float) -> float:
    return seconds(lease, "lease", least=SHORTEST_LEASE)


def pools_of(
    handlers: Iterable[Handler],
    workers: int,
    queues: Collection[str] | Mapping[str, int] | None,
    unhandled: Unhandled,
) -> tuple[list[tuple[dict[str, Handler], int]], frozenset[str]]:
    """Who serves what with how many workers, and every kind that has a handler here."""
    by_kind: dict[str, Handler] = {}
    if not isinstance(handlers, Iterable):
        raise TypeError(f"handlers must be a list of Handlers, not {handlers!r}")
    for handler in handlers:
        first = by_kind.setdefault(checked_handler(handler).kind.name, handler)
        if first is not handler:
            raise ValueError(_two(first, handler))
    if unhandled not in ("leave", "fail") and not is_async(unhandled):
        raise ValueError(
            f'unhandled must be "leave", "fail" or an async function, not {unhandled!r}'
        )
    known = frozenset(by_kind)
    if queues is None:
        if unhandled == "leave" and not by_kind:
            # Not refused: deadlines are kept, and `statistics().unhandled` names what is waiting.
            _log.warning("there are no handlers: no job will be started")
        return [(by_kind, _workers(workers, "workers"))], known
    if isinstance(queues, str) or not isinstance(queues, Collection):
        raise TypeError(
            "queues must be a list of names, or a mapping from names to numbers of workers, or "
            f"None for all, not {queues!r}"
        )
    if not queues:
        raise ValueError("queues must name at least one queue, or be None for all")
    served = {handler.kind.queue for handler in by_kind.values()}
    missing = [name for name in queues if name not in served]
    if missing:
        raise ValueError(f"no handler is for queue {_list(missing)}; they are for {_list(served)}")
    if isinstance(queues, Mapping):
        return [
            (_served(by_kind, {name}), _workers(number, f"workers of queue {name!r}"))
            for name, number in queues.items()
        ], known
    return [(_served(by_kind, queues), _workers(workers, "workers"))], known


def _two(first: Handler, second: Handler) -> str:
    name = first.kind.name
    functions = f"{name_of(first.fn)} and {name_of(second.fn)}"
    if first.kind is second.kind:
        return f"kind {name!r} has two handlers: {functions}"
    return f"two Kinds are named {name!r}: those of the handlers {functions}"


def _list(names: Iterable[object]) -> str:
    return ", ".join(sorted(map(repr, names))) or "none"


def _served(by_kind: Mapping[str, Handler], queues: Collection[str]) -> dict[str, Handler]:
    return {name: one for name, one in by_kind.items() if one.kind.queue in queues}


def _workers(number: int, name: str) -> int:
    is_whole = isinstance(number, int) and not isinstance(number, bool)
    if not is_whole or not 1 <= number <= MOST_WORKERS:
        raise ValueError(
            f"{name} must be a whole number from 1 to {MOST_WORKERS:,}, not {number!r}"
        )
    return number
