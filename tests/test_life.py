"""A job from its first start to its last: retries, hand-backs, cancels, and new lives."""

from __future__ import annotations

import logging
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest
import trio
from stories import (
    Script,
    abandon,
    at,
    finished,
    forever,
    instant,
    now,
    outcomes,
    row_of,
    scheduling,
    second,
    serving,
    stubborn,
    writer,
)
from trio.testing import MockClock

import trio_jobs
from trio_jobs import (
    Attempt,
    Fail,
    Failure,
    JobNotFound,
    Jobs,
    Kind,
    PastAttempt,
    Retry,
    RetryLater,
    State,
    StateError,
    constant,
    exponential,
)

plain = Kind("plain", None)
number = Kind("number", None, int)


@pytest.fixture
async def memory(autojump_clock: MockClock) -> AsyncIterator[Jobs]:
    async with trio_jobs.open_jobs(":memory:") as opened:
        yield opened


# Retries.


async def test_the_default_retries_wait_5_20_45_80_seconds_and_end_in_a_dead_letter(
    jobs: Jobs, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    handle = Script(Fail("no ink"))
    async with serving(jobs, plain.handled_by(handle)) as runner:
        job = await jobs.enqueue(plain, None)
        [ended] = await finished(jobs, job)
        statistics = runner.statistics()

    assert handle.starts == [0, 5, 25, 70, 150]
    assert handle.numbers == [1, 2, 3, 4, 5]
    assert (ended.state, ended.attempt, ended.failure) == (State.DEAD, 5, Failure("no ink"))
    assert (statistics.started, statistics.retried, statistics.failed) == (5, 4, 1)
    [warning] = [one for one in caplog.records if one.levelno == logging.WARNING]
    assert warning.getMessage() == f"job {job.id} (plain) is dead after 5 attempts: no ink"


async def test_every_start_that_failed_is_in_the_history(
    jobs: Jobs, autojump_clock: MockClock
) -> None:
    handle = Script(sleeps_then(2, ValueError()), RetryLater(30), Fail("no ink"), None)
    async with serving(jobs, plain.handled_by(handle)):
        job = await jobs.enqueue(plain, None)
        await finished(jobs, job)

    def past(claim: int, number: int, start: float, end: float, *how: Any) -> PastAttempt:
        outcome, failure = how
        return PastAttempt(number, claim, at(start), at(end), outcome, failure)

    assert await jobs.history(job) == [
        past(1, 1, 0, 2, "failed", Failure("internal error", "ValueError")),
        past(2, 2, 7, 7, "retry later", None),
        past(3, 2, 37, 37, "failed", Failure("no ink")),
    ]


def sleeps_then(seconds: float, error: Exception) -> Any:
    async def step(attempt: Attempt[Any, Any]) -> None:
        await trio.sleep(seconds)
        raise error

    return step


async def test_the_failure_of_an_earlier_attempt_is_gone_after_a_success(
    jobs: Jobs, autojump_clock: MockClock
) -> None:
    async with serving(jobs, number.handled_by(Script(Fail("no ink"), 7))):
        job = await jobs.enqueue(number, None)
        await trio.sleep(1)
        between = await jobs.get(job)
        [ended] = await finished(jobs, job)

    assert (between.state, between.failure) == (State.QUEUED, Failure("no ink"))
    assert second(between.run_at) == 5
    assert (ended.state, ended.failure, ended.unwrap()) == (State.SUCCEEDED, None, 7)


async def test_retry_later_does_not_use_up_an_attempt(
    jobs: Jobs, autojump_clock: MockClock
) -> None:
    once = Kind("once", None, int, retry=Retry(attempts=1))
    handle = Script(*[RetryLater(30)] * 20, 7)
    async with serving(jobs, once.handled_by(handle)) as runner:
        [ended] = await finished(jobs, await jobs.enqueue(once, None))
        statistics = runner.statistics()

    assert handle.starts == [30.0 * count for count in range(21)]
    assert set(handle.numbers) == {1}
    assert (ended.state, ended.attempt) == (State.SUCCEEDED, 1)
    assert (statistics.retried, statistics.succeeded) == (20, 1)


@pytest.mark.parametrize("first", [RetryLater(0), ValueError()], ids=repr)
async def test_a_retry_without_a_wait_starts_at_once(
    first: Exception, jobs: Jobs, autojump_clock: MockClock
) -> None:
    eager = Kind("eager", None, retry=Retry(backoff=constant(0)))
    handle = Script(first, first, None)
    async with serving(jobs, eager.handled_by(handle), workers=2):
        await finished(jobs, await jobs.enqueue(eager, None))

    assert handle.starts == [0, 0, 0]


@pytest.mark.parametrize("factor", [2.0, 10.0])
async def test_R1_a_job_at_attempt_2000_is_queued_again(
    factor: float, memory: Jobs, autojump_clock: MockClock
) -> None:
    kind = Kind("kind", None, retry=Retry(attempts=5000, backoff=exponential(1, factor=factor)))
    job = await memory.enqueue(kind, None)
    store: Any = memory._store
    writer(store).execute("UPDATE trio_jobs_job SET attempt = 2000, claims = 2000")
    async with serving(memory, kind.handled_by(Script(ValueError()))):
        await trio.sleep(1)

    job = await memory.get(job)
    assert (job.state, job.attempt, second(job.run_at)) == (State.QUEUED, 2001, 86_400)


# Interrupted.


async def interrupt(jobs: Jobs, kind: Kind[None, Any]) -> None:
    """Be a runner that is stopped while the handler is under way."""
    async with serving(jobs, kind.handled_by(Script(forever)), grace=0):
        await trio.sleep(1)


async def test_an_interrupted_job_is_due_again_at_once_and_keeps_its_attempts(
    jobs: Jobs, autojump_clock: MockClock
) -> None:
    job = await jobs.enqueue(plain, None, delay=5, priority=3)
    async with serving(jobs, plain.handled_by(Script(forever)), grace=0):
        await trio.sleep(10)
    row = await row_of(jobs, job)
    handle = Script(None)
    async with serving(jobs, plain.handled_by(handle)):
        await finished(jobs, job)

    assert (row.state, row.attempt, row.interruptions) == (State.QUEUED, 0, 1)
    assert (row.run_at, row.priority, row.lease_until) == (instant(5), 3, None)
    assert await outcomes(jobs, job) == ["interrupted"]
    assert (handle.starts, handle.numbers) == ([10], [1])


async def test_after_ten_interruptions_in_a_row_each_further_one_uses_up_an_attempt(
    jobs: Jobs, autojump_clock: MockClock
) -> None:
    kind = Kind("kind", None, retry=Retry(attempts=2))
    job = await jobs.enqueue(kind, None)
    attempts = []
    for _ in range(12):
        await interrupt(jobs, kind)
        attempts.append((await jobs.get(job)).attempt)

    ended = await jobs.get(job)
    assert attempts == [0] * 10 + [1, 2]
    assert (ended.state, ended.failure) == (State.DEAD, Failure("interrupted"))
    assert await outcomes(jobs, job) == ["interrupted"] * 12


async def test_any_other_end_makes_the_interruptions_start_again(
    jobs: Jobs, autojump_clock: MockClock
) -> None:
    kind = Kind("kind", None, retry=Retry(attempts=2, backoff=constant(0)))
    job = await jobs.enqueue(kind, None)
    for _ in range(10):
        await interrupt(jobs, kind)
    async with serving(jobs, kind.handled_by(Script(RetryLater(1), forever)), grace=0):
        await trio.sleep(2)

    row = await row_of(jobs, job)
    assert (row.state, row.attempt, row.interruptions) == (State.QUEUED, 0, 1)


@pytest.mark.parametrize("how", ["shutdown", "lost"])
async def test_a_kind_that_must_not_be_repeated_fails_when_it_was_interrupted(
    how: str, jobs: Jobs, autojump_clock: MockClock
) -> None:
    fragile = Kind("fragile", None, on_interrupt="fail")
    job = await jobs.enqueue(fragile, None)
    if how == "shutdown":
        await interrupt(jobs, fragile)
    else:
        await abandon(jobs, fragile, lease=30)
    handle = Script(None)
    async with serving(jobs, fragile.handled_by(handle)):
        [ended] = await finished(jobs, job)

    assert handle.starts == []
    assert (ended.state, ended.failure) == (State.FAILED, Failure("interrupted by restart"))
    assert await outcomes(jobs, job) == ["interrupted" if how == "shutdown" else "lost"]


async def test_a_job_that_is_lost_every_time_ends_as_a_dead_letter(
    jobs: Jobs, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """Attempts are counted at the claim."""
    kind = Kind("kind", None, retry=Retry(attempts=3))
    job = await jobs.enqueue(kind, None)
    for _ in range(3):
        [_] = await abandon(jobs, kind, lost_limit=1, lease=10)
        await trio.sleep(10)
    handle = Script(None)
    async with serving(jobs, kind.handled_by(handle)) as runner:
        [ended] = await finished(jobs, job)
        statistics = runner.statistics()

    assert handle.starts == []
    assert (ended.state, ended.attempt, ended.failure) == (State.DEAD, 3, Failure("worker lost"))
    assert await outcomes(jobs, job) == ["lost", "lost", "lost"]
    assert (statistics.failed, statistics.lost) == (1, 1)
    assert "is dead after 3 attempts: worker lost" in caplog.text


async def test_the_policy_is_that_of_the_kind_that_claims_and_not_of_the_one_that_enqueued(
    jobs: Jobs, autojump_clock: MockClock
) -> None:
    old = Kind("kind", None, retry=Retry(attempts=1), on_interrupt="fail")
    new = Kind("kind", None, retry=Retry(attempts=2, backoff=constant(7)))
    job = await jobs.enqueue(old, None)
    handle = Script(ValueError())
    async with serving(jobs, new.handled_by(handle)):
        [ended] = await finished(jobs, job)

    assert handle.starts == [0, 7]
    assert ended.state is State.DEAD


# Cancelled.


async def test_K1_a_queued_job_that_was_cancelled_never_starts(
    jobs: Jobs, autojump_clock: MockClock
) -> None:
    handle = Script(None)
    async with serving(jobs, plain.handled_by(handle)):
        job = await jobs.enqueue(plain, None, delay=10)
        answers = [await jobs.cancel(job), await jobs.cancel(job)]
        await trio.sleep(100)

    ended = await jobs.get(job)
    assert answers == [True, False]
    assert handle.starts == []
    assert (ended.state, ended.attempt, ended.failure) == (State.CANCELLED, 0, None)
    assert await jobs.history(job) == []


async def test_K1_the_scope_of_a_running_job_is_cancelled_at_once(
    jobs: Jobs, autojump_clock: MockClock
) -> None:
    stopped: list[float] = []

    async def handle(attempt: Attempt[None, None]) -> None:
        try:
            await trio.sleep_forever()
        finally:
            stopped.append(now())

    async with serving(jobs, plain.handled_by(handle)):
        job = await jobs.enqueue(plain, None)
        await trio.sleep(7)
        answers = [await jobs.cancel(job), await jobs.cancel(job)]
        [ended] = await finished(jobs, job, within=0.1)
        answers.append(await jobs.cancel(job))

    assert stopped == [7]
    assert answers in ([True, True, False], [True, False, False])
    assert (ended.state, ended.attempt) == (State.CANCELLED, 1)
    assert await outcomes(jobs, job) == ["cancelled"]


async def test_K1_a_cancel_during_the_clean_up_of_another_cancel_changes_nothing(
    memory: Jobs, autojump_clock: MockClock
) -> None:
    async def handle(attempt: Attempt[None, None]) -> None:
        try:
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                await trio.sleep(5)

    async with serving(memory, plain.handled_by(handle)):
        job = await memory.enqueue(plain, None)
        await trio.sleep(1)
        answers = [await memory.cancel(job)]
        await trio.sleep(1)
        answers.append(await memory.cancel(job))
        state = (await memory.get(job)).state
        [ended] = await finished(memory, job)

    assert answers == [True, True]
    assert state is State.RUNNING
    assert (ended.state, now()) == (State.CANCELLED, 6)


async def test_K1_a_lost_job_is_cancelled_at_once_and_not_taken_up(
    jobs: Jobs, autojump_clock: MockClock
) -> None:
    lost = await jobs.enqueue(plain, None)
    await abandon(jobs, plain, lease=10)
    leased = await jobs.enqueue(plain, None)
    await abandon(jobs, plain, lease=100)
    await trio.sleep(10)
    answers = [await jobs.cancel(lost), await jobs.cancel(leased)]
    at_once = (await jobs.get(lost)).state
    handle = Script(None)
    # Any runner does it, whatever it serves.
    async with serving(jobs, number.handled_by(Script(7))):
        [_, ended] = await finished(jobs, lost, leased)

    assert answers == [True, True]
    assert at_once is State.CANCELLED
    assert (ended.state, now()) == (State.CANCELLED, 100)
    assert handle.starts == []


async def test_K1_an_unknown_id_is_not_found(jobs: Jobs, autojump_clock: MockClock) -> None:
    for call in (jobs.cancel, jobs.retry, jobs.get, jobs.history, jobs.wait_finished):
        with pytest.raises(JobNotFound, match="no job 42"):
            await call(42)


async def test_K1_what_cancel_answers_agrees_with_the_row_in_500_races(
    autojump_clock: MockClock,
) -> None:
    """Handlers that end, and cancels that come, at the same moments of virtual time."""
    seed = 20_260_101
    chance = random.Random(seed)
    answers: dict[int, list[bool]] = {}

    async def handle(attempt: Attempt[None, int]) -> int:
        await trio.sleep(chance.randrange(4))
        for _ in range(chance.randrange(8)):
            await trio.lowlevel.checkpoint()
        return 7

    async def cancel(jobs: Jobs, id: int) -> None:
        await trio.sleep(chance.randrange(4))
        for _ in range(chance.randrange(8)):
            await trio.lowlevel.checkpoint()
        answers[id].append(await jobs.cancel(id))

    async with trio_jobs.open_jobs(":memory:") as jobs:
        with scheduling(seed):
            async with serving(jobs, number.handled_by(handle), workers=30):
                all_of_them = await jobs.enqueue_many(number, [None] * 500)
                async with trio.open_nursery() as nursery:
                    for job in all_of_them:
                        answers[job.id] = []
                        for _ in range(chance.choice([1, 1, 2])):
                            nursery.start_soon(cancel, jobs, job.id)
                ended = await finished(jobs, *all_of_them)
        histories = [await outcomes(jobs, job) for job in ended]

    for job, past in zip(ended, histories, strict=True):
        expected = State.CANCELLED if any(answers[job.id]) else State.SUCCEEDED
        assert (seed, job.id, job.state) == (seed, job.id, expected)
        assert past == (["cancelled"] if expected is State.CANCELLED and job.attempt else [])
    assert {job.state for job in ended} == {State.CANCELLED, State.SUCCEEDED}


# A new life.


async def test_K5_only_a_job_that_failed_died_or_was_cancelled_can_be_retried(
    jobs: Jobs, autojump_clock: MockClock
) -> None:
    once = Retry(attempts=1)
    kinds = {name: Kind(name, None, int, retry=once) for name in ("good", "bad", "dead", "slow")}
    steps: dict[str, object] = {
        "good": 7,
        "bad": Fail("", retry=False),
        "dead": ValueError(),
        "slow": forever,
    }
    async with serving(
        jobs, *(kind.handled_by(Script(steps[name], 7)) for name, kind in kinds.items()), grace=0
    ):
        made = {name: await jobs.enqueue(kind, None) for name, kind in kinds.items()}
        queued = await jobs.enqueue(kinds["good"], None, delay=1000)
        cancelled = await jobs.enqueue(kinds["good"], None, delay=1000)
        await jobs.cancel(cancelled)
        await trio.sleep(1)
        for job in (made["good"], made["slow"], queued):
            with pytest.raises(StateError, match=r"succeeded|running|queued"):
                await jobs.retry(job)
        again = [await jobs.retry(job) for job in (made["bad"], made["dead"], cancelled)]
        ended = await finished(jobs, *again)

    assert [job.state for job in again] == [State.QUEUED] * 3
    assert [(job.state, job.attempt) for job in ended] == [(State.SUCCEEDED, 1)] * 3


async def test_K5_a_new_life_has_all_its_attempts_and_keeps_claims_history_and_result(
    jobs: Jobs, autojump_clock: MockClock
) -> None:
    kind = Kind("kind", None, int, retry=Retry(attempts=2, backoff=constant(10)))
    tokens: list[int] = []
    seen: list[int | None] = []

    async def handle(attempt: Attempt[None, int]) -> int:
        tokens.append(attempt.token)
        seen.append(attempt.published)
        await attempt.publish(len(tokens))
        raise ValueError

    async with serving(jobs, kind.handled_by(handle)):
        job = await jobs.enqueue(kind, None)
        [dead] = await finished(jobs, job)
        await trio.sleep(90)
        again = await jobs.retry(job)
        [dead_again] = await finished(jobs, job)
        history = await jobs.history(job)

    assert (dead.attempt, dead_again.attempt) == (2, 2)
    assert (again.attempt, again.result, second(again.run_at)) == (0, 2, 100)
    assert tokens == [1, 2, 3, 4]
    assert seen == [None, 1, 2, 3]
    assert [(past.number, past.claim) for past in history] == [(1, 1), (2, 2), (1, 3), (2, 4)]


@pytest.mark.parametrize("seed", range(10))
async def test_K5_two_retries_at_the_same_moment_give_one_new_life(
    seed: int, jobs: Jobs, autojump_clock: MockClock
) -> None:
    kind = Kind("kind", None, int, retry=Retry(attempts=1))
    handle = Script(ValueError(), 7)
    outcomes_of_retry: list[str] = []

    async def retry(id: int) -> None:
        try:
            await jobs.retry(id)
            outcomes_of_retry.append("retried")
        except StateError:
            outcomes_of_retry.append("refused")

    with scheduling(seed):
        async with serving(jobs, kind.handled_by(handle)):
            job = await jobs.enqueue(kind, None)
            await finished(jobs, job)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(retry, job.id)
                nursery.start_soon(retry, job.id)
            [ended] = await finished(jobs, job)

    assert sorted(outcomes_of_retry) == ["refused", "retried"]
    assert len(handle.starts) == 2
    assert ended.unwrap() == 7


async def test_a_job_that_was_cancelled_while_it_ran_can_have_a_new_life(
    jobs: Jobs, autojump_clock: MockClock
) -> None:
    """The old request does not cancel the new life."""
    handle = Script(forever, 7)
    async with serving(jobs, number.handled_by(handle)):
        job = await jobs.enqueue(number, None)
        await trio.sleep(1)
        await jobs.cancel(job)
        await finished(jobs, job)
        await jobs.retry(job)
        [ended] = await finished(jobs, job)

    assert (ended.state, ended.unwrap(), ended.failure) == (State.SUCCEEDED, 7, None)


async def test_history_keeps_the_newest_hundred(memory: Jobs, autojump_clock: MockClock) -> None:
    handle = Script(*[RetryLater(1)] * 120, 7)
    async with serving(memory, number.handled_by(handle)):
        job = await memory.enqueue(number, None)
        await finished(memory, job)

    history = await memory.history(job)
    assert [past.claim for past in history] == list(range(21, 121))


async def test_attempts_are_counted_where_handlers_were_stopped_by_a_shield(
    memory: Jobs, autojump_clock: MockClock
) -> None:
    """A timeout that a handler only notices later is one failed attempt."""
    slow = Kind("slow", None, timeout=5, retry=Retry(attempts=2, backoff=constant(1)))

    async def dawdle(attempt: Attempt[None, None]) -> None:
        await stubborn(8)(attempt)
        await trio.sleep_forever()

    async with serving(memory, slow.handled_by(dawdle)):
        job = await memory.enqueue(slow, None)
        [ended] = await finished(memory, job)

    assert (ended.state, ended.attempt, now()) == (State.DEAD, 2, 17)
