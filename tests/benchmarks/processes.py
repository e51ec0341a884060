"""What is measured with runners in processes of their own.

A child is this module, told its role in JSON. It says "ready", waits for a line that says go,
and at its end says in JSON what it found. Instants are of the monotonic clock, which on Linux
all processes share.
"""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any, Final, TypeAlias

import trio

import trio_jobs
from trio_jobs import Attempt, Runner

from .files import fresh_file
from .names import GROWTH, IDLE_CPU, SLOWEST
from .ours import Latencies, Note, Way, fill, make_table, noop, opened
from .rounds import RATE, Sample, Unavailable, Watch

SETTLE: Final = 0.4
"""Seconds until children that were told to go all run at their pace."""

Role: TypeAlias = Callable[..., Any]


# The parent's side.


class Child:
    def __init__(self, process: subprocess.Popen[str], to: IO[str], of: IO[str]) -> None:
        self._process = process
        self._to = to
        self._of = of

    def tell(self, **values: float) -> None:
        self._to.write(json.dumps(values) + "\n")
        self._to.flush()

    def hear(self) -> Any:
        line = self._of.readline()
        if not line:
            raise Unavailable(f"its process ended with {self._process.wait()}")
        return json.loads(line)


@contextmanager
def child(role: Role, path: Path, way: Way, **values: float) -> Iterator[Child]:
    """A process that has opened the file and waits to be told to go."""
    settings = {"path": str(path), "driver": way.driver, "durability": way.durability}
    command = [sys.executable, "-m", f"{__package__}.processes", role.__name__]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [*command, json.dumps(settings | values)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            one = Child(process, process.stdin, process.stdout)
            assert one.hear() == "ready"
            yield one
        finally:
            process.stdin.close()  # a child that hears the end of its input ends
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()


def wake_up(count: int, way: Way) -> Sample:
    """From `enqueue` here to the start of the handler in another process, which is idle."""
    latencies = Latencies()
    chance = random.Random(count)

    async def offer(path: Path) -> None:
        async with opened(way, path) as jobs:
            for number in range(count):
                await trio.sleep(chance.uniform(0.004, 0.008))
                await latencies.enqueue(jobs, number)

    with fresh_file() as path, child(serve_some, path, way, count=count) as runner:
        runner.tell()
        assert runner.hear() == "serving"
        trio.run(offer, path)
        latencies.started = {int(number): at for number, at in runner.hear().items()}
    return latencies.sample()


def idle(count: int, way: Way) -> Sample:
    """What part of a core a runner takes that has nothing to do for so many seconds."""
    with fresh_file() as path, child(serve_nothing, path, way, seconds=count) as runner:
        runner.tell()
        return {IDLE_CPU: runner.hear() * 100}


def together(count: int, number: int, way: Way, full: Path) -> Sample:
    """So many processes drain a copy of a file together, for so many milliseconds."""
    with fresh_file() as path, ExitStack() as stack:
        shutil.copyfile(full, path)
        children = [stack.enter_context(child(serve_for, path, way)) for _ in range(number)]
        begin = time.monotonic() + SETTLE
        for one in children:
            one.tell(begin=begin, end=begin + count / 1000)
        counts = [one.hear() for one in children]
    if None in counts:
        raise Unavailable("the jobs ran out before the time was over")
    return {
        RATE: sum(counts) / (count / 1000),
        SLOWEST: min(counts) / statistics.mean(counts),
    }


def memory(count: int, way: Way) -> Sample:
    """How much a runner grows while it does so many jobs, after the first tenth of them."""
    with fresh_file() as path:
        make_table(path, way.driver, count, is_finished=False, delay=0)
        with child(serve_and_weigh, path, way, count=count) as runner:
            runner.tell()
            found: Sample = runner.hear()
            return found


# The child's side. Each role gets a `Way`, a path and its own settings.


async def serve_some(way: Way, path: Path, count: int) -> object:
    latencies = Latencies()
    async with opened(way, path) as jobs, trio.open_nursery() as nursery:
        await _go()
        runner = await nursery.start(trio_jobs.serve, jobs, [noop.handled_by(latencies.handle)])
        _say("serving")
        while len(latencies.started) < count:  # noqa: ASYNC110 - an event would cost time
            await trio.sleep(0.1)
        runner.drain()
    return latencies.started


async def serve_nothing(way: Way, path: Path, seconds: float) -> object:
    async def handle(attempt: Attempt[Note, None]) -> None:
        pass

    async with opened(way, path) as jobs, trio.open_nursery() as nursery:
        await _go()
        runner = await nursery.start(trio_jobs.serve, jobs, [noop.handled_by(handle)])
        await fill(jobs, 10)
        await trio.sleep(SETTLE)
        start, cpu = time.monotonic(), time.process_time()
        await trio.sleep(seconds)
        used = (time.process_time() - cpu) / (time.monotonic() - start)
        runner.drain()
    return used


async def serve_for(way: Way, path: Path) -> object:
    begin = end = 0.0
    count = 0
    is_full = True

    async def handle(attempt: Attempt[Note, None]) -> None:
        nonlocal count
        if begin <= time.monotonic() < end:
            count += 1

    async with opened(way, path) as jobs, trio.open_nursery() as nursery:
        told = await _go()
        begin, end = told["begin"], told["end"]
        runner = await nursery.start(
            partial(trio_jobs.serve, jobs, [noop.handled_by(handle)], workers=100)
        )
        await trio.sleep(end - time.monotonic())
        runner.drain()
        is_full = bool(await jobs.find(state=trio_jobs.State.QUEUED, limit=1))
    return count if is_full else None


async def serve_and_weigh(way: Way, path: Path, count: int) -> object:
    started = 0
    weights: list[float] = []
    runner: Runner | None = None
    watch = Watch()

    async def handle(attempt: Attempt[Note, None]) -> None:
        nonlocal started
        started += 1
        if started % (count // 10) == 0:
            weights.append(_megabytes())
        if started == count:
            assert runner is not None
            runner.drain()

    async with opened(way, path) as jobs, trio.open_nursery() as nursery:
        await _go()
        watch = Watch()
        runner = await nursery.start(
            partial(trio_jobs.serve, jobs, [noop.handled_by(handle)], workers=100)
        )
    return {**watch.sample(count), GROWTH: max(weights[1:]) - weights[0], "MB": max(weights)}


def _megabytes() -> float:
    """Of this process in memory; where there is no /proc, the most there ever were."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize() / 1e6
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


async def _go() -> Any:
    """Say that all is ready, and wait for what to do."""
    _say("ready")
    line = await trio.to_thread.run_sync(sys.stdin.readline)
    return json.loads(line)


def _say(value: object) -> None:
    print(json.dumps(value), flush=True)


ROLES: Final[Sequence[Role]] = [serve_some, serve_nothing, serve_for, serve_and_weigh]


def main(role: str, settings: str) -> None:
    values = json.loads(settings)
    way = Way(values.pop("driver"), values.pop("durability"))
    path = Path(values.pop("path"))
    [serve] = [one for one in ROLES if one.__name__ == role]
    _say(trio.run(partial(serve, way, path, **values)))


if __name__ == "__main__":
    main(*sys.argv[1:])
