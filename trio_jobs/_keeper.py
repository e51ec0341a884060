"""What a runner has in hand: its leases are renewed, and what passes a limit is stopped.

Two loops over all attempts, so that an attempt costs no timer and no task of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

import trio

from ._attempt import Execution, Stop
from ._bridge import Bridge
from ._clock import Alarm, Clock
from ._errors import StoreError
from ._instants import MICROSECONDS
from ._model import Fence, Instant
from ._repeats import LONGEST_REPEAT, Repeats

_log = logging.getLogger("trio_jobs")


class Keeper:
    """Keeps the leases of the executions in hand (`lease`: microseconds, `poll`: seconds)."""

    def __init__(
        self,
        bridge: Bridge,
        clock: Clock,
        *,
        poll: float,
        lease: int,
        met_trouble: Callable[[StoreError, str], None],
    ) -> None:
        self.in_hand: dict[Fence, Execution] = {}
        self._bridge = bridge
        self._clock = clock
        self._lease = lease
        self._met_trouble = met_trouble
        self._renewal = Alarm(clock, poll)
        self._limit = Alarm(clock, poll)
        # The first instants asked for since those were set. Quick ones come and go between two
        # looks; the alarms stay set, so that the next quick one need not ring them.
        self._first_renewal: Instant | None = None
        self._first_limit: Instant | None = None

    def take(self, execution: Execution) -> None:
        self.in_hand[execution.fence] = execution

    def begins(self, execution: Execution, now: Instant) -> None:
        """Its handler starts now: from here its lease and its limits count."""
        renewal, limit = self._renewal_of(execution), execution.first_limit(now)
        if self._first_renewal is None or renewal < self._first_renewal:
            self._first_renewal = renewal
        if self._first_limit is None or limit < self._first_limit:
            self._first_limit = limit
        self._renewal.bring_forward(renewal)
        self._limit.bring_forward(limit)

    def drop(self, execution: Execution) -> None:
        self.in_hand.pop(execution.fence, None)

    def handling(self) -> list[Execution]:
        """Those whose handler is under way."""
        return [one for one in self.in_hand.values() if one.is_handling]

    @trio.lowlevel.enable_ki_protection
    async def keep_leases(self) -> None:
        """Renew every lease when a third of it is over."""
        repeats = Repeats(min(LONGEST_REPEAT, self._lease / MICROSECONDS / 12))
        while True:
            first, self._first_renewal = self._first_renewal, None
            due = min((self._renewal_of(one) for one in self._kept()), default=first)
            await self._renewal.wait(due, idle=due is None)
            now = self._clock.now()
            if not any(self._is_worn(one, now, 3) for one in self._kept()):
                continue
            # Those that are nearly due come along in the same transaction.
            keep = [one for one in self._kept() if self._is_worn(one, now, 4)]
            try:
                held = await self._bridge.renew([one.fence for one in keep], now + self._lease)
            except StoreError as error:
                self._met_trouble(error, "leases could not be renewed")
                self._fence(keep)
                await trio.sleep(repeats.next())
            else:
                repeats.reset()
                self._renewed(keep, held, now)
            keep.clear()  # they may have ended long before the next ones are due

    @trio.lowlevel.enable_ki_protection
    async def watch_limits(self) -> None:
        """Stop each handler whose timeout, deadline or fence has passed."""
        while True:
            now = self._clock.now()
            self._check(now)
            limits = [one.next_limit(now) for one in self.handling()]
            first, self._first_limit = self._first_limit, None
            limit = min((limit for limit in limits if limit is not None), default=first)
            await self._limit.wait(limit, idle=not limits and first is None)
            late = self._limit.late
            if late * MICROSECONDS > self._lease // 6:
                _log.warning("the event loop was blocked for %.1f s; leases may be lost", late)

    # Functions of their own, so that the loops, while they sleep, keep nothing that has ended.

    def _check(self, now: Instant) -> None:
        for one in self.handling():
            one.check(now)

    def _fence(self, kept: Sequence[Execution]) -> None:
        for one in kept:
            if self._clock.now() >= one.lease_until:
                one.stop(Stop.FENCE)

    def _kept(self) -> list[Execution]:
        # One that has lost its lease may go on cleaning up, but has nothing left to renew.
        return [one for one in self.handling() if not one.is_over]

    def _renewal_of(self, one: Execution) -> Instant:
        return one.kept_from + self._lease // 3

    def _is_worn(self, one: Execution, now: Instant, share: int) -> bool:
        # A lease from the future was made before the clock was set back; it is made anew.
        return not one.kept_from <= now < one.kept_from + self._lease // share

    def _renewed(self, kept: Sequence[Execution], held: Mapping[Fence, bool], now: Instant) -> None:
        for one in kept:
            if one.fence in held:
                one.kept_from = now
                if held[one.fence]:
                    one.cancel_was_requested()
            elif one.is_handling:
                one.lose()
