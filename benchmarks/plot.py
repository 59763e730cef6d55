# SPDX-License-Identifier: MIT
"""Pictures of one table of `report.py`, which draws them where they are stale."""

from __future__ import annotations

import math
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure
from report import NAMES, Table

COLUMNS = 3
COLORS = {"ours": "#1b7837", "fla": "#bdbdbd", "flash_qla": "#7fb3d5", "flashinfer": "#e59866"}


def draw(table: Table, latency: Path, speedup: Path) -> None:
    """Write both pictures as SVG, the same for the same rows."""
    save(latency_bars(table), latency, table.digest)
    save(speedup_map(table), speedup, table.digest)


def save(figure: Figure, path: Path, digest: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context({"svg.hashsalt": "fla_flashqla", "svg.fonttype": "none"}):
        figure.savefig(path, metadata={"Date": None, "Description": f"rows {digest}"})


def latency_bars(table: Table) -> Figure:
    """One plot per head configuration, with the providers side by side for each set of lengths."""
    heads = list(dict.fromkeys(r.case.heads for r in table.results))
    rows = -(-len(heads) // COLUMNS)
    figure = Figure(figsize=(5 * COLUMNS, 3 * rows + 0.5), layout="constrained")
    grid = list(figure.subplots(rows, COLUMNS, squeeze=False).flat)
    for axes in grid[len(heads) :]:
        axes.set_axis_off()
    width = 0.8 / len(table.providers)
    for axes, config in zip(grid, heads, strict=False):
        results = [r for r in table.results if r.case.heads == config]
        for i, provider in enumerate(table.providers):
            x = [n - 0.4 + width * (i + 0.5) for n in range(len(results))]
            times = [r.row.get(provider) or 0.0 for r in results]
            axes.bar(x, times, width, label=NAMES[provider], color=COLORS[provider])
        axes.set_title(f"H:HV = {config}")
        axes.set_ylabel("ms")
        ticks = [r.case.seqs for r in results]
        axes.set_xticks(range(len(results)), ticks, rotation=45, ha="right", fontsize=8)
    figure.axes[0].legend()
    figure.suptitle(table.title)
    return figure


def speedup_map(table: Table) -> Figure:
    """Time of the best other provider by ours, heads against lengths: blue where ours is faster."""
    heads = list(dict.fromkeys(r.case.heads for r in table.results))
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
