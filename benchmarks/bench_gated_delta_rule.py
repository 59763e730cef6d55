# SPDX-License-Identifier: MIT
"""Time chunked Gated Delta Rule implementations side by side on one GPU, in one process.

    python benchmarks/bench_gated_delta_rule.py --set published --out results.jsonl
    python benchmarks/bench_gated_delta_rule.py --heads 16:64 --seqs 1x32768,4096x8 --pass fwd,bwd

Every provider is called through its public operator on the same tensors. Calls are captured in a
CUDA graph and the median replay is reported, so host overhead stays out (`--eager` measures it).
`ours` goes through FLA's operator and counts only if `fla_flashqla.dispatch_report()` shows that
our kernels ran; otherwise it is null. A provider that does not import is skipped with the reason.

Inputs are those of `fla_flashqla.testing`: l2-normalised q and k, float32 gates, beta and initial
state. Gates `published` are log-sigmoid / 16 on three quarters of the heads and no decay on the
rest, as in flash_qla's benchmark; `strong` is the range of FLA's layer at initialisation.

Exit codes: 0 if the run is complete, 1 if nothing can be measured or the GPU failed, 2 for wrong
arguments, 130 if interrupted. `records.py` describes the file, `report.py` makes tables of it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import records
import torch
from records import PROVIDERS, Case, Record
from torch import Tensor

from fla_flashqla import testing

D = 128
DIFFERENTIATED = ("q", "k", "v", "g", "beta", "initial_state")
ARGUMENTS = (*DIFFERENTIATED, "scale", "output_final_state", "cu_seqlens")
STEPS = ("fwd", "bwd", "step")

_LATENCY = ("1x32768", "4096+28672", "8192x4", "4096x8", "1x8192", "1024x8", "1x2048")
_RANDOM = ("1x8192", "1x32768", "rand4_8192", "rand8_32768")
_TP = ("2:8", "4:16", "8:32", "16:64")
# Heads and lengths by pass; a pass that a set does not name takes those of the set's last one.
SETS: dict[str, dict[str, tuple[tuple[str, ...], tuple[str, ...]]]] = {
    "published": {"fwd": (_TP, _LATENCY), "bwd": (_TP, _RANDOM)},
    "heads": {"fwd": (("16:16", "32:32", "16:48", "8:24"), ("8192x4", "1024x8", "4096+28672"))},
}

Inputs = dict[str, Any]
Outputs = tuple[Tensor, Tensor]
Function = Callable[[], Any]


def _same(inputs: Inputs) -> Inputs:
    return inputs


class Provider(NamedTuple):
    """How one implementation is called; `prepare` and `restore` stay outside of what is timed."""

    operator: Callable[..., Outputs]
    variables: dict[str, str] = {}  # the environment that it runs in
    prepare: Callable[[Inputs], Inputs] = _same
    restore: Callable[..., Outputs] = lambda o, ht: (o, ht)
    answered: Callable[[], int] | None = None  # counts the calls that it surely answered


def _fla() -> Provider:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    return Provider(chunk_gated_delta_rule, {"FLA_FLASH_QLA": "0"})


def _ours() -> Provider:
    import fla_flashqla

    # Strict, so that a refusal raises its reason and nobody else's time is taken for ours.
    variables = {"FLA_FLASH_QLA": "1", "FLA_FLASH_QLA_STRICT": "1"}
    answered = lambda: sum(fla_flashqla.dispatch_report()["ran"].values())  # noqa: E731
    return _fla()._replace(variables=variables, answered=answered)


def _flash_qla() -> Provider:
    import flash_qla

    return Provider(flash_qla.chunk_gated_delta_rule)


def _flashinfer() -> Provider:
    from flashinfer.gdn_prefill import chunk_gated_delta_rule

    def prepare(inputs: Inputs) -> Inputs:
        """It takes packed rows, the decay and not its logarithm, and states [N, HV, V, K]."""
        packed = {name: inputs[name].squeeze(0) for name in ("q", "k", "v", "beta")}
        alpha = inputs["g"].detach().squeeze(0).exp()
        h0 = inputs["initial_state"].mT.contiguous()
        return inputs | packed | {"g": alpha, "initial_state": h0}

    return Provider(
        chunk_gated_delta_rule, prepare=prepare, restore=lambda o, ht: (o.unsqueeze(0), ht.mT)
    )


LOADERS = {"ours": _ours, "fla": _fla, "flash_qla": _flash_qla, "flashinfer": _flashinfer}


def load(names: list[str]) -> tuple[dict[str, Provider], dict[str, str]]:
    """The providers that import here, and why the others do not."""
    found, skipped = {}, {}
    for name in names:
        try:
            found[name] = LOADERS[name]()
        except Exception as error:  # a broken installation raises anything
            skipped[name] = describe(error)
    return found, skipped


def describe(error: BaseException) -> str:
    """One line: the type and the beginning of the message."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


# Timers: each takes `make`, which returns the function to time


