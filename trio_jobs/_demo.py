"""`trio-jobs demo`, the example to read first: it finds duplicate files below a folder.

One job walks the tree and enqueues a job for every file; each of those hashes its file. All
of it is in one database: killed at any moment and started again with the same database, the
search goes on, and what was hashed is not hashed again. A database holds one search, and a
file that changes after it was hashed keeps its result there.
"""

from __future__ import annotations

import hashlib
import logging
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice

import click
import trio
from rich.console import Console
from rich.progress import Progress

from trio_jobs import Attempt, Fail, Job, Jobs, Kind, Runner, State, Statistics, open_jobs, serve

BATCH = 500  # files found between two transactions
CHUNK = 1 << 20  # bytes hashed between two looks at whether to stop
LEASE = 3.0  # seconds until a killed search, started again, takes up what it had in hand

_log = logging.getLogger("trio_jobs")

Inode = tuple[int, int]  # device and number: what a file is, whatever its names are


@dataclass(frozen=True)
class Hashed:
    digest: str
    size: int
    inode: Inode


# Paths are bytes, because the name of a file need not be text.
walk_folder = Kind("walk folder", bytes, int)
hash_file = Kind("hash file", bytes, Hashed)


@dataclass(frozen=True)
class Report:
    files: list[Job[Hashed]]
    statistics: Statistics
    seconds: float


async def find_duplicates(folder: bytes, database: str, workers: int, console: Console) -> Report:
    """Search, or go on with the search that is in `database`."""
    finder = Finder(database, workers)
    handlers = [walk_folder.handled_by(finder.walk), hash_file.handled_by(finder.hash)]
    async with open_jobs(database) as jobs, trio.open_nursery() as nursery:
        walk = await the_walk(jobs, folder)
        begin = trio.current_time()
        runner = await nursery.start(
            partial(serve, jobs, handlers, workers=workers, lease=LEASE, grace=1)
        )
        async with trio.open_nursery() as display:
            if console.is_terminal:
                display.start_soon(show_progress, jobs, walk, runner, console)
            (await jobs.wait_finished(walk)).unwrap()
            while unfinished := [job for job in await files_so_far(jobs) if not job.state.is_final]:
                await jobs.wait_finished(unfinished[-1])
            display.cancel_scope.cancel()
        files = await files_so_far(jobs)
        runner.drain()
    return Report(files, runner.statistics(), trio.current_time() - begin)


async def the_walk(jobs: Jobs, folder: bytes) -> Job[int]:
    """The job that walks: the one this database has, or a new one."""
    for walk in await jobs.find(kind=walk_folder, limit=1):
        if walk.key != key_of(folder):
            raise click.ClickException(
                f"this database holds the search of {walk.key}; give another --db"
            )
        is_broken = walk.state.is_final and walk.state is not State.SUCCEEDED
        return await jobs.retry(walk) if is_broken else walk
    return await jobs.enqueue(walk_folder, folder, key=key_of(folder))


async def files_so_far(jobs: Jobs) -> list[Job[Hashed]]:
    """The job of every file that was found."""
    files: list[Job[Hashed]] = []
    last = 0
    while page := await jobs.find(kind=hash_file, after=last, limit=BATCH):
        files += page
        last = page[-1].id
    return files


async def show_progress(jobs: Jobs, walk: Job[int], runner: Runner, console: Console) -> None:
    """A bar, until cancelled."""
    counts = await jobs.counts()
    before = sum(count for state, count in counts.items() if state.is_final)
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("hashing", total=None)
        while True:
            did = runner.statistics()
            files = (await jobs.get(walk)).result  # what it published last
            total = None if files is None else files + 1
            bar.update(task, completed=before + did.succeeded + did.failed, total=total)
            await trio.sleep(0.1)


class Finder:
    """The two handlers, and what they share."""

    def __init__(self, database: str, workers: int) -> None:
        self.database = database
        self.threads = trio.CapacityLimiter(workers)

    async def walk(self, attempt: Attempt[bytes, int]) -> int:
        """Enqueue a job for every file, and publish how many there are so far."""
        # An earlier attempt may have been killed on its way: what it enqueued is there.
        known = {job.key for job in await files_so_far(attempt.jobs)}
        files = files_below(attempt.payload, self.database)
        while found := await trio.to_thread.run_sync(
            list, islice(files, BATCH), limiter=self.threads
        ):
            new = {key: path for path in found if (key := key_of(path)) not in known}
            await attempt.jobs.enqueue_many(hash_file, new.values(), keys=new.keys())
            known.update(new)
            await attempt.publish(len(known))
        return len(known)

    async def hash(self, attempt: Attempt[bytes, Hashed]) -> Hashed:
        try:
            return await trio.to_thread.run_sync(
                read_and_hash, attempt.payload, self.database, limiter=self.threads
            )
        except OSError as error:
            raise Fail(f"cannot be read: {error.strerror}", retry=False) from None


def files_below(folder: bytes, database: str) -> Iterator[bytes]:
    """Every regular file but the database itself, following no links. For a thread."""
    folders, own = [folder], own_files(database)
    while folders:
        folder = folders.pop()
        try:
            entries = list(os.scandir(folder))
        except OSError as error:
            _log.warning("left out, %s cannot be read: %s", key_of(folder), error.strerror)
            continue
        for entry in entries:
            trio.from_thread.check_cancelled()
            if entry.is_dir(follow_symlinks=False):
                folders.append(entry.path)
            elif entry.is_file(follow_symlinks=False) and inode_of(entry.path) not in own:
                yield entry.path


def read_and_hash(path: bytes, database: str) -> Hashed:
    """For a thread."""
    status = os.lstat(path)
    inode = (status.st_dev, status.st_ino)
    if not stat.S_ISREG(status.st_mode) or inode in own_files(database):
        raise Fail("is no longer the file that was found", retry=False)
    digest, size = hashlib.blake2b(digest_size=32), 0
    with open(path, "rb") as file:
        # Not further than it was long: some files grow as fast as they are read.
        while chunk := file.read(min(CHUNK, status.st_size - size)):
            trio.from_thread.check_cancelled()
            digest.update(chunk)
            size += len(chunk)
    return Hashed(digest.hexdigest(), size, inode)


def own_files(database: str) -> set[Inode | None]:
    """Never to be opened: closing one of them again would drop SQLite's locks on it."""
    return {inode_of(database + suffix) for suffix in ("", "-wal", "-shm")} - {None}


def inode_of(path: str | bytes) -> Inode | None:
    """None if it is gone."""
    try:
        status = os.lstat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def key_of(path: bytes) -> str:
    """A path as text, each path another one, whatever bytes it is made of."""
    return path.replace(b"\\", rb"\\").decode(errors="backslashreplace")
