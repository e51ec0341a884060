"""Stands in for the thread that writes.

The calls of a simulated store are made on the Trio thread, where nothing can come between what a
caller decides and the transaction it is written in, nor between the commit and the answer. With
a thread, and with a disk, both take time in which other processes go on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextvars import Context
from typing import Final

import trio

from trio_jobs import Jobs
from trio_jobs._batch import Write

from .world import Process

_REPLACED: Final = ("_flush", "_deliver")


def let_writing_take_time(process: Process, jobs: Jobs) -> None:
    """Batches of these jobs wait before they are committed, and answers before they are heard:
    each up to the process's latency, answers also longer."""
    bridge, settings = jobs._bridge, process.settings
    # By other names they would go on as ever, and nothing would take time any more.
    for name in _REPLACED:
        assert callable(getattr(type(bridge), name, None)), f"a Bridge has no {name}"
    flush, deliver = bridge._flush, bridge._deliver
    answered: deque[Sequence[Write]] = deque()

    def later(call: object, seconds: float) -> None:
        wait = process.random.uniform(0, seconds)
        trio.lowlevel.spawn_system_task(_after, process, wait, call, context=Context())

    def hear() -> None:
        if answered:
            deliver(answered.popleft())

    def flush_later() -> None:
        later(flush, settings.latency) if settings.latency else process.run(flush)

    def deliver_later(batch: Sequence[Write]) -> None:
        answered.append(batch)
        seconds = settings.latency + settings.answers
        if seconds and not bridge.is_closed:
            later(hear, seconds)
        while answered and (bridge.is_closed or not seconds):
            hear()

    bridge._flush = flush_later  # type: ignore[method-assign]
    bridge._deliver = deliver_later  # type: ignore[method-assign]


async def _after(process: Process, seconds: float, call: object) -> None:
    assert callable(call)
    await trio.sleep(seconds)
    process.run(call)
