"""A life: the time from one power cut to the next, on the files that the last one left.

Two simulated processes work on one file. Clients do what a script says, which is either the
one that has every kind of end in it or drawn from the seed; everything that was ever enqueued
has to end. What became known to anybody is in `facts`, what the disk was asked for in
`operations`, and so a cut at any point of this life can be judged after it.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import random
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from functools import partial
from typing import Final, TypeAlias

import apsw
import trio
from trio.testing import MockClock

import trio_jobs
from trio_jobs import (
    Attempt,
    Fail,
    Handler,
    Jobs,
    Kind,
    Retry,
    RetryLater,
    State,
    StateError,
    _checkpoints,
    _connections,
    constant,
)
from trio_jobs._batch import Write
from trio_jobs._model import Claim
from trio_jobs.testing import EPOCH

from .chance import scheduling
from .power_disk import Image
from .power_facts import NOTHING, Contents, Fact, Facts
from .power_store import Store, Synchronous, folder_with, image_of
from .vfs import Recorder

Step: TypeAlias = Callable[[Jobs], Awaitable[None]]

FILE: Final = "jobs.db"
_MAX_LOG: Final = 25_000
"""So small that every life has logs that begin anew, and checkpoints with and without the lock."""
_LAST: Final = 99
"""The second number of a result, greater than that of anything published."""
_LONGEST: Final = 600
"""Virtual seconds after which a job is stuck."""


@dataclass(frozen=True)
class Errand:
    does: str
    ballast: str = ""


errand = Kind("errand", Errand, list[int], timeout=4, retry=Retry(attempts=2, backoff=constant(1)))
errand_once = Kind(
    "errand once", Errand, list[int], timeout=4, retry=Retry(attempts=1), on_interrupt="fail"
)

ENDS: Final = (
    "returns", "publishes", "raises", "raises once", "refuses", "asks for later", "sleeps",
    "hangs", "enqueues",
)  # fmt: skip


class Life:
    """It is lived when it is made; the seed decides what happens, but for the script of every end.

    `earlier` is what was known before and must stay true, `start` what the file holds.
    """

    def __init__(
        self,
        seed: str,
        *,
        synchronous: Synchronous = "full",
        image: Image | None = None,
        start: Contents = NOTHING,
        unfinished: str | None = None,
        earlier: Sequence[Fact] = (),
        began_at: float = 0,
        boot: int = 0,
        is_script: bool = False,
    ) -> None:
        self.image: Image = {} if image is None else image
        self.synchronous: Synchronous = synchronous
        self.unfinished = unfinished
        """The commit that was under way when the power failed. A log that begins anew after a cut
        may have the same salt, and then its first frame, half written, can complete a frame that
        was torn. That commit was never denied, so it may still come, until there is another."""
        self.boot = boot
        self._began_at = began_at
        self._chance = random.Random(f"life {seed}")
        self._is_script = is_script
        self._numbers = itertools.count(1)
        self._jobs: list[Jobs] = []
        self._ids: list[int] = []
        self._watched: set[int] = set()
        self._last_known = max((fact.job for fact in earlier), default=0)
        with folder_with(self.image) as folder, _quiet(), _small_log():
            recorder = Recorder(folder)
            self.operations = recorder.operations
            self.files = dict(recorder.files)
            self.facts = Facts(self.operations, start, earlier, began_at)
            self._path = os.path.join(folder, FILE)
            self._vfs = recorder.name
            try:
                with scheduling(self._chance.getrandbits(32)):
                    trio.run(self._live, clock=MockClock(autojump_threshold=0))
            finally:
                recorder.unregister()
            self.left = image_of(folder)
            """The files, if the power stays on until the end."""

    def _open(self, path: str) -> apsw.Connection:
        """A connection through the recorder, that never waits for a lock."""
        connection = apsw.Connection(path, vfs=self._vfs)
        connection.set_busy_timeout(0)
        return connection

    async def _live(self) -> None:
        clock = trio.lowlevel.current_clock()
        assert isinstance(clock, MockClock)
        clock.jump(self._began_at)
        # It is the last to close, for now, so that the log goes and comes again.
        await self._visit(None)
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(2):
                self._jobs.append(await stack.enter_async_context(self._process()))
            async with trio.open_nursery() as runners:
                for jobs in self._jobs:
                    runners.start_soon(self._run, jobs)
                with trio.move_on_after(_LONGEST) as patience:
                    async with trio.open_nursery() as self._clients:
                        for jobs, steps in zip(self._jobs, self._steps(), strict=True):
                            self._clients.start_soon(self._client, jobs, steps)
                if patience.cancelled_caught:
                    self.facts.wrong.append("a job has no end, however long one waits")
                runners.cancel_scope.cancel()

    def _process(self) -> contextlib.AbstractAsyncContextManager[Jobs]:
        store = Store(
            self._path,
            self.synchronous,
            boot=self.boot,
            number=next(self._numbers),
            open=self._open,
            committed=self.facts.committed,
        )
        return trio_jobs.open_jobs(store, clock=_wall_clock)

    # Runners.

    async def _run(self, jobs: Jobs) -> None:
        """Serve, now and then stopped and begun again."""
        handlers: list[Handler] = [kind.handled_by(self._handle) for kind in (errand, errand_once)]
        while True:
            with trio.move_on_after(self._chance.choice([3, 8, 20])):
                await trio_jobs.serve(jobs, handlers, workers=3, lease=5, grace=0.5)

    async def _handle(self, attempt: Attempt[Errand, list[int]]) -> list[int]:
        id, token = attempt.job_id, attempt.token
        self.facts.started(id, token)
        match attempt.payload.does:
            case "publishes":
                for step in range(3):
                    await attempt.publish([token, step])
                    self.facts.published(id, [token, step])
                    await trio.sleep(0.3)
            case "raises":
                raise ValueError
            case "raises once" if attempt.number == 1:
                raise ValueError
            case "refuses":
                raise Fail("no", retry=False)
            case "asks for later" if token < 3:
                raise RetryLater(1)
            case "sleeps":
                await trio.sleep(3)
            case "hangs":
                await trio.sleep_forever()
            case "enqueues":
                await self._enqueue(attempt.jobs, "returns", key="child")
        return [token, _LAST]

    # Clients.

    def _steps(self) -> list[list[Step]]:
        """What each of the clients does, one after the other."""
        chance = self._chance
        ends: list[Step] = [partial(self._enqueue, does=does) for does in ENDS]
        others: list[Step] = [
            partial(self._enqueue, does="sleeps", kind=errand_once),
            partial(self._enqueue, does="sleeps", key="sleeper"),
            partial(self._enqueue, does="returns", delay=2, within=1),
            partial(self._enqueue, does="returns", delay=3, ballast=6_000),
            self._enqueue_many,
            self._enqueue_on,
            self._cancel,
            self._die,
            self._visit,
            self._read_for_long,
        ]
        if self._is_script:
            return [[*ends, self._cancel], [*others, self._enqueue_many]]
        count = 5 if self.boot == 0 else 1
        return [chance.choices(ends + others, k=chance.randint(1, count)) for _ in self._jobs]

    async def _client(self, jobs: Jobs, steps: Sequence[Step]) -> None:
        for job in await jobs.find(limit=1_000_000):
            self._watch(jobs, job.id)
        for step in steps:
            await step(jobs)
            await trio.sleep(self._chance.choice([0, 0, 0.2, 1]))

    async def _enqueue(
        self,
        jobs: Jobs,
        does: str,
        *,
        kind: Kind[Errand, list[int]] = errand,
        key: str | None = None,
        delay: float = 0,
        within: float | None = None,
        ballast: int = 0,
    ) -> None:
        payload = Errand(does, "x" * ballast)
        deadline = None if within is None else _now() + timedelta(seconds=within)
        job = await jobs.enqueue(kind, payload, key=key, delay=delay, deadline=deadline)
        self._added(jobs, job.id, kind, payload, key)

    async def _enqueue_many(self, jobs: Jobs) -> None:
        payloads = [Errand("returns", "y" * 3000) for _ in range(4)]
        keys = [None, "first", "second", None]
        added = await jobs.enqueue_many(errand, payloads, keys=keys)
        # With a key it may be somebody else's.
        self.facts.groups.append([added[0].id, added[-1].id])
        for job, payload, key in zip(added, payloads, keys, strict=True):
            self._added(jobs, job.id, errand, payload, key)

    async def _enqueue_on(self, jobs: Jobs) -> None:
        """Together with what the application itself writes."""
        await trio.lowlevel.checkpoint()
        payload = Errand("returns")
        connection = self._open(self._path)
        try:
            connection.execute("BEGIN IMMEDIATE")
            ids = [jobs.enqueue_on(connection, errand, payload) for _ in range(2)]
            connection.execute("COMMIT")
            self.facts.committed(connection)
        finally:
            connection.close()
        self.facts.groups.append(ids)
        for id in ids:
            self._added(jobs, id, errand, payload, None)

    async def _visit(self, jobs: Jobs | None) -> None:
        """A process that only enqueues, and is gone in good order."""
        payload = Errand("returns")
        async with self._process() as visitor:
            job = await visitor.enqueue(errand, payload)
            self._added(jobs, job.id, errand, payload, None)

    async def _read_for_long(self, jobs: Jobs) -> None:
        """Meanwhile checkpoints can only move a part of the log."""
        connection = self._open(self._path)
        try:
            connection.execute("BEGIN; SELECT count(*) FROM trio_jobs_job").fetchall()
            await trio.sleep(2)
        finally:
            connection.close()

    def _added(
        self,
        jobs: Jobs | None,
        id: int,
        kind: Kind[Errand, list[int]],
        payload: Errand,
        key: str | None,
    ) -> None:
        if id <= self._last_known and key is None:
            self.facts.wrong.append(f"job {id} is new, and {self._last_known} was in use")
        self.facts.added(id, kind.name, key, asdict(payload))
        if jobs is not None:
            self._watch(jobs, id)

    async def _cancel(self, jobs: Jobs) -> None:
        if self._ids:
            id = self._chance.choice(self._ids[-3:])
            asked_at = self.facts.position
            if await jobs.cancel(id):
                self.facts.cancelled(id, asked_at)

    async def _die(self, jobs: Jobs) -> None:
        """What a runner leaves that has claimed and is gone."""
        now = round(_wall_clock() * 1_000_000)
        claim = Claim(
            policies={kind.name: kind.policy for kind in (errand, errand_once)},
            limit=2,
            lost_limit=0,
            now=now,
            lease_now=now,
            lease_until=now + 2_000_000,
        )
        write = Write("claim", claim)
        jobs._bridge.submit(write)
        await jobs._bridge.outcome_of(write)

    def _watch(self, jobs: Jobs, id: int) -> None:
        if id not in self._watched:
            self._watched.add(id)
            self._ids.append(id)
            self._clients.start_soon(self._see_end, jobs, id)

    async def _see_end(self, jobs: Jobs, id: int) -> None:
        # Nobody else retries, so nothing comes between the end and our note of it.
        job = await jobs.wait_finished(id)
        self.facts.ended(job)
        if job.state is not State.SUCCEEDED and self._chance.random() < 0.3:
            claims = job._row.claims
            self.facts.retrying(id)
            try:
                await jobs.retry(id)
            except StateError:
                return  # a live job has its key
            if job.deadline is None:  # else it may have failed again without a start
                self.facts.retried(id, claims)
            self.facts.ended(await jobs.wait_finished(id))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Handlers that raise are logged; here they do it all the time."""
    logger = logging.getLogger("trio_jobs")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


@contextlib.contextmanager
def _small_log() -> Iterator[None]:
    before = _connections.MAX_LOG
    modules = [vars(_connections), vars(_checkpoints)]
    for constants in modules:
        constants["MAX_LOG"] = _MAX_LOG
    try:
        yield
    finally:
        for constants in modules:
            constants["MAX_LOG"] = before


def _wall_clock() -> float:
    """Given as a clock of its own, so that processes look for what others have done."""
    return EPOCH.timestamp() + trio.current_time()


def _now() -> datetime:
    return EPOCH + timedelta(seconds=trio.current_time())
