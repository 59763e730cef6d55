# SPDX-License-Identifier: MIT
"""Make README.md's tables and the pictures from all files in benchmarks/results.

    python benchmarks/report.py            # write what is stale
    python benchmarks/report.py --check    # write nothing, exit with 1 if something is stale

Of several results of a case on the same GPU the newest one counts, as a whole row. Rows in which
ours is slower stay in, and so do rows without a result of ours. Modes `graph` and `eager` are shown.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import re
import statistics
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

import records

from fla_flashqla import cases
from fla_flashqla.cases import NAMES, PROVIDERS, STEPS, Case, Record

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- performance -->\n", "<!-- end of performance -->\n"
FOLDED_ROWS = 16  # more are folded away
SCALING_ROWS = 3  # a line needs so many lengths


class Mode(NamedTuple):
    """How rows of a mode are shown."""

    title: str
    note: str
    picture_rows: int  # a picture of fewer rows says less than its table


MODES = {
    "graph": Mode("", "", 12),
    "eager": Mode("host time of ", " Milliseconds in which the host issues a call.", 4),
}


class Result(NamedTuple):
    """The newest row of a case, with the environment and the file that it is from."""

    case: Case
    row: Record
    environment: Record
    path: Path

    @property
    def ratio(self) -> float | None:
        """Time of the best other provider by ours: above 1 ours is faster."""
        return cases.ratio(self.row)

    def ms(self, provider: str) -> float | None:
        return cases.milliseconds(self.row, provider)

    @property
    def lens(self) -> list[int]:
        return cases.parse_seqs(self.case.seqs)


Key = tuple[str, str, str, str, str]  # the GPU, pass, gates, dtype and mode of a table


class Table(NamedTuple):
    """Results of one GPU, pass, kind of gates, dtype and mode, in the order in which they are shown."""

    gpu: str
    step: str
    gates: str
    dtype: str
    mode: str
    results: list[Result]

    @property
    def title(self) -> str:
        what = MODES[self.mode].title + STEPS[self.step]
        return f"{self.gpu}: {what}, {self.dtype}, {self.gates} gates"

    @property
    def heads(self) -> dict[str, list[Result]]:
        """The results of each head configuration."""
        found: dict[str, list[Result]] = {}
        for result in self.results:
            found.setdefault(result.case.heads, []).append(result)
        return found

    @property
    def scaling(self) -> dict[str, list[Result]]:
        """Those of single sequences, shortest first, where there are enough to see how time grows with T."""
        single = {
            h: [r for r in found[::-1] if len(r.lens) == 1] for h, found in self.heads.items()
        }
        return {heads: found for heads, found in single.items() if len(found) >= SCALING_ROWS}

    @property
    def providers(self) -> list[str]:
        return [p for p in NAMES if p == "ours" or any(p in r.row for r in self.results)]

    @property
    def digest(self) -> str:
        """What a picture of this table carries, to show that it is not stale."""
        rows = [r.row for r in self.results]
        return hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()

    def pictures(self, results: Path) -> dict[str, Path]:
        """By kind: latency bars, speed-up map and scaling over T, or the host's time; none for a small table."""
        if len(self.results) < MODES[self.mode].picture_rows:
            return {}
        kinds = (
            ["host"]
            if self.mode == "eager"
            else ["ms", "speedup", *["scaling"] * bool(self.scaling)]
        )
        name = "-".join([self.step, self.gates, self.dtype])
        return {kind: results / slug(self.gpu) / f"{name}-{kind}.svg" for kind in kinds}


def slug(gpu: str) -> str:
    """The folder of a GPU: "h200" for "NVIDIA H200"."""
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower().removeprefix("nvidia ")).strip("-")


def tables(results: Path) -> list[Table]:
    newest: dict[tuple[str, Case], Result] = {}
    for path in sorted(results.rglob("*.jsonl")):
        for environment, row in records.read(path):
            result = Result(Case.of(row), row, environment, path)
            gpu = environment["gpu"]
            if path.parent.name != slug(gpu):
                raise ValueError(f"{path}: rows of {gpu} belong into a folder {slug(gpu)}")
            old = newest.get((gpu, result.case))
            if old is None or old.environment["time"] <= environment["time"]:
                newest[gpu, result.case] = result
    groups: dict[Key, list[Result]] = {}
    for (gpu, case), result in newest.items():
        if case.mode in MODES:
            key = (gpu, case.step, case.gates, case.dtype, case.mode)
            groups.setdefault(key, []).append(result)
    return [Table(*key, sorted(groups[key], key=order)) for key in sorted(groups, key=table_order)]


def table_order(key: Key) -> tuple[str, int, str, int, str]:
    gpu, step, gates, dtype, mode = key
    return gpu, list(MODES).index(mode), dtype, list(STEPS).index(step), gates


def order(result: Result) -> tuple[tuple[int, int], int, int, str]:
    """By heads; then the most tokens and the fewest sequences first."""
    heads, lens = cases.parse_heads(result.case.heads), result.lens
    return heads, -sum(lens), len(lens), result.case.seqs


