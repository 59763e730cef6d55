# SPDX-License-Identifier: MIT
"""Sequences in segments on their own hardware, through FLA's operator, against float64."""

import pytest
import torch
from gpu_helpers import DEVICE, LAYER, ROWS, assert_same, check, planner, run_ours

from fla_flashqla import api
from fla_flashqla.call import describe
from fla_flashqla.plan import plan
from fla_flashqla.testing import (
    BOUNDS,
    DIFFERENTIABLE,
    PARAMETERS,
    Case,
    make_inputs,
    make_output_gradients,
    oracle,
    relative_error,
)

pytestmark = [pytest.mark.gpu, pytest.mark.sm90, pytest.mark.fla]

DTYPE = pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
GATES = pytest.mark.parametrize("gates", ["strong", "mild", "zero", "published"])
MODE = pytest.mark.parametrize("mode", ["exact", "auto"])
LENS = (0, 1, 63, 0, 0, 64, 65, 127, 128, 129, 700, 0)


def inputs(seed=0, **fields):
    return make_inputs(Case(**fields), DEVICE, seed)


@pytest.fixture
def cut(monkeypatch):
    """Every call is cut into segments of that many tokens (None: as planned), in that mode."""

    def cut(tokens, mode="auto", shares=1):
        fields = {"segment": tokens, "segment_splits": shares, "backward_segment": 0}
        monkeypatch.setenv("FLA_FLASH_QLA_CP", mode)
        monkeypatch.setattr(api, "plan", planner(**({} if tokens is None else fields)))

    return cut


@DTYPE
@GATES
@MODE
@pytest.mark.parametrize(("tokens", "shares"), [(64, 1), (128, 2), (320, 1)])
def test_flashqla_segments_gpu(dtype, gates, mode, tokens, shares, cut):
    cut(tokens, mode, shares)
    check(inputs(T=1000, dtype=dtype, gates=gates))
    check(inputs(B=2, T=640, dtype=dtype, gates=gates, l2norm=True))
    check(inputs(lens=LENS, tail=70, dtype=dtype, gates=gates, cu_dtype="int64"))


@DTYPE
@MODE
@pytest.mark.parametrize("gates", ["strong", "mild"])
@pytest.mark.parametrize(
    "flags", [LAYER, {"raw_g": "no_bias", "raw_beta": 1}], ids=["layer", "raw"]
)
def test_flashqla_segments_gpu_of_made_gates_and_betas(flags, gates, mode, dtype, cut):
    cut(128, mode)
    fields = {"dtype": dtype, "gates": gates, **flags}
    check(inputs(T=1000, beta_dtype="bfloat16", g_dtype="bfloat16", **fields), fla=False)
    check(inputs(lens=LENS, tail=70, H=1, HV=3, **fields), fla=False)


@DTYPE
@pytest.mark.parametrize("state", ["float32", "bfloat16", None])
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("final", [False, True])
def test_flashqla_segments_gpu_states(dtype, state, v_first, final, cut):
    cut(64)
    fields = {"state_dtype": state, "state_v_first": v_first, "output_final_state": final}
    check(inputs(lens=LENS, dtype=dtype, gates="mild", **fields))
    check(inputs(B=2, T=130, HV=6, dtype=dtype, gates="zero", **fields))


@DTYPE
@GATES
def test_flashqla_segments_gpu_as_planned(dtype, gates, cut):
    """Long sequences as the planner cuts them, and one as long for each SM to be used."""
    cut(None)
    for fields in ({"T": 16384}, {"lens": (1000, 0, 15000), "tail": 100}):
        x = inputs(H=1, HV=2, dtype=dtype, gates=gates, **fields)
        if "cu_seqlens" in x:
            x["cu_seqlens_cpu"] = x["cu_seqlens"].cpu()  # otherwise the mean length counts
        assert plan(describe(**x)).segment
        check(x, fla=False)


def test_flashqla_segments_gpu_near_whole_sequences(cut, monkeypatch):
    """Cutting costs no more accuracy than rounding does, where nothing decays."""
    x = inputs(T=4096, gates="zero")
    want = oracle(x)
    errors = {}
    for mode in ("off", "exact"):
        cut(256, mode)
        errors[mode] = [relative_error(a, b) for a, b in zip(run_ours(**x), want, strict=True)]
    for off, exact in zip(errors["off"], errors["exact"], strict=True):
        assert exact <= 1.2 * off + 1e-4, errors


