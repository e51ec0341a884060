"""One run: chaos by a plan, then everything is healed, and what is left is judged."""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import os
import shutil
import tempfile
import traceback
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import apsw
import trio
from trio.testing import MockClock

import trio_jobs
from trio_jobs import Handler, SqliteStore, StoreError
from trio_jobs._drivers import Values

from .chance import scheduling
from .clients import Client
from .coverage import ways_of
from .evidence import (
    AUDIT_QUERIES,
    Audit,
    Evidence,
    History,
    Rest,
    Rules,
    Stop,
    audit_of,
    audit_schema,
    name_of,
)
from .handlers import handlers_of, kind_of
from .invariants import Violation, check_all
from .latency import let_writing_take_time
from .plan import CANARY, DURATIONS, RAISED, Event, Plan, ProcessPlan
from .store import SimulatedStore
from .visits import Visits, is_any_left
from .witness import witnessed
from .world import Process, World, folder, frozen_tasks_do_not_run, process_of

WAITS_FOR: Final = 1500.0
"""Seconds until no more ends are waited for: longer than `time_to_settle`, so that it is known
whether what is late gets there."""
LOOKS_EVERY: Final = 10.0
HEALER: Final = -1
PROMPT: Final = 11.0
"""Seconds: the healer's poll, and one more. It renews its leases less often than that."""
HEALTHY: Final = ProcessPlan(
    place="here",
    clock=0.0,
    runners=1,
    workers=4,
    queues=None,
    poll=10.0,
    lease=60.0,
    grace=5.0,
    busy_timeout=5.0,
    tidies=False,
    latency=0.0,
)


@dataclass
class Result:
    plan: Plan
    violations: list[Violation]
    evidence: Evidence
    coverage: Counter[str]
    statements: list[tuple[str, str, Values]]
    """The last ones."""
    digest: str = ""
    """Of all statements of all processes, if it was asked for."""


