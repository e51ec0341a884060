"""What is printed of a run that failed: what there is to see, and how to see it again."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Final

from trio_jobs.testing import EPOCH

from .coverage import NAMES, missing
from .evidence import Evidence, Step
from .invariants import PROMISES, Violation
from .runs import Result

_WIDTH: Final = 160
"""Characters of a line about a violation; its rows are whole in the story of their job."""
_STATEMENT: Final = 100
_MANY: Final = 10
_EPOCH: Final = round(EPOCH.timestamp() * 1e9)


def replay(result: Result, seed_plan_size: int) -> str:
    """The arguments of the command that lives through the same run again."""
    command = f"--seed {result.plan.seed}"
    pieces = result.plan.pieces()
    return command if len(pieces) == seed_plan_size else f"{command} --only {','.join(pieces)}"


def failure(result: Result, again: str) -> Iterator[str]:
    """Line by line, what matters most at the end. `again`: the arguments with which the command
    shows it once more."""
    yield (
        f"the last {len(result.statements)} statements"
        " (2#1 is process 2 in its first life, 2#2 in its second):"
    )
    for process, sql, values in result.statements:
        yield f"  {process}: {_cut(' '.join(sql.split()), _STATEMENT)} {_cut(values, _STATEMENT)}"
    yield from stories(result.violations, result.evidence, epoch=_EPOCH)
    pieces = (*result.plan.steps, *result.plan.faults, *result.plan.events)
    if len(pieces) <= _MANY:
        yield "what is asked for and goes wrong:"
        for name, piece in zip(result.plan.pieces(), pieces, strict=False):
            yield f"  {name}: {type(piece).__name__} {_fields(piece)}"
        if result.plan.is_visited:
            yield "  visits: when all is healed others ask for jobs, and one of them dies"
    yield from violations(result.violations)
    yield f"again: python -m tests.simulation {again}"


def violations(found: Sequence[object], width: int = _WIDTH) -> Iterator[str]:
    yield f"broken promises, {len(found)} in all:"
    for violation in found[:_MANY]:
        yield from (f"  {_cut(line, width)}" for line in str(violation).splitlines())
    if len(found) > _MANY:
        yield f"  and {len(found) - _MANY} more"
    names = {str(violation).partition(":")[0] for violation in found}
    yield from (f"{name} is: {what}" for name, what in PROMISES.items() if name in names)


def brief(violation: str) -> str:
    """In one line; of a traceback its end, which says what happened."""
    first, *traceback = violation.splitlines()
    return _cut(f"{first} ... {traceback[-1]}" if traceback else first, _WIDTH)


def stories(found: Sequence[Violation], evidence: Evidence, *, epoch: int = 0) -> Iterator[str]:
    """Of the first jobs concerned. `epoch`: where an `at` of 0 is, in nanoseconds since 1970."""
    began = min((life.started_at for life in evidence.history.lives), default=0)
    jobs = dict.fromkeys(one.job for one in found if one.job is not None)
    for number, job in enumerate(list(jobs)[:2]):
        yield f"job {job}, with all that happened meanwhile:"
        if not number:
            yield "  (seconds since the first process; a token is the number of a claim)"
        for at, what in sorted(_story(evidence, job, epoch + began)):
            yield f"  {(at - began) / 1e9:11.6f}  {what}"


def _story(evidence: Evidence, job: int, zero: int) -> Iterator[tuple[int, str]]:
    """The audit of the job among all that happened meanwhile."""
    history, steps = evidence.history, evidence.audit.steps
    for life in history.lives:
        yield life.started_at, f"process {life.process} starts"
        if life.killed_at is not None:
            yield life.killed_at, f"process {life.process} is killed"
        if life.ended_at is not None:
            yield life.ended_at, f"process {life.process} ends"
    for stop in history.stops:
        yield stop.begun_at, f"an orderly stop of {stop.process} begins"
    for fault in history.faults:
        lasts = (max(fault.until or 0, fault.at) - fault.at) / 1e9
        told = f"fault: {fault.what}, {fault.process or 'all'}"
        yield fault.at, f"{told}, {lasts:.3f} s" if lasts >= 0.001 else told
    payload = next((one.payload for one in steps if one.job == job and one.payload), None)
    for call in history.calls:
        if job == call.job or job in call.ids or payload in call.payloads:
            yield call.invoked_at, f"{call.process} calls {call.verb}"
            if call.answered_at is not None:
                answer = call.error or (call.answer if call.answer is not None else call.states)
                yield call.answered_at, f"{call.process}: {call.verb} is {call.outcome}: {answer}"
    for start in history.starts:
        if start.job == job:
            yield start.at, f"{start.process} starts token {start.token}"
            if start.ended_at is not None:
                yield start.ended_at, f"{start.process}: token {start.token}: {start.ending}"
    for step in steps:
        if step.job == job:
            yield (
                step.at,
                f"{step.who or 'somebody'} writes (seq={step.seq}): {_change(step, zero)}",
            )


def _change(step: Step, zero: int) -> str:
    if step.after is None:
        return "removed"
    if step.before is None:
        return f"inserted, {_fields(step.after, zero)}"
    outcome = "" if step.outcome is None else f" ({step.outcome})"
    changed = [
        f"{name} {_value(name, was, zero)} -> {_value(name, now, zero)}"
        for name in step.after.__slots__
        if (was := getattr(step.before, name)) != (now := getattr(step.after, name))
    ]
    return f"{', '.join(changed) or 'nothing changed'}{outcome}"


def _fields(thing: Any, zero: int = 0) -> str:
    """Those that say something."""
    return ", ".join(
        f"{field.name} {_value(field.name, value, zero)}"
        for field in dataclasses.fields(thing)
        if (value := getattr(thing, field.name)) != field.default and field.name != "number"
    )


def _value(name: str, value: object, zero: int) -> str:
    """An instant by the same clock as the story; it is stored in microseconds since 1970."""
    is_instant = name.endswith(("_at", "_until")) or name == "deadline"
    if zero and is_instant and isinstance(value, int):
        return f"{round((value * 1000 - zero) / 1e9, 6) + 0.0:.6f}"  # not -0.0
    return repr(value)


def _cut(thing: object, width: int) -> str:
    text = str(thing)
    return text if len(text) <= width else f"{text[: width - 4]} ..."


def coverage(counts: Counter[str], runs: int) -> Iterator[str]:
    """How often each rare thing happened, the rarest first; and what should have, and has not."""
    yield (
        "how often each rare way was gone, the rarest first (0 is no mistake; one that so many runs"
        " should have gone is named below):"
    )
    for name in sorted({*counts, *NAMES}, key=lambda name: (counts[name], name)):
        yield f"{counts[name]:9,}  {name}"
    if never := missing(counts, runs):
        yield f"never happened, and should have in {runs:,} runs: {', '.join(never)}"
