"""What is printed of a run that failed: how to see it again, and what there is to see."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Final

from .coverage import NAMES
from .evidence import Step
from .runs import Result

_MANY: Final = 10


def replay(result: Result, seed_plan_size: int) -> str:
    """The arguments of the command that lives through the same run again."""
    command = f"--seed {result.plan.seed}"
    pieces = result.plan.pieces()
    return command if len(pieces) == seed_plan_size else f"{command} --only {','.join(pieces)}"


def failure(result: Result, again: str) -> Iterator[str]:
    """Line by line. `again`: the arguments with which the command shows it once more."""
    violations = result.violations
    yield f"{len(violations)} violations"
    yield from (f"  {violation}" for violation in violations[:_MANY])
    if len(violations) > _MANY:
        yield f"  and {len(violations) - _MANY} more"
    yield f"again: python -m tests.simulation {again}"
    jobs = dict.fromkeys(one.job for one in violations if one.job is not None)
    for job in list(jobs)[:2]:
        yield from _story(result, job)
    yield f"the last {len(result.statements)} statements:"
    for process, sql, values in result.statements:
        yield f"  {process}: {' '.join(sql.split())[:150]} {str(values)[:150]}"


def _story(result: Result, job: int) -> Iterator[str]:
    """The audit of the job among all that happened meanwhile, in order."""
    history = result.evidence.history
    told: list[tuple[int, str]] = []
    for life in history.lives:
        told.append((life.started_at, f"process {life.process} starts"))
        if life.killed_at is not None:
            told.append((life.killed_at, f"process {life.process} is killed"))
        if life.ended_at is not None:
            told.append((life.ended_at, f"process {life.process} ends"))
    for stop in history.stops:
        told.append((stop.begun_at, f"an orderly stop of {stop.process} begins"))
    for fault in history.faults:
        told.append(
            (fault.at, f"fault: {fault.what}, {fault.process or 'all'} {_until(fault.until)}")
        )
    for call in history.calls:
        if call.job == job or job in call.ids:
            told.append((call.invoked_at, f"{call.process} calls {call.verb}"))
            if call.answered_at is not None:
                answer = call.error or (call.answer if call.answer is not None else call.states)
                told.append((call.answered_at, f"{call.verb} is {call.outcome}: {answer}"))
    for start in history.starts:
        if start.job == job:
            told.append((start.at, f"{start.process} starts token {start.token}"))
            if start.ended_at is not None:
                told.append((start.ended_at, f"token {start.token}: {start.ending}"))
    for step in result.evidence.audit.steps:
        if step.job == job:
            told.append((step.at, f"{step.who}: {_change(step)}"))
    yield f"job {job}, with all that happened meanwhile:"
    for at, what in sorted(told):
        yield f"  {at / 1e9:13.6f}  {what}"


def _until(until: int | None) -> str:
    return "" if until is None else f"until {until / 1e9:.3f}"


def _change(step: Step) -> str:
    if step.after is None:
        return "removed"
    outcome = "" if step.outcome is None else f" ({step.outcome})"
    if step.before is None:
        return f"inserted: {step.after}"
    changed = [
        f"{name} {was!r} -> {now!r}"
        for name in step.after.__slots__
        if (was := getattr(step.before, name)) != (now := getattr(step.after, name))
    ]
    return f"{', '.join(changed) or 'written, nothing changed'}{outcome}"


def coverage(counts: Counter[str]) -> Iterator[str]:
    """How often each rare thing happened, the rarest first."""
    for name in sorted({*counts, *NAMES}, key=lambda name: (counts[name], name)):
        yield f"{counts[name]:9,}  {name}"
