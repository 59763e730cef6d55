# SPDX-License-Identifier: MIT
"""The operator in graphs of torch.compile: by the reference, and with models that stand in for the kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from model_helpers import EVERY, gradients, trained
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import fla_flashqla
from fla_flashqla import Unsupported, api, chunk, chunk_gated_delta_rule, op
from fla_flashqla.testing import Case, make_inputs, make_output_gradients

FLAGS: dict[str, dict[str, Any]] = {
    "plain": {"state_dtype": None, "output_final_state": False},
    "states": {"state_v_first": True, "state_dtype": "bfloat16", "H": 1, "B": 2},
    "packed": {"lens": (65, 0, 3), "tail": 2, "l2norm": True, "cu_dtype": "int64"},
    "activated": {"raw_g": "bias", "raw_beta": 2, "dtype": "float16", "scale": -0.3},
    "unbiased": {"raw_g": "no_bias", "raw_beta": 1, "parameter_dtype": "bfloat16"},
}
by_flags = pytest.mark.parametrize("fields", FLAGS.values(), ids=FLAGS)


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch.compiler.reset()
    fla_flashqla.reset_report()


@pytest.fixture(params=["reference", "kernels"])
def answer(request: pytest.FixtureRequest) -> None:
    """What a graph knows of its nodes must not depend on who answers."""
    if request.param == "kernels":
        request.getfixturevalue("launched")


def compiled(
    function: Callable[..., Any] = chunk_gated_delta_rule, **options: Any
) -> tuple[Callable[..., Any], CompileCounterWithBackend]:
    """A function in one graph, and the counter of its graphs."""
    counter = CompileCounterWithBackend("aot_eager")
    options = {"fullgraph": True, "backend": counter, **options}
    return torch.compile(lambda **x: function(**x), **options), counter


def case(**fields: Any) -> dict[str, Any]:
    return make_inputs(Case(**{"T": 70, **fields}))


def arguments(x: dict[str, Any], training: bool) -> tuple[Any, ...]:
    """Those of the node for a call."""
    rest = {**dict.fromkeys(op._Arguments._fields, False), "chunk_size": 64, "refused": []}
    rest |= dict.fromkeys(("initial_state", "cu_seqlens", "A_log", "dt_bias"))
    return op._Arguments(**{**rest, **x, "gradients": training})


def same(got: torch.Tensor | None, want: torch.Tensor | None) -> None:
    if want is None:
        assert got is None
    else:
        assert got is not None and got.dtype == want.dtype and torch.equal(got, want)


def report() -> dict[str, Any]:
    """The counters, which start again."""
    found = fla_flashqla.dispatch_report()
    fla_flashqla.reset_report()
    return found


@by_flags
def test_flashqla_graph_answers_as_eager(fields: dict[str, Any], answer: None) -> None:
    """The same bits, and as many calls on record, none of them for the tracing."""
    x = case(**fields)
    operator, counter = compiled()
    want, wanted = chunk_gated_delta_rule(**x), report()
    for _ in range(2):
        for mine, its in zip(operator(**x), want, strict=True):
            same(mine, its)
        assert report() == wanted
    do, dht = make_output_gradients(x)
    grads = do, dht if fields.get("output_final_state", True) else None
    eager, wanted = gradients(x, *grads), report()
    for _ in range(2):
        found = gradients(x, *grads, operator=operator)
        assert report() == wanted and found.keys() == eager.keys()
        for name in found:
            same(found[name], eager[name])
    assert counter.frame_count == 2  # without gradients, and with


@pytest.mark.parametrize("name", EVERY)
def test_flashqla_graph_of_single_gradients(name: str, answer: None) -> None:
    x = case(raw_g="bias", T=5)
    do, dht = make_output_gradients(x)
    operator, _ = compiled()
    alone = ((do, dht), (do, None), (None, dht))
    for grads in alone if name != "q" else alone[1:2]:  # on which the final state does not depend
        found = gradients(x, *grads, (name,), operator)
        same(found[name], gradients(x, *grads, (name,))[name])


def test_flashqla_graph_computes_what_is_needed(launched: list[str]) -> None:
    """Launches are those of an eager call."""
    x = case(T=5)
    do, _ = make_output_gradients(x)
    operator, _ = compiled()
    for names in (("v",), ("initial_state",), ("beta",)):
        seen = []
        for function in (chunk_gated_delta_rule, operator):
            launched.clear()
            gradients(x, do, None, names, function)
            seen.append(launched.copy())
        assert seen[0] == seen[1]


@pytest.mark.parametrize("training", [False, True])
def test_flashqla_graph_holds_for_any_sizes(training: bool, answer: None) -> None:
    """Of batch, tokens and heads: PyTorch sets aside 0, 1 and sizes that are equal at first."""
    operator, counter = compiled(dynamic=True)
    for B, T, H in ((2, 66, 3), (3, 9, 2), (4, 5, 4)):
        x = case(B=B, T=T, H=H, HV=2 * H, l2norm=True)
        for got, want in zip(operator(**x), chunk_gated_delta_rule(**x), strict=True):
            same(got, want)
        if training:
            do, dht = make_output_gradients(x)
            found, wanted = (
                gradients(x, do, dht, operator=f) for f in (operator, chunk_gated_delta_rule)
            )
            assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert counter.frame_count == 1 + training


def test_flashqla_graph_holds_for_any_sequences(answer: None) -> None:
    """The second length makes PyTorch try sizes that vary, without being told."""
    operator, counter = compiled()
    for lens in ((65, 3), (9, 0, 64), (1, 2, 3, 4), (200, 1)):
        x = trained(case(lens=lens))
        o, state = operator(**x)
        want = chunk_gated_delta_rule(**x)
        same(o, want[0])
        same(state, want[1])
        (o.sum() + state.sum()).backward()
    assert counter.frame_count == 2


def test_flashqla_graph_contains_the_call(answer: None) -> None:
    """Operations before it and behind it are in the same graph, and a checkpoint around it, too."""

    def layer(**x: Any) -> torch.Tensor:
        def block(q: torch.Tensor) -> torch.Tensor:
            return chunk_gated_delta_rule(**{**x, "q": q * 2})[0].sin()

        found: torch.Tensor = checkpoint(block, x["q"], use_reentrant=False)
        return found

    x = trained(case())
    operator, counter = compiled(layer)
    pairs = []
    for function in (operator, layer):
        o = function(**x)
        pairs.append((o, *torch.autograd.grad(o.sum(), [x["q"], x["v"]])))
    for got, want in zip(*pairs, strict=True):
        same(got, want)
    assert counter.frame_count == 1


@by_flags
@pytest.mark.parametrize("training", [False, True])
def test_flashqla_graph_nodes_are_what_they_say(
    fields: dict[str, Any], training: bool, answer: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`torch.library.opcheck` of both, which compares all that is kept, also what is never written or read."""
    monkeypatch.setattr(torch.Tensor, "new_empty", torch.Tensor.new_zeros)
    forward = torch.ops.fla_flashqla.chunk_gated_delta_rule.default
    backward = torch.ops.fla_flashqla.chunk_gated_delta_rule_backward.default
    x = case(**{"T": 5, **fields})
    args = arguments(x, training)
    torch.library.opcheck(forward, arguments(trained(x), True) if training else args)
    if training:
        do, dht = make_output_gradients(x)
        kept = forward(*args)[2]
        for names, *grads in ((EVERY, do, dht), (EVERY, do, None), (("beta",), None, dht)):
            needs = [name in names and x.get(name) is not None for name in EVERY]
            torch.library.opcheck(backward, (*grads, kept, needs, *args))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"answer": 42, "another": 1}, "unknown keyword arguments: another, answer"),
        ({"cp_context": 1}, "cp_context is not supported"),
        ({"head_first": True}, "head_first was removed"),
        ({"chunk_size": 8}, "chunk_size must be 16, 32 or 64, got 8"),
        ({"use_gate_in_kernel": True}, "A_log must be a floating-point tensor"),
        ({"allow_neg_eigval": True}, "allow_neg_eigval needs use_beta_sigmoid_in_kernel"),
        ({"state_v_first": True, "transpose_state_layout": False}, "are one argument, got both"),
        ({"beta": torch.ones(1, 70, 3)}, "beta must be [B, T, HV] = (1, 70, 4), got (1, 70, 3)"),
        ({"g": torch.ones(1, 70, 4, dtype=torch.int32)}, "g must be a floating-point tensor"),
        ({"cu_seqlens": torch.tensor([0.0, 70.0])}, "cu_seqlens must be int32 or int64"),
    ],
)
def test_flashqla_graph_refuses_when_it_runs(changes: dict[str, Any], text: str) -> None:
    x = {**case(), **changes}
    with pytest.raises(Unsupported) as eager:
        chunk_gated_delta_rule(**x)
    wanted = report()["refused"]
    operator, counter = compiled()
    for _ in range(2):
        with pytest.raises(Unsupported) as raised:
            operator(**x)
        assert str(raised.value).startswith(str(eager.value)) and text in str(eager.value)
        assert report()["refused"] == wanted
    assert counter.frame_count == 1


