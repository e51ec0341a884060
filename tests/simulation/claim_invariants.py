"""Promises about claims and starts: I4 starts are counted, I5 nobody takes what is held, I6 writes
are fenced, I7 results are of their claim, I8 leases are of the running."""

from __future__ import annotations

from collections import defaultdict
from typing import Final

from .evidence import Publication, Start, Step
from .timeline import Claim, Found, Timeline, Token

_PROVEN_AFTER: Final = 999_000_000
"""Nanoseconds: a second, by a clock of microseconds."""


def starts_are_counted(timeline: Timeline) -> Found:
    """I4: every start has its claim, by the same process and before it, and no other start has the
    same; in a life there are no more than attempts + interruptions + RetryLaters."""
    resolution = timeline.evidence.resolution
    for (job, token), starts in timeline.starts.items():
        claim = timeline.claims.get((job, token))
        if claim is None:
            yield job, f"was started under token {token}, of which there is no claim"
            continue
        if len(starts) > 1:
            yield job, f"was started {len(starts)} times under token {token}"
        start = starts[0]
        if claim.holder is not None and start.process != claim.holder:
            yield job, f"claim {token} is of {claim.holder}, the start of {start.process}"
        if start.at < claim.step.at - resolution:
            yield job, f"was started before claim {token}"
        if claim.step.after is not None and start.attempt != claim.step.after.attempt:
            yield job, f"was told attempt {start.attempt}, the claim says {claim.step.after}"
        if claim.end is not None and claim.end.outcome is None and _went(claim.end, "queued"):
            yield job, f"was handed back as never started, and token {token} was started"
    for job in timeline.steps:
        for life in timeline.lives(job):
            yield from _life_is_counted(timeline, job, life)


def _went(step: Step, state: str) -> bool:
    return step.after is not None and step.after.state == state


def _life_is_counted(timeline: Timeline, job: int, life: list[Step]) -> Found:
    claims = [step.after.claims for step in life if step.is_claim and step.after is not None]
    starts = sum(len(timeline.starts.get((job, token), ())) for token in claims)
    free = sum(step.outcome in ("interrupted", "retry later") for step in life if step.ends_claim)
    image = life[0].after or life[0].before
    rules = None if image is None else timeline.evidence.rules.get(image.kind)
    if rules is not None and starts > rules.attempts + free:
        yield job, f"was started {starts} times, {rules.attempts} and {free} for nothing allowed"


def nobody_takes_what_is_held(timeline: Timeline) -> Found:
    """I5: somebody else ends a claim, or takes the row up, only when its lease is over by their
    clock, or when its owner is dead."""
    for (job, token), claim in timeline.claims.items():
        end = claim.end
        if end is None or end.before is None or claim.holder is None or end.who is None:
            continue
        if end.who == claim.holder:
            continue
        if end.outcome not in ("lost", "cancelled", "deadline"):
            yield job, f"{end.who} ended claim {token} of {claim.holder} as its own: {end}"
        if timeline.is_dead(claim.holder, end.at) or timeline.is_owner_dead(end.before, end.at):
            continue
        now, until = _decided_at(timeline, end), end.before.lease_until
        if now is not None and until is not None and now < until:
            yield job, f"claim {token} of {claim.holder} was ended by {end.who} at {now}: {end}"


def lost_rows_are_taken_up_gently(timeline: Timeline) -> Found:
    """I5: of the lost rows that a runner takes up, no more are unproven at a time than one and
    those that are proven (they ended, or ran for a second); one that was lost twice is alone."""
    claims: defaultdict[str | None, list[tuple[int, Claim]]] = defaultdict(list)
    for (job, token), claim in timeline.claims.items():
        # Where the commit of a claim was unknown, the runner never had it in hand. What does not
        # decode has an end without a start, which proves as much as others.
        end = claim.end
        is_ended = end is not None and end.who == claim.holder and end.outcome == "failed"
        if claim.takes_up and (is_ended or timeline.start_of(job, token) is not None):
            claims[claim.holder].append((job, claim))
    for life in timeline.evidence.history.lives:
        if life.runners != 1 or timeline.has_wrong_clock(life.process):
            continue
        taken: list[Claim] = []
        for job, claim in claims[life.process]:
            at = claim.step.at
            # What its own holder gave up proves as much as others, and is never poison.
            proven = sum(_is_proven(one, at) for one in taken)
            unproven = [one for one in taken if one.is_rescue and not _is_proven(one, at)]
            taken.append(claim)
            if not claim.is_rescue:
                continue
            if len(unproven) > proven:
                yield job, f"was taken up beside {len(unproven)}, and {proven} are proven"
            if unproven and (claim.is_suspect or any(one.is_suspect for one in unproven)):
                yield job, f"was taken up beside another, and one was lost twice: {claim.step}"


def _is_proven(claim: Claim, at: int) -> bool:
    has_ended = claim.end is not None and claim.end.at <= at
    return has_ended or claim.step.at + _PROVEN_AFTER <= at


