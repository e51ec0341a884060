"""The planted faults fit the library as it is, and one of them is found."""

from __future__ import annotations

import ast
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from . import mutants
from .mutants import MUTANTS, Mutant, Simulators, Verdict, copy_with, verdict_of, verdicts
from .progress import INTERRUPTED


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_fits_the_library(mutant: Mutant, tmp_path: Path) -> None:
    copy_with(mutant, tmp_path)

    text = (tmp_path / "trio_jobs" / mutant.file).read_text()
    ast.parse(text)
    assert mutant.new in text


def test_there_are_at_least_twenty() -> None:
    assert len({mutant.name for mutant in MUTANTS if not mutant.equivalent}) >= 20


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("claims are not counted", "I3: "),
        ("a renewal that found another claim is not minded", "I13: "),
    ],
)
def test_a_planted_fault_is_found_by_a_seed(name: str, how: str) -> None:
    [mutant] = [mutant for mutant in MUTANTS if mutant.name == name]

    verdict = verdict_of(mutant, 20, Simulators())

    assert verdict.seed is not None
    assert verdict.how.startswith(how)


def test_what_is_told_of_it_ends_with_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    how = "I3: job 1: claims went from 0 to 0: Step(seq=3, at=2014000002, who='1#1', wall=1577836)"
    verdict = Verdict(MUTANTS[0], 0, 1.0, f"{how} and more and more")
    monkeypatch.setattr(mutants, "verdict_of", lambda *_, **__: verdict)

    *_, told, legend, count = (
        CliRunner().invoke(mutants.main, ["--workers", "1"]).output.split("\n")[:-1]
    )

    assert told.endswith("who='1#1', ...")
    assert legend.startswith("I3 is: claims, attempts and interruptions are counted")
    assert count.endswith(" found")


def test_of_a_mutant_that_takes_too_long_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mutants, "LONGEST", 0.01)

    ran = CliRunner().invoke(mutants.main, ["--only", "claims are not counted"])

    assert "claims are not counted: no verdict" in ran.output
    assert "0 of 1 found" in ran.output
    assert ran.exit_code == 1


def test_several_mutants_are_looked_for_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    both = threading.Barrier(2)

    def meets(mutant: Mutant, seeds: int, simulators: Simulators) -> Verdict:
        both.wait(10)
        return Verdict(mutant, seeds, 0.0, "")

    monkeypatch.setattr(mutants, "verdict_of", meets)

    assert [one.mutant for one in verdicts(MUTANTS[:4], 3, workers=2)] == MUTANTS[:4]


def test_an_interrupt_ends_those_that_look_and_tells_what_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[subprocess.Popen[str]] = []

    class Popen(subprocess.Popen[str]):
        def __init__(self, *command: Any, **how: Any) -> None:
            super().__init__(*command, **how)
            started.append(self)
            if len(started) == 2:
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    monkeypatch.setattr(subprocess, "Popen", Popen)
    monkeypatch.setattr(mutants, "LONGEST", 30)
    arguments = ["--only", "lost", "--seeds", "100000", "--workers", "2"]

    ran = CliRunner().invoke(mutants.main, arguments)

    assert ran.exit_code == INTERRUPTED
    assert ran.output.splitlines()[-1].startswith("interrupted: 0 of 0 found")
    assert [process.returncode for process in started] == [-signal.SIGKILL] * 2


def test_a_mutant_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    mutant = Mutant("none", "_writes.py", "not in there", "")

    with pytest.raises(ValueError, match=r"none: its place in .* not once"):
        copy_with(mutant, tmp_path)
