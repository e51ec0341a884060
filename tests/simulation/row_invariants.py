"""Promises about rows: I1 nothing is lost, I2 an end is an end, and what was asked for stays,
I3 the numbers, I11 the keys."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Final

from .evidence import Call, Image, Step
from .timeline import Found, Timeline, is_retry


def nothing_is_lost(timeline: Timeline) -> Found:
    """I1: every acknowledged enqueue has its row, an unknown one has one or none (of several all
    or none), a refused one has none; there are no other rows, and only ended ones are removed."""
    expected: set[str] = set()
    for call in timeline.evidence.history.calls:
        expected.update(call.payloads)
        inserted = [timeline.inserts.get(payload, []) for payload in call.payloads]
        if any(len(steps) > 1 for steps in inserted):
            yield None, f"{call.verb} of {call.payloads} inserted one of them twice"
        ids = [steps[0].job if steps else None for steps in inserted]
        if call.outcome == "fail" and any(ids):
            yield next(filter(None, ids)), f"{call.verb} was refused ({call.error}) and inserted"
        elif call.outcome == "unknown" and any(ids) and not all(ids) and not any(call.keys):
            yield next(filter(None, ids)), f"{call.verb} of {call.payloads} was done by half"
        elif call.outcome == "ok" and call.payloads:
            yield from _is_there(timeline, call, ids)
    for payload, steps in timeline.inserts.items():
        if payload not in expected:
            yield steps[0].job, f"nobody asked for its payload {payload}"
    rest = timeline.evidence.rest
    for job, steps in timeline.steps.items():
        for step in steps:
            if step.after is None and (step.before is None or not step.before.is_final):
                yield job, "was removed before it had ended"
        last = steps[-1].after
        if rest is not None and rest.states.get(job) != (last and last.state):
            yield job, f"is {rest.states.get(job)} in the end, its last change says {last}"
    for job in set() if rest is None else rest.states.keys() - timeline.steps.keys():
        yield job, "was never inserted"


def _is_there(timeline: Timeline, call: Call, ids: list[int | None]) -> Found:
    if len(call.ids) != len(ids):
        yield None, f"{call.verb} of {call.payloads} returned the jobs {call.ids}"
        return
    keys = call.keys or (None,) * len(ids)
    for payload, key, returned, inserted in zip(call.payloads, keys, call.ids, ids, strict=True):
        if inserted == returned:
            continue
        holders = timeline.images(returned, call.invoked_at, call.answered_at)
        if key is None:
            yield returned, f"{call.verb} of {payload} was acknowledged, and inserted {inserted}"
        elif inserted is not None or not any(
            image is not None and (image.kind, image.key) == (call.kind, key) and not image.is_final
            for image in holders
        ):
            yield (
                returned,
                f"{call.verb} with key {key!r} gave it for {payload}, it had not the key",
            )


_MOVES: Final = {
    None: {"queued"},
    "queued": {"queued", "running", "cancelled", "failed"},
    "running": {"running", "queued", "succeeded", "failed", "dead", "cancelled"},
    "failed": {"queued"},
    "dead": {"queued"},
    "cancelled": {"queued"},
}


def an_end_is_an_end(timeline: Timeline) -> Found:
    """I2: one final state a life; what has ended never changes but by a retry by hand, which
    somebody asked for."""
    retries = [call for call in timeline.evidence.history.calls if call.verb == "retry"]
    for job, steps in timeline.steps.items():
        for step in steps:
            before, after = step.before, step.after
            if after is None:
                continue
            if after.state not in _MOVES.get(None if before is None else before.state, ()):
                yield job, f"went from {before and before.state} to {after.state}: {step}"
            elif is_retry(step) and not _is_asked_for(timeline, step, retries):
                yield job, f"has a new life that nobody asked for: {step}"


def _is_asked_for(timeline: Timeline, step: Step, calls: Sequence[Call]) -> bool:
    """One of these calls may have made it."""
    resolution = timeline.evidence.resolution
    return any(
        call.job == step.job
        and call.outcome != "fail"
        and call.invoked_at - resolution <= step.at
        and (call.answered_at is None or step.at <= call.answered_at + resolution)
        for call in calls
    )


def cancels_are_asked_for(timeline: Timeline) -> Found:
    """I2: nothing is cancelled, or to be cancelled, but what somebody asked for."""
    cancels = [call for call in timeline.evidence.history.calls if call.verb == "cancel"]
    for job, steps in timeline.steps.items():
        for step in steps:
            before, after = step.before, step.after
            if after is None or (before is not None and before.cancel_requested):
                continue
            is_new = after.cancel_requested or after.state == "cancelled"
            if is_new and not _is_asked_for(timeline, step, cancels):
                yield job, f"is cancelled, and nobody asked for it: {step}"


_FIXED: Final = ("kind", "key", "priority", "enqueued_at", "deadline")


def what_was_asked_for_stays(timeline: Timeline) -> Found:
    """I2: what a job was enqueued with never changes, and when it is due only by an end that puts
    it off, or by a retry by hand: not when it is claimed, interrupted or lost."""
    for job, steps in timeline.steps.items():
        for step in steps:
            before, after = step.before, step.after
            if before is None or after is None:
                continue
            for name in _FIXED:
                if getattr(before, name) != getattr(after, name):
                    yield job, f"its {name} changed: {step}"
            is_put_off = step.ends_claim and step.outcome in ("failed", "timed out", "retry later")
            if before.run_at != after.run_at and not is_put_off and not is_retry(step):
                yield job, f"is due at another time: {step}"


def numbers_are_right(timeline: Timeline) -> Found:
    """I3: `claims` goes up by one at each claim, and else never changes; `attempt` is the number
    of counted claims of this life, and no more than the kind allows; `interruptions` is how many
    starts were interrupted one after the other."""
    for job, steps in timeline.steps.items():
        for step in steps:
            before, after = step.before, step.after
            if after is None:
                continue
            was = Image("queued", after.kind) if before is None else before
            if after.claims != was.claims + step.is_claim:
                yield job, f"claims went from {was.claims} to {after.claims}: {step}"
            allowed = _attempts(step, was)
            if after.attempt not in allowed:
                yield job, f"attempt went from {was.attempt} to {after.attempt}: {step}"
            if after.interruptions != _interruptions(step, was):
                yield job, f"was interrupted {was.interruptions}, {after.interruptions}: {step}"
            rules = timeline.evidence.rules.get(after.kind)
            if step.is_claim and rules is not None and after.attempt > rules.attempts:
                yield job, f"is at attempt {after.attempt} of {rules.attempts}: {step}"


_MAX_INTERRUPTIONS: Final = 10


def _attempts(step: Step, was: Image) -> set[int]:
    """What the number may be after that step."""
    if step.is_claim:
        return {was.attempt + 1}
    if is_retry(step):
        return {0}
    if not step.ends_claim or step.after is None:
        return {was.attempt}
    if step.outcome is None and step.after.state in ("queued", "cancelled"):
        return {was.attempt - 1}  # handed back
    if step.after.state == "queued" and step.outcome == "retry later":
        return {was.attempt - 1}
    if step.after.state == "queued" and step.outcome == "interrupted":
        return {was.attempt - (was.interruptions < _MAX_INTERRUPTIONS)}
    return {was.attempt}


def _interruptions(step: Step, was: Image) -> int:
    if is_retry(step):
        return 0
    if not step.ends_claim or step.outcome is None or not _went_back(step):
        return was.interruptions
    return was.interruptions + 1 if step.outcome == "interrupted" else 0


def _went_back(step: Step) -> bool:
    return step.after is not None and step.after.state == "queued"


def ends_are_by_the_rules(timeline: Timeline) -> Found:
    """I3: a failure or a loss uses up the attempts before the job is dead, and not one more; what
    must not be interrupted is not started again."""
    for job, steps in timeline.steps.items():
        for step in steps:
            before, after = step.before, step.after
            if before is None or after is None or not step.ends_claim:
                continue
            rules = timeline.evidence.rules.get(after.kind)
            if rules is None or step.outcome in (None, "cancelled", "deadline"):
                continue
            is_last = before.attempt >= rules.attempts
            is_interrupted = step.outcome in ("lost", "interrupted")
            if is_interrupted and (rules.on_interrupt == "fail") != (after.state == "failed"):
                yield job, f"on_interrupt is {rules.on_interrupt}: {step}"
            if after.state == "dead" and not is_last:
                yield job, f"is dead, and attempts are left: {step}"
            counts = step.outcome in ("failed", "timed out", "lost")
            if after.state == "queued" and counts and is_last:
                yield job, f"is queued, and no attempt is left: {step}"


def a_key_has_one_live_job(timeline: Timeline) -> Found:
    """I11: at no moment have two queued or running jobs of a kind the same key."""
    live: defaultdict[tuple[str, str], set[int]] = defaultdict(set)
    for step in timeline.evidence.audit.steps:
        for image in (step.before, step.after):
            if image is None or image.key is None:
                continue
            jobs = live[image.kind, image.key]
            if image is step.after and not image.is_final:
                jobs.add(step.job)
                if len(jobs) > 1:
                    yield step.job, f"jobs {sorted(jobs)} have the key {image.key!r}: {step}"
            else:
                jobs.discard(step.job)
