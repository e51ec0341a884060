"""The command: choose, measure, print. See `--help`."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import click
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from . import peers, plot, report
from .figures import FIGURES
from .files import Driver
from .plan import FULL_SIZE, GROUPS, QUICK, Setting, Size
from .rounds import Case, Results, measurements, run_rounds


@click.command(epilog=f"NAMES are {', '.join(GROUPS)}; all of them if none is given.")
@click.argument("names", nargs=-1, type=click.Choice(list(GROUPS)), metavar="[NAMES]...")
@click.option("--quick/--full", "is_quick", default=True, help="A minute (default), or eight.")
@click.option("--driver", type=click.Choice(["sqlite3", "apsw"]), default="sqlite3")
@click.option("--peers/--no-peers", "with_peers", default=True, help="Measure other queues too.")
@click.option("--rounds", type=click.IntRange(min=1), help="Instead of the mode's number.")
@click.option("--pin", type=int, metavar="CORE", help="Run on this core alone.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write all samples.")
@click.option("--plot", "plot_file", type=click.Path(path_type=Path), help="Draw a picture.")
@click.option("--markdown", is_flag=True, help="Print the figures as Markdown too.")
def main(
    names: Sequence[str],
    is_quick: bool,
    driver: Driver,
    with_peers: bool,
    rounds: int | None,
    pin: int | None,
    json_file: Path | None,
    plot_file: Path | None,
    markdown: bool,
) -> None:
    """How fast trio_jobs is, beside bare Trio, bare SQLite and other queues.

    All cases of a NAME are measured in interleaved rounds; the numbers are medians, the ratios
    medians of the ratios within the rounds.
    """
    if pin is not None:
        if sys.platform != "linux":
            raise click.ClickException("--pin works on Linux only")
        os.sched_setaffinity(0, {pin})
    if plot_file is not None and not plot.is_possible():
        raise click.ClickException("--plot needs matplotlib")
    mode = "quick" if is_quick else "full"
    console = Console()
    if not console.is_terminal:
        console.width = 140
    title = f"{mode}, driver {driver}, {report.pinned()}"
    console.print(title)
    results = Results()
    size = QUICK if is_quick else FULL_SIZE
    measure(names or list(GROUPS), size, driver, with_peers, rounds, results, console)
    figures = [figure for figure in FIGURES if not names or figure.is_measured(results)]
    console.print(report.figures_table(figures, results, size))
    if markdown:
        click.echo(report.figures_markdown(figures, results))
        click.echo(f"\n({title}; full tables of {size.table:,} rows)")
    if json_file is not None:
        found = report.document(mode, driver, results)
        json_file.write_text(json.dumps(found, indent=1) + "\n")
    if plot_file is not None:
        plot.draw(results, title, plot_file)


def measure(
    names: Sequence[str],
    size: Size,
    driver: Driver,
    with_peers: bool,
    rounds: int | None,
    results: Results,
    console: Console,
) -> None:
    """Group by group, each with its table."""
    logging.getLogger("huey").setLevel(logging.ERROR)  # it tells of every start
    found, missing = peers.installed() if with_peers else ([], [])
    for line in missing:
        console.print(line)
    results.notes += missing
    for name in names:
        group = GROUPS[name]
        with ExitStack() as stack, _progress(console) as progress:
            bar = progress.add_task(f"{name}: filling tables", total=None)
            cases = list(group.cases(Setting(size, driver, found, stack)))
            count = group.rounds(rounds or size.rounds)
            progress.update(bar, total=measurements(cases, count))

            def measuring(case: Case, progress: Progress = progress, bar: TaskID = bar) -> None:
                progress.update(bar, advance=1, description=case.name)

            noted = len(results.notes)
            run_rounds(cases, count, results, measuring)
        for line in results.notes[noted:]:
            console.print(line)
        console.print(report.group_table(group, [case.name for case in cases], results))


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(
        *columns,
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
        refresh_per_second=2,
    )


if __name__ == "__main__":
    sys.exit(main(prog_name="python -m tests.benchmarks"))
