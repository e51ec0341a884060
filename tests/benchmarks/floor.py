"""What nobody can beat who writes to SQLite from Trio tasks in a thread: tasks, one thread, the
statements, and nothing else. Where a figure is missed, this tells the library from the machine.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import trio

from .bare import INSERT, PAUSE, claim, finish, instant, make_tables, payload
from .files import connection, fresh_file, rows
from .names import P50, P99
from .rounds import Sample, Watch, percentile

END: Final = -1
"""Given instead of a number: one of the running rows has come to its end."""


class Thread:
    """Calls `write` with all that tasks have given since it called it before."""

    def __init__(self, write: Callable[[Sequence[int]], None]) -> None:
        self._write = write
        self._token = trio.lowlevel.current_trio_token()
        self._given: list[tuple[int, trio.lowlevel.Task]] = []
        self._is_over = False
        self._gathered = threading.Condition()
        self._thread = threading.Thread(target=self._work)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        self._thread.start()
        try:
            yield
        finally:
            with self._gathered:
                self._is_over = True
                self._gathered.notify()
            self._thread.join()

    async def give(self, number: int) -> None:
        with self._gathered:
            self._given.append((number, trio.lowlevel.current_task()))
            self._gathered.notify()

        def abort(_: Any) -> trio.lowlevel.Abort:
            return trio.lowlevel.Abort.FAILED

        await trio.lowlevel.wait_task_rescheduled(abort)

    def _work(self) -> None:
        while True:
            with self._gathered:
                while not self._given and not self._is_over:
                    self._gathered.wait()
                given, self._given = self._given, []
            if not given:
                return
            self._write([number for number, _ in given])
            self._token.run_sync_soon(_wake, [task for _, task in given])


def _wake(tasks: Sequence[trio.lowlevel.Task]) -> None:
    for task in tasks:
        trio.lowlevel.reschedule(task)


def inserts(count: int, tasks: int) -> Sample:
    """One row a call, from so many tasks; those that wait together share a transaction."""
    with fresh_file() as path, connection(path, "sqlite3", "full") as opened:
        make_tables(opened)

        def write(numbers: Sequence[int]) -> None:
            at = instant()
            rows(opened, "BEGIN IMMEDIATE")
            opened.executemany(INSERT, [(at, at, payload(number)) for number in numbers])
            rows(opened, "COMMIT")

        async def main() -> Sample:
            thread = Thread(write)

            async def task(some: int) -> None:
                for number in range(some):
                    await thread.give(number)

            watch = Watch()
            with thread.running():
                async with trio.open_nursery() as nursery:
                    for number in range(tasks):
                        nursery.start_soon(task, (count + number) // tasks)
                return watch.sample(count)

        return trio.run(main)


def latency(count: int, *, per_second: float | None) -> Sample:
    """A row is inserted and claimed in one transaction, its task is woken, and its end written.

    Now and then, or so many a second, as `ours.latency` does it.
    """
    took: list[float] = []
    running: list[tuple[int, int]] = []
    with fresh_file() as path, connection(path, "sqlite3", "full") as opened:
        make_tables(opened)

        def write(numbers: Sequence[int]) -> None:
            at = instant()
            new = [number for number in numbers if number != END]
            ended = len(numbers) - len(new)
            rows(opened, "BEGIN IMMEDIATE")
            if ended:
                finish(opened, at, running[:ended])
                del running[:ended]
            if new:
                opened.executemany(INSERT, [(at, at, payload(number)) for number in new])
                running.extend(claim(opened, at))
            rows(opened, "COMMIT")

        async def job(thread: Thread, number: int, start: float) -> None:
            await thread.give(number)
            took.append((time.monotonic() - start) * 1000)
            await thread.give(END)

        async def main() -> None:
            thread = Thread(write)
            with thread.running():
                async with trio.open_nursery() as nursery:
                    begin = trio.current_time()
                    for number in range(count):
                        if per_second is None:
                            await trio.sleep(PAUSE)
                            await job(thread, number, time.monotonic())
                        else:
                            await trio.sleep_until(begin + number / per_second)
                            nursery.start_soon(job, thread, number, time.monotonic())

        trio.run(main)
        [(left,)] = rows(opened, "SELECT count(*) FROM job WHERE state <> 3")
    assert left == 0
    return {P50: percentile(took, 50), P99: percentile(took, 99)}
