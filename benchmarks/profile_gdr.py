# SPDX-License-Identifier: MIT
"""Time each kernel on the device, and say how near it is to what the GPU can do.

    python benchmarks/profile_gdr.py --set develop
    python benchmarks/profile_gdr.py --heads 16:64 --seqs 8192x4 --skip-bwd --providers ours,fla

Sets: `develop` has few chains, groups of one, and a full GPU; `varlen` tails and ragged batches;
`product` the heads of models, whole and under tensor parallelism. Times are from PyTorch's profiler
(`fla_flashqla.bench.time_kernels`). For our kernels there is the share of the bytes and of the
FLOPs a second that were measured to be possible on this GPU, if it is in `PEAKS`: bytes and FLOPs
of inputs, results and products are counted as in docs/forward.md and docs/backward.md.

Exit codes and files are those of bench_gated_delta_rule.py; rows have mode "kernels".
"""

from __future__ import annotations

import sys
from typing import NamedTuple

import bench_gated_delta_rule as script

from fla_flashqla import cases
from fla_flashqla.bench import progress
from fla_flashqla.cases import Record

CHUNK = 64
KB, MFLOP = 1024, 1e6


class Peak(NamedTuple):
    bytes_per_s: float
    flops_per_s: float


class Work(NamedTuple):
    """Of a chunk: KB moved and MFLOP for a value head, and for a q/k head."""

    kb: float
    kb_qk: float
    mflop: float
    mflop_qk: float = 0.0


PEAKS = {"NVIDIA H200": Peak(4.3e12, 780e12)}  # measured: copies, and products in bfloat16
WORK = {
    "gdr_prepare": Work(10, 16, 0, 1.05),
    "gdr_forward": Work(41.5, 32, 9.45),
    "gdr_states": Work(73.5, 16, 5.25),
    "gdr_reverse": Work(73.5, 32, 9.45),
    "gdr_gradients": Work(114, 64, 12.6),
}
_BOTH = ("fwd", "bwd")
SETS: dict[str, dict[str, script.Rows]] = {
    name: dict.fromkeys(_BOTH, rows)
    for name, rows in {
        "develop": (("2:8", "16:16", "16:64"), ("1x32768", "8192x4")),
        "varlen": (("4:16", "16:64"), ("33x11", "4096+28672", "rand8_32768", "1000x30")),
        "product": (("16:32", "16:48", "16:64", "4:16"), ("1x16384", "rand16_16384")),
    }.items()
}


def shares(row: Record, peak: Peak) -> dict[str, list[float]]:
    """Shares of the peak bytes and FLOPs a second, by kernel of ours."""
    H, HV = cases.parse_heads(row["heads"])
    chunks = sum(-(-length // CHUNK) for length in cases.parse_seqs(row["seqs"]))
    found = {}
    for name, ms in row["ours"].items():
        if work := WORK.get(name.removesuffix("_kernel")):
            moved = (work.kb * HV + work.kb_qk * H) * KB * chunks
            done = (work.mflop * HV + work.mflop_qk * H) * MFLOP * chunks
            times = moved / peak.bytes_per_s, done / peak.flops_per_s
            found[name] = [round(s / (ms / 1e3), 3) for s in times]
    return found


def show(row: Record) -> None:
    """The kernels of a row, as text on the way."""
    for provider in cases.PROVIDERS:
        for name, ms in (row.get(provider) or {}).items():
            text = f"    {provider:<10} {ms:9.4f} ms"
            if share := row.get("share", {}).get(name) if provider == "ours" else None:
                text += "  {:4.0%} of bytes  {:4.0%} of FLOPs".format(*share)
            progress(f"{text:<56} {name}")


def complete(row: Record, environment: Record) -> None:
    """Add the shares of a row, and show it."""
    if (peak := PEAKS.get(environment["gpu"])) and row.get("ours"):
        row["share"] = shares(row, peak)
    show(row)


def main(argv: list[str]) -> int:
    parser = script.parser_of(__doc__, SETS, ["ours"])
    parser.add_argument("--skip-bwd", action="store_true", help="the forward pass only")
    parser.set_defaults(mode="kernels")
    args = script.checked(parser, argv)
    if args.skip_bwd:
        args.steps = ["fwd"]
    return script.measure(args, script.plan(args, SETS), argv, complete)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
