"""What mypy --strict and basedpyright say: right code passes and infers, wrong code does not.

The right code is tests/typing/accepted.py. The wrong code is the table below: each row must
be an error, in both checkers.
"""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import trio_jobs

ACCEPTED = Path(__file__).parent / "typing" / "accepted.py"
PACKAGE = Path(trio_jobs.__file__).parent
ROOT = PACKAGE.parent

REJECTED = {
    "a payload of another type": "await jobs.enqueue(resize, 5)",
    "a dict for a dataclass": 'await jobs.enqueue(resize, {"path": "cat.jpg"})',
    "None for a payload that is not optional": "await jobs.enqueue(plain, None)",
    "a value for a payload of None": "await jobs.enqueue(nothing, 1)",
    "a wrong member of an optional payload": 'await jobs.enqueue(optional, "1")',
    "a missing key of a TypedDict": "await jobs.enqueue(box, {})",
    "an unknown key of a TypedDict": 'await jobs.enqueue(box, {"size": 1, "color": 2})',
    "wrong items of a generic payload": 'await jobs.enqueue(page, Page(["a"]))',
    "one wrong payload among many": "await jobs.enqueue_many(plain, [1, 'a'])",
    "a wrong payload in the application's transaction": "jobs.enqueue_on(object(), plain, 'a')",
    "a positional option": "await jobs.enqueue(plain, 1, 5.0)",
    "a delay that is no number": 'await jobs.enqueue(plain, 1, delay="5")',
    "a run_at that is no datetime": "await jobs.enqueue(plain, 1, run_at=5.0)",
    "an unknown option": "await jobs.enqueue(plain, 1, retries=3)",
    "a name instead of a kind": 'await jobs.enqueue("plain", 1)',
    "the result taken for another type": (
        "text: str = (await jobs.enqueue(resize, Resize('a'))).unwrap()"
    ),
    "the result not checked for None": ("text: list[str] = (await jobs.get(1, resize)).result"),
    "the result of a bare id taken for known": (
        "text: list[str] = (await jobs.wait_finished(1)).unwrap()"
    ),
    "a found job taken for another": "jobs_found: list[Job[int]] = await jobs.find(kind=resize)",
    "a kind that is not that of the job": (
        "job: Job[int] = await jobs.get((await jobs.enqueue(resize, Resize('a'))).id, resize)"
    ),
    "a job that is changed": "(await jobs.get(1)).kind = 'other'",
    "a state that is a word": "await jobs.find(state='dead')",
    "a handler for another payload": "plain.handled_by(takes_str)",
    "a handler with another result": "plain.handled_by(returns_int)",
    "a handler that is not async": "plain.handled_by(is_sync)",
    "a handler without a parameter": "plain.handled_by(takes_nothing)",
    "a method that does not fit": "plain.handled_by(service.look_up)",
    "a partial that does not fit": "plain.handled_by(functools.partial(measure, 2))",
    "a class instead of an object": "nothing.handled_by(Service)",
    "a published value of another type": "await attempt.publish('a')",
    "a published list of other items": "await attempt.publish([1])",
    "a payload field that is not there": "attempt.payload.paths",
    "a function instead of a handler": "await trio_jobs.run_once(jobs, [returns_int])",
    "a kind instead of a handler": "await trio_jobs.run_once(jobs, [plain])",
    "one wrong handler among many": "await trio_jobs.serve(jobs, [make_thumbnails, returns_int])",
    "an unhandled that is an unknown word": "await trio_jobs.serve(jobs, [], unhandled='ignore')",
    "an unhandled of another form": "await trio_jobs.serve(jobs, [], unhandled=returns_int)",
    "a kind without a payload type": "Kind('kind')",
    "a payload type that is a value": "Kind('kind', 5)",
    "a kind with an unknown setting": "Kind('kind', int, attempts=5)",
    "an on_interrupt that is an unknown word": "Kind('kind', int, on_interrupt='maybe')",
    "a retry that is a number": "Kind('kind', int, retry=5)",
    "a backoff of another form": "Retry(backoff=lambda attempt: 'soon')",
    "a positional cap": "exponential(1, 2, 60)",
    "a Fail without text": "Fail()",
    "an unknown driver": "trio_jobs.SqliteStore('a.db', driver='sqlite')",
    "an attempt by hand with another payload": "testing.attempt(resize, 5)",
    "an attempt by hand with another published value": (
        "testing.attempt(resize, Resize('a'), published=5)"
    ),
}

