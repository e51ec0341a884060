"""The command: what it prints, its exit codes, and `work` as a real process under signals."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest
import trio
import trio.testing
from click.testing import CliRunner, Result

import trio_jobs
from trio_jobs import Attempt, Fail, Job, Jobs, Kind, SqliteStore, State, _work, open_jobs, run_once
from trio_jobs.__main__ import main
from trio_jobs._work import work

T = TypeVar("T")

ROOT = Path(__file__).parent.parent

HANDLERS = """
import logging
import time
import trio
from trio_jobs import Kind

log = logging.getLogger("app")
nap = Kind("nap", float, str)
blocking = Kind("blocking", float, str)

@nap.handled_by
async def take_nap(attempt):
    log.info("job %d has begun", attempt.job_id)
    await trio.sleep(attempt.payload)
    return "slept"

@blocking.handled_by
async def block(attempt):
    log.info("job %d has begun", attempt.job_id)
    print("this is buffered")
    await trio.to_thread.run_sync(time.sleep, attempt.payload)
    return "blocked"

@blocking.handled_by
async def do_not_block(attempt):
    return "did not block"

HANDLERS = [take_nap, block]
TUPLE = (take_nap,)
NONE = []
MIXED = [take_nap, 3]
TWICE = [block, do_not_block]
NUMBER = 3
TEXT = "take_nap"

def make():
    return {take_nap}

async def make_async():
    return [take_nap]

async def generate():
    yield take_nap

async def unbound(attempt):
    pass
