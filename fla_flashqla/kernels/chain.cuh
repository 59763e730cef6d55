// SPDX-License-Identifier: MIT
// Device functions of the kernels that run along a chain of chunks: forward.py, segments.py, states.py and reverse.py.

// Whether a barrier has passed the phase of this parity. The answer can be asked for early and used late.
__device__ __forceinline__ int gdr_test(void* barrier, int parity) {
  unsigned passed;
  asm volatile(
      "{\n.reg .pred p;\nmbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
      : "=r"(passed)
      : "r"(static_cast<unsigned>(__cvta_generic_to_shared(barrier))), "r"(parity)
      : "memory");
  return passed;
}

namespace gdr {

// A tile [64 tokens, 64 columns] of a warpgroup lies in rows of 128 bytes, swizzled as TMA does. Where this lane's rows of 8 x 8
// blocks begin for ldmatrix.trans and stmatrix.trans, which make of it the transposed tile in accumulator order; 16 tokens
// further are 2048 bytes further.
__device__ __forceinline__ unsigned lane_in(const void* tile) {
  const int t = threadIdx.x, row = t % 8, column = t % 128 / 32 * 2 + t / 8 % 2;
  const int at = t / 128 * 4096 + t % 32 / 16 * 512 + row * 64 + (column ^ row) * 8;
  return static_cast<unsigned>(__cvta_generic_to_shared(tile)) + 2 * at;
}

// The transposed tile in accumulator order, which is that of a left operand of wgmma too
__device__ __forceinline__ void load(const void* tile, unsigned* x) {
  const unsigned at = lane_in(tile);
#pragma unroll
  for (int i = 0; i < 4; ++i, x += 4)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(at + 2048 * i)
                 : "memory");
}

// A gate of 64 tokens for the columns of an accumulator
__device__ __forceinline__ void load(const float* gate, float* x) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float2 g = *reinterpret_cast<const float2*>(gate + 8 * i + threadIdx.x % 4 * 2);
    x[2 * i] = g.x;
    x[2 * i + 1] = g.y;
  }
}

// W^T = V^T - X^T o x_j
template <typename T>
__device__ __forceinline__ void w(const float* x, const unsigned* vt, const float* xg, void* out) {
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const float2 v = unpack(vt[i], T());
    const float* g = xg + i / 2 * 2;
    reinterpret_cast<unsigned*>(out)[i] = pack(v.x - x[2 * i] * g[0], v.y - x[2 * i + 1] * g[1], T());
  }
}

// dY^T = E^T + X^T o u_j
template <typename T>
__device__ __forceinline__ void dy(const float* e, const float* x, const float* gate, void* out) {
#pragma unroll
  for (int i = 0; i < 16; i += 2, e += 4, x += 4) {
    const float2 g = *reinterpret_cast<const float2*>(gate + 4 * i + threadIdx.x % 4 * 2);
    reinterpret_cast<unsigned*>(out)[i] = pack(e[0] + x[0] * g.x, e[1] + x[1] * g.y, T());
    reinterpret_cast<unsigned*>(out)[i + 1] = pack(e[2] + x[2] * g.x, e[3] + x[3] * g.y, T());
  }
}

// A left operand times a gate of its columns
template <typename T>
__device__ __forceinline__ void scale(const void* in, const float* gate, void* out) {
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const float2 g = *reinterpret_cast<const float2*>(gate + i / 2 * 8 + threadIdx.x % 4 * 2);
    const float2 v = unpack(reinterpret_cast<const unsigned*>(in)[i], T());
    reinterpret_cast<unsigned*>(out)[i] = pack(v.x * g.x, v.y * g.y, T());
  }
}

// A transposed accumulator [64 columns, 64 tokens] to a tile of tokens
template <typename T>
__device__ __forceinline__ void store(const float* o, const void* tile) {
  const unsigned at = lane_in(tile);
#pragma unroll
  for (int i = 0; i < 4; ++i, o += 8)
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
                 :
                 : "r"(at + 2048 * i), "r"(pack(o[0], o[1], T())), "r"(pack(o[2], o[3], T())),
                   "r"(pack(o[4], o[5], T())), "r"(pack(o[6], o[7], T()))
                 : "memory");
}

}  // namespace gdr

