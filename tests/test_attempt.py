"""One start of a job: what each way to end comes to, and what can go wrong on the way there."""

from __future__ import annotations

import itertools
import logging
import sqlite3
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from stories import (
    STORES,
    TIMES,
    Does,
    Script,
    Trouble,
    abandon,
    assert_no_transaction_is_open,
    at,
    finished,
    forever,
    is_cancelled_after,
    make_store,
    now,
    outcomes,
    row_of,
    scheduling,
    second,
    serving,
    writer,
)
from trio.testing import MockClock

import trio_jobs
from trio_jobs import (
    Attempt,
    Fail,
    Failure,
    Jobs,
    Kind,
    LeaseLost,
    PayloadError,
    Retry,
    RetryLater,
    SqliteStore,
    State,
    StoreBusy,
    constant,
    testing,
)
from trio_jobs._model import Change

PATIENT = Retry(attempts=2, backoff=constant(500))
plain = Kind("plain", None, retry=PATIENT)
good = Kind("good", int, int)
INTERNAL = "internal error"


@pytest.fixture
async def memory(autojump_clock: MockClock) -> AsyncIterator[Jobs]:
    async with trio_jobs.open_jobs(":memory:") as opened:
        yield opened


async def triple(attempt: Attempt[int, int]) -> int:
    await trio.sleep(1)
    return 3 * attempt.payload


# The ways to end.


def children_raise(*errors: BaseException, depth: int = 1) -> Does:
    """A step whose child tasks raise, so deep that their groups are nested."""

    async def child(error: BaseException) -> None:
        await trio.lowlevel.cancel_shielded_checkpoint()
        raise error

    async def step(attempt: Any) -> None:
        async with trio.open_nursery() as nursery:
            if depth > 1:
                deeper = children_raise(*errors, depth=depth - 1)
                nursery.start_soon(deeper, attempt)
            else:
                for error in errors:
                    nursery.start_soon(child, error)

    return step


async def stray_cancelled(attempt: object) -> None:
    """Raise a Cancelled long after its scope was closed."""
    stray: trio.Cancelled | None = None
    with trio.CancelScope() as scope:
        scope.cancel()
        try:
            await trio.sleep_forever()
        except trio.Cancelled as error:
            stray = error
            raise
    assert stray is not None
    raise stray


@dataclass(frozen=True)
class End:
    state: State
    failure: Failure | None
    attempt: int = 1
    due: float = 0.0
    history: tuple[str, ...] = ("failed",)


def refused(message: str) -> End:
    return End(State.FAILED, Failure(message))


def again(message: str, type: str | None = None) -> End:
    return End(State.QUEUED, Failure(message, type), due=500)


def later(due: float) -> End:
    return End(State.QUEUED, None, attempt=0, due=due, history=("retry later",))


ENDS: dict[str, tuple[object, End]] = {
    "a value": (7.5, End(State.SUCCEEDED, None, history=())),
    "an error": (ValueError("x"), again(INTERNAL, "ValueError")),
    "Fail": (Fail("no ink"), again("no ink")),
    "Fail for good": (Fail("gone", retry=False), refused("gone")),
    "RetryLater": (RetryLater(30), later(30)),
    "its timeout": (
        forever,
        End(State.QUEUED, Failure("timed out"), due=550.001, history=("timed out",)),
    ),
    "another type": ("x", refused("result does not fit")),
    "P3 NaN": (float("nan"), refused("result does not fit")),
    "P3 infinity": (float("-inf"), refused("result does not fit")),
    "B1 SystemExit": (SystemExit(3), again(INTERNAL, "SystemExit")),
    "B1 BaseException": (BaseException("bare"), again(INTERNAL, "BaseException")),
    "B1 GeneratorExit": (GeneratorExit(), again(INTERNAL, "GeneratorExit")),
    "B3 a stray Cancelled": (stray_cancelled, again(INTERNAL, "Cancelled")),
    "B4 RetryLater of a child": (children_raise(RetryLater(30)), later(30)),
    "B4 RetryLater three deep": (children_raise(RetryLater(30), depth=3), later(30)),
    "B4 two of RetryLater": (children_raise(RetryLater(40), RetryLater(30)), later(40)),
    "B4 Fail of a child": (children_raise(Fail("gone", retry=False)), refused("gone")),
    "B4 Fail beside Fail for good": (
        ExceptionGroup("", [Fail("one"), Fail("two", retry=False)]),
        refused("one"),
    ),
    "B4 RetryLater beside an error": (
        ExceptionGroup("", [RetryLater(30), ValueError()]),
        again(INTERNAL, "ExceptionGroup(RetryLater, ValueError)"),
    ),
    "B4 RetryLater beside Fail": (
        ExceptionGroup("", [RetryLater(30), Fail("no")]),
        again(INTERNAL, "ExceptionGroup(RetryLater, Fail)"),
    ),
    "B4 every leaf is named": (
        BaseExceptionGroup("", [KeyError(), ExceptionGroup("", [OSError()]), SystemExit()]),
        again(INTERNAL, "BaseExceptionGroup(KeyError, OSError, SystemExit)"),
    ),
}


