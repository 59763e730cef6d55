# SPDX-License-Identifier: MIT
"""Products by mma.sync: which architectures have them, who gets them on SM90, and every kernel compiled for each of them."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from compiler import UNREAD, Compiled, compile_for, compile_lowered, lower
from test_flashqla_compile import DTYPES, report
from test_flashqla_plan import BASE

from fla_flashqla import arch, env
from fla_flashqla import check as command
from fla_flashqla.arch import ARCHS, MMA, WGMMA, Arch
from fla_flashqla.call import Call
from fla_flashqla.plan import plan


def test_flashqla_forms_of_architectures() -> None:
    assert [row.form for row in ARCHS.values()] == [WGMMA, MMA, MMA, MMA, MMA]
    targets = ["sm_90a", "sm_100a", "sm_103a", "sm_120a", "sm_121a"]
    assert [row.target for row in ARCHS.values()] == targets
    for row in ARCHS.values():
        assert arch.named(row.name) is row.in_form("") is row.in_form(row.form) is row
    portable = arch.named("sm90-mma")
    as_tested = {"status": portable.status, "proven": False}
    assert portable == replace(ARCHS[9, 0], name="sm90-mma", form=MMA, **as_tested)
    assert portable.in_form(MMA) is portable


def test_flashqla_forms_are_said_to_be_untried(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the same words by README and by `check`."""
    assert arch.UNTRIED == "compiled and run in its portable form on Hopper; never run on Blackwell"
    readme = (Path(__file__).parent.parent / "README.md").read_text()
    assert arch.UNTRIED in " ".join(readme.split())
    monkeypatch.delenv("FLA_FLASH_QLA_SELFCHECK", raising=False)
    gpu = {"supported": True, "proven": False, "measured": False, "status": ARCHS[10, 0].status}
    (said,) = command._untried(gpu, {"flash-qla": None})
    assert arch.UNTRIED in said


@pytest.mark.parametrize("sm", [(10, 0), (10, 3)])
def test_flashqla_forms_are_planned_for_blackwell(sm: tuple[int, int]) -> None:
    """As on Hopper, with kernels of its own, which nobody has seen run there."""
    own, made = (plan(Call(**BASE)._replace(sm=x)) for x in ((9, 0), sm))
    assert made == replace(own, arch=f"sm{sm[0]}{sm[1]}") and not arch.proven(made.arch)
    assert ARCHS[sm].status == arch.UNTRIED and not ARCHS[sm].measured


def test_flashqla_forms_by_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another form than the architecture's own makes other kernels, which reports tell."""
    for value, form in {"mma": MMA, "auto": "", "wgmma": ""}.items():
        monkeypatch.setenv("FLA_FLASH_QLA_FORM", value)
        assert env.form() == form
    own, portable = (plan(Call(**BASE)._replace(form=form)) for form in ("", MMA))
    assert portable == replace(own, arch="sm90-mma") and portable.compiled != own.compiled
    assert portable.path("forward") == "forward sm90-mma bfloat16"
    assert portable.key("segments") != own.key("segments")


# Of one math warpgroup, of two, without that choice
KERNELS = (
    *("forward_halves", "states_halves", "reverse_halves", "forward", "states", "reverse"),
    *("reverse_segments", "segments", "gradients", "prepare", "prepare_single", "combine"),
)
# Bytes at most, loads and stores: accumulators are as large as those of wgmma, and right operands take registers, too.
SPILLED_BYTES = {
    "sm_90a": {"forward": 32, "reverse": 520, "reverse_segments": 64, "gradients": 1400},
    "sm_100a": {"reverse": 480, "gradients": 960},
    "sm_103a": {"forward": 64, "reverse": 256, "gradients": 960},
    "sm_120a": {"gradients": 960, "prepare": 16},
}
# A thread, at launch: what a block of 512, of 384 and of fewer can have; `prepare.py` has several blocks on an SM
REGISTERS = {
    **dict.fromkeys(("forward", "reverse", "reverse_segments", "gradients", "prepare"), 128),
    **dict.fromkeys(("forward_halves", "states", "reverse_halves", "segments"), 168),
    "prepare_single": 168,
}
GATED = ("gradients", "prepare", "prepare_single")  # know the dtypes of g and beta
SMALL = ("prepare", "prepare_single", "combine")  # what has room in a block of SM120
# Of 16 x 8 x 16, a warp: as many as the wgmma of test_flashqla_compile.py have. Those of gradients.py are partly in loops.
PRODUCTS = {"forward": 896, "states": 544, "segments": 544, "reverse": 928}


