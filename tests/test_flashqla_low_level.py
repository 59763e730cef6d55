# SPDX-License-Identifier: MIT
"""The pair of calls without autograd: by the reference, by models of the kernels, and on a GPU by the kernels."""

from __future__ import annotations

import inspect
from itertools import pairwise
from typing import Any

import kernel_models
import pytest
import torch
from gpu_helpers import DEVICE, LENS, poisoned_memory
from model_helpers import EXACT, REHEARSE, small, trained

import fla_flashqla
from fla_flashqla import (
    Unsupported,
    api,
    chunk,
    chunk_gated_delta_rule,
    chunk_gated_delta_rule_bwd,
    chunk_gated_delta_rule_fwd,
    reference,
)
from fla_flashqla.low_level import BackwardResult, ForwardResult
from fla_flashqla.testing import (
    BOUNDS,
    DIFFERENTIABLE,
    GRADIENT_BOUNDS,
    Case,
    make_inputs,
    make_output_gradients,
    oracle,
    oracle_gradients,
    relative_error,
)

CASES: dict[str, dict[str, Any]] = {
    "one_token": {"T": 1},
    "chunks": {"T": 128, "B": 2},
    "tails": {"T": 130, "B": 3, "H": 1, "HV": 3},
    "varlen": {"lens": (0, 65, 3, 0, 130, 0), "tail": 70},
    "varlen_int64": {"lens": (1, 64, 70), "cu_dtype": "int64", "gates": "strong"},
    "v_first": {"lens": (70, 2), "state_v_first": True, "gates": "zero"},
    "v_first_dense": {"T": 70, "B": 2, "state_v_first": True},
    "no_state": {"state_dtype": None, "gates": "mild", "T": 70},
    "scale": {"scale": -0.7, "T": 70},
    "nothing": {"lens": (0, 0), "tail": 5},
}
EACH = pytest.mark.parametrize("case", CASES)


def arguments(x: dict[str, Any]) -> dict[str, Any]:
    """Of both calls, from those of the operator."""
    return {
        n: t for n, t in x.items() if n not in ("output_final_state", "use_qk_l2norm_in_kernel")
    }


def forward(x: dict[str, Any], **options: Any) -> ForwardResult:
    result: ForwardResult = chunk_gated_delta_rule_fwd(**arguments(x), **options)
    return result


def unchecked(x: dict[str, Any], kept: ForwardResult, do: Any, dht: Any) -> dict[str, Any]:
    """Gradients by input."""
    result: BackwardResult = chunk_gated_delta_rule_bwd(
        **{**arguments(x), "g": kept.g}, A=kept.A, do=do, dht=dht
    )
    return dict(zip(("q", "k", "v", "beta", "g", "initial_state"), result, strict=True))


def backward(x: dict[str, Any], kept: ForwardResult, do: Any, dht: Any) -> dict[str, Any]:
    """The same; those of the rows behind the last boundary are zero."""
    found = unchecked(x, kept, do, dht)
    for name in DIFFERENTIABLE[:5]:
        assert found[name].shape == x[name].shape and found[name].dtype == x[name].dtype
        assert (found[name].flatten(0, 1)[sequences(x)[-1][1] :] == 0).all()
    if x.get("initial_state") is None:
        assert found.pop("initial_state") is None
    return found


def sequences(x: dict[str, Any]) -> list[tuple[int, int]]:
    """First row and end of each, the rows of all B being counted on."""
    B, T = x["q"].shape[:2]
    cu = x.get("cu_seqlens")
    return [*pairwise([n * T for n in range(B + 1)] if cu is None else cu.tolist())]


def sums(x: dict[str, Any]) -> torch.Tensor:
    """Of g within chunks."""
    g = x["g"].double().flatten(0, 1)
    want = torch.zeros_like(g)
    for start, end in sequences(x):
        for t in range(start, end, 64):
            want[t : min(t + 64, end)] = g[t : min(t + 64, end)].cumsum(0)
    return want.view(x["g"].shape)


def states(x: dict[str, Any]) -> torch.Tensor:
    """Before each chunk: the final states of all that comes before."""
    rows = {n: x[n].flatten(0, 1)[None] for n in DIFFERENTIABLE[:5]}
    flags = {n: x[n] for n in ("scale", "state_v_first")}
    h0, want = x.get("initial_state"), []
    for n, (start, end) in enumerate(sequences(x)):
        for t in range(start, end, 64):
            before = {name: rows[name][:, start:t] for name in rows}
            h = None if h0 is None else h0[n, None]
            call = {**before, **flags, "initial_state": h, "output_final_state": True}
            want.append(oracle(call)[1])
    shape = x["v"].shape[2], *((6, 8) if x["state_v_first"] else (8, 6))
    return torch.cat([torch.zeros(0, *shape).double(), *want]).view(x["q"].shape[0], -1, *shape)


