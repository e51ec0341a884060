"""The same work by other queues on SQLite, each used as its documentation says.

With threads, as they have no other way, and with the durability of `synchronous=FULL`: that is
what SqliteHuey and persist-queue come with, litequeue has to be told. Their jobs do nothing,
and are done when the queue has been told so.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from .files import fresh_file
from .names import HUEY
from .rounds import Sample, Unavailable, Watch

PATIENCE: Final = 60.0
"""Seconds after which a peer is left out of the round."""


@dataclass(frozen=True)
class Peer:
    name: str
    package: str
    module: str
    drain: Callable[[int, int], Sample]
    """By so many workers, so many jobs."""
    enqueue: Callable[[int, int], Sample]
    """By so many threads, so many jobs."""


def installed() -> tuple[list[Peer], list[str]]:
    """Those that can be measured, and a line for each that cannot."""
    found = [peer for peer in PEERS if is_installed(peer.module)]
    missing = [
        f"{peer.name} is left out: {peer.package} is not installed"
        for peer in PEERS
        if peer not in found
    ]
    return found, missing


def is_installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


# SqliteHuey, with the consumer that it comes with. It needs no end: a task is taken out of the
# table when it starts, and a result of None is not stored.


def _drain_huey(workers: int, count: int) -> Sample:
    numbers = itertools.count(1)
    watch: list[Watch] = []
    is_done = threading.Event()

    def work(number: int, text: str) -> None:
        started = next(numbers)
        if started == 1:
            watch.append(Watch())
        if started == count:
            is_done.set()

    with fresh_file() as path:
        filling, task = _open_huey(path, work, fsync=False)
        for number in range(count):
            task(number, "a short text")
        filling.storage.close()
        huey, _ = _open_huey(path, work)
        consumer = huey.create_consumer(workers=workers)
        consumer.start()
        was_done = is_done.wait(PATIENCE)
        sample = watch[0].sample(count)
        consumer.stop(graceful=True)
        huey.storage.close()
        if not was_done:
            raise Unavailable(f"not done after {PATIENCE:.0f} s")
        return sample


def _enqueue_huey(threads: int, count: int) -> Sample:
    def work(number: int, text: str) -> None:
        pass

    with fresh_file() as path:
        huey, task = _open_huey(path, work)

        def put(some: int) -> None:
            for number in range(some):
                task(number, "a short text")

        sample = _in_threads(
            [partial(put, _part(count, one, threads)) for one in range(threads)], count
        )
        huey.storage.close()
        return sample


def _open_huey(path: Path, work: Callable[[int, str], None], **settings: Any) -> tuple[Any, Any]:
    from huey import SqliteHuey

    huey = SqliteHuey(filename=str(path), **settings)
    return huey, huey.task()(work)


# litequeue: a queue object for each thread, because transactions belong to its connection.


def _drain_litequeue(workers: int, count: int) -> Sample:
    with fresh_file() as path:
        queues = [_open_litequeue(path) for _ in range(workers)]
        queues[0].conn.execute("BEGIN")
        for number in range(count):
            queues[0].put(_text(number))
        queues[0].conn.execute("COMMIT")

        def work(queue: Any) -> None:
            while (message := queue.pop()) is not None:
                json.loads(message.data)
                queue.done(message.message_id)

        sample = _in_threads([partial(work, queue) for queue in queues], count)
        for queue in queues:
            queue.close()
        return sample


def _enqueue_litequeue(threads: int, count: int) -> Sample:
    with fresh_file() as path:
        queues = [_open_litequeue(path) for _ in range(threads)]

        def put(some: int, queue: Any) -> None:
            for number in range(some):
                queue.put(_text(number))

        works = [partial(put, _part(count, one, threads), queues[one]) for one in range(threads)]
        sample = _in_threads(works, count)
        for queue in queues:
            queue.close()
        return sample


def _open_litequeue(path: Path) -> Any:
    from litequeue import LiteQueue

    queue = LiteQueue(path)
    queue.conn.execute("PRAGMA synchronous = FULL")
    return queue


# persist-queue: one queue object for all threads.


def _drain_persist_queue(workers: int, count: int) -> Sample:
    with fresh_file() as path:
        queue = _open_persist_queue(path)
        for number in range(count):
            queue.put(_text(number))

        def work() -> None:
            from persistqueue import Empty

            while True:
                try:
                    item = queue.get(block=False)
                except Empty:
                    return
                json.loads(item)
                queue.ack(item)

        sample = _in_threads([work] * workers, count)
        queue.close()
        return sample


def _enqueue_persist_queue(threads: int, count: int) -> Sample:
    with fresh_file() as path:
        queue = _open_persist_queue(path)

        def put(some: int) -> None:
            for number in range(some):
                queue.put(_text(number))

        sample = _in_threads(
            [partial(put, _part(count, one, threads)) for one in range(threads)], count
        )
        queue.close()
        return sample


def _open_persist_queue(path: Path) -> Any:
    from persistqueue import SQLiteAckQueue

    return SQLiteAckQueue(str(path), multithreading=True)


PEERS: Final = [
    Peer(HUEY, "huey", "huey", _drain_huey, _enqueue_huey),
    Peer("litequeue", "litequeue", "litequeue", _drain_litequeue, _enqueue_litequeue),
    Peer(
        "persist-queue",
        "persist-queue",
        "persistqueue",
        _drain_persist_queue,
        _enqueue_persist_queue,
    ),
]


def _in_threads(works: Sequence[Callable[[], None]], count: int) -> Sample:
    """Let threads do these things, all from the same moment on, until the last is through."""
    failed: list[Exception] = []
    barrier = threading.Barrier(len(works) + 1)

    def run(work: Callable[[], None]) -> None:
        barrier.wait()
        try:
            work()
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=[work]) for work in works]
    for thread in threads:
        thread.start()
    barrier.wait()
    watch = Watch()
    for thread in threads:
        thread.join()
    sample = watch.sample(count)
    if failed:
        raise Unavailable(f"{type(failed[0]).__name__}: {failed[0]}")
    return sample


def _part(count: int, one: int, threads: int) -> int:
    """How many of the jobs are this thread's."""
    return (count + one) // threads


def _text(number: int) -> str:
    return json.dumps({"number": number, "text": "a short text"})
