"""The picture: what was measured as bars, by matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import names
from .names import P50, P99
from .peers import PEERS, is_installed
from .rounds import RATE, Results


def is_possible() -> bool:
    return is_installed("matplotlib")


def draw(results: Results, title: str, path: Path) -> None:
    """Whatever panels there are samples for."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    cases = list(results.samples)
    panels = [
        ("Drain of no-op jobs", "jobs per second", _starting(cases, "drain: "), [RATE]),
        ("Enqueue, one job a call", "jobs per second", _starting(cases, "enqueue: "), [RATE]),
        ("From enqueue to start", "ms", _starting(cases, "enqueue to start: "), [P50, P99]),
        ("In a full table", "jobs per second", _starting(cases, "table: life cycle"), [RATE]),
        ("Processes on one file", "jobs per second", _starting(cases, "processes: "), [RATE]),
        ("Lateness of a 1 ms ticker", "ms", _starting(cases, "lateness: "), [P50, P99]),
    ]
    panels = [panel for panel in panels if panel[2]]
    heights = [1.5 + len(panel[2]) * len(panel[3]) for panel in panels] or [1.0]
    figure = Figure(figsize=(11, 1 + 0.27 * sum(heights)), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(f"trio_jobs benchmarks ({title})")
    rows = figure.subplots(len(heights), 1, squeeze=False, height_ratios=heights)
    for [axes], (heading, unit, some, metrics) in zip(rows, panels, strict=False):
        _bars(axes, results, some, metrics)
        axes.set_title(heading, loc="left")
        axes.set_xlabel(f"{unit} (median and range of the rounds)")
    figure.savefig(path, dpi=110)


def _starting(cases: Sequence[str], text: str) -> list[str]:
    return [case for case in cases if case.startswith(text)]


def _bars(axes: Any, results: Results, cases: Sequence[str], metrics: Sequence[str]) -> None:
    labels: list[str] = []
    for case in cases:
        for metric in metrics:
            values = results.of(case, metric)
            median = results.median(case, metric)
            if median is None:
                continue
            spread = [[median - min(values)], [max(values) - median]]
            color = "tab:blue" if _is_ours(case) else "tab:gray"
            axes.barh(len(labels), median, xerr=spread, color=color, ecolor="black", capsize=2)
            text = f"{median:,.0f}" if median >= 100 else f"{median:.3g}"
            axes.text(max(values), len(labels), f"  {text}", va="center", fontsize=8)
            short = case.split(": ", 1)[1]
            labels.append(short if metric == RATE else f"{short}, {metric.removesuffix(' ms')}")
    axes.set_yticks(range(len(labels)), labels, fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    if RATE not in metrics:
        axes.set_xscale("log")  # from a tenth of a millisecond to a second


def _is_ours(case: str) -> bool:
    yardsticks = (names.BARE, names.RAW, names.INSERTS, names.ONE_INSERT, names.SYNC)
    return not any(other in case for other in (*yardsticks, *(peer.name for peer in PEERS)))
