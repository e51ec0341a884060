"""What handlers do at each of their starts, and what they see of it."""

from __future__ import annotations

import contextvars
import json
from collections.abc import Sequence
from typing import Any

import trio

from trio_jobs import (
    Attempt,
    Fail,
    Handler,
    Kind,
    LeaseLost,
    Retry,
    RetryLater,
    StoreError,
    constant,
)

from .clients import recorded
from .evidence import Publication, Start
from .plan import CANARY, RAISED, Act, KindPlan
from .world import Process


class Exotic(BaseException):
    """No Exception, and nobody's to catch."""


def kind_of(plan: KindPlan) -> Kind[str, str]:
    return Kind(
        plan.name,
        str,
        str,
        retry=Retry(attempts=plan.attempts, backoff=constant(plan.backoff)),
        timeout=plan.timeout,
        on_interrupt=plan.on_interrupt,
        queue=plan.queue,
        priority=plan.priority,
    )


def handlers_of(
    process: Process, kinds: Sequence[Kind[str, str]], *, own_time: bool = True
) -> list[Handler]:
    """`own_time`: the clock of the process decides about deadlines."""

    async def handle(attempt: Attempt[str, str]) -> str:
        return await _witnessed(process, kinds, attempt, own_time)

    return [kind.handled_by(handle) for kind in kinds]


async def _witnessed(
    process: Process, kinds: Sequence[Kind[str, str]], attempt: Attempt[str, str], own_time: bool
) -> str:
    world = process.world
    if not process.is_alive:
        await trio.sleep_forever()  # nothing it does is evidence any more
    start = world.history.start(
        process.name,
        attempt.job_id,
        attempt.token,
        attempt.number,
        world.tick(),
        process.instant() if own_time else None,
    )
    script = world.plan.script(attempt.payload)
    act = script[min(world.starts_of[attempt.payload], len(script) - 1)]
    start.is_stubborn = act.name in ("swallow", "shield")
    start.is_refusal = act.name in ("refuse", "misfit")
    world.starts_of[attempt.payload] += 1
    world.coverage[f"handler: {act.name}"] += 1
    try:
        value = await _Acting(process, kinds, attempt, start).act(act)
    except BaseException as error:
        _ended(process, start, type(error).__name__)
        raise
    _ended(process, start, "returned", json.dumps(value))
    return value


def _ended(process: Process, start: Start, ending: str, returned: str | None = None) -> None:
    if process.is_alive:
        start.ended_at = process.world.tick()
        start.ending = ending
        start.returned = returned


class _Acting:
    """One start of one handler."""

    def __init__(
        self,
        process: Process,
        kinds: Sequence[Kind[str, str]],
        attempt: Attempt[str, str],
        start: Start,
    ) -> None:
        self.process = process
        self.kinds = kinds
        self.attempt = attempt
        self.start = start

    def value(self, what: object) -> str:
        """A result that no other start can have."""
        return f"{self.attempt.job_id} {self.attempt.token} {what}"

    async def act(self, act: Act) -> str:
        match act.name:
            case "fail":
                raise Fail("not today")
            case "refuse":
                raise Fail("never", retry=False)
            case "retry later":
                raise RetryLater(act.seconds)
            case "error":
                raise ValueError(f"wrong {RAISED}")
            case "group of errors":
                raise ExceptionGroup("two", [Fail("one"), ValueError(RAISED)])
            case "group of fails":
                raise ExceptionGroup(RAISED, [Fail("one"), Fail("two")])
            case "base exception":
                raise Exotic(RAISED)
            case "keyboard interrupt":
                raise KeyboardInterrupt
            case "child error":
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(trio.sleep_forever)
                    nursery.start_soon(self.raise_soon)
            case "misfit":
                return {CANARY: self.attempt.payload}  # type: ignore[return-value]
            case "sleep" | "wait":
                await trio.sleep(act.seconds)
            case "block":
                await self.process.block(act.seconds)
            case "swallow":
                try:
                    await trio.sleep(act.seconds)
                except trio.Cancelled:
                    pass  # noqa: ASYNC103 - what is tested
            case "shield":
                with self.process.shield():
                    await trio.sleep(act.seconds)
            case "publish":
                for number in range(3):
                    await self.publish(number)
                    await trio.sleep(act.seconds)
            case "publish after the end":
                trio.lowlevel.spawn_system_task(
                    self.publish_late, act.seconds, context=contextvars.copy_context()
                )
            case "enqueue":
                await self.enqueue()
            case "kill":
                await trio.lowlevel.checkpoint()
                self.process.kill()
                await trio.lowlevel.checkpoint()
            case "return":
                pass
        return self.value("returned")

    async def raise_soon(self) -> None:
        await trio.lowlevel.checkpoint()
        raise ValueError(f"in a child {RAISED}")

    async def publish(self, what: object) -> None:
        world = self.process.world
        value = self.value(what)
        publication = Publication(json.dumps(value), world.tick())
        self.start.published.append(publication)
        try:
            await self.attempt.publish(value)
        except (LeaseLost, trio.ClosedResourceError):
            self._answered(publication, "fail")
            raise
        except StoreError as error:
            self._answered(publication, "unknown" if error.is_outcome_unknown else "fail")
            raise
        self._answered(publication, "ok")

    def _answered(self, publication: Publication, outcome: Any) -> None:
        if self.process.is_alive:
            publication.outcome = outcome
            publication.answered_at = self.process.world.tick()

    async def publish_late(self, seconds: float) -> None:
        """The handler has ended then; if only just, its end is not written yet."""
        if seconds:
            await trio.sleep(seconds)
        try:
            await self.publish("late")
        except (LeaseLost, StoreError, trio.ClosedResourceError):
            self.process.world.coverage["publication after the end refused"] += 1

    async def enqueue(self) -> None:
        """A job that is the same whichever attempt asks for it."""
        payload = f"{self.attempt.payload}+{self.attempt.token}"
        await recorded(
            self.process,
            "enqueue",
            lambda: self.attempt.jobs.enqueue(self.kinds[0], payload, key=self.attempt.payload),
            kind=self.kinds[0].name,
            payloads=(json.dumps(payload),),
            keys=(self.attempt.payload,),
        )
