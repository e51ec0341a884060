"""Rows in which somebody wrote by hand what no job can have: they hurt nobody, and are mended."""

from __future__ import annotations

import itertools
import logging
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
import trio
from stories import Script, Trouble, finished, make_store, serving, writer
from trio.testing import MockClock

import trio_jobs
from trio_jobs import Job, Jobs, Kind, SqliteStore, State, StoreError

plain = Kind("plain", None)

NONSENSE: list[object] = [
    "abc",
    "",
    b"\x00\xff",
    1.5,
    float("inf"),
    float("-inf"),
    -1,
    2,
    9,
    2**63 - 1,
    -(2**63),
]

NUMBERS = [
    "state",
    "attempt",
    "claims",
    "interruptions",
    "cancel_requested",
    "priority",
    "enqueued_at",
    "run_at",
    "deadline",
    "lease_until",
    "started_at",
    "finished_at",
    "owner",
]

AS = {
    "ready": "state = 0",
    "scheduled": "state = 1, run_at = enqueued_at + 1000000",
    "lost": "state = 2, claims = 1, attempt = 1, lease_until = 1",
    "ended": "state = 4, finished_at = 1",
}


async def edited(store: Trouble, jobs: Jobs, column: str, first: str) -> list[Job[None]]:
    """A job for every nonsense, with that in the column."""
    made = await jobs.enqueue_many(
        plain, [None] * len(NONSENSE), keys=[f"key {n}" for n in range(len(NONSENSE))]
    )
    for job, nonsense in zip(made, NONSENSE, strict=True):
        writer(store).execute(f"UPDATE trio_jobs_job SET {first} WHERE id = ?", (job.id,))
        writer(store).execute(
            f"UPDATE trio_jobs_job SET {column} = ? WHERE id = ?",
            (nonsense, job.id),  # type: ignore[arg-type]
        )
    return made


@pytest.mark.parametrize("first", AS)
@pytest.mark.parametrize("column", NUMBERS)
@pytest.mark.parametrize("driver", ["memory", "file"])
async def test_P1_nonsense_in_any_column_of_numbers_stops_nobody(
    driver: str, column: str, first: str, tmp_path: Path, autojump_clock: MockClock
) -> None:
    store = make_store(driver, tmp_path, Trouble)
    claims: list[str] = []
    async with trio_jobs.open_jobs(store) as jobs:
        made = await edited(store, jobs, column, AS[first])
        store.rule = lambda step: claims.append(step) if step == "claim" else None
        async with serving(jobs, plain.handled_by(Script(None)), workers=2) as runner:
            await trio.sleep(100)
            good = await finished(jobs, *await jobs.enqueue_many(plain, [None] * 5), within=10)
            trouble = runner.statistics().trouble
            found = await jobs.find()
            for odd in made:
                assert await jobs.get(odd) in found
                assert await jobs.cancel(odd) in (True, False)
                await jobs.history(odd)
            again = (
                await finished(
                    jobs,
                    *[await jobs.enqueue(plain, None, key=f"key {n}") for n in range(3)],
                    within=1000,
                )
                if column == "state"
                else []
            )

        assert [job.state for job in [*good, *again]] == [State.SUCCEEDED] * (5 + len(again))
        assert trouble is None
        assert len(claims) < 200
        assert len(found) == len(made) + 5
        assert sum((await jobs.counts()).values()) >= len(found)
        for state in State:
            assert len(await jobs.find(state=state)) == (await jobs.counts())[state]
        for job in found:
            assert job.to_dict()


@pytest.mark.parametrize("column", NUMBERS)
async def test_a_job_that_has_ended_is_retried_whatever_was_written_into_it(
    column: str, autojump_clock: MockClock
) -> None:
    store = Trouble(":memory:")
    async with trio_jobs.open_jobs(store) as jobs:
        made = await edited(store, jobs, column, AS["ended"])
        for job in made:
            if (await jobs.get(job)).state is not State.FAILED:
                continue  # a state that a job can have
            with trio.fail_after(10):
                retried = await jobs.retry(job)
            assert retried.state is State.QUEUED
            assert await jobs.get(job) == retried


