"""A poller and its workers: claims rows when there is room, and starts what it claimed.

A fixed number of long-lived workers; a job costs no task, nursery or channel. A worker
goes on to the next job while the end of the last is being written: what ends in one tick
goes to the store together, with the next claim, in one transaction.
"""

from __future__ import annotations

import contextvars
import functools
import logging
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import outcome
import trio

from . import _lifecycle
from ._agenda import Agenda, earliest
from ._attempt import Execution, Stop
from ._bridge import MAX_BATCH, Write
from ._clock import Alarm, microseconds
from ._errors import StoreError
from ._kinds import Handler
from ._lifecycle import End
from ._model import Change, Claim, Claimed, Fence, Instant, NewJob, Refused, Row
from ._pace import MAX_WAIT, NOTHING_AHEAD, Ahead, Pace, ahead
from ._probation import Allowance

if TYPE_CHECKING:
    from ._engine import Engine


_log = logging.getLogger("trio_jobs")

ENOUGH: Final = 100
"""Ends; from here on a larger transaction makes each little cheaper."""


class Ending(NamedTuple):
    """An execution that is through, and what is to be written of it."""

    execution: Execution
    end: End
    change: Change


class Pool:
    """The workers that share a set of kinds (a runner has one, or one for each queue)."""

    def __init__(self, engine: Engine, handlers: Mapping[str, Handler], workers: int) -> None:
        self.workers = workers
        self.is_claiming = False
        self.is_exhausted = False
        """The last claim found less than it had room for."""
        self._engine = engine
        self._bridge = engine.bridge
        self._clock = engine.clock
        self._handlers = dict(handlers)
        self._policies = {name: one.kind.policy for name, one in handlers.items()}
        self._paces = {
            name: Pace() for name, one in handlers.items() if one.kind.on_interrupt == "retry"
        }
        self._room = workers
        """Workers for whom nothing is claimed; below zero if some is claimed ahead."""
        self._may_go_ahead = True
        self._taken: frozenset[Fence] = frozenset()
        self._long: set[Execution] = set()
        """Those under way that are not known to be short."""
        self._host = engine.host
        self._ready: deque[Execution] = deque()
        self._ended: list[Ending] = []
        self._has_ended = trio.lowlevel.ParkingLot()
        self._idle: list[trio.lowlevel.Task] = []
        self._context = contextvars.copy_context()
        self._alarm = Alarm(engine.clock, engine.poll)
        self._agenda = Agenda()
        self._claim_under_way: Write | None = None
        self._version: Hashable = ()
        """The store's at the latest look."""
        self._looked_around_at: Instant | None = None
        self._is_news = False
        """Others have committed since then."""
        self._held: frozenset[int] = frozenset()
        """What that claim leaves alone, because it was in hand when it was made."""
        self._is_one_free = False
        """One of those is queued again, and no claim has seen it."""

    # What the engine tells it.

    def adopt(self, handler: Handler) -> None:
        """Serve one more kind."""
        # Anew, not in place: the writing thread may be reading the old one.
        self._handlers = {**self._handlers, handler.kind.name: handler}
        self._policies = {**self._policies, handler.kind.name: handler.kind.policy}
        self._paces = {**self._paces, handler.kind.name: Pace()}
        self.wake()

    def claim_for(self, jobs: Sequence[NewJob]) -> Write | None:
        """A claim that goes to the store together with these new jobs, if it may take one."""
        if (
            self._has_room()
            and not self.is_claiming
            and self._engine.may_claim
            and self._agenda.may_claim(self._engine.decision_now())
            and any(job.kind in self._handlers and job.run_at <= job.enqueued_at for job in jobs)
        ):
            return self._new_claim()
        return None

    def heard(self, row: Row) -> None:
        """A queued row was committed in this process."""
        if row.fence in self._taken:
            return  # together with the claim that took it
        if row.deadline is not None:
            self._agenda.heard_deadline(row.deadline)
            self._alarm.bring_forward(row.deadline)
        if row.kind in self._handlers:
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
        self._agenda.is_hungry = True
        self._alarm.ring()

    def look(self) -> None:
        """Somebody else may have committed: claim if so."""
        self._agenda.is_curious = True
        self._claim_if_useful()

    def lost_jobs_may_start(self) -> None:
        """More of them than before."""
        if self._agenda.is_lost_waiting:
            self.wake()

    def hand_back_waiting(self, keep: int = 0) -> None:
        """Give back what was claimed and not started, but for so many."""
        while len(self._ready) > keep:
            execution = self._ready.pop()
            execution.stop(Stop.SHUTDOWN)
            self._room += 1
            self._write_end(execution, execution.not_started())

    def withdraw_claim(self) -> None:
        """Claim nothing any more, if it is not too late."""
        if self._claim_under_way is not None and self._bridge.withdraw(self._claim_under_way):
            self.is_claiming = False

    # The poller.

    @trio.lowlevel.enable_ki_protection
    async def poll(self) -> None:
        """Claim when a due time or deadline has come; once a `poll` on a real clock, look."""
        is_look = False
        while True:
            if not is_look or self._is_news or self._agenda.is_written_elsewhere:
                await self._look_around()
            if self._engine.has_work and not self._agenda.is_written_elsewhere:
                self._claim(is_look=is_look)
            is_look = await self._sleep()

    async def _sleep(self) -> bool:
        """Until it is time to claim, or, if it returns True, for a look."""
        while True:
            self._claim_if_useful()
            instant = self._next_instant()
            is_time = await self._alarm.wait(instant)
            self._give_up_ahead()
            if is_time or self._agenda.is_written_elsewhere or self._is_news_of_kinds():
                return self._is_look_enough(instant)

    def _is_look_enough(self, instant: Instant | None) -> bool:
        """No instant has come that a claim was to wait for."""
        if self._clock.is_virtual or self._engine.once is not None:
            return False
        if self._agenda.is_written_elsewhere or self._agenda.is_lost_waiting:
            return False
        return instant is None or self._clock.now() < instant

    def _is_news_of_kinds(self) -> bool:
        """There may be unknown kinds, and it is a `poll` since they were looked for."""
        at, poll = self._looked_around_at, microseconds(self._engine.poll)
        return (
            self._is_news
            and self._engine.looks_for_unhandled(self)
            and (at is None or self._clock.ticks() >= at + poll)
        )

    async def _look_around(self) -> None:
        """See what no claim shows: unknown kinds, and whether another's transaction is over."""
        self._looked_around_at, self._is_news = self._clock.ticks(), False
        try:
            if self._engine.looks_for_unhandled(self):
                self._engine.meet(await self._bridge.read(lambda store: store.queued_kinds()))
            if self._agenda.is_written_elsewhere:
                self._agenda.is_written_elsewhere = False
                if not await self._bridge.read(lambda store: store.is_unlocked()):
                    self._agenda.is_written_elsewhere = True
        except StoreError as error:
            self._is_news = True
            self._engine.met_trouble(error, "the store could not be read")

    def _next_instant(self) -> Instant | None:
        return earliest(self._next_claim(), self._end_of_patience())

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

    def _end_of_patience(self) -> Instant | None:
        # With room for all, those that are ready are on their way to a worker.
        is_any_ahead = self._room < 0 and self._ready
        return self._ready[0].came_at + MAX_WAIT if is_any_ahead else None

    def _give_up_ahead(self) -> None:
        """The first has waited for as long as it may: others may have all that wait."""
        instant = self._end_of_patience()
        if instant is None or self._clock.now() < instant:
            return
        for execution in self._engine.handling():
            if execution.row.kind in self._handlers:
                self._long.add(execution)
            if execution.row.kind in self._paces:
                self._paces[execution.row.kind].took(MAX_WAIT)
        self.hand_back_waiting()

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
            and self._agenda.wants_look(self._engine.decision_now())
        )

    def _has_room(self) -> bool:
        if self._room > 0:
            return True
        # Not for a few: the more rows one transaction brings, the less each costs.
        limit = self._ahead().limit if self._may_go_ahead else 0
        return limit > 0 and len(self._ready) <= limit // 2

    def _ahead(self) -> Ahead:
        if self._engine.once is not None or self._engine.has_unwritten:
            return NOTHING_AHEAD
        return ahead(self._paces.items(), self.workers - len(self._long))

    def _claim(self, *, is_look: bool = False) -> None:
        if not self.is_claiming:
            write = self._new_claim()
            write.unless = self._version if is_look else None
            self._bridge.submit(write)

    def _new_claim(self) -> Write:
        self.is_claiming = True
        allowance = self._engine.probation.reserve(self._clock.now())
        held = self._held = self._engine.held_ids()

        # Called by the writing thread when its batch is formed: the room is that of the last
        # moment, and so are the instants, from which the leases count. What is heard after
        # `claim_was_formed` makes the pool ask again, so it comes before all that is read.
        def claim() -> Claim:
            if self._agenda.is_hungry:
                write.unless = None  # a look is not enough: there is something to be seen
            self._agenda.claim_was_formed()
            now = self._clock.now()
            once = self._engine.once
            # While the runner stops it takes nothing, but still hears of cancel requests.
            may_take = self._engine.may_claim
            room = max(0, min(self._room, MAX_BATCH)) if may_take else 0
            further = self._ahead() if may_take else NOTHING_AHEAD
            return Claim(
                policies=self._policies if may_take else {},
                limit=room,
                ahead_limit=max(0, further.limit - len(self._ready)),
                ahead_kinds=further.kinds,
                lost_limit=allowance.limit,
                takes_suspect=allowance.takes_suspect,
                now=now if once is None or once.now is None else once.now,
                lease_now=now,
                lease_until=now + self._engine.lease,
                held=held,
                below=None if once is None else once.below,
                due_by=None if once is None else once.due_by,
            )

        write = Write("claim", claim)
        write.done = lambda result: self._claimed(write, allowance, result)
        self._claim_under_way = write
        return write

    def _claimed(self, write: Write, allowance: Allowance, result: outcome.Outcome[Any]) -> None:
        self.is_claiming = False
        self._claim_under_way = None
        if self._engine.is_over or self._bridge.is_closed:
            if isinstance(result, outcome.Value) and result.value is not None:
                self._give_back(result.value)
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
        self._sleep_no_longer()

    def _saw(self, look: Write, claimed: Claimed) -> None:
        if look.unless is not None:
            self._version = look.version
            if claimed.jobs:
                self._engine.jobs._lookout.found()
            if self._engine.looks_for_unhandled(self):
                self._is_news = True
                self._alarm.ring()

    def _sleep_no_longer(self) -> None:
        """There is room that was not there, or a due time was learnt."""
        instant = self._next_instant()
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
        self._room -= len(claimed.jobs)
        self._taken = frozenset([job.was.fence for job in claimed.jobs])
        now = self._clock.now()
        for job in claimed.jobs:
            execution = Execution(job, self._handlers[job.row.kind], self._host, claim.lease_now)
            execution.came_at = now
            self._engine.takes(execution, job)
            self._ready.append(execution)
        self._engine.claim_answered(claimed)
        self._agenda.claim_was_answered(claim, claimed)
        # The next in order may be of a kind that is not short: then it waits for a worker.
        self._may_go_ahead = not claimed.more or len(claimed.jobs) > claim.limit
        self.is_exhausted = claim.limit > 0 and not claimed.more and not claimed.lost_waiting
        if self._engine.is_hurried:
            self.hand_back_waiting()
        else:
            self._hand_out()
            self._engine.maybe_all_is_done()
            self._claim_if_useful()

    def _hand_out(self) -> None:
        # One that comes from a job takes the next by itself; then one of these finds none.
        for _ in range(min(len(self._ready), len(self._idle))):
            trio.lowlevel.reschedule(self._idle.pop())

    # The workers.

    @trio.lowlevel.enable_ki_protection
    async def work(self) -> None:
        """Run one claimed job after another."""
        while True:
            await trio.lowlevel.checkpoint_if_cancelled()
            try:
                # One scope for many jobs, because a new one would be a third of what Trio does
                # for a job. It is left when it was cancelled, or when a handler did not close
                # a scope or nursery of its own: nobody else's job must run in that.
                nurseries = len(trio.lowlevel.current_task().child_nurseries)
                with trio.CancelScope() as scope:
                    status = _cancel_status()
                    while not scope.cancel_called and _is_innermost(scope, nurseries, status):
                        await self._work_once(scope)
            except RuntimeError as error:  # "Cancel scope stack corrupted", now mended
                _log.error("a handler left a cancel scope or nursery open", exc_info=error)

    async def _work_once(self, scope: trio.CancelScope) -> None:
        execution = await self._next()
        pace = self._paces.get(execution.row.kind)
        if pace is None or not pace.is_short:
            self._long.add(execution)
        end = await execution.run(scope, self._engine.begins)
        self._long.discard(execution)
        self._engine.progress()
        if execution.keyboard_interrupt is not None:
            self._engine.fail(execution.keyboard_interrupt)
        self._room += 1
        self._may_go_ahead = True
        took = execution.took()
        if pace is not None and took is not None:
            pace.took(took)
        self._write_end(execution, end)

    async def _next(self) -> Execution:
        # Each job sees a context of its own; a task takes a new one up when it is resumed.
        task = trio.lowlevel.current_task()
        task.context = self._context.copy()
        if self._ready:
            await trio.lowlevel.cancel_shielded_checkpoint()
        while not self._ready:
            self._idle.append(task)

            def abort(_: Any) -> trio.lowlevel.Abort:
                self._idle.remove(task)
                return trio.lowlevel.Abort.SUCCEEDED

            await trio.lowlevel.wait_task_rescheduled(abort)
        return self._ready.popleft()

    # Their ends.

    def _write_end(self, execution: Execution, end: End) -> None:
        if execution.is_over:
            self._engine.lost(execution)
        else:
            self._ended.append(Ending(execution, end, execution.decide(end)))
        self._has_ended.unpark()

    @trio.lowlevel.enable_ki_protection
    async def write_ends(self) -> None:
        """Hand over what has ended. It is woken by the first, and runs when all who could run
        in that tick have: so their ends are one write, and nobody has waited for a timer."""
        while True:
            if not self._ended:
                await self._has_ended.park()
            number = 0
            # While each tick brings more, and those who bring them have still more to do.
            while self._ready and number < len(self._ended) < ENOUGH:
                number = len(self._ended)
                await trio.lowlevel.cancel_shielded_checkpoint()
            endings, self._ended = self._ended, []
            writes = [self._new_claim()] if self._wants_claim() else []
            if endings:
                end = Write("apply", [ending.change for ending in endings])
                end.done = functools.partial(self._answered, endings)
                writes.insert(0, end)
            if writes:
                self._bridge.submit(*writes)
            self._sleep_no_longer()
            await trio.lowlevel.cancel_shielded_checkpoint()

    def _answered(self, endings: Sequence[Ending], result: outcome.Outcome[Any]) -> None:
        """Called before anybody who waits for these jobs is woken, and before a pool hears that
        one of them is due again: the runner is never behind."""
        if isinstance(result, outcome.Value):
            for ending, answer in zip(endings, result.value, strict=True):
                self._settle(ending, answer)
        elif isinstance(result, outcome.Error):
            for ending in endings:
                self._settle(ending, result.error)

    def _settle(self, ending: Ending, answer: Refused | BaseException | None) -> None:
        execution, end, change = ending
        if isinstance(answer, StoreError):
            if execution.was_not_written(answer):
                self._engine.cannot_write_end(execution, answer)
                if not self._engine.is_over:
                    self._room -= 1
                    self._engine.nursery.start_soon(self._write_end_later, execution, end)
            else:
                self._engine.gave_up(execution)
        elif isinstance(answer, BaseException):
            self._engine.fail(answer)
        elif execution.is_written(change, answer):
            self._engine.wrote(execution, change)
            if answer is not None:
                self._engine.jobs._tell([change.after])
        else:
            self._write_end(execution, end)

    async def _write_end_later(self, execution: Execution, end: End) -> None:
        await execution.wait_for_store()
        self._room += 1
        self._write_end(execution, end)


def _is_innermost(scope: trio.CancelScope, nurseries: int, status: object) -> bool:
    return (
        trio.current_effective_deadline() == scope.deadline
        and len(trio.lowlevel.current_task().child_nurseries) == nurseries
        and _cancel_status() is status
    )


def _cancel_status() -> object:
    # Private to Trio, and the only thing that tells of a scope without a deadline. Should it go
    # away, the rest is still told by the two above.
    return getattr(trio.lowlevel.current_task(), "_cancel_status", None)
