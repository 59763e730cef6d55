# SPDX-License-Identifier: MIT
"""What autograd sees of the operator, and failures, without a GPU: models of the kernels stand in for them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import kernel_models
import pytest
import torch
from model_helpers import REHEARSE, compare, gradients, small, trained
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import fla_flashqla
from fla_flashqla import api, chunk, chunk_gated_delta_rule, reference, segments
from fla_flashqla.plan import plan
from fla_flashqla.testing import (
    DIFFERENTIABLE,
    Case,
    make_inputs,
    make_output_gradients,
)

pytestmark = pytest.mark.usefixtures("launched")


def test_flashqla_autograd_keeps_no_graph_unasked(launched: list[str]) -> None:
    x = make_inputs(Case(T=3, B=20))
    with torch.no_grad():
        o, state = chunk_gated_delta_rule(**trained(x))
    assert not o.requires_grad and not state.requires_grad
    o, _ = chunk_gated_delta_rule(**x)
    assert o.grad_fn is None
    o, state = chunk_gated_delta_rule(**trained(x, ("beta",)))
    assert o.requires_grad and state.requires_grad
    assert launched == ["prepare_single", "forward"] * 3
    ran = fla_flashqla.dispatch_report()["ran"]
    assert ran == {"forward sm90 bfloat16": 3}
    assert {key[0] for key in api._kernels} == {"forward", "backward"}


@pytest.mark.parametrize("fields", [{"T": 3}, {"lens": (2, 1)}])
def test_flashqla_autograd_keeps_nothing_but_what_is_saved(fields: dict[str, Any]) -> None:
    """Tensors that the graph holds by other ways are neither counted nor guarded against changes in place."""
    o, _ = chunk_gated_delta_rule(**trained(make_inputs(Case(**fields))))
    assert o.grad_fn is not None

    def tensors(x: Any) -> bool:
        return isinstance(x, torch.Tensor) or (isinstance(x, tuple) and any(map(tensors, x)))

    kept = {name for name, x in vars(o.grad_fn).items() if tensors(x)}
    assert not kept
    assert any(tensors(x) for x in o.grad_fn.saved_tensors)


class Record(TorchDispatchMode):
    """Names of the operators that run, views apart."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.names = names

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.view.default and func is not torch.ops.aten.view.dtype:
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("segment", [0, 64])
def test_flashqla_forward_launches_follow_each_other(
    segment: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recurrence starts while the kernel before it runs: no copy between them, and no memory freed and given to it."""
    seen: list[str] = []

    def noted(kernels: Any) -> Any:
        return kernels._make(lambda *_, name=name: seen.append(name) for name in kernels._fields)

    built, cut = noted(chunk.Kernels), noted(segments.SegmentKernels)
    monkeypatch.setattr(chunk, "build", lambda plan: built)
    monkeypatch.setattr(segments, "build", lambda plan: cut)
    monkeypatch.setattr(api, "plan", lambda call: replace(plan(call), segment=segment, splits=2))
    raw = {"raw_g": "bias", "raw_beta": 2, "parameter_dtype": "bfloat16"}
    dtypes = {"dtype": "float16", "state_dtype": "bfloat16", "cu_dtype": "int64"}
    x = make_inputs(Case(lens=(70, 0, 5), **dtypes, **raw))
    wide = {n: x[n].repeat_interleave(2, -1)[..., ::2] for n in ("q", "k", "v", "g", "beta")}
    wide["cu_seqlens"] = x["cu_seqlens"].repeat_interleave(2)[::2]
    wide["initial_state"] = x["initial_state"].mT.contiguous().mT
    with torch.no_grad(), Record(seen):
        chunk_gated_delta_rule(**{**x, **wide, "use_qk_l2norm_in_kernel": True})
    if segment:  # these two wait before they touch what they are given
        launched = [name for name in seen if "empty" not in name]
        assert launched[-4:] == ["prepare_single", "segments", "combine", "forward"], seen
        assert seen[-2:] == ["combine", "forward"]
    else:
        assert seen[-2:] == ["prepare_single", "forward_halves"], seen


def test_flashqla_autograd_builds_no_backward_for_inference() -> None:
    chunk_gated_delta_rule(**make_inputs(Case(T=3)))
    assert {key[0] for key in api._kernels} == {"forward"}


@pytest.mark.parametrize("form", ["sum", "slice", "transposed", "broken_alignment"])
def test_flashqla_autograd_takes_any_strides(form: str, exact: None) -> None:
    """Of o's gradient, and of the state's: expanded with stride 0, of a slice, not contiguous."""

    def loss(o: torch.Tensor, state: torch.Tensor | None) -> torch.Tensor:
        assert state is not None
        if form == "sum":
            return o.sum() + state.sum()
        if form == "slice":
            return o[:, 3:, 1].sum() + state[..., :2].square().sum()
        if form == "transposed":
            w = torch.linspace(0, 1, o.shape[1], dtype=o.dtype)
            return (o.transpose(1, 3) * w).sum() + (state.mT * 2).sum()
        return (o.flatten()[1:] * o.flatten()[:-1]).sum()

    x = small(B=2, T=67)
    ours, theirs = trained(x), trained(x)
    loss(*chunk_gated_delta_rule(**ours)).backward()
    loss(*reference.chunk_gated_delta_rule(**theirs)).backward()
    compare({n: ours[n].grad for n in DIFFERENTIABLE}, {n: theirs[n].grad for n in DIFFERENTIABLE})


def test_flashqla_autograd_of_strided_inputs(exact: None) -> None:
    """q, k and v are views of one projection, whose gradient is what counts."""
    x = small(B=2, T=67, K=6)
    packed = torch.cat([x["q"], x["k"], x["v"]], 2)
    do, dht = make_output_gradients(x)
    found = []
    for operator in (chunk_gated_delta_rule, reference.chunk_gated_delta_rule):
        leaf = packed.clone().requires_grad_()
        q, k, v = leaf.split([2, 2, 4], 2)
        h0 = x["initial_state"][:1].clone().requires_grad_()
        turned = h0.mT.expand(2, -1, -1, -1)
        rest = {**x, "q": q, "k": k, "v": v, "initial_state": turned}
        o, state = operator(**rest)
        found.append(torch.autograd.grad([o, state], [leaf, h0], [do, dht.to(state)]))
    compare(dict(enumerate(found[0])), dict(enumerate(found[1])))


def test_flashqla_autograd_accumulates(exact: None) -> None:
    x = small()
    do, dht = make_output_gradients(x)
    want = gradients(x, do, dht)
    leaves = trained(x)
    for _ in range(2):
        o, state = chunk_gated_delta_rule(**leaves)
        torch.autograd.backward([o, state], [do, dht.to(state)])
    assert all(torch.equal(leaves[n].grad, 2 * want[n]) for n in DIFFERENTIABLE)


def test_flashqla_autograd_twice_over_one_graph(exact: None) -> None:
    x = trained(small())
    o, _ = chunk_gated_delta_rule(**x)
    first = torch.autograd.grad(o.sum(), x["k"], retain_graph=True)
    assert torch.equal(first[0], torch.autograd.grad(o.sum(), x["k"])[0])
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(o.sum(), x["k"])


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_flashqla_autograd_refuses_second_derivatives(name: str, exact: None) -> None:
    """Also where the gradient of o is a constant, which alone would let the second one pass for zero."""
    x = trained(small(), (name,))
    o, _ = chunk_gated_delta_rule(**x)
    (dx,) = torch.autograd.grad(o.sum(), x[name], create_graph=True)
    assert dx.requires_grad
    with pytest.raises(RuntimeError, match="differentiate twice"):
        (o.sum() + dx.square().sum()).backward()


def test_flashqla_autograd_sees_inputs_changed_in_place(exact: None) -> None:
    x = trained(small(), ("v",))
    o, _ = chunk_gated_delta_rule(**x)
    x["k"].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()


@pytest.mark.parametrize("reentrant", [False, True])
def test_flashqla_autograd_under_checkpointing(
    reentrant: bool, exact: None, launched: list[str]
) -> None:
    x = small(lens=(65, 3))
    do, dht = make_output_gradients(x)
    want = gradients(x, do, dht)
    launched.clear()
    leaves = trained(x)
    tensors = [leaves[n] for n in DIFFERENTIABLE]
    rest = {n: t for n, t in leaves.items() if n not in DIFFERENTIABLE}

    def layer(*tensors: torch.Tensor) -> Any:
        return chunk_gated_delta_rule(**dict(zip(DIFFERENTIABLE, tensors, strict=True)), **rest)

    o, state = checkpoint(layer, *tensors, use_reentrant=reentrant)
    torch.autograd.backward([o, state], [do, dht.to(state)])
    assert all(torch.equal(leaves[n].grad, want[n]) for n in DIFFERENTIABLE)
    assert launched == ["prepare", "forward"] * 2 + ["states", "reverse", "gradients"]


def test_flashqla_autograd_under_autocast() -> None:
    """It changes nothing, whether the backward runs inside or outside."""
    x = make_inputs(Case(T=66, dtype="float16", l2norm=True))
    do, dht = make_output_gradients(x)
    want = gradients(x, do, dht)

    def inside(**leaves: Any) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return chunk_gated_delta_rule(**leaves)

    got = gradients(x, do, dht, operator=inside)
    assert all(torch.equal(got[n], want[n]) for n in DIFFERENTIABLE)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = gradients(x, do, dht)
    assert all(torch.equal(got[n], want[n]) for n in DIFFERENTIABLE)


@pytest.mark.parametrize("fields", [{"B": 3, "T": 100}, {"lens": (1, 0, 64, 70), "l2norm": True}])
def test_flashqla_autograd_keeps_little(fields: dict[str, Any]) -> None:
    """Beside inputs: 160 bytes a token and value head, chunks filled up; README says so."""
    x = trained(make_inputs(Case(**fields)))
    kept: dict[int, torch.Tensor] = {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        kept[t.data_ptr()] = t
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        chunk_gated_delta_rule(**x)
    inputs = {t.data_ptr() for t in x.values() if isinstance(t, torch.Tensor)}
    extra = [t for address, t in kept.items() if address not in inputs]
    lens = fields.get("lens", (100,) * fields.get("B", 1))
    chunks = sum(lens) // 64 + len(lens) + 1
    assert sum(t.nbytes for t in extra) <= chunks * 64 * 4 * 160
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in extra}
    assert sum(storages.values()) == sum(t.nbytes for t in extra)


def test_flashqla_autograd_passes_absent_gradients_as_flags(
    monkeypatch: pytest.MonkeyPatch, exact: None
) -> None:
    seen: list[Any] = []

    def reverse(*args: Any) -> None:
        seen.append((args[15:17], args[2].any().item()))  # use_dht, store_dh0
        kernel_models.reverse(*args)

    kernels = kernel_models.BACKWARD._replace(reverse=reverse)
    monkeypatch.setattr(chunk, "build_backward", lambda plan: kernels)
    x = small()
    do, dht = make_output_gradients(x)
    gradients(x, do, None)
    gradients(x, None, dht, ("v",))
    assert seen == [((0, 1), True), ((1, 0), False)]


# Failures


def broken(*_: Any) -> None:
    raise RuntimeError("bad launch")


def test_flashqla_backward_that_cannot_be_built(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Training is left to FLA, inference is not."""
    monkeypatch.setattr(chunk, "build_backward", broken)
    x = make_inputs(Case(T=3))
    for _ in range(2):
        with pytest.raises(fla_flashqla.Unsupported, match="backward sm90 bfloat16 cannot be"):
            chunk_gated_delta_rule(**trained(x))
    chunk_gated_delta_rule(**x)
    assert [r.levelname for r in caplog.records] == ["WARNING"]


def test_flashqla_backward_that_fails_at_its_rehearsal(
    monkeypatch: pytest.MonkeyPatch, launched: list[str]
) -> None:
    """Before the forward that it belongs to, while FLA can still answer the call."""
    monkeypatch.setattr(chunk, "rehearse_backward", broken)
    x = make_inputs(Case(T=3))
    with pytest.raises(RuntimeError, match="bad launch"):
        chunk_gated_delta_rule(**trained(x))
    with pytest.raises(fla_flashqla.Unsupported, match="failed at its first launch"):
        chunk_gated_delta_rule(**trained(x))
    assert launched == []
    chunk_gated_delta_rule(**x)
    assert launched == ["prepare_single", "forward_halves"]


@pytest.mark.parametrize("group", [2, 3])
@pytest.mark.parametrize("splits", [1, 2])
def test_flashqla_backward_is_rehearsed_once(
    splits: int, group: int, monkeypatch: pytest.MonkeyPatch, launched: list[str]
) -> None:
    """By every kernel that a backward of this plan can need."""
    monkeypatch.setattr(chunk, "rehearse_backward", REHEARSE)
    call = trained(make_inputs(Case(T=3, B=1 if splits == 2 else 20, HV=2 * group)))
    for _ in range(2):
        chunk_gated_delta_rule(**call)
    end, prepare = "_halves" if splits == 2 else "", "prepare_single" if group == 2 else "prepare"
    rehearsal = [f"states{end}", f"reverse{end}", "gradients"]
    assert launched == rehearsal + [prepare, f"forward{end}"] * 2
    assert fla_flashqla.dispatch_report()["ran"] == {"forward sm90 bfloat16": 2}


def test_flashqla_backward_error_after_the_rehearsal_is_raised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernels = kernel_models.BACKWARD._replace(gradients=broken)
    monkeypatch.setattr(chunk, "build_backward", lambda plan: kernels)
    x = trained(make_inputs(Case(T=3)))
    o, _ = chunk_gated_delta_rule(**x)
    with pytest.raises(RuntimeError, match="bad launch"):
        o.sum().backward()


def test_flashqla_backward_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of the backward, too, must have run before."""
    x = make_inputs(Case(T=3))
    chunk_gated_delta_rule(**x)
    monkeypatch.setattr(api, "capturing", lambda: True)
    chunk_gated_delta_rule(**x)
    with pytest.raises(fla_flashqla.Unsupported, match="captured"):
        chunk_gated_delta_rule(**trained(x))
    monkeypatch.setattr(api, "capturing", lambda: False)
    chunk_gated_delta_rule(**trained(x))
    monkeypatch.setattr(api, "capturing", lambda: True)
    o, _ = chunk_gated_delta_rule(**trained(x))
    o.sum().backward()


def test_flashqla_states_of_another_size_while_a_graph_is_captured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whole heads in the states are a kernel of their own."""
    x = make_inputs(Case(T=3))
    for whole in (False, True):

        def planned(call: Any, whole: bool = whole) -> Any:
            return replace(plan(call), states_whole=whole)

        monkeypatch.setattr(api, "plan", planned)
        monkeypatch.setattr(api, "capturing", lambda: True)
        with pytest.raises(fla_flashqla.Unsupported, match="captured"):
            chunk_gated_delta_rule(**trained(x))
        monkeypatch.setattr(api, "capturing", lambda: False)
        chunk_gated_delta_rule(**trained(x))
        monkeypatch.setattr(api, "capturing", lambda: True)
        chunk_gated_delta_rule(**trained(x))


def test_flashqla_forward_that_fails_at_its_first_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error comes through autograd as it comes without."""
    kernels = kernel_models.FORWARD._replace(forward_halves=broken)
    monkeypatch.setattr(chunk, "build", lambda plan: kernels)
    x = trained(make_inputs(Case(T=3)))
    with pytest.raises(RuntimeError, match="bad launch"):
        chunk_gated_delta_rule(**x)
    with pytest.raises(fla_flashqla.Unsupported, match="forward sm90 bfloat16 failed at its first"):
        chunk_gated_delta_rule(**x)


def test_flashqla_errors_of_autograd_are_not_blamed_on_kernels() -> None:
    x = make_inputs(Case(T=3))
    with torch.inference_mode():
        q = x["q"].clone()
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved"):
        chunk_gated_delta_rule(**{**trained(x, ("beta",)), "q": q})
    o, _ = chunk_gated_delta_rule(**trained(x))
    o.sum().backward()
