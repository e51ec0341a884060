"""Many runs, in several processes."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from typing import Final

from .flavours import draw
from .progress import pool
from .runs import run

_CHUNK: Final = 10
ENOUGH: Final = 5
"""So many failing seeds, and nothing is learnt by looking for more."""


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
        summary.runs += 1
        try:
            result = run(draw(seed))
        except Exception:  # run alone, it shows its traceback
            summary.failed.append(seed)
            continue
        summary.coverage += result.coverage
        if result.violations:
            summary.failed.append(seed)
    return summary


def run_many(
    numbers: Iterator[int],
    workers: int,
    until: float | None,
    note: Callable[[Summary], bool] = lambda summary: False,
) -> Summary:
    """Run these seeds in so many processes, until there are no more, or that instant of
    `time.monotonic`, or enough have failed. `note` hears how far it is, and says
    whether that is enough."""
    summary = Summary()
    is_enough = False

    def is_over() -> bool:
        late = until is not None and time.monotonic() >= until
        return is_enough or late or len(summary.failed) >= ENOUGH

    def done(some: Summary) -> None:
        nonlocal is_enough
        summary.add(some)
        is_enough = note(summary)

    if workers == 1:
        while not is_over() and (chunk := list(itertools.islice(numbers, _CHUNK))):
            done(runs_of(chunk))
        return summary
    waiting: set[Future[Summary]] = set()
    with pool(workers) as processes:
        while True:
            while len(waiting) < 2 * workers and not is_over():
                chunk = list(itertools.islice(numbers, _CHUNK))
                if not chunk:
                    break
                waiting.add(processes.submit(runs_of, chunk))
            if not waiting:
                return summary
            ready, waiting = wait(waiting, return_when=FIRST_COMPLETED)
            for future in ready:
                done(future.result())
