# SPDX-License-Identifier: MIT
"""The command `fla-flashqla`; each subcommand has `--json` and documents its exit code."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from fla_flashqla import __version__, cases

_CHECK = """\
Reports versions, the GPU and the compiler, proves that FLA's operator reaches this package, compares
its results with a float64 reference on the best device there is, and shows what would answer typical
calls. Nothing is changed. Where there is no GPU, the comparison runs on the CPU.
"""
_CHECK_EXIT = """\
exit code: 0 if everything that can work on this machine does, 1 if something does not or is switched
off (the last lines say what), 2 for wrong arguments.
"""
_WARMUP = """\
Compiles the kernels of the forward and the backward pass into TileLang's cache folder (TILELANG_CACHE_DIR),
so that the first call of a later process needs neither time nor nvcc. No GPU is needed: a cache folder can
be filled when an image is built. No length, batch size, head count or scale needs other kernels than these.
"""
_WARMUP_EXIT = "exit code: 0 if all kernels compiled, 1 if not, 2 for wrong arguments."
_BENCH = """\
Times calls of your shapes by this package, by FLA and by flash_qla and FlashInfer where they are installed, side by side on
the same tensors: milliseconds of one call, the median of CUDA-graph replays, so without the host's time. Heads are H:HV with
K = V = 128. Lengths are 8192x4 (four sequences), 4096+28672, or rand4_8192 (8192 tokens in four random pieces). The
first call of each implementation compiles its kernels, which can take minutes.
"""
_BENCH_EXIT = """\
exit code: 0 if ours has a time in every row, 1 if not or if there is no GPU (the last lines say why), 2 for wrong
arguments, 130 if interrupted; the rows so far are printed then.
"""
_DTYPES = cases.DTYPES
_GATE_DTYPES = ("float32", *_DTYPES)
_TARGETS = ("sm_90a", "sm_100a", "sm_103a")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="fla-flashqla")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(
        name: str, run: Callable[[argparse.Namespace], int], summary: str, text: str, exit_code: str
    ) -> argparse.ArgumentParser:
        added = commands.add_parser(
            name,
            help=summary,
            description=text,
            epilog=exit_code,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        added.add_argument("--json", action="store_true", help="print one JSON object to stdout")
        added.set_defaults(run=run)
        return added

    question = "does it work on this machine, and which calls does it take?"
    command("check", _check, question, _CHECK, _CHECK_EXIT)
    ahead = "compile the kernels ahead, also without a GPU"
    warmup = command("warmup", _warmup, ahead, _WARMUP, _WARMUP_EXIT)
    warmup.add_argument(
        "--dtype", nargs="+", choices=_DTYPES, default=["bfloat16"], help="of q, k and v"
    )
    warmup.add_argument("--g-dtype", nargs="+", choices=_GATE_DTYPES, default=["float32"])
    warmup.add_argument(
        "--beta-dtype", nargs="+", choices=_GATE_DTYPES, default=["float32", "bfloat16"]
    )
    warmup.add_argument(
        "--forward-only", action="store_true", help="leave out the backward pass, for inference"
    )
    warmup.add_argument(
        "--arch", choices=_TARGETS, help="(default: that of the GPU here, or sm_90a)"
    )
    gain = "my heads, my lengths: what do I gain?"
    bench = command("bench", _bench, gain, _BENCH, _BENCH_EXIT)
    add, words = bench.add_argument, cases.words
    add("--heads", type=words(cases.parse_heads), required=True, metavar="H:HV,...")
    add("--seqs", type=words(cases.parse_seqs), required=True, metavar="LENGTHS,...")
    add(
        "--pass",
        dest="steps",
        type=words(cases.one_of(cases.STEPS)),
        default=["fwd", "bwd"],
        metavar="PASS,...",
        help="of fwd,bwd,step; step is forward and backward (default: fwd,bwd)",
    )
    add("--dtype", choices=_DTYPES, default="bfloat16", help="of q, k and v")
    arguments = parser.parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output has gone
        sys.stderr.close()
        return 1


def _progress(text: str) -> None:
    print(f"... {text}", file=sys.stderr, flush=True)


def _warmup(arguments: argparse.Namespace) -> int:
    from tqdm import tqdm

    from fla_flashqla import warmup

    dtypes = arguments.dtype, arguments.g_dtype, arguments.beta_dtype
    target = arguments.arch or warmup.visible()
    wanted = warmup.plans(*dtypes, gradients=not arguments.forward_only, target=target)
    total = sum(len(warmup.steps(plan)) for plan in wanted)
    with tqdm(total=total, desc="compiling", unit="step", file=sys.stderr) as bar:

        def done(text: str) -> None:
            bar.set_postfix_str(text, refresh=False)
            bar.update()

        record = warmup.run(wanted, done)
    if arguments.json:
        print(json.dumps(record, indent=2))
    else:
        for row in record["plans"]:
            said = f"{row['seconds']} s" if "seconds" in row else f"FAIL  {row['error']}"
            print(f"  {row['dtype']:<9} g {row['g_dtype']:<9} beta {row['beta_dtype']:<9} {said}")
        print(f"kernels compiled for {target} are in {record['cache']}")
    return 0 if record["ok"] else 1


def _check(arguments: argparse.Namespace) -> int:
    from fla_flashqla import check

    record = check.run(_progress)
    if arguments.json:
        print(json.dumps(record, indent=2))
    else:
        print("\n".join(render(record)))
    return 0 if record["ok"] else 1


def render(record: dict[str, Any]) -> list[str]:
    """The record of `check` as lines of text."""
    gpu, compiler, reach = record["gpu"], record["compiler"], record["reach"]
    lines = [f"fla_flashqla {record['version']}", "", "Versions"]
    lines += _table([(name, version or "-") for name, version in record["versions"].items()])
    lines += _table([("set: " + name, value) for name, value in record["environment"].items()])

    lines += ["", "GPU and compiler"]
    sm = "" if gpu["sm"] is None else f", SM {gpu['sm'][0]}.{gpu['sm'][1]}"
    name = "none" if gpu["name"] is None else f"{gpu['name']}{sm}, cuda:{gpu['index']}"
    tilelang = "loads" if compiler["tilelang_loads"] else "does not load"
    nvcc = f"{compiler['nvcc']} in {compiler['cuda_home']}" if compiler["nvcc"] else "none"
    lines += _table(
        [
            ("GPU", name + (f" (of {gpu['count']})" if gpu["count"] > 1 else "")),
            ("driver", gpu["driver"] or "-"),
            ("CUDA of PyTorch", gpu["cuda"] or "-"),
            ("TileLang", tilelang),
            ("nvcc", nvcc),
        ]
    )

    lines += ["", "Reach, by a call through FLA's operator"]
    by = {"kernels": "our kernels", "reference": "our CPU reference", "refused": "FLA's own path"}
    lines += _table(
        [
            ("device", reach["device"]),
            ("answered by", by.get(reach["answered"], "not us")),
            ("loaded by", reach["loaded_by"] or "-"),
            ("mechanism", reach["mechanism"] or "-"),
        ]
    )

    lines += ["", "Relative L2 error against float64, through FLA's operator"]
    for case in record["correctness"]["cases"]:
        found = case["error"] or "  ".join(
            f"{name} {error:.1e}"
            for errors in ("relative_errors", "gradient_errors")
            for name, error in case[errors].items()
        )
        lines.append(f"  {'ok  ' if case['ok'] else 'FAIL'}  {case['name']:<44} {found}")
    if not record["correctness"]["cases"]:
        lines.append("  not run")

    calls = record["calls"]
    sm = ".".join(map(str, calls["sm"]))
    what = "on a GPU of SM" if calls["hypothetical"] else "on this GPU, SM"
    lines += ["", f"Typical calls: what would answer {what} {sm}"]
    if calls["hypothetical"]:
        lines[-1] += " (there is none here; planned as if)"
    for row in calls["rows"]:
        lines += [f"  {row['path']:<5} {row['name']}", f"        {row['reason']}"]

    lines += [""]
    lines += [f"note: {text}" for text in record["notes"]]
    lines += [f"problem: {text}" for text in record["problems"]]
    lines.append(_verdict(record))
    return lines


def _verdict(record: dict[str, Any]) -> str:
    if not record["ok"]:
        return "Not everything that can work on this machine does."
    where = record["reach"]["device"]
    what = "kernels" if where != "cpu" else "CPU reference, no GPU of ours"
    return f"Everything that can work on this machine does ({where}: {what})."


def _bench(arguments: argparse.Namespace) -> int:
    from fla_flashqla import bench

    wanted = [
        cases.Case(heads, seqs, step, "published", arguments.dtype)
        for heads in arguments.heads
        for seqs in arguments.seqs
        for step in arguments.steps
    ]
    record: dict[str, Any] = {"schema": 1, "environment": None, "skipped": {}, "rows": []}
    record |= {"ok": False, "problem": None}
    try:
        with contextlib.redirect_stdout(sys.stderr):  # what libraries print
            bench.compare(wanted, record)
    except KeyboardInterrupt:
        record["problem"] = "interrupted"
        raise
    finally:  # an interrupted run shows its rows
        print(json.dumps(record, indent=2) if arguments.json else "\n".join(_compared(record)))
    return 0 if record["ok"] else 1


def _compared(record: dict[str, Any]) -> Iterator[str]:
    """The record of `bench` as lines of text."""
    rows, found = record["rows"], record["environment"]
    if rows:
        versions = [f"{name} {found[name]}" for name in cases.VERSIONS if found[name]]
        yield f"{found['gpu']}, {', '.join(versions)}"
        yield f"{rows[0]['dtype']}, initial and final state, a quarter of the heads without decay; ms"
        yield ""
        providers = [name for name in cases.PROVIDERS if name in rows[0]]
        names = [cases.NAMES[name] for name in providers]
        titles = ["pass", "H:HV", "lengths", *names, "FLA / ours", "best other / ours"]
        lines = [titles]
        for row in rows:
            times = [cases.milliseconds(row, name) for name in providers]
            ratios = [cases.ratio(row, ("fla",)), cases.ratio(row)]
            cells = ["n/a" if ms is None else f"{ms:.3f}" for ms in times]
            cells += ["-" if ratio is None else f"{ratio:.2f}" for ratio in ratios]
            lines.append([row["step"], row["heads"], row["seqs"], *cells])
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        for line in lines:
            yield "  ".join(
                f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)
            ).rstrip()
        yield ""
    for row in rows:
        for name, text in row.get("error", {}).items():
            yield f"n/a: {name}, {row['step']} {row['heads']} {row['seqs']}: {text}"
    yield from (f"skipped: {name}: {text}" for name, text in record["skipped"].items())
    if record["problem"]:
        yield f"problem: {record['problem']}"
    if gains := [gain for row in rows if (gain := cases.ratio(row, ("fla",)))]:
        mean = math.exp(statistics.fmean(map(math.log, gains)))
        yield f"FLA's own path takes {mean:.2f} times as long as ours (geometric mean of {len(gains)} rows)."


def _table(rows: list[tuple[str, Any]]) -> list[str]:
    return [f"  {name:<24} {value}" for name, value in rows]
