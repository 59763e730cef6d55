# SPDX-License-Identifier: MIT
"""The states that segments start from, and the gradients of those that they end with.

One block per (direction, sequence, value head, 16 rows of S^T), which takes the segments in order, or from the last to the first:

    S^T of the first segment is the initial state, or 0
    S^T of segment j + 1 is S^T of segment j times Phi_j^T, if that was kept, + L_j^T

    dS^T of the last segment is the gradient of the final state, or 0
    dS^T of segment j - 1 is dS^T of segment j times Phi_j, if that was kept, + dL_j^T; dL of the last segment is all of it

out of what `segments.py` and `reverse.py` make. The sums are of float32, the products by tensor cores: each factor is the sum of two
bfloat16, and the product of the two small parts is left out; what is lost is about 2^-17 of a product. A block reads each element of
Phi once, from memory to registers, while the product of the segment before runs; S^T goes through shared memory from warp to warp.
What nobody computed is not read.
"""

from typing import Any

import tilelang
import tilelang.language as T

from fla_flashqla.kernels import device_functions
from fla_flashqla.kernels.arguments import optional
from fla_flashqla.kernels.prepare import HEAD

ROWS = 16  # a block
THREADS = 256
PASS_CONFIGS = {
    tilelang.PassConfigKey.TL_ENABLE_FAST_MATH: True,
    tilelang.PassConfigKey.TL_DISABLE_THREAD_STORAGE_SYNC: True,  # `combine.cuh` has the barriers
    "tl.disable_safe_memory_legalize": True,  # indices are in range by construction
}


def combine_kernel() -> Any:
    """TileLang source of the combination; all is float32.

    `wanted` is as in `segments.py`: FORWARD takes `local` and `first`, REVERSE `back_local` and `back_first`. What enters, `first`, is in
    the layout of an initial state: that state, or the gradient of the final one; so is what is made, `made` and `back_made`.
    """
    D = HEAD
    f32 = "float32"
    source = device_functions("combine.cuh")
    HV, NCU, NSEG = (T.dynamic(n) for n in ("HV", "NCU", "NSEG"))

    @T.prim_func
    def gdr_combine(
        local: T.Tensor((NSEG, HV, D, D), f32),
        back_local: T.Tensor((NSEG, HV, D, D), f32),
        phi: T.Tensor((NSEG, HV, D, D), f32),
        kept: T.Tensor((NSEG, HV), "int32"),
        cu: T.Tensor((NCU,), "int32"),
        first: optional("first"),
        back_first: optional("back_first"),
        made: T.Tensor((NSEG, HV, D, D), f32),
        back_made: T.Tensor((NSEG, HV, D, D), f32),
        seqlen: T.int32,
        cu_step: T.int32,
        sequences: T.int32,
        value_heads: T.int32,
        segment: T.int32,
        wanted: T.int32,
        directions: T.int32,
        use_first: T.int32,
        use_back_first: T.int32,
        stride_k: T.int32,
        stride_v: T.int32,
    ):
        with T.Kernel(
            directions * sequences * HV * (D // ROWS), threads=THREADS, prelude=source
        ) as bx:
            # two buffers of left operands: 16 terms, two parts, lanes, registers
            tile = T.alloc_shared((2, D // 16, 2, 32, 4), "uint32", scope="shared")
            T.pdl_sync()
            T.pdl_trigger()
            T.call_extern(
                "handle",
                "gdr_combine_both",
                *(T.address_of(local[0, 0, 0, 0]), T.address_of(back_local[0, 0, 0, 0])),
                *(T.address_of(phi[0, 0, 0, 0]), T.address_of(kept[0, 0]), T.address_of(cu[0])),
                *(T.address_of(first[0, 0, 0, 0]), T.address_of(back_first[0, 0, 0, 0])),
                *(T.address_of(made[0, 0, 0, 0]), T.address_of(back_made[0, 0, 0, 0])),
                T.address_of(tile[0, 0, 0, 0, 0]),
                *(cu_step, seqlen, segment, sequences, value_heads, bx, wanted),
                *(use_first, use_back_first, stride_k, stride_v),
            )

    return gdr_combine
