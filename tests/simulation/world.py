"""Simulated processes on one real file, under one virtual time.

A process is a set of Trio tasks with connections, a wall clock and a fate of its own. What it can
suffer is what real ones can: when it is killed, its connections are closed without a commit,
every later statement of its tasks fails, and nothing they do is evidence any more; while it is
frozen none of its tasks runs, though time goes on for the others.
"""

from __future__ import annotations

import contextlib
import contextvars
import math
import os
import random
from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

import apsw
import outcome
import trio
import trio._core._run as trio_run
from trio.testing import MockClock

from trio_jobs import Jobs, Runner, _hub
from trio_jobs._drivers import ApswConnection, Connection, Record, Values
from trio_jobs._identity import Process as Identity
from trio_jobs.testing import EPOCH

from . import faults
from .evidence import Fault, History, Life
from .plan import Plan, ProcessPlan, StatementFault
from .work import Work

if TYPE_CHECKING:
    from .store import SimulatedStore

_EPOCH: Final = EPOCH.timestamp()
_LONG: Final = 0.3
"""Seconds: less than a sixth of the shortest lease."""
_OTHERS: Final = {-1: "healer", -2: "visitor", -3: "victim"}
here: contextvars.ContextVar[Process] = contextvars.ContextVar("simulated process")
"""Whose task that is; not set for the world's own."""

_SAME_INSTANT: Final = 1_000
"""Nanoseconds: a fault hits what begins in the instant of its end, too, and each event of an
instant is one later."""


class World:
    """What all processes share: the file, time, and who is alive."""

    def __init__(self, plan: Plan, path: str, clock: MockClock) -> None:
        self.plan = plan
        self.path = path
        self.clock = clock
        self.history = History()
        self.coverage: Counter[str] = Counter()
        self.statements: deque[tuple[str, str, Values]] = deque(maxlen=60)
        self.note_statement: Callable[[str, str, Values], None] = lambda *what: None
        self.processes: list[Process] = []
        self.full_until = -math.inf
        self.is_healed = False
        self.work = Work(self.break_off)
        self.broken: list[str] = []
        """What should not happen to a process: tracebacks."""
        self.starts_of: Counter[str] = Counter()
        """By payload."""
        self.jobs: dict[int, None] = {}
        """Those that somebody was told of."""
        self.steps_taken: set[int] = set()
        self._sleep_began = self._slept_until = -1.0
        self._sleep: Fault | None = None
        self._tick = 0
        self._locks: list[tuple[float, apsw.Connection]] = []
        self._statements_of = [0] * len(plan.processes)
        self._faults_of = [
            deque(fault for fault in plan.faults if fault.process == index)
            for index in range(len(plan.processes))
        ]

    # Time.

    def now(self) -> float:
        return self.clock.current_time()

    def tick(self) -> int:
        """A moment that no other is equal to: nanoseconds."""
        self._tick = max(self._tick + 1, round(self.now() * 1e9))
        return self._tick

    def sleep(self, seconds: float) -> None:
        """Time passes, and nobody can do anything meanwhile."""
        if self.now() != self._slept_until:
            self._sleep_began, self._sleep = self.now(), None
        self.clock.jump(seconds)
        self._slept_until = self.now()
        if self._sleep is not None:
            self._sleep.until = round(self._slept_until * 1e9)
        elif self._slept_until - self._sleep_began >= _LONG:
            self._sleep = self.note_fault("wait for a lock", None)
            self._sleep.at = round(self._sleep_began * 1e9)
        self.release_locks()

    # The file.

    def connect(self, who: Process | None = None) -> apsw.Connection:
        native = apsw.Connection(self.path)
        native.set_busy_timeout(0)
        native.execute("PRAGMA wal_autocheckpoint = 0")
        name = None if who is None else who.name

        def at(*_: object) -> int:
            return self.tick()

        def whose(*_: object) -> str | None:
            return name

        def wall(*_: object) -> int | None:
            return None if who is None else who.instant()

        native.create_scalar_function("sim_at", at, 0)
        native.create_scalar_function("sim_who", whose, 0)
        native.create_scalar_function("sim_wall", wall, 0)
        return native

    def hold_lock(self, seconds: float) -> None:
        """Somebody else writes for so long."""
        native = self.connect()
        try:
            native.execute("BEGIN IMMEDIATE")
        except apsw.BusyError:
            native.close()
            return
        self.note_fault("outside lock", None, seconds)
        self._locks.append((self.now() + seconds, native))

    def read_long(self, seconds: float) -> None:
        """Somebody reads for so long, and needs the log as it is."""
        self.note_fault("long reader", None, seconds)
        native = self.connect()
        native.execute("BEGIN")
        native.execute("SELECT count(*) FROM trio_jobs_job").fetchall()
        self._locks.append((self.now() + seconds, native))

    def write_as_neighbour(self) -> None:
        """The application writes to a table of its own, if the lock is free."""
        with contextlib.closing(self.connect()) as native:
            try:
                native.execute("UPDATE neighbour SET number = number + 1")
                self.coverage["neighbour wrote"] += 1
            except apsw.BusyError:
                self.coverage["neighbour did not get the lock"] += 1

    def commit_as_other(self) -> None:
        """Some process that uses the library makes its next commit."""
        with contextlib.closing(self.connect()) as native:
            native.execute("UPDATE trio_jobs_meta SET writer = 'other', batch = batch + 1")

    def release_locks(self, *, all: bool = False) -> None:
        now = self.now()
        for until, native in self._locks:
            if all or until <= now:
                native.close()
        self._locks = [] if all else [one for one in self._locks if one[0] > now]

    # Faults.

    def note_fault(self, what: str, process: Process | None, seconds: float = 0.0) -> Fault:
        at = self.tick()
        until = at + round(min(seconds, 1e9) * 1e9) + (_SAME_INSTANT if seconds else 0)
        name = None if process is None else process.name
        fault = Fault(what, at, name, until)
        self.history.faults.append(fault)
        self.coverage[f"fault: {what}"] += 1
        return fault

    def is_over(self, fault: Fault) -> None:
        """It is now, whatever was thought of when it began."""
        fault.until = self.tick() + _SAME_INSTANT

    def next_fault(self, process: Process) -> StatementFault | None:
        """The one that is due, by the number of statements of all lives of this process."""
        index = process.index
        if index < 0 or self.is_healed:
            return None
        self._statements_of[index] += 1
        due = self._faults_of[index]
        return due[0] if due and due[0].statement <= self._statements_of[index] else None

    def struck(self, process: Process) -> None:
        self._faults_of[process.index].popleft()

    def heal(self) -> None:
        """Nothing goes wrong any more, and all clocks are right."""
        self.is_healed = True
        now = self.tick()
        for fault in self.history.faults:
            if fault.until is not None and fault.until > now + _SAME_INSTANT:
                self.is_over(fault)
        self.full_until = -math.inf
        self.release_locks(all=True)
        for process in self.processes:
            if process.offset and process.is_alive:
                self.note_fault("clock step", process)
            process.offset = 0.0
            process.broken_until = -math.inf
            process.thaw()

    def break_off(self) -> None:
        """The run has no end: nothing that anybody does from here on is evidence."""
        for process in self.processes:
            process.vanish()

    def is_dead(self, process: Identity, here: Identity) -> bool:
        """What the operating system knows: only of its own machine."""
        if process.place != here.place:
            return False
        identity = (process.place, process.pid, process.started)
        return not any(
            one.identity == identity and one.is_alive for one in reversed(self.processes)
        )


