"""Promises about the whole: I9 answers are true, I14 nobody is left in a transaction, I15 nothing
fails by itself, I16 everything ends in time, I17 the file is sound, I18 nothing is told, I19 nobody
spins."""

from __future__ import annotations

import logging
import re
from collections import Counter
from typing import Final

from .evidence import FINAL, Call, Image, Step
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
        elif call.verb in ("get", "find", "wait_finished", "history", "counts"):
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
    steps = list(timeline.between(call.job or 0, call.invoked_at, call.answered_at))
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
    if call.verb == "history":
        yield from _history_is_true(timeline, call)
        return
    if call.verb == "counts":
        yield from _counts_are_true(timeline, call)
        return
    if call.verb == "find":
        yield from _found_are_all(timeline, call)
    if call.job is not None and call.ids != (call.job,):
        yield call.job, f"{call.verb} gave the jobs {call.ids}"
    if call.verb == "wait_finished" and not FINAL.issuperset(call.states):
        yield call.job, f"wait_finished did not wait: {call.states}"
    if len(call.ids) != len(call.states):
        yield call.job, f"{call.verb} gave the jobs {call.ids} in the states {call.states}"
    since = call.invoked_at
    if call.verb == "wait_finished":
        # The news of an end may have been under way when it was asked for, and the job be gone.
        since -= timeline.news_takes.get(call.process, 0)
    for job, state in zip(call.ids, call.states, strict=False):
        images = list(timeline.images(job, since, call.answered_at))
        if not any(image and image.state == state for image in images):
            yield job, f"{call.verb} said {state}: {images}"


def _found_are_all(timeline: Timeline, call: Call) -> Found:
    """Each job that is known and was there all the time, by id."""
    if list(call.ids) != sorted(set(call.ids)):
        yield None, f"find gave the jobs {call.ids}"
    for job in timeline.steps.keys() - set(call.ids):
        images = timeline.images(job, call.invoked_at, call.answered_at)
        if timeline.was_known(job, call.invoked_at) and None not in images:
            yield job, f"find did not find it, and it was there: {call.ids}"


def _history_is_true(timeline: Timeline, call: Call) -> Found:
    """Each start that had an end without success, the oldest first. (Nobody here has more than
    the hundred that are kept.)"""
    if call.job is None or call.past is None:
        return
    late = timeline.evidence.resolution
    asked, answered = call.invoked_at - late, (call.answered_at or call.invoked_at) + late
    ends = [
        (step.at, (step.before.claims, step.outcome))
        for step in timeline.steps.get(call.job, ())
        if step.before is not None and step.outcome is not None
    ]
    if all(image is None for image in _images(timeline, call)):
        yield call.job, "history found it, and it was not there"
    told = list(call.past)
    if told != sorted(told):
        yield call.job, f"its history is in disorder: {told}"
    for at, end in ends:
        if at < asked and end not in told:
            yield call.job, f"its history lacks the start {end}: {told}"
    possible = [end for at, end in ends if at <= answered]
    for start in told:
        if start not in possible:
            yield call.job, f"its history has the start {start}, which did not end so"


def _counts_are_true(timeline: Timeline, call: Call) -> Found:
    """No fewer than were in that state all the time, no more than ever were in it."""
    least, most = Counter[str](), Counter[str]()
    for job in timeline.steps:
        images = list(timeline.images(job, call.invoked_at, call.answered_at))
        states = {None if image is None else image.state for image in images}
        for state in states - {None}:
            most[state or ""] += 1
            least[state or ""] += len(states) == 1 and timeline.was_known(job, call.invoked_at)
    told = call.counts or {}
    for state in sorted({*told, *most}):
        if not least[state] <= told.get(state, 0) <= most[state]:
            yield None, f"counts said that {told.get(state, 0)} were {state}: {least[state]} were"


_REFUSALS: Final = frozenset(
    {"StoreBusy", "StoreError", "StateError", "JobNotFound", "ClosedResourceError"}
)


def refusals_are_as_documented(timeline: Timeline) -> Found:
    """I9: a call is refused by an exception that users know of."""
    for call in timeline.evidence.history.calls:
        if call.error is not None and call.error.isidentifier() and call.error not in _REFUSALS:
            yield call.job, f"{call.verb} was refused by {call.error}"


def nobody_is_left_in_a_transaction(timeline: Timeline) -> Found:
    """I14: at rest another connection gets the write lock at once."""
    rest = timeline.evidence.rest
    if rest is not None and not rest.can_write:
        yield None, "at rest somebody still holds the write lock"


_BY_HANDLERS: Final = re.compile(
    "raised|is dead after|is not valid|does not decode|cannot be cancelled|cannot be looked at"
)


