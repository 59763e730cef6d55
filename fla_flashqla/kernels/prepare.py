# SPDX-License-Identifier: MIT
"""State-independent part of the forward pass, all chunks side by side (SM90).

One block per (chunk, q/k head); it computes K K^T once and serves the value heads of the group in turn. Per chunk of C = 64
tokens and value head, with gc the inclusive cumulative sum of g inside the chunk and rk, rq the l2norm factors (1 without):

    M = I + strictlower(beta_i rk_i rk_j (K K^T)_ij exp(gc_i - gc_j))       A = M^-1 diag(beta)

and the gate vectors that the recurrence multiplies with (rows of `gates`, zero behind the sequence's last token):

    X: exp(gc) rk   U: exp(gc_C - gc) rk   O: scale exp(gc) rq   PR: log2(exp(gc) rq)   PC: log2(exp(gc) / rk)
    DECAY: exp(gc_C), in its first element

Inverse. M is cut into 32 x 32 blocks. Each diagonal block is inverted in float32 by forward substitution, a column per lane;
the off-diagonal block is T21 = -T22 M21 T11 with both products on tensor cores from operands split in a high and a low half
(relative error about 2^-17), since errors of single low-precision operands grow with the condition of M (equal keys,
beta near 2, keys that are not normalised).

Chunk slots. Chunk i of sequence n lies in slot `cu_seqlens[n] // C + n + i`: slots of different sequences never overlap and
`T // C + N + 1` are enough, so that neither host nor device has to sum up chunk counts. The surplus slot range behind the
last sequence zeroes the rows of o behind the last boundary.
"""

import tilelang
import tilelang.language as T

CHUNK = 64
HEAD = 128  # K = V
GATE_X, GATE_U, GATE_O, GATE_PR, GATE_PC, GATE_DECAY = range(6)
GATE_ROWS = 6
THREADS = 128
LOG2E = 1.4426950408889634
GATE_FLOOR = -128.0  # exp(-128) is 0 in float32; a finite floor keeps differences of cumulative sums free of inf - inf
L2NORM_EPS = 1e-6

PASS_CONFIGS = {tilelang.PassConfigKey.TL_ENABLE_FAST_MATH: True, "tl.disable_safe_memory_legalize": True}


