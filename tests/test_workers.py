"""Workers: what a handler leaves open, and what becomes of the next job."""

from __future__ import annotations

import contextvars
import math
from collections.abc import AsyncIterator

import pytest
import trio
from stories import (
    Does,
    Script,
    Trouble,
    finished,
    forever,
    now,
    outcomes,
    scheduling,
    serving,
    sleeps,
)
from trio.testing import MockClock

import trio_jobs
from trio_jobs import Attempt, Failure, Job, Jobs, Kind, Retry, State, StoreError, constant

plain = Kind("plain", None)
number = Kind("number", int, int)


async def open_scope_with_deadline(attempt: Attempt[int, int]) -> int:
    trio.move_on_after(30).__enter__()  # noqa: ASYNC122 - as no handler should
    return 7


async def stop_in_the_middle_of_a_generator(attempt: Attempt[int, int]) -> int:
    async def ticks() -> AsyncIterator[int]:
        with trio.fail_after(30):
            yield 7  # noqa: ASYNC101, ASYNC119 - as no handler should

    generator = ticks()
    left_open.append(generator)  # kept alive, so that nothing closes it
    return await generator.__anext__()


left_open: list[AsyncIterator[int]] = []


@pytest.mark.parametrize(
    "leave_open", [open_scope_with_deadline, stop_in_the_middle_of_a_generator]
)
async def test_a_scope_that_a_handler_left_open_is_not_the_next_jobs(
    leave_open: Does, jobs: Jobs, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    untidy = Kind("untidy", int, int)
    async with serving(
        jobs, untidy.handled_by(leave_open), number.handled_by(Script(sleeps(100, 8))), workers=1
    ):
        first = await jobs.enqueue(untidy, 1)
        second = await jobs.enqueue(number, 1)
        [left, innocent] = await finished(jobs, first, second)

    assert (left.unwrap(), innocent.unwrap(), innocent.attempt) == (7, 8, 1)
    assert f"job {first.id}: {untidy.handled_by(leave_open)!r} left a cancel scope" in caplog.text
    assert now() == 100


async def test_a_nursery_that_a_handler_left_open_does_not_cancel_the_next_job(
    jobs: Jobs, autojump_clock: MockClock
) -> None:
    async def open_a_nursery(attempt: Attempt[int, int]) -> int:
        nursery = await trio.open_nursery().__aenter__()
        nursery.start_soon(fail_in_a_while)
        return 7

    async def fail_in_a_while() -> None:
        await trio.sleep(5)
        raise ValueError

    untidy = Kind("untidy", int, int)
    innocent = Script(sleeps(100, 8))
    async with serving(
        jobs, untidy.handled_by(open_a_nursery), number.handled_by(innocent), workers=1
    ):
        await finished(jobs, await jobs.enqueue(untidy, 1))
        [ended] = await finished(jobs, await jobs.enqueue(number, 1))

    assert (ended.unwrap(), ended.attempt) == (8, 1)


async def test_whoever_closes_a_nursery_that_was_left_open_disturbs_no_other_job(
    jobs: Jobs, autojump_clock: MockClock
) -> None:
    """Trio then resumes the task it was opened in, whatever that does by then."""
    tasks: list[trio.lowlevel.Task] = []

    async def leave_open(attempt: Attempt[int, int]) -> int:
        tasks.append(trio.lowlevel.current_task())
        await trio.open_nursery().__aenter__()
        return 7

    untidy = Kind("untidy", int, int)
    innocent = Script(sleeps(100, 8))
    async with serving(jobs, untidy.handled_by(leave_open), number.handled_by(innocent), workers=1):
        [left] = await finished(jobs, await jobs.enqueue(untidy, 1))
        job = await jobs.enqueue(number, 1)
        await trio.sleep(50)
        trio.lowlevel.reschedule(tasks[0])
        [ended] = await finished(jobs, job)

    assert left.unwrap() == 7
    assert (ended.unwrap(), ended.attempt) == (8, 1)


@pytest.mark.parametrize("is_drained", [True, False])
async def test_what_runs_in_a_nursery_that_was_left_open_is_over_when_the_runner_is(
    is_drained: bool, jobs: Jobs, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    ended: list[float] = []

    async def leave_open(attempt: Attempt[int, int]) -> int:
        for seconds in (1, 3):  # the second longer than the log's patience
            nursery = await trio.open_nursery().__aenter__()
            nursery.start_soon(take_long_to_stop, seconds)
        return 7

    async def take_long_to_stop(seconds: float) -> None:
        try:
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                await trio.sleep(seconds)
            ended.append(now())

    untidy = Kind("untidy", int, int)
    async with trio.open_nursery() as nursery:
        runner = await nursery.start(trio_jobs.serve, jobs, [untidy.handled_by(leave_open)])
        await finished(jobs, *await jobs.enqueue_many(untidy, [1, 2]))
        if is_drained:
            runner.drain()
        else:
            nursery.cancel_scope.cancel()

    assert ended == pytest.approx([1, 1, 3, 3], abs=0.01)
    assert "cannot be cancelled; the runner ends after it" in caplog.text
    assert runner.statistics().succeeded == 2


@pytest.mark.parametrize("when", ["before", "at once", "after a while", "after the stop"])
async def test_what_is_raised_in_a_nursery_that_was_left_open_is_logged(
    when: str, jobs: Jobs, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async def leave_open(attempt: Attempt[int, int]) -> int:
        nursery = await trio.open_nursery().__aenter__()
        nursery.start_soon(wait_in_a_nursery)
        if when == "before":
            with trio.CancelScope(shield=True):
                nursery.start_soon(fail)
                await trio.sleep(1)
        else:
            nursery.start_soon(fail_after, {"at once": 0, "after a while": 5}.get(when, 11))
        return 7

    async def wait_in_a_nursery() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.sleep_forever)
            nursery.start_soon(trio.sleep_forever)

    async def fail() -> None:
        raise ValueError("told")

    async def fail_after(seconds: float) -> None:
        with trio.CancelScope(shield=True):
            await trio.sleep(seconds)
        await fail()

    untidy = Kind("untidy", int, int)
    handler = untidy.handled_by(leave_open)
    async with serving(jobs, handler, workers=1):
        job = await jobs.enqueue(untidy, 1)
        await trio.sleep(10)
        is_told = "told" in caplog.text
    [line] = [one for one in caplog.records if one.message.endswith("raised")]

    assert (await jobs.get(job)).unwrap() == 7
    assert is_told == (when != "after the stop")
    assert line.message == f"job {job.id}: a task in the nursery that {handler!r} left open raised"
    assert line.exc_info is not None
    assert isinstance(line.exc_info[1], ValueError)


async def test_another_error_beside_a_nursery_that_was_left_open_is_raised(
    jobs: Jobs, autojump_clock: MockClock
) -> None:
    async def leave_open(attempt: Attempt[int, int]) -> int:
        await trio.open_nursery().__aenter__()
        return 7

    async def fail() -> None:
        raise RuntimeError("a bug of ours")

    untidy = Kind("untidy", int, int)
    with pytest.RaisesGroup(
        pytest.RaisesExc(RuntimeError, match="a bug of ours"), flatten_subgroups=True
    ):
        async with trio.open_nursery() as nursery:
            runner = await nursery.start(trio_jobs.serve, jobs, [untidy.handled_by(leave_open)])
            await finished(jobs, await jobs.enqueue(untidy, 1))
            runner._engine.nursery.start_soon(fail)


async def test_a_worker_whose_job_was_cancelled_does_the_next_one(
    jobs: Jobs, autojump_clock: MockClock
) -> None:
    timed = Kind("timed", int, int, timeout=5, retry=Retry(attempts=1))
    async with serving(jobs, timed.handled_by(Script(forever, sleeps(4, 8))), workers=1):
        [late, next_one] = await finished(jobs, *await jobs.enqueue_many(timed, [1, 2]))

    assert (late.state, next_one.unwrap()) == (State.DEAD, 8)
    assert now() == pytest.approx(9, abs=0.01)


@pytest.mark.parametrize("shield", [False, True])
async def test_a_scope_without_a_deadline_that_a_handler_left_open_is_not_the_next_jobs(
    shield: bool, autojump_clock: MockClock
) -> None:
    """Nothing tells of it; but somebody might cancel it, and a shield keeps timeouts away."""
    left: list[trio.CancelScope] = []

    async def leave_open(attempt: Attempt[int, int]) -> int:
        left.append(trio.CancelScope(shield=shield))
        left[0].__enter__()
        return 7

    untidy = Kind("untidy", int, int)
    timed = Kind("timed", int, int, timeout=5, retry=Retry(attempts=1))
    async with (
        trio_jobs.open_jobs(":memory:") as jobs,
        serving(
            jobs, untidy.handled_by(leave_open), timed.handled_by(Script(sleeps(50))), workers=1
        ),
    ):
        await finished(jobs, await jobs.enqueue(untidy, 1))
        job = await jobs.enqueue(timed, 1)
        await trio.sleep(1)
        left[0].cancel()
        await finished(jobs, job)

        assert await outcomes(jobs, job) == ["timed out"]
    assert now() == pytest.approx(5, abs=0.01)


async def test_a_scope_that_a_handler_left_open_and_that_ends_it_is_no_stop_of_the_runner(
    autojump_clock: MockClock,
) -> None:
    """It is an attempt that failed, or the job would be tried for ever."""

    async def leave_open(attempt: Attempt[int, int]) -> int:
        trio.move_on_after(5).__enter__()  # noqa: ASYNC122
        await trio.sleep(10)
        return 7

    untidy = Kind("untidy", int, int, retry=Retry(attempts=2, backoff=constant(1)))
    async with (
        trio_jobs.open_jobs(":memory:") as jobs,
        serving(
            jobs, untidy.handled_by(leave_open), number.handled_by(Script(sleeps(9, 8))), workers=1
        ),
    ):
        [ended] = await finished(jobs, await jobs.enqueue(untidy, 1))
        [innocent] = await finished(jobs, await jobs.enqueue(number, 1))

        assert await outcomes(jobs, ended) == ["failed", "failed"]
    assert ended.failure == Failure("internal error", "Cancelled")
    assert (innocent.unwrap(), innocent.attempt) == (8, 1)


async def test_a_handler_sees_no_deadline_but_its_own(autojump_clock: MockClock) -> None:
    seen: list[float] = []

    async def handle(attempt: Attempt[int, int]) -> int:
        with trio.fail_after(3):
            seen.append(trio.current_effective_deadline())
            await trio.lowlevel.checkpoint()
        seen.append(trio.current_effective_deadline())
        return 7

    timed = Kind("timed", int, int, timeout=5)
    with trio.fail_after(1000):
        async with (
            trio_jobs.open_jobs(":memory:") as jobs,
            serving(jobs, timed.handled_by(handle), workers=1),
        ):
            await finished(jobs, *await jobs.enqueue_many(timed, [1, 2]), within=900)

    assert seen == [3, math.inf, 3, math.inf]


@pytest.mark.parametrize("seed", range(10))
def test_a_limit_in_the_instant_of_a_jobs_end_does_not_touch_the_next_one(seed: int) -> None:
    """Timeouts act a millisecond late; and in that instant the worker takes the next job."""
    timed = Kind("timed", int, int, timeout=5, retry=Retry(attempts=1))
    first = Script(sleeps(5.001, 7), sleeps(5, 7), sleeps(4.999, 7))

    async def main() -> None:
        async with (
            trio_jobs.open_jobs(":memory:") as jobs,
            serving(jobs, timed.handled_by(first), number.handled_by(Script(sleeps(9, 8)))),
        ):
            enqueued: list[Job[int]] = []
            for kind in (timed, number, timed, number, timed, number):
                enqueued.append(await jobs.enqueue(kind, 1))
            late, *ended = await finished(jobs, *enqueued)

        # A value that is returned, though it was stopped, counts before a timeout.
        assert late.state in (State.SUCCEEDED, State.DEAD)
        assert [job.result for job in ended] == [8, 7, 8, 7, 8]
        assert {job.attempt for job in ended} == {1}

    with scheduling(seed):
        trio.run(main, clock=MockClock(autojump_threshold=0))


async def test_a_cancel_of_a_job_whose_end_waits_does_not_touch_the_workers_next_one(
    autojump_clock: MockClock,
) -> None:
    store = Trouble(":memory:")
    async with (
        trio_jobs.open_jobs(store) as jobs,
        serving(jobs, number.handled_by(Script(sleeps(5, 7), sleeps(20, 8))), workers=1),
    ):
        enqueued = await jobs.enqueue_many(number, [1, 2])
        await trio.sleep(4)
        failing = iter([StoreError("disk I/O error")] * 2)
        store.rule = lambda step: next(failing, None) if step == "apply" else None
        await trio.sleep(1.01)
        for error in failing:  # the next end will be written
            assert error is not None
        await jobs.cancel(enqueued[0])
        ended = await finished(jobs, *enqueued)

        assert [await outcomes(jobs, job) for job in ended] == [["cancelled"], []]
    assert [job.state for job in ended] == [State.CANCELLED, State.SUCCEEDED]


async def test_a_scope_with_a_deadline_is_found_also_if_trio_no_longer_tells_which_is_innermost(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trio_jobs._workers._cancel_status", lambda: None)
    untidy = Kind("untidy", int, int)
    innocent = number.handled_by(Script(sleeps(100, 8)))
    async with (
        trio_jobs.open_jobs(":memory:") as jobs,
        serving(jobs, untidy.handled_by(open_scope_with_deadline), innocent, workers=1),
    ):
        first = await jobs.enqueue(untidy, 1)
        second = await jobs.enqueue(number, 1)
        [_, ended] = await finished(jobs, first, second)

    assert (ended.unwrap(), ended.attempt) == (8, 1)


async def test_every_job_sees_the_context_of_the_runner_and_not_that_of_another_job(
    jobs: Jobs, autojump_clock: MockClock
) -> None:
    tenant: contextvars.ContextVar[str] = contextvars.ContextVar("tenant")
    seen: list[str] = []

    async def handle(attempt: Attempt[int, int]) -> int:
        seen.append(tenant.get())
        tenant.set(f"job {attempt.payload}")
        await trio.sleep(1)
        seen.append(tenant.get())
        return 0

    tenant.set("of the runner")
    async with serving(jobs, number.handled_by(handle), workers=1):
        tenant.set("of the caller")
        await finished(jobs, *await jobs.enqueue_many(number, range(3)))

    of = "of the runner"
    assert seen == [of, "job 0", of, "job 1", of, "job 2"]


async def test_an_error_of_the_runner_itself_is_not_taken_for_a_handlers(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was logged as one, and the worker went on for ever without letting anybody else run."""

    async def fail(*args: object) -> None:
        await trio.lowlevel.checkpoint()
        raise RuntimeError("ours")

    async with trio_jobs.open_jobs(":memory:") as jobs:
        await jobs.enqueue(plain, None)
        monkeypatch.setattr("trio_jobs._attempt.Execution.run", fail)
        with pytest.raises(RuntimeError, match="ours"):
            await trio_jobs.serve(jobs, [plain.handled_by(Script(None))])
