# SPDX-License-Identifier: MIT
"""What benchmarks measure, on which machine, and how their rows are read; loads no torch by itself."""

from __future__ import annotations

import argparse
import importlib.metadata
import re
import subprocess
import time
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any, NamedTuple

Record = dict[str, Any]

PRECOMPUTED = "precomputed"  # ours, behind FLA's kernels for gates, betas and norms
NAMES = {"ours": "ours", "fla": "FLA", "flash_qla": "flash_qla", "flashinfer": "FlashInfer"}
PROVIDERS = tuple(NAMES)
NAMES[PRECOMPUTED] = "ours, precomputed"
OTHERS = tuple(NAMES)[1:]
STEPS = {"fwd": "forward", "bwd": "backward", "step": "forward and backward"}
LAYER = "layer"  # the call of FLA's layer: gates, betas and norms are made by the operator
GATES = ("published", "strong", "mild", "zero", LAYER)
DTYPES = ("bfloat16", "float16")
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


def words(parse: Callable[[str], object]) -> Callable[[str], list[str]]:
    """An argument that is a list of words that `parse` takes."""

    def convert(text: str) -> list[str]:
        found = list(dict.fromkeys(text.split(",")))
        try:
            for word in found:
                parse(word)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        return found

    return convert


def one_of(known: Iterable[str]) -> Callable[[str], object]:
    def parse(word: str) -> None:
        if word not in known:
            raise ValueError(f"{word!r} is none of {', '.join(known)}")

    return parse


def milliseconds(row: Record, provider: str) -> float | None:
    """The time of a provider; of mode "eager" that in which the host issues a call."""
    found: float | list[float] | None = row.get(provider)
    return found[0] if isinstance(found, list) else found


def ratio(row: Record, others: Iterable[str] = OTHERS) -> float | None:
    """Time of the fastest of `others` by ours: above 1 ours is faster."""
    times = [ms for provider in others if (ms := milliseconds(row, provider))]
    ours = milliseconds(row, "ours")
    return min(times) / ours if times and ours else None


def environment() -> Record:
    """This machine and its software; what cannot be found out is None."""
    import torch

    from fla_flashqla import __version__, arch

    gpu = torch.cuda.is_available()
    return {
        "gpu": torch.cuda.get_device_name(0) if gpu else None,
        "sms": arch.device_facts(torch.device("cuda", 0)).sms if gpu else None,
        "driver": first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "cuda": torch.version.cuda,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        **{name: _version(name) for name in VERSIONS},
        "fla-flashqla": __version__,
    }


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def first_line(*command: str) -> str | None:
    """The first line that a command prints, if it succeeds."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        return done.stdout.splitlines()[0].strip()
    except (OSError, subprocess.SubprocessError, IndexError):
        return None
