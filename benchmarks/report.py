# SPDX-License-Identifier: MIT
"""Make README.md's tables and the pictures from all files in benchmarks/results.

    python benchmarks/report.py            # write what is stale
    python benchmarks/report.py --check    # write nothing, exit with 1 if something is stale

Of several results of a case on the same GPU the newest one counts, as a whole row. Rows in which
ours is slower stay in, and so do rows without a result of ours. Only mode `graph` is shown.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import re
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import records
from records import PROVIDERS, Case, Record

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- performance -->\n", "<!-- end of performance -->\n"
STEPS = {"fwd": "forward", "bwd": "backward", "step": "forward and backward"}
NAMES = {"ours": "ours", "fla": "FLA", "flash_qla": "flash_qla", "flashinfer": "FlashInfer"}
PICTURE_ROWS = 12  # a picture of fewer rows says less than its table


class Result(NamedTuple):
    """The newest row of a case, with the environment and the file that it is from."""

    case: Case
    row: Record
    environment: Record
    path: Path

    @property
    def ratio(self) -> float | None:
        """Time of the best other provider by ours: above 1 ours is faster."""
        others = [self.row[p] for p in PROVIDERS[1:] if self.row.get(p)]
        ours = self.row.get("ours")
        return min(others) / ours if others and ours else None


class Table(NamedTuple):
    """Results of one GPU, pass, kind of gates and dtype, in the order in which they are shown."""

    gpu: str
    step: str
    gates: str
    dtype: str
    results: list[Result]

    @property
    def title(self) -> str:
        return f"{self.gpu}: {STEPS[self.step]}, {self.dtype}, {self.gates} gates"

    @property
    def providers(self) -> list[str]:
        return [p for p in PROVIDERS if p == "ours" or any(p in r.row for r in self.results)]

    @property
    def digest(self) -> str:
        """What a picture of this table carries, to show that it is not stale."""
        rows = [r.row for r in self.results]
        return hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()

    def pictures(self, results: Path) -> list[Path]:
        """Latency bars and speed-up map; none for a small table."""
        if len(self.results) < PICTURE_ROWS:
            return []
        name = "-".join([self.step, self.gates, self.dtype])
        return [results / slug(self.gpu) / f"{name}-{kind}.svg" for kind in ("ms", "speedup")]


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
    groups: dict[tuple[str, str, str, str], list[Result]] = {}
    for (gpu, case), result in newest.items():
        if case.mode == "graph":
            groups.setdefault((gpu, case.step, case.gates, case.dtype), []).append(result)
    return [Table(*key, sorted(groups[key], key=order)) for key in sorted(groups, key=table_order)]


def table_order(key: tuple[str, str, str, str]) -> tuple[str, str, int, str]:
    gpu, step, gates, dtype = key
    return gpu, dtype, list(STEPS).index(step), gates


def order(result: Result) -> tuple[tuple[int, int], int, int, str]:
    """By heads; then the most tokens and the fewest sequences first."""
    lens = records.parse_seqs(result.case.seqs)
    return records.parse_heads(result.case.heads), -sum(lens), len(lens), result.case.seqs


def cell(row: Record, provider: str) -> str:
    if provider not in row:
        return "–"
    return "n/a" if row[provider] is None else f"{row[provider]:.3f}"


def summary(table: Table) -> str:
    """Mean, extremes, losses, and what is missing."""
    ratios = {
        f"{r.case.heads} {r.case.seqs}": r.ratio for r in table.results if r.ratio is not None
    }
    missing = len(table.results) - len(ratios)
    text = f"{len(table.results)} rows."
    if ratios:
        mean = math.exp(statistics.fmean(map(math.log, ratios.values())))
        best, worst = max(ratios, key=ratios.__getitem__), min(ratios, key=ratios.__getitem__)
        losses = sum(ratio < 1 for ratio in ratios.values())
        text += f" Best other / ours: {mean:.2f} in the geometric mean, {ratios[best]:.2f} at best"
        text += f" ({best}), {ratios[worst]:.2f} at worst ({worst}); ours is slower in {losses}."
    if missing:
        text += f" Without such a ratio: {missing}."
    absent = [NAMES[p] for p in PROVIDERS if not any(p in r.row for r in table.results)]
    return text + (f" Not measured: {', '.join(absent)}." if absent else "")


def source(environment: Record, link: str) -> str:
    """The file, when and with what it was measured."""
    names = ("driver", "cuda", *records.VERSIONS, "commit")
    versions = [f"{name} {environment[name]}" for name in names if environment.get(name)]
    return f"[{Path(link).name}]({link}), {environment['time'][:10]}: {', '.join(versions)}"


def render(table: Table, results: Path, root: Path) -> Iterator[str]:
    """The lines of one table, with its pictures and sources."""
    yield from (f"### {table.title}", "", summary(table), "")
    for picture in table.pictures(results):
        yield f"![{table.title}]({picture.relative_to(root).as_posix()})"
        yield ""
    columns = ["H:HV", "lengths", *(NAMES[p] for p in table.providers), "best other / ours", "run"]
    yield f"| {' | '.join(columns)} |"
    yield "| --- | --- |" + " ---: |" * (len(columns) - 2)
    sources: list[str] = []
    for result in table.results:
        text = source(result.environment, result.path.relative_to(root).as_posix())
        if text not in sources:
            sources.append(text)
        times = [cell(result.row, provider) for provider in table.providers]
        ratio = "–" if result.ratio is None else f"{result.ratio:.2f}"
        cells = [result.case.heads, result.case.seqs, *times, ratio, str(sources.index(text) + 1)]
        yield f"| {' | '.join(cells)} |"
    yield ""
    yield from (f"{number}. {text}" for number, text in enumerate(sources, 1))
    yield ""


def stale_pictures(shown: list[Table], results: Path) -> list[Path]:
    """Pictures that are missing or were drawn from other rows."""
    return [
        path
        for table in shown
        for path in table.pictures(results)
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
            if set(table.pictures(results)) & set(pictures):
                plot.draw(table, *table.pictures(results))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
