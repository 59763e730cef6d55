// SPDX-License-Identifier: MIT
// The states that the segments of a sequence start from, or the gradients of those that they end with, for 16 rows of S^T, by
// 8 warps; see combine.py.

namespace gdr {

__device__ __forceinline__ unsigned tf32(float x) {
  unsigned u;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(u) : "f"(x));
  return u;
}

// A float32 as the sum of two tf32, to 2^-22 of it
struct Parts {
  unsigned hi, lo;
  __device__ __forceinline__ explicit Parts(float x) : hi(tf32(x)), lo(tf32(x - __uint_as_float(hi))) {}
};

__device__ __forceinline__ void mma(float* c, const unsigned* a, unsigned b0, unsigned b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace gdr

// tile: 16 rows of 136 floats in shared memory, so that rows of a product's left operand lie in other banks.
// A warp has 16 columns of S^T, a lane rows r and r + 8 and four neighbouring columns, which as columns of two 16 x 8 products are
// 2c and 2c + 1 of each: column 2i + t of the warp is column i of product t. Of the 8 terms of a step a lane has 2q and 2q + 1.
template <bool REVERSE>
__device__ __forceinline__ void gdr_combine(const float* locals, const float* phis, const int* kept, const float* first,
                                            const int* cu, float* states, float* tile, int step, int seqlen, int segment, int n,
                                            int head, int heads, int row0, int use_first, int stride_k, int stride_v) {
  constexpr int D = 128, STRIDE = 136, STEPS = D / 8, KEPT = REVERSE ? 2 : 1;
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
    for (int i = 0; i < 4; ++i) {
      const long long at = static_cast<long long>(n * heads + head) * D * D;
      s[h][i] = use_first > 0 ? first[at + (row0 + r + 8 * h) * stride_v + (column + i) * stride_k] : 0.f;
    }

  // What the next segment needs is on its way while this one's product runs.
  float2 phi[STEPS][2];
  float4 local[2];
  int keep = 0;
  const auto fetch_phi = [&](int j, long long slot) {
    const int k = 8 * j + 2 * q, c = 16 * warp + 2 * r;  // forward phi[j][i] is row k + i, reverse column c + i, of the right factor
    const float* p = phis + slot * D * D + (REVERSE ? c * D + k : k * D + c);
    phi[j][0] = *reinterpret_cast<const float2*>(p);
    phi[j][1] = *reinterpret_cast<const float2*>(p + D);
  };
  const auto fetch_local = [&](long long slot) {
    const float* p = locals + slot * D * D + (row0 + r) * D + column;
    local[0] = *reinterpret_cast<const float4*>(p);
    local[1] = *reinterpret_cast<const float4*>(p + 8 * D);
  };
  if (count > 1) {
    keep = REVERSE ? 0 : kept[slot] & KEPT;  // the last segment's dL is all
    fetch_local(slot);
    if (keep)
#pragma unroll
      for (int j = 0; j < STEPS; ++j) fetch_phi(j, slot);
  }

  for (int i = 0;; ++i, slot += on) {
    float* state = states + slot * D * D;
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int e = 0; e < 4; ++e) state[(row0 + r + 8 * h) * stride_v + (column + e) * stride_k] = s[h][e];
    if (i + 1 == count) break;

    const bool more = i + 2 < count;
    const int next_keep = more ? kept[slot + on] & KEPT : 0;
    float c[2][4] = {{local[0].x, local[0].z, local[1].x, local[1].z}, {local[0].y, local[0].w, local[1].y, local[1].w}};
    if (more) fetch_local(slot + on);
    if (keep) {
      __syncthreads();  // the tile of the segment before has been read
#pragma unroll
      for (int h = 0; h < 2; ++h)
        *reinterpret_cast<float4*>(tile + (r + 8 * h) * STRIDE + column) = make_float4(s[h][0], s[h][1], s[h][2], s[h][3]);
      __syncthreads();
    }
#pragma unroll
    for (int j = 0; j < STEPS; ++j) {
      if (keep) {
        unsigned hi[4], lo[4];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float2 two = *reinterpret_cast<const float2*>(tile + (r + 8 * h) * STRIDE + 8 * j + 2 * q);
          const gdr::Parts a0(two.x), a1(two.y);
          hi[h] = a0.hi;
          lo[h] = a0.lo;
          hi[h + 2] = a1.hi;
          lo[h + 2] = a1.lo;
        }
#pragma unroll
        for (int t = 0; t < 2; ++t) {
          const float2 of_k = t ? make_float2(phi[j][0].y, phi[j][1].y) : make_float2(phi[j][0].x, phi[j][1].x);
          const float2 two = REVERSE ? phi[j][t] : of_k;
          const gdr::Parts b0(two.x), b1(two.y);
          gdr::mma(c[t], lo, b0.hi, b1.hi);
          gdr::mma(c[t], hi, b0.lo, b1.lo);
          gdr::mma(c[t], hi, b0.hi, b1.hi);
        }
      }
      if (next_keep) fetch_phi(j, slot + on);
    }
    keep = next_keep;
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int e = 0; e < 4; ++e) s[h][e] = c[e % 2][2 * h + e / 2];
  }
}