class Process:
    """One life of a process. `index` is its place in the plan, below 0 for those of no plan."""

    def __init__(self, world: World, index: int, settings: ProcessPlan) -> None:
        number = sum(one.index == index for one in world.processes) + 1
        self.world = world
        self.index: int = index
        self.settings = settings
        self.name = f"{_OTHERS.get(index, index)}#{number}"
        self.random = random.Random(f"{world.plan.seed}/{self.name}")
        self.identity = (
            None if settings.place is None else (settings.place, 100 + index, world.tick())
        )
        self.offset = settings.clock
        self.broken_until = -math.inf
        self.is_alive = True
        self.scope = trio.CancelScope()
        self.over = trio.Event()
        """It is dead, or has ended."""
        self.runners: list[Runner] = []
        self.jobs: Jobs
        self.store: SimulatedStore
        self.natives: list[apsw.Connection] = []
        self.shields: dict[trio.CancelScope, None] = {}
        self._freezes: list[Fault] = []
        """Those that are not over: it runs when none is left."""
        self._stashed: deque[Any] = deque()
        self._backlog: list[Callable[[], object]] = []
        world.processes.append(self)
        if self.offset:
            world.note_fault("skewed clock", self, math.inf)
        if settings.answers:
            world.note_fault("slow answers", self)
        self.life: Life = world.history.life(self.name, world.tick(), self.identity)
        self.life.runners = settings.runners
        self.life.news_takes = round((settings.latency + settings.answers) * 1e9)

    # What it sees of the world.

    def wall(self) -> float:
        return _EPOCH + self.world.now() + self.offset

    def instant(self) -> int:
        return round(self.wall() * 1_000_000)

    def os_identity(self) -> Identity | None:
        return None if self.identity is None else Identity(*self.identity)

    def connect(self, path: str) -> Connection:
        return SimulatedConnection(self, ApswConnection(self.open_native()))

    def open_native(self) -> apsw.Connection:
        """A connection of the application."""
        if not self.is_alive:
            raise faults.ProcessIsDead
        native = self.world.connect(self)
        self.natives.append(native)
        return native

    # Its fate.

    def kill(self) -> None:
        """As kill -9 leaves it."""
        if self.is_alive:
            self.vanish()
            self.over.set()
            self.thaw()
            self.scope.cancel()
            for shield in self.shields:
                shield.cancel()

    def vanish(self) -> None:
        """Killed, and nobody hears of it."""
        if self.is_alive:
            self.life.killed_at = self.world.tick()
            self._end()

    def ended(self) -> None:
        """It came to its end by itself."""
        if self.is_alive:
            self.life.ended_at = self.world.tick()
            self._end()
            self.over.set()

    def _end(self) -> None:
        self.is_alive = False
        for native in self.natives:
            native.close(True)

    def forget(self) -> None:
        """What the library keeps of it, if it could not close in order."""
        _hub._hubs.pop(self.name, None)
        if hasattr(self, "store"):
            self.store._connections.close(lambda: None)

    @contextlib.contextmanager
    def shield(self) -> Iterator[None]:
        """What only the death of the process ends."""
        with trio.CancelScope(shield=True) as scope:
            self.shields[scope] = None
            try:
                yield
            finally:
                del self.shields[scope]

    def unplug(self, seconds: float) -> None:
        """The file cannot be reached for so long."""
        self.world.note_fault("I/O errors", self, seconds)
        self.broken_until = max(self.broken_until, self.world.now() + seconds)

    @property
    def is_frozen(self) -> bool:
        return bool(self._freezes)

    def freeze(self, what: str, seconds: float) -> Fault:
        """Somebody has to `thaw` it after so long."""
        fault = self.world.note_fault(what, self, seconds)
        if self.is_alive:
            self._freezes.append(fault)
        return fault

    def thaw(self, *faults: Fault) -> None:
        """These are over; if none are given, all of them."""
        over = [one for one in self._freezes if not faults or one in faults]
        for one in over:
            self._freezes.remove(one)
            self.world.is_over(one)
        if over and not self._freezes:
            runq = trio_run.GLOBAL_RUN_CONTEXT.runner.runq
            runq.extend(self._stashed)
            self._stashed.clear()
            backlog, self._backlog = self._backlog, []
            for call in backlog:
                call()

    def stash(self, task: trio.lowlevel.Task) -> None:
        self._stashed.append(task)

    async def block(self, seconds: float) -> None:
        """Keep the event loop of this process from running."""
        fault = self.freeze("blocked loop", seconds)
        trio.lowlevel.spawn_system_task(
            self._thaw_after, seconds, fault, context=contextvars.Context()
        )
        await trio.lowlevel.cancel_shielded_checkpoint()

    async def _thaw_after(self, seconds: float, fault: Fault) -> None:
        await trio.sleep(seconds)
        self.thaw(fault)

    def run(self, call: Callable[..., object], *args: object) -> None:
        """Call it in the name of the process, when that runs."""
        if self.is_frozen:
            self._backlog.append(lambda: self.run(call, *args))
        else:
            context = contextvars.copy_context()
            context.run(here.set, self)
            context.run(call, *args)

    def enter(self) -> None:
        """The current task, and all it starts, are of this process from here on."""
        here.set(self)


