"""`enqueue_on`: a job inside the application's own transaction, on its own connection."""

from __future__ import annotations

import contextlib
import functools
import math
import sqlite3
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from stories import LONG, in_threads, real_timeout
from trio.testing import MockClock

import trio_jobs
from trio_jobs import (
    Attempt,
    Job,
    Jobs,
    Kind,
    PayloadError,
    SqliteStore,
    State,
    StoreBusy,
    StoreError,
    testing,
)

EPOCH = testing.EPOCH
CANARY = "hunter2-XYZ"

number = Kind("number", int, int)


@number.handled_by
async def double(attempt: Attempt[int, int]) -> int:
    return 2 * attempt.payload


@dataclass
class Mode:
    """One way in which applications use sqlite3."""

    settings: dict[str, Any]
    begin: str | None = None
    """What the application does itself to begin a transaction."""


MODES = {
    "implicit": Mode({}),
    "deferred": Mode({"isolation_level": "DEFERRED"}),
    "immediate": Mode({"isolation_level": "IMMEDIATE"}),
    "exclusive": Mode({"isolation_level": "EXCLUSIVE"}),
    "explicit": Mode({"isolation_level": None}, "BEGIN"),
    "explicit immediate": Mode({"isolation_level": None}, "BEGIN IMMEDIATE"),
}
if sys.version_info >= (3, 12):
    MODES["autocommit=False"] = Mode({"autocommit": False})
    MODES["autocommit=True"] = Mode({"autocommit": True}, "BEGIN")

every_mode = pytest.mark.parametrize("mode", MODES)


@contextlib.contextmanager
def application(path: Path, mode: str = "implicit") -> Iterator[sqlite3.Connection]:
    """The application's own connection, in a transaction if it begins them itself."""
    chosen = MODES[mode]
    with contextlib.closing(sqlite3.connect(path, timeout=0.1, **chosen.settings)) as connection:
        if chosen.begin is not None:
            connection.execute(chosen.begin)
        yield connection


@pytest.fixture
async def file_jobs(tmp_path: Path) -> AsyncIterator[Jobs]:
    async with trio_jobs.open_jobs(tmp_path / "jobs.db") as jobs:
        with contextlib.closing(sqlite3.connect(tmp_path / "jobs.db")) as connection:
            connection.execute("CREATE TABLE user (name TEXT)")
        yield jobs


def end(connection: sqlite3.Connection, commits: bool) -> None:
    """End the transaction as this mode does it."""
    if connection.isolation_level is None or getattr(connection, "autocommit", -1) is True:
        connection.execute("COMMIT" if commits else "ROLLBACK")
    elif commits:
        connection.commit()
    else:
        connection.rollback()


def users(path: Path) -> list[str]:
    with contextlib.closing(sqlite3.connect(path)) as connection:
        return [name for (name,) in connection.execute("SELECT name FROM user")]


@every_mode
@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("commits", [True, False])
async def test_a_job_exists_exactly_if_the_application_s_writes_do(
    file_jobs: Jobs, tmp_path: Path, mode: str, is_first: bool, commits: bool
) -> None:
    path = tmp_path / "jobs.db"
    with application(path, mode) as connection:
        if not is_first:
            connection.execute("INSERT INTO user VALUES ('ann')")
        id = file_jobs.enqueue_on(connection, number, 7, priority=3, key="k")
        was_in_transaction = connection.in_transaction
        if is_first:
            connection.execute("INSERT INTO user VALUES ('ann')")
        seen_before = await file_jobs.find()
        end(connection, commits)
    found = await file_jobs.find()

    assert was_in_transaction
    assert seen_before == []
    assert users(path) == ["ann"] * commits
    assert [(job.id, job.priority, job.key) for job in found] == [(id, 3, "k")] * commits
    # And the file is as usable as before.
    await file_jobs.enqueue(number, 1)


async def test_without_a_transaction_the_job_is_stored_at_once(
    file_jobs: Jobs, tmp_path: Path
) -> None:
    with contextlib.closing(
        sqlite3.connect(tmp_path / "jobs.db", isolation_level=None)
    ) as connection:
        id = file_jobs.enqueue_on(connection, number, 7)
        await trio_jobs.run_once(file_jobs, [double])
        ended = await file_jobs.get(id, number)

        assert not connection.in_transaction
        assert ended.unwrap() == 14


