"""Real processes on one file: what only kill -9, SIGSTOP, fork and other processes' locks show.

The clock is the real one, so leases are short. `processes` has the children: "A" and "B" run
jobs, the test itself is one more process, which enqueues and looks.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, Final, Literal, Protocol

import pytest
import trio
from processes import (
    Child,
    Start,
    Work,
    careful,
    children,
    connected,
    final_writes,
    hopeless,
    integrity,
    moody,
    poison,
    record_final_writes,
    work,
    write_lock,
)

from trio_jobs import Job, Jobs, SqliteStore, State, StoreBusy, open_jobs

LEASE = 1.5
"""Seconds. Renewed after a third, and given up a sixth before the end: for half of it a process
may stall."""

POLL = 0.25

LONG = 60.0
"""Seconds nobody waits for."""

SLACK = 5.0
"""Seconds a busy machine may need to let a process do what it is about to do. So a bound tells
apart only what is further away, mostly LONG; how long things take exactly is said of the virtual
clock, in the tests of the modules."""

SERVING: Final[dict[str, Any]] = {"kinds": ["work"], "lease": LEASE, "poll": POLL, "workers": 4}


class Serve(Protocol):
    def __call__(self, name: str, **changes: Any) -> Awaitable[Child]:
        """Start a process that runs jobs, with SERVING but for these changes."""
        ...


@pytest.fixture
def db(tmp_path: Path) -> Path:
    return tmp_path / "jobs.db"


@pytest.fixture
async def jobs(db: Path) -> AsyncIterator[Jobs]:
    """The test's own look at the file: what any other process would see."""
    async with open_jobs(db) as opened:
        yield opened


@pytest.fixture
async def start(db: Path) -> AsyncIterator[Start]:
    """Starts processes; none is left when the test ends."""
    async with children(db) as started:
        yield started


@pytest.fixture
def serve(start: Start) -> Serve:
    return lambda name, **changes: start(name, "serve", **{**SERVING, **changes})


async def raw(jobs: Jobs, job: Job[Any]) -> Any:
    """The row behind a job, with the fields that are no business of users."""
    return (await jobs.get(job))._row


async def lease_of(jobs: Jobs, job: Job[Any]) -> float:
    """Until when its claim is valid, in Unix seconds."""
    return float((await raw(jobs, job)).lease_until) / 1e6


async def leases_ahead(jobs: Jobs, some: list[Job[str]], child: Child) -> list[float]:
    """How many seconds their leases had left whenever we looked, until all have ended."""
    ahead: list[float] = []
    with trio.fail_after(20):
        while len(child.all("end")) < len(some):
            for job in some:
                now = time.time()
                row = await raw(jobs, job)
                if row.state is State.RUNNING:
                    ahead.append(row.lease_until / 1e6 - now)
            await trio.sleep(0.02)
    return sorted(ahead)


async def finished(jobs: Jobs, job: Job[Any], *, within: float = 20) -> Job[Any]:
    with trio.fail_after(within):
        return await jobs.wait_finished(job, poll=0.02)


async def all_have_ended(jobs: Jobs) -> bool:
    counts = await jobs.counts()
    return not counts[State.QUEUED] and not counts[State.RUNNING]


async def stopped(child: Child) -> int:
    child.send(signal.SIGTERM)
    return await child.exit_code()


def unix(moment: datetime | None) -> float:
    assert moment is not None
    return moment.timestamp()


# A process dies.


@pytest.mark.parametrize(
    ("other", "driver"), [("runs beside it", "sqlite3"), ("is started afterwards", "apsw")]
)
async def test_L1_the_first_job_of_a_killed_process_starts_again_within_about_a_poll(
    serve: Serve,
    jobs: Jobs,
    other: Literal["runs beside it", "is started afterwards"],
    driver: Literal["sqlite3", "apsw"],
) -> None:
    # The leases are long; and until the test has ended, the killed process is a zombie.
    a = await serve("A", lease=LONG, poll=1.0, driver=driver)
    b = await serve("B", lease=LONG, poll=1.0, driver=driver, hold=True)
    many = await jobs.enqueue_many(work, [Work(LONG)] * 4)
    for job in many:
        await a.event("start", job=job.id)
    if other == "runs beside it":
        await b.tell()
        await b.event("serving")

    killed = a.kill()
    await b.tell()
    ends = [await finished(jobs, job) for job in many]

    [first, *rest] = sorted(b.starts(), key=lambda event: event["at"])
    assert first["at"] <= killed + 1.0 + SLACK  # not the lease
    assert [event["attempt"] for event in [first, *rest]] == [2] * 4
    assert {(job.state, job.attempt, job.result) for job in ends} == {(State.SUCCEEDED, 2, "B")}
    assert [past.outcome for past in await jobs.history(many[0])] == ["lost"]
    assert await stopped(b) == 0


