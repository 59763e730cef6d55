# SPDX-License-Identifier: MIT
"""State-independent part of the forward pass, all chunks side by side.

One block per (chunk, q/k head); it computes K K^T once, then each warp serves one value head of the group at a time. Per chunk
of C = 64 tokens and value head, with gc the inclusive cumulative sum of g inside the chunk and rk, rq the l2norm factors (1
without):

    R = (I + strictlower(rk_i rk_j (K K^T)_ij exp(gc_i - gc_j) beta_j))^-1

and the gate vectors that the recurrence multiplies with (rows of `gates`, zero behind the sequence's last token):

    X: exp(gc) rk             U: exp(gc_C - gc) rk beta     O: scale exp(gc) rq
    PR: log2(exp(gc) rq)      PC: log2(exp(gc) / (rk scale beta))
    DECAY: exp(gc_C), in its first element, log2 of that in its second, and in its third a bound on log2 of the 2-norm of what the chunk
           does to a state: that plus the sum of log2 max(1, |1 - beta |k|^2|), each token's map being exp(g) (I - beta k k^T)

and, if there will be a backward pass, GC: log2(exp(gc) / rk) and B: beta.

Where asked for, g and beta are made here, as they are read, from what was given in their place:

    g <- -exp(A_log) softplus(g + dt_bias)           beta <- sigmoid(beta), times 1 or 2

R maps v - S^T k to the errors Y before beta, which needs no division by beta anywhere, in the backward either. Logarithms know
no sign: `scale` must not be negative, and where beta is, |beta| stands for it (but in B) and the row of R is negated, as if Y were.

The inverse is in `prepare.cuh`. Chunk slots: chunk i of sequence n lies in slot `cu_seqlens[n] // C + n + i`; slots of
different sequences never overlap and `T // C + N + 1` are enough, so that neither host nor device has to sum up chunk
counts. The slots behind the last sequence zero the rows of o behind the last boundary.
"""

import tilelang
import tilelang.language as T

from fla_flashqla.kernels import device_functions
from fla_flashqla.kernels.arguments import flat, optional, packed

CHUNK = 64
HEAD = 128  # K = V
GATE_X, GATE_U, GATE_O, GATE_PR, GATE_PC, GATE_DECAY, GATE_GC, GATE_B = range(8)
GATE_ROWS = 8
CHAIN_ROWS = 6  # the recurrences read
MIN_BLOCKS = {1: 12, 4: 4}  # an SM, by warps a block: caps registers
LOG2E = 1.4426950408889634
GATE_FLOOR = -128.0  # exp(-128) is 0 in float32; a finite floor keeps differences of cumulative sums free of inf - inf
L2NORM_EPS = 1e-6
SLICE = 32  # columns of K that are loaded together
SLICES = HEAD // SLICE
KK = {1: 4 * 192, 4: 4 * 192 + 6 * 256}  # floats of K K^T in shared memory, see prepare.cuh
SCRATCH = 3 * 264 + 3 * 256  # floats a warp, likewise
GC, BETA = range(2)  # of each of the value heads that are read together
BK, ROWS, COLS = range(3)  # of the one at hand
RK, K2 = range(2)  # what l2norm multiplies k with, and what it makes of |k|^2; 1 and |k|^2 without

PASS_CONFIGS = {
    tilelang.PassConfigKey.TL_ENABLE_FAST_MATH: True,
    tilelang.PassConfigKey.TL_DISABLE_THREAD_STORAGE_SYNC: True,  # warps work on their own between block barriers
    "tl.disable_safe_memory_legalize": True,  # indices are in range by construction
}