async def test_a_connection_that_begins_by_itself_keeps_the_job_and_the_lock_until_it_commits(
    file_jobs: Jobs, tmp_path: Path
) -> None:
    with contextlib.closing(sqlite3.connect(tmp_path / "jobs.db", timeout=0)) as other:
        with contextlib.closing(sqlite3.connect(tmp_path / "jobs.db")) as connection:
            file_jobs.enqueue_on(connection, number, 7)
            was_in_transaction = connection.in_transaction
            with pytest.raises(StoreBusy):
                file_jobs.enqueue_on(other, number, 8)
        found = await file_jobs.find()

    assert was_in_transaction
    assert found == []


async def test_a_block_that_raises_takes_the_job_with_it(file_jobs: Jobs, tmp_path: Path) -> None:
    with application(tmp_path / "jobs.db") as connection:
        try:
            with connection:
                file_jobs.enqueue_on(connection, number, 7)
                raise ZeroDivisionError
        except ZeroDivisionError:
            pass

    assert await file_jobs.find() == []


async def test_a_savepoint_that_is_rolled_back_takes_only_its_own_job_with_it(
    file_jobs: Jobs, tmp_path: Path
) -> None:
    with application(tmp_path / "jobs.db", "explicit") as connection:
        kept = file_jobs.enqueue_on(connection, number, 1)
        connection.execute("SAVEPOINT inner")
        file_jobs.enqueue_on(connection, number, 2)
        connection.execute("ROLLBACK TO inner")
        connection.execute("COMMIT")

    assert [job.id for job in await file_jobs.find()] == [kept]


@pytest.mark.parametrize("commits", [True, False])
async def test_it_takes_the_same_options_as_enqueue(
    file_jobs: Jobs, tmp_path: Path, autojump_clock: MockClock, commits: bool
) -> None:
    deadline = EPOCH + timedelta(days=1)
    with application(tmp_path / "jobs.db") as connection:
        first = file_jobs.enqueue_on(connection, number, 1, delay=5, deadline=deadline)
        second = file_jobs.enqueue_on(connection, number, 1, run_at=deadline)
        connection.commit()
    jobs = await file_jobs.find()

    assert [job.id for job in jobs] == [first, second]
    assert [job.run_at for job in jobs] == [EPOCH + timedelta(seconds=5), deadline]
    assert jobs[0].deadline == deadline


async def test_a_payload_that_does_not_fit_leaves_the_transaction_alone(
    file_jobs: Jobs, tmp_path: Path
) -> None:
    wrong: Any = CANARY
    with application(tmp_path / "jobs.db") as connection:
        connection.execute("INSERT INTO user VALUES ('ann')")
        with pytest.raises(PayloadError) as caught:
            file_jobs.enqueue_on(connection, number, wrong)
        connection.commit()

    assert CANARY not in str(caught.value)
    assert users(tmp_path / "jobs.db") == ["ann"]
    assert await file_jobs.find() == []


BAD_OPTIONS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"delay": -1}, ValueError, "delay must be finite and 0 or more"),
    ({"delay": math.nan}, ValueError, "delay must be finite and 0 or more"),
    ({"delay": "5"}, TypeError, "delay must be a number"),
    ({"run_at": datetime(2024, 1, 1)}, ValueError, "run_at must be an aware datetime"),
    ({"run_at": date(2024, 1, 1)}, TypeError, "run_at must be a datetime"),
    ({"deadline": datetime(2024, 1, 1)}, ValueError, "deadline must be an aware datetime"),
    ({"delay": 1, "run_at": EPOCH}, ValueError, "delay and run_at"),
    ({"priority": 2**31}, ValueError, "priority must fit in 32 bits"),
    ({"key": 5}, TypeError, "key must be a str"),
    ({"key": "\ud800"}, ValueError, "key has a lone surrogate"),
]


async def test_the_application_s_transaction_is_not_touched_by_options_that_cannot_be(
    tmp_path: Path,
) -> None:
    path = tmp_path / "jobs.db"
    async with trio_jobs.open_jobs(path) as jobs:
        with contextlib.closing(sqlite3.connect(path)) as connection:
            for options, error, text in BAD_OPTIONS:
                with pytest.raises(error, match=text):
                    jobs.enqueue_on(connection, number, 1, **options)

                assert not connection.in_transaction, options