def cell(result: Result, provider: str) -> str:
    if provider not in result.row:
        return "–"
    ms = result.ms(provider)
    return "n/a" if ms is None else f"{ms:.3f}"


def mean(ratios: Collection[float]) -> float:
    return math.exp(statistics.fmean(map(math.log, ratios)))


def summary(table: Table) -> str:
    """Mean, extremes, losses, and what is missing."""
    ratios = {
        f"{r.case.heads} {r.case.seqs}": r.ratio for r in table.results if r.ratio is not None
    }
    missing = len(table.results) - len(ratios)
    text = f"{len(table.results)} rows.{MODES[table.mode].note}"
    if ratios:
        best, worst = max(ratios, key=ratios.__getitem__), min(ratios, key=ratios.__getitem__)
        losses = sum(ratio < 1 for ratio in ratios.values())
        text += f" Best other / ours: {mean(ratios.values()):.2f} in the geometric mean,"
        text += f" {ratios[best]:.2f} at best ({best}), {ratios[worst]:.2f} at worst ({worst});"
        text += f" ours is slower in {losses}."
    if missing:
        text += f" Without such a ratio: {missing}."
    absent = [NAMES[p] for p in PROVIDERS if not any(p in r.row for r in table.results)]
    return text + (f" Not measured: {', '.join(absent)}." if absent else "")


def by_heads(table: Table) -> Iterator[str]:
    """The summary of each head configuration, if there are several."""
    if len(table.heads) < 2:
        return
    yield "| H:HV | rows | best other / ours: mean | best | worst | ours slower in | FLA / ours: mean |"
    yield "| --- |" + " ---: |" * 6
    for heads, results in table.heads.items():
        ratios = [r.ratio for r in results if r.ratio is not None]
        gains = [gain for r in results if (gain := cases.ratio(r.row, ("fla",)))]
        losses = str(sum(ratio < 1 for ratio in ratios))
        numbers = [mean(ratios), max(ratios), min(ratios)] if ratios else []
        cells = [f"{x:.2f}" for x in numbers] or ["–"] * 3
        last = f"{mean(gains):.2f}" if gains else "–"
        yield f"| {' | '.join([heads, str(len(results)), *cells, losses, last])} |"
    yield ""


def source(environment: Record, link: str) -> str:
    """The file, when and with what it was measured."""
    names = ("driver", "cuda", *cases.VERSIONS, "commit")
    versions = [f"{name} {environment[name]}" for name in names if environment.get(name)]
    return f"[{Path(link).name}]({link}), {environment['time'][:10]}: {', '.join(versions)}"


def render(table: Table, results: Path, root: Path) -> Iterator[str]:
    """The lines of one table, with its pictures and sources; many rows are folded away."""
    yield from (f"### {table.title}", "", summary(table), "")
    yield from by_heads(table)
    for picture in table.pictures(results).values():
        yield f"![{table.title}]({picture.relative_to(root).as_posix()})"
        yield ""
    folded = len(table.results) > FOLDED_ROWS
    if folded:
        yield from (f"<details><summary>All {len(table.results)} rows</summary>", "")
    columns = ["H:HV", "lengths", *(NAMES[p] for p in table.providers), "best other / ours", "run"]
    yield f"| {' | '.join(columns)} |"
    yield "| --- | --- |" + " ---: |" * (len(columns) - 2)
    sources: list[str] = []
    for result in table.results:
        text = source(result.environment, result.path.relative_to(root).as_posix())
        if text not in sources:
            sources.append(text)
        times = [cell(result, provider) for provider in table.providers]
        ratio = "–" if result.ratio is None else f"{result.ratio:.2f}"
        cells = [result.case.heads, result.case.seqs, *times, ratio, str(sources.index(text) + 1)]
        yield f"| {' | '.join(cells)} |"
    yield ""
    if folded:
        yield from ("</details>", "")
    yield from (f"{number}. {text}" for number, text in enumerate(sources, 1))
    yield ""


def stale_pictures(shown: list[Table], results: Path) -> list[Path]:
    """Pictures that are missing or were drawn from other rows."""
    return [
        path
        for table in shown
        for path in table.pictures(results).values()
        if not path.exists() or table.digest not in path.read_text()
    ]


def main(argv: list[str], root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="exit with 1 if something is stale")
    args = parser.parse_args(argv)
    results, readme = root / "benchmarks" / "results", root / "README.md"
    shown = tables(results)
    text = readme.read_text()
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    lines = [line for table in shown for line in render(table, results, root)]
    made = "".join([before, BEGIN, "\n", *(line + "\n" for line in lines), END, after])
    pictures = stale_pictures(shown, results)
    stale = [readme] * (made != text) + pictures
    for path in stale:
        print(f"{'stale' if args.check else 'writing'}: {path.relative_to(root)}")
    if args.check:
        return 1 if stale else 0
    readme.write_text(made)
    if pictures:
        import plot  # the one part that needs matplotlib

        for table in shown:
            for kind, path in table.pictures(results).items():
                if path in pictures:
                    plot.draw(table, kind, path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
