"""Plans that are about one thing, which chance alone hardly ever brings about undisturbed.

They are made of a plan that was drawn, and draw from chance of their own: another flavour, or
another share of them, changes no other plan.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

from .evidence import Verb
from .plan import (
    ClientStep,
    Event,
    FaultName,
    KindPlan,
    Plan,
    ProcessPlan,
    StatementFault,
    draw_ordinary,
)

Flavour: TypeAlias = Callable[[Plan, random.Random], Plan]

SHARE: Final = 0.4
"""Of the plans that have one of `FLAVOURS`."""
VISITED: Final = 0.5
"""Of all plans. To see that nothing is late takes a third of a run."""


def draw(seed: int) -> Plan:
    """The plan of a seed."""
    plan = draw_ordinary(seed)
    chance = random.Random(f"{seed}/flavour")
    if chance.random() < SHARE:
        plan = chance.choice(FLAVOURS)(plan, chance)
    return dataclasses.replace(plan, is_visited=chance.random() < VISITED)


def late_holders(plan: Plan, chance: random.Random) -> Plan:
    """A process freezes for longer than its leases, and nobody is there to take up what it has.
    Just before it goes on, and renews them, somebody cancels: what was read then is not true any
    more when it is written."""
    holder = _calm(plan.processes[0], workers=10, lease=chance.choice([2.0, 3.0]))
    client = _calm(holder, runners=0, latency=0.3)
    steps = [_step(0, 0.0, 1, "enqueue_many", count=10)]
    events: list[Event] = []
    at = 2.0
    while at + 5.0 < 20.0:
        events.append(Event(len(events), at, 0, "freeze", 4.0))
        for _ in range(3):
            cancels_at = at + 4.0 - chance.uniform(0.0, 0.2)
            target = chance.randrange(10)
            steps.append(_step(len(steps), cancels_at, 1, "cancel", target=target))
        at += chance.choice([5.0, 6.0])
    steps.sort(key=lambda step: step.at)
    return dataclasses.replace(
        plan,
        chaos=20.0,
        kinds=_patient(plan.kinds),
        processes=(holder, client),
        acts=("wait", "wait", "sleep", "shield"),
        steps=tuple(steps),
        faults=(),
        events=tuple(events),
    )


def slow_answers(plan: Plan, chance: random.Random) -> Plan:
    """What was written is told seconds later, and runners are stopped meanwhile in applications
    that go on: nobody is there any more to take what a claim brings."""
    processes = tuple(
        _calm(one, lease=30.0, grace=0.0, answers=6.0, lingers=10.0) for one in plan.processes
    )
    steps: list[ClientStep] = []
    events: list[Event] = []
    at = 0.0
    while (at := at + chance.uniform(1.0, 4.0)) < 30.0:
        process = chance.randrange(len(processes))
        steps.append(_step(len(steps), round(at, 3), process, "enqueue"))
        if chance.random() < 0.5:
            stops_at = round(at + chance.uniform(0.0, 1.0), 3)
            events.append(Event(len(events), stops_at, process, "stop"))
    events.sort(key=lambda event: event.at)
    deadlines = [None, None, 1.0, 3.0]
    return dataclasses.replace(
        plan,
        chaos=30.0,
        processes=processes,
        acts=("return", "return", "sleep", "fail", "error"),
        steps=tuple(
            dataclasses.replace(step, deadline=chance.choice(deadlines), kind=_kind(plan, chance))
            for step in steps
        ),
        faults=(),
        events=tuple(events),
    )


def crowded(plan: Plan, chance: random.Random) -> Plan:
    """Nothing goes wrong, only others write to the file whenever they can."""
    faults: list[StatementFault] = []
    for process in range(len(plan.processes)):
        statement = 0
        while statement < 1500:
            statement += 1 + int(chance.expovariate(1 / 8))
            faults.append(StatementFault(len(faults), process, statement, "neighbour"))
    return dataclasses.replace(
        plan,
        processes=tuple(_calm(one, tidies=False) for one in plan.processes),
        acts=("return", "return", "sleep", "fail", "error", "publish", "refuse", "retry later"),
        steps=tuple(step for step in plan.steps if step.verb != "enqueue_on"),
        faults=tuple(faults),
        events=(),
    )


def interrupted(plan: Plan, chance: random.Random) -> Plan:
    """Jobs that are never given the time they need: from the eleventh interruption in a row on,
    each costs an attempt."""
    processes = tuple(
        _calm(one, grace=0.0, poll=0.5, lease=12.0, latency=min(one.latency, 0.02))
        for one in plan.processes[:2]
    )
    gap = chance.choice([0.5, 1.0])
    events = [
        Event(number, 0.5 + gap * number, number % len(processes), "stop")
        for number in range(int(15.0 / gap) * len(processes))
    ]
    return dataclasses.replace(
        plan,
        chaos=20.0 * gap * len(processes),
        kinds=tuple(
            dataclasses.replace(kind, attempts=chance.choice([1, 2, 3]))
            for kind in _patient(plan.kinds)
        ),
        processes=processes,
        acts=("wait",),
        scripts=(11, 12, 14, 40),
        steps=(_step(0, 0.0, 0, "enqueue_many", count=chance.choice([1, 3]), kind=0),),
        faults=(),
        events=tuple(events),
        restart_after=(0.0,),
    )


def poisoned(plan: Plan, chance: random.Random) -> Plan:
    """A process that dies again and again, with jobs in hand of which some have been lost twice,
    and some, that come before them, once."""
    victim = _calm(plan.processes[0], place="here", workers=10, poll=0.5, lease=2.0)
    steps = [
        _step(number, 0.5 * number, 0, "enqueue", priority=chance.choice([0, 1, 2, 3]))
        for number in range(20)
    ]
    events: list[Event] = []
    at = 1.0
    while at < 12.0:
        events.append(Event(len(events), round(at, 3), 0, "kill"))
        at += chance.uniform(1.2, 4.0)
    return dataclasses.replace(
        plan,
        chaos=14.0,
        kinds=tuple(dataclasses.replace(kind, attempts=10) for kind in _patient(plan.kinds)),
        processes=(victim,),
        acts=("wait",),
        scripts=(2, 4, 20),
        steps=tuple(steps),
        faults=(),
        events=tuple(events),
        restart_after=(0.0,),
    )


def refused(plan: Plan, chance: random.Random) -> Plan:
    """Now and then the store refuses something, and there is time to repeat it."""
    faults: list[StatementFault] = []
    names: Sequence[FaultName] = ("commit fails", "commit overtaken", "I/O error", "busy snapshot")
    for process in range(len(plan.processes)):
        statement = 0
        while statement < 1000:
            statement += 1 + int(chance.expovariate(1 / 30))
            name = chance.choice(names)
            faults.append(StatementFault(len(faults), process, statement, name))
    return dataclasses.replace(
        plan,
        kinds=_patient(plan.kinds),
        processes=tuple(_calm(one, lease=12.0) for one in plan.processes),
        acts=("return", "return", "sleep", "fail", "publish"),
        steps=tuple(step for step in plan.steps if step.verb != "enqueue_on"),
        faults=tuple(faults),
        events=(),
    )


def cut_off(plan: Plan, chance: random.Random) -> Plan:
    """Renewals are told late, and then their process does not reach the file any more: another
    takes up what it has, and its handlers have to be stopped by when renewals were asked for."""
    settings = _calm(plan.processes[0], workers=10, poll=0.5, lease=6.0, busy_timeout=0.0)
    events: list[Event] = []
    at = 0.0
    while (at := at + chance.uniform(3.0, 9.0)) < 30.0:
        process = chance.randrange(2)
        events.append(Event(len(events), round(at, 3), process, "unplug", 9.0))
    return dataclasses.replace(
        plan,
        chaos=30.0,
        kinds=_patient(plan.kinds),
        processes=(dataclasses.replace(settings, answers=1.9),) * 2,
        acts=("wait",),
        steps=tuple(_step(number, 0.5 * number, number % 2, "enqueue") for number in range(8)),
        faults=(),
        events=tuple(events),
    )


def drained(plan: Plan, chance: random.Random) -> Plan:
    """Runners that are told to finish what they have, and nothing disturbs them."""
    processes = tuple(_calm(one) for one in plan.processes)
    events: list[Event] = []
    at = 0.0
    while (at := at + chance.expovariate(1 / 3.0)) < plan.chaos:
        process = chance.randrange(len(processes))
        events.append(Event(len(events), round(at, 3), process, "drain"))
        if chance.random() < 0.2:  # and then cannot wait for it
            stops_at = round(at + chance.choice([0.0, 0.5, 3.0]), 3)
            events.append(Event(len(events), stops_at, process, "stop"))
    events.sort(key=lambda event: event.at)
    return dataclasses.replace(
        plan,
        processes=processes,
        acts=("return", "sleep", "fail", "error", "publish", "retry later", "swallow"),
        faults=(),
        events=tuple(events),
    )


def misunderstood(plan: Plan, chance: random.Random) -> Plan:
    """Processes that do not agree on the type of a payload, and clients that read all there is."""
    steps: list[ClientStep] = []
    for step in plan.steps:
        is_misfit = step.verb.startswith("enqueue") and chance.random() < 0.3
        steps.append(dataclasses.replace(step, is_misfit=is_misfit))
    at = 0.0
    number = 1 + max((step.number for step in steps), default=0)
    while (at := at + chance.expovariate(1.0)) < plan.chaos:
        verb: Verb = chance.choice(["counts", "history", "history", "find", "get", "retry"])
        process = chance.randrange(len(plan.processes))
        target = chance.randrange(1000)
        steps.append(_step(number, round(at, 3), process, verb, target=target))
        number += 1
    steps.sort(key=lambda step: step.at)
    return dataclasses.replace(
        plan, acts=(*plan.acts, "misfit", "error", "group of errors"), steps=tuple(steps)
    )


FLAVOURS: Final[Sequence[Flavour]] = (
    late_holders, slow_answers, crowded, interrupted, poisoned, refused, cut_off, drained,
    misunderstood,
)  # fmt: skip


def _calm(settings: ProcessPlan, **changes: object) -> ProcessPlan:
    """A process with a runner for all there is, and a right clock."""
    calm = dataclasses.replace(settings, clock=0.0, runners=1, queues=None, latency=0.0)
    return dataclasses.replace(calm, **changes)  # type: ignore[arg-type]


def _patient(kinds: Sequence[KindPlan]) -> tuple[KindPlan, ...]:
    return tuple(
        dataclasses.replace(kind, attempts=5, timeout=None, on_interrupt="retry") for kind in kinds
    )


def _kind(plan: Plan, chance: random.Random) -> int:
    return chance.randrange(len(plan.kinds))


def _step(number: int, at: float, process: int, verb: Verb, **asked: object) -> ClientStep:
    step = ClientStep(number, at, process, verb)
    return dataclasses.replace(step, **asked)  # type: ignore[arg-type]
