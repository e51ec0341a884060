"""Rounds with real processes: one of each kind finds nothing wrong, and their judge bites."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import trio

from trio_jobs import open_jobs, run_once

from .child import Settings
from .child_client import CANARY, Client
from .child_handlers import Handlers, Task, steps
from .diary import Diary
from .fleet import Fleet, Process
from .process_evidence import connected, evidence_of, make_file
from .process_judge import judge
from .process_plan import KINDS, draw
from .process_round import Outcome, Round
from .processes import report_of

FOREVER = 2**62

BY_HAND = f'{{"tag":"{CANARY} by hand","naps":[]}}'

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(sys.platform != "linux", reason="limits are set from outside on Linux only")
def test_one_round_of_each_kind_with_real_processes_finds_nothing_wrong() -> None:
    # In an interpreter of its own: it forks, and this one may have threads.
    command = [sys.executable, "-m", "tests.simulation", "processes"]
    rounds = ["--rounds", "1", "--side-by-side", "3"]

    run = subprocess.run(
        [*command, *rounds], cwd=ROOT, capture_output=True, text=True, timeout=200, check=False
    )

    assert run.returncode == 0, run.stdout + run.stderr
    assert f"{len(KINDS)} rounds" in run.stdout


def test_a_plan_is_a_function_of_kind_and_seed() -> None:
    for kind in KINDS:
        assert draw(kind, 7) == draw(kind, 7)
        assert draw(kind, 7) != draw(kind, 8)


def test_a_process_that_keeps_the_write_lock_is_found_while_it_lives(tmp_path: Path) -> None:
    round = Round(draw("kill", 0), tmp_path, Fleet())
    round.prepare()

    with connected(tmp_path / "disk" / "jobs.db") as other:
        other.execute("BEGIN IMMEDIATE")
        [violation] = round.lock(within=0.01)
        other.execute("ROLLBACK")

    assert violation.invariant == "I14"
    assert round.lock(within=0.01) == []


# One process that has run one job, and then what it left behind is tampered with.


class Scene:
    """All that is left of that process."""

    def __init__(self, folder: Path) -> None:
        self.database = folder / "jobs.db"
        settings = Settings("A1", self.database, folder / "A1.jsonl", "seed")
        self.process = Process(settings, pid=1, log=folder / "A1.log", started_at=0)
        self.process.signalled = (signal.SIGTERM,)
        self.process.signalled_at = 1
        self.process.code = 0

    def write(self, event: str, **fields: Any) -> None:
        """One more line in its diary."""
        line = {"at": time.time_ns(), "process": "A1", "event": event, **fields}
        with self.process.settings.evidence.open("a") as diary:
            diary.write(json.dumps(line) + "\n")

    def erase(self, *events: str) -> None:
        """All such lines of its diary."""
        lines = self.process.settings.evidence.read_text().splitlines(keepends=True)
        kept = [line for line in lines if json.loads(line)["event"] not in events]
        self.process.settings.evidence.write_text("".join(kept))

    def change(self, *statements: str) -> None:
        """The file, behind everybody's back, but not behind that of the audit."""
        with connected(self.database) as connection:
            for statement in statements:
                connection.execute(statement)

    def take_second_job(self) -> None:
        """As the process does it, with a lease that is far from over."""
        self.write("call", number="by hand", verb="enqueue", kind="steps", payloads=[BY_HAND])
        self.change(
            f"INSERT INTO trio_jobs_job (id, kind, payload) VALUES (2, 'steps', '{BY_HAND}')",
            """
            UPDATE trio_jobs_job SET state = 2, attempt = 1, claims = 1, started_at = 1,
            lease_until = 1000000, owner = (SELECT owner FROM audit_owner) WHERE id = 2
            """,
        )
        self.write("answer", number="by hand", outcome="ok", ids=[2])

    def judged(self) -> set[str]:
        """Which invariants are violated."""
        evidence = evidence_of(self.database, [self.process])
        return {violation.invariant for violation in judge(evidence, [self.process])}


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    scene = Scene(tmp_path)
    make_file(scene.database)
    settings = scene.process.settings
    diary = Diary(settings.evidence, settings.name)
    handlers = Handlers(settings.seed, diary, lease=1.0, is_deadly=False).all
    diary.say_started()

    async def live() -> None:
        async with open_jobs(scene.database) as jobs:
            client = Client(jobs, diary.say, "A1")
            await client.enqueue(steps, Task(client.new_tag(), (0.0, 0.0)))
            await run_once(jobs, handlers)

    trio.run(live)
    diary.say("ended", code=0)
    diary.close()
    return scene


