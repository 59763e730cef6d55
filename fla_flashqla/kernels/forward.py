# SPDX-License-Identifier: MIT
"""Forward recurrence over the chunks of one sequence and value head, state in registers.

One block per (value head, sequence). With the chunk quantities of `prepare.py` (R; e = exp(gc) and the l2norm factors
are folded into the gate vectors) it runs, per chunk of C = 64 tokens and in transposed form so that every chained product takes
its left operand from registers:

    X^T  = S^T K^T                                          [V, C]
    W^T  = V^T - X^T o x_j                                  [V, C]     x = e rk
    Y^T  = W^T R^T                                          [V, C]     the errors before beta
    O^T  = (S^T Q^T) o o_j + Y^T P^T                        [V, C]     o = scale e rq
    S^T <- exp(gc_C) S^T + (Y^T o u_j) K                    [V, K]     u = exp(gc_C - gc) rk beta
    P    = (Q K^T) o exp2(pr_i - pc_j), i >= j              [C, C]     pr = log2(e rq), pc = log2(e / (rk scale beta))

Roles: one or two math warpgroups keep 64 rows of S^T each (with one, a head's V is shared by two blocks) and run the chain
independently of each other; the next warpgroup makes P; in the last, one warp loads q and k, one v, R and the gates, and one
stores o, all by TMA but for the rows of o in a tail chunk. All numbers of warps below are for two math warpgroups.

    barrier      arrivals             set by              awaited by        meaning
    full[s]      2 + bytes            load warps          math, P           stage s (q k v R gates) is readable
    empty[s]     12 warps             math, P             load warps        stage s and its P may be overwritten
    p_full[s]    4 warps              P                   math              P of stage s is in shared memory
    o_full       8 warps              math                store warp        o of a chunk is in shared memory
    o_empty      1                    store warp          math              the tile of o may be overwritten
    landed[w]    1 + bytes            load warp w         load warp w       tail chunk has landed and can be cleaned

Stage s of chunk i is i % 3, its phase (i // 3) % 2. P of chunk i + 3 is written behind full of that chunk, which is behind empty
of chunk i: P needs no barrier of its own for that. The rows of a tail chunk that lie behind the sequence belong to someone
else (or to nobody): the load warps zero them in K and V before they hand the stage over, so that nothing they hold, NaN
included, reaches this sequence; by construction R is the identity and the gate vectors are zero there; Q needs no cleaning,
since its rows only reach rows of o that are never stored.

A math warp seems to be held up while it issues products with a left operand in registers (docs/forward.md), so that little of its
other work hides behind its own products. The loop is therefore turned: X of the next chunk is issued as soon as S is known, and
o leaves under it. The tile of o is fenced for TMA by the warp that stores it, behind its wait for o_full, not by those that write
it: the fence lies on the path from their writes to the copy. Barriers are tested well before they are needed, because an answer
takes about 80 cycles, and awaited only if the test failed.

Launched programmatically behind `prepare.py`: only the warp that loads what that makes (R, the gates) waits for its end. Everything
else that is read was complete before `prepare.py` began, which waits for all before it.
"""

from functools import partial

import tilelang
import tilelang.language as T

