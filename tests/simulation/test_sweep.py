"""The script of the sweep has everything in it, and some of its cases run on every push."""

from __future__ import annotations

from itertools import islice

import pytest
from stories import TIMES

from . import sweep
from .runs import run

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