def nothing_fails_by_itself(timeline: Timeline) -> Found:
    """I15: where nothing was made to go wrong, nothing is warned of but what handlers did; and no
    call is refused by the store while nothing goes wrong."""
    history = timeline.evidence.history
    for call in history.calls:
        if call.verb in _APPLICATIONS_OWN:
            continue
        # A lock may be held by an application's transaction, which is none of our faults.
        if call.error == "StoreError" and not _was_hindered(timeline, call):
            yield call.job, f"{call.verb} was refused by the store"
    if not timeline.nothing_went_wrong():
        return
    for line in history.logs:
        if line.level >= logging.WARNING and not _BY_HANDLERS.search(line.text):
            yield None, f"was logged: {line.text}"
    for call in history.calls:
        if call.error == "StoreBusy":
            yield call.job, f"{call.verb} was refused by the store"


_APPLICATIONS_OWN: Final = frozenset({"enqueue_on", "prune"})
"""What is done in its own transactions, which it may roll back."""


def _was_hindered(timeline: Timeline, call: Call) -> bool:
    # On a real machine anything may happen that nobody tells of.
    return timeline.evidence.resolution > 0 or timeline.was_disturbed(
        call.process, call.invoked_at, call.answered_at or call.invoked_at
    )


def everything_ends(timeline: Timeline) -> Found:
    """I16: after the healing all jobs have ended in time, all workers are free, and the runners
    see no trouble."""
    rest, settle_by = timeline.evidence.rest, timeline.evidence.settle_by
    if rest is None:
        return
    for job, state in rest.states.items():
        if state in ("queued", "running"):
            yield job, f"is {state} when all should have ended"
    calm = timeline.evidence.calm_since
    if settle_by is not None:
        for job, steps in timeline.steps.items():
            is_new = calm is not None and steps[0].at >= calm  # `nothing_is_late` is about those
            if steps[-1].at > settle_by and not is_new:
                yield job, f"ended only at {steps[-1].at}, {steps[-1].at - settle_by} ns too late"
    if rest.running:
        yield None, f"{rest.running} handlers are still under way"
    if rest.trouble is not None:
        yield None, f"a runner still sees trouble: {rest.trouble}"


def nothing_is_late(timeline: Timeline) -> Found:
    """I16: where nothing goes wrong and a worker is free, a job starts soon after it is due, and
    the handler of one that is to be cancelled is stopped soon, whichever process asked for it;
    and what a process had that is known to be dead is taken up."""
    evidence = timeline.evidence
    if evidence.calm_since is None:
        return
    for job, steps in timeline.steps.items():
        first = steps[0]
        if first.at < evidence.calm_since or first.after is None:
            continue
        wait = max(0, first.after.run_at - first.after.enqueued_at) * 1000
        taken = next((step for step in steps if step.is_claim), None)
        if taken is None or taken.at > first.at + wait + evidence.prompt:
            yield job, f"was enqueued at {first.at}, and is claimed too late: {taken}"
    for life in evidence.history.lives:
        if life.killed_at is None or life.killed_at < evidence.calm_since or life.identity is None:
            continue
        for (job, token), claim in timeline.claims.items():
            by = life.killed_at + evidence.prompt
            if claim.holder == life.process and (claim.end is None or claim.end.at > by):
                yield job, f"{life.process} died with its claim {token}: {claim.end}"
    for (job, token), claim in timeline.claims.items():
        asked = next((step for step in claim.changes if _is_cancel(step)), None)
        if asked is None or asked.at < evidence.calm_since:
            continue
        if claim.end is None or claim.end.at > asked.at + evidence.prompt:
            yield job, f"was to be cancelled under {token} from {asked.at} on: {claim.end}"


def _is_cancel(step: Step) -> bool:
    return bool(
        step.before
        and step.after
        and step.after.cancel_requested
        and not step.before.cancel_requested
    )


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
    """I18: nothing of a payload is in a failure or in the log, nor of the text of an exception in
    a failure; a failure is that of the job, and that of each of its past starts."""
    canary, raised = timeline.evidence.canary, timeline.evidence.raised
    for line in timeline.evidence.history.logs:
        if canary and canary in line.text:
            yield None, f"a payload was logged: {line.text}"
    for step in timeline.evidence.audit.steps:
        after = step.after
        told = step.past_failure
        if after is not None:
            told = f"{after.failure} {after.failure_type} {told}"
        for word, what in ((canary, "a payload"), (raised, "the text of an exception")):
            if word and word in told:
                yield step.job, f"{what} is in its failure: {told}"


def nobody_spins(timeline: Timeline) -> Found:
    """I19: a run comes to an end with the work that others need for theirs."""
    if timeline.evidence.endless:
        yield None, timeline.evidence.endless
