"""All that a seed decides before a run begins, as plain data: who is there, what is asked for, what
handlers do, and what goes wrong when.

Each run draws first which kinds of handlers, calls and faults there are at all and how often
("swarm testing"): a run with everything in it hardly ever gets far into any of it. What was
drawn can be taken out again piece by piece, which is how a failing plan is made small.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, TypeVar

from .evidence import Verb

T = TypeVar("T")

CANARY: Final = "canary"
"""In every payload, and nowhere else."""
RAISED: Final = "unspeakable"
"""In the text of every exception that no `Fail` is."""

# Handlers.

ActName: TypeAlias = Literal[
    "return", "fail", "refuse", "retry later", "error", "group of errors", "group of fails",
    "base exception", "keyboard interrupt", "child error", "misfit", "sleep", "block", "swallow",
    "shield", "publish", "publish after the end", "enqueue", "kill", "wait",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Act:
    """What a handler does at one of its starts, and for how long."""

    name: ActName
    seconds: float = 0.0


ORDINARY: Final[Sequence[ActName]] = ("return", "sleep", "fail", "error", "publish")
STRANGE: Final[Sequence[ActName]] = (
    "refuse", "retry later", "group of errors", "group of fails", "base exception",
    "keyboard interrupt", "child error", "misfit", "block", "swallow", "shield",
    "publish after the end", "enqueue", "kill",
)  # fmt: skip
DURATIONS: Final = {
    "retry later": (0.0, 1.0, 7.0),
    "sleep": (0.1, 1.0, 5.0, 40.0),
    "wait": (40.0,),
    "block": (1.0, 4.0, 20.0),
    "swallow": (1.0, 6.0),
    "shield": (1.0, 6.0, 15.0),
    "publish": (0.0, 0.5),
    "publish after the end": (0.0, 3.0),
}


@dataclass(frozen=True, slots=True)
class KindPlan:
    name: str
    queue: str
    attempts: int
    backoff: float
    timeout: float | None
    on_interrupt: Literal["retry", "fail"]
    priority: int


# Processes.


@dataclass(frozen=True, slots=True)
class ProcessPlan:
    place: str | None
    """Its machine, as far as the library can tell. Within one it is known who is dead."""
    clock: float
    """Seconds its wall clock is ahead of the right time."""
    runners: int
    workers: int
    queues: tuple[str, ...] | None
    poll: float
    lease: float
    grace: float
    busy_timeout: float
    tidies: bool
    """Its log is checkpointed at every occasion."""
    latency: float
    """Seconds that a transaction waits to begin, and its answer to be heard, at most."""
    answers: float = 0.0
    """Seconds that answers take beyond that, at most."""
    lingers: float = 0.0
    """Seconds that it lives on after its runners."""


# What clients do.


@dataclass(frozen=True, slots=True)
class ClientStep:
    number: int
    at: float
    process: int
    verb: Verb
    kind: int = 0
    count: int = 1
    delay: float | None = None
    deadline: float | None = None
    """Seconds from then."""
    priority: int | None = None
    key: str | None = None
    target: int = 0
    """Which of the jobs that are known by then, counted round."""
    seconds: float = 0.0
    """How long the application keeps its transaction open, waits, or looks ahead."""
    commits: bool = True
    cancel_after: int | None = None
    """Checkpoints until the call is cancelled."""
    is_misfit: bool = False
    """Whoever enqueues has another type for the payload than those who run it."""


# What goes wrong.

FaultName: TypeAlias = Literal[
    "crash before", "crash after", "busy", "busy snapshot", "I/O error", "I/O errors", "full",
    "commit reports an error", "commit fails", "commit unknown", "delay", "neighbour",
    "commit overtaken",
]  # fmt: skip
EventName: TypeAlias = Literal[
    "kill", "freeze", "stop", "drain", "clock", "suspend", "lock", "busy reader", "unplug"
]

FAULTS: Final[Sequence[FaultName]] = (
    "crash before", "crash after", "busy", "busy snapshot", "I/O error", "I/O errors", "full",
    "commit reports an error", "commit fails", "commit unknown", "delay",
)  # fmt: skip
EVENTS: Final[Sequence[EventName]] = (
    "kill", "freeze", "stop", "drain", "clock", "suspend", "lock", "busy reader", "unplug",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class StatementFault:
    """It strikes the first statement of the process that it fits, from that one on; statements
    are counted over all lives of the process."""

    number: int
    process: int
    statement: int
    name: FaultName
    seconds: float = 0.0
    coin: bool = False


VISITS: Final = 1_000_000
"""From this number on steps are of no plan: they come when all is healed, to see how it does."""
VISITS_WAIT: Final = (VISITS, VISITS + 100)
"""Those of them whose job does not return at its first start."""


@dataclass(frozen=True, slots=True)
class Event:
    number: int
    at: float
    process: int
    name: EventName
    seconds: float = 0.0


@dataclass(frozen=True)
class Plan:
    seed: int
    chaos: float
    """Seconds until everything is healed."""
    kinds: tuple[KindPlan, ...]
    processes: tuple[ProcessPlan, ...]
    acts: tuple[ActName, ...]
    steps: tuple[ClientStep, ...]
    faults: tuple[StatementFault, ...]
    events: tuple[Event, ...]
    restart_after: tuple[float, ...]
    heals_by_stop: bool
    scripts: tuple[int, ...] = (1, 1, 2, 3, 4)
    """How many starts of a job have something of their own to do; one of these."""
    is_visited: bool = True
    """When all is healed, `visits` are made."""

    def script(self, payload: str) -> list[Act]:
        """What the starts of that job do, one after the other; the last again and again."""
        number = payload.removeprefix(f"{CANARY} ").partition(".")[0]
        if number.isdecimal() and int(number) >= VISITS:
            return [Act("wait", 40.0)] * (int(number) in VISITS_WAIT) + [Act("return")]
        chance = random.Random(f"{self.seed}/{payload}")
        acts = []
        for _ in range(chance.choice(self.scripts)):
            name = chance.choice(self.acts)
            acts.append(Act(name, chance.choice(DURATIONS.get(name, (0.0,)))))
        acts.append(Act("return"))
        return acts

    def pieces(self) -> list[str]:
        """The names of all that can be taken out: s for steps, f for faults, e for events, and
        the visits."""
        return [
            *(f"s{step.number}" for step in self.steps),
            *(f"f{fault.number}" for fault in self.faults),
            *(f"e{event.number}" for event in self.events),
            *(["visits"] if self.is_visited else []),
        ]

    def only(self, pieces: Collection[str]) -> Plan:
        kept = frozenset(pieces)
        return dataclasses.replace(
            self,
            steps=tuple(step for step in self.steps if f"s{step.number}" in kept),
            faults=tuple(fault for fault in self.faults if f"f{fault.number}" in kept),
            events=tuple(event for event in self.events if f"e{event.number}" in kept),
            is_visited=self.is_visited and "visits" in kept,
        )


TAKEOVERS: Final = 0.25
"""Share of the plans that are about claims which outlive their lease."""


def draw_ordinary(seed: int) -> Plan:
    """What a seed says of everything; see `flavours`."""
    chance = random.Random(seed)
    plan = _draw(seed, chance)
    return _with_takeovers(plan, chance) if chance.random() < TAKEOVERS else plan


def _draw(seed: int, chance: random.Random) -> Plan:
    chaos = chance.choice([5.0, 12.0, 12.0, 30.0])
    number = chance.choice([1, 2, 2, 3, 4])
    kinds = tuple(_kind(chance, index) for index in range(chance.choice([1, 2, 3])))
    skews = chance.choice([(0.0,), (0.0,), (0.0, 0.0, -2.0, 1.5, 30.0)])
    acts = (*ORDINARY, *_some(chance, STRANGE, 3), "return", "return")
    plan = Plan(
        seed=seed,
        chaos=chaos,
        kinds=kinds,
        processes=tuple(_process(chance, kinds, skews) for _ in range(number)),
        acts=acts,
        steps=_steps(chance, chaos, number, len(kinds)),
        faults=_faults(chance, number),
        events=_events(chance, chaos, number),
        restart_after=tuple(chance.choice([0.0, 0.0, 0.5, 3.0, 15.0]) for _ in range(7)),
        heals_by_stop=chance.random() < 0.5,
    )
    return _unreachable(plan) if chance.random() < 0.15 else plan


def _unreachable(plan: Plan) -> Plan:
    """Long handlers, short leases, and now and then a process that does not reach the file: what a
    self-fence is for, which chance alone hardly ever brings about undisturbed."""
    processes = [
        dataclasses.replace(one, clock=0.0, lease=2.0, runners=1, queues=None, busy_timeout=0.0)
        for one in (*plan.processes, *plan.processes)[: max(2, len(plan.processes))]
    ]
    count = max(2, int(plan.chaos / 5))
    return dataclasses.replace(
        plan,
        processes=tuple(processes),
        acts=("sleep", "sleep", "return"),
        faults=(),
        events=tuple(
            Event(number, 1.0 + 5.0 * number, number % 2, "unplug", 4.0) for number in range(count)
        ),
        steps=tuple(step for step in plan.steps if step.verb != "enqueue_on"),
    )


def _with_takeovers(plan: Plan, chance: random.Random) -> Plan:
    """Handlers that take long in processes that freeze or lose their disk, with others who take up
    what was theirs: by chance alone, the end of the first hardly ever comes while the second is
    under way. Who has lost its disk runs, so its handlers have to be stopped before that."""
    processes = [
        dataclasses.replace(
            settings,
            clock=0.0,
            runners=1,
            queues=None,
            poll=0.5,
            lease=chance.choice([2.0, 3.0]),
        )
        for settings in (*plan.processes, plan.processes[0])
    ]
    events: list[Event] = []
    at = 0.0
    while (at := at + chance.expovariate(1 / 3.0)) < plan.chaos:
        seconds = chance.choice([1.0, 4.0, 15.0])
        process = chance.randrange(len(processes))
        name: EventName = chance.choice(["freeze", "unplug"])
        events.append(Event(len(events), round(at, 3), process, name, seconds))
    return dataclasses.replace(
        plan,
        kinds=tuple(
            dataclasses.replace(kind, attempts=5, timeout=None, on_interrupt="retry")
            for kind in plan.kinds
        ),
        processes=tuple(processes),
        acts=("sleep", "sleep", "block", "publish", "shield", "swallow", "return"),
        events=tuple(events),
    )


def _some(chance: random.Random, names: Sequence[T], about: int) -> list[T]:
    return [name for name in names if chance.random() < about / len(names)]


def _kind(chance: random.Random, index: int) -> KindPlan:
    return KindPlan(
        name=f"kind {index}",
        queue=f"queue {index % 2}",
        attempts=chance.choice([1, 2, 3, 5]),
        backoff=chance.choice([0.0, 0.5, 3.0, 10.0]),
        timeout=chance.choice([None, None, 2.0, 10.0]),
        on_interrupt=chance.choice(["retry", "retry", "fail"]),
        priority=chance.choice([0, 0, 5]),
    )


def _process(
    chance: random.Random, kinds: Sequence[KindPlan], skews: Sequence[float]
) -> ProcessPlan:
    queues = sorted({kind.queue for kind in kinds})
    return ProcessPlan(
        place=chance.choice(["here", "here", "here", "there", None]),
        clock=chance.choice(skews),
        runners=chance.choice([0, 1, 1, 1, 1, 2]),
        workers=chance.choice([1, 2, 4, 10]),
        queues=chance.choice([None, None, None, (chance.choice(queues),)]),
        poll=chance.choice([0.5, 1.0, 2.0, 3.0]),
        lease=chance.choice([2.0, 3.0, 6.0, 12.0]),
        grace=chance.choice([0.0, 1.0, 5.0]),
        busy_timeout=chance.choice([0.0, 0.2, 0.2, 0.5, 5.0]),
        tidies=chance.random() < 0.25,
        latency=chance.choice([0.0, 0.0, 0.001, 0.02, 0.3]),
    )


_VERBS: Final[Sequence[Verb]] = (
    "enqueue_many", "enqueue_on", "cancel", "retry", "get", "find", "wait_finished", "history",
    "prune", "run_once",
)  # fmt: skip


def _steps(
    chance: random.Random, chaos: float, processes: int, kinds: int
) -> tuple[ClientStep, ...]:
    verbs: list[Verb] = ["enqueue"]
    verbs = 5 * verbs + _some(chance, _VERBS, 5)
    keys = chance.choice([0.0, 0.2, 0.8])
    deadlines = chance.choice([0.0, 0.1, 0.5])
    cancels = chance.choice([0.0, 0.0, 0.3])
    steps = []
    at = 0.0
    for number in range(chance.choice([5, 15, 30, 60])):
        at += chance.choice([0.0, 0.0, 0.0, 0.05, 0.4, 2.0])
        if at > chaos:
            break
        verb = chance.choice(verbs)
        steps.append(
            ClientStep(
                number=number,
                at=at,
                process=chance.randrange(processes),
                verb=verb,
                kind=chance.randrange(kinds),
                count=chance.choice([2, 5, 20]) if verb == "enqueue_many" else 1,
                delay=chance.choice([None, None, None, 0.0, 2.0, 30.0]),
                deadline=(
                    chance.choice([-1.0, 0.0, 1.0, 5.0, 60.0])
                    if chance.random() < deadlines
                    else None
                ),
                priority=chance.choice([None, None, 1, -1]),
                key=chance.choice("abc") if chance.random() < keys else None,
                target=chance.randrange(1000),
                seconds=chance.choice([0.0, 0.0, 0.2, 3.0]),
                commits=chance.random() < 0.7,
                cancel_after=chance.randrange(4) if chance.random() < cancels else None,
            )
        )
    return tuple(steps)


def _faults(chance: random.Random, processes: int) -> tuple[StatementFault, ...]:
    gap = chance.choice([0, 0, 100, 30, 10])
    names = _some(chance, FAULTS, 4)
    if not gap or not names:
        return ()
    faults: list[StatementFault] = []
    for process in range(processes):
        statement = 0
        while statement < 3000 and len(faults) < 100:
            statement += 1 + int(chance.expovariate(1 / gap))
            faults.append(
                StatementFault(
                    number=len(faults),
                    process=process,
                    statement=statement,
                    name=chance.choice(names),
                    seconds=chance.choice([0.01, 0.2, 2.0, 8.0]),
                    coin=chance.random() < 0.5,
                )
            )
    return tuple(faults)


def _events(chance: random.Random, chaos: float, processes: int) -> tuple[Event, ...]:
    gap = chance.choice([0, 0, 10.0, 4.0, 1.0])
    names = _some(chance, EVENTS, 3)
    events: list[Event] = []
    at = 0.0
    while gap and names and (at := at + chance.expovariate(1 / gap)) < chaos:
        name = chance.choice(names)
        seconds = chance.choice([0.01, 0.5, 3.0, 15.0])
        if name == "clock":
            seconds = chance.choice([-30.0, -2.0, -0.5, 0.5, 2.0, 30.0, 600.0])
        events.append(Event(len(events), round(at, 3), chance.randrange(processes), name, seconds))
    return tuple(events)
