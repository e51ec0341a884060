"""Real processes for tests: heard line by line, signalled, waited for with a bound, never left
behind.

The first half is the test's side: `children()` gives a function that starts one, `Child` is what
it returns. The second half is the application such a process runs: its kinds and handlers, and a
function for each role it can play. A child says what it does as lines of JSON, each with the
instant at which it was said (Unix seconds); what it logs is kept for the failure report.
"""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, Protocol, TypeAlias

import trio

import trio_jobs
from trio_jobs import (
    Attempt,
    Fail,
    Jobs,
    Kind,
    Retry,
    Runner,
    SqliteStore,
    StoreError,
    TrioJobsError,
    constant,
    open_jobs,
)
from trio_jobs._identity import Process

# The test's side.

PATIENCE: Final = 20.0
"""Seconds until a test gives up: only a failing one waits for so long."""

Event: TypeAlias = dict[str, Any]
"""What a child said: "event" is its name, "at" the instant."""


class Child:
    """One process, which leads a group of its own."""

    def __init__(self, name: str, process: trio.Process) -> None:
        self.name = name
        self.events: list[Event] = []
        self.log: list[str] = []
        self._process = process
        self._news = trio.Event()
        self._readers = 0
        self._questions = 0

    def __repr__(self) -> str:
        return f"<Child {self.name}>"

    @property
    def pid(self) -> int:
        return self._process.pid

    async def event(self, name: str, *, within: float = PATIENCE, **fields: object) -> Event:
        """The first thing it said, or will say, that has this name and these fields."""
        with trio.move_on_after(within):
            while True:
                found = self.all(name, **fields)
                if found:
                    return found[0]
                if not self._readers:
                    break
                await self._news.wait()
        raise AssertionError(f"{self.name} never said {name} {fields}; it {self.report()}")

    def all(self, name: str, **fields: object) -> list[Event]:
        wanted = {"event": name, **fields}.items()
        return [event for event in self.events if wanted <= event.items()]

    def starts(self, job: int | None = None) -> list[Event]:
        """The starts of handlers it told of."""
        return self.all("start") if job is None else self.all("start", job=job)

    def logged(self, text: str) -> list[str]:
        return [line for line in self.log if text in line]

    async def logs(self, text: str, *, within: float = PATIENCE) -> str:
        """The first line of its log, so far or to come, that holds this text."""
        with trio.move_on_after(within):
            while self._readers and not self.logged(text):
                await self._news.wait()
        if self.logged(text):
            return self.logged(text)[0]
        raise AssertionError(f"{self.name} never logged {text!r}; it {self.report()}")

    def report(self) -> str:
        said = "\n  ".join(map(str, self.events[-30:]))
        return f"said\n  {said}\nand logged\n  " + "\n  ".join(self.log[-60:])

    def complaints(self) -> list[str]:
        """What it logged as a warning or worse, and tracebacks; not that the machine is busy."""
        return [
            line
            for line in self.log
            if line.startswith(("WARNING", "ERROR", "CRITICAL", "Traceback"))
            and "the event loop was blocked" not in line
        ]

    # Acting on it.

    async def tell(self, **message: object) -> None:
        """A line for its standard input."""
        assert self._process.stdin is not None
        await self._process.stdin.send_all(json.dumps(message).encode() + b"\n")

    async def ask(self, do: str, *, of: int, **arguments: object) -> list[Event]:
        """Ask so many agents to do something, all at the same instant; their answers."""
        self._questions += 1
        number = self._questions
        await self.tell(number=number, do=do, at=time.time() + 0.02, **arguments)
        return [await self.event("answer", number=number, agent=agent) for agent in range(of)]

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def kill(self) -> float:
        """`kill -9`; returns the instant before it."""
        now = time.time()
        self.send(signal.SIGKILL)
        return now

    async def kill_all(self) -> None:
        """`kill -9` it and all that it forked, and wait for what they had said."""
        os.killpg(self.pid, signal.SIGKILL)
        await self.exit_code()

    async def exit_code(self, *, within: float = PATIENCE) -> int:
        """Wait for its end, and for all that it said and logged."""
        with trio.move_on_after(within):
            code = await self._process.wait()
            while self._readers:
                await self._news.wait()
            return code
        raise AssertionError(f"{self.name} has not ended; it {self.report()}")

    async def freeze(self, db: Path) -> None:
        """SIGSTOP it at a moment when it does not hold the write lock of the file."""
        for _ in range(100):
            self.send(signal.SIGSTOP)
            os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOWAIT)  # noqa: ASYNC222 - microseconds
            if not is_locked(db):
                return
            self.send(signal.SIGCONT)
            await trio.sleep(0.002)
        raise AssertionError(f"{self.name} always holds the lock")

    def thaw(self) -> None:
        self.send(signal.SIGCONT)

    # What `children` does with it.

    async def _read(
        self, stream: trio.abc.ReceiveStream | None, hear: Callable[[str], None]
    ) -> None:
        assert stream is not None
        rest = b""
        async with stream:
            async for chunk in stream:
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    hear(line.decode(errors="replace"))
                self._tell()
        self._readers -= 1
        self._tell()

    def _hear(self, line: str) -> None:
        try:
            self.events.append(json.loads(line))
        except ValueError:
            self.log.append(f"Traceback? on stdout: {line}")

    def _tell(self) -> None:
        self._news.set()
        self._news = trio.Event()

    async def _bury(self) -> None:
        with suppress(ProcessLookupError):  # the group: a child may have children
            os.killpg(self.pid, signal.SIGKILL)
        await self._process.wait()
        if self._process.stdin is not None:
            await self._process.stdin.aclose()


