# SPDX-License-Identifier: MIT
"""Gates and betas that the kernels make themselves, without a GPU: models of the kernels stand in for them."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from gpu_helpers import LAYER, loss_gradients, poisoned_memory
from model_helpers import EVERY, compare, gradients, small, trained

import fla_flashqla
from fla_flashqla import api, chunk, chunk_gated_delta_rule, compat, reference
from fla_flashqla.activations import NONE, Activations
from fla_flashqla.testing import (
    DIFFERENTIABLE,
    PARAMETERS,
    Case,
    make_inputs,
    make_output_gradients,
    oracle,
    oracle_gradients,
)

pytestmark = pytest.mark.usefixtures("launched")
CASES: dict[str, dict[str, Any]] = {
    "gate": {"raw_g": "bias"},
    "gate_without_bias": {"raw_g": "no_bias", "B": 2, "T": 130, "gates": "strong"},
    "sigmoid": {"raw_beta": 1, "H": 1, "HV": 3},
    "sigmoid_doubled": {"raw_beta": 2, "lens": (0, 65, 3, 0, 130, 0), "tail": 70},
    "layer": {**LAYER, "B": 2, "T": 130, "gates": "strong"},
    "layer_varlen": {**LAYER, "lens": (64, 0, 1, 70), "tail": 130, "cu_dtype": "int64"},
    "layer_one_token": {**LAYER, "T": 1},
    "layer_of_nothing": {**LAYER, "lens": (0, 0), "tail": 70},
    "layer_without_state": {**LAYER, "state_dtype": None, "scale": -0.3},
}
# Of what the flags concern, and what decides which kernels run.
SUBSETS = [
    subset
    for names in [("q", "v", *PARAMETERS), ("g", "beta", *PARAMETERS)]
    for n in range(1, 5)
    for subset in itertools.combinations(names, n)
]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("loss", ["both", "o", "final_state"])
def test_flashqla_activations(name: str, loss: str, exact: None) -> None:
    """Against the token recurrence; memory nobody wrote is NaN, as are rows of nobody."""
    x = small(**CASES[name])
    do, dht = loss_gradients(x, loss)
    want = oracle_gradients(x, do, dht, reference.recurrent_gated_delta_rule)
    assert {n for n in PARAMETERS if n in x} == want.keys() - set(DIFFERENTIABLE)
    results = oracle(x)
    end = x["q"].shape[1]
    if "lens" in CASES[name]:
        end = sum(CASES[name]["lens"])
        for tensor in (*(x[n] for n in DIFFERENTIABLE[:5]), *([] if do is None else [do])):
            tensor[:, end:] = torch.nan
    with poisoned_memory():
        got = gradients(x, do, dht)
        with torch.no_grad():
            compare(dict(enumerate(chunk_gated_delta_rule(**x))), dict(enumerate(results)))
    assert got.keys() == want.keys()
    compare(got, want, 1e-5)  # float32 logarithms of strong gates add up to 100
    assert all((got[n][:, end:] == 0).all() for n in DIFFERENTIABLE[:5])


@pytest.mark.parametrize("wanted", SUBSETS, ids="-".join)
def test_flashqla_activations_subsets(
    wanted: tuple[str, ...], exact: None, launched: list[str]
) -> None:
    """The same values as together with all others, by no more kernels than they need."""
    x = small(lens=(65, 0, 3), tail=70, **LAYER)
    do, dht = make_output_gradients(x)
    want = gradients(x, do, dht)
    launched.clear()
    with poisoned_memory():
        got = gradients(x, do, dht, wanted)
    assert got.keys() == set(wanted) and all(torch.equal(got[n], want[n]) for n in wanted)
    kernels = {("q",): ["states", "gradients"], ("v",): ["reverse"]}
    backward = kernels.get(wanted, ["states", "reverse", "gradients"])
    assert launched == ["prepare", "forward", *backward]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("side", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("parameter", ["float32", "bfloat16", "float64"])
def test_flashqla_activations_dtypes(dtype: str, side: str, parameter: str) -> None:
    """From call to plan to kernels as on a GPU."""
    dtypes = {"g_dtype": side, "beta_dtype": side, "parameter_dtype": parameter}
    x = make_inputs(Case(lens=(70, 1), tail=2, dtype=dtype, **dtypes, **LAYER))
    do, dht = make_output_gradients(x)
    want = oracle_gradients(x, do, dht)
    got = gradients(x, do, dht)
    assert got.keys() == set(EVERY)
    compare(got, want, 1e-2 if "bfloat16" in (dtype, side, parameter) else 1.5e-3)
    assert all(got[n].dtype == x[n].dtype and got[n].shape == x[n].shape for n in EVERY)
    ran = fla_flashqla.dispatch_report()["ran"]
    assert ran == {f"forward sm90 {dtype}": 1, f"backward sm90 {dtype}": 1}


def test_flashqla_activations_of_extreme_values(exact: None) -> None:
    """Flat ends of softplus and sigmoid; a gate below -128 has no gradient, whatever its factors are."""
    x = small(B=2, T=140, raw_g="bias", raw_beta=1, gates="strong")
    for t, value in enumerate((-1e4, -90.0, -30.0, 30.0, 90.0, 1e4)):
        x["g"][:, t::20] = value
        x["beta"][:, t + 7 :: 20] = value / 3
    x["A_log"][0], x["A_log"][1] = 6.0, -20.0
    do, dht = make_output_gradients(x)
    got = gradients(x, do, dht)
    assert all(dx.isfinite().all() for dx in got.values())
    # float32 logarithms of gates are as exact as what they add up to
    compare(got, oracle_gradients(x, do, dht), 1e-4)
    x["g"][0, 50] = torch.inf
    got = gradients(x, do, dht)
    assert all(dx.isfinite().all() for dx in got.values()) and (got["g"][0, 50] == 0).all()


def test_flashqla_activations_of_shaped_and_strided_parameters(exact: None) -> None:
    """Parameters are HV numbers in any shape; their gradients have theirs."""
    x = small(**LAYER)
    do, dht = make_output_gradients(x)
    want = gradients(x, do, dht)
    x["A_log"] = x["A_log"].view(1, 1, -1, 1)
    x["dt_bias"] = torch.stack([x["dt_bias"]] * 2, 1)[:, 1]
    x["g"], x["beta"] = (x[n].mT.contiguous().mT for n in ("g", "beta"))
    got = gradients(x, do, dht)
    assert got["A_log"].shape == (1, 1, 4, 1)
    assert all(torch.equal(got[n].flatten(), want[n].flatten()) for n in EVERY)


def test_flashqla_activations_under_autocast() -> None:
    """As FLA's function: nothing is cast, inside or outside."""
    x = make_inputs(Case(T=66, **LAYER))
    do, dht = make_output_gradients(x)
    want = gradients(x, do, dht)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = gradients(x, do, dht)
    assert all(torch.equal(got[n], want[n]) for n in EVERY)


