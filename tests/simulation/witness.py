"""What the library logs, written into the history."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from .evidence import History, LogLine
from .world import here


class Witness(logging.Handler):
    """Writes what the library logs into the history, unless a dead process said it."""

    _formatter = logging.Formatter("%(message)s")

    def __init__(self, history: History) -> None:
        super().__init__(logging.INFO)
        self._history = history

    def emit(self, record: logging.LogRecord) -> None:
        process = here.get(None)
        if process is None or process.is_alive:
            text = self._formatter.format(record)
            self._history.logs.append(LogLine(record.levelno, text))


@contextlib.contextmanager
def witnessed(history: History) -> Iterator[None]:
    log = logging.getLogger("trio_jobs")
    witness = Witness(history)
    before = log.level, log.propagate
    log.addHandler(witness)
    log.setLevel(logging.INFO)
    log.propagate = False
    try:
        yield
    finally:
        log.removeHandler(witness)
        log.setLevel(before[0])
        log.propagate = before[1]
