"""Cases, measured in interleaved rounds, and what can be said of their samples.

A machine has slow minutes. So no case is measured to its end before the next: every round
measures each case once, and what is compared is the ratio within a round.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

Sample: TypeAlias = Mapping[str, float]
"""What one measurement found, by metric."""

RATE: Final = "per second"
CPU: Final = "CPU us each"


class Unavailable(Exception):
    """A case cannot be measured here; its text says why."""


@dataclass(frozen=True)
class Case:
    """Something to measure, with how many of what it is about."""

    name: str
    measure: Callable[[int], Sample]
    count: int
    seconds: float | None = None
    """Let a first round, which does not count, find the count that takes about so long."""
    once_if_slow: bool = False
    """If the smallest count takes far longer than that, the first round must do."""


@dataclass
class Results:
    """All samples in the order of their rounds, and why some are missing."""

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


class Watch:
    """Wall time and processor time since it was made."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._cpu = time.process_time()

    def sample(self, count: int) -> Sample:
        cpu = time.process_time() - self._cpu
        return {RATE: count / (time.perf_counter() - self._start), CPU: cpu / count * 1e6}


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
    if case.seconds is None:
        return case.count
    return max(case.count, round(sample[RATE] * case.seconds))


def is_slow(case: Case, sample: Sample) -> bool:
    """Whether to measure it never again."""
    if case.seconds is None or not case.once_if_slow:
        return False
    return case.count / sample[RATE] > 5 * case.seconds


def measurements(cases: Sequence[Case], rounds: int) -> int:
    """How many `run_rounds` makes at most."""
    return len(cases) * rounds + sum(case.seconds is not None for case in cases)


def run_rounds(
    cases: Sequence[Case],
    rounds: int,
    results: Results,
    measuring: Callable[[Case], None] = lambda case: None,
) -> None:
    """Size the cases in a round that does not count, then measure each once a round.

    One that is not available is left out from then on, and a note says so.
    """
    counts: dict[str, int] = {}
    done: set[str] = set()

    def measure(case: Case) -> Sample | None:
        measuring(case)
        if case.name in done:
            return None
        gc.collect()
        try:
            return case.measure(counts.get(case.name, case.count))
        except Unavailable as reason:
            results.notes.append(f"{case.name}: {reason}")
            done.add(case.name)
            return None

    for case in cases:
        results.samples.setdefault(case.name, {})  # in this order they are shown
    for case in cases:
        if case.seconds is not None and (sample := measure(case)) is not None:
            counts[case.name] = fitting(case, sample)
            if is_slow(case, sample):
                results.add(case.name, sample)
                done.add(case.name)
    for numbers in order(len(cases), rounds):
        for case in [cases[number] for number in numbers]:
            if (sample := measure(case)) is not None:
                results.add(case.name, sample)