def test_flashqla_graph_passes_on_other_arguments() -> None:
    """The former name of a flag, what only tunes, and gates that are not made."""
    x = case()
    x["initial_state"] = x["initial_state"].mT.contiguous()
    x |= {"chunk_size": 16, "A_log": torch.zeros(4), "use_gate_in_kernel": False, "auto_cp": False}
    del x["state_v_first"]
    operator, _ = compiled()
    with pytest.warns(DeprecationWarning):
        want = chunk_gated_delta_rule(**x, transpose_state_layout=True)
    for mine, its in zip(operator(**x, transpose_state_layout=True), want, strict=True):
        same(mine, its)


def broken(*_: Any) -> None:
    raise RuntimeError("bad launch")


@pytest.mark.usefixtures("launched")
@pytest.mark.parametrize("name", ["forward", "rehearse_backward"])
def test_flashqla_graph_whose_kernels_fail(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody can take over; the backward's fail before the forward runs."""
    monkeypatch.setattr(chunk, name, broken)
    operator, _ = compiled()
    x = trained(case())
    with pytest.raises(RuntimeError, match="bad launch"):
        operator(**x)
    with pytest.raises(Unsupported, match="failed at its first launch"):
        operator(**x)


@pytest.mark.usefixtures("launched")
def test_flashqla_graph_whose_backward_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    operator, _ = compiled()
    o, _ = operator(**trained(case()))
    monkeypatch.setattr(api, "_kernels", {})
    monkeypatch.setattr(api, "capturing", lambda: True)
    with pytest.raises(Unsupported, match="before a CUDA graph is captured"):
        o.sum().backward()


def test_flashqla_graph_has_first_derivatives_only() -> None:
    """A node called outside of graphs refuses a second one."""
    x = trained(case(T=3))
    o, _, _ = torch.ops.fla_flashqla.chunk_gated_delta_rule(*arguments(x, True))
    (dq,) = torch.autograd.grad(o.sum(), x["q"], create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula"):
        dq.square().sum().backward()


@pytest.mark.fla
def test_flashqla_graph_ends_at_flas_dispatch() -> None:
    """One graph before FLA's operator and one behind it, whatever the length."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule as of_fla

    fla_flashqla.register()

    def layer(q: torch.Tensor, **x: Any) -> torch.Tensor:
        o: torch.Tensor = of_fla(q=q * 1, **x)[0]
        return o + 1

    operator, counter = compiled(layer, fullgraph=False, dynamic=True)
    for T in (5, 6, 70):
        same(operator(**case(T=T)), layer(**case(T=T)))
    assert counter.frame_count == 2 and report()["reference"] == 6


@pytest.mark.sm90
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_flashqla_graph_on_the_gpu(mode: str) -> None:
    """Two lengths and a repetition, with Inductor, and as CUDA graphs: the bits of an eager call."""
    operator, _ = compiled(backend="inductor", mode=mode)
    for T in (70, 513, 70):
        x = make_inputs(Case(T=T, raw_g="bias", raw_beta=2, l2norm=True), "cuda")
        do, dht = make_output_gradients(x)
        want = gradients(x, do, dht)
        for _ in range(3):
            torch.compiler.cudagraph_mark_step_begin()
            found = gradients(x, do, dht, operator=operator)
            for name in want:
                same(found[name], want[name])