@pytest.mark.parametrize("first", ["alone", "beside others"])
@pytest.mark.parametrize(
    "change",
    [
        "run_at = datetime('now')",
        "run_at = x'00'",
        "state = 1, run_at = datetime('now')",
        "state = 1, run_at = ''",
        "state = 1, run_at = x''",
        "deadline = datetime('now')",
        "state = 1, run_at = enqueued_at + 1, deadline = datetime('now')",
        "state = 2, lease_until = datetime('now')",
        "state = 2, lease_until = ''",
        "state = 2, lease_until = x'00'",
        "state = 2, lease_until = NULL",
        "state = 2, lease_until = 1, run_at = datetime('now')",
    ],
)
async def test_P2_a_job_with_an_instant_that_somebody_wrote_as_text_runs(
    change: str, first: str, autojump_clock: MockClock
) -> None:
    """SQLite keeps it as it is, in a column of integers, and above all numbers."""
    store = SqliteStore(":memory:")
    async with trio_jobs.open_jobs(store) as jobs:
        odd = await jobs.enqueue(plain, None)
        writer(store).execute(f"UPDATE trio_jobs_job SET {change} WHERE id = ?", (odd.id,))
        if first == "beside others":
            await jobs.enqueue_many(plain, [None] * 3)
            await jobs.enqueue_many(plain, [None] * 3, delay=100)
            writer(store).execute(
                """
                INSERT INTO trio_jobs_job (id, kind, state, claims, lease_until, run_at, payload)
                VALUES (90, 'plain', 2, 1, 9e15, 0, 'null')
                """
            )
        async with serving(jobs, plain.handled_by(Script(None)), workers=2):
            await trio.sleep(50)
            [ended, good] = await finished(jobs, odd, await jobs.enqueue(plain, None), within=60)

    assert (ended.state, good.state) == (State.SUCCEEDED, State.SUCCEEDED)
    assert ended.deadline is None


