"""How what has ended is written: the ends of one tick together, with the next claim.

A worker goes on to its next job meanwhile. An end the store refuses is written again until
its lease ends, one that was refused for another reason is decided again; no neighbour in the
same transaction is hurt by either.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import outcome
import trio

from ._attempt import Execution
from ._batch import Write
from ._errors import StoreError
from ._lifecycle import End
from ._model import Change, Refused
from ._repeats import FIRST_REPEAT
from ._workers import Workers

if TYPE_CHECKING:
    from ._engine import Engine

ENOUGH: Final = 100
"""Ends; from here on a larger transaction makes each little cheaper."""


class Ending(NamedTuple):
    """An execution that is through, and what is to be written of it."""

    execution: Execution
    end: End
    change: Change


class Ends:
    """What has ended in a pool and is not on disk yet.

    `claims` gives the claim that goes along, if one is wanted; `handed_over` is called after.
    """

    def __init__(
        self,
        engine: Engine,
        workers: Workers,
        claims: Callable[[], Sequence[Write]],
        handed_over: Callable[[], None],
    ) -> None:
        self._engine = engine
        self._workers = workers
        self._claims = claims
        self._handed_over = handed_over
        self._endings: list[Ending] = []
        self._is_woken = False
        self._sleeper = trio.lowlevel.ParkingLot()
        self._owed: set[Execution] = set()

    def add(self, execution: Execution, end: End) -> None:
        if execution.is_over:
            self._is_through(execution)
            self._engine.lost(execution)
        else:
            try:
                change = execution.decide(end)
            except BaseException as error:  # noqa: ASYNC103 - an application's clock raises anything
                self._engine.fail(error)
                self._engine.start(self._decide_later, execution, end)
                return  # noqa: ASYNC104
            self._endings.append(Ending(execution, end, change))
        self._wake()

    @trio.lowlevel.enable_ki_protection
    async def write(self) -> None:
        """Hand over what has ended. It is woken by the first, and runs when all who could run
        in that tick have: so their ends are one write, and nobody has waited for a timer."""
        while True:
            while not self._is_woken:
                await self._sleeper.park()
            number = 0
            # While each tick brings more, and those who bring them have still more to do.
            while self._workers.ready and number < len(self._endings) < ENOUGH:
                number = len(self._endings)
                await trio.lowlevel.cancel_shielded_checkpoint()
            self._hand_over()
            await trio.lowlevel.cancel_shielded_checkpoint()

    # Not a part of the loop: that sleeps, and would keep the last rows and their results.
    def _hand_over(self) -> None:
        writes = list(self._claims())  # before anything is changed: it may fail
        self._is_woken = False
        endings, self._endings = self._endings, []
        if endings:
            end = Write("apply", [ending.change for ending in endings])
            end.done = self._engine.guarded(functools.partial(self._answered, endings))
            writes.insert(0, end)
        if writes:
            self._engine.bridge.submit(*writes)
        self._handed_over()

    def _answered(self, endings: Sequence[Ending], result: outcome.Outcome[Any]) -> None:
        """Called before anybody who waits for these jobs is woken, and before a pool hears that
        one of them is due again: the runner is never behind."""
        if isinstance(result, outcome.Value):
            for ending, answer in zip(endings, result.value, strict=True):
                self._settle(ending, answer)
        elif isinstance(result, outcome.Error):
            for ending in endings:
                self._settle(ending, result.error)

    def _settle(self, ending: Ending, answer: Refused | BaseException | None) -> None:
        execution, end, change = ending
        if isinstance(answer, StoreError):
            if execution.was_not_written(answer):
                self._engine.cannot_write_end(execution, answer)
                self._owed.add(execution)
                self._workers.owed = len(self._owed)
                if not self._engine.is_over:
                    self._engine.start(self._add_later, execution, end)
            else:
                self._is_through(execution)
                self._engine.gave_up(execution)
        elif isinstance(answer, BaseException):
            self._engine.fail(answer)
        elif execution.is_written(change, answer):
            self._is_through(execution)
            self._engine.wrote(execution, change)
            if answer is not None:
                self._engine.found_written(change)
        else:
            self.add(execution, end)

    @trio.lowlevel.enable_ki_protection
    async def _add_later(self, execution: Execution, end: End) -> None:
        await execution.wait_for_store()
        self.add(execution, end)

    async def _decide_later(self, execution: Execution, end: End) -> None:
        await trio.sleep(FIRST_REPEAT)
        self.add(execution, end)

    def _is_through(self, execution: Execution) -> None:
        if execution in self._owed:
            self._owed.discard(execution)
            self._workers.owed = len(self._owed)
            self._wake()  # there is room for a claim

    def _wake(self) -> None:
        if not self._is_woken:
            self._is_woken = True
            self._sleeper.unpark()
