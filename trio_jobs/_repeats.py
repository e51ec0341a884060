"""How long the runner waits before it tries again what the store refused."""

from __future__ import annotations

from typing import Final

FIRST_REPEAT: Final = 0.05
LONGEST_REPEAT: Final = 2.0
"""Seconds between two tries."""


class Repeats:
    """How long to wait before a call that the store refused is tried again."""

    __slots__ = ("_longest", "_next")

    def __init__(self, longest: float = LONGEST_REPEAT) -> None:
        self._longest = longest
        self._next = FIRST_REPEAT

    def next(self) -> float:
        """Seconds, twice as many each time."""
        wait, self._next = self._next, min(2 * self._next, self._longest)
        return wait

    def reset(self) -> None:
        """It was not refused."""
        self._next = FIRST_REPEAT
