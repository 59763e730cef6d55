# SPDX-License-Identifier: MIT
"""Files of results: JSON lines, an environment record and then one row per case.

A row belongs to the last environment record above it:

    {"heads": "2:8", "seqs": "8192x4", "step": "fwd", "gates": "published", "ours": 0.1989, ...}

Each provider has its milliseconds, or null where it failed or ours did not run. Rows without `step`
are measurements of other kinds, which nothing here reads. Optional keys:

    dtype    of q, k, v; default "bfloat16"
    mode     "graph" (default): ms of a CUDA-graph replay; "warm": seconds of a first call;
             "eager": [ms in which the host issues a call, ms until the call is complete]
    error    {provider: why it has no time}
    rel_l2   {provider: {output, or input for its gradient: relative L2 error against float64}},
             on the first and the last q/k head and their value heads
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import time
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

Record = dict[str, Any]

PROVIDERS = ("ours", "fla", "flash_qla", "flashinfer")
VERSIONS = (
    "torch",
    "triton",
    "tilelang",
    "apache-tvm-ffi",
    "fla-core",
    "flash-qla",
    "flashinfer-python",
    "fla-flashqla",
)


class Case(NamedTuple):
    """What is measured: a later result of the same case on the same GPU replaces an earlier one."""

    heads: str
    seqs: str
    step: str
    gates: str
    dtype: str = "bfloat16"
    mode: str = "graph"

    @classmethod
    def of(cls, row: Record) -> Case:
        return cls(**{name: row[name] for name in cls._fields if name in row})


def parse_heads(text: str) -> tuple[int, int]:
    """H and HV of "H:HV"."""
    try:
        H, HV = map(int, text.split(":"))
    except ValueError:
        raise ValueError(f"heads must be H:HV, got {text!r}") from None
    if H < 1 or HV < 1 or HV % H:
        raise ValueError(f"HV must be a multiple of H, got {text!r}")
    return H, HV


def parse_seqs(text: str) -> list[int]:
    """Lengths: "8192x4" (or "4x8192"), "4096+28672", or "rand4_8192": 8192 tokens in 4 parts."""
    if match := re.fullmatch(r"rand(\d+)_(\d+)", text):
        lens = _random_cuts(int(match[1]), int(match[2]))
    else:
        lens = []
        for part in text.split("+"):
            if not (match := re.fullmatch(r"(?:(\d+)x)?(\d+)", part)):
                raise ValueError(
                    f"lengths must be like 8192x4, 4096+28672, rand4_8192, got {text!r}"
                )
            n, length = sorted((int(match[1] or 1), int(match[2])))
            lens += [length] * n
    if not lens or min(lens) < 1:
        raise ValueError(f"there must be a sequence, each with a token, got {text!r}")
    return lens


def _random_cuts(n: int, tokens: int) -> list[int]:
    """Those of flash_qla's benchmark, so that the lengths are those of its published rows."""
    import torch

    if not 1 <= n <= tokens:
        return []
    generator = torch.Generator().manual_seed(42)
    cuts = torch.randperm(tokens - 1, dtype=torch.int32, generator=generator)[: n - 1] + 1
    bounds = [0, *sorted(cuts.tolist()), tokens]
    return [end - start for start, end in pairwise(bounds)]


def environment(argv: list[str], commit: str | None = None) -> Record:
    """This machine and its software; what cannot be found out is None."""
    import torch

    import fla_flashqla
    from fla_flashqla import arch

    gpu = torch.cuda.is_available()
    package = Path(fla_flashqla.__file__).parent
    return {
        "environment": True,
        "gpu": torch.cuda.get_device_name(0) if gpu else None,
        "sms": arch.device_facts(torch.device("cuda", 0)).sms if gpu else None,
        "driver": _first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "cuda": torch.version.cuda,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "argv": argv,
        **{name: _version(name) for name in VERSIONS},
        "fla-flashqla": fla_flashqla.__version__,
        "commit": commit or _commit(package),
    }


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit(package: Path) -> str | None:
    """The commit of a package that git tracks: an installed copy may lie in a checkout, too."""
    git = ("git", "-C", str(package))
    if _first_line(*git, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    return _first_line(*git, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")


def _first_line(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        return done.stdout.splitlines()[0].strip()
    except (OSError, subprocess.SubprocessError, IndexError):
        return None


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
