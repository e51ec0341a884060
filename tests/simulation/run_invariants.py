"""Promises about the whole: I9 answers are true, I14 nobody is left in a transaction, I15 nothing
fails by itself, I16 everything ends, I17 the file is sound, I18 nothing is told."""

from __future__ import annotations

import logging
import re
from typing import Final

from .evidence import FINAL, Call, Image
from .timeline import Found, Timeline, is_retry


def answers_are_true(timeline: Timeline) -> Found:
    """I9: what `cancel`, `retry` and the reading calls said was so at some moment of the call; and
    a running job whose cancellation was requested ends cancelled."""
    for call in timeline.evidence.history.calls:
        if call.outcome == "unknown":
            continue
        if call.verb == "cancel":
            yield from _cancel_is_true(timeline, call)
        elif call.verb == "retry":
            yield from _retry_is_true(timeline, call)
        elif call.verb in ("get", "find", "wait_finished"):
            yield from _reading_is_true(timeline, call)
    for (job, token), claim in timeline.claims.items():
        end = claim.end
        if end is None or end.before is None or not end.before.cancel_requested:
            continue
        if end.after is None or end.after.state != "cancelled":
            yield job, f"was to be cancelled under claim {token}: {end}"


def _images(timeline: Timeline, call: Call) -> list[Image | None]:
    if call.job is None:
        return []
    return list(timeline.images(call.job, call.invoked_at, call.answered_at))


def _cancel_is_true(timeline: Timeline, call: Call) -> Found:
    images = _images(timeline, call)
    if call.outcome == "fail":
        if call.error == "JobNotFound" and None not in images:
            yield call.job, "cancel did not find it, and it was there"
    elif call.answer:
        steps = timeline.between(call.job or 0, call.invoked_at, call.answered_at)
        is_done = any(step.after and step.after.state == "cancelled" for step in steps)
        if not is_done and not any(
            image and image.state == "running" and image.cancel_requested for image in images
        ):
            yield call.job, f"cancel said True and nothing came of it: {images}"
    elif not any(image and image.is_final for image in images):
        yield call.job, f"cancel said that it had ended: {images}"


def _retry_is_true(timeline: Timeline, call: Call) -> Found:
    assert call.job is not None
    steps = timeline.between(call.job, call.invoked_at, call.answered_at)
    has_new_life = any(is_retry(step) and step.who in (None, call.process) for step in steps)
    images = _images(timeline, call)
    if call.outcome == "ok":
        if not has_new_life:
            yield call.job, f"retry succeeded without a new life: {images}"
    elif call.error == "JobNotFound":
        if None not in images:
            yield call.job, "retry did not find it, and it was there"
    elif call.error == "StateError":
        may = ("failed", "dead", "cancelled")
        if all(image and image.state in may and image.key is None for image in images):
            yield call.job, f"retry was refused without a reason: {images}"


def _reading_is_true(timeline: Timeline, call: Call) -> Found:
    if call.outcome == "fail":
        if call.error == "JobNotFound" and None not in _images(timeline, call):
            yield call.job, f"{call.verb} did not find it, and it was there"
        return
    if call.job is not None and call.ids != (call.job,):
        yield call.job, f"{call.verb} gave the jobs {call.ids}"
    if call.verb == "wait_finished" and not FINAL.issuperset(call.states):
        yield call.job, f"wait_finished did not wait: {call.states}"
    for job, state in zip(call.ids, call.states, strict=True):
        images = list(timeline.images(job, call.invoked_at, call.answered_at))
        if not any(image and image.state == state for image in images):
            yield job, f"{call.verb} said {state}: {images}"


def nobody_is_left_in_a_transaction(timeline: Timeline) -> Found:
    """I14: at rest another connection gets the write lock at once."""
    rest = timeline.evidence.rest
    if rest is not None and not rest.can_write:
        yield None, "at rest somebody still holds the write lock"


_BY_HANDLERS: Final = re.compile(
    "raised|is dead after|is not valid|does not decode|cannot be cancelled|cannot be looked at"
)


def nothing_fails_by_itself(timeline: Timeline) -> Found:
    """I15: where nothing was made to go wrong, nothing is warned of but what handlers did, and
    no call is refused by the store."""
    history = timeline.evidence.history
    if history.faults or any(life.killed_at is not None for life in history.lives):
        return
    for line in history.logs:
        if line.level >= logging.WARNING and not _BY_HANDLERS.search(line.text):
            yield None, f"was logged: {line.text}"
    for call in history.calls:
        if call.error in ("StoreBusy", "StoreError"):
            yield call.job, f"{call.verb} was refused by the store"


def everything_ends(timeline: Timeline) -> Found:
    """I16: after the healing all jobs have ended in time, all workers are free, and the runners
    see no trouble."""
    rest, settle_by = timeline.evidence.rest, timeline.evidence.settle_by
    if rest is None:
        return
    for job, state in rest.states.items():
        if state in ("queued", "running"):
            yield job, f"is {state} when all should have ended"
    if settle_by is not None:
        for job, steps in timeline.steps.items():
            if steps[-1].at > settle_by:
                yield job, f"ended only at {steps[-1].at}, {steps[-1].at - settle_by} ns too late"
    if rest.running:
        yield None, f"{rest.running} handlers are still under way"
    if rest.trouble is not None:
        yield None, f"a runner still sees trouble: {rest.trouble}"


def the_file_is_sound(timeline: Timeline) -> Found:
    """I17: integrity_check finds nothing, and the log is no longer than it may be."""
    rest = timeline.evidence.rest
    if rest is None:
        return
    if rest.integrity != "ok":
        yield None, f"integrity_check: {rest.integrity}"
    if rest.log_bytes > timeline.evidence.max_log:
        yield None, f"the write-ahead log has {rest.log_bytes} bytes"


def nothing_is_told(timeline: Timeline) -> Found:
    """I18: nothing of a payload is in a failure or in the log."""
    canary = timeline.evidence.canary
    if not canary:
        return
    for line in timeline.evidence.history.logs:
        if canary in line.text:
            yield None, f"a payload was logged: {line.text}"
    for step in timeline.evidence.audit.steps:
        after = step.after
        if after is not None and canary in f"{after.failure} {after.failure_type}":
            yield step.job, f"a payload is in its failure: {after.failure} ({after.failure_type})"
