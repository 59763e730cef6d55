# SPDX-License-Identifier: MIT
"""Implementations of the operator, timed side by side on one GPU, in one process.

Every provider is called through its public operator on the same tensors. Calls are captured in a
CUDA graph and the median replay is reported, so host overhead stays out (`eager` measures it).
`ours` goes through FLA's operator and counts only if `fla_flashqla.dispatch_report()` shows that
our kernels ran. For `fla-flashqla bench` and the scripts in benchmarks/ alone.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from fla_flashqla import testing
from fla_flashqla.cases import (
    LAYER,
    PRECOMPUTED,
    PROVIDERS,
    Case,
    Record,
    environment,
    milliseconds,
    parse_heads,
    parse_seqs,
)

D = 128
DIFFERENTIATED = ("q", "k", "v", "g", "beta", "initial_state")
ARGUMENTS = (*DIFFERENTIATED, "scale", "output_final_state", "cu_seqlens")

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
    flags: bool = False  # whether it takes those of FLA's layer


def _fla() -> Provider:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    return Provider(chunk_gated_delta_rule, {"FLA_FLASH_QLA": "0"}, flags=True)


def _ours() -> Provider:
    import fla_flashqla

    # Strict, so that a refusal raises its reason and nobody else's time is taken for ours.
    variables = {"FLA_FLASH_QLA": "1", "FLA_FLASH_QLA_STRICT": "1"}
    answered = lambda: sum(fla_flashqla.dispatch_report()["ran"].values())  # noqa: E731
    return _fla()._replace(variables=variables, answered=answered)


def _precomputed() -> Provider:
    from fla.modules.l2norm import l2norm
    from fla.ops.common.gate import fused_beta_sigmoid
    from fla.ops.gated_delta_rule.gate import fused_gdn_gate

    ours = _ours()

    def operator(
        q: Tensor,
        k: Tensor,
        g: Tensor,
        beta: Tensor,
        A_log: Tensor,
        dt_bias: Tensor,
        use_qk_l2norm_in_kernel: bool,
        use_gate_in_kernel: bool,
        use_beta_sigmoid_in_kernel: bool,
        allow_neg_eigval: bool,
        **rest: Any,
    ) -> Outputs:
        """The call of FLA's layer with its flags off: FLA's kernels make what they stand for."""
        assert use_qk_l2norm_in_kernel and use_gate_in_kernel and use_beta_sigmoid_in_kernel
        beta = fused_beta_sigmoid(beta, 2.0 if allow_neg_eigval else 1.0)
        g = fused_gdn_gate(g, A_log, dt_bias)
        return ours.operator(q=l2norm(q), k=l2norm(k), g=g, beta=beta, **rest)

    return ours._replace(operator=operator)


def _own() -> Provider:
    """Ours without FLA's dispatch, of which `ours` has the host's time, too."""
    import fla_flashqla

    operator: Any = fla_flashqla.chunk_gated_delta_rule
    return _ours()._replace(operator=operator)


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


LOADERS = {
    "ours": _ours,
    "own": _own,
    "fla": _fla,
    "flash_qla": _flash_qla,
    "flashinfer": _flashinfer,
    PRECOMPUTED: _precomputed,
}


def load(names: list[str]) -> tuple[dict[str, Provider], dict[str, str]]:
    """The providers that import here, and why the others do not."""
    os.environ.setdefault("TRITON_CACHE_AUTOTUNING", "1")  # before FLA is imported
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


def time_eager(make: Callable[[], Function], n: int = 200) -> list[float]:
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


def time_kernels(make: Callable[[], Function], n: int = 20) -> dict[str, float]:
    """Mean milliseconds per call of each kernel on the device, in the order of their first launch.

    A kernel that is launched programmatically starts while the one before it still runs and counts
    the time that it waits for it: the sum can be more than the time of the call.
    """
    function = make()
    for _ in range(3):
        function()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(n):
            function()
        torch.cuda.synchronize()
    return kernel_times(profiler.events(), n)


def kernel_times(events: Iterable[Any], n: int) -> dict[str, float]:
    """What `time_kernels` returns, of a profiler's events during n calls."""
    found: dict[str, float] = {}
    for event in sorted(events, key=lambda event: float(event.time_range.start)):
        if event.device_type.name == "CUDA" and not event.is_user_annotation:
            name = event.name.removeprefix("void ")[:80]  # with its template's arguments
            found[name] = found.get(name, 0.0) + event.time_range.elapsed_us() / n / 1e3
    if not found:
        raise RuntimeError("the profiler saw no kernel")
    return {name: round(ms, 4) for name, ms in found.items()}


