# SPDX-License-Identifier: MIT
"""Forward recurrence once more, for the backward pass: the state at the start of every chunk, and Y.

One block per value head and sequence, or segment of one (`segments.py`), or per half of one. With the chunk quantities of
`prepare.py` (R and the gate vectors), per chunk of C = 64 tokens, as `forward.py` but without o:

    s    = S^T, rounded                              [V, K]     stored
    X^T  = S^T K^T                                   [V, C]
    W^T  = V^T - X^T o x_j                           [V, C]     x = e rk
    Y^T  = W^T R^T                                   [V, C]     Y stored
    S^T <- exp(gc_C) S^T + (Y^T o u_j) K             [V, K]     u = exp(gc_C - gc) rk beta

Roles: one or two math warpgroups keep 64 rows of S^T each and run the chain independently of each other; in the last warpgroup
one warp loads k, one v, R and the gates, one stores Y, and one s, all by TMA but for the rows of Y in a tail chunk. The
fragments of S that are stored are the left operands of X: they leave under the product of Y, and Y leaves under that of S. All
numbers of warps below are for two math warpgroups.

    barrier      arrivals             set by              awaited by        meaning
    full[s]      2 + bytes            load warps          math              stage s (k v R gates) is readable
    empty[s]     8 warps              math                load warps        stage s may be overwritten
    y_full       8 warps              math                store warp        Y of a chunk is in shared memory
    y_empty      1                    store warp          math              the tile of Y may be overwritten
    s_full       8 warps              math                store warp        s of a chunk is in shared memory
    s_empty      1                    store warp          math              the tile of s may be overwritten
    landed[w]    1 + bytes            load warp w         load warp w       tail chunk has landed and can be cleaned

Stage s of chunk i is i % 3, its phase (i // 3) % 2. The rows of a tail chunk behind the sequence are zeroed in K and V by the load
warps; with zero gates there Y is zero behind the sequence, whatever those rows held. Both tiles that leave are fenced for TMA by
the warps that store them, as in `forward.py`.
"""

from functools import partial

import tilelang
import tilelang.language as T

from fla_flashqla.kernels import device_functions
from fla_flashqla.kernels.arguments import flat, optional, packed
from fla_flashqla.kernels.forward import PASS_CONFIGS, STAGES, clean, land
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

__all__ = ["PASS_CONFIGS", "REGISTERS", "states_kernel"]
# a thread, by role (math, load and store), for two math warpgroups; with one, there are enough for all
REGISTERS = (216, 72)


