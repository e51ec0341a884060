"""Every fault in turn: one script that has each kind of end in it, and a crash before and after
each of its statements, an error at each of them, a stop at each step of its tasks; then pairs of
faults, the second while the first is still being mended.

Nothing is drawn here. What the script cannot do is found by chance, see `plan`.
"""

from __future__ import annotations

import dataclasses
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import click
from rich.console import Console

from trio_jobs._drivers import Values

from . import report
from .faults import is_write
from .options import refuse_beside
from .plan import Act, ClientStep, FaultName, KindPlan, Plan, StatementFault
from .progress import INTERRUPTED, pool, telling
from .runs import HEALTHY, Result, Steps, run

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
_MANY: Final = 20
_CHUNK: Final = 8
"""Cases that go to another process together: an interrupt waits for a few of these."""
LASTS: Final = 2.0
"""Seconds that a fault lasts which does not go away at once."""


# The script.

_RETRY, _DIES, _ONCE = range(3)
_KINDS: Final = (
    KindPlan("retry", "queue 0", 3, 0.5, None, "retry", 0),
    KindPlan("dies", "queue 0", 2, 0.5, 1.0, "retry", 0),
    KindPlan("once", "queue 0", 3, 0.5, None, "fail", 0),
)
_PROCESS: Final = dataclasses.replace(HEALTHY, poll=1.0, lease=3.0, grace=1.0, busy_timeout=0.2)
_STEPS: Final = (
    ClientStep(0, 0.0, 0, "enqueue"),
    ClientStep(1, 0.0, 0, "enqueue", _DIES),
    ClientStep(2, 0.0, 0, "enqueue_many", count=3),
    ClientStep(3, 0.1, 0, "enqueue", key="a"),
    ClientStep(4, 0.1, 0, "enqueue", key="a"),
    ClientStep(5, 0.2, 0, "enqueue", _ONCE),
    ClientStep(6, 0.3, 0, "enqueue", deadline=0.5, delay=30.0),
    ClientStep(7, 0.3, 0, "enqueue", deadline=0.5),
    ClientStep(8, 0.4, 0, "enqueue_on"),
    ClientStep(9, 0.5, 0, "enqueue_on", commits=False),
    ClientStep(10, 1.0, 0, "enqueue", delay=30.0),
    ClientStep(11, 1.1, 0, "cancel", target=-1),
    ClientStep(12, 1.2, 0, "enqueue"),
    ClientStep(13, 1.4, 0, "cancel", target=-1),
    ClientStep(14, 1.5, 0, "enqueue", _DIES),
    ClientStep(15, 1.6, 0, "enqueue", delay=0.7),
    ClientStep(16, 4.0, 0, "retry", target=4),
    ClientStep(17, 5.0, 0, "prune", seconds=2.0),
    ClientStep(18, 5.2, 0, "enqueue"),
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
    is_visited=False,
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


def parse(text: str, script: Length) -> Case:
    """The case of that name. Raises ValueError."""
    faults: list[tuple[FaultName, int]] = []
    stop_at = None
    for part in text.split(","):
        name, _, digits = part.partition("@")
        number = int(digits) if digits.isdecimal() else 0
        known = next((one for one in SINGLE if one == name), None)
        if known is not None:
            faults.append((known, number))
        elif name == "stop" and text == part:
            stop_at = number
        else:
            raise ValueError(f"there is no fault {name!r} (there are {', '.join(SINGLE)}).")
    # A second fault counts on, in what is done to mend the first.
    numbers = [number for _, number in faults] if stop_at is None else [stop_at]
    most = len(script.statements) if stop_at is None else script.steps
    if numbers[0] > most or min(numbers) < 1:
        raise ValueError(f"after the @ of {text!r} is a number from 1 to {most}.")
    return Case(tuple(faults), stop_at)


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
    try:
        return [str(violation) for violation in run_case(case).violations]
    except Exception:  # run alone, it shows its traceback
        return [traceback.format_exc()]


@click.command("sweep")
@click.option("--pairs", "with_pairs", is_flag=True, help="Also two faults at a time.")
@click.option("--every", type=click.IntRange(min=1), default=1, help="Only each n-th case.")
@click.option(
    "--case", "name", metavar="CASE", help="Only this one, and all there is to see of it."
)
@click.pass_context
def main(context: click.Context, with_pairs: bool, every: int, name: str | None) -> None:
    """Every fault in turn.

    Each strikes once at every statement of one script, in which jobs end in every way; and a stop
    comes at every step of its tasks. The exit code is 1 if a promise was broken; then all that is
    known of the first such case is printed, and how to run it again.
    """
    console = Console(soft_wrap=True, highlight=False)
    script = length()
    if name is not None:
        refuse_beside(context, "--case", "with_pairs", "every")
        try:
            case = parse(name, script)
        except ValueError as error:
            raise click.BadParameter(str(error), param_hint="--case") from None
        sys.exit(_show(console, case))
    cases = [*singles(script), *stops(script)]
    if with_pairs:
        cases += pairs(script)
    size = (
        f"{len(script.statements)} statements and {script.steps} steps of tasks"
        f" make {len(cases):,} cases"
    )
    cases = cases[::every]
    console.print(size if every == 1 else f"{size}; every {every:,}th of them: {len(cases):,}")
    failed: list[tuple[Case, list[str]]] = []
    began = time.monotonic()
    done = 0
    with telling(console, "cases", len(cases)) as told, pool() as workers:
        for case, broken in zip(
            cases, workers.map(broken_by, cases, chunksize=_CHUNK), strict=True
        ):
            done += 1
            if broken:
                failed.append((case, broken))
                told.say(f'broken: --case "{case}"')
            told.at(done, len(failed))
            if told.is_interrupted:
                workers.shutdown(cancel_futures=True)
                break
    took = time.monotonic() - began
    console.print(
        f"{'interrupted: ' if told.is_interrupted else ''}"
        f"{done:,} cases in {took:.0f} s, {done / took:.1f} a second, {len(failed)} broken"
    )
    for case, broken in failed[:_MANY]:
        console.print(f'  --case "{case}": {report.brief(broken[0])}', markup=False)
    if len(failed) > _MANY:
        console.print(f"  and {len(failed) - _MANY} more")
    code = _show(console, failed[0][0]) if failed else 0
    sys.exit(INTERRUPTED if told.is_interrupted else code)


def _show(console: Console, case: Case) -> int:
    result = run_case(case)
    if not result.violations:
        console.print(f"{case}: all promises were kept")
        return 0
    for line in report.failure(result, f'sweep --case "{case}"'):
        console.print(line, markup=False)
    return 1
