"""How long the handlers of each kind take, and so how many rows may be claimed ahead.

A row that is claimed before a worker is free waits here, while another process might have
it. That is no loss only where it will not wait: for kinds seen to be short, and for a
tenth of a second of work. Pure bookkeeping; it reads no clock.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

PATIENCE: Final = 100_000
"""Microseconds that a row which was claimed ahead may wait for a worker."""
SHORT: Final = PATIENCE // 10
"""Microseconds below which a handler is short."""
MAX_AHEAD: Final = 250
"""Rows; from here on a larger transaction is no cheaper for each."""
_ENOUGH: Final = 20
"""Starts that have to be seen before anything is believed."""
_FORGETS: Final = 32
"""A long start is outweighed by about so many short ones."""


class Ahead(NamedTuple):
    """What may be claimed beyond the free workers."""

    limit: int
    kinds: frozenset[str]


NOTHING_AHEAD: Final = Ahead(0, frozenset())


class Pace:
    """How long the handlers of one kind take: the longest of late, slowly forgotten."""

    __slots__ = ("seen", "takes")

    def __init__(self) -> None:
        self.seen = 0
        self.takes = 0

    def took(self, duration: int) -> None:
        """A handler was under way for so many microseconds."""
        self.seen += 1
        if duration >= self.takes:
            self.takes = duration
        else:
            self.takes -= (self.takes - duration) // _FORGETS + 1

    @property
    def is_short(self) -> bool:
        return self.seen >= _ENOUGH and self.takes <= SHORT


def ahead(paces: Iterable[tuple[str, Pace]], workers: int) -> Ahead:
    """What so many workers may have waiting for them."""
    short = {kind: pace.takes for kind, pace in paces if pace.is_short}
    if not short:
        return NOTHING_AHEAD
    # The last of them waits for the handlers under way, too.
    limit = workers * (PATIENCE - SHORT) // max(1, *short.values())
    return Ahead(min(limit, MAX_AHEAD), frozenset(short))
