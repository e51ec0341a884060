"""What a disk holds after a power cut: a pure function of what was done to it, and of chance.

A write goes to a cache first. What has been synced stays. Of the rest each sector of each
write survives or does not, whatever came before or after it, and so does each new size and
each name that was created or deleted. A sector that was being written may be torn: then the
rest of what was written to it is old, zero or noise, but never a byte beside it (SQLite counts
on that on every system it knows: https://www.sqlite.org/psow.html).

A disk may also lie. `Obeys` says what it makes of a sync; every one but `every_sync` is there
to show that lies are noticed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final, Generic, TypeAlias, TypeVar

from .vfs import Create, Delete, Operation, Sync, Truncate, Write

T = TypeVar("T")

Image: TypeAlias = Mapping[str, bytes]
"""The files of a folder: their contents by name."""

Obeys: TypeAlias = Callable[[Sync], bool]

SECTOR: Final = 512


def every_sync(sync: Sync) -> bool:
    return True


def no_sync(sync: Sync) -> bool:
    """A disk that says yes, and goes on caching."""
    return False


def no_sync_of_the_log(sync: Sync) -> bool:
    """As if the store had forgotten about it."""
    return not sync.name.endswith("-wal")


class Disk:
    """A disk as seen from below its cache. `apply` what was done; `after_cut` can be asked at
    any time, and as often as one likes.

    `files` are the numbers of those that are recorded.

    With `is_late` a sync makes durable only what was there at the sync before it: what comes
    after a sync may reach the disk before what came ahead of it.
    """

    def __init__(
        self,
        image: Image,
        files: Mapping[str, int],
        *,
        obeys: Obeys = every_sync,
        is_late: bool = False,
    ) -> None:
        self._obeys = obeys
        self._is_late = is_late
        self._names = _Cached[_Names]({name: files[name] for name in image if name in files})
        self._files = {
            file: _Cached[bytearray](bytearray(image[name])) for name, file in files.items()
        }

    def apply(self, operation: Operation) -> None:
        match operation:
            case Create(_, file):
                self._files[file] = _Cached(bytearray())
                self._names.add(operation)
            case Delete():
                self._names.add(operation)
            case Write(file) | Truncate(file):
                self._files[file].add(operation)
            case Sync(file, _, folder):
                if self._obeys(operation):
                    self._files[file].sync(_change_file, self._is_late)
                    if folder:
                        self._names.sync(_change_names, self._is_late)

    def after_cut(self, chance: random.Random, under_way: Operation | None = None) -> Image:
        """What is found when the power comes back. `under_way` was asked for and not yet
        answered: if it is a sync, the disk has done nothing about it."""
        # Some cuts keep nearly all and some nearly nothing: one loss among many survivors is
        # as telling as one survivor among many losses.
        keep = chance.choice([0, 0.05, 0.5, 0.95, 1])
        tear = chance.choice([0, 0, 0.1])

        names = dict(self._names.durable)
        pending: list[Operation] = list(self._names.cached)
        if isinstance(under_way, Create | Delete):
            pending.append(under_way)
        for operation in pending:
            if chance.random() < keep:
                _change_names(names, operation)
        image = {}
        for name, file in names.items():
            content = bytearray()
            if file in self._files:  # else it is only just being created
                content[:] = self._files[file].durable
                pending = list(self._files[file].cached)
                if isinstance(under_way, Write | Truncate) and under_way.file == file:
                    pending.append(under_way)
                for operation in _survivors(pending, chance, keep, tear):
                    _change_file(content, operation)
            image[name] = bytes(content)
        return image


_Names: TypeAlias = dict[str, int]


class _Cached(Generic[T]):
    """What is durable for certain, and what has been done since."""

    def __init__(self, durable: T) -> None:
        self.durable = durable
        self.cached: list[Operation] = []
        self._before_last_sync = 0

    def add(self, operation: Operation) -> None:
        self.cached.append(operation)

    def sync(self, change: Callable[[T, Operation], None], is_late: bool) -> None:
        until = self._before_last_sync if is_late else len(self.cached)
        for operation in self.cached[:until]:
            change(self.durable, operation)
        del self.cached[:until]
        self._before_last_sync = len(self.cached)


def _change_names(names: _Names, operation: Operation) -> None:
    match operation:
        case Create(name, file):
            names[name] = file
        case Delete(name):
            names.pop(name, None)


def _change_file(content: bytearray, operation: Operation) -> None:
    match operation:
        case Write(_, offset, data):
            content.extend(bytes(max(0, offset - len(content))))
            content[offset : offset + len(data)] = data
        case Truncate(_, size):
            content.extend(bytes(max(0, size - len(content))))
            del content[size:]


def _survivors(
    cached: Iterable[Operation], chance: random.Random, keep: float, tear: float
) -> Iterator[Operation]:
    for operation in cached:
        for piece in _sectors(operation):
            if chance.random() < keep:
                yield piece
            elif isinstance(piece, Write) and chance.random() < tear:
                yield Write(piece.file, piece.offset, _torn(piece.data, chance))


def _sectors(operation: Operation) -> Iterator[Operation]:
    if not isinstance(operation, Write):
        yield operation
        return
    start, data = operation.offset, operation.data
    position = 0
    while position < len(data):
        end = min(len(data), position + SECTOR - (start + position) % SECTOR)
        yield Write(operation.file, start + position, data[position:end])
        position = end


def _torn(data: bytes, chance: random.Random) -> bytes:
    kept = data[: chance.randrange(len(data))]
    rest = len(data) - len(kept)
    return kept + chance.choice([b"", bytes(rest), chance.randbytes(rest)])
