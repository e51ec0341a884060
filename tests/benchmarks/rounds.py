"""Cases, measured in interleaved rounds, and what can be said of their samples.

A machine has slow minutes. So no case is measured to its end before the next: every round
measures each case once, and what is compared is the ratio within a round.
"""

from __future__ import annotations

import gc
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

Sample: TypeAlias = Mapping[str, float]
"""What one measurement found, by metric."""

RATE: Final = "per second"


class Unavailable(Exception):
    """A case cannot be measured here; its text says why."""


@dataclass(frozen=True)
class Case:
    """Something to measure, with how many of what it is about."""

    name: str
    measure: Callable[[int], Sample]
    count: int
    seconds: float | None = None
    """Choose the count so that it takes about so long (if it has a rate)."""
    most: int = 1_000_000


@dataclass
class Results:
    """All samples, in the order of their rounds."""

    samples: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add(self, case: str, sample: Sample) -> None:
        metrics = self.samples.setdefault(case, {})
        for metric, value in sample.items():
            metrics.setdefault(metric, []).append(value)

    def of(self, case: str, metric: str = RATE) -> list[float]:
        return self.samples.get(case, {}).get(metric, [])

    def median(self, case: str, metric: str = RATE) -> float | None:
        values = self.of(case, metric)
        return statistics.median(values) if values else None

    def ratio(self, case: str, other: str, metric: str = RATE) -> float | None:
        """The median of the ratios within the rounds."""
        pairs = zip(self.of(case, metric), self.of(other, metric), strict=False)
        ratios = [one / two for one, two in pairs if two]
        return statistics.median(ratios) if ratios else None


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that so many percent of them do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def order(count: int, rounds: int) -> Iterator[list[int]]:
    """Forth and back, so that no case always follows the same one."""
    for number in range(rounds):
        numbers = list(range(count))
        yield numbers if number % 2 == 0 else numbers[::-1]


def fitting(case: Case, sample: Sample) -> int:
    """How many take as long as wanted, at the rate that was found."""
    if case.seconds is None or RATE not in sample:
        return case.count
    return min(case.most, max(case.count, round(sample[RATE] * case.seconds)))


def run_rounds(
    cases: Sequence[Case],
    rounds: int,
    results: Results,
    measured: Callable[[Case], None] = lambda case: None,
) -> None:
    """Measure each case once a round, after a first, smaller round that is not counted."""
    counts = [case.count for case in cases]
    broken: set[int] = set()
    warm_ups = 1 if any(case.seconds is not None for case in cases) else 0
    for number, numbers in enumerate(order(len(cases), warm_ups + rounds)):
        is_warm_up = number < warm_ups
        for index in numbers:
            case = cases[index]
            if index in broken or (is_warm_up and case.seconds is None):
                continue
            gc.collect()
            try:
                sample = case.measure(counts[index])
            except Unavailable as reason:
                results.notes.append(f"{case.name}: {reason}")
                broken.add(index)
                continue
            if is_warm_up:
                counts[index] = fitting(case, sample)
            else:
                results.add(case.name, sample)
            measured(case)