def process_of(task: trio.lowlevel.Task) -> Process | None:
    return task.context.get(here)


class SimulatedConnection:
    """Where statements of a process meet their fate."""

    def __init__(self, process: Process, inner: ApswConnection) -> None:
        self._process = process
        self._inner = inner
        self.version = inner.version

    @property
    def in_transaction(self) -> bool:
        return self._process.is_alive and self._inner.in_transaction

    @property
    def total_changes(self) -> int:
        return self._inner.total_changes if self._process.is_alive else 0

    def execute(self, sql: str, values: Values = ()) -> list[Record]:
        process = self._process
        world = process.world
        world.work.add(process.name, sql)
        if not process.is_alive:
            raise faults.ProcessIsDead
        world.note_statement(process.name, sql, values)
        world.statements.append((process.name, sql, values))
        now = world.now()
        if now < process.broken_until:
            faults.fail(self._inner)
            raise faults.io_error()
        if now < world.full_until and self._inner.in_transaction and faults.is_write(sql):
            faults.fail(self._inner)
            raise faults.disk_full()
        fault = world.next_fault(process)
        if fault is not None and faults.fits(fault, sql, self._inner.in_transaction):
            world.struck(process)
            return faults.strike(fault, process, self._inner, sql, values)
        return self._inner.execute(sql, values)

    def interrupt(self) -> None:
        self._inner.interrupt()

    def close(self) -> None:
        if self._process.is_alive:
            self._inner.close()


@contextlib.contextmanager
def frozen_tasks_do_not_run() -> Iterator[None]:
    """Tasks of frozen processes are scheduled when these thaw. (And what all do is counted.)"""
    original = trio_run.Runner.reschedule

    def reschedule(
        runner: trio_run.Runner,
        task: trio.lowlevel.Task,
        next_send: outcome.Outcome[object] = trio_run._NO_SEND,
    ) -> None:
        original(runner, task, next_send)
        process = process_of(task)
        if process is None:
            return
        if process.is_frozen:
            assert runner.runq[-1] is task
            runner.runq.pop()
            process.stash(task)
        process.world.work.add(process.name, task.name)

    trio_run.Runner.reschedule = reschedule  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        trio_run.Runner.reschedule = original  # type: ignore[method-assign]


def folder() -> str | None:
    """Where files are fastest; None for where temporary files are."""
    return "/dev/shm" if os.path.isdir("/dev/shm") else None
