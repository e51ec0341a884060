"""Each flavour brings about what it is for; visits are made and judged; and what the simulation
replaces in the library is there to be replaced."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from trio_jobs import _pool

from .flavours import (
    FLAVOURS,
    Flavour,
    crowded,
    cut_off,
    drained,
    draw,
    interrupted,
    late_holders,
    misunderstood,
    poisoned,
    refused,
    slow_answers,
)
from .latency import let_writing_take_time
from .plan import draw_ordinary
from .runs import run

REACHES = {
    late_holders: ["lost row cancelled"],
    slow_answers: ["claim handed back"],
    crowded: ["neighbour did not get the lock", "nothing went wrong"],
    interrupted: ["interruption that counts", "dead of interruptions"],
    poisoned: ["suspect taken alone", "lost rows held back"],
    refused: ["commit failed"],
    cut_off: ["taken from the living after its lease ended"],
    drained: ["drain without a disturbance"],
    misunderstood: ["payload does not decode", "call: counts", "call: history"],
}


def test_every_flavour_is_for_something() -> None:
    assert set(REACHES) == set(FLAVOURS)


@pytest.mark.parametrize(("flavour", "ways"), REACHES.items())
def test_a_flavour_brings_about_what_it_is_for(flavour: Flavour, ways: Sequence[str]) -> None:
    went = Counter[str]()
    for seed in range(20):
        plan = flavour(draw_ordinary(seed), random.Random(seed))
        result = run(plan)
        assert not result.violations
        went += result.coverage
        if all(went[way] for way in ways):
            return

    pytest.fail(f"of {ways} it has {went}")


def test_a_flavour_changes_no_plan_but_its_own() -> None:
    plans = [(draw(seed), draw_ordinary(seed)) for seed in range(100)]

    same = [dataclasses.replace(drawn, is_visited=True) == ordinary for drawn, ordinary in plans]

    assert 50 < sum(same) < 70


def test_who_is_deaf_to_other_processes_is_found_by_a_visit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = draw_ordinary(0).only(["visits"])
    assert not run(plan).violations
    monkeypatch.setattr(_pool.Pool, "_claim", lambda self, *, is_look=False: None)

    violations = run(plan).violations

    assert {violation.invariant for violation in violations} == {"I16"}


def test_without_visits_nothing_is_asked_for_any_more() -> None:
    assert not run(draw_ordinary(0).only([])).evidence.audit.steps


@pytest.mark.parametrize("name", ["_flush", "_deliver"])
def test_a_bridge_that_has_nothing_to_replace_is_no_bridge_to_simulate(name: str) -> None:
    other = next(one for one in ("_flush", "_deliver") if one != name)
    bridge = type("Bridge", (), {other: lambda self: None})()

    with pytest.raises(AssertionError, match=f"a Bridge has no {name}"):
        let_writing_take_time(SimpleNamespace(settings=None), SimpleNamespace(_bridge=bridge))  # type: ignore[arg-type]
