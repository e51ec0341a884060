"""One round with real processes: chaos by plan, then one healthy process, then the judges."""

from __future__ import annotations

import heapq
import random
import signal
import sqlite3
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Final

from .child import Settings
from .disk import Disk
from .evidence import Evidence, Fault
from .fleet import Fleet, Process
from .invariants import Violation
from .process_evidence import LATE, connected, evidence_of, make_file
from .process_judge import judge
from .process_plan import Moment, Plan

TO_STOP: Final = 20.0
"""Seconds a process is given to end after it was asked to: grace, clean-up and final writes are
less than five, the rest is for a busy machine."""

SWALLOWED: Final = "Exception ignored in"
"""What Python says when it lets KeyboardInterrupt come in a place where no exception can leave,
such as the callback of a weak reference. Then people press Ctrl-C again."""

TO_LOCK: Final = 10.0
"""Seconds in which anybody gets the write lock once; transactions take milliseconds."""

TO_HEAL: Final = 40.0
"""Seconds until everything must have ended; a busy machine needs two."""


FROZEN: Final = 3_000_000_000
"""Nanoseconds: longer than any process is."""


@dataclass(frozen=True)
class Outcome:
    """What a round came to."""

    violations: list[Violation]
    evidence: Evidence
    processes: list[Process]
    seconds: float


def run_round(plan: Plan, folder: Path) -> Outcome:
    """In an empty folder. The process that calls it must have one thread only, for it forks."""
    began = time.monotonic()
    with Fleet() as fleet:
        round = Round(plan, folder, fleet)
        round.prepare()
        round.make_chaos()
        # Where nobody lives, who closes the file last would mend it before the healer can.
        complaints = round.lock() if fleet.alive else []
        complaints += [*round.stop(), *round.heal()]
        evidence = round.evidence()
        violations = complaints + judge(evidence, fleet.all)
    return Outcome(violations, evidence, fleet.all, time.monotonic() - began)


class Round:
    def __init__(self, plan: Plan, folder: Path, fleet: Fleet) -> None:
        self._plan = plan
        self._folder = folder
        self._disk = Disk(folder / "disk", plan)
        self._fleet = fleet
        self._database = self._disk.path / "jobs.db"
        self._faults: list[Fault] = []
        self._lives = count(1)
        self._now: dict[int, Process] = {}
        """The present life of each member."""
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._dice = random.Random(f"pauses {plan.seed}")

    # Before.

    def prepare(self) -> None:
        make_file(self._database)

    # Chaos.

    def make_chaos(self) -> None:
        began = time.monotonic()
        for number in range(len(self._plan.members)):
            self._start(number)
        for moment in self._plan.moments:
            self._at(began + moment.at, partial(self._act, moment))
        while (now := time.monotonic()) < began + self._plan.seconds:
            while self._agenda and self._agenda[0][0] <= now:
                heapq.heappop(self._agenda)[2]()
            for process in self._fleet.reap():
                self._replace(process)
            time.sleep(0.002)
        for process in self._fleet.alive:
            self._fleet.thaw(process)
        self._disk.release(self._fleet.alive)
        self._disk.grow()

    def _at(self, instant: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (instant, next(self._order), act))

    def _after(self, seconds: float, act: Callable[[], None]) -> None:
        self._at(time.monotonic() + seconds, act)

    def _start(self, number: int) -> None:
        member = self._plan.members[number]
        self._now[number] = self._start_as(
            f"{member.name}{next(self._lives)}",
            mode=member.mode,
            driver=member.driver,
            synchronous=member.synchronous,
            ballast=self._plan.ballast,
            # They kill themselves only where they are killed anyway.
            is_deadly=self._plan.kind == "kill",
        )

    def _replace(self, process: Process) -> None:
        for number, present in self._now.items():
            if present is process:
                pause = self._dice.choice([0.0, 0.05, 0.2])
                self._after(pause, partial(self._start, number))

    def _act(self, moment: Moment) -> None:
        if moment.action == "fill":
            now = time.time_ns()
            # A row whose end could not be written while its lease lasted is left as it is.
            seconds = moment.seconds + self._plan.lease
            what = "the disk is full" if self._disk.is_small else "files may not grow"
            self._faults.append(Fault(what, now, until=now + int(seconds * 1e9) + LATE))
            self._disk.fill(self._fleet.alive)
            self._after(moment.seconds, lambda: self._disk.release(self._fleet.alive))
            return
        assert moment.member is not None
        process = self._now[moment.member]
        if moment.action == "kill":
            self._fleet.kill(process)
        elif moment.action == "freeze":
            self._fleet.freeze(process)
            self._after(moment.seconds, partial(self._fleet.thaw, process))
        else:
            self._fleet.send(process, self._signal)
            # Where each is an exception, Trio calls two of them in its `start` a fault of its own.
            if moment.seconds and process.settings.mode != "bare":
                self._after(moment.seconds, partial(self._fleet.send, process, self._signal))

    @property
    def _signal(self) -> signal.Signals:
        return signal.SIGINT if self._plan.kind == "interrupt" else signal.SIGTERM

    # After it.

    def lock(self, within: float = TO_LOCK) -> list[Violation]:
        """I14: none of those who live keeps the write lock. Their end would take it from them."""
        end = time.monotonic() + within
        while True:
            try:
                with connected(self._database) as connection:
                    connection.execute("BEGIN IMMEDIATE")
                return []
            except sqlite3.OperationalError as error:
                if time.monotonic() > end:
                    text = f"in {within} s nobody else got the write lock: {error}"
                    return [Violation("I14", None, text)]
            time.sleep(0.001)

    def stop(self) -> list[Violation]:
        """End all processes, as the plan says."""
        stopping = [process for process in self._fleet.alive if not process.killed_at]
        for process in stopping:
            if not self._plan.ends_in_order:
                self._fleet.kill(process)
            elif not process.signalled:
                self._fleet.send(process, self._signal)
        return [violation for process in self._fleet.alive for violation in self._end(process)]

    def heal(self) -> list[Violation]:
        """One process in good health does what is left."""
        healer = self._start_as(
            "healer", workers=40, enqueues=False, is_deadly=False, until_idle=True
        )
        return self._end(healer, TO_HEAL)

    def _end(self, process: Process, within: float = TO_STOP) -> list[Violation]:
        if self._fleet.wait(process, within=within):
            return []
        if SWALLOWED in process.log.read_text(errors="replace"):
            self._fleet.send(process, self._signal)
            if self._fleet.wait(process, within=within):
                return []
        self._fleet.ask_where(process)
        self._fleet.kill(process)
        self._fleet.wait(process, within=TO_STOP)
        log = process.log.read_text(errors="replace")[-5000:]
        text = f"{process.name} ({process.settings.mode}) has not ended within {within} s:\n{log}"
        return [Violation("I16", None, text)]

    def evidence(self) -> Evidence:
        """Of all that has happened, when every process has ended."""
        return evidence_of(
            self._database,
            self._fleet.all,
            self._faults,
            # A frozen process may have made a change that nobody sees until it commits.
            resolution=FROZEN if self._plan.kind == "stop" else LATE,
            # KeyboardInterrupt may come between the call of a handler and its first line.
            starts_are_complete=all(member.mode != "bare" for member in self._plan.members),
        )

    def _start_as(self, name: str, **changes: Any) -> Process:
        settings = Settings(
            name,
            self._database,
            self._folder / f"{name}.jsonl",
            f"{self._plan.kind} {self._plan.seed}",
            lease=self._plan.lease,
            poll=self._plan.poll,
            **changes,
        )
        return self._fleet.start(settings, self._folder / f"{name}.log")
