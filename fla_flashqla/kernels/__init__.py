# SPDX-License-Identifier: MIT
"""TileLang kernels: one builder per file; nothing outside this package imports tilelang."""

import contextlib
import logging
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from fla_flashqla.arch import ARCHS, Arch
from fla_flashqla.report import logger

SM90 = ARCHS[9, 0]
# A kernel takes some 20 s, more on a busy machine; one that hangs must not stop all others for good.
LOCK_TIMEOUT_S = 600.0


def device_functions(*names: str) -> str:
    """CUDA source for a kernel's `prelude`: common.cuh, then the files `names`."""
    here = Path(__file__).parent
    return "".join((here / name).read_text() for name in ("common.cuh", *names))


def compile_kernel(
    name: str, function: Any, pass_configs: dict[Any, Any], arch: Arch = SM90
) -> Any:
    """Compile a TileLang function, or read it from TileLang's cache; needs nvcc, but no GPU.

    Args:
        name (str):
            Tells it from all others for the same architecture: of processes that compile the same name at once, the
            others wait for the first.
        function (Any):
            What `T.prim_func` made.
        pass_configs (dict):
            TileLang's `pass_configs`.
        arch (Arch):
            What it is compiled for. Default: `SM90`.

    Raises:
        Exception: what TileLang raises.
    """
    import tilelang

    # TileLang announces each compilation on stdout, which belongs to the program that calls us.
    logging.getLogger("tilelang.jit.kernel").addFilter(_not_ours)
    target = {"kind": "cuda", "arch": arch.target}
    with first(f"{name}-{arch.target}"):
        return tilelang.compile(function, target=target, pass_configs=pass_configs)


def compile_kernels(
    sources: Sequence[tuple[str, Any, dict[Any, Any]]], arch: Arch = SM90
) -> list[Any]:
    """What launches each of `sources`, which are arguments of `compile_kernel`, compiled side by side: most of the time is nvcc's."""
    with ThreadPoolExecutor(len(sources)) as pool:
        return [*pool.map(lambda source: launcher(compile_kernel(*source, arch)), sources)]


def launcher(kernel: Any) -> Any:
    """The function that TileLang's wrapper of a compiled kernel calls: launches cost a third without the wrapper.

    The wrapper counts arguments, which the function does too, and allocates results, of which our kernels have none.
    """
    try:
        return kernel.adapter.get_exportable_executable()["main"]
    except Exception:
        # A release of TileLang that keeps it elsewhere: launches are slower, which is no reason to fail.
        return kernel


@contextlib.contextmanager
def first(name: str) -> Iterator[None]:
    """Be the process of this node that makes `name`, or enter when the one before us has done so.

    A lock saves time and no more: where there is none to be had, whatever the reason, we go on without.
    """
    lock = None
    try:
        from filelock import FileLock, Timeout
        from tilelang.env import env

        if env.is_cache_enabled():  # else there is nothing to wait for
            folder = os.path.join(cache_folder(), "fla_flashqla-locks")
            os.makedirs(folder, exist_ok=True)
            # Not the soft lock that filelock takes where the file system has no other: that one
            # outlives a process that is killed, which another host cannot find out.
            lock = FileLock(os.path.join(folder, f"{name}.lock"), fallback_to_soft=False)
            try:
                lock.acquire(timeout=0)
            except Timeout:
                lock.acquire(timeout=LOCK_TIMEOUT_S)
                # It is in the cache now, which many can read at once. If it is not, since the other
                # process failed, it is too late to take turns.
                lock.release()
    except Exception as error:
        # A folder that was filled ahead may well be read-only; a wait in vain is worth a warning.
        level = logging.WARNING if isinstance(error, TimeoutError) else logging.INFO
        text = "no lock for %s, so other processes may make it too: %s: %s"
        logger.log(level, text, name, type(error).__name__, error)
    try:
        yield
    finally:
        with contextlib.suppress(Exception):
            if lock is not None:
                lock.release()  # does nothing where it is not held


def _not_ours(record: logging.LogRecord) -> bool:
    return "`gdr_" not in record.getMessage()


def cache_folder() -> str:
    """Where TileLang keeps compiled kernels."""
    from tilelang.env import env

    return str(env.TILELANG_CACHE_DIR)
