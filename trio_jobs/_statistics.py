"""What a runner did and how it is: its counts, and the trouble it has with the store."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass

from ._errors import StoreError
from ._model import Change, State

_log = logging.getLogger("trio_jobs")


@dataclass(frozen=True)
class Statistics:
    """What a runner did since it started, and how it is now."""

    running: int
    """Handlers under way."""
    started: int
    succeeded: int
    failed: int
    """Jobs that ended failed or dead."""
    retried: int
    """Attempts that failed or asked for later, and will be started again."""
    lost: int
    """Attempts whose process died or whose lease ended: lost rows this runner took up or ended,
    and its own."""
    unhandled: frozenset[str]
    """Kinds seen waiting that nobody gave a handler for."""
    trouble: str | None
    """What the store last refused; None once a claim went well again."""


class Tally:
    """The counts since the start."""

    def __init__(self) -> None:
        self.started = 0
        self.succeeded = 0
        self.failed = 0
        self.retried = 0
        self.lost = 0
        self._trouble: str | None = None
        self._warned: set[str] = set()

    def statistics(self, running: int, unhandled: Iterable[str]) -> Statistics:
        return Statistics(
            running=running,
            started=self.started,
            succeeded=self.succeeded,
            failed=self.failed,
            retried=self.retried,
            lost=self.lost,
            unhandled=frozenset(unhandled),
            trouble=self._trouble,
        )

    def count(self, change: Change) -> None:
        """This was written."""
        after, past = change.after, change.past
        outcome = None if past is None else past.outcome
        if after.state is State.SUCCEEDED:
            self.succeeded += 1
        elif after.state in (State.FAILED, State.DEAD):
            self.failed += 1
        elif outcome in ("failed", "timed out", "retry later"):
            self.retried += 1
        if outcome == "lost":
            self.lost += 1
        if after.state is State.DEAD:
            _log.warning(
                "job %d (%s) is dead after %d attempts: %s",
                after.id,
                after.kind,
                after.attempt,
                "" if after.failure is None else after.failure.message,
            )

    def met_trouble(self, error: StoreError, what: str) -> None:
        """The store refused: warn once for each kind of call until it works again."""
        if what not in self._warned:
            self._warned.add(what)
            then = "stops" if error.is_permanent else "goes on trying"
            _log.warning("%s: %s; the runner %s", what, error, then)
        self._trouble = str(error)

    def worked_again(self) -> None:
        self._trouble = None
        self._warned.clear()
