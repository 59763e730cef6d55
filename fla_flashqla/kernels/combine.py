# SPDX-License-Identifier: MIT
"""The states that segments start from, out of the maps of `segments.py` (SM90).

One block per (sequence, value head, 16 rows of S^T), which takes the segments in order:

    S^T of the first segment is the initial state, or 0
    S^T of segment j + 1 is S^T of segment j times Phi_j^T, if that was kept, + L_j^T

Products are of float32 by tensor cores: each factor is the sum of two tf32, and the product of the two small parts is left out,
which is 2^-22 of the whole. A block reads each element of Phi^T once, from memory to registers, while the product of the segment
before runs; S^T goes through shared memory from warp to warp. Maps that nobody computed are not read.
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


def combine_kernel() -> Any:
    """TileLang source of the combination; all is float32."""
    D = HEAD
    f32 = "float32"
    source = device_functions("combine.cuh")
    HV, NCU, NSEG, NH0, NS = (T.dynamic(n) for n in ("HV", "NCU", "NSEG", "NH0", "NS"))

    @T.prim_func
    def gdr_combine(
        maps: T.Tensor((NSEG, HV, 2, D, D), f32),
        kept: T.Tensor((NSEG, HV), "int32"),
        cu: T.Tensor((NCU,), "int32"),
        h0: T.Tensor((NH0,), f32),
        starts: T.Tensor((NS,), f32),
        seqlen: T.int32,
        cu_step: T.int32,
        sequences: T.int32,
        value_heads: T.int32,
        segment: T.int32,
        use_h0: T.int32,
        stride_k: T.int32,
        stride_v: T.int32,
    ):
        with T.Kernel(sequences * HV * (D // ROWS), threads=D * 2, prelude=source) as bx:
            tile = T.alloc_shared((ROWS, D + 4), f32, scope="shared")
            T.pdl_sync()
            T.pdl_trigger()
            bn = T.alloc_var("int32", init=T.truncdiv(bx // (D // ROWS), value_heads))
            T.call_extern(
                "handle",
                "gdr_combine",
                T.address_of(maps[0, 0, 0, 0, 0]),
                T.address_of(kept[0, 0]),
                T.address_of(h0[0]),
                T.address_of(cu[0]),
                T.address_of(starts[0]),
                T.address_of(tile[0, 0]),
                *(cu_step, seqlen, segment, bn, bx // (D // ROWS) - bn * value_heads, value_heads),
                *(bx % (D // ROWS) * ROWS, use_h0, stride_k, stride_v),
            )

    return gdr_combine
