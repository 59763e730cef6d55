# SPDX-License-Identifier: MIT
"""Time chunked Gated Delta Rule implementations side by side on one GPU, in one process.

    python benchmarks/bench_gated_delta_rule.py --set published --heads 16:48 --out results.jsonl
    python benchmarks/bench_gated_delta_rule.py --heads 16:64 --seqs 1x32768,4096x8 --pass fwd,bwd

How they are called and timed is in `fla_flashqla/bench.py`. Set `published` is the table of
flash_qla's benchmark; a run for each head configuration (`--heads` takes the set's lengths for them)
keeps all providers of a row in one process. Set `targets` is a selection of it, `heads` of other heads.
Set `layer` has gates `layer`: the call of FLA's layer with all its flags, where `precomputed` is ours
without them, behind FLA's kernels for gates, betas and norms, timed with their gradients.

Inputs are those of `fla_flashqla.testing`: l2-normalised q and k, float32 gates, beta and initial
state. Gates `published` are log-sigmoid / 16 on three quarters of the heads and no decay on the
rest, as in flash_qla's benchmark; `strong` is the range of FLA's layer at initialisation.

Exit codes: 0 if the run is complete, 1 if nothing can be measured or the GPU failed, 2 for wrong
arguments, 130 if interrupted. `records.py` describes the file, `report.py` makes tables of it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import records

from fla_flashqla import bench, cases
from fla_flashqla.bench import progress
from fla_flashqla.cases import Case, Record

Rows = tuple[tuple[str, ...], tuple[str, ...]]  # heads, lengths

_PUBLISHED = (
    *("1x32768", "1x16384", "1x8192", "1x4096", "1x2048"),
    *("28672+4096", "24576+8192", "16384+16384", "8192+24576", "4096+28672"),
    *("12288+4096", "6144+2048", "4096+4096", "2048+6144", "1024+7168"),
    *("8192x4", "4096x8", "2048x4", "1024x8"),
)
_PIECES = tuple(
    f"rand{n}_{tokens}" if n > 1 else f"1x{tokens}"
    for tokens in (8192, 32768)
    for n in (1, 2, 4, 8)
)
_LATENCY = ("1x32768", "4096+28672", "8192x4", "4096x8", "1x8192", "1024x8", "1x2048")
_RANDOM = ("1x8192", "1x32768", "rand4_8192", "rand8_32768")
_TP = ("2:8", "4:16", "8:32", "16:64")
LAYER_PROVIDERS = ("ours", cases.PRECOMPUTED, "fla")  # the others do not take its flags
# By pass; one that a set does not name takes the heads and lengths of the set's last one.
SETS: dict[str, dict[str, Rows]] = {
    "published": {
        "fwd": ((*_TP, "16:32", "8:24", "16:48", "16:16", "32:32"), _PUBLISHED),
        "bwd": (("16:32", "8:16", "4:8", "2:4"), _PIECES),
    },
    "targets": {"fwd": (_TP, _LATENCY), "bwd": (_TP, _RANDOM)},
    "heads": {"fwd": (("16:16", "32:32", "16:48", "8:24"), ("8192x4", "1024x8", "4096+28672"))},
    cases.LAYER: dict.fromkeys(
        ("fwd", "bwd"), (("2:8", "8:32", "16:16", "16:64"), ("1x8192", "8192x4", "4096+28672"))
    ),
}


def plan(args: argparse.Namespace, sets: dict[str, dict[str, Rows]] = SETS) -> list[Case]:
    """The cases of a command line, all of one head configuration together."""
    rows = sets[args.set]
    steps = args.steps or list(rows)
    table = {step: rows.get(step) or list(rows.values())[-1] for step in steps}
    known = dict.fromkeys(h for step in steps for h in table[step][0])
    asked = args.heads and (args.steps or args.seqs)  # not only the set's rows of these heads

    def wanted(heads: str, step: str) -> bool:
        return bool(asked) or heads not in known or heads in table[step][0]

    return [
        Case(heads, seqs, step, args.gates, args.dtype, args.mode)
        for heads in args.heads or known
        for step in steps
        if wanted(heads, step)
        for seqs in args.seqs or table[step][1]
    ]


def parser_of(
    text: str | None,
    sets: dict[str, dict[str, Rows]],
    providers: list[str],
    known: Iterable[str] = cases.NAMES,
) -> argparse.ArgumentParser:
    """The arguments that scripts share which measure sets of cases; the first set is the default."""
    parser = argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add, words = parser.add_argument, cases.words
    default = next(iter(sets))
    add("--set", choices=sets, default=default, help=f"named rows (default: {default})")
    add("--heads", type=words(cases.parse_heads), help="H:HV,... instead of the set's")
    add("--seqs", type=words(cases.parse_seqs), help="lengths,... instead of the set's")
    add(
        "--providers",
        type=words(cases.one_of(known)),
        default=providers,
        help=f"of {','.join(known)} (default: {','.join(providers)})",
    )
    add("--gates", choices=cases.GATES, help="default: published, or layer in the set layer")
    add("--dtype", choices=cases.DTYPES, default="bfloat16")
    add("--json", action="store_true", help="print the records to standard output")
    add("--out", type=Path, help="append the records to this file")
    add("--resume", action="store_true", help="leave out what --out has from this environment")
    add("--commit", help="of the package, where git does not know it")
    parser.set_defaults(steps=None, mode="graph", errors=False)
    return parser


def arguments(argv: list[str]) -> argparse.Namespace:
    parser = parser_of(__doc__, SETS, list(cases.PROVIDERS))
    parser.add_argument(
        "--pass",
        dest="steps",
        type=cases.words(cases.one_of(cases.STEPS)),
        help="fwd,bwd,step (default: the set's)",
    )
    mode = parser.add_mutually_exclusive_group()
    for name, text in (
        ("eager", "time the host: [issue, complete] in ms"),
        ("warm", "only fill the compilers' caches: s"),
    ):
        mode.add_argument(f"--{name}", dest="mode", action="store_const", const=name, help=text)
    parser.add_argument(
        "--errors", action="store_true", help="errors against float64, on two q/k heads"
    )
    parser.set_defaults(providers=None)
    args = checked(parser, argv)
    known = LAYER_PROVIDERS if args.gates == cases.LAYER else cases.PROVIDERS
    args.providers = args.providers or list(known)
    return args


def checked(parser: argparse.ArgumentParser, argv: list[str]) -> argparse.Namespace:
    args = parser.parse_args(argv)
    if args.resume and not args.out:
        parser.error("--resume needs --out")
    args.gates = args.gates or (cases.LAYER if args.set == cases.LAYER else "published")
    return args


def measure(
    args: argparse.Namespace,
    wanted: list[Case],
    argv: list[str],
    complete: Callable[[Record, Record], None] = lambda row, environment: None,
) -> int:
    """Measure the cases and keep each row as it comes; returns the exit code.

    Args:
        args (argparse.Namespace):
            Of a parser that `parser_of` made.
        wanted (list[Case]):
            What to measure.
        argv (list[str]):
            The command line, for the record.
        complete (Callable):
            Called with each row and the environment's record before the row is kept.
    """
    # Nobody needs to know where on a machine the file was.
    shown = [a.replace(str(args.out), args.out.name) if args.out else a for a in argv]
    environment = records.environment(shown, args.commit)
    if environment["gpu"] is None:
        progress("nothing can be measured: PyTorch finds no GPU")
        return 1
    providers, skipped = bench.load(args.providers)
    for name, reason in skipped.items():
        progress(f"{name} is skipped: {reason}")
    if not providers:
        progress("nothing can be measured: no provider is left")
        return 1
    if args.out:
        records.repair(args.out)
        if args.resume:
            done = records.measured(args.out, environment, providers)
            progress(f"{len(done & set(wanted))} of {len(wanted)} cases are in {args.out} already")
            wanted = [case for case in wanted if case not in done]

    def emit(record: Record) -> None:
        if args.out:
            records.append(args.out, record)
        if args.json:
            print(json.dumps(record), flush=True)

    def emit_row(row: Record) -> None:
        complete(row, environment)
        emit(row)

    if wanted:
        emit(environment | ({"skipped": skipped} if skipped else {}))
    try:
        if bench.run(wanted, providers, emit_row, errors=args.errors):
            return 0
    except KeyboardInterrupt:
        progress("interrupted: the rows so far are kept, --resume measures the others")
        return 130
    progress("run again with --resume for them")
    return 1


def main(argv: list[str]) -> int:
    args = arguments(argv)
    return measure(args, plan(args), argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
