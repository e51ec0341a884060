"""What the tests of an application use: a handler alone, a quiet moment, virtual time."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import trio
from trio.testing import MockClock, assert_checkpoints

import trio_jobs
from trio_jobs import Attempt, Fail, Jobs, Kind, PayloadError, RetryLater, SqliteStore, testing


@dataclass
class Resize:
    path: str
    widths: tuple[int, ...] = (320, 1280)


resize = Kind("resize", Resize, list[str])


@resize.handled_by
async def make_thumbnails(attempt: Attempt[Resize, list[str]]) -> list[str]:
    done = list(attempt.published or [])
    for width in attempt.payload.widths[len(done) :]:
        if attempt.payload.path == "gone.jpg":
            raise Fail("The picture is gone.", retry=False)
        done.append(f"{attempt.payload.path}.{width}.webp")
        await attempt.publish(done)
    return done


# An attempt by hand.


def test_an_attempt_holds_what_it_was_given() -> None:
    attempt = testing.attempt(resize, Resize("cat.jpg"), number=3, published=["a"])

    assert attempt.payload == Resize("cat.jpg")
    assert (attempt.number, attempt.kind, attempt.published) == (3, "resize", ["a"])
    assert isinstance(attempt.job_id, int)
    assert isinstance(attempt.token, int)


def test_an_attempt_is_the_first_one_and_nothing_was_published_before() -> None:
    attempt = testing.attempt(resize, Resize("cat.jpg"))

    assert (attempt.number, attempt.published) == (1, None)


def test_a_later_attempt_has_a_larger_token() -> None:
    tokens = [
        testing.attempt(resize, Resize("cat.jpg"), number=number).token for number in (1, 2, 3)
    ]

    assert tokens == sorted(set(tokens))


def test_the_payload_arrives_as_the_handler_would_get_it() -> None:
    given: Any = Resize("cat.jpg", [1, 2])  # type: ignore[arg-type]

    assert testing.attempt(resize, given).payload == Resize("cat.jpg", (1, 2))


@pytest.mark.parametrize("payload", [None, Resize(5), {"path": "cat.jpg"}])  # type: ignore[arg-type]
def test_a_payload_that_does_not_fit_is_refused_as_enqueue_would(payload: Any) -> None:
    with pytest.raises(PayloadError, match="payload of kind 'resize'"):
        testing.attempt(resize, payload)


async def test_what_is_published_shows_in_the_attempt() -> None:
    attempt = testing.attempt(resize, Resize("cat.jpg"))

    await attempt.publish(["a"])
    await attempt.publish(["a", "b"])

    assert attempt.published == ["a", "b"]


async def test_what_was_published_does_not_change_with_the_list_it_was_made_from() -> None:
    attempt = testing.attempt(resize, Resize("cat.jpg"))
    done = ["a"]

    await attempt.publish(done)
    done.append("b")

    assert attempt.published == ["a"]


async def test_a_published_value_that_does_not_fit_raises_and_changes_nothing() -> None:
    attempt = testing.attempt(resize, Resize("cat.jpg"), published=["a"])
    wrong: Any = [1]

    with pytest.raises(PayloadError, match="result of kind 'resize'"):
        await attempt.publish(wrong)

    assert attempt.published == ["a"]


async def test_publishing_is_a_checkpoint() -> None:
    with assert_checkpoints():
        await testing.attempt(resize, Resize("cat.jpg")).publish([])


async def test_an_attempt_by_hand_says_that_it_has_no_jobs() -> None:
    attempt = testing.attempt(resize, Resize("cat.jpg"))

    with pytest.raises(RuntimeError, match="no jobs"):
        await attempt.jobs.enqueue(resize, Resize("dog.jpg"))


async def test_a_handler_can_be_called_with_an_attempt() -> None:
    attempt = testing.attempt(resize, Resize("cat.jpg"), number=2, published=["cat.jpg.320.webp"])

    result = await make_thumbnails(attempt)

    assert result == ["cat.jpg.320.webp", "cat.jpg.1280.webp"]
    assert attempt.published == result


# A handler alone.


async def test_run_gives_the_result_of_the_handler() -> None:
    result = await testing.run(make_thumbnails, Resize("cat.jpg", (64,)))

    assert result == ["cat.jpg.64.webp"]


async def test_run_raises_what_the_handler_raises() -> None:
    with pytest.raises(Fail, match=r"The picture is gone\."):
        await testing.run(make_thumbnails, Resize("gone.jpg"))


async def test_run_raises_retry_later_too() -> None:
    kind = Kind("later", None)

    @kind.handled_by
    async def later(attempt: Attempt[None, None]) -> None:
        raise RetryLater(30)

    with pytest.raises(RetryLater) as caught:
        await testing.run(later, None)

    assert caught.value.seconds == 30


async def test_run_refuses_a_payload_that_does_not_fit() -> None:
    with pytest.raises(PayloadError, match="payload of kind 'resize'"):
        await testing.run(make_thumbnails, "cat.jpg")


async def test_run_refuses_a_result_that_does_not_fit() -> None:
    kind = Kind("k", int, int)

    async def wrong(attempt: Attempt[int, int]) -> Any:
        return "eleven"

    with pytest.raises(PayloadError, match="result of kind 'k'"):
        await testing.run(kind.handled_by(wrong), 1)


async def test_run_gives_the_result_as_a_reader_would_see_it() -> None:
    kind = Kind("k", int, list[int])

    async def wrong(attempt: Attempt[int, list[int]]) -> Any:
        return (attempt.payload, attempt.payload)

    result = await testing.run(kind.handled_by(wrong), 1)

    assert result == [1, 1]


async def test_what_is_no_handler_is_refused_as_serve_does() -> None:
    wrong: Any
    for wrong in (resize, make_thumbnails.fn):
        with pytest.raises(
            TypeError, match=r"is no Handler: bind a function with @kind\.handled_by"
        ):
            await testing.run(wrong, Resize("cat.jpg"))


def test_an_attempt_of_a_handler_is_told_to_use_its_kind() -> None:
    wrong: Any = make_thumbnails

    with pytest.raises(TypeError, match=r"kind must be a Kind, not Handler: use handler\.kind"):
        testing.attempt(wrong, Resize("cat.jpg"))


async def test_run_is_a_checkpoint_whatever_the_handler_does() -> None:
    kind = Kind("k", int, int)

    @kind.handled_by
    async def busy(attempt: Attempt[int, int]) -> int:
        return 1

    with assert_checkpoints():
        await testing.run(busy, 1)


# A quiet moment.


async def test_settled_returns_when_all_that_can_run_has_run(
    jobs: Jobs, autojump_clock: MockClock
) -> None:
    kind = Kind("k", int, int)

    @kind.handled_by
    async def doubles(attempt: Attempt[int, int]) -> int:
        await attempt.publish(attempt.payload)
        return 2 * attempt.payload

    async with trio.open_nursery() as nursery:
        await nursery.start(trio_jobs.serve, jobs, [doubles])
        made = await jobs.enqueue_many(kind, range(200))
        later = await jobs.enqueue(kind, 1, delay=60)
        await testing.settled()
        states = [(await jobs.get(job)).state for job in made]
        state = (await jobs.get(later)).state
        nursery.cancel_scope.cancel()

    assert set(states) == {trio_jobs.State.SUCCEEDED}
    assert state is trio_jobs.State.QUEUED
    assert trio.current_time() == 0


async def test_settled_waits_for_a_call_that_works_in_a_thread(
    jobs: Jobs, autojump_clock: MockClock
) -> None:
    kind = Kind("k", int)
    done: list[int] = []

    async def enqueue() -> None:
        for number in range(20):
            await jobs.enqueue(kind, number)
            done.append(len(await jobs.find()))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(enqueue)
        await testing.settled()
        settled_with = list(done)

    assert settled_with == list(range(1, 21))


async def test_settled_is_about_all_jobs_of_the_run(
    store: SqliteStore, autojump_clock: MockClock
) -> None:
    kind = Kind("k", int)
    done: list[int] = []

    async def pass_on(one: Jobs, other: Jobs) -> None:
        for jobs in (one, other) * 10:
            await jobs.enqueue(kind, 1)
            done.append(1)

    async with (
        trio_jobs.open_jobs(store) as one,
        trio_jobs.open_jobs(":memory:") as other,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(pass_on, one, other)
        await testing.settled()
        settled_with = len(done)

    assert settled_with == 20


async def test_settled_works_without_any_jobs_and_is_a_checkpoint() -> None:
    with assert_checkpoints():
        await testing.settled()


# Virtual time.


async def test_virtual_time_starts_at_the_epoch(jobs: Jobs, autojump_clock: MockClock) -> None:
    job = await jobs.enqueue(resize, Resize("cat.jpg"))

    assert datetime(2020, 1, 1, tzinfo=UTC) == testing.EPOCH
    assert job.enqueued_at == testing.EPOCH


async def test_a_story_can_be_told_in_instants_from_the_epoch(
    jobs: Jobs, autojump_clock: MockClock
) -> None:
    job = await jobs.enqueue(resize, Resize("cat.jpg"), run_at=testing.EPOCH + timedelta(days=100))
    async with trio.open_nursery() as nursery:
        await nursery.start(trio_jobs.serve, jobs, [make_thumbnails])
        ended = await jobs.wait_finished(job)
        nursery.cancel_scope.cancel()

    assert ended.finished_at == testing.EPOCH + timedelta(days=100)
    assert trio.current_time() == 100 * 86_400
