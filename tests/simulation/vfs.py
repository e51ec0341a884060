"""A virtual file system for apsw that writes down everything that reaches the disk.

The files are real ones, reached through SQLite's own file system: locks, shared memory and
reading are what they are in production, with as many connections as one likes. What changes a
disk (a write, a new size, a sync, a file that comes or goes) passes through here and is
recorded in order. `power_disk` says from such a record what a power cut leaves at any point of it.
"""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass
from typing import Final, TypeAlias

import apsw


@dataclass(frozen=True)
class Create:
    """A name in the folder now means this file."""

    name: str
    file: int


@dataclass(frozen=True)
class Delete:
    name: str


@dataclass(frozen=True)
class Write:
    file: int
    offset: int
    data: bytes


@dataclass(frozen=True)
class Truncate:
    file: int
    size: int


@dataclass(frozen=True)
class Sync:
    """What was written to the file before is demanded to be durable; with `folder` also which
    names there are."""

    file: int
    name: str
    folder: bool


Operation: TypeAlias = Create | Delete | Write | Truncate | Sync

INDEX_SUFFIX: Final = "-shm"
"""Of a file that SQLite maps into memory, past everything here."""

_recorders: Final = itertools.count(1)

_LOGS: Final = apsw.SQLITE_OPEN_WAL | apsw.SQLITE_OPEN_MAIN_JOURNAL
_NAMED: Final = _LOGS | apsw.SQLITE_OPEN_MAIN_DB


class Recorder(apsw.VFS):
    """Records what is done to the files of one folder. `name` is its name for SQLite; it must
    be `unregister`ed."""

    def __init__(self, folder: str) -> None:
        self.name = f"recorder {next(_recorders)}"
        self.operations: list[Operation] = []
        names = [name for name in sorted(os.listdir(folder)) if not name.endswith(INDEX_SUFFIX)]
        self.files = {name: number for number, name in enumerate(names)}
        self._numbers = itertools.count(len(self.files))
        super().__init__(self.name, "unix")

    def xOpen(self, name: str | apsw.URIFilename | None, flags: list[int]) -> apsw.VFSFile:
        assert name is not None, "a temporary file, which nothing here should need"
        assert flags[0] & _NAMED
        path = name.filename() if isinstance(name, apsw.URIFilename) else name
        return _File(self, name, path, flags)

    def xDelete(self, filename: str, syncdir: bool) -> None:
        super().xDelete(filename, syncdir)
        name = os.path.basename(filename)
        if self.files.pop(name, None) is not None:
            self.operations.append(Delete(name))

    def number_of(self, name: str) -> int:
        """The file of that name, which is new if there was none."""
        if name not in self.files:
            self.files[name] = next(self._numbers)
            self.operations.append(Create(name, self.files[name]))
        return self.files[name]


class _File(apsw.VFSFile):
    def __init__(
        self, recorder: Recorder, name: str | apsw.URIFilename, path: str, flags: list[int]
    ) -> None:
        self._operations = recorder.operations
        self._name = os.path.basename(path)
        # Like SQLite's own: the first sync of a log or journal syncs its folder.
        self._folder_is_due = bool(flags[0] & _LOGS)
        super().__init__("unix", name, flags)
        self._file = recorder.number_of(self._name)

    def xWrite(self, data: bytes, offset: int) -> None:
        self._operations.append(Write(self._file, offset, bytes(data)))
        super().xWrite(data, offset)

    def xTruncate(self, newsize: int) -> None:
        self._operations.append(Truncate(self._file, newsize))
        super().xTruncate(newsize)

    def xSync(self, flags: int) -> None:
        # No power fails here but the one in `power_disk`, so the real disk need not be bothered.
        self._operations.append(Sync(self._file, self._name, self._folder_is_due))
        self._folder_is_due = False
