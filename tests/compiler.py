# SPDX-License-Identifier: MIT
"""What the compiler makes of a kernel: registers, spills, shared memory and instructions. Needs nvcc, no GPU."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

UNREAD = ("sm_103a",)  # by the disassembler that comes with Triton


class Compiled(NamedTuple):
    registers: int  # at launch
    spilled_bytes: int
    smem_bytes: int  # dynamic and static
    notes: tuple[str, ...]  # ptxas performance notes (C75xx)
    instructions: Counter[str]
    register_operands: int  # wgmma whose left operand lies in registers


@functools.cache
def nvcc() -> str | None:
    """The nvcc that TileLang finds, without loading TileLang."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home:
        return shutil.which(f"{home}/bin/nvcc")
    try:
        files = importlib.metadata.files("nvidia-cuda-nvcc") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    packaged = [str(file.locate()) for file in files if file.name == "nvcc"]
    candidates = ["nvcc", *packaged, "/usr/local/cuda/bin/nvcc"]
    return next((path for name in candidates if (path := shutil.which(name))), None)


def disassembler() -> str:
    import triton

    return str(Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump")


def lower(arch: str, function: Any, pass_configs: dict[Any, Any]) -> Any:
    """TileLang's host and CUDA source of a TileLang function for `arch` ("sm_90a")."""
    import tilelang

    target = tilelang.tvm.target.Target({"kind": "cuda", "arch": arch})
    with tilelang.tvm.transform.PassContext(opt_level=3, config=pass_configs), target:
        return tilelang.engine.lower(function, target=target)


def compile_for(arch: str, function: Any, pass_configs: dict[Any, Any], folder: Path) -> Compiled:
    """Compile a TileLang function for `arch` ("sm_90a")."""
    return compile_lowered(arch, lower(arch, function, pass_configs), pass_configs, folder)


def compile_lowered(
    arch: str, artifact: Any, pass_configs: dict[Any, Any], folder: Path
) -> Compiled:
    """Compile what `lower` made with TileLang's own nvcc options for `arch`; no `instructions` for `UNREAD`."""
    import tilelang
    from tilelang.env import CUTLASS_INCLUDE_DIR, TILELANG_TEMPLATE_PATH

    source, cubin = folder / "kernel.cu", folder / "kernel.cubin"
    source.write_text(artifact.kernel_source)
    fast_math = tilelang.PassConfigKey.TL_ENABLE_FAST_MATH
    options = ["--use_fast_math"] if pass_configs.get(fast_math) else []
    compiler = nvcc()
    assert compiler, "no nvcc"
    command = [compiler, "-cubin", "-O3", f"-arch={arch}", "-std=c++20", "-Xptxas", "-v", *options]
    paths = [f"-I{TILELANG_TEMPLATE_PATH}", f"-I{CUTLASS_INCLUDE_DIR}"]
    done = subprocess.run(
        [*command, *paths, "-o", str(cubin), str(source)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    log = done.stdout + done.stderr
    show = [disassembler(), "-sass", str(cubin)]
    known = arch not in UNREAD
    sass = subprocess.run(show, capture_output=True, text=True, check=True).stdout if known else ""
    dynamic = re.findall(r'\(\((\d+),\), "uint8", scope="shared.dyn"\)', str(artifact.device_mod))
    static = re.findall(r"(\d+) bytes smem", log)
    assert dynamic or static
    names = re.findall(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9]+)", sass, re.M)
    return Compiled(
        registers=int(re.findall(r"Used (\d+) registers", log)[0]),
        spilled_bytes=sum(map(int, re.findall(r"(\d+) bytes spill", log))),
        smem_bytes=sum(map(int, dynamic + static)),
        notes=tuple(re.findall(r"\((C75\d\d)\)", log)),
        instructions=Counter(names),
        register_operands=len(re.findall(r"HGMMA\.\S+ R\d+, R\d+", sass)),
    )