// V^T and the gates x of a chunk in the order of the accumulator X^T
__device__ __forceinline__ void gdr_load(const void* v, const float* gates, unsigned* vt, float* xg) {
  gdr::load(v, vt);
  gdr::load(gates, xg);
}

// A tile of tokens, transposed, as a left operand
__device__ __forceinline__ void gdr_load_t(const void* tile, void* out) {
  gdr::load(tile, reinterpret_cast<unsigned*>(out));
}

// The state [V, K], rounded, as its two halves of K lie in registers, to a tile of two halves of K, [rows, 64] each, in rows of
// 128 bytes swizzled as TMA does.
__device__ __forceinline__ void gdr_store_state(const void* a, const void* b, const void* tile, int rows) {
  const int t = threadIdx.x;
  const unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(tile)) + t / 32 * 2048 + t % 16 * 128 +
                      (t % 32 / 16 ^ t % 8) * 16;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const unsigned* x = reinterpret_cast<const unsigned*>(i < 4 ? a : b) + i % 4 * 4;
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                 :
                 : "r"((at ^ i % 4 * 32) + i / 4 * rows * 128), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
                 : "memory");
  }
}

namespace gdr {

// P by warp WARP of its warpgroup: what lies right of the warp's diagonal block of 16 x 16 is 0.
template <int WARP>
__device__ __forceinline__ void decay(float* p, const float* pr, const float* pc, int rows) {
  int t = threadIdx.x % 32;
  asm volatile("" : "+r"(t) : "n"(WARP));  // comparisons kept across the loop would hold 30 registers
  const int r = t / 4, c = t % 4 * 2;
  const float row[2] = {16 * WARP + r < rows ? pr[16 * WARP + r] : -1e30f,
                        16 * WARP + r + 8 < rows ? pr[16 * WARP + r + 8] : -1e30f};
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    if (n > 2 * WARP + 1) {
      p[4 * n] = p[4 * n + 1] = p[4 * n + 2] = p[4 * n + 3] = 0.f;
      continue;
    }
    const float2 column = *reinterpret_cast<const float2*>(pc + 8 * n + c);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int first = 8 * (n - 2 * WARP) + c, last = r + 8 * h;  // within the diagonal block
      p[4 * n + 2 * h] *= exp2f(n < 2 * WARP || first <= last ? row[h] - column.x : -1e30f);
      p[4 * n + 2 * h + 1] *= exp2f(n < 2 * WARP || first < last ? row[h] - column.y : -1e30f);
    }
  }
}

}  // namespace gdr

// The accumulator Q K^T [64, 64] times exp2(pr_i - pc_j) for i >= j, i < rows, else 0
__device__ __forceinline__ void gdr_decay(float* p, const float* pr, const float* pc, int rows) {
  const int warp = threadIdx.x % 128 / 32;
  if (warp == 0) gdr::decay<0>(p, pr, pc, rows);
  if (warp == 1) gdr::decay<1>(p, pr, pc, rows);
  if (warp == 2) gdr::decay<2>(p, pr, pc, rows);
  if (warp == 3) gdr::decay<3>(p, pr, pc, rows);
}

// The sequence of this rank by length, longest first, ties in order; of at most 32 sequences. Called by whole warps.
__device__ __forceinline__ int gdr_longest(const int* cu, int step, int sequences, int rank) {
  const int n = threadIdx.x % 32;
  const int length = n < sequences ? cu[(n + 1) * step] - cu[n * step] : -1;
  int longer = 0;
  for (int m = 0; m < sequences; ++m) {
    const int other = __shfl_sync(~0u, length, m);
    longer += other > length || (other == length && m < n);
  }
  return __ffs(__ballot_sync(~0u, longer == rank)) - 1;
}

