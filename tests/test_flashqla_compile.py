# SPDX-License-Identifier: MIT
"""Every kernel variant compiles for its architecture within its limits, without a GPU."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from compiler import Compiled, compile_for

from fla_flashqla.arch import ARCHS

pytestmark = pytest.mark.compile
DTYPES = ("bfloat16", "float16")
GATE_DTYPES = ("float32", "bfloat16", "float16")
SMEM_BYTES = ARCHS[(9, 0)].smem_bytes


def report(name: str, compiled: Compiled, record_property: Any) -> None:
    """A row of the table at the end of a test run (conftest.py)."""
    wgmma = compiled.instructions["HGMMA"]
    record_property("kernel", name)
    record_property("registers", compiled.registers)
    record_property("spilled", compiled.spilled_bytes)
    record_property("shared", compiled.smem_bytes)
    record_property("wgmma", f"{wgmma} ({compiled.register_operands})")
    record_property("notes", " ".join(compiled.notes) or "-")


@pytest.mark.parametrize("warpgroups", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
def test_flashqla_compile_forward(
    dtype: str, warpgroups: int, tmp_path: Path, record_property: Any
) -> None:
    from fla_flashqla.kernels import forward

    function = forward.forward_kernel(dtype, warpgroups)
    compiled = compile_for("sm_90a", function, forward.PASS_CONFIGS, tmp_path)
    report(f"forward {dtype}, {warpgroups} math warpgroups", compiled, record_property)
    assert compiled.notes == ()  # neither serialised wgmma nor ignored setmaxnreg
    assert compiled.spilled_bytes == 0
    assert compiled.registers == {1: 168, 2: 128}[warpgroups]  # a thread at launch, and in all:
    math, p, io = forward.REGISTERS[warpgroups]
    assert warpgroups * math + p + io <= compiled.registers * (warpgroups + 2)
    assert compiled.smem_bytes <= SMEM_BYTES
    # X of the first chunk; S^T Q^T, U, S, U^T P^T and the next X of three chunks; Q K^T
    assert compiled.instructions["HGMMA"] == 8 + 3 * (8 + 4 + 4 + 4 + 8) + 8
    assert compiled.register_operands == 8 + 3 * (8 + 4 + 4 + 4 + 8)  # all but Q K^T
    assert compiled.instructions["USETMAXREG"] == 3
    assert compiled.instructions["BAR"] == 1  # behind the barriers' initialisation only
    assert not {"LDL", "STL", "HMMA"} & compiled.instructions.keys()


@pytest.mark.parametrize(
    ("warps", "dtype", "g_dtype", "beta_dtype"),
    [
        *itertools.product((4,), DTYPES, GATE_DTYPES, GATE_DTYPES),
        *((1, dtype, gates, gates) for dtype in DTYPES for gates in ("float32", dtype)),
    ],
)
def test_flashqla_compile_prepare(
    warps: int, dtype: str, g_dtype: str, beta_dtype: str, tmp_path: Path, record_property: Any
) -> None:
    from fla_flashqla.kernels import prepare

    function = prepare.prepare_kernel(dtype, g_dtype, beta_dtype, warps)
    compiled = compile_for("sm_90a", function, prepare.PASS_CONFIGS, tmp_path)
    report(f"prepare {dtype} {g_dtype} {beta_dtype} {warps}", compiled, record_property)
    blocks = prepare.MIN_BLOCKS[warps]
    assert compiled.notes == ()
    assert compiled.spilled_bytes <= 64  # a few addresses; see MIN_BLOCKS
    assert compiled.registers <= 65536 // (warps * 32 * blocks)
    # a block can have all of an SM's but the 1024 bytes that each costs beside
    assert (compiled.smem_bytes + 1024) * blocks <= SMEM_BYTES + 1024
    # the inverse, K K^T, |q|^2
    assert compiled.instructions["HMMA"] == 96 + 8 * {1: 20, 4: 8}[warps] + {1: 64, 4: 16}[warps]


@pytest.mark.parametrize("dtype", DTYPES)
def test_flashqla_compile_segments(dtype: str, tmp_path: Path, record_property: Any) -> None:
    from fla_flashqla.kernels import segments

    function = segments.segments_kernel(dtype)
    compiled = compile_for("sm_90a", function, segments.PASS_CONFIGS, tmp_path)
    report(f"segments {dtype}", compiled, record_property)
    assert compiled.notes == ()
    assert compiled.spilled_bytes == 0
    assert compiled.registers == 168  # a thread at launch, and in all:
    math, load = segments.REGISTERS
    assert 2 * math + load <= compiled.registers * 3
    assert compiled.smem_bytes <= SMEM_BYTES
    # X of the first chunk; Y, S and the next X of three
    assert compiled.instructions["HGMMA"] == 8 + 3 * (4 + 4 + 8)
    assert compiled.register_operands == 8 + 3 * (4 + 4 + 8)
    assert compiled.instructions["USETMAXREG"] == 2
    assert compiled.instructions["BAR"] == 1
    assert not {"LDL", "STL", "HMMA"} & compiled.instructions.keys()


def test_flashqla_compile_combine(tmp_path: Path, record_property: Any) -> None:
    from fla_flashqla.kernels import combine

    compiled = compile_for("sm_90a", combine.combine_kernel(), combine.PASS_CONFIGS, tmp_path)
    report("combine", compiled, record_property)
    assert compiled.spilled_bytes == 0
    assert compiled.registers <= 255
    # directions, steps of K, columns, parts of float32
    assert compiled.instructions["HMMA"] == 2 * 8 * 2 * 3
    assert compiled.instructions["BAR"] == 2
    assert not {"LDL", "STL"} & compiled.instructions.keys()


def test_flashqla_compile_build_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    from fla_flashqla import kernels as package
    from fla_flashqla import segments
    from fla_flashqla.plan import Plan

    monkeypatch.setattr(segments, "_built", {})
    monkeypatch.setattr(package, "launcher", lambda kernel: kernel)
    plan = Plan("sm90", "bfloat16", "float32", "float32", segment=64)
    kernels = segments.build(plan)
    assert segments.build(plan) is kernels
    for kernel, name in zip(kernels, ("gdr_segments", "gdr_combine"), strict=True):
        assert f"{name}_kernel" in kernel.get_kernel_source()


def test_flashqla_compile_build(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the package itself calls, from an empty memory cache; the disk cache may answer."""
    from fla_flashqla import chunk
    from fla_flashqla import kernels as package
    from fla_flashqla.plan import Plan

    monkeypatch.setattr(chunk, "_built", {})
    monkeypatch.setattr(package, "launcher", lambda kernel: kernel)
    plan = Plan("sm90", "bfloat16", "float32", "float32")
    kernels = chunk.build(plan)
    assert chunk.build(plan) is kernels
    for kernel, name in zip(kernels, ("gdr_prepare",) * 2 + ("gdr_forward",) * 2, strict=True):
        assert f"{name}_kernel" in kernel.get_kernel_source()