TIMERS = {"graph": time_graph, "eager": time_eager, "kernels": time_kernels}


def make_inputs(case: Case, device: str) -> Inputs:
    """Keyword arguments of FLA's operator for `case`."""
    H, HV = parse_heads(case.heads)
    lens = tuple(parse_seqs(case.seqs))
    shape = testing.Case(H, HV, lens=lens, dtype=case.dtype, gates=case.gates, scale=D**-0.5)
    if case.gates != LAYER:
        made = testing.make_inputs(shape, device)
        return {name: made[name] for name in ARGUMENTS}
    layer = dataclasses.replace(
        shape,
        gates="strong",
        raw_g="bias",
        raw_beta=1,
        g_dtype=case.dtype,
        beta_dtype=case.dtype,
        l2norm=True,
        state_v_first=True,
    )
    return testing.make_inputs(layer, device)


def differentiated(inputs: Inputs) -> list[str]:
    return [name for name in (*DIFFERENTIATED, *testing.PARAMETERS) if name in inputs]


class Prepared(NamedTuple):
    """A case as one provider is called."""

    inputs: Inputs
    leaves: dict[str, Tensor]  # the inputs that are differentiated
    grads: Outputs  # of the outputs
    forward: Callable[[], Outputs]
    make: Callable[[], Function]  # what a timer takes


def prepare(provider: Provider, case: Case, device: str) -> Prepared:
    """Make the tensors of a case."""
    inputs = make_inputs(case, device)
    grads = torch.randn_like(inputs["v"]), torch.randn_like(inputs["initial_state"]) / 8
    names = differentiated(inputs)
    leaves = {name: inputs[name].requires_grad_(case.step != "fwd") for name in names}
    arguments = provider.prepare(inputs)

    def forward() -> Outputs:
        return provider.operator(**arguments)

    def make() -> Function:
        if case.step == "fwd":
            return torch.no_grad()(forward)
        wanted = [*leaves.values()]
        if case.step == "step":
            return lambda: torch.autograd.grad(forward(), wanted, grads)
        outputs = forward()
        return lambda: torch.autograd.grad(outputs, wanted, grads, retain_graph=True)

    return Prepared(inputs, leaves, grads, forward, make)


def measure(provider: Provider, case: Case, device: str, errors: bool) -> Record:
    """`ms` (seconds for `warm`) of one provider, and `rel_l2` of its outputs if asked for."""
    begin = time.perf_counter()
    if case.gates == LAYER and not provider.flags:
        raise RuntimeError("it does not take the flags of FLA's layer")
    inputs, leaves, grads, forward, make = prepare(provider, case, device)
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
            gradients = torch.autograd.grad(outputs, [*leaves.values()], grads)
            results = dict(zip(leaves, gradients, strict=True))
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
        if name in testing.PARAMETERS:
            return x[groups]
        return x[:, groups] if name in ("initial_state", "final_state") else x[:, :, groups]

    exact = inputs | {n: part(n, inputs[n]).detach() for n in differentiated(inputs)}
    want: dict[str, Any]
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
    sys.stderr.write(text + end)
    sys.stderr.flush()


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
            whole = sum(row[name].values()) if isinstance(row[name], dict) else row[name]
            progress(f" {whole}", end="")
            alive = works(device)
        progress("")
        for name, text in row.get("error", {}).items():
            progress(f"    {name}: {text}")
        emit(row)
        if not alive:
            progress("the GPU stopped working: the other cases were not measured")
            return False
    return True


def compare(wanted: list[Case], record: Record) -> None:
    """Measure with every provider that there is, and put what is found into `record` as it comes.

    Args:
        wanted (list[Case]):
            What to measure.
        record (dict):
            Of `fla-flashqla bench`. Gets `environment`, `skipped` (providers that do not import: why), `rows`, `problem` (why
            there is nothing more) and `ok`, which is whether ours has a time in every row.
    """
    record["environment"] = environment()
    if record["environment"]["gpu"] is None:
        record["problem"] = "nothing can be measured: PyTorch finds no GPU"
        return
    providers, record["skipped"] = load(list(PROVIDERS))
    if "ours" not in providers:
        record["problem"] = (
            "nothing can be measured: ours is called through FLA, which does not import"
        )
    elif not run(wanted, providers, record["rows"].append):
        record["problem"] = "the GPU stopped working"
    else:
        record["ok"] = all(milliseconds(row, "ours") for row in record["rows"])