// Where the tokens of a chain lie that a block takes: a sequence, or a segment of one. Sequences are cut into segments of `segment`
// tokens, a multiple of 64, the last one shorter; 0: they are not cut. Segment j of sequence n lies in slot cu[n] / segment + n + j,
// as chunks do, so that T / segment + N slots are enough and nobody has to sum up counts; an empty sequence has one segment, for
// its final state. Of sequences that are not cut, the slots are those in order, or by length. Called by whole warps.
//   at: sequence, first token, tokens, slot of the first chunk, kind (-1 nobody's, 0 followed by another segment, 1 the last),
//       segments before it in its sequence (-1 nobody's)
__device__ __forceinline__ void gdr_segment(const int* cu, int step, int seqlen, int sequences, int segment, int by_length,
                                            int slot, int* at) {
  int n = slot;
  if (segment > 0) {  // the last sequence whose first slot is not behind this one
    n = 0;
    for (int upper = sequences - 1; n < upper;) {
      const int middle = (n + upper + 1) / 2, first = seqlen > 0 ? middle * seqlen : cu[middle * step];
      if (first / segment + middle <= slot)
        n = middle;
      else
        upper = middle - 1;
    }
  } else if (by_length > 0) {
    n = gdr_longest(cu, step, sequences, slot);
  }
  const int bos = seqlen > 0 ? n * seqlen : cu[n * step];
  const int length = seqlen > 0 ? seqlen : cu[(n + 1) * step] - bos;
  at[0] = n;
  at[1] = bos;
  at[2] = length;
  at[3] = bos / 64 + n;
  at[4] = 1;
  at[5] = 0;
  if (segment > 0) {
    const int number = slot - bos / segment - n, count = length > segment ? (length - 1) / segment + 1 : 1;
    const bool used = number >= 0 && number < count;
    const int skipped = used ? number * segment : 0;
    at[1] += skipped;
    at[2] = used ? min(length - skipped, segment) : 0;
    at[3] += skipped / 64;
    at[4] = used ? number + 1 == count : -1;
    at[5] = used ? number : -1;
  }
}

// The fewest chunks from one end of a segment on whose log2 decays sum up to at most `threshold`; 0 if all of them do not. The
// decays lie `stride` floats apart, which is negative for chunks from the last on. Called by whole warps.
__device__ __forceinline__ int gdr_decisive(const float* decays, int stride, int chunks, float threshold) {
  const int lane = threadIdx.x % 32;
  float total = 0.f;
  for (int done = 0; done < chunks; done += 32) {
    float sum = done + lane < chunks ? decays[static_cast<long long>(done + lane) * stride] : 0.f;
#pragma unroll
    for (int e = 1; e < 32; e *= 2) {
      const float shifted = __shfl_up_sync(~0u, sum, e);
      if (lane >= e) sum += shifted;
    }
    sum += total;
    total = __shfl_sync(~0u, sum, 31);
    const unsigned enough = __ballot_sync(~0u, done + lane < chunks && sum <= threshold);
    if (enough) return done + __ffs(enough);
  }
  return 0;
}

#define GDR_DTYPE(NAME, TYPE)                                                                                    \
  __device__ __forceinline__ void gdr_w_##NAME(const float* x, const unsigned* vt, const float* xg, void* out) { \
    gdr::w<TYPE>(x, vt, xg, out);                                                                                \
  }                                                                                                              \
  __device__ __forceinline__ void gdr_dy_##NAME(const float* e, const float* x, const float* gate, void* out) {  \
    gdr::dy<TYPE>(e, x, gate, out);                                                                              \
  }                                                                                                              \
  __device__ __forceinline__ void gdr_scale_##NAME(const void* in, const float* gate, void* out) {               \
    gdr::scale<TYPE>(in, gate, out);                                                                             \
  }                                                                                                              \
  __device__ __forceinline__ void gdr_store_##NAME(const float* o, const void* tile) { gdr::store<TYPE>(o, tile); }
GDR_DTYPE(bfloat16, __nv_bfloat16)
GDR_DTYPE(float16, __half)
