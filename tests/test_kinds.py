"""Kinds and handlers: inert values, checked where they are written down."""

from __future__ import annotations

import copy
import functools
import math
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypedDict, TypeVar
from unittest.mock import AsyncMock

import pytest
import trio
from trio.testing import MockClock

import trio_jobs
from trio_jobs import Attempt, Handler, Jobs, Kind, Retry, State, testing

T = TypeVar("T")


def setting_id(value: object) -> str:
    """Settings as the name of a test: the same in every process that collects it."""
    return re.sub(r" at 0x\w+", "", str(value)) if isinstance(value, dict) else ""


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


class Tree(Protocol):
    def grow(self) -> None: ...


class Unstorable:
    pass


def test_a_kind_keeps_what_it_was_given() -> None:
    retry = Retry(attempts=2)

    kind = Kind(
        "resize",
        Resize,
        list[str],
        retry=retry,
        timeout=120,
        on_interrupt="fail",
        queue="pictures",
        priority=-3,
    )

    assert (kind.name, kind.retry, kind.timeout) == ("resize", retry, 120.0)
    assert (kind.on_interrupt, kind.queue, kind.priority) == ("fail", "pictures", -3)
    assert repr(kind) == "<Kind 'resize'>"


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("name", "other"),
        ("retry", Retry(attempts=1)),
        ("timeout", 1.0),
        ("on_interrupt", "fail"),
        ("queue", "other"),
        ("priority", 1),
    ],
)
def test_a_setting_of_a_kind_that_is_assigned_later_is_refused_and_not_ignored(
    setting: str, value: object
) -> None:
    kind = Kind("resize", Resize)
    before = getattr(kind, setting)

    with pytest.raises(AttributeError, match=rf"{setting} of <Kind 'resize'> cannot be changed"):
        setattr(kind, setting, value)

    assert getattr(kind, setting) == before


def test_a_kind_can_be_copied() -> None:
    kind = Kind("resize", Resize, timeout=2)

    copied = copy.copy(kind)

    assert (copied.name, copied.timeout, copied.retry) == ("resize", 2, kind.retry)


def test_a_plain_kind_has_the_documented_defaults() -> None:
    kind = Kind("plain", None)

    assert (kind.retry, kind.timeout) == (Retry(), None)
    assert (kind.on_interrupt, kind.queue, kind.priority) == ("retry", "default", 0)


