"""Weeks in which everything is decided by chance: runners, clients, handlers, and a bad disk.

A seed decides all of it, the order in which Trio runs its tasks included. So a failing seed
is the whole bug report: `pytest tests/test_simulation.py -k "[seed]"` lives through the same
week again, on every Python.
"""

from __future__ import annotations

import logging
import random
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import pytest
import trio
from stories import (
    TIMES,
    Trouble,
    abandon,
    assert_no_transaction_is_open,
    at,
    now,
    scheduling,
    serving,
    unknown,
)
from trio.testing import MockClock

import trio_jobs
from trio_jobs import (
    Attempt,
    Fail,
    Handler,
    Job,
    Jobs,
    Kind,
    Retry,
    RetryLater,
    State,
    StateError,
    StoreBusy,
    StoreError,
    constant,
)
from trio_jobs._model import Change, Claim, Claimed, Fence, NewJob

SEEDS = range(10 * TIMES)


class Diary(Trouble):
    """Writes down everything that was asked of it, when, and what it answered."""

    def __init__(self) -> None:
        super().__init__(":memory:")
        self.pages: list[str] = []

    def note(self, *what: object) -> None:
        self.pages.append(f"{now()}: {what}")

    def add(self, jobs: Sequence[NewJob]) -> Any:
        answer = super().add(jobs)
        self.note("add", jobs, answer)
        return answer

    def apply(self, changes: Sequence[Change]) -> Any:
        answer = super().apply(changes)
        self.note("apply", changes, answer)
        return answer

    def renew(self, fences: Sequence[Fence], until: int) -> Any:
        answer = super().renew(fences, until)
        self.note("renew", fences, until, answer)
        return answer

    def claim(self, claim: Claim) -> Claimed:
        answer: Claimed = super().claim(claim)
        asked = claim.limit, claim.lost_limit, claim.now, claim.lease_until, sorted(claim.held)
        self.note("claim", sorted(claim.policies), asked, answer)
        return answer

    def get(self, id: int) -> Any:
        answer = super().get(id)
        self.note("get", id, answer)
        return answer


