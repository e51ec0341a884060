"""Instants and durations as the store keeps them, and as callers give and see them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Final

from ._model import Instant

MICROSECONDS: Final = 1_000_000
"""In a second."""

LATEST: Final[Instant] = 253_402_300_799_999_999
"""The end of the year 9999, the last instant a datetime can show."""

_UNIX_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)


def instant_of(moment: datetime, name: str) -> Instant:
    """An aware datetime as an instant; ValueError for a naive one."""
    if not isinstance(moment, datetime):
        raise TypeError(f"{name} must be a datetime, not {type(moment).__name__}")
    if moment.utcoffset() is None:
        raise ValueError(
            f"{name} must be an aware datetime; this one has no time zone: make it with"
            " tzinfo=datetime.UTC, or with datetime.datetime.now(tz=datetime.UTC)"
        )
    return min((moment - _UNIX_EPOCH) // _MICROSECOND, LATEST)


def datetime_of(instant: Instant) -> datetime:
    """The UTC datetime of an instant, clamped to the years a datetime can show."""
    try:
        return _UNIX_EPOCH + timedelta(microseconds=min(instant, LATEST))
    except OverflowError:
        return datetime.min.replace(tzinfo=UTC)


def microseconds(seconds: float) -> int:
    """A duration of this many seconds, no longer than until the year 9999."""
    return round(min(seconds * MICROSECONDS, LATEST))
