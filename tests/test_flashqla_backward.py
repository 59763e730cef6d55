# SPDX-License-Identifier: MIT
"""The backward kernels on their own hardware, through FLA's operator, against float64."""

import itertools
import os
from unittest import mock

import gpu_helpers
import kernel_models
import pytest
import torch
from gpu_helpers import DEVICE, LENS, ROWS, answered, loss_gradients, poisoned_memory, used_rows
from model_helpers import any_sign
from torch.utils.checkpoint import checkpoint

import fla_flashqla
from fla_flashqla import chunk, reference
from fla_flashqla.call import describe
from fla_flashqla.plan import plan
from fla_flashqla.testing import (
    DIFFERENTIABLE,
    GRADIENT_BOUNDS,
    Case,
    make_inputs,
    make_output_gradients,
    oracle_gradients,
    relative_error,
)

pytestmark = [pytest.mark.gpu, pytest.mark.sm90, pytest.mark.fla]

DTYPE = pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
GATES = pytest.mark.parametrize("gates", ["published", "strong", "zero"])
SUBSETS = [s for n in range(1, 7) for s in itertools.combinations(DIFFERENTIABLE, n)]


def inputs(seed=0, **fields):
    return make_inputs(Case(**fields), DEVICE, seed)


def operator(**call):
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    return chunk_gated_delta_rule(**call)


def trained(x, wanted=DIFFERENTIABLE):
    return {
        n: t.detach().requires_grad_(n in wanted) if n in DIFFERENTIABLE else t
        for n, t in x.items()
    }


def run(x, do, dht, wanted=DIFFERENTIABLE, operator=operator):
    """Gradients by our kernels, proved by the count, on poisoned memory."""
    wanted = [n for n in wanted if n in x]
    before = answered()
    with mock.patch.dict(os.environ, {"FLA_FLASH_QLA": "1"}), poisoned_memory():
        leaves = trained(x, wanted)
        results = operator(**leaves)
        pairs = [(o, d) for o, d in zip(results, (do, dht), strict=True) if d is not None]
        outputs, of_outputs = zip(*pairs, strict=True)
        found = torch.autograd.grad(outputs, [leaves[n] for n in wanted], of_outputs)
    assert answered() == before + 2, fla_flashqla.dispatch_report()
    for name, dx in zip(wanted, found, strict=True):
        assert dx.dtype == x[name].dtype and dx.shape == x[name].shape, name
    return dict(zip(wanted, found, strict=True))


def compare(x, got, want):
    """Errors below the bound of the dtype; rows behind the last boundary are zero."""
    rows = used_rows(x)
    bound = GRADIENT_BOUNDS[str(x["q"].dtype).removeprefix("torch.")]
    for name, dx in got.items():
        truth = want[name]
        if name in ROWS:
            if rows.stop is not None:
                assert (dx[:, rows.stop :] == 0).all(), name
            dx, truth = dx[:, rows], truth[:, rows]
        rounded = GRADIENT_BOUNDS.get(str(dx.dtype).removeprefix("torch."), 0.0)
        limit, error = max(bound, rounded), relative_error(dx, truth)
        # little else than <S, dS> where nothing decays: one number a sequence and head
        if name == "g" and (x["g"] == 0).all(1).any():
            limit *= 2
        assert error <= limit, f"d{name}: relative L2 error {error:.2e}, at most {limit:.1e}"


def check(x, loss="both", wanted=DIFFERENTIABLE, form=reference.recurrent_gated_delta_rule):
    do, dht = loss_gradients(x, loss)
    got = run(x, do, dht, wanted)
    compare(x, got, oracle_gradients(x, do, dht, form))
    return got


def assert_same(got, want):
    assert got.keys() == want.keys()
    for name in got:
        assert torch.equal(got[name], want[name]), name


@DTYPE
@GATES
@pytest.mark.parametrize("T", [1, 63, 64, 65, 127, 1000])
def test_flashqla_backward(dtype, gates, T):
    check(inputs(B=2, T=T, dtype=dtype, gates=gates))


@DTYPE
def test_flashqla_backward_longest_first(dtype):
    x = inputs(lens=(*LENS, 300), H=4, HV=16, dtype=dtype)
    assert plan(describe(**x)).longest_first
    check(x)


