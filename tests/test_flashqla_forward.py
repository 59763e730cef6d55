# SPDX-License-Identifier: MIT
"""The forward kernels on their own hardware, through FLA's operator, against float64."""

import pytest
import torch
from gpu_helpers import (
    DEVICE,
    LENS,
    ROWS,
    assert_same,
    check,
    harden,
    operator,
    poisoned_memory,
    run_ours,
)

from fla_flashqla.call import describe
from fla_flashqla.plan import plan
from fla_flashqla.testing import Case, make_inputs

pytestmark = [pytest.mark.gpu, pytest.mark.sm90, pytest.mark.fla]

DTYPE = pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
GATES = pytest.mark.parametrize("gates", ["strong", "mild", "zero"])


def cases(*cases):
    return pytest.mark.parametrize("case", [pytest.param(c, id=c.id) for c in cases])


def inputs(seed=0, **fields):
    return make_inputs(Case(**fields), DEVICE, seed)


def rows_of(x, rows):
    return {**x, **{n: x[n][:, rows] for n in ROWS}}


@DTYPE
@GATES
@pytest.mark.parametrize("T", [1, 63, 64, 65, 127, 1000])
def test_flashqla_chunk(dtype, gates, T):
    check(inputs(B=2, T=T, dtype=dtype, gates=gates))


@DTYPE
@GATES
@pytest.mark.parametrize("cu_dtype", ["int32", "int64"])
def test_flashqla_chunk_varlen(dtype, gates, cu_dtype):
    x = inputs(lens=LENS, dtype=dtype, gates=gates, cu_dtype=cu_dtype)
    o, ht = check(x)
    for n, length in enumerate(LENS):
        assert length or torch.equal(ht[n], x["initial_state"][n])


@DTYPE
@cases(*(Case(T=T, lens=lens, gates="strong") for T, lens in ((1, None), (200, None), (0, LENS))))
def test_flashqla_chunk_state_v_first(dtype, case):
    x = make_inputs(case, DEVICE)
    x = {n: t.to(getattr(torch, dtype)) if n in ("q", "k", "v") else t for n, t in x.items()}
    o, ht = run_ours(**x)
    turned = {**x, "initial_state": x["initial_state"].mT, "state_v_first": True}
    o_v, ht_v = check(turned)
    assert_same((o_v, ht_v.mT), (o, ht))
    assert ht_v.is_contiguous()
    x.pop("initial_state")
    o, ht = run_ours(**x)
    assert_same(run_ours(**{**x, "state_v_first": True}), (o, ht.mT))


@DTYPE
@pytest.mark.parametrize("heads", ["2:2", "2:4", "2:6", "2:8", "1:5", "30:30", "16:64"])
def test_flashqla_chunk_gva(heads, dtype):
    H, HV = map(int, heads.split(":"))
    check(inputs(H=H, HV=HV, B=2, T=200, dtype=dtype))
    check(inputs(H=H, HV=HV, lens=(70, 0, 130), dtype=dtype))


@DTYPE
@pytest.mark.parametrize("h0", ["float32", "bfloat16", "float16", None])
@pytest.mark.parametrize("final", [True, False])
def test_flashqla_states(dtype, h0, final):
    fields = {"dtype": dtype, "state_dtype": h0, "output_final_state": final}
    check(inputs(B=3, T=130, **fields))
    check(inputs(lens=(0, 130, 1), **fields))


@pytest.mark.parametrize("h0", [None, "bfloat16"])
def test_flashqla_empty_sequences_keep_their_state(h0):
    x = inputs(lens=(0, 5, 0), state_dtype=h0)
    _, ht = run_ours(**x)
    for n in (0, 2):
        assert torch.equal(ht[n], x["initial_state"][n].float() if h0 else torch.zeros_like(ht[n]))


def test_flashqla_wholly_empty_batch():
    x = inputs(lens=(0, 0, 0), tail=70)
    x["q"].fill_(torch.nan)
    o, ht = run_ours(**x)
    assert (o == 0).all() and torch.equal(ht, x["initial_state"])


