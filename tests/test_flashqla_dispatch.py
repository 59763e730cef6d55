# SPDX-License-Identifier: MIT
"""Binding, verifier, call, fallbacks and report, without FLA and with kernels that stand in."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from child_processes import environment

import fla_flashqla
from fla_flashqla import api, compat
from fla_flashqla._autoload import TARGET
from fla_flashqla.backend import FlashQLABackend
from fla_flashqla.call import Unsupported, describe
from fla_flashqla.layout import Setup
from fla_flashqla.plan import Plan, Reference, Refusal

PLAN = Plan("stand_in", "bfloat16", "float32", "float32")
BINDING = compat.Binding.between(describe, describe)


def inputs(T: int = 5, **more: Any) -> dict[str, Any]:
    q, k = torch.randn(2, 1, T, 1, 8).unbind()
    v, g, beta = torch.randn(1, T, 2, 8), -torch.rand(1, T, 2), torch.rand(1, T, 2)
    return {"q": q, "k": k, "v": v, "g": g, "beta": beta, **more}


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(api, "_kernels", {})
    for variable in fla_flashqla.env.VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)
    fla_flashqla.reset_report()
    yield
    fla_flashqla.reset_report()


@pytest.fixture
def ours() -> FlashQLABackend:
    return FlashQLABackend(BINDING)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """Every call gets `PLAN`, whose kernels do what a test says."""
    stand_in = types.SimpleNamespace(
        plan=MagicMock(return_value=PLAN), build=MagicMock(), forward=MagicMock()
    )
    stand_in.forward.return_value = "o", None
    monkeypatch.setattr(api, "plan", stand_in.plan)
    monkeypatch.setattr(api.chunk, "build", stand_in.build)
    monkeypatch.setattr(api.chunk, "forward", stand_in.forward)
    return stand_in


@pytest.fixture
def fla(monkeypatch: pytest.MonkeyPatch) -> MagicMock:
    """FLA's operator, which a failed first launch calls."""
    operator = MagicMock(return_value=("FLA", None))
    module = types.SimpleNamespace(chunk_gated_delta_rule=operator)
    monkeypatch.setitem(sys.modules, TARGET, module)  # type: ignore[arg-type]
    return operator


# Binding

FLA_041 = "q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, \
use_qk_l2norm_in_kernel=False, cu_seqlens=None, **kwargs"
FLA_050 = FLA_041.replace(
    "**", "cu_seqlens_cpu=None, cp_context=None, transpose_state_layout=False, **"
)
FLA_051 = "q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, \
use_qk_l2norm_in_kernel=False, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, \
state_v_first=False, cu_seqlens=None, cu_seqlens_cpu=None, cp_context=None, **kwargs"
FLA_060 = FLA_051.replace("cp_context", "chunk_indices=None, cp_context")


def operator_with(arguments: str) -> Callable[..., Any]:
    operator: Callable[..., Any] = eval(f"lambda {arguments}: None")
    return operator


@pytest.mark.parametrize(
    ("arguments", "prefix", "theirs", "ours"),
    [
        pytest.param(FLA_041, 9, [], 6, id="0.4.1"),
        pytest.param(FLA_050, 9, ["transpose_state_layout"], 4, id="0.5.0"),
        pytest.param(FLA_051, 14, [], 1, id="0.5.1"),
        pytest.param(FLA_060, 16, [], 0, id="0.6.0"),
    ],
)
def test_flashqla_binding_of_each_signature(
    arguments: str, prefix: int, theirs: list[str], ours: int
) -> None:
    binding = compat.Binding.between(operator_with(arguments), describe)
    assert (binding.prefix, [name for name, _ in binding.theirs]) == (prefix, theirs)
    assert len(binding.ours) == ours
    values = {name: object() for name in binding.names if name not in theirs}
    for split in range(len(binding.names) + 1):
        names = binding.names[:split]
        given = tuple(values.get(name, False) for name in names)
        args, kwargs = binding(given, {n: x for n, x in values.items() if n not in names})
        bound = dict(zip(describe.__code__.co_varnames, args, strict=False)) | kwargs
        assert bound == values