def check(x: dict[str, Any], bound: float) -> ForwardResult:
    """All results of both calls against float64."""
    do, dht = make_output_gradients(x)
    for tensor in (*(x[n] for n in DIFFERENTIABLE[:5]), do):
        tensor.flatten(0, 1)[sequences(x)[-1][1] :] = torch.nan
    before = {n: t.clone() for n, t in x.items() if isinstance(t, torch.Tensor)}
    with poisoned_memory():
        kept = forward(x, output_h=True)
        A = kept.A.clone()
        found = [backward(x, kept, do, dht) for _ in range(2)]
    o, final_state = oracle({**x, "output_final_state": True})
    h = states(x)
    assert kept.g.dtype == x["g"].dtype and kept.o.dtype == x["q"].dtype
    assert kept.h is not None and kept.h.dtype == x["q"].dtype and kept.h.shape == h.shape
    assert kept.A.dtype == torch.uint8 and torch.equal(kept.A, A)
    pairs = [(kept.g, sums(x)), (kept.o, o), (kept.h, h), (kept.final_state, final_state)]
    want = oracle_gradients(x, do, dht, reference.recurrent_gated_delta_rule)
    pairs += [(found[0][n], want[n]) for n in want]
    for i, (got, wanted) in enumerate(pairs):
        assert relative_error(got.nan_to_num(), wanted.nan_to_num()) <= bound, i
    assert all(torch.equal(found[0][n], found[1][n]) for n in want)
    assert all(torch.equal(before[n].nan_to_num(), x[n].nan_to_num()) for n in before)
    return kept


@EACH
def test_flashqla_low_level_by_the_reference(case: str) -> None:
    fla_flashqla.reset_report()
    check(small(**CASES[case]), 1e-12)
    assert fla_flashqla.dispatch_report()["reference"] == 3


@EACH
def test_flashqla_low_level_by_models(case: str, exact: None, launched: list[str]) -> None:
    check(small(**CASES[case]), EXACT)
    assert launched == ["prepare", "forward", "states", *["states", "reverse", "gradients"] * 2]
    ran = fla_flashqla.dispatch_report()["ran"]
    assert ran == {"forward model float64": 1, "backward model float64": 2}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("side", ["float32", "bfloat16"])
@pytest.mark.parametrize("on", ["reference", "models"])
def test_flashqla_low_level_is_the_operator(
    dtype: str, side: str, on: str, request: pytest.FixtureRequest
) -> None:
    """The same bits, and what the backward needs is in A though no gradient was asked for."""
    if on == "models":
        request.getfixturevalue("launched")
    x = make_inputs(Case(lens=(70, 0, 5), tail=3, dtype=dtype, g_dtype=side, state_dtype=side))
    do, dht = make_output_gradients(x)
    with poisoned_memory():
        kept = forward(x)
        if on == "models":
            assert {key[0] for key in api._kernels} == {"forward"}
        found = backward(x, kept, do, dht)
    leaves = trained(x)
    o, final_state = chunk_gated_delta_rule(**leaves)
    torch.autograd.backward([o, final_state], [do, dht])
    assert torch.equal(kept.o, o) and torch.equal(kept.final_state, final_state)
    assert all(torch.equal(found[n], leaves[n].grad) for n in DIFFERENTIABLE)


def test_flashqla_low_level_results_have_names() -> None:
    x = small()
    g, A, o, h, final_state = kept = forward(x)
    assert (g, A, o, h, final_state) == (kept.g, kept.A, kept.o, kept.h, kept.final_state)
    assert h is None
    assert forward(x, output_final_state=False).final_state is None
    result = chunk_gated_delta_rule_bwd(**arguments(x), A=A, do=o)
    dq, dk, dv, db, dg, dh0 = result
    assert (dq, dk, dv, db, dg, dh0) == tuple(
        getattr(result, n) for n in ("dq", "dk", "dv", "db", "dg", "dh0")
    )


@pytest.mark.parametrize("on", ["reference", "models"])
def test_flashqla_low_level_backward_takes(on: str, request: pytest.FixtureRequest) -> None:
    """The decay itself for g, a copy of A at any address, do of any dtype and strides, no dht."""
    if on == "models":
        request.getfixturevalue("launched")
        request.getfixturevalue("exact")
    x = small(B=2, T=70)
    do, _ = make_output_gradients(x)
    kept = forward(x)
    want = backward(x, kept, do, None)
    shifted = torch.cat([kept.A.new_zeros(1), kept.A])[1:]
    turned = do.transpose(1, 2).contiguous().transpose(1, 2)
    got = backward(
        x, kept._replace(g=x["g"], A=shifted), turned, torch.zeros_like(x["initial_state"])
    )
    assert all(torch.equal(got[n], want[n]) for n in want)
    got = backward(x, kept, do.float(), None)
    assert all(relative_error(got[n], want[n]) < 1e-6 for n in want)


