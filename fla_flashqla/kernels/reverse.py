# SPDX-License-Identifier: MIT
"""Reverse recurrence over the chunks of one sequence and value head, gradient of the state in registers.

One block per value head and sequence, or segment of one (`segments.py`), or per half of one, from the last chunk to the first.
With the chunk quantities of `prepare.py` (R and the gate vectors), per chunk of C = 64 tokens and in transposed form, as `forward.py`:

    ds     = dS^T, rounded: of the chunk's outgoing state   [V, K]     stored
    E^T    = dO^T P                                         [V, C]
    X^T    = dS^T K^T                                       [V, C]
    dY^T   = E^T + X^T o u_j                                [V, C]     u = exp(gc_C - gc) rk beta
    dW^T   = dY^T R                                         [V, C]     stored: dv = dW
    dS^T  <- exp(gc_C) dS^T + (dO^T o o_i) Q                [V, K]     o = scale e rq
             - (dW^T o x_i) K                                          x = e rk
    P      = (Q K^T) o exp2(pr_i - pc_j), i >= j            [C, C]     pr = log2(e rq), pc = log2(e / (rk scale beta))

Roles: one or two math warpgroups keep 64 rows of dS^T each and run the chain independently of each other; the next warpgroup
makes P; in the last, one warp loads q and k, one do, R and the gates, one stores dv, and one ds, all by TMA but for the rows of
dv in a tail chunk. All numbers of warps below are for two math warpgroups. Steps count chunks in the order of the kernel.

    barrier      arrivals             set by              awaited by        meaning
    full[s]      2 + bytes            load warps          math, P           stage s (q k R gates) and do are readable
    empty[s]     12 warps             math, P             load warps        stage s may be overwritten, see below
    p_full[h]    4 warps              P                   math              P of half h is in shared memory
    dv_full      8 warps              math                store warp        dv of a chunk is in shared memory
    dv_empty     1                    store warp          math              the tile of dv may be overwritten
    ds_full      8 warps              math                store warp        ds of a chunk is in shared memory
    ds_empty     1                    store warp          math              the tile of ds may be overwritten
    landed[w]    1 + bytes            load warp w         load warp w       tail chunk has landed and can be cleaned

Stage s of step i is i % 3, its phase (i // 3) % 2; there is room for two tiles of do and of P only, half h of step i is i % 2. E is
issued a step ahead, behind the product of R: when the math warps leave step i they have read do of step i + 1 and used up its
P. Their arrival at empty[s] at the end of step i thus frees, beside the stage, what do and P of step i + 3 overwrite, and it is
the one that the loads of step i + 3 await; P of step i + 3 is behind full of that step. For this to hold for step 2 too, math
and P warps arrive for a "step -1", math behind E of step 0: the loads of step i await completion number (i + 1) // 3 of empty[s].

Rows of a tail chunk (step 0) behind the sequence belong to someone else and can hold anything, NaN included. All of q, k and do are
contracted over tokens here, so the load warps zero these rows in all three; dW of them is zero then. P's rows are masked as well
as its upper triangle: the exponent pr_i is zero in these rows, but exp2(0 - pc_j) can be infinite.

What is said in `forward.py` of products with a left operand in registers, of fences and of early tests of barriers holds here:
ds leaves under the product of dO and Q, dv under that of dW and K. With two math warpgroups registers are scarce: ds is stored
before dY is made, and dO^T o o before E is issued, because ptxas otherwise has too few (C7512) or spills.

The launch is programmatic. Directly behind `states.py` (`beside`), which starts when all before it is complete and needs the
same inputs, blocks run beside its blocks as soon as those have started; otherwise they wait for what was launched before. Either way this
kernel does not end before that has.

With `local` the kernel is the mirror image of `segments.py`: it makes dL^T of every segment but the first of a sequence, and
stores neither ds nor dv. The gradient of S in front of a segment is

    dS^T <- dS^T Phi + dL^T

with Phi of `segments.py`, and dL is the chain from zero; but for the last segment it is from the gradient of the final state, so
that its Phi, and that of its tail chunk, is not needed. Where the log2 decays of the first w chunks sum up to at most
`threshold`, dL comes from those w alone (the fewest), from zero: what lies behind them is lost in front of the segment. The
bound is that of `segments.py`, for dS.
"""

import tilelang
import tilelang.language as T

