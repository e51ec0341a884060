"""The write-ahead log of one store is kept short, off the hot path where SQLite allows it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Final

from ._connections import MAX_LOG, Connections, has_reset_bug, need, roll_back
from ._errors import StoreBusy, StoreError
from ._model import Instant

_TOO_LONG: Final = 4 * MAX_LOG
"""Bytes above which the log is worth a warning."""
_LONG_READ: Final = 0.02
"""Seconds that a checkpoint waits for a read of this store, while the log is not yet long: on a
machine with too much to do a short read took that long again and again."""
_TRY_EVERY: Final[Instant] = 5_000_000
"""Microseconds until a checkpoint that emptied nothing is tried again."""

_logger: Final = logging.getLogger("trio_jobs")

_PINNED: Final = (
    "the write-ahead log has %d MB and cannot be emptied: somebody has had a reading transaction"
    " open for long"
)


class Checkpoints:
    """Of the file behind `connections`. `write` writes a little, in a transaction of its own;
    a checkpoint that fails is `warned` of, and tried again later."""

    def __init__(
        self,
        connections: Connections,
        write: Callable[[], None],
        warn: Callable[[StoreError], None],
    ) -> None:
        self._connections = connections
        self._write = write
        self._warn = warn
        self._next_tidy = MAX_LOG
        self._tidied_at: Instant = 0
        self._is_pinned = False

    def tidy(self, now: Instant) -> bool:
        """After commits; cheap while the log is short. True: call `run`, in any thread."""
        size = self._connections.log_size()
        if size <= MAX_LOG:
            self._next_tidy, self._is_pinned = MAX_LOG, False
            return False
        # While a reader needs the log as it is, to try on every call would be no use.
        last = self._tidied_at
        if size < self._next_tidy and last <= now < last + _TRY_EVERY:
            return False
        # Past that size those who write wait, and the log cannot run away from a checkpoint.
        is_safe_beside = not has_reset_bug(need(self._connections.writer).version)
        if is_safe_beside and size <= 3 * MAX_LOG:
            self._next_tidy, self._tidied_at = size + MAX_LOG, now
            return True
        try:
            self.under_lock(size)
        except StoreBusy:
            return False
        except StoreError as error:
            self._warn(error)
        self._next_tidy, self._tidied_at = size + MAX_LOG, now
        return False

    def run(self) -> None:
        """Beside those who write."""
        try:
            with self._connections.checkpointing:
                if self._connections.checkpointer is not None:
                    self._move_log()
            # Under load it does not begin anew by itself, because something was written
            # meanwhile. That is little; so now and then those who write may wait for it.
            size = self._connections.log_size()
            if size > 2 * MAX_LOG:
                self.under_lock(size)
        except StoreBusy:
            pass
        except StoreError as error:
            self._warn(error)

    def under_lock(self, size: int) -> None:
        """While nobody can write."""
        here = self._connections
        with here.writing, self._without_own_reader(size), here.checkpointing:
            if here.writer is None or here.checkpointer is None:
                return  # closed meanwhile
            try:
                # With our lock on it, no commit can reset the log under the checkpoint.
                here.writer.execute("BEGIN IMMEDIATE")
                is_emptied = self._move_log()
            finally:
                roll_back(here.writer)
            if is_emptied and size > 2 * MAX_LOG:
                # It begins anew, and is cut, with the first commit that meets no reader.
                self._write()
            elif is_emptied is False and size > _TOO_LONG and not self._is_pinned:
                self._is_pinned = True
                _logger.warning("%s: " + _PINNED, here.path, size // 1_000_000)

    @contextlib.contextmanager
    def _without_own_reader(self, size: int) -> Iterator[None]:
        """A dashboard that always reads kept the log from ever beginning anew: it grew by all
        that was written. Nobody waits here for a read that takes long."""
        reading = self._connections.reading
        patience = _LONG_READ if size <= 3 * MAX_LOG else 10 * _LONG_READ
        is_held = size > 2 * MAX_LOG and reading.acquire(timeout=patience)
        try:
            yield
        finally:
            if is_held:
                reading.release()

    def _move_log(self) -> bool | None:
        """Move what is in the log to the file. False: somebody reads who needs what is left, or
        it was just written. None: another process is at it."""
        checkpointer = need(self._connections.checkpointer)
        [(is_busy, pages, moved)] = checkpointer.execute("PRAGMA wal_checkpoint(PASSIVE)")
        return None if is_busy else moved >= pages