@pytest.mark.parametrize(
    ("settings", "error", "text"),
    [
        ({"name": ""}, ValueError, "name of a kind must not be empty"),
        ({"name": "\ud800"}, ValueError, "surrogate"),
        ({"name": None}, TypeError, "name of a kind must be a str"),
        ({"name": b"resize"}, TypeError, "name of a kind must be a str"),
        ({"timeout": 0}, ValueError, "timeout of kind 'k'"),
        ({"timeout": -1}, ValueError, "timeout of kind 'k'"),
        ({"timeout": math.nan}, ValueError, "timeout of kind 'k'"),
        ({"timeout": math.inf}, ValueError, "timeout of kind 'k'"),
        ({"timeout": "5"}, TypeError, "timeout of kind 'k'"),
        ({"timeout": True}, TypeError, "timeout of kind 'k'"),
        ({"on_interrupt": "maybe"}, ValueError, "on_interrupt of kind 'k'"),
        ({"on_interrupt": None}, ValueError, "on_interrupt of kind 'k'"),
        ({"on_interrupt": ["retry"]}, ValueError, "on_interrupt of kind 'k'"),
        ({"queue": ""}, ValueError, "queue of kind 'k' must not be empty"),
        ({"queue": None}, TypeError, "queue of kind 'k' must be a str"),
        ({"priority": 1.5}, TypeError, "priority must be an int"),
        ({"priority": True}, TypeError, "priority must be an int"),
        ({"priority": math.inf}, TypeError, "priority must be an int"),
        ({"priority": 2**31}, ValueError, "priority must fit in 32 bits"),
        ({"priority": -(2**31) - 1}, ValueError, "priority must fit in 32 bits"),
        ({"retry": 5}, TypeError, "retry of kind 'k' must be a Retry"),
        ({"retry": lambda attempt: 5.0}, TypeError, "retry of kind 'k' must be a Retry"),
        ({"payload": Unstorable}, TypeError, "payload of kind 'k' cannot be of type `Unstorable`"),
        ({"payload": complex}, TypeError, "payload of kind 'k' cannot be of type `complex`"),
        ({"payload": Callable[[], int]}, TypeError, "payload of kind 'k'"),
        ({"payload": Tree}, TypeError, "payload of kind 'k'"),
        ({"payload": list[Unstorable]}, TypeError, "payload of kind 'k'"),
        ({"payload": "Reszie"}, TypeError, "payload of kind 'k'"),
        ({"payload": 5}, TypeError, "payload of kind 'k'"),
        ({"payload": dict[Resize, int]}, TypeError, "payload of kind 'k'"),
        ({"result": Unstorable}, TypeError, "result of kind 'k' cannot be of type `Unstorable`"),
        ({"result": int | complex}, TypeError, "result of kind 'k'"),
        ({"result": 5}, TypeError, "result of kind 'k'"),
    ],
    ids=setting_id,
)
def test_a_kind_that_cannot_work_is_refused_at_once_with_a_clear_error(
    settings: dict[str, Any], error: type[Exception], text: str
) -> None:
    make: Callable[..., object] = Kind

    with pytest.raises(error, match=text):
        make(**({"name": "k", "payload": int} | settings))


def test_a_forward_reference_inside_a_function_is_refused_with_a_hint() -> None:
    @dataclass
    class Inner:
        other: Other | None

    @dataclass
    class Other:
        pass

    with pytest.raises(TypeError, match=r"payload of kind 'k'.*Other.*top of its module"):
        Kind("k", Inner)


@pytest.mark.parametrize(
    ("type", "value"),
    [
        (None, None),
        (int, 2**100),
        (int | None, None),
        (list[str], ["a"]),
        (bytes, b"\x00\xff"),
        (Resize, Resize("a")),
        (Box, {"size": 1}),
        (Point, Point(1)),
        (Page[int], Page([1])),
        (object, {"a": [1, None]}),
    ],
    ids=str,
)
async def test_payloads_of_many_types_reach_their_handler(type: Any, value: object) -> None:
    kind = Kind[Any, Any]("k", type)
    seen: list[object] = []

    @kind.handled_by
    async def sees(attempt: Attempt[Any, None]) -> None:
        seen.append(attempt.payload)

    async with trio_jobs.open_jobs(":memory:") as jobs:
        await jobs.enqueue(kind, value)
        await trio_jobs.run_once(jobs, [sees])

    assert seen == [value]


@pytest.mark.parametrize(
    "name",
    [
        "a'; DROP TABLE trio_jobs_job; --",
        'a"b',
        "per%cent_",
        "back\\slash",
        "two words",
        "line\nbreak",
        "grüße \N{PARTY POPPER}",
        "\u202eright to left",
        "x" * 1000,
        "null",
        "[1]",
    ],
    ids=ascii,
)
async def test_a_job_runs_whatever_the_name_of_its_kind(jobs: Jobs, name: str) -> None:
    kind = Kind(name, int, int)

    @kind.handled_by
    async def doubles(attempt: Attempt[int, int]) -> int:
        return attempt.payload * 2

    job = await jobs.enqueue(kind, 4, key=name)
    await trio_jobs.run_once(jobs, [doubles])

    ended = await jobs.get(job)
    assert (ended.unwrap(), ended.kind, ended.key) == (8, name, name)
    assert [one.id for one in await jobs.find(kind=kind)] == [job.id]
    assert (await jobs.counts(kind=name))[State.SUCCEEDED] == 1


