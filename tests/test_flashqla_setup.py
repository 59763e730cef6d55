# SPDX-License-Identifier: MIT
"""What is remembered of calls that look alike never answers one that differs; without a GPU, by models of the kernels."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from model_helpers import SM90, gradients, trained

from fla_flashqla import api, arch, call, chunk, chunk_gated_delta_rule, layout, plan, reference
from fla_flashqla.layout import Setup
from fla_flashqla.testing import (
    BOUNDS,
    DIFFERENTIABLE,
    Case,
    gradient_bound,
    make_inputs,
    make_output_gradients,
    relative_error,
)

BASE: dict[str, Any] = {"B": 2, "T": 66}
PACKED: dict[str, Any] = {"lens": (100, 32)}
# Each differs from its neighbours in one thing or two.
CASES = (
    BASE,
    {**BASE, "output_final_state": False},
    {**BASE, "state_dtype": None},
    {**BASE, "state_v_first": True},
    {**BASE, "state_v_first": True, "l2norm": True},
    {**BASE, "l2norm": True, "dtype": "float16"},
    {**BASE, "g_dtype": "bfloat16"},
    {**BASE, "beta_dtype": "bfloat16", "raw_beta": 2},
    {**BASE, "raw_g": "bias"},
    {"B": 1, "T": 132},
    PACKED,
    {**PACKED, "cu_dtype": "int64"},
    {"lens": (64, 4, 64), "cu_dtype": "int64"},
    {**PACKED, "HV": 2},
    BASE,
)


def strided(x: dict[str, Any]) -> dict[str, Any]:
    """The same values, no tensor of them contiguous."""
    names = {n for n, t in x.items() if isinstance(t, torch.Tensor) and t.ndim > 2}
    return {n: t.mT.contiguous().mT if n in names else t for n, t in x.items()}


def check(x: dict[str, Any]) -> None:
    """Results and gradients are those of the reference."""
    dtype = str(x["q"].dtype).removeprefix("torch.")
    given = make_output_gradients(x)
    do, dht = given[0], given[1] if x["output_final_state"] else None
    with torch.no_grad():
        got, want = (f(**x) for f in (chunk_gated_delta_rule, reference.chunk_gated_delta_rule))
    for a, b in zip(got, want, strict=True):
        assert (a is None) == (b is None)
        assert a is None or b is None or relative_error(a, b) <= BOUNDS[dtype]
    names = tuple(n for n in DIFFERENTIABLE if x.get(n) is not None)
    found, wanted = (
        gradients(x, do, dht, names, f)
        for f in (chunk_gated_delta_rule, reference.chunk_gated_delta_rule)
    )
    for n, dx in found.items():
        assert relative_error(dx, wanted[n]) <= gradient_bound(n, wanted[n], dtype), n


@pytest.mark.usefixtures("launched")
@pytest.mark.parametrize("backwards", [False, True])
def test_flashqla_setup_of_calls_in_turn(backwards: bool) -> None:
    """Whatever was called before, and with strides of any kind."""
    for fields in reversed(CASES) if backwards else CASES:
        x = make_inputs(Case(**fields))
        for form in (x, strided(x)):
            check(form)


def test_flashqla_setup_with_other_gradients(launched: list[str]) -> None:
    """The same values, once with a gradient, then without, then with another."""
    x = make_inputs(Case(T=66))
    for names in ((), ("q",), (), ("v", "beta"), ("v",), ()):
        launched.clear()
        o, _ = chunk_gated_delta_rule(**trained(x, names))
        assert o.requires_grad == bool(names)
        with torch.no_grad():
            assert not chunk_gated_delta_rule(**trained(x, names))[0].requires_grad
        assert launched == ["prepare_single", "forward_halves"] * 2


@pytest.mark.usefixtures("launched")
def test_flashqla_setup_obeys_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables are read on each call, as if it were the first."""
    x = make_inputs(Case(HV=2, T=64 * 512))
    meta = {n: t for n, t in x.items() if n != "initial_state"}
    for mode in ("auto", "off", "exact", "off", "auto"):
        monkeypatch.setenv("FLA_FLASH_QLA_CP", mode)
        decision = api.decide((), meta)
        assert isinstance(decision, plan.Plan)
        assert bool(decision.segment) == (mode != "off")
        assert decision.exact == (mode == "exact")
        assert api.decide((), meta) is decision  # made once, with what it keeps
        setup = Setup.of(decision, x["q"], x["v"], None)
        assert setup.plan == decision and setup.order[3] == decision.segment


def test_flashqla_setup_is_not_of_a_device(
    launched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two devices of one process, of which one has few multiprocessors and one is not ours."""
    blocks: list[int] = []
    kernels = chunk.BackwardKernels(*[lambda *args: blocks.append(args[-1])] * 5)
    monkeypatch.setattr(chunk, "build_backward", lambda plan: kernels)
    x = make_inputs(Case(H=2, HV=2, T=640))
    for sms in (132, 5, 132):
        monkeypatch.setattr(arch, "device_facts", lambda device, sms=sms: SM90._replace(sms=sms))
        leaves = trained(x)
        chunk_gated_delta_rule(**leaves)[0].sum().backward()
        assert blocks[-1] == min(2 * 12, sms)
    monkeypatch.setattr(arch, "device_facts", lambda device: SM90._replace(sm=(8, 0)))
    assert isinstance(api.decide((), x), plan.Refusal)
    monkeypatch.setattr(arch, "device_facts", lambda device: SM90)
    assert isinstance(api.decide((), x), plan.Plan)


def test_flashqla_setup_differs_with_all_that_it_is_made_of() -> None:
    made = plan.Plan("sm90", "bfloat16", "float32", "float32")
    q, v = torch.empty(1, 640, 2, 128), torch.empty(1, 640, 4, 128)
    cu = torch.zeros(3, dtype=torch.int32)
    cases = [
        Setup.of(made, q, v, None),
        Setup.of(replace(made, segment=128), q, v, None),
        Setup.of(replace(made, segment=128, backward_segment=64), q, v, None),
        Setup.of(replace(made, segment=128, longest_first=True), q, v, None),
        Setup.of(made, q, v, None, True),
        Setup.of(made, q, v, None, False, True),
        Setup.of(made, q, v, None, False, False, True),
        Setup.of(made, q, v, cu),
        Setup.of(made, q, v, cu.long()),
        Setup.of(made, q, v, cu[:2]),
        Setup.of(made, q[:, :64], v[:, :64], None),
        Setup.of(made, q[:, :, :1], v, None),
        Setup.of(made, q, v[:, :, :2], None),
    ]
    assert all(a != b for a, b in pairwise(cases)) and len({*cases}) == len(cases)
    assert Setup.of(made, q.clone(), v.mT.contiguous().mT, None) is cases[0]


def test_flashqla_setup_is_remembered_within_bounds() -> None:
    plans = plan.plan, plan._plan, plan.changed, plan.segment
    for remembered in (layout._setup, call._examined, *plans):
        bound = remembered.cache_info().maxsize
        assert bound is not None and bound <= 1024
