"""The script of the sweep has everything in it, and some of its cases run on every push."""

from __future__ import annotations

from itertools import islice

import pytest
from click.testing import CliRunner
from stories import TIMES

from trio_jobs import _lifecycle
from trio_jobs._model import Failure

from . import sweep
from .plan import CANARY
from .runs import Result, run

EVERY = max(1, 3000 // TIMES)


def test_the_script_has_every_kind_of_end() -> None:
    audit = run(sweep.SCRIPT).evidence.audit

    ends = {
        (step.after.state, step.after.failure, step.outcome)
        for step in audit.steps
        if step.after is not None and step.before is not None and step.ends_claim
    }
    others = {
        (step.before.state, step.after.state)
        for step in audit.steps
        if step.after is not None and step.before is not None and not step.ends_claim
    }
    assert ends == {
        ("succeeded", None, None),
        ("queued", "internal error", "failed"),
        ("dead", "not today", "failed"),
        ("failed", "never", "failed"),
        ("queued", None, "retry later"),
        ("queued", "timed out", "timed out"),
        ("failed", "deadline", "deadline"),
        ("cancelled", None, "cancelled"),
        ("queued", None, "interrupted"),
    }
    assert others >= {
        ("queued", "running"),
        ("queued", "cancelled"),
        ("queued", "failed"),
        ("dead", "queued"),
        ("running", "running"),
    }


@pytest.mark.parametrize(
    "name", ["stop@17", "crash after@40", "I/O error@33,crash before@41"], ids=lambda name: name
)
def test_a_case_is_its_name(name: str) -> None:
    assert str(sweep.parse(name, sweep.length())) == name


def test_a_case_alone_is_told_whole_with_the_line_that_repeats_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arguments = ["--case", "crash before@81"]
    kept = CliRunner().invoke(sweep.main, arguments)
    monkeypatch.setattr(_lifecycle, "WORKER_LOST", Failure(CANARY))
    broken = CliRunner().invoke(sweep.main, arguments)

    assert (kept.exit_code, kept.output) == (0, "crash before@81: all promises were kept\n")
    assert broken.exit_code == 1
    assert broken.output.endswith(
        'again: python -m tests.simulation sweep --case "crash before@81"\n'
    )


def test_a_case_that_cannot_be_judged_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(case: sweep.Case) -> Result:
        raise ZeroDivisionError

    monkeypatch.setattr(sweep, "run_case", fails)
    [broken] = sweep.broken_by(sweep.Case())

    assert "ZeroDivisionError" in broken


def test_some_of_the_cases_keep_all_promises() -> None:
    script = sweep.length()
    cases = [*sweep.singles(script), *sweep.stops(script), *sweep.pairs(script)]

    broken = {
        str(case): violations
        for case in islice(cases, 7, None, EVERY)
        if (violations := sweep.broken_by(case))
    }

    assert len(cases) > 20_000
    assert broken == {}


def test_how_many_cases_every_nth_makes_is_told() -> None:
    told = CliRunner().invoke(sweep.main, ["--every", "5000"]).output

    script = sweep.length()
    cases = len([*sweep.singles(script), *sweep.stops(script)])
    assert f" make {cases:,} cases; every 5,000th of them: 1\n" in told
