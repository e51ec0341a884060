"""Who in this process wants to hear of which file: every `Jobs` on a file wakes the others.

A wake-up is only ever a hint. It says what was committed; whoever hears it looks at the
store, or knows from the row it carries that there is nothing to look at.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
from collections.abc import Callable, Hashable, Sequence

import trio

from ._model import Row

_log = logging.getLogger("trio_jobs")


class Listener:
    """One open `Jobs` as the hub sees it; its callbacks run on its own Trio thread."""

    def __init__(
        self, heard: Callable[[Sequence[Row]], None], written_elsewhere: Callable[[], None]
    ) -> None:
        self.token = trio.lowlevel.current_trio_token()
        self.heard = heard
        self.written_elsewhere = written_elsewhere


class Hub:
    """The listeners of one file in this process."""

    def __init__(self) -> None:
        self._listeners: tuple[Listener, ...] = ()

    def join(self, listener: Listener) -> None:
        self._listeners = (*self._listeners, listener)

    def leave(self, listener: Listener) -> None:
        self._listeners = tuple(one for one in self._listeners if one is not listener)

    @property
    def is_empty(self) -> bool:
        return not self._listeners

    def tell(self, rows: Sequence[Row]) -> None:
        """These rows were committed as they are here. From any thread."""
        for listener in self._listeners:
            _call(listener.token, functools.partial(listener.heard, rows))

    def tell_written_elsewhere(self) -> None:
        """An application's own transaction wrote, and is not over yet. From any thread."""
        for listener in self._listeners:
            _call(listener.token, listener.written_elsewhere)


_hubs: dict[Hashable, Hub] = {}
_lock = threading.Lock()


def join_hub(identity: Hashable, listener: Listener) -> Hub:
    with _lock:
        hub = _hubs.setdefault(identity, Hub())
        hub.join(listener)
        return hub


def leave_hub(identity: Hashable, listener: Listener) -> None:
    with _lock:
        hub = _hubs[identity]
        hub.leave(listener)
        if hub.is_empty:
            del _hubs[identity]


def _after_fork_in_child() -> None:
    global _lock
    _lock = threading.Lock()  # somebody in the parent may have held it
    _hubs.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


def _call(token: trio.lowlevel.TrioToken, call: Callable[[], None]) -> None:
    if _is_here(token):
        call_safely(call)
    else:
        try:
            token.run_sync_soon(call_safely, call)
        except trio.RunFinishedError:
            pass  # that loop is gone, and its listener with it


def call_safely(call: Callable[..., None], *args: object) -> None:
    """Call what is to hear of a commit; what it raises goes to the log, for others are to hear."""
    # Trio itself has called us, mostly: what is raised here would end that whole program.
    try:
        call(*args)
    except BaseException:  # noqa: ASYNC103 - an application's clock raises anything
        _log.exception("what was to hear of a commit failed")  # noqa: ASYNC104


def _is_here(token: trio.lowlevel.TrioToken) -> bool:
    try:
        return trio.lowlevel.current_trio_token() is token
    except RuntimeError:  # not a Trio thread
        return False
