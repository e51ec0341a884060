"""The benchmarks: what they compute of samples, and that they run at all."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from benchmarks import bare, floor, names, ours, peers, processes
from benchmarks.__main__ import main
from benchmarks.figures import FIGURES, Figure, Part, Verdict
from benchmarks.files import connection, fresh_file, rows
from benchmarks.names import P50
from benchmarks.ours import Way
from benchmarks.rounds import (
    RATE,
    Case,
    Results,
    Sample,
    Unavailable,
    measurements,
    order,
    percentile,
    run_rounds,
)
from click.testing import CliRunner


def results_of(**cases: list[float]) -> Results:
    results = Results()
    for case, rates in cases.items():
        for rate in rates:
            results.add(case, {RATE: rate})
    return results


# What is computed.


def test_the_median_of_a_case_is_that_of_its_rounds() -> None:
    results = results_of(a=[3, 100, 1])

    assert results.median("a") == 3
    assert results.median("b") is None
    assert results.median("a", P50) is None


def test_a_ratio_is_taken_within_each_round() -> None:
    # A machine that is slow in the second round: it is so for both.
    results = results_of(a=[20, 2, 22], b=[10, 1, 11])

    assert results.ratio("a", "b") == 2
    assert results.ratio("a", "c") is None


def test_a_percentile_is_one_of_the_values() -> None:
    values = [float(value) for value in range(1, 101)]

    assert percentile(values, 50) == 50
    assert percentile(values, 99) == 99
    assert percentile(values, 100) == 100
    assert percentile([7.0], 99) == 7


def test_rounds_go_forth_and_back() -> None:
    assert list(order(3, 3)) == [[0, 1, 2], [2, 1, 0], [0, 1, 2]]


# Rounds.


class Measured:
    """Cases that note what is asked of them."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def case(self, name: str, count: int, rate: float, seconds: float | None = None) -> Case:
        return Case(name, partial(self._measure, name, rate), count, seconds)

    def _measure(self, name: str, rate: float, count: int) -> Sample:
        self.calls.append((name, count))
        return {RATE: rate}


def test_a_first_round_finds_the_counts_and_is_not_counted() -> None:
    measured, results = Measured(), Results()
    cases = [measured.case("a", 10, 1000, 0.5), measured.case("b", 7, 1000)]

    run_rounds(cases, 2, results)

    assert measured.calls == [("a", 10), ("a", 500), ("b", 7), ("b", 7), ("a", 500)]
    assert results.of("a") == [1000, 1000]
    assert measurements(cases, 2) == len(measured.calls)


def test_of_a_slow_case_the_first_round_may_do() -> None:
    measured, results = Measured(), Results()

    case = measured.case("slow", 100, 20, 0.5)
    run_rounds([dataclasses.replace(case, once_if_slow=True)], 3, results)

    assert measured.calls == [("slow", 100)]
    assert results.of("slow") == [20]


def test_a_case_that_is_not_available_is_left_out_with_a_note() -> None:
    def fail(count: int) -> Sample:
        raise Unavailable("database is locked")

    measured, results = Measured(), Results()

    run_rounds([Case("peer", fail, 10), measured.case("a", 1, 5)], 3, results)

    assert results.notes == ["peer: database is locked"]
    assert results.of("a") == [5, 5, 5]
    assert results.of("peer") == []


# Figures.


@pytest.mark.parametrize(
    ("value", "verdict"),
    [
        (0.8, Verdict.GOAL),
        (0.7, Verdict.GOAL),
        (0.6, Verdict.OK),
        (0.5, Verdict.OK),
        (0.4, Verdict.MISSED),
        (None, Verdict.UNKNOWN),
    ],
)
def test_a_verdict_compares_with_the_least_and_the_goal(
    value: float | None, verdict: Verdict
) -> None:
    assert Part(lambda results: value, 0.5, 0.7).verdict(Results()) is verdict


def test_of_times_the_lower_is_the_better() -> None:
    def verdict(value: float) -> Verdict:
        part = Part(lambda results: value, 0.5, 0.3, "ms", lower_is_better=True)
        return part.verdict(Results())

    assert verdict(0.2) is Verdict.GOAL
    assert verdict(0.4) is Verdict.OK
    assert verdict(0.6) is Verdict.MISSED


