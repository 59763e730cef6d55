# SPDX-License-Identifier: MIT
"""Maps of the segments of long sequences, all segments side by side.

Sequences are cut into segments (slots: `gdr_segment` in `chain.cuh`). What a segment makes of the state that enters it is affine,
and rows of S^T are independent of each other:

    S^T <- S^T Phi^T + L^T

L is what the segment makes of a state of zero; Phi^T is what it makes of the identity, in the place of S^T, if V is zero. So one
block takes the 128 rows of L^T and one those of Phi^T, for every segment but the last of a sequence, of which nobody asks; both run
the chain of `forward.py` without o. `combine.py` makes of them the states that segments start from. The backward pass wants the
gradients of the states that segments end with, too, which the same Phi maps (`reverse.py`): `wanted` is the sum of FORWARD and
REVERSE, and without FORWARD there is no L.

Where a segment's last chunks decay enough, what came before them is lost anyway: if the bounds on log2 norms (DECAY in `prepare.py`) of
its last w chunks sum up to at most `threshold`, the chain of L starts with those w (the fewest), from zero, and Phi counts as zero. The
state that is passed on then lacks Phi' S, Phi' being the map of those w chunks and S the state before them, and |Phi' S| <= 2^threshold |S|
in the 2-norm, since each token's map is exp(g) (I - beta k k^T). For the
gradients, which come from the other side, the segment's first chunks decide. Each block decides for itself, from the gates; a
NaN among them keeps Phi. A threshold of -inf keeps all. `kept` says for what Phi counts, as `wanted`; where it is 0, Phi is not computed.

Roles: two math warpgroups keep 64 rows each and run the chain independently of each other; in the last warpgroup one warp loads k,
one v, R and the gates, by TMA. There are no tail chunks, since only the last segment of a sequence can have one. For Phi, V is
never loaded: its tiles are zeroed once.

    barrier      arrivals             set by              awaited by        meaning
    full[s]      2 + bytes            load warps          math              stage s (k v R gates) is readable
    empty[s]     8 warps              math                load warps        stage s may be overwritten

Stage s of chunk i is i % 3, its phase (i // 3) % 2. All wait for the end of `prepare.py`, whose gates decide what there is to do.
"""

from functools import partial

import tilelang
import tilelang.language as T

from fla_flashqla.kernels import device_functions
from fla_flashqla.kernels.arguments import packed
from fla_flashqla.kernels.forward import PASS_CONFIGS, STAGES
from fla_flashqla.kernels.prepare import (
    CHAIN_ROWS,
    CHUNK,
    GATE_DECAY,
    GATE_ROWS,
    GATE_U,
    GATE_X,
    HEAD,
)
from fla_flashqla.kernels.products import WGMMA, products

__all__ = ["PASS_CONFIGS", "REGISTERS", "segments_kernel"]
REGISTERS = (216, 72)  # a thread, by role (math, load)
LOCAL, PHI = range(2)  # what a block computes
FORWARD, REVERSE = 1, 2  # what Phi is to map: states, gradients of states


