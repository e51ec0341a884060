"""A run in which somebody spins is broken off, and told like any other failure."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import trio

from trio_jobs import _drivers, _hub

from . import report, work
from .flavours import draw
from .handlers import _Acting
from .runs import run


async def _tries_again(acting: _Acting) -> None:
    while True:
        await trio.lowlevel.checkpoint()


async def _hears_of_nothing(acting: _Acting) -> None:
    with trio.CancelScope(shield=True):
        while True:
            try:
                await trio.lowlevel.cancel_shielded_checkpoint()
            except work.Endless:
                pass


async def _asks_the_file(acting: _Acting) -> None:
    connection = acting.process.connect(acting.process.world.path)
    while True:
        connection.execute("SELECT 'over and over'")


@pytest.mark.parametrize(
    ("spins", "told"),
    [
        (_tries_again, "1,000 of 1#1: trio_jobs._workers.Workers.work"),
        (_hears_of_nothing, "1,000 of 1#1: trio_jobs._workers.Workers.work"),
        (_asks_the_file, "1,000 of 1#1: SELECT 'over and over'"),
    ],
)
def test_a_run_without_an_end_is_broken_off_and_told(
    spins: Callable[[_Acting], Coroutine[Any, Any, None]],
    told: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(work, "MOST", 5_000)
    monkeypatch.setattr(_Acting, "act", lambda self, act: spins(self))

    result = run(draw(0))
    lines = list(report.failure(result, "--seed 0"))

    [accused] = result.violations
    assert accused.invariant == "I19"
    assert accused.text.startswith("5,000 steps and statements are no end, and the last 1,000 took")
    assert accused.text.endswith(told)
    assert lines[-2:] == [
        "I19 is: nobody does the same over and over without an end",
        "again: python -m tests.simulation --seed 0",
    ]


def test_after_a_run_that_was_broken_off_others_are_as_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = run(draw(1), digests=True)
    kept = ({**_drivers._open}, {**_hub._hubs})
    with monkeypatch.context() as patch:
        patch.setattr(work, "MOST", 1_000)
        broken = [run(draw(seed)).evidence.endless for seed in range(5)]
    after = run(draw(1), digests=True)

    assert any(broken)
    assert (_drivers._open, _hub._hubs) == kept
    assert after.digest == before.digest
    assert not after.violations
