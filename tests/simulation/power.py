"""The command: power cuts at every operation of a script, and at some of many seeds' lives.

    python -m tests.simulation power [--seeds N] [--from S] [--no-script] [--seed S [--cut K]]
        [--twice]

What is demanded after a cut is in `power_judge`, what happens between two cuts in `power_life`.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from rich.progress import Progress, TextColumn

from .power_judge import Again, Cut, after, cuts, wrong_at_end
from .power_life import Life
from .power_store import Synchronous
from .vfs import Create, Delete, Sync, Truncate, Write

CUTS: Final = 10
"""Of each life that is drawn from a seed."""

SCRIPTS: Final[Mapping[str, Synchronous]] = {"script-full": "full", "script-normal": "normal"}
"""The seeds that mean the script of every end, cut at every operation."""

_ENOUGH: Final = 5
"""Violations after which to stop."""

_TOLD: Final = 15
"""Operations to be told of with a violation."""


@dataclass(frozen=True)
class Verdict:
    """On one cut, or without a position on a life that was not cut."""

    seed: str
    position: int | None
    wrong: list[str]
    twice: bool = False
    before: Sequence[str] = ()
    """What the disk was asked for until then."""

    def report(self) -> str:
        where = "" if self.position is None else f" --cut {self.position}"
        twice = " --twice" if self.twice else ""
        replay = f"python -m tests.simulation power --seed {self.seed}{where}{twice}"
        wrong = (f"  {one[-2000:]}" for one in self.wrong)
        return "\n".join([replay, *wrong, *(f"    {one}" for one in self.before)])


def run(seed: str, only: int | None = None, *, twice: bool = False) -> Iterator[Verdict]:
    """Cut the life of a seed at some operations, and the script of every end at each. Of the
    lives after it half are cut again, or with `twice` each at every operation."""
    is_script = seed in SCRIPTS
    chance = random.Random(seed)
    synchronous: Synchronous = "full" if chance.random() < 0.7 else "normal"
    try:
        life = Life(seed, synchronous=SCRIPTS.get(seed, synchronous), is_script=is_script)
    except Exception:
        yield Verdict(seed, None, [traceback.format_exc()])
        return
    yield Verdict(seed, None, wrong_at_end(life))
    positions: Sequence[int] = range(len(life.operations) + 1)
    if only is not None:
        positions = [only]
    elif not is_script:
        positions = chance.choices(positions, k=CUTS)
    for cut in cuts(life, seed, only=positions):
        chance_here = f"{seed} {cut.position}"
        once: Again = "once" if cut.position % 2 else "no"
        for wrong in after(cut, chance_here, again="everywhere" if twice else once):
            before = _last_operations(cut) if wrong else ()
            yield Verdict(seed, cut.position, wrong, twice, before)


def _last_operations(cut: Cut) -> list[str]:
    names = {number: name for name, number in cut.life.files.items()}
    told = []
    for position, operation in enumerate(cut.life.operations[: cut.position + 1]):
        match operation:
            case Create(name, file):
                names[file] = name
                text = f"create {name}"
            case Delete(name):
                text = f"delete {name}"
            case Write(file, offset, data):
                text = f"write {len(data)} bytes at {offset} of {names[file]}"
            case Truncate(file, size):
                text = f"cut {names[file]} to {size} bytes"
            case Sync(_, name, folder):
                text = f"sync {name}{' and its folder' if folder else ''}"
        told.append(f"{position}: {text}")
    return told[-_TOLD:]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulation power",
        description="Cut the power at every operation of a script, and at some of many seeds.",
    )
    parser.add_argument("--seeds", type=int, default=50, help="how many, after the script")
    parser.add_argument("--no-script", action="store_true", help="leave the script out")
    parser.add_argument("--from", type=int, default=0, dest="first", help="the first of them")
    parser.add_argument("--seed", help=f"this one only: a number, or {', '.join(SCRIPTS)}")
    parser.add_argument("--cut", type=int, help="of that seed, this cut only")
    parser.add_argument(
        "--twice", action="store_true", help="cut each life after a cut too, at every operation"
    )
    options = parser.parse_args(arguments)
    scripts = [] if options.no_script else [*SCRIPTS]
    seeds = [*scripts, *map(str, range(options.first, options.first + options.seeds))]
    if options.seed is not None:
        seeds = [options.seed]

    began = time.monotonic()
    count = 0
    failed: list[Verdict] = []
    with Progress(*Progress.get_default_columns(), TextColumn("{task.fields[cuts]}")) as progress:
        task = progress.add_task("power cuts", total=len(seeds), cuts="")
        for seed in seeds:
            for verdict in run(seed, options.cut, twice=options.twice):
                count += verdict.position is not None
                rate = count / (time.monotonic() - began)
                progress.update(task, cuts=f"{count} cuts, {rate:.0f} a second")
                if verdict.wrong:
                    failed.append(verdict)
                    progress.console.print(
                        verdict.report(), markup=False, highlight=False, soft_wrap=True
                    )
            progress.advance(task)
            if len(failed) >= _ENOUGH:
                break
    seconds = time.monotonic() - began
    rate = count / seconds
    print(f"{count:,} power cuts in {seconds:.0f} s, {rate:.0f} a second, {len(failed)} violations")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