async def test_a_kind_whose_name_holds_a_nul_runs_or_is_refused(jobs: Jobs) -> None:
    try:
        kind = Kind("a\0b", int, int)
    except ValueError:
        return

    @kind.handled_by
    async def doubles(attempt: Attempt[int, int]) -> int:
        return attempt.payload * 2

    job = await jobs.enqueue(kind, 4)
    await trio_jobs.run_once(jobs, [doubles])

    assert (await jobs.get(job)).unwrap() == 8


# Handlers.

number = Kind("number", int, int)


async def doubles(attempt: Attempt[int, int]) -> int:
    return attempt.payload * 2


class Multiplier:
    def __init__(self, factor: int) -> None:
        self.factor = factor

    async def multiply(self, attempt: Attempt[int, int]) -> int:
        return attempt.payload * self.factor

    async def __call__(self, attempt: Attempt[int, int]) -> int:
        return attempt.payload * self.factor


async def multiply_by(factor: int, attempt: Attempt[int, int]) -> int:
    return attempt.payload * factor


@pytest.mark.parametrize(
    "fn",
    [
        doubles,
        Multiplier(2).multiply,
        Multiplier(2),
        functools.partial(multiply_by, 2),
        functools.partial(functools.partial(multiply_by), 2),
        functools.partial(Multiplier(2).multiply),
        functools.partial(Multiplier(2)),
        AsyncMock(return_value=10),
    ],
    ids=[
        "function",
        "bound method",
        "callable object",
        "partial",
        "nested partial",
        "partial of a bound method",
        "partial of a callable object",
        "mock",
    ],
)
async def test_async_functions_of_every_form_are_handlers(fn: Any) -> None:
    handler = number.handled_by(fn)

    async with trio_jobs.open_jobs(":memory:") as jobs:
        job = await jobs.enqueue(number, 5)
        await trio_jobs.run_once(jobs, [handler])
        ended = await jobs.get(job)

    assert handler.kind is number
    assert ended.unwrap() == 10


def is_sync(attempt: object) -> int:
    return 1


async def is_generator(attempt: object) -> Any:
    yield 1


@pytest.mark.parametrize(
    ("fn", "named"),
    [
        (is_sync, "is_sync: write `async def`"),
        (lambda attempt: 1, "<lambda>: write `async def`"),
        (is_generator, "is_generator, an async generator: it has a `yield`"),
        (functools.partial(is_sync), "is_sync: write `async def`"),
        (print, "print: write `async def`"),
        (Multiplier, "Multiplier: write `async def`"),
        (None, "NoneType"),
        ("doubles", "str"),
    ],
    ids=["function", "lambda", "generator", "partial", "builtin", "class", "None", "str"],
)
def test_what_is_not_an_async_function_is_refused_at_once(fn: Any, named: str) -> None:
    with pytest.raises(
        TypeError, match=rf"kind 'number' must be an async function, not .*{named}$"
    ):
        number.handled_by(fn)


async def takes_nothing() -> int:
    return 1


async def takes_a_name(*, name: str) -> int:
    return 1


@pytest.mark.parametrize(
    ("fn", "why"),
    [
        (multiply_by, "missing a required argument: 'attempt'"),
        (takes_nothing, "too many positional arguments"),
        (takes_a_name, ""),
        (Multiplier.multiply, "missing a required argument: 'attempt'"),
        (functools.partial(multiply_by, 2, None), "too many positional arguments"),  # type: ignore[arg-type]
    ],
    ids=["two", "none", "keyword", "unbound method", "partial"],
)
def test_a_handler_that_cannot_be_called_with_an_attempt_is_refused_at_once(
    fn: Any, why: str
) -> None:
    with pytest.raises(
        TypeError, match=rf"kind 'number' must take one argument, the attempt; .*: .*{why}"
    ):
        number.handled_by(fn)


