"""A disk that can be full: a small file system of its own, or a limit for the size of any file.

They differ in what SQLite is told: ENOSPC, which it calls a full disk, and EFBIG, which it calls
an I/O error; and only the first hits everybody at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import resource
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from .fleet import Process
from .process_plan import Plan

SMALL: Final = 4_000_000
ROOMY: Final = 64_000_000

FOR_DIARIES: Final = 100_000
"""Bytes a limit leaves them: they must not have a hole."""

# See mount(2) and unshare(2).
_CLONE_NEWNS: Final = 0x20000
_REMOUNT: Final = 0x20
_REC_PRIVATE: Final = 0x44000


class Disk:
    """Where the database of a round lies. A small file system is seen by this process and those
    it forks only, and is gone with them."""

    def __init__(self, path: Path, plan: Plan) -> None:
        path.mkdir()
        self.path = path
        self._dice = random.Random(f"limits {plan.seed}")
        self._filler = path / "filler"
        self.is_small = plan.kind == "full" and plan.disk == "small" and _mount(path)

    def fill(self, processes: Sequence[Process]) -> None:
        if self.is_small:
            with contextlib.suppress(OSError), open(self._filler, "wb", buffering=0) as filler:
                while True:
                    filler.write(bytes(4096))
        else:
            self._limit_all(processes)

    def _limit_all(self, processes: Sequence[Process]) -> None:
        log = self.path / "jobs.db-wal"
        size = log.stat().st_size if log.exists() else 0
        for process in processes:
            diary = process.settings.evidence
            told = diary.stat().st_size if diary.exists() else 0
            limit = max(told + FOR_DIARIES, int(size * self._dice.uniform(0.2, 1)))
            _limit(process, limit)

    def release(self, processes: Sequence[Process]) -> None:
        """What was too much is gone."""
        if self.is_small:
            self._filler.unlink(missing_ok=True)
        for process in processes:
            _limit(process, resource.RLIM_INFINITY)

    def grow(self) -> None:
        """From now on there is room for everything."""
        if self.is_small:
            _call("mount", None, os.fsencode(self.path), None, _REMOUNT, _size(ROOMY))


def _limit(process: Process, size: int) -> None:
    # Python ignores SIGXFSZ, so that a write beyond it fails, and does not end the process.
    with contextlib.suppress(ProcessLookupError):
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def _mount(path: Path) -> bool:
    """Whether that is permitted here."""
    try:
        _call("unshare", _CLONE_NEWNS)
        _call("mount", b"none", b"/", None, _REC_PRIVATE, None)
        _call("mount", b"tmpfs", os.fsencode(path), b"tmpfs", 0, _size(SMALL))
    except (OSError, AttributeError):
        return False
    return True


def _size(size: int) -> bytes:
    return b"size=%d" % size


def _call(name: str, *arguments: bytes | int | None) -> None:
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), name)
