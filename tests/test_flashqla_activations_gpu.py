# SPDX-License-Identifier: MIT
"""Gates and betas that the kernels make themselves, on their own hardware, through FLA's operator, against float64."""

import pytest
import torch
from gpu_helpers import (
    DEVICE,
    LAYER,
    LENS,
    ROWS,
    answered,
    assert_same,
    poisoned_memory,
    run_ours,
    used_rows,
)
from model_helpers import EVERY, gradients
from test_flashqla_backward import beside_its_model, operator

from fla_flashqla import chunk, reference
from fla_flashqla.call import describe
from fla_flashqla.plan import plan
from fla_flashqla.testing import (
    BOUNDS,
    GRADIENT_BOUNDS,
    Case,
    gradient_bound,
    make_inputs,
    make_output_gradients,
    oracle,
    oracle_gradients,
    relative_error,
)

pytestmark = [pytest.mark.gpu, pytest.mark.sm90, pytest.mark.fla]
DTYPE = pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
FLAGS = {
    "gate": {"raw_g": "bias"},
    "gate_without_bias": {"raw_g": "no_bias"},
    "sigmoid": {"raw_beta": 1},
    "sigmoid_doubled": {"raw_beta": 2},
    "layer": LAYER,
}


def inputs(seed=0, **fields):
    return make_inputs(Case(**fields), DEVICE, seed)


def run(x, do, dht, names=EVERY):
    """Gradients by our kernels, proved by the count, on poisoned memory."""
    before = answered()
    with poisoned_memory():
        got = gradients(x, do, dht, names, operator)
    assert answered() == before + 2
    return got


def check(x, form=reference.recurrent_gated_delta_rule):
    rows, dtype = used_rows(x), str(x["q"].dtype).removeprefix("torch.")
    want = oracle(x)
    o, ht = run_ours(**x)
    assert relative_error(o[:, rows], want[0][:, rows]) <= BOUNDS[dtype]
    assert relative_error(ht, want[1]) <= BOUNDS[dtype]
    do, dht = make_output_gradients(x)
    got, want = run(x, do, dht), oracle_gradients(x, do, dht, form)
    assert got.keys() == want.keys()
    for name, dx in got.items():
        assert dx.dtype == x[name].dtype and dx.shape == x[name].shape, name
        limit = gradient_bound(name, dx, dtype)
        truth = want[name]
        if name in ROWS:
            if rows.stop is not None:
                assert (dx[:, rows.stop :] == 0).all(), name
            dx, truth = dx[:, rows], truth[:, rows]
        error = relative_error(dx, truth)
        assert error <= limit, f"d{name}: relative L2 error {error:.2e}, at most {limit:.1e}"
    return got


@DTYPE
@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("gates", ["mild", "strong"])
def test_flashqla_activations_on_gpu(dtype, flags, gates):
    for T in (1, 64, 130, 1000):
        check(inputs(B=2, T=T, dtype=dtype, gates=gates, **FLAGS[flags]))
    check(inputs(lens=LENS, tail=70, dtype=dtype, gates=gates, **FLAGS[flags]))


@DTYPE
@pytest.mark.parametrize("heads", ["2:2", "2:6", "2:8", "1:5", "16:64"])
def test_flashqla_activations_on_gpu_gva(heads, dtype):
    """One warp a block of the preparation, and four with idle ones."""
    H, HV = map(int, heads.split(":"))
    check(inputs(H=H, HV=HV, B=2, T=200, dtype=dtype, **LAYER))