def states_kernel(dtype: str, warpgroups: int = 2, form: str = WGMMA):
    """TileLang source of the recurrence that stores states and Y.

    Args:
        dtype (str): of k, v, r, s and y, "bfloat16" or "float16".
        warpgroups (int): math warpgroups a block, 64 columns of V each: 2, or 1 to give a head to two blocks.
        form (str): of products, see `products.py`.
    """
    C, D, M, HD = CHUNK, HEAD, 64 * warpgroups, HEAD // 2
    MATH, SPLITS = 128 * warpgroups, 2 // warpgroups
    f32 = "float32"
    accumulate, wait = products(form)
    matmul = partial(accumulate, transpose_B=True)
    source = device_functions("chain.cuh")
    B, L, H, HV, NSLOT, NCU = map(T.dynamic, ("B", "L", "H", "HV", "NSLOT", "NCU"))

    @T.prim_func
    def gdr_states(
        k: T.Tensor((B, L, H, D), dtype),
        v: T.Tensor((B, L, HV, D), dtype),
        r: T.Tensor((NSLOT, HV, C, C), dtype),
        gates: T.Tensor((NSLOT, HV, GATE_ROWS, C), f32),
        cu: T.Tensor((NCU,), "int32"),
        h0: optional("h0"),
        s: T.Tensor((NSLOT, HV, D, D), dtype),
        y: T.Tensor((B, L, HV, D), dtype),
        seqlen: T.int32,
        cu_step: T.int32,
        sequences: T.int32,
        value_heads: T.int32,
        group: T.int32,
        use_h0: T.int32,
        stride_k: T.int32,
        stride_v: T.int32,
        longest_first: T.int32,
        segment: T.int32,
        slots: T.int32,
    ):
        k, v, y, h0 = packed(k), packed(v), packed(y), flat(h0)
        with T.Kernel(slots * HV * SPLITS, threads=MATH + 128, prelude=source) as bx:
            k_s = T.alloc_shared((STAGES, C, D), dtype)
            v_s = T.alloc_shared((STAGES, C, M), dtype)
            r_s = T.alloc_shared((STAGES, C, C), dtype)
            s_s = T.alloc_shared((M, D), dtype)
            y_s = T.alloc_shared((C, M), dtype)
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
            swizzled = tilelang.layout.make_swizzled_layout
            T.annotate_layout({v_s: swizzled(v_s), y_s: swizzled(y_s), s_s: swizzled(s_s)})

            full = T.alloc_barrier(arrive_count=[2] * STAGES)
            empty = T.alloc_barrier(arrive_count=[MATH // 32] * STAGES)
            y_full = T.alloc_barrier(arrive_count=MATH // 32)
            y_empty = T.alloc_barrier(arrive_count=1)
            s_full = T.alloc_barrier(arrive_count=MATH // 32)
            s_empty = T.alloc_barrier(arrive_count=1)
            landed = T.alloc_barrier(arrive_count=[1] * 2)

            T.pdl_trigger()  # `reverse.py` can take the SMs that are free: it needs nothing from here
            tx = T.get_thread_binding()
            lane = tx % 32
            split = bx % SPLITS
            piece = T.alloc_var("int32", init=T.truncdiv(bx // SPLITS, value_heads))
            bh = T.alloc_var("int32", init=bx // SPLITS - piece * value_heads)
            at = T.alloc_local((6,), "int32")
            T.call_extern(
                "handle",
                "gdr_segment",
                T.address_of(cu[0]),
                *(cu_step, seqlen, sequences, segment),
                longest_first if warpgroups == 2 else 0,  # halves all run at once
                piece,
                at.access_ptr("w"),
            )
            bos = T.alloc_var("int32", init=at[1])  # the first token, of a segment too
            length = T.alloc_var("int32", init=at[2])
            NT = T.ceildiv(length, C)

            ready = T.alloc_var("int32")
            s_ready = T.alloc_var("int32")
            y_ready = T.alloc_var("int32")
            if tx < MATH:
                if warpgroups == 2:
                    T.set_max_nreg(REGISTERS[0], 1)
                start = T.alloc_var("int32", init=T.if_then_else(segment > 0, piece, at[0]))
                state = T.alloc_var(
                    "int64",
                    init=T.cast(start * value_heads + bh, "int64") * (D * D) + split * M * stride_v,
                )
                if (use_h0 > 0) & (at[4] >= 0):
                    for d, c in T.Parallel(M, D):
                        S[d, c] = h0[state + d * stride_v + c * stride_k]
                else:
                    T.clear(S)
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
                            out_phase = (ii * STAGES + st + 1) % 2
                            T.call_extern(
                                "handle",
                                "gdr_w_" + dtype,
                                X.access_ptr("r"),
                                vt.access_ptr("r"),
                                xg.access_ptr("r"),
                                W.access_ptr("w"),
                            )
                            matmul(W, r_s[st, :, :], X, clear_accum=True)
                            s_ready = T.call_extern(
                                "int32", "gdr_test", T.address_of(s_empty[0]), out_phase
                            )
                            decay[0] = g_s[st, GATE_DECAY, 0]
                            for d, c in T.Parallel(M, D):
                                S[d, c] *= decay[0]
                            if s_ready == 0:
                                T.barrier_wait(s_empty, out_phase)
                            # pointers "to read" keep TileLang from adding the fence that the store warps have
                            T.call_extern(
                                "handle",
                                "gdr_store_state",
                                Sa.access_ptr("r"),
                                Sb.access_ptr("r"),
                                s_s.access_ptr("r"),
                                M,
                            )
                            T.sync_warp()
                            if lane == 0:
                                T.barrier_arrive(s_full)
                            wait(0)
                            for d, c in T.Parallel(M, C):
                                Yu[d, c] = X[d, c] * g_s[st, GATE_U, c]
                            accumulate(Yu, k_s[st, :, :], S)
                            y_ready = T.call_extern(
                                "int32", "gdr_test", T.address_of(y_empty[0]), out_phase
                            )
                            ready = T.call_extern(
                                "int32", "gdr_test", T.address_of(full[n]), n_phase
                            )
                            if y_ready == 0:
                                T.barrier_wait(y_empty, out_phase)
                            T.call_extern(
                                "handle",
                                "gdr_store_" + dtype,
                                X.access_ptr("r"),
                                y_s.access_ptr("r"),
                            )
                            T.sync_warp()
                            if lane == 0:
                                T.barrier_arrive(y_full)
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
            else:
                if warpgroups == 2:
                    T.set_max_nreg(REGISTERS[1], 0)
                hq = T.alloc_var("int32", init=T.truncdiv(bh, group))
                slot = T.alloc_var("int32", init=at[3])
                v0 = split * M
                if tx < MATH + 32:
                    for i in T.serial(NT):
                        st = i % STAGES
                        t0 = bos + i * C
                        T.barrier_wait(empty[st], (i // STAGES + 1) % 2)
                        if length - i * C >= C:
                            T.tma_copy(k[t0 : t0 + C, hq, :], k_s[st, :, :], barrier=full[st])
                        else:
                            T.tma_copy(k[t0 : t0 + C, hq, :], k_s[st, :, :], barrier=landed[0])
                            land(landed, 0)
                            clean(k_s, D, st, length - i * C)
                        T.sync_warp()
                        if lane == 0:
                            T.barrier_arrive(full[st])
                elif tx < MATH + 64:
                    for i in T.serial(NT):
                        st = i % STAGES
                        t0 = bos + i * C
                        T.barrier_wait(empty[st], (i // STAGES + 1) % 2)
                        T.tma_copy(
                            gates[slot + i, bh, 0:CHAIN_ROWS, :], g_s[st, :, :], barrier=full[st]
                        )
                        T.tma_copy(r[slot + i, bh, :, :], r_s[st, :, :], barrier=full[st])
                        if length - i * C >= C:
                            T.tma_copy(
                                v[t0 : t0 + C, bh, v0 : v0 + M], v_s[st, :, :], barrier=full[st]
                            )
                        else:
                            T.tma_copy(
                                v[t0 : t0 + C, bh, v0 : v0 + M], v_s[st, :, :], barrier=landed[1]
                            )
                            land(landed, 1)
                            clean(v_s, M, st, length - i * C)
                        T.sync_warp()
                        if lane == 0:
                            T.barrier_arrive(full[st])
                elif tx < MATH + 96:
                    NF = length // C
                    for i in T.serial(NF):
                        T.barrier_wait(y_full, i % 2)
                        T.fence_proxy_async()
                        T.copy(y_s, y[bos + i * C : bos + i * C + C, bh, v0 : v0 + M])
                        T.sync_warp()
                        if lane == 0:
                            T.barrier_arrive(y_empty)
                    if NF < NT:  # the rows of a tail chunk alone
                        T.barrier_wait(y_full, NF % 2)
                        T.call_extern("handle", "gdr_order")
                        for t in T.serial(length - NF * C):
                            for e in T.vectorized(M // 32):
                                y[bos + NF * C + t, bh, v0 + lane * (M // 32) + e] = y_s[
                                    t, lane * (M // 32) + e
                                ]
                else:
                    for i in T.serial(NT):
                        T.barrier_wait(s_full, i % 2)
                        T.fence_proxy_async()
                        T.copy(s_s, s[slot + i, bh, v0 : v0 + M, :])
                        T.sync_warp()
                        if lane == 0:
                            T.barrier_arrive(s_empty)

    return gdr_states
