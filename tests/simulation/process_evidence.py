"""What real processes left behind, as the evidence that the judges of all runs know.

Their own diaries, their logs, what was done to them, and the file with its audit.
"""

from __future__ import annotations

import contextlib
import logging
import sqlite3
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from trio_jobs import SqliteStore

from .child_client import CANARY
from .child_handlers import KINDS
from .diary import lines_of
from .evidence import (
    Call,
    Evidence,
    Fault,
    History,
    LogLine,
    Publication,
    Rest,
    Rules,
    Start,
    Stop,
    audit_schema,
    name_of,
    read_audit,
)
from .fleet import Process

RULES: Final = {kind.name: Rules(kind.retry.attempts, kind.on_interrupt) for kind in KINDS}

LATE: Final = 100_000_000
"""Nanoseconds: a change is written down when it is made, and seen when it is committed, which on
a busy machine is later."""


REAL_TIME: Final = Fault("a busy machine may do anything to anybody", at=0, until=0)
"""Under the real clock no round is without faults."""


def make_file(database: Path) -> None:
    """With all tables of the library, the audit, and the application's own."""
    store = SqliteStore(database)
    store.open()
    store.close()
    with connected(database) as connection:
        for statement in audit_schema():
            connection.execute(statement)
        connection.execute("CREATE TABLE ballast (zeros BLOB)")


def evidence_of(
    database: Path,
    processes: Sequence[Process],
    faults: Iterable[Fault] = (),
    *,
    resolution: int = LATE,
    starts_are_complete: bool = True,
) -> Evidence:
    """Of all that has happened, when every process has ended."""
    return Evidence(
        history_of(processes, [REAL_TIME, *faults]),
        read_audit(str(database)),
        RULES,
        canary=CANARY,
        rest=_rest_of(database),
        resolution=resolution,
        starts_are_complete=starts_are_complete,
    )


def _rest_of(database: Path) -> Rest:
    with connected(database) as connection:
        can_write = True
        try:
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("ROLLBACK")
        except sqlite3.OperationalError:
            can_write = False
        [(integrity,)] = connection.execute("PRAGMA integrity_check")
        states = connection.execute("SELECT id, state FROM trio_jobs_job")
        return Rest(
            time.time_ns(),
            can_write=can_write,
            integrity=integrity,
            log_bytes=_size(Path(f"{database}-wal")),
            states={id: name_of(code) for id, code in states},
        )


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


@contextlib.contextmanager
def connected(database: Path) -> Iterator[sqlite3.Connection]:
    """A connection of our own, which waits for nobody."""
    with contextlib.closing(sqlite3.connect(database, isolation_level=None, timeout=0)) as own:
        own.execute("PRAGMA wal_autocheckpoint = 0")
        yield own


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
                stop = Stop(process.name, begun_at, self._life.ended_at)
                # Of the others nobody knows when exactly they began.
                stop.is_hurried = process.settings.mode == "scope" and self._stopping_at is not None
                self._history.stops.append(stop)
        elif self._life.killed_at is None:
            self._life.killed_at = process.killed_at or process.signalled_at or process.ended_at
            self._life.ended_at = None
        if process.settings.mode == "bare" and process.signalled_at is not None:
            self._forget_what_was_cut(process.signalled_at)
        logs = log_of(process)
        self._history.logs += logs
        if any("working on" in line.text for line in logs):
            process.listens_since = process.started_at  # the command listens before it says so

    def _forget_what_was_cut(self, since: int) -> None:
        # KeyboardInterrupt comes between any two instructions: also between what a handler tells
        # and what it does, or when it has told of its return and is still to return.
        self._history.starts = [
            start
            for start in self._history.starts
            if start.process != self._process.name
            or (start.ended_at is not None and start.ended_at < since)
        ]

    # One for each event that a child tells of.

    def _started(self, at: int, process: str, identity: list[Any] | None) -> None:
        if identity is not None:
            place, pid, started = identity
            self._life.identity = (place, pid, started)

    def _obeys(self, at: int, process: str) -> None:
        self._process.listens_since = at

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