async def takes_more(attempt: Attempt[int, int], factor: int = 2, *more: int, add: int = 0) -> int:
    return attempt.payload * factor + add


def gives_a_factor(fn: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(fn)
    async def inner(attempt: Attempt[int, int]) -> Any:
        return await fn(2, attempt)

    return inner


class Unsigned:
    __signature__ = "none"

    async def __call__(self, attempt: Attempt[int, int]) -> int:
        return attempt.payload * 2


@pytest.mark.parametrize(
    "fn",
    [
        takes_more,
        functools.partial(takes_more, add=0),
        functools.partial(takes_more, factor=2),
        gives_a_factor(multiply_by),
        functools.partial(gives_a_factor(multiply_by)),
        Unsigned(),
    ],
    ids=["defaults", "partial", "partial by name", "wrapper", "partial wrapper", "no signature"],
)
async def test_a_handler_is_refused_only_if_it_cannot_be_called(fn: Any) -> None:
    assert await number.handled_by(fn)(testing.attempt(number, 21)) == 42


async def test_a_decorated_handler_can_be_called_by_hand() -> None:
    handler = number.handled_by(doubles)

    assert await handler(testing.attempt(number, 21)) == 42
    assert repr(handler) == "<Handler of 'number': doubles>"


async def test_one_kind_can_have_other_handlers_in_other_runners() -> None:
    twice, thrice = (number.handled_by(Multiplier(factor).multiply) for factor in (2, 3))

    async with trio_jobs.open_jobs(":memory:") as jobs:
        first = await jobs.enqueue(number, 1)
        await trio_jobs.run_once(jobs, [twice])
        second = await jobs.enqueue(number, 1)
        await trio_jobs.run_once(jobs, [thrice])
        results = [(await jobs.get(job)).unwrap() for job in (first, second)]

    assert results == [2, 3]


doubling = number.handled_by(doubles)
same_name = Kind("number", str).handled_by(AsyncMock())

BAD_SETTINGS: list[tuple[list[Any], dict[str, Any], type[Exception], str]] = [
    (
        [doubling, number.handled_by(takes_more)],
        {},
        ValueError,
        "kind 'number' has two handlers: doubles and takes_more",
    ),
    (
        [doubling, same_name],
        {},
        ValueError,
        "two Kinds are named 'number': those of the handlers doubles and AsyncMock",
    ),
    ([doubles], {}, TypeError, "is no Handler: bind a function"),
    ([number], {}, TypeError, "is no Handler: bind a function"),
    ([doubling], {"workers": 0}, ValueError, "workers must be a whole number from 1 to 10,000"),
    ([doubling], {"workers": 10_001}, ValueError, "workers must be .* 1 to 10,000, not 10001$"),
    (
        [doubling],
        {"workers": 10**20},
        ValueError,
        "workers must be a whole number from 1 to 10,000",
    ),
    ([doubling], {"workers": -1}, ValueError, "workers must be a whole number from 1 to 10,000"),
    ([doubling], {"workers": 2.5}, ValueError, "workers must be a whole number from 1 to 10,000"),
    ([doubling], {"workers": True}, ValueError, "workers must be a whole number from 1 to 10,000"),
    (
        [doubling],
        {"workers": math.inf},
        ValueError,
        "workers must be a whole number from 1 to 10,000",
    ),
    ([doubling], {"queues": {"default": 0}}, ValueError, "workers of queue 'default'"),
    ([doubling], {"queues": {"default": 10**12}}, ValueError, "workers of queue 'default' must be"),
    ([doubling], {"queues": {"default": -1}}, ValueError, "workers of queue 'default'"),
    ([doubling], {"queues": ["defualt"]}, ValueError, "no handler is for queue 'defualt'"),
    ([doubling], {"queues": {"defualt": 1}}, ValueError, "no handler is for queue 'defualt'"),
    ([doubling], {"queues": "default"}, TypeError, "queues must be a list of names, or a mapping"),
    ([doubling], {"queues": []}, ValueError, "at least one queue"),
    ([doubling], {"unhandled": "ignore"}, ValueError, "unhandled must be"),
    ([doubling], {"unhandled": is_sync}, ValueError, "unhandled must be"),
    ([doubling], {"unhandled": None}, ValueError, "unhandled must be"),
]

BAD_TIMES: list[tuple[list[Any], dict[str, Any], type[Exception], str]] = [
    ([doubling], {name: bad}, error, name)
    for name in ("poll", "lease", "grace")
    for bad, error in [
        (-1, ValueError),
        (math.nan, ValueError),
        (math.inf, ValueError),
        ("5", TypeError),
        (None, TypeError),
    ]
] + [
    ([doubling], {"poll": 0}, ValueError, "poll"),
    ([doubling], {"lease": -1}, ValueError, "lease must be finite and 0.5 or more, not -1.0"),
    ([doubling], {"lease": 0}, ValueError, "lease must be finite and 0.5 or more, not 0.0"),
    ([doubling], {"lease": 0.1}, ValueError, "lease must be finite and 0.5 or more, not 0.1"),
]


@pytest.mark.parametrize(
    ("handlers", "settings", "error", "text"),
    BAD_SETTINGS + BAD_TIMES,
    ids=setting_id,
)
async def test_E6_serve_refuses_settings_that_cannot_work(
    handlers: list[Handler], settings: dict[str, Any], error: type[Exception], text: str
) -> None:
    async with trio_jobs.open_jobs(":memory:") as jobs:
        with pytest.raises(error, match=text):
            await trio_jobs.serve(jobs, handlers, **settings)

        assert await jobs.find() == []  # it is as usable as before


@pytest.mark.parametrize(
    ("handlers", "settings", "error", "text"),
    BAD_SETTINGS,
    ids=setting_id,
)
async def test_E6_run_once_refuses_the_same_settings(
    handlers: list[Handler], settings: dict[str, Any], error: type[Exception], text: str
) -> None:
    async with trio_jobs.open_jobs(":memory:") as jobs:
        await jobs.enqueue(number, 1)
        with pytest.raises(error, match=text):
            await trio_jobs.run_once(jobs, handlers, **settings)

        assert (await jobs.counts())[State.QUEUED] == 1


async def test_no_handler_at_all_is_an_idle_runner(autojump_clock: MockClock) -> None:
    async with trio_jobs.open_jobs(":memory:") as jobs, trio.open_nursery() as nursery:
        runner = await nursery.start(trio_jobs.serve, jobs, [])
        await jobs.enqueue(number, 1)
        await trio.sleep(10)
        nursery.cancel_scope.cancel()

    assert runner.statistics().started == 0
    assert runner.statistics().unhandled == {"number"}


async def takes_any(name: str, payload: bytes) -> None:
    pass


@pytest.mark.parametrize("unhandled", ["leave", "fail", takes_any], ids=["leave", "fail", "any"])
async def test_a_runner_that_can_start_nothing_says_so(
    unhandled: Any, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with trio_jobs.open_jobs(":memory:") as jobs, trio.open_nursery() as nursery:
        await trio_jobs.run_once(jobs, [], unhandled=unhandled)
        await nursery.start(functools.partial(trio_jobs.serve, jobs, [], unhandled=unhandled))
        await trio.sleep(10)
        nursery.cancel_scope.cancel()

    said = [record.getMessage() for record in caplog.records]
    assert said == (2 * ["there are no handlers: no job will be started"] * (unhandled == "leave"))


def test_kinds_are_importable_where_no_event_loop_runs_and_start_nothing() -> None:
    code = (
        "import threading, trio_jobs; trio_jobs.Kind('k', int).handled_by; "
        "assert threading.active_count() == 1"
    )

    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)
