"""What README says is run: every Python block, and the commands it shares with CI."""

from __future__ import annotations

import dataclasses
import inspect
import os
import re
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import pytest
import trio
from stories import Script, finished, instant, serving
from trio.testing import MockClock

import trio_jobs
from trio_jobs import Attempt, Failure, Job, PastAttempt, Retry, Runner, State, Statistics
from trio_jobs._model import Outcome

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PYTHON = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
BLOCKS = [block for block in PYTHON if not block.startswith("# ")]
FILES = {
    name: text
    for block in PYTHON
    for name, text in re.findall(r"^# (\S+\.py)\b(.*?)(?=^# \S+\.py\b|\Z)", block, re.DOTALL | re.M)
}
"""Blocks, or parts of them, that say to what file they belong."""

NAMES: Mapping[str, type] = {"jobs": trio_jobs.Jobs, "attempt": Attempt, "runner": Runner}
TABLE = re.findall(r"^\| `(await )?([\w.]+)\((.*?)\)` \| ?(.*) \|$", README, flags=re.MULTILINE)


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_every_python_block_runs(number: int, tmp_path: Path) -> None:
    block = BLOCKS[number]
    script = tmp_path / f"test_block_{number}.py"
    script.write_text(block)
    is_test = "async def test_" in block
    command = ["-m", "pytest", "-q", "-o", "trio_mode=true"] if is_test else ["-W", "error"]

    done = subprocess.run(
        [sys.executable, *command, script.name],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr


def test_the_blocks_are_found() -> None:
    assert len(BLOCKS) == 4
    assert set(FILES) == {"app/kinds.py", "app/tasks.py", "crash.py"}


async def test_what_one_process_enqueues_the_command_works_on(tmp_path: Path) -> None:
    (tmp_path / "app").mkdir()
    for name, text in FILES.items():
        (tmp_path / name).write_text("#" + text)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    kinds: dict[str, Any] = {}
    exec(FILES["app/kinds.py"].partition("\n")[2], kinds)
    async with trio_jobs.open_jobs(tmp_path / "app.db") as jobs:
        await jobs.enqueue(kinds["mail"], "ada@example.org")
    [command] = re.findall(r"`trio-jobs (work [^`]*)`", README)
    with subprocess.Popen(  # noqa: ASYNC220 - nothing else runs here
        [sys.executable, "-m", "trio_jobs", *command.split()],
        cwd=tmp_path,
        env=env,
        stdout=subprocess.PIPE,
        text=True,
    ) as worker:
        assert worker.stdout is not None
        done = worker.stdout.readline()
        worker.terminate()
        code = worker.wait(timeout=60)

    assert (done, code) == ("to ada@example.org\n", 0)


# The reference.


def _meant(name: str) -> Callable[..., Any]:
    owner, _, member = name.rpartition(".")
    found: Callable[..., Any] = getattr(NAMES[owner] if owner else trio_jobs, member)
    return found


def _comparable(default: object) -> object:
    if isinstance(default, Retry):
        return (default.attempts, _comparable(default.backoff), default.jitter)
    if callable(default) and not isinstance(default, type):
        return [default(attempt) for attempt in range(1, 6)]
    return default


@pytest.mark.parametrize(("awaited", "name", "parameters", "gives"), TABLE)
def test_a_call_is_as_the_reference_says(
    awaited: str, name: str, parameters: str, gives: str
) -> None:
    meant = _meant(name)
    told: dict[str, Any] = {}
    exec(f"def told({parameters}): pass", dict(vars(trio_jobs)), told)
    actual = inspect.signature(meant)

    wanted = [
        (one.name, one.kind, _comparable(one.default))
        for one in inspect.signature(told["told"]).parameters.values()
    ]
    is_there = [
        (one.name, one.kind, _comparable(Retry() if one.name == "retry" else one.default))
        for one in actual.parameters.values()
        if one.name not in ("self", "task_status")
    ]
    assert is_there == wanted
    assert bool(awaited) == inspect.iscoroutinefunction(meant)
    for one in ("id", "job_or_id"):
        assert one not in actual.parameters or "Job[" in actual.parameters[one].annotation
    if name.startswith(("jobs.", "run_once")):
        plain = re.sub(r"\[(R|Any)\]", "", actual.return_annotation)
        assert gives.startswith(f"`{plain}`")


def test_the_reference_has_every_call() -> None:
    methods = {
        f"{variable}.{name}"
        for variable, cls in NAMES.items()
        for name, value in vars(cls).items()
        if inspect.isfunction(value) and not name.startswith("_")
    }

    told = {name for _, name, _, _ in TABLE}
    assert told == methods | {
        "Kind", "Retry", "SqliteStore", "open_jobs", "run_once", "serve",
    }  # fmt: skip


def test_the_reference_has_every_field() -> None:
    def told(pattern: str) -> set[str]:
        [text] = re.findall(pattern, README, flags=re.DOTALL)
        return set(re.findall(r"[`\"]([a-z_ ]+)[`\"]", text))

    def public(cls: type) -> set[str]:
        return {name for name in dir(cls) if not name.startswith("_")}

    past = {field.name for field in dataclasses.fields(PastAttempt)}
    assert told(r"`Statistics`:(.*?)\|") == {one.name for one in dataclasses.fields(Statistics)}
    assert told(r"`list\[PastAttempt\]`:(.*?)\|") == past | set(get_args(Outcome))
    assert told(r"A handler's `Attempt` has (.*?)\.\n") == public(Attempt)
    assert told(r"A `Job` has (`id.*?)\.\n") == public(Job)


def test_ci_runs_the_test_command() -> None:
    commands = re.findall(r"```sh\n(.*?)\n```", README, flags=re.DOTALL)

    assert (
        next(command for command in commands if "pytest" in command)
        in (ROOT / ".ci" / "run").read_text()
    )


async def test_the_statements_that_remove_old_jobs_leave_all_others(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    statements = [
        " ".join(statement.split()) for statement in re.findall(r"`(DELETE [^`]*)`", README)
    ]
    flaky = trio_jobs.Kind("flaky", None)
    async with trio_jobs.open_jobs(tmp_path / "jobs.db") as jobs:
        async with serving(jobs, flaky.handled_by(Script(ValueError(), None))):
            [old] = await finished(jobs, await jobs.enqueue(flaky, None))
        await trio.sleep(1000)
        async with serving(jobs, flaky.handled_by(Script(ValueError(), None))):
            [young] = await finished(jobs, await jobs.enqueue(flaky, None))
        waiting = await jobs.enqueue(flaky, None)
        connection = sqlite3.connect(tmp_path / "jobs.db", isolation_level=None)
        connection.execute(statements[0], (instant(500),))
        connection.execute(statements[1])
        connection.close()
        left = [job.id for job in await jobs.find()]
        past = len(await jobs.history(young))
        with pytest.raises(trio_jobs.JobNotFound):
            await jobs.history(old)

    assert left == [young.id, waiting.id]
    assert past == 1


async def test_a_payload_type_can_change_while_jobs_of_the_old_one_wait(
    autojump_clock: MockClock,
) -> None:
    @dataclass
    class Old:
        path: str

    @dataclass
    class New:
        path: str
        width: int = 320

    @dataclass
    class Wrong:
        path: str
        width: int

    old, new, wrong = (trio_jobs.Kind("resize", form) for form in (Old, New, Wrong))
    handle = Script(None)
    async with trio_jobs.open_jobs(":memory:") as jobs:
        waiting = await jobs.enqueue(old, Old("cat.jpg"))
        async with serving(jobs, wrong.handled_by(handle)):
            [refused] = await finished(jobs, waiting)
        async with serving(jobs, new.handled_by(handle)):
            [ended] = await finished(jobs, await jobs.retry(waiting))
        async with serving(jobs, old.handled_by(handle)):
            [unknown] = await finished(jobs, await jobs.enqueue(new, New("cat.jpg")))

    for job in (refused, unknown):
        assert (job.state, job.failure) == (State.FAILED, Failure("payload does not decode"))
    assert ended.state is State.SUCCEEDED


async def test_a_crash_of_a_process_under_a_virtual_clock_is_lived_through_in_a_test(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    file = tmp_path / "jobs.db"
    died = subprocess.run(  # noqa: ASYNC221 - nothing else runs yet
        [sys.executable, "-c", FILES["crash.py"], file],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=60,
        check=False,
    )
    step = trio_jobs.Kind("step", None)
    async with (
        trio_jobs.open_jobs(file) as jobs,
        serving(jobs, step.handled_by(Script(None))),
    ):
        [ended] = await finished(jobs, *await jobs.find())
        [past] = await jobs.history(ended)

    assert died.returncode == 1
    assert (ended.state, ended.attempt) == (State.SUCCEEDED, 2)
    assert past.outcome == "lost"