@pytest.mark.parametrize("end", ENDS)
async def test_every_end_of_a_start_comes_to_what_the_state_table_says(
    memory: Jobs, autojump_clock: MockClock, end: str
) -> None:
    step, expected = ENDS[end]
    kind = Kind("kind", None, float | None, retry=PATIENT, timeout=50)
    async with serving(memory, kind.handled_by(Script(step))):
        job = await memory.enqueue(kind, None)
        await trio.sleep(100 if step is forever else 20)

    job = await memory.get(job)
    assert (job.state, job.failure, job.attempt) == (
        expected.state,
        expected.failure,
        expected.attempt,
    )
    assert second(job.run_at) == expected.due
    assert await outcomes(memory, job) == list(expected.history)


async def test_the_last_attempt_that_fails_or_times_out_leaves_a_dead_letter(
    memory: Jobs, autojump_clock: MockClock
) -> None:
    once = Retry(attempts=1)
    raising, slow = Kind("raising", None, retry=once), Kind("slow", None, retry=once, timeout=5)
    handlers = [raising.handled_by(Script(Fail("no ink"))), slow.handled_by(Script(forever))]
    async with serving(memory, *handlers):
        jobs = [await memory.enqueue(raising, None), await memory.enqueue(slow, None)]
        ended = await finished(memory, *jobs)

    assert [job.state for job in ended] == [State.DEAD, State.DEAD]
    assert [job.failure for job in ended] == [Failure("no ink"), Failure("timed out")]


async def test_P1_a_payload_that_does_not_decode_fails_for_good_and_is_not_handled(
    memory: Jobs, autojump_clock: MockClock
) -> None:
    handle = Script(1)
    async with serving(memory, Kind("renamed", int, int).handled_by(handle)):
        job = await memory.enqueue(Kind("renamed", str), "seven")
        [ended] = await finished(memory, job)

    assert (ended.state, ended.failure) == (State.FAILED, Failure("payload does not decode"))
    assert handle.starts == []


@pytest.mark.parametrize("where", ["memory", "file"])
async def test_P1_rows_edited_by_hand_hurt_nobody(
    where: str, tmp_path: Path, autojump_clock: MockClock
) -> None:
    store = make_store(where, tmp_path, SqliteStore)
    bad: list[object] = ["not json", b"\xff\x00", "[" * 100_000, "", b"", "1e400", 7, 0.5]
    async with trio_jobs.open_jobs(store) as jobs:
        around = [await jobs.enqueue(good, number) for number in range(5)]
        edited = [await jobs.enqueue(good, 0) for _ in bad]
        around += [await jobs.enqueue(good, number) for number in range(5, 10)]
        for job, payload in zip(edited, bad, strict=True):
            writer(store).execute(
                "UPDATE trio_jobs_job SET payload = ? WHERE id = ?",
                (payload, job.id),  # type: ignore[arg-type]
            )
        async with serving(jobs, good.handled_by(triple), workers=3) as runner:
            ended = await finished(jobs, *around, *edited)
            statistics = runner.statistics()

    assert [job.unwrap() for job in ended[:10]] == [3 * number for number in range(10)]
    # The integer 7 is the number 7 in JSON.
    failures = {None if job.failure is None else job.failure.message for job in ended[10:]}
    assert failures <= {"payload does not decode", None}
    assert [job.state for job in ended[10:]].count(State.FAILED) >= 7
    assert statistics.running == 0


