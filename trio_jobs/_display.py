"""How the command shows things: safely, whatever is in the table. Payloads are never shown."""

from __future__ import annotations

import io
import json
import logging
import os
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Final

import click
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from ._demo import Hashed, Inode, Report
from ._errors import PayloadError
from ._job import Job, PastAttempt
from ._model import Failure, State

MOST_GROUPS: Final = 20
"""Groups of duplicates that the demo prints."""
MOST_LINES: Final = 5
"""Paths it prints of a group, and of what failed."""
MOST_TEXT: Final = 80
"""Characters of a failure in a list of jobs."""

_WIDE: Final = 10_000
"""Columns where no terminal sets a limit: a line a row, for grep."""

_Cell = str | int | datetime | Text | None


def printable(text: str) -> str:
    """One line without control characters: they are shown as escapes."""
    if text.isprintable():
        return text
    return "".join(
        one if one.isprintable() else one.encode("unicode_escape").decode() for one in text
    )


def prepare_output(level: int) -> None:
    """The log to stderr; characters that stdout cannot encode as escapes."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    handler = logging.StreamHandler()
    handler.setFormatter(_OneLine("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=level, handlers=[handler])


def is_output_lost() -> bool:
    """Whether what was printed cannot be written; then it is dropped, and not tried again."""
    stdout = sys.stdout
    if stdout is None:  # closed by who started us
        return False
    try:
        stdout.flush()
    except OSError:
        # Else Python tries once more at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), stdout.fileno())
        return True
    return False


class _OneLine(logging.Formatter):
    """A record is one line, whatever is in its arguments; a traceback follows as it is."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return printable(super().formatMessage(record))


def output() -> Console:
    """Standard output. Tables get as wide as they are where it is no terminal."""
    # None if it was closed by who started us; then nothing is printed.
    is_terminal = sys.stdout is not None and sys.stdout.isatty()
    return Console(width=None if is_terminal else _WIDE, highlight=False)


def print_json(document: object) -> None:
    click.echo(json.dumps(document, indent=2))


def print_jobs(jobs: Iterable[Job[object]]) -> None:
    table = _table("id", "kind", "state", "attempt", "key", "due", "finished", "failure")
    for job in jobs:
        failure = _failure(job.failure)
        if len(failure) > MOST_TEXT:
            failure = failure[: MOST_TEXT - 1] + "…"
        cells = (job.id, job.kind, job.state.value, job.attempt, job.key)
        _add(table, *cells, job.run_at, job.finished_at, failure)
    output().print(table)


def print_job(job: Job[object]) -> None:
    table = Table(Column(), Column(overflow="fold"), show_header=False)
    for name, value in job.to_dict().items():
        if name == "result":
            _add(table, name, _result(job))
        elif value is not None:
            _add(table, name, str(value))
    output().print(table)


def print_history(history: Iterable[PastAttempt]) -> None:
    table = _table("attempt", "claim", "started", "ended", "outcome", "failure")
    for past in history:
        cells = (past.number, past.claim, past.started_at, past.ended_at, past.outcome)
        _add(table, *cells, _failure(past.failure))
    output().print(table)


def past_to_dict(past: PastAttempt) -> dict[str, object]:
    """Named as in `Job.to_dict`."""
    return {
        "number": past.number,
        "claim": past.claim,
        "started_at": past.started_at.isoformat(),
        "ended_at": past.ended_at.isoformat(),
        "outcome": past.outcome,
        "error": None if past.failure is None else past.failure.message,
        "error_type": None if past.failure is None else past.failure.type,
    }


def print_counts(counts: dict[State, int]) -> None:
    table = _table("state", "jobs")
    for state, count in counts.items():
        _add(table, state.value, f"{count:,}")
    output().print(table)


def print_report(report: Report) -> None:
    """What the demo found."""
    groups = duplicates(report.files)
    if groups:
        table = _table("copies", "bytes each", "bytes wasted", "paths")
        for size, paths in groups[:MOST_GROUPS]:
            wasted = size * (len(paths) - 1)
            _add(table, f"{len(paths):,}", f"{size:,}", f"{wasted:,}", Text(_some(paths)))
        output().print(table)
    if len(groups) > MOST_GROUPS:
        click.echo(f"and {len(groups) - MOST_GROUPS:,} more groups")
    total = sum(size * (len(paths) - 1) for size, paths in groups)
    click.echo(f"Wasted: {total:,} bytes in {len(groups):,} groups of duplicates.")
    failed = [job for job in report.files if job.state is not State.SUCCEEDED]
    click.echo(f"Files: {len(report.files):,} found, {len(failed):,} not hashed.")
    if failed:
        click.echo(
            _some([f"{job.key}: {_failure(job.failure) or job.state.value}" for job in failed])
        )
    did, seconds = report.statistics, report.seconds
    jobs = did.succeeded + did.failed
    click.echo(
        f"Runner: {jobs:,} jobs, {did.retried:,} retries, {did.failed:,} failures "
        f"in {seconds:.1f} s, {jobs / seconds:,.0f} jobs/s."
    )


def duplicates(files: Iterable[Job[Hashed]]) -> list[tuple[int, list[str]]]:
    """Size and paths of files with the same content, the most wasted bytes first."""
    same: defaultdict[tuple[int, str], dict[Inode, str]] = defaultdict(dict)
    for job in files:
        if job.state is State.SUCCEEDED:
            file = job.unwrap()
            # Another name of the same inode wastes nothing.
            same[file.size, file.digest].setdefault(file.inode, job.key or "")
    groups = [(size, sorted(paths.values())) for (size, _), paths in same.items()]
    groups = [(size, paths) for size, paths in groups if size > 0 and len(paths) > 1]
    return sorted(groups, key=lambda group: (-group[0] * (len(group[1]) - 1), group[1]))


def _table(*names: str) -> Table:
    return Table(*(Column(name, overflow="fold") for name in names))


def _add(table: Table, *cells: _Cell) -> None:
    table.add_row(*(_text(cell) for cell in cells))


def _text(cell: _Cell) -> Text:
    # Text, because a str would be read as markup.
    if isinstance(cell, Text):
        return cell
    if isinstance(cell, datetime):
        cell = cell.isoformat(" ", "seconds").removesuffix("+00:00") + "Z"
    return Text("" if cell is None else printable(str(cell)))


def _failure(failure: Failure | None) -> str:
    if failure is None:
        return ""
    return failure.message if failure.type is None else f"{failure.message} ({failure.type})"


def _result(job: Job[object]) -> str:
    try:
        return json.dumps(job.result, ensure_ascii=False)
    except PayloadError:
        return "(cannot be decoded)"


def _some(texts: Sequence[str]) -> str:
    lines = [printable(text) for text in texts[:MOST_LINES]]
    if len(texts) > MOST_LINES:
        lines.append(f"and {len(texts) - MOST_LINES:,} more")
    return "\n".join(lines)
