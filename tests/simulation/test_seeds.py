"""Some runs decided by chance, and all that ever failed; and that a seed decides all of a run."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner
from stories import TIMES

from trio_jobs import _agenda, _lifecycle
from trio_jobs._model import Failure

from . import report, runs
from .__main__ import main
from .coverage import NAMES
from .flavours import draw
from .kept import KEPT, KEPT_WITH_FLAVOUR
from .plan import CANARY, draw_ordinary
from .runs import run
from .shrink import shrink, smallest

SEEDS = range(20 * TIMES)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_run_decided_by_chance_keeps_all_promises(seed: int) -> None:
    assert not run(draw(seed)).violations


@pytest.mark.parametrize("seed", KEPT)
def test_a_run_that_failed_once_keeps_all_promises(seed: int) -> None:
    assert not run(draw_ordinary(seed)).violations


@pytest.mark.parametrize("seed", KEPT_WITH_FLAVOUR)
def test_a_run_with_a_flavour_that_failed_once_keeps_all_promises(seed: int) -> None:
    assert not run(draw(seed)).violations


def test_a_seed_decides_every_statement_of_a_run_also_in_another_interpreter() -> None:
    seeds = range(4)
    here = [run(draw(seed), digests=True).digest for seed in seeds]
    again = [run(draw(seed), digests=True).digest for seed in seeds]
    code = (
        "from simulation.flavours import draw; from simulation.runs import run;"
        f"print(*(run(draw(seed), digests=True).digest for seed in {seeds}))"
    )
    tests = str(Path(__file__).parents[1])
    path = os.pathsep.join([tests, *filter(None, sys.path)])
    environment = os.environ | {"PYTHONHASHSEED": "1", "PYTHONPATH": path}
    other = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )

    assert here == again == other.stdout.split()
    assert len(set(here)) == len(seeds)


def test_the_worlds_processes_do_not_run_while_they_are_frozen() -> None:
    result = next(
        result
        for result in (run(draw(seed)) for seed in range(200))
        if any(fault.what == "freeze" for fault in result.evidence.history.faults)
    )

    history = result.evidence.history
    frozen = [fault for fault in history.faults if fault.what == "freeze"]
    killed = {life.process: life.killed_at for life in history.lives if life.killed_at}
    for fault in frozen:
        until = min(fault.until or fault.at, killed.get(fault.process or "", fault.until or 0))
        instant = fault.at + 1_000_000  # what was to run at that instant still does
        assert not [
            step
            for step in result.evidence.audit.steps
            if step.who == fault.process and instant < step.at < until
        ]


def test_a_stop_is_known_to_have_ended_also_if_it_cancels_all_that_its_process_does() -> None:
    stops = run(draw(0)).evidence.history.stops

    assert [stop.is_hurried for stop in stops if stop.process.startswith("healer")] == [True]
    assert stops[-1].ended_at is not None


def test_a_runner_that_gets_there_but_late_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    plans = [dataclasses.replace(draw(seed), is_visited=False) for seed in range(2)]
    monkeypatch.setattr(runs, "HEALTHY", dataclasses.replace(runs.HEALTHY, poll=600.0))
    monkeypatch.setattr(_agenda.Agenda, "next_instant", lambda self, **known: None)

    violations = [violation for plan in plans for violation in run(plan).violations]

    assert {violation.invariant for violation in violations} == {"I16"}
    assert all(violation.text.startswith("ended only at ") for violation in violations)


def test_what_a_run_does_not_fail_without_is_left() -> None:
    tried: list[Sequence[str]] = []

    def fails(pieces: Sequence[str]) -> bool:
        tried.append(pieces)
        return {"s3", "f7"} <= set(pieces)

    pieces = [*(f"s{number}" for number in range(20)), *(f"f{number}" for number in range(10))]

    assert smallest(pieces, fails) == ["s3", "f7"]
    assert len(tried) < 100


def test_a_failure_is_made_small_and_told_with_the_line_that_repeats_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_lifecycle, "WORKER_LOST", Failure(CANARY))
    failed = next(
        result for result in (run(draw(seed)) for seed in range(200)) if result.violations
    )
    size = len(failed.plan.pieces())

    small = shrink(failed)
    told = "\n".join(report.failure(small, report.replay(small, size)))

    assert {violation.invariant for violation in small.violations} == {"I18"}
    assert len(small.plan.pieces()) < size
    assert f"--seed {failed.plan.seed} --only " in told
    assert f"-> '{CANARY}'" in told
    assert told.count("I18 is: nothing of a payload is logged") == 1
    assert "I1 is: " not in told
    assert "the last " in told
    assert told.count("2#1 is process 2 in its first life") == 1
    assert max(map(len, told.partition("broken promises")[2].splitlines())) < 200
    assert told.splitlines()[-1].startswith("again: ")


def test_a_violation_is_told_in_one_line_of_its_first_words_and_how_its_traceback_ends() -> None:
    assert report.brief("I1: job 1: is gone") == "I1: job 1: is gone"
    assert report.brief("crash: Traceback:\n  File x\nValueError: y") == (
        "crash: Traceback: ... ValueError: y"
    )
    assert len(report.brief("x" * 1000)) <= 160


@pytest.mark.parametrize(("runs", "told"), [(100, ""), (500, "drain"), (3000, "self-fence, drain")])
def test_a_way_that_so_many_runs_should_have_gone_and_never_went_is_told(
    runs: int, told: str
) -> None:
    counts = Counter(dict.fromkeys(set(NAMES) - {"drain", "self-fence"}, 1))

    *_, last = report.coverage(counts, runs)

    says = f"never happened, and should have in {runs:,} runs: {told}"
    assert (last == says) if told else ("never happened" not in last)


def test_the_command_runs_many_seeds_in_several_processes_and_says_which_ways_they_went() -> None:
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "tests.simulation", "--seeds", "2", "--workers", "2"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    assert "2 runs in " in done.stdout
    assert "lost row taken up" in done.stdout


def test_the_command_fails_with_a_seed_that_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_lifecycle, "WORKER_LOST", Failure(CANARY))
    runner = CliRunner()

    several = runner.invoke(main, ["--seeds", "30", "--workers", "1", "--no-shrink"])
    one = runner.invoke(main, ["--seed", "0", "--only", ""])

    assert several.exit_code == 1
    assert "again: python -m tests.simulation --seed" in several.output
    assert one.exit_code == 0
    assert "all promises were kept" in one.output
