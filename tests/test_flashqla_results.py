# SPDX-License-Identifier: MIT
"""README's tables and pictures, made from files of results."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
BENCHMARKS = ROOT / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import records  # noqa: E402
import report  # noqa: E402

PICTURES = ("ms", "speedup", "scaling")
ENVIRONMENT = {"environment": True, "gpu": "NVIDIA H200", "time": "2026-01-01T00:00:00Z"}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "README.md").write_text(f"before\n{report.BEGIN}{report.END}after\n")
    return tmp_path


def put(tree: Path, name: str, *rows: Any, **environment: Any) -> None:
    path = tree / "benchmarks" / "results" / "h200" / f"{name}.jsonl"
    records.append(path, ENVIRONMENT | environment)
    for row in rows:
        records.append(path, {"heads": "2:8", "step": "fwd", "gates": "published"} | row)


def cells(tree: Path) -> list[list[str]]:
    lines = [x for x in (tree / "README.md").read_text().splitlines() if x.startswith("| 2:8")]
    return [line.strip("| ").split(" | ")[1:] for line in lines]


def test_flashqla_report_table(tree: Path) -> None:
    """The newest row counts whatever its file is called; losses and failures are shown."""
    win = {"seqs": "8192x4", "ours": 1.0, "fla": 3.0, "flash_qla": 2.0}
    loss = {"seqs": "1x2048", "ours": 2.0, "fla": 3.0, "flash_qla": 1.0}
    none = {"seqs": "1x8192", "ours": None, "fla": 3.0, "error": {"ours": "Unsupported: no"}}
    kernels = {"seqs": "64", "mode": "kernels", "ours": {"gdr_forward_kernel": 1.0}}
    other_kind = {"environment": False, "kernel": "forward", "ms": 1.0}
    put(tree, "b", win | {"ours": 0.1}, loss, torch="2.8.0")
    put(tree, "a", win, none, kernels, time="2026-02-01T00:00:00Z", torch="2.9.0", commit=None)
    records.append(tree / "benchmarks" / "results" / "h200" / "a.jsonl", other_kind)
    assert report.main(["--check"], tree) == 1
    assert report.main([], tree) == 0 and report.main(["--check"], tree) == 0
    assert cells(tree) == [
        ["8192x4", "1.000", "3.000", "2.000", "2.00", "1"],
        ["1x8192", "n/a", "3.000", "–", "–", "1"],
        ["1x2048", "2.000", "3.000", "1.000", "0.50", "2"],
    ]
    text = (tree / "README.md").read_text()
    assert text.startswith("before\n") and text.endswith("after\n")
    assert "1.00 in the geometric mean, 2.00 at best (2:8 8192x4), 0.50 at worst" in text
    assert "slower in 1. Without such a ratio: 1. Not measured: FlashInfer." in text
    assert "1. [a.jsonl](benchmarks/results/h200/a.jsonl), 2026-02-01: torch 2.9.0\n" in text
    assert "2. [b.jsonl](benchmarks/results/h200/b.jsonl), 2026-01-01: torch 2.8.0\n" in text


def test_flashqla_report_host_time(tree: Path) -> None:
    """A table of its own, of the time in which the host issues a call."""
    pytest.importorskip("matplotlib")
    eager = {"mode": "eager", "ours": [0.1, 1.0], "fla": [0.3, 0.9]}
    put(tree, "a", *({"seqs": str(n)} | eager for n in (1, 2, 3, 4)), {"seqs": "1", "ours": 1.0})
    report.main([], tree)
    text = (tree / "README.md").read_text()
    assert (
        "### NVIDIA H200: host time of forward, bfloat16, published gates\n\n4 rows. Mill" in text
    )
    assert cells(tree) == [["1", "1.000", "–", "1"]] + [
        [str(n), "0.100", "0.300", "3.00", "1"] for n in (4, 3, 2, 1)
    ]
    (picture,) = (tree / "benchmarks" / "results" / "h200").glob("*.svg")
    assert picture.name == "fwd-published-bfloat16-host.svg" and picture.name in text
    assert "the host issues a call" in picture.read_text()


def test_flashqla_report_by_heads(tree: Path) -> None:
    """A summary of each head configuration, where there are several; many rows are folded away."""
    pytest.importorskip("matplotlib")
    rows = [{"seqs": f"{n}x{n}", "ours": 1.0, "fla": 2.0, "flash_qla": 0.5} for n in range(1, 8)]
    more = {"heads": "4:4", "seqs": "8", "ours": 1.0, "fla": 4.0}
    put(tree, "a", *rows, more, more | {"seqs": "9", "ours": None})
    report.main([], tree)
    lines = (tree / "README.md").read_text().splitlines()
    assert "| 2:8 | 7 | 0.50 | 0.50 | 0.50 | 7 | 2.00 |" in lines
    assert "| 4:4 | 2 | 4.00 | 4.00 | 4.00 | 0 | 4.00 |" in lines
    assert not any("<details>" in line for line in lines)
    put(tree, "b", *({"heads": "8:8", "seqs": str(n), "ours": None} for n in range(10, 20)))
    report.main([], tree)
    lines = (tree / "README.md").read_text().splitlines()
    assert "| 8:8 | 10 | – | – | – | 0 | – |" in lines
    start, end = lines.index("<details><summary>All 19 rows</summary>"), lines.index("</details>")
    assert sum(bool(re.match(r"\| \d:\d \| \d+", line)) for line in lines[start:end]) == 19


def test_flashqla_report_tables_by_pass_gates_and_dtype(tree: Path) -> None:
    row = {"seqs": "64", "ours": 1.0}
    put(
        tree, "a", row, row | {"step": "bwd"}, row | {"gates": "strong"}, row | {"dtype": "float16"}
    )
    report.main([], tree)
    assert re.findall(r"### NVIDIA H200: (.+)", (tree / "README.md").read_text()) == [
        "forward, bfloat16, published gates",
        "forward, bfloat16, strong gates",
        "backward, bfloat16, published gates",
        "forward, float16, published gates",
    ]
    assert cells(tree) == [["64", "1.000", "–", "1"]] * 4


def test_flashqla_report_precomputed(tree: Path) -> None:
    """Ours without its flags has a column of its own, and what it gains is a loss."""
    row = {"seqs": "64", "gates": "layer", "ours": 1.0, "fla": 4.0, "precomputed": 0.5}
    put(tree, "a", row)
    report.main([], tree)
    text = (tree / "README.md").read_text()
    assert "| H:HV | lengths | ours | FLA | ours, precomputed | best other / ours | run |" in text
    assert cells(tree) == [["64", "1.000", "4.000", "0.500", "0.50", "1"]]
    assert "ours is slower in 1. Not measured: flash_qla, FlashInfer.\n" in text


def test_flashqla_report_wrong_folder(tree: Path) -> None:
    put(tree, "a", {"seqs": "64", "ours": 1.0}, gpu="NVIDIA GB200")
    with pytest.raises(ValueError, match="belong into a folder gb200"):
        report.main([], tree)


def test_flashqla_report_pictures(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Drawn from enough rows, linked, the same each time, and stale once the rows change."""
    pytest.importorskip("matplotlib")
    rows = [{"seqs": str(64 * n), "ours": 1.0, "fla": 0.2 * n} for n in range(1, 14)]
    put(tree, "a", *rows[:12], rows[0] | {"ours": None, "seqs": "32"})
    assert report.main([], tree) == 0 and report.main(["--check"], tree) == 0
    folder = tree / "benchmarks" / "results" / "h200"
    drawn = {path.name: path.read_text() for path in folder.glob("*.svg")}
    assert drawn.keys() == {f"fwd-published-bfloat16-{kind}.svg" for kind in PICTURES}
    assert all(f"results/h200/{name}" in (tree / "README.md").read_text() for name in drawn)
    bars, speedup, scaling = (drawn[f"fwd-published-bfloat16-{kind}.svg"] for kind in PICTURES)
    assert ">H:HV = 2:8<" in bars and ">FLA<" in bars and ">0.20<" in speedup
    assert (
        "one sequence of T tokens" in scaling and ">768<" in scaling and ">H:HV = 2:8<" in scaling
    )
    (folder / "fwd-published-bfloat16-ms.svg").unlink()
    assert report.main(["--check"], tree) == 1
    report.main([], tree)
    assert {path.name: path.read_text() for path in folder.glob("*.svg")} == drawn
    put(tree, "b", rows[12])
    capsys.readouterr()
    assert report.main(["--check"], tree) == 1
    assert len(re.findall("stale: .*svg", capsys.readouterr().out)) == 3


def test_flashqla_report_scaling_needs_single_sequences(tree: Path) -> None:
    rows = [{"seqs": f"{n}x64", "ours": 1.0} for n in range(1, 14)]
    put(tree, "a", *rows)
    (table,) = report.tables(tree / "benchmarks" / "results")
    assert table.scaling == {} and list(table.pictures(tree)) == ["ms", "speedup"]


# What is in the tree


def test_flashqla_readme_performance_is_not_stale() -> None:
    assert report.main(["--check"]) == 0, "run `python benchmarks/report.py`"


def test_flashqla_results_name_no_machine() -> None:
    for path in (BENCHMARKS / "results").rglob("*.jsonl"):
        for line in path.read_text().splitlines():
            assert not any(a.startswith("/") for a in json.loads(line).get("argv", [])), path


def test_flashqla_benchmark_files() -> None:
    for path in BENCHMARKS.glob("*.py"):
        lines = path.read_text().splitlines()
        assert lines[:1] == ["# SPDX-License-Identifier: MIT"], path
        assert len(lines) <= 500, path