async def test_a_live_key_gives_its_job_in_the_application_s_transaction_too(
    file_jobs: Jobs, tmp_path: Path
) -> None:
    job = await file_jobs.enqueue(number, 1, key="old")
    with application(tmp_path / "jobs.db") as connection:
        old = file_jobs.enqueue_on(connection, number, 2, key="old")
        new = file_jobs.enqueue_on(connection, number, 3, key="new")
        again = file_jobs.enqueue_on(connection, number, 4, key="new")
        connection.commit()

    assert old == job.id
    assert new == again != job.id
    assert len(await file_jobs.find()) == 2


async def test_U1_threads_with_their_own_connections_get_one_job_for_one_key(
    file_jobs: Jobs, tmp_path: Path
) -> None:
    barrier = threading.Barrier(8)
    ids: list[list[int]] = [[] for _ in range(50)]

    def enqueue() -> None:
        # Each statement is a transaction of its own: the worst case for a key.
        with contextlib.closing(
            sqlite3.connect(tmp_path / "jobs.db", timeout=LONG, isolation_level=None)
        ) as connection:
            connection.execute("PRAGMA wal_autocheckpoint = 0")
            for round in range(50):
                barrier.wait(LONG)
                ids[round].append(file_jobs.enqueue_on(connection, number, 1, key=str(round)))

    await trio.to_thread.run_sync(in_threads, [enqueue] * 8)
    found = await file_jobs.find()

    assert [len(set(some)) for some in ids] == [1] * 50
    assert [job.id for job in found] == sorted({some[0] for some in ids})


@pytest.mark.parametrize("commits", [True, False])
async def test_it_may_be_called_in_any_thread(
    file_jobs: Jobs, tmp_path: Path, commits: bool
) -> None:
    def register() -> int:
        with application(tmp_path / "jobs.db") as connection:
            connection.execute("INSERT INTO user VALUES ('ann')")
            id = file_jobs.enqueue_on(connection, number, 7)
            end(connection, commits)
            return id

    id = await trio.to_thread.run_sync(register)

    assert [job.id for job in await file_jobs.find()] == [id] * commits


class Shouting(sqlite3.Cursor):
    """A cursor of an application that does its own thing with rows."""

    def fetchall(self) -> list[Any]:
        raise AssertionError("this is the application's cursor")


def set_row_factory(connection: sqlite3.Connection) -> None:
    connection.row_factory = sqlite3.Row


def set_dict_factory(connection: sqlite3.Connection) -> None:
    connection.row_factory = lambda cursor, row: {
        name[0]: value for name, value in zip(cursor.description, row, strict=True)
    }


def set_bytes(connection: sqlite3.Connection) -> None:
    connection.text_factory = bytes


def set_upper(connection: sqlite3.Connection) -> None:
    connection.text_factory = lambda data: data.decode().upper()


def set_foreign_keys(connection: sqlite3.Connection) -> None:
    connection.execute("PRAGMA foreign_keys = 1")
    connection.execute("PRAGMA recursive_triggers = 1")


def set_trace(connection: sqlite3.Connection) -> None:
    connection.set_trace_callback(lambda statement: None)


@pytest.mark.parametrize(
    "setting",
    [set_row_factory, set_dict_factory, set_bytes, set_upper, set_foreign_keys, set_trace],
    ids=lambda setting: setting.__name__,
)
async def test_settings_of_the_application_s_connection_do_not_matter_and_are_kept(
    file_jobs: Jobs, tmp_path: Path, setting: Callable[[sqlite3.Connection], None]
) -> None:
    old = await file_jobs.enqueue(number, 1, key="old")
    with application(tmp_path / "jobs.db") as connection:
        setting(connection)
        before = (connection.row_factory, connection.text_factory, connection.isolation_level)
        id = file_jobs.enqueue_on(connection, number, 7, key="new")
        again = file_jobs.enqueue_on(connection, number, 7, key="new")
        of_old = file_jobs.enqueue_on(connection, number, 7, key="old")
        after = (connection.row_factory, connection.text_factory, connection.isolation_level)
        connection.commit()

    assert (id, of_old) == (again, old.id)
    assert before == after
    assert [(job.id, job.key) for job in await file_jobs.find()] == [(old.id, "old"), (id, "new")]