def prepare_kernel(dtype: str, g_dtype: str, beta_dtype: str):
    """TileLang source of the preparation for q, k, v in `dtype` and gates in `g_dtype` and `beta_dtype`."""
    C, D, B = CHUNK, HEAD, CHUNK // 2
    f32, split = "float32", "bfloat16"  # bfloat16 for its range, also beside float16
    full_row = T.GemmWarpPolicy.FullRow
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
        l2norm: T.int32,
    ):
        with T.Kernel(NSLOT * H, threads=THREADS) as bx:
            T.annotate_min_blocks_per_sm(4)
            k_s = T.alloc_shared((C, D), dtype)
            l_s = T.alloc_shared((2, B, B + 4), f32)  # transposed diagonal blocks of M - I
            m_hi = T.alloc_shared((B, B), split)  # M21 transposed, split
            m_lo = T.alloc_shared((B, B), split)
            t_hi = T.alloc_shared((2, B, B), split)  # T11 and T22, split
            t_lo = T.alloc_shared((2, B, B), split)
            y_hi = T.alloc_shared((B, B), split)
            y_lo = T.alloc_shared((B, B), split)
            a_s = T.alloc_shared((C, C), dtype)
            gc_s = T.alloc_shared((C,), f32)
            beta_s = T.alloc_shared((C,), f32)
            rk_s = T.alloc_shared((C,), f32)
            rq_s = T.alloc_shared((C,), f32)

            KK = T.alloc_fragment((C, C), f32)
            L = T.alloc_fragment((C, C), f32)
            Y = T.alloc_fragment((B, B), f32)
            gr = T.alloc_fragment((C,), f32)
            gcol = T.alloc_fragment((C,), f32)
            fr = T.alloc_fragment((C,), f32)
            fcol = T.alloc_fragment((C,), f32)
            x = T.alloc_local((B,), f32)
            row = T.alloc_local((4,), f32)
            q8 = T.alloc_local((8,), dtype)

            tx = T.get_thread_binding()
            slot = T.alloc_var("int32", init=T.truncdiv(bx, heads))
            hq = T.alloc_var("int32", init=bx - slot * heads)

            # the last sequence n whose first slot is not behind this one
            n = T.alloc_var("int32", init=0)
            upper = T.alloc_var("int32", init=sequences)
            middle = T.alloc_var("int32")
            first = T.alloc_var("int32")
            while n < upper:
                middle = (n + upper + 1) // 2
                first = T.if_then_else(seqlen > 0, middle * seqlen, cu[middle * cu_step]) // C + middle
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
                T.copy(k[t0 : t0 + C, hq, :], k_s, prefer_instruction="tma")
                T.gemm(k_s, k_s, KK, transpose_B=True, policy=full_row, clear_accum=True)
                if tx < C:
                    rk_s[tx] = 1.0
                    rq_s[tx] = 1.0
                if l2norm > 0:
                    # two threads a row; the squared norms of k are the diagonal of K K^T
                    total = T.alloc_var(f32, init=0.0)
                    for j in T.serial(8):
                        if tx // 2 < valid:
                            for e in T.vectorized(8):
                                q8[e] = q[t0 + tx // 2, hq, (tx % 2) * 64 + j * 8 + e]
                            for e in T.unroll(8):
                                total += T.cast(q8[e], f32) * T.cast(q8[e], f32)
                    total += T.shfl_xor(total, 1)
                    T.sync_threads()
                    if tx % 2 == 0:
                        rq_s[tx // 2] = T.rsqrt(total + L2NORM_EPS)
                    for r, c in T.Parallel(C, C):
                        if r == c:
                            rk_s[r] = T.rsqrt(KK[r, c] + L2NORM_EPS)
                for r, c in T.Parallel(C, C):
                    a_s[r, c] = 0
                T.sync_threads()

                for j in T.serial(group):
                    hv = hq * group + j
                    # gates of the chunk: inclusive cumulative sum, in base 2
                    if tx < C:
                        gate = T.alloc_var(f32, init=0.0)
                        b = T.alloc_var(f32, init=0.0)
                        if tx < valid:
                            gate = g[t0 + tx, hv]
                            b = beta[t0 + tx, hv]
                        gc_s[tx] = T.if_then_else(gate < GATE_FLOOR, GATE_FLOOR, gate) * LOG2E
                        beta_s[tx] = b
                    T.cumsum(gc_s, dim=0)
                    T.sync_threads()
                    if tx < C:
                        gc = gc_s[tx]
                        last = gc_s[C - 1]
                        rk = rk_s[tx]
                        rq = rq_s[tx]
                        if tx < valid:
                            gates[slot, hv, GATE_X, tx] = T.exp2(gc) * rk
                            gates[slot, hv, GATE_U, tx] = T.exp2(last - gc) * rk
                            gates[slot, hv, GATE_O, tx] = T.exp2(gc) * rq * scale
                            gates[slot, hv, GATE_PR, tx] = gc + T.log2(rq)
                            gates[slot, hv, GATE_PC, tx] = gc - T.log2(rk)
                        else:
                            for e in T.unroll(GATE_DECAY):
                                gates[slot, hv, e, tx] = 0.0
                        gates[slot, hv, GATE_DECAY, tx] = T.exp2(last)

                    # L = transpose of M - I, from the symmetric K K^T
                    for c in T.Parallel(C):
                        gr[c] = gc_s[c]
                    for c in T.Parallel(C):
                        gcol[c] = gc_s[c]
                    for c in T.Parallel(C):
                        fr[c] = rk_s[c]
                    for c in T.Parallel(C):
                        fcol[c] = rk_s[c] * beta_s[c]
                    for r, c in T.Parallel(C, C):
                        L[r, c] = T.Select(
                            (r < c) & (c < valid), KK[r, c] * fr[r] * fcol[c] * T.exp2(T.Select(r < c, gcol[c] - gr[r], 0.0)), 0.0
                        )
                    for r, c in T.Parallel(C, C):
                        if r // B == c // B:
                            l_s[r // B, r % B, c % B] = L[r, c]
                        if (r < B) & (c >= B):
                            m_hi[r % B, c % B] = L[r, c]
                            m_lo[r % B, c % B] = L[r, c] - T.cast(T.cast(L[r, c], split), f32)
                    T.sync_threads()

                    # T11 and T22: column `lane` of the inverse of diagonal block `tx // B`
                    if tx < C:
                        for r in T.unroll(B):
                            x[r] = T.if_then_else(r == tx % B, 1.0, 0.0)
                        for r in T.unroll(B):
                            for c4 in T.unroll(B // 4):
                                if c4 * 4 + 3 > r:
                                    for e in T.vectorized(4):
                                        row[e] = l_s[tx // B, r, c4 * 4 + e]
                                    for e in T.unroll(4):
                                        x[c4 * 4 + e] -= row[e] * x[r]
                        for r in T.unroll(B):
                            t_hi[tx // B, r, tx % B] = x[r]
                            t_lo[tx // B, r, tx % B] = x[r] - T.cast(T.cast(x[r], split), f32)
                            a_s[(tx // B) * B + r, tx] = x[r] * beta_s[tx]
                    T.sync_threads()

                    # Y = M21 T11, T21 = -T22 Y
                    T.clear(Y)
                    T.gemm(m_hi, t_hi[0, :, :], Y, transpose_A=True)
                    T.gemm(m_lo, t_hi[0, :, :], Y, transpose_A=True)
                    T.gemm(m_hi, t_lo[0, :, :], Y, transpose_A=True)
                    for r, c in T.Parallel(B, B):
                        y_hi[r, c] = Y[r, c]
                        y_lo[r, c] = Y[r, c] - T.cast(T.cast(Y[r, c], split), f32)
                    T.sync_threads()
                    T.clear(Y)
                    T.gemm(t_hi[1, :, :], y_hi, Y)
                    T.gemm(t_lo[1, :, :], y_hi, Y)
                    T.gemm(t_hi[1, :, :], y_lo, Y)
                    for r, c in T.Parallel(B, B):
                        a_s[r + B, c] = -Y[r, c] * beta_s[c]
                    T.sync_threads()
                    T.copy(a_s, a[slot, hv, :, :])
                    T.sync_threads()

    return gdr_prepare