class Week:
    """Chaos for a while, then a healthy store and one runner; what is left has to be right."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.store = Diary()
        self.fault_rate = chance.choice([0, 0, 0.02, 0.1])
        self.store.rule = self.bad_disk
        self.kinds = [
            Kind(
                f"kind {number}",
                int,
                int,
                queue=f"queue {number % 2}",
                timeout=chance.choice([None, 10, 50]),
                on_interrupt=chance.choice(["retry", "retry", "fail"]),
                retry=Retry(
                    attempts=chance.choice([1, 3, 8]), backoff=constant(chance.choice([0, 1, 20]))
                ),
            )
            for number in range(4)
        ]
        self.acknowledged: list[int] = []
        self.starts: defaultdict[int, list[int]] = defaultdict(list)
        self.under_way: set[int] = set()
        self.wrong: list[str] = []

    def bad_disk(self, step: str) -> StoreError | None:
        if self.chance.random() >= self.fault_rate:
            return None
        if step in ("commit", "committed"):
            return unknown()
        return self.chance.choice([StoreBusy("locked"), StoreError("disk I/O error")])

    async def handle(self, attempt: Attempt[int, int]) -> int:
        id = attempt.job_id
        self.store.note("start", id, attempt.token)
        self.starts[id].append(attempt.token)
        if id in self.under_way:
            self.wrong.append(f"job {id} runs twice at the same time")
        self.under_way.add(id)
        try:
            return await self.whatever(attempt)
        finally:
            self.under_way.discard(id)

    async def whatever(self, attempt: Attempt[int, int]) -> int:
        chance = self.chance
        match chance.randrange(11):
            case 0:
                raise ValueError
            case 1:
                raise RetryLater(chance.choice([0, 1, 7]))
            case 2:
                raise Fail("no", retry=chance.random() < 0.5)
            case 3:
                await attempt.publish(attempt.token)
            case 4 | 5:
                await trio.sleep(chance.choice([1, 5, 60]))
            case 6:
                child = await attempt.jobs.enqueue(self.kinds[0], 1, key="child")
                self.acknowledged.append(child.id)
            case 7:
                with trio.CancelScope(shield=True):
                    await trio.sleep(chance.choice([1, 5, 30]))
            case 8:
                try:
                    await trio.sleep(40)
                except trio.Cancelled:
                    if chance.random() < 0.5:
                        raise
        return attempt.token

    async def client(self, jobs: Jobs) -> None:
        chance = self.chance
        for _ in range(6):
            try:
                job = await jobs.enqueue(
                    chance.choice(self.kinds),
                    7,
                    delay=chance.choice([0, 0, 3]),
                    deadline=chance.choice([None, None, at(40)]),
                    priority=chance.choice([0, 1]),
                )
                self.acknowledged.append(job.id)
                if chance.random() < 0.3:
                    await jobs.cancel(job)
                if chance.random() < 0.1:
                    await jobs.retry(job)
            except (StoreError, StateError):
                pass
            await trio.sleep(chance.choice([0, 0, 1, 10]))

    async def crash_of_another_runner(self, jobs: Jobs) -> None:
        await trio.sleep(5)
        try:
            await abandon(jobs, *self.kinds, lease=5)
        except StoreError:
            pass

    async def live(self) -> None:
        chance = self.chance
        handlers: list[Handler] = [kind.handled_by(self.handle) for kind in self.kinds]
        async with trio_jobs.open_jobs(self.store) as jobs:
            with trio.move_on_after(chance.choice([20, 60, 200])):
                async with (
                    serving(jobs, *handlers, workers=3, lease=12, grace=2),
                    serving(jobs, *handlers, queues={"queue 0": 1, "queue 1": 2}, lease=6),
                    trio.open_nursery() as nursery,
                ):
                    for _ in range(5):
                        nursery.start_soon(self.client, jobs)
                    if chance.random() < 0.5:
                        nursery.start_soon(self.crash_of_another_runner, jobs)
                    await trio.sleep_forever()
            self.fault_rate = 0
            async with serving(jobs, *handlers, workers=4) as runner:
                await trio.sleep(3000)
                statistics = runner.statistics()
            left = await jobs.find(limit=1000)
            for job in left:
                self.look_at(job, [past.claim for past in await jobs.history(job)])
            assert_no_transaction_is_open(self.store)
        if (statistics.running, statistics.trouble) != (0, None):
            self.wrong.append(f"at rest: {statistics}")
        if not set(self.acknowledged) <= {job.id for job in left}:
            self.wrong.append("an acknowledged job is gone")

    def look_at(self, job: Job[Any], claims: list[int]) -> None:
        """What has to be true of every job when all is over."""
        tokens = self.starts[job.id]
        checks = {
            "has ended": job.state.is_final and job._row.lease_until is None,
            "never starts twice under one token": tokens == sorted(set(tokens)),
            "has each claim in its history once": claims == sorted(set(claims)),
            "succeeds by the start that wrote its result": job.state is not State.SUCCEEDED
            or (job.result in tokens and job.result not in claims),
            "has no failure after a success": job.state is not State.SUCCEEDED
            or job.failure is None,
        }
        self.wrong += [f"{job!r}: not true that it {what}" for what, ok in checks.items() if not ok]


def live_through(seed: int) -> Week:
    with scheduling(seed) as chance:
        week = Week(chance)
        trio.run(week.live, clock=MockClock(autojump_threshold=0))
    return week


@pytest.mark.parametrize("seed", SEEDS)
def test_after_a_week_of_chaos_every_job_has_its_end_and_nothing_is_lost(
    seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, "trio_jobs")
    week = live_through(seed)

    assert week.wrong == []
    assert len(week.acknowledged) > 0


def test_inline_the_same_seed_gives_the_same_history(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "trio_jobs")
    histories = set()
    for seed in range(4 * TIMES):
        first, second = live_through(seed).store.pages, live_through(seed).store.pages
        assert len(first) > 50
        assert first == second, f"seed {seed}"
        histories.add(tuple(first))

    assert len(histories) == 4 * TIMES