def time_graph(make: Callable[[], Function], budget_ms: float = 60.0) -> float:
    """Median milliseconds of one call, over replays of a CUDA graph.

    `make` runs on the stream that is captured, so that autograd, which runs a backward on its
    forward's stream, is captured too.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph = torch.cuda.CUDAGraph()

    def elapsed_ms(function: Function) -> float:
        start.record()
        function()
        end.record()
        torch.cuda.synchronize()
        return float(start.elapsed_time(end))

    with torch.cuda.stream(stream):
        function = make()
        for _ in range(3):
            function()
        torch.cuda.synchronize()
        once_ms = max(elapsed_ms(function), 0.01)
        inner = max(1, min(20, int(2.0 / once_ms)))
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            for _ in range(inner):
                function()
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
        n = max(7, min(50, int(budget_ms / (once_ms * inner))))
        return round(statistics.median(elapsed_ms(graph.replay) / inner for _ in range(n)), 4)


def time_eager(make: Callable[[], Function], n: int = 50) -> list[float]:
    """Median milliseconds in which the host issues one call, and in which the call is complete."""
    function = make()
    for _ in range(3):
        function()
    torch.cuda.synchronize()
    host, wall = [], []
    for _ in range(n):
        start = time.perf_counter()
        function()
        issued = time.perf_counter()
        torch.cuda.synchronize()
        wall.append((time.perf_counter() - start) * 1e3)
        host.append((issued - start) * 1e3)
    return [round(statistics.median(times), 4) for times in (host, wall)]


TIMERS = {"graph": time_graph, "eager": time_eager}


def measure(provider: Provider, case: Case, device: str, errors: bool) -> Record:
    """`ms` (seconds for `warm`) of one provider, and `rel_l2` of its outputs if asked for."""
    begin = time.perf_counter()
    H, HV = records.parse_heads(case.heads)
    lens = tuple(records.parse_seqs(case.seqs))
    shape = testing.Case(H, HV, lens=lens, dtype=case.dtype, gates=case.gates, scale=D**-0.5)
    made = testing.make_inputs(shape, device)
    inputs = {name: made[name] for name in ARGUMENTS}
    grads = torch.randn_like(inputs["v"]), torch.randn_like(inputs["initial_state"]) / 8
    leaves = [inputs[name].requires_grad_(case.step != "fwd") for name in DIFFERENTIATED]
    arguments = provider.prepare(inputs)

    def forward() -> Outputs:
        return provider.operator(**arguments)

    def make() -> Function:
        if case.step == "fwd":
            return torch.no_grad()(forward)
        if case.step == "step":
            return lambda: torch.autograd.grad(forward(), leaves, grads)
        outputs = forward()
        return lambda: torch.autograd.grad(outputs, leaves, grads, retain_graph=True)

    with mock.patch.dict(os.environ, provider.variables):
        before = provider.answered() if provider.answered else -1
        with torch.set_grad_enabled(case.step != "fwd"):
            outputs = forward()
        if provider.answered and provider.answered() == before:
            raise RuntimeError("our kernels did not run: something else answered FLA's operator")
        if case.step != "fwd" and not outputs[0].requires_grad:
            raise RuntimeError("it has no backward")
        found: Record = {}
        if errors and case.step == "fwd":
            results = dict(zip(("o", "final_state"), provider.restore(*outputs), strict=True))
            found["rel_l2"] = relative_errors(inputs, results)
        elif errors:
            gradients = torch.autograd.grad(outputs, leaves, grads)
            results = dict(zip(DIFFERENTIATED, gradients, strict=True))
            found["rel_l2"] = relative_errors(inputs, results, grads)
        del outputs
        if case.mode == "warm":
            make()()
            works(device)
            return found | {"ms": round(time.perf_counter() - begin, 2)}
        return found | {"ms": TIMERS[case.mode](make)}


def relative_errors(
    inputs: Inputs, results: dict[str, Tensor], grads: Outputs | None = None
) -> dict[str, float]:
    """Relative L2 errors against float64 on the first and the last q/k head and their value heads.

    Args:
        inputs (dict):
            Keyword arguments of the call.
        results (dict):
            Its o and final_state, or the gradients of `inputs`, by name.
        grads (tuple, Optional):
            Gradients of o and final_state, if the results are gradients.
    """
    H, HV = inputs["q"].shape[2], inputs["v"].shape[2]
    groups = torch.arange(HV).view(H, -1)[[0, -1] if H > 1 else [0]].flatten().tolist()

    def part(name: str, x: Tensor) -> Tensor:
        if name in ("q", "k"):
            return x[:, :, [0, H - 1] if H > 1 else [0]]
        return x[:, groups] if name in ("initial_state", "final_state") else x[:, :, groups]

    exact = inputs | {name: part(name, inputs[name]).detach() for name in DIFFERENTIATED}
    if grads is None:
        want = dict(zip(("o", "final_state"), testing.oracle(exact), strict=True))
    else:
        do, dht = part("o", grads[0]), part("final_state", grads[1])
        want = testing.oracle_gradients(exact, do, dht)
    return {
        name: float(f"{testing.relative_error(part(name, x), want[name]):.3g}")
        for name, x in results.items()
    }


def works(device: str) -> bool:
    """Wait for the GPU and free its memory: False after an error that ends all its work."""
    try:
        if device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
    except Exception:
        return False
    return True


def progress(text: str, end: str = "\n") -> None:
    print(text, end=end, file=sys.stderr, flush=True)


def run(
    cases: list[Case],
    providers: dict[str, Provider],
    emit: Callable[[Record], None],
    device: str = "cuda",
    errors: bool = False,
) -> bool:
    """Measure the cases and emit each row as it comes; False if the GPU failed on the way."""
    for number, case in enumerate(cases, 1):
        progress(f"[{number}/{len(cases)}] {case.step} {case.heads} {case.seqs}:", end="")
        row: Record = case._asdict()
        alive = True
        for name, provider in providers.items():
            progress(f" {name}", end="")
            try:
                found = measure(provider, case, device, errors)
            except Exception as error:  # a provider that cannot run a case is a result too
                found = {"ms": None}
                row.setdefault("error", {})[name] = describe(error)
            row[name] = found["ms"]
            if "rel_l2" in found:
                row.setdefault("rel_l2", {})[name] = found["rel_l2"]
            progress(f" {row[name]}", end="")
            alive = works(device)
        progress("")
        for name, text in row.get("error", {}).items():
            progress(f"    {name}: {text}")
        emit(row)
        if not alive:
            progress("the GPU stopped working: run again with --resume for the other cases")
            return False
    return True


def plan(args: argparse.Namespace) -> list[Case]:
    """The cases of a command line, all of one head configuration together."""
    rows = SETS[args.set]
    steps = args.steps or list(rows)
    table = {step: rows.get(step) or list(rows.values())[-1] for step in steps}
    mode = "warm" if args.warm else "eager" if args.eager else "graph"
    heads = args.heads or list(dict.fromkeys(h for step in steps for h in table[step][0]))
    return [
        Case(h, seqs, step, args.gates, args.dtype, mode)
        for h in heads
        for step in steps
        for seqs in args.seqs or table[step][1]
        if args.heads or h in table[step][0]
    ]


def one_of(known: tuple[str, ...]) -> Callable[[str], object]:
    def parse(word: str) -> None:
        if word not in known:
            raise ValueError(f"{word!r} is none of {', '.join(known)}")

    return parse


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


def arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--set", choices=SETS, default="published", help="named rows (default: published)")
    add("--heads", type=words(records.parse_heads), help="H:HV,... instead of the set's")
    add("--seqs", type=words(records.parse_seqs), help="lengths,... instead of the set's")
    add("--pass", dest="steps", type=words(one_of(STEPS)), help="fwd,bwd,step (default: the set's)")
    add(
        "--providers",
        type=words(one_of(PROVIDERS)),
        default=list(PROVIDERS),
        help=",".join(PROVIDERS),
    )
    add("--gates", choices=["published", "strong", "zero"], default="published")
    add("--dtype", choices=["bfloat16", "float16"], default="bfloat16")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--eager", action="store_true", help="time the host: [issue, complete] in ms")
    mode.add_argument("--warm", action="store_true", help="only fill the compilers' caches: s")
    add("--errors", action="store_true", help="errors against float64, on two q/k heads")
    add("--json", action="store_true", help="print the records to standard output")
    add("--out", type=Path, help="append the records to this file")
    add("--resume", action="store_true", help="leave out what --out has from this environment")
    add("--commit", help="of the package, where git does not know it")
    args = parser.parse_args(argv)
    if args.resume and not args.out:
        parser.error("--resume needs --out")
    return args


def main(argv: list[str]) -> int:
    args = arguments(argv)
    os.environ.setdefault("TRITON_CACHE_AUTOTUNING", "1")  # before FLA is imported
    # Nobody needs to know where on a machine the file was.
    shown = [a.replace(str(args.out), args.out.name) if args.out else a for a in argv]
    environment = records.environment(shown, args.commit)
    if environment["gpu"] is None:
        progress("nothing can be measured: PyTorch finds no GPU")
        return 1
    providers, skipped = load(args.providers)
    for name, reason in skipped.items():
        progress(f"{name} is skipped: {reason}")
    if not providers:
        progress("nothing can be measured: no provider is left")
        return 1
    cases = plan(args)
    if args.out:
        records.repair(args.out)
        if args.resume:
            done = records.measured(args.out, environment, providers)
            progress(f"{len(done & set(cases))} of {len(cases)} cases are in {args.out} already")
            cases = [case for case in cases if case not in done]

    def emit(record: Record) -> None:
        if args.out:
            records.append(args.out, record)
        if args.json:
            print(json.dumps(record), flush=True)

    if cases:
        emit(environment | ({"skipped": skipped} if skipped else {}))
    try:
        return 0 if run(cases, providers, emit, errors=args.errors) else 1
    except KeyboardInterrupt:
        progress("interrupted: the rows so far are kept, --resume measures the others")
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
