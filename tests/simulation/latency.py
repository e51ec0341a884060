"""Stands in for the thread that writes.

The calls of a simulated store are made on the Trio thread, where nothing can come between what a
caller decides and the transaction it is written in, nor between the commit and the answer. With
a thread, and with a disk, both take time in which other processes go on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextvars import Context

import trio

from trio_jobs import Jobs
from trio_jobs._batch import Write

from .world import Process


def let_writing_take_time(process: Process, jobs: Jobs) -> None:
    """Batches of these jobs wait before they are committed, and answers before they are heard:
    each up to the process's latency."""
    bridge = jobs._bridge
    flush, deliver = bridge._flush, bridge._deliver
    answered: deque[Sequence[Write]] = deque()

    def later(call: object) -> None:
        trio.lowlevel.spawn_system_task(_after, process, call, context=Context())

    def hear() -> None:
        if answered:
            deliver(answered.popleft())

    def flush_later() -> None:
        later(flush) if process.settings.latency else process.run(flush)

    def deliver_later(batch: Sequence[Write]) -> None:
        answered.append(batch)
        if process.settings.latency and not bridge.is_closed:
            later(hear)
        while answered and (bridge.is_closed or not process.settings.latency):
            hear()

    bridge._flush = flush_later  # type: ignore[method-assign]
    bridge._deliver = deliver_later  # type: ignore[method-assign]


async def _after(process: Process, call: object) -> None:
    assert callable(call)
    await trio.sleep(process.random.uniform(0, process.settings.latency))
    process.run(call)
