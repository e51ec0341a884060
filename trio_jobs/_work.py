"""`trio-jobs work`: handlers of somebody's module in a process of their own, until a signal.

Signals come in as values, and stopping is cancelling the scope around `serve`.
"""

from __future__ import annotations

import atexit
import importlib
import logging
import os
import signal
import sys
import traceback
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from types import FrameType
from typing import Final, NoReturn

import click
import trio

from ._checks import is_async, is_async_generator, name_of, refuses_one_argument, seconds
from ._jobs import open_jobs
from ._kinds import Handler
from ._runner import Runner, lease_of, pools_of, serve

STUCK: Final = 75
"""The exit code when a handler could not be cancelled (EX_TEMPFAIL: starting again helps)."""

_log = logging.getLogger("trio_jobs")


class BadArgument(click.ClickException):
    """What was asked for cannot be done with these arguments."""

    exit_code = 2


async def work(
    database: str, handlers: Iterable[Handler], *, workers: int, lease: float, grace: float
) -> None:
    """Serve until SIGTERM or SIGINT; a second one cuts the grace.

    If a handler cannot be cancelled, the process ends here, with `STUCK`.
    """
    handlers = list(handlers)
    try:  # before there is a file
        pools_of(handlers, workers, None, "leave")
        lease_of(lease)
        seconds(grace, "grace")
    except (TypeError, ValueError) as error:
        raise BadArgument(str(error)) from error
    is_new = not os.path.exists(database)  # noqa: ASYNC240 - nothing else runs yet
    serving, hurry = trio.CancelScope(), trio.Event()
    with _stop_signals() as signals:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_obey, signals, serving, hurry)
            with serving:  # around `open_jobs` too, for that may wait for somebody's lock
                async with open_jobs(database) as jobs, trio.open_nursery() as inner:
                    runner = await inner.start(
                        partial(serve, jobs, handlers, workers=workers, lease=lease, grace=grace)
                    )
                    nursery.start_soon(_cut_grace, hurry, runner)
                    nursery.start_soon(_end_process_if_stuck, runner)
                    names = ", ".join(sorted(handler.kind.name for handler in handlers))
                    _log.info("working on %s: %s", database, names)
                    if is_new:
                        _log.warning(
                            "there was no file %s: it is new, and has no jobs yet", database
                        )
            nursery.cancel_scope.cancel()
        _log.info("stopped")  # after this block a signal ends the process


@contextmanager
def _stop_signals() -> Iterator[AsyncIterator[int]]:
    """SIGTERM and SIGINT as values; after a stop in order they only end the process sooner.

    Whoever signals then asks for what has been done: it must not change the exit code.
    """
    others: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        others.append(number)

    # What the receiver puts back when it closes, so that there is no moment without a handler.
    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        with trio.open_signal_receiver(*before) as signals:
            for number in others:
                signal.raise_signal(number)
            yield signals
    except BaseException:
        for number, handler in before.items():
            signal.signal(number, handler)
        raise
    # Threads of the application may keep the process; but not from a further signal.
    for number in before:
        signal.signal(number, lambda *_: _exit_now(0))
    atexit.register(_ignore_signals, before)


def _ignore_signals(numbers: Iterable[int]) -> None:
    # In its last moments the interpreter has no handlers, and a signal would kill it.
    for number in numbers:
        signal.signal(number, signal.SIG_IGN)


async def _obey(signals: AsyncIterator[int], serving: trio.CancelScope, hurry: trio.Event) -> None:
    async for number in signals:
        if not serving.cancel_called:
            _log.info("%s: stopping; once more cuts the grace", signal.Signals(number).name)
            serving.cancel()
        else:
            _log.info("%s: handlers are cancelled now", signal.Signals(number).name)
            hurry.set()


async def _cut_grace(hurry: trio.Event, runner: Runner) -> None:
    await hurry.wait()
    runner._engine.cut_grace()


async def _end_process_if_stuck(runner: Runner) -> None:
    # Everything else is written by now. What is stuck is lost, and taken up by the rule for that.
    await runner._engine.stuck.wait()
    _log.error("the process ends under a handler that cannot be cancelled, with code %d", STUCK)
    _exit_now(STUCK)


def _exit_now(code: int) -> NoReturn:
    """End without waiting for threads."""
    streams = [stream for stream in (sys.stdout, sys.stderr) if stream is not None]
    try:
        for flush in (logging.shutdown, *(stream.flush for stream in streams)):
            with suppress(Exception):  # nobody reads it any more, or the disk is full
                flush()
    finally:
        os._exit(code)


def load_handlers(reference: str) -> list[Handler]:
    """What `MODULE:HANDLERS` names: a handler, several, or a function that gives them."""
    module_name, _, attribute = reference.partition(":")
    if module_name.endswith(".py") or os.sep in module_name:
        module = module_name.removesuffix(".py").strip("./").replace(os.sep, ".")
        raise BadArgument(
            f"{module_name!r} is a file, and a module is wanted: {module}:{attribute or 'HANDLERS'}"
        )
    if not all(name.isidentifier() for name in [*module_name.split("."), attribute]):
        raise BadArgument(f"{reference!r} is not MODULE:HANDLERS, as in app.tasks:HANDLERS")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    value = _attribute(module_name, attribute)
    if isinstance(value, Handler):
        return [value]
    if callable(value) and (is_async(value) or is_async_generator(value)):
        advice = (
            "bind it with @kind.handled_by"
            if refuses_one_argument(value) is None
            else "write `def`, or, for handlers that need something async, a program with `serve`"
        )
        raise BadArgument(f"{reference} is an async function, no Handler: {advice}")
    try:
        given = value() if callable(value) else value
        given = list(given) if isinstance(given, Iterable) else [given]
    except Exception as error:
        traceback.print_exc()  # it is theirs, and they want to know where
        raise BadArgument(
            f"{reference} raised {type(error).__name__} instead of handlers"
        ) from error
    handlers: list[Handler] = []
    for one in given:
        if not isinstance(one, Handler):
            raise BadArgument(
                f"{reference} must be a Handler, or some of them in an iterable, "
                f"or a function that returns that; it gave {name_of(one)}"
            )
        handlers.append(one)
    if not handlers:
        raise BadArgument(f"{reference} is empty: no handlers to work with")
    return handlers


def _attribute(module_name: str, attribute: str) -> object:
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and f"{module_name}.".startswith(f"{missing}."):
            raise BadArgument(f"there is no module {missing!r}") from error
        traceback.print_exc()  # it is theirs, and they want to know where
        raise BadArgument(f"module {module_name!r} cannot be imported") from error
    try:
        return getattr(module, attribute)
    except AttributeError as error:
        raise BadArgument(f"module {module_name!r} has no {attribute!r}") from error