def test_what_a_good_process_leaves_behind_is_good(scene: Scene) -> None:
    assert scene.judged() == set()


def test_an_acknowledged_job_that_is_not_there_is_seen(scene: Scene) -> None:
    scene.write("call", number="9", verb="enqueue", kind="steps", payloads=[BY_HAND])
    scene.write("answer", number="9", outcome="ok", ids=[2])

    assert "I1" in scene.judged()


def test_a_job_nobody_asked_for_is_seen(scene: Scene) -> None:
    scene.erase("call", "answer")

    assert "I1" in scene.judged()


def test_a_change_of_what_has_ended_is_seen(scene: Scene) -> None:
    scene.change("UPDATE trio_jobs_job SET state = 4")

    assert "I2" in scene.judged()


def test_a_broken_round_is_told_with_the_story_of_the_job(scene: Scene) -> None:
    scene.change("UPDATE trio_jobs_job SET state = 4")
    evidence = evidence_of(scene.database, [scene.process])
    violations = judge(evidence, [scene.process])

    told = report_of(draw("kill", 1), Outcome(violations, evidence, [scene.process], 1.0))

    assert "A1: scope, sqlite3, full, sent [SIGTERM], ended with 0" in told
    assert "A1 calls enqueue" in told
    assert "A1: token 1: returned" in told
    assert "state 'succeeded' -> 'failed'" in told
    assert "I2: job 1: went from succeeded to failed" in told.partition("broken promises")[2]


def test_a_start_without_a_claim_is_seen(scene: Scene) -> None:
    scene.write("start", job=1, token=2, attempt=2)

    assert "I4" in scene.judged()


def test_a_success_of_a_handler_that_has_not_returned_is_seen(scene: Scene) -> None:
    scene.erase("end")

    assert "I6" in scene.judged()


def test_a_claim_that_is_ended_under_its_handler_is_seen(scene: Scene) -> None:
    scene.erase("ended")
    scene.process.killed_at, scene.process.code = FOREVER, -signal.SIGKILL
    scene.take_second_job()
    scene.write("start", job=2, token=1, attempt=1)
    scene.change(
        "INSERT INTO trio_jobs_past VALUES (2, 1, 1, 0, 0, 'lost', 'worker lost', NULL)",
        "UPDATE trio_jobs_job SET state = 1, lease_until = NULL WHERE id = 2",
    )

    assert "I5" in scene.judged()


def test_a_claim_that_is_ended_when_its_process_is_dead_is_in_order(scene: Scene) -> None:
    scene.take_second_job()
    scene.change(
        "INSERT INTO trio_jobs_past VALUES (2, 1, 1, 0, 0, 'lost', 'worker lost', NULL)",
        "UPDATE trio_jobs_job SET state = 1, lease_until = NULL WHERE id = 2",
    )

    assert scene.judged() == {"I16"}


def test_a_row_that_runs_after_an_orderly_stop_is_seen(scene: Scene) -> None:
    scene.erase("ended")
    scene.take_second_job()
    scene.write("ended", code=0)

    assert "I10" in scene.judged()


def test_an_exit_code_that_is_not_documented_is_seen(scene: Scene) -> None:
    scene.process.code = 1
    scene.process.listens_since = 0

    assert scene.judged() == {"exit"}


def test_a_traceback_in_the_log_is_seen(scene: Scene) -> None:
    scene.process.log.write_text("INFO hello\nTraceback (most recent call last):\n  File\n")

    assert scene.judged() == {"log"}


def test_a_traceback_that_is_foreseen_is_in_order(scene: Scene) -> None:
    scene.process.log.write_text(
        "WARNING job 1 (steps) raised while it was stopped\nTraceback (most recent call last):\n"
        "trio_jobs.LeaseLost: this attempt of job 1 (steps) is over\n"
    )

    assert scene.judged() == set()


def test_a_payload_in_the_log_is_seen(scene: Scene) -> None:
    scene.process.log.write_text(f"INFO decoding {CANARY} A1 1\n")

    assert scene.judged() == {"I18"}


def test_a_diary_may_end_anywhere(scene: Scene) -> None:
    lines = scene.process.settings.evidence.read_text().splitlines(keepends=True)
    scene.process.killed_at, scene.process.code = FOREVER, -signal.SIGKILL

    for length in range(len(lines)):
        scene.process.settings.evidence.write_text("".join(lines[:length]))
        scene.judged()