@DTYPE
@pytest.mark.parametrize("side", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("parameter", ["float32", "bfloat16"])
def test_flashqla_activations_on_gpu_dtypes(dtype, side, parameter):
    dtypes = {"g_dtype": side, "beta_dtype": side, "parameter_dtype": parameter}
    check(inputs(T=330, dtype=dtype, **dtypes, **LAYER))


def test_flashqla_activations_on_gpu_of_a_long_sequence():
    """Many slots to add up, and the longest of several first."""
    check(inputs(T=16384, **LAYER), reference.chunk_gated_delta_rule)
    x = inputs(lens=(*LENS, 3000), H=4, HV=16, **LAYER)
    assert plan(describe(**x)).longest_first
    check(x, reference.chunk_gated_delta_rule)


def test_flashqla_activations_on_gpu_of_extreme_values():
    x = inputs(B=2, T=330, raw_g="bias", raw_beta=1, gates="strong")
    for t, value in enumerate((-1e4, -90.0, -30.0, 30.0, 90.0, 1e4)):
        x["g"][:, t::20] = value
        x["beta"][:, t + 7 :: 20] = value / 3
    x["A_log"][0], x["A_log"][1] = 6.0, -20.0
    got = check(x)
    assert all(dx.isfinite().all() for dx in got.values())
    x["g"][0, 50] = torch.inf
    got = run(x, *make_output_gradients(x))
    assert all(dx.isfinite().all() for dx in got.values()) and (got["g"][0, 50] == 0).all()


def test_flashqla_activations_on_gpu_rows_of_nobody():
    """NaN behind the last boundary, with chunk slots that have no chunk, changes not a bit."""
    x = inputs(lens=(1, 64, 0, 200), tail=300, **LAYER)
    do, dht = make_output_gradients(x)
    want = run(x, do, dht)
    for tensor in (*(x[n] for n in ROWS), do):
        tensor[:, 265:] = torch.nan
    got = run(x, do, dht)
    assert_same([got[n] for n in EVERY], [want[n] for n in EVERY])


@pytest.mark.parametrize("wanted", [("A_log",), ("dt_bias", "g"), ("beta",), ("q",), ("v",)])
def test_flashqla_activations_on_gpu_subsets(wanted):
    x = inputs(lens=(65, 0, 130), tail=70, **LAYER)
    do, dht = make_output_gradients(x)
    want = run(x, do, dht)
    got = run(x, do, dht, wanted)
    assert_same([got[n] for n in wanted], [want[n] for n in wanted])


def test_flashqla_activations_on_gpu_repeats_are_bit_identical():
    x = inputs(lens=(1000, 0, 65, 700), H=4, HV=16, gates="strong", **LAYER)
    do, dht = make_output_gradients(x)
    want = run(x, do, dht)
    for _ in range(50):
        got = run(x, do, dht)
        assert_same([got[n] for n in EVERY], [want[n] for n in EVERY])


def test_flashqla_activations_on_gpu_no_host_sync():
    x = inputs(lens=(100, 0, 65), tail=3, parameter_dtype="bfloat16", **LAYER)
    do, dht = make_output_gradients(x)
    run(x, do, dht)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(x, do, dht)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_flashqla_activations_on_gpu_are_what_fla_computes(monkeypatch):
    """FLA's Triton kernels, from the same call; untuned, as in gpu_helpers.py."""
    from triton.runtime.autotuner import Autotuner

    monkeypatch.setattr(Autotuner, "prune_configs", lambda tuner, _: tuner.configs[:1])
    x = inputs(T=200, g_dtype="bfloat16", beta_dtype="bfloat16", H=2, HV=2, **LAYER)
    do, dht = make_output_gradients(x)
    got = run(x, do, dht)
    monkeypatch.setenv("FLA_FLASH_QLA", "0")
    before = answered()
    theirs = gradients(x, do, dht, EVERY, operator)
    assert answered() == before
    for name in EVERY:
        assert got[name].dtype == theirs[name].dtype and got[name].shape == theirs[name].shape
        assert relative_error(got[name], theirs[name]) <= 3e-2, name


@DTYPE
@pytest.mark.parametrize("B", [1, 40], ids=["halves", "wholes"])
def test_flashqla_activations_on_gpu_kernels(dtype, B, monkeypatch):
    """Each kernel of the backward beside its model: what it writes, and nothing else."""
    x = inputs(
        lens=(0, 1, 64, 0, 65, 200, *[1] * (B - 1)), tail=70, H=1, HV=3, dtype=dtype, **LAYER
    )
    do, dht = make_output_gradients(x)
    run(x, do, dht)
    build, bound = chunk.build_backward, 2 * GRADIENT_BOUNDS[dtype]

    def checked(plan):
        kernels = build(plan)._asdict()
        return chunk.BackwardKernels(*(beside_its_model(n, k, bound) for n, k in kernels.items()))

    monkeypatch.setattr(chunk, "build_backward", checked)
    run(x, do, dht)
