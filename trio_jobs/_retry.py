"""How often a job is tried, and how long it waits in between. Pure, and never in the way:
a backoff that cannot be used is replaced, not raised.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeAlias

from . import _checks

Backoff: TypeAlias = Callable[[int], float]
"""Number of the attempt that failed, from 1, to seconds until the next one."""

DAY: Final = 86_400.0
MAX_BACKOFF: Final = 365 * DAY
"""No backoff is longer, whatever a callable returns: seconds."""

_log = logging.getLogger("trio_jobs")


def quadratic(base: float, *, cap: float = DAY) -> Backoff:
    """base, 4 base, 9 base, ... seconds, at most `cap`."""
    base, cap = _checks.seconds(base, "base"), _checks.seconds(cap, "cap")
    return lambda attempt: min(base * attempt * attempt, cap)


def exponential(base: float, *, factor: float = 2, cap: float = DAY) -> Backoff:
    """base, factor x base, factor^2 x base, ... seconds, at most `cap`."""
    base, cap = _checks.seconds(base, "base"), _checks.seconds(cap, "cap")
    factor = _checks.seconds(factor, "factor")

    def backoff(attempt: int) -> float:
        try:
            return min(base * factor ** (attempt - 1), cap)
        except OverflowError:
            return cap if base else 0.0

    return backoff


def constant(seconds: float) -> Backoff:
    """The same wait every time: seconds."""
    wait = _checks.seconds(seconds, "seconds")
    return lambda attempt: wait


_DEFAULT_BACKOFF: Final = quadratic(5.0)


@dataclass(frozen=True)
class Retry:
    """How often a kind is tried, and how long it waits in between.

    `backoff` maps the number of the attempt that failed (from 1) to seconds; the wait is
    that times (1 + jitter x u), u in [0, 1). u is a pure function of job id and attempt,
    so that a test can know it. The default waits 5, 20, 45 and 80 seconds and gives up
    after the fifth attempt. A backoff that raises, or returns anything but a number of
    seconds from 0 on, is replaced by the default one for that wait (the log says so);
    no wait is longer than 365 days. Raises `ValueError` for settings that cannot work.
    """

    attempts: int = 5
    backoff: Backoff = _DEFAULT_BACKOFF
    jitter: float = 0.0

    def __post_init__(self) -> None:
        if isinstance(self.attempts, bool) or not isinstance(self.attempts, int):
            raise TypeError(f"attempts must be an int, not {type(self.attempts).__name__}")
        if self.attempts < 1:
            raise ValueError(f"attempts must be 1 or more, not {self.attempts}")
        if not callable(self.backoff):
            raise TypeError(f"backoff must be a callable, not {type(self.backoff).__name__}")
        _checks.seconds(self.jitter, "jitter")

    def wait(self, job_id: int, attempt: int) -> float:
        """Seconds from the failure of this attempt to the next start; never raises."""
        try:
            wait = self.backoff(attempt)
            if isinstance(wait, bool) or not isinstance(wait, int | float) or not wait >= 0:
                raise ValueError("not a number of seconds")  # NaN is not >= 0 either
        except BaseException as error:  # noqa: ASYNC103 - it is not ours, and none of its waits
            _log.warning(
                "backoff after attempt %d of job %d is not usable (%s); using the default",
                attempt,
                job_id,
                type(error).__name__,
            )
            wait = _DEFAULT_BACKOFF(attempt)
        # Cut before the product, too: an int may be too large for a float.
        return min(min(wait, MAX_BACKOFF) * (1 + self.jitter * _unit(job_id, attempt)), MAX_BACKOFF)


def _unit(job_id: int, attempt: int) -> float:
    """A number in [0, 1) that looks random and is always the same for its arguments."""
    digest = hashlib.blake2b(f"{job_id}/{attempt}".encode(), digest_size=6).digest()
    return int.from_bytes(digest, "big") / 2**48