async def test_a_stopped_process_keeps_its_jobs_until_its_lease_ends(
    serve: Serve, jobs: Jobs, db: Path
) -> None:
    a = await serve("A", lease=LONG)
    b = await serve("B", hold=True)
    job = await jobs.enqueue(work, Work(LONG))
    await a.event("start", job=job.id)

    await a.freeze(db)
    await b.tell()
    await b.event("serving")
    await trio.sleep(1.0)  # four polls, and two looks at who lives

    assert not b.starts()
    row = await raw(jobs, job)
    assert (row.state, row.claims) == (State.RUNNING, 1)


async def test_L1_a_job_whose_process_was_killed_elsewhere_starts_again_when_its_lease_has_ended(
    serve: Serve, jobs: Jobs
) -> None:
    job = await jobs.enqueue(work, Work(LONG))
    a = await serve("A", elsewhere=True)
    b = await serve("B", lease=LONG, hold=True)  # only the row's own lease counts
    await a.event("start", job=job.id)

    killed = a.kill()
    lease_until = await lease_of(jobs, job)
    await b.tell()
    end = await finished(jobs, job)

    [second] = b.starts()
    assert second["at"] >= lease_until
    assert second["at"] <= killed + LEASE + POLL + SLACK
    assert (end.state, end.attempt, end.result) == (State.SUCCEEDED, 2, "B")
    [past] = await jobs.history(job)
    assert (past.number, past.outcome) == (1, "lost")
    assert past.failure is not None
    assert past.failure.message == "worker lost"
    assert await jobs.counts() == {state: int(state is State.SUCCEEDED) for state in State}
    assert await a.exit_code() == -signal.SIGKILL


async def test_all_that_a_killed_process_had_in_hand_runs_again_within_seconds(
    serve: Serve, jobs: Jobs
) -> None:
    # They are taken up gently, 1, 2, 4, 8, 5 at a time, but nobody waits without need: for one
    # poll, and not for four more.
    poll = 2.0
    many = await jobs.enqueue_many(work, [Work(LONG)] * 20)
    a = await serve("A", workers=20, lease=LONG)
    b = await serve("B", workers=20, poll=poll, hold=True)
    for job in many:
        await a.event("start", job=job.id)

    killed = a.kill()
    await b.tell()
    ends = [await finished(jobs, job) for job in many]

    assert {(job.state, job.attempt, job.result) for job in ends} == {(State.SUCCEEDED, 2, "B")}
    assert max(unix(job.finished_at) for job in ends) <= killed + poll + SLACK


async def test_a_job_that_must_not_be_repeated_fails_when_its_process_was_killed(
    serve: Serve, jobs: Jobs
) -> None:
    job = await jobs.enqueue(careful, Work(LONG))
    untouched = await jobs.enqueue(careful, Work())
    a = await serve("A", kinds=["careful"], workers=1, lease=LONG)
    b = await serve("B", kinds=["careful"], workers=1, hold=True)
    await a.event("start", job=job.id)

    a.kill()
    await b.tell()
    end = await finished(jobs, job)

    assert end.state is State.FAILED
    assert end.failure is not None
    assert end.failure.message == "interrupted by restart"
    assert [past.outcome for past in await jobs.history(job)] == ["lost"]
    assert (await finished(jobs, untouched)).result == "B"
    assert not b.starts(job.id)


async def test_an_acknowledged_enqueue_survives_kill_9_at_the_next_instant(
    start: Start, jobs: Jobs, db: Path
) -> None:
    rounds = 50
    a = await start("A", "enqueue_and_die", rounds=rounds)

    assert await a.exit_code() == 0

    acknowledged = [event["job"] for event in a.all("enqueued")]
    assert [event["code"] for event in a.all("exited")] == [-signal.SIGKILL] * rounds
    assert len(acknowledged) == rounds
    assert [job.id for job in await jobs.find(limit=1000)] == acknowledged
    assert integrity(db) == "ok"