"""

nap = Kind("nap", float, str)
blocking = Kind("blocking", float, str)


@nap.handled_by
async def take_nap(attempt: Attempt[float, str]) -> str:
    raise NotImplementedError


@pytest.fixture
def database(tmp_path: Path) -> Path:
    return tmp_path / "jobs.db"


def using(database: Path, do: Callable[[Jobs], Awaitable[T]]) -> T:
    async def open_and_do() -> T:
        async with open_jobs(database) as jobs:
            return await do(jobs)

    return trio.run(open_and_do)


def command(*arguments: str | Path | int) -> Result:
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def as_json(*arguments: str | Path | int) -> Any:
    result = command(*arguments, "--json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


# Looking.


class Samples:
    """One job of each sort, by id."""

    greet = Kind("greet", str, list[str], retry=trio_jobs.Retry(attempts=2))

    def __init__(self, database: Path) -> None:
        self.ids: dict[str, int] = {}
        using(database, self._make)

    async def _make(self, jobs: Jobs) -> None:
        greet = self.greet

        @greet.handled_by
        async def answer(attempt: Attempt[str, list[str]]) -> list[str]:
            await trio.lowlevel.checkpoint()
            if attempt.payload == "refused":
                raise Fail("not today", retry=False)
            if attempt.payload == "broken":
                raise Fail("try again")
            return ["hello", attempt.payload[:1]]

        for payload in ("succeeded", "refused", "broken"):
            self.ids[payload] = (await jobs.enqueue(greet, payload, key=f"key {payload}")).id
        await run_once(jobs, [answer])
        await run_once(jobs, [answer], now=datetime.now(UTC) + timedelta(hours=1))
        self.ids["queued"] = (await jobs.enqueue(greet, "secret payload", delay=3600)).id
        self.ids["cancelled"] = (await jobs.enqueue(greet, "cancelled")).id
        await jobs.cancel(self.ids["cancelled"])


@pytest.fixture
def samples(database: Path) -> Samples:
    return Samples(database)


def test_list_prints_jobs_in_order_and_no_payload(samples: Samples, database: Path) -> None:
    result = command("list", "--db", database)

    assert result.exit_code == 0
    lines = [line for line in result.stdout.splitlines() if line.startswith("│")]
    cells = [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]
    assert [[*row[:5], row[7]] for row in cells] == [
        ["1", "greet", "succeeded", "1", "key succeeded", ""],
        ["2", "greet", "failed", "1", "key refused", "not today"],
        ["3", "greet", "dead", "2", "key broken", "try again"],
        ["4", "greet", "queued", "0", "", ""],
        ["5", "greet", "cancelled", "0", "", ""],
    ]
    assert "secret" not in result.stdout


def test_list_as_json_is_every_job_as_a_dict(samples: Samples, database: Path) -> None:
    listed = as_json("list", "--db", database)

    expected = using(database, lambda jobs: jobs.find())
    assert listed == [job.to_dict() for job in expected]


def test_list_chooses_by_state_kind_id_and_number(samples: Samples, database: Path) -> None:
    def ids(*options: str | int) -> list[int]:
        return [job["id"] for job in as_json("list", "--db", database, *options)]

    assert ids("--state", "dead") == [3]
    assert ids("--kind", "greet") == [1, 2, 3, 4, 5]
    assert ids("--kind", "other") == []
    assert ids("--after", 3) == [4, 5]
    assert ids("--limit", 2) == [1, 2]
    assert ids("--after", 1, "--limit", 2) == [2, 3]
    assert "--after 2" in command("list", "--db", database, "--limit", 2).stdout


def test_show_prints_a_job_with_its_result(samples: Samples, database: Path) -> None:
    result = command("show", 1, "--db", database)

    assert result.exit_code == 0
    assert '["hello", "s"]' in result.stdout
    assert as_json("show", 1, "--db", database)["result"] == ["hello", "s"]
    assert as_json("show", 3, "--db", database)["error"] == "try again"


def test_a_result_that_cannot_be_decoded_is_a_placeholder(samples: Samples, database: Path) -> None:
    execute(database, "UPDATE trio_jobs_job SET result = 'no JSON' WHERE id = 1")

    result = command("show", 1, "--db", database)

    assert result.exit_code == 0
    assert "(cannot be decoded)" in result.stdout
    assert as_json("show", 1, "--db", database)["result"] is None


def test_history_tells_of_every_start_that_did_not_succeed(
    samples: Samples, database: Path
) -> None:
    printed = command("history", 3, "--db", database).stdout
    past = as_json("history", 3, "--db", database)

    assert [(one["number"], one["claim"], one["outcome"]) for one in past] == [
        (1, 1, "failed"),
        (2, 2, "failed"),
    ]
    assert {one["error"] for one in past} == {"try again"}
    assert all(datetime.fromisoformat(one["ended_at"]).tzinfo is not None for one in past)
    assert printed.count("try again") == 2
    assert as_json("history", 1, "--db", database) == []


def test_stats_counts_each_state(samples: Samples, database: Path) -> None:
    counts = {state.value: 1 for state in State} | {"running": 0}

    assert as_json("stats", "--db", database) == counts
    assert as_json("stats", "--db", database, "--kind", "other") == dict.fromkeys(counts, 0)
    assert "succeeded" in command("stats", "--db", database).stdout


def test_text_from_the_table_is_escaped(database: Path) -> None:
    # As nothing here would store it, but other programs can write to the file.
    text = "[bold]text[/bold] \x1b]0;title\x07 :smile:\nnext\u202e\x9b"
    escaped = r"[bold]text[/bold] \x1b]0;title\x07 :smile:\nnext\u202e\x9b"
    using(database, lambda jobs: jobs.enqueue(nap, 0.0, key="key"))
    for table, columns in {
        "trio_jobs_job": ("kind", "key", "failure", "failure_type"),
        "trio_jobs_past": ("failure", "failure_type"),
    }.items():
        if table == "trio_jobs_past":
            execute(database, f"INSERT INTO {table} VALUES (1, 1, 1, 0, 0, 'failed', '', '')")
        for column in columns:
            execute(database, f"UPDATE {table} SET {column} = ?", text)
    execute(database, "UPDATE trio_jobs_job SET result = ?", json.dumps([text]))

    for arguments, times in {("list",): 4, ("show", 1): 5, ("history", 1): 2}.items():
        output = command(*arguments, "--db", database).stdout

        assert all(character == "\n" or character.isprintable() for character in output)
        shown = output.replace(r"\u001b", r"\x1b").replace(r"\u0007", r"\x07")  # as in JSON
        assert shown.count(escaped[:30]) == times, output
    [job] = as_json("list", "--db", database)
    assert {job["kind"], job["key"], job["error"], job["error_type"], *job["result"]} == {text}


def test_output_that_cannot_be_encoded_is_escaped(database: Path) -> None:
    snow = Kind("\N{SNOWMAN}", None)
    using(database, lambda jobs: jobs.enqueue(snow, None))

    done = subprocess.run(
        [sys.executable, "-m", "trio_jobs", "list", "--db", database],
        env={**environment(), "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert r"\u2603" in done.stdout


# Changing.


def test_retry_gives_a_new_life(samples: Samples, database: Path) -> None:
    assert command("retry", 3, "--db", database).stdout == "Job 3 is queued again.\n"
    assert as_json("show", 3, "--db", database)["status"] == "queued"
    assert as_json("retry", 2, "--db", database)["status"] == "queued"


def test_cancel_says_what_becomes_of_the_job(samples: Samples, database: Path) -> None:
    assert command("cancel", 4, "--db", database).stdout == "Job 4 was cancelled.\n"
    assert (
        command("cancel", 4, "--db", database).stdout
        == "Job 4 had already ended: it is cancelled.\n"
    )
    assert as_json("cancel", 1, "--db", database)["cancelled"] is False


# Errors.


@pytest.mark.parametrize(
    "arguments", [["show", 99], ["history", 99], ["cancel", 99], ["retry", 99]]
)
def test_a_job_that_is_not_there_is_one_line(
    arguments: list[str | int], samples: Samples, database: Path
) -> None:
    for more in ([], ["--json"]):
        result = command(*arguments, "--db", database, *more)

        assert result.exit_code == 1
        assert result.stdout == ""
        assert result.stderr == "Error: there is no job 99\n"


def test_a_state_that_does_not_allow_it_is_one_line(samples: Samples, database: Path) -> None:
    result = command("retry", 1, "--db", database)

    assert result.exit_code == 1
    assert result.stderr.startswith("Error: job 1 ")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "arguments", [["list"], ["stats"], ["show", 1], ["history", 1], ["retry", 1], ["cancel", 1]]
)
def test_a_file_that_is_not_there_is_an_error_and_is_not_made(
    arguments: list[str | int], database: Path
) -> None:
    result = command(*arguments, "--db", database)

    assert result.exit_code == 1
    assert result.stderr == f"Error: there is no file {database}\n"
    assert not database.exists()


@pytest.mark.parametrize("arguments", [["list"], ["work", "app_handlers:HANDLERS"]])
@pytest.mark.usefixtures("app_handlers")
def test_a_file_that_is_no_database_is_one_line(arguments: list[str], database: Path) -> None:
    database.write_bytes(b"this is no database" * 1000)

    result = command(*arguments, "--db", database)

    assert result.exit_code == 1
    [line] = result.stderr.splitlines()
    assert line.startswith("Error: ")
    assert str(database) in line


def test_the_database_can_be_named_by_the_environment(
    samples: Samples, database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRIO_JOBS_DB", str(database))

    assert len(as_json("list")) == 5
    monkeypatch.delenv("TRIO_JOBS_DB")
    assert command("list").exit_code == 2


@pytest.mark.parametrize("arguments", [["list"], ["work", "app_handlers:HANDLERS"], ["demo"]])
@pytest.mark.usefixtures("app_handlers")
def test_a_file_without_a_name_is_one_line(arguments: list[str]) -> None:
    result = command(*arguments, "--db", "")

    assert result.exit_code == 2
    last = result.stderr.splitlines()[-1]
    assert re.fullmatch("Error: Invalid value for '--db'.*: it must be the name of a file", last)


@pytest.mark.parametrize("arguments", ["list", "show 1", "stats", "list --json"])
def test_nothing_is_printed_where_the_output_is_closed(
    samples: Samples, database: Path, arguments: str
) -> None:
    done = subprocess.run(
        f"exec {sys.executable} -m trio_jobs {arguments} --db {database} >&-",
        shell=True,
        capture_output=True,
        text=True,
        cwd=ROOT,
    )

    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    "arguments",
    [
        *("list", "show 1", "stats", "history 3", "retry 3", "cancel 4"),
        *("list --json", "demo --db demo.db .", "list --help"),
    ],
)
def test_an_output_that_cannot_be_written_is_one_line(
    samples: Samples, database: Path, arguments: str
) -> None:
    with full_disk() as full:
        done = subprocess.run(
            [sys.executable, "-m", "trio_jobs", *arguments.split()],
            cwd=database.parent,
            env={**environment(), "TRIO_JOBS_DB": str(database)},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )

    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last == "Error: the output cannot be written: No space left on device"
    assert "Traceback" not in done.stderr


# Working.


def environment() -> dict[str, str]:
    others = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return {**others, "PYTHONPATH": str(ROOT)}


def run_process(*arguments: str | Path, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-m", "trio_jobs", *arguments],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


class Worker:
    """`trio-jobs work` as a process; its log is in a file that can be read meanwhile."""

    def __init__(self, folder: Path, database: Path) -> None:
        self.folder = folder
        self.database = database
        self.log = folder / "log"
        self.processes: list[subprocess.Popen[bytes]] = []
        (folder / "app_handlers.py").write_text(HANDLERS)

    def start(
        self,
        *options: str,
        handlers: str = "HANDLERS",
        reference: str | None = None,
        stdout: int | None = None,
    ) -> subprocess.Popen[bytes]:
        with self.log.open("wb") as log:
            process = subprocess.Popen(
                [
                    *(sys.executable, "-W", "error", "-m", "trio_jobs", "work"),
                    *(
                        reference or f"app_handlers:{handlers}",
                        "--db",
                        str(self.database),
                        *options,
                    ),
                ],
                cwd=self.folder,
                env=environment(),
                stdout=log if stdout is None else stdout,
                stderr=log,
            )
        self.processes.append(process)
        return process

    def wait_for(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 30
        while not condition():
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.01)

    def wait_for_log(self, text: str) -> None:
        self.wait_for(lambda: text in self.log.read_text())

    def wait_for_state(self, id: int, state: State) -> None:
        self.wait_for(lambda: self.job(id).state is state)

    def wait_for_handler(self, id: int) -> None:
        """A row is running before its handler is: a stop between the two hands it back."""
        self.wait_for_log(f"job {id} has begun")

    def enqueue(self, kind: Kind[float, str], payload: float) -> int:
        return using(self.database, lambda jobs: jobs.enqueue(kind, payload)).id

    def job(self, id: int) -> Job[object]:
        return using(self.database, lambda jobs: jobs.get(id))

    def outcomes(self, id: int) -> list[tuple[int, str]]:
        past = using(self.database, lambda jobs: jobs.history(id))
        return [(one.number, one.outcome) for one in past]


@pytest.fixture
def worker(tmp_path: Path, database: Path) -> Iterator[Worker]:
    worker = Worker(tmp_path, database)
    yield worker
    for process in worker.processes:
        process.kill()
        process.wait()


def execute(database: Path, sql: str, *values: str) -> None:
    connection = sqlite3.connect(database)
    with connection:
        connection.execute(sql, values)
    connection.close()


@pytest.fixture
def app_handlers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The module can be imported here."""
    (tmp_path / "app_handlers.py").write_text(HANDLERS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "app_handlers", raising=False)