def prepare_kernel(dtype: str, g_dtype: str, beta_dtype: str, warps: int = 4):
    """TileLang source of the preparation.

    Args:
        dtype, g_dtype, beta_dtype (str): of q, k and v, of g, of beta.
        warps (int): a block, which take turns at the value heads of a group: 4, or 1 for small groups.

    The kernel's `raw_g` is 0 where g is the gate, 1 where A_log is to be applied and 2 where dt_bias is, too; its `raw_beta` the
    factor of the sigmoid, 0 where beta is beta.
    """
    C, D, W = CHUNK, HEAD, warps
    f32 = "float32"
    sizes = KK[W], W * SCRATCH, W * 2 * C, W * 3 * C, 2 * C  # floats of what takes the place of K
    slices = max(SLICES, -(-sum(sizes) * 2 // (C * SLICE)))
    source = f"#define GDR_WARPS {W}\n" + device_functions("gates.cuh", "prepare.cuh")
    B, L, H, HV, NSLOT, NCU = (T.dynamic(n) for n in ("B", "L", "H", "HV", "NSLOT", "NCU"))

    @T.macro
    def read(j, g, beta, A_log, dt_bias, gb, rates, t0, valid, hq, group, raw_g):
        """Gates and betas of the next W value heads, neighbouring heads of a token together, and what gates are made of."""
        tx = T.get_thread_binding()
        ours = j * W + tx % W < group
        hv = hq * group + j * W + tx % W
        for e in T.unroll(2):
            t = (e * W * 32 + tx) // W
            gb[2 * e] = 0.0
            gb[2 * e + 1] = 0.0
            if (t < valid) & ours:
                gb[2 * e] = g[t0 + t, hv]
                gb[2 * e + 1] = beta[t0 + t, hv]
        rates[0] = 0.0
        rates[1] = 0.0
        if (raw_g > 0) & ours:
            rates[0] = A_log[hv]
            if raw_g > 1:
                rates[1] = dt_bias[hv]

    @T.prim_func
    def gdr_prepare(
        q: T.Tensor((B, L, H, D), dtype),
        k: T.Tensor((B, L, H, D), dtype),
        g: T.Tensor((B, L, HV), g_dtype),
        beta: T.Tensor((B, L, HV), beta_dtype),
        A_log: optional("A_log"),
        dt_bias: optional("dt_bias"),
        cu: T.Tensor((NCU,), "int32"),
        r: T.Tensor((NSLOT, HV, C, C), dtype),
        gates: T.Tensor((NSLOT, HV, GATE_ROWS, C), f32),
        o: T.Tensor((B, L, HV, D), dtype),
        scale: T.float32,
        Tn: T.int32,
        seqlen: T.int32,
        cu_step: T.int32,
        sequences: T.int32,
        heads: T.int32,
        group: T.int32,
        normalize_q: T.int32,
        normalize_k: T.int32,
        backward: T.int32,
        raw_g: T.int32,
        raw_beta: T.float32,
    ):
        q, k, g, beta, o = packed(q), packed(k), packed(g), packed(beta), packed(o)
        A_log, dt_bias = flat(A_log), flat(dt_bias)
        with T.Kernel(NSLOT * H, threads=W * 32, prelude=source) as bx:
            T.annotate_min_blocks_per_sm(MIN_BLOCKS[W])
            k_s = T.alloc_shared((slices, C, SLICE), dtype)
            T.annotate_layout({k_s: tilelang.layout.make_swizzled_layout(k_s)})
            rq_s = T.alloc_shared((C,), f32)
            # in the place of K:
            kk_s = T.make_tensor(T.address_of(k_s[0, 0, 0]), (sum(sizes),), f32)
            scratch_s = T.make_tensor(T.address_of(kk_s[sum(sizes[:1])]), (W, SCRATCH), f32)
            heads_s = T.make_tensor(T.address_of(kk_s[sum(sizes[:2])]), (W, 2, C), f32)
            w_s = T.make_tensor(T.address_of(kk_s[sum(sizes[:3])]), (W, 3, C), f32)
            rk_s = T.make_tensor(T.address_of(kk_s[sum(sizes[:4])]), (2, C), f32)
            kk = T.alloc_local((128 // W,), f32)  # accumulators
            gb = T.alloc_local((4,), f32)
            rates = T.alloc_local((2,), f32)
            gl = T.alloc_local((2,), f32)
            bk = T.alloc_local((2,), f32)
            gate = T.alloc_var(f32)
            shifted = T.alloc_var(f32)
            here = T.alloc_var(f32)
            before = T.alloc_var(f32)
            middle_gc = T.alloc_var(f32)
            total = T.alloc_var(f32)
            factor = T.alloc_var(f32)
            growth = T.alloc_var(f32)
            loaded = T.alloc_barrier(arrive_count=1)

            T.pdl_sync()
            T.pdl_trigger()  # forward.py can take the SMs that become free; it waits for our results itself
            tx = T.get_thread_binding()
            warp = tx // 32
            lane = tx % 32
            slot = T.alloc_var("int32", init=T.truncdiv(bx, heads))
            hq = T.alloc_var("int32", init=bx - slot * heads)

            # the last sequence n whose first slot is not behind this one
            n = T.alloc_var("int32", init=0)
            upper = T.alloc_var("int32", init=sequences)
            middle = T.alloc_var("int32")
            first = T.alloc_var("int32")
            while n < upper:
                middle = (n + upper + 1) // 2
                first = (
                    T.if_then_else(seqlen > 0, middle * seqlen, cu[middle * cu_step]) // C + middle
                )
                if first <= slot:
                    n = middle
                else:
                    upper = middle - 1
            bos = T.alloc_var("int32", init=T.if_then_else(seqlen > 0, n * seqlen, cu[n * cu_step]))
            eos = T.alloc_var("int32")
            if n < sequences:
                eos = T.if_then_else(seqlen > 0, (n + 1) * seqlen, cu[(n + 1) * cu_step])
            else:
                eos = Tn
            t0 = T.alloc_var("int32", init=bos + (slot - bos // C - n) * C)
            valid = T.alloc_var("int32", init=T.min(C, eos - t0))

            if n == sequences:
                for row in T.serial(valid):
                    for j in T.serial(group):
                        for e in T.unroll(4 // W):
                            o[t0 + row, hq * group + j, e * W * 32 + tx] = 0
            elif valid > 0:
                if tx < 32:
                    for e in T.unroll(SLICES):
                        T.tma_copy(
                            k[t0 : t0 + C, hq, e * SLICE : (e + 1) * SLICE],
                            k_s[e, :, :],
                            barrier=loaded,
                        )
                    T.sync_warp()
                    if tx == 0:
                        T.barrier_arrive(loaded)
                read(0, g, beta, A_log, dt_bias, gb, rates, t0, valid, hq, group, raw_g)
                T.call_extern(
                    "handle",
                    "gdr_q_factors_" + dtype,
                    T.address_of(q[t0, hq, 0]),
                    heads * D,
                    T.address_of(rq_s[0]),
                    valid,
                    normalize_q,
                    L2NORM_EPS,
                )
                for e in T.unroll(128 // W):
                    kk[e] = 0.0
                T.barrier_wait(loaded, 0)
                for e in T.unroll(SLICES):
                    T.call_extern(
                        "handle",
                        "gdr_products_" + dtype,
                        T.address_of(kk[0]),
                        T.address_of(k_s[0, 0, 0]),
                        e,
                    )
                T.sync_threads()  # K is used up
                T.call_extern(
                    "handle",
                    "gdr_keep",
                    T.address_of(kk[0]),
                    T.address_of(kk_s[0]),
                    T.address_of(rk_s[RK, 0]),
                    T.address_of(rk_s[K2, 0]),
                    valid,
                    normalize_k,
                    L2NORM_EPS,
                )
                for j in T.serial(T.ceildiv(group, W)):
                    if j > 0:
                        T.sync_threads()  # the gates of the heads before are used up
                        read(j, g, beta, A_log, dt_bias, gb, rates, t0, valid, hq, group, raw_g)
                    for e in T.unroll(2):
                        if (e * W * 32 + tx) // W < valid:  # rows behind must not decay
                            if raw_g > 0:
                                gb[2 * e] = T.call_extern(
                                    f32, "gdr_gate", gb[2 * e] + rates[1], rates[0]
                                )
                            if raw_beta > 0:
                                gb[2 * e + 1] = raw_beta * T.call_extern(
                                    f32, "gdr_sigmoid", gb[2 * e + 1]
                                )
                        heads_s[tx % W, GC, (e * W * 32 + tx) // W] = gb[2 * e]
                        heads_s[tx % W, BETA, (e * W * 32 + tx) // W] = gb[2 * e + 1]
                    T.sync_threads()

                    if j * W + warp < group:
                        hv = hq * group + j * W + warp
                        growth = 0.0
                        for half in T.unroll(2):
                            t = half * 32 + lane
                            gate = heads_s[warp, GC, t]
                            gl[half] = T.if_then_else(gate < GATE_FLOOR, GATE_FLOOR, gate) * LOG2E
                            b = heads_s[warp, BETA, t]
                            bk[half] = T.if_then_else(t < valid, b * rk_s[RK, t], 0.0)
                            factor = T.abs(1.0 - b * rk_s[K2, t])
                            # a NaN stays one
                            growth += T.log2(T.if_then_else(factor <= 1.0, 1.0, factor))
                        # inclusive cumulative sums of both halves, in base 2, and the sum of growth: side by side, since
                        # each is a chain of shuffles
                        for e in T.unroll(5):
                            for half in T.unroll(2):
                                shifted = T.shfl_up(gl[half], 1 << e)
                                if lane >= (1 << e):
                                    gl[half] += shifted
                            growth += T.shfl_xor(growth, 1 << e)
                        middle_gc = T.shfl_sync(gl[0], 31)
                        gl[1] += middle_gc
                        total = T.shfl_sync(gl[1], 31)
                        for half in T.unroll(2):
                            t = half * 32 + lane
                            # end of this 16-token block and of the one before
                            here = T.shfl_sync(gl[half], lane // 16 * 16 + 15)
                            before = T.shfl_sync(gl[half], 15)
                            if lane < 16:
                                before = T.if_then_else(half == 0, 0.0, middle_gc)
                            heads_s[warp, GC, t] = gl[half]
                            w_s[warp, BK, t] = bk[half]
                            w_s[warp, ROWS, t] = T.if_then_else(
                                t < valid, rk_s[RK, t] * T.exp2(gl[half] - before), 0.0
                            )
                            w_s[warp, COLS, t] = bk[half] * T.exp2(here - gl[half])
                        for half in T.unroll(2):
                            t = half * 32 + lane
                            if t < valid:
                                gates[slot, hv, GATE_X, t] = T.exp2(gl[half]) * rk_s[RK, t]
                                gates[slot, hv, GATE_U, t] = T.exp2(total - gl[half]) * T.abs(
                                    bk[half]
                                )
                                gates[slot, hv, GATE_O, t] = T.exp2(gl[half]) * rq_s[t] * scale
                                gates[slot, hv, GATE_PR, t] = gl[half] + T.log2(rq_s[t])
                                gates[slot, hv, GATE_PC, t] = gl[half] - T.log2(
                                    scale * T.abs(bk[half])
                                )
                                if backward > 0:
                                    gates[slot, hv, GATE_GC, t] = gl[half] - T.log2(rk_s[RK, t])
                                    gates[slot, hv, GATE_B, t] = heads_s[warp, BETA, t]
                            else:
                                for e in T.unroll(GATE_ROWS):
                                    if (e != GATE_DECAY) & ((e < CHAIN_ROWS) | (backward > 0)):
                                        gates[slot, hv, e, t] = 0.0
                        if lane < 3:
                            gates[slot, hv, GATE_DECAY, lane] = T.if_then_else(
                                lane == 0,
                                T.exp2(total),
                                total + T.if_then_else(lane == 1, 0.0, growth),
                            )
                        T.sync_warp()
                        T.call_extern(
                            "handle",
                            "gdr_invert_" + dtype,
                            T.address_of(kk[0]),
                            T.address_of(kk_s[0]),
                            T.address_of(heads_s[warp, GC, 0]),
                            T.address_of(w_s[warp, 0, 0]),
                            T.address_of(rk_s[RK, 0]),
                            T.address_of(scratch_s[warp, 0]),
                            T.address_of(r[slot, hv, 0, 0]),
                        )

    return gdr_prepare