@pytest.mark.parametrize(
    ("place", "naps", "most"),
    [
        pytest.param(0, 0.0, 2, id="first, beside quick ones"),
        pytest.param(0, 0.1, 2, id="first, beside sleeping ones"),
        # Not first, it may meet the same neighbour twice before it is known for what it is.
        pytest.param(13, 0.1, 3, id="in the middle of sleeping ones"),
    ],
)
async def test_R5_a_job_that_kills_its_process_ends_dead_and_takes_nobody_along(
    start: Start, jobs: Jobs, place: int, naps: float, most: int
) -> None:
    before = await jobs.enqueue_many(work, [Work(naps, always=True)] * place)
    bad = await jobs.enqueue(poison, None)
    after = await jobs.enqueue_many(work, [Work(naps, always=True)] * (20 - place))
    settings = {**SERVING, "kinds": ["poison", "work"], "workers": 10}

    supervisor = await start("A", "supervise", **settings)
    bad = await finished(jobs, bad)
    innocents = [await finished(jobs, one) for one in [*before, *after]]

    assert len(supervisor.starts(bad.id)) == 3
    assert bad.state is State.DEAD
    assert bad.attempt == 3
    assert bad.failure is not None
    assert bad.failure.message == "worker lost"
    assert [past.outcome for past in await jobs.history(bad)] == ["lost"] * 3
    assert {job.state for job in innocents} == {State.SUCCEEDED}
    assert max(job.attempt for job in innocents) <= most
    assert [event["code"] for event in supervisor.all("exited")] == [137] * 3


async def test_kill_9_at_random_moments_loses_nothing_and_starts_nothing_twice(
    start: Start, jobs: Jobs, db: Path
) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    settings = {**SERVING, "kinds": ["moody"], "poll": 0.05}
    a = await start("A", "supervise", count=2, troubles=f"{seed}", **settings)
    b = await start("B", "supervise", count=1, troubles=f"{seed}", driver="apsw", **settings)
    c = await start("C", "serve", **settings, hold=True)
    kills = Counter[signal.Signals]()

    for _ in range(20):
        await trio.sleep(dice.uniform(0, 0.25))
        fate = dice.choice([signal.SIGKILL] * 4 + [signal.SIGTERM])
        victims = sorted(
            {event["pid"] for child in (a, b) for event in child.all("serving")}
            - {event["child"] for child in (a, b) for event in child.all("exited")}
        )
        if victims:
            with suppress(ProcessLookupError):
                os.kill(dice.choice(victims), fate)
                kills[fate] += 1
    for child in (a, b):
        await child.kill_all()
    await c.tell()
    with trio.fail_after(20):
        while not await all_have_ended(jobs):  # noqa: ASYNC110 - nobody here would ring
            await trio.sleep(0.05)
    assert await stopped(c) == 0

    assert integrity(db) == "ok"
    with connected(db) as connection:
        assert connection.execute("SELECT count(*) FROM trio_jobs_owner").fetchall() == [(0,)]
    everything = {job.id: job for job in await jobs.find(limit=10_000)}
    acknowledged = {event["job"] for child in (a, b) for event in child.all("enqueued")}
    assert acknowledged <= set(everything)
    # Beside them one from each process that died between its commit and what it said of it.
    assert len(everything) - len(acknowledged) <= kills.total() + 3
    starts = [event for child in (a, b, c) for event in child.starts()]
    assert len({(event["job"], event["token"]) for event in starts}) == len(starts)
    for id, number in Counter(event["job"] for event in starts).items():
        uncounted = [
            past
            for past in await jobs.history(id)
            if past.outcome in ("interrupted", "retry later")
        ]
        assert number <= everything[id].attempt + len(uncounted)
        assert everything[id].attempt <= moody.retry.attempts
    for child in (a, b):
        for event in child.all("cancel", answer=True):
            assert everything[event["job"]].state is State.CANCELLED
        assert not child.logged("Traceback")
        assert not child.logged("database is locked")
    assert kills[signal.SIGKILL] >= 5
    assert len(starts) >= 20


# A process stops for a while.


@pytest.mark.parametrize("second", ["has finished", "is at it"])
async def test_X2_a_stale_first_attempt_cannot_overwrite_the_second(
    serve: Serve, jobs: Jobs, db: Path, second: Literal["has finished", "is at it"]
) -> None:
    a = await serve("A")
    b = await serve("B", hold=True)
    await a.event("serving")
    record_final_writes(db)
    job = await jobs.enqueue(work, Work(LEASE, always=True))
    await a.event("start", job=job.id)

    await a.freeze(db)
    await b.tell()
    await b.event("start", job=job.id)
    if second == "has finished":
        await finished(jobs, job)
    a.thaw()
    await a.logs("has lost its lease")
    by_b = await finished(jobs, job)
    assert await stopped(b) == 0
    another = await finished(jobs, await jobs.enqueue(work, Work()))
    assert await stopped(a) == 0

    assert (by_b.state, by_b.attempt, by_b.result) == (State.SUCCEEDED, 2, "B")
    assert await jobs.get(job) == by_b
    assert final_writes(db) == [job.id, another.id]
    assert [past.outcome for past in await jobs.history(job)] == ["lost"]
    assert len(a.logged("lost its lease")) == 1
    assert another.result == "A"
    assert not a.logged("Traceback")