from fla_flashqla.kernels import device_functions
from fla_flashqla.kernels.arguments import flat, optional, packed
from fla_flashqla.kernels.forward import PASS_CONFIGS, REGISTERS, STAGES, clean, land
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

__all__ = ["HALVES", "PASS_CONFIGS", "REGISTERS", "reverse_kernel"]
HALVES = 2  # tiles of do and of P


def reverse_kernel(dtype: str, warpgroups: int = 2, form: str = WGMMA, local: bool = False):
    """TileLang source of the reverse recurrence.

    Args:
        dtype (str): of q, k, do, r, ds and dv, "bfloat16" or "float16".
        warpgroups (int): math warpgroups a block, 64 columns of V each: 2, or 1 to give a head to two blocks.
        form (str): of products, see `products.py`.
        local (bool): whether it makes nothing but dL^T, `[V, K]` in the slots of segments, into dh0.
    """
    C, D, M, HD = CHUNK, HEAD, 64 * warpgroups, HEAD // 2
    MATH, SPLITS = 128 * warpgroups, 2 // warpgroups
    registers = REGISTERS[warpgroups]
    f32 = "float32"
    matmul, wait = products(form)
    source = device_functions("chain.cuh")
    B, L, H, HV, NSLOT, NCU = map(T.dynamic, ("B", "L", "H", "HV", "NSLOT", "NCU"))

    @T.prim_func
    def gdr_reverse(
        q: T.Tensor((B, L, H, D), dtype),
        k: T.Tensor((B, L, H, D), dtype),
        do: T.Tensor((B, L, HV, D), dtype),
        r: T.Tensor((NSLOT, HV, C, C), dtype),
        gates: T.Tensor((NSLOT, HV, GATE_ROWS, C), f32),
        cu: T.Tensor((NCU,), "int32"),
        dht: optional("dht"),
        ds: T.Tensor((NSLOT, HV, D, D), dtype),
        dv: T.Tensor((B, L, HV, D), dtype),
        dh0: optional("dh0"),
        seqlen: T.int32,
        cu_step: T.int32,
        sequences: T.int32,
        value_heads: T.int32,
        group: T.int32,
        use_dht: T.int32,
        store_dh0: T.int32,
        stride_k: T.int32,
        stride_v: T.int32,
        longest_first: T.int32,
        segment: T.int32,
        slots: T.int32,
        threshold: T.float32,
        beside: T.int32,
    ):
        q, k, do, dv = packed(q), packed(k), packed(do), packed(dv)
        dht, dh0 = flat(dht), flat(dh0)
        with T.Kernel(slots * HV * SPLITS, threads=MATH + 256, prelude=source) as bx:
            q_s = T.alloc_shared((STAGES, C, D), dtype)
            k_s = T.alloc_shared((STAGES, C, D), dtype)
            r_s = T.alloc_shared((STAGES, C, C), dtype)
            do_s = T.alloc_shared((HALVES, C, M), dtype)
            p_s = T.alloc_shared((HALVES, C, C), dtype)
            dv_s = T.alloc_shared((C, M), dtype)
            ds_s = T.alloc_shared((M, D), dtype)
            g_s = T.alloc_shared((STAGES, CHAIN_ROWS, C), f32)

            S = T.alloc_fragment((M, D), f32)  # dS^T
            Sa = T.alloc_fragment((M, HD), dtype)
            Sb = T.alloc_fragment((M, HD), dtype)
            X = T.alloc_fragment((M, C), f32)
            E = T.alloc_fragment((M, C), f32)
            Z = T.alloc_fragment((M, C), dtype)  # dO^T
            Zo = T.alloc_fragment((M, C), dtype)
            Y = T.alloc_fragment((M, C), dtype)  # dY^T
            Wx = T.alloc_fragment((M, C), dtype)
            P = T.alloc_fragment((C, C), f32)
            P16 = T.alloc_fragment((C, C), dtype)
            decay = T.alloc_local((1,), f32)
            swizzled = tilelang.layout.make_swizzled_layout
            T.annotate_layout({do_s: swizzled(do_s), dv_s: swizzled(dv_s), ds_s: swizzled(ds_s)})

            full = T.alloc_barrier(arrive_count=[2] * STAGES)
            empty = T.alloc_barrier(arrive_count=[MATH // 32 + 4] * STAGES)
            p_full = T.alloc_barrier(arrive_count=[4] * HALVES)
            dv_full = T.alloc_barrier(arrive_count=MATH // 32)
            dv_empty = T.alloc_barrier(arrive_count=1)
            ds_full = T.alloc_barrier(arrive_count=MATH // 32)
            ds_empty = T.alloc_barrier(arrive_count=1)
            landed = T.alloc_barrier(arrive_count=[1] * 2)

            if local:
                T.pdl_sync()
                T.pdl_trigger()
            elif beside == 0:
                T.pdl_sync()
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
            begin = T.alloc_var("int32", init=at[0])  # whose dht the chain begins with,
            begins = T.alloc_var("int32", init=use_dht)  # if with any
            if local:
                first = T.alloc_var("int32", init=0)  # chunks that decide
                if at[5] > 0:
                    first = T.call_extern(
                        "int32",
                        "gdr_decisive",
                        T.address_of(gates[at[3], bh, GATE_DECAY, 2]),
                        value_heads * (GATE_ROWS * C),
                        T.ceildiv(length, C),
                        threshold,
                    )
                    if first > 0:
                        length = T.min(length, first * C)
                else:
                    length = 0
                if (first > 0) | (at[4] == 0):
                    begins = 0
            else:
                if segment > 0:
                    begin = piece
                # the state in front of a sequence; one register across the loop
                end = T.alloc_var(
                    "int32", init=T.if_then_else(at[5] == 0, at[0] * value_heads + bh, -1)
                )
            NT = T.ceildiv(length, C)

            ready = T.alloc_var("int32")
            p_ready = T.alloc_var("int32")
            ds_ready = T.alloc_var("int32")
            dv_ready = T.alloc_var("int32")
            if tx < MATH:
                T.set_max_nreg(registers[0], 1)
                state = T.alloc_var(
                    "int64",
                    init=T.cast(begin * value_heads + bh, "int64") * (D * D) + split * M * stride_v,
                )
                if (begins > 0) & (at[4] >= 0):
                    for d, c in T.Parallel(M, D):
                        S[d, c] = dht[state + d * stride_v + c * stride_k]
                else:
                    T.clear(S)
                for d, c in T.Parallel(M, HD):
                    Sa[d, c] = S[d, c]
                for d, c in T.Parallel(M, HD):
                    Sb[d, c] = S[d, c + HD]
                if NT > 0:
                    T.barrier_wait(full[0], 0)
                    matmul(Sa, k_s[0, :, 0:HD], X, transpose_B=True, clear_accum=True)
                    matmul(Sb, k_s[0, :, HD:D], X, transpose_B=True)
                    T.call_extern("handle", "gdr_load_t", do_s.access_ptr("r"), Z.access_ptr("w"))
                    T.call_extern(
                        "handle",
                        "gdr_scale_" + dtype,
                        Z.access_ptr("r"),
                        g_s.access_ptr("r", offset=GATE_O * C),
                        Zo.access_ptr("w"),
                    )
                    T.barrier_wait(p_full[0], 0)
                    matmul(Z, p_s[0, :, :], E, clear_accum=True)
                    decay[0] = g_s[0, GATE_DECAY, 0]
                    for d, c in T.Parallel(M, D):
                        S[d, c] *= decay[0]
                    wait(0)
                    T.sync_warp()
                    if lane == 0:
                        T.barrier_arrive(empty[STAGES - 1])
                for ii in T.serial(T.ceildiv(NT, STAGES)):
                    for st in T.unroll(STAGES):
                        if ii * STAGES + st < NT:
                            n = (st + 1) % STAGES  # stage of the next chunk, and its phase
                            n_phase = (ii + (st + 1) // STAGES) % 2
                            half = (ii * STAGES + st + 1) % HALVES  # of the next chunk
                            p_phase = (ii * STAGES + st + 1) // HALVES % 2
                            out_phase = (ii * STAGES + st + 1) % 2
                            matmul(Zo, q_s[st, :, :], S)
                            if not local:
                                ds_ready = T.call_extern(
                                    "int32", "gdr_test", T.address_of(ds_empty[0]), out_phase
                                )
                            ready = T.call_extern(
                                "int32", "gdr_test", T.address_of(full[n]), n_phase
                            )
                            p_ready = T.call_extern(
                                "int32", "gdr_test", T.address_of(p_full[half]), p_phase
                            )
                            if not local:
                                if ds_ready == 0:
                                    T.barrier_wait(ds_empty, out_phase)
                                # pointers "to read" keep TileLang from adding the fence that the store warps have
                                T.call_extern(
                                    "handle",
                                    "gdr_store_state",
                                    Sa.access_ptr("r"),
                                    Sb.access_ptr("r"),
                                    ds_s.access_ptr("r"),
                                    M,
                                )
                                T.sync_warp()
                                if lane == 0:
                                    T.barrier_arrive(ds_full)
                            T.call_extern(
                                "handle",
                                "gdr_dy_" + dtype,
                                E.access_ptr("r"),
                                X.access_ptr("r"),
                                g_s.access_ptr("r", offset=(st * CHAIN_ROWS + GATE_U) * C),
                                Y.access_ptr("w"),
                            )
                            matmul(Y, r_s[st, :, :], X, clear_accum=True)
                            if (ready == 0) & (ii * STAGES + st + 1 < NT):
                                T.barrier_wait(full[n], n_phase)
                            wait(1)  # Zo is used up
                            # behind the last chunk all of the next one is whatever memory holds, for nobody
                            T.call_extern(
                                "handle",
                                "gdr_load_t",
                                do_s.access_ptr("r", offset=half * C * M),
                                Z.access_ptr("w"),
                            )
                            T.call_extern(
                                "handle",
                                "gdr_scale_" + dtype,
                                Z.access_ptr("r"),
                                g_s.access_ptr("r", offset=(n * CHAIN_ROWS + GATE_O) * C),
                                Zo.access_ptr("w"),
                            )
                            if (p_ready == 0) & (ii * STAGES + st + 1 < NT):
                                T.barrier_wait(p_full[half], p_phase)
                            matmul(Z, p_s[half, :, :], E, clear_accum=True)
                            if not local:
                                dv_ready = T.call_extern(
                                    "int32", "gdr_test", T.address_of(dv_empty[0]), out_phase
                                )
                            wait(1)
                            for d, c in T.Parallel(M, C):
                                Wx[d, c] = -X[d, c] * g_s[st, GATE_X, c]
                            matmul(Wx, k_s[st, :, :], S)
                            if not local:
                                if dv_ready == 0:
                                    T.barrier_wait(dv_empty, out_phase)
                                T.call_extern(
                                    "handle",
                                    "gdr_store_" + dtype,
                                    X.access_ptr("r"),
                                    dv_s.access_ptr("r"),
                                )
                                T.sync_warp()
                                if lane == 0:
                                    T.barrier_arrive(dv_full)
                            decay[0] = T.if_then_else(
                                ii * STAGES + st + 1 < NT, g_s[n, GATE_DECAY, 0], 1.0
                            )
                            wait(0)
                            T.sync_warp()
                            if lane == 0:
                                T.barrier_arrive(empty[st])
                            for d, c in T.Parallel(M, HD):
                                Sa[d, c] = S[d, c]
                            matmul(Sa, k_s[n, :, 0:HD], X, transpose_B=True, clear_accum=True)
                            for d, c in T.Parallel(M, HD):
                                Sb[d, c] = S[d, c + HD]
                            matmul(Sb, k_s[n, :, HD:D], X, transpose_B=True)
                            for d, c in T.Parallel(M, D):
                                S[d, c] *= decay[0]
                            wait(0)
                if local:
                    if NT > 0:
                        state = T.cast(bx // SPLITS, "int64") * (D * D)
                        for d, c in T.Parallel(M, D):
                            dh0[state + (split * M + d) * D + c] = S[d, c]
                else:
                    if (store_dh0 > 0) & (end >= 0):
                        state = T.cast(end, "int64") * (D * D) + split * M * stride_v
                        for d, c in T.Parallel(M, D):
                            dh0[state + d * stride_v + c * stride_k] = S[d, c]
            elif tx < MATH + 128:
                T.set_max_nreg(registers[1], 0)
                if (NT > 0) & (lane == 0):
                    T.barrier_arrive(empty[STAGES - 1])
                for i in T.serial(NT):
                    st = i % STAGES
                    T.barrier_wait(full[st], i // STAGES % 2)
                    T.call_extern("handle", "gdr_order")
                    matmul(q_s[st, :, :], k_s[st, :, :], P, transpose_B=True, clear_accum=True)
                    wait(0)
                    T.call_extern(
                        "handle",
                        "gdr_decay",
                        P.access_ptr("rw"),
                        g_s.access_ptr("r", offset=(st * CHAIN_ROWS + GATE_PR) * C),
                        g_s.access_ptr("r", offset=(st * CHAIN_ROWS + GATE_PC) * C),
                        length - (NT - 1 - i) * C,
                    )
                    T.copy(P, P16)
                    T.copy(P16, p_s[i % HALVES, :, :])
                    T.call_extern("handle", "gdr_order")  # the fence names no memory
                    T.fence_proxy_async()
                    T.sync_warp()
                    if lane == 0:
                        T.barrier_arrive(empty[st])
                        T.barrier_arrive(p_full[i % HALVES])
            else:
                T.set_max_nreg(registers[2], 0)
                hq = T.alloc_var("int32", init=T.truncdiv(bh, group))
                slot = T.alloc_var("int32", init=at[3])
                v0 = split * M
                if tx < MATH + 160:
                    t0 = T.alloc_var("int32", init=bos + NT * C)
                    eos = T.alloc_var("int32", init=bos + length)
                    for i in T.serial(NT):
                        st = i % STAGES
                        t0 -= C
                        T.barrier_wait(empty[st], ((i + 1) // STAGES + 1) % 2)
                        if eos - t0 >= C:
                            T.tma_copy(q[t0 : t0 + C, hq, :], q_s[st, :, :], barrier=full[st])
                            T.tma_copy(k[t0 : t0 + C, hq, :], k_s[st, :, :], barrier=full[st])
                        else:
                            T.tma_copy(q[t0 : t0 + C, hq, :], q_s[st, :, :], barrier=landed[0])
                            T.tma_copy(k[t0 : t0 + C, hq, :], k_s[st, :, :], barrier=landed[0])
                            land(landed, 0)
                            clean(q_s, D, st, eos - t0)
                            clean(k_s, D, st, eos - t0)
                        T.sync_warp()
                        if lane == 0:
                            T.barrier_arrive(full[st])
                elif tx < MATH + 192:
                    for i in T.serial(NT):
                        st = i % STAGES
                        half = i % HALVES
                        c = NT - 1 - i
                        t0 = bos + c * C
                        T.barrier_wait(empty[st], ((i + 1) // STAGES + 1) % 2)
                        T.tma_copy(
                            gates[slot + c, bh, 0:CHAIN_ROWS, :], g_s[st, :, :], barrier=full[st]
                        )
                        if length - c * C >= C:
                            T.tma_copy(
                                do[t0 : t0 + C, bh, v0 : v0 + M], do_s[half, :, :], barrier=full[st]
                            )
                        else:
                            T.tma_copy(
                                do[t0 : t0 + C, bh, v0 : v0 + M],
                                do_s[half, :, :],
                                barrier=landed[1],
                            )
                            land(landed, 1)
                            clean(do_s, M, half, length - c * C)
                        T.tma_copy(r[slot + c, bh, :, :], r_s[st, :, :], barrier=full[st])
                        T.sync_warp()
                        if lane == 0:
                            T.barrier_arrive(full[st])
                elif not local:
                    if tx < MATH + 224:
                        tail = NT - length // C  # 1 if step 0 is a tail chunk, else 0
                        if tail > 0:  # its rows alone
                            T.barrier_wait(dv_full, 0)
                            T.call_extern("handle", "gdr_order")
                            for t in T.serial(length % C):
                                for e in T.vectorized(M // 32):
                                    dv[bos + (NT - 1) * C + t, bh, v0 + lane * (M // 32) + e] = (
                                        dv_s[t, lane * (M // 32) + e]
                                    )
                            T.call_extern("handle", "gdr_order")
                            T.sync_warp()
                            if lane == 0:
                                T.barrier_arrive(dv_empty)
                        for i in T.serial(NT - tail):
                            t0 = bos + (NT - 1 - tail - i) * C
                            T.barrier_wait(dv_full, (i + tail) % 2)
                            T.fence_proxy_async()
                            T.copy(dv_s, dv[t0 : t0 + C, bh, v0 : v0 + M])
                            T.sync_warp()
                            if lane == 0:
                                T.barrier_arrive(dv_empty)
                    else:
                        for i in T.serial(NT):
                            T.barrier_wait(ds_full, i % 2)
                            T.fence_proxy_async()
                            T.copy(ds_s, ds[slot + NT - 1 - i, bh, v0 : v0 + M, :])
                            T.sync_warp()
                            if lane == 0:
                                T.barrier_arrive(ds_empty)
                        T.pdl_sync()  # who comes behind this kernel comes behind `states.py`, too

    return gdr_reverse
