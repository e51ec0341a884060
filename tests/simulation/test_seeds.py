"""Some runs decided by chance, and all that ever failed; and that a seed decides all of a run."""

from __future__ import annotations

import dataclasses
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
import trio
from click.testing import CliRunner
from stories import TIMES
from trio.testing import MockClock

from trio_jobs import _agenda, _lifecycle
from trio_jobs._model import Failure

from . import handlers, report, runs
from .__main__ import main
from .coverage import NAMES
from .evidence import Step
from .flavours import draw, late_holders
from .kept import KEPT, KEPT_WITH_FLAVOUR
from .plan import CANARY, Event, EventName, draw_ordinary
from .runs import Result, run
from .shrink import shrink, smallest
from .store import SimulatedStore
from .world import Process, World, process_of

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


def disturbed(name: EventName, *times: tuple[float, float]) -> Result:
    """Twenty seconds of a process that renews leases every second: when it is, and for how long."""
    plan = late_holders(draw_ordinary(0), random.Random(0))
    step, *_ = plan.steps
    events = [Event(number, at, 0, name, lasts) for number, (at, lasts) in enumerate(times)]
    return run(dataclasses.replace(plan, acts=("wait",), steps=(step,), events=tuple(events)))


def faults_of(result: Result) -> list[tuple[float, float]]:
    """The instants they began and ended at."""
    faults = result.evidence.history.faults
    return [(round(one.at / 1e9, 3), round((one.until or 0) / 1e9, 3)) for one in faults]


def steps_in(result: Result, since: float, until: float) -> list[Step]:
    steps = result.evidence.audit.steps
    return [step for step in steps if step.who == "0#1" and since < step.at / 1e9 < until]


def test_a_process_does_not_run_while_it_is_frozen_and_runs_when_the_last_freeze_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # One in another, one that outlives the one before, and one that the healing ends.
    times = [(1.5, 5.0), (2.5, 1.0), (9.5, 2.0), (10.5, 3.0), (18.5, 9.0)]
    spans = [(1.501, 6.499), (9.501, 13.499), (18.501, 19.999)]

    result = disturbed("freeze", *times)

    assert not result.violations
    assert not [steps_in(result, *span) for span in spans if steps_in(result, *span)]
    assert steps_in(result, 6.499, 9.5)
    assert steps_in(result, 13.499, 18.5)
    assert faults_of(result) == [(1.5, 6.5), (2.5, 3.5), (9.5, 11.5), (10.5, 13.5), (18.5, 20.0)]
    monkeypatch.setattr(Process, "is_frozen", False)
    unfrozen = disturbed("freeze", *times)
    assert all(steps_in(unfrozen, *span) for span in spans)


def test_what_the_healing_ends_is_over_then_also_by_the_evidence() -> None:
    assert faults_of(disturbed("unplug", (17.0, 9.0))) == [(17.0, 20.0)]
    assert faults_of(disturbed("busy reader", (17.0, 9.0))) == [(17.0, 20.0)]


def test_what_a_handler_leaves_behind_is_of_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Process | None, Process]] = []
    publish_late = handlers._Acting.publish_late

    async def spied(acting: handlers._Acting, seconds: float) -> None:
        seen.append((process_of(trio.lowlevel.current_task()), acting.process))
        await publish_late(acting, seconds)

    monkeypatch.setattr(handlers._Acting, "publish_late", spied)

    assert not run(
        dataclasses.replace(draw_ordinary(0), acts=("publish after the end",))
    ).violations

    assert seen
    assert all(of is process for of, process in seen)


def test_what_a_store_does_by_chance_is_of_the_seed_and_the_process() -> None:
    drawn = set()
    for seed in (1, 2):
        plan = draw_ordinary(seed)
        world = World(plan, "never opened", MockClock())
        for index in (0, 1, 0):
            process = Process(world, index, plan.processes[0])
            drawn.add(SimulatedStore(process).random.random())

    assert len(drawn) == 6


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

    first, *_, last = report.coverage(counts, runs)
    assert first.startswith("how often each rare way was gone")

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