def test_a_figure_is_as_good_as_its_worst_part() -> None:
    good = Part(lambda results: 0.2, 0.5, 0.3, "ms", lower_is_better=True)
    bad = Part(lambda results: 9.0, 2, 1, "ms", lower_is_better=True)
    unknown = Part(lambda results: None, 2, 1)

    assert Figure("p50", (good,)).verdict(Results()) is Verdict.GOAL
    assert Figure("p50; p99", (good, bad)).verdict(Results()) is Verdict.MISSED
    assert Figure("p50; p99", (good, bad)).measured(Results()) == "0.2 ms; 9 ms"
    assert Figure("p50; p99", (good, bad)).least == "at most 0.5 ms; 2 ms"
    assert Figure("p50; p99", (unknown, bad)).verdict(Results()) is Verdict.UNKNOWN


def test_a_figure_says_what_it_is_without_a_library() -> None:
    with_floor = Part(lambda results: 0.2, 0.5, 0.3, "ms", floor=lambda results: 0.1)
    without = Part(lambda results: 1, 2, 3)

    assert Figure("both", (with_floor, without)).floor(Results()) == "0.1 ms; -"
    assert Figure("none", (without,)).floor(Results()) == ""


def test_every_figure_is_computed_from_cases_that_exist() -> None:
    class Everything(Results):
        def of(self, case: str, metric: str = RATE) -> list[float]:
            asked.add(case)
            return [1.0]

    asked: set[str] = set()

    assert all(figure.measured(Everything()) for figure in FIGURES)
    assert names.drain(names.HUEY, 100, "full") in asked
    assert names.INSERTS in asked


# They run.


@pytest.mark.parametrize(
    ("rate", "count"),
    [
        (partial(bare.tasks, at_a_time=10), 50),
        (partial(bare.life_cycles, driver="sqlite3", durability="full"), 250),
        (partial(bare.inserts, driver="apsw", durability="full"), 5),
        (partial(floor.inserts, tasks=7), 20),
        (partial(ours.drain, workers=10, way=Way("sqlite3", "full")), 50),
        (partial(ours.drain, workers=10, way=Way("apsw", "normal"), with_checkpoint=True), 50),
        (partial(ours.enqueue, tasks=7, way=Way("sqlite3", "full")), 20),
    ],
)
def test_a_rate_is_measured(rate: Callable[[int], Sample], count: int) -> None:
    assert rate(count)[RATE] > 0


@pytest.mark.parametrize("per_second", [None, 500])
def test_a_latency_is_measured_without_a_library(per_second: float | None) -> None:
    assert floor.latency(5, per_second=per_second)[P50] > 0


def test_a_full_table_is_made_of_one_job_and_works_on() -> None:
    with fresh_file() as path:
        ours.make_table(path, "sqlite3", 50, is_finished=False, delay=1e6)
        with connection(path, "sqlite3", "normal") as opened:
            [(jobs, instants)] = rows(
                opened, "SELECT count(id), count(DISTINCT run_at) FROM trio_jobs_job"
            )

        way = Way("sqlite3", "normal")
        assert (jobs, instants) == (50, 50)
        assert ours.life_cycle(20, way, path)[RATE] > 0
        assert ours.latency(3, way, per_second=None, path=path)[P50] > 0


def test_a_runner_in_another_process_is_measured() -> None:
    sample = processes.memory(20, Way("sqlite3", "normal"))

    assert sample[RATE] > 0
    assert sample[names.GROWTH] < sample["MB"]


def test_the_command_prints_figures_and_writes_all_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "is_installed", lambda module: module != "huey")
    file = tmp_path / "benchmarks.json"
    arguments = ["lateness", "--rounds", "1", "--markdown", "--json", str(file)]

    result = CliRunner().invoke(main, arguments, catch_exceptions=False)

    assert result.exit_code == 0, result.output
    assert "SqliteHuey is left out: huey is not installed" in result.output
    assert "| loop lateness from the library, 100 workers, p99 |" in result.output
    written = json.loads(file.read_text())
    assert len(written["samples"][names.LATENESS][RATE]) == 1
    assert len(written["figures"]) == len(FIGURES)
    assert str(tmp_path) not in file.read_text()
