"""The figures to reach: what is computed of the samples, and how it is judged."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeAlias

from . import names
from .names import FLOOR, FULL, HUEY, NORMAL, OURS, P50, P99
from .rounds import RATE, Results

Value: TypeAlias = Callable[[Results], float | None]


class Verdict(enum.Enum):
    GOAL = "goal"
    OK = "ok"
    MISSED = "missed"
    UNKNOWN = "not measured"


@dataclass(frozen=True)
class Part:
    """One number of a figure."""

    value: Value
    least: float
    goal: float
    unit: str = ""
    lower_is_better: bool = False
    floor: Value | None = None
    """What it is without a library (see `floor`), or with Trio alone for drains: where that misses
    it, the machine does."""

    def verdict(self, results: Results) -> Verdict:
        value = self.value(results)
        if value is None:
            return Verdict.UNKNOWN
        sign = -1 if self.lower_is_better else 1
        if sign * value >= sign * self.goal:
            return Verdict.GOAL
        return Verdict.OK if sign * value >= sign * self.least else Verdict.MISSED


@dataclass(frozen=True)
class Figure:
    name: str
    parts: tuple[Part, ...]

    def verdict(self, results: Results) -> Verdict:
        """That of its worst part."""
        found = {part.verdict(results) for part in self.parts}
        worst_first = (Verdict.UNKNOWN, Verdict.MISSED, Verdict.OK, Verdict.GOAL)
        return next(verdict for verdict in worst_first if verdict in found)

    def is_measured(self, results: Results) -> bool:
        return any(part.value(results) is not None for part in self.parts)

    def measured(self, results: Results) -> str:
        return "; ".join(_text(part.value(results), part.unit) for part in self.parts)

    def floor(self, results: Results) -> str:
        if all(part.floor is None for part in self.parts):
            return ""
        values = (None if part.floor is None else part.floor(results) for part in self.parts)
        texts = zip(values, self.parts, strict=True)
        return "; ".join(_text(value, part.unit) for value, part in texts)

    @property
    def least(self) -> str:
        text = "; ".join(_text(part.least, part.unit) for part in self.parts)
        return f"at most {text}" if self.parts[0].lower_is_better else text

    @property
    def goal(self) -> str:
        return "; ".join(_text(part.goal, part.unit) for part in self.parts)


def _text(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    number = f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
    return f"{number} {unit}" if unit else number


def _ratio(case: str, other: str, metric: str = RATE) -> Value:
    return lambda results: results.ratio(case, other, metric)


def _median(case: str, metric: str) -> Value:
    return lambda results: results.median(case, metric)


def _ms(value: Value, least: float, goal: float, floor: Value | None = None) -> Part:
    return Part(value, least, goal, "ms", lower_is_better=True, floor=floor)


def _to_huey(workers: int, least: float, goal: float) -> Part:
    huey = names.drain(HUEY, workers, FULL)
    ours = _ratio(names.drain(OURS, workers, FULL), huey)
    return Part(ours, least, goal, floor=_ratio(names.bare(workers), huey))


def _lateness(results: Results) -> float | None:
    """What the library adds to a bare loop."""
    with_us = results.median(names.LATENESS, P99)
    without = results.median(names.BARE_LATENESS, P99)
    return None if with_us is None or without is None else max(0.0, with_us - without)


_ours_full_100: Final = names.drain(OURS, 100, FULL)
_ours_normal_10: Final = names.drain(OURS, 10, NORMAL)
_ours_normal_100: Final = names.drain(OURS, 100, NORMAL)
_idle: Final = names.latency(names.WHILE_IDLE, FULL)
_offered: Final = names.latency(names.AT_1000, FULL)
_bare_idle: Final = names.floor_latency(names.WHILE_IDLE)
_bare_offered: Final = names.floor_latency(names.AT_1000)
_wake: Final = names.wake(FULL)

FIGURES: Final = (
    Figure(
        "drain, 100 workers, NORMAL / bare Trio at 100",
        (Part(_ratio(_ours_normal_100, names.bare(100)), 0.5, 0.7),),
    ),
    Figure(
        "drain, 10 workers, NORMAL / raw fused finish + claim in batches of 100",
        (
            Part(
                _ratio(_ours_normal_10, names.raw(NORMAL)),
                0.25,
                0.4,
                floor=_ratio(names.bare(10), names.raw(NORMAL)),
            ),
        ),
    ),
    Figure(
        "drain, 100 workers, FULL / the same at NORMAL",
        (Part(_ratio(_ours_full_100, _ours_normal_100), 0.6, 0.8),),
    ),
    Figure(
        "drain, ours FULL / SqliteHuey as it comes (FULL), 10; 100 workers",
        (
            _to_huey(10, 7, 10),
            _to_huey(100, 15, 20),
        ),
    ),
    Figure(
        "enqueue from 100 tasks, FULL / stdlib sqlite3 one insert a transaction, FULL",
        (
            Part(
                _ratio(names.enqueue(OURS, 100, FULL), names.INSERTS),
                12,
                20,
                floor=_ratio(names.enqueue(FLOOR, 100, FULL), names.INSERTS),
            ),
        ),
    ),
    Figure(
        "enqueue from 1 task, FULL / the same",
        (
            Part(
                _ratio(names.enqueue(OURS, 1, FULL), names.INSERTS),
                0.4,
                0.6,
                floor=_ratio(names.enqueue(FLOOR, 1, FULL), names.INSERTS),
            ),
        ),
    ),
    Figure(
        "enqueue to start, idle, p50; p99",
        (
            _ms(_median(_idle, P50), 0.5, 0.3, _median(_bare_idle, P50)),
            _ms(_median(_idle, P99), 2, 1, _median(_bare_idle, P99)),
        ),
    ),
    Figure(
        "the same at 1,000 jobs/s offered",
        (
            _ms(_median(_offered, P50), 0.6, 0.4, _median(_bare_offered, P50)),
            _ms(_median(_offered, P99), 3, 1.2, _median(_bare_offered, P99)),
        ),
    ),
    Figure(
        "cross-process wake-up p50; p99; idle CPU",
        (
            _ms(_median(_wake, P50), 0.8, 0.4),
            _ms(_median(_wake, P99), 3, 1),
            Part(_median(names.IDLE, names.IDLE_CPU), 0.2, 0.05, "%", lower_is_better=True),
        ),
    ),
    Figure(
        "life cycle at 1 million finished rows / at none",
        (Part(_ratio(names.life_cycle(names.FINISHED), names.life_cycle(names.NONE)), 0.85, 1),),
    ),
    Figure(
        "claim with 1 million rows scheduled for later / with none",
        (
            Part(
                _ratio(names.claim(names.LATER), names.claim(names.NONE), P50),
                1.3,
                1,
                lower_is_better=True,
            ),
        ),
    ),
    Figure(
        "2 processes / 1 process, 100 workers each",
        (Part(_ratio(names.processes(2), names.processes(1)), 1.3, 1.6),),
    ),
    Figure("loop lateness from the library, 100 workers, p99", (_ms(_lateness, 3, 1),)),
)