class Steps(trio.abc.Instrument):
    """Counts the steps that tasks of the first process take; before the one with the number
    `stop_at` it is told to stop."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.taken = 0
        self._stop_at = stop_at
        self._stop: Callable[[Process], None] = lambda process: None

    def call(self, stop: Callable[[Process], None]) -> None:
        self._stop = stop

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        process = process_of(task)
        if process is not None and process.index == 0 and process.is_alive:
            self.taken += 1
            if self.taken == self._stop_at:
                self._stop(process)


def run(
    plan: Plan,
    *,
    digests: bool = False,
    note_statement: Callable[[str, str, Values], None] | None = None,
    steps: Steps | None = None,
) -> Result:
    """Live through a plan. The same plan gives the same result, on every machine."""
    with tempfile.TemporaryDirectory(dir=folder(), prefix="simulation") as place:
        path = os.path.join(place, "jobs.db")
        shutil.copyfile(_template(), path)
        clock = MockClock(autojump_threshold=0)
        world = World(plan, path, clock)
        digest = hashlib.blake2b(digest_size=16)
        if digests:
            world.note_statement = lambda *what: digest.update(repr(what).encode())
        if note_statement is not None:
            world.note_statement = note_statement
        life = _Run(world)
        instruments = []
        if steps is not None:
            steps.call(partial(life.end, by_stop=True))
            instruments.append(steps)
        with scheduling(plan.seed), witnessed(world.history), frozen_tasks_do_not_run():
            rest = life.lived(instruments)
        with contextlib.closing(apsw.Connection(path)) as connection:
            audit = audit_of(*(connection.execute(query).fetchall() for query in AUDIT_QUERIES))
    evidence = Evidence(
        history=world.history,
        audit=audit,
        rules={
            kind.name: Rules(kind.attempts, kind.on_interrupt, kind.timeout, kind.backoff)
            for kind in plan.kinds
        },
        canary=CANARY,
        raised=RAISED,
        rest=rest,
        settle_by=None if rest is None else life.settle_by(audit),
        calm_since=None if rest is None else life.calm_since,
        prompt=round(PROMPT * 1e9),
        endless=world.work.endless,
    )
    violations = [Violation("crash", None, text) for text in world.broken]
    violations += check_all(evidence)
    world.coverage += ways_of(evidence)
    return Result(
        plan, violations, evidence, world.coverage, list(world.statements), digest.hexdigest()
    )


def time_to_settle(plan: Plan, history: History, audit: Audit, healed_at: int) -> float:
    """Seconds from the healing on in which everything ends, if no runner is late.

    It is the plan that decides them, and how often it made handlers start, fail and die."""
    starts = [start for start in history.starts if start.at > healed_at]
    acts = plan.acts or DURATIONS  # a script may do anything
    longest = max(seconds for act in acts for seconds in DURATIONS.get(act, (0.0,)))
    # What waits for an instant when all is healed: of claims whose holder may live, of delays,
    # of an attempt that has failed, each by a clock that may have been ahead.
    pause = max(*(kind.backoff for kind in plan.kinds), *DURATIONS["retry later"])
    leases = (process.lease for process in plan.processes)
    delays = (step.delay or 0.0 for step in plan.steps)
    waits = _ahead(plan) + max(pause, *leases, *delays)
    # Handlers share the workers, unless they block them all, or die, and nobody knows when.
    took = sum(longest if one.ended_at is None else (one.ended_at - one.at) / 1e9 for one in starts)
    works = took / (1 if "block" in plan.acts else HEALTHY.workers) + longest
    # The job that starts most often waits before each of its starts.
    often = max(Counter(start.job for start in starts).values(), default=0)
    # Lost rows are proven one after the other, a second each.
    lost = sum(step.outcome == "lost" and step.at > healed_at for step in audit.steps)
    # A handler may end the process, kindly or not: then that stops, and is started again.
    lives = sum(life.started_at > healed_at for life in history.lives)
    restarts = lives * (HEALTHY.grace + 4.0 + longest + max(plan.restart_after))
    return waits + works + often * pause + lost + restarts + PROMPT


def _ahead(plan: Plan) -> float:
    """Seconds that a clock may have been: what it has put off has to be waited for."""
    steps = sum(max(0.0, event.seconds) for event in plan.events if event.name == "clock")
    return steps + max(0.0, *(process.clock for process in plan.processes))


class _Run:
    def __init__(self, world: World) -> None:
        self.world = world
        self.plan = world.plan
        self.kinds = [kind_of(kind) for kind in self.plan.kinds]
        self.current: dict[int, Process] = {}
        self.healed_at = 0
        self.calm_since: int | None = None
        self.visits = Visits(world, self.kinds, HEALTHY, self.launch, prompt=PROMPT)

    def lived(self, instruments: Sequence[trio.abc.Instrument]) -> Rest | None:
        """None if that had no end."""
        try:
            return trio.run(self.live, clock=self.world.clock, instruments=instruments)
        except BaseException:  # Trio takes it for a fault of its own
            if not self.world.work.endless:
                raise
            self.world.work.close()
            for process in self.world.processes:
                process.forget()
            return None

    def settle_by(self, audit: Audit) -> int:
        seconds = time_to_settle(self.plan, self.world.history, audit, self.healed_at)
        return self.healed_at + round(seconds * 1e9)

    async def live(self) -> Rest:
        async with trio.open_nursery() as self.nursery:
            async with trio.open_nursery() as chaos:
                for index, settings in enumerate(self.plan.processes):
                    chaos.start_soon(self.keep_alive, index, settings)
                chaos.start_soon(self.cause_events)
                await trio.sleep_until(self.plan.chaos)
                chaos.cancel_scope.cancel()
            self.world.heal()
            for process in self.world.processes:
                if process.is_alive:
                    self.end(process, by_stop=self.plan.heals_by_stop)
                    await process.over.wait()
        return await self.settle()

    # Chaos.

    async def keep_alive(self, index: int, settings: ProcessPlan) -> None:
        """Start the process again whenever it has ended."""
        delays = self.plan.restart_after
        while True:
            process = Process(self.world, index, settings)
            self.current[index] = process
            self.launch(process)
            await process.over.wait()
            await trio.sleep(delays[len(self.world.processes) % len(delays)])

    async def cause_events(self) -> None:
        for event in self.plan.events:
            await trio.sleep_until(event.at)
            self.nursery.start_soon(self.cause, event)
        await trio.sleep_forever()

    async def cause(self, event: Event) -> None:
        world, process = self.world, self.current.get(event.process)
        if process is None or not process.is_alive:
            return
        world.coverage[f"event: {event.name}"] += 1
        match event.name:
            case "kill":
                process.kill()
            case "freeze":
                fault = process.freeze("freeze", event.seconds)
                await trio.sleep(event.seconds)
                process.thaw(fault)
            case "stop":
                self.end(process, by_stop=True)
            case "drain":
                self.drain(process)
            case "clock":
                world.note_fault("clock step", process)
                process.offset += event.seconds
            case "suspend":
                world.note_fault("suspended machine", None, event.seconds)
                world.sleep(event.seconds)
            case "lock":
                world.hold_lock(event.seconds)
                await trio.sleep(event.seconds)
                world.release_locks()
            case "unplug":
                process.unplug(event.seconds)
            case "busy reader":
                world.read_long(event.seconds)
                await trio.sleep(event.seconds)
                world.release_locks()

    def end(self, process: Process, *, by_stop: bool) -> None:
        if by_stop:
            self.stop_begins(process, is_hurried=True)
            process.scope.cancel()
        else:
            process.kill()

    def drain(self, process: Process) -> None:
        self.stop_begins(process, is_hurried=False)
        for runner in process.runners:
            runner.drain()

    def stop_begins(self, process: Process, *, is_hurried: bool) -> None:
        history = self.world.history
        if not any(stop.process == process.name for stop in history.stops):
            at = self.world.tick()
            history.stops.append(Stop(process.name, at, is_hurried=is_hurried))

    # A process.

    def launch(self, process: Process) -> None:
        self.nursery.start_soon(self.process_lives, process)

    async def process_lives(self, process: Process) -> None:
        process.enter()
        try:
            with process.scope:
                await self.main(process)
        except BaseException as error:
            if _is_own_fault(error):
                process.kill()  # the application is not ready for that
            elif process.is_alive:
                self.world.broken.append("".join(traceback.format_exception(error)))
                process.kill()
        self.stop_ended(process)  # here, because a hurried one cancels all that is above
        process.ended()

    async def main(self, process: Process) -> None:
        """As an application is written: open, serve, and ask for work."""
        process.store = SimulatedStore(process)
        handlers = handlers_of(process, self.kinds)
        timeless = handlers_of(process, self.kinds, own_time=False)
        async with trio_jobs.open_jobs(process.store, clock=process.wall) as jobs:
            process.jobs = jobs
            let_writing_take_time(process, jobs)
            async with trio.open_nursery() as clients, _lingering(process):
                async with trio.open_nursery() as nursery:
                    for _ in range(process.settings.runners):
                        process.runners.append(
                            await nursery.start(partial(self.serve, process, handlers))
                        )
                    client = Client(process, self.kinds, lambda own: handlers if own else timeless)
                    clients.start_soon(client.live)
                    if not process.runners:
                        await trio.sleep_forever()
                clients.cancel_scope.cancel()

    async def serve(self, process: Process, handlers: Sequence[Handler], task_status: Any) -> None:
        settings = process.settings
        await trio_jobs.serve(
            process.jobs,
            handlers,
            workers=settings.workers,
            queues=settings.queues,
            poll=settings.poll,
            lease=settings.lease,
            grace=settings.grace,
            task_status=task_status,
        )

    def stop_ended(self, process: Process) -> None:
        if process.is_alive:
            for stop in self.world.history.stops:
                if stop.process == process.name:
                    stop.ended_at = self.world.tick()

    # Healing.

    def is_healed(self) -> bool:
        """The last poison job may just have taken the healer with it."""
        healer = self.current.get(HEALER)
        return healer is not None and healer.is_alive and bool(healer.runners)

    async def settle(self) -> Rest:
        world = self.world
        self.healed_at = world.tick()
        until = world.now() + WAITS_FOR + _ahead(self.plan)
        native = world.connect()
        try:
            async with trio.open_nursery() as self.nursery:
                async with trio.open_nursery() as healing:
                    # Again and again, because a poison job may take it with it.
                    healing.start_soon(self.keep_alive, HEALER, HEALTHY)
                    while world.now() < until and (  # noqa: ASYNC110 - it polls
                        is_any_left(native) or not self.is_healed()
                    ):
                        await trio.sleep(LOOKS_EVERY)
                    if self.plan.is_visited and not is_any_left(native):
                        self.calm_since = world.tick()
                        await self.visits.make(native)
                    healing.cancel_scope.cancel()
                healer = self.current[HEALER]
                running = sum(runner.statistics().running for runner in healer.runners)
                troubles = [runner.statistics().trouble for runner in healer.runners]
                at = world.tick()
                # Now: the end of the healer closes its connections, whatever they had begun.
                can_write = _can_write(native)
                self.end(healer, by_stop=True)
            return Rest(
                at=at,
                can_write=can_write,
                integrity=str(native.execute("PRAGMA integrity_check").fetchall()[0][0]),
                log_bytes=os.stat(f"{world.path}-wal").st_size,
                running=running,
                trouble=next(filter(None, troubles), None),
                states={
                    job: name_of(state)
                    for job, state in native.execute("SELECT id, state FROM trio_jobs_job")
                },
            )
        finally:
            native.close()


@contextlib.asynccontextmanager
async def _lingering(process: Process) -> AsyncIterator[None]:
    """It does something else for a while after its runners."""
    try:
        yield
    finally:
        if process.settings.lingers:
            with process.shield():
                await trio.sleep(process.settings.lingers)


def _can_write(native: apsw.Connection) -> bool:
    try:
        native.execute("BEGIN IMMEDIATE; ROLLBACK")
    except apsw.BusyError:
        return False
    return True


def _is_own_fault(error: BaseException) -> bool:
    """What an application is killed by: the store at its start, or a handler's Ctrl-C."""
    if isinstance(error, BaseExceptionGroup):
        return all(_is_own_fault(one) for one in error.exceptions)
    return isinstance(error, StoreError | KeyboardInterrupt)


_made: dict[str, str] = {}


def _template() -> str:
    """A file that has all tables already: made once a process, since it takes a third of a run."""
    if "path" not in _made:
        place = tempfile.TemporaryDirectory(dir=folder(), prefix="simulation")
        atexit.register(place.cleanup)
        path = os.path.join(place.name, "jobs.db")
        store = SqliteStore(path, driver="apsw")
        store.open()
        store.close()
        connection = apsw.Connection(path)
        for statement in audit_schema(at="sim_at()", who="sim_who()", wall="sim_wall()"):
            connection.execute(statement)
        connection.execute("CREATE TABLE neighbour (number INTEGER)")
        connection.execute("INSERT INTO neighbour VALUES (0)")
        connection.close()
        _made["path"] = path
    return _made["path"]
