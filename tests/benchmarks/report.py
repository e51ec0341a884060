"""What the command prints, and the JSON file."""

from __future__ import annotations

import os
import platform
import sqlite3
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import Any, Final

from rich.table import Table

from .figures import FIGURES, Figure, Verdict
from .files import Driver
from .peers import is_installed
from .plan import Group, Size
from .rounds import RATE, Results

STYLES: Final = {
    Verdict.GOAL: "green",
    Verdict.OK: "green",
    Verdict.MISSED: "red",
    Verdict.UNKNOWN: "dim",
}
PACKAGES: Final = ("trio", "msgspec", "apsw", "huey", "litequeue", "persist-queue")


def group_table(group: Group, cases: Sequence[str], results: Results) -> Table:
    """Medians, the range of the rates, and the rates as ratios to the group's reference."""
    table = Table(title=group.title, title_justify="left")
    table.add_column("case", no_wrap=True)
    metrics = list(dict.fromkeys(m for case in cases for m in results.samples.get(case, {})))
    for metric in metrics:
        table.add_column(metric, justify="right", no_wrap=True)
        if metric == RATE:
            table.add_column("from - to", justify="right", style="dim", no_wrap=True)
            if group.reference is not None:
                table.add_column("ratio", justify="right", no_wrap=True)
                table.caption = f"ratio: to {_short(group.reference)}"
    for case in cases:
        cells = [_short(case)]
        for metric in metrics:
            values = results.of(case, metric)
            cells.append(_number(results.median(case, metric)))
            if metric == RATE:
                cells.append(f"{_number(min(values))} - {_number(max(values))}" if values else "")
                if group.reference is not None:
                    cells.append(_number(results.ratio(case, group.reference)))
        table.add_row(*cells)
    return table


def _short(case: str) -> str:
    """Without the name of its group."""
    return case.split(": ", 1)[1]


def figures_table(figures: Sequence[Figure], results: Results, size: Size) -> Table:
    table = Table(title="Figures to reach", title_justify="left")
    if size.table < 1_000_000:
        table.caption = f"here with {size.table:,} rows instead of a million"
    for heading in ("figure", "measured", "no library", "at least", "goal", ""):
        table.add_column(heading)
    for figure in figures:
        verdict = figure.verdict(results)
        table.add_row(
            figure.name,
            figure.measured(results),
            figure.floor(results),
            figure.least,
            figure.goal,
            verdict.value,
            style=STYLES[verdict],
        )
    return table


def figures_markdown(figures: Sequence[Figure], results: Results) -> str:
    lines = ["| figure | measured | no library | at least | goal | |", "|---|---|---|---|---|---|"]
    lines += [
        f"| {figure.name} | {figure.measured(results)} | {figure.floor(results)} | {figure.least}"
        f" | {figure.goal} | {figure.verdict(results).value} |"
        for figure in figures
    ]
    return "\n".join(lines)


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def machine() -> dict[str, Any]:
    """What the figures depend on, and nothing that tells whose machine it is."""
    return {
        "system": platform.system(),
        "machine": platform.machine(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "allowed_cores": allowed_cores(),
    }


def allowed_cores() -> list[int]:
    """Those this process may run on (`taskset` chooses)."""
    if sys.platform == "linux":
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def pinned() -> str:
    """Whether fewer cores are allowed than there are."""
    cores, count = allowed_cores(), os.cpu_count() or 1
    if len(cores) == count:
        return f"not pinned, {count} cores"
    return f"pinned to core {', '.join(map(str, cores))} of {count}"


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.split(": ", 1)[1].strip() for line in file if "model name" in line)
    except (OSError, StopIteration):
        return platform.processor()


def versions(driver: Driver) -> dict[str, str]:
    found = {"python": platform.python_version(), "sqlite (sqlite3)": sqlite3.sqlite_version}
    if is_installed("apsw"):
        import apsw

        found["sqlite (apsw)"] = apsw.sqlite_lib_version()
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def document(mode: str, driver: Driver, results: Results) -> dict[str, Any]:
    """Everything that was measured, for a JSON file."""
    return {
        "mode": mode,
        "driver": driver,
        "machine": machine(),
        "versions": versions(driver),
        "notes": results.notes,
        "samples": results.samples,
        "figures": [
            {
                "name": figure.name,
                "measured": [part.value(results) for part in figure.parts],
                "least": [part.least for part in figure.parts],
                "floor": [part.floor and part.floor(results) for part in figure.parts],
                "goal": [part.goal for part in figure.parts],
                "verdict": figure.verdict(results).value,
            }
            for figure in FIGURES
        ],
    }
