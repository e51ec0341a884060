"""The jobs of a real process: their kinds, and handlers that tell what they do.

What a handler does is a function of the seed, the job and the claim.
"""

from __future__ import annotations

import os
import random
import signal
import time
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

import trio

from trio_jobs import (
    Attempt,
    Fail,
    Handler,
    Kind,
    Retry,
    RetryLater,
    StoreError,
    constant,
)

from .child_client import Client, encoded
from .diary import Diary

R = TypeVar("R")


@dataclass(frozen=True)
class Task:
    """What a handler does, and by what the job is known to whoever enqueued it."""

    tag: str
    naps: tuple[float, ...] = ()


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


class Handlers:
    """Those of one process, which tell its diary."""

    def __init__(self, seed: str, diary: Diary, *, lease: float, is_deadly: bool) -> None:
        self._seed = seed
        self._diary = diary
        self._lease = lease
        self._is_deadly = is_deadly
        """They may kill their process."""

    @property
    def all(self) -> list[Handler]:
        return [
            steps.handled_by(self._do_steps),
            moody.handled_by(self._do_moody),
            careful.handled_by(self._do_careful),
            parent.handled_by(self._do_parent),
            rude.handled_by(self._do_rude),
        ]

    async def _do_steps(self, attempt: Attempt[Task, list[str]]) -> list[str]:
        with self._told(attempt) as told:
            done: list[str] = []
            for number, nap in enumerate(attempt.payload.naps):
                await trio.sleep(nap)
                done = [*done, f"{_signature(attempt)}/{number}"]
                await told.publish(done)
            return told.returns(done)

    async def _do_moody(self, attempt: Attempt[Task, str]) -> str:
        with self._told(attempt) as told:
            await _nap(attempt)
            mood = self._dice(attempt).random()
            if mood < 0.2:
                raise Fail("no luck")
            if mood < 0.35:
                raise RetryLater(0.05)
            if mood < 0.42:
                raise Fail("for good", retry=False)
            return told.returns(_signature(attempt))

    async def _do_careful(self, attempt: Attempt[Task, str]) -> str:
        with self._told(attempt) as told:
            await _nap(attempt)
            return told.returns(_signature(attempt))

    async def _do_parent(self, attempt: Attempt[Task, int]) -> int:
        with self._told(attempt) as told:
            await _nap(attempt)
            client = Client(attempt.jobs, self._diary.say, f"handler {_signature(attempt)}")
            task = Task(client.new_tag(), (0.01,))
            child = await client.enqueue(steps, task, key=f"child of {attempt.job_id}")
            return told.returns(0 if child is None else child)

    async def _do_rude(self, attempt: Attempt[Task, str]) -> str:
        with self._told(attempt) as told:
            how = self._dice(attempt).choice(["block", "thread", "swallow", "kill"])
            # Not again and again: the others here suffer with it.
            if how == "block" and attempt.token == 1:
                time.sleep(1.3 * self._lease)  # noqa: ASYNC251 - that is the point
            elif how == "thread":
                await trio.to_thread.run_sync(time.sleep, 0.2)
            elif how == "swallow":
                with trio.CancelScope(shield=True):
                    await trio.sleep(0.2)
            elif how == "kill" and attempt.token <= 2 and self._is_deadly:
                self._diary.say("kills itself")
                os.kill(os.getpid(), signal.SIGKILL)
            await _nap(attempt)
            return told.returns(_signature(attempt))

    def _told(self, attempt: Attempt[Task, R]) -> _Told[R]:
        return _Told(attempt, self._diary)

    def _dice(self, attempt: Attempt[Task, Any]) -> random.Random:
        return random.Random(f"{self._seed}/{attempt.job_id}/{attempt.token}")


class _Told(Generic[R]):
    """Around a handler's body: tells that it starts, what it publishes, and how it ends."""

    def __init__(self, attempt: Attempt[Task, R], diary: Diary) -> None:
        self._attempt = attempt
        self._diary = diary
        [self._codec] = [kind.result_codec for kind in KINDS if kind.name == attempt.kind]
        self._returned: str | None = None

    def __enter__(self) -> _Told[R]:
        self._say("start", attempt=self._attempt.number)
        return self

    async def publish(self, value: R) -> None:
        """Lives with a store that refuses."""
        self._say("publish", value=encoded(self._codec, value))
        try:
            await self._attempt.publish(value)
        except StoreError:
            self._say("publish refused")
        else:
            self._say("published")

    def returns(self, value: R) -> R:
        self._returned = encoded(self._codec, value)
        return value

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        ending = "returned" if error is None else type(error).__name__
        self._say("end", ending=ending, value=self._returned)

    def _say(self, event: str, **fields: object) -> None:
        self._diary.say(event, job=self._attempt.job_id, token=self._attempt.token, **fields)


async def _nap(attempt: Attempt[Task, Any]) -> None:
    await trio.sleep(sum(attempt.payload.naps))


def _signature(attempt: Attempt[Task, Any]) -> str:
    """Tells which attempt a result is of."""
    return f"{attempt.job_id}/{attempt.token}"
