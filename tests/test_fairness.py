"""Several processes that always want the write lock: each gets its share of it.

Time is virtual and one thread runs at a time, so the shares are a function of the seed.
"""

from __future__ import annotations

import heapq
import random
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from trio_jobs import SqliteStore

COMMIT = 0.001
"""Seconds for which a transaction has the lock."""
BETWEEN = 0.0001
"""Seconds until the same process wants it again, at most."""


class Turns:
    """Threads that take turns: `sleep` gives the turn to whoever is to wake first."""

    def __init__(self) -> None:
        self.now = 0.0
        self._sleeping: list[tuple[float, int, threading.Semaphore]] = []
        self._order = 0
        self._gave_up = threading.Semaphore(0)

    def sleep(self, seconds: float) -> None:
        turn = self._queue(seconds)
        self._gave_up.release()
        turn.acquire()

    def run(self, *calls: Callable[[], None]) -> None:
        threads = [threading.Thread(target=self._take_part, args=(call,)) for call in calls]
        for thread in threads:
            thread.start()
            self._gave_up.acquire()  # it waits for its first turn
        while self._sleeping:
            self.now, _, turn = heapq.heappop(self._sleeping)
            turn.release()
            self._gave_up.acquire()
        for thread in threads:
            thread.join()

    def _take_part(self, call: Callable[[], None]) -> None:
        self.sleep(0)
        try:
            call()
        finally:
            self._gave_up.release()

    def _queue(self, seconds: float) -> threading.Semaphore:
        turn = threading.Semaphore(0)
        self._order += 1
        heapq.heappush(self._sleeping, (self.now + seconds, self._order, turn))
        return turn


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("processes", [2, 4])
def test_the_slowest_of_saturated_processes_gets_more_than_0_7_of_its_share(
    tmp_path: Path, processes: int, seed: int
) -> None:
    turns = Turns()
    chance = random.Random(seed)
    commits = [0] * processes

    def saturate(number: int) -> None:
        store = SqliteStore(tmp_path / "jobs.db", synchronous="normal", driver="apsw")
        store.sleep = turns.sleep
        store.random = random.Random(f"{seed} {number}")
        store.open()
        try:
            while turns.now < 1:
                with store.transaction():
                    turns.sleep(COMMIT)
                commits[number] += 1
                turns.sleep(chance.uniform(0, BETWEEN))
        finally:
            store.close()

    turns.run(*[lambda number=number: saturate(number) for number in range(processes)])

    assert min(commits) > 0.7 * sum(commits) / processes, commits
