# SPDX-License-Identifier: MIT
"""Gradients of sequences in segments on their own hardware, through FLA's operator, against float64."""

import pytest
import test_flashqla_activations_gpu as activations
import torch
from gpu_helpers import DEVICE, LAYER, ROWS, planner
from test_flashqla_backward import assert_same, beside_its_model, check, compare, run, trained
from test_flashqla_segments_gpu import DTYPE, GATES, LENS, MODE, inputs

from fla_flashqla import api, chunk, reference, segments
from fla_flashqla.call import describe
from fla_flashqla.plan import plan
from fla_flashqla.testing import (
    DIFFERENTIABLE,
    GRADIENT_BOUNDS,
    make_output_gradients,
    oracle_gradients,
    relative_error,
)

pytestmark = [pytest.mark.gpu, pytest.mark.sm90, pytest.mark.fla]


@pytest.fixture
def cut(monkeypatch):
    """Every backward is cut into segments of that many tokens (None: as planned), in that mode; the forward is not."""

    def cut(tokens, mode="auto", shares=1, forward=0):
        fields = {"segment": forward, "backward_segment": tokens, "backward_splits": shares}
        monkeypatch.setenv("FLA_FLASH_QLA_CP", mode)
        monkeypatch.setattr(api, "plan", planner(**({} if tokens is None else fields)))

    return cut


OUTPUTS = {
    "segments": (5, 6, 7),
    "combine": (7, 8),
    "reverse_segments": (9,),
    "states": (6, 7),
    "reverse": (7, 8, 9),
    "gradients": (),
}


@DTYPE
@MODE
@pytest.mark.parametrize("gates", ["strong", "zero"])
@pytest.mark.parametrize("shares", [1, 2])
def test_flashqla_segments_backward_gpu_kernels(dtype, mode, gates, shares, cut, monkeypatch):
    """Each kernel alone: nothing is written but what its model writes."""
    cut(128, mode, shares)
    x = inputs(lens=(0, 1, 128, 0, 129, 500), tail=70, H=1, HV=3, dtype=dtype, gates=gates)
    do, dht = make_output_gradients(x)
    run(x, do, dht)
    bound = GRADIENT_BOUNDS[dtype]
    for module, name in (
        (segments, "build"),
        (segments, "build_backward"),
        (chunk, "build_backward"),
    ):
        kernels = getattr(module, name)(api.plan(describe(**x)))
        checked = {n: beside_its_model(n, k, bound, OUTPUTS) for n, k in kernels._asdict().items()}
        made = kernels._replace(**checked)
        monkeypatch.setattr(module, name, lambda plan, made=made: made)
    run(x, do, dht)


@DTYPE
@GATES
@MODE
@pytest.mark.parametrize(("tokens", "shares"), [(64, 1), (128, 2), (320, 1)])
def test_flashqla_segments_backward_gpu(dtype, gates, mode, tokens, shares, cut):
    cut(tokens, mode, shares)
    check(inputs(T=1000, dtype=dtype, gates=gates))
    check(inputs(B=2, T=640, dtype=dtype, gates=gates, l2norm=True))
    x = inputs(lens=LENS, tail=70, dtype=dtype, gates=gates, cu_dtype="int64")
    _, dht = make_output_gradients(x)
    got = check(x)
    for n, length in enumerate(LENS):
        assert length or torch.equal(got["initial_state"][n], dht[n])


@DTYPE
@pytest.mark.parametrize("loss", ["both", "o", "final_state"])
@pytest.mark.parametrize("state", ["float32", "bfloat16", None])
@pytest.mark.parametrize("v_first", [False, True])
def test_flashqla_segments_backward_gpu_states(dtype, loss, state, v_first, cut):
    cut(64)
    fields = {"dtype": dtype, "state_dtype": state, "state_v_first": v_first}
    check(inputs(lens=LENS, gates="mild", **fields), loss)
    check(inputs(B=2, T=130, HV=6, gates="zero", **fields), loss)


@DTYPE
@MODE
@pytest.mark.parametrize("gates", ["strong", "mild"])
@pytest.mark.parametrize(
    "flags", [LAYER, {"raw_g": "no_bias", "raw_beta": 1}], ids=["layer", "raw"]
)
def test_flashqla_segments_backward_gpu_of_made_gates_and_betas(flags, gates, mode, dtype, cut):
    cut(128, mode)
    fields = {"dtype": dtype, "gates": gates, **flags}
    activations.check(inputs(T=1000, beta_dtype="bfloat16", g_dtype="bfloat16", **fields))
    activations.check(inputs(lens=LENS, tail=70, H=1, HV=3, **fields))


@DTYPE
@pytest.mark.parametrize(
    "wanted", [("q",), ("v",), ("v", "initial_state"), ("k",), ("g", "beta")], ids="-".join
)
def test_flashqla_segments_backward_gpu_subsets(dtype, wanted, cut):
    """The same bits whatever else is asked for."""
    cut(64)
    x = inputs(lens=(165, 0, 230), tail=70, dtype=dtype, gates="mild", l2norm=True)
    do, dht = make_output_gradients(x)
    want = run(x, do, dht)
    assert_same(run(x, do, dht, wanted), {n: want[n] for n in wanted})


