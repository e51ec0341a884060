"""Which rare ways a run has gone, by name. Told from the evidence: the library needs no hooks.

A way that many runs never went is one that they say nothing about.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from .evidence import Evidence, Step
from .timeline import Claim, Timeline, is_retry


class _End:
    """How a claim ended."""

    def __init__(self, claim: Claim, step: Step, timeline: Timeline) -> None:
        assert step.before is not None
        self.outcome = step.outcome
        self.before = step.before
        self.failure = None if step.after is None else step.after.failure
        self.state = "removed" if step.after is None else step.after.state
        self.by_holder = step.who == claim.holder
        over = step.before.lease_until
        self.lease_is_over = over is not None and step.wall is not None and step.wall >= over
        self.is_of_dead = timeline.is_dead(claim.holder, step.at)
        self.interruptions = step.before.interruptions
        self.start = timeline.start_of(step.job, claim.token)


_ENDS: Final[Mapping[str, Callable[[_End], bool]]] = {
    "lost row taken up": lambda end: end.outcome == "lost" and end.state == "queued",
    "lost row dead": lambda end: end.outcome == "lost" and end.state == "dead",
    "lost row failed, must not be interrupted": lambda end: (
        end.outcome == "lost" and end.state == "failed"
    ),
    "taken from the dead before its lease ended": lambda end: (
        end.is_of_dead and not end.lease_is_over
    ),
    "taken from the living after its lease ended": lambda end: (
        not end.by_holder and not end.is_of_dead and end.lease_is_over
    ),
    "self-fence": lambda end: (
        end.outcome == "lost" and end.by_holder and end.start is not None and not end.lease_is_over
    ),
    "end written after the lease ended": lambda end: (
        end.by_holder and end.lease_is_over and end.outcome != "lost"
    ),
    "claim handed back": lambda end: end.outcome is None and end.state == "queued",
    "claim handed back and cancelled": lambda end: end.outcome is None and end.state == "cancelled",
    "interrupted": lambda end: end.outcome == "interrupted" and end.state == "queued",
    "interruption that counts": lambda end: (
        end.outcome == "interrupted" and end.interruptions >= 10
    ),
    "dead of interruptions": lambda end: end.outcome == "interrupted" and end.state == "dead",
    "interrupted, and fails by it": lambda end: (
        end.outcome == "interrupted" and end.state == "failed"
    ),
    "payload does not decode": lambda end: end.failure == "payload does not decode",
    "timed out": lambda end: end.outcome == "timed out",
    "retry later": lambda end: end.outcome == "retry later",
    "dead after attempts": lambda end: end.outcome == "failed" and end.state == "dead",
    "refused for good": lambda end: end.outcome == "failed" and end.state == "failed",
    "running row cancelled by its holder": lambda end: end.outcome == "cancelled" and end.by_holder,
    "lost row cancelled": lambda end: end.outcome == "cancelled" and not end.by_holder,
    "running row at its deadline": lambda end: end.outcome == "deadline" and end.by_holder,
    "lost row at its deadline": lambda end: end.outcome == "deadline" and not end.by_holder,
    "succeeded after a loss": lambda end: (
        end.state == "succeeded" and end.before.failure == "worker lost"
    ),
}

_STEPS: Final[Mapping[str, Callable[[Step], bool]]] = {
    "queued row cancelled": lambda step: _moved(step, "queued", "cancelled"),
    "queued row at its deadline": lambda step: _moved(step, "queued", "failed"),
    "retry by hand": is_retry,
    "removed": lambda step: step.after is None,
    "renewed after publishing": lambda step: (
        _moved(step, "running", "running")
        and step.after is not None
        and step.after.result is not None
    ),
}

_STORE: Final = (
    "commit failed", "commit unknown", "commit unknown and found", "end refused",
    "publication or cancel refused", "renewal refused", "suspect taken alone",
    "lost rows held back", "more than could be taken", "checkpoint",
    "publication after the end refused", "enqueue unknown", "enqueue_many unknown",
    "cancel unknown", "retry unknown", "neighbour did not get the lock",
)  # fmt: skip
"""What is counted while it happens, by the simulated store and clients."""

NAMES: Final = (
    *_ENDS, *_STEPS, *_STORE, "key given again", "drain", "drain without a disturbance",
    "hurried stop", "hurried stop without a disturbance", "nothing went wrong",
)  # fmt: skip

ENOUGH: Final = 500
"""Runs, after which each of `NAMES` has happened: those that are not `RARE` do in one of 40."""

RARE: Final[Mapping[str, int]] = {
    "self-fence": 3_000, "enqueue_many unknown": 3_000, "cancel unknown": 5_000,
    "retry unknown": 10_000, "claim handed back and cancelled": 100_000,
}  # fmt: skip
"""Runs that those take. In 3,000 they were 24, 22, 10, 5 and none."""


def missing(counts: Counter[str], runs: int) -> list[str]:
    """What should have happened in so many runs, and never has."""
    return [name for name in NAMES if not counts[name] and runs >= RARE.get(name, ENOUGH)]


def _moved(step: Step, before: str, after: str) -> bool:
    return (
        step.before is not None
        and step.after is not None
        and (step.before.state, step.after.state) == (before, after)
    )


def ways_of(evidence: Evidence) -> Counter[str]:
    return Counter(_ways(evidence))


def _ways(evidence: Evidence) -> Iterator[str]:
    timeline = Timeline(evidence)
    for claim in timeline.claims.values():
        if claim.end is not None:
            end = _End(claim, claim.end, timeline)
            yield from (name for name, is_so in _ENDS.items() if is_so(end))
    for step in evidence.audit.steps:
        yield from (name for name, is_so in _STEPS.items() if is_so(step))
    history = evidence.history
    for call in history.calls:
        if call.outcome == "ok" and call.keys and call.payloads:
            yield from ("key given again" for one in call.payloads if one not in timeline.inserts)
    for stop in history.stops:
        if stop.ended_at is not None:
            what = "hurried stop" if stop.is_hurried else "drain"
            yield what
            if not timeline.was_disturbed(stop.process, stop.begun_at, stop.ended_at):
                yield f"{what} without a disturbance"
    if timeline.nothing_went_wrong():
        yield "nothing went wrong"
