"""What a pool knows of the store without asking: whether to claim now, and when to look next.

Pure bookkeeping. It is told what was heard and what claims answered; it never claims,
sleeps or reads a clock. All is called on the Trio thread, but for `claim_was_formed`.
"""

from __future__ import annotations

from ._instants import microseconds
from ._model import Claim, Claimed, Instant, Row
from ._pace import PATIENCE
from ._repeats import Repeats


class Agenda:
    """The due times, deadlines and hints of one pool."""

    def __init__(self) -> None:
        self.is_hungry = True
        """There may be due rows that no claim has seen."""
        self._look_at: Instant | None = None
        self.is_lost_waiting = False
        """The last claim left lost rows, which have to wait for others to be proven."""
        self.is_written_elsewhere = False
        """An application's own transaction has enqueued, and may not be over yet."""
        self._due: Instant | None = None
        self._deadline: Instant | None = None
        # What was heard since the claim under way was formed: its answer may not know of it.
        self._heard_due: Instant | None = None
        self._heard_deadline: Instant | None = None
        self._refused_at: Instant = 0
        self._repeat_at: Instant | None = None
        self._repeats = Repeats()

    def heard_due(self, row: Row, now: Instant) -> None:
        """A served row was queued."""
        self._due = earliest(self._due, row.run_at)
        self._heard_due = earliest(self._heard_due, row.run_at)
        self.is_hungry = self.is_hungry or row.run_at <= now

    def heard_deadline(self, deadline: Instant) -> None:
        """A row of any kind was queued with a deadline."""
        self._deadline = earliest(self._deadline, deadline)
        self._heard_deadline = earliest(self._heard_deadline, deadline)

    def claim_was_formed(self) -> None:
        """Whatever was heard until now, it will see. Called by the writing thread, with the lock
        of the store: what is heard from here on makes the pool ask again."""
        self.is_hungry = False
        self._look_at = None
        self._heard_due = self._heard_deadline = None

    def claim_was_answered(self, claim: Claim, claimed: Claimed) -> None:
        self._repeats.reset()
        self._repeat_at = None
        self.is_hungry = self.is_hungry or claimed.more
        self.is_lost_waiting = claimed.lost_waiting
        self._deadline = earliest(claimed.next_deadline, self._heard_deadline)
        due = claimed.next_due
        if not claimed.jobs and not claimed.more and due is not None and due <= claim.now:
            due = None  # due and not taken, as a lost row that has to wait: no reason to wake
        self._due = earliest(due, self._heard_due)

    def claim_was_refused(self, now: Instant) -> None:
        """The store failed; leave it alone for a while, longer each time."""
        self.is_hungry = True
        self._refused_at = now
        self._repeat_at = now + microseconds(self._repeats.next())

    def may_claim(self, now: Instant) -> bool:
        """Nothing speaks against it."""
        # If that lies in the future, the clock was set back since.
        is_waiting = self._repeat_at is not None and self._refused_at <= now < self._repeat_at
        return not (self.is_written_elsewhere or is_waiting)

    def wants_claim(self, now: Instant) -> bool:
        """A claim may find something, if there is room for it."""
        if not self.may_claim(now):
            return False
        return self.is_hungry or (self._due is not None and self._due <= now)

    def heard_others(self, now: Instant) -> None:
        """Somebody else may have committed."""
        if self._look_at is None:
            self._look_at = now + PATIENCE

    def wants_look(self, now: Instant, *, is_idle: bool) -> bool:
        """To claim if somebody else has committed, which a claim sees anyway. Where no worker is
        free that brings no more than cancel requests, so it can wait for a claim for a while:
        with four busy processes such looks took a tenth of all they did."""
        look_at = self.next_look
        return look_at is not None and (is_idle or not look_at - PATIENCE <= now < look_at)

    @property
    def next_look(self) -> Instant | None:
        """Until when to wait for a claim before somebody has to look."""
        return None if self.is_written_elsewhere or self._repeat_at is not None else self._look_at

    def next_instant(
        self, *, has_room: bool, next_proof: Instant | None, next_look: Instant
    ) -> Instant | None:
        """When there is something to do if nobody rings before; None: never.

        `next_look` is when to see again whether another's transaction is over.
        """
        if self.is_written_elsewhere:
            return next_look
        if self._repeat_at is not None:
            return self._repeat_at
        # While no worker is free a due time is no reason to wake: it would be one for ever.
        due = self._due if has_room else None
        proof = next_proof if has_room and self.is_lost_waiting else None
        return earliest(self._deadline, due, proof)


def earliest(*instants: Instant | None) -> Instant | None:
    """The first of those that there are."""
    return min((instant for instant in instants if instant is not None), default=None)
