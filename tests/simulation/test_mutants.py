"""The planted faults fit the library as it is, and one of them is found."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from click.testing import CliRunner

from . import mutants
from .mutants import MUTANTS, Mutant, copy_with, verdict_of


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

    verdict = verdict_of(mutant, seeds=20)

    assert verdict.seed is not None
    assert verdict.how.startswith(how)


def test_of_a_mutant_that_takes_too_long_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mutants, "LONGEST", 0.01)

    ran = CliRunner().invoke(mutants.main, ["--only", "claims are not counted"])

    assert "claims are not counted: no verdict" in ran.output
    assert "0 of 1 found" in ran.output
    assert ran.exit_code == 1


def test_a_mutant_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    mutant = Mutant("none", "_writes.py", "not in there", "")

    with pytest.raises(ValueError, match=r"none: its place in .* not once"):
        copy_with(mutant, tmp_path)