@pytest.mark.parametrize("handlers", ["HANDLERS", "TUPLE", "take_nap", "make"])
def test_work_runs_jobs_of_the_handlers_it_is_given(worker: Worker, handlers: str) -> None:
    worker.start(handlers=handlers)
    worker.wait_for_log(f"WARNING trio_jobs: there was no file {worker.database}: it is new")

    id = worker.enqueue(nap, 0.0)

    worker.wait_for_state(id, State.SUCCEEDED)
    assert worker.job(id).result == "slept"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_d1_a_signal_lets_what_is_under_way_end_and_starts_nothing_more(
    worker: Worker, number: int
) -> None:
    running = [worker.enqueue(nap, 1.0) for _ in range(2)]
    queued = [worker.enqueue(nap, 1.0) for _ in range(5)]
    process = worker.start("--workers", "2", "--grace", "20")
    for id in running:
        worker.wait_for_handler(id)

    process.send_signal(number)

    assert process.wait(10) == 0
    jobs = [worker.job(id) for id in running + queued]
    assert [job.state for job in jobs] == [State.SUCCEEDED] * 2 + [State.QUEUED] * 5
    assert [job.attempt for job in jobs] == [1] * 2 + [0] * 5
    assert worker.log.read_text().splitlines()[-1].endswith("stopped")