class Start(Protocol):
    def __call__(
        self, name: str, role: str, *, hold: bool = False, **options: Any
    ) -> Awaitable[Child]:
        """Start a process in a role. `hold`: when this returns it has everything imported, and
        waits for the first `tell()`."""
        ...


@asynccontextmanager
async def children(db: Path) -> AsyncIterator[Start]:
    """Inside the block processes can be started on that file; after it there are none."""
    started: list[Child] = []
    path = [str(Path(file).parent) for file in (__file__, Path(trio_jobs.__file__).parent)]

    async with trio.open_nursery() as nursery:

        async def start(name: str, role: str, *, hold: bool = False, **options: Any) -> Child:
            process = await trio.lowlevel.open_process(
                # Imported, because what is run as a script is compiled each time.
                [
                    *(sys.executable, "-c", "import processes; processes.main()"),
                    *(name, role, str(db), json.dumps(options)),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
            )
            child = Child(name, process)
            started.append(child)
            child._readers = 2
            nursery.start_soon(child._read, process.stdout, child._hear)
            nursery.start_soon(child._read, process.stderr, child.log.append)
            if hold:
                await child.event("warm")
            else:
                await child.tell()
            return child

        try:
            yield start
        finally:
            with trio.CancelScope(shield=True):
                for child in started:
                    await child._bury()
            nursery.cancel_scope.cancel()


@contextmanager
def connected(db: Path) -> Iterator[sqlite3.Connection]:
    """The application's own connection to the file."""
    connection = sqlite3.connect(db, isolation_level=None, timeout=PATIENCE)
    try:
        connection.execute("PRAGMA wal_autocheckpoint = 0")
        yield connection
    finally:
        connection.close()


def is_locked(db: Path) -> bool:
    with connected(db) as connection:
        connection.execute("PRAGMA busy_timeout = 0")
        try:
            connection.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError:
            return True
        return False


@contextmanager
def write_lock(db: Path) -> Iterator[None]:
    """Hold the file's write lock, as an outside writer."""
    with connected(db) as connection:
        connection.execute("BEGIN IMMEDIATE")
        yield
        connection.execute("ROLLBACK")


def integrity(db: Path) -> str:
    with connected(db) as connection:
        [(answer,)] = connection.execute("PRAGMA integrity_check")
        return str(answer)


def record_final_writes(db: Path) -> None:
    """From now on each write of a final state leaves a record, whoever makes it."""
    with connected(db) as connection:
        connection.execute("CREATE TABLE final_writes (job INTEGER, claims INTEGER)")
        connection.execute(
            """
            CREATE TRIGGER record_final_write AFTER UPDATE ON trio_jobs_job WHEN new.state >= 3
            BEGIN INSERT INTO final_writes VALUES (new.id, new.claims); END
            """
        )


def final_writes(db: Path) -> list[int]:
    """The jobs of the recorded final writes."""
    with connected(db) as connection:
        return sorted(job for (job,) in connection.execute("SELECT job FROM final_writes"))


# The application: what it writes down.


@dataclass(frozen=True)
class Work:
    """What the handler is to do in the first attempt; a later one returns at once."""

    seconds: float = 0.0
    how: Literal["sleep", "block", "thread", "spin"] = "sleep"
    always: bool = False
    """In later attempts too."""


work = Kind("work", Work, str, retry=Retry(attempts=5, backoff=constant(0)))
"""Returns the name of the process that did it."""

careful = Kind("careful", Work, str, on_interrupt="fail")
"""The same, but it must not be repeated."""

poison = Kind("poison", None, retry=Retry(attempts=3, backoff=constant(0)))
"""Kills its process."""

hopeless = Kind("hopeless", None, retry=Retry(attempts=1))
"""Fails."""

moody = Kind("moody", float, str, retry=Retry(attempts=4, backoff=constant(0.01)))
"""Sleeps so many seconds, or fails, or wants to be started later."""

who = "?"


def say(event: str, **fields: object) -> None:
    # One write a line, in one piece up to PIPE_BUF: nothing is left in a buffer by kill -9.
    line = {"event": event, "at": time.time(), "who": who, "pid": os.getpid(), **fields}
    os.write(1, json.dumps(line).encode() + b"\n")


def say_start(attempt: Attempt[Any, Any]) -> None:
    say(
        "start",
        job=attempt.job_id,
        attempt=attempt.number,
        token=attempt.token,
        kind=attempt.kind,
    )


async def do_work(attempt: Attempt[Work, str]) -> str:
    say_start(attempt)
    seconds, how = attempt.payload.seconds, attempt.payload.how
    if attempt.number == 1 or attempt.payload.always:
        try:
            if how == "sleep":
                await trio.sleep(seconds)
            elif how == "block":
                block_the_loop(seconds)
            elif how == "thread":
                await trio.to_thread.run_sync(time.sleep, seconds)
            else:
                await trio.to_thread.run_sync(spin, seconds)
        except trio.Cancelled:
            say("cancelled", job=attempt.job_id)
            raise
    say("end", job=attempt.job_id, attempt=attempt.number)
    return who


def block_the_loop(seconds: float) -> None:
    time.sleep(seconds)


def spin(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


@poison.handled_by
async def do_poison(attempt: Attempt[None, None]) -> None:
    say_start(attempt)
    os._exit(137)


@hopeless.handled_by
async def do_hopeless(attempt: Attempt[None, None]) -> None:
    say_start(attempt)
    raise Fail("as always")


@moody.handled_by
async def do_moody(attempt: Attempt[float, str]) -> str:
    say_start(attempt)
    mood = random.Random(attempt.job_id * 1000 + attempt.token).random()
    if mood < 0.1:
        raise Fail("no luck")
    if mood < 0.2:
        raise trio_jobs.RetryLater(0.02)
    if mood < 0.25:
        raise Fail("for good", retry=False)
    await trio.sleep(attempt.payload)
    return who


HANDLERS: Final = {
    handler.kind.name: handler
    for handler in (
        work.handled_by(do_work),
        careful.handled_by(do_work),
        do_poison,
        do_hopeless,
        do_moody,
    )
}


# The application: the roles its processes play.


def serve(db: str, **options: Any) -> None:
    """Run jobs. SIGTERM: cancel the scope around `serve`. SIGUSR1: drain. `elsewhere`: as if it
    were on another machine, where nobody here can see whether it lives."""
    trio.run(partial(_serve, db, **options))


async def _serve(
    db: str,
    *,
    kinds: Sequence[str],
    driver: Literal["sqlite3", "apsw"] = "sqlite3",
    busy_timeout: float = 5.0,
    troubles: str | None = None,
    elsewhere: bool = False,
    **settings: Any,
) -> None:
    store = SqliteStore(db, driver=driver, busy_timeout=busy_timeout)
    if elsewhere:
        store.this_process = lambda: Process("another machine", os.getpid(), 1)
    handlers = [HANDLERS[kind] for kind in kinds]
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGUSR1) as signals:
        async with open_jobs(store) as jobs, trio.open_nursery() as around:
            async with trio.open_nursery() as serving:
                runner = await serving.start(partial(trio_jobs.serve, jobs, handlers, **settings))
                stop = serving.cancel_scope
                around.start_soon(_obey, signals, runner, stop)
                if troubles is not None:
                    around.start_soon(_make_trouble, jobs, random.Random(f"{troubles}/{who}"))
                say("serving")
            around.cancel_scope.cancel()
    numbers = runner.statistics()
    say("stopped", started=numbers.started, succeeded=numbers.succeeded, lost=numbers.lost)


async def _obey(signals: AsyncIterator[int], runner: Runner, serving: trio.CancelScope) -> None:
    async for number in signals:
        if number == signal.SIGTERM:
            serving.cancel()
        else:
            runner.drain()
            say("draining")


async def _make_trouble(jobs: Jobs, dice: random.Random) -> None:
    """Enqueue and cancel, as fast as people would."""
    mine: list[int] = []
    while True:
        job = await jobs.enqueue(
            moody, dice.uniform(0, 0.05), delay=dice.choice([None, None, 0.05])
        )
        say("enqueued", job=job.id)
        mine.append(job.id)
        if dice.random() < 0.15:
            victim = dice.choice(mine[-20:])
            say("cancel", job=victim, answer=await jobs.cancel(victim))
        await trio.sleep(dice.uniform(0, 0.02))


def supervise(db: str, *, count: int = 1, **options: Any) -> None:
    """Keep so many processes serving; one that dies is replaced at once. They are forked before
    any file is open, so they start without the time it takes to import."""
    processes = 0
    for number in range(1, 100):
        pid = _forked(partial(serve, db, **options), f"{who}{number}")
        processes += 1
        if processes == count:
            pid, status = os.wait()
            processes -= 1
            say("exited", child=pid, code=os.waitstatus_to_exitcode(status))


def enqueue_and_die(db: str, *, rounds: int) -> None:
    """Again and again a process that kills itself once its enqueue has returned."""

    for _ in range(rounds):
        pid = _forked(lambda: trio.run(_enqueue_and_die, db), who)
        _, status = os.waitpid(pid, 0)
        say("exited", code=os.waitstatus_to_exitcode(status))


async def _enqueue_and_die(db: str) -> None:
    async with open_jobs(db) as jobs:
        job = await jobs.enqueue(work, Work())
        say("enqueued", job=job.id)
        os.kill(os.getpid(), signal.SIGKILL)


async def _enqueue(db: str) -> int:
    async with open_jobs(db) as jobs:
        return (await jobs.enqueue(work, Work())).id


def agents(db: str, *, count: int) -> None:
    """So many processes; each does what every line of standard input asks for, at its instant."""
    inputs = []
    for number in range(count):
        reading, writing = os.pipe()
        _forked(partial(_agent_at, reading, db, number), f"{who} {number}")
        os.close(reading)
        inputs.append(writing)
    for line in sys.stdin:
        for writing in inputs:
            os.write(writing, line.encode())


def _agent_at(reading: int, db: str, agent: int) -> None:
    trio.run(_agent, reading, db, agent)


async def _agent(reading: int, db: str, agent: int) -> None:
    async with open_jobs(db) as jobs:
        say("ready", agent=agent)
        async for line in trio.wrap_file(os.fdopen(reading)):
            question = json.loads(line)
            await trio.sleep(max(0, question["at"] - time.time()))
            answer: dict[str, object] = {}
            try:
                if question["do"] == "enqueue":
                    job = await jobs.enqueue(work, Work(), key=question["key"])
                    answer["value"] = job.id
                elif question["do"] == "retry":
                    await jobs.retry(question["id"])
                else:
                    answer["value"] = await _visit(question["db"], enqueue=agent % 2 == 0)
            except TrioJobsError as error:
                answer |= {"error": type(error).__name__, "text": str(error)}
            say("answer", number=question["number"], agent=agent, **answer)


async def _visit(db: str, *, enqueue: bool) -> int | None:
    """Open a file that may not exist yet, and close it again."""
    async with open_jobs(db) as jobs:
        return (await jobs.enqueue(work, Work())).id if enqueue else None


# Forking with the file open.


def fork_beside(
    db: str, *, rounds: int, how: Literal["fork", "pool"], driver: Literal["sqlite3", "apsw"]
) -> None:
    """One thread enqueues and looks without a pause, while this one forks."""
    opened: list[Jobs] = []
    is_open, stop = threading.Event(), threading.Event()
    acknowledged: list[int] = []

    async def parent() -> None:
        async with open_jobs(SqliteStore(db, driver=driver)) as jobs:
            opened.append(jobs)
            is_open.set()
            while not stop.is_set() or not acknowledged:
                job = await jobs.enqueue(work, Work())
                acknowledged.append(job.id)
                assert (await jobs.get(job)).id == job.id

    thread = threading.Thread(target=trio.run, args=(parent,))
    thread.start()
    is_open.wait()
    if how == "fork":
        for _ in range(rounds):
            pid = _forked(partial(_try_everything, db, opened[0]), f"{who}'")
            _, status = os.waitpid(pid, 0)
            say("exited", code=os.waitstatus_to_exitcode(status))
    else:
        import multiprocessing  # here, because it takes all other processes a while

        with multiprocessing.get_context("fork").Pool(2) as pool:
            for _ in range(rounds):
                pool.apply(_try_everything, (db, None))
            pool.close()
            pool.join()
    stop.set()
    thread.join()
    say("done", acknowledged=acknowledged)


def _try_everything(db: str, jobs: Jobs | None) -> None:
    """What a forked process may want: its parent's Jobs, or the same file once more."""
    if jobs is not None:
        inherited = jobs
        _try("enqueue_on", lambda: inherited.enqueue_on(object(), work, Work()))
        _try("enqueue", lambda: trio.run(inherited.enqueue, work, Work()))
        _try("get", lambda: trio.run(inherited.get, 1))
    _try("open", lambda: trio.run(_enqueue, db))


def _try(what: str, call: Callable[[], object]) -> None:
    try:
        answer = repr(call())
    except StoreError as error:
        answer = f"{type(error).__name__}: {error}"
    say("tried", what=what, answer=answer)


def fork_inside(db: str) -> None:
    """Fork in the middle of an async function, and go on in the child as if it were nothing."""
    trio.run(_fork_inside, db)


async def _fork_inside(db: str) -> None:
    async with open_jobs(db) as jobs:
        await jobs.enqueue(work, Work())
        pid = os.fork()
        if pid == 0:
            signal.alarm(LONGEST_LIFE)
            verbs: dict[str, Callable[[], Coroutine[Any, Any, object]]] = {
                "enqueue": lambda: jobs.enqueue(work, Work()),
                "get": lambda: jobs.get(1),
                "cancel": lambda: jobs.cancel(1),
            }
            for what, verb in verbs.items():
                try:
                    answer = repr(await verb())
                except StoreError as error:
                    answer = f"{type(error).__name__}: {error}"
                say("tried", what=what, answer=answer)
            os._exit(0)
        with trio.move_on_after(5):
            await trio.to_thread.run_sync(os.waitpid, pid, 0, abandon_on_cancel=True)
        await jobs.enqueue(work, Work())
        say("done")


def _forked(call: Callable[[], object], name: str) -> int:
    """Call it in a forked process, which then ends like any other."""
    global who
    pid = os.fork()
    if pid:
        return pid
    who = name
    signal.alarm(LONGEST_LIFE)  # not inherited
    call()
    sys.exit(0)


ROLES: Final[dict[str, Callable[..., None]]] = {
    role.__name__: role
    for role in (serve, supervise, agents, enqueue_and_die, fork_beside, fork_inside)
}

LONGEST_LIFE: Final = 100
"""Seconds: also if nobody is left to end it."""


def main() -> None:
    global who
    who, role, db, options = sys.argv[1:]
    signal.alarm(LONGEST_LIFE)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    say("warm")
    sys.stdin.readline()
    ROLES[role](db, **json.loads(options))
