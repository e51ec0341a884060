"""What the clients of a process ask for, and what they are answered."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import apsw
import trio

import trio_jobs
from trio_jobs import Handler, Job, JobNotFound, Kind, PastAttempt, StateError, StoreError

from .evidence import Call, Verb
from .plan import CANARY, ClientStep
from .world import Process


async def recorded(
    process: Process, verb: Verb, ask: Callable[[], Awaitable[Any]], **asked: Any
) -> Any:
    """Make the call and write into the history what became of it. None if it was refused."""
    world = process.world
    call = world.history.call(verb, process.name, world.tick(), **asked)
    try:
        answer = await ask()
    except (StoreError, StateError, JobNotFound, trio.ClosedResourceError) as error:
        if process.is_alive:
            is_unknown = isinstance(error, StoreError) and error.is_outcome_unknown
            if is_unknown:
                call.unclear(world.tick())
                world.coverage[f"{verb} unknown"] += 1
            else:
                call.failed(world.tick(), error)
        return None
    if process.is_alive:
        _answered(process, call, answer)
    return answer


def _answered(process: Process, call: Call, answer: Any) -> None:
    at = process.world.tick()
    if isinstance(answer, bool):
        call.ok(at, answer=answer)
    elif isinstance(answer, int):
        call.ok(at, ids=(answer,))
    elif isinstance(answer, Job):
        call.ok(at, ids=(answer.id,), states=(answer.state.value,))
    elif call.verb == "history":
        past: list[PastAttempt] = answer
        call.ok(at, past=tuple((one.claim, one.outcome) for one in past))
    elif call.verb == "counts":
        call.ok(at, counts={state.value: number for state, number in answer.items()})
    elif isinstance(answer, list) and all(isinstance(one, Job) for one in answer):
        call.ok(
            at,
            ids=tuple(job.id for job in answer),
            states=tuple(job.state.value for job in answer),
        )
    else:
        call.ok(at)
    process.world.jobs.update(dict.fromkeys(call.ids))


class Client:
    """Takes the steps of a plan in one process."""

    def __init__(
        self,
        process: Process,
        kinds: Sequence[Kind[str, str]],
        handlers: Callable[[bool], list[Handler]],
    ) -> None:
        self.process = process
        self.kinds = kinds
        self.handlers = handlers

    async def live(self) -> None:
        """Each step at its time, whatever has become of those before."""
        world = self.process.world
        async with trio.open_nursery() as nursery:
            for step in world.plan.steps:
                if step.process == self.process.index and step.at >= world.now():
                    await trio.sleep_until(step.at)
                    if step.number not in world.steps_taken:  # by an earlier life, just now
                        world.steps_taken.add(step.number)
                        nursery.start_soon(self.take, step)

    async def take(self, step: ClientStep) -> None:
        """One step, cancelled on its way if the plan says so."""
        self.process.world.coverage[f"call: {step.verb}"] += 1
        async with trio.open_nursery() as nursery:
            if step.cancel_after is not None:
                nursery.start_soon(_cancel_after, step.cancel_after, nursery.cancel_scope)
            await self.call(step)
            nursery.cancel_scope.cancel()

    async def call(self, step: ClientStep) -> None:
        jobs, process = self.process.jobs, self.process
        if step.verb in ("enqueue", "enqueue_many", "enqueue_on"):
            await self.enqueue(step)
        elif step.verb == "find":
            await recorded(process, "find", lambda: jobs.find(limit=1000))
        elif step.verb == "counts":
            await recorded(process, "counts", jobs.counts)
        elif step.verb == "prune":
            await recorded(process, "prune", lambda: self.prune(step.seconds))
        elif step.verb == "run_once":
            await self.run_once(step)
        elif known := list(process.world.jobs):
            await self.ask_of(step.verb, known[step.target % len(known)])

    async def ask_of(self, verb: Verb, job: int) -> Any:
        """Ask what is asked of one job."""
        ask: Callable[[int], Awaitable[Any]] = getattr(self.process.jobs, verb)
        return await recorded(self.process, verb, lambda: ask(job), job=job)

    async def enqueue(self, step: ClientStep) -> None:
        jobs = self.process.jobs
        kind: Kind[Any, str] = self.kinds[step.kind]
        payloads: list[Any] = [f"{CANARY} {step.number}.{index}" for index in range(step.count)]
        if step.is_misfit:
            kind, payloads = _other_version_of(kind), [[text] for text in payloads]
        asked: dict[str, Any] = {"delay": step.delay, "priority": step.priority}
        if step.deadline is not None:
            wall = datetime.fromtimestamp(self.process.wall(), UTC)
            asked["deadline"] = wall + timedelta(seconds=step.deadline)
        keys = None if step.key is None else [f"{step.key}{index}" for index in range(step.count)]

        def ask() -> Awaitable[Any]:
            if step.verb == "enqueue_many":
                return jobs.enqueue_many(kind, payloads, keys=keys, **asked)
            asked["key"] = None if keys is None else keys[0]
            if step.verb == "enqueue_on":
                return self.enqueue_on(step, kind, payloads[0], asked)
            return jobs.enqueue(kind, payloads[0], **asked)

        await recorded(
            self.process,
            step.verb,
            ask,
            kind=kind.name,
            payloads=tuple(map(json.dumps, payloads)),
            keys=() if keys is None else tuple(keys),
        )

    async def enqueue_on(
        self, step: ClientStep, kind: Kind[Any, str], payload: Any, asked: dict[str, Any]
    ) -> int:
        """The application's own transaction. Rolled back, it is as if it had been refused."""
        process = self.process
        native = process.open_native()
        try:
            native.execute("BEGIN")
            id = process.jobs.enqueue_on(native, kind, payload, **asked)
            process.world.note_fault("application's transaction", None, step.seconds)
            await trio.sleep(step.seconds)
            native.execute("COMMIT" if step.commits else "ROLLBACK")
        except apsw.Error as error:
            raise StoreError(str(error)) from error
        finally:
            native.close(True)
        if not step.commits:
            raise StoreError("rolled back")
        return id

    async def prune(self, age: float) -> None:
        """As README shows it."""
        await trio.lowlevel.checkpoint()
        native = self.process.open_native()
        before = self.process.instant() - round(age * 1_000_000)
        try:
            native.execute(
                "DELETE FROM trio_jobs_job WHERE id IN (SELECT id FROM trio_jobs_job"
                " WHERE state > 2 AND finished_at < ? LIMIT 1000)",
                (before,),
            )
            native.execute(
                "DELETE FROM trio_jobs_past WHERE job NOT IN (SELECT id FROM trio_jobs_job)"
            )
        except apsw.Error as error:
            raise StoreError(str(error)) from error
        finally:
            native.close(True)

    async def run_once(self, step: ClientStep) -> None:
        self.process.life.runners = None  # it is one more, for as long as it lasts
        own_time = step.commits
        wall = datetime.fromtimestamp(self.process.wall() + step.seconds, UTC)
        now = None if own_time else wall
        with contextlib.suppress(StoreError):
            await trio_jobs.run_once(self.process.jobs, self.handlers(own_time), now=now, workers=2)


def _other_version_of(kind: Kind[Any, str]) -> Kind[list[str], str]:
    """As a process has it in which the payload was another type."""
    return Kind(kind.name, list[str], str, priority=kind.priority)


async def _cancel_after(checkpoints: int, scope: trio.CancelScope) -> None:
    for _ in range(checkpoints):
        await trio.lowlevel.checkpoint()
    scope.cancel()
