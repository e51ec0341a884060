"""What is measured of trio_jobs in this process, through its public interface."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import trio

import trio_jobs
from trio_jobs import Attempt, Jobs, Kind, Runner, SqliteStore

from .files import Driver, Durability, fresh_file
from .rounds import RATE, Sample


@dataclass(frozen=True)
class Note:
    """A payload like many: small, typed, JSON in the table."""

    number: int
    text: str = "a short text"


noop: Final = Kind("noop", Note)


@dataclass(frozen=True)
class Way:
    """How the file is reached."""

    driver: Driver
    durability: Durability = "full"

    def store(self, path: Path) -> SqliteStore:
        return SqliteStore(path, synchronous=self.durability, driver=self.driver)


@asynccontextmanager
async def open_fresh(way: Way) -> AsyncIterator[Jobs]:
    with fresh_file() as path:
        async with trio_jobs.open_jobs(way.store(path)) as jobs:
            yield jobs


async def fill(jobs: Jobs, count: int) -> None:
    for first in range(0, count, 1000):
        notes = [Note(number) for number in range(first, min(first + 1000, count))]
        await jobs.enqueue_many(noop, notes)


def drain(count: int, workers: int, way: Way, *, with_checkpoint: bool = False) -> Sample:
    """Jobs that are queued already, from the first start until the last end is written."""

    async def main() -> Sample:
        async with open_fresh(way) as jobs:
            await fill(jobs, count)
            return {RATE: count / await drained(jobs, count, workers, with_checkpoint)}

    return trio.run(main)


async def drained(jobs: Jobs, count: int, workers: int, with_checkpoint: bool = False) -> float:
    """Serve so many jobs that do nothing; the seconds from the first start to the last end."""
    started = 0
    start = 0.0
    runner: Runner | None = None

    async def handle(attempt: Attempt[Note, None]) -> None:
        nonlocal started, start
        if started == 0:
            start = time.perf_counter()
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
    return time.perf_counter() - start
