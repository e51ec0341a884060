"""What README says is run: every Python block, and the commands it shares with CI."""

from __future__ import annotations

import os
import re
import sqlite3
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import trio
from stories import Script, finished, instant, serving
from trio.testing import MockClock

import trio_jobs
from trio_jobs import Failure, State

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


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


CRASH = """
import os, sys, trio, trio_jobs
from trio.testing import MockClock

step = trio_jobs.Kind("step", None)

@step.handled_by
async def crash(attempt):
    os._exit(1)

async def main():
    async with trio_jobs.open_jobs(sys.argv[1]) as jobs, trio.open_nursery() as nursery:
        await nursery.start(trio_jobs.serve, jobs, [crash])
        await jobs.enqueue(step, None)

trio.run(main, clock=MockClock(autojump_threshold=0))
"""


async def test_a_crash_of_a_process_under_a_virtual_clock_is_lived_through_in_a_test(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    file = tmp_path / "jobs.db"
    died = subprocess.run(  # noqa: ASYNC221 - nothing else runs yet
        [sys.executable, "-c", CRASH, file],
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
