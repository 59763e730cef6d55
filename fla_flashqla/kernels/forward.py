# SPDX-License-Identifier: MIT
"""Forward recurrence over the chunks of one sequence and value head, state in registers (SM90).

One block per (value head, sequence). With the chunk quantities of `prepare.py` (A; e = exp(gc) and the l2norm factors
are folded into the gate vectors) it runs, per chunk of C = 64 tokens and in transposed form so that every chained product takes
its left operand from registers:

    X^T  = S^T K^T                                   [V, C]
    W^T  = V^T - X^T o x_j                           [V, C]     x = e rk
    U^T  = W^T A^T                                   [V, C]
    O^T  = (S^T Q^T) o o_j + U^T P^T                 [V, C]     o = scale e rq
    S^T <- exp(gc_C) S^T + (U^T o u_j) K             [V, K]     u = exp(gc_C - gc) rk
    P    = scale (Q K^T) o exp2(pr_i - pc_j), i >= j [C, C]     pr = log2(e rq), pc = log2(e / rk)

Roles: one or two math warpgroups keep 64 rows of S^T each (with one, a head's V is shared by two blocks) and run the chain
independently of each other; the next warpgroup makes P; in the last, one warp loads by TMA and one stores o. All numbers of
warps below are for two math warpgroups.

    barrier      arrivals             set by              awaited by        meaning
    full[s]      32 + bytes           loader              math, P           stage s (q k v A gates) is readable
    empty[s]     12 warps             math, P             loader            stage s may be overwritten
    p_full[s]    4 warps              P                   math              P of stage s is in shared memory
    p_empty[s]   8 warps              math                P                 P of stage s may be overwritten
    o_full[s]    8 warps              math                store warp        o of the chunk before is in shared memory
    o_empty[s]   1                    store warp          math              o tile s may be overwritten
    landed       1 + bytes            loader              loader            tail chunk has landed and can be cleaned

Stage s of chunk i is i % 2, its phase (i // 2) % 2. The rows of a tail chunk that lie behind the sequence belong to someone
else (or to nobody): the loader zeroes them in K and V before it hands the stage over, so that nothing they hold, NaN
included, reaches this sequence; A and the gate vectors are zero there by construction; Q needs no cleaning, since its rows
only reach rows of o that are never stored.
"""

from functools import partial
from pathlib import Path

import tilelang
import tilelang.language as T

from fla_flashqla.kernels.prepare import (
    CHUNK,
    GATE_DECAY,
    GATE_O,
    GATE_PC,
    GATE_PR,
    GATE_ROWS,
    GATE_U,
    GATE_X,
    HEAD,
)

STAGES = 2
# a thread, by role (math, P, load and store), for two and for one math warpgroup
REGISTERS = {2: (208, 64, 32), 1: (240, 168, 96)}

PASS_CONFIGS = {
    tilelang.PassConfigKey.TL_ENABLE_FAST_MATH: True,
    tilelang.PassConfigKey.TL_DISABLE_THREAD_STORAGE_SYNC: True,  # the barriers above are the whole protocol
    "tl.disable_shared_memory_reuse": True,  # the planner does not see concurrent warpgroups
    "tl.disable_safe_memory_legalize": True,  # indices are in range by construction
}