@DTYPE
@MODE
def test_flashqla_segments_gpu_do_not_leak(dtype, mode, cut):
    cut(64, mode)
    x = inputs(lens=(100, 130, 150, 0), tail=60, dtype=dtype, gates="mild")
    o, ht = run_ours(**x)
    for name in ROWS:
        x[name][:, 100:230] = torch.nan
        x[name][:, 380:] = torch.nan
    x["initial_state"][1] = torch.nan
    o_n, ht_n = run_ours(**x)
    others = [0, 2, 3]
    assert torch.equal(ht[others], ht_n[others]) and ht_n[1].isnan().all()
    for rows in (slice(100), slice(230, None)):
        assert torch.equal(o[:, rows], o_n[:, rows])


@DTYPE
@pytest.mark.parametrize("reset", [-torch.inf, -200.0])
def test_flashqla_segments_gpu_resets(dtype, reset, cut):
    cut(128)
    x = inputs(T=700, gates="mild", dtype=dtype)
    for t in (5, 64, 127, 128, 300, 511, 512):
        x["g"][0, t] = reset
    x["g"][0, 130:200, 1] = reset
    check(x, fla=False)


def test_flashqla_segments_gpu_no_host_sync(cut):
    cut(64)
    x = inputs(lens=(100, 0, 265), tail=3, cu_dtype="int64", state_dtype="bfloat16")
    want = run_ours(**x)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = run_ours(**x)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_same(got, want)


@pytest.mark.parametrize("lens", [None, (400, 0, 300, 324)], ids=["dense", "varlen"])
def test_flashqla_segments_gpu_graph(lens, cut):
    """Replays answer for the contents of the moment, boundaries and decays included."""
    cut(128)
    x = inputs(lens=lens, T=1024)
    run_ours(**x)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = run_ours(**x)
    for seed, gates in ((1, "zero"), (2, "strong")):
        new = inputs(lens=lens, T=1024, seed=seed, gates=gates)
        if lens is not None:
            new["cu_seqlens"] = torch.tensor([0, 1 + seed, 70, 70, 1024 - seed]).to(
                new["cu_seqlens"]
            )
        for name in ROWS + ("initial_state", "cu_seqlens") * (lens is not None):
            x[name].copy_(new[name])
        graph.replay()
        torch.cuda.synchronize()
        assert_same(captured, run_ours(**x))
        check(x, captured, fla=False)


def test_flashqla_segments_gpu_repeats_are_bit_identical(cut):
    cut(128)
    x = inputs(lens=(1000, 0, 65, 700), H=4, HV=16)
    want = run_ours(**x)
    load = torch.cuda.Stream()
    a = torch.randn(2048, 2048, device=DEVICE)
    for i in range(200):
        if i % 2:
            with torch.cuda.stream(load):  # blocks of another kernel change who runs when
                a @ a
        assert_same(run_ours(**x), want)
    load.synchronize()


@DTYPE
@pytest.mark.parametrize("flags", [{}, LAYER], ids=["plain", "layer"])
def test_flashqla_segments_gpu_under_a_backward(flags, dtype, cut):
    """The backward takes whole sequences and gives the same gradients either way."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    x = inputs(lens=(300, 0, 200), dtype=dtype, gates="mild", **flags)
    names = [n for n in (*DIFFERENTIABLE, *PARAMETERS) if n in x]
    do, dht = make_output_gradients(x)
    found = []
    for mode in ("off", "auto"):
        cut(64, mode)
        leaves = {n: x[n].detach().clone().requires_grad_() for n in names}
        results = chunk_gated_delta_rule(**{**x, **leaves})
        want = oracle(x)
        assert all(
            relative_error(a.detach(), b) <= BOUNDS[dtype]
            for a, b in zip(results, want, strict=True)
        )
        found.append(torch.autograd.grad(results, [*leaves.values()], [do, dht]))
    assert_same(*found)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_flashqla_segments_gpu_on_another_device_than_the_current(cut, monkeypatch):
    cut(64)
    monkeypatch.setattr(api, "_kernels", {})  # rehearsed anew
    x = inputs(lens=(300, 65))
    there = {n: t.to("cuda:1") if isinstance(t, torch.Tensor) else t for n, t in x.items()}
    got = run_ours(**there)
    assert torch.cuda.current_device() == 0
    assert_same([t.to("cuda:0") for t in got], run_ours(**x))
