"""How many lost rows a runner may start at a time, so that a poison job stays alone.

A job that kills its process takes all its neighbours' attempts with it. So lost rows are
taken up gently: of those a runner has started, at most 1 + the number already proven may
be unproven at a time (1, 2, 4, ...). Proven is a start that ended, or ran for a second.
"""

from __future__ import annotations

from typing import Final

from ._clock import MICROSECONDS
from ._model import Fence, Instant

PROVEN_AFTER: Final = MICROSECONDS


class Probation:
    """The lost rows one runner took up."""

    def __init__(self) -> None:
        self._proven = 0
        self._unproven: dict[Fence, Instant | None] = {}  # since when it runs
        self._is_reserved = False

    def reserve(self, now: Instant) -> int:
        """How many lost rows the next claim may take; 0 while another claim is under way."""
        if self._is_reserved:
            return 0
        for fence, since in list(self._unproven.items()):
            if since is not None and not since <= now < since + PROVEN_AFTER:
                self.ended(fence)
        limit = max(0, 1 + self._proven - len(self._unproven))
        self._is_reserved = limit > 0
        return limit

    def release(self, reserved: int) -> None:
        """The claim that was given so many has its answer."""
        if reserved:
            self._is_reserved = False

    def took(self, fence: Fence) -> None:
        self._unproven[fence] = None

    def began(self, fence: Fence, now: Instant) -> None:
        if fence in self._unproven:
            self._unproven[fence] = now

    def ended(self, fence: Fence) -> bool:
        """True if it was on probation, which proves it."""
        if fence not in self._unproven:
            return False
        del self._unproven[fence]
        self._proven += 1
        return True

    def next_proof(self) -> Instant | None:
        """When the next of them will have run for long enough."""
        since = [instant for instant in self._unproven.values() if instant is not None]
        return min(since) + PROVEN_AFTER if since else None
