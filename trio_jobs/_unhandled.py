"""Kinds of which jobs wait, and that nobody here handles: how they are found, and what becomes of
them."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Literal, TypeAlias

import trio

from ._bridge import Bridge
from ._errors import StoreError
from ._handler import Attempt, Fail
from ._kinds import Handler, Kind

Unhandled: TypeAlias = Literal["leave", "fail"] | Callable[[str, bytes], Awaitable[None]]
"""What becomes of kinds nobody gave a handler for."""

_log = logging.getLogger("trio_jobs")


class UnknownKinds:
    """What a runner knows of kinds that are not among the `known`.

    `adopt` is given the handlers that `rule` makes; `failed` is told that a look was not possible.
    """

    def __init__(
        self,
        bridge: Bridge,
        known: frozenset[str],
        rule: Unhandled,
        *,
        poll: float,
        adopt: Callable[[Sequence[Handler]], None],
        failed: Callable[[StoreError], None],
    ) -> None:
        self.met: set[str] = set()
        self._bridge = bridge
        self._known = known
        self._rule: Unhandled = rule
        self._poll = poll
        self._adopt = adopt
        self._failed = failed
        self._may_be_new = trio.Event()

    @trio.lowlevel.enable_ki_protection
    async def watch(self) -> None:
        """Look whenever there may be new ones, at most once a `poll`. A task of its own, because
        a read may have to wait for other reads, and a claim must not."""
        while True:
            await self._may_be_new.wait()
            self._may_be_new = trio.Event()
            await self.look()
            await trio.sleep(self._poll)

    def may_be_new(self) -> None:
        """Others may have enqueued."""
        self._may_be_new.set()

    async def look(self) -> None:
        """Meet all kinds of which jobs wait in the store."""
        try:
            kinds = await self._bridge.read(lambda store: store.queued_kinds())
        except StoreError as error:
            self._may_be_new.set()
            self._failed(error)
        else:
            self.meet(kinds)

    def meet(self, kinds: Iterable[str]) -> None:
        """Jobs of these kinds are waiting: see whether somebody handles them."""
        names = set(kinds) - self._known - self.met
        self.met |= names
        if self._rule == "leave":
            for name in names:
                _log.warning("jobs of kind %r wait, and nobody here handles them", name)
            return
        # Only by hand can a row have a name that no kind may have; it stays queued.
        possible = [name for name in names if name and "\0" not in name]
        if possible:
            self._adopt([_handler_of(name, self._rule) for name in possible])


def _handler_of(name: str, rule: Unhandled) -> Handler:
    kind = Kind(name, bytes)

    async def handle(attempt: Attempt[bytes, None]) -> None:
        if callable(rule):
            await rule(name, attempt.payload)
        else:
            raise Fail(f"no handler for job kind {name}", retry=False)

    return kind.handled_by(handle)
