"""A long command says how far it is where there is no terminal, and what it knows at Ctrl-C."""

from __future__ import annotations

import io
import signal

import pytest
from click.testing import CliRunner
from rich.console import Console

from . import many, sweep
from .__main__ import main
from .progress import EVERY, Told, telling


def test_without_a_terminal_a_line_is_printed_now_and_then() -> None:
    file = io.StringIO()
    now = 0.0
    with telling(Console(file=file), "cases", 3000, lambda: now) as told:
        for done in range(1, 11):
            now = done * EVERY / 4
            told.at(done * 100, 2)

    assert file.getvalue().splitlines() == [
        "400 of 3,000 cases, 6.7 cases a second, 2 broken",
        "800 of 3,000 cases, 6.7 cases a second, 2 broken",
    ]


def _interrupts(monkeypatch: pytest.MonkeyPatch) -> None:
    at = Told.at

    def interrupted(told: Told, done: int, broken: int) -> None:
        at(told, done, broken)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Told, "at", interrupted)


def test_runs_that_are_interrupted_are_summed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    _interrupts(monkeypatch)
    monkeypatch.setattr(many, "_CHUNK", 2)
    before = signal.getsignal(signal.SIGINT)

    ran = CliRunner().invoke(main, ["--seeds", "1000", "--workers", "1"])

    assert ran.exit_code == 130
    assert "interrupted: 2 runs in " in ran.output
    assert signal.getsignal(signal.SIGINT) is before


def test_a_sweep_that_is_interrupted_is_summed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    _interrupts(monkeypatch)

    ran = CliRunner().invoke(sweep.main, ["--every", "20"])

    assert ran.exit_code == 130
    assert "interrupted: 1 cases in " in ran.output