@pytest.mark.parametrize(
    "detect_types", [sqlite3.PARSE_DECLTYPES, sqlite3.PARSE_COLNAMES, 3], ids=str
)
async def test_a_connection_that_detects_types_is_welcome(
    file_jobs: Jobs, tmp_path: Path, detect_types: int
) -> None:
    await file_jobs.enqueue(number, 1, key="old")
    with contextlib.closing(
        sqlite3.connect(tmp_path / "jobs.db", detect_types=detect_types)
    ) as connection:
        file_jobs.enqueue_on(connection, number, 7, key="old")
        file_jobs.enqueue_on(connection, number, 7)
        connection.commit()

    assert len(await file_jobs.find()) == 2


async def test_a_connection_of_a_subclass_is_welcome(file_jobs: Jobs, tmp_path: Path) -> None:
    class Connection(sqlite3.Connection):
        def cursor(self, factory: Any = Shouting) -> Any:
            return super().cursor(factory)

    with contextlib.closing(
        sqlite3.connect(tmp_path / "jobs.db", factory=Connection)
    ) as connection:
        id = file_jobs.enqueue_on(connection, number, 7)
        connection.commit()

    assert [job.id for job in await file_jobs.find()] == [id]


@pytest.mark.parametrize("link", [True, False])
async def test_the_file_is_the_same_by_another_name(
    file_jobs: Jobs, tmp_path: Path, link: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "link.db"
    path.symlink_to(tmp_path / "jobs.db")
    monkeypatch.chdir(tmp_path)
    with contextlib.closing(sqlite3.connect(path if link else "jobs.db")) as connection:
        id = file_jobs.enqueue_on(connection, number, 7)
        connection.commit()

    assert [job.id for job in await file_jobs.find()] == [id]


async def test_a_connection_to_another_file_is_refused_and_nothing_is_written_there(
    file_jobs: Jobs, tmp_path: Path
) -> None:
    other = tmp_path / "other.db"
    async with trio_jobs.open_jobs(other):
        pass

    with application(other) as connection:
        with pytest.raises(ValueError, match="main database of the connection is not"):
            file_jobs.enqueue_on(connection, number, 7)
        assert not connection.in_transaction
    with application(other) as connection:
        connection.execute("ATTACH ? AS jobs", (str(tmp_path / "jobs.db"),))
        with pytest.raises(ValueError, match="main database of the connection is not"):
            file_jobs.enqueue_on(connection, number, 7)
    with (
        contextlib.closing(sqlite3.connect(":memory:")) as memory,
        pytest.raises(ValueError, match="main database of the connection is not"),
    ):
        file_jobs.enqueue_on(memory, number, 7)

    assert await file_jobs.find() == []
    async with trio_jobs.open_jobs(other) as jobs:
        assert await jobs.find() == []


async def test_jobs_in_memory_have_no_file_to_share(tmp_path: Path) -> None:
    async with trio_jobs.open_jobs(":memory:") as jobs:
        with (
            contextlib.closing(sqlite3.connect(":memory:")) as connection,
            pytest.raises(ValueError, match="in memory are no file that another connection"),
        ):
            jobs.enqueue_on(connection, number, 7)


@pytest.mark.parametrize("wrong", [None, "jobs.db", 5, object()])
async def test_what_is_no_connection_is_refused(file_jobs: Jobs, wrong: object) -> None:
    with pytest.raises(TypeError, match=r"not a sqlite3\.Connection"):
        file_jobs.enqueue_on(wrong, number, 7)


async def test_a_cursor_or_a_closed_connection_is_refused(file_jobs: Jobs, tmp_path: Path) -> None:
    with (
        application(tmp_path / "jobs.db") as connection,
        pytest.raises(TypeError, match=r"not a sqlite3\.Connection.*Cursor"),
    ):
        file_jobs.enqueue_on(connection.cursor(), number, 7)

    with pytest.raises(StoreError, match="closed"):
        file_jobs.enqueue_on(connection, number, 7)


async def test_a_read_only_connection_is_an_error_that_says_so(
    file_jobs: Jobs, tmp_path: Path
) -> None:
    with (
        contextlib.closing(
            sqlite3.connect(f"file:{tmp_path / 'jobs.db'}?mode=ro", uri=True)
        ) as connection,
        pytest.raises(StoreError, match="readonly"),
    ):
        file_jobs.enqueue_on(connection, number, 7)

    assert await file_jobs.find() == []


async def test_M1_a_lock_that_others_hold_is_StoreBusy_after_the_application_s_own_timeout(
    file_jobs: Jobs, tmp_path: Path
) -> None:
    path = tmp_path / "jobs.db"
    with (
        application(path, "explicit immediate"),
        application(path) as connection,
        pytest.raises(StoreBusy, match="locked"),
    ):
        file_jobs.enqueue_on(connection, number, 7)

    assert await file_jobs.find() == []


async def test_a_snapshot_that_is_too_old_is_StoreBusy(file_jobs: Jobs, tmp_path: Path) -> None:
    with application(tmp_path / "jobs.db", "explicit") as connection:
        connection.execute("SELECT * FROM user").fetchall()
        job = await file_jobs.enqueue(number, 1)
        with pytest.raises(StoreBusy):
            file_jobs.enqueue_on(connection, number, 7)
        connection.execute("ROLLBACK")
        connection.execute("BEGIN")
        id = file_jobs.enqueue_on(connection, number, 7)
        connection.execute("COMMIT")

    assert [one.id for one in await file_jobs.find()] == [job.id, id]


async def test_while_the_application_s_transaction_is_open_enqueue_waits_for_it(
    file_jobs: Jobs, tmp_path: Path
) -> None:
    made: list[Job[int]] = []

    async def enqueue() -> None:
        made.append(await file_jobs.enqueue(number, 1))

    with application(tmp_path / "jobs.db") as connection:
        id = file_jobs.enqueue_on(connection, number, 7)
        with trio.fail_after(LONG):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(enqueue)
                await trio.testing.wait_all_tasks_blocked()
                connection.commit()

    assert [job.id for job in await file_jobs.find()] == [id, made[0].id]


@pytest.mark.parametrize("delay", [0, 50])
@every_mode
async def test_a_runner_starts_it_within_a_poll_of_the_commit_under_a_virtual_clock(
    file_jobs: Jobs, tmp_path: Path, autojump_clock: MockClock, mode: str, delay: float
) -> None:
    async with trio.open_nursery() as nursery:
        await nursery.start(trio_jobs.serve, file_jobs, [double])
        await trio.sleep(100)
        with application(tmp_path / "jobs.db", mode) as connection:
            id = file_jobs.enqueue_on(connection, number, 7, delay=delay)
            await trio.sleep(3.3)
            end(connection, commits=True)
            committed_at = trio.current_time()
        with trio.fail_after(1000):
            ended = await file_jobs.wait_finished(id)
        nursery.cancel_scope.cancel()

    assert committed_at == 103.3
    assert ended.result == 14
    assert ended.started_at is not None
    started_at = (ended.started_at - EPOCH).total_seconds()
    if delay:
        assert started_at == 150
    else:
        assert 103.3 <= started_at <= 104.3


@pytest.mark.parametrize("commits", [True, False])
async def test_a_runner_that_starts_while_a_transaction_is_open_waits_for_it_without_spinning(
    tmp_path: Path, autojump_clock: MockClock, commits: bool
) -> None:
    path = tmp_path / "jobs.db"
    store = SqliteStore(path, busy_timeout=0.02)
    with real_timeout(30):
        async with trio_jobs.open_jobs(store) as jobs, trio.open_nursery() as nursery:
            with application(path) as connection:
                jobs.enqueue_on(connection, number, 7)
                runner = await nursery.start(trio_jobs.serve, jobs, [double])
                await testing.settled()
                trouble = runner.statistics().trouble
                jobs.enqueue_on(connection, number, 8)
                await trio.sleep(10)
                end(connection, commits)
            await trio.sleep(3)
            states = [job.state for job in await jobs.find()]
            nursery.cancel_scope.cancel()

    assert trouble is not None
    assert states == [State.SUCCEEDED, State.SUCCEEDED] * commits


@pytest.mark.parametrize("commits", [True, False])
async def test_when_the_transaction_is_over_a_virtual_year_is_short_again(
    file_jobs: Jobs, tmp_path: Path, autojump_clock: MockClock, commits: bool
) -> None:
    async with trio.open_nursery() as nursery:
        await nursery.start(trio_jobs.serve, file_jobs, [double])
        await testing.settled()
        with application(tmp_path / "jobs.db") as connection:
            file_jobs.enqueue_on(connection, number, 7)
            await trio.sleep(10)
            end(connection, commits)
        await trio.sleep(365 * 86_400)  # 31 million polls, if it went on polling
        jobs = await file_jobs.find()
        nursery.cancel_scope.cancel()

    assert [job.state for job in jobs] == [State.SUCCEEDED] * commits


async def test_a_second_transaction_is_seen_though_the_first_is_over(
    file_jobs: Jobs, tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with trio.open_nursery() as nursery:
        await nursery.start(trio_jobs.serve, file_jobs, [double])
        await testing.settled()
        for _ in range(5):
            with application(tmp_path / "jobs.db") as connection:
                id = file_jobs.enqueue_on(connection, number, 7)
                await trio.sleep(0.7)
                connection.commit()
            with trio.fail_after(1):
                await file_jobs.wait_finished(id)
            await trio.sleep(50)
        nursery.cancel_scope.cancel()

    assert (await file_jobs.counts())[State.SUCCEEDED] == 5


async def test_a_transaction_is_seen_though_the_first_look_for_its_end_failed(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    class FailsOnce(SqliteStore):
        looks = 0

        def is_unlocked(self) -> bool:
            self.looks += 1
            if self.looks == 1:
                raise StoreError("disk I/O error")
            return super().is_unlocked()

    store = FailsOnce(tmp_path / "jobs.db")
    async with trio_jobs.open_jobs(store) as jobs, trio.open_nursery() as nursery:
        await nursery.start(trio_jobs.serve, jobs, [double])
        await testing.settled()
        with application(tmp_path / "jobs.db") as connection:
            id = jobs.enqueue_on(connection, number, 7)
            await trio.sleep(0.7)
            connection.commit()
        with trio.fail_after(2):
            await jobs.wait_finished(id)
        nursery.cancel_scope.cancel()

    assert store.looks >= 2


async def test_a_job_of_a_thread_s_transaction_wakes_the_runner(
    file_jobs: Jobs, tmp_path: Path, autojump_clock: MockClock
) -> None:
    def register() -> int:
        with application(tmp_path / "jobs.db") as connection:
            id = file_jobs.enqueue_on(connection, number, 7)
            connection.commit()
            return id

    async with trio.open_nursery() as nursery:
        await nursery.start(trio_jobs.serve, file_jobs, [double])
        await trio.sleep(100)
        file_jobs._clock.hold()  # a thread of the application does not do it
        id = await trio.to_thread.run_sync(register)
        file_jobs._clock.release()
        with trio.fail_after(1.5):
            ended = await file_jobs.wait_finished(id)
        nursery.cancel_scope.cancel()

    assert ended.result == 14


async def test_enqueue_on_after_the_block_raises_ClosedResourceError_and_writes_nothing(
    tmp_path: Path,
) -> None:
    path = tmp_path / "jobs.db"
    async with trio_jobs.open_jobs(path) as jobs:
        pass

    with contextlib.closing(sqlite3.connect(path)) as connection:
        with pytest.raises(trio.ClosedResourceError):
            jobs.enqueue_on(connection, number, 7)
        assert not connection.in_transaction
    async with trio_jobs.open_jobs(path) as again:
        assert await again.find() == []


# The same with apsw.


@pytest.fixture
async def apsw_jobs(tmp_path: Path) -> AsyncIterator[Jobs]:
    async with trio_jobs.open_jobs(SqliteStore(tmp_path / "jobs.db", driver="apsw")) as jobs:
        yield jobs


@contextlib.contextmanager
def apsw_application(path: Path) -> Iterator[Any]:
    import apsw

    with contextlib.closing(apsw.Connection(str(path))) as connection:
        yield connection


@pytest.mark.parametrize("commits", [True, False])
async def test_apsw_a_job_exists_exactly_if_the_transaction_is_committed(
    apsw_jobs: Jobs, tmp_path: Path, commits: bool
) -> None:
    with apsw_application(tmp_path / "jobs.db") as connection:
        connection.execute("BEGIN")
        id = apsw_jobs.enqueue_on(connection, number, 7, key="k")
        again = apsw_jobs.enqueue_on(connection, number, 7, key="k")
        seen_before = await apsw_jobs.find()
        connection.execute("COMMIT" if commits else "ROLLBACK")

    assert id == again
    assert seen_before == []
    assert [job.id for job in await apsw_jobs.find()] == [id] * commits


async def test_apsw_its_own_blocks_and_traces_work_with_it(apsw_jobs: Jobs, tmp_path: Path) -> None:
    with apsw_application(tmp_path / "jobs.db") as connection:
        connection.row_trace = lambda cursor, row: {"row": row}
        connection.exec_trace = lambda cursor, sql, bindings: True
        with connection:
            kept = apsw_jobs.enqueue_on(connection, number, 7)
        try:
            with connection:
                apsw_jobs.enqueue_on(connection, number, 8)
                raise ZeroDivisionError
        except ZeroDivisionError:
            pass

    assert [job.id for job in await apsw_jobs.find()] == [kept]


async def test_apsw_a_connection_of_the_other_driver_is_refused(apsw_jobs: Jobs) -> None:
    with (
        contextlib.closing(sqlite3.connect(":memory:")) as connection,
        pytest.raises(
            TypeError,
            match=r"not an apsw\.Connection but a sqlite3\.Connection: .* would corrupt it.* "
            r'needs a store with driver="sqlite3"',
        ),
    ):
        apsw_jobs.enqueue_on(connection, number, 7)


async def test_an_apsw_connection_is_refused_by_the_default_driver(file_jobs: Jobs) -> None:
    with (
        apsw_application(Path(":memory:")) as connection,
        pytest.raises(
            TypeError,
            match=r"not a sqlite3\.Connection but an apsw\.Connection: .* would corrupt it.* "
            r'needs a store with driver="apsw"',
        ),
    ):
        file_jobs.enqueue_on(connection, number, 7)


async def test_apsw_a_runner_starts_it_within_a_poll_of_the_commit(
    apsw_jobs: Jobs, tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with trio.open_nursery() as nursery:
        await nursery.start(trio_jobs.serve, apsw_jobs, [double])
        await trio.sleep(100)
        with apsw_application(tmp_path / "jobs.db") as connection:
            connection.execute("BEGIN")
            id = apsw_jobs.enqueue_on(connection, number, 7)
            await trio.sleep(2.5)
            connection.execute("COMMIT")
        with trio.fail_after(1):
            ended = await apsw_jobs.wait_finished(id)
        nursery.cancel_scope.cancel()

    assert ended.result == 14


async def test_a_busy_writer_of_our_own_is_not_taken_for_the_application_s_transaction(
    file_jobs: Jobs, tmp_path: Path
) -> None:
    async def enqueue_for_ever() -> None:
        while True:
            await file_jobs.enqueue(other, 0)

    other = Kind("other", int)
    async with trio.open_nursery() as nursery:
        await nursery.start(
            functools.partial(trio_jobs.serve, file_jobs, [number.handled_by(double)], poll=1000)
        )
        for _ in range(10):
            nursery.start_soon(enqueue_for_ever)
        with contextlib.closing(sqlite3.connect(tmp_path / "jobs.db")) as connection:
            connection.execute("PRAGMA wal_autocheckpoint = 0")
            for _ in range(20):
                with connection:
                    id = file_jobs.enqueue_on(connection, number, 7)
                with trio.fail_after(60):
                    ended = await file_jobs.wait_finished(id)
                assert ended.result == 14
        nursery.cancel_scope.cancel()


async def test_run_once_waits_for_a_transaction_that_is_open_and_goes_on(
    file_jobs: Jobs, tmp_path: Path, autojump_clock: MockClock
) -> None:
    @number.handled_by
    async def opens_one(attempt: Attempt[int, int]) -> int:
        if attempt.payload == 0:
            connection.execute("BEGIN IMMEDIATE")
            file_jobs.enqueue_on(connection, number, 9)
            await trio.sleep(0.5)
            connection.execute("ROLLBACK")
        return 0

    with contextlib.closing(
        sqlite3.connect(tmp_path / "jobs.db", isolation_level=None)
    ) as connection:
        await file_jobs.enqueue_many(number, [0, 1, 2])
        with trio.fail_after(1000):
            count = await trio_jobs.run_once(file_jobs, [opens_one])

    assert count == 3
