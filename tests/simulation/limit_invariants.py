"""Promises about what stops a handler: I13 they are stopped at their timeouts and deadlines, and
when another has their row, and start again after a backoff; I3 what was refused for good is not
repeated, and nothing else is refused.

A process that was disturbed in any way while the handler ran is not asked.
"""

from __future__ import annotations

from typing import Final

from .evidence import Start
from .timeline import Claim, Found, Timeline

_MICROSECOND: Final = 1_000
_SECOND: Final = 1_000_000_000
_GRACE: Final = _SECOND
"""Until a cancelled handler has left a call that is being written."""


def handlers_are_stopped_at_their_limits(timeline: Timeline) -> Found:
    """I13: none runs for longer than its timeout, nor past the deadline of its job."""
    for (job, token), claim in timeline.claims.items():
        start = timeline.start_of(job, token)
        if start is None or start.ended_at is None or start.is_stubborn:
            continue
        limit = _limit(timeline, claim, start)
        if limit is None or start.ended_at <= limit + _GRACE:
            continue
        if not timeline.was_disturbed(start.process, start.at, start.ended_at):
            yield job, f"its start {token} ended at {start.ended_at}, its limit was {limit}"


def handlers_are_stopped_without_their_row(timeline: Timeline) -> Found:
    """I13: none runs on after its claim was ended, for longer than its process takes to ask for a
    renewal, if nothing disturbs that so long."""
    if timeline.evidence.resolution:
        return  # a real machine may keep any process from running, and nobody tells
    for (job, token), claim in timeline.claims.items():
        start, end, image = timeline.start_of(job, token), claim.end, claim.step.after
        if start is None or start.is_stubborn or start.wall is None or end is None:
            continue
        if image is None or image.lease_until is None or image.started_at is None:
            continue
        ended_at = start.ended_at or timeline.dead_since.get(start.process)
        if ended_at is None or ended_at <= end.at:
            continue
        # It asks after a third of the lease; the answer may take its time.
        longest = (image.lease_until - image.started_at) * _MICROSECOND // 2 + _GRACE
        if timeline.longest_calm(start.process, end.at, ended_at) > longest:
            yield job, f"its start {token} ran on until {ended_at}, its claim had ended: {end}"


def timeouts_are_what_they_say(timeline: Timeline) -> Found:
    """I13: no attempt is called timed out before its timeout."""
    for (job, token), claim in timeline.claims.items():
        start, end = timeline.start_of(job, token), claim.end
        if start is None or start.ended_at is None or end is None or end.outcome != "timed out":
            continue
        timeout = _timeout(timeline, claim)
        is_early = timeout is not None and start.ended_at < start.at + timeout
        if is_early and not timeline.was_disturbed(start.process, start.at, start.ended_at):
            yield job, f"its start {token} timed out after {start.ended_at - start.at} ns"


def failures_wait_for_their_backoff(timeline: Timeline) -> Found:
    """I13: an attempt that failed is followed by another one no sooner than the kind says."""
    for (job, token), claim in timeline.claims.items():
        start, end = timeline.start_of(job, token), claim.end
        if start is None or start.wall is None or end is None or end.after is None:
            continue
        rules = timeline.evidence.rules.get(end.after.kind)
        if rules is None or rules.backoff is None or end.after.state != "queued":
            continue
        earliest = start.wall + round(rules.backoff * 1_000_000)
        has_failed = end.outcome in ("failed", "timed out")
        if has_failed and end.after.run_at < earliest and not _stepped(timeline, start.process):
            yield job, f"failed under {token}, and is due again at {end.after.run_at}"


def refusals_are_the_handlers_own(timeline: Timeline) -> Found:
    """I3: a job whose handler or result is refused ends failed, and no other does."""
    for (job, token), claim in timeline.claims.items():
        start, end = timeline.start_of(job, token), claim.end
        if start is None or start.is_refusal is None or start.ended_at is None or end is None:
            continue
        if end.after is None or end.outcome != "failed":
            continue
        is_refused = end.after.state == "failed"
        if is_refused is not start.is_refusal:
            yield job, f"is {end.after.state} after {start.ending} under {token}"


def _limit(timeline: Timeline, claim: Claim, start: Start) -> int | None:
    limits = []
    timeout = _timeout(timeline, claim)
    if timeout is not None:
        limits.append(start.at + timeout)
    image = claim.step.after
    if image is not None and image.deadline is not None and start.wall is not None:
        limits.append(start.at + (image.deadline - start.wall) * _MICROSECOND)
    return min(limits, default=None)


def _timeout(timeline: Timeline, claim: Claim) -> int | None:
    """Nanoseconds."""
    rules = None
    if claim.step.after is not None:
        rules = timeline.evidence.rules.get(claim.step.after.kind)
    return None if rules is None or rules.timeout is None else round(rules.timeout * _SECOND)


def _stepped(timeline: Timeline, process: str) -> bool:
    return any(
        fault.what == "clock step" and fault.process in (None, process)
        for fault in timeline.evidence.history.faults
    )
