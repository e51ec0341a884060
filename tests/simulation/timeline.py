"""The evidence in the order a judge asks for it: by job, by claim, by life."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from .evidence import Evidence, Image, Start, Step

Token: TypeAlias = tuple[int, int]
"""(job, claims)"""

Found: TypeAlias = Iterator[tuple[int | None, str]]
"""What a judge says is wrong: (the job, if it is about one; a sentence)."""

CLOCKS: Final = frozenset({"clock step", "skewed clock"})
"""The faults of a clock."""


@dataclass(slots=True)
class Claim:
    """One claim of a job, from the step that took the row to the one that ended it."""

    step: Step
    holder: str | None
    """The process, where it is known."""
    takes_up: bool = False
    """It takes up a lost row, which is due at once."""
    is_rescue: bool = False
    """And it was not its own holder that gave it up, as one does whose lease nearly ends."""
    is_suspect: bool = False
    """That row was lost the time before, too."""
    changes: list[Step] = field(default_factory=list)
    """Renewals, publications and requests to cancel."""
    end: Step | None = None

    @property
    def token(self) -> int:
        assert self.step.after is not None
        return self.step.after.claims


class Timeline:
    """Made once of the evidence; what it cannot make sense of it leaves out, so that there is
    always a verdict."""

    def __init__(self, evidence: Evidence) -> None:
        self.evidence = evidence
        self.steps: defaultdict[int, list[Step]] = defaultdict(list)
        self.inserts: defaultdict[str, list[Step]] = defaultdict(list)
        """By payload."""
        self.claims: dict[Token, Claim] = {}
        self.starts: defaultdict[Token, list[Start]] = defaultdict(list)
        self._names = {
            life.identity: life.process
            for life in evidence.history.lives
            if life.identity is not None
        }
        self.news_takes = {
            life.process: life.news_takes for life in evidence.history.lives if life.news_takes
        }
        self.dead_since = {
            life.process: at
            for life in evidence.history.lives
            if (at := life.killed_at if life.ended_at is None else life.ended_at) is not None
        }
        self.known_since: dict[int, int] = {}
        """When somebody was first told of a job: it was committed by then."""
        for call in evidence.history.calls:
            at = call.answered_at
            if at is not None:
                self.known_since |= {
                    job: min(at, self.known_since.get(job, at)) for job in call.ids
                }
        for start in evidence.history.starts:
            self.starts[start.job, start.token].append(start)
        for step in evidence.audit.steps:
            self._add(step)

    def _add(self, step: Step) -> None:
        self.steps[step.job].append(step)
        if step.before is None:
            self.inserts[step.payload or ""].append(step)
        if step.before is not None and step.before.state == "running":
            claim = self.claims.get((step.job, step.before.claims))
            if claim is not None and claim.end is None:
                if step.ends_claim:
                    claim.end = step
                else:
                    claim.changes.append(step)
        if step.is_claim and step.after is not None:
            token = step.job, step.after.claims
            earlier = self.steps[step.job][-2:-1]
            takes_up = any(one.outcome == "lost" for one in earlier)
            is_suspect = takes_up and any(
                one.before is not None and one.before.failure == "worker lost" for one in earlier
            )
            lost = self.claims.get((step.job, step.after.claims - 1))
            gave_up = lost is not None and lost.end is not None and lost.end.who == lost.holder
            is_rescue = takes_up and not gave_up
            claim = Claim(step, self._holder(step), takes_up, is_rescue, is_suspect)
            self.claims.setdefault(token, claim)

    def _holder(self, step: Step) -> str | None:
        if step.who is not None or step.after is None or step.after.owner is None:
            return step.who
        identity = self.evidence.audit.owners.get(step.after.owner)
        return None if identity is None else self._names.get(identity)

    def start_of(self, job: int, token: int) -> Start | None:
        starts = self.starts.get((job, token))
        return starts[0] if starts else None

    def is_dead(self, process: str | None, at: int) -> bool:
        """It had ended, in whatever way, by that time."""
        since = None if process is None else self.dead_since.get(process)
        return since is not None and since <= at + self.evidence.resolution

    def is_owner_dead(self, image: Image, at: int) -> bool:
        """Of a claimed row, where only the file says whose it was."""
        identity = None if image.owner is None else self.evidence.audit.owners.get(image.owner)
        return identity is not None and self.is_dead(self._names.get(identity), at)

    def nothing_went_wrong(self) -> bool:
        """Nor did anybody die, but for those who do when all is well."""
        calm = self.evidence.calm_since
        return not self.evidence.history.faults and all(
            life.killed_at is None or (calm is not None and life.killed_at >= calm)
            for life in self.evidence.history.lives
        )

    def was_disturbed(self, process: str, since: int, until: int) -> bool:
        """Something was made to go wrong with that process then."""
        return any(at <= until and to >= since for at, to in self.disturbances(process))

    def has_wrong_clock(self, process: str | None) -> bool:
        """Or had one."""
        return any(
            fault.what in CLOCKS and fault.process in (None, process)
            for fault in self.evidence.history.faults
        )

    def disturbances(self, process: str) -> list[tuple[int, int]]:
        """From when to when something was."""
        return [
            (fault.at, fault.at if fault.until is None else fault.until)
            for fault in self.evidence.history.faults
            if fault.process in (None, process)
        ]

    def longest_calm(self, process: str, since: int, until: int) -> int:
        """Nanoseconds of that interval without a disturbance; below 0 if there are none."""
        calm = 0
        for at, to in sorted(self.disturbances(process)):
            calm = max(calm, min(at, until) - since)
            since = max(since, to)
        return max(calm, until - since)

    def images(self, job: int, since: int, until: int | None) -> Iterator[Image | None]:
        """What the row was at any moment of an interval; None: there was none."""
        since -= self.evidence.resolution
        until = None if until is None else until + self.evidence.resolution
        before: Image | None = None
        is_told = False
        for step in self.steps.get(job, ()):
            if until is not None and step.at > until:
                break
            if step.at >= since:
                if not is_told:
                    is_told = True
                    yield before
                yield step.after
            before = step.after
        if not is_told:
            yield before

    def was_known(self, job: int, at: int) -> bool:
        """It was committed by then, for sure; an insert is witnessed when it is made."""
        return self.known_since.get(job, at) < at

    def between(self, job: int, since: int, until: int | None) -> Iterator[Step]:
        """The changes of a row in an interval."""
        resolution = self.evidence.resolution
        for step in self.steps.get(job, ()):
            if step.at >= since - resolution and (until is None or step.at <= until + resolution):
                yield step

    def lives(self, job: int) -> Iterator[list[Step]]:
        """The changes of a row from when it was added, or retried by hand, to the next retry."""
        life: list[Step] = []
        for step in self.steps[job]:
            if life and is_retry(step):
                yield life
                life = []
            life.append(step)
        if life:
            yield life


def is_retry(step: Step) -> bool:
    """It gives an ended job a new life."""
    return (
        step.before is not None
        and step.before.is_final
        and step.after is not None
        and not step.after.is_final
    )