@pytest.mark.parametrize("fields", [{}, LAYER, {"raw_g": "no_bias"}, {"raw_beta": 1}])
def test_flashqla_activations_keep_inputs_only(fields: dict[str, Any]) -> None:
    """g and beta, where they are needed again, as they are."""
    x = trained(make_inputs(Case(T=100, **fields)))
    kept: dict[int, torch.Tensor] = {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        kept[t.data_ptr()] = t
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        chunk_gated_delta_rule(**x)
    assert (x["g"].data_ptr() in kept) == ("raw_g" in fields)
    assert (x["beta"].data_ptr() in kept) == ("raw_beta" in fields)
    inputs = {t.data_ptr() for t in x.values() if isinstance(t, torch.Tensor)}
    assert len([address for address in kept if address not in inputs]) == 2


@pytest.mark.parametrize("chunk_size", [16, 32, 64])
def test_flashqla_activations_chunk_size_decides_nothing(chunk_size: int) -> None:
    x = make_inputs(Case(T=100, **LAYER))
    o, state = chunk_gated_delta_rule(**x)
    again = chunk_gated_delta_rule(**x, chunk_size=chunk_size)
    assert state is not None and again[1] is not None
    assert torch.equal(o, again[0]) and torch.equal(state, again[1])


def test_flashqla_activations_old_name_of_the_layout() -> None:
    x = make_inputs(Case(T=100, **LAYER))
    o, state = chunk_gated_delta_rule(**x)
    del x["state_v_first"]
    with pytest.warns(DeprecationWarning, match="renamed to `state_v_first`"):
        again = chunk_gated_delta_rule(**x, transpose_state_layout=True)
    assert state is not None and again[1] is not None
    assert torch.equal(o, again[0]) and torch.equal(state, again[1])


def test_flashqla_activations_are_what_the_flags_say(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Activations] = []

    def answer(plan: Any, *args: Any) -> chunk.Forward:
        seen.append(args[-1])
        return chunk.forward(plan, *args)

    monkeypatch.setattr(api, "_answer", answer)
    x = make_inputs(Case(T=3, HV=2))
    A_log, dt_bias = torch.randn(2, 2).unbind()

    def passed(**more: Any) -> Activations:
        chunk_gated_delta_rule(**x, **more)
        return seen[-1]

    parameters = {"A_log": A_log, "dt_bias": dt_bias}
    assert passed() == passed(**parameters) == NONE  # as FLA: without the flag, unused
    assert passed(use_gate_in_kernel=True, A_log=A_log) == (A_log, None, 0.0)
    assert passed(use_gate_in_kernel=1, **parameters) == (A_log, dt_bias, 0.0)
    assert passed(use_beta_sigmoid_in_kernel=True) == (None, None, 1.0)
    doubled = {"use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True}
    assert passed(**doubled) == (None, None, 2.0)


@pytest.mark.parametrize("varlen", [False, True])
@pytest.mark.fla
def test_flashqla_activations_through_flas_operator(varlen: bool) -> None:
    """The call that FLA's layer makes, whose initial state comes from a cache or is not there."""
    fla = pytest.importorskip("fla.ops.gated_delta_rule", reason="needs FLA")
    fields = {"lens": (70, 3), "state_dtype": None} if varlen else {"B": 2, "T": 70}
    x = make_inputs(Case(HV=2, g_dtype="bfloat16", beta_dtype="bfloat16", **fields, **LAYER))
    x |= {"scale": None, "output_final_state": True}
    do, dht = make_output_gradients(x)
    fla_flashqla.register()

    def layer(**call: Any) -> Any:
        with mock.patch.dict(os.environ, {"FLA_FLASH_QLA_STRICT": "1"}):
            del call["scale"]
            return fla.chunk_gated_delta_rule(**call)

    got = gradients(x, do, dht, operator=layer)
    compare(got, oracle_gradients(x, do, dht), 1e-2)
    ran = fla_flashqla.dispatch_report()["ran"]
    assert ran == {"forward sm90 bfloat16": 1, "backward sm90 bfloat16": 1}


@pytest.mark.fla
def test_flashqla_activations_by_flas_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """FLA's own layer, but for its Triton kernels of convolution and norm, by our kernels and by the reference."""
    layers = pytest.importorskip("fla.layers.gated_deltanet", reason="needs FLA's layers")
    fla_flashqla.register()
    sizes = {"hidden_size": 64, "head_dim": 128, "num_heads": 2, "expand_v": 1}
    layer = layers.GatedDeltaNet(**sizes, use_short_conv=False, use_gate=False).bfloat16()
    layer.o_norm = torch.nn.Identity()
    x = torch.randn(2, 70, 64, dtype=torch.bfloat16)

    def found() -> dict[str, Any]:
        layer.zero_grad()
        o = layer(x)[0]
        o.float().square().sum().backward()
        return {"o": o, **{name: p.grad for name, p in layer.named_parameters()}}

    ours = found()
    ran = fla_flashqla.dispatch_report()["ran"]
    assert ran == {"forward sm90 bfloat16": 1, "backward sm90 bfloat16": 1}
    monkeypatch.setattr(api, "plan", lambda call: api.Reference("for comparison"))
    theirs = found()
    assert fla_flashqla.dispatch_report()["reference"] == 1
    assert {"A_log", "dt_bias", "a_proj.weight", "b_proj.weight"} < ours.keys()
    compare(ours, theirs, 3e-2)


def test_flashqla_activations_keep_their_digits() -> None:
    """The forms that the kernels compute, in float32, where the textbook ones have none left."""
    x = torch.tensor([-60.0, -20.0, -9.0, -1e-3, 0.0, 1e-3, 9.0, 20.0, 60.0])
    e, wide = (-x.abs()).exp(), x.double()
    softplus = x.clamp(min=0) + e.log1p()
    want = torch.logaddexp(wide, torch.zeros_like(wide))  # F.softplus is x from 20 on
    torch.testing.assert_close(softplus.double(), want, rtol=1e-6, atol=0)
    sigmoid = torch.where(x < 0, e, torch.ones_like(e)) / (1 + e)
    torch.testing.assert_close(sigmoid.double(), wide.sigmoid(), rtol=1e-6, atol=0)
    slope = e / ((1 + e) * (1 + e))
    want = wide.sigmoid() * (-wide).sigmoid()
    torch.testing.assert_close(slope.double(), want, rtol=1e-6, atol=0)
    assert (F.softplus(x).double() - softplus.double()).abs().max() < 1e-5


@pytest.mark.fla
def test_flashqla_activations_are_flas_flags() -> None:
    """What this FLA's operator reads, known or passed over, is what the binding says."""
    fla = pytest.importorskip("fla.ops.gated_delta_rule.chunk", reason="needs FLA")
    binding = compat.Binding.between(fla.chunk_gated_delta_rule, chunk_gated_delta_rule)
    source = Path(fla.__file__).read_text()
    assert binding.unread == tuple(name for name in compat.UNNAMED if name not in source)