def segments_kernel(dtype: str, form: str = WGMMA):
    """TileLang source of the segments' maps.

    Args:
        dtype (str): of k, v and r, "bfloat16" or "float16".
        form (str): of products, see `products.py`.
    """
    C, D, M, HD, MATH = CHUNK, HEAD, HEAD, HEAD // 2, 256
    f32 = "float32"
    accumulate, wait = products(form)
    matmul = partial(accumulate, transpose_B=True)
    source = device_functions("chain.cuh")
    sizes = ("B", "L", "H", "HV", "NSLOT", "NCU", "NSEG")
    B, L, H, HV, NSLOT, NCU, NSEG = (T.dynamic(n) for n in sizes)

    @T.prim_func
    def gdr_segments(
        k: T.Tensor((B, L, H, D), dtype),
        v: T.Tensor((B, L, HV, D), dtype),
        r: T.Tensor((NSLOT, HV, C, C), dtype),
        gates: T.Tensor((NSLOT, HV, GATE_ROWS, C), f32),
        cu: T.Tensor((NCU,), "int32"),
        local: T.Tensor((NSEG, HV, D, D), f32),
        phi: T.Tensor((NSEG, HV, D, D), f32),
        kept: T.Tensor((NSEG, HV), "int32"),
        threshold: T.float32,
        seqlen: T.int32,
        cu_step: T.int32,
        sequences: T.int32,
        value_heads: T.int32,
        group: T.int32,
        segment: T.int32,
        wanted: T.int32,
    ):
        k, v = packed(k), packed(v)
        with T.Kernel(NSEG * HV * 2, threads=MATH + 128, prelude=source) as bx:
            k_s = T.alloc_shared((STAGES, C, D), dtype)
            v_s = T.alloc_shared((STAGES, C, M), dtype)
            r_s = T.alloc_shared((STAGES, C, C), dtype)
            g_s = T.alloc_shared((STAGES, CHAIN_ROWS, C), f32)

            S = T.alloc_fragment((M, D), f32)
            Sa = T.alloc_fragment((M, HD), dtype)
            Sb = T.alloc_fragment((M, HD), dtype)
            X = T.alloc_fragment((M, C), f32)
            W = T.alloc_fragment((M, C), dtype)
            Yu = T.alloc_fragment((M, C), dtype)
            vt = T.alloc_local((16,), "uint32")  # V^T, two elements each, in the order of X
            xg = T.alloc_local((16,), f32)  # the gates x of its columns
            decay = T.alloc_local((1,), f32)
            T.annotate_layout({v_s: tilelang.layout.make_swizzled_layout(v_s)})

            full = T.alloc_barrier(arrive_count=[2] * STAGES)
            empty = T.alloc_barrier(arrive_count=[MATH // 32] * STAGES)

            T.pdl_sync()
            T.pdl_trigger()
            tx = T.get_thread_binding()
            lane = tx % 32
            what = bx % 2
            piece = T.alloc_var("int32", init=T.truncdiv(bx // 2, value_heads))
            bh = T.alloc_var("int32", init=bx // 2 - piece * value_heads)
            at = T.alloc_local((6,), "int32")
            T.call_extern(
                "handle",
                "gdr_segment",
                T.address_of(cu[0]),
                *(cu_step, seqlen, sequences, segment, 0, piece),
                at.access_ptr("w"),
            )
            bos = T.alloc_var("int32", init=at[1])
            slot = T.alloc_var("int32", init=at[3])
            NT = T.alloc_var("int32", init=0)
            last = T.alloc_var("int32", init=0)  # chunks that decide what the segment passes on,
            first = T.alloc_var("int32", init=0)  # and what it passes back
            keep = T.alloc_var("int32", init=0)
            if at[4] == 0:
                NT = segment // C
                stride = value_heads * (GATE_ROWS * C)
                last = T.call_extern(
                    "int32",
                    "gdr_decisive",
                    T.address_of(gates[slot + NT - 1, bh, GATE_DECAY, 2]),
                    *(-stride, NT, threshold),
                )
                if what == LOCAL:
                    if last > 0:
                        bos += (NT - last) * C
                        slot += NT - last
                        NT = last
                    if (wanted & FORWARD) == 0:
                        NT = 0
                else:
                    first = T.call_extern(
                        "int32",
                        "gdr_decisive",
                        T.address_of(gates[slot, bh, GATE_DECAY, 2]),
                        *(stride, NT, threshold),
                    )
                    keep = T.if_then_else(((wanted & FORWARD) > 0) & (last == 0), FORWARD, 0)
                    # nobody asks what the first segment passes back
                    if (wanted >= REVERSE) & (at[5] > 0) & (first == 0):
                        keep += REVERSE
                    if tx == 0:
                        kept[piece, bh] = keep
                    if keep == 0:
                        NT = 0

            ready = T.alloc_var("int32")
            if tx < MATH:
                T.set_max_nreg(REGISTERS[0], 1)
                for d, c in T.Parallel(M, D):
                    S[d, c] = T.if_then_else((what == PHI) & (d == c), 1.0, 0.0)
                for d, c in T.Parallel(M, HD):
                    Sa[d, c] = S[d, c]
                # ahead of the branch, otherwise ptxas adds a wait (C7517)
                for d, c in T.Parallel(M, HD):
                    Sb[d, c] = S[d, c + HD]
                if NT > 0:
                    T.barrier_wait(full[0], 0)
                    matmul(Sa, k_s[0, :, 0:HD], X, clear_accum=True)
                    matmul(Sb, k_s[0, :, HD:D], X)
                    T.call_extern(
                        "handle",
                        "gdr_load",
                        v_s.access_ptr("r"),
                        g_s.access_ptr("r", offset=GATE_X * C),
                        vt.access_ptr("w"),
                        xg.access_ptr("w"),
                    )
                    wait(0)
                for ii in T.serial(T.ceildiv(NT, STAGES)):
                    for st in T.unroll(STAGES):
                        if ii * STAGES + st < NT:
                            n = (st + 1) % STAGES  # stage of the next chunk, and its phase
                            n_phase = (ii + (st + 1) // STAGES) % 2
                            T.call_extern(
                                "handle",
                                "gdr_w_" + dtype,
                                X.access_ptr("r"),
                                vt.access_ptr("r"),
                                xg.access_ptr("r"),
                                W.access_ptr("w"),
                            )
                            matmul(W, r_s[st, :, :], X, clear_accum=True)
                            decay[0] = g_s[st, GATE_DECAY, 0]
                            for d, c in T.Parallel(M, D):
                                S[d, c] *= decay[0]
                            wait(0)
                            for d, c in T.Parallel(M, C):
                                Yu[d, c] = X[d, c] * g_s[st, GATE_U, c]
                            accumulate(Yu, k_s[st, :, :], S)
                            ready = T.call_extern(
                                "int32", "gdr_test", T.address_of(full[n]), n_phase
                            )
                            if (ready == 0) & (ii * STAGES + st + 1 < NT):
                                T.barrier_wait(full[n], n_phase)
                            wait(0)
                            for d, c in T.Parallel(M, HD):
                                Sa[d, c] = S[d, c]
                            # behind the last chunk this and gdr_load take whatever the stage holds, for nobody
                            matmul(Sa, k_s[n, :, 0:HD], X, clear_accum=True)
                            for d, c in T.Parallel(M, HD):
                                Sb[d, c] = S[d, c + HD]
                            matmul(Sb, k_s[n, :, HD:D], X)
                            T.sync_warp()
                            if lane == 0:
                                T.barrier_arrive(empty[st])
                            T.call_extern(
                                "handle",
                                "gdr_load",
                                v_s.access_ptr("r", offset=n * C * M),
                                g_s.access_ptr("r", offset=(n * CHAIN_ROWS + GATE_X) * C),
                                vt.access_ptr("w"),
                                xg.access_ptr("w"),
                            )
                            wait(0)
                if NT > 0:
                    if what == LOCAL:
                        for d, c in T.Parallel(M, D):
                            local[piece, bh, d, c] = S[d, c]
                    else:
                        for d, c in T.Parallel(M, D):
                            phi[piece, bh, d, c] = S[d, c]
            else:
                T.set_max_nreg(REGISTERS[1], 0)
                hq = T.alloc_var("int32", init=T.truncdiv(bh, group))
                if tx < MATH + 32:
                    for i in T.serial(NT):
                        st = i % STAGES
                        t0 = bos + i * C
                        T.barrier_wait(empty[st], (i // STAGES + 1) % 2)
                        T.tma_copy(k[t0 : t0 + C, hq, :], k_s[st, :, :], barrier=full[st])
                        T.sync_warp()
                        if lane == 0:
                            T.barrier_arrive(full[st])
                elif tx < MATH + 64:
                    if what == PHI:
                        for st in T.unroll(STAGES):
                            for t in T.serial(T.if_then_else(NT > 0, C, 0)):
                                for e in T.vectorized(M // 32):
                                    v_s[st, t, lane * (M // 32) + e] = 0
                        T.call_extern("handle", "gdr_order")
                    for i in T.serial(NT):
                        st = i % STAGES
                        t0 = bos + i * C
                        T.barrier_wait(empty[st], (i // STAGES + 1) % 2)
                        T.tma_copy(
                            gates[slot + i, bh, 0:CHAIN_ROWS, :], g_s[st, :, :], barrier=full[st]
                        )
                        T.tma_copy(r[slot + i, bh, :, :], r_s[st, :, :], barrier=full[st])
                        if what == LOCAL:
                            T.tma_copy(v[t0 : t0 + C, bh, :], v_s[st, :, :], barrier=full[st])
                        T.sync_warp()
                        if lane == 0:
                            T.barrier_arrive(full[st])

    return gdr_segments
