# SPDX-License-Identifier: MIT
"""Products of tiles by tensor cores in the forms that architectures have (`Arch.form`), of which one is chosen when a kernel is built.

    wgmma   by warpgroups, asynchronous: operands and results stay untouched until `wait`; SM90 alone
    mma     by warps, mma.sync: done when the next statement runs, `wait` does nothing; every architecture since SM80

In both, a warpgroup takes 64 rows and a warp 16 of them; accumulators and left operands in registers lie in the same order (row
lane / 4 and the 8th behind, columns 2 (lane % 4) + {0, 1} of each eight), on which the device functions rely; and shared tiles lie
in panels of 64 columns, rows of 128 bytes, swizzled as TMA does.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import tilelang.language as T

from fla_flashqla.arch import MMA, WGMMA


class Products(NamedTuple):
    """What a kernel's builder calls.

    Args:
        matmul (Callable):
            `(A, B, C, transpose_A=, transpose_B=, clear_accum=)`: C (+)= A B, each operand transposed where so said.
        wait (Callable):
            `(n)`: until at most the last n products are unfinished.
    """

    matmul: Callable[..., Any]
    wait: Callable[[int], Any]


def products(form: str) -> Products:
    """The products of `form`, WGMMA or MMA."""
    by_rows = T.GemmWarpPolicy.FullRow
    if form == WGMMA:
        return Products(partial(T.wgmma_gemm, policy=by_rows), T.wait_wgmma)
    assert form == MMA, form
    return Products(partial(T.gemm, policy=by_rows), lambda _: None)


def in_form(
    form: str, name: str, function: Any, configs: dict[Any, Any]
) -> tuple[str, Any, dict[Any, Any]]:
    """Arguments of `compile_kernel` for a kernel built with `products(form)`."""
    if form == WGMMA:
        return name, function, configs
    # without this TileLang takes wgmma on SM90 all the same
    return f"{name}-{form}", function, {**configs, "tl.disable_wgmma": True}
