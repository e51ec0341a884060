"""Instants and durations: to and from what callers give and see."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta, timezone, tzinfo
from typing import Any

import pytest
from hypothesis import given, strategies as st

from trio_jobs._clock import EPOCH
from trio_jobs._instants import LATEST, MICROSECONDS, datetime_of, instant_of, microseconds

INDIA = timezone(timedelta(hours=5, minutes=30))


class NoOffset(tzinfo):
    """A time zone that does not say which: a datetime in it is naive all the same."""

    def utcoffset(self, moment: datetime | None) -> None:
        return None

    def dst(self, moment: datetime | None) -> None:
        return None

    def tzname(self, moment: datetime | None) -> None:
        return None


@pytest.mark.parametrize(
    ("moment", "instant"),
    [
        (datetime(1970, 1, 1, tzinfo=UTC), 0),
        (datetime(1970, 1, 1, 0, 0, 0, 1, tzinfo=UTC), 1),
        (datetime(1970, 1, 1, 5, 30, tzinfo=INDIA), 0),
        (datetime(1969, 12, 31, 23, 59, 59, tzinfo=UTC), -MICROSECONDS),
        (datetime(9999, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC), LATEST),
        (datetime(9999, 12, 31, 23, 59, tzinfo=timezone(timedelta(hours=-12))), LATEST),
        (datetime(1, 1, 1, tzinfo=timezone(timedelta(hours=12))), -62_135_640_000 * MICROSECONDS),
    ],
)
def test_Z10_an_aware_datetime_is_one_instant_whatever_its_zone(
    moment: datetime, instant: int
) -> None:
    assert instant_of(moment, "run_at") == instant


@given(st.datetimes(timezones=st.timezones() | st.just(UTC)))
def test_an_instant_is_the_same_moment_again_when_it_is_read(moment: datetime) -> None:
    back = datetime_of(instant_of(moment, "run_at"))

    assert back.utcoffset() == timedelta(0)
    # Differences: datetimes of two zones are never equal in an hour that a zone has twice.
    assert back - EPOCH == min(moment - EPOCH, datetime_of(LATEST) - EPOCH)


@pytest.mark.parametrize(
    "moment",
    [
        datetime(2024, 1, 1),
        datetime.max,
        datetime(2024, 1, 1, tzinfo=NoOffset()),
    ],
)
def test_Z10_a_naive_datetime_is_refused(moment: datetime) -> None:
    with pytest.raises(ValueError, match=r"run_at must be an aware datetime.*tz=datetime\.UTC"):
        instant_of(moment, "run_at")


@pytest.mark.parametrize("wrong", [1.5, "2024-01-01T00:00:00Z", None, date(2024, 1, 1)])
def test_what_is_no_datetime_is_refused(wrong: Any) -> None:
    with pytest.raises(TypeError, match="deadline must be a datetime"):
        instant_of(wrong, "deadline")


@pytest.mark.parametrize(
    ("instant", "moment"),
    [
        (LATEST, datetime.max.replace(tzinfo=UTC)),
        (LATEST + 1, datetime.max.replace(tzinfo=UTC)),
        (2**63 - 1, datetime.max.replace(tzinfo=UTC)),
        (-(2**63), datetime.min.replace(tzinfo=UTC)),
        (-62_135_596_800 * MICROSECONDS, datetime.min.replace(tzinfo=UTC)),
    ],
)
def test_an_instant_outside_the_years_of_a_datetime_is_clamped(
    instant: int, moment: datetime
) -> None:
    assert datetime_of(instant) == moment


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(0, 0), (0.5, 500_000), (1e-7, 0), (60, 60_000_000), (1e300, LATEST), (1.7e308, LATEST)],
)
def test_a_duration_is_rounded_to_microseconds_and_ends_in_the_year_9999(
    seconds: float, expected: int
) -> None:
    assert microseconds(seconds) == expected
