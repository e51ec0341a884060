"""The command: power cuts at every operation of a script, and at some of many seeds' lives.

What is demanded after a cut is in `power_judge`, what happens between two cuts in `power_life`.
"""

from __future__ import annotations

import random
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import click
from rich.progress import Progress, TextColumn

from .options import first_option, refuse_beside
from .power_judge import Again, Cut, after, cuts, wrong_at_end
from .power_life import Life
from .power_store import Synchronous
from .report import violations
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
        return "\n".join(
            [
                *(["the last operations before the cut:"] if self.before else []),
                *(f"  {one}" for one in self.before),
                *violations(self.wrong, width=300),
                f"again: python -m tests.simulation power --seed {self.seed}{where}{twice}",
            ]
        )


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
        if only not in positions:
            raise click.BadParameter(
                f"the cuts of seed {seed} are 0 to {positions[-1]}.", param_hint="--cut"
            )
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


@click.command("power")
@click.option(
    "--seeds", type=click.IntRange(min=0), default=50, show_default=True, help="After the script."
)
@click.option("--no-script", is_flag=True, help="Leave the script out.")
@first_option
@click.option("--seed", metavar="SEED", help=f"Only this one: a number, or {' or '.join(SCRIPTS)}.")
@click.option("--cut", type=click.IntRange(min=0), help="With --seed: only this cut.")
@click.option("--twice", is_flag=True, help="Cut each life after a cut too, at every operation.")
@click.pass_context
def main(
    context: click.Context,
    seeds: int,
    no_script: bool,
    first: int,
    seed: str | None,
    cut: int | None,
    twice: bool,
) -> None:
    """Power cuts at any moment.

    They come at every operation of a script, and at some of many seeds' lives. After each the file
    is opened again and judges look at it. The exit code is 1 if a promise was broken; printed are
    the last operations before the cut, and how to run it again.
    """
    if seed is not None:
        refuse_beside(context, "--seed", "seeds", "first", "no_script")
        if seed not in SCRIPTS and not seed.isdecimal():
            known = " or ".join(SCRIPTS)
            raise click.BadParameter(f"{seed!r} is not a number, {known}.", param_hint="--seed")
        todo = [seed]
    elif cut is not None:
        raise click.UsageError("--cut is of one --seed.")
    else:
        todo = [*([] if no_script else SCRIPTS), *map(str, range(first, first + seeds))]
    if not todo:
        raise click.UsageError("--no-script and --seeds 0 leave nothing to do.")

    began = time.monotonic()
    count = 0
    failed: list[Verdict] = []
    with Progress(*Progress.get_default_columns(), TextColumn("{task.fields[cuts]}")) as progress:
        task = progress.add_task("power cuts", total=len(todo), cuts="")
        for one in todo:
            for verdict in run(one, cut, twice=twice):
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
    click.echo(
        f"{count:,} power cuts in {seconds:.0f} s, {rate:.0f} a second, {len(failed)} broken"
    )
    sys.exit(bool(failed))