def source(
    name: str, dtype: str, form: str = MMA, gates: str = "float32"
) -> tuple[Any, dict[Any, Any]]:
    """A kernel in a form, as chunk.py and segments.py ask for it; g and beta have dtype `gates`."""
    from fla_flashqla.kernels import combine, forward, gradients, prepare, reverse, segments, states
    from fla_flashqla.kernels.products import in_form

    warpgroups = 1 if name.endswith("halves") else 2
    kind = name.partition("_")[0]
    if kind == "prepare":
        warps = 1 if name == "prepare_single" else 4
        return prepare.prepare_kernel(dtype, gates, gates, warps), prepare.PASS_CONFIGS
    if kind == "combine":
        return combine.combine_kernel(), combine.PASS_CONFIGS
    if kind == "forward":
        made = forward.forward_kernel(dtype, warpgroups, form), forward.PASS_CONFIGS
    elif kind == "states":
        made = states.states_kernel(dtype, warpgroups, form), states.PASS_CONFIGS
    elif kind == "reverse":
        local = name == "reverse_segments"
        made = reverse.reverse_kernel(dtype, warpgroups, form, local), reverse.PASS_CONFIGS
    elif kind == "segments":
        made = segments.segments_kernel(dtype, form), segments.PASS_CONFIGS
    else:
        made = gradients.gradients_kernel(dtype, gates, gates, form), gradients.PASS_CONFIGS
    return in_form(form, name, *made)[1:]


@pytest.mark.compile
@pytest.mark.parametrize("kernel", ["forward", "reverse", "gradients"])
def test_flashqla_forms_differ_in_products_alone(kernel: str) -> None:
    """The same descriptors for TMA, so the same tiles; the same copies, barriers and calls of device functions in the same order."""
    made = [lower("sm_90a", *source(kernel, "bfloat16", form)) for form in (WGMMA, MMA)]
    own, portable = (str(artifact.host_mod) for artifact in made)
    assert own == portable and "__tvm_tensormap_create_tiled" in own
    own_lines, lines = (statements(artifact.kernel_source) for artifact in made)
    assert own_lines == lines and len(lines) > 60
    assert ["tl::wgmma_" in artifact.kernel_source for artifact in made] == [True, False]


def statements(source: str) -> list[str]:
    """Those that say what goes on around products, without the numbers of loop variables."""
    told = r"gdr_|tma_|stmatrix|\.wait\(|\.arrive|fence_proxy|__syncwarp|reg_(de)?alloc|buf_dyn_shmem \+"
    kernel = source.rpartition("buf_dyn_shmem[]")[2]
    lines = [re.sub(r"_\d+\b", "", line.strip()) for line in kernel.splitlines()]
    return [line for line in lines if re.search(told, line)]


def check(compiled: Compiled, row: Arch, kernel: str) -> None:
    assert compiled.notes == ()
    fits = compiled.smem_bytes <= row.smem_bytes
    assert fits == (row.name != "sm120" or kernel in SMALL)
    assert compiled.registers <= REGISTERS.get(kernel, 255)
    assert compiled.spilled_bytes <= SPILLED_BYTES[row.target].get(kernel, 0)
    if row.target not in UNREAD:
        assert compiled.instructions["HGMMA"] == 0 < compiled.instructions["HMMA"]
        products = PRODUCTS.get(kernel.partition("_")[0])
        assert products in (None, compiled.instructions["HMMA"])


def variants() -> list[Any]:
    """Of every kernel, in every dtype; gates in that of q where the kernel knows them."""
    found = [(kernel, dtype, "float32") for dtype in DTYPES for kernel in KERNELS[:-1]]
    found += [(kernel, dtype, dtype) for dtype in DTYPES for kernel in GATED]
    return [
        pytest.param(*case, id="-".join(case)) for case in [*found, ("combine", *["float32"] * 2)]
    ]


@pytest.mark.compile
@pytest.mark.parametrize(("kernel", "dtype", "gates"), variants())
def test_flashqla_forms_compile_for_blackwell(
    kernel: str, dtype: str, gates: str, tmp_path: Path, record_property: Any
) -> None:
    function, configs = source(kernel, dtype, gates=gates)
    lowered = lower(ARCHS[10, 0].target, function, configs)
    for row in (ARCHS[sm] for sm in ((10, 0), (10, 3), (12, 0))):  # SM121 is as SM120
        compiled = compile_lowered(row.target, lowered, configs, tmp_path)
        report(f"{kernel} {dtype} {gates}, {row.target} {row.form}", compiled, record_property)
        check(compiled, row, kernel)


@pytest.mark.compile
def test_flashqla_forms_are_one_source_for_blackwell() -> None:
    """What the test above takes for granted."""
    function, configs = source("segments", "bfloat16")
    made = [lower(row.target, function, configs).kernel_source for row in ARCHS.values()]
    assert made[1] == made[2] == made[3]


def cases() -> list[Any]:
    """What runs on Hopper in this form, and what float16 may compile to otherwise."""
    found = [("sm90-mma", "bfloat16", name) for name in KERNELS[:-3]]
    found += [("sm90-mma", "float16", name) for name in ("forward", "gradients")]
    return [pytest.param(*case, id="-".join(case)) for case in found]


@pytest.mark.compile
@pytest.mark.parametrize(("name", "dtype", "kernel"), cases())
def test_flashqla_forms_compile(
    name: str, dtype: str, kernel: str, tmp_path: Path, record_property: Any
) -> None:
    row = arch.named(name)
    compiled = compile_for(row.target, *source(kernel, dtype), tmp_path)
    report(f"{kernel} {dtype}, {row.target} {row.form}", compiled, record_property)
    check(compiled, row, kernel)
