"""Which cases belong to which name on the command line, and how long they may take."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from . import bare, floor, names, ours, processes
from .files import Driver, fresh_file
from .names import FLOOR, FULL, HUEY, NORMAL, OURS
from .ours import Way
from .peers import Peer
from .rounds import Case, Sample


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    rounds: int
    seconds: float
    """Of one measurement of a rate."""
    latencies: int
    offered: int
    wake_ups: int
    idle: int
    """Seconds."""
    window: int
    """Milliseconds that processes drain together."""
    shared: int
    """Jobs in the file they share: they must not run out."""
    table: int
    """Other jobs in a full table."""
    memory: int
    """Jobs one runner does."""


QUICK: Final = Size(
    rounds=3,
    seconds=0.12,
    latencies=60,
    offered=400,
    wake_ups=60,
    idle=2,
    window=500,
    shared=200_000,
    table=100_000,
    memory=100_000,
)
FULL_SIZE: Final = Size(
    rounds=7,
    seconds=0.4,
    latencies=300,
    offered=2000,
    wake_ups=200,
    idle=20,
    window=1500,
    shared=500_000,
    table=1_000_000,
    memory=1_000_000,
)


@dataclass(frozen=True)
class Setting:
    size: Size
    driver: Driver
    peers: Sequence[Peer]
    stack: ExitStack
    """What is only made once, and goes at the end."""

    @property
    def full(self) -> Way:
        return Way(self.driver, FULL)

    @property
    def normal(self) -> Way:
        return Way(self.driver, NORMAL)

    def rate(self, name: str, measure: Callable[[int], Sample], first: int) -> Case:
        return Case(name, measure, first, self.size.seconds)

    def peer(self, peer: Peer, name: str, measure: Callable[[int], Sample]) -> Case:
        # A figure is computed of SqliteHuey.
        return Case(name, measure, 100, self.size.seconds, once_if_slow=peer.name != HUEY)

    def file(self) -> Path:
        return self.stack.enter_context(fresh_file())


@dataclass(frozen=True)
class Group:
    """Cases that are measured in the same rounds."""

    title: str
    cases: Callable[[Setting], Iterator[Case]]
    reference: str | None = None
    """The case whose rate the others are compared with."""
    rounds: Callable[[int], int] = lambda rounds: rounds


def half(rounds: int) -> int:
    """To start processes takes longer than to measure them."""
    return (rounds + 1) // 2


def once(rounds: int) -> int:
    return 1


def _drain(setting: Setting) -> Iterator[Case]:
    # What is compared is measured side by side.
    for count, first in ((1, 100), (10, 500), (100, 2000)):
        if count > 1:
            yield setting.rate(names.bare(count), partial(bare.tasks, at_a_time=count), 2000)
        for way in (setting.normal, setting.full):
            name = names.drain(OURS, count, way.durability)
            yield setting.rate(name, partial(ours.drain, workers=count, way=way), first)
            if count == 10:
                raw = partial(bare.life_cycles, driver=way.driver, durability=way.durability)
                yield setting.rate(names.raw(way.durability), raw, 1000)
        if count > 1:
            for peer in setting.peers:
                name = names.drain(peer.name, count, FULL)
                yield setting.peer(peer, name, partial(peer.drain, count))
    with_checkpoint = partial(ours.drain, workers=100, way=setting.normal, with_checkpoint=True)
    yield setting.rate(names.WITH_CHECKPOINT, with_checkpoint, 2000)


def _enqueue(setting: Setting) -> Iterator[Case]:
    # The disk's speed changes by the minute: those that wait for it one after the other.
    yield setting.rate(names.SYNC, bare.synchronizations, 30)
    inserts = partial(bare.inserts, driver="sqlite3", durability=FULL)
    yield setting.rate(names.INSERTS, inserts, 50)
    for count in (1, 100):
        name = names.enqueue(FLOOR, count, FULL)
        yield setting.rate(name, partial(floor.inserts, tasks=count), 50 + 2 * count)
    for way in (setting.full, setting.normal):
        for count in (1, 10, 100):
            name = names.enqueue(OURS, count, way.durability)
            yield setting.rate(name, partial(ours.enqueue, tasks=count, way=way), 50 + 2 * count)
    for peer in setting.peers:
        for count in (1, 100):
            name = names.enqueue(peer.name, count, FULL)
            yield setting.peer(peer, name, partial(peer.enqueue, count))


def _latency(setting: Setting) -> Iterator[Case]:
    size = setting.size
    yield Case(names.ONE_INSERT, bare.insert_latency, size.latencies)
    loads = ((names.WHILE_IDLE, None, size.latencies), (names.AT_1000, 1000, size.offered))
    for load, per_second, count in loads:
        bare_thread = partial(floor.latency, per_second=per_second)
        yield Case(names.floor_latency(load), bare_thread, count)
    for way in (setting.full, setting.normal):
        for load, per_second, count in loads:
            measure = partial(ours.latency, way=way, per_second=per_second)
            yield Case(names.latency(load, way.durability), measure, count)


def _wake(setting: Setting) -> Iterator[Case]:
    for way in (setting.full, setting.normal):
        measure = partial(processes.wake_up, way=way)
        yield Case(names.wake(way.durability), measure, setting.size.wake_ups)


def _idle(setting: Setting) -> Iterator[Case]:
    yield Case(names.IDLE, partial(processes.idle, way=setting.full), setting.size.idle)


def _growth(setting: Setting) -> Iterator[Case]:
    size, way = setting.size, setting.normal
    finished, later = setting.file(), setting.file()
    ours.make_table(finished, way.driver, size.table, is_finished=True, delay=0)
    ours.make_table(later, way.driver, size.table, is_finished=False, delay=1e7)
    for name, path in ((names.NONE, None), (names.FINISHED, finished), (names.LATER, later)):
        measure = partial(ours.life_cycle, way=way, path=path)
        yield setting.rate(names.life_cycle(name), measure, 1000)
    for name, path in ((names.NONE, None), (names.LATER, later)):
        claim = partial(ours.latency, way=way, per_second=None, path=path)
        yield Case(names.claim(name), claim, size.latencies)


def _processes(setting: Setting) -> Iterator[Case]:
    path = setting.file()
    ours.make_table(path, setting.driver, setting.size.shared, is_finished=False, delay=0)
    for count in (1, 2, 4):
        measure = partial(processes.together, number=count, way=setting.full, full=path)
        yield Case(names.processes(count), measure, setting.size.window)


def _lateness(setting: Setting) -> Iterator[Case]:
    count = 100
    beside = partial(bare.ticker_beside_tasks, at_a_time=count)
    yield setting.rate(names.BARE_LATENESS, beside, 2000)
    drain = partial(ours.ticker_beside_drain, workers=count, way=setting.full)
    yield setting.rate(names.LATENESS, drain, 1000)


def _memory(setting: Setting) -> Iterator[Case]:
    measure = partial(processes.memory, way=setting.normal)
    yield Case(names.MEMORY, measure, setting.size.memory)


GROUPS: Final = {
    "drain": Group("Drain of no-op jobs", _drain, names.bare(100)),
    "enqueue": Group("Enqueue, one job a call", _enqueue, names.INSERTS),
    "latency": Group("From enqueue to start, in one process", _latency),
    "wake": Group("From enqueue to start, in another process", _wake, rounds=half),
    "idle": Group("A runner process with nothing to do", _idle, rounds=once),
    "growth": Group("In a table with many other jobs", _growth, names.life_cycle(names.NONE)),
    "processes": Group("Processes on one file", _processes, names.processes(1), half),
    "lateness": Group("Loop lateness", _lateness),
    "memory": Group("Memory", _memory, rounds=once),
}
