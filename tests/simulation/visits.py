"""What is asked for when all is healed and nothing goes wrong any more: then nothing may be late.

Another process asks for jobs, and to have one cancelled; a process of the same machine dies with
one. A runner that served its own process well, and is deaf to others, is found by this.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Final

import apsw
import trio

from trio_jobs import Kind

from .clients import Client
from .evidence import Verb
from .plan import VISITS, VISITS_WAIT, ClientStep, ProcessPlan
from .world import Process, World

VISITOR: Final = -2
VICTIM: Final = -3
_OF_ONE: Final[Sequence[Verb]] = ("get", "wait_finished", "history", "cancel", "retry")


class Visits:
    """`live` starts a process; what is asked for has to begin within `prompt` seconds, which are
    fewer than a third of a lease of these `settings`, or a renewal might do what a look has to."""

    def __init__(
        self,
        world: World,
        kinds: Sequence[Kind[str, str]],
        settings: ProcessPlan,
        live: Callable[[Process], None],
        *,
        prompt: float,
    ) -> None:
        assert prompt < settings.lease / 3
        self._world = world
        self._kinds = kinds
        self._settings = settings
        self._live = live
        self._prompt = prompt

    async def make(self, native: apsw.Connection) -> None:
        visitor = await self._newcomer(VISITOR, runners=0)
        client = self._client(visitor)
        missing = max(self._world.jobs, default=0) + 1_000_000
        for verb in _OF_ONE:
            await client.ask_of(verb, missing)
        await client.enqueue(_step(VISITS_WAIT[0], 0))
        waits = max(self._world.jobs)
        for number, _ in enumerate(self._kinds):
            await client.enqueue(_step(VISITS + 1 + number, number))
        await self._until(lambda: self._has_started(waits))
        await client.ask_of("cancel", waits)
        await client.call(dataclasses.replace(_step(0, 0), verb="counts"))
        await self._until(lambda: not is_any_left(native))
        visitor.scope.cancel()
        await visitor.over.wait()

        victim = await self._newcomer(VICTIM, runners=1)
        await self._client(victim).enqueue(_step(VISITS_WAIT[1], 0))
        await self._until(lambda: self._has_started(max(self._world.jobs)))
        victim.kill()
        await self._until(lambda: not is_any_left(native))

    def _client(self, process: Process) -> Client:
        return Client(process, self._kinds, lambda own: [])

    async def _newcomer(self, index: int, *, runners: int) -> Process:
        process = Process(self._world, index, dataclasses.replace(self._settings, runners=runners))
        self._live(process)
        while not hasattr(process, "jobs") or len(process.runners) < runners:
            await trio.lowlevel.checkpoint()
        return process

    def _has_started(self, job: int) -> bool:
        return any(start.job == job for start in self._world.history.starts)

    async def _until(self, condition: Callable[[], bool]) -> None:
        """For longer than it may take."""
        with trio.move_on_after(3 * self._prompt):
            while not condition():  # noqa: ASYNC110 - it polls
                await trio.sleep(1.0)


def is_any_left(native: apsw.Connection) -> bool:
    """A job that has not ended."""
    return bool(native.execute("SELECT 1 FROM trio_jobs_job WHERE state < 3 LIMIT 1").fetchall())


def _step(number: int, kind: int) -> ClientStep:
    return ClientStep(number, 0.0, VISITOR, "enqueue", kind=kind)
