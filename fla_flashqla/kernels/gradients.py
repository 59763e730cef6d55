# SPDX-License-Identifier: MIT
"""Gradients of q, k, g and beta from the states of both chains, all chunks side by side.

The work is cut into items, one per (chunk, q/k head). A block takes every `blocks`-th of them, so that loads of the next run under the
products of the last, and goes through the value heads of each. Per chunk of C = 64 tokens and value head, with S the state at its start,
dS the gradient of its outgoing state, Y the error before beta and dW = dv (`states.py`, `reverse.py`), the gate vectors of
`prepare.py` (pr, gc), beta without its sign, as there, and b = beta, but 1 / 64 where beta is smaller than that:

    F1   = scale (dO Y^T) o exp2(pr_i - gc_j), i >= j             [C, C]     warpgroup 0
    dQ   = (dO S^T) o o_i + (F1 o beta_j) K                       [C, K]     warpgroup 0
    F2   = -(dW Y^T) o exp2(gc_i + 2 log2 rk_i - gc_j), i > j     [C, C]     warpgroup 1
    dK+  = -(dW S^T) o x_i + (F2 o beta_j) K                      [C, K]     warpgroup 1
    Z    = (Y dS^T) o exp2(log2 decay - gc_i) b_i                 [C, K]     warpgroup 2
    dK~  = Z + (F1 o b_j)^T Q + (F2 o b_j)^T K                    [C, K]     warpgroup 2
    dK-  = dK~ o beta_i / b_i,   dbeta_i = +-K_i . dK~_i / b_i               warpgroup 2
    dgc_i = Q_i . dQ_i + K_i . dK+_i - K_i . dK-_i                           sum warp
    last  = decay <S, dS> + sum_j K_j . Z_j beta_j / b_j                     dot warps, sum warp
    dg_i  = last + sum of dgc_j over j >= i in the chunk                     sum warp

and summed over the value heads, with the l2norm's derivative where it is on (r^2 = 1 / (|q|^2 + eps), likewise for k):

    dq = dQ - r^2 q (q . dQ)        dk = dK - r^2 k (k . dK)        dK = dK+ + dK-

and where `prepare.py` made g and beta from g0 and beta0 (`raw_g` and `raw_beta`, as there), the sum warp goes on to

    dg0 = -dg exp(A_log) sigmoid(g0 + dt_bias)       dbeta0 = raw_beta dbeta sigmoid'(beta0)
    shares[slot, 0] = sum_i dg_i g_i                 shares[slot, 1] = sum_i dg0_i

in place of dg and dbeta; the shares, summed over the slots, are the gradients of A_log and dt_bias. A slot without a chunk has 0
there, which the load warp writes.

Two tokens' share of dgc enters the sum of dg with both signs and cancels unless g lies between them. That holds after rounding as
well, if the rounded F of the row's side and of the column's are the same numbers: therefore b, which is beta there and can yet
be divided by (docs/backward.md).

Roles: three warpgroups as named above; in the fourth, one warp loads, one makes sums and stores dg and dbeta, two take the inner
product of S and dS. Everything is 32-bit but for operands of products.

    barrier        arrivals              set by             awaited by      meaning
    told[m]        1                     load warp          all others      which chunk item m is
    heard[m]       15 warps              all others         load warp       this may be overwritten
    full[s]        1 + bytes             load warp          math            stage s (dO dW Y gates) is readable
    empty[s]       12 warps              math               load warp       stage s may be overwritten
    s_full         1 + bytes             load warp          0, 1, dot       S is readable
    s_empty        10 warps              0, 1, dot          load warp       S may be overwritten
    ds_full        1 + bytes             load warp          2, dot          dS is readable
    ds_empty       6 warps               2, dot             load warp       dS may be overwritten
    qk_full        1 + bytes             load warp          math            q and k of an item are readable
    qk_empty       12 warps              math               load warp       q and k may be overwritten
    f_full[w]      4 warps               w (0, 1)           2               F1 (F2) is in shared memory
    f_empty        4 warps               2                  0, 1            F1 and F2 may be overwritten
    given          4 warps               2                  1               half of the sum of dK- lies in place of F1 and F2
    taken          4 warps               1                  2               that half has been read
    sum_full[s]    14 warps              math, dot          sum warp        the row sums of a head are complete
    sum_empty[s]   1                     sum warp           math, dot       they may be overwritten
    landed         1 + bytes             load warp          load warp       q and k of a tail chunk can be cleaned

The load warp alone looks at every item; it passes over those without tokens and tells the end by an item of no rows. Item m and head i
of a block, counted without those, are in stage m % 2 and i % 2. A barrier completes once per head; told, heard and qk_* once per
item; landed once per tail chunk; given and taken twice per item, so that their phases start afresh with each. Behind an item's
last head f_empty waits for the exchange of dK-.

Rows of a tail chunk that lie behind the sequence can hold anything. F1 and F2 are selected, not multiplied, to 0 there, which
keeps such rows of dO, dW and Y from the others; the load warp zeros them in q and k; what they leave in rows of results is never
stored, nor summed up. Slots behind the last sequence zero all gradients (dv too) of the rows behind the last boundary.
"""

