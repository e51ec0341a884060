"""What runs under `serve`: pools of workers, a lease keeper and a watchdog in one nursery.

The loops only carry values. What to claim is a value for the store, what an end means is
decided in `_lifecycle`, an attempt is read in `_attempt`. Every method without `await`
runs to its end on the Trio thread. One thing is called from the writing thread: the
function in `Pool.new_claim` that forms a claim. It reads numbers of workers and of what is
ready, and how short kinds are, at any moment; a row more or less is handed back or claimed
by the next. And it tells the agenda that whatever was heard until now will be seen
(`Agenda.claim_was_formed`): before it reads anything, so that what is heard meanwhile is
never taken for seen.

The way of a job: `Jobs.enqueue` -> `Bridge.add` -> `Pool.new_claim` (or `Pool.heard`, or the
poller) -> `store.claim` -> `Pool._claimed` -> `Workers.give` -> `Execution.run` -> `Ends.add`
-> `Ends.write` -> `store.apply` -> `Ends._settle` -> `Engine.wrote`.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import outcome
import trio

from ._attempt import Execution, Host, Stop
from ._batch import Done
from ._errors import StoreError
from ._instants import MICROSECONDS, microseconds
from ._jobs import Jobs
from ._keeper import Keeper
from ._kinds import Handler
from ._model import Change, Claimed, ClaimedJob, Fence, Instant, NewJob, Row, State
from ._pool import Pool
from ._probation import Probation
from ._repeats import Repeats
from ._statistics import Statistics, Tally
from ._unhandled import Unhandled, UnknownKinds
from ._workers import wait_left_behind, without_left_open

CLEAN_UP: Final = 2.0
"""Seconds a cancelled handler has for its clean-up before the log names it."""
FINAL_WRITES: Final = 2.0
"""Seconds the last ends have to be written."""

_log = logging.getLogger("trio_jobs")


@dataclass(frozen=True)
class Once:
    """The bounds of `run_once`: what is due by `due_by` with an id below `below`."""

    now: Instant | None
    """If it was given, time stands still there."""
    due_by: Instant
    below: int


class Engine:
    """Pools of workers and a keeper in one nursery, from the start to the orderly stop."""

    def __init__(
        self,
        jobs: Jobs,
        pools: Sequence[tuple[dict[str, Handler], int]],
        known: frozenset[str],
        *,
        poll: float,
        lease: float,
        grace: float,
        unhandled: Unhandled,
        once: Once | None = None,
    ) -> None:
        self.jobs = jobs
        self.bridge = jobs._bridge
        self.clock = jobs._clock
        self.poll = poll
        self.lease = microseconds(lease)
        self.once = once
        self.may_claim = True
        self.is_over = False
        self.probation = Probation()
        self.nursery: trio.Nursery
        self.retired: list[trio.lowlevel.Task] = []
        """Workers that work no more, because a handler left a nursery open in them."""
        self._grace = grace
        self.host = Host(
            jobs=jobs,
            bridge=self.bridge,
            clock=self.clock,
            max_payload=jobs._max_payload,
            lease=self.lease,
            decision_now=self.decision_now,
            # Where time stands still (`run_once(now)`), none passes while a handler runs.
            watches_deadlines=once is None or once.now is None,
            is_cancelled=lambda: self.nursery.cancel_scope.cancel_called,
        )
        self._keeper = Keeper(
            self.bridge, self.clock, poll=poll, lease=self.lease, met_trouble=self.met_trouble
        )
        self._pools = [Pool(self, served, workers) for served, workers in pools]
        self.unknown_kinds = UnknownKinds(
            self.bridge,
            known,
            unhandled,
            poll=poll,
            adopt=self._pools[0].adopt,
            failed=self._cannot_look_for_kinds,
        )
        self._spent: set[int] = set()
        self._tally = Tally()
        self._unwritten: set[Execution] = set()
        self._stop = trio.Event()
        self._hurry = trio.Event()
        self._progress = trio.Event()
        self._over = trio.Event()
        self._fatal: BaseException | None = None
        self._graced = trio.CancelScope()
        self.stuck = trio.Event()
        """Only handlers that cannot be cancelled are left: the command ends the process."""

    def drain(self) -> None:
        """Finish what is in hand, claim no more; then `serve` returns."""
        self.may_claim = False
        self._stop.set()

    def statistics(self) -> Statistics:
        """Counts since the start."""
        return self._tally.statistics(len(self._keeper.handling()), self.unknown_kinds.met)

    # Its life.

    async def run(self, started: Callable[[], None]) -> None:
        """Live until drained or cancelled, then stop in order."""
        self.bridge.raise_if_closed()
        self.bridge.raise_if_elsewhere()
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._live)
                try:
                    started()
                    await self._over.wait()
                except BaseException:
                    self._hurry_up()
                    raise
        finally:
            # Also where all was cancelled meanwhile: that must not make an error unheard.
            if self._fatal is not None:
                raise self._fatal

    @trio.lowlevel.enable_ki_protection
    async def _live(self) -> None:
        # Shielded: a cancellation from outside begins the orderly stop, it does not cut the
        # handlers off. `_wind_down` is bounded, but for handlers that cannot be cancelled.
        try:
            with trio.CancelScope(shield=True), self.jobs._watched_by(self):
                async with trio.open_nursery() as self.nursery:
                    try:
                        self.start(self._keeper.keep_leases)
                        self.start(self._keeper.watch_limits)
                        if self.once is None:
                            self.start(self.unknown_kinds.watch)
                        for pool in self._pools:
                            self.start(pool.poll)
                            self.start(pool.ends.write)
                            for _ in range(pool.workers.number):
                                self.start(pool.workers.work)
                        await self._stop.wait()
                        await self._wind_down()
                    finally:
                        # Before the nursery closes: what a claim still brings is given back.
                        self.is_over = True
                        self.nursery.cancel_scope.cancel()
        except* trio.ClosedResourceError as closed:
            # The block of open_jobs has ended around us; one of the loops was the first to see.
            self.fail(closed.exceptions[0])
        except* RuntimeError as errors:
            others = without_left_open(errors, self.retired)
            if others is not None:
                raise others from None
        finally:
            self._over.set()

    def start(self, loop: Callable[..., Awaitable[None]], *args: object) -> None:
        """A task of the runner. What it raises stops the runner in order, as in `guarded`; to the
        end of that it is tried again, for handlers have their grace, and ends are written."""
        self.nursery.start_soon(self._run_loop, loop, *args, name=loop)

    async def _run_loop(self, loop: Callable[..., Awaitable[None]], *args: object) -> None:
        repeats = Repeats()
        while True:
            try:
                return await loop(*args)
            except (trio.Cancelled, trio.ClosedResourceError):
                raise
            except BaseException as error:  # noqa: ASYNC103 - an application's clock raises anything
                self.fail(error)  # noqa: ASYNC104
            await trio.sleep(repeats.next())

    def cut_grace(self) -> None:
        """Stop, and cancel the handlers at once: the command's answer to a second signal."""
        self._graced.cancel()
        self._hurry_up()

    def _hurry_up(self) -> None:
        self.may_claim = False
        self._stop.set()
        self._hurry.set()
        self.progress()

    def fail(self, error: BaseException) -> None:
        """Stop in order, and raise this to the caller of `serve`."""
        if self._fatal is None or isinstance(error, KeyboardInterrupt):
            self._fatal = error
        self._hurry_up()

    def guarded(self, done: Done) -> Done:
        """What hears of a write, so that an error in it stops this runner: it would be lost."""

        def guarded(result: outcome.Outcome[Any]) -> None:
            try:
                done(result)
            except BaseException as error:  # noqa: ASYNC103 - an application's clock raises anything
                self.fail(error)  # noqa: ASYNC104

        return guarded

    async def _wind_down(self) -> None:
        for pool in self._pools:
            pool.withdraw_claim()  # it may wait for the lock for longer than all there is to do
        # A drain has no bound of its own, but a cancellation may come on top of it.
        await self._until(lambda: self.is_hurried or self._is_nothing_in_hand())
        for pool in self._pools:
            pool.hand_back_waiting()
        is_hopeless = isinstance(self._fatal, StoreError)
        # What failed may go on failing. Then no lease is renewed, and as each has been until now
        # half of it is left: nobody else may start what still runs.
        half = self.lease / MICROSECONDS / 2
        grace = self._grace if self._fatal is None else min(self._grace, half)
        self._graced.relative_deadline = 0 if is_hopeless else grace
        with self._graced:
            await self._until(self._is_nothing_in_hand)
        for one in self._keeper.in_hand.values():
            one.stop(Stop.SHUTDOWN)
        with trio.move_on_after(CLEAN_UP):
            await self._until(lambda: not self._keeper.handling())
        for one in self._keeper.handling():
            _log.error("%s cannot be cancelled; the runner ends after it: %r", one, one.handler)
        if self._keeper.handling():
            with trio.move_on_after(FINAL_WRITES):
                await self._until(self._is_only_handling)
            self.stuck.set()
        await self._until(lambda: not self._keeper.handling())
        with trio.move_on_after(FINAL_WRITES):
            await self._until(self._is_nothing_in_hand)
        for pool in self._pools:
            pool.withdraw_claim()
        for one in self._keeper.in_hand.values():
            _log.error("%s: its end could not be written in time; its lease has to end", one)
        with trio.move_on_after(CLEAN_UP) as patience:
            await self._wait_left_behind()
        if patience.cancelled_caught:
            _log.error(
                "what runs in a nursery that a handler left open cannot be cancelled; "
                "the runner ends after it"
            )
            self.stuck.set()
            await self._wait_left_behind()

    async def _wait_left_behind(self) -> None:
        for task in self.retired:
            await wait_left_behind(task)

    def handling(self) -> list[Execution]:
        """Those whose handler is under way."""
        return self._keeper.handling()

    @property
    def has_work(self) -> bool:
        """It claims, or has something in hand that may be cancelled from elsewhere."""
        return self.may_claim or bool(self._keeper.in_hand)

    @property
    def is_hurried(self) -> bool:
        """It was cancelled, not only drained: what has not started goes back."""
        return self._hurry.is_set()

    def _is_only_handling(self) -> bool:
        return all(one.is_handling for one in self._keeper.in_hand.values())

    def _is_nothing_in_hand(self) -> bool:
        return not self._keeper.in_hand and not any(pool.is_claiming for pool in self._pools)

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._progress = trio.Event()
            await self._progress.wait()

    def progress(self) -> None:
        """Something came to its end: a stop that waits for it looks again."""
        self._progress.set()

    # What the pools tell it, in the order in which it happens to a job.

    def takes(self, execution: Execution, job: ClaimedJob) -> None:
        self._keeper.take(execution)
        if job.taken_up:
            self.probation.took(
                execution.fence,
                is_suspect=job.is_suspect,
                is_last_life=job.row.attempt >= execution.handler.kind.policy.attempts,
            )

    def begins(self, execution: Execution, now: Instant) -> None:
        self._tally.started += 1
        self._keeper.begins(execution, now)
        if self.probation.began(execution.fence, now):
            for pool in self._pools:
                pool.sleep_no_longer()

    def wrote(self, execution: Execution, change: Change) -> None:
        """Its end is on disk."""
        self._tally.count(change)
        if self.once is not None and self._is_due_again(change.after, self.once):
            self._spent.add(change.after.id)
        self._let_go(execution, is_end=change.after.state.is_final)

    def _is_due_again(self, row: Row, once: Once) -> bool:
        due_by = max(once.due_by, row.enqueued_at) if once.now is None else once.due_by
        return row.state is State.QUEUED and row.run_at <= due_by

    def found_written(self, change: Change) -> None:
        """Its end was on disk, though its commit reported an error: nobody has heard of it."""
        self.jobs._tell([change.after])

    def lost(self, execution: Execution) -> None:
        """Somebody else has its row."""
        self._tally.lost += 1
        self._let_go(execution)

    def gave_up(self, execution: Execution) -> None:
        """Its end could not be written while the lease lasted."""
        self._let_go(execution)
        # It is lost now, and counted when it is taken up, maybe here and at once.
        for pool in self._pools:
            pool.wake()

    def _let_go(self, execution: Execution, *, is_end: bool = False) -> None:
        self._keeper.drop(execution)
        # One whose payload does not decode ends without a start, and is as harmless as others.
        has_started = is_end or execution.began_at is not None
        if self.probation.ended(execution.fence, has_started=has_started):
            self.lost_jobs_may_start()
        if self._unwritten and execution in self._unwritten:
            self._unwritten.discard(execution)
            self._worked_again()
        self.progress()

    def lost_jobs_may_start(self) -> None:
        """One of them was proven, or the claim that might have taken some is answered."""
        for pool in self._pools:
            pool.lost_jobs_may_start()

    def claim_answered(self, claimed: Claimed) -> None:
        self._worked_again()
        for change in claimed.settled:
            self._tally.count(change)
        for fence in claimed.cancelled:
            self._cancel(fence)

    def look_found_jobs(self) -> None:
        """Others commit what is for us."""
        self.jobs._lookout.found()

    def claim_was_not_needed(self) -> None:
        """Nobody else has committed, and no instant has come."""
        self._worked_again()

    def maybe_all_is_done(self) -> None:
        """`run_once` ends when no pool finds anything more."""
        if self.once is not None and all(pool.is_exhausted for pool in self._pools):
            self.drain()

    def has_in_hand(self, fence: Fence) -> bool:
        """That claim is this runner's, and not over."""
        return fence in self._keeper.in_hand

    def held_ids(self) -> frozenset[int]:
        """Ids no claim may give us: in hand, or started before in this `run_once`."""
        return frozenset(self._spent.union(id for id, _ in self._keeper.in_hand))

    def decision_now(self) -> Instant:
        """The instant decisions are made by: backoff, deadlines, what is due."""
        if self.once is not None and self.once.now is not None:
            return self.once.now
        return self.clock.now()

    def met_trouble(self, error: StoreError, what: str) -> None:
        """The store refused: go on trying, unless that is of no use."""
        self._tally.met_trouble(error, what)
        if error.is_permanent or self.once is not None:
            self.fail(error)

    def _cannot_look_for_kinds(self, error: StoreError) -> None:
        self.met_trouble(error, "the store could not be read")
        self._pools[0].wake()  # a claim that goes well ends the trouble

    def cannot_write_end(self, execution: Execution, error: StoreError) -> None:
        """It is tried again; until it is written, the trouble shows."""
        self._unwritten.add(execution)
        self.met_trouble(error, "the end of a job could not be written")

    @property
    def has_unwritten(self) -> bool:
        """The store refused an end that it is still to take."""
        return bool(self._unwritten)

    def _worked_again(self) -> None:
        if not self._unwritten:
            self._tally.worked_again()

    # What `Jobs` tells it.

    def claimants(self, jobs: Sequence[NewJob]) -> list[Pool]:
        return [pool for pool in self._pools if pool.may_take(jobs)]

    def heard(self, rows: Sequence[Row]) -> None:
        self.unknown_kinds.meet(row.kind for row in rows if row.state is State.QUEUED)
        for row in rows:
            if row.state is State.QUEUED:
                for pool in self._pools:
                    pool.heard(row)
            elif row.state is State.RUNNING and row.cancel_requested:
                self._cancel(row.fence)

    def written_elsewhere(self) -> None:
        for pool in self._pools:
            pool.heard_of_writing_elsewhere()

    def look(self) -> None:
        for pool in self._pools:
            pool.look()

    def _cancel(self, fence: Fence) -> None:
        execution = self._keeper.in_hand.get(fence)
        if execution is not None:
            execution.cancel_was_requested()