@DTYPE
@GATES
def test_flashqla_segments_backward_gpu_as_planned(dtype, gates, cut):
    """Long sequences as the planner cuts them."""
    cut(None)
    for fields in ({"T": 32768}, {"lens": (1000, 0, 31000), "tail": 100}):
        x = inputs(H=1, HV=2, dtype=dtype, gates=gates, **fields)
        if "cu_seqlens" in x:
            x["cu_seqlens_cpu"] = x["cu_seqlens"].cpu()  # otherwise the mean length counts
        assert plan(describe(**trained(x))).backward_segment
        check(x, form=reference.chunk_gated_delta_rule)


def test_flashqla_segments_backward_gpu_near_whole_sequences(cut):
    """Cutting costs no more accuracy than rounding does, where nothing decays."""
    x = inputs(T=4096, gates="zero")
    do, dht = make_output_gradients(x)
    want = oracle_gradients(x, do, dht)
    errors = {}
    for mode in ("off", "exact"):
        cut(256, mode)
        got = run(x, do, dht)
        errors[mode] = {n: relative_error(dx, want[n]) for n, dx in got.items()}
    for name, off in errors["off"].items():
        assert errors["exact"][name] <= 1.2 * off + 1e-4, errors


@pytest.mark.parametrize("forward", [0, 64, 320])
def test_flashqla_segments_backward_gpu_whatever_the_forward_did(forward, cut):
    x = inputs(T=1000, gates="mild")
    do, dht = make_output_gradients(x)
    cut(128)
    want = run(x, do, dht)
    cut(128, forward=forward)
    assert_same(run(x, do, dht), want)


@DTYPE
@MODE
def test_flashqla_segments_backward_gpu_do_not_leak(dtype, mode, cut):
    cut(64, mode)
    x = inputs(lens=(100, 130, 150, 0), tail=60, dtype=dtype, gates="mild")
    do, dht = make_output_gradients(x)
    want = run(x, do, dht)
    for tensor in (*(x[n] for n in ROWS), do):
        tensor[:, 100:230] = torch.nan
        tensor[:, 380:] = torch.nan
    x["initial_state"][1] = dht[1] = torch.nan
    got = run(x, do, dht)
    others = [0, 2, 3]
    assert torch.equal(got["initial_state"][others], want["initial_state"][others])
    for name in ROWS:
        for rows in (slice(100), slice(230, None)):
            assert torch.equal(got[name][:, rows], want[name][:, rows]), name


@DTYPE
@pytest.mark.parametrize("reset", [-torch.inf, -200.0])
def test_flashqla_segments_backward_gpu_resets(dtype, reset, cut):
    cut(128)
    x = inputs(T=700, gates="mild", dtype=dtype)
    for t in (5, 64, 127, 128, 300, 511, 512):
        x["g"][0, t] = reset
    x["g"][0, 130:200, 1] = reset
    check(x)


def test_flashqla_segments_backward_gpu_no_host_sync(cut):
    cut(64)
    x = inputs(lens=(100, 0, 265), tail=3, cu_dtype="int64", state_dtype="bfloat16")
    do, dht = make_output_gradients(x)
    want = run(x, do, dht)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = run(x, do, dht)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_same(got, want)


@pytest.mark.parametrize("lens", [None, (400, 0, 300, 324)], ids=["dense", "varlen"])
def test_flashqla_segments_backward_gpu_graph(lens, cut):
    """Replays answer for the contents of the moment, boundaries and decays included."""
    cut(128)
    x = inputs(lens=lens, T=1024)
    do, dht = make_output_gradients(x)
    run(x, do, dht)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = run(x, do, dht)
    for seed, gates in ((1, "zero"), (2, "strong")):
        new = inputs(lens=lens, T=1024, seed=seed, gates=gates)
        if lens is not None:
            new["cu_seqlens"] = torch.tensor([0, 1 + seed, 70, 70, 1024 - seed]).to(
                new["cu_seqlens"]
            )
        for name in DIFFERENTIABLE + ("cu_seqlens",) * (lens is not None):
            x[name].copy_(new[name])
        graph.replay()
        torch.cuda.synchronize()
        assert_same(captured, run(x, do, dht))
        compare(x, captured, oracle_gradients(x, do, dht))


def test_flashqla_segments_backward_gpu_repeats_are_bit_identical(cut):
    cut(128)
    x = inputs(lens=(1000, 0, 65, 700), H=4, HV=16)
    do, dht = make_output_gradients(x)
    want = run(x, do, dht)
    load = torch.cuda.Stream()
    a = torch.randn(2048, 2048, device=DEVICE)
    for i in range(200):
        if i % 2:
            with torch.cuda.stream(load):  # blocks of another kernel change who runs when
                a @ a
        assert_same(run(x, do, dht), want)
    load.synchronize()