@DTYPE
@pytest.mark.parametrize("tail", [1, 63, 64, 200])
def test_flashqla_rows_behind_the_last_boundary(dtype, tail):
    """Padded batches repeat the last boundary; what lies behind it is not read and zero in o."""
    x = inputs(lens=(100, 29, 0, 0), tail=tail, dtype=dtype)
    for name in ROWS:
        x[name][:, 129:] = torch.nan
    o, ht = check(x, fla=False)
    assert (o[:, 129:] == 0).all()
    used = rows_of(x, slice(129))
    assert_same(run_ours(**used), (o[:, :129], ht))


@DTYPE
def test_flashqla_neighbours_do_not_leak(dtype):
    x = inputs(lens=(65, 63, 130, 0, 1), dtype=dtype)
    o, ht = run_ours(**x)
    for name in ROWS:
        x[name][:, 65:128] = torch.nan
    x["initial_state"][1] = torch.nan
    o_n, ht_n = run_ours(**x)
    others = [0, 2, 3, 4]
    assert torch.equal(ht[others], ht_n[others])
    assert torch.equal(o[:, :65], o_n[:, :65]) and torch.equal(o[:, 128:], o_n[:, 128:])
    x = inputs(B=3, T=65, dtype=dtype)
    o, ht = run_ours(**x)
    for name in ROWS:
        x[name][1] = torch.nan
    o_n, ht_n = run_ours(**x)
    assert torch.equal(o[::2], o_n[::2]) and torch.equal(ht[::2], ht_n[::2])


@DTYPE
@pytest.mark.parametrize("scale", [1.0, 0.5, 7, -0.3])
def test_flashqla_scale(dtype, scale):
    check(inputs(T=100, dtype=dtype, scale=scale))


@DTYPE
@pytest.mark.parametrize("size", ["unit", "tiny", "large", "mixed", "zero"])
def test_flashqla_l2norm(dtype, size):
    """eps decides below a norm of 1e-3; a row of zeros stays one."""
    x = inputs(lens=(200, 0, 65), dtype=dtype, l2norm=True)
    T = x["q"].shape[1]
    factor = {
        "unit": torch.ones(T),
        "tiny": torch.full((T,), 1e-4),
        "large": torch.full((T,), 3e3),
        "mixed": 10 ** torch.linspace(-5, 3, T)[torch.randperm(T)],
        "zero": (torch.arange(T) % 3 > 0).float(),
    }[size].to(DEVICE)
    for name in ("q", "k"):
        x[name] = (x[name].float() * factor[:, None, None]).to(x[name].dtype)
    check(x)


@DTYPE
@pytest.mark.parametrize("side", ["bfloat16", "float16"])
@GATES
def test_flashqla_gate_dtypes(dtype, side, gates):
    check(inputs(T=200, dtype=dtype, g_dtype=side, gates=gates))
    check(inputs(T=200, dtype=dtype, beta_dtype=side, gates=gates))


@DTYPE
@pytest.mark.parametrize("reset", [-torch.inf, -1e30, -3e4, -200.0])
def test_flashqla_resets(dtype, reset):
    """Documents in one sequence: a gate that lets nothing through, alone, in rows, in one head."""
    x = inputs(B=2, T=330, gates="mild", dtype=dtype)
    for t in (5, 6, 63, 64, 127, 200):
        x["g"][0, t] = reset
    x["g"][1, 130:200] = reset
    x["g"][1, 0, 2:] = reset
    x["g"][1, -1, 0] = reset
    check(x, fla=False)


@DTYPE
@pytest.mark.parametrize("keys", ["equal", "alike", "long"])
def test_flashqla_inverse(dtype, keys):
    """Entries of the inverse that are not small: equal keys with beta = 2, un-normalised keys."""
    x = inputs(T=500, dtype=dtype, gates="mild")
    harden(x, keys)
    check(x, absolute=False)


@DTYPE
@pytest.mark.parametrize("cut", [1, 64, 77, 192])
def test_flashqla_split_over_two_calls(dtype, cut):
    x = inputs(B=2, T=250, dtype=dtype, gates="mild")
    o1, state = run_ours(**rows_of(x, slice(cut)))
    o2, state = run_ours(**{**rows_of(x, slice(cut, None)), "initial_state": state})
    check(x, (torch.cat([o1, o2], 1), state))


