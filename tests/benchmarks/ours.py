"""What is measured of trio_jobs in this process, through its public interface."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import trio

import trio_jobs
from trio_jobs import Attempt, Jobs, Kind, Runner, SqliteStore

from . import bare
from .bare import PAUSE
from .files import Driver, Durability, fresh_file, multiply
from .names import P50, P50_RETURNED, P99, P99_RETURNED
from .rounds import Sample, Watch, percentile


@dataclass(frozen=True)
class Note:
    """A payload like many: small, typed, JSON in the table."""

    number: int
    text: str = "a short text"


noop: Final = Kind("noop", Note)


@dataclass(frozen=True)
class Way:
    """How a file is reached."""

    driver: Driver
    durability: Durability

    def store(self, path: Path) -> SqliteStore:
        return SqliteStore(path, synchronous=self.durability, driver=self.driver)


@asynccontextmanager
async def opened(way: Way, path: Path | None = None) -> AsyncIterator[Jobs]:
    """The jobs in a file that is there, or in a fresh one."""
    with fresh_file() if path is None else nullcontext(path) as file:
        async with trio_jobs.open_jobs(way.store(file)) as jobs:
            yield jobs


async def fill(jobs: Jobs, count: int) -> None:
    for first in range(0, count, 1000):
        notes = [Note(number) for number in range(first, min(first + 1000, count))]
        await jobs.enqueue_many(noop, notes)


# Draining.


def drain(count: int, workers: int, way: Way, *, with_checkpoint: bool = False) -> Sample:
    """Jobs that are queued already, from the first start until the last end is written."""

    async def main() -> Sample:
        async with opened(way) as jobs:
            await fill(jobs, count)
            return await _drain(jobs, count, workers, with_checkpoint)

    return trio.run(main)


async def _drain(
    jobs: Jobs, count: int, workers: int = 100, with_checkpoint: bool = False
) -> Sample:
    started = 0
    watch: Watch | None = None
    runner: Runner | None = None

    async def handle(attempt: Attempt[Note, None]) -> None:
        nonlocal started, watch
        if started == 0:
            watch = Watch()
        started += 1
        if started == count:
            assert runner is not None
            runner.drain()
        if with_checkpoint:
            await trio.lowlevel.checkpoint()

    async with trio.open_nursery() as nursery:
        runner = await nursery.start(
            partial(trio_jobs.serve, jobs, [noop.handled_by(handle)], workers=workers)
        )
    assert watch is not None
    return watch.sample(count)


def ticker_beside_drain(count: int, workers: int, way: Way) -> Sample:
    """How late a 1 ms ticker is in the loop of a runner with its hands full."""

    async def main() -> Sample:
        late: list[float] = []
        async with opened(way) as jobs:
            await fill(jobs, count)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(bare.tick, late)
                rate = await _drain(jobs, count, workers)
                nursery.cancel_scope.cancel()
        return {**rate, **bare.lateness(late)}

    return trio.run(main)


# Enqueueing.


def enqueue(count: int, tasks: int, way: Way) -> Sample:
    """One job a call, from so many tasks, until the last is acknowledged."""

    async def main() -> Sample:
        async with opened(way) as jobs:

            async def task(some: int) -> None:
                for number in range(some):
                    await jobs.enqueue(noop, Note(number))

            watch = Watch()
            async with trio.open_nursery() as nursery:
                for number in range(tasks):
                    nursery.start_soon(task, (count + number) // tasks)
            return watch.sample(count)

    return trio.run(main)


# From enqueue to start.


class Latencies:
    """When each job was enqueued, when that was acknowledged, and when its handler started."""

    def __init__(self) -> None:
        self.called: dict[int, float] = {}
        self.returned: dict[int, float] = {}
        self.started: dict[int, float] = {}

    async def enqueue(self, jobs: Jobs, number: int) -> None:
        self.called.setdefault(number, time.monotonic())
        await jobs.enqueue(noop, Note(number))
        self.returned[number] = time.monotonic()

    async def handle(self, attempt: Attempt[Note, None]) -> None:
        self.started[attempt.payload.number] = time.monotonic()

    def sample(self) -> Sample:
        return {
            P50: percentile(self._since(self.called), 50),
            P99: percentile(self._since(self.called), 99),
            P50_RETURNED: percentile(self._since(self.returned), 50),
            P99_RETURNED: percentile(self._since(self.returned), 99),
        }

    def _since(self, instants: Mapping[int, float]) -> list[float]:
        """In ms. A job may start before its caller gets to know that it is on disk."""
        return [max(0.0, self.started[number] - at) * 1000 for number, at in instants.items()]


def latency(count: int, way: Way, *, per_second: float | None, path: Path | None = None) -> Sample:
    """From `enqueue` to the start of the handler, in one loop.

    With the runner idle each time, or with so many jobs a second offered, whether or not it
    keeps up (each in a task of its own, which Trio's timer wakes to the millisecond).
    """
    latencies = Latencies()

    async def offer(jobs: Jobs) -> None:
        async with trio.open_nursery() as nursery:
            begin = trio.current_time()
            for number in range(count):
                if per_second is None:
                    await trio.sleep(PAUSE)
                    await latencies.enqueue(jobs, number)
                else:
                    await trio.sleep_until(begin + number / per_second)
                    latencies.called[number] = time.monotonic()
                    nursery.start_soon(latencies.enqueue, jobs, number)

    async def main() -> None:
        async with opened(way, path) as jobs, trio.open_nursery() as nursery:
            handlers = [noop.handled_by(latencies.handle)]
            runner = await nursery.start(trio_jobs.serve, jobs, handlers)
            await offer(jobs)
            while len(latencies.started) < count:  # noqa: ASYNC110 - an event would cost time
                await trio.sleep(PAUSE)
            runner.drain()

    trio.run(main)
    return latencies.sample()


# In a table with many other jobs.


def make_table(path: Path, driver: Driver, count: int, *, is_finished: bool, delay: float) -> None:
    """A file with so many jobs in it, all finished or none."""

    async def handle(attempt: Attempt[Note, None]) -> None:
        pass

    async def main() -> None:
        async with opened(Way(driver, "normal"), path) as jobs:
            await jobs.enqueue(noop, Note(0), delay=delay)
            if is_finished:
                await trio_jobs.run_once(jobs, [noop.handled_by(handle)])

    trio.run(main)
    if delay:
        multiply(path, driver, count, run_at="run_at + n")
    else:
        multiply(path, driver, count)


def life_cycle(count: int, way: Way, path: Path | None) -> Sample:
    """Jobs from being enqueued, 1,000 at a time, until the last end is written."""

    async def main() -> Sample:
        async with opened(way, path) as jobs:
            watch = Watch()
            await fill(jobs, count)
            await _drain(jobs, count)
            return watch.sample(count)

    return trio.run(main)