async def test_X2_a_handler_that_lost_its_lease_while_it_was_stopped_is_cancelled(
    serve: Serve, jobs: Jobs, db: Path
) -> None:
    a = await serve("A")
    b = await serve("B", hold=True)
    await a.event("serving")
    job = await jobs.enqueue(work, Work(3 * LEASE, always=True))
    await a.event("start", job=job.id)

    await a.freeze(db)
    await b.tell()
    await b.event("start", job=job.id)
    a.thaw()
    await a.event("cancelled", job=job.id)  # so before it would have ended
    end = await finished(jobs, job)

    assert await stopped(a) == 0
    assert len(a.logged("lost its lease")) == 1
    assert (end.state, end.attempt, end.result) == (State.SUCCEEDED, 2, "B")


async def test_X2_a_job_nobody_took_while_its_process_was_stopped_goes_on(
    serve: Serve, jobs: Jobs, db: Path
) -> None:
    a = await serve("A")
    await a.event("serving")
    job = await jobs.enqueue(work, Work(2 * LEASE))
    await a.event("start", job=job.id)

    await a.freeze(db)
    await trio.sleep(1.5 * LEASE)
    a.thaw()
    end = await finished(jobs, job)

    assert (end.state, end.attempt, end.result) == (State.SUCCEEDED, 1, "A")
    assert await jobs.history(job) == []
    assert len(a.starts()) == 1


# Leases.


