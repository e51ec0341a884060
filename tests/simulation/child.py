"""One real process on one real file: handlers, a client, ways to stop, and what it tells of itself.

It is forked by `processes` and may be killed at any instant, so whatever it does is told twice
where that matters: the intention before, the outcome after. Each is one line of JSON, written
whole and appended to a file of this process alone; what is missing at its end did not happen,
or nobody knows. It draws all that it does from the seed, and judges nothing.
"""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import trio

import trio_jobs
from trio_jobs import (
    Attempt,
    Fail,
    Handler,
    Jobs,
    Kind,
    Retry,
    RetryLater,
    Runner,
    SqliteStore,
    StoreBusy,
    StoreError,
    constant,
    open_jobs,
)
from trio_jobs.__main__ import main as command
from trio_jobs._identity import this_process

from .child_client import Client, own_connection

Driver: TypeAlias = Literal["sqlite3", "apsw"]

Mode: TypeAlias = Literal["scope", "drain", "command", "bare"]
"""How it stops. A signal cancels the scope around `serve`, or drains; it is the command
`trio-jobs work`; or nothing is arranged, and Ctrl-C raises KeyboardInterrupt wherever it falls."""

INTERRUPTED: Final = 130
"""The exit code of a process that ended by KeyboardInterrupt, as a shell has it."""

MAX_BYTES: Final = 1_000_000

LONGEST_LIFE: Final = 60
"""Seconds: also if nobody is left to end it."""


@dataclass(frozen=True)
class Task:
    """What a handler does, and by what the job is known to whoever enqueued it."""

    tag: str
    naps: tuple[float, ...] = ()


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


class Diary:
    """What this process tells of itself."""

    def __init__(self, path: Path, name: str) -> None:
        # Not buffered: what was said is in the kernel's hands when the process is killed.
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC)
        self._name = name

    def say(self, event: str, **fields: object) -> None:
        line = {"at": time.time_ns(), "process": self._name, "event": event, **fields}
        data = json.dumps(line).encode() + b"\n"
        if os.write(self._file, data) != len(data):
            os.abort()  # its evidence is incomplete from here on, so it must not go on

    def say_started(self) -> None:
        here = this_process()
        identity = None if here is None else (here.place, here.pid, here.started)
        self.say("started", identity=identity)

    def close(self) -> None:
        os.close(self._file)


class _Here:
    """What handlers cannot be given by their runner: which process they are in."""

    settings: Settings
    diary: Diary


# What it serves. What a handler does is a function of the seed, the job and the claim.

steps = Kind("steps", Task, list[str], retry=Retry(attempts=5, backoff=constant(0.05)))
"""Publishes after each nap."""

moody = Kind("moody", Task, str, retry=Retry(attempts=3, backoff=constant(0.05)), timeout=2.0)
"""Fails, or fails for good, or wants to be started later."""

careful = Kind("careful", Task, str, on_interrupt="fail")
"""Must not be repeated."""

parent = Kind("parent", Task, int, retry=Retry(attempts=4, backoff=constant(0.05)))
"""Enqueues another job, with a key."""

rude = Kind("rude", Task, str, retry=Retry(attempts=3, backoff=constant(0.0)))
"""Blocks the event loop for longer than the lease, runs in a thread, swallows its cancellation,
or kills the process."""

KINDS: Final = (steps, moody, careful, parent, rude)


async def do_steps(attempt: Attempt[Task, list[str]]) -> list[str]:
    done: list[str] = []
    with _told(attempt) as told:
        for number, nap in enumerate(attempt.payload.naps):
            await trio.sleep(nap)
            done = [*done, f"{attempt.job_id}/{attempt.token}/{number}"]
            told("publish", value=told.stored(done))
            try:
                await attempt.publish(done)
            except StoreError:
                told("publish refused")
            else:
                told("published")
        told.returns(done)
    return done


async def do_moody(attempt: Attempt[Task, str]) -> str:
    dice = _dice(attempt)
    with _told(attempt) as told:
        await _nap(attempt)
        mood = dice.random()
        if mood < 0.2:
            raise Fail("no luck")
        if mood < 0.35:
            raise RetryLater(0.05)
        if mood < 0.42:
            raise Fail("for good", retry=False)
        value = _signature(attempt)
        told.returns(value)
    return value


async def do_careful(attempt: Attempt[Task, str]) -> str:
    with _told(attempt) as told:
        await _nap(attempt)
        value = _signature(attempt)
        told.returns(value)
    return value


async def do_parent(attempt: Attempt[Task, int]) -> int:
    with _told(attempt) as told:
        await _nap(attempt)
        client = Client(attempt.jobs, _Here.diary.say, f"handler {_signature(attempt)}")
        child = await client.enqueue(
            steps, Task(client.new_tag(), (0.01,)), key=f"child of {attempt.job_id}"
        )
        value = 0 if child is None else child
        told.returns(value)
    return value


