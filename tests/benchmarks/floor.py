"""What nobody can beat who writes to SQLite from Trio tasks in a thread: tasks, one thread, the
statements, and nothing else. Where a figure is missed, this tells the library from the machine.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import trio

from .bare import CLAIM, INSERT, LEASE, PAUSE, instant, make_tables, payload
from .files import connection, fresh_file, rows
from .names import P50, P99
from .rounds import Sample, Watch, percentile


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


def latency(count: int) -> Sample:
    """A row is inserted and claimed in one transaction, now and then, and its task is woken."""
    took: list[float] = []
    with fresh_file() as path, connection(path, "sqlite3", "full") as opened:
        make_tables(opened)

        def write(numbers: Sequence[int]) -> None:
            at = instant()
            rows(opened, "BEGIN IMMEDIATE")
            for number in numbers:
                rows(opened, INSERT, (at, at, payload(number)))
            rows(opened, CLAIM, (at + LEASE, at, at))
            rows(opened, "COMMIT")

        async def main() -> None:
            thread = Thread(write)
            with thread.running():
                for number in range(count):
                    await trio.sleep(PAUSE)
                    start = time.monotonic()
                    await thread.give(number)
                    took.append((time.monotonic() - start) * 1000)

        trio.run(main)
    return {P50: percentile(took, 50), P99: percentile(took, 99)}