def _decided_at(timeline: Timeline, end: Step) -> int | None:
    """The latest instant that step can have been decided by."""
    instants = [end.wall, None if end.after is None else end.after.finished_at]
    for step in timeline.steps[end.job]:
        if step.seq > end.seq:
            # A lost row is queued and taken in one transaction.
            instants.append(step.after.started_at if step.is_claim and step.after else None)
            break
    return max((instant for instant in instants if instant is not None), default=None)


def writes_are_fenced(timeline: Timeline) -> Found:
    """I6: what an attempt writes (renewals, partial results, its end) is written by the process
    that holds the claim; its own end only after its handler has ended, and by what it came to."""
    for (job, token), claim in timeline.claims.items():
        for step in claim.changes:
            if _is_by_other(claim, step) and _is_of_attempt(step):
                yield job, f"{step.who} wrote under claim {token} of {claim.holder}: {step}"
        end, start = claim.end, timeline.start_of(job, token)
        if end is not None and not _is_by_other(claim, end):
            if start is not None:
                yield from _end_fits(timeline, claim, end, start)
            elif timeline.evidence.starts_are_complete and _needs_start(end):
                yield job, f"claim {token} has an end, and no handler was started: {end}"


def _is_by_other(claim: Claim, step: Step) -> bool:
    return claim.holder is not None and step.who is not None and step.who != claim.holder


def _is_of_attempt(step: Step) -> bool:
    before, after = step.before, step.after
    assert before is not None
    assert after is not None
    return (before.lease_until, before.result) != (after.lease_until, after.result)


_UNSTARTED: Final = ("payload does not decode", "no handler for job kind")


def _needs_start(end: Step) -> bool:
    if end.after is None or (end.after.failure or "").startswith(_UNSTARTED):
        return False
    own = ("failed", "timed out", "retry later", "interrupted")
    return end.after.state == "succeeded" or end.outcome in own


def _end_fits(timeline: Timeline, claim: Claim, end: Step, start: Start) -> Found:
    resolution = timeline.evidence.resolution
    if end.who is None and end.outcome in ("lost", "cancelled", "deadline"):
        return  # it may be another's
    if start.ended_at is None or start.ended_at > end.at + resolution:
        # A claim of the same process may have found the lease over, as anybody's would.
        assert end.before is not None
        now = _decided_at(timeline, end)
        is_over = end.before.lease_until is None or now is None or now >= end.before.lease_until
        if not (is_over and end.outcome in ("lost", "cancelled", "deadline")):
            yield end.job, f"claim {claim.token} was ended under its handler: {end}"
        return
    returned = start.ending == "returned"
    if _went(end, "succeeded") and not returned:
        yield end.job, f"succeeded by claim {claim.token}, which raised {start.ending}"
    if returned and end.outcome in ("timed out", "retry later", "interrupted"):
        yield end.job, f"claim {claim.token} returned, and was ended as {end.outcome}"


def results_are_of_their_claim(timeline: Timeline) -> Found:
    """I7: a stored result was published, or at the end returned, under the claim that the row had
    then; what was published with success is there, and its handler was under way; else a result
    never changes."""
    for job, steps in timeline.steps.items():
        for step in steps:
            before, after = step.before, step.after
            if before is None or after is None:
                continue
            start = timeline.start_of(job, after.claims)
            if _went(step, "succeeded"):
                if start is not None and after.result != start.returned:
                    yield job, f"has the result {after.result}, returned was {start.returned}"
            elif after.result != before.result:
                values = [] if start is None else [one.value for one in start.published]
                if (before.state, after.state) != ("running", "running"):
                    yield job, f"its result changed: {step}"
                elif timeline.evidence.starts_are_complete and after.result not in values:
                    yield job, f"{after.result} was not published under {after.claims}: {step}"
    for (job, token), starts in timeline.starts.items():
        for start in starts:
            for publication in start.published:
                yield from _publication_is_true(timeline, (job, token), start, publication)


def _publication_is_true(
    timeline: Timeline, claim: Token, start: Start, publication: Publication
) -> Found:
    job, token = claim
    is_there = any(
        step.after is not None
        and (step.after.claims, step.after.result) == (token, publication.value)
        for step in timeline.between(job, publication.begun_at, publication.answered_at)
    )
    is_late = start.ended_at is not None and publication.begun_at > start.ended_at
    if publication.outcome == "ok" and not is_there:
        yield job, f"{publication.value} was published under {token} and is not there"
    if publication.outcome == "ok" and is_late:
        yield job, f"{publication.value} was published under {token} after its end"
    if publication.outcome == "fail" and is_there:
        yield job, f"{publication.value} was refused under {token} and is there"


def leases_are_of_the_running(timeline: Timeline) -> Found:
    """I8: a row has a lease exactly while it runs, and only its holder moves it."""
    for job, steps in timeline.steps.items():
        for step in steps:
            if step.after is None:
                continue
            if (step.after.lease_until is not None) != (step.after.state == "running"):
                yield job, f"is {step.after.state} with the lease {step.after.lease_until}"
    for (job, token), claim in timeline.claims.items():
        for step in claim.changes:
            assert step.before is not None
            assert step.after is not None
            moved = step.before.lease_until != step.after.lease_until
            if moved and _is_by_other(claim, step):
                yield job, f"{step.who} moved the lease of claim {token} of {claim.holder}"