async def do_rude(attempt: Attempt[Task, str]) -> str:
    with _told(attempt) as told:
        how = _dice(attempt).choice(["block", "thread", "swallow", "kill"])
        # Once only: the others here suffer with it.
        if attempt.token == 1 and how == "block":
            time.sleep(1.3 * _Here.settings.lease)  # noqa: ASYNC251 - that is the point
        elif how == "thread":
            await trio.to_thread.run_sync(time.sleep, 0.2)
        elif how == "swallow":
            with trio.CancelScope(shield=True):
                await trio.sleep(0.2)
        elif how == "kill" and _Here.settings.is_deadly and attempt.token <= 2:
            _Here.diary.say("kills itself")
            os.kill(os.getpid(), signal.SIGKILL)
        await _nap(attempt)
        value = _signature(attempt)
        told.returns(value)
    return value


HANDLERS: Final[tuple[Handler, ...]] = (
    steps.handled_by(do_steps),
    moody.handled_by(do_moody),
    careful.handled_by(do_careful),
    parent.handled_by(do_parent),
    rude.handled_by(do_rude),
)


class _told:
    """Around a handler's body: tells its start, and how it ended if not by a value."""

    def __init__(self, attempt: Attempt[Any, Any]) -> None:
        self._about = {"job": attempt.job_id, "token": attempt.token, "attempt": attempt.number}
        self._kind = attempt.kind
        self._returned: str | None = None

    def __enter__(self) -> _told:
        self("start")
        return self

    def __call__(self, event: str, **fields: object) -> None:
        _Here.diary.say(event, **self._about, **fields)

    def stored(self, value: object) -> str:
        """As the library stores it."""
        [codec] = [kind.result_codec for kind in KINDS if kind.name == self._kind]
        return codec.encode(value, MAX_BYTES).decode()

    def returns(self, value: object) -> None:
        self._returned = self.stored(value)

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is None:
            self("end", ending="returned", value=self._returned)
        else:
            self("end", ending=type(error).__name__)


async def _nap(attempt: Attempt[Task, Any]) -> None:
    await trio.sleep(sum(attempt.payload.naps))


def _dice(attempt: Attempt[Task, Any]) -> random.Random:
    return random.Random(f"{_Here.settings.seed}/{attempt.job_id}/{attempt.token}")


def _signature(attempt: Attempt[Task, Any]) -> str:
    """Tells which attempt a result is of."""
    return f"{attempt.job_id}/{attempt.token}"


# What it is.


def main(settings: Settings) -> int:
    """Be that process; returns its exit code."""
    signal.alarm(LONGEST_LIFE)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s", force=True)
    _Here.settings = settings
    _Here.diary = Diary(settings.evidence, settings.name)
    _Here.diary.say_started()
    code = _be_the_command(settings) if settings.mode == "command" else _run(settings)
    _Here.diary.say("ended", code=code)
    return code


def _run(settings: Settings) -> int:
    try:
        trio.run(_serve, settings)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BaseExceptionGroup as group:
        if group.split(KeyboardInterrupt)[1] is None:
            return INTERRUPTED
        raise
    return 0


def _be_the_command(settings: Settings) -> int:
    try:
        command(
            [
                *("work", f"{__name__}:HANDLERS", "--db", str(settings.database)),
                *("--workers", str(settings.workers), "--lease", str(settings.lease)),
                *("--grace", str(settings.grace)),
            ],
            prog_name="trio-jobs",
        )
    except SystemExit as exit:
        return exit.code if isinstance(exit.code, int) else int(exit.code is not None)
    return 0


async def _serve(settings: Settings) -> None:
    store = SqliteStore(
        settings.database,
        driver=settings.driver,
        synchronous=settings.synchronous,
        # Shorter than most stops and full disks last, so that callers hear of them.
        busy_timeout=1.0,
    )
    async with open_jobs(store) as jobs, trio.open_nursery() as around:
        async with trio.open_nursery() as serving:
            runner = await serving.start(
                partial(
                    trio_jobs.serve,
                    jobs,
                    HANDLERS,
                    workers=settings.workers,
                    poll=settings.poll,
                    lease=settings.lease,
                    grace=settings.grace,
                )
            )
            if settings.until_idle:
                around.start_soon(_drain_when_idle, jobs, runner)
            elif settings.mode != "bare":
                await around.start(_obey, settings.mode, runner, serving.cancel_scope)
            if settings.enqueues:
                around.start_soon(_enqueue_and_so_on, settings, jobs)
        around.cancel_scope.cancel()


async def _obey(
    mode: Mode,
    runner: Runner,
    serving: trio.CancelScope,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    signals: AsyncIterator[int]
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        _Here.diary.say("obeys")
        task_status.started()
        async for number in signals:
            _Here.diary.say("stopping", signal=number)
            if mode == "drain":
                runner.drain()
            else:
                serving.cancel()


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


async def _enqueue_and_so_on(settings: Settings, jobs: Jobs) -> None:
    """What clients do, by dice, with short pauses."""
    dice = random.Random(f"{settings.seed}/{settings.name}")
    client = Client(jobs, _Here.diary.say, settings.name)

    def task() -> Task:
        naps = tuple(dice.choice([0, 0.01, 0.05]) for _ in range(dice.randrange(4)))
        long = (dice.uniform(0.2, 1.5 * settings.lease),) if dice.random() < 0.05 else ()
        return Task(client.new_tag(), naps + long)

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
