"""Promises about time: I5 attempts do not overlap, I10 a stop is in order, I13 nothing starts too
early or too late, I16 an end that was refused is written again.

Some of them can only be kept by a process that runs, by clocks that are right. Where something was
made to go wrong with that at the time, they are not asked for.
"""

from __future__ import annotations

from typing import Final

from .evidence import Step, Stop
from .timeline import CLOCKS, Claim, Found, Timeline

_SECOND: Final = 1_000_000_000
_FINAL_WRITES: Final = 2 * _SECOND
_LONGEST_REPEAT: Final = 3 * _SECOND
"""A refused end is written again every two seconds."""
_PAUSES: Final = frozenset(
    {"freeze", "blocked loop", "suspended machine", "delay", "wait for a lock"}
)
"""The faults that keep a process from running."""


def attempts_do_not_overlap(timeline: Timeline) -> Found:
    """I5: the handler of a claim has ended before there is another claim, unless it cannot be
    cancelled, its process does not run, or clocks are wrong; and before its own runner claims the
    row again, whatever else is so."""
    if timeline.evidence.resolution:
        return  # a real machine may keep any process from running, and nobody tells
    alone = {life.process for life in timeline.evidence.history.lives if life.runners == 1}
    last: dict[int, Claim] = {}
    for (job, token), claim in timeline.claims.items():
        before, last[job] = last.get(job), claim
        start = None if before is None else timeline.start_of(job, before.token)
        at = claim.step.at
        if before is None or start is None or timeline.is_dead(start.process, at):
            continue
        is_own = before.holder == claim.holder and claim.holder in alone
        if not is_own and (start.is_stubborn or not _ran_in_time(timeline, before, claim)):
            continue
        if start.ended_at is None or start.ended_at > at + timeline.evidence.resolution:
            yield job, f"was claimed under {token} while its start {before.token} was under way"


def _ran_in_time(timeline: Timeline, before: Claim, claim: Claim) -> bool:
    """Both processes did from when the first handler had to be stopped, and by right clocks; so
    had whoever took the row for lost."""
    since = _has_to_stop(before)
    ended_by = None if before.end is None else before.end.who
    return not any(
        fault.process in (None, before.holder, claim.holder, ended_by)
        and fault.at <= claim.step.at
        and (
            fault.what in CLOCKS
            or (
                fault.what in _PAUSES
                and (fault.at if fault.until is None else fault.until) >= since
            )
        )
        for fault in timeline.evidence.history.faults
    )


def _has_to_stop(claim: Claim) -> int:
    """A sixth of the lease before that is over; from its beginning, where that is not known."""
    over, image = _lease_is_over(claim), claim.step.after
    if over is None or image is None or image.lease_until is None or image.started_at is None:
        return claim.step.at
    # Its length is that of the claim: a renewal may wait to be written, with less of it left.
    return over - (image.lease_until - image.started_at) * 1000 // 6


def a_stop_leaves_nothing(timeline: Timeline) -> Found:
    """I10: after an orderly stop no row runs in the name of the process. What its handlers
    returned is stored by then (I4 and I6 refute other ends). In a hurried one nothing starts."""
    for stop in timeline.evidence.history.stops:
        if stop.ended_at is None or timeline.was_disturbed(
            stop.process, stop.begun_at, stop.ended_at
        ):
            continue
        if stop.is_hurried:
            yield from _starts_after(timeline, stop)
        for (job, token), claim in timeline.claims.items():
            if claim.holder != stop.process or claim.step.at > stop.ended_at:
                continue
            # A claim whose commit was unknown was never in its hands: its lease has to end.
            start = timeline.start_of(job, token)
            if start is None and timeline.was_disturbed(stop.process, claim.step.at, stop.ended_at):
                continue
            # What could not be written while its lease lasted was given up before the stop; by
            # `run_once`, which raises what the store says, two seconds after its handler.
            over = _lease_is_over(claim)
            if over is not None and over <= stop.begun_at:
                continue
            ended = None if start is None else start.ended_at
            if ended is not None and timeline.was_disturbed(
                stop.process, ended, ended + _FINAL_WRITES
            ):
                continue
            if claim.end is None or claim.end.at > stop.ended_at + timeline.evidence.resolution:
                yield job, f"runs under claim {token} after the orderly stop of {stop.process}"


def _starts_after(timeline: Timeline, stop: Stop) -> Found:
    margin = timeline.evidence.resolution + _SECOND // 100
    for (job, token), starts in timeline.starts.items():
        if starts[0].process == stop.process and starts[0].at > stop.begun_at + margin:
            yield job, f"was started under {token} after the stop of {stop.process} began"


def nothing_starts_too_early_or_late(timeline: Timeline) -> Found:
    """I13: no claim, and no start of a handler, at or after the deadline by that clock; no claim
    before the job is due by a clock that never stepped (what was due when it was enqueued stays
    due, what is lost is due)."""
    for (job, token), claim in timeline.claims.items():
        image = claim.step.after
        if image is None or image.started_at is None:
            continue
        is_early = image.run_at > max(image.started_at, image.enqueued_at)
        # One call of `run_once` goes by the instant it began at, wherever the clock went since.
        if is_early and not claim.takes_up and not timeline.has_wrong_clock(claim.holder):
            yield job, f"was claimed at {image.started_at}, and due at {image.run_at}"
        if image.deadline is None:
            continue
        if image.started_at >= image.deadline:
            yield job, f"was claimed at {image.started_at}, its deadline is {image.deadline}"
        for start in timeline.starts.get((job, token), ()):
            if start.wall is not None and start.wall >= image.deadline:
                yield job, f"was started at {start.wall}, its deadline is {image.deadline}"


def refused_ends_are_written_again(timeline: Timeline) -> Found:
    """I16: what a handler came to is not lost with its claim, if there was time to write it while
    the process ran and the lease lasted."""
    for (job, token), claim in timeline.claims.items():
        start, end = timeline.start_of(job, token), claim.end
        if start is None or start.ended_at is None or end is None or end.outcome != "lost":
            continue
        over = _lease_is_over(claim)
        if over is None or end.who == claim.holder or timeline.is_dead(start.process, over):
            continue
        until = min(over, end.at) - timeline.evidence.resolution
        if timeline.longest_calm(start.process, start.ended_at, until) > _LONGEST_REPEAT:
            yield job, f"claim {token} was lost, though its handler had ended: {start}"


def _lease_is_over(claim: Claim) -> int | None:
    """When it was, by the clock of the holder as it was at the last renewal."""
    step = _renewal(claim)
    if step.wall is None or step.after is None or step.after.lease_until is None:
        return None
    return step.at + (step.after.lease_until - step.wall) * 1000


def _renewal(claim: Claim) -> Step:
    """The last one, or the claim itself. (A request to cancel is made by another clock.)"""
    for step in reversed(claim.changes):
        if step.before and step.after and step.before.lease_until != step.after.lease_until:
            return step
    return claim.step