async def test_very_many_instants_that_were_written_as_text_hold_up_no_claim_for_long(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    mended: list[int] = []

    def count(step: str) -> None:
        if step == "claim":
            mended.append(sum("which is mended" in one.message for one in caplog.records))

    store = Trouble(":memory:")
    store.rule = count
    async with trio_jobs.open_jobs(store) as jobs:
        odd = await jobs.enqueue_many(plain, [None] * 350)
        writer(store).execute("UPDATE trio_jobs_job SET state = 1, run_at = datetime('now')")
        async with serving(jobs, plain.handled_by(Script(None))):
            ended = await finished(jobs, *odd, within=10)

    assert {job.state for job in ended} == {State.SUCCEEDED}
    assert mended[0] == 0
    assert max(b - a for a, b in itertools.pairwise(mended)) == 100


async def test_a_request_to_cancel_that_is_no_1_cancels_the_running_handler_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The runner's changes were refused for ever, because it reads that as a request."""
    path = tmp_path / "jobs.db"
    async with trio_jobs.open_jobs(path) as jobs:
        started, is_edited = trio.Event(), trio.Event()

        async def run(attempt: object) -> None:
            started.set()
            await is_edited.wait()

        async with serving(jobs, plain.handled_by(run)):
            job = await jobs.enqueue(plain, None)
            await started.wait()
            with closing(sqlite3.connect(path, isolation_level=None)) as connection:
                connection.execute("UPDATE trio_jobs_job SET cancel_requested = 2")
            is_edited.set()
            [ended] = await finished(jobs, job, within=10)

    assert ended.state is State.CANCELLED
    [record] = [one for one in caplog.records if one.levelno >= logging.WARNING]
    assert record.message == (
        f"job {job.id}: somebody wrote what no job can have, which is mended: cancel_requested"
    )


@pytest.mark.parametrize("request_", [b"\x00", "abc", 2])
async def test_leases_are_renewed_beside_a_request_to_cancel_that_is_nonsense(
    request_: object, autojump_clock: MockClock
) -> None:
    store = Trouble(":memory:")
    async with trio_jobs.open_jobs(store) as jobs:

        async def run(attempt: object) -> None:
            await trio.sleep(100)

        async with serving(jobs, plain.handled_by(run), lease=9, poll=1):
            odd, good = await jobs.enqueue_many(plain, [None, None])
            await trio.sleep(1)
            writer(store).execute(
                "UPDATE trio_jobs_job SET cancel_requested = ? WHERE id = ?",
                (request_, odd.id),  # type: ignore[arg-type]
            )
            ended = await finished(jobs, odd, good, within=200)

    assert [(job.state, job.attempt) for job in ended] == [
        (State.CANCELLED, 1),
        (State.SUCCEEDED, 1),
    ]


@pytest.mark.parametrize("column", ["claim", "number", "started_at", "ended_at", "outcome"])
async def test_nonsense_in_the_past_of_a_job_can_be_shown(
    column: str, autojump_clock: MockClock
) -> None:
    store = Trouble(":memory:")
    async with trio_jobs.open_jobs(store) as jobs:
        job = await jobs.enqueue(plain, None)
        async with serving(jobs, plain.handled_by(Script(RuntimeError(), None))):
            await finished(jobs, job)
        for nonsense in NONSENSE:
            writer(store).execute(
                f"UPDATE trio_jobs_past SET {column} = ?",
                (nonsense,),  # type: ignore[arg-type]
            )
            [past] = await jobs.history(job)

            assert past.started_at.isoformat()
            assert past.ended_at.isoformat()


@pytest.mark.parametrize("column", ["place", "pid", "started"])
async def test_nonsense_about_those_who_claim_stops_nobody(tmp_path: Path, column: str) -> None:
    path = tmp_path / "jobs.db"
    async with (
        trio_jobs.open_jobs(path) as jobs,
        serving(jobs, plain.handled_by(Script(None)), poll=0.05) as runner,
    ):
        await finished(jobs, await jobs.enqueue(plain, None), within=10)
        for nonsense in NONSENSE:
            with closing(sqlite3.connect(path, isolation_level=None)) as connection:
                connection.execute(f"UPDATE trio_jobs_owner SET {column} = ?", (nonsense,))
            jobs._store._owners._looked_at = 0  # type: ignore[attr-defined]
            await finished(jobs, await jobs.enqueue(plain, None), within=10)

        assert runner.statistics().trouble is None


async def test_a_version_that_is_none_is_refused(tmp_path: Path) -> None:
    async with trio_jobs.open_jobs(tmp_path / "jobs.db"):
        pass
    with closing(sqlite3.connect(tmp_path / "jobs.db", isolation_level=None)) as connection:
        connection.execute("UPDATE trio_jobs_meta SET version = 'abc'")

    with pytest.raises(StoreError, match="does not say which version"):
        async with trio_jobs.open_jobs(SqliteStore(tmp_path / "jobs.db")):
            pass


@pytest.mark.parametrize("driver", ["memory", "file"])
async def test_a_file_without_its_meta_row_is_refused_by_name(
    driver: str, tmp_path: Path, autojump_clock: MockClock
) -> None:
    store = make_store(driver, tmp_path, Trouble)
    async with trio_jobs.open_jobs(store) as jobs:
        await jobs.enqueue(plain, None)
        await trio_jobs.run_once(jobs, [plain.handled_by(Script(None))])
        writer(store).execute("DELETE FROM trio_jobs_meta")
        with pytest.raises(StoreError, match="trio_jobs_meta must have one row") as caught:
            await jobs.enqueue(plain, None)

    assert caught.value.is_permanent
    if driver == "file":
        with pytest.raises(StoreError, match="opening: trio_jobs_meta must have one row"):
            async with trio_jobs.open_jobs(tmp_path / "jobs.db"):
                pass
