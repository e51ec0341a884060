"""What real processes left behind, as the evidence that the judges of all runs know; and the few
things only real processes can do wrong.

A diary may end anywhere, even where its process was killed in the middle of nothing; but it has
no holes, for each line is in the kernel's hands before the process does the next thing.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from . import child
from .evidence import (
    Call,
    Fault,
    History,
    LogLine,
    Publication,
    Rules,
    Start,
    Stop,
)
from .fleet import Process

RULES: Final = {kind.name: Rules(kind.retry.attempts, kind.on_interrupt) for kind in child.KINDS}

LATE: Final = 100_000_000
"""Nanoseconds: a change is written down when it is made, and seen when it is committed, which on
a busy machine is later."""


def history_of(processes: Sequence[Process], faults: Iterable[Fault]) -> History:
    """Of all processes, which have ended."""
    history = History(faults=list(faults))
    for process in processes:
        _Reader(history, process).read()
    return history


class _Reader:
    """One diary, and what was seen of its process from outside."""

    def __init__(self, history: History, process: Process) -> None:
        self._history = history
        self._process = process
        self._calls: dict[str, Call] = {}
        self._starts: dict[tuple[int, int], Start] = {}
        self._life = history.life(process.name, process.started_at)
        self._stopping_at: int | None = None

    def read(self) -> None:
        for line in lines_of(self._process.settings.evidence):
            getattr(self, f"_{line.pop('event').replace(' ', '_')}")(**line)
        process = self._process
        if process.is_orderly:
            begun_at = self._stopping_at or process.signalled_at
            if begun_at is not None:
                self._history.stops.append(Stop(process.name, begun_at, self._life.ended_at))
        elif self._life.killed_at is None:
            self._life.killed_at = process.killed_at or process.signalled_at or process.ended_at
            self._life.ended_at = None
        logs = log_of(process)
        self._history.logs += logs
        process.listened |= any("working on" in line.text for line in logs)

    # One for each event that a child tells of.

    def _started(self, at: int, process: str, identity: list[Any] | None) -> None:
        if identity is not None:
            place, pid, started = identity
            self._life.identity = (place, pid, started)

    def _obeys(self, at: int, process: str) -> None:
        self._process.listened = True

    def _stopping(self, at: int, process: str, signal: int) -> None:
        self._stopping_at = self._stopping_at or at

    def _kills_itself(self, at: int, process: str) -> None:
        self._life.killed_at = at
        self._process.killed_itself = True

    def _ended(self, at: int, process: str, code: int) -> None:
        self._life.ended_at = at

    def _call(self, at: int, process: str, number: str, verb: Any, **asked: Any) -> None:
        for name in ("payloads", "keys"):
            asked[name] = tuple(asked.get(name, ()))
        self._calls[number] = self._history.call(verb, process, at, **asked)

    def _answer(self, at: int, process: str, number: str, outcome: str, **told: Any) -> None:
        call = self._calls[number]
        if outcome == "ok":
            call.ok(at, **{name: _frozen(value) for name, value in told.items()})
        elif outcome == "fail":
            call.failed(at, told["error"])
        else:
            call.unclear(at)

    def _start(self, at: int, process: str, job: int, token: int, attempt: int) -> None:
        self._starts[job, token] = self._history.start(process, job, token, attempt, at)

    def _publish(self, at: int, job: int, token: int, value: str, **_: object) -> None:
        self._starts[job, token].published.append(Publication(value, at))

    def _published(self, at: int, job: int, token: int, **_: object) -> None:
        publication = self._starts[job, token].published[-1]
        publication.outcome, publication.answered_at = "ok", at

    def _publish_refused(self, at: int, job: int, token: int, **_: object) -> None:
        # By a store in trouble: whether it is there nobody says.
        self._starts[job, token].published[-1].answered_at = at

    def _end(
        self, at: int, job: int, token: int, ending: str, value: str | None = None, **_: object
    ) -> None:
        start = self._starts[job, token]
        start.ended_at, start.ending, start.returned = at, ending, value


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def lines_of(path: Path) -> list[dict[str, Any]]:
    """There is no file if the process was killed before its first word."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]


_LEVELS: Final = logging.getLevelNamesMapping()


def log_of(process: Process) -> list[LogLine]:
    """Each message with the traceback that follows it."""
    lines: list[LogLine] = []
    text = process.log.read_text(errors="replace") if process.log.exists() else ""
    for line in text.splitlines():
        level = _LEVELS.get(line.split(" ", 1)[0])
        if level is None and lines:
            lines[-1] = LogLine(lines[-1].level, f"{lines[-1].text}\n{line}")
        else:
            lines.append(LogLine(level or logging.ERROR, line))
    return lines
