"""What many runs came to. Not in `__main__`: who shares the work could not import that."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from .plan import draw
from .runs import run


@dataclass
class Summary:
    """What many runs came to."""

    runs: int = 0
    failed: list[int] = field(default_factory=list)
    coverage: Counter[str] = field(default_factory=Counter)

    def add(self, other: Summary) -> None:
        self.runs += other.runs
        self.failed += other.failed
        self.coverage += other.coverage


def runs_of(seeds: Sequence[int]) -> Summary:
    summary = Summary()
    for seed in seeds:
        result = run(draw(seed))
        summary.runs += 1
        summary.coverage += result.coverage
        if result.violations:
            summary.failed.append(seed)
    return summary
