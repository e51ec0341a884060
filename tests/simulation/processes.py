"""`python -m tests.simulation processes`: seeded rounds with real processes on one real file.

What no simulated world shows: real locks, signals at any instruction, SQLite's recovery after a
kill, the threads under the store, a disk that is full. The processes are forked and hurt as a
plan says that is drawn from the seed; then one healthy process must bring every job to its end;
then the judges of all simulations read the evidence.

A round is replayed by its kind and seed as far as the real clock lets it: the same things are
done at the same instants, give or take what the machine needs.
"""

from __future__ import annotations

import argparse
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
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, get_args

from .evidence import Step
from .fleet import Process
from .process_plan import KINDS, Plan, RoundKind, draw
from .process_round import Outcome, run_round

COMMAND: Final = "python -m tests.simulation processes"

FOUND: Final = 1
"""The exit code where there was a violation."""

_SHOWN: Final = 10
_REPORT: Final = "report.json"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run rounds; 1 if there was a violation."""
    options = _parser().parse_args(arguments)
    kinds: Sequence[RoundKind] = [options.kind] if options.kind else KINDS
    first = random.randrange(1_000_000) if options.seed is None else options.seed
    todo = [(kind, first + number) for number in range(options.rounds) for kind in kinds]
    began = time.monotonic()
    done = failed = 0
    seen = Counter[str]()
    for kind, seed, report in _run_all(todo, options.side_by_side):
        done += 1
        seen.update(report.seen)
        if report.code:
            failed += 1
            print(f"\n{kind} {seed}: {COMMAND} --kind {kind} --seed {seed} --rounds 1")
            print(report.text, flush=True)
        print(f"\r{done}/{len(todo)} rounds, {failed} failed", end="", flush=True)
    print(f", {(time.monotonic() - began) / max(1, done):.1f} s each; seen:")
    for what, number in sorted(seen.items()):
        print(f"{number:9,} {what}")
    return FOUND if failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5, help="of each kind (%(default)s)")
    parser.add_argument("--kind", choices=get_args(RoundKind), help="only this one")
    parser.add_argument("--seed", type=int, help="of the first round; the next ones follow")
    parser.add_argument("--side-by-side", type=int, default=2, help="rounds (%(default)s)")
    return parser


@dataclass(frozen=True)
class Report:
    """What a round tells whoever had it run."""

    code: int
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
            found = bool(outcome.violations)
            report = Report(found, report_of(plan, outcome) if found else "", seen_in(outcome))
        except Exception:
            report = Report(FOUND, traceback.format_exc(), {})
        (folder / _REPORT).write_text(json.dumps(dataclasses.asdict(report)))
    finally:
        os._exit(0)


def _read_report(folder: Path) -> Report:
    try:
        return Report(**json.loads((folder / _REPORT).read_text()))
    except (OSError, ValueError):
        return Report(FOUND, "the round has told nothing", {})


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
    return dict(seen)


def report_of(plan: Plan, outcome: Outcome) -> str:
    """What is wrong, and of the first job concerned all that is known."""
    lines = [f"  {violation}" for violation in outcome.violations[:_SHOWN]]
    if len(outcome.violations) > _SHOWN:
        lines.append(f"  and {len(outcome.violations) - _SHOWN} more")
    lines.append(f"  {plan}")
    lines += [f"  {_life(process)}" for process in outcome.processes]
    job = next((one.job for one in outcome.violations if one.job is not None), None)
    if job is not None:
        lines += ["", f"all that is known of job {job}:", *_story(outcome, job)]
    return "\n".join(lines)


def _life(process: Process) -> str:
    settings = process.settings
    sent = " ".join(number.name for number in process.signalled)
    killed = "" if process.killed_at is None else " and was killed"
    return (
        f"{process.name}: {settings.mode}, {settings.driver}, {settings.synchronous},"
        f" sent [{sent}]{killed}, ended with {process.code}"
    )


def _story(outcome: Outcome, job: int) -> list[str]:
    """In the order in which it happened, as far as clocks tell."""
    history, audit = outcome.evidence.history, outcome.evidence.audit
    told: list[tuple[int, str]] = []
    payload = ""
    for step in audit.steps:
        if step.job == job:
            payload = step.payload or payload
            told.append((step.at, f"row {step.seq}: {_difference(step)}"))
    for call in history.calls:
        if job == call.job or job in call.ids or payload in call.payloads:
            told.append((call.invoked_at, f"{call}"))
    for start in history.starts:
        if start.job == job:
            told.append((start.at, f"{start}"))
    first = min((at for at, _ in told), default=0)
    return [f"  {(at - first) / 1e9:9.4f} {text}" for at, text in sorted(told)]


def _difference(step: Step) -> str:
    """What changed."""
    if step.before is None or step.after is None:
        return f"{step.before} -> {step.after}"
    changes = [
        f"{field.name} {before} -> {after}"
        for field in dataclasses.fields(step.after)
        if (before := getattr(step.before, field.name))
        != (after := getattr(step.after, field.name))
    ]
    return ", ".join(changes) + ("" if step.outcome is None else f" ({step.outcome})")


if __name__ == "__main__":
    sys.exit(main())
