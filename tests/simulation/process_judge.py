"""What only real processes can do wrong, judged beside the invariants of all runs.

Who made a change is not in their audit, as no connection but the library's own takes part in it;
so it is asked of the owners. And a process has an exit code, a log, and may fail to end.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator, Sequence
from typing import Final

from .child import INTERRUPTED
from .evidence import Evidence, Step
from .fleet import Process
from .invariants import Violation, check_all
from .timeline import Found, Timeline

LEFT_IN_ORDER: Final = 0

TICK: Final = 2_000_000
"""Nanoseconds: the audit's clock has milliseconds."""


def judge(evidence: Evidence, processes: Sequence[Process]) -> list[Violation]:
    """All that is wrong."""
    timeline = Timeline(evidence)
    return [
        *check_all(evidence),
        *(Violation("I5", job, text) for job, text in handlers_keep_their_claims(timeline)),
        *(Violation("exit", None, text) for text in exits_are_as_documented(processes)),
        *(Violation("log", None, text) for text in nothing_unforeseen_is_logged(evidence)),
    ]


def handlers_keep_their_claims(timeline: Timeline) -> Found:
    """I5: a claim ends under its handler only when its lease is over, or its owner dead.

    Neither depends on when a change was committed, so the clocks are taken at their word. (Who
    ended it is not known; where that is, `claim_invariants` ask whether it was another's.)
    """
    late = TICK - timeline.evidence.resolution
    for (job, token), claim in timeline.claims.items():
        end, start = claim.end, timeline.start_of(job, token)
        if end is None or end.before is None or end.before.lease_until is None:
            continue
        is_own = start is not None and start.ended_at is not None and start.ended_at < end.at + TICK
        if is_own or end.outcome is None or timeline.is_dead(claim.holder, end.at + late):
            continue
        decided_at = _decided_by(timeline, end)
        if decided_at is not None and decided_at < end.before.lease_until:
            yield job, f"claim {token} of {claim.holder} was ended under its handler: {end}"


def _decided_by(timeline: Timeline, end: Step) -> int | None:
    """The latest instant it can have been decided at, by the wall clock all of them share."""
    later = [step for step in timeline.steps[end.job] if step.seq > end.seq]
    # A lost row is queued and taken in one transaction.
    images = [end.after, later[0].after if later and later[0].is_claim else None]
    instants = [
        instant
        for image in images
        if image is not None
        for instant in (image.finished_at, image.started_at)
        if instant is not None
    ]
    return max(instants, default=None)


def exits_are_as_documented(processes: Sequence[Process]) -> Iterator[str]:
    """A process that was asked to stop ends, with 0; with 130 where Ctrl-C is left to Python.

    Before it listens to signals, and after its runner is gone, they do what they do by default.
    """
    for process in processes:
        allowed = _allowed(process)
        if process.code not in allowed:
            wanted = " or ".join(map(str, sorted(allowed)))
            yield (
                f"{process.name} ({process.settings.mode}) ended with {process.code}, not {wanted};"
                f" it was sent {[number.name for number in process.signalled]}"
            )


def _allowed(process: Process) -> set[int]:
    if process.killed_at is not None or process.killed_itself:
        return {-signal.SIGKILL, LEFT_IN_ORDER, *(_by_default(process))}
    if not process.signalled:
        return {LEFT_IN_ORDER} if process.settings.until_idle else set()
    if process.settings.mode == "bare":
        return {INTERRUPTED}
    since, asked_at = process.listens_since, process.signalled_at
    if since is None or asked_at is None or asked_at < since or len(process.signalled) > 1:
        return {LEFT_IN_ORDER, *_by_default(process)}
    return {LEFT_IN_ORDER}


def _by_default(process: Process) -> set[int]:
    codes = {signal.SIGTERM: {-signal.SIGTERM}, signal.SIGINT: {INTERRUPTED}}
    if process.settings.mode == "command":
        codes[signal.SIGINT].add(1)  # click's
    return {code for number in process.signalled for code in codes[number]}


def nothing_unforeseen_is_logged(evidence: Evidence) -> Iterator[str]:
    """No handler here raises anything that is logged with a traceback, but for the `LeaseLost`
    of a publication that comes too late; and Python tells of a Ctrl-C that it swallows."""
    for line in evidence.history.logs:
        if "Traceback" in line.text and not _FORESEEN.search(line.text):
            yield line.text


_FORESEEN: Final = re.compile(
    r"^trio_jobs\.LeaseLost: |^Exception ignored in.*^KeyboardInterrupt", re.MULTILINE | re.DOTALL
)
