"""Lost jobs are taken up gently, so that one that kills its process stays alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import trio
from stories import (
    TIMES,
    Script,
    Trouble,
    abandon,
    finished,
    make_store,
    row_of,
    scheduling,
    serving,
    sleeps,
)
from trio.testing import MockClock

import trio_jobs
from trio_jobs import Attempt, Failure, Job, Jobs, Kind, Retry, State, StoreError
from trio_jobs._probation import Probation

plain = Kind("plain", None)
number = Kind("number", int, int, retry=Retry(attempts=3))


async def lost(jobs: Jobs, kind: Kind[None, None], count: int) -> list[Job[None]]:
    """So many jobs whose runner is gone."""
    enqueued = await jobs.enqueue_many(kind, [None] * count)
    assert len(await abandon(jobs, kind)) == count
    return enqueued


async def starts_of_lost(jobs: Jobs, count: int, *, takes: float, workers: int) -> list[float]:
    """When those of so many lost jobs were started that take so long each."""
    handle = Script(sleeps(takes))
    enqueued = await lost(jobs, plain, count)
    async with serving(jobs, plain.handled_by(handle), workers=workers):
        await finished(jobs, *enqueued)
    return handle.starts


async def test_R5_lost_jobs_start_1_2_4_8_at_a_time_while_none_has_proven_itself_but_by_time(
    jobs: Jobs, autojump_clock: MockClock
) -> None:
    """Proven after one second."""
    starts = await starts_of_lost(jobs, 20, takes=100, workers=20)

    assert starts == [0] + [1] * 2 + [2] * 4 + [3] * 8 + [4] * 5


async def test_R5_the_end_of_a_lost_job_lets_the_next_ones_start_at_once(
    jobs: Jobs, autojump_clock: MockClock
) -> None:
    """However it ended: proven is that it does not take the process with it."""
    starts = await starts_of_lost(jobs, 20, takes=0.125, workers=20)

    assert starts == [0] + [0.125] * 2 + [0.25] * 4 + [0.375] * 8 + [0.5] * 5


async def test_R5_no_more_lost_jobs_start_than_there_are_workers(
    jobs: Jobs, autojump_clock: MockClock
) -> None:
    starts = await starts_of_lost(jobs, 7, takes=10, workers=3)

    assert starts == [0, 1, 1, 10, 11, 11, 20]


async def test_a_claim_moves_no_more_lost_rows_than_it_may_start(
    jobs: Jobs, autojump_clock: MockClock
) -> None:
    """The others stay as they are: their attempts do not count again and again."""
    enqueued = await lost(jobs, plain, 5)
    async with serving(jobs, plain.handled_by(Script(sleeps(10)))):
        await trio.sleep(1.5)
        rows = [await row_of(jobs, job) for job in enqueued]

    assert [row.state for row in rows] == [State.RUNNING] * 5
    assert [(row.claims, row.attempt) for row in rows] == [(2, 2)] * 3 + [(1, 1)] * 2


async def test_fresh_jobs_need_not_wait_for_lost_ones(
    jobs: Jobs, autojump_clock: MockClock
) -> None:
    fresh = Kind("fresh", None)
    old, new = Script(sleeps(10)), Script(sleeps(10))
    await lost(jobs, plain, 4)
    enqueued = await jobs.enqueue_many(fresh, [None] * 4)
    async with serving(jobs, plain.handled_by(old), fresh.handled_by(new), workers=10):
        await trio.sleep(0.5)
        enqueued.append(await jobs.enqueue(fresh, None))
        await finished(jobs, *enqueued)

    assert new.starts == [0] * 4 + [0.5]
    assert old.starts == [0, 1, 1, 2]


async def test_lost_jobs_compete_by_priority_with_those_that_are_due(
    jobs: Jobs, autojump_clock: MockClock
) -> None:
    order: list[int] = []

    async def handle(attempt: Attempt[int, int]) -> int:
        order.append(attempt.job_id)
        await trio.sleep(2)
        return 7

    low = await jobs.enqueue(number, 1)
    high = await jobs.enqueue(number, 1, priority=2)
    await abandon(jobs, number)
    middle = await jobs.enqueue(number, 1, priority=1)
    async with serving(jobs, number.handled_by(handle), workers=1):
        await finished(jobs, low, middle, high)

    assert order == [high.id, middle.id, low.id]


async def test_lost_jobs_are_not_forgotten_when_something_else_happens(
    jobs: Jobs, autojump_clock: MockClock
) -> None:
    handle = Script(sleeps(0.125))
    enqueued = await lost(jobs, plain, 4)
    async with serving(jobs, plain.handled_by(handle)):
        for delay in (0.0625, 0.125, 0.0625, 0.3):
            await trio.sleep(delay)
            await jobs.enqueue(plain, None, delay=1000)
        await finished(jobs, *enqueued, within=10)

    assert len(handle.starts) == 4


@pytest.mark.parametrize("workers", [1, 4])
@pytest.mark.parametrize("seed", range(10 * TIMES))
async def test_lost_jobs_of_every_queue_are_taken_up(
    seed: int, workers: int, autojump_clock: MockClock
) -> None:
    """In whatever order the tasks run; and the rule holds for the runner, not for a queue."""
    kinds = [Kind(name, None, queue=name) for name in "abc"]
    handle = Script(sleeps(0.25))
    handlers = [kind.handled_by(handle) for kind in kinds]
    async with trio_jobs.open_jobs(":memory:") as jobs:
        enqueued = [job for kind in kinds for job in await lost(jobs, kind, 3)]
        with scheduling(seed):
            async with serving(jobs, *handlers, queues=dict.fromkeys("abc", workers)):
                ended = await finished(jobs, *enqueued, within=20)

    assert {(job.state, job.attempt) for job in ended} == {(State.SUCCEEDED, 2)}
    assert handle.starts.count(0) == 1
    assert handle.starts.count(0.25) <= 2


async def test_what_is_lost_later_is_found_when_its_lease_ends(
    jobs: Jobs, autojump_clock: MockClock
) -> None:
    await jobs.enqueue_many(plain, [None] * 3)
    handle = Script(sleeps(5))
    async with serving(jobs, plain.handled_by(handle), workers=1) as runner:
        await trio.sleep(1)
        await abandon(jobs, plain, lease=30)
        await trio.sleep(100)
        statistics = runner.statistics()

    assert handle.starts == [0, 31, 36]
    assert (statistics.started, statistics.succeeded, statistics.lost) == (3, 3, 2)


# A job that kills its process, with processes played by runners whose store is cut off.


class Process:
    """Serves until its poison job kills it: from then on nothing it does reaches the file."""

    def __init__(self, where: str, folder: Path) -> None:
        self.store = make_store(where, folder, Trouble)
        self.is_killed = trio.Event()

    def kill(self) -> None:
        self.store.rule = lambda step: StoreError("the process is dead")
        self.is_killed.set()

    async def live(self, jobs: Jobs, handle: Callable[[Process, int], object]) -> bool:
        """True if it was killed, False if there was nothing more to do for a minute."""

        async def work(attempt: Attempt[int, int]) -> int:
            handle(self, attempt.payload)
            await trio.sleep(forever_if(self.is_killed.is_set()))
            return attempt.payload

        async with trio_jobs.open_jobs(self.store) as mine:
            with trio.move_on_after(60):
                async with serving(mine, number.handled_by(work), lease=6, grace=0):
                    await self.is_killed.wait()
        return self.is_killed.is_set()


def forever_if(is_dead: bool) -> float:
    return 1e9 if is_dead else 0.25


@pytest.mark.parametrize("where", ["file", "apsw"])
@pytest.mark.parametrize("place", [0, 5, 19])
async def test_R5_a_job_that_kills_its_process_ends_dead_and_leaves_no_innocent_job_dead(
    place: int, where: str, tmp_path: Path, autojump_clock: MockClock
) -> None:
    starts: list[int] = []

    def handle(process: Process, payload: int) -> None:
        starts.append(payload)
        if payload == place:
            process.kill()

    observer = make_store(where, tmp_path, Trouble)
    async with trio_jobs.open_jobs(observer) as jobs:
        enqueued = await jobs.enqueue_many(number, range(21))
        lives = 0
        while await Process(where, tmp_path).live(jobs, handle):
            lives += 1
            assert lives <= 3
        ended = [await jobs.get(job) for job in enqueued]

    poison, innocent = ended[place], ended[:place] + ended[place + 1 :]
    assert starts.count(place) == 3
    assert (poison.state, poison.failure) == (State.DEAD, Failure("worker lost"))
    assert {job.state for job in innocent} == {State.SUCCEEDED}
    assert max(job.attempt for job in innocent) <= (2 if place == 0 else 3)
    assert lives == 3


def test_a_lost_job_that_is_given_back_without_a_start_has_proven_nothing() -> None:
    probation = Probation()
    probation.took((1, 2))
    beside = probation.allowance(1)
    is_another_free = probation.ended((1, 2), has_started=False)

    assert beside.limit == 0
    assert is_another_free
    assert probation.allowance(2).limit == 1


def test_a_suspect_starts_alone_and_not_beside_a_victim_that_lives_its_last_life() -> None:
    probation = Probation()
    victim, suspect = (1, 4), (2, 3)
    probation.took(victim, is_last_life=True)
    probation.began(victim, 0)
    proven = probation.allowance(2_000_000)
    probation.ended(victim)
    free = probation.allowance(2_000_000)
    probation.took(suspect, is_suspect=True)
    beside = probation.allowance(2_000_001)

    assert (proven.limit, proven.takes_suspect) == (2, False)
    assert (free.limit, free.takes_suspect) == (2, True)
    assert (beside.limit, beside.takes_suspect) == (0, False)


def test_a_lost_job_that_waits_to_be_started_is_not_proven_by_time() -> None:
    """It was given back in the end, and two had been started meanwhile."""
    probation = Probation()
    probation.took((1, 2))
    waits = probation.allowance(10_000_000)
    probation.began((1, 2), 10_000_000)
    begins = probation.allowance(10_999_999)
    proof = probation.next_proof()
    runs = probation.allowance(11_000_000)

    assert (waits.limit, begins.limit, runs.limit) == (0, 0, 2)
    assert proof == 11_000_000