def forward_kernel(dtype: str, warpgroups: int = 2):
    """TileLang source of the forward recurrence.

    Args:
        dtype (str): of q, k, v and o, "bfloat16" or "float16".
        warpgroups (int): math warpgroups a block, 64 columns of V each: 2, or 1 to give a head to two blocks.
    """
    C, D, M, HD = CHUNK, HEAD, 64 * warpgroups, HEAD // 2
    MATH, SPLITS = 128 * warpgroups, 2 // warpgroups
    registers = REGISTERS[warpgroups]
    f32 = "float32"
    full_row = T.GemmWarpPolicy.FullRow
    matmul = partial(T.wgmma_gemm, transpose_B=True, policy=full_row)
    source = Path(__file__).with_suffix(".cuh").read_text()
    Tn, H, HV, NSLOT, NCU, NH0, NHT = (
        T.dynamic(n) for n in ("Tn", "H", "HV", "NSLOT", "NCU", "NH0", "NHT")
    )

    @T.prim_func
    def gdr_forward(
        q: T.Tensor((Tn, H, D), dtype),
        k: T.Tensor((Tn, H, D), dtype),
        v: T.Tensor((Tn, HV, D), dtype),
        a: T.Tensor((NSLOT, HV, C, C), dtype),
        gates: T.Tensor((NSLOT, HV, GATE_ROWS, C), f32),
        cu: T.Tensor((NCU,), "int32"),
        h0: T.Tensor((NH0,), f32),
        o: T.Tensor((Tn, HV, D), dtype),
        ht: T.Tensor((NHT,), f32),
        scale: T.float32,
        seqlen: T.int32,
        cu_step: T.int32,
        sequences: T.int32,
        value_heads: T.int32,
        group: T.int32,
        use_h0: T.int32,
        store_ht: T.int32,
        stride_k: T.int32,
        stride_v: T.int32,
    ):
        with T.Kernel(sequences * HV * SPLITS, threads=MATH + 256, prelude=source) as bx:
            q_s = T.alloc_shared((STAGES, C, D), dtype)
            k_s = T.alloc_shared((STAGES, C, D), dtype)
            v_s0 = T.alloc_shared((C, M), dtype)  # a slice of a common buffer would be read
            v_s1 = T.alloc_shared((C, M), dtype)  # element by element
            a_s = T.alloc_shared((STAGES, C, C), dtype)
            p_s = T.alloc_shared((STAGES, C, C), dtype)
            o_s0 = T.alloc_shared((C, M), dtype)
            o_s1 = T.alloc_shared((C, M), dtype)
            g_s = T.alloc_shared((STAGES, GATE_ROWS, C), f32)

            S = T.alloc_fragment((M, D), f32)
            Sa = T.alloc_fragment((M, HD), dtype)
            Sb = T.alloc_fragment((M, HD), dtype)
            X = T.alloc_fragment((M, C), f32)
            W = T.alloc_fragment((M, C), dtype)
            Ur = T.alloc_fragment((M, C), dtype)
            U16 = T.alloc_fragment((M, C), dtype)
            O = T.alloc_fragment((M, C), f32)
            Ot = T.alloc_fragment((C, M), dtype)
            Vt = T.alloc_fragment((C, M), dtype)
            P = T.alloc_fragment((C, C), f32)
            P16 = T.alloc_fragment((C, C), dtype)
            pr = T.alloc_fragment((C,), f32)
            pc = T.alloc_fragment((C,), f32)
            decay = T.alloc_local((1,), f32)
            # The accumulator layout of [M, C], transposed: copies become ldmatrix.trans and stmatrix.trans.
            transposed = T.Fragment(
                (C, M),
                forward_fn=lambda t, r: (
                    (r // 16) * 32 + (r % 8) * 4 + (t % 8) // 2,
                    (t // 8) * 4 + ((r % 16) // 8) * 2 + t % 2,
                ),
            )
            swizzled = tilelang.layout.make_swizzled_layout
            T.annotate_layout(
                {
                    Ot: transposed,
                    Vt: transposed,
                    v_s0: swizzled(v_s0),
                    v_s1: swizzled(v_s1),
                    o_s0: swizzled(o_s0),
                    o_s1: swizzled(o_s1),
                }
            )

            full = T.alloc_barrier(arrive_count=[32] * STAGES)
            empty = T.alloc_barrier(arrive_count=[MATH // 32 + 4] * STAGES)
            p_full = T.alloc_barrier(arrive_count=[4] * STAGES)
            p_empty = T.alloc_barrier(arrive_count=[MATH // 32] * STAGES)
            o_full = T.alloc_barrier(arrive_count=[MATH // 32] * STAGES)
            o_empty = T.alloc_barrier(arrive_count=[1] * STAGES)
            landed = T.alloc_barrier(arrive_count=1)

            tx = T.get_thread_binding()
            lane = tx % 32
            split = bx % SPLITS
            head = T.alloc_var("int32", init=bx // SPLITS)
            bn = T.alloc_var("int32", init=T.truncdiv(head, value_heads))
            bh = T.alloc_var("int32", init=head - bn * value_heads)
            bos = T.if_then_else(seqlen > 0, bn * seqlen, cu[bn * cu_step])
            length = T.if_then_else(seqlen > 0, seqlen, cu[(bn + 1) * cu_step] - bos)
            NT = T.ceildiv(length, C)
            state = T.cast(head, "int64") * (D * D) + split * M * stride_v

            if tx < MATH:
                T.set_max_nreg(registers[0], 1)
                if use_h0 > 0:
                    for r, c in T.Parallel(M, D):
                        S[r, c] = h0[state + r * stride_v + c * stride_k]
                else:
                    T.clear(S)
                T.clear(O)
                for r, c in T.Parallel(M, HD):
                    Sa[r, c] = S[r, c]
                for ii in T.serial(T.ceildiv(NT, 2)):
                    for s in T.unroll(2):
                        if ii * 2 + s < NT:
                            T.barrier_wait(full[s], ii % 2)
                            T.call_extern("handle", "gdr_order")
                            if s == 0:
                                T.copy(v_s0, Vt)
                            else:
                                T.copy(v_s1, Vt)
                            matmul(Sa, k_s[s, :, 0:HD], X, clear_accum=True)
                            for r, c in T.Parallel(M, HD):
                                Sb[r, c] = S[r, c + HD]
                            matmul(Sb, k_s[s, :, HD:D], X)
                            for r, c in T.Parallel(M, C):  # o of the chunk before leaves under X
                                Ot[c, r] = O[r, c]
                            matmul(Sa, q_s[s, :, 0:HD], O, clear_accum=True)
                            T.barrier_wait(o_empty[s], (ii + 1) % 2)
                            if s == 0:
                                T.copy(Ot, o_s0)
                            else:
                                T.copy(Ot, o_s1)
                            T.fence_proxy_async()
                            T.sync_warp()
                            if lane == 0:
                                T.barrier_arrive(o_full[s])
                            T.wait_wgmma(1)
                            for r, c in T.Parallel(M, C):
                                W[r, c] = Vt[c, r] - X[r, c] * g_s[s, GATE_X, c]
                            matmul(W, a_s[s, :, :], X, clear_accum=True)
                            matmul(Sb, q_s[s, :, HD:D], O)
                            decay[0] = g_s[s, GATE_DECAY, 0]
                            for r, c in T.Parallel(M, D):
                                S[r, c] *= decay[0]
                            T.wait_wgmma(1)
                            for r, c in T.Parallel(M, C):
                                Ur[r, c] = X[r, c] * g_s[s, GATE_U, c]
                            T.wgmma_gemm(Ur, k_s[s, :, :], S, policy=full_row)
                            T.copy(X, U16)
                            T.wait_wgmma(1)
                            for r, c in T.Parallel(M, C):
                                O[r, c] *= g_s[s, GATE_O, c]
                            T.barrier_wait(p_full[s], ii % 2)
                            matmul(U16, p_s[s, :, :], O)
                            T.wait_wgmma(1)
                            for r, c in T.Parallel(M, HD):
                                Sa[r, c] = S[r, c]
                            T.wait_wgmma(0)
                            T.sync_warp()
                            if lane == 0:
                                T.barrier_arrive(empty[s])
                                T.barrier_arrive(p_empty[s])
                for r, c in T.Parallel(M, C):
                    Ot[c, r] = O[r, c]
                T.barrier_wait(o_empty[NT % 2], (NT // 2 + 1) % 2)
                if NT % 2 == 0:
                    T.copy(Ot, o_s0)
                else:
                    T.copy(Ot, o_s1)
                T.fence_proxy_async()
                T.sync_warp()
                if lane == 0:
                    T.barrier_arrive(o_full[NT % 2])
                if store_ht > 0:
                    for r, c in T.Parallel(M, D):
                        ht[state + r * stride_v + c * stride_k] = S[r, c]
            elif tx < MATH + 128:
                T.set_max_nreg(registers[1], 0)
                zero = T.alloc_var("int32")
                for i in T.serial(NT):
                    zero = T.call_extern("int32", "gdr_opaque", 0)
                    T.barrier_wait(full[i % 2], (i // 2) % 2)
                    T.call_extern("handle", "gdr_order")
                    matmul(q_s[i % 2, :, :], k_s[i % 2, :, :], P, clear_accum=True)
                    for j in T.Parallel(C):
                        pr[j] = g_s[i % 2, GATE_PR, j]
                    for j in T.Parallel(C):
                        pc[j] = g_s[i % 2, GATE_PC, j]
                    T.wait_wgmma(0)
                    for r, c in T.Parallel(C, C):
                        P[r, c] *= scale * T.exp2(T.Select(c + zero <= r, pr[r] - pc[c], -1e30))
                    T.barrier_wait(p_empty[i % 2], (i // 2 + 1) % 2)
                    T.copy(P, P16)
                    T.copy(P16, p_s[i % 2, :, :])
                    T.fence_proxy_async()
                    T.sync_warp()
                    if lane == 0:
                        T.barrier_arrive(empty[i % 2])
                        T.barrier_arrive(p_full[i % 2])
            else:
                T.set_max_nreg(registers[2], 0)
                if tx < MATH + 160:
                    hq = T.alloc_var("int32", init=T.truncdiv(bh, group))
                    slot = T.alloc_var("int32", init=bos // C + bn)
                    for i in T.serial(NT):
                        s = i % STAGES
                        t0 = bos + i * C
                        T.barrier_wait(empty[s], (i // STAGES + 1) % 2)
                        T.tma_copy(gates[slot + i, bh, :, :], g_s[s, :, :], barrier=full[s])
                        T.tma_copy(a[slot + i, bh, :, :], a_s[s, :, :], barrier=full[s])
                        T.tma_copy(q[t0 : t0 + C, hq, :], q_s[s, :, :], barrier=full[s])
                        if length - i * C >= C:
                            T.tma_copy(k[t0 : t0 + C, hq, :], k_s[s, :, :], barrier=full[s])
                            if s == 0:
                                T.tma_copy(
                                    v[t0 : t0 + C, bh, split * M : split * M + M],
                                    v_s0,
                                    barrier=full[s],
                                )
                            else:
                                T.tma_copy(
                                    v[t0 : t0 + C, bh, split * M : split * M + M],
                                    v_s1,
                                    barrier=full[s],
                                )
                        else:
                            T.tma_copy(k[t0 : t0 + C, hq, :], k_s[s, :, :], barrier=landed)
                            if s == 0:
                                T.tma_copy(
                                    v[t0 : t0 + C, bh, split * M : split * M + M],
                                    v_s0,
                                    barrier=landed,
                                )
                            else:
                                T.tma_copy(
                                    v[t0 : t0 + C, bh, split * M : split * M + M],
                                    v_s1,
                                    barrier=landed,
                                )
                            T.sync_warp()
                            if lane == 0:
                                T.barrier_arrive(landed)
                            T.barrier_wait(landed, 0)
                            T.call_extern("handle", "gdr_order")
                            for r in T.serial(length - i * C, C):
                                for e in T.vectorized(4):
                                    k_s[s, r, lane * 4 + e] = 0
                                if s == 0:
                                    for e in T.vectorized(M // 32):
                                        v_s0[r, lane * (M // 32) + e] = 0
                                else:
                                    for e in T.vectorized(M // 32):
                                        v_s1[r, lane * (M // 32) + e] = 0
                            T.call_extern("handle", "gdr_order")
                            T.fence_proxy_async()
                        T.barrier_arrive(full[s])
                elif tx < MATH + 192:
                    v0 = split * M
                    NF = length // C
                    T.barrier_wait(o_full[0], 0)  # nothing came before chunk 0
                    T.sync_warp()
                    if lane == 0:
                        T.barrier_arrive(o_empty[0])
                    for i in T.serial(1, NF + 1):
                        T.barrier_wait(o_full[i % 2], (i // 2) % 2)
                        if i % 2 == 0:
                            T.copy(o_s0, o[bos + i * C - C : bos + i * C, bh, v0 : v0 + M])
                        else:
                            T.copy(o_s1, o[bos + i * C - C : bos + i * C, bh, v0 : v0 + M])
                        T.sync_warp()
                        if lane == 0:
                            T.barrier_arrive(o_empty[i % 2])
                    if NF < NT:  # the rows of a tail chunk alone
                        T.barrier_wait(o_full[NT % 2], (NT // 2) % 2)
                        T.call_extern("handle", "gdr_order")
                        for r in T.serial(length - NF * C):
                            for e in T.vectorized(M // 32):
                                if NT % 2 == 0:
                                    o[bos + NF * C + r, bh, v0 + lane * (M // 32) + e] = o_s0[
                                        r, lane * (M // 32) + e
                                    ]
                                else:
                                    o[bos + NF * C + r, bh, v0 + lane * (M // 32) + e] = o_s1[
                                        r, lane * (M // 32) + e
                                    ]

    return gdr_forward