@DTYPE
@GATES
def test_flashqla_backward_of_a_long_sequence(dtype, gates):
    x = inputs(T=8192, H=2, HV=4, dtype=dtype, gates=gates)
    check(x, form=reference.chunk_gated_delta_rule)


@DTYPE
@GATES
@pytest.mark.parametrize("cu_dtype", ["int32", "int64"])
def test_flashqla_backward_varlen(dtype, gates, cu_dtype):
    x = inputs(lens=LENS, dtype=dtype, gates=gates, cu_dtype=cu_dtype)
    _, dht = make_output_gradients(x)
    got = check(x)
    for n, length in enumerate(LENS):
        assert length or torch.equal(got["initial_state"][n], dht[n])


@DTYPE
@pytest.mark.parametrize("l2norm", [False, True])
@pytest.mark.parametrize("state_v_first", [False, True])
@pytest.mark.parametrize("h0", ["float32", "bfloat16", "float16", None])
@pytest.mark.parametrize("loss", ["both", "o", "final_state"])
def test_flashqla_backward_options(dtype, l2norm, state_v_first, h0, loss):
    fields = {"dtype": dtype, "l2norm": l2norm, "state_v_first": state_v_first, "state_dtype": h0}
    check(inputs(B=2, T=130, **fields), loss)
    check(inputs(lens=(0, 130, 1), tail=3, **fields), loss)


@DTYPE
@pytest.mark.parametrize("heads", ["2:2", "2:4", "2:6", "2:8", "1:5", "30:30", "16:64"])
def test_flashqla_backward_gva(heads, dtype):
    """Blocks of half a head and of a whole one."""
    H, HV = map(int, heads.split(":"))
    check(inputs(H=H, HV=HV, B=2, T=200, dtype=dtype))
    check(inputs(H=H, HV=HV, lens=(70, 0, 130), dtype=dtype, l2norm=True))


@DTYPE
@pytest.mark.parametrize("wanted", SUBSETS, ids="-".join)
def test_flashqla_backward_subsets(dtype, wanted):
    """The same bits whatever else is asked for."""
    x = inputs(lens=(65, 0, 130), tail=70, dtype=dtype, l2norm=True)
    do, dht = make_output_gradients(x)
    want = run(x, do, dht)
    assert_same(run(x, do, dht, wanted), {n: want[n] for n in wanted})


@DTYPE
@pytest.mark.parametrize("side", ["bfloat16", "float16"])
def test_flashqla_backward_gate_dtypes(dtype, side):
    check(inputs(T=200, dtype=dtype, g_dtype=side))
    check(inputs(T=200, dtype=dtype, beta_dtype=side))


@DTYPE
@pytest.mark.parametrize("reset", [-torch.inf, -1e30, -3e4, -200.0])
def test_flashqla_backward_resets(dtype, reset):
    x = inputs(B=2, T=330, gates="mild", dtype=dtype)
    for t in (5, 6, 63, 64, 127, 200):
        x["g"][0, t] = reset
    x["g"][1, 130:200] = reset
    x["g"][1, 0, 2:] = reset
    x["g"][1, -1, 0] = reset
    got = check(x)
    assert all(dx.isfinite().all() for dx in got.values())


@DTYPE
@pytest.mark.parametrize("l2norm", [False, True])
@pytest.mark.parametrize("scale", [None, 0.5, -0.3])
@pytest.mark.parametrize("heads", ["2:4", "2:6"])
def test_flashqla_backward_of_any_sign(dtype, l2norm, scale, heads):
    """Of beta and of scale: the kernels hold logarithms of both."""
    H, HV = map(int, heads.split(":"))
    fields = {"H": H, "HV": HV, "dtype": dtype, "gates": "mild", "scale": scale, "l2norm": l2norm}
    for shape in ({"B": 2, "T": 130}, {"lens": (300, 64, 0, 65), "tail": 7}):
        x = inputs(**shape, **fields)
        x["beta"] = any_sign(x["beta"])
        check(x)
    if scale is not None:
        x["beta"] = -x["beta"].abs()
        for loss in ("o", "final_state"):
            check(x, loss)