def test_flashqla_dense_is_varlen():
    x = inputs(B=3, T=150)
    o, ht = run_ours(**x)
    flat = {**x, **{n: x[n].flatten(0, 1)[None] for n in ROWS}}
    cu = torch.arange(0, 451, 150, device=DEVICE)
    o_flat, ht_flat = run_ours(**flat, cu_seqlens=cu)
    assert_same((o_flat.view_as(o), ht_flat), (o, ht))


def test_flashqla_boundaries_changed_in_place():
    x = inputs(lens=(64, 64, 64))
    run_ours(**x)
    x["cu_seqlens"].copy_(torch.tensor([0, 10, 150, 192]))
    check(x, fla=False)


def test_flashqla_strided_views():
    """q, k, v of one packed projection, heads before tokens, an expanded state."""
    x = inputs(B=2, T=130)
    want = run_ours(**x)
    packed = torch.cat([x["q"], x["k"], x["v"]], 2)
    q, k, v = packed.split([2, 2, 4], 2)
    assert_same(run_ours(**{**x, "q": q, "k": k, "v": v}), want)
    turned = {n: x[n].transpose(1, 2).contiguous().transpose(1, 2) for n in ROWS}
    assert_same(run_ours(**{**x, **turned}), want)
    padded = torch.full((2, 130, 2, 160), torch.nan, dtype=q.dtype, device=DEVICE)
    padded[..., 16:144] = x["q"]
    assert_same(run_ours(**{**x, "q": padded[..., 16:144]}), want)
    odd = torch.empty(x["k"].numel() + 1, dtype=q.dtype, device=DEVICE)[1:].view_as(x["k"])
    assert_same(run_ours(**{**x, "k": odd.copy_(x["k"])}), want)  # 2-byte alignment only
    h0 = x["initial_state"][:1]
    want = run_ours(**{**x, "initial_state": h0.repeat(2, 1, 1, 1)})
    assert_same(run_ours(**{**x, "initial_state": h0.expand(2, -1, -1, -1)}), want)
    one = {n: x[n][:1] for n in (*ROWS, "initial_state")}
    want = run_ours(**{**x, **one})
    # of one batch, so that they are contiguous with any stride between batches
    longer = {n: torch.cat([one[n]] * 2, 1)[:, :130] for n in ROWS}
    assert_same(run_ours(**{**x, **one, **longer}), want)
    cu = torch.tensor([0, 7, 130, 7, 260, 7], device=DEVICE)[::2]
    flat = {**x, **{n: x[n].flatten(0, 1)[None] for n in ROWS}}
    assert_same(run_ours(**flat, cu_seqlens=cu), run_ours(**flat, cu_seqlens=cu.clone()))


def test_flashqla_inputs_are_not_written():
    x = inputs(lens=(3, 200), tail=5, l2norm=True)
    before = {n: t.clone() for n, t in x.items() if isinstance(t, torch.Tensor)}
    run_ours(**x)
    assert all(torch.equal(x[n], t) for n, t in before.items())


def test_flashqla_side_stream():
    """The kernels run on the current stream: the inputs are late there, and so must they be."""
    x = inputs(T=300)
    want = run_ours(**x)
    late = {n: torch.full_like(x[n], torch.nan) for n in ROWS}
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        for name in ROWS:
            late[name].copy_(x[name])
        got = run_ours(**{**x, **late})
    torch.cuda.current_stream().wait_stream(stream)
    assert_same(got, want)


def test_flashqla_no_host_sync():
    x = inputs(lens=(100, 0, 65), tail=3, cu_dtype="int64", state_dtype="bfloat16")
    want = run_ours(**x)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = run_ours(**x)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_same(got, want)


@pytest.mark.parametrize("lens", [None, (100, 0, 65, 91)], ids=["dense", "varlen"])
def test_flashqla_cuda_graph(lens):
    """Replays answer for the contents of the moment, boundaries included."""
    x = inputs(lens=lens, T=256)
    run_ours(**x)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = run_ours(**x)
    for seed in (1, 2):
        new = inputs(lens=lens, T=256, seed=seed)
        if lens is not None:
            new["cu_seqlens"] = torch.tensor([0, 1 + seed, 70, 70, 256 - seed]).to(
                new["cu_seqlens"]
            )
        for name in ROWS + ("initial_state", "cu_seqlens") * (lens is not None):
            x[name].copy_(new[name])
        graph.replay()
        torch.cuda.synchronize()
        assert_same(captured, run_ours(**x))
        check(x, captured, fla=False)


