# SPDX-License-Identifier: MIT
"""Pictures of one table of `report.py`, which draws them where they are stale."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from report import MODES, Result, Table

from fla_flashqla.cases import NAMES

COLUMNS = 3
COLORS = {"ours": "#1b7837", "fla": "#bdbdbd", "flash_qla": "#7fb3d5", "flashinfer": "#e59866"}
COLORS["precomputed"] = "#a6dba0"


def draw(table: Table, kind: str, path: Path) -> None:
    """Write a picture as SVG, the same for the same rows."""
    figure = FIGURES[kind](table)
    path.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context({"svg.hashsalt": "fla_flashqla", "svg.fonttype": "none"}):
        figure.savefig(path, metadata={"Date": None, "Description": f"rows {table.digest}"})


def plots(
    figure: Figure, table: Table, shown: dict[str, list[Result]], title: str
) -> Iterator[tuple[Any, list[Result]]]:
    """A plot per head configuration, of the same logarithmic milliseconds: axes and results."""
    heads = list(shown)
    times = [ms for r in sum(shown.values(), []) for p in table.providers if (ms := r.ms(p))]
    rows = -(-len(heads) // COLUMNS)
    figure.set_size_inches(5 * COLUMNS, 3 * rows + 0.5)
    grid = list(figure.subplots(rows, COLUMNS, squeeze=False, sharey=True).flat)
    for axes in grid[len(heads) :]:
        axes.set_axis_off()
    for axes, config in zip(grid, heads, strict=False):
        yield axes, shown[config]
        axes.set_title(f"H:HV = {config}")
        axes.set_yscale("log")
        axes.set_ylim(min(times, default=1.0) / 2, max(times, default=1.0) * 1.5)
        axes.yaxis.set_major_formatter("{x:g}")
        axes.set_ylabel("ms")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    figure.suptitle(title)


def latency_bars(table: Table) -> Figure:
    """The providers side by side for each set of lengths."""
    figure = Figure(layout="constrained")
    width = 0.8 / len(table.providers)
    title = f"{table.title}.{MODES[table.mode].note}"
    for axes, results in plots(figure, table, table.heads, title):
        for i, provider in enumerate(table.providers):
            times = [r.ms(provider) or math.nan for r in results]
            x = [n - 0.4 + width * (i + 0.5) for n in range(len(results))]
            axes.bar(x, times, width, label=NAMES[provider], color=COLORS[provider])
        ticks = [r.case.seqs for r in results]
        axes.set_xticks(range(len(results)), ticks, rotation=45, ha="right", fontsize=8)
    return figure


def scaling(table: Table) -> Figure:
    """One sequence of growing length."""
    figure = Figure(layout="constrained")
    title = f"{table.title}: one sequence of T tokens"
    for axes, results in plots(figure, table, table.scaling, title):
        lengths = [r.lens[0] for r in results]
        for provider in table.providers:
            times = [r.ms(provider) or math.nan for r in results]
            style = {"color": COLORS[provider], "marker": "o"}
            axes.plot(lengths, times, label=NAMES[provider], **style)
        axes.set_xscale("log", base=2)
        axes.set_xticks(lengths, list(map(str, lengths)))
        axes.set_xticks([], minor=True)
        axes.set_xlabel("T")
    return figure


def speedup_map(table: Table) -> Figure:
    """Time of the best other provider by ours, heads against lengths: blue where ours is faster."""
    heads = list(table.heads)
    lengths = list(dict.fromkeys(r.case.seqs for r in table.results))
    ratios = {(r.case.heads, r.case.seqs): r.ratio for r in table.results}
    values = [[math.log2(ratios.get((h, s)) or math.nan) for s in lengths] for h in heads]
    figure = Figure(figsize=(2 + 0.8 * len(lengths), 2 + 0.4 * len(heads)), layout="constrained")
    axes = figure.subplots()
    axes.imshow(values, cmap="RdBu", vmin=-1.5, vmax=1.5, aspect="auto")
    for y, row in enumerate(values):
        for x, value in enumerate(row):
            text = "–" if math.isnan(value) else f"{2**value:.2f}"
            color = "white" if abs(value) > 1 else "black"
            axes.text(x, y, text, ha="center", va="center", color=color, fontsize=9)
    axes.set_xticks(range(len(lengths)), lengths, rotation=45, ha="right", fontsize=8)
    axes.set_yticks(range(len(heads)), heads)
    axes.set_ylabel("H:HV")
    axes.set_title(f"{table.title}\nbest other / ours", fontsize=10)
    return figure


FIGURES = {
    "ms": latency_bars,
    "speedup": speedup_map,
    "scaling": scaling,
    "host": latency_bars,
}
