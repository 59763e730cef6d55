# SPDX-License-Identifier: MIT
"""Time the host: how long it takes to issue a call while the GPU is idle, and where that time goes.

    python benchmarks/host_time.py --out results.jsonl
    python benchmarks/host_time.py --heads 2:8 --providers ours --profile

`own` is our function `fla_flashqla.chunk_gated_delta_rule`; `ours`, as in all benchmarks, FLA's operator, which dispatches to us.
`--profile` adds the Python functions in which ours spends its time, by cProfile, which makes all of them slower.

Exit codes and files are those of bench_gated_delta_rule.py; rows have mode "eager".
"""

from __future__ import annotations

import cProfile
import io
import os
import pstats
import sys
from unittest import mock

import bench_gated_delta_rule as script
import torch

from fla_flashqla import bench
from fla_flashqla.bench import progress
from fla_flashqla.cases import Case, Record

ROWS = ("2:8", "16:64"), ("1x2048",)
SETS: dict[str, dict[str, script.Rows]] = {"host": {"fwd": ROWS, "step": ROWS}}
PROVIDERS = ["ours", "own", "fla", "flash_qla"]
CALLS = 300


def show(row: Record, _: Record) -> None:
    """Microseconds of a row."""
    for name in PROVIDERS:
        if times := row.get(name):
            issue, whole = (1e3 * ms for ms in times)
            progress(f"    {name:<10} issued in {issue:7.1f} us, complete after {whole:8.1f} us")


def profile(case: Case, name: str, lines: int = 40) -> str:
    """Where the host is while it issues calls."""
    provider = bench.LOADERS[name]()
    with mock.patch.dict(os.environ, provider.variables):
        function = bench.prepare(provider, case, "cuda").make()
        for _ in range(3):
            function()
        profiler = cProfile.Profile()
        for _ in range(CALLS):
            torch.cuda.synchronize()
            profiler.enable()
            function()
            profiler.disable()
    text = io.StringIO()
    pstats.Stats(profiler, stream=text).strip_dirs().sort_stats("tottime").print_stats(lines)
    return text.getvalue()


def main(argv: list[str]) -> int:
    parser = script.parser_of(__doc__, SETS, PROVIDERS, tuple(bench.LOADERS))
    parser.add_argument("--profile", action="store_true", help="show where the time of ours goes")
    parser.set_defaults(mode="eager")
    args = script.checked(parser, argv)
    wanted = script.plan(args, SETS)
    code = script.measure(args, wanted, argv, show)
    if args.profile and not code:
        for case in wanted:
            for name in ("ours", "own"):
                if name in args.providers:
                    progress(f"{name}, {case.step} {case.heads} {case.seqs}, {CALLS} calls:")
                    progress(profile(case, name))
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
