"""`python -m tests.simulation processes`: seeded rounds with real processes on one real file.

What no simulated world shows: real locks, signals at any instruction, SQLite's recovery after a
kill, the threads under the store, a disk that is full. The processes are forked and hurt as a
plan says that is drawn from the seed; then one healthy process must bring every job to its end;
then the judges of all simulations read the evidence.

A round is replayed by its kind and seed as far as the real clock lets it: the same things are
done at the same instants, give or take what the machine needs.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import click

from .fleet import Process
from .process_plan import KINDS, Plan, RoundKind, draw
from .process_round import Outcome, run_round
from .report import stories, violations

COMMAND: Final = "python -m tests.simulation processes"

_TOLD: Final = (
    "has lost its lease",
    "given up",
    "goes on trying",
    "the event loop was blocked",
    "cannot be cancelled",
)
"""What shows in the log that something rare has happened."""

_REPORT: Final = "report.json"


@click.command("processes")
@click.option(
    "--rounds", type=click.IntRange(min=1), default=5, show_default=True, help="Of each kind."
)
@click.option("--kind", type=click.Choice(KINDS), help="Only rounds of this kind.")
@click.option(
    "--seed", type=click.IntRange(min=0), help="Of the first round; the next ones follow."
)
@click.option(
    "--side-by-side", type=click.IntRange(min=1), default=2, show_default=True, help="At a time."
)
def main(rounds: int, kind: RoundKind | None, seed: int | None, side_by_side: int) -> None:
    """Real processes on one real file.

    They are killed, interrupted (Ctrl-C), terminated, stopped for a while, or find their disk
    full. After each round one process in good health does what is left, and judges look at what
    all of them have told. The exit code is 1 if a promise was broken.
    """
    first = random.randrange(1_000_000) if seed is None else seed
    kinds = KINDS if kind is None else (kind,)
    todo = [(kind, first + number) for number in range(rounds) for kind in kinds]
    began = time.monotonic()
    done = failed = 0
    seen: defaultdict[str, Counter[RoundKind]] = defaultdict(Counter)
    for kind, seed, report in _run_all(todo, side_by_side):
        done += 1
        for what, number in report.seen.items():
            seen[what][kind] += number
        if report.is_broken:
            failed += 1
            click.echo(f"\n{kind} {seed}:\n{report.text}")
            click.echo(f"again: {COMMAND} --kind {kind} --seed {seed} --rounds 1")
        # Not with a bar that has a thread: it would be forked.
        if sys.stdout.isatty() or done % 50 == 0:
            click.echo(f"\r{done} of {len(todo)} rounds, {failed} broken", nl=False)
    took = (time.monotonic() - began) / done
    click.echo(f"\r{done} rounds, {took:.1f} s each, {failed} broken, from seed {first} on; seen:")
    click.echo("".join(f"{kind:>10}" for kind in kinds))
    for what, numbers in sorted(seen.items()):
        click.echo("".join(f"{numbers[kind]:10,}" for kind in kinds) + f"  {what}")
    sys.exit(int(failed > 0))


@dataclass(frozen=True)
class Report:
    """What a round tells whoever had it run."""

    is_broken: bool
    text: str
    seen: dict[str, int]


@dataclass(frozen=True)
class _Running:
    kind: RoundKind
    seed: int
    folder: Path


def _run_all(
    todo: Sequence[tuple[RoundKind, int]], side_by_side: int
) -> Iterator[tuple[RoundKind, int, Report]]:
    """Each round in a process of its own, as they come to their ends."""
    running: dict[int, _Running] = {}
    waiting = list(reversed(todo))
    try:
        while waiting or running:
            while waiting and len(running) < side_by_side:
                kind, seed = waiting.pop()
                folder = Path(tempfile.mkdtemp(prefix="trio-jobs-round-", dir=_fast_disk()))
                running[_forked(draw(kind, seed), folder)] = _Running(kind, seed, folder)
            pid, _ = os.wait()
            one = running.pop(pid)
            report = _read_report(one.folder)
            _clear(pid, one.folder)
            yield one.kind, one.seed, report
    finally:
        for pid, one in running.items():
            _clear(pid, one.folder)
            os.waitpid(pid, 0)


def _fast_disk() -> str | None:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def _clear(pid: int, folder: Path) -> None:
    """What a round leaves behind, whatever happened to it; it leads a group of its own."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    shutil.rmtree(folder, ignore_errors=True)


def _forked(plan: Plan, folder: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setpgid(0, 0)
        try:
            outcome = run_round(plan, folder)
            is_broken = bool(outcome.violations)
            text = report_of(plan, outcome) if is_broken else ""
            report = Report(is_broken, text, seen_in(outcome))
        except Exception:
            report = Report(True, traceback.format_exc(), {})
        (folder / _REPORT).write_text(json.dumps(dataclasses.asdict(report)))
    finally:
        os._exit(0)


def _read_report(folder: Path) -> Report:
    try:
        return Report(**json.loads((folder / _REPORT).read_text()))
    except (OSError, ValueError):
        return Report(True, "the round has told nothing", {})


def seen_in(outcome: Outcome) -> dict[str, int]:
    """How much of what was to be tried has happened."""
    history, audit = outcome.evidence.history, outcome.evidence.audit
    seen = Counter[str]()
    seen["jobs"] = sum(step.before is None for step in audit.steps)
    seen["starts"] = len(history.starts)
    for process in outcome.processes:
        seen[f"processes that ended with {process.code}"] += 1
    for call in history.calls:
        seen[f"calls: {call.outcome if call.error is None else call.error}"] += 1
    for step in audit.steps:
        if step.ends_claim and step.after is not None:
            seen[f"claims: {step.outcome or 'handed back or succeeded'}"] += 1
    for fault in history.faults:
        seen[f"faults: {fault.what}"] += 1
    for line in history.logs:
        for told in _TOLD:
            seen[f"log: {told}"] += told in line.text
    return dict(seen)


def report_of(plan: Plan, outcome: Outcome) -> str:
    """What is wrong, and of the first jobs concerned all that is known."""
    return "\n".join(
        [
            f"  {plan}",
            "  its processes (A3 is member A, and the third that was started):",
            *(f"  {_life(process)}" for process in outcome.processes),
            *stories(outcome.violations, outcome.evidence),
            *violations(outcome.violations),
        ]
    )


def _life(process: Process) -> str:
    settings = process.settings
    sent = " ".join(number.name for number in process.signalled)
    killed = "" if process.killed_at is None else " and was killed"
    return (
        f"{process.name}: {settings.mode}, {settings.driver}, {settings.synchronous},"
        f" sent [{sent}]{killed}, ended with {process.code}"
    )