def test_flashqla_binding_keeps_what_only_flas_signature_names() -> None:
    binding = compat.Binding.between(operator_with(FLA_050), describe)
    # There it is not deprecated yet, so that nobody shall be told so.
    assert binding((), {"transpose_state_layout": True})[1] == {"state_v_first": True}
    assert binding((), {"transpose_state_layout": False}) == ((), {})
    with pytest.raises(Unsupported, match="no argument state_v_first"):
        binding((), {"state_v_first": True})
    assert binding((), {"state_v_first": False})[1] == {"state_v_first": False}


def test_flashqla_binding_of_keywords_that_flas_operator_passes_over() -> None:
    """It would compute something else without a word: the call is FLA's."""
    binding = compat.Binding.between(operator_with(FLA_041), describe)
    for name in ("use_gate_in_kernel", "transpose_state_layout"):
        with pytest.raises(Unsupported, match=f"no argument {name}"):
            binding((), {name: True})
        assert binding((), {name: False}) == ((), {name: False})
        assert BINDING((), {name: True}) == ((), {name: True})


def test_flashqla_binding_of_malformed_calls() -> None:
    binding = compat.Binding.between(operator_with(FLA_041), describe)
    with pytest.raises(TypeError, match="more values"):
        binding(tuple(range(11)), {})
    with pytest.raises(TypeError, match="more values"):
        binding(tuple(range(10)), {"cu_seqlens": None})


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("q, k, v, beta, **kwargs", "no argument 'g'"),
        ("*args, **kwargs", "unnamed"),
        ("q, k, v, /, g, beta", "unnamed"),
        (FLA_041.replace("beta,", "beta, length,"), "'length'"),
        (FLA_041.replace("scale=None", "scale=1.0"), "'scale' defaults to 1.0, expected None"),
    ],
)
def test_flashqla_binding_that_does_not_fit(arguments: str, text: str) -> None:
    with pytest.raises(compat.Misfit, match=text):
        compat.Binding.between(operator_with(arguments), describe)


# Verifier and call


def test_flashqla_dispatch_describes_a_call_once(
    ours: FlashQLABackend, kernels: types.SimpleNamespace
) -> None:
    given = inputs(output_final_state=True)
    assert ours.chunk_gated_delta_rule_verifier(**given) == (True, None)
    assert ours.chunk_gated_delta_rule(**given) == ("o", None)
    assert kernels.plan.call_count == 1
    # Without a verifier before it, a call is described again: the objects may have changed.
    assert ours.chunk_gated_delta_rule(**given) == ("o", None)
    assert kernels.plan.call_count == 2


@pytest.mark.parametrize("change", ["tensor", "flag", "keyword", "positional", "thread"])
def test_flashqla_dispatch_never_answers_another_call(
    ours: FlashQLABackend, kernels: types.SimpleNamespace, change: str
) -> None:
    given = inputs()
    ours.chunk_gated_delta_rule_verifier(**given)
    other: dict[str, Any] = dict(given)
    args: tuple[Any, ...] = ()
    if change == "tensor":
        other["g"] = given["g"].clone()
    elif change == "flag":
        other["output_final_state"] = True
    elif change == "keyword":
        other["chunk_size"] = 64
    elif change == "positional":
        args = (other.pop("q"),)
    if change == "thread":
        thread = threading.Thread(target=ours.chunk_gated_delta_rule, kwargs=given)
        thread.start()
        thread.join()
    else:
        ours.chunk_gated_delta_rule(*args, **other)
    assert kernels.plan.call_count == 2


def test_flashqla_dispatch_keeps_no_tensors(
    ours: FlashQLABackend, kernels: types.SimpleNamespace
) -> None:
    given = inputs()
    alive = weakref.ref(given["q"])
    ours.chunk_gated_delta_rule_verifier(**given)
    ours.chunk_gated_delta_rule(**given)
    kernels.plan.reset_mock()
    kernels.forward.reset_mock()
    del given
    gc.collect()
    assert alive() is None