@pytest.fixture
def _signals_as_before() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("_signals_as_before")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_while_others_keep_the_file_locked_is_a_stop_in_order(
    database: Path,
    number: int,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    patient = SqliteStore(database, busy_timeout=1000)
    monkeypatch.setattr(_work, "open_jobs", lambda path: open_jobs(patient))
    caplog.set_level(logging.INFO)
    others = sqlite3.connect(database, isolation_level=None)
    others.execute("CREATE TABLE user (id INTEGER)")
    others.execute("BEGIN EXCLUSIVE")

    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(
                partial(work, str(database), [take_nap], workers=1, lease=60, grace=10)
            )
            await trio.testing.wait_all_tasks_blocked()
            signal.raise_signal(number)

    others.close()
    assert [record.message for record in caplog.records] == [
        f"{signal.Signals(number).name}: stopping; once more cuts the grace",
        "stopped",
    ]
    assert not patient.is_open


def test_d2_when_the_grace_is_over_jobs_are_handed_back_at_once(worker: Worker) -> None:
    id = worker.enqueue(nap, 60.0)
    process = worker.start("--grace", "0.3")
    worker.wait_for_handler(id)

    process.terminate()

    assert process.wait(10) == 0
    job = worker.job(id)
    assert (job.state, job.attempt) == (State.QUEUED, 0)
    assert job.run_at <= datetime.now(UTC)
    assert worker.outcomes(id) == [(1, "interrupted")]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_cuts_the_grace(worker: Worker, number: int) -> None:
    id = worker.enqueue(nap, 60.0)
    process = worker.start("--grace", "60")
    worker.wait_for_handler(id)
    process.send_signal(number)
    worker.wait_for_log("stopping")

    process.send_signal(number)

    assert process.wait(20) == 0  # not after 60 s
    assert worker.job(id).state is State.QUEUED
    assert worker.outcomes(id) == [(1, "interrupted")]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_that_go_on_coming_do_not_change_how_a_stop_ends(
    worker: Worker, number: int
) -> None:
    id = worker.enqueue(nap, 60.0)
    process = worker.start("--grace", "60")
    worker.wait_for_handler(id)

    while process.poll() is None:
        process.send_signal(number)
        time.sleep(0.001)

    assert process.returncode == 0, worker.log.read_text()
    assert worker.outcomes(id) == [(1, "interrupted")]
    assert worker.log.read_text().splitlines()[-1].endswith("stopped")


def test_a_thread_of_the_application_does_not_keep_the_process_from_a_further_signal(
    worker: Worker,
) -> None:
    (worker.folder / "with_thread.py").write_text(
        "import threading, time\n"
        "from app_handlers import HANDLERS\n"
        "threading.Thread(target=time.sleep, args=(60,)).start()\n"
    )
    process = worker.start(reference="with_thread:HANDLERS")
    worker.wait_for_log("working on")
    process.terminate()
    worker.wait_for_log("INFO trio_jobs: stopped")
    assert process.poll() is None

    process.terminate()

    assert process.wait(20) == 0  # not after 60 s


def test_h3_a_thread_does_not_keep_the_process_and_its_job_is_taken_up_again(
    worker: Worker,
) -> None:
    stuck = worker.enqueue(blocking, 60.0)
    short = worker.enqueue(nap, 60.0)
    process = worker.start("--grace", "0.5", "--lease", "6")
    worker.wait_for_handler(stuck)
    worker.wait_for_handler(short)

    start = time.monotonic()
    process.terminate()

    assert process.wait(20) == 75  # not after 60 s
    assert time.monotonic() - start >= 2.5  # grace, and 2 s of clean-up
    assert worker.job(stuck).state is State.RUNNING
    assert worker.job(short).state is State.QUEUED
    log = worker.log.read_text()
    assert f"job {stuck} (blocking), attempt 1 cannot be cancelled" in log
    assert "with code 75" in log
    assert "this is buffered" in log

    worker.start("--lease", "1.5", handlers="do_not_block")
    worker.wait_for_state(stuck, State.SUCCEEDED)
    assert worker.job(stuck).result == "did not block"
    assert worker.outcomes(stuck) == [(1, "lost")]


@contextmanager
def full_disk() -> Iterator[int]:
    """A descriptor on which every write fails."""
    try:
        full = os.open("/dev/full", os.O_WRONLY)
    except OSError:
        pytest.skip("there is no /dev/full")
    yield full
    os.close(full)


@contextmanager
def closed_pipe() -> Iterator[int]:
    """A descriptor that nobody reads."""
    reading, writing = os.pipe()
    os.close(reading)
    yield writing
    os.close(writing)


@pytest.mark.parametrize("stdout", [full_disk, closed_pipe])
def test_what_cannot_be_printed_does_not_keep_the_process_of_a_stuck_handler(
    worker: Worker, stdout: Callable[[], AbstractContextManager[int]]
) -> None:
    stuck = worker.enqueue(blocking, 60.0)
    with stdout() as descriptor:
        process = worker.start("--grace", "0", stdout=descriptor)
    worker.wait_for_handler(stuck)

    process.terminate()

    assert process.wait(10) == 75


def test_a_thread_that_ends_in_time_has_its_result_stored(worker: Worker) -> None:
    id = worker.enqueue(blocking, 1.0)
    process = worker.start("--grace", "0")
    worker.wait_for_handler(id)

    process.terminate()

    assert process.wait(10) == 0
    assert worker.job(id).result == "blocked"


def test_the_exit_code_of_a_stuck_handler_is_documented() -> None:
    assert "exit code 75" in " ".join(command("work", "--help").stdout.split())


def test_the_log_is_one_line_a_record_and_goes_to_stderr(tmp_path: Path, database: Path) -> None:
    (tmp_path / "evil.py").write_text(
        "import os, signal\n"
        "from trio_jobs import Fail, Kind, Retry\n"
        "evil = Kind('evil', None, retry=Retry(attempts=1))\n"
        "@evil.handled_by\n"
        "async def fail(attempt):\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    raise Fail('one\\nERROR two\\u202e')\n"
    )
    using(database, lambda jobs: jobs.enqueue(Kind("evil", None), None))

    done = run_process("work", "evil:fail", "--db", database, folder=tmp_path)

    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    [dead] = [line for line in done.stderr.splitlines() if "is dead" in line]
    assert dead.endswith(r"one\nERROR two\u202e")
    assert "WARNING trio_jobs: job 1 (evil)" in dead


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("app_handlers", "'app_handlers' is not MODULE:HANDLERS, as in "),
        (":HANDLERS", "':HANDLERS' is not MODULE:HANDLERS, as in "),
        ("app_handlers:", "'app_handlers:' is not MODULE:HANDLERS, as in "),
        (".app_handlers:HANDLERS", "'.app_handlers:HANDLERS' is not MODULE:HANDLERS, as in "),
        ("no_such_module:HANDLERS", "there is no module 'no_such_module'"),
        ("app_handlers.no:HANDLERS", "there is no module 'app_handlers.no'"),
        ("app_handlers:NOWHERE", "module 'app_handlers' has no 'NOWHERE'"),
        ("app_handlers.py:TUPLE", "is a file, and a module is wanted: app_handlers:TUPLE$"),
        ("./app/handlers.py", "is a file, and a module is wanted: app.handlers:HANDLERS$"),
        ("app_handlers:NUMBER", "app_handlers:NUMBER must be a Handler, .* it gave int"),
        ("app_handlers:TEXT", "it gave str"),
        ("app_handlers:MIXED", "it gave int"),
        ("app_handlers:NONE", "is empty"),
        ("app_handlers:nap", "it gave Kind"),
        (
            "app_handlers:make_async",
            "is an async function, no Handler: write `def`, or, for .* `serve`",
        ),
        (
            "app_handlers:generate",
            "is an async function, no Handler: write `def`, or, for .* `serve`",
        ),
        (
            "app_handlers:unbound",
            "is an async function, no Handler: bind it with @kind.handled_by$",
        ),
        ("app_handlers:TWICE", "kind 'blocking' has two handlers: block and do_not_block$"),
    ],
)
@pytest.mark.usefixtures("app_handlers")
def test_handlers_that_cannot_be_had_are_one_line(
    database: Path, reference: str, message: str
) -> None:
    result = command("work", reference, "--db", database)

    assert result.exit_code == 2
    assert result.stdout == ""
    [line] = result.stderr.splitlines()
    assert line.startswith("Error: ")
    assert re.search(message, line)
    assert not database.exists()


