"""The store of a simulated process, through the recorder, and the folder it is in."""

from __future__ import annotations

import contextlib
import os
import random
import tempfile
from collections.abc import Callable, Hashable, Iterator
from typing import Final, Literal, TypeAlias

import apsw

from trio_jobs import SqliteStore
from trio_jobs._drivers import ApswConnection, Record, Values
from trio_jobs._identity import Process

from .power_disk import Image

Synchronous: TypeAlias = Literal["full", "normal"]

_HARBOUR: Final = "/dev/shm" if os.path.isdir("/dev/shm") else None


class Store(SqliteStore):
    """The one of process `number` since the machine was booted for the `boot`-th time."""

    def __init__(
        self,
        path: str,
        synchronous: Synchronous,
        *,
        boot: int,
        number: int,
        open: Callable[[str], apsw.Connection],
        committed: Callable[[apsw.Connection], None],
    ) -> None:
        super().__init__(path, synchronous=synchronous, driver="apsw")
        self.inline = True
        self.random = random.Random(number)
        self.connect = lambda path: Witness(open(path), committed)
        self.sleep = _never
        # After a cut nobody can know of those before it that they are dead.
        self.this_process = lambda: Process(f"boot {boot}", number, 1)
        self.is_dead = lambda process, here: False
        self._boot = boot
        self._number = number

    def open(self) -> None:
        super().open()
        # Its own name has the process's id in it, and so is another one in every run.
        self._name = f"{self._boot}-{self._number}"

    @property
    def identity(self) -> Hashable:
        """One for each: processes do not hear each other."""
        return (super().identity, self._number)


class Witness(ApswConnection):
    """Says what was committed."""

    def __init__(
        self, connection: apsw.Connection, committed: Callable[[apsw.Connection], None]
    ) -> None:
        super().__init__(connection)
        self._native = connection
        self._committed = committed

    def execute(self, sql: str, values: Values = ()) -> list[Record]:
        records = super().execute(sql, values)
        if sql == "COMMIT":
            self._committed(self._native)
        return records


def _never(seconds: float) -> None:
    raise AssertionError("nobody holds a lock while another one runs")


@contextlib.contextmanager
def folder_with(image: Image) -> Iterator[str]:
    """A folder with these files, for as long as the block."""
    with tempfile.TemporaryDirectory(dir=_HARBOUR) as folder:
        for name, content in image.items():
            with open(os.path.join(folder, name), "wb") as file:
                file.write(content)
        yield folder


def image_of(folder: str) -> Image:
    image = {}
    for name in os.listdir(folder):
        with open(os.path.join(folder, name), "rb") as file:
            image[name] = file.read()
    return image
