# SPDX-License-Identifier: MIT
"""TileLang kernels: one builder per file; nothing outside this package imports tilelang."""

from typing import Any

SM90 = {"kind": "cuda", "arch": "sm_90a"}


def compile_kernel(
    function: Any, pass_configs: dict[Any, Any], target: dict[str, str] = SM90
) -> Any:
    """Compile a TileLang function for `target`; needs nvcc, but no GPU."""
    import tilelang

    return tilelang.compile(function, target=target, pass_configs=pass_configs)