@pytest.mark.parametrize(
    "option",
    [
        ("--workers", "0"),
        ("--workers", "99999999999999999999"),
        ("--grace", "-1"),
        ("--grace", "nan"),
        ("--lease", "0"),
        ("--lease", "inf"),
    ],
)
@pytest.mark.usefixtures("app_handlers")
def test_settings_that_cannot_work_are_one_line(database: Path, option: tuple[str, str]) -> None:
    result = command("work", "app_handlers:HANDLERS", "--db", database, *option)

    assert result.exit_code == 2
    [line] = result.stderr.splitlines()
    assert line.startswith(f"Error: {option[0][2:]} must be ")
    assert not database.exists()


def test_a_module_that_breaks_on_import_shows_where(tmp_path: Path, database: Path) -> None:
    (tmp_path / "broken.py").write_text("import no_such_thing\n")

    done = run_process("work", "broken:HANDLERS", "--db", database, folder=tmp_path)

    assert done.returncode == 2
    assert 'broken.py", line 1' in done.stderr
    assert done.stderr.splitlines()[-1] == "Error: module 'broken' cannot be imported"


@pytest.mark.parametrize(
    "factory",
    [
        "def make():\n    raise LookupError\n",
        "def make():\n    yield from ()\n    raise LookupError\n",
        "def make(settings):\n    pass\n",
    ],
    ids=["raises", "generator", "wants an argument"],
)
def test_a_function_that_breaks_instead_of_giving_handlers_is_named(
    tmp_path: Path, database: Path, factory: str
) -> None:
    (tmp_path / "broken.py").write_text(factory)

    done = run_process("work", "broken:make", "--db", database, folder=tmp_path)

    assert done.returncode == 2
    error = "TypeError" if "settings" in factory else "LookupError"
    assert f"\n{error}" in done.stderr
    assert done.stderr.splitlines()[-1] == f"Error: broken:make raised {error} instead of handlers"


def test_every_command_has_help() -> None:
    for name in ("work", "list", "show", "history", "retry", "cancel", "stats", "demo"):
        assert name in command("--help").stdout
        assert command(name, "--help").exit_code == 0
