"""Every fault in turn: one script that has each kind of end in it, and a crash before and after
each of its statements, an error at each of them, a stop at each step of its tasks; then pairs of
faults, the second while the first is still being mended.

Nothing is drawn here. What the script cannot do is found by chance, see `plan`.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Final

from rich.console import Console
from rich.progress import Progress

from trio_jobs._drivers import Values

from . import report
from .faults import is_write
from .plan import Act, ClientStep, FaultName, KindPlan, Plan, ProcessPlan, StatementFault
from .runs import Result, Steps, run

WITHIN: Final = 20
"""Statements between the first fault of a pair and the second."""
SINGLE: Final[Sequence[FaultName]] = (
    "crash before", "crash after", "I/O error", "I/O errors", "full", "busy", "busy snapshot",
    "commit reports an error", "commit fails", "commit unknown",
)  # fmt: skip
PAIRS: Final[Sequence[tuple[FaultName, FaultName]]] = (
    ("crash after", "crash before"),
    ("crash after", "I/O error"),
    ("I/O error", "crash before"),
    ("commit unknown", "crash after"),
    ("full", "I/O error"),
)
LASTS: Final = 2.0
"""Seconds that a fault lasts which does not go away at once."""


# The script.

_RETRY, _DIES, _ONCE = range(3)
_KINDS: Final = (
    KindPlan("retry", "queue 0", 3, 0.5, None, "retry", 0),
    KindPlan("dies", "queue 0", 2, 0.5, 1.0, "retry", 0),
    KindPlan("once", "queue 0", 3, 0.5, None, "fail", 0),
)
_PROCESS: Final = ProcessPlan(
    place="here",
    clock=0.0,
    runners=1,
    workers=4,
    queues=None,
    poll=1.0,
    lease=3.0,
    grace=1.0,
    busy_timeout=0.2,
    tidies=False,
    latency=0.0,
)


def _step(number: int, at: float, kind: int = _RETRY, **asked: object) -> ClientStep:
    step = ClientStep(number=number, at=at, process=0, verb="enqueue", kind=kind)
    return dataclasses.replace(step, **asked)  # type: ignore[arg-type]


_STEPS: Final = (
    _step(0, 0.0),
    _step(1, 0.0, _DIES),
    _step(2, 0.0, verb="enqueue_many", count=3),
    _step(3, 0.1, key="a"),
    _step(4, 0.1, key="a"),
    _step(5, 0.2, _ONCE),
    _step(6, 0.3, deadline=0.5, delay=30.0),
    _step(7, 0.3, deadline=0.5),
    _step(8, 0.4, verb="enqueue_on"),
    _step(9, 0.5, verb="enqueue_on", commits=False),
    _step(10, 1.0, delay=30.0),
    _step(11, 1.1, verb="cancel", target=-1),
    _step(12, 1.2),
    _step(13, 1.4, verb="cancel", target=-1),
    _step(14, 1.5, _DIES),
    _step(15, 1.6, delay=0.7),
    _step(16, 4.0, verb="retry", target=4),
    _step(17, 5.0, verb="prune", seconds=2.0),
    _step(18, 5.2),
)
_ACTS: Final = {
    0: [Act("return")],
    1: [Act("error"), Act("fail")],
    2: [Act("group of errors"), Act("return")],
    3: [Act("publish", 0.2), Act("return")],
    5: [Act("shield", 2.0)],
    7: [Act("sleep", 5.0), Act("return")],
    8: [Act("retry later", 1.0), Act("return")],
    12: [Act("sleep", 5.0), Act("return")],
    14: [Act("sleep", 5.0), Act("swallow", 5.0)],
    15: [Act("refuse")],
    18: [Act("sleep", 4.0), Act("enqueue")],
}


@dataclass(frozen=True)
class Script(Plan):
    """A plan in which it is written what each job does."""

    def script(self, payload: str) -> list[Act]:
        _, _, name = payload.partition(" ")
        number = name.partition(".")[0]
        return [*_ACTS.get(int(number), []), Act("return")]


SCRIPT: Final = Script(
    seed=0,
    chaos=8.0,
    kinds=_KINDS,
    processes=(_PROCESS,),
    acts=(),
    steps=_STEPS,
    faults=(),
    events=(),
    restart_after=(0.5,),
    heals_by_stop=True,
)


# Cases.


@dataclass(frozen=True)
class Case:
    """What goes wrong in one run of the script."""

    faults: tuple[tuple[FaultName, int], ...] = ()
    """With the number of the statement, from 1."""
    stop_at: int | None = None
    """The number of the task step before which the process is told to stop, from 1."""

    def __str__(self) -> str:
        if self.stop_at is not None:
            return f"stop@{self.stop_at}"
        return ",".join(f"{name}@{statement}" for name, statement in self.faults)


def parse(text: str) -> Case:
    """The case of that name. Raises ValueError."""
    if text.startswith("stop@"):
        return Case(stop_at=int(text.removeprefix("stop@")))
    faults: list[tuple[FaultName, int]] = []
    for part in text.split(","):
        name, _, statement = part.partition("@")
        known = next((one for one in SINGLE if one == name), None)
        if known is None:
            raise ValueError(f"there is no fault {name!r}")
        faults.append((known, int(statement)))
    return Case(tuple(faults))


def plan_of(case: Case) -> Plan:
    faults = [
        StatementFault(number, 0, statement, name, LASTS, coin=bool(statement % 2))
        for number, (name, statement) in enumerate(case.faults)
    ]
    return dataclasses.replace(SCRIPT, faults=tuple(faults))


def run_case(case: Case) -> Result:
    steps = None if case.stop_at is None else Steps(case.stop_at)
    return run(plan_of(case), steps=steps)


@dataclass(frozen=True)
class Length:
    """How much the script does when nothing goes wrong."""

    statements: Sequence[str]
    steps: int


def length() -> Length:
    statements: list[str] = []
    steps = Steps()

    def note(process: str, sql: str, values: Values) -> None:
        if process == "0#1":
            statements.append(sql)

    run(SCRIPT, note_statement=note, steps=steps)
    return Length(statements, steps.taken)


def singles(script: Length) -> Iterator[Case]:
    for name in SINGLE:
        for number, sql in enumerate(script.statements, 1):
            if name.startswith("commit") and sql != "COMMIT":
                continue
            if name == "full" and not is_write(sql):
                continue
            if name == "busy" and sql != "BEGIN IMMEDIATE":
                continue
            yield Case(((name, number),))


def stops(script: Length) -> Iterator[Case]:
    for number in range(1, script.steps + 1):
        yield Case(stop_at=number)


def pairs(script: Length) -> Iterator[Case]:
    for first, second in PAIRS:
        for number, sql in enumerate(script.statements, 1):
            if first.startswith("commit") and sql != "COMMIT":
                continue
            if first == "full" and not is_write(sql):
                continue
            for after in range(1, WITHIN + 1):
                yield Case(((first, number), (second, number + after)))


# The command.


def broken_by(case: Case) -> list[str]:
    return [str(violation) for violation in run_case(case).violations]


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser("python -m tests.simulation sweep", description=__doc__)
    parser.add_argument("--pairs", action="store_true", help="also two faults at a time")
    parser.add_argument("--every", type=int, default=1, help="only each n-th case")
    parser.add_argument("--case", help="only this one, and all there is to see of it")
    options = parser.parse_args(arguments)
    console = Console(soft_wrap=True, highlight=False)
    if options.case is not None:
        return _show(console, parse(options.case))
    script = length()
    cases = [*singles(script), *stops(script)]
    if options.pairs:
        cases += pairs(script)
    cases = list(itertools.islice(cases, 0, None, options.every))
    console.print(
        f"{len(script.statements)} statements and {script.steps} steps of tasks:"
        f" {len(cases):,} cases"
    )
    failed: list[tuple[Case, list[str]]] = []
    began = time.monotonic()
    # Not forked: a child must not inherit what this process has open.
    with Progress(console=console) as progress, _pool() as pool:
        task = progress.add_task("cases", total=len(cases))
        for case, broken in zip(cases, pool.map(broken_by, cases, chunksize=16), strict=True):
            progress.advance(task)
            if broken:
                failed.append((case, broken))
    took = time.monotonic() - began
    console.print(f"{len(cases):,} cases in {took:.0f} s, {len(cases) / took:.1f} a second")
    for case, broken in failed[:20]:
        console.print(f'python -m tests.simulation sweep --case "{case}": {broken[0]}')
    if failed:
        console.print(f"{len(failed)} cases broke promises")
        return _show(console, failed[0][0])
    console.print("all promises were kept")
    return 0


def _pool() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(mp_context=get_context("spawn"))


def _show(console: Console, case: Case) -> int:
    result = run_case(case)
    for line in report.failure(result, f'sweep --case "{case}"'):
        console.print(line, markup=False)
    return 1 if result.violations else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