def test_flashqla_dispatch_passes_what_the_kernels_need(
    ours: FlashQLABackend, kernels: types.SimpleNamespace
) -> None:
    given = inputs(use_qk_l2norm_in_kernel=True, cu_seqlens=torch.tensor([0, 5]))
    ours.chunk_gated_delta_rule(**given, cu_seqlens_cpu=given["cu_seqlens"])
    setup, *passed, activations = kernels.forward.call_args.args
    tensors = [given[name] for name in ("q", "k", "v", "g", "beta")]

    def made(*flags: bool, cu_seqlens: torch.Tensor | None = None) -> Setup:
        return Setup.of(PLAN, given["q"], given["v"], cu_seqlens, *flags)

    assert setup == made(True, cu_seqlens=given["cu_seqlens"])
    expected = [*tensors, 8**-0.5, None, given["cu_seqlens"]]
    assert all(a is b or a == b for a, b in zip(passed, expected, strict=True))
    v_first = made(False, True)
    assert v_first != made()
    ours.chunk_gated_delta_rule(*tensors, 0.0, state_v_first=True)
    setup, *passed, activations = kernels.forward.call_args.args
    assert setup == v_first and passed[5:] == [0.0, None, None]
    with pytest.warns(DeprecationWarning, match="renamed to `state_v_first`"):
        ours.chunk_gated_delta_rule(*tensors, 0.0, transpose_state_layout=True, chunk_size=16)
    setup, *passed, activations = kernels.forward.call_args.args
    assert setup == v_first and passed[5:] == [0.0, None, None]
    # FLA takes a flag for what it is worth; a kernel needs numbers.
    ours.chunk_gated_delta_rule(*tensors, True, None, None, 2)
    setup, *passed, activations = kernels.forward.call_args.args
    assert setup == made(True) and passed[5:] == [1.0, None, None]
    assert type(passed[5]) is float
    assert (type(setup.output_final_state), *map(type, setup.normalized)) == (bool, int, int)


def test_flashqla_dispatch_refuses_with_a_reason(ours: FlashQLABackend) -> None:
    accepted, reason = ours.chunk_gated_delta_rule_verifier(**inputs(), answer=42)
    assert not accepted and reason == "unknown keyword arguments: answer"
    assert fla_flashqla.dispatch_report()["refused"] == {reason: 1}


