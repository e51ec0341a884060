"""A poller and its workers: claims rows when there is room, and starts what it claimed."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import outcome
import trio

from . import _lifecycle
from ._agenda import Agenda, earliest
from ._attempt import Execution
from ._batch import MAX_BATCH, Write
from ._clock import Alarm
from ._ends import Ends
from ._errors import StoreError
from ._instants import microseconds
from ._kinds import Handler
from ._lifecycle import End
from ._model import Claim, Claimed, Instant, NewJob, Row
from ._pace import NOTHING_AHEAD, Ahead
from ._probation import Allowance
from ._workers import Workers

if TYPE_CHECKING:
    from ._engine import Engine


_log = logging.getLogger("trio_jobs")


class Pool:
    """The workers that share a set of kinds (a runner has one, or one for each queue)."""

    def __init__(self, engine: Engine, handlers: Mapping[str, Handler], workers: int) -> None:
        self.is_exhausted = False
        """The last claim found less than it had room for."""
        self._engine = engine
        self._bridge = engine.bridge
        self._clock = engine.clock
        self._handlers = dict(handlers)
        self._policies = {name: one.kind.policy for name, one in handlers.items()}
        self.workers = Workers(engine, workers, handlers, self._ended)
        self.ends = Ends(engine, self.workers, self._next_claims, self.sleep_no_longer)
        self._may_go_ahead = True
        self._host = engine.host
        self._alarm = Alarm(engine.clock, engine.poll)
        self._agenda = Agenda()
        self._claim_under_way: Write | None = None
        self._version: Hashable = ()
        """The store's at the latest look."""
        self._held: frozenset[int] = frozenset()
        """What the claim under way leaves alone, because it was in hand when it was made."""
        self._is_one_free = False
        """One of those is queued again, and no claim has seen it."""

    @property
    def is_claiming(self) -> bool:
        return self._claim_under_way is not None

    # What the engine tells it.

    def adopt(self, handlers: Sequence[Handler]) -> None:
        """Serve more kinds."""
        # Anew, not in place: the writing thread may be reading the old one. So all at once.
        self._handlers = self._handlers | {one.kind.name: one for one in handlers}
        self._policies = self._policies | {one.kind.name: one.kind.policy for one in handlers}
        self.workers.adopt(handlers)
        self.wake()

    def may_take(self, jobs: Sequence[NewJob]) -> bool:
        """Whether a claim that goes to the store together with these new jobs may take one."""
        return (
            self._has_room()
            and not self.is_claiming
            and self._engine.may_claim
            and self._agenda.may_claim(self._engine.decision_now())
            and any(job.kind in self._handlers and job.run_at <= job.enqueued_at for job in jobs)
        )

    def heard(self, row: Row) -> None:
        """A queued row was committed in this process."""
        if self._engine.has_in_hand((row.id, row.claims + 1)):
            return  # it came together with the claim that took it
        if row.deadline is not None:
            self._agenda.heard_deadline(row.deadline)
            self._alarm.bring_forward(row.deadline)
        if row.kind in self._handlers:
            self._look_is_not_enough()
            self._agenda.heard_due(row, self._engine.decision_now())
            self._is_one_free = self._is_one_free or (self.is_claiming and row.id in self._held)
            self._claim_if_useful()
            if self._has_room():
                self._alarm.bring_forward(row.run_at)

    def heard_of_writing_elsewhere(self) -> None:
        if self._clock.is_virtual:
            # A claim would hold the clock while it waits for the lock, maybe for ever.
            self._agenda.is_written_elsewhere = True
            self._alarm.ring()
        else:
            self.wake()  # the claim gets the lock after that transaction, and sees its rows

    def wake(self) -> None:
        """Look at the store at once."""
        self._look_is_not_enough()
        self._agenda.is_hungry = True
        self._alarm.ring()

    def look(self) -> None:
        """Somebody else may have committed: claim if so."""
        self._agenda.heard_others(self._clock.now())
        self._claim_if_useful()
        self.sleep_no_longer()

    def lost_jobs_may_start(self) -> None:
        """More of them than before."""
        if self._agenda.is_lost_waiting:
            self.wake()

    def hand_back_waiting(self) -> None:
        """Give back what was claimed and not started."""
        for execution in self.workers.take_back():
            self.ends.add(execution, execution.not_started())

    def withdraw_claim(self) -> None:
        """Claim nothing any more, if it is not too late."""
        if self._claim_under_way is not None and self._bridge.withdraw(self._claim_under_way):
            self._claim_under_way = None

    # The poller.

    @trio.lowlevel.enable_ki_protection
    async def poll(self) -> None:
        """Claim when a due time or deadline has come; once a `poll` on a real clock, look."""
        is_look = False
        while True:
            if self._engine.once is not None:
                await self._engine.unknown_kinds.look()  # it ends when there is nothing more to do
            elif not is_look:
                self._engine.unknown_kinds.may_be_new()
            if self._agenda.is_written_elsewhere:
                await self._see_whether_that_is_over()
            if self._engine.has_work and self._agenda.may_claim(self._engine.decision_now()):
                self._claim(is_look=is_look)
            is_look = await self._sleep()

    async def _see_whether_that_is_over(self) -> None:
        """Whether another's transaction, of which we heard, goes on."""
        try:
            self._agenda.is_written_elsewhere = False
            if not await self._bridge.read(lambda store: store.is_unlocked()):
                self._agenda.is_written_elsewhere = True
        except StoreError as error:
            self._agenda.is_written_elsewhere = True
            self._engine.met_trouble(error, "the store could not be read")

    async def _sleep(self) -> bool:
        """Until it is time to claim, or, if it returns True, for a look."""
        while True:
            self._claim_if_useful()
            instant, look_at = self._next_instant(), self._next_look()
            is_time = await self._alarm.wait(earliest(instant, look_at))
            self._give_up_ahead()
            if is_time and look_at is not None and (instant is None or look_at < instant):
                continue
            if is_time or self._agenda.is_written_elsewhere:
                return self._is_look_enough(instant)

    def _is_look_enough(self, instant: Instant | None) -> bool:
        """No instant has come that a claim was to wait for."""
        if self._clock.is_virtual or self._engine.once is not None:
            return False
        if not self._has_room():
            return False  # the ends of others' leases are no instants to wake for, then
        if self._agenda.is_written_elsewhere or self._agenda.is_lost_waiting:
            return False
        return instant is None or self._clock.now() < instant

    def _next_instant(self) -> Instant | None:
        patience = self.workers.end_of_patience()
        if patience is not None:
            patience += self._clock.now() - self._clock.ticks()
        return earliest(self._next_claim(), patience)

    def _next_claim(self) -> Instant | None:
        if self.is_claiming or not self._engine.may_claim:
            return None
        if self._engine.once is not None and not self._agenda.is_written_elsewhere:
            return self._engine.probation.next_proof() if self._agenda.is_lost_waiting else None
        now = self._clock.now()
        return self._agenda.next_instant(
            has_room=self._has_room(),
            next_proof=self._engine.probation.next_proof(),
            next_look=now + microseconds(self._engine.poll),
        )

    def _give_up_ahead(self) -> None:
        """The first has waited for as long as it may: others may have all that wait."""
        instant = self.workers.end_of_patience()
        if instant is not None and instant <= self._clock.ticks():
            self.workers.are_long()
            self.hand_back_waiting()

    def _next_look(self) -> Instant | None:
        is_of_use = self._engine.has_work and not self.is_claiming
        return self._agenda.next_look if is_of_use else None

    # Claiming. No await in here: a claim is submitted, and `_claimed` is called.

    def _claim_if_useful(self) -> None:
        if self._wants_claim():
            self._claim()
        elif self._wants_look():
            self._claim(is_look=True)

    def _wants_claim(self) -> bool:
        return (
            self._has_room()
            and not self.is_claiming
            and self._engine.may_claim
            and self._agenda.wants_claim(self._engine.decision_now())
        )

    def _wants_look(self) -> bool:
        return (
            not self.is_claiming
            and self._engine.has_work
            and self._agenda.wants_look(self._clock.now(), is_idle=self.workers.room > 0)
        )

    def _has_room(self) -> bool:
        if self.workers.room > 0:
            return True
        # Not for a few: the more rows one transaction brings, the less each costs.
        limit = self._ahead().limit if self._may_go_ahead else 0
        return limit > 0 and self.workers.ready <= limit // 2

    def _ahead(self) -> Ahead:
        if self._engine.once is not None or self._engine.has_unwritten:
            return NOTHING_AHEAD
        return self.workers.ahead()

    def _claim(self, *, is_look: bool = False) -> None:
        if not self.is_claiming:
            self._bridge.raise_if_closed()
            write = self.new_claim(self._clock.now())
            write.unless = self._version if is_look and not self._agenda.is_hungry else None
            self._bridge.submit(write)

    def _look_is_not_enough(self) -> None:
        # Before the hunger: the writing thread clears that, and then sees whether it is a look.
        if self._claim_under_way is not None:
            self._claim_under_way.unless = None

    def new_claim(self, asked_at: Instant) -> Write:
        """To be submitted at once: nothing more is claimed until its answer is here."""
        allowance = self._engine.probation.reserve(asked_at)
        held = self._held = self._engine.held_ids()

        # Called by the writing thread when its batch is formed: the room is that of the last
        # moment, and so are the instants, from which the leases count. What is heard after
        # `claim_was_formed` makes the pool ask again, so it comes before all that is read.
        def claim() -> Claim:
            self._agenda.claim_was_formed()
            now = self._clock.now()
            once = self._engine.once
            # While the runner stops it takes nothing, but still hears of cancel requests.
            may_take = self._engine.may_claim
            room = max(0, min(self.workers.room, MAX_BATCH)) if may_take else 0
            further = self._ahead() if may_take else NOTHING_AHEAD
            return Claim(
                policies=self._policies if may_take else {},
                limit=room,
                ahead_limit=max(0, further.limit - self.workers.ready),
                ahead_kinds=further.kinds,
                lost_limit=allowance.limit,
                takes_suspect=allowance.takes_suspect,
                now=now if once is None or once.now is None else once.now,
                lease_now=now,
                lease_until=now + self._engine.lease,
                held=held,
                below=None if once is None else once.below,
                due_by=None if once is None else once.due_by,
                stays_due=once is None or once.now is None,
            )

        write = Write("claim", claim)
        write.done = self._engine.guarded(lambda result: self._claimed(write, allowance, result))
        self._claim_under_way = write
        return write

    def _claimed(self, write: Write, allowance: Allowance, result: outcome.Outcome[Any]) -> None:
        self._claim_under_way = None
        if self._engine.is_over or self._bridge.is_closed:
            if isinstance(result, outcome.Value) and result.value is not None:
                self._give_back(result.value)
            self._engine.progress()
            return
        if self._is_one_free:
            self._is_one_free = False
            self._agenda.is_hungry = True
        if isinstance(result, outcome.Value) and result.value is None:
            self._engine.claim_was_not_needed()
        elif isinstance(result, outcome.Value):
            self._take(write.items, result.value)
            self._saw(write, result.value)
        elif isinstance(result, outcome.Error):
            self._refused(result.error)
        if self._engine.probation.release(allowance):
            self._engine.lost_jobs_may_start()
        elif self._agenda.is_lost_waiting and self._is_outdated(allowance, result):
            self.wake()
        self._engine.progress()
        self._claim_if_useful()
        self.sleep_no_longer()

    def _saw(self, look: Write, claimed: Claimed) -> None:
        if look.unless is not None:
            self._version = look.version
            if claimed.jobs:
                self._engine.look_found_jobs()
            self._engine.unknown_kinds.may_be_new()

    def sleep_no_longer(self) -> None:
        """There is room that was not there, or an instant to claim at was learnt."""
        instant = earliest(self._next_instant(), self._next_look())
        if instant is not None:
            self._alarm.bring_forward(instant)

    def _is_outdated(self, given: Allowance, result: outcome.Outcome[Any]) -> bool:
        """More lost jobs may start now than when the claim was made: one was proven since."""
        taken = (
            sum(job.taken_up for job in result.value.jobs)
            if isinstance(result, outcome.Value) and result.value is not None
            else 0
        )
        now = self._engine.probation.allowance(self._clock.now())
        return now.limit > given.limit - taken or now.takes_suspect > given.takes_suspect

    def _give_back(self, claimed: Claimed) -> None:
        # Nobody is left to wait for this; if it is not written the leases have to end.
        changes = [
            _lifecycle.ended(
                job.row,
                _lifecycle.NeverStarted(job.was),
                self._policies[job.row.kind],
                self._clock.now(),
            )
            for job in claimed.jobs
        ]
        if changes and not self._bridge.is_closed:
            self._bridge.submit(Write("apply", changes))

    def _refused(self, error: BaseException) -> None:
        if isinstance(error, StoreError):
            self._agenda.claim_was_refused(self._clock.now())
            self._engine.met_trouble(error, "due jobs could not be claimed")
        else:
            self._engine.fail(error)

    def _take(self, claim: Claim, claimed: Claimed) -> None:
        try:
            came_at = self._clock.ticks()
        except BaseException:  # noqa: ASYNC103 - an application's clock raises anything
            self._give_back(claimed)
            raise
        executions: list[Execution] = []
        for job in claimed.jobs:
            handler = self._handlers[job.row.kind]
            execution = Execution(job, handler, self._host, claim.lease_now, came_at)
            self._engine.takes(execution, job)
            executions.append(execution)
        self.workers.give(executions)
        self._engine.claim_answered(claimed)
        self._agenda.claim_was_answered(claim, claimed)
        # The next in order may be of a kind that is not short: then it waits for a worker.
        self._may_go_ahead = not claimed.more or len(claimed.jobs) > claim.limit
        self.is_exhausted = claim.limit > 0 and not claimed.more and not claimed.lost_waiting
        if self._engine.is_hurried:
            self.hand_back_waiting()
        else:
            self.workers.start()
            self._engine.maybe_all_is_done()

    def _ended(self, execution: Execution, end: End) -> None:
        self._may_go_ahead = True
        self.ends.add(execution, end)

    def _next_claims(self) -> Sequence[Write]:
        return [self.new_claim(self._clock.now())] if self._wants_claim() else []