@DTYPE
@pytest.mark.parametrize("cu_dtype", ["int32", "int64"])
def test_flashqla_longest_first(dtype, cu_dtype):
    """Not all blocks run at once: sequences start in the order of their lengths."""
    x = inputs(lens=(*LENS, 300), H=4, HV=16, dtype=dtype, cu_dtype=cu_dtype)
    assert plan(describe(**x)).longest_first
    check(x, fla=False)


@DTYPE
def test_flashqla_signs(dtype):
    """Negative scales and betas: the kernels hold logarithms of both."""
    x = inputs(lens=(300, 64, 0, 65), dtype=dtype, gates="mild", scale=-0.3, tail=7)
    x["beta"][:, 10:330:3] *= -1
    check(x, fla=False)


@pytest.mark.parametrize("zero", ["scale", "beta"])
def test_flashqla_zeros(zero):
    x = inputs(T=200, gates="mild", scale=0.0 if zero == "scale" else 0.3)
    if zero == "beta":
        x["beta"][:, ::2] = 0
        check(x, fla=False)
    else:
        assert not run_ours(**x)[0].any()


def test_flashqla_repeats_are_bit_identical():
    x = inputs(lens=(1000, 0, 65, 700), gates="strong", H=4, HV=16)
    want = run_ours(**x)
    load = torch.cuda.Stream()
    a = torch.randn(2048, 2048, device=DEVICE)
    for i in range(200):
        if i % 2:
            with torch.cuda.stream(load):  # blocks of another kernel change who runs when
                a @ a
        assert_same(run_ours(**x), want)
    load.synchronize()


def test_flashqla_many_short_sequences():
    """More sequences than a grid's second dimension holds, with an answer in closed form."""
    N = 70_000
    x = inputs(lens=(1,) * N, H=1, HV=1, state_dtype=None, output_final_state=False)
    o, _ = run_ours(**x)
    q, k, v = (x[n].float() for n in ("q", "k", "v"))
    want = 128**-0.5 * (q * k).sum(-1, keepdim=True) * x["beta"][..., None] * v
    assert torch.linalg.vector_norm(o.float() - want) <= 8e-3 * torch.linalg.vector_norm(want)


def test_flashqla_offsets_above_two_to_the_31():
    """A short sequence behind a long one: elements of v and o beyond 32-bit offsets."""
    long, short, H, HV = 2**18, 200, 2, 64
    x = inputs(lens=(long, short), H=H, HV=HV, gates="mild", state_dtype=None)
    o, ht = run_ours(**x)
    assert o.numel() > 2**31
    last = {n: x[n][:, long:] for n in ROWS}
    check({**last, "output_final_state": True}, (o[:, long:], ht[1:]), fla=False)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_flashqla_on_another_device_than_the_current():
    x = inputs(lens=(100, 65))
    want = run_ours(**x)
    there = {n: t.to("cuda:1") if isinstance(t, torch.Tensor) else t for n, t in x.items()}
    got = run_ours(**there)
    assert torch.cuda.current_device() == 0
    assert_same([t.to("cuda:0") for t in got], want)


def test_flashqla_poison_is_seen():
    """The guard of this file works: memory nobody wrote is NaN."""
    with poisoned_memory():
        assert torch.empty(3, device=DEVICE).isnan().all()
        assert torch.empty_like(torch.ones(3, device=DEVICE)).isnan().all()
        assert torch.ones(3, device=DEVICE).new_empty(2).isnan().all()


def test_flashqla_autocast_changes_nothing():
    x = inputs(T=100)
    want = run_ours(**x)
    with torch.autocast("cuda", dtype=torch.float16):
        assert_same(run_ours(**x), want)


def test_flashqla_positional_call():
    x = inputs(T=100)
    names = (*ROWS, "scale", "initial_state", "output_final_state")
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    with torch.no_grad():
        got = chunk_gated_delta_rule(*(x[n] for n in names))
    assert_same(got, run_ours(**x))
    assert_same(got, operator(**x))
