# SPDX-License-Identifier: MIT
"""Every kernel of the backward pass compiles within its limits, without a GPU; as test_flashqla_compile.py."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from compiler import Compiled, compile_for
from test_flashqla_compile import DTYPES, SMEM_BYTES, report

pytestmark = pytest.mark.compile


def assert_clean(compiled: Compiled) -> None:
    assert compiled.notes == ()  # neither serialised wgmma nor ignored setmaxnreg
    assert compiled.spilled_bytes == 0
    assert compiled.smem_bytes <= SMEM_BYTES
    assert not {"LDL", "STL"} & compiled.instructions.keys()


@pytest.mark.parametrize("warpgroups", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
def test_flashqla_compile_states(
    dtype: str, warpgroups: int, tmp_path: Path, record_property: Any
) -> None:
    from fla_flashqla.kernels import states

    function = states.states_kernel(dtype, warpgroups)
    compiled = compile_for("sm_90a", function, states.PASS_CONFIGS, tmp_path)
    report(f"states {dtype}, {warpgroups} math warpgroups", compiled, record_property)
    assert_clean(compiled)
    assert compiled.registers == {1: 178, 2: 168}[warpgroups]  # a thread at launch, and in all:
    math, io = states.REGISTERS
    assert 2 * math + io <= 3 * 168
    # X of the first chunk; Y, S and the next X of three chunks
    assert compiled.instructions["HGMMA"] == 8 + 3 * (4 + 4 + 8)
    assert compiled.register_operands == 8 + 3 * (4 + 4 + 8)
    assert compiled.instructions["HMMA"] == 0
    assert compiled.instructions["USETMAXREG"] == {1: 0, 2: 2}[warpgroups]
    assert compiled.instructions["BAR"] == 1


@pytest.mark.parametrize("warpgroups", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
def test_flashqla_compile_reverse(
    dtype: str, warpgroups: int, tmp_path: Path, record_property: Any
) -> None:
    from fla_flashqla.kernels import reverse

    function = reverse.reverse_kernel(dtype, warpgroups)
    compiled = compile_for("sm_90a", function, reverse.PASS_CONFIGS, tmp_path)
    report(f"reverse {dtype}, {warpgroups} math warpgroups", compiled, record_property)
    assert_clean(compiled)
    assert compiled.registers == {1: 168, 2: 128}[warpgroups]
    math, p, io = reverse.REGISTERS[warpgroups]
    assert warpgroups * math + p + io <= compiled.registers * (warpgroups + 2)
    # X and E of the first chunk; S in two products, dW and the next X and E of three chunks; Q K^T
    assert compiled.instructions["HGMMA"] == 8 + 4 + 3 * (4 + 4 + 4 + 8 + 4) + 8
    assert compiled.register_operands == 8 + 4 + 3 * (4 + 4 + 4 + 8 + 4)  # all but Q K^T
    assert compiled.instructions["HMMA"] == 0
    assert compiled.instructions["USETMAXREG"] == 3
    assert compiled.instructions["BAR"] == 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_flashqla_compile_reverse_segments(
    dtype: str, tmp_path: Path, record_property: Any
) -> None:
    from fla_flashqla.kernels import reverse

    function = reverse.reverse_kernel(dtype, local=True)
    compiled = compile_for("sm_90a", function, reverse.PASS_CONFIGS, tmp_path)
    report(f"reverse_segments {dtype}", compiled, record_property)
    assert_clean(compiled)
    assert compiled.registers == 128
    # as above, with nothing to store
    assert compiled.instructions["HGMMA"] == 8 + 4 + 3 * (4 + 4 + 4 + 8 + 4) + 8
    assert compiled.register_operands == 8 + 4 + 3 * (4 + 4 + 4 + 8 + 4)  # all but Q K^T
    assert compiled.instructions["USETMAXREG"] == 3
    assert compiled.instructions["BAR"] == 1
    assert not {"HMMA", "STSM", "UTMASTG"} & compiled.instructions.keys()


# Gates in other dtypes change two stores.
@pytest.mark.parametrize(
    ("dtype", "gates"), [(dtype, gates) for dtype in DTYPES for gates in ("float32", dtype)]
)
def test_flashqla_compile_gradients(
    dtype: str, gates: str, tmp_path: Path, record_property: Any
) -> None:
    from fla_flashqla.kernels import gradients

    function = gradients.gradients_kernel(dtype, gates, gates)
    compiled = compile_for("sm_90a", function, gradients.PASS_CONFIGS, tmp_path)
    report(f"gradients {dtype} {gates}", compiled, record_property)
    assert_clean(compiled)
    assert sum(gradients.REGISTERS) <= 4 * compiled.registers == 4 * 128
    # F1, dO S^T, F1 K; as much of dW; Y dS^T, F1^T Q, F2^T K
    assert compiled.instructions["HGMMA"] == 2 * (8 + 8 + 4) + 8 + 4 + 4
    assert compiled.register_operands == 2 * 4
    assert compiled.instructions["HMMA"] == 16  # <S, dS>
    assert compiled.instructions["USETMAXREG"] == 4


def test_flashqla_compile_build_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the package itself calls, from an empty memory cache; the disk cache may answer."""
    from fla_flashqla import chunk, segments
    from fla_flashqla import kernels as package
    from fla_flashqla.plan import Plan

    monkeypatch.setattr(package, "launcher", lambda kernel: kernel)
    plan = Plan("sm90", "bfloat16", "float32", "float32", gradients=True)
    for module in (chunk, segments):
        monkeypatch.setattr(module, "_built_backward", {})
        kernels = module.build_backward(plan)
        assert module.build_backward(plan) is kernels
        for name, kernel in kernels._asdict().items():
            source = re.sub("_halves|_segments|_reverse", "", name)
            assert f"gdr_{source}_kernel" in kernel.get_kernel_source()