@DTYPE
def test_flashqla_backward_of_a_zero_scale(dtype):
    """The gradient of o reaches nothing, that of the final state all but q."""
    x = inputs(B=2, T=130, dtype=dtype, scale=0.0)
    got = check(x)
    assert (got["q"] == 0).all()


@DTYPE
@pytest.mark.parametrize("size", ["tiny", "large", "mixed", "zero"])
def test_flashqla_backward_l2norm(dtype, size):
    """Rows of any length; their gradients are compared as those of the unit rows."""
    x = inputs(lens=(200, 0, 65), dtype=dtype, l2norm=True)
    T = x["q"].shape[1]
    factor = {
        "tiny": torch.full((T,), 1e-2),
        "large": torch.full((T,), 1e2),
        "mixed": 10 ** torch.linspace(-2, 2, T)[torch.randperm(T)],
        "zero": (torch.arange(T) % 3 > 0).float(),
    }[size].to(DEVICE)
    for name in ("q", "k"):
        x[name] = (x[name].float() * factor[:, None, None]).to(x[name].dtype)
    do, dht = make_output_gradients(x)
    got, want = run(x, do, dht), oracle_gradients(x, do, dht)
    for name in ("q", "k"):
        if size == "zero":  # eps alone is what divides there
            assert got[name].isfinite().all()
            keep = factor > 0
            got[name], want[name] = got[name][:, keep], want[name][:, keep]
            compare({**x, "cu_seqlens": None}, {name: got.pop(name)}, want)
        else:
            scale = factor[:, None, None]
            got[name], want[name] = got[name].float() * scale, want[name] * scale
    compare(x, got, want)


@DTYPE
@pytest.mark.parametrize("l2norm", [False, True])
@pytest.mark.parametrize("tail", [1, 63, 64, 200])
@pytest.mark.parametrize("wanted", [DIFFERENTIABLE, ("v", "initial_state"), ("q",)], ids="-".join)
def test_flashqla_backward_rows_behind_the_last_boundary(dtype, l2norm, tail, wanted):
    """They are not read, neither of inputs nor of o's gradient, and zero in all gradients."""
    x = inputs(lens=(100, 29, 0, 0), tail=tail, dtype=dtype, l2norm=l2norm)
    do, dht = make_output_gradients(x)
    for tensor in (*(x[n] for n in ROWS), do):
        tensor[:, 129:] = torch.nan
    compare(x, run(x, do, dht, wanted), oracle_gradients(x, do, dht))


@DTYPE
def test_flashqla_backward_neighbours_do_not_leak(dtype):
    x = inputs(lens=(65, 63, 130, 0, 1), dtype=dtype)
    do, dht = make_output_gradients(x)
    want = run(x, do, dht)
    for tensor in (*(x[n] for n in ROWS), do):
        tensor[:, 65:128] = torch.nan
    x["initial_state"][1] = dht[1] = torch.nan
    got = run(x, do, dht)
    for name in ROWS:
        for rows in (slice(0, 65), slice(128, None)):
            assert torch.equal(got[name][:, rows], want[name][:, rows]), name
    others = [0, 2, 3, 4]
    assert torch.equal(got["initial_state"][others], want["initial_state"][others])


def test_flashqla_backward_wholly_empty_batch():
    x = inputs(lens=(0, 0, 0), tail=70)
    do, dht = make_output_gradients(x)
    got = run(x, do, dht)
    assert torch.equal(got["initial_state"], dht)
    assert all((got[n] == 0).all() for n in ROWS)


@DTYPE
@pytest.mark.parametrize("form", ["sum", "slice", "transposed"])
def test_flashqla_backward_strides(dtype, form):
    """Gradients of o and of the state with stride 0, of slices, not contiguous, not aligned."""
    x = inputs(B=2, T=130, dtype=dtype)
    do, dht = make_output_gradients(x)
    if form == "sum":
        do, dht = do[0, 0, 0, 0].expand_as(do), dht[0, 0, 0, 0].expand_as(dht)
    elif form == "slice":
        do = torch.nn.functional.pad(do, (3, 5))[..., 3:-5]
        dht = torch.nn.functional.pad(dht, (1, 0))[..., 1:]
    else:
        do, dht = do.transpose(1, 3).contiguous().transpose(1, 3), dht.mT.contiguous().mT
    got = run(x, do, dht)
    assert_same(got, run(x, do.contiguous(), dht.contiguous()))
    compare(x, got, oracle_gradients(x, do, dht))


