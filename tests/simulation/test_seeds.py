"""Some runs decided by chance, and all that ever failed; and that a seed decides all of a run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from stories import TIMES

from .kept import KEPT
from .plan import draw
from .runs import run

SEEDS = range(30 * TIMES)


@pytest.mark.parametrize("seed", [*SEEDS, *KEPT])
def test_a_run_decided_by_chance_keeps_all_promises(seed: int) -> None:
    assert not run(draw(seed)).violations


def test_a_seed_decides_every_statement_of_a_run_also_in_another_interpreter() -> None:
    seeds = range(4)
    here = [run(draw(seed), digests=True).digest for seed in seeds]
    again = [run(draw(seed), digests=True).digest for seed in seeds]
    code = (
        "from simulation.plan import draw; from simulation.runs import run;"
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