# Hostile exceptions.


class StrRaises(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


class StrExits(Exception):
    def __str__(self) -> str:
        raise SystemExit(1)

    __repr__ = __str__


class NeedsArguments(Exception):
    def __init__(self, one: int, *, two: int) -> None:
        self.sum = one + two


class Hollow(Fail):
    def __init__(self) -> None:
        pass  # so it has neither message nor retry


class HollowLater(RetryLater):
    def __init__(self) -> None:
        pass


class Nameless(type):
    @property
    def __name__(cls) -> str:  # type: ignore[override]
        raise RuntimeError("no name")


class NoName(Exception, metaclass=Nameless):
    pass


class NoLeaves(ExceptionGroup[Exception]):
    exceptions = ()


def cyclic() -> Exception:
    one, other = ValueError("one"), ValueError("other")
    one.__cause__, other.__cause__ = other, one
    return one


def deep(levels: int) -> Exception:
    error: Exception = ValueError("at the bottom")
    for _ in range(levels):
        error = ExceptionGroup("", [error])
    return error


def with_attribute(error: Exception, name: str, value: object) -> Exception:
    setattr(error, name, value)
    return error


HOSTILE: dict[str, Callable[[], BaseException]] = {
    "a lone surrogate": lambda: Fail("\ud800"),
    "NUL": lambda: Fail("a\0b"),
    "ESC codes": lambda: Fail("\x1b[31mred\x1b[0m"),
    "5 MB": lambda: Fail("x" * 5_000_000),
    "5 MB of an ordinary error": lambda: ValueError("x" * 5_000_000),
    "a type's name of 1 MB": lambda: type("x" * 1_000_000, (Exception,), {})(),
    "str raises": StrRaises,
    "str exits": StrExits,
    "needs arguments": lambda: NeedsArguments(1, two=2),
    "a cause cycle": cyclic,
    "300 groups deep": lambda: deep(300),
    "5000 groups deep": lambda: deep(5000),
    "a Fail without a message": Hollow,
    "a RetryLater without seconds": HollowLater,
    "a message that is no text": lambda: with_attribute(Fail("x"), "message", 5),
    "seconds that are NaN": lambda: with_attribute(RetryLater(1), "seconds", float("nan")),
    "seconds below 0": lambda: with_attribute(RetryLater(1), "seconds", -1e300),
    "seconds that are text": lambda: with_attribute(RetryLater(1), "seconds", "soon"),
    "a type without a name": NoName,
    "a group without leaves": lambda: NoLeaves("", [ValueError()]),
}


@pytest.mark.parametrize("hostile", HOSTILE)
async def test_P5_a_hostile_exception_is_recorded_and_hurts_nobody_else(
    hostile: str, tmp_path: Path, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "trio_jobs")
    async with trio_jobs.open_jobs(tmp_path / "jobs.db") as jobs:
        raise_it = Script(HOSTILE[hostile](), HOSTILE[hostile]())
        async with serving(jobs, plain.handled_by(raise_it), good.handled_by(triple)):
            bad = await jobs.enqueue(plain, None)
            neighbours = [await jobs.enqueue(good, 7, delay=delay) for delay in (0, 0.5, 600)]
            [ended] = await finished(jobs, bad)
            others = await finished(jobs, *neighbours)
        raw = stored_texts(tmp_path / "jobs.db")

    assert ended.state is State.DEAD
    assert raise_it.numbers == [1, 2]
    assert ended.failure is not None
    assert len(ended.failure.message) <= 10_000
    assert [job.unwrap() for job in others] == [21, 21, 21]
    for text in raw:
        assert "\0" not in text.decode("utf-8", errors="strict")


async def test_P5_what_is_not_a_fail_has_its_type_named(
    memory: Jobs, autojump_clock: MockClock
) -> None:
    errors = [StrRaises(), cyclic(), NeedsArguments(1, two=2)]
    script = Script(*errors)
    async with serving(memory, plain.handled_by(script), workers=1):
        jobs = [await memory.enqueue(plain, None) for _ in errors]
        await trio.sleep(1)

    failures = [(await memory.get(job)).failure for job in jobs]
    names = ["StrRaises", "ValueError", "NeedsArguments"]
    assert failures == [Failure(INTERNAL, name) for name in names]


def stored_texts(path: Path) -> list[bytes]:
    """Every failure and type of it that the file holds."""
    connection = sqlite3.connect(path)
    try:
        return [
            bytes(text)
            for table in ("trio_jobs_job", "trio_jobs_past")
            for row in connection.execute(
                f"SELECT CAST(failure AS BLOB), CAST(failure_type AS BLOB) FROM {table}"
            )
            for text in row
            if text is not None
        ]
    finally:
        connection.close()


CANARY = "hunter2-XYZ"


@dataclass(frozen=True)
class Login:
    password: str
    headers: dict[str, str]

    def __post_init__(self) -> None:
        if self.password.endswith("!"):
            raise ValueError(f"no such password: {self.password}")


login = Kind("login", Login, list[str], retry=Retry(attempts=2))


async def leak_in_locals(attempt: Attempt[Login, list[str]]) -> list[str]:
    password, headers = attempt.payload.password, attempt.payload.headers

    def deep_inside(secret: str, headers: dict[str, str]) -> None:
        raise RuntimeError("refused")

    deep_inside(password, headers)
    return []


async def return_a_secret(attempt: Attempt[Login, list[str]]) -> list[str]:
    return [attempt.payload.headers]  # type: ignore[list-item]


async def publish_a_secret(attempt: Attempt[Login, list[str]]) -> list[str]:
    await attempt.publish(attempt.payload.password)  # type: ignore[arg-type]
    return []


@pytest.mark.parametrize("leak", [leak_in_locals, return_a_secret, publish_a_secret])
async def test_S1_no_payload_value_reaches_the_error_columns_or_the_log(
    leak: Any, tmp_path: Path, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    secret = Login(CANARY, {"Authorization": f"Bearer {CANARY}"})
    async with trio_jobs.open_jobs(tmp_path / "jobs.db") as jobs:
        async with serving(jobs, login.handled_by(leak)):
            job = await jobs.enqueue(login, secret)
            [ended] = await finished(jobs, job)
        shown = repr(ended), str(ended.to_dict()), str(await jobs.history(job))

    assert ended.state in (State.DEAD, State.FAILED)
    assert caplog.records
    assert CANARY not in caplog.text
    assert CANARY not in "".join(shown)
    assert not any(CANARY.encode() in text for text in stored_texts(tmp_path / "jobs.db"))


async def test_S1_a_payload_that_does_not_decode_is_not_shown_either(
    memory: Jobs, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    as_dict = Kind("login", dict[str, object])
    secret: dict[str, object] = {"password": f"{CANARY}!", "headers": {}}
    async with serving(memory, login.handled_by(leak_in_locals)):
        job = await memory.enqueue(as_dict, secret)
        [ended] = await finished(memory, job)

    assert ended.failure == Failure("payload does not decode")
    assert CANARY not in caplog.text + repr(ended)


async def test_an_ordinary_error_is_logged_with_its_traceback_and_whose_it_was(
    memory: Jobs, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(memory, plain.handled_by(Script(ValueError("deep down")))):
        job = await memory.enqueue(plain, None)
        await trio.sleep(1)

    [record] = [one for one in caplog.records if one.exc_info]
    assert "job 1 (plain), attempt 1" in record.getMessage()
    assert "ValueError: deep down" in caplog.text
    assert "in __call__" in caplog.text
    assert (await memory.get(job)).failure == Failure(INTERNAL, "ValueError")


async def test_S1_a_fail_is_stored_and_not_logged_as_an_error(
    memory: Jobs, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(memory, plain.handled_by(Script(Fail("no ink")))):
        await memory.enqueue(plain, None)
        await trio.sleep(1)

    assert caplog.records == []


# Publishing.

counting = Kind("counting", int, list[int], retry=Retry(attempts=3, backoff=constant(10)))


class Recorder(SqliteStore):
    """Notes what is written of a job, in the order in which it is."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.written: list[tuple[State, int, bytes | None]] = []

    def apply(self, changes: Sequence[Change]) -> Any:
        refused = super().apply(changes)
        for change, refusal in zip(changes, refused, strict=True):
            if refusal is None:
                after = change.after
                self.written.append((after.state, after.claims, after.result))
        return refused


@pytest.mark.parametrize("where", STORES)
async def test_X5_300_partial_results_arrive_in_order_and_the_value_last(
    where: str, tmp_path: Path, autojump_clock: MockClock
) -> None:
    async def count(attempt: Attempt[int, list[int]]) -> list[int]:
        for number in range(attempt.payload):
            await attempt.publish([number])
        return [-1]

    store = make_store(where, tmp_path, Recorder)
    async with trio_jobs.open_jobs(store) as jobs, serving(jobs, counting.handled_by(count)):
        job = await jobs.enqueue(counting, 300)
        [ended] = await finished(jobs, job)

    assert ended.unwrap() == [-1]
    partial = [(State.RUNNING, 1, b"[%d]" % number) for number in range(300)]
    assert store.written == [*partial, (State.SUCCEEDED, 1, b"[-1]")]


async def test_X5_partial_results_of_many_child_tasks_come_in_the_order_they_were_published(
    jobs: Jobs, autojump_clock: MockClock
) -> None:
    order: list[int] = []

    async def count(attempt: Attempt[int, list[int]]) -> list[int]:
        async def publish(number: int) -> None:
            order.append(number)
            await attempt.publish([number])

        async with trio.open_nursery() as nursery:
            for number in range(attempt.payload):
                nursery.start_soon(publish, number)
        await trio.sleep(10)
        return [-1]

    async with serving(jobs, counting.handled_by(count)):
        job = await jobs.enqueue(counting, 50)
        await trio.sleep(5)
        halfway = await jobs.get(job)
        [ended] = await finished(jobs, job)

    assert (halfway.state, halfway.result) == (State.RUNNING, [order[-1]])
    assert ended.unwrap() == [-1]


async def test_a_published_result_is_seen_at_once_and_by_the_next_attempt(
    jobs: Jobs, autojump_clock: MockClock
) -> None:
    seen: list[list[int] | None] = []

    async def count(attempt: Attempt[int, list[int]]) -> list[int]:
        done = attempt.published or []
        seen.append(attempt.published)
        await attempt.publish([*done, attempt.number])
        seen.append((await attempt.jobs.get(attempt.job_id, counting)).result)
        raise ValueError

    async with serving(jobs, counting.handled_by(count)):
        job = await jobs.enqueue(counting, 0)
        [ended] = await finished(jobs, job)

    assert seen == [None, [1], [1], [1, 2], [1, 2], [1, 2, 3]]
    assert (ended.state, ended.result) == (State.DEAD, [1, 2, 3])


async def test_M4_publishing_cancelled_at_any_point_took_place_if_it_returned_and_only_then(
    store: SqliteStore, autojump_clock: MockClock
) -> None:
    """The handler goes on after it, and nothing is open meanwhile."""
    returned: list[bool] = []
    seen: list[tuple[int, object]] = []

    async def publish(attempt: Attempt[int, int]) -> int:
        was_in_time = True
        while was_in_time:
            number = len(returned)
            before = (await row_of(jobs, attempt.job_id)).result
            was_cancelled, was_in_time = await is_cancelled_after(
                number, partial(attempt.publish, number)
            )
            returned.append(not was_cancelled)
            after = (await row_of(jobs, attempt.job_id)).result
            seen.append((number, after if after != before else None))
            assert attempt.published == (None if after is None else int(after))
            await testing.settled()  # the runner may be just looking for more
            assert_no_transaction_is_open(store)
        return -1

    async with (
        trio_jobs.open_jobs(store) as jobs,
        serving(jobs, good.handled_by(publish)) as runner,
    ):
        [job] = await finished(jobs, await jobs.enqueue(good, 1))
        statistics = runner.statistics()

    assert (job.state, job.result, statistics.trouble) == (State.SUCCEEDED, -1, None)
    assert [of is not None for _, of in seen] == returned
    assert not returned[0]
    assert returned[-1]


async def test_a_published_value_that_does_not_fit_raises_in_the_handler_and_is_not_stored(
    memory: Jobs, autojump_clock: MockClock
) -> None:
    async def count(attempt: Attempt[int, list[int]]) -> list[int]:
        await attempt.publish([1])
        for bad in (["x"], [float("nan")], None, [1] * 1_000_000):
            with pytest.raises(PayloadError):
                await attempt.publish(bad)  # type: ignore[arg-type]
        raise Fail("done", retry=False)

    async with serving(memory, counting.handled_by(count)):
        [ended] = await finished(memory, await memory.enqueue(counting, 0))

    assert (ended.failure, ended.result) == (Failure("done"), [1])


async def test_what_was_published_as_another_type_does_not_stop_the_next_attempt(
    memory: Jobs, autojump_clock: MockClock
) -> None:
    old, new = Kind("kind", None, str), Kind("kind", None, list[int])

    async def publish(attempt: Attempt[None, str]) -> str:
        await attempt.publish("old words")
        raise RetryLater(5)

    job = await memory.enqueue(new, None)
    async with serving(memory, old.handled_by(publish)):
        await trio.sleep(1)
    seen: list[object] = []

    async def look(attempt: Attempt[None, list[int]]) -> list[int]:
        seen.append(attempt.published)
        return [1]

    async with serving(memory, new.handled_by(look)):
        [ended] = await finished(memory, job)

    assert seen == [None]
    assert ended.unwrap() == [1]


async def test_X5_a_stale_attempt_that_publishes_gets_LeaseLost_and_changes_nothing(
    jobs: Jobs, autojump_clock: MockClock
) -> None:
    old: list[Attempt[int, list[int]]] = []

    async def keep_it(attempt: Attempt[int, list[int]]) -> list[int]:
        old.append(attempt)
        if attempt.number == 1:
            raise ValueError
        await attempt.publish([2])
        await trio.sleep(10)
        with pytest.raises(LeaseLost):
            await old[0].publish([1])
        row = await row_of(jobs, attempt.job_id)
        assert row.result == b"[2]"
        return [3]

    async with serving(jobs, counting.handled_by(keep_it)):
        [ended] = await finished(jobs, await jobs.enqueue(counting, 0))
    with pytest.raises(LeaseLost):
        await old[1].publish([9])

    assert (await jobs.get(ended)).result == [3]


async def test_a_cancel_that_is_taken_back_by_hand_does_not_keep_a_publication_waiting(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """It was refused for ever, as often as the disk allowed."""
    store = make_store("memory", tmp_path, SqliteStore)

    async def publish(attempt: Attempt[int, list[int]]) -> list[int]:
        with trio.CancelScope(shield=True):
            await jobs.cancel(attempt.job_id)
            writer(store).execute("UPDATE trio_jobs_job SET cancel_requested = 0")
            with trio.fail_after(10):
                await attempt.publish([1])
        return [2]

    async with trio_jobs.open_jobs(store) as jobs, serving(jobs, counting.handled_by(publish)):
        [ended] = await finished(jobs, await jobs.enqueue(counting, 0))

    assert ended.result == [2]


@pytest.mark.parametrize("where", STORES)
async def test_X5_a_runner_whose_row_was_taken_finds_out_by_publishing(
    where: str, tmp_path: Path, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """Somebody else claims the row under a running handler (its lease was cut by hand)."""
    store = make_store(where, tmp_path, SqliteStore)
    raised: list[BaseException] = []

    async def lose_it(attempt: Attempt[int, list[int]]) -> list[int]:
        await steal(jobs, store, attempt.job_id)
        try:
            await attempt.publish([1])
        except LeaseLost as error:
            raised.append(error)
            await trio.sleep_forever()  # we are cancelled, too
        return [1]

    async with trio_jobs.open_jobs(store) as jobs:
        async with serving(jobs, counting.handled_by(lose_it)) as runner:
            job = await jobs.enqueue(counting, 0)
            await trio.sleep(1)
            statistics = runner.statistics()
        row = await row_of(jobs, job)

    assert len(raised) == 1
    assert (row.state, row.claims, row.result) == (State.RUNNING, 2, None)
    assert (statistics.running, statistics.lost) == (0, 1)
    assert caplog.text.count("lost its lease") == 1


async def steal(jobs: Jobs, store: SqliteStore, id: int) -> None:
    """Be another runner that finds the lease over and claims the row."""
    with store._connections.writing:
        writer(store).execute("UPDATE trio_jobs_job SET lease_until = 1 WHERE id = ?", (id,))
    await abandon(jobs, counting, lost_limit=1, lease=600)


async def test_X2_a_handler_that_lost_its_lease_and_cleans_up_is_left_alone_by_the_lease_keeper(
    autojump_clock: MockClock,
) -> None:
    store = SqliteStore(":memory:")

    async def cleans_up(attempt: Attempt[int, list[int]]) -> list[int]:
        await steal(jobs, store, attempt.job_id)
        try:
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                await trio.sleep(100)
                ended_at.append(now())

    ended_at: list[float] = []
    async with (
        trio_jobs.open_jobs(store) as jobs,
        serving(jobs, counting.handled_by(cleans_up), lease=6),
    ):
        await jobs.enqueue(counting, 0)
        await trio.sleep(200)

    assert ended_at == [102]  # the renewal after a third of the lease found out


@pytest.mark.parametrize("seed", range(5 * TIMES))
async def test_X5_what_is_returned_is_stored_whatever_was_published_at_the_same_time(
    seed: int, autojump_clock: MockClock
) -> None:
    async def at_once(attempt: Attempt[int, list[int]]) -> list[int]:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(attempt.publish, [1])
            nursery.start_soon(attempt.publish, [2])
        return [1 + seed % 2]

    with scheduling(seed):
        async with (
            trio_jobs.open_jobs(":memory:") as jobs,
            serving(jobs, counting.handled_by(at_once)),
        ):
            ended = await finished(jobs, *await jobs.enqueue_many(counting, range(10)))

    assert {tuple(job.unwrap()) for job in ended} == {(1 + seed % 2,)}


@pytest.mark.parametrize("end", [[7], ValueError(), RetryLater(1)], ids=repr)
async def test_X2_an_end_whose_row_was_taken_meanwhile_is_not_written(
    end: object, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    store = SqliteStore(":memory:")

    async def lose_it(attempt: Attempt[Any, Any]) -> Any:
        await steal(jobs, store, attempt.job_id)
        if isinstance(end, Exception):
            raise end
        return end

    async with (
        trio_jobs.open_jobs(store) as jobs,
        serving(jobs, counting.handled_by(lose_it), workers=1) as runner,
    ):
        job = await jobs.enqueue(counting, 0)
        await trio.sleep(1)
        row = await row_of(jobs, job)
        statistics = runner.statistics()

    assert (row.state, row.claims, row.attempt, row.result) == (State.RUNNING, 2, 2, None)
    assert (statistics.succeeded, statistics.retried, statistics.lost) == (0, 0, 1)
    assert caplog.text.count("lost its lease") == 1


# Why a start was stopped, when there are several reasons at once.

REASONS = ["cancel", "deadline", "timeout", "fence", "shutdown"]


async def last_20_seconds(ending: str) -> float:
    with trio.CancelScope(shield=True):
        await trio.sleep(20)
    if ending == "raises":
        raise ValueError
    if ending == "is cancelled":
        await trio.sleep_forever()
    return 7.5


def what_must_come_of_it(
    reasons: Sequence[str], ending: str
) -> tuple[State, str | None, list[str]]:
    """The precedence of DESIGN section 2, in its own words."""
    if "cancel" in reasons:
        return State.CANCELLED, None, ["cancelled"]
    if "deadline" in reasons:
        return State.FAILED, "deadline", ["deadline"]
    if ending == "returns":
        return State.SUCCEEDED, None, []
    if "timeout" in reasons:
        return State.QUEUED, "timed out", ["timed out"]
    if "fence" in reasons:
        return State.QUEUED, "worker lost", ["lost"]
    return State.QUEUED, None, ["interrupted"]


@pytest.mark.parametrize(
    "reasons",
    [c for size in range(1, 6) for c in itertools.combinations(REASONS, size)],
    ids="+".join,
)
@pytest.mark.parametrize("ending", ["returns", "raises", "is cancelled"])
async def test_H1_H5_the_reasons_for_a_stop_have_a_fixed_precedence(
    reasons: tuple[str, ...], ending: str, autojump_clock: MockClock
) -> None:
    """Every reason there is comes in second 10; the handler ends in second 20."""
    store = Trouble(":memory:")
    if "fence" in reasons:
        store.rule = lambda step: StoreBusy("locked") if step == "renew" else None
    kind = Kind(
        "kind",
        None,
        float | None,
        retry=Retry(backoff=constant(500)),
        timeout=10 if "timeout" in reasons else None,
    )

    async def handle(attempt: Attempt[None, float | None]) -> float:
        return await last_20_seconds(ending)

    async with trio_jobs.open_jobs(store) as jobs:
        deadline = at(10) if "deadline" in reasons else None
        job = await jobs.enqueue(kind, None, deadline=deadline)
        async with serving(jobs, kind.handled_by(handle), lease=12, grace=0) as runner:
            await trio.sleep(10)
            if "cancel" in reasons:
                assert await jobs.cancel(job)
            if "shutdown" not in reasons:
                runner.drain()  # so that it is not started again
                await trio.sleep(20)
        ended = await jobs.get(job)
        row = await row_of(jobs, job)
        history = await outcomes(jobs, job)

    state, message, past = what_must_come_of_it(reasons, ending)
    assert (ended.state, history) == (state, past)
    assert (None if ended.failure is None else ended.failure.message) == message
    assert row.lease_until is None


@pytest.mark.parametrize("end", [5, ValueError(), Fail("no"), RetryLater(1)], ids=repr)
async def test_H1_a_handler_that_swallows_the_cancel_is_cancelled_all_the_same(
    jobs: Jobs, autojump_clock: MockClock, end: object
) -> None:
    kind = Kind("kind", None, int)

    async def swallow(attempt: Attempt[None, int]) -> int:
        try:
            await trio.sleep_forever()
        except trio.Cancelled:
            if isinstance(end, Exception):
                raise end from None
        return 5

    async with serving(jobs, kind.handled_by(swallow)) as runner:
        job = await jobs.enqueue(kind, None)
        await trio.sleep(1)
        assert await jobs.cancel(job)
        [ended] = await finished(jobs, job, within=1)
        statistics = runner.statistics()

    assert (ended.state, ended.result, ended.attempt) == (State.CANCELLED, None, 1)
    assert await outcomes(jobs, job) == ["cancelled"]
    assert (statistics.started, statistics.succeeded, statistics.retried) == (1, 0, 0)


async def test_H5_three_reasons_for_one_Cancelled_are_three_different_ends(
    jobs: Jobs, autojump_clock: MockClock
) -> None:
    async with serving(jobs, plain.handled_by(Script(forever)), grace=0):
        by_user = await jobs.enqueue(plain, None)
        by_deadline = await jobs.enqueue(plain, None, deadline=at(5))
        by_shutdown = await jobs.enqueue(plain, None)
        await trio.sleep(3)
        await jobs.cancel(by_user)
        await trio.sleep(3)

    ended = [await jobs.get(job) for job in (by_user, by_deadline, by_shutdown)]
    assert [job.state for job in ended] == [State.CANCELLED, State.FAILED, State.QUEUED]
    histories = [await outcomes(jobs, job) for job in ended]
    assert histories == [["cancelled"], ["deadline"], ["interrupted"]]
    assert ended[1].failure == Failure("deadline")


async def test_what_a_handler_raises_once_it_was_stopped_counts_as_the_reason(
    memory: Jobs, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """And is not lost: the log has it."""
    slow = Kind("slow", None, timeout=5, retry=PATIENT)

    async def stumble(attempt: Attempt[None, None]) -> None:
        try:
            await trio.sleep_forever()
        finally:
            raise OSError("in the clean-up")

    async with serving(memory, slow.handled_by(stumble)):
        job = await memory.enqueue(slow, None)
        await trio.sleep(6)

    assert (await memory.get(job)).failure == Failure("timed out")
    assert "in the clean-up" in caplog.text