def test_flashqla_low_level_makes_no_graph(launched: list[str]) -> None:
    x = trained(make_inputs(Case(T=70)))
    kept = forward(x, output_h=True)
    found = backward(x, kept, *make_output_gradients(x))
    assert not any(t.requires_grad for t in (*kept, *found.values()) if t is not None)


def test_flashqla_low_level_keeps_what_the_operator_keeps(launched: list[str]) -> None:
    """160 bytes a token and value head, chunks filled up; README says so."""
    kept = forward(make_inputs(Case(lens=(1, 0, 64, 70))))
    assert kept.A.nbytes == kept.A.untyped_storage().nbytes() == (135 // 64 + 5) * 64 * 4 * 160


@pytest.mark.parametrize("reset", [-torch.inf, -1e30, -200.0])
def test_flashqla_low_level_resets(reset: float, exact: None) -> None:
    """Their sum is finite where the kernels need it so, and does not reach other chunks."""
    x = small(B=2, T=140, gates="mild")
    x["g"][:, 5] = x["g"][1, 70] = reset
    kept, want = forward(x), sums(x)
    regular = want > -100
    assert relative_error(kept.g[regular], want[regular]) < EXACT
    assert (kept.g[~regular] <= -128).all() and kept.g.isfinite().all()


# Refusals and failures


def test_flashqla_low_level_refusals() -> None:
    """One sentence each, counted as the operator's."""
    x = small()
    do, dht = make_output_gradients(x)
    kept = forward(x)
    whole = {**arguments(x), "A": kept.A, "do": do}
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"A": kept.A[1:]}, r"A must be what the forward of this call returned, 2240 bytes, got"),
        ({"A": x["g"]}, r"A must be what .*, got \(1, 70, 4\) torch.float64 on cpu"),
        ({"do": do[:, 1:]}, r"do must have o's shape \(1, 70, 4, 6\)"),
        ({"dht": dht.mT}, r"dht must have the final state's shape \(1, 4, 8, 6\)"),
        ({"cp_context": object()}, "cp_context is not supported"),
        ({"g": x["g"][:, 1:]}, "g must be"),
    ]
    fla_flashqla.reset_report()
    for change, text in wrong:
        with pytest.raises(Unsupported, match=text):
            chunk_gated_delta_rule_bwd(**{**whole, **change})
    for change, text in wrong[-2:]:
        with pytest.raises(Unsupported, match=text):
            chunk_gated_delta_rule_fwd(**{**arguments(x), **change})
    counts = fla_flashqla.dispatch_report()
    assert sum(counts["refused"].values()) == 8 and counts["reference"] == 0


def test_flashqla_low_level_refuses_as_planned(launched: list[str]) -> None:
    x = make_inputs(Case(T=3, K=64))
    for output_h in (False, True):
        with pytest.raises(Unsupported, match="K and V must be 128, got K=64, V=128"):
            forward(x, output_h=output_h)
    assert launched == []


