# SPDX-License-Identifier: MIT
"""A small kernel, and a process that compiles it when told to; test_flashqla_coldstart.py starts several at once."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any

import tilelang
import tilelang.language as T
from tilelang.contrib import nvcc

from fla_flashqla.kernels import compile_kernel


def small_kernel(factor: int) -> Any:
    """Its name has our prefix, so that TileLang does not announce it on stdout."""

    @T.prim_func
    def gdr_small(x: T.Tensor((128,), "float32")):
        with T.Kernel(1, threads=128):
            for i in T.Parallel(128):
                x[i] = x[i] * factor

    return gdr_small


def say(**values: Any) -> None:
    print(json.dumps(values), flush=True)


def main(then: str) -> None:
    compiled: list[str] = []
    logged: list[str] = []
    real = nvcc.compile_cuda

    def compile_cuda(*args: Any, **kwargs: Any) -> Any:
        compiled.append("small")
        return real(*args, **kwargs)

    def hang(*args: Any, **kwargs: Any) -> None:
        say(hangs=True)
        time.sleep(600)

    nvcc.compile_cuda = compile_cuda
    if then == "hang":
        tilelang.compile = hang
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("fla_flashqla").addHandler(handler)
    logging.getLogger("fla_flashqla").setLevel(logging.DEBUG)
    function = small_kernel(2)
    say(ready=True)
    sys.stdin.readline()
    start = time.monotonic()
    source = compile_kernel("small", function, {}).get_kernel_source()
    end = time.monotonic()
    say(start=start, end=end, compiled=len(compiled), source=source, logged=logged)


if __name__ == "__main__":
    main(*sys.argv[1:])
