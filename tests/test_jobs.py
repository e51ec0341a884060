"""What callers use: enqueue, look, wait, cancel, retry; and the snapshots they get."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
import os
import random
import sqlite3
import subprocess
import sys
import textwrap
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from stories import LONG, PassThrough, in_threads, is_cancelled_after, real_timeout
from trio.testing import MockClock, assert_checkpoints

import trio_jobs
from trio_jobs import (
    Attempt,
    Fail,
    Failure,
    Job,
    JobFailed,
    JobNotFound,
    Jobs,
    Kind,
    PayloadError,
    Retry,
    SqliteStore,
    State,
    StateError,
    StoreError,
    _drivers,
    _hub,
    testing,
)
from trio_jobs._drivers import Connection, Record, Values

EPOCH = testing.EPOCH
INDIA = timezone(timedelta(hours=5, minutes=30))
YEAR_9999 = datetime.max.replace(tzinfo=UTC)
CANARY = "hunter2-XYZ"

number = Kind("number", int, int)
work = Kind("work", str, str, retry=Retry(attempts=1))


@number.handled_by
async def double(attempt: Attempt[int, int]) -> int:
    return 2 * attempt.payload


@contextlib.asynccontextmanager
async def a_job(jobs: Jobs, state: State, *, key: str | None = None) -> AsyncIterator[Job[str]]:
    """A job of kind `work` that is in this state while the block runs."""
    started, release = trio.Event(), trio.Event()

    @work.handled_by
    async def handle(attempt: Attempt[str, str]) -> str:
        started.set()
        if state is State.RUNNING:
            await attempt.publish("half")
            await release.wait()
        if state is State.FAILED:
            raise Fail("refused", retry=False)
        if state is State.DEAD:
            raise ZeroDivisionError(CANARY)
        return "done"

    async with trio.open_nursery() as nursery:
        job = await jobs.enqueue(work, "payload", key=key)
        if state is State.CANCELLED:
            await jobs.cancel(job)
        elif state is not State.QUEUED:
            nursery.start_soon(trio_jobs.run_once, jobs, [handle])
            await started.wait()
            if state is not State.RUNNING:
                await jobs.wait_finished(job)
            while (job := await jobs.get(job)).result is None and state is State.RUNNING:
                await trio.lowlevel.checkpoint()
        yield await jobs.get(job)
        release.set()


def run_python(code: str, *arguments: object) -> subprocess.Popen[str]:
    """Another process, with its own locks and its own copy of everything."""
    preface = (
        "import sys, os, json, trio, trio_jobs\n"
        "from trio_jobs import *\n"
        "number = Kind('number', int, int)\n"
    )
    return subprocess.Popen(
        [sys.executable, "-c", preface + code, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(trio_jobs.__file__).parents[1])},
    )


async def output_of(process: subprocess.Popen[str], said: str = "") -> str:
    out, _ = await trio.to_thread.run_sync(process.communicate, said, LONG)
    assert process.returncode == 0
    return out


async def said_at_once(count: int, code: str, path: Path) -> list[Any]:
    """What so many processes print as JSON that begin with this at the same moment."""
    processes = [
        run_python(
            "async def main():\n"
            "    async with open_jobs(sys.argv[1]) as jobs:\n"
            "        print('ready', flush=True)\n"
            "        sys.stdin.readline()\n"
            f"{textwrap.indent(textwrap.dedent(code), ' ' * 8)}\n"
            "trio.run(main)",
            path,
        )
        for _ in range(count)
    ]
    for process in processes:
        assert process.stdout is not None
        await trio.to_thread.run_sync(process.stdout.readline)
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    return [json.loads(await output_of(process)) for process in processes]


# Opening.


@pytest.mark.parametrize("form", [str, Path, SqliteStore], ids=["str", "Path", "SqliteStore"])
async def test_jobs_open_by_path_or_by_store(tmp_path: Path, form: Callable[[Any], Any]) -> None:
    async with trio_jobs.open_jobs(form(tmp_path / "jobs.db")) as jobs:
        await jobs.enqueue(number, 1)

    assert (tmp_path / "jobs.db").exists()


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"store": b"jobs.db"}, (TypeError, AttributeError)),
        ({"store": None}, (TypeError, AttributeError)),
        ({"store": ""}, ValueError),
        ({"max_payload": 0}, ValueError),
        ({"max_payload": -1}, ValueError),
        ({"max_payload": 1.5}, (ValueError, TypeError)),
        ({"max_payload": math.inf}, (ValueError, TypeError)),
        ({"max_payload": True}, (ValueError, TypeError)),
        ({"max_payload": None}, (ValueError, TypeError)),
    ],
    ids=str,
)
async def test_settings_that_cannot_work_are_refused_when_jobs_open(
    settings: dict[str, Any], error: Any
) -> None:
    with pytest.raises(error):
        async with trio_jobs.open_jobs(**({"store": ":memory:"} | settings)):
            pass


async def test_a_store_can_be_opened_again_after_it_was_closed(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "jobs.db")

    async with trio_jobs.open_jobs(store) as jobs:
        first = await jobs.enqueue(number, 1)
    async with trio_jobs.open_jobs(store) as jobs:
        found = await jobs.get(first)

    assert found.id == first.id


async def test_a_store_that_is_open_is_refused_or_shared_and_never_broken(
    store: SqliteStore,
) -> None:
    async with trio_jobs.open_jobs(store) as jobs:
        await jobs.enqueue(number, 1)
        try:
            async with trio_jobs.open_jobs(store) as again:
                await again.enqueue(number, 2)
        except (StoreError, RuntimeError, ValueError):
            pass
        await jobs.enqueue(number, 3)

        assert len(await jobs.find()) >= 2


async def test_a_file_written_by_a_newer_version_is_refused_and_left_alone(
    tmp_path: Path,
) -> None:
    path = tmp_path / "jobs.db"
    async with trio_jobs.open_jobs(path):
        pass
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("UPDATE trio_jobs_meta SET version = version + 1")
        connection.commit()

    with pytest.raises(StoreError, match="newer version of trio_jobs"):
        async with trio_jobs.open_jobs(path):
            pass


# Enqueueing: what is stored, and when it is due.


async def test_an_enqueued_job_is_queued_and_due_now(jobs: Jobs, autojump_clock: MockClock) -> None:
    await trio.sleep(5)

    job = await jobs.enqueue(number, 7)

    now = EPOCH + timedelta(seconds=5)
    assert (job.kind, job.state, job.attempt) == ("number", State.QUEUED, 0)
    assert (job.enqueued_at, job.run_at) == (now, now)
    assert (job.priority, job.key, job.deadline) == (0, None, None)
    assert (job.started_at, job.finished_at, job.result, job.failure) == (None,) * 4
    assert await jobs.get(job) == job


async def test_a_job_is_on_disk_when_enqueue_returns(tmp_path: Path) -> None:
    path = tmp_path / "jobs.db"
    process = run_python(
        "async def main():\n"
        "    async with open_jobs(sys.argv[1]) as jobs:\n"
        "        job = await jobs.enqueue(number, 7)\n"
        "        print(job.id, flush=True)\n"
        "        os._exit(0)\n"
        "trio.run(main)",
        path,
    )
    id = int(await output_of(process))

    async with trio_jobs.open_jobs(path) as jobs:
        await trio_jobs.run_once(jobs, [double])
        ended = await jobs.get(id, number)

    assert ended.unwrap() == 14


async def test_a_job_that_was_enqueued_before_a_restart_runs_after_it(tmp_path: Path) -> None:
    path = tmp_path / "jobs.db"
    async with trio_jobs.open_jobs(path) as jobs:
        job = await jobs.enqueue(number, 7)

    async with trio_jobs.open_jobs(path) as jobs, trio.open_nursery() as nursery:
        await nursery.start(trio_jobs.serve, jobs, [double])
        ended = await jobs.wait_finished(job)
        nursery.cancel_scope.cancel()

    assert ended.unwrap() == 14


DUE: list[tuple[dict[str, Any], datetime]] = [
    ({}, EPOCH),
    ({"delay": 0}, EPOCH),
    ({"delay": 2}, EPOCH + timedelta(seconds=2)),
    ({"delay": 0.25}, EPOCH + timedelta(seconds=0.25)),
    ({"delay": 1e9}, EPOCH + timedelta(seconds=1e9)),
    ({"delay": 1e15}, YEAR_9999),
    ({"delay": 1e300}, YEAR_9999),
    ({"run_at": EPOCH + timedelta(days=400)}, EPOCH + timedelta(days=400)),
    ({"run_at": EPOCH.replace(tzinfo=INDIA) + timedelta(hours=6)}, EPOCH + timedelta(hours=0.5)),
    ({"run_at": EPOCH - timedelta(seconds=1)}, EPOCH),
    ({"run_at": datetime.min.replace(tzinfo=UTC)}, EPOCH),
    ({"run_at": datetime(1960, 1, 1, tzinfo=UTC)}, EPOCH),
    ({"run_at": YEAR_9999}, YEAR_9999),
    ({"run_at": datetime.max.replace(tzinfo=timezone(-timedelta(hours=12)))}, YEAR_9999),
]


async def test_Z10_a_job_is_due_when_it_was_said_and_the_past_means_now(
    jobs: Jobs, autojump_clock: MockClock
) -> None:
    for options, due in DUE:
        job = await jobs.enqueue(number, 1, **options)
        [other] = await jobs.enqueue_many(number, [1], **options)

        assert job.run_at == other.run_at == due, options
        assert (await jobs.get(job)).run_at == due, options


async def test_a_job_of_the_year_9999_is_accepted_and_is_not_due(
    jobs: Jobs, autojump_clock: MockClock
) -> None:
    job = await jobs.enqueue(number, 1, run_at=YEAR_9999, deadline=YEAR_9999)

    async with trio.open_nursery() as nursery:
        await nursery.start(trio_jobs.serve, jobs, [double])
        await trio.sleep(1000 * 365 * 86_400)
        found = await jobs.get(job)
        nursery.cancel_scope.cancel()

    assert found.state is State.QUEUED
    assert json.dumps(found.to_dict())


BAD_OPTIONS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"delay": -1}, ValueError, "delay must be finite and 0 or more"),
    ({"delay": -1e-9}, ValueError, "delay must be finite and 0 or more"),
    ({"delay": math.nan}, ValueError, "delay must be finite and 0 or more"),
    ({"delay": math.inf}, ValueError, "delay must be finite and 0 or more"),
    ({"delay": -math.inf}, ValueError, "delay must be finite and 0 or more"),
    ({"delay": 10**400}, ValueError, "delay must be finite and 0 or more"),
    ({"delay": "5"}, TypeError, "delay must be a number"),
    ({"delay": True}, TypeError, "delay must be a number"),
    ({"delay": timedelta(seconds=5)}, TypeError, "delay must be a number"),
    ({"run_at": datetime(2024, 1, 1)}, ValueError, "run_at must be an aware datetime"),
    ({"run_at": datetime.max}, ValueError, "run_at must be an aware datetime"),
    ({"run_at": math.nan}, TypeError, "run_at must be a datetime"),
    ({"run_at": 1_700_000_000.0}, TypeError, "run_at must be a datetime"),
    ({"run_at": "2024-01-01T00:00:00Z"}, TypeError, "run_at must be a datetime"),
    ({"run_at": date(2024, 1, 1)}, TypeError, "run_at must be a datetime"),
    ({"deadline": datetime(2024, 1, 1)}, ValueError, "deadline must be an aware datetime"),
    ({"deadline": 60}, TypeError, "deadline must be a datetime"),
    ({"delay": 1, "run_at": EPOCH}, ValueError, "delay and run_at"),
    ({"delay": 0, "run_at": EPOCH}, ValueError, "delay and run_at"),
    ({"priority": 1.5}, TypeError, "priority must be an int"),
    ({"priority": "high"}, TypeError, "priority must be an int"),
    ({"priority": True}, TypeError, "priority must be an int"),
    ({"priority": 2**31}, ValueError, "priority must fit in 32 bits"),
    ({"priority": -(2**31) - 1}, ValueError, "priority must fit in 32 bits"),
    ({"priority": 2**100}, ValueError, "priority must fit in 32 bits"),
]
BAD_KEYS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"key": 5}, TypeError, "key must be a str"),
    ({"key": b"k"}, TypeError, "key must be a str"),
    ({"key": "\ud800"}, ValueError, "key has a lone surrogate"),
]


async def test_M4_opening_and_closing_cancelled_at_any_point_leaves_nothing_behind(
    store: SqliteStore, autojump_clock: MockClock
) -> None:
    """Neither a thread nor a connection nor a held clock, and it can be opened again at once."""
    returned: list[Job[int]] = []
    steps, was_in_time = 0, True

    async def use() -> None:
        async with trio_jobs.open_jobs(store) as jobs:
            returned.append(await jobs.enqueue(number, steps, key=f"step {steps}"))

    while was_in_time:
        was_cancelled, was_in_time = await is_cancelled_after(steps, use)

        assert not [one for one in threading.enumerate() if "trio_jobs" in one.name], steps
        assert (
            store._connections.writer,
            store._connections.reader,
            store._connections.checkpointer,
        ) == (None, None, None), steps
        assert (_drivers._open, _hub._hubs) == ({}, {}), steps
        assert autojump_clock.autojump_threshold == 0, steps
        async with trio_jobs.open_jobs(store) as again:
            stored = [] if store.inline else [job.key for job in await again.find(limit=1000)]
        if not store.inline:
            assert stored == [job.key for job in returned], steps
        steps += 1

    assert steps > 3
    assert returned
    assert not was_cancelled


@pytest.mark.parametrize(("options", "error", "text"), BAD_OPTIONS + BAD_KEYS, ids=str)
async def test_Z10_options_that_cannot_be_are_refused_and_nothing_is_inserted(
    options: dict[str, Any], error: type[Exception], text: str
) -> None:
    async with trio_jobs.open_jobs(":memory:") as jobs:
        with pytest.raises(error, match=text):
            await jobs.enqueue(number, 1, **options)
        if "key" in options:
            options = {"keys": ["fine", options["key"]]}
        with pytest.raises(error, match=text):
            await jobs.enqueue_many(number, [1, 2], **options)

        assert await jobs.find() == []


async def test_a_deadline_is_accepted_whenever_it_is(jobs: Jobs, autojump_clock: MockClock) -> None:
    for deadline in (
        EPOCH,
        EPOCH - timedelta(days=1),
        datetime.min.replace(tzinfo=UTC),
        EPOCH + timedelta(days=1),
        YEAR_9999,
    ):
        job = await jobs.enqueue(number, 1, delay=3600, deadline=deadline)

        assert job.deadline == deadline
        assert (await jobs.get(job)).deadline == deadline


async def test_K7_a_deadline_before_the_job_is_due_fails_it_when_it_passes(
    jobs: Jobs, autojump_clock: MockClock
) -> None:
    deadline = EPOCH + timedelta(seconds=10)

    job = await jobs.enqueue(number, 1, delay=60, deadline=deadline)
    async with trio.open_nursery() as nursery:
        await nursery.start(trio_jobs.serve, jobs, [])
        ended = await jobs.wait_finished(job)
        nursery.cancel_scope.cancel()

    assert (ended.state, ended.failure) == (State.FAILED, Failure("deadline"))
    assert ended.finished_at == deadline
    assert ended.attempt == 0


async def test_the_priority_is_that_of_the_kind_unless_it_is_given(jobs: Jobs) -> None:
    urgent = Kind("urgent", int, priority=7)

    given = [None, 0, -3, 2**31 - 1, -(2**31)]
    made = [await jobs.enqueue(urgent, 1, priority=priority) for priority in given]

    assert [job.priority for job in made] == [7, 0, -3, 2**31 - 1, -(2**31)]
    assert [job.priority for job in await jobs.find()] == [7, 0, -3, 2**31 - 1, -(2**31)]


async def test_jobs_run_by_priority_then_by_due_time_then_by_id(
    jobs: Jobs, autojump_clock: MockClock
) -> None:
    order: list[str] = []
    name = Kind("name", str)

    @name.handled_by
    async def note(attempt: Attempt[str, None]) -> None:
        order.append(attempt.payload)

    await jobs.enqueue(name, "late", delay=30)
    await jobs.enqueue(name, "early", delay=10)
    await jobs.enqueue(name, "early too", delay=10)
    await jobs.enqueue(name, "urgent", delay=40, priority=1)
    await jobs.enqueue(name, "unimportant", priority=-1)
    await jobs.enqueue(name, "not due", delay=1000, priority=9)
    await trio.sleep(100)
    await jobs.enqueue(name, "now")
    await trio_jobs.run_once(jobs, [note])

    assert order == ["urgent", "early", "early too", "late", "now", "unimportant"]


# Enqueueing: payloads.


@dataclass
class Login:
    user: str
    password: str
    tries: list[int] = dataclasses.field(default_factory=list)


login = Kind("login", Login, Login)

BAD_PAYLOADS: list[tuple[Kind[Any, Any], Any, str]] = [
    (number, CANARY, r"payload of kind 'number' is not valid at \$: Expected `int`"),
    (number, None, r"payload of kind 'number' is not valid at \$"),
    (number, 1.5, r"payload of kind 'number' is not valid at \$"),
    (login, Login(CANARY, 5), r"\$\.password: Expected `str`, got `int`"),  # type: ignore[arg-type]
    (login, Login("a", CANARY, [CANARY]), r"\$\.tries\[0\]: Expected `int`"),  # type: ignore[list-item]
    (login, {"user": CANARY}, r"payload of kind 'login'"),
    (Kind("f", float), math.nan, "NaN and infinity"),
    (Kind("f", float), math.inf, "NaN and infinity"),
    (Kind("f", list[float]), [1.0, -math.inf], r"\$\[1\]: NaN and infinity"),
    (Kind("f", dict[str, float | None]), {CANARY: math.nan}, "NaN and infinity"),
    (Kind("s", str), "\ud800" + CANARY, "surrogate"),
    (Kind("o", object), {"a": object()}, "cannot be stored"),
    (Kind("b", bytes), "text", "Expected `bytes`, got `str`"),
]


@pytest.mark.parametrize(("kind", "payload", "text"), BAD_PAYLOADS)
async def test_P3_S1_a_bad_payload_is_refused_and_its_value_is_not_shown(
    kind: Kind[Any, Any], payload: Any, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)

    async with trio_jobs.open_jobs(":memory:") as jobs:
        with pytest.raises(PayloadError, match=text) as caught:
            await jobs.enqueue(kind, payload)
        assert await jobs.find() == []

    assert isinstance(caught.value, ValueError)
    assert CANARY not in str(caught.value) + repr(caught.value) + caplog.text
    assert caught.value.__cause__ is None


@pytest.mark.parametrize("raw", [True, False], ids=["bytes", "json"])
async def test_P8_a_payload_over_the_limit_is_refused_before_anything_is_written(
    raw: bool,
) -> None:
    kind: Kind[Any, None] = Kind("big", bytes if raw else str)
    fits: Any = b"x" * 1000 if raw else "x" * 998  # with its quotes

    async with trio_jobs.open_jobs(":memory:", max_payload=1000) as jobs:
        await jobs.enqueue(kind, fits)
        with pytest.raises(PayloadError, match="takes 1001 bytes, and the limit is 1000"):
            await jobs.enqueue(kind, fits + fits[:1])
        with pytest.raises(PayloadError):
            await jobs.enqueue_many(kind, [fits, fits + fits[:1]])

        assert len(await jobs.find()) == 1


async def test_P8_the_limit_is_a_million_bytes_unless_it_is_given(jobs: Jobs) -> None:
    raw = Kind("raw", bytes)

    await jobs.enqueue(raw, bytes(1_000_000))
    with pytest.raises(PayloadError, match="limit is 1000000"):
        await jobs.enqueue(raw, bytes(1_000_001))
    with pytest.raises(PayloadError, match="limit is 1000000"):
        await jobs.enqueue(raw, bytes(64_000_000))

    assert len(await jobs.find()) == 1


async def test_what_is_no_kind_is_refused(jobs: Jobs) -> None:
    wrong: Any
    for wrong in ("number", None, int):
        with pytest.raises(TypeError, match=r"kind must be a Kind, not \w+$"):
            await jobs.enqueue(wrong, 1)
        with pytest.raises(TypeError, match=r"kind must be a Kind, not \w+$"):
            await jobs.enqueue_many(wrong, [])


async def test_a_handler_in_place_of_its_kind_is_told_so(jobs: Jobs) -> None:
    job = await jobs.enqueue(number, 1)
    wrong: Any = double

    for call in (
        lambda: jobs.enqueue(wrong, 1),
        lambda: jobs.enqueue_many(wrong, [1]),
        lambda: jobs.get(job.id, wrong),
        lambda: jobs.find(kind=wrong),
        lambda: jobs.counts(kind=wrong),
    ):
        with pytest.raises(TypeError, match=r"not Handler: use handler\.kind$"):
            await call()


# enqueue_many.


async def test_many_jobs_come_in_the_order_of_their_payloads(jobs: Jobs) -> None:
    made = await jobs.enqueue_many(number, (index for index in range(500)), delay=60, priority=2)

    ids = [job.id for job in made]
    assert ids == sorted(set(ids))
    assert {(job.run_at - job.enqueued_at, job.priority) for job in made} == {
        (timedelta(seconds=60), 2)
    }
    assert await jobs.find(limit=1000) == made


async def test_many_jobs_get_the_payloads_in_order(jobs: Jobs, autojump_clock: MockClock) -> None:
    made = await jobs.enqueue_many(number, range(100))
    await trio_jobs.run_once(jobs, [double], workers=7)

    assert [(await jobs.get(job)).unwrap() for job in made] == [2 * n for n in range(100)]


async def test_no_jobs_are_many_too(jobs: Jobs) -> None:
    with assert_checkpoints():
        assert await jobs.enqueue_many(number, []) == []
    assert await jobs.enqueue_many(number, [], keys=[]) == []


async def test_one_bad_payload_keeps_all_of_them_out(jobs: Jobs) -> None:
    wrong: list[Any] = [*range(100), CANARY, *range(100)]

    with pytest.raises(PayloadError):
        await jobs.enqueue_many(number, wrong)

    assert await jobs.find() == []


async def test_payloads_that_raise_while_they_are_made_keep_all_of_them_out(jobs: Jobs) -> None:
    def payloads() -> Iterator[int]:
        yield 1
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await jobs.enqueue_many(number, payloads())

    assert await jobs.find() == []


class FailsAt(PassThrough):
    """A connection whose n-th INSERT of jobs fails."""

    def __init__(self, real: Connection, state: dict[str, int]) -> None:
        super().__init__(real)
        self._state = state

    def execute(self, sql: str, values: Values = ()) -> list[Record]:
        if "INSERT INTO trio_jobs_job" in sql and not sql.lstrip().startswith("CREATE"):
            self._state["left"] -= 1
            if self._state["left"] == 0:
                raise StoreError("disk I/O error")
        return super().execute(sql, values)


async def test_many_jobs_are_one_transaction(store: SqliteStore) -> None:
    state = {"left": 0}
    connect = store.connect
    store.connect = lambda path: FailsAt(connect(path), state)

    async with trio_jobs.open_jobs(store) as jobs:
        state["left"] = 3
        with pytest.raises(StoreError, match="disk I/O error"):
            await jobs.enqueue_many(number, range(1000))
        after_failure = await jobs.find()
        made = await jobs.enqueue_many(number, range(1000))

    assert state["left"] < 0, "there were fewer INSERTs than this test wants to fail"
    assert after_failure == []
    assert len(made) == 1000


@pytest.mark.parametrize(
    "keys", [["a"], ["a", "b", "c"], [], "ab"], ids=["too few", "too many", "none", "a str"]
)
async def test_keys_that_are_not_as_many_as_payloads_are_refused(jobs: Jobs, keys: Any) -> None:
    with pytest.raises(ValueError, match="2 payloads need as many keys"):
        await jobs.enqueue_many(number, [1, 2], keys=keys)

    assert await jobs.find() == []


@pytest.mark.parametrize("text", ["abc", b"abc", ""])
async def test_a_text_is_no_list_of_payloads(jobs: Jobs, text: Any) -> None:
    word = Kind("word", type(text))

    with pytest.raises(
        TypeError, match=rf"list of payloads, not a {type(text).__name__}: .*enqueue"
    ):
        await jobs.enqueue_many(word, text)

    assert await jobs.find() == []


async def test_many_jobs_may_have_keys_some_may_have_none_and_some_the_same(jobs: Jobs) -> None:
    old = await jobs.enqueue(number, 0, key="old")

    made = await jobs.enqueue_many(
        number, [1, 2, 3, 4, 5, 6], keys=["a", None, "a", "old", "b", None]
    )

    a, none, a_again, old_again, b, none_again = (job.id for job in made)
    assert a == a_again
    assert old_again == old.id
    assert len({a, none, b, none_again, old.id}) == 5
    assert len(await jobs.find()) == 5


# Keys.


async def test_a_live_key_gives_the_job_that_has_it(jobs: Jobs) -> None:
    first = await jobs.enqueue(number, 1, key="k", priority=3)
    second = await jobs.enqueue(number, 2, key="k", delay=5, priority=9)

    assert second == first
    assert await jobs.find() == [first]


async def test_a_key_belongs_to_its_kind(jobs: Jobs) -> None:
    other = Kind("other", int)

    first = await jobs.enqueue(number, 1, key="k")
    second = await jobs.enqueue(other, 1, key="k")

    assert first.id != second.id


KEYS = ["", "k", "K", "k ", "a\0b", "a\0c", "é", "e\u0301", "'", '"', "%", "1", "01", "x" * 10_000]


async def test_keys_are_compared_as_they_are(jobs: Jobs) -> None:
    made = [await jobs.enqueue(number, 1, key=key) for key in KEYS]
    again = [await jobs.enqueue(number, 1, key=key) for key in KEYS]
    many = await jobs.enqueue_many(number, range(len(KEYS)), keys=KEYS)

    assert len({job.id for job in made}) == len(KEYS)
    assert [job.id for job in again] == [job.id for job in many] == [job.id for job in made]
    assert [job.key for job in await jobs.find()] == KEYS


LIVE = {State.QUEUED, State.RUNNING}


@pytest.mark.parametrize("state", State)
async def test_U2_a_key_is_free_again_when_its_job_has_ended(
    jobs: Jobs, autojump_clock: MockClock, state: State
) -> None:
    async with a_job(jobs, state, key="k") as job:
        again = await jobs.enqueue(work, "again", key="k")
        found = await jobs.get(job)
        kept = await jobs.find(kind=work)

    assert job.state is state
    assert (again.id == job.id) is (state in LIVE)
    assert again.state is (state if state in LIVE else State.QUEUED)
    assert found.key == "k"
    assert len(kept) == (1 if state in LIVE else 2)


async def test_U2_a_job_that_waits_for_its_retry_keeps_its_key(
    jobs: Jobs, autojump_clock: MockClock
) -> None:
    kind = Kind("flaky", None, retry=Retry(attempts=2))

    @kind.handled_by
    async def fails(attempt: Attempt[None, None]) -> None:
        raise Fail("no")

    job = await jobs.enqueue(kind, None, key="k")
    await trio_jobs.run_once(jobs, [fails])
    again = await jobs.enqueue(kind, None, key="k")

    assert (again.id, again.state, again.attempt) == (job.id, State.QUEUED, 1)


@pytest.mark.parametrize("state", [State.FAILED, State.DEAD, State.CANCELLED])
async def test_U2_a_retry_is_refused_while_a_live_job_has_the_key(
    jobs: Jobs, autojump_clock: MockClock, state: State
) -> None:
    async with a_job(jobs, state, key="k") as job:
        holder = await jobs.enqueue(work, "again", key="k")
        with pytest.raises(StateError, match="a live job has its key"):
            await jobs.retry(job)
        unchanged = await jobs.get(job)
        await jobs.cancel(holder)
        retried = await jobs.retry(job)

    assert unchanged == job
    assert (retried.state, retried.key) == (State.QUEUED, "k")


def test_U1_16_threads_that_enqueue_one_key_get_one_job(tmp_path: Path) -> None:
    path = tmp_path / "jobs.db"
    barrier = threading.Barrier(16)
    ids: list[list[int]] = [[] for _ in range(50)]

    async def enqueue() -> None:
        async with trio_jobs.open_jobs(path) as jobs:
            for round in range(50):
                barrier.wait(LONG)
                ids[round].append((await jobs.enqueue(number, round, key=f"round {round}")).id)

    in_threads([lambda: trio.run(enqueue)] * 16)

    assert [len(set(some)) for some in ids] == [1] * 50
    assert [len(some) for some in ids] == [16] * 50
    with contextlib.closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT count(*) FROM trio_jobs_job").fetchone() == (50,)


async def test_U1_processes_that_enqueue_one_key_get_one_job(tmp_path: Path) -> None:
    path = tmp_path / "jobs.db"
    ids = await said_at_once(
        3,
        """
        ids = [(await jobs.enqueue(number, n, key=str(n))).id for n in range(200)]
        print(json.dumps(ids))
        """,
        path,
    )

    assert ids[0] == ids[1] == ids[2]
    assert len(set(ids[0])) == 200


# Looking.


async def test_get_gives_the_job_as_it_is_now(jobs: Jobs) -> None:
    job = await jobs.enqueue(number, 7)
    await trio_jobs.run_once(jobs, [double])

    assert job.state is State.QUEUED
    assert (await jobs.get(job)).state is State.SUCCEEDED
    assert (await jobs.get(job.id)).state is State.SUCCEEDED
    assert (await jobs.get(job.id, number)).result == 14


async def test_an_id_of_no_job_is_not_found_however_large(jobs: Jobs) -> None:
    await jobs.enqueue(number, 1)

    for id in (0, -1, 2, 2**31, 2**63 - 1, 2**63, -(2**63), 2**64 + 1, -(10**100)):
        for call in (jobs.get, jobs.history, jobs.wait_finished, jobs.cancel, jobs.retry):
            with pytest.raises(JobNotFound, match=f"there is no job {id}$"):
                await call(id)
        assert await jobs.find(after=id) == ([] if id > 0 else await jobs.find())


async def test_an_id_that_is_no_int_is_refused(jobs: Jobs) -> None:
    await jobs.enqueue(number, 1)

    id: Any
    for id in ("1", 1.0, None, True, b"1"):
        for call in (jobs.get, jobs.history, jobs.wait_finished, jobs.cancel, jobs.retry):
            with pytest.raises(TypeError, match="id must be an int"):
                await call(id)


async def test_a_job_of_another_kind_is_not_found(jobs: Jobs) -> None:
    job = await jobs.enqueue(number, 1)

    with pytest.raises(JobNotFound, match=f"job {job.id} is not of kind 'work'"):
        await jobs.get(job.id, work)


async def test_a_result_is_typed_where_the_kind_is_known_and_plain_where_it_is_not(
    jobs: Jobs,
) -> None:
    @login.handled_by
    async def echo(attempt: Attempt[Login, Login]) -> Login:
        return attempt.payload

    value = Login("ann", "secret", [1])
    plain = {"user": "ann", "password": "secret", "tries": [1]}
    job = await jobs.enqueue(login, value)
    await trio_jobs.run_once(jobs, [echo])

    assert (await jobs.get(job)).result == value
    assert (await jobs.get(job.id, login)).unwrap() == value
    assert (await jobs.wait_finished(job)).unwrap() == value
    assert [one.result for one in await jobs.find(kind=login)] == [value]
    assert (await jobs.get(job.id)).result == plain
    assert (await jobs.wait_finished(job.id)).unwrap() == plain
    assert [one.result for one in await jobs.find(kind="login")] == [plain]
    assert (await jobs.get(job)).to_dict()["result"] == plain


async def test_a_result_that_does_not_fit_any_more_raises_when_it_is_read(jobs: Jobs) -> None:
    changed = Kind("number", int, list[str])

    job = await jobs.enqueue(number, 7)
    await trio_jobs.run_once(jobs, [double])
    [found] = await jobs.find(kind=changed)

    with pytest.raises(PayloadError, match="result of kind 'number'"):
        _ = found.result
    with pytest.raises(PayloadError, match="result of kind 'number'"):
        found.unwrap()
    assert found.to_dict()["result"] == 14
    assert (await jobs.get(job.id)).result == 14


@pytest.fixture
async def six(jobs: Jobs) -> list[Job[int]]:
    """Ids 1 to 6: three of `number`, of which the second has ended, between others."""
    other = Kind("other", int)
    made: list[Any] = []
    for kind in (number, other, number, other, other, number):
        made.append(await jobs.enqueue(kind, 1))
    await jobs.cancel(made[2])
    await jobs.cancel(made[3])
    return made


FOUND: list[tuple[dict[str, Any], list[int]]] = [
    ({}, [1, 2, 3, 4, 5, 6]),
    ({"kind": number}, [1, 3, 6]),
    ({"kind": "other"}, [2, 4, 5]),
    ({"kind": "none"}, []),
    ({"kind": ""}, []),
    ({"kind": "numb%"}, []),
    ({"state": State.CANCELLED}, [3, 4]),
    ({"state": State.SUCCEEDED}, []),
    ({"state": State.QUEUED, "kind": number}, [1, 6]),
    ({"after": 4}, [5, 6]),
    ({"after": -5}, [1, 2, 3, 4, 5, 6]),
    ({"after": 6}, []),
    ({"limit": 2}, [1, 2]),
    ({"limit": 0}, []),
    ({"limit": 10**30}, [1, 2, 3, 4, 5, 6]),
    ({"limit": 1, "after": 1, "kind": number, "state": State.QUEUED}, [6]),
]

BAD_FILTERS: list[tuple[dict[str, Any], Any]] = [
    ({"limit": -1}, ValueError),
    ({"limit": 1.5}, (ValueError, TypeError)),
    ({"limit": None}, (ValueError, TypeError)),
    ({"limit": True}, (ValueError, TypeError)),
    ({"state": "sleeping"}, ValueError),
    ({"state": 1}, ValueError),
    ({"after": "1"}, TypeError),
    ({"after": 1.5}, TypeError),
    ({"kind": 5}, TypeError),
    ({"kind": int}, TypeError),
]


async def test_find_filters_by_state_and_kind_and_pages_by_id(
    jobs: Jobs, six: list[Job[int]]
) -> None:
    for filters, ids in FOUND:
        assert [job.id for job in await jobs.find(**filters)] == ids, filters


@pytest.mark.parametrize(("filters", "error"), BAD_FILTERS, ids=str)
async def test_filters_that_cannot_be_are_refused(filters: dict[str, Any], error: Any) -> None:
    async with trio_jobs.open_jobs(":memory:") as jobs:
        with pytest.raises(error):
            await jobs.find(**filters)


@pytest.mark.parametrize("state", ["foo", "DEAD", 5])
async def test_a_state_that_is_none_is_answered_with_those_there_are(
    jobs: Jobs, state: Any
) -> None:
    words = "queued, running, succeeded, failed, dead, cancelled"

    with pytest.raises(ValueError, match=f"state must be one of {words}, not {state!r}"):
        await jobs.find(state=state)


async def test_a_kind_that_cannot_be_stored_is_found_nowhere(jobs: Jobs) -> None:
    await jobs.enqueue(number, 1)

    for call in (jobs.find, jobs.counts):
        try:
            found: Any = await call(kind="\ud800")
        except ValueError:
            continue
        assert not found or not any(found.values())


async def test_pages_are_complete_while_jobs_come_and_end(jobs: Jobs) -> None:
    made = [job.id for job in await jobs.enqueue_many(number, range(25))]

    seen: list[int] = []
    for _ in range(3):
        page = await jobs.find(after=seen[-1] if seen else None, limit=10)
        seen += [job.id for job in page]
        await jobs.cancel(page[0])

    assert seen == made
    assert await jobs.find(after=seen[-1], limit=10) == []


async def test_counts_name_all_six_states(jobs: Jobs, six: list[Job[int]]) -> None:
    nothing = dict.fromkeys(State, 0)

    assert await jobs.counts() == nothing | {State.QUEUED: 4, State.CANCELLED: 2}
    assert await jobs.counts(kind=number) == nothing | {State.QUEUED: 2, State.CANCELLED: 1}
    assert await jobs.counts(kind="other") == nothing | {State.QUEUED: 2, State.CANCELLED: 1}
    assert await jobs.counts(kind="none") == nothing


async def test_scheduled_jobs_are_queued_in_counts_and_in_find(jobs: Jobs) -> None:
    await jobs.enqueue(number, 1)
    await jobs.enqueue(number, 1, delay=3600)

    assert (await jobs.counts())[State.QUEUED] == 2
    assert len(await jobs.find(state=State.QUEUED)) == 2


async def test_a_job_that_never_started_has_no_history(jobs: Jobs) -> None:
    job = await jobs.enqueue(number, 1)
    await jobs.cancel(job)

    assert await jobs.history(job.id) == []


async def test_history_keeps_the_newest_100_starts_that_did_not_succeed(
    jobs: Jobs, autojump_clock: MockClock
) -> None:
    kind = Kind("flaky", None, int, retry=Retry(attempts=130, backoff=trio_jobs.constant(60)))

    @kind.handled_by
    async def succeeds_at_last(attempt: Attempt[None, int]) -> int:
        if attempt.number < 121:
            raise Fail(f"no {attempt.number}")
        return attempt.number

    job = await jobs.enqueue(kind, None)
    async with trio.open_nursery() as nursery:
        await nursery.start(trio_jobs.serve, jobs, [succeeds_at_last])
        ended = await jobs.wait_finished(job)
        nursery.cancel_scope.cancel()
    history = await jobs.history(job)

    assert ended.unwrap() == 121
    assert [past.number for past in history] == list(range(21, 121))
    assert [past.claim for past in history] == list(range(21, 121))
    assert history[-1] == trio_jobs.PastAttempt(
        number=120,
        claim=120,
        started_at=EPOCH + timedelta(seconds=119 * 60),
        ended_at=EPOCH + timedelta(seconds=119 * 60),
        outcome="failed",
        failure=Failure("no 120"),
    )


# Waiting.


@pytest.mark.parametrize("state", [state for state in State if state.is_final])
async def test_who_waits_for_a_job_that_has_ended_has_it_at_once(
    jobs: Jobs, autojump_clock: MockClock, state: State
) -> None:
    async with a_job(jobs, state) as job:
        ended = await jobs.wait_finished(job)

    assert ended == job
    assert trio.current_time() == 0


async def test_everybody_who_waits_is_woken_at_once(jobs: Jobs, autojump_clock: MockClock) -> None:
    woken: list[tuple[int, float, object]] = []

    async def wait(job: Job[int]) -> None:
        ended = await jobs.wait_finished(job)
        woken.append((ended.id, trio.current_time(), ended.result))

    async with trio.open_nursery() as nursery:
        await nursery.start(trio_jobs.serve, jobs, [double])
        made = [await jobs.enqueue(number, n, delay=10 + n) for n in range(3)]
        with trio.fail_after(1000):
            async with trio.open_nursery() as waiting:
                for job in made * 5:
                    waiting.start_soon(wait, job)
        nursery.cancel_scope.cancel()

    assert sorted(woken) == [
        (job.id, 10 + n, 2 * n) for n, job in enumerate(made) for _ in range(5)
    ]
    assert not jobs._waiters


async def test_who_waits_is_not_woken_by_a_failure_that_will_be_retried(
    jobs: Jobs, autojump_clock: MockClock
) -> None:
    kind = Kind("flaky", None, retry=Retry(attempts=2, backoff=trio_jobs.constant(60)))

    @kind.handled_by
    async def fails(attempt: Attempt[None, None]) -> None:
        raise Fail(f"no {attempt.number}")

    job = await jobs.enqueue(kind, None)
    async with trio.open_nursery() as nursery:
        await nursery.start(trio_jobs.serve, jobs, [fails])
        ended = await jobs.wait_finished(job)
        nursery.cancel_scope.cancel()

    assert (ended.state, ended.failure) == (State.DEAD, Failure("no 2"))
    assert trio.current_time() == 60


async def test_a_job_with_a_new_life_is_waited_for_until_that_ends(
    jobs: Jobs, autojump_clock: MockClock
) -> None:
    job = await jobs.enqueue(number, 7)
    await jobs.cancel(job)
    await jobs.retry(job)

    async with trio.open_nursery() as nursery:
        await nursery.start(trio_jobs.serve, jobs, [double])
        ended = await jobs.wait_finished(job)
        nursery.cancel_scope.cancel()

    assert ended.unwrap() == 14


async def test_cancelling_the_wait_does_not_touch_the_job(
    jobs: Jobs, autojump_clock: MockClock
) -> None:
    job = await jobs.enqueue(number, 7, delay=3600)

    with trio.move_on_after(10) as scope:
        await jobs.wait_finished(job)

    assert scope.cancelled_caught
    assert await jobs.get(job) == job
    assert not jobs._waiters


async def test_a_job_that_ends_in_another_process_wakes_its_waiter_within_a_poll(
    tmp_path: Path,
) -> None:
    path = tmp_path / "jobs.db"
    async with trio_jobs.open_jobs(path) as jobs:
        job = await jobs.enqueue(number, 7)
        process = run_python(
            "async def main():\n"
            "    async with open_jobs(sys.argv[1]) as jobs:\n"
            "        sys.stdin.readline()\n"
            "        await jobs.cancel(int(sys.argv[2]))\n"
            "trio.run(main)",
            path,
            job.id,
        )
        ended: list[Job[int]] = []

        async def wait() -> None:
            ended.append(await jobs.wait_finished(job, poll=0.05))

        with trio.fail_after(LONG):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(wait)
                await trio.testing.wait_all_tasks_blocked()
                await output_of(process, "go\n")

    assert [one.state for one in ended] == [State.CANCELLED]


async def test_a_poll_that_cannot_be_is_refused(jobs: Jobs) -> None:
    job = await jobs.enqueue(number, 7)
    bad: Any
    for bad in (0, -1, math.nan, math.inf, "1", None):
        with pytest.raises((ValueError, TypeError), match="poll"):
            await jobs.wait_finished(job, poll=bad)


async def test_who_waits_when_the_jobs_close_is_told(
    store: SqliteStore, autojump_clock: MockClock
) -> None:
    # Under a virtual clock no timer would ever wake it.
    told_at: list[float] = []

    async def wait(jobs: Jobs, job: Job[int]) -> None:
        with pytest.raises(trio.ClosedResourceError):
            await jobs.wait_finished(job)
        told_at.append(trio.current_time())

    async def use(nursery: trio.Nursery) -> None:
        async with trio_jobs.open_jobs(store) as jobs:
            job = await jobs.enqueue(number, 7, delay=3600)
            nursery.start_soon(wait, jobs, job)
            await testing.settled()

    with trio.move_on_after(10):
        async with trio.open_nursery() as nursery:
            await use(nursery)

    assert told_at == [0]


# Cancelling.


async def test_cancel_ends_a_queued_job_at_once_and_it_never_starts(
    jobs: Jobs, autojump_clock: MockClock
) -> None:
    job = await jobs.enqueue(number, 7, delay=10)
    await trio.sleep(5)

    assert await jobs.cancel(job.id) is True
    assert await jobs.cancel(job.id) is False
    await trio.sleep(100)
    assert await trio_jobs.run_once(jobs, [double]) == 0
    ended = await jobs.get(job)
    assert (ended.state, ended.attempt, ended.started_at) == (State.CANCELLED, 0, None)
    assert ended.finished_at == EPOCH + timedelta(seconds=5)


@pytest.mark.parametrize("state", [state for state in State if state.is_final])
async def test_K1_cancel_of_a_job_that_has_ended_says_so_and_changes_nothing(
    jobs: Jobs, autojump_clock: MockClock, state: State
) -> None:
    async with a_job(jobs, state) as job:
        await trio.sleep(5)

        assert await jobs.cancel(job) is False
        assert await jobs.get(job) == job


async def test_K1_cancel_of_a_running_job_is_harmless_twice(
    jobs: Jobs, autojump_clock: MockClock
) -> None:
    started = trio.Event()

    @number.handled_by
    async def is_slow_to_stop(attempt: Attempt[int, int]) -> int:
        await attempt.publish(1)
        started.set()
        try:
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                await trio.sleep(1)

    async with trio.open_nursery() as nursery:
        await nursery.start(trio_jobs.serve, jobs, [is_slow_to_stop])
        job = await jobs.enqueue(number, 7)
        await started.wait()
        answers = [await jobs.cancel(job), await jobs.cancel(job)]
        meanwhile = await jobs.get(job)
        ended = await jobs.wait_finished(job)
        answers.append(await jobs.cancel(job))
        nursery.cancel_scope.cancel()

    assert answers == [True, True, False]
    assert meanwhile.state is State.RUNNING
    assert (ended.state, ended.result) == (State.CANCELLED, 1)
    assert [past.outcome for past in await jobs.history(job)] == ["cancelled"]


async def test_K1_what_500_cancels_answered_agrees_with_the_rows(
    autojump_clock: MockClock,
) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    kind = Kind("sleeps", float, str, retry=Retry(attempts=2, backoff=trio_jobs.constant(0.01)))
    answers: dict[int, list[bool]] = {}

    @kind.handled_by
    async def sleep(attempt: Attempt[float, str]) -> str:
        try:
            await trio.sleep(attempt.payload)
        except trio.Cancelled:
            if dice.random() < 0.3:
                return "swallowed"
            if dice.random() < 0.3:
                raise Fail("while it was cancelled") from None
            raise
        if dice.random() < 0.1:
            raise Fail("by itself")
        return "done"

    async def cancel(jobs: Jobs, job: Job[str]) -> None:
        await trio.sleep(dice.uniform(0, 0.2))
        answers.setdefault(job.id, []).append(await jobs.cancel(job))

    async with trio_jobs.open_jobs(":memory:") as jobs, trio.open_nursery() as nursery:
        await nursery.start(trio_jobs.serve, jobs, [sleep])
        for _ in range(500):
            # An instant of a hundredth: many cancels come at the very moment of an end.
            payload = dice.randrange(20) / 100
            job = await jobs.enqueue(kind, payload, delay=dice.randrange(3) / 100)
            for _ in range(dice.choice([1, 1, 2])):
                nursery.start_soon(cancel, jobs, job)
            await trio.sleep(dice.choice([0, 0.01, 0.05]))
        ended = [await jobs.wait_finished(job) for job in await jobs.find(limit=1000)]
        await trio.sleep(1)
        later = await jobs.find(limit=1000)
        nursery.cancel_scope.cancel()

    assert {job.id: True in answers[job.id] for job in ended} == {
        job.id: job.state is State.CANCELLED for job in ended
    }
    assert later == ended  # the final write of a cancelled job was refused
    assert len({job.state for job in ended}) >= 2


# Retrying by hand.


@pytest.mark.parametrize("state", [State.FAILED, State.DEAD, State.CANCELLED])
async def test_a_retry_gives_an_ended_job_a_new_life(
    jobs: Jobs, autojump_clock: MockClock, state: State
) -> None:
    async with a_job(jobs, state, key="k") as job:
        await trio.sleep(50)
        retried = await jobs.retry(job)
        history = await jobs.history(job)

    assert retried == await jobs.get(job)
    assert (retried.state, retried.attempt, retried.key) == (State.QUEUED, 0, "k")
    assert retried.run_at == EPOCH + timedelta(seconds=50)
    assert retried.enqueued_at == EPOCH
    assert retried.finished_at is None
    assert len(history) == (0 if state is State.CANCELLED else 1)


async def test_a_new_life_has_all_attempts_and_keeps_what_was_published(
    jobs: Jobs, autojump_clock: MockClock
) -> None:
    kind = Kind("flaky", None, list[int], retry=Retry(attempts=2, backoff=trio_jobs.constant(1)))
    starts: list[tuple[int, int, list[int] | None]] = []

    @kind.handled_by
    async def fails_three_times(attempt: Attempt[None, list[int]]) -> list[int]:
        starts.append((attempt.number, attempt.token, attempt.published))
        await attempt.publish([*(attempt.published or []), attempt.token])
        if len(starts) < 4:
            raise Fail("no")
        return [0]

    job = await jobs.enqueue(kind, None)
    async with trio.open_nursery() as nursery:
        await nursery.start(trio_jobs.serve, jobs, [fails_three_times])
        dead = await jobs.wait_finished(job)
        await jobs.retry(dead)
        ended = await jobs.wait_finished(job)
        nursery.cancel_scope.cancel()

    assert (dead.state, dead.result) == (State.DEAD, [1, 2])
    assert starts == [(1, 1, None), (2, 2, [1]), (1, 3, [1, 2]), (2, 4, [1, 2, 3])]
    assert ended.unwrap() == [0]
    assert [(past.number, past.claim) for past in await jobs.history(job)] == [
        (1, 1),
        (2, 2),
        (1, 3),
    ]


@pytest.mark.parametrize("state", [State.QUEUED, State.RUNNING, State.SUCCEEDED])
async def test_K5_a_retry_of_any_other_job_is_a_named_error_and_changes_nothing(
    jobs: Jobs, autojump_clock: MockClock, state: State
) -> None:
    async with a_job(jobs, state) as job:
        with pytest.raises(StateError, match=rf"job {job.id} \(work\).*{state.value}"):
            await jobs.retry(job)

        assert await jobs.get(job) == job


async def test_K5_two_retries_at_the_same_moment_give_one_new_life(jobs: Jobs) -> None:
    outcomes: list[str] = []

    async def retry(job: Job[int]) -> None:
        try:
            await jobs.retry(job)
        except StateError:
            outcomes.append("refused")
        else:
            outcomes.append("retried")

    for _ in range(20):
        job = await jobs.enqueue(number, 7)
        await jobs.cancel(job)
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(retry, job)

    assert sorted(outcomes) == ["refused"] * 40 + ["retried"] * 20
    assert (await jobs.counts())[State.QUEUED] == 20


async def test_K5_retries_from_two_processes_give_one_new_life(tmp_path: Path) -> None:
    path = tmp_path / "jobs.db"
    async with trio_jobs.open_jobs(path) as jobs:
        for job in await jobs.enqueue_many(number, range(100)):
            await jobs.cancel(job)
    outcomes = await said_at_once(
        2,
        """
        outcomes = []
        for id in range(1, 101):
            try:
                await jobs.retry(id)
                outcomes.append(True)
            except StateError:
                outcomes.append(False)
        print(json.dumps(outcomes))
        """,
        path,
    )

    assert [sorted(pair) for pair in zip(*outcomes, strict=True)] == [[False, True]] * 100
    async with trio_jobs.open_jobs(path) as jobs:
        assert (await jobs.counts())[State.QUEUED] == 100


async def test_a_retry_after_the_deadline_fails_again(
    jobs: Jobs, autojump_clock: MockClock
) -> None:
    job = await jobs.enqueue(number, 7, deadline=EPOCH + timedelta(seconds=10))
    await jobs.cancel(job)
    await trio.sleep(20)
    await jobs.retry(job)

    async with trio.open_nursery() as nursery:
        await nursery.start(trio_jobs.serve, jobs, [double])
        ended = await jobs.wait_finished(job)
        nursery.cancel_scope.cancel()

    assert (ended.state, ended.failure) == (State.FAILED, Failure("deadline"))


# The snapshot.


async def test_a_job_is_frozen_and_hashable_and_equal_to_the_same_job(jobs: Jobs) -> None:
    job = await jobs.enqueue(number, 7)
    same = await jobs.get(job.id)
    await jobs.cancel(job)
    later = await jobs.get(job.id)
    untyped: Any = job

    for name in ("id", "state", "_row", "anything"):
        with pytest.raises(AttributeError):
            setattr(untyped, name, 5)
    assert job == same
    assert hash(job) == hash(same)
    assert job != later
    assert len({job, same, later}) == 2


@pytest.mark.parametrize("state", State)
async def test_a_job_of_every_state_is_json_ready(
    jobs: Jobs, autojump_clock: MockClock, state: State
) -> None:
    async with a_job(jobs, state, key="k") as job:
        shown = json.loads(json.dumps(job.to_dict(), allow_nan=False))

    failure = {
        State.FAILED: ("refused", None),
        State.DEAD: ("internal error", "ZeroDivisionError"),
    }.get(state, (None, None))
    start = EPOCH.isoformat()
    has_run = state not in (State.QUEUED, State.CANCELLED)
    assert shown == {
        "id": 1,
        "kind": "work",
        "status": state.value,
        "result": {State.RUNNING: "half", State.SUCCEEDED: "done"}.get(state),
        "error": failure[0],
        "error_type": failure[1],
        "attempt": 1 if has_run else 0,
        "priority": 0,
        "key": "k",
        "enqueued_at": start,
        "run_at": start,
        "deadline": None,
        "started_at": start if has_run else None,
        "finished_at": start if state.is_final else None,
    }
    assert datetime.fromisoformat(shown["enqueued_at"]).utcoffset() == timedelta(0)


@pytest.mark.parametrize("state", State)
async def test_unwrap_gives_the_result_or_says_why_there_is_none(
    autojump_clock: MockClock, state: State
) -> None:
    async with trio_jobs.open_jobs(":memory:") as jobs, a_job(jobs, state) as job:
        pass

    if state is State.SUCCEEDED:
        assert job.unwrap() == "done"
    elif state.is_final:
        reason = {
            State.FAILED: "failed: refused",
            State.DEAD: "dead: internal error",
            State.CANCELLED: "was cancelled",
        }[state]
        with pytest.raises(JobFailed, match=rf"job 1 \(work\) {reason}"):
            job.unwrap()
    else:
        with pytest.raises(StateError, match=rf"job 1 \(work\).*{state.value}"):
            job.unwrap()


async def test_a_result_of_None_unwraps_to_None(jobs: Jobs) -> None:
    kind = Kind("nothing", None)

    @kind.handled_by
    async def nothing(attempt: Attempt[None, None]) -> None:
        pass

    job = await jobs.enqueue(kind, None)
    await trio_jobs.run_once(jobs, [nothing])

    ended = await jobs.get(job.id)
    assert (ended.state, ended.unwrap(), ended.result) == (State.SUCCEEDED, None, None)


async def test_S1_no_text_about_a_job_shows_its_payload_or_result(
    jobs: Jobs, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    value = Login("ann", CANARY)

    @login.handled_by
    async def echo(attempt: Attempt[Login, Login]) -> Login:
        shown.append(repr(attempt))
        await attempt.publish(attempt.payload)
        return attempt.payload

    shown: list[str] = []
    job = await jobs.enqueue(login, value, key="k")
    await trio_jobs.run_once(jobs, [echo])
    ended = await jobs.get(job)
    wrong = Kind("login", Login, int)
    [misread] = await jobs.find(kind=wrong)
    for call in (ended.unwrap, lambda: misread.result, misread.unwrap):
        with contextlib.suppress(PayloadError):
            call()
    with pytest.raises(StateError) as not_ended:
        await jobs.retry(job)
    with pytest.raises(JobNotFound) as not_found:
        await jobs.get(job.id, number)
    with pytest.raises(PayloadError) as refused:
        misread.unwrap()
    shown += [str(error.value) for error in (not_ended, not_found, refused)]
    shown += [repr(job), str(ended), repr(ended), repr(misread), caplog.text]

    assert ended.unwrap() == value
    assert CANARY not in "".join(shown)
    assert repr(ended) == "<Job 1 'login': succeeded, attempt 1>"


# Hostile rows.


@pytest.fixture
async def file_jobs(tmp_path: Path) -> AsyncIterator[Jobs]:
    async with trio_jobs.open_jobs(tmp_path / "jobs.db") as jobs:
        yield jobs


NOT_JSON = [b"not json", b"\xff\x00", b"[" * 100_000, b"", b'{"a": NaN}', b"\xed\xa0\x80", b"1 2"]


async def test_P1_a_result_that_is_not_json_hurts_only_who_reads_it(
    file_jobs: Jobs, tmp_path: Path
) -> None:
    made = await file_jobs.enqueue_many(number, range(len(NOT_JSON) + 1))
    await trio_jobs.run_once(file_jobs, [double])
    with contextlib.closing(sqlite3.connect(tmp_path / "jobs.db")) as connection, connection:
        for one, data in zip(made, NOT_JSON, strict=False):
            connection.execute("UPDATE trio_jobs_job SET result = ? WHERE id = ?", (data, one.id))
    found = await file_jobs.find(kind=number)
    plain = await file_jobs.find()

    assert len(found) == len(plain) == len(made)
    broken: list[Job[Any]] = [*found[:-1], *plain[:-1]]
    for job in broken:
        with pytest.raises(PayloadError):
            _ = job.result
        with pytest.raises(PayloadError):
            job.unwrap()
        assert job.to_dict()["result"] is None
        assert json.dumps(job.to_dict())
        assert repr(job)
    assert found[-1].unwrap() == 2 * len(NOT_JSON)


@pytest.mark.parametrize("column", ["kind", "key", "failure", "failure_type", "result", "payload"])
async def test_P1_a_row_with_nonsense_in_a_text_column_can_be_listed_and_shown(
    file_jobs: Jobs, tmp_path: Path, column: str
) -> None:
    nonsense = [b"\xff\x00\xfe", "a\0b", b"x" * 1_000_000, 5, 1.5]
    bad = await file_jobs.enqueue_many(number, range(5), keys=list("abcde"))
    good = await file_jobs.enqueue(number, 2, key="good")
    with contextlib.closing(sqlite3.connect(tmp_path / "jobs.db")) as connection, connection:
        for job, data in zip(bad, nonsense, strict=True):
            connection.execute(
                f"UPDATE trio_jobs_job SET failure = 'no', {column} = ? WHERE id = ?",
                (data, job.id),
            )

    found = await file_jobs.find()
    assert [job.id for job in found] == [*[job.id for job in bad], good.id]
    assert all(json.dumps(job.to_dict()) and repr(job) for job in found)
    assert sum((await file_jobs.counts()).values()) == 6
    await trio_jobs.run_once(file_jobs, [double])
    assert (await file_jobs.get(good)).unwrap() == 4


@pytest.mark.parametrize(
    "column", ["enqueued_at", "run_at", "deadline", "started_at", "finished_at"]
)
async def test_P1_an_instant_that_no_datetime_can_show_is_clamped(
    file_jobs: Jobs, tmp_path: Path, column: str
) -> None:
    job = await file_jobs.enqueue(number, 1)
    for instant in (-(2**63), -1, 0, 2**62, 2**63 - 1):
        with contextlib.closing(sqlite3.connect(tmp_path / "jobs.db")) as connection, connection:
            connection.execute(f"UPDATE trio_jobs_job SET {column} = ?", (instant,))

        found = await file_jobs.get(job)
        assert isinstance(getattr(found, column), datetime)
        assert json.dumps(found.to_dict())


# Sizes.


async def test_P8_listing_1000_large_jobs_takes_little_memory_and_time(tmp_path: Path) -> None:
    # 100 MB of payloads: a tenth of what a file may hold of them, twice what is allowed here.
    path = tmp_path / "jobs.db"
    raw = Kind("raw", bytes)
    async with trio_jobs.open_jobs(SqliteStore(path, synchronous="normal")) as jobs:
        for _ in range(10):
            await jobs.enqueue_many(raw, [bytes(100_000)] * 100)

    process = run_python(
        "import resource, time\n"
        "def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024\n"
        "async def main():\n"
        "    async with open_jobs(sys.argv[1]) as jobs:\n"
        "        await jobs.find(limit=1)\n"
        "        before, start = peak(), time.process_time()\n"
        "        found = await jobs.find(limit=1000)\n"
        "        print(json.dumps([len(found), peak() - before, time.process_time() - start]))\n"
        "trio.run(main)",
        path,
    )
    found, megabytes, seconds = json.loads(await output_of(process))

    assert found == 1000
    assert megabytes < 50
    assert seconds < 0.5


# The end.


CALLS: dict[str, Callable[[Jobs, Job[int]], Awaitable[object]]] = {
    "enqueue": lambda jobs, job: jobs.enqueue(number, 1),
    "enqueue_many": lambda jobs, job: jobs.enqueue_many(number, [1, 2]),
    "enqueue_many of none": lambda jobs, job: jobs.enqueue_many(number, []),
    "get": lambda jobs, job: jobs.get(job),
    "get with a kind": lambda jobs, job: jobs.get(job.id, number),
    "find": lambda jobs, job: jobs.find(),
    "history": lambda jobs, job: jobs.history(job),
    "counts": lambda jobs, job: jobs.counts(),
    "wait_finished": lambda jobs, job: jobs.wait_finished(job),
    "cancel": lambda jobs, job: jobs.cancel(job),
    "retry": lambda jobs, job: jobs.retry(job),
    "run_once": lambda jobs, job: trio_jobs.run_once(jobs, [double]),
    "serve": lambda jobs, job: trio_jobs.serve(jobs, [double]),
}


async def test_a_jobs_used_after_its_block_raises_ClosedResourceError(store: SqliteStore) -> None:
    async with trio_jobs.open_jobs(store) as jobs:
        job = await jobs.enqueue(number, 1)
        await jobs.cancel(job)

    with trio.fail_after(LONG):
        for call in CALLS.values():
            with pytest.raises(trio.ClosedResourceError):
                await call(jobs, job)


async def test_every_async_call_is_a_checkpoint(jobs: Jobs) -> None:
    job = await jobs.enqueue(number, 1)
    await jobs.cancel(job)

    for name, call in CALLS.items():
        if name != "serve":
            with assert_checkpoints():
                await call(jobs, job)


async def test_every_async_call_can_be_cancelled_before_it_begins(jobs: Jobs) -> None:
    job = await jobs.enqueue(number, 1)
    await jobs.cancel(job)
    before = await jobs.find()

    for name, call in CALLS.items():
        with trio.CancelScope() as scope:
            scope.cancel()
            await call(jobs, job)

        assert scope.cancelled_caught, name
        assert await jobs.find() == before, name


# Time travel.


async def test_a_year_of_waiting_takes_no_time(jobs: Jobs, autojump_clock: MockClock) -> None:
    job = await jobs.enqueue(number, 7, delay=365 * 86_400)

    with real_timeout(30):
        async with trio.open_nursery() as nursery:
            await nursery.start(trio_jobs.serve, jobs, [double])
            ended = await jobs.wait_finished(job)
            nursery.cancel_scope.cancel()

    assert ended.started_at == EPOCH + timedelta(days=365)