from fla_flashqla.kernels import device_functions
from fla_flashqla.kernels.arguments import flat, optional, packed
from fla_flashqla.kernels.prepare import (
    CHAIN_ROWS,
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
from fla_flashqla.kernels.products import WGMMA, products

STAGES = 3
# a thread, by role (math, P, load and store), for two and for one math warpgroup
REGISTERS = {2: (208, 64, 32), 1: (240, 168, 96)}

PASS_CONFIGS = {
    tilelang.PassConfigKey.TL_ENABLE_FAST_MATH: True,
    tilelang.PassConfigKey.TL_DISABLE_THREAD_STORAGE_SYNC: True,  # the barriers above are the whole protocol
    "tl.disable_shared_memory_reuse": True,  # the planner does not see concurrent warpgroups
    "tl.disable_safe_memory_legalize": True,  # indices are in range by construction
    "tl.disable_buffer_init_check": True,  # it does not see what device functions write
}


@T.macro
def land(landed, w):
    """Await the tail chunk that load warp `w` has asked for."""
    T.sync_warp()
    if T.get_thread_binding() % 32 == 0:
        T.barrier_arrive(landed[w])
    T.barrier_wait(landed[w], 0)
    T.call_extern("handle", "gdr_order")


@T.macro
def clean(tile, columns, s, rows):
    """Zero the rows of a landed tail chunk from `rows` on, by one warp."""
    lane = T.get_thread_binding() % 32
    for t in T.serial(rows, CHUNK):
        for e in T.vectorized(columns // 32):
            tile[s, t, lane * (columns // 32) + e] = 0
    T.call_extern("handle", "gdr_order")
    T.fence_proxy_async()


def forward_kernel(dtype: str, warpgroups: int = 2, form: str = WGMMA):
    """TileLang source of the forward recurrence.

    Args:
        dtype (str): of q, k, v and o, "bfloat16" or "float16".
        warpgroups (int): math warpgroups a block, 64 columns of V each: 2, or 1 to give a head to two blocks.
        form (str): of products, see `products.py`.
    """
    C, D, M, HD = CHUNK, HEAD, 64 * warpgroups, HEAD // 2
    MATH, SPLITS = 128 * warpgroups, 2 // warpgroups
    registers = REGISTERS[warpgroups]
    f32 = "float32"
    accumulate, wait = products(form)
    matmul = partial(accumulate, transpose_B=True)
    source = device_functions("chain.cuh")
    B, L, H, HV, NSLOT, NCU = (T.dynamic(n) for n in ("B", "L", "H", "HV", "NSLOT", "NCU"))

    @T.prim_func
    def gdr_forward(
        q: T.Tensor((B, L, H, D), dtype),
        k: T.Tensor((B, L, H, D), dtype),
        v: T.Tensor((B, L, HV, D), dtype),
        r: T.Tensor((NSLOT, HV, C, C), dtype),
        gates: T.Tensor((NSLOT, HV, GATE_ROWS, C), f32),
        cu: T.Tensor((NCU,), "int32"),
        h0: optional("h0"),
        o: T.Tensor((B, L, HV, D), dtype),
        ht: optional("ht"),
        seqlen: T.int32,
        cu_step: T.int32,
        sequences: T.int32,
        value_heads: T.int32,
        group: T.int32,
        use_h0: T.int32,
        store_ht: T.int32,
        stride_k: T.int32,
        stride_v: T.int32,
        longest_first: T.int32,
        segment: T.int32,
        slots: T.int32,
    ):
        q, k, v, o = packed(q), packed(k), packed(v), packed(o)
        h0, ht = flat(h0), flat(ht)
        with T.Kernel(slots * HV * SPLITS, threads=MATH + 256, prelude=source) as bx:
            q_s = T.alloc_shared((STAGES, C, D), dtype)
            k_s = T.alloc_shared((STAGES, C, D), dtype)
            v_s = T.alloc_shared((STAGES, C, M), dtype)
            r_s = T.alloc_shared((STAGES, C, C), dtype)
            p_s = T.alloc_shared((STAGES, C, C), dtype)
            o_s = T.alloc_shared((C, M), dtype)
            g_s = T.alloc_shared((STAGES, CHAIN_ROWS, C), f32)

            S = T.alloc_fragment((M, D), f32)
            Sa = T.alloc_fragment((M, HD), dtype)
            Sb = T.alloc_fragment((M, HD), dtype)
            X = T.alloc_fragment((M, C), f32)
            W = T.alloc_fragment((M, C), dtype)
            Yu = T.alloc_fragment((M, C), dtype)
            Y16 = T.alloc_fragment((M, C), dtype)
            O = T.alloc_fragment((M, C), f32)
            vt = T.alloc_local((16,), "uint32")  # V^T, two elements each, in the order of X
            xg = T.alloc_local((16,), f32)  # the gates x of its columns
            P = T.alloc_fragment((C, C), f32)
            P16 = T.alloc_fragment((C, C), dtype)
            decay = T.alloc_local((1,), f32)
            swizzled = tilelang.layout.make_swizzled_layout
            T.annotate_layout({v_s: swizzled(v_s), o_s: swizzled(o_s)})

            full = T.alloc_barrier(arrive_count=[2] * STAGES)
            empty = T.alloc_barrier(arrive_count=[MATH // 32 + 4] * STAGES)
            p_full = T.alloc_barrier(arrive_count=[4] * STAGES)
            o_full = T.alloc_barrier(arrive_count=MATH // 32)
            o_empty = T.alloc_barrier(arrive_count=1)
            landed = T.alloc_barrier(arrive_count=[1] * 2)

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
            bn = T.alloc_var("int32", init=at[0])
            bos = T.alloc_var("int32", init=at[1])  # the first token, of a segment too
            length = T.alloc_var("int32", init=at[2])
            NT = T.ceildiv(length, C)

            ready = T.alloc_var("int32")
            p_ready = T.alloc_var("int32")
            o_ready = T.alloc_var("int32")
            if tx < MATH:
                T.set_max_nreg(registers[0], 1)
                if segment > 0:
                    T.pdl_sync()  # `combine.py` has made the states that segments start from
                    bn = piece
                state = T.alloc_var(
                    "int64",
                    init=T.cast(bn * value_heads + bh, "int64") * (D * D) + split * M * stride_v,
                )
                if (use_h0 > 0) & (at[4] >= 0):
                    for m, c in T.Parallel(M, D):
                        S[m, c] = h0[state + m * stride_v + c * stride_k]
                else:
                    T.clear(S)
                for m, c in T.Parallel(M, HD):
                    Sa[m, c] = S[m, c]
                if NT > 0:
                    T.barrier_wait(full[0], 0)
                    matmul(Sa, k_s[0, :, 0:HD], X, clear_accum=True)
                    for m, c in T.Parallel(M, HD):
                        Sb[m, c] = S[m, c + HD]
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
                    for s in T.unroll(STAGES):
                        if ii * STAGES + s < NT:
                            n = (s + 1) % STAGES  # stage of the next chunk, and its phase
                            n_phase = (ii + (s + 1) // STAGES) % 2
                            o_phase = (ii * STAGES + s + 1) % 2
                            matmul(Sa, q_s[s, :, 0:HD], O, clear_accum=True)
                            T.call_extern(
                                "handle",
                                "gdr_w_" + dtype,
                                X.access_ptr("r"),
                                vt.access_ptr("r"),
                                xg.access_ptr("r"),
                                W.access_ptr("w"),
                            )
                            matmul(W, r_s[s, :, :], X, clear_accum=True)
                            decay[0] = g_s[s, GATE_DECAY, 0]
                            matmul(Sb, q_s[s, :, HD:D], O)
                            for m, c in T.Parallel(M, D):
                                S[m, c] *= decay[0]
                            wait(1)
                            for m, c in T.Parallel(M, C):
                                Yu[m, c] = X[m, c] * g_s[s, GATE_U, c]
                            accumulate(Yu, k_s[s, :, :], S)
                            p_ready = T.call_extern(
                                "int32", "gdr_test", T.address_of(p_full[s]), ii % 2
                            )
                            T.copy(X, Y16)
                            wait(1)
                            for m, c in T.Parallel(M, C):
                                O[m, c] *= g_s[s, GATE_O, c]
                            if p_ready == 0:
                                T.barrier_wait(p_full[s], ii % 2)
                            ready = T.call_extern(
                                "int32", "gdr_test", T.address_of(full[n]), n_phase
                            )
                            matmul(Y16, p_s[s, :, :], O)
                            if (ready == 0) & (ii * STAGES + s + 1 < NT):
                                T.barrier_wait(full[n], n_phase)
                            wait(1)
                            for m, c in T.Parallel(M, HD):
                                Sa[m, c] = S[m, c]
                            o_ready = T.call_extern(
                                "int32", "gdr_test", T.address_of(o_empty[0]), o_phase
                            )
                            # behind the last chunk this and gdr_load take whatever the stage holds, for nobody
                            matmul(Sa, k_s[n, :, 0:HD], X, clear_accum=True)
                            for m, c in T.Parallel(M, HD):
                                Sb[m, c] = S[m, c + HD]
                            matmul(Sb, k_s[n, :, HD:D], X)
                            wait(2)
                            if o_ready == 0:
                                T.barrier_wait(o_empty, o_phase)
                            # pointers "to read" keep TileLang from adding the fence that the store warp has
                            T.call_extern(
                                "handle",
                                "gdr_store_" + dtype,
                                O.access_ptr("r"),
                                o_s.access_ptr("r"),
                            )
                            T.sync_warp()
                            if lane == 0:
                                T.barrier_arrive(empty[s])
                                T.barrier_arrive(o_full)
                            T.call_extern(
                                "handle",
                                "gdr_load",
                                v_s.access_ptr("r", offset=n * C * M),
                                g_s.access_ptr("r", offset=(n * CHAIN_ROWS + GATE_X) * C),
                                vt.access_ptr("w"),
                                xg.access_ptr("w"),
                            )
                            wait(0)
                if (store_ht > 0) & (at[4] > 0):
                    state = (
                        T.cast(at[0] * value_heads + bh, "int64") * (D * D) + split * M * stride_v
                    )
                    for m, c in T.Parallel(M, D):
                        ht[state + m * stride_v + c * stride_k] = S[m, c]
            elif tx < MATH + 128:
                T.set_max_nreg(registers[1], 0)
                for i in T.serial(NT):
                    s = i % STAGES
                    T.barrier_wait(full[s], i // STAGES % 2)
                    T.call_extern("handle", "gdr_order")
                    matmul(q_s[s, :, :], k_s[s, :, :], P, clear_accum=True)
                    wait(0)
                    T.call_extern(
                        "handle",
                        "gdr_decay",
                        P.access_ptr("rw"),
                        g_s.access_ptr("r", offset=(s * CHAIN_ROWS + GATE_PR) * C),
                        g_s.access_ptr("r", offset=(s * CHAIN_ROWS + GATE_PC) * C),
                        C,
                    )
                    T.copy(P, P16)
                    T.copy(P16, p_s[s, :, :])
                    T.call_extern("handle", "gdr_order")  # the fence names no memory
                    T.fence_proxy_async()
                    T.sync_warp()
                    if lane == 0:
                        T.barrier_arrive(empty[s])
                        T.barrier_arrive(p_full[s])
            else:
                T.set_max_nreg(registers[2], 0)
                hq = T.alloc_var("int32", init=T.truncdiv(bh, group))
                slot = T.alloc_var("int32", init=at[3])
                v0 = split * M
                if tx < MATH + 160:
                    for i in T.serial(NT):
                        s = i % STAGES
                        t0 = bos + i * C
                        T.barrier_wait(empty[s], (i // STAGES + 1) % 2)
                        T.tma_copy(q[t0 : t0 + C, hq, :], q_s[s, :, :], barrier=full[s])
                        if length - i * C >= C:
                            T.tma_copy(k[t0 : t0 + C, hq, :], k_s[s, :, :], barrier=full[s])
                        else:
                            T.tma_copy(k[t0 : t0 + C, hq, :], k_s[s, :, :], barrier=landed[0])
                            land(landed, 0)
                            clean(k_s, D, s, length - i * C)
                        T.sync_warp()
                        if lane == 0:
                            T.barrier_arrive(full[s])
                elif tx < MATH + 192:
                    T.pdl_sync()
                    for i in T.serial(NT):
                        s = i % STAGES
                        t0 = bos + i * C
                        T.barrier_wait(empty[s], (i // STAGES + 1) % 2)
                        T.tma_copy(
                            gates[slot + i, bh, 0:CHAIN_ROWS, :], g_s[s, :, :], barrier=full[s]
                        )
                        T.tma_copy(r[slot + i, bh, :, :], r_s[s, :, :], barrier=full[s])
                        if length - i * C >= C:
                            T.tma_copy(
                                v[t0 : t0 + C, bh, v0 : v0 + M], v_s[s, :, :], barrier=full[s]
                            )
                        else:
                            T.tma_copy(
                                v[t0 : t0 + C, bh, v0 : v0 + M], v_s[s, :, :], barrier=landed[1]
                            )
                            land(landed, 1)
                            clean(v_s, M, s, length - i * C)
                        T.sync_warp()
                        if lane == 0:
                            T.barrier_arrive(full[s])
                elif tx < MATH + 224:
                    NF = length // C
                    for i in T.serial(NF):
                        T.barrier_wait(o_full, i % 2)
                        T.fence_proxy_async()
                        T.copy(o_s, o[bos + i * C : bos + i * C + C, bh, v0 : v0 + M])
                        T.sync_warp()
                        if lane == 0:
                            T.barrier_arrive(o_empty)
                    if NF < NT:  # the rows of a tail chunk alone
                        T.barrier_wait(o_full, NF % 2)
                        T.call_extern("handle", "gdr_order")
                        for m in T.serial(length - NF * C):
                            for e in T.vectorized(M // 32):
                                o[bos + NF * C + m, bh, v0 + lane * (M // 32) + e] = o_s[
                                    m, lane * (M // 32) + e
                                ]

    return gdr_forward
