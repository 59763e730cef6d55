// SPDX-License-Identifier: MIT
// The states that the segments of a sequence start from, or the gradients of those that they end with, for 16 rows of S^T, by
// 8 warps; see combine.py.

namespace gdr {

// {a, b} as bfloat16, a in the lower half
__device__ __forceinline__ unsigned bf16x2(float a, float b) {
  unsigned u;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(u) : "f"(b), "f"(a));
  return u;
}

// Two float32, each as the sum of two bfloat16
struct Pair {
  unsigned hi, lo;
  __device__ __forceinline__ Pair() {}
  __device__ __forceinline__ Pair(float a, float b)
      : hi(bf16x2(a, b)), lo(bf16x2(a - __uint_as_float(hi << 16), b - __uint_as_float(hi & 0xffff0000u))) {}
};

__device__ __forceinline__ void mma(float* c, const uint4& a, unsigned b0, unsigned b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}

}  // namespace gdr

// A warp has 16 columns of S^T, a lane rows r and r + 8 and the columns 4q to 4q + 3 of them. As columns of two 16 x 8 products
// these are 2q and 2q + 1 of each: column 2i + t of the warp is column i of product t. As a left operand they are what the same lane holds
// for the 16 terms of this warp, 4q to 4q + 3 standing where the instruction has 2q, 2q + 1, 2q + 8 and 2q + 9; Phi follows.
// tile: left operands of 2 products, of each warp's terms the two parts of 32 lanes.
template <bool REVERSE>
__device__ __forceinline__ void gdr_combine(const float* locals, const float* phis, const int* kept, const int* cu,
                                            const float* first, float* made, uint4* tile, int step, int seqlen, int segment, int n,
                                            int head, int heads, int row0, int use_first, int stride_k, int stride_v) {
  constexpr int D = 128, WARPS = 8, KEPT = REVERSE ? 2 : 1;
  const int bos = seqlen > 0 ? n * seqlen : cu[n * step];
  const int length = seqlen > 0 ? seqlen : cu[(n + 1) * step] - bos;
  const int count = length > segment ? (length - 1) / segment + 1 : 1;  // slots as in gdr_segment
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, r = lane / 4, q = lane % 4;
  const int column = 16 * warp + 4 * q;
  const int on = REVERSE ? -heads : heads;  // to the next segment
  long long slot = static_cast<long long>(bos / segment + n + (REVERSE ? count - 1 : 0)) * heads + head;

  float s[2][4];
#pragma unroll
  for (int h = 0; h < 2; ++h)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const long long at = static_cast<long long>(n * heads + head) * D * D;
      s[h][e] = use_first > 0 ? first[at + (row0 + r + 8 * h) * stride_v + (column + e) * stride_k] : 0.f;
    }

  // What the next segment needs is on its way while this one's product runs; whether it needs it is known a segment earlier.
  float phi[WARPS][2][4];
  float4 local[2];
  const auto fetch_phi = [&](long long slot) {
    const float* p = phis + slot * D * D;
    const int c = 16 * warp + 2 * r;
#pragma unroll
    for (int j = 0; j < WARPS; ++j) {
      const int k = 16 * j + 4 * q;
      if (REVERSE) {
#pragma unroll
        for (int t = 0; t < 2; ++t)
          *reinterpret_cast<float4*>(phi[j][t]) = *reinterpret_cast<const float4*>(p + (c + t) * D + k);
      } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float2 two = *reinterpret_cast<const float2*>(p + (k + i) * D + c);
          phi[j][0][i] = two.x;
          phi[j][1][i] = two.y;
        }
      }
    }
  };
  const auto fetch_local = [&](long long slot) {
    const float* p = locals + slot * D * D + (row0 + r) * D + column;
    local[0] = *reinterpret_cast<const float4*>(p);
    local[1] = *reinterpret_cast<const float4*>(p + 8 * D);
  };
  const auto keeps = [&](int i, long long slot) { return i + 1 < count ? kept[slot] & KEPT : 0; };
  int keep = REVERSE ? 0 : keeps(0, slot);  // the last segment's dL is all
  int next_keep = keeps(1, slot + on);
  if (count > 1) fetch_local(slot);
  if (keep) fetch_phi(slot);
  int buffer = 0;

  for (int i = 0;; ++i, slot += on) {
    float* state = made + slot * D * D;
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int e = 0; e < 4; ++e) state[(row0 + r + 8 * h) * stride_v + (column + e) * stride_k] = s[h][e];
    if (i + 1 == count) break;

    float c[3][2][4] = {{{local[0].x, local[0].z, local[1].x, local[1].z}, {local[0].y, local[0].w, local[1].y, local[1].w}}};
    if (keep) {
      const gdr::Pair a[4] = {{s[0][0], s[0][1]}, {s[1][0], s[1][1]}, {s[0][2], s[0][3]}, {s[1][2], s[1][3]}};
      uint4* mine = tile + (buffer * WARPS + warp) * 64 + lane;
      mine[0] = make_uint4(a[0].hi, a[1].hi, a[2].hi, a[3].hi);
      mine[32] = make_uint4(a[0].lo, a[1].lo, a[2].lo, a[3].lo);
    }
    gdr::Pair b[WARPS][2][2];
    if (keep) {
#pragma unroll
      for (int j = 0; j < WARPS; ++j)
#pragma unroll
        for (int t = 0; t < 2; ++t)
#pragma unroll
          for (int h = 0; h < 2; ++h) b[j][t][h] = gdr::Pair(phi[j][t][2 * h], phi[j][t][2 * h + 1]);
    }
    if (i + 2 < count) fetch_local(slot + on);
    if (next_keep) fetch_phi(slot + on);
    const int kept_on = keeps(i + 2, slot + 2 * on);
    if (keep) {
      __syncthreads();  // the buffer before this one may still be read, and no other
#pragma unroll
      for (int j = 0; j < WARPS; ++j) {
        const uint4* a = tile + (buffer * WARPS + j) * 64 + lane;
        const uint4 hi = a[0], lo = a[32];
#pragma unroll
        for (int t = 0; t < 2; ++t) {
          gdr::mma(c[0][t], hi, b[j][t][0].hi, b[j][t][1].hi);
          gdr::mma(c[1][t], hi, b[j][t][0].lo, b[j][t][1].lo);
          gdr::mma(c[2][t], lo, b[j][t][0].hi, b[j][t][1].hi);
        }
      }
      buffer ^= 1;
    }
    keep = next_keep;
    next_keep = kept_on;
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int t = e % 2, x = 2 * h + e / 2;
        s[h][e] = c[0][t][x] + (c[1][t][x] + c[2][t][x]);
      }
  }
}

__device__ __forceinline__ void gdr_combine_both(const float* local, const float* back_local, const float* phi, const int* kept,
                                                 const int* cu, const float* first, const float* back_first, float* made,
                                                 float* back_made, unsigned* tile, int step, int seqlen, int segment, int sequences,
                                                 int heads, int block, int wanted, int use_first, int use_back_first, int stride_k,
                                                 int stride_v) {
  constexpr int SHARES = 8;
  const int of_one = sequences * heads * SHARES;
  const bool back = wanted == 2 || block >= of_one;
  block -= block >= of_one ? of_one : 0;
  const int n = block / (heads * SHARES), head = block / SHARES - n * heads, row0 = block % SHARES * 16;
  uint4* operands = reinterpret_cast<uint4*>(tile);
  if (back)
    gdr_combine<true>(back_local, phi, kept, cu, back_first, back_made, operands, step, seqlen, segment, n, head, heads, row0,
                      use_back_first, stride_k, stride_v);
  else
    gdr_combine<false>(local, phi, kept, cu, first, made, operands, step, seqlen, segment, n, head, heads, row0, use_first, stride_k,
                       stride_v);
}
