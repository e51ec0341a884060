"""How many lost rows a runner may start at a time, so that a poison job stays alone.

A job that kills its process takes all its neighbours' attempts with it. So lost rows are
taken up gently: of those a runner has started, at most 1 + the number already proven may
be unproven at a time (1, 2, 4, ...). Proven is a start that ended, or ran for a second.
One that was lost the last time, too, is a suspect: it is unproven alone or not at all,
and not beside a victim that lives its last life (that of a job which ends dead if it is
lost once more).
"""

from __future__ import annotations

from typing import Final, NamedTuple

from ._instants import MICROSECONDS
from ._model import Fence, Instant

PROVEN_AFTER: Final = MICROSECONDS


class Allowance(NamedTuple):
    """What one claim may take of the lost rows."""

    limit: int
    takes_suspect: bool


class Probation:
    """The lost rows one runner took up."""

    def __init__(self) -> None:
        self._proven = 0
        self._unproven: dict[Fence, Instant | None] = {}  # and since when it runs, if it does
        self._suspect: Fence | None = None
        self._last_lives: set[Fence] = set()
        self._is_reserved = False
        self._is_another_waiting = False

    def allowance(self, now: Instant) -> Allowance:
        """What may be started now."""
        for fence, since in list(self._unproven.items()):
            if since is not None and not since <= now < since + PROVEN_AFTER:
                self._prove(fence)
        limit = max(0, 1 + self._proven - len(self._unproven))
        if self._suspect in self._unproven:
            limit = 0
        return Allowance(limit, not self._unproven and not self._last_lives)

    def reserve(self, now: Instant) -> Allowance:
        """The allowance for the next claim; nothing while another claim may take some."""
        if self._is_reserved:
            self._is_another_waiting = True
            return Allowance(0, False)
        allowance = self.allowance(now)
        self._is_reserved = allowance.limit > 0
        return allowance

    def release(self, reserved: Allowance) -> bool:
        """That claim has its answer. True if another was refused since."""
        if not reserved.limit:
            return False
        is_another_waiting, self._is_another_waiting = self._is_another_waiting, False
        self._is_reserved = False
        return is_another_waiting

    def took(self, fence: Fence, *, is_suspect: bool = False, is_last_life: bool = False) -> None:
        self._unproven[fence] = None
        if is_suspect:
            self._suspect = fence
        if is_last_life:
            self._last_lives.add(fence)

    def began(self, fence: Fence, now: Instant) -> bool:
        """Its handler starts. True if that will prove it, in time."""
        if fence not in self._unproven:
            return False
        self._unproven[fence] = now
        return True

    def ended(self, fence: Fence, *, has_started: bool = True) -> bool:
        """True if others may start because of it."""
        if fence not in self._unproven and fence not in self._last_lives:
            return False
        self._last_lives.discard(fence)
        if fence in self._unproven:
            if has_started:
                self._prove(fence)
            else:
                del self._unproven[fence]  # it was given back, and has shown nothing
        return True

    def _prove(self, fence: Fence) -> None:
        del self._unproven[fence]
        self._proven += 1

    def next_proof(self) -> Instant | None:
        """When the next of them will have run for long enough."""
        running = [since for since in self._unproven.values() if since is not None]
        return min(running) + PROVEN_AFTER if running else None
