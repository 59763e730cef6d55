# SPDX-License-Identifier: MIT
"""State-independent part of the forward pass, all chunks side by side (SM90).

One block per (chunk, q/k head); it computes K K^T once, then each warp serves one value head of the group at a time. Per chunk
of C = 64 tokens and value head, with gc the inclusive cumulative sum of g inside the chunk and rk, rq the l2norm factors (1
without):

    M = I + strictlower(beta_i rk_i rk_j (K K^T)_ij exp(gc_i - gc_j))       A = M^-1 diag(beta)

and the gate vectors that the recurrence multiplies with (rows of `gates`, zero behind the sequence's last token):

    X: exp(gc) rk   U: exp(gc_C - gc) rk   O: scale exp(gc) rq   PR: log2(exp(gc) rq)   PC: log2(exp(gc) / rk)
    DECAY: exp(gc_C), in its first element

The inverse is in `inverse.cuh`. Chunk slots: chunk i of sequence n lies in slot `cu_seqlens[n] // C + n + i`; slots of
different sequences never overlap and `T // C + N + 1` are enough, so that neither host nor device has to sum up chunk counts. The slots
behind the last sequence zero the rows of o behind the last boundary.
"""

from pathlib import Path

import tilelang
import tilelang.language as T

CHUNK = 64
HEAD = 128  # K = V
GATE_X, GATE_U, GATE_O, GATE_PR, GATE_PC, GATE_DECAY = range(6)
GATE_ROWS = 6
WARPS = 4
MIN_BLOCKS = 4  # caps registers at 128 a thread
LOG2E = 1.4426950408889634
GATE_FLOOR = -128.0  # exp(-128) is 0 in float32; a finite floor keeps differences of cumulative sums free of inf - inf
L2NORM_EPS = 1e-6
SCRATCH = 6 * 264  # floats a warp: six blocks of BLOCK_STRIDE, see inverse.cuh
GC, BK, ROWS, COLS, BETA = range(5)  # the gates that it is given

PASS_CONFIGS = {
    tilelang.PassConfigKey.TL_ENABLE_FAST_MATH: True,
    tilelang.PassConfigKey.TL_DISABLE_THREAD_STORAGE_SYNC: True,  # warps work on their own between the two block barriers
    "tl.disable_safe_memory_legalize": True,  # indices are in range by construction
}