def test_flashqla_low_level_states_of_a_captured_graph(
    exact: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of chunks would be that of the capture, and their order too."""
    x, dense = small(lens=(65, 3)), small(T=70)
    before = forward(x, output_h=True), forward(dense, output_h=True)
    monkeypatch.setattr(api, "capturing", lambda: True)
    with pytest.raises(Unsupported, match="output_h with cu_seqlens waits for the device"):
        forward(x, output_h=True)
    assert torch.equal(forward(x).o, before[0].o)
    h = forward(dense, output_h=True).h
    assert h is not None and before[1].h is not None and torch.equal(h, before[1].h)


def broken(*_: Any) -> None:
    raise RuntimeError("bad launch")


@pytest.mark.parametrize("step", ["forward", "states", "backward"])
def test_flashqla_low_level_failures(
    step: str, launched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody takes over: the first failure is raised, and later calls are refused."""
    monkeypatch.setattr(chunk, "rehearse_backward", REHEARSE)
    x = make_inputs(Case(T=3))
    do, dht = make_output_gradients(x)
    if step == "forward":
        kernels = kernel_models.FORWARD._replace(forward_halves=broken)
        monkeypatch.setattr(chunk, "build", lambda plan: kernels)
    else:
        kept = forward(x)
        models = kernel_models.BACKWARD._replace(reverse_halves=broken)
        monkeypatch.setattr(chunk, "build_backward", lambda plan: models)

    def call() -> None:
        if step == "backward":
            backward(x, kept, do, dht)
        else:
            forward(x, output_h=step == "states")

    with pytest.raises(RuntimeError, match="bad launch"):
        call()
    with pytest.raises(Unsupported, match="failed at its first launch"):
        call()


# Arguments of flash_qla 0.1.3

FWD = "q k v g beta scale initial_state cu_seqlens output_final_state output_h auto_cp state_v_first enable_fwd_cp_cache cp_context is_train"
BWD = (
    "q k v g beta A do dht scale initial_state cu_seqlens state_v_first auto_cp cp_cache cp_context"
)
BOTH = "q k v g beta scale initial_state output_final_state use_qk_l2norm_in_kernel cu_seqlens head_first state_v_first auto_cp enable_fwd_cp_cache cp_context force_intra_cp"


def test_flashqla_arguments_of_flash_qla() -> None:
    """The pair's in its order; the operator's by name, and in its order up to the ninth."""
    assert [*inspect.signature(chunk_gated_delta_rule_fwd).parameters] == FWD.split()
    assert [*inspect.signature(chunk_gated_delta_rule_bwd).parameters] == BWD.split()
    names = [*inspect.signature(chunk_gated_delta_rule).parameters]
    assert set(BOTH.split()) <= {*names} and names[:9] == BOTH.split()[:9]


def test_flashqla_operator_takes_what_flash_qla_takes() -> None:
    x = small()
    want = chunk_gated_delta_rule(**x)
    flags = {"auto_cp": False, "enable_fwd_cp_cache": False, "force_intra_cp": True}
    got = chunk_gated_delta_rule(**x, **flags, head_first=False, cp_context=None)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    with pytest.raises(Unsupported, match="head_first was removed"):
        chunk_gated_delta_rule(**x, head_first=True)
    five = [x[n] for n in DIFFERENTIABLE[:5]]
    with pytest.raises(Unsupported, match="give cu_seqlens by name"):
        chunk_gated_delta_rule(*five, None, None, False, False, torch.tensor([0, 70]))


# On a GPU


def gpu_inputs(**fields: Any) -> dict[str, Any]:
    return make_inputs(Case(**fields), DEVICE)


@pytest.mark.gpu
@pytest.mark.sm90
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("v_first", [False, True], ids=["kv", "vk"])
@pytest.mark.parametrize("shape", ["dense", "long", "varlen", "many", "no_state"])
def test_flashqla_low_level_on_a_gpu(shape: str, v_first: bool, dtype: str) -> None:
    """The bits of the operator; g and h against the reference."""
    fields: dict[str, Any] = {
        "dense": {"B": 3, "T": 200},
        "long": {"T": 4096},
        "varlen": {"lens": LENS, "tail": 70, "cu_dtype": "int64"},
        "many": {"H": 4, "HV": 16, "lens": (100, 30) * 8},
        "no_state": {"T": 100, "state_dtype": None},
    }[shape]
    x = gpu_inputs(dtype=dtype, state_v_first=v_first, **fields)
    do, dht = make_output_gradients(x)
    with poisoned_memory():
        kept = forward(x, output_h=True)
        found = [backward(x, kept, do, dht) for _ in range(2)]
    leaves = trained(x)
    o, final_state = chunk_gated_delta_rule(**leaves)
    torch.autograd.backward([o, final_state], [do, dht])
    assert torch.equal(kept.o, o) and torch.equal(kept.final_state, final_state)
    for got in found:
        assert all(torch.equal(dx, leaves[n].grad) for n, dx in got.items())
    want = chunk_gated_delta_rule_fwd(
        **{n: t.cpu() if isinstance(t, torch.Tensor) else t for n, t in arguments(x).items()},
        output_h=True,
    )
    assert relative_error(kept.g.cpu(), want.g) < 1e-6
    assert kept.h is not None and kept.h.shape == want.h.shape and kept.h.is_contiguous()
    assert relative_error(kept.h.cpu(), want.h) < BOUNDS[dtype]
    exact = oracle_gradients(x, do, dht)
    for name, dx in found[0].items():
        assert relative_error(dx, exact[name]) < GRADIENT_BOUNDS[dtype], name


@pytest.mark.gpu
@pytest.mark.sm90
def test_flashqla_low_level_does_not_wait_for_a_gpu() -> None:
    """Nor use what deterministic algorithms forbid; a graph can be captured."""
    x = gpu_inputs(lens=(100, 0, 65), tail=3)
    do, dht = make_output_gradients(x)

    def both() -> tuple[torch.Tensor, ...]:
        kept = forward(x)
        return kept.g, kept.o, *unchecked(x, kept, do, dht).values()

    want = both()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    torch.use_deterministic_algorithms(True)
    try:
        got = both()
    finally:
        torch.use_deterministic_algorithms(False)
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = both()
    graph.replay()
    torch.cuda.synchronize()
    for a, b, c in zip(want, got, captured, strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)
