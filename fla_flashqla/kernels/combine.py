# SPDX-License-Identifier: MIT
"""The states that segments start from, and the gradients of those that they end with (SM90).

One block per (sequence, value head, 16 rows of S^T), which takes the segments in order, or from the last to the first:

    S^T of the first segment is the initial state, or 0
    S^T of segment j + 1 is S^T of segment j times Phi_j^T, if that was kept, + L_j^T

    dS^T of the last segment is the gradient of the final state, or 0
    dS^T of segment j - 1 is dS^T of segment j times Phi_j, if that was kept, + dL_j^T; dL of the last segment is all of it

out of what `segments.py` and `reverse.py` make. Products are of float32 by tensor cores: each factor is the sum of two tf32, and the
product of the two small parts is left out, which is 2^-22 of the whole. A block reads each element of Phi once, from memory to
registers, while the product of the segment before runs; S^T goes through shared memory from warp to warp. What nobody computed
is not read.
"""

from typing import Any

import tilelang
import tilelang.language as T

from fla_flashqla.kernels import device_functions
from fla_flashqla.kernels.prepare import HEAD

ROWS = 16  # a block
PASS_CONFIGS = {
    tilelang.PassConfigKey.TL_ENABLE_FAST_MATH: True,
    tilelang.PassConfigKey.TL_DISABLE_THREAD_STORAGE_SYNC: True,  # `combine.cuh` has the barriers
    "tl.disable_safe_memory_legalize": True,  # indices are in range by construction
}


def combine_kernel(reverse: bool = False) -> Any:
    """TileLang source of the combination; all is float32.

    Args:
        reverse (bool): whether it is of gradients, from the last segment to the first.

    `first` is what enters, in the layout of an initial state: that state, or the gradient of the final one.
    """
    D = HEAD
    f32 = "float32"
    source = device_functions("combine.cuh")
    combine = f"gdr_combine<{str(reverse).lower()}>"
    HV, NCU, NSEG, NFIRST, NS = (T.dynamic(n) for n in ("HV", "NCU", "NSEG", "NFIRST", "NS"))

    @T.prim_func
    def gdr_combine(
        local: T.Tensor((NSEG, HV, D, D), f32),
        phi: T.Tensor((NSEG, HV, D, D), f32),
        kept: T.Tensor((NSEG, HV), "int32"),
        cu: T.Tensor((NCU,), "int32"),
        first: T.Tensor((NFIRST,), f32),
        states: T.Tensor((NS,), f32),
        seqlen: T.int32,
        cu_step: T.int32,
        sequences: T.int32,
        value_heads: T.int32,
        segment: T.int32,
        use_first: T.int32,
        stride_k: T.int32,
        stride_v: T.int32,
    ):
        with T.Kernel(sequences * HV * (D // ROWS), threads=D * 2, prelude=source) as bx:
            tile = T.alloc_shared((ROWS, D + 8), f32, scope="shared")
            T.pdl_sync()
            T.pdl_trigger()
            bn = T.alloc_var("int32", init=T.truncdiv(bx // (D // ROWS), value_heads))
            T.call_extern(
                "handle",
                combine,
                T.address_of(local[0, 0, 0, 0]),
                T.address_of(phi[0, 0, 0, 0]),
                T.address_of(kept[0, 0]),
                T.address_of(first[0]),
                T.address_of(cu[0]),
                T.address_of(states[0]),
                T.address_of(tile[0, 0]),
                *(cu_step, seqlen, segment, bn, bx // (D // ROWS) - bn * value_heads, value_heads),
                *(bx % (D // ROWS) * ROWS, use_first, stride_k, stride_v),
            )

    return gdr_combine
