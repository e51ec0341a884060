"""The command: choose, measure, print."""

from __future__ import annotations

from functools import partial

from rich.console import Console

from . import bare, ours
from .ours import Way
from .rounds import Case, Results, run_rounds

def main() -> None:
    console = Console()
    driver = "sqlite3"
    cases = []
    for at in (10, 100):
        cases.append(Case(f"bare Trio, {at}", partial(bare.tasks, at_a_time=at), 2000, 0.3))
    for d in ("normal", "full"):
        cases.append(Case(f"raw, {d}", partial(bare.life_cycles, driver=driver, durability=d), 1000, 0.3))
        for w in (1, 10, 100):
            cases.append(Case(f"drain, {w}, {d}", partial(ours.drain, workers=w, way=Way(driver, d)), 200, 0.3))
    cases.append(Case("insert", partial(bare.inserts, driver=driver, durability="full"), 200, 0.3))
    r = Results()
    run_rounds(cases, 5, r)
    for name in r.samples:
        console.print(f"{name:30} {r.median(name):10.0f}")
main()