def test_flashqla_dispatch_survives_a_planner_that_fails(
    ours: FlashQLABackend, kernels: types.SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    kernels.plan.side_effect = ZeroDivisionError("our mistake")
    for _ in range(2):
        accepted, reason = ours.chunk_gated_delta_rule_verifier(**inputs())
        assert not accepted and reason and "our mistake" in reason
    assert [r.levelname for r in caplog.records] == ["WARNING"]


def test_flashqla_dispatch_strict(ours: FlashQLABackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLA_FLASH_QLA_STRICT", "1")
    assert ours.chunk_gated_delta_rule_verifier(**inputs(), answer=42) == (True, None)
    with pytest.raises(Unsupported, match="answer"):
        ours.chunk_gated_delta_rule(**inputs(), answer=42)
    assert fla_flashqla.dispatch_report()["refused"] == {"unknown keyword arguments: answer": 1}


def test_flashqla_dispatch_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, enabled in (("0", False), ("1", True), ("", True)):
        monkeypatch.setenv("FLA_FLASH_QLA", value)
        assert FlashQLABackend.is_enabled() is enabled is FlashQLABackend.can_use()
    assert FlashQLABackend.is_available()


def test_flashqla_dispatch_names_no_other_function() -> None:
    """FLA asks a backend for every function that it dispatches, by name."""
    public = {name for name in vars(FlashQLABackend) if not name.startswith("_")}
    assert {name for name in public if callable(getattr(FlashQLABackend, name))} == {
        "is_available",
        "is_enabled",
        "can_use",
        "chunk_gated_delta_rule",
        "chunk_gated_delta_rule_verifier",
    }


# Failures of kernels

OTHERS = [{"splits": 2}, {"warps": 1}]  # plans with a kernel more than `PLAN`'s


def test_flashqla_fallback_when_the_build_fails(
    ours: FlashQLABackend, kernels: types.SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    kernels.build.side_effect = RuntimeError(
        "// source\nvoid f() {} // error\nCompilation error:\nnvcc warning: x\nnvcc fatal: no\nmore"
    )
    for _ in range(3):
        accepted, reason = ours.chunk_gated_delta_rule_verifier(**inputs())
        assert not accepted
    assert reason == "forward stand_in bfloat16 cannot be built: RuntimeError: nvcc fatal: no"
    assert kernels.build.call_count == 1 and not kernels.forward.called
    assert [r.levelname for r in caplog.records] == ["WARNING"] and reason in caplog.text
    assert fla_flashqla.dispatch_report()["refused"] == {reason: 3}


def test_flashqla_fallback_when_the_first_launch_fails(
    ours: FlashQLABackend,
    kernels: types.SimpleNamespace,
    fla: MagicMock,
    caplog: pytest.LogCaptureFixture,
) -> None:
    kernels.forward.side_effect = RuntimeError("bad launch")
    given = inputs()
    assert ours.chunk_gated_delta_rule_verifier(**given)[0]
    assert ours.chunk_gated_delta_rule(given["q"], **{n: given[n] for n in list(given)[1:]}) == (
        "FLA",
        None,
    )
    args, kwargs = fla.call_args
    assert args[0] is given["q"] and kwargs["beta"] is given["beta"]
    assert not ours.chunk_gated_delta_rule_verifier(**given)[0]
    assert [r.levelname for r in caplog.records] == ["WARNING"] and "bad launch" in caplog.text


@pytest.mark.parametrize("field", OTHERS)
def test_flashqla_fallback_of_one_kernel_leaves_the_others(
    field: dict[str, int], ours: FlashQLABackend, kernels: types.SimpleNamespace, fla: MagicMock
) -> None:
    """A kernel that fails at its first launch is refused; one that has run goes on."""
    ours.chunk_gated_delta_rule(**inputs())
    kernels.plan.return_value = replace(PLAN, **field)
    kernels.forward.side_effect = RuntimeError("bad launch")
    assert ours.chunk_gated_delta_rule(**inputs()) == ("FLA", None)
    assert not ours.chunk_gated_delta_rule_verifier(**inputs())[0]
    kernels.plan.return_value, kernels.forward.side_effect = PLAN, None
    assert ours.chunk_gated_delta_rule(**inputs()) == ("o", None)


def test_flashqla_fallback_ends_with_the_first_success(
    ours: FlashQLABackend, kernels: types.SimpleNamespace, fla: MagicMock
) -> None:
    kernels.forward.side_effect = [("o", None), RuntimeError("later"), ("o", None)]
    ours.chunk_gated_delta_rule(**inputs())
    with pytest.raises(RuntimeError, match="later"):
        ours.chunk_gated_delta_rule(**inputs())
    assert ours.chunk_gated_delta_rule_verifier(**inputs())[0]
    ours.chunk_gated_delta_rule(**inputs())
    assert fla_flashqla.dispatch_report()["ran"] == {"forward stand_in bfloat16": 2}
    assert not fla.called


def test_flashqla_fallback_not_for_want_of_memory(
    ours: FlashQLABackend, kernels: types.SimpleNamespace, fla: MagicMock
) -> None:
    kernels.forward.side_effect = torch.OutOfMemoryError("full")
    with pytest.raises(torch.OutOfMemoryError):
        ours.chunk_gated_delta_rule(**inputs())
    assert ours.chunk_gated_delta_rule_verifier(**inputs())[0] and not fla.called


def test_flashqla_fallback_not_when_strict(
    ours: FlashQLABackend, kernels: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLA_FLASH_QLA_STRICT", "1")
    kernels.forward.side_effect = RuntimeError("bad launch")
    with pytest.raises(RuntimeError, match="bad launch"):
        ours.chunk_gated_delta_rule(**inputs())
    assert ours.chunk_gated_delta_rule_verifier(**inputs()) == (True, None)
    with pytest.raises(Unsupported, match="bad launch"):
        ours.chunk_gated_delta_rule(**inputs())


@pytest.mark.parametrize("field", OTHERS)
def test_flashqla_fallback_while_a_graph_is_captured(
    field: dict[str, int],
    ours: FlashQLABackend,
    kernels: types.SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing is compiled or loaded under a capture; what has run before is captured."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    capturing = True
    accepted, reason = ours.chunk_gated_delta_rule_verifier(**inputs())
    assert not accepted and reason and "captured" in reason and not kernels.build.called
    capturing = False
    assert ours.chunk_gated_delta_rule(**inputs()) == ("o", None)
    capturing = True
    assert ours.chunk_gated_delta_rule_verifier(**inputs()) == (True, None)
    other = replace(PLAN, **field)  # compiled with it, but never launched
    monkeypatch.setattr(api, "plan", lambda call: other)
    assert not ours.chunk_gated_delta_rule_verifier(**inputs())[0]
    alike = replace(PLAN, longest_first=True)  # the same kernels
    monkeypatch.setattr(api, "plan", lambda call: alike)
    assert ours.chunk_gated_delta_rule_verifier(**inputs())[0]
    monkeypatch.setattr(api, "plan", lambda call: other)
    capturing = False
    assert ours.chunk_gated_delta_rule_verifier(**inputs())[0]


COMPILERS = {"missing": None, "broken": "#!/bin/sh\necho 'nvcc fatal: no such thing'; exit 1\n"}


@pytest.mark.parametrize("compiler", COMPILERS)
def test_flashqla_fallback_without_nvcc(compiler: str, tmp_path: Path) -> None:
    """The real kernels with a CUDA_HOME that has no nvcc, or one that fails."""
    pytest.importorskip("tilelang", reason="needs TileLang")
    nvcc = tmp_path / "bin" / "nvcc"
    if script := COMPILERS[compiler]:
        nvcc.parent.mkdir()
        nvcc.write_text(script)
        nvcc.chmod(0o755)
    code = """
import torch
from fla_flashqla import api, plan
api.plan = lambda call: plan.Plan("sm90", "bfloat16", "float32", "float32")
x = torch.zeros(1, 64, 1, 128)
for _ in range(2):
    print("ANSWER", api.decide((x, x, x, x[..., 0], x[..., 0]), {}))
"""
    child = subprocess.run(
        [sys.executable, "-c", code],
        env=environment(
            CUDA_HOME=str(tmp_path),
            CUDA_PATH=str(tmp_path),
            PATH=os.defpath,
            TILELANG_CACHE_DIR=str(tmp_path / "cache"),
        ),
        capture_output=True,
        text=True,
        timeout=120,
    )
    answers = [line for line in child.stdout.splitlines() if line.startswith("ANSWER Refusal")]
    cause = "bin/nvcc" if compiler == "missing" else "nvcc fatal: no such thing"
    assert len(answers) == 2 and all(cause in line for line in answers), child.stdout + child.stderr
    said = [line for line in child.stderr.splitlines() if "are left to FLA from now on" in line]
    assert len(said) == 1 and cause in said[0]


# The public operator


def test_flashqla_api_runs_without_fla(kernels: types.SimpleNamespace) -> None:
    assert fla_flashqla.chunk_gated_delta_rule(**inputs(scale=2)) == ("o", None)
    kernels.forward.side_effect = RuntimeError("later")
    with pytest.raises(RuntimeError, match="later"):
        fla_flashqla.chunk_gated_delta_rule(**inputs())


def test_flashqla_api_raises(kernels: types.SimpleNamespace) -> None:
    kernels.forward.side_effect = RuntimeError("first")
    with pytest.raises(RuntimeError, match="first"):
        fla_flashqla.chunk_gated_delta_rule(**inputs())
    with pytest.raises(Unsupported, match="first"):
        fla_flashqla.chunk_gated_delta_rule(**inputs())
    kernels.plan.return_value = Refusal("not ours")
    with pytest.raises(Unsupported, match="not ours"):
        fla_flashqla.chunk_gated_delta_rule(**inputs())


def test_flashqla_api_has_flas_arguments() -> None:
    binding = compat.Binding.between(fla_flashqla.chunk_gated_delta_rule, describe)
    assert binding.names == BINDING.names and not binding.ours
    flash_qlas = {"head_first", "auto_cp", "enable_fwd_cp_cache", "force_intra_cp"}
    assert {name for name, _ in binding.theirs} == flash_qlas


def test_flashqla_api_reference_on_the_cpu() -> None:
    given = inputs(output_final_state=True)
    o, state = fla_flashqla.chunk_gated_delta_rule(**given)
    assert o.shape == given["v"].shape and state is not None and state.dtype == torch.float32
    assert fla_flashqla.dispatch_report()["reference"] == 1


def test_flashqla_decisions_are_of_three_kinds() -> None:
    assert isinstance(api.decide((), inputs()), Reference)
    assert isinstance(api.decide((), inputs(answer=42)), Refusal)