def test_flashqla_backward_strided_inputs():
    x = inputs(B=2, T=130)
    do, dht = make_output_gradients(x)
    want = run(x, do, dht)
    packed = torch.cat([x["q"], x["k"], x["v"]], 2)
    views = dict(zip("qkv", packed.split([2, 2, 4], 2), strict=True))
    assert_same(run({**x, **views}, do, dht), want)
    turned = {n: x[n].transpose(1, 2).contiguous().transpose(1, 2) for n in ROWS}
    assert_same(run({**x, **turned}, do, dht), want)


def test_flashqla_backward_dense_is_varlen():
    x = inputs(B=3, T=150)
    do, dht = make_output_gradients(x)
    want = run(x, do, dht)
    flat = {**x, **{n: x[n].flatten(0, 1)[None] for n in ROWS}}
    flat["cu_seqlens"] = torch.arange(0, 451, 150, device=DEVICE)
    got = run(flat, do.flatten(0, 1)[None], dht)
    assert_same({n: got[n].view_as(want[n]) for n in got}, want)


@pytest.mark.parametrize("lens", [None, (1000, 0, 65, 700)], ids=["dense", "varlen"])
def test_flashqla_backward_repeats_are_bit_identical(lens):
    x = inputs(lens=lens, T=1000, gates="strong", H=4, HV=16)
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


@pytest.mark.parametrize("reentrant", [False, True])
def test_flashqla_backward_under_checkpointing(reentrant):
    x = inputs(lens=(100, 65), l2norm=True)
    do, dht = make_output_gradients(x)
    want = run(x, do, dht)
    leaves = trained(x)
    rest = {n: t for n, t in leaves.items() if n not in DIFFERENTIABLE}
    fla_flashqla.reset_report()

    def layer(*tensors):
        return operator(**dict(zip(DIFFERENTIABLE, tensors, strict=True)), **rest)

    results = checkpoint(layer, *(leaves[n] for n in DIFFERENTIABLE), use_reentrant=reentrant)
    torch.autograd.backward(results, [do, dht])
    assert_same({n: leaves[n].grad for n in DIFFERENTIABLE}, want)
    ran = fla_flashqla.dispatch_report()["ran"]
    name = f"{gpu_helpers.ARCH} bfloat16"
    assert ran == {f"forward {name}": 2, f"backward {name}": 1}


def test_flashqla_backward_accumulates():
    x = inputs(T=100)
    do, dht = make_output_gradients(x)
    want = run(x, do, dht)
    leaves = trained(x)
    for _ in range(2):
        torch.autograd.backward(operator(**leaves), [do, dht])
    assert_same({n: leaves[n].grad for n in DIFFERENTIABLE}, {n: 2 * want[n] for n in want})


def test_flashqla_backward_inputs_are_not_written():
    x = inputs(lens=(3, 200), tail=70, l2norm=True)
    do, dht = make_output_gradients(x)
    tensors = {**{n: t for n, t in x.items() if isinstance(t, torch.Tensor)}, "do": do, "dht": dht}
    before = {n: t.clone() for n, t in tensors.items()}
    for wanted in (DIFFERENTIABLE, ("q",), ("v",)):
        run(x, do, dht, wanted)
        assert_same(tensors, before)


def test_flashqla_backward_autocast_changes_nothing():
    x = inputs(T=100, dtype="float16", l2norm=True)
    do, dht = make_output_gradients(x)
    want = run(x, do, dht)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert_same(run(x, do, dht), want)


def test_flashqla_backward_on_a_side_stream():
    """The backward runs on the stream of its forward."""
    x = inputs(T=300)
    do, dht = make_output_gradients(x)
    want = run(x, do, dht)
    late = {n: torch.full_like(x[n], torch.nan) for n in ROWS}
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        for name in ROWS:
            late[name].copy_(x[name])
        got = run({**x, **late}, do, dht)
    torch.cuda.current_stream().wait_stream(stream)
    assert_same(got, want)