FRAME = """
from __future__ import annotations
import functools
import trio_jobs
from trio_jobs import Attempt, Fail, Job, Jobs, Kind, Retry, exponential, testing
from accepted import Page, Resize, Service, box, make_thumbnails, measure, nothing, optional
from accepted import page, plain, resize, service

async def takes_str(attempt: Attempt[str, None]) -> None: ...
async def returns_int(attempt: Attempt[int, None]) -> int: return 1
async def takes_nothing() -> None: ...
def is_sync(attempt: Attempt[int, None]) -> None: ...

async def wrong(jobs: Jobs, attempt: Attempt[Resize, list[str]]) -> None:
    pass
"""


@dataclass(frozen=True)
class Verdict:
    """What one checker says: (file name, line) of each error, with its text."""

    errors: dict[tuple[str, int], str]

    def in_file(self, name: str) -> dict[int, str]:
        return {line: text for (file, line), text in self.errors.items() if file == name}


@pytest.fixture(scope="session")
def said(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> dict[str, str]:
    """What the checkers that are installed print of the right and the wrong code.

    The first of pytest-xdist's workers that comes here runs them, the others wait for it.
    """
    folder = tmp_path_factory.getbasetemp()
    if worker_id != "master":
        folder = folder.parent  # of all the workers
    results = folder / "typing.json"
    with (folder / "typing.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not results.exists():
            results.write_text(json.dumps(run_checkers(tmp_path_factory.mktemp("typing"))))
    answers: dict[str, str] = json.loads(results.read_text())
    return answers


def run_checkers(folder: Path) -> dict[str, str]:
    """Both at the same time."""
    (folder / "accepted.py").write_text(ACCEPTED.read_text())
    (folder / "rejected.py").write_text(
        FRAME + "".join(f"    {code}\n" for code in REJECTED.values())
    )
    (folder / "pyrightconfig.json").write_text(
        json.dumps({"typeCheckingMode": "strict", "extraPaths": [str(ROOT)], "include": ["."]})
    )
    commands = {
        "mypy": [
            *("--strict", "--config-file=", "--no-error-summary", "--show-absolute-path"),
            *("--no-pretty", "--cache-dir", str(folder / "cache")),
            *("accepted.py", "rejected.py"),
        ],
        "basedpyright": ["--outputjson", "--pythonpath", sys.executable],
    }
    running = {
        checker: subprocess.Popen(
            [sys.executable, "-m", checker, *arguments],
            cwd=folder,
            env={**os.environ, "MYPYPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for checker, arguments in commands.items()
        if importlib.util.find_spec(checker) is not None
    }
    return {checker: process.communicate()[0] for checker, process in running.items()}


def read_mypy(said: str) -> Iterator[tuple[tuple[str, int], str]]:
    for line in said.splitlines():
        found = re.fullmatch(r"(.*?):(\d+): error: (.*)", line)
        if found is not None:
            yield (Path(found[1]).name, int(found[2])), found[3]


def read_basedpyright(said: str) -> Iterator[tuple[tuple[str, int], str]]:
    for one in json.loads(said)["generalDiagnostics"]:
        if one["severity"] == "error":
            place = (Path(one["file"]).name, one["range"]["start"]["line"] + 1)
            yield place, f"{one['message']} ({one.get('rule')})"


@pytest.fixture(params=["mypy", "basedpyright"])
def verdict(request: pytest.FixtureRequest, said: dict[str, str]) -> Verdict:
    if request.param not in said:
        pytest.skip(f"{request.param} is not installed here")
    read = {"mypy": read_mypy, "basedpyright": read_basedpyright}[request.param]
    return Verdict(dict(read(said[request.param])))


def test_right_code_is_accepted_and_everything_infers(verdict: Verdict) -> None:
    assert verdict.in_file("accepted.py") == {}


@pytest.mark.parametrize("name", REJECTED)
def test_wrong_code_is_rejected(verdict: Verdict, name: str) -> None:
    line = FRAME.count("\n") + list(REJECTED).index(name) + 1

    assert line in verdict.in_file("rejected.py"), REJECTED[name]


def test_nothing_else_is_rejected(verdict: Verdict) -> None:
    first = FRAME.count("\n") + 1

    others = {
        place: text
        for place, text in verdict.errors.items()
        if place[0] != "rejected.py" or place[1] < first
    }
    assert others == {}


def test_right_code_also_runs() -> None:
    import trio

    main = runpy.run_path(str(ACCEPTED))["main"]

    trio.run(main)