async def test_E1_jobs_longer_than_their_lease_stay_with_their_process(
    serve: Serve, jobs: Jobs
) -> None:
    # Not shorter: under a thread that spins each step of a renewal waits 5 ms for the GIL, and
    # several times as long where other processes want the processor too.
    lease = 3.0
    a = await serve("A", lease=lease)
    b = await serve("B", lease=lease, hold=True)
    long = [
        await jobs.enqueue(work, Work(2 * lease, how="sleep")),
        await jobs.enqueue(work, Work(2 * lease, how="thread")),
        await jobs.enqueue(work, Work(1.2 * lease, how="spin")),
    ]
    for job in long:
        await a.event("start", job=job.id)
    await b.tell()
    await b.event("serving")

    ahead = await leases_ahead(jobs, long, a)
    ends = [await finished(jobs, job) for job in long]

    assert [(job.state, job.attempt) for job in ends] == [(State.SUCCEEDED, 1)] * 3
    assert len(a.starts()) == 3
    assert not b.starts()
    # By at least a third of the lease, but for a hiccup of the machine.
    assert len(ahead) > 20
    assert ahead[len(ahead) // 20] >= lease / 3
    assert ahead[0] > 0
    assert a.complaints() == []


@pytest.mark.parametrize("claimed", ["before the others", "while others run"])
async def test_E3_a_handler_that_blocks_the_loop_for_three_leases_loses_it_and_the_others(
    serve: Serve,
    jobs: Jobs,
    db: Path,
    claimed: Literal["before the others", "while others run"],
) -> None:
    record_final_writes(db)
    a = await serve("A")
    b = await serve("B", hold=True)
    await a.event("serving")
    block, innocent = Work(3 * LEASE, how="block"), Work(LONG)

    if claimed == "while others run":
        innocents = await jobs.enqueue_many(work, [innocent] * 3)
        for job in innocents:
            await a.event("start", job=job.id)
        await trio.sleep(LEASE / 2)
        blocker = await jobs.enqueue(work, block)
    else:
        blocker, *innocents = await jobs.enqueue_many(work, [block, *[innocent] * 3])
    await a.event("start", job=blocker.id)
    await b.tell()
    ends = [await finished(jobs, job) for job in [blocker, *innocents]]
    another = await jobs.enqueue(work, Work())
    await finished(jobs, another)
    assert await stopped(a) == 0

    assert {job.state for job in ends} == {State.SUCCEEDED}
    assert {(job.result, job.attempt) for job in ends} == {("B", 2)}
    assert final_writes(db) == sorted(job.id for job in [*ends, another])
    lines = a.logged("the event loop was blocked for")
    seconds = [float(line.split("blocked for ")[1].split()[0]) for line in lines]
    assert 3 * LEASE - LEASE <= max(seconds) <= 3 * LEASE + SLACK
    assert len(a.logged("lost its lease")) == 4
    assert not a.logged("Traceback")


# A process is told to stop.


async def test_D1_work_in_hand_is_finished_and_nothing_else_is_begun(
    serve: Serve, jobs: Jobs
) -> None:
    a = await serve("A", grace=LONG)
    await a.event("serving")
    # So long that none has ended when the signal arrives.
    everything = await jobs.enqueue_many(work, [Work(3.0)] * 54)
    for job in everything[:4]:
        await a.event("start", job=job.id)

    signalled = time.time()
    assert await stopped(a) == 0
    took = time.time() - signalled

    assert took <= 3.0 + SLACK  # not the grace
    now = [await jobs.get(job) for job in everything]
    assert [(job.state, job.attempt) for job in now[:4]] == [(State.SUCCEEDED, 1)] * 4
    assert [(job.state, job.attempt) for job in now[4:]] == [(State.QUEUED, 0)] * 50
    assert len(a.starts()) == 4
    assert a.complaints() == []


async def test_D2_what_does_not_end_in_time_is_handed_back_and_starts_at_once_elsewhere(
    serve: Serve, jobs: Jobs
) -> None:
    job = await jobs.enqueue(work, Work(LONG, always=True))
    a = await serve("A", lease=60.0, grace=0.3)
    b = await serve("B", lease=60.0, hold=True)
    await a.event("start", job=job.id)

    signalled = time.time()
    assert await stopped(a) == 0
    took = time.time() - signalled
    row = await raw(jobs, job)
    told = time.time()
    await b.tell()
    second = await b.event("start", job=job.id)

    assert 0.3 <= took <= 0.3 + SLACK  # not until it ends
    assert (row.state, row.lease_until) == (State.QUEUED, None)
    assert row.run_at <= signalled * 1e6
    assert (row.attempt, row.interruptions) == (0, 1)
    assert [past.outcome for past in await jobs.history(job)] == ["interrupted"]
    assert second["attempt"] == 1
    assert second["at"] <= told + POLL + SLACK  # not the lease


async def test_H3_a_thread_that_cannot_be_cancelled_keeps_its_lease_until_it_ends(
    serve: Serve, jobs: Jobs
) -> None:
    a = await serve("A", grace=0.2)
    b = await serve("B", hold=True)
    # Longer than grace, clean-up and one more lease.
    job = await jobs.enqueue(work, Work(3.0 + LEASE, how="thread"))
    await a.event("start", job=job.id)
    await b.tell()
    await b.event("serving")

    a.send(signal.SIGTERM)
    ahead = await leases_ahead(jobs, [job], a)
    code = await a.exit_code()

    assert code == 0
    assert ahead[0] > 0
    end = await jobs.get(job)
    assert (end.state, end.attempt, end.result) == (State.SUCCEEDED, 1, "A")
    assert not b.starts()
    [line] = a.complaints()
    assert f"job {job.id} (work)" in line
    assert "cannot be cancelled" in line


# Other processes look, cancel, retry.


async def test_C4_what_is_in_the_file_means_the_same_in_every_process(
    serve: Serve, jobs: Jobs, db: Path
) -> None:
    b = await serve("B", kinds=["careful"], hold=True)
    a = await serve("A")
    await a.event("serving")
    running = await jobs.enqueue(work, Work(LONG))
    delayed = await jobs.enqueue(careful, Work(), delay=1)
    await a.event("start", job=running.id)

    with connected(db) as connection:
        now = time.time()
        rows = connection.execute("SELECT * FROM trio_jobs_job")
        instants = [
            (description[0], value / 1e6 - now)
            for row in rows
            for description, value in zip(rows.description, row, strict=True)
            if value is not None and description[0].endswith(("_at", "_until", "deadline"))
        ]
    await b.tell()
    started = await b.event("start", job=delayed.id)

    # Another clock, or another unit, would be hours away.
    assert 1 <= started["at"] - unix(delayed.enqueued_at) <= 1 + POLL + SLACK
    assert {name for name, _ in instants} == {"enqueued_at", "run_at", "started_at", "lease_until"}
    assert all(-SLACK <= seconds <= LEASE + SLACK for _, seconds in instants)


async def test_a_job_enqueued_in_one_process_starts_in_another_within_poll(
    serve: Serve, jobs: Jobs
) -> None:
    a = await serve("A", lease=LONG)  # nothing but a poll would bring it
    await a.event("serving")
    job = await jobs.enqueue(work, Work())

    started = await a.event("start", job=job.id)

    assert 0 <= started["at"] - unix(job.enqueued_at) <= POLL + SLACK


async def test_wait_finished_hears_of_an_end_in_another_process_within_poll(
    serve: Serve, jobs: Jobs
) -> None:
    a = await serve("A")
    job = await jobs.enqueue(work, Work(0.3))
    await a.event("start", job=job.id)

    with trio.fail_after(20):
        end = await jobs.wait_finished(job, poll=POLL)
    heard = time.time()

    assert end.unwrap() == "A"
    assert 0 <= heard - unix(end.finished_at) <= POLL + SLACK


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells of writes to a file")
async def test_processes_hear_of_each_other_at_once_and_not_only_once_a_poll(
    serve: Serve, jobs: Jobs
) -> None:
    a = await serve("A", poll=LONG, workers=1)
    await a.event("serving")

    starts, ends = [], []
    for _ in range(5):
        job = await jobs.enqueue(work, Work())
        ended = await jobs.wait_finished(job, poll=LONG)
        ends.append(time.time() - unix(ended.finished_at))
        starts.append((await a.event("start", job=job.id))["at"] - unix(job.enqueued_at))
    job = await jobs.enqueue(work, Work(LONG))
    await a.event("start", job=job.id)
    await jobs.cancel(job)
    cancelled = await jobs.wait_finished(job, poll=LONG)

    assert sorted(starts)[2] <= SLACK  # not a poll
    assert sorted(ends)[2] <= SLACK
    assert cancelled.state is State.CANCELLED
    assert a.complaints() == []


async def test_K1_a_cancel_in_one_process_reaches_the_handler_in_another_within_poll(
    serve: Serve, jobs: Jobs
) -> None:
    # No worker is free to claim for, and then nothing may be claimed at all.
    a = await serve("A", lease=60.0, workers=2)
    while_busy, while_draining = await jobs.enqueue_many(work, [Work(LONG)] * 2)
    await a.event("start", job=while_busy.id)
    await a.event("start", job=while_draining.id)

    waits = []
    for job in (while_busy, while_draining):
        assert await jobs.cancel(job)
        asked = time.time()
        reached = await a.event("cancelled", job=job.id)
        waits.append(reached["at"] - asked)
        if job is while_busy:
            a.send(signal.SIGUSR1)
            await a.event("draining")
    ends = [await finished(jobs, job) for job in (while_busy, while_draining)]

    assert max(waits) <= POLL + SLACK  # not a third of the lease, when it is renewed
    assert await a.exit_code() == 0
    assert [(job.state, job.attempt) for job in ends] == [(State.CANCELLED, 1)] * 2
    for job in ends:
        assert await jobs.cancel(job) is False
        assert [past.outcome for past in await jobs.history(job)] == ["cancelled"]
    assert not a.all("end")


async def test_K1_what_cancel_answers_is_what_becomes_of_the_job(serve: Serve, jobs: Jobs) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    a = await serve("A", poll=0.05, workers=10)
    await a.event("serving")
    # Ten at a time, each about 10 ms: they end while we go through them.
    many = await jobs.enqueue_many(work, [Work(dice.uniform(0, 0.02)) for _ in range(300)])
    many.append(await jobs.enqueue(work, Work(), delay=LONG))
    await finished(jobs, many[0])

    answers: dict[int, bool] = {}
    for job in many:
        answers[job.id] = await jobs.cancel(job)
        await trio.sleep(dice.choice([0, 0, 0.001]))
    ends = [await finished(jobs, job) for job in many]

    cancelled = {job.id: job.state is State.CANCELLED for job in ends}
    assert cancelled == answers
    assert set(answers.values()) == {True, False}
    assert {job.state for job in ends} == {State.CANCELLED, State.SUCCEEDED}
    assert a.complaints() == []


async def test_K5_two_retries_from_two_processes_give_one_new_life(
    serve: Serve, start: Start, jobs: Jobs
) -> None:
    rounds = 20
    dead = await jobs.enqueue_many(hopeless, [None] * rounds)
    a = await serve("A", kinds=["hopeless"])
    b = await serve("B", kinds=["hopeless"], hold=True)
    two = await start("agent", "agents", count=2)
    assert {(await finished(jobs, job)).state for job in dead} == {State.DEAD}
    assert await stopped(a) == 0

    answers = [await two.ask("retry", of=2, id=job.id) for job in dead]
    await b.tell()
    ends = [await finished(jobs, job) for job in dead]
    assert await stopped(b) == 0

    for pair in answers:
        assert sorted(answer.get("error", "new life") for answer in pair) == [
            "StateError",
            "new life",
        ]
    assert {(job.state, job.attempt) for job in ends} == {(State.DEAD, 1)}
    assert Counter(event["job"] for event in b.starts()) == {job.id: 1 for job in dead}


async def test_U1_sixteen_processes_with_one_key_enqueue_one_job(start: Start, jobs: Jobs) -> None:
    rounds, many = 20, 16
    agents = await start("agent", "agents", count=many)

    ids = []
    for number in range(rounds):
        answers = await agents.ask("enqueue", of=many, key=f"key {number}")
        ids.append({answer.get("value") for answer in answers})

    assert [len(of_round) for of_round in ids] == [1] * rounds
    found = await jobs.find(limit=1000)
    assert [{job.id} for job in found] == ids
    assert [job.key for job in found] == [f"key {number}" for number in range(rounds)]
    assert agents.complaints() == []


async def test_X1_four_processes_start_each_of_many_jobs_exactly_once(
    serve: Serve, jobs: Jobs, db: Path
) -> None:
    many = await jobs.enqueue_many(work, [Work()] * 200)
    # Two of them with the other driver: that is another SQLite on the same file.
    workers = [
        await serve(name, driver=driver)
        for name, driver in [("A", "sqlite3"), ("B", "apsw"), ("C", "sqlite3"), ("D", "apsw")]
    ]
    for one in workers:
        await one.event("serving")
    many += await jobs.enqueue_many(work, [Work(0.01)] * 200)

    ends = [await finished(jobs, job) for job in many]
    codes = [await stopped(one) for one in workers]

    starts = Counter(event["job"] for one in workers for event in one.starts())
    assert starts == {job.id: 1 for job in many}
    assert {(job.state, job.attempt) for job in ends} == {(State.SUCCEEDED, 1)}
    assert [one.complaints() for one in workers] == [[]] * 4
    assert codes == [0] * 4
    assert sum(event["succeeded"] for one in workers for event in one.all("stopped")) == len(many)
    assert sum(1 for one in workers if one.starts()) >= 2
    assert integrity(db) == "ok"


# The file is locked, new, or inherited.


async def test_M1_a_lock_shorter_than_the_busy_timeout_is_not_noticed(
    serve: Serve, jobs: Jobs, db: Path
) -> None:
    # The lock falls on an end (at 1.5 s), a renewal (at 2 s), claims and an enqueue.
    lease = 6.0
    a = await serve("A", lease=lease)
    ends_then, renewed_then = await jobs.enqueue_many(work, [Work(1.5), Work(4.0)])
    started = await a.event("start", job=renewed_then.id)
    enqueued_then: list[Job[str]] = []

    async def enqueue() -> None:
        enqueued_then.append(await jobs.enqueue(work, Work()))

    async with trio.open_nursery() as nursery:
        with write_lock(db):
            nursery.start_soon(enqueue)
            await a.event("end", job=ends_then.id)
            await trio.sleep(max(0, started["at"] + lease / 3 + 0.5 - time.time()))
            assert (await jobs.get(ends_then)).state is State.RUNNING  # it came after the lock
            assert not enqueued_then
    ends = [await finished(jobs, job) for job in [ends_then, renewed_then, *enqueued_then]]

    assert {(job.state, job.attempt) for job in ends} == {(State.SUCCEEDED, 1)}
    assert len(a.starts()) == 3
    assert a.complaints() == []


async def test_M1_a_lock_longer_than_the_busy_timeout_is_told_to_callers_and_outlived_by_runners(
    serve: Serve, jobs: Jobs, db: Path
) -> None:
    a = await serve("A", busy_timeout=0.3, lease=60.0, kinds=["careful"])
    b = await serve("B", busy_timeout=0.3, lease=60.0, kinds=["careful"], hold=True)
    # Its limit is a sixth of the lease before the end: so long it may stall.
    c = await serve("C", busy_timeout=0.3, lease=6.0)
    for one in (a, c):
        await one.event("serving")
    ends_then = await jobs.enqueue(careful, Work(2.5))
    loses_its_lease = await jobs.enqueue(work, Work(LONG))
    await a.event("start", job=ends_then.id)
    await c.event("start", job=loses_its_lease.id)

    async with open_jobs(SqliteStore(db, busy_timeout=0.3)) as impatient:
        with write_lock(db):
            locked = time.time()
            await b.tell()  # a process may also start while the file is locked
            with pytest.raises(StoreBusy):
                await impatient.enqueue(careful, Work())
            refused = time.time()
            lease_until = await lease_of(jobs, loses_its_lease)
            await b.event("serving")
            await a.event("end", job=ends_then.id)
            await c.event("cancelled", job=loses_its_lease.id)
            assert (await jobs.get(ends_then)).state is State.RUNNING
        released = time.time()
    assert len(await jobs.find()) == 2
    later = await jobs.enqueue(careful, Work())
    ends = [await finished(jobs, job) for job in [ends_then, later]]
    taken_up = await finished(jobs, loses_its_lease)

    assert 0.3 <= refused - locked < 5.0  # the busy timeout that nobody set
    assert {(job.state, job.attempt) for job in ends} == {(State.SUCCEEDED, 1)}
    # Not the lease of A.
    assert max(unix(job.finished_at) for job in [*ends, taken_up]) <= released + 2 + SLACK
    assert len(a.starts(ends_then.id)) == 1
    [stopped_itself] = c.all("cancelled")
    assert stopped_itself["at"] <= lease_until
    assert (taken_up.state, taken_up.attempt, taken_up.result) == (State.SUCCEEDED, 2, "C")
    assert [past.outcome for past in await jobs.history(taken_up)] == ["lost"]
    assert a.logged("database is locked")
    assert c.logged("database is locked")
    for one in (a, b, c):
        assert len(one.complaints()) <= 10
        assert not one.logged("Traceback")
        assert await stopped(one) == 0


async def test_M1_a_stop_while_the_file_is_locked_is_bounded(
    serve: Serve, jobs: Jobs, db: Path
) -> None:
    a = await serve("A", grace=0.2, lease=LONG, busy_timeout=LONG)
    b = await serve("B", hold=True)
    await a.event("serving")
    returned, interrupted = await jobs.enqueue_many(work, [Work(1.5), Work(LONG)])
    await a.event("start", job=interrupted.id)

    with write_lock(db):
        await a.event("end", job=returned.id)
        assert (await jobs.get(returned)).state is State.RUNNING  # it came after the lock
        signalled = time.time()
        code = await stopped(a)
        took = time.time() - signalled
    await b.tell()
    ends = [await finished(jobs, job) for job in (returned, interrupted)]

    assert code == 0
    assert took <= 0.2 + 2 + 2 + SLACK  # not the busy timeout
    assert [(job.state, job.result, job.attempt) for job in ends] == [(State.SUCCEEDED, "B", 2)] * 2
    assert not a.logged("Traceback")


async def test_M2_ten_processes_may_create_the_file_at_the_same_instant(
    start: Start, db: Path
) -> None:
    rounds, many = 20, 10
    agents = await start("agent", "agents", count=many)
    for number in range(many):
        await agents.event("ready", agent=number)

    for number in range(rounds):
        new = db.with_name(f"new-{number}.db")
        answers = await agents.ask("visit", of=many, db=str(new))
        with connected(new) as connection:
            mode = connection.execute("PRAGMA journal_mode").fetchall()
        async with open_jobs(new) as jobs:
            found = await jobs.find()

        assert [answer.get("error") for answer in answers] == [None] * many
        ids = sorted(answer["value"] for answer in answers if answer["value"] is not None)
        assert ids == [job.id for job in found] == [1, 2, 3, 4, 5]
        assert mode == [("wal",)]
        assert integrity(new) == "ok"
    assert agents.complaints() == []


@pytest.mark.parametrize("driver", ["sqlite3", "apsw"])
@pytest.mark.parametrize("how", ["fork", "pool"])
async def test_M9_a_forked_process_is_told_so_and_hurts_nobody(
    start: Start, db: Path, how: Literal["fork", "pool"], driver: Literal["sqlite3", "apsw"]
) -> None:
    rounds = 5
    a = await start("A", "fork_beside", rounds=rounds, how=how, driver=driver)

    assert await a.exit_code() == 0

    tried = Counter((event["what"], event["answer"].split(":")[0]) for event in a.all("tried"))
    inherited = ["enqueue_on", "enqueue", "get"] if how == "fork" else []
    assert tried == {(what, "StoreError"): rounds for what in [*inherited, "open"]}
    assert all("fork" in event["answer"] for event in a.all("tried"))
    assert [event["code"] for event in a.all("exited")] == ([0] * rounds if inherited else [])
    [done] = a.all("done")
    async with open_jobs(db) as jobs:
        assert [job.id for job in await jobs.find(limit=100_000)] == done["acknowledged"]
    assert integrity(db) == "ok"
    assert not a.logged("Traceback")


async def test_M9_a_fork_in_an_async_function_gets_errors_and_does_not_hang(
    start: Start, db: Path
) -> None:
    a = await start("A", "fork_inside")

    assert await a.exit_code() == 0

    tried = {event["what"]: event["answer"] for event in a.all("tried")}
    assert {what: answer.split(":")[0] for what, answer in tried.items()} == {
        "enqueue": "StoreError",
        "get": "StoreError",
        "cancel": "StoreError",
    }
    async with open_jobs(db) as jobs:
        assert [job.id for job in await jobs.find()] == [1, 2]