def test_flashqla_backward_no_host_sync():
    x = inputs(lens=(100, 0, 65), tail=3, cu_dtype="int64", state_dtype="bfloat16")
    do, dht = make_output_gradients(x)
    want = run(x, do, dht)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = run(x, do, dht)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_same(got, want)


def test_flashqla_backward_in_a_cuda_graph():
    x = inputs(lens=(100, 0, 65, 91))
    do, dht = make_output_gradients(x)
    run(x, do, dht)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = run(x, do, dht)
    for seed in (1, 2):
        new = inputs(lens=(100, 0, 65, 91), seed=seed)
        new["cu_seqlens"] = torch.tensor([0, 1 + seed, 70, 70, 256 - seed]).to(new["cu_seqlens"])
        for name in (*DIFFERENTIABLE, "cu_seqlens"):
            x[name].copy_(new[name])
        graph.replay()
        torch.cuda.synchronize()
        assert_same(captured, run(x, do, dht))


def requested_bytes():
    """Of the present allocations, before the allocator rounds them up."""
    return torch.cuda.memory_stats()["requested_bytes.all.current"]


@pytest.mark.parametrize("fields", [{"B": 3, "T": 1000}, {"lens": (1, 0, 64, 700), "l2norm": True}])
def test_flashqla_backward_keeps_little(fields):
    """Memory between forward and backward, beside inputs and results: what README says."""
    x = trained(inputs(H=4, HV=16, **fields))
    operator(**x)  # compiled, loaded and rehearsed
    torch.cuda.synchronize()
    before = requested_bytes()
    results = operator(**x)
    kept = requested_bytes() - before - sum(t.nbytes for t in results)
    lens = fields.get("lens", (1000,) * 3)
    slots = sum(lens) // 64 + len(lens) + 1
    assert kept <= slots * 64 * 16 * 160
    del results


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_flashqla_backward_on_another_device_than_the_current():
    x = inputs(lens=(100, 65))
    do, dht = make_output_gradients(x)
    want = run(x, do, dht)
    there = {n: t.to("cuda:1") if isinstance(t, torch.Tensor) else t for n, t in x.items()}
    got = run(there, do.to("cuda:1"), dht.to("cuda:1"))
    assert torch.cuda.current_device() == 0
    assert_same({n: t.to("cuda:0") for n, t in got.items()}, want)


# Each kernel alone

OUTPUTS = {"states": (6, 7), "reverse": (7, 8, 9), "gradients": (3, 13, 14, 15, 16, 17)}


def beside_its_model(name, kernel, bound, outputs=OUTPUTS):
    """A launch, after which every output is compared with what the formulas give for the same buffers."""
    name = name.removesuffix("_halves")

    def launch(*args):
        copies = [a.detach().cpu().clone() if isinstance(a, torch.Tensor) else a for a in args]
        kernel(*args)
        getattr(kernel_models, name)(*copies)
        for i in outputs[name]:
            got, want = args[i].cpu().double(), copies[i].double()
            assert torch.equal(got.isnan(), want.isnan()), f"{name}: argument {i}, written rows"
            error = relative_error(got.nan_to_num(), want.nan_to_num())
            assert error <= bound, f"{name}: argument {i}: {error:.1e}"

    return launch


@DTYPE
@GATES
@pytest.mark.parametrize("l2norm", [False, True])
@pytest.mark.parametrize("B", [1, 40], ids=["halves", "wholes"])
def test_flashqla_backward_kernels(dtype, gates, l2norm, B, monkeypatch):
    """Nothing is written but what belongs to a sequence, and zeros behind the last boundary."""
    lens = (0, 1, 64, 0, 65, 200, *[1] * (B - 1))
    x = inputs(lens=lens, tail=70, H=1, HV=3, dtype=dtype, gates=gates, l2norm=l2norm)
    do, dht = make_output_gradients(x)
    run(x, do, dht)
    build, bound = chunk.build_backward, GRADIENT_BOUNDS[dtype]

    def checked(plan):
        assert plan.splits == (2 if B == 1 else 1)
        kernels = build(plan)._asdict()
        return chunk.BackwardKernels(*(beside_its_model(n, k, bound) for n, k in kernels.items()))

    monkeypatch.setattr(chunk, "build_backward", checked)
    run(x, do, dht)