from functools import partial

import tilelang.language as T

from fla_flashqla.kernels import device_functions
from fla_flashqla.kernels.arguments import optional, packed
from fla_flashqla.kernels.forward import PASS_CONFIGS
from fla_flashqla.kernels.prepare import CHUNK, GATE_O, GATE_ROWS, GATE_X, HEAD, L2NORM_EPS
from fla_flashqla.kernels.products import WGMMA, products

__all__ = ["PASS_CONFIGS", "REGISTERS", "gradients_kernel"]
STAGES = 2
REGISTERS = (160, 160, 152, 40)  # a thread, by warpgroup
# row sums of a head: Q . dQ, K . dK+, K . Z beta / b, dbeta, K . dK-; in the last, <S, dS> in two parts and the decay
SUM_Q, SUM_K, SUM_Z, SUM_BETA, SUM_BB, SUM_DOT = range(6)
SUM_ROWS = 6


def gradients_kernel(dtype: str, g_dtype: str, beta_dtype: str, form: str = WGMMA):
    """TileLang source of the gradients of q, k, g and beta.

    Args:
        dtype (str): of q, k, do, dw, y, s, ds, dq and dk, "bfloat16" or "float16".
        g_dtype (str): of g and dg.
        beta_dtype (str): of beta and dbeta.
        form (str): of products, see `products.py`.

    The kernel's `blocks` is its grid: as many as the device has SMs, or as there are items if they are fewer.
    """
    C, D = CHUNK, HEAD
    f32 = "float32"
    EPS = T.float32(L2NORM_EPS)
    matmul, wait_products = products(form)
    call = partial(T.call_extern, "handle")
    find = partial(T.call_extern, "int32", "gdr_find")
    source = device_functions("gates.cuh", "gradients.cuh")
    B, L, H, HV, NSLOT, NCU = map(T.dynamic, ("B", "L", "H", "HV", "NSLOT", "NCU"))

    # pointers "to read", also where a device function writes, keep TileLang from adding fences
    def ptr(buffer, offset=0):
        return buffer.access_ptr("r", offset=offset)

    def row(rows, stage, at, column=0):
        return ptr(rows, (stage * rows.shape[1] + at) * C + column)

    @T.macro
    def wait(barrier, at, phase):
        T.barrier_wait(barrier[at], phase)
        call("gdr_order")

    @T.macro
    def arrive(barrier, at, lane):
        call("gdr_order")
        T.sync_warp()
        if lane == 0:
            T.barrier_arrive(barrier[at])

    @T.prim_func
    def gdr_gradients(
        q: T.Tensor((B, L, H, D), dtype),
        k: T.Tensor((B, L, H, D), dtype),
        do: T.Tensor((B, L, HV, D), dtype),
        dw: T.Tensor((B, L, HV, D), dtype),
        y: T.Tensor((B, L, HV, D), dtype),
        state: T.Tensor((NSLOT, HV, D, D), dtype),
        dstate: T.Tensor((NSLOT, HV, D, D), dtype),
        gates: T.Tensor((NSLOT, HV, GATE_ROWS, C), f32),
        g: T.Tensor((B, L, HV), g_dtype),
        beta: T.Tensor((B, L, HV), beta_dtype),
        A_log: optional("A_log"),
        dt_bias: optional("dt_bias"),
        cu: T.Tensor((NCU,), "int32"),
        dq: T.Tensor((B, L, H, D), dtype),
        dk: T.Tensor((B, L, H, D), dtype),
        dg: T.Tensor((B, L, HV), g_dtype),
        dbeta: T.Tensor((B, L, HV), beta_dtype),
        shares: optional("shares"),
        scale: T.float32,
        Tn: T.int32,
        seqlen: T.int32,
        cu_step: T.int32,
        sequences: T.int32,
        heads: T.int32,
        group: T.int32,
        normalize_q: T.int32,
        normalize_k: T.int32,
        raw_g: T.int32,
        raw_beta: T.float32,
        blocks: T.int32,
    ):
        q, k, do, dw, y, dq, dk, dg, dbeta = map(packed, (q, k, do, dw, y, dq, dk, dg, dbeta))
        shares = T.Tensor((NSLOT, 2, HV), f32, shares.data)
        with T.Kernel(blocks, threads=512, prelude=source) as bx:
            q_s = T.alloc_shared((C, D), dtype)
            k_s = T.alloc_shared((C, D), dtype)
            do_s = T.alloc_shared((STAGES, C, D), dtype)
            dw_s = T.alloc_shared((STAGES, C, D), dtype)
            y_s = T.alloc_shared((STAGES, C, D), dtype)
            s_s = T.alloc_shared((D, D), dtype)
            ds_s = T.alloc_shared((D, D), dtype)
            f_s = T.alloc_shared((2, C, C), dtype)
            g_s = T.alloc_shared((STAGES, GATE_ROWS, C), f32)
            sums_s = T.alloc_shared((STAGES, SUM_ROWS, C), f32)
            item_s = T.alloc_shared((2, 4), "int32")

            told = T.alloc_barrier(arrive_count=[1] * 2)
            heard = T.alloc_barrier(arrive_count=[15] * 2)
            full = T.alloc_barrier(arrive_count=[1] * STAGES)
            empty = T.alloc_barrier(arrive_count=[12] * STAGES)
            s_full = T.alloc_barrier(arrive_count=1)
            s_empty = T.alloc_barrier(arrive_count=10)
            ds_full = T.alloc_barrier(arrive_count=1)
            ds_empty = T.alloc_barrier(arrive_count=6)
            qk_full = T.alloc_barrier(arrive_count=1)
            qk_empty = T.alloc_barrier(arrive_count=12)
            f_full = T.alloc_barrier(arrive_count=[4] * 2)
            f_empty = T.alloc_barrier(arrive_count=4)
            given = T.alloc_barrier(arrive_count=4)
            taken = T.alloc_barrier(arrive_count=4)
            sum_full = T.alloc_barrier(arrive_count=[14] * STAGES)
            sum_empty = T.alloc_barrier(arrive_count=[1] * STAGES)
            landed = T.alloc_barrier(arrive_count=1)

            F1 = T.alloc_fragment((C, C), f32)
            F2 = T.alloc_fragment((C, C), f32)
            F1b = T.alloc_fragment((C, C), dtype)
            F2b = T.alloc_fragment((C, C), dtype)
            A0 = T.alloc_fragment((C, D), f32)
            A1 = T.alloc_fragment((C, D), f32)
            A2 = T.alloc_fragment((C, D), f32)
            # summed over the value heads, in the order of the accumulators above
            dQ = T.alloc_local((64,), f32)
            dKp = T.alloc_local((64,), f32)
            dKm = T.alloc_local((64,), f32)
            pair = T.alloc_local((2,), f32)  # of a thread's two rows
            lk = T.alloc_local((2,), f32)

            tx = T.get_thread_binding()
            lane = tx % 32
            items = T.ceildiv(NSLOT * heads - bx, blocks)
            i = T.alloc_var("int32", init=0)  # heads so far
            it = T.alloc_var("int32", init=0)  # items so far, but for those without tokens
            tails = T.alloc_var("int32", init=0)  # items with a tail chunk so far
            t0 = T.alloc_var("int32")
            valid = T.alloc_var("int32")
            hq = T.alloc_var("int32")
            slot = T.alloc_var("int32")

            if tx < 128:
                T.set_max_nreg(REGISTERS[0], 1)
                wait(told, 0, 0)
                while item_s[it % 2, 1] > 0:
                    call("gdr_clear", ptr(dQ))
                    for _ in T.serial(group):
                        s = i % STAGES
                        wait(full, s, i // STAGES % 2)
                        matmul(do_s[s, :, :], y_s[s, :, :], F1, transpose_B=True, clear_accum=True)
                        wait_products(0)
                        T.barrier_wait(f_empty, (i + 1) % 2)
                        call(
                            "gdr_f1_" + dtype,
                            ptr(F1),
                            ptr(F1b),
                            ptr(f_s),
                            row(g_s, s, 0),
                            scale,
                            item_s[it % 2, 1],
                        )
                        T.fence_proxy_async()
                        arrive(f_full, 0, lane)
                        T.barrier_wait(s_full, i % 2)
                        matmul(do_s[s, :, :], s_s, A0, clear_accum=True)
                        wait_products(0)
                        arrive(s_empty, 0, lane)
                        call("gdr_scale", ptr(A0), row(g_s, s, GATE_O), 1.0)
                        T.barrier_wait(qk_full, it % 2)
                        matmul(F1b, k_s, A0)
                        wait_products(0)
                        call("gdr_dot_" + dtype, ptr(A0), ptr(q_s), ptr(pair))
                        call("gdr_add", ptr(dQ), ptr(A0))
                        wait(sum_empty, s, (i // STAGES + 1) % 2)
                        call("gdr_put", ptr(pair), row(sums_s, s, SUM_Q))
                        arrive(empty, s, lane)
                        arrive(sum_full, s, lane)
                        i += 1
                    if normalize_q > 0:
                        call("gdr_project_" + dtype, ptr(dQ), ptr(q_s), EPS)
                    arrive(qk_empty, 0, lane)
                    call(
                        "gdr_rows_" + dtype,
                        ptr(dQ),
                        T.address_of(dq[item_s[it % 2, 0], item_s[it % 2, 2], 0]),
                        heads * D,
                        item_s[it % 2, 1],
                    )
                    arrive(heard, it % 2, lane)
                    it += 1
                    wait(told, it % 2, it // 2 % 2)
            elif tx < 256:
                T.set_max_nreg(REGISTERS[1], 1)
                wait(told, 0, 0)
                while item_s[it % 2, 1] > 0:
                    call("gdr_clear", ptr(dKp))
                    lk[0] = 0.0
                    lk[1] = 0.0
                    T.barrier_wait(qk_full, it % 2)
                    if normalize_k > 0:
                        call("gdr_log_norm_" + dtype, ptr(k_s), ptr(lk), EPS)
                    for _ in T.serial(group):
                        s = i % STAGES
                        wait(full, s, i // STAGES % 2)
                        matmul(dw_s[s, :, :], y_s[s, :, :], F2, transpose_B=True, clear_accum=True)
                        wait_products(0)
                        T.barrier_wait(f_empty, (i + 1) % 2)
                        call(
                            "gdr_f2_" + dtype,
                            ptr(F2),
                            ptr(F2b),
                            ptr(f_s, C * C),
                            row(g_s, s, 0),
                            ptr(lk),
                            item_s[it % 2, 1],
                        )
                        T.fence_proxy_async()
                        arrive(f_full, 1, lane)
                        T.barrier_wait(s_full, i % 2)
                        matmul(dw_s[s, :, :], s_s, A1, clear_accum=True)
                        wait_products(0)
                        arrive(s_empty, 0, lane)
                        call("gdr_scale", ptr(A1), row(g_s, s, GATE_X), -1.0)
                        matmul(F2b, k_s, A1)
                        wait_products(0)
                        call("gdr_dot_" + dtype, ptr(A1), ptr(k_s), ptr(pair))
                        call("gdr_add", ptr(dKp), ptr(A1))
                        wait(sum_empty, s, (i // STAGES + 1) % 2)
                        call("gdr_put", ptr(pair), row(sums_s, s, SUM_K))
                        arrive(empty, s, lane)
                        arrive(sum_full, s, lane)
                        i += 1
                    for half in T.unroll(2):
                        wait(given, 0, half)
                        call("gdr_take", ptr(dKp), ptr(f_s), half)
                        arrive(taken, 0, lane)
                    if normalize_k > 0:
                        call("gdr_project_" + dtype, ptr(dKp), ptr(k_s), EPS)
                    arrive(qk_empty, 0, lane)
                    call(
                        "gdr_rows_" + dtype,
                        ptr(dKp),
                        T.address_of(dk[item_s[it % 2, 0], item_s[it % 2, 2], 0]),
                        heads * D,
                        item_s[it % 2, 1],
                    )
                    arrive(heard, it % 2, lane)
                    it += 1
                    wait(told, it % 2, it // 2 % 2)
            elif tx < 384:
                T.set_max_nreg(REGISTERS[2], 1)
                wait(told, 0, 0)
                while item_s[it % 2, 1] > 0:
                    arrive(heard, it % 2, lane)
                    call("gdr_clear", ptr(dKm))
                    for j in T.serial(group):
                        s = i % STAGES
                        wait(full, s, i // STAGES % 2)
                        T.barrier_wait(ds_full, i % 2)
                        matmul(y_s[s, :, :], ds_s, A2, clear_accum=True)
                        wait_products(0)
                        arrive(ds_empty, 0, lane)
                        call("gdr_decay", ptr(A2), row(g_s, s, 0))
                        T.barrier_wait(qk_full, it % 2)
                        call("gdr_dot_" + dtype, ptr(A2), ptr(k_s), ptr(pair))
                        wait(sum_empty, s, (i // STAGES + 1) % 2)
                        call("gdr_put_z", ptr(pair), row(sums_s, s, 0), row(g_s, s, 0))
                        T.barrier_wait(f_full[0], i % 2)
                        matmul(f_s[0, :, :], q_s, A2, transpose_A=True)
                        T.barrier_wait(f_full[1], i % 2)
                        matmul(f_s[1, :, :], k_s, A2, transpose_A=True)
                        wait_products(0)
                        if j + 1 < group:
                            arrive(f_empty, 0, lane)
                        call("gdr_dot_" + dtype, ptr(A2), ptr(k_s), ptr(pair))
                        call("gdr_add_beta", ptr(dKm), ptr(A2), row(g_s, s, 0))
                        call("gdr_put_beta", ptr(pair), row(sums_s, s, 0), row(g_s, s, 0))
                        arrive(empty, s, lane)
                        arrive(sum_full, s, lane)
                        i += 1
                    arrive(qk_empty, 0, lane)
                    T.sync_threads(8, 128)  # all four warps are through with F1 and F2
                    for half in T.unroll(2):
                        call("gdr_give", ptr(dKm), ptr(f_s), half)
                        arrive(given, 0, lane)
                        wait(taken, 0, half)
                    arrive(f_empty, 0, lane)
                    it += 1
                    wait(told, it % 2, it // 2 % 2)
            else:
                T.set_max_nreg(REGISTERS[3], 0)
                if tx < 416:
                    n = T.alloc_var("int32")
                    rows = T.alloc_local((2,), "int32")
                    for item in T.serial(items):
                        slot = T.truncdiv(item * blocks + bx, heads)
                        hq = item * blocks + bx - slot * heads
                        n = find(
                            T.address_of(cu[0]), cu_step, seqlen, sequences, slot, Tn, ptr(rows)
                        )
                        t0 = rows[0]
                        valid = rows[1]
                        if n == sequences:
                            for r in T.serial(valid):
                                call("gdr_blank", T.address_of(dq[t0 + r, hq, 0]), 1)
                                call("gdr_blank", T.address_of(dk[t0 + r, hq, 0]), 1)
                                call("gdr_blank", T.address_of(dw[t0 + r, hq * group, 0]), group)
                                call("gdr_zero", T.address_of(dg[t0 + r, hq * group]), group)
                                call("gdr_zero", T.address_of(dbeta[t0 + r, hq * group]), group)
                        # every slot is added up, also one without a chunk
                        if (n == sequences) | (valid <= 0):
                            for part in T.serial(T.if_then_else(raw_g > 0, 2, 0)):
                                call(
                                    "gdr_zero", T.address_of(shares[slot, part, hq * group]), group
                                )
                        else:
                            wait(heard, it % 2, (it // 2 + 1) % 2)
                            if lane == 0:
                                item_s[it % 2, 0] = t0
                                item_s[it % 2, 1] = valid
                                item_s[it % 2, 2] = hq
                                item_s[it % 2, 3] = slot
                            arrive(told, it % 2, lane)
                            for j in T.serial(group):
                                s = i % STAGES
                                hv = hq * group + j
                                T.barrier_wait(empty[s], (i // STAGES + 1) % 2)
                                T.tma_copy(do[t0 : t0 + C, hv, :], do_s[s, :, :], barrier=full[s])
                                T.tma_copy(y[t0 : t0 + C, hv, :], y_s[s, :, :], barrier=full[s])
                                T.tma_copy(dw[t0 : t0 + C, hv, :], dw_s[s, :, :], barrier=full[s])
                                T.tma_copy(gates[slot, hv, :, :], g_s[s, :, :], barrier=full[s])
                                arrive(full, s, lane)
                                T.barrier_wait(ds_empty, (i + 1) % 2)
                                T.tma_copy(dstate[slot, hv, :, :], ds_s, barrier=ds_full)
                                arrive(ds_full, 0, lane)
                                T.barrier_wait(s_empty, (i + 1) % 2)
                                T.tma_copy(state[slot, hv, :, :], s_s, barrier=s_full)
                                arrive(s_full, 0, lane)
                                i += 1
                                if j == 0:
                                    T.barrier_wait(qk_empty, (it + 1) % 2)
                                    if valid == C:
                                        T.tma_copy(k[t0 : t0 + C, hq, :], k_s, barrier=qk_full)
                                        T.tma_copy(q[t0 : t0 + C, hq, :], q_s, barrier=qk_full)
                                    else:
                                        T.tma_copy(k[t0 : t0 + C, hq, :], k_s, barrier=landed)
                                        T.tma_copy(q[t0 : t0 + C, hq, :], q_s, barrier=landed)
                                        arrive(landed, 0, lane)
                                        wait(landed, 0, tails % 2)
                                        call("gdr_clean", ptr(k_s), valid)
                                        call("gdr_clean", ptr(q_s), valid)
                                        call("gdr_order")
                                        T.fence_proxy_async()
                                        tails += 1
                                    arrive(qk_full, 0, lane)
                            it += 1
                    wait(heard, it % 2, (it // 2 + 1) % 2)
                    if lane == 0:
                        item_s[it % 2, 1] = 0
                    arrive(told, it % 2, lane)
                elif tx < 448:
                    dgc = T.alloc_local((2,), f32)
                    rest = T.alloc_var(f32)
                    wait(told, 0, 0)
                    valid = item_s[0, 1]
                    while valid > 0:
                        t0 = item_s[it % 2, 0]
                        hq = item_s[it % 2, 2]
                        slot = item_s[it % 2, 3]
                        arrive(heard, it % 2, lane)
                        for j in T.serial(group):
                            s = i % STAGES
                            hv = hq * group + j
                            wait(sum_full, s, i // STAGES % 2)
                            rest = T.call_extern(
                                f32, "gdr_sums", row(sums_s, s, 0), ptr(dgc), valid
                            )
                            call(
                                "gdr_store_betas",
                                *(row(sums_s, s, SUM_BETA), dbeta.data, beta.data),
                                *(t0, valid, hv, HV, raw_beta),
                            )
                            arrive(sum_empty, s, lane)
                            call(
                                "gdr_store_gates",
                                *(ptr(dgc), rest, dg.data, g.data, A_log.data, dt_bias.data),
                                *(shares.data, t0, valid, slot, hv, HV, raw_g),
                            )
                            i += 1
                        it += 1
                        wait(told, it % 2, it // 2 % 2)
                        valid = item_s[it % 2, 1]
                else:
                    dot = T.alloc_var(f32)
                    w = tx // 32 - 14
                    wait(told, 0, 0)
                    while item_s[it % 2, 1] > 0:
                        arrive(heard, it % 2, lane)
                        for _ in T.serial(group):
                            s = i % STAGES
                            wait(ds_full, 0, i % 2)
                            wait(s_full, 0, i % 2)
                            dot = T.call_extern(
                                "float32", "gdr_inner_" + dtype, ptr(s_s), ptr(ds_s), w
                            )
                            arrive(s_empty, 0, lane)
                            arrive(ds_empty, 0, lane)
                            for e in T.unroll(5):
                                dot += T.shfl_xor(dot, 1 << e)
                            wait(sum_empty, s, (i // STAGES + 1) % 2)
                            if lane == 0:
                                sums_s[s, SUM_DOT, w] = dot
                            arrive(sum_full, s, lane)
                            i += 1
                        it += 1
                        wait(told, it % 2, it // 2 % 2)

    return gdr_gradients
