"""The commands. `python -m tests.simulation --help` names them all.

Without a command: runs decided by chance, one for each seed.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Sequence

import click
from rich.console import Console

from . import mutants, power, processes, report, sweep
from .flavours import draw
from .many import ENOUGH, Summary, run_many
from .options import first_option, refuse_beside
from .progress import INTERRUPTED, telling
from .runs import run
from .shrink import shrink


@click.group(invoke_without_command=True)
@click.option("--seeds", type=click.IntRange(min=1), help="How many; 500 if nothing else is said.")
@click.option("--seed", type=click.IntRange(min=0), help="Only this one.")
@first_option
@click.option(
    "--minutes",
    type=click.FloatRange(min=0, min_open=True),
    help="As many seeds as there is time for.",
)
@click.option("--workers", type=click.IntRange(min=1), default=os.cpu_count(), help="Processes.")
@click.option("--only", metavar="PIECES", help="With --seed: leave out all else of its plan.")
@click.option("--shrink/--no-shrink", "shrinks", default=True, help="Make a failing plan small.")
@click.pass_context
def main(
    context: click.Context,
    seeds: int | None,
    seed: int | None,
    first: int,
    minutes: float | None,
    workers: int,
    only: str | None,
    shrinks: bool,
) -> None:
    """Runs in which a seed decides everything: who is there, what is asked for, what goes wrong.

    After each run all is healed, and judges look at what is left. The exit code is 1 if a
    promise was broken; then the plan is made small, and printed is how to run it again.

    The commands look in other ways; these options are not theirs.
    """
    if context.invoked_subcommand is not None:
        refuse_beside(context, context.invoked_subcommand, *context.params)
        return
    console = Console(soft_wrap=True, highlight=False)
    if seed is not None:
        refuse_beside(context, "--seed", "seeds", "first", "minutes", "workers")
        sys.exit(_one(console, seed, None if only is None else only.split(","), shrinks))
    if only is not None:
        raise click.UsageError("--only is of one --seed.")
    if seeds is None and minutes is None:
        seeds = 500
    began = time.monotonic()
    until = None if minutes is None else began + 60 * minutes
    numbers = itertools.count(first) if seeds is None else iter(range(first, first + seeds))
    known: set[int] = set()
    with telling(console, "runs", seeds) as told:

        def note(summary: Summary) -> bool:
            for failed in set(summary.failed) - known:
                known.add(failed)
                told.say(f"broken: --seed {failed}")
            told.at(summary.runs, len(summary.failed))
            return told.is_interrupted

        summary = run_many(numbers, workers, until, note)
    took = time.monotonic() - began
    for line in report.coverage(summary.coverage, summary.runs):
        console.print(line, markup=False)
    rate = summary.runs / took
    broken = len(summary.failed)
    how = "interrupted: " if told.is_interrupted else ""
    told.say(f"{how}{summary.runs:,} runs in {took:.0f} s, {rate:.1f} a second, {broken} broken")
    if summary.failed:
        enough = "; no more were run" if broken >= ENOUGH else ""
        console.print(f"broken seeds: {', '.join(map(str, sorted(summary.failed)))}{enough}")
        _one(console, min(summary.failed), None, shrinks and not told.is_interrupted)
    if summary.failed or told.is_interrupted:
        sys.exit(INTERRUPTED if told.is_interrupted else 1)


def _one(console: Console, seed: int, only: Sequence[str] | None, shrinks: bool) -> int:
    plan = draw(seed)
    size = len(plan.pieces())
    if only is not None:
        for piece in filter(None, only):
            if piece not in plan.pieces():
                raise click.BadParameter(f"seed {seed} has no {piece!r}.", param_hint="--only")
        plan = plan.only(only)
    result = run(plan)
    if not result.violations:
        console.print(f"seed {seed}: all promises were kept")
        return 0
    if shrinks:
        with console.status("making it small") as status:
            result = shrink(result, lambda left: status.update(f"{left} of {size} pieces left"))
    for line in report.failure(result, report.replay(result, size)):
        console.print(line, markup=False)
    return 1


for command in (sweep.main, power.main, processes.main, mutants.main):
    main.add_command(command)

if __name__ == "__main__":
    main()
