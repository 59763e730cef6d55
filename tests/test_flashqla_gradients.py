# SPDX-License-Identifier: MIT
"""Gradients and the kernels that they take, without a GPU: models of the kernels stand in for them."""

from __future__ import annotations

import itertools

import pytest
import test_flashqla_kernels
import torch
from gpu_helpers import loss_gradients, poisoned_memory
from model_helpers import EVERY, PLAN, REHEARSE, SM90, any_sign, compare, fitting, gradients, small

import fla_flashqla
from fla_flashqla import api, arch, chunk, chunk_gated_delta_rule, l2norm, reference
from fla_flashqla.plan import Plan
from fla_flashqla.testing import (
    DIFFERENTIABLE,
    Case,
    make_inputs,
    make_output_gradients,
    oracle,
    oracle_gradients,
)

pytestmark = pytest.mark.usefixtures("launched")
SUBSETS = [s for n in range(1, 7) for s in itertools.combinations(DIFFERENTIABLE, n)]


CASES = {
    "one_token": {"T": 1},
    "a_chunk": {"T": 64, "B": 2},
    "tails": {"T": 130, "B": 2, "H": 1, "HV": 1},
    "varlen": {"lens": (0, 65, 3, 0, 130, 0), "tail": 70},
    "varlen_int64": {"lens": (1, 64), "cu_dtype": "int64", "gates": "strong"},
    "empty": {"lens": (0, 0), "tail": 5},
    "gva_3": {"H": 2, "HV": 6, "l2norm": True},
    "gva_4": {"H": 1, "HV": 4, "state_v_first": True},
    "l2norm": {"lens": (70, 2), "l2norm": True, "state_v_first": True, "gates": "zero"},
    "no_state": {"state_dtype": None, "gates": "mild"},
    "scale": {"scale": -0.7},
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("loss", ["both", "o", "final_state"])
def test_flashqla_gradients(name: str, loss: str, exact: None) -> None:
    """Against the token recurrence; memory nobody wrote is NaN, as are rows of nobody."""
    x = small(**CASES[name])
    do, dht = loss_gradients(x, loss)
    want = oracle_gradients(x, do, dht, reference.recurrent_gated_delta_rule)
    end = x["q"].shape[1]
    if "lens" in CASES[name]:
        end = sum(CASES[name]["lens"])
        for tensor in (*(x[n] for n in DIFFERENTIABLE[:5]), *([] if do is None else [do])):
            tensor[:, end:] = torch.nan
    with poisoned_memory():
        got = gradients(x, do, dht)
    compare(got, want)
    assert all((got[n][:, end:] == 0).all() for n in DIFFERENTIABLE[:5])
    ran = fla_flashqla.dispatch_report()["ran"]
    assert ran == {"forward model float64": 1, "backward model float64": 1}


@pytest.mark.parametrize("reset", [-torch.inf, -1e30, -200.0])
def test_flashqla_gradients_of_resets(reset: float, exact: None) -> None:
    x = small(B=2, T=140)
    for t in (5, 6, 63, 64, 127):
        x["g"][0, t] = reset
    x["g"][1, 0] = x["g"][1, 64:70] = reset
    do, dht = make_output_gradients(x)
    # logarithms of gates are float32, too, and as large as such gates add up to
    compare(gradients(x, do, dht), oracle_gradients(x, do, dht), 1e-4)


@pytest.mark.parametrize("wanted", SUBSETS, ids="-".join)
def test_flashqla_gradients_of_subsets(
    wanted: tuple[str, ...], exact: None, launched: list[str]
) -> None:
    """The same values as together with all others, by no more kernels than they need."""
    x = small(lens=(65, 0, 3), tail=4, l2norm=True)
    do, dht = make_output_gradients(x)
    want = gradients(x, do, dht)
    launched.clear()
    with poisoned_memory():
        got = gradients(x, do, dht, wanted)
    assert got.keys() == set(wanted) and all(torch.equal(got[n], want[n]) for n in wanted)
    kernels = ["prepare", "forward"]
    if set(wanted) == {"q"}:
        kernels += ["states", "gradients"]
    elif set(wanted) <= {"v", "initial_state"}:
        kernels += ["reverse"]
    else:
        kernels += ["states", "reverse", "gradients"]
    assert launched == kernels


@pytest.mark.parametrize("scale", [None, 0.7, -0.7, 0.0])
@pytest.mark.parametrize("l2norm", [False, True])
def test_flashqla_gradients_of_any_sign(scale: float | None, l2norm: bool, exact: None) -> None:
    """The kernels hold logarithms of |beta| and of |scale|; a beta of 0 has gradients, too."""
    x = small(lens=(130, 3, 65), tail=3, l2norm=l2norm, scale=scale)
    x["beta"] = any_sign(x["beta"])
    do, dht = make_output_gradients(x)
    want = oracle_gradients(x, do, dht, reference.recurrent_gated_delta_rule)
    with poisoned_memory():
        got = gradients(x, do, dht)
        alone = gradients(x, None, dht, ("k", "beta"))
        results = chunk_gated_delta_rule(**x)
    compare(dict(enumerate(results)), dict(enumerate(oracle(x))))
    compare(got, want)
    compare(alone, oracle_gradients(x, None, dht, reference.recurrent_gated_delta_rule))


def test_flashqla_gradients_of_negative_betas_alone(exact: None) -> None:
    x = small(B=2, T=130, scale=-1.0)
    x["beta"] = -x["beta"]
    do, dht = make_output_gradients(x)
    compare(gradients(x, do, dht), oracle_gradients(x, do, dht))


@pytest.mark.parametrize("warps", [1, 4])
@pytest.mark.parametrize("splits", [1, 2])
def test_flashqla_gradients_by_plan(
    splits: int, warps: int, monkeypatch: pytest.MonkeyPatch, exact: None, launched: list[str]
) -> None:
    end, prepare = "_halves" if splits == 2 else "", "prepare_single" if warps == 1 else "prepare"
    for whole in (False, True):
        planned = Plan(
            *PLAN.compiled, splits=splits, warps=warps, gradients=True, states_whole=whole
        )
        monkeypatch.setattr(api, "plan", lambda call, planned=planned: planned)
        x = small()
        gradients(x, *make_output_gradients(x))
        states = "states" if whole else f"states{end}"
        assert launched == [prepare, f"forward{end}", states, f"reverse{end}", "gradients"]
        launched.clear()


DTYPES = [("bfloat16", "float16", "bfloat16"), ("float16", "float32", "float16")]


@pytest.mark.parametrize(("dtype", "g_dtype", "beta_dtype"), DTYPES)
@pytest.mark.parametrize("l2norm", [False, True])
@pytest.mark.parametrize("negative", [False, True])
def test_flashqla_gradients_in_their_dtypes(
    dtype: str, g_dtype: str, beta_dtype: str, l2norm: bool, negative: bool
) -> None:
    """From call to plan to kernels as on a GPU; float16 keys are normalised beforehand."""
    fields = {"dtype": dtype, "g_dtype": g_dtype, "beta_dtype": beta_dtype, "state_dtype": g_dtype}
    case = Case(lens=(70, 1), tail=2, l2norm=l2norm, scale=-0.3 if negative else None, **fields)
    x = make_inputs(case)
    if negative:
        x["beta"] = any_sign(x["beta"])
    do, dht = make_output_gradients(x)
    want = oracle_gradients(x, do, dht)
    for name in DIFFERENTIABLE[:5]:
        x[name][:, 71:] = torch.nan
    with poisoned_memory():
        got = gradients(x, do, dht)
    compare(got, want, {"bfloat16": 1e-2, "float16": 1.5e-3}[dtype])
    for name, dx in got.items():
        assert dx.dtype == x[name].dtype and dx.shape == x[name].shape
        assert name == "initial_state" or (dx[:, 71:] == 0).all()
    assert fla_flashqla.dispatch_report()["ran"][f"backward sm90 {dtype}"] == 1


@pytest.mark.parametrize("size", [1.0, 1e-4, 1e3])
def test_flashqla_gradients_through_l2norm_beforehand(size: float) -> None:
    x = (size * torch.randn(5, 3, 8)).requires_grad_()
    dy = torch.randn(5, 3, 8)
    dy[1] = 0.0
    (want,) = torch.autograd.grad(l2norm.forward(x), x, dy)
    torch.testing.assert_close(l2norm.backward(x.detach(), dy), want)
    x = x.detach()
    x[1] = torch.nan
    assert (l2norm.backward(x, dy)[1] == 0).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("splits", [1, 2])
def test_flashqla_launches_fit_the_kernels(
    dtype: str, splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names, order, dtypes and shapes of arguments, which a kernel would complain about on a GPU only."""
    pytest.importorskip("tilelang", reason="needs TileLang")
    from fla_flashqla.kernels import forward, prepare, reverse, states
    from fla_flashqla.kernels import gradients as gradients_file

    gate_dtypes = "float32", "bfloat16"
    sources = {
        "prepare": prepare.prepare_kernel(dtype, *gate_dtypes),
        "prepare_single": prepare.prepare_kernel(dtype, *gate_dtypes, warps=1),
        "forward": forward.forward_kernel(dtype, 2),
        "forward_halves": forward.forward_kernel(dtype, 1),
        "states": states.states_kernel(dtype, 2),
        "states_halves": states.states_kernel(dtype, 1),
        "reverse": reverse.reverse_kernel(dtype, 2),
        "reverse_halves": reverse.reverse_kernel(dtype, 1),
        "gradients": gradients_file.gradients_kernel(dtype, *gate_dtypes),
    }
    seen: list[str] = []

    built = chunk.Kernels._make(fitting(n, sources[n], seen) for n in chunk.Kernels._fields)
    built_backward = chunk.BackwardKernels._make(
        fitting(n, sources[n], seen) for n in chunk.BackwardKernels._fields
    )
    monkeypatch.setattr(chunk, "build", lambda plan: built)
    monkeypatch.setattr(chunk, "build_backward", lambda plan: built_backward)
    monkeypatch.setattr(chunk, "rehearse_backward", REHEARSE)
    raw = {"raw_g": "bias", "raw_beta": 2, "parameter_dtype": "bfloat16"}
    packed = {"lens": (65, 1), "tail": 3, "cu_dtype": "int64", "HV": 3, **raw}
    for fields in ({"B": 1, "T": 66, "HV": 2}, packed):
        sms = 132 if splits == 2 else 1
        monkeypatch.setattr(arch, "device_facts", lambda device, sms=sms: SM90._replace(sms=sms))
        x = make_inputs(Case(H=1, dtype=dtype, beta_dtype="bfloat16", l2norm=True, **fields))
        do, dht = make_output_gradients(x)
        for wanted in (DIFFERENTIABLE, EVERY, ("q",), ("v",), ("initial_state",)):
            gradients(x, do, dht, wanted)
    end = "_halves" if splits == 2 else ""
    backward = {f"states{end}", f"reverse{end}", "gradients"}
    assert set(seen) == {"prepare", "prepare_single", f"forward{end}"} | backward


@pytest.mark.parametrize("warps", [1, 4])
def test_flashqla_gradients_of_a_preparation_alone(warps: int) -> None:
    """What tests of `prepare.py` on a GPU call, and expect, holds for its model."""
    lens = (70, 0, 64, 3)
    x = make_inputs(Case(1, 2, lens=lens, l2norm=True))
    test_flashqla_kernels.compare(x, lens, "bfloat16", warps)
