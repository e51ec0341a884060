"""One real process on one real file: handlers, a client, ways to stop, and what it tells of itself.

It is forked by `processes` and may be killed at any instant, so whatever it does is told twice
where that matters: the intention before, the outcome after. It draws all that it does from the
seed, and judges nothing.
"""

from __future__ import annotations

import faulthandler
import logging
import random
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, Literal, TypeAlias

import trio

import trio_jobs
from trio_jobs import (
    Handler,
    Jobs,
    Runner,
    SqliteStore,
    StoreBusy,
    open_jobs,
)
from trio_jobs.__main__ import main as command

from .child_client import Client, own_connection
from .child_handlers import KINDS, Handlers, Task, steps
from .diary import Diary

Driver: TypeAlias = Literal["sqlite3", "apsw"]

Mode: TypeAlias = Literal["scope", "drain", "command", "bare"]
"""How it stops. A signal cancels the scope around `serve`, or drains; it is the command
`trio-jobs work`; or nothing is arranged, and Ctrl-C raises KeyboardInterrupt wherever it falls."""

INTERRUPTED: Final = 130
"""The exit code of a process that ended by KeyboardInterrupt, as a shell has it."""

TELL_WHERE: Final = signal.SIGUSR1
"""The signal that makes it log where all its threads are."""

LONGEST_LIFE: Final = 60
"""Seconds: also if nobody is left to end it."""


@dataclass(frozen=True)
class Settings:
    """What one process is to be."""

    name: str
    database: Path
    evidence: Path
    seed: str
    mode: Mode = "scope"
    driver: Driver = "sqlite3"
    synchronous: Literal["full", "normal"] = "full"
    lease: float = 1.0
    poll: float = 0.2
    grace: float = 0.2
    workers: int = 6
    ballast: int = 0
    """At most so many bytes go into a table of the application with some transactions."""
    enqueues: bool = True
    is_deadly: bool = True
    """Handlers may kill their process."""
    until_idle: bool = False
    """Enqueue nothing, and end when every job has ended."""


_of_the_command: list[Handler] = []


def handlers_of_the_command() -> list[Handler]:
    """What `trio-jobs work` is told to find them by."""
    return _of_the_command


def main(settings: Settings) -> int:
    """Be that process; returns its exit code."""
    signal.alarm(LONGEST_LIFE)
    faulthandler.register(TELL_WHERE)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s", force=True)
    diary = Diary(settings.evidence, settings.name)
    diary.say_started()
    child = Child(settings, diary)
    code = child.be_the_command() if settings.mode == "command" else child.run()
    diary.say("ended", code=code)
    return code


class Child:
    """What `main` needs of it."""

    def __init__(self, settings: Settings, diary: Diary) -> None:
        self._settings = settings
        self._diary = diary
        self._handlers = Handlers(
            settings.seed, diary, lease=settings.lease, is_deadly=settings.is_deadly
        ).all

    def be_the_command(self) -> int:
        """`trio-jobs work`, with nobody who enqueues but handlers."""
        settings = self._settings
        _of_the_command[:] = self._handlers
        arguments = [
            *("work", f"{__name__}:{handlers_of_the_command.__name__}"),
            *("--db", str(settings.database), "--workers", str(settings.workers)),
            *("--lease", str(settings.lease), "--grace", str(settings.grace)),
        ]
        try:
            command(arguments, prog_name="trio-jobs")
        except SystemExit as exit:
            return exit.code if isinstance(exit.code, int) else int(exit.code is not None)
        return 0

    def run(self) -> int:
        """A runner and a client of this file's own."""
        try:
            trio.run(self._serve)
        except KeyboardInterrupt:
            return INTERRUPTED
        except BaseExceptionGroup as group:
            if group.split(KeyboardInterrupt)[1] is None:
                return INTERRUPTED
            raise
        return 0

    async def _serve(self) -> None:
        if self._settings.mode == "bare" or self._settings.until_idle:
            await self._work(None)
            return
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            self._diary.say("obeys")
            await self._work(signals)

    async def _work(self, signals: AsyncIterator[int] | None) -> None:
        settings = self._settings
        store = SqliteStore(
            settings.database,
            driver=settings.driver,
            synchronous=settings.synchronous,
            # Shorter than most stops and full disks last, so that callers hear of them.
            busy_timeout=1.0,
        )
        serve = partial(
            trio_jobs.serve,
            workers=settings.workers,
            poll=settings.poll,
            lease=settings.lease,
            grace=settings.grace,
        )
        async with open_jobs(store) as jobs, trio.open_nursery() as around:
            async with trio.open_nursery() as serving:
                runner = await serving.start(serve, jobs, self._handlers)
                if settings.until_idle:
                    around.start_soon(_drain_when_idle, jobs, runner)
                if signals is not None:
                    around.start_soon(self._obey, signals, runner, serving.cancel_scope)
                if settings.enqueues:
                    around.start_soon(self._enqueue_and_so_on, jobs)
            around.cancel_scope.cancel()

    async def _obey(
        self, signals: AsyncIterator[int], runner: Runner, serving: trio.CancelScope
    ) -> None:
        async for number in signals:
            self._diary.say("stopping", signal=number)
            if self._settings.mode == "drain":
                runner.drain()
            else:
                serving.cancel()

    async def _enqueue_and_so_on(self, jobs: Jobs) -> None:
        """What clients do, by dice, with short pauses."""
        settings = self._settings
        dice = random.Random(f"{settings.seed}/{settings.name}")
        client = Client(jobs, self._diary.say, settings.name)

        def task() -> Task:
            naps = tuple(dice.choice([0, 0.01, 0.05, 0.2]) for _ in range(dice.randrange(4)))
            is_long = dice.random() < 0.05
            long = (dice.uniform(0.2, 1.5 * settings.lease),) if is_long else ()
            return Task(client.new_tag(), naps + long)

        # So that there is something in hand from the beginning.
        await client.enqueue_many(steps, [task() for _ in range(dice.randrange(10))])
        for _ in range(100):
            kind = dice.choices(KINDS, [8, 6, 3, 3, 1])[0]
            verb = dice.random()
            if verb < 0.45:
                await client.enqueue(
                    kind,
                    task(),
                    delay=dice.choice([None, None, 0.0, 0.2]),
                    deadline=dice.choice([None] * 9 + [0.3]),
                    priority=dice.choice([None, 5]),
                )
            elif verb < 0.55:
                await client.enqueue(kind, task(), key=f"key {dice.randrange(4)}")
            elif verb < 0.65:
                await client.enqueue_many(kind, [task() for _ in range(dice.randrange(1, 6))])
            elif verb < 0.75:
                client.enqueue_on(
                    own_connection(settings.database, settings.driver),
                    kind,
                    task(),
                    commit=dice.random() < 0.7,
                    ballast=dice.randrange(settings.ballast + 1),
                )
            elif verb < 0.87:
                await client.cancel(dice)
            elif verb < 0.95:
                await client.retry(dice)
            else:
                await client.get(dice)
            await trio.sleep(dice.uniform(0, 0.05))


async def _drain_when_idle(jobs: Jobs, runner: Runner) -> None:
    while True:
        try:
            counts = await jobs.counts()
        except StoreBusy:
            pass
        else:
            if not any(count for state, count in counts.items() if not state.is_final):
                runner.drain()
                return
        await trio.sleep(0.05)
