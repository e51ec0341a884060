"""What a pool knows of the store without asking (what comes of it is in test_pool)."""

from __future__ import annotations

import pytest

from trio_jobs._agenda import Agenda
from trio_jobs._pace import PATIENCE

NOW = 10**15
HOUR = 3_600_000_000


@pytest.mark.parametrize(
    ("later", "wants"),
    [
        (0, False),
        (PATIENCE - 1, False),
        (PATIENCE, True),
        (HOUR, True),
        (-1, True),  # the clock was set back: that instant may be as far away as you like
        (-HOUR, True),
    ],
)
def test_with_all_workers_busy_a_look_waits_for_a_claim_but_not_for_a_clock_that_was_set_back(
    later: int, wants: bool
) -> None:
    agenda = Agenda()
    agenda.heard_others(NOW)

    assert agenda.wants_look(NOW + later, is_idle=False) is wants


@pytest.mark.parametrize("later", [-HOUR, 0, HOUR])
def test_with_an_idle_worker_a_look_waits_for_nothing(later: int) -> None:
    agenda = Agenda()
    before = agenda.wants_look(NOW, is_idle=True)
    agenda.heard_others(NOW)

    assert not before
    assert agenda.wants_look(NOW + later, is_idle=True)


def test_a_claim_that_was_formed_sees_what_others_did() -> None:
    agenda = Agenda()
    agenda.heard_others(NOW)
    agenda.claim_was_formed()

    assert not agenda.wants_look(NOW + HOUR, is_idle=True)