def prepare_kernel(dtype: str, g_dtype: str, beta_dtype: str):
    """TileLang source of the preparation for q, k, v in `dtype` and gates in `g_dtype` and `beta_dtype`."""
    C, D = CHUNK, HEAD
    f32 = "float32"
    source = Path(__file__).with_name("inverse.cuh").read_text()
    Tn, H, HV, NSLOT, NCU = (T.dynamic(n) for n in ("Tn", "H", "HV", "NSLOT", "NCU"))

    @T.prim_func
    def gdr_prepare(
        q: T.Tensor((Tn, H, D), dtype),
        k: T.Tensor((Tn, H, D), dtype),
        g: T.Tensor((Tn, HV), g_dtype),
        beta: T.Tensor((Tn, HV), beta_dtype),
        cu: T.Tensor((NCU,), "int32"),
        a: T.Tensor((NSLOT, HV, C, C), dtype),
        gates: T.Tensor((NSLOT, HV, GATE_ROWS, C), f32),
        o: T.Tensor((Tn, HV, D), dtype),
        scale: T.float32,
        seqlen: T.int32,
        cu_step: T.int32,
        sequences: T.int32,
        heads: T.int32,
        group: T.int32,
        normalize_q: T.int32,
        normalize_k: T.int32,
    ):
        with T.Kernel(NSLOT * H, threads=WARPS * 32, prelude=source) as bx:
            T.annotate_min_blocks_per_sm(MIN_BLOCKS)
            k_s = T.alloc_shared((C, D), dtype)  # K, then K K^T in float32 [C, C] in its place
            scratch_s = T.alloc_shared((WARPS, SCRATCH), f32)
            w_s = T.alloc_shared((WARPS, 5, C), f32)
            rk_s = T.alloc_shared((C,), f32)
            rq_s = T.alloc_shared((C,), f32)
            KK = T.alloc_fragment((C, C), f32)
            q8 = T.alloc_local((8,), dtype)
            gb = T.alloc_local((4,), f32)
            gl = T.alloc_local((2,), f32)
            gate = T.alloc_var(f32)
            shifted = T.alloc_var(f32)
            here = T.alloc_var(f32)
            before = T.alloc_var(f32)
            middle_gc = T.alloc_var(f32)
            total = T.alloc_var(f32)
            loaded = T.alloc_barrier(arrive_count=1)

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
                for r in T.serial(valid):
                    for j in T.serial(group):
                        o[t0 + r, hq * group + j, tx] = 0
            elif valid > 0:
                if tx < 32:
                    T.tma_copy(k[t0 : t0 + C, hq, :], k_s, barrier=loaded)
                    T.sync_warp()
                    if tx == 0:
                        T.barrier_arrive(loaded)
                for j in T.serial(T.ceildiv(group, WARPS)):
                    # four neighbouring value heads of a token are read together
                    for half in T.unroll(2):
                        gb[half] = 0.0
                        gb[2 + half] = 0.0
                        if (half * 32 + tx // WARPS < valid) & (j * WARPS + tx % WARPS < group):
                            gb[half] = g[
                                t0 + half * 32 + tx // WARPS, hq * group + j * WARPS + tx % WARPS
                            ]
                            gb[2 + half] = beta[
                                t0 + half * 32 + tx // WARPS, hq * group + j * WARPS + tx % WARPS
                            ]
                    if j == 0:
                        if tx < C:
                            if normalize_k == 0:
                                rk_s[tx] = 1.0
                            if normalize_q == 0:
                                rq_s[tx] = 1.0
                        if normalize_q > 0:  # two threads a row
                            total = 0.0
                            for c in T.serial(8):
                                if tx // 2 < valid:
                                    for e in T.vectorized(8):
                                        q8[e] = q[t0 + tx // 2, hq, (tx % 2) * 64 + c * 8 + e]
                                    for e in T.unroll(8):
                                        total += T.cast(q8[e], f32) * T.cast(q8[e], f32)
                            total += T.shfl_xor(total, 1)
                            if tx % 2 == 0:
                                rq_s[tx // 2] = T.rsqrt(total + L2NORM_EPS)
                        T.barrier_wait(loaded, 0)
                        T.wgmma_gemm(
                            k_s,
                            k_s,
                            KK,
                            transpose_B=True,
                            policy=T.GemmWarpPolicy.FullRow,
                            clear_accum=True,
                        )
                        T.wait_wgmma(0)
                        if normalize_k > 0:  # the squared norms of k are the diagonal of K K^T
                            for r, c in T.Parallel(C, C):
                                if r == c:
                                    rk_s[r] = T.Select(
                                        r < valid, T.rsqrt(KK[r, c] + L2NORM_EPS), 0.0
                                    )
                    T.sync_threads()  # K, or the gates of the heads before, are used up
                    if j == 0:
                        T.call_extern(
                            "handle",
                            "gdr_store_kk",
                            KK.access_ptr("r"),
                            T.address_of(k_s[0, 0]),
                            valid,
                        )
                    for half in T.unroll(2):
                        w_s[tx % WARPS, GC, half * 32 + tx // WARPS] = gb[half]
                        w_s[tx % WARPS, BETA, half * 32 + tx // WARPS] = gb[2 + half]
                    T.sync_threads()

                    if j * WARPS + warp < group:
                        hv = hq * group + j * WARPS + warp
                        total = 0.0
                        for half in T.unroll(2):  # inclusive cumulative sum, in base 2
                            t = half * 32 + lane
                            gate = w_s[warp, GC, t]
                            gate = T.if_then_else(gate < GATE_FLOOR, GATE_FLOOR, gate) * LOG2E
                            for e in T.unroll(5):
                                shifted = T.shfl_up(gate, 1 << e)
                                if lane >= (1 << e):
                                    gate += shifted
                            gate += total
                            total = T.shfl_sync(gate, 31)
                            # end of this 16-token block and of the one before
                            here = T.shfl_sync(gate, lane // 16 * 16 + 15)
                            if half == 0:
                                before = T.shfl_sync(gate, 15)
                                middle_gc = total
                                before = T.if_then_else(lane < 16, 0.0, before)
                            else:
                                before = T.shfl_sync(gate, 15)
                                before = T.if_then_else(lane < 16, middle_gc, before)
                            gl[half] = gate
                            bk = T.if_then_else(t < valid, w_s[warp, BETA, t] * rk_s[t], 0.0)
                            w_s[warp, GC, t] = gate
                            w_s[warp, BK, t] = bk
                            w_s[warp, ROWS, t] = bk * T.exp2(gate - before)
                            w_s[warp, COLS, t] = T.if_then_else(
                                t < valid, rk_s[t] * T.exp2(here - gate), 0.0
                            )
                        for half in T.unroll(2):
                            t = half * 32 + lane
                            if t < valid:
                                gates[slot, hv, GATE_X, t] = T.exp2(gl[half]) * rk_s[t]
                                gates[slot, hv, GATE_U, t] = T.exp2(total - gl[half]) * rk_s[t]
                                gates[slot, hv, GATE_O, t] = T.exp2(gl[half]) * rq_s[t] * scale
                                gates[slot, hv, GATE_PR, t] = gl[half] + T.log2(rq_s[t])
                                gates[slot, hv, GATE_PC, t] = gl[half] - T.log2(rk_s[t])
                            else:
                                for e in T.unroll(GATE_DECAY):
                                    gates[slot, hv, e, t] = 0.0
                        if lane == 0:
                            gates[slot, hv, GATE_DECAY, 0] = T.exp2(total)
                        T.sync_warp()
                        T.call_extern(
                            "handle",
                            "gdr_invert_" + dtype,
                            T.address_of(k_s[0, 0]),
                            T.address_of(w_s[warp, 0, 0]),
                            T.address_of(rk_s[0]),
                            T.address_of(scratch_s[warp, 0]),
                            T.address_of(a[slot, hv, 0, 0]),
                        )

    return gdr_prepare
