# SPDX-License-Identifier: MIT
"""Files of results: JSON lines, an environment record and then one row per case.

A row belongs to the last environment record above it:

    {"heads": "2:8", "seqs": "8192x4", "step": "fwd", "gates": "published", "ours": 0.1989, ...}

Each provider has its milliseconds, or null where it failed or ours did not run. Rows without `step`
are measurements of other kinds, which nothing here reads. Optional keys:

    dtype    of q, k, v; default "bfloat16"
    mode     "graph" (default): ms of a CUDA-graph replay; "warm": seconds of a first call;
             "eager": [ms in which the host issues a call, ms until the call is complete];
             "kernels": {kernel: ms on the device}
    error    {provider: why it has no time}
    rel_l2   {provider: {output, or input for its gradient: relative L2 error against float64}},
             on the first and the last q/k head and their value heads
    share    {kernel of ours: [of the peak bytes, of the peak FLOPs a second]}, of mode "kernels"
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import fla_flashqla
from fla_flashqla import cases
from fla_flashqla.cases import Case, Record


def environment(argv: list[str], commit: str | None = None) -> Record:
    """The record that stands above the rows of a run."""
    commit = commit or _commit(Path(fla_flashqla.__file__).parent)
    return {"environment": True, **cases.environment(), "argv": argv, "commit": commit}


def _commit(package: Path) -> str | None:
    """The commit of a package that git tracks: an installed copy may lie in a checkout, too."""
    git = ("git", "-C", str(package))
    if cases.first_line(*git, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    return cases.first_line(*git, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")


def read(path: Path) -> Iterator[tuple[Record, Record]]:
    """Each side-by-side row of a file, with its environment record in front."""
    environment: Record | None = None
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            record = json.loads(line)
        except ValueError:
            raise ValueError(f"{path}:{number}: not a JSON object: {line[:60]!r}") from None
        if record.get("environment"):
            environment = record
        elif environment is None:
            raise ValueError(f"{path}:{number}: a row before any environment record")
        elif "step" in record:
            yield environment, record


def repair(path: Path) -> None:
    """Cut off a last line that was interrupted while it was written."""
    data = path.read_bytes() if path.exists() else b""
    if data and not data.endswith(b"\n"):
        path.write_bytes(data[: data.rfind(b"\n") + 1])


def measured(path: Path, environment: Record, providers: Iterable[str]) -> set[Case]:
    """Cases for which a file has all of `providers`, measured in the same environment."""

    def same(other: Record) -> bool:
        names = (environment.keys() | other.keys()) - {"time", "argv", "skipped"}
        return all(environment.get(name) == other.get(name) for name in names)

    if not path.exists():
        return set()
    rows = [row for other, row in read(path) if same(other)]
    return {Case.of(row) for row in rows if row.keys() >= set(providers)}


def append(path: Path, record: Record) -> None:
    """Add a record in one write, so that an interrupted run keeps what it has measured."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")
