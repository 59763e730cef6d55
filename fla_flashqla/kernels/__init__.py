# SPDX-License-Identifier: MIT
"""TileLang kernels: one builder per file; nothing outside this package imports tilelang."""

import logging
from typing import Any

SM90 = {"kind": "cuda", "arch": "sm_90a"}


def compile_kernel(
    function: Any, pass_configs: dict[Any, Any], target: dict[str, str] = SM90
) -> Any:
    """Compile a TileLang function for `target`; needs nvcc, but no GPU."""
    import tilelang

    # TileLang announces each compilation on stdout, which belongs to the program that calls us.
    logging.getLogger("tilelang.jit.kernel").addFilter(_not_ours)
    return tilelang.compile(function, target=target, pass_configs=pass_configs)


def _not_ours(record: logging.LogRecord) -> bool:
    return "`gdr_" not in record.getMessage()


def cache_folder() -> str:
    """Where TileLang keeps compiled kernels."""
    from tilelang.env import env

    return str(env.TILELANG_CACHE_DIR)
