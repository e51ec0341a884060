"""What both type checkers must take without a word, and what they must infer.

tests/test_typing.py gives it to mypy --strict and to basedpyright, and also runs it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Generic, NamedTuple, TypedDict, TypeVar, assert_type

import trio

import trio_jobs
from trio_jobs import (
    Attempt,
    Fail,
    Failure,
    Handler,
    Job,
    Jobs,
    Kind,
    PastAttempt,
    Retry,
    Runner,
    State,
    Statistics,
    exponential,
    testing,
)

T = TypeVar("T")


@dataclass(frozen=True)
class Resize:
    path: str
    widths: tuple[int, ...] = (320, 1280)


class Box(TypedDict):
    size: int


class Point(NamedTuple):
    x: int


@dataclass
class Page(Generic[T]):
    items: list[T]


# Kinds infer from what they are given, also from what is no class.

resize = Kind("resize", Resize, list[str], retry=Retry(attempts=5), timeout=120)
plain = Kind("plain", int)
optional = Kind("optional", int | None, list[str])
nothing = Kind("nothing", None)
nothing_said = Kind("nothing said", None, None)
raw = Kind("raw", bytes, int | str)
box = Kind("box", Box, Point)
page = Kind("page", Page[int], Page[Resize])
numbers = Kind("numbers", dict[str, list[float]], tuple[int, ...])

assert_type(resize, Kind[Resize, list[str]])
assert_type(plain, Kind[int, None])
assert_type(optional, Kind[int | None, list[str]])
assert_type(nothing, Kind[None, None])
assert_type(nothing_said, Kind[None, None])
assert_type(raw, Kind[bytes, int | str])
assert_type(box, Kind[Box, Point])
assert_type(page, Kind[Page[int], Page[Resize]])
assert_type(numbers, Kind[dict[str, list[float]], tuple[int, ...]])


def kind_of(name: str, payload: type[T]) -> Kind[T, T]:
    return Kind(name, payload, payload)


assert_type(kind_of("generic", str), Kind[str, str])


# Handlers: functions, bound methods, partials, callable objects.


@resize.handled_by
async def make_thumbnails(attempt: Attempt[Resize, list[str]]) -> list[str]:
    assert_type(attempt.payload, Resize)
    assert_type(attempt.published, list[str] | None)
    assert_type(attempt.number, int)
    assert_type(attempt.job_id, int)
    assert_type(attempt.token, int)
    assert_type(attempt.kind, str)
    done = attempt.published or []
    for width in attempt.payload.widths[len(done) :]:
        if attempt.payload.path == "gone.jpg":
            raise Fail("The picture is gone.", retry=False)
        done = [*done, f"{attempt.payload.path}.{width}.webp"]
        await attempt.publish(done)
    await attempt.jobs.enqueue(plain, len(done))
    return done


@plain.handled_by
async def count(attempt: Attempt[int, None]) -> None:
    assert_type(attempt.payload, int)


class Service:
    def __init__(self, names: list[str]) -> None:
        self.names = names

    async def look_up(self, attempt: Attempt[int | None, list[str]]) -> list[str]:
        return self.names[: attempt.payload]

    async def __call__(self, attempt: Attempt[None, None]) -> None:
        pass


async def measure(scale: int, attempt: Attempt[bytes, int | str]) -> int | str:
    return scale * len(attempt.payload)


assert_type(make_thumbnails, Handler)

service = Service(["a", "b"])
look_up = optional.handled_by(service.look_up)
do_nothing = nothing.handled_by(service)
measured = raw.handled_by(functools.partial(measure, 2))

handlers = [make_thumbnails, count, look_up, do_nothing, measured]
assert_type(handlers, list[Handler])


async def unhandled(name: str, payload: bytes) -> None:
    pass


# Jobs: the payload is checked, the result is known.


async def use(jobs: Jobs, when: datetime) -> None:
    job = await jobs.enqueue(resize, Resize("cat.jpg"), delay=2, key="cat", priority=1)
    assert_type(job, Job[list[str]])
    assert_type(await jobs.enqueue(plain, 1, run_at=when, deadline=when), Job[None])
    assert_type(await jobs.enqueue(optional, None), Job[list[str]])
    assert_type(await jobs.enqueue(nothing, None), Job[None])
    assert_type(await jobs.enqueue(box, Box(size=1)), Job[Point])
    assert_type(await jobs.enqueue(page, Page([1])), Job[Page[Resize]])
    assert_type(
        await jobs.enqueue_many(resize, [Resize("a"), Resize("b")], keys=["a", None]),
        list[Job[list[str]]],
    )
    assert_type(await jobs.enqueue_many(plain, (number for number in range(3))), list[Job[None]])

    assert_type(await jobs.get(job), Job[list[str]])
    assert_type(await jobs.get(job.id, resize), Job[list[str]])
    assert_type(await jobs.get(job.id), Job[object])

    assert_type(await jobs.find(kind=resize), list[Job[list[str]]])
    assert_type(await jobs.find(kind="resize", state=State.DEAD, after=5), list[Job[object]])
    assert_type(await jobs.find(limit=5), list[Job[object]])

    finished = await jobs.wait_finished(job)
    assert_type(finished, Job[list[str]])
    assert_type(await jobs.wait_finished(job.id, poll=0.5), Job[object])
    assert_type(finished.unwrap(), list[str])
    assert_type(finished.result, list[str] | None)
    assert_type(finished.failure, Failure | None)
    assert_type(finished.finished_at, datetime | None)
    assert_type(finished.enqueued_at, datetime)
    assert_type(finished.state, State)
    assert_type(finished.to_dict(), dict[str, object])

    assert_type(await jobs.retry(job), Job[list[str]])
    assert_type(await jobs.retry(job.id), Job[object])
    assert_type(await jobs.cancel(job.id), bool)
    assert_type(await jobs.history(job.id), list[PastAttempt])
    assert_type(await jobs.counts(kind=resize), dict[State, int])
    assert_type(jobs.enqueue_on(object(), plain, 1, key="a"), int)


# Runners take handlers of any mixture, also out of a variable.


async def main(path: str = ":memory:", clock: Callable[[], float] | None = None) -> None:
    async with trio_jobs.open_jobs(path, clock=clock) as jobs, trio.open_nursery() as nursery:
        assert_type(jobs, Jobs)
        runner: Runner = await nursery.start(trio_jobs.serve, jobs, handlers)
        job = await jobs.enqueue(resize, Resize("cat.jpg"))
        finished = await jobs.wait_finished(job)
        assert finished.unwrap() == ["cat.jpg.320.webp", "cat.jpg.1280.webp"]
        assert_type(runner.statistics(), Statistics)
        runner.drain()
    async with trio_jobs.open_jobs(trio_jobs.SqliteStore(":memory:")) as jobs:
        started = await trio_jobs.run_once(jobs, [make_thumbnails, count], unhandled=unhandled)
        assert_type(started, int)
        await trio_jobs.run_once(jobs, tuple(handlers), queues={"default": 1}, unhandled="fail")
        await trio_jobs.run_once(jobs, {count}, queues=["default"])


# In tests.


async def try_alone() -> None:
    attempt = testing.attempt(resize, Resize("cat.jpg"), number=2, published=["a"])
    assert_type(attempt, Attempt[Resize, list[str]])
    await testing.run(make_thumbnails, Resize("cat.jpg"))


own = Kind("own", int, retry=Retry(backoff=lambda attempt: 1.5 * attempt, jitter=0.1))
other = Kind("other", int, retry=Retry(backoff=exponential(1, cap=60)), on_interrupt="fail")
