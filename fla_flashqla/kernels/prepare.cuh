// SPDX-License-Identifier: MIT
// Device functions of prepare.py: K K^T of a chunk of 64 tokens by a block, then R = (I + L)^-1 by a warp a value head;
// L_ij = rk_i rk_j beta_j kk_ij 2^(gc_i - gc_j) for i > j, else 0.
//
// In 16 x 16 blocks: the four diagonal blocks are inverted in float32 by forward substitution, a column per lane; then
//     T10 = -T1 (L10 T0),   T32 = -T3 (L32 T2)                                 [16, 16]
//     T_BA = -T_B (L_BA T_A),  T_A = [T0 0; T10 T1],  T_B = [T2 0; T32 T3]     [32, 32]
// on tensor cores. Each product P = X Y is taken as P^T = Y^T X^T or P = X (Y^T)^T, whichever makes the accumulator of one
// product the right operand of the next without leaving registers: the accumulator layout of Z is the right-operand layout of Z^T.
// Operands are split into a high and a low bfloat16 half, three products each (relative error about 2^-16): single halves lose
// their digits to the condition of I + L (equal keys, beta near 2, keys that are not normalised).

namespace gdr {

constexpr int BLOCK_STRIDE = 264;  // floats from one 16 x 16 block to the next: 8 banks further

// Element (r, c) of a 16 x 16 block: rows r and r + 2 use different banks.
__device__ __forceinline__ int block_at(int r, int c) { return r * 16 + (c ^ (r & 2) * 4); }

// K K^T is kept by blocks of 16 x 16 as accumulators lie in a warp: of a diagonal block, whose lower left is never read, the upper
// four floats of both sides a lane (row lane / 4, its two columns on the left, on the right), then the lower right two; behind these,
// (I, J), I > J, four (row lane / 4, its two columns; row lane / 4 + 8) for the left 8 columns, then four for the right. A warp that
// is alone leaves the latter in its registers.
constexpr int KK_DIAGONAL = 192, KK_REST = 4 * KK_DIAGONAL;  // floats a diagonal block; in front of the others
using Products = float[4 / GDR_WARPS][4][2][4];              // blocks (I, J) of the block rows I of a warp, J <= I

struct Split {  // four registers each: a left operand, or the right operands of two 8-column tiles
  unsigned hi[4], lo[4];
};

__device__ __forceinline__ void split2(float x, float y, unsigned& hi, unsigned& lo) {
  hi = pack(x, y, __nv_bfloat16());
  lo = pack(x - __uint_as_float(hi << 16), y - __uint_as_float(hi & 0xffff0000u), __nv_bfloat16());
}

// d[t] += left times right tiles t = 0, 1
__device__ __forceinline__ void mma(float (&d)[2][4], const unsigned (&l)[4], const unsigned (&r)[4]) {
  mma(d[0], l, r[0], r[1], __nv_bfloat16());
  mma(d[1], l, r[2], r[3], __nv_bfloat16());
}

__device__ __forceinline__ void mma_split(float (&d)[2][4], const Split& l, const Split& r) {
  mma(d, l.hi, r.hi);
  mma(d, l.lo, r.hi);
  mma(d, l.hi, r.lo);
}

// Accumulator of Z (16 x 16) as the right operand Z^T.
__device__ __forceinline__ Split right_of(const float (&z)[2][4]) {
  Split s;
#pragma unroll
  for (int t = 0; t < 2; ++t)
#pragma unroll
    for (int h = 0; h < 2; ++h) split2(z[h][2 * t], z[h][2 * t + 1], s.hi[2 * t + h], s.lo[2 * t + h]);
  return s;
}

// Left operand from a 16 x 16 block in shared memory.
__device__ __forceinline__ Split left(const float* block, int lane) {
  const int at = block_at(lane / 4, 2 * (lane % 4));  // the same swizzle 8 rows further, the other half 8 columns further
  Split s;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 x = *reinterpret_cast<const float2*>(block + (i / 2 ? at ^ 8 : at) + i % 2 * 8 * 16);
    split2(x.x, x.y, s.hi[i], s.lo[i]);
  }
  return s;
}

// Left operand: transpose of a block, its row 8 t + r being row 2 r + t of the transpose. A product whose right operand comes
// from such rows leaves four neighbouring columns in each lane: columns 0 to 3 are elements 0 of tiles 0 and 1, then elements 1.
__device__ __forceinline__ Split left_transposed(const float* block, int lane) {
  const float* p = block + block_at(2 * (lane % 4), 2 * (lane / 4));
  Split s;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const float2 x = *reinterpret_cast<const float2*>(p + i / 2 * 8 * 16);
    const float2 y = *reinterpret_cast<const float2*>(p + (i / 2 * 8 + 1) * 16);
    split2(x.x, y.x, s.hi[i], s.lo[i]);
    split2(x.y, y.y, s.hi[i + 1], s.lo[i + 1]);
  }
  return s;
}

// What the warp knows of its value head's gates, in shared memory. With s_I = gc of the last token before block I, the decay
// between rows of block I and columns of an earlier block J is 2^(gc_i - s_I) 2^(s_I - s_J+1) 2^(s_J+1 - gc_j), no exponent of
// which is positive when no gate is.
struct Gates {
  const float *gc;    // [64] cumulative gates, base 2
  const float *bk;    // [64] beta_j rk_j
  const float *rk;    // [64]
  const float *rows;  // [64] rk_i 2^(gc_i - s_I)
  const float *cols;  // [64] bk_j 2^(s_J+1 - gc_j)
};

// Right operand L_IJ^T, I > J.
__device__ __forceinline__ Split right_l(const Products& d, const float* kk, const Gates& g, int I, int J, int lane) {
  float z[2][4];
  const float between = I == J + 1 ? 1.f : exp2f(g.gc[16 * I - 1] - g.gc[16 * J + 15]);
  const float row[2] = {g.rows[16 * I + lane / 4] * between, g.rows[16 * I + 8 + lane / 4] * between};
#pragma unroll
  for (int t = 0; t < 2; ++t) {
    const float4 x = GDR_WARPS == 1
                         ? make_float4(d[I][J][t][0], d[I][J][t][1], d[I][J][t][2], d[I][J][t][3])
                         : reinterpret_cast<const float4*>(kk + KK_REST)[(I * (I - 1) / 2 + J) * 64 + t * 32 + lane];
    const float2 c = *reinterpret_cast<const float2*>(g.cols + 16 * J + 8 * t + 2 * (lane % 4));
    z[t][0] = x.x * c.x * row[0];
    z[t][1] = x.y * c.y * row[0];
    z[t][2] = x.z * c.x * row[1];
    z[t][3] = x.w * c.y * row[1];
  }
  return right_of(z);
}

struct Rows {  // of a block: row lane / 4 and row lane / 4 + 8, four neighbouring columns
  float4 top, bottom;
};

__device__ __forceinline__ Rows load_rows(const float* block, int lane) {
  const float* p = block + block_at(lane / 4, 4 * (lane % 4));  // 8 rows further the swizzle is the same
  return {*reinterpret_cast<const float4*>(p), *reinterpret_cast<const float4*>(p + 8 * 16)};
}

__device__ __forceinline__ void store_rows(float* block, const Rows& x, int lane) {
  float* p = block + block_at(lane / 4, 4 * (lane % 4));
  *reinterpret_cast<float4*>(p) = x.top;
  *reinterpret_cast<float4*>(p + 8 * 16) = x.bottom;
}

// The negated accumulator of a product whose columns are permuted as `left_transposed` says.
__device__ __forceinline__ Rows negated(const float (&d)[2][4]) {
  return {make_float4(-d[0][0], -d[1][0], -d[0][1], -d[1][1]), make_float4(-d[0][2], -d[1][2], -d[0][3], -d[1][3])};
}

// Blocks (I, J) and (I, J + 1) to the result. Neighbouring lanes exchange halves: 16 bytes a lane and row.
template <typename T>
__device__ __forceinline__ void store(T* out, int I, int J, const Rows& x, const Rows& y, int lane) {
  const bool odd = lane % 2;
  uint4* p = reinterpret_cast<uint4*>(out) + lane / 4 * 8 + 2 * (lane % 2) + lane % 4 / 2 + (16 * I * 8 + 2 * J);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float4 a = h ? x.bottom : x.top, b = h ? y.bottom : y.top;
    const uint2 left = make_uint2(pack(a.x, a.y, T()), pack(a.z, a.w, T()));
    const uint2 right = make_uint2(pack(b.x, b.y, T()), pack(b.z, b.w, T()));
    const uint2 mine = odd ? right : left, send = odd ? left : right;
    const uint2 other = make_uint2(__shfl_xor_sync(~0u, send.x, 1), __shfl_xor_sync(~0u, send.y, 1));
    const uint2 first = odd ? other : mine, second = odd ? mine : other;
    p[h * 64] = make_uint4(first.x, first.y, second.x, second.y);
  }
}

// kk, the gates and scratch for this warp in shared memory, out [64, 64] in global memory. Called by a whole warp.
template <typename T>
__device__ __forceinline__ void invert(const Products& d, const float* kk, const Gates& g, float* diag, T* out) {
  int lane = threadIdx.x % 32;
  asm volatile("" : "+r"(lane));  // or the addresses below are made once for all heads, and spilled
  float* const off = diag + 3 * BLOCK_STRIDE + 256;
  // transposed diagonal blocks of L, from the symmetric kk; all of them before the first is stored, or each waits for the one before
  float2 l[4][3];
#pragma unroll
  for (int b = 0; b < 4; ++b) {
    const float* const z = kk + b * KK_DIAGONAL;
    const float4 x0 = reinterpret_cast<const float4*>(z)[lane];
    const float2 x1 = reinterpret_cast<const float2*>(z + 128)[lane];
    float2 gc[2], f[2];
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      gc[t] = *reinterpret_cast<const float2*>(g.gc + 16 * b + 8 * t + 2 * (lane % 4));
      f[t] = *reinterpret_cast<const float2*>(g.rk + 16 * b + 8 * t + 2 * (lane % 4));
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int r = 8 * h + lane / 4, j = 16 * b + r;
      const float col_gc = g.gc[j], col_bk = g.bk[j];
#pragma unroll
      for (int t = h; t < 2; ++t) {  // the rest is never read
        const int c = 8 * t + 2 * (lane % 4);
        const float2 x = h ? x1 : t ? make_float2(x0.z, x0.w) : make_float2(x0.x, x0.y);
        // column r of L, rows c and c + 1
        l[b][h + t].x = c > r ? x.x * f[t].x * col_bk * exp2f(gc[t].x - col_gc) : 0.f;
        l[b][h + t].y = c + 1 > r ? x.y * f[t].y * col_bk * exp2f(gc[t].y - col_gc) : 0.f;
      }
    }
  }
#pragma unroll
  for (int b = 0; b < 4; ++b)
#pragma unroll
    for (int i = 0; i < 3; ++i)
      *reinterpret_cast<float2*>(diag + b * BLOCK_STRIDE + block_at(i / 2 * 8 + lane / 4, (i + 1) / 2 * 8 + 2 * (lane % 4))) = l[b][i];
  __syncwarp();
  // columns lane % 8 and lane % 8 + 8 of T_b, b = lane / 8; the latter is zero above its row 8
  {
    float x[16], y[8];
    float* d = diag + lane / 8 * BLOCK_STRIDE;
#pragma unroll
    for (int i = 0; i < 16; ++i) x[i] = i == lane % 8 ? 1.f : 0.f;
#pragma unroll
    for (int i = 0; i < 8; ++i) y[i] = x[i];
#pragma unroll
    for (int i = 0; i < 15; ++i)
#pragma unroll
      for (int m = (i + 1) / 4; m < 4; ++m) {
        const float4 l = *reinterpret_cast<const float4*>(d + block_at(i, 4 * m));
        const float row[4] = {l.x, l.y, l.z, l.w};
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if (4 * m + e <= i) continue;
          x[4 * m + e] -= row[e] * x[i];
          if (i >= 8) y[4 * m + e - 8] -= row[e] * y[i - 8];
        }
      }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      d[block_at(i, lane % 8)] = x[i];
      d[block_at(i, lane % 8 + 8)] = i < 8 ? 0.f : y[i < 8 ? 0 : i - 8];
    }
  }
  __syncwarp();
  const Rows zero = {};
#pragma unroll
  for (int r = 0; r < 32; r += 8)  // right of the first two block rows
    *reinterpret_cast<uint4*>(out + (r + lane / 4) * 64 + 32 + lane % 4 * 8) = make_uint4(0, 0, 0, 0);
  // T10 and T32
  {
    Split right[2];
#pragma unroll
    for (int b = 0; b < 2; ++b) {
      float y[2][4] = {};
      mma_split(y, left_transposed(diag + 2 * b * BLOCK_STRIDE, lane), right_l(d, kk, g, 2 * b + 1, 2 * b, lane));
      right[b] = right_of(y);
    }
    Rows t[2];
#pragma unroll
    for (int b = 0; b < 2; ++b) {
      float y[2][4] = {};
      mma_split(y, left(diag + (2 * b + 1) * BLOCK_STRIDE, lane), right[b]);
      t[b] = negated(y);
    }
#pragma unroll
    for (int b = 0; b < 2; ++b) {
      store_rows(off + b * 256, t[b], lane);
      store(out, 2 * b, 2 * b, load_rows(diag + 2 * b * BLOCK_STRIDE, lane), zero, lane);
      store(out, 2 * b + 1, 2 * b, t[b], load_rows(diag + (2 * b + 1) * BLOCK_STRIDE, lane), lane);
    }
  }
  __syncwarp();
  // T_BA by block rows j: y[i] = the rows of Y^T, Y = L_BA T_A, that belong to block column i and block row j of Y
  float e[2][2][4] = {};
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    Split right[2];
    {
      float y[2][2][4] = {};
      {
        const Split l = right_l(d, kk, g, 2 + j, 1, lane);
        mma_split(y[0], left_transposed(off, lane), l);
        mma_split(y[1], left_transposed(diag + BLOCK_STRIDE, lane), l);
      }
      mma_split(y[0], left_transposed(diag, lane), right_l(d, kk, g, 2 + j, 0, lane));
#pragma unroll
      for (int i = 0; i < 2; ++i) right[i] = right_of(y[i]);
    }
    if (j == 0) {
      float x[2][2][4] = {};
      const Split t2 = left(diag + 2 * BLOCK_STRIDE, lane);
#pragma unroll
      for (int i = 0; i < 2; ++i) mma_split(x[i], t2, right[i]);
      store(out, 2, 0, negated(x[0]), negated(x[1]), lane);
    }
    const Split t3 = left(j ? diag + 3 * BLOCK_STRIDE : off + 256, lane);
#pragma unroll
    for (int i = 0; i < 2; ++i) mma_split(e[i], t3, right[i]);
  }
  store(out, 3, 0, negated(e[0]), negated(e[1]), lane);
}

}  // namespace gdr

namespace gdr {

// 16 rows of 16 columns of K, from 16 I rows behind `at`.
__device__ __forceinline__ void load_k(unsigned (&x)[4], unsigned at, int I) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(at + I * 1024)
               : "memory");
}

// To d the share of a slice [64, 32] of K, as TMA swizzles them, in K K^T, lower blocks, by the GDR_WARPS warps of a block. Rows are
// loaded twice, in the order of registers of a left operand and of two right ones, which would take more instructions to rearrange.
template <typename T>
__device__ __forceinline__ void add_products(Products& d, const void* k, int slice) {
  constexpr int OWN = 4 / GDR_WARPS;  // block rows of a warp
  const int lane = threadIdx.x % 32, warp = GDR_WARPS == 1 ? 0 : threadIdx.x / 32;
  const unsigned base = static_cast<unsigned>(__cvta_generic_to_shared(k));
  const unsigned left = base + lane % 16 * 64, right = base + (lane % 8 + lane / 16 * 8) * 64;
#pragma unroll
  for (int s = 0; s < 2; ++s) {  // of 16 columns
    unsigned x[OWN][4];
#pragma unroll
    for (int n = 0; n < OWN; ++n) load_k(x[n], left + ((s * 2 + lane / 16) ^ lane / 2 % 4) * 16, slice * 4 + n * GDR_WARPS + warp);
#pragma unroll
    for (int J = 0; J < 4; ++J) {
      if (J > (OWN - 1) * GDR_WARPS + warp) continue;
      unsigned y[4];
      load_k(y, right + ((s * 2 + lane / 8 % 2) ^ lane / 2 % 4) * 16, slice * 4 + J);
#pragma unroll
      for (int n = 0; n < OWN; ++n)
        if (J <= n * GDR_WARPS + warp)
#pragma unroll
          for (int t = 0; t < 2; ++t) mma(d[n][J][t], x[n], y[2 * t], y[2 * t + 1], T());
    }
  }
}

// Of an accumulator of a diagonal block, element t of the diagonals that lanes with `on_diagonal` hold: row 8 t + lane / 4.
__device__ __forceinline__ bool on_diagonal(int lane) { return lane / 8 == lane % 4; }
__device__ __forceinline__ float diagonal(const float (&d)[2][4], int t, int lane) {
  return lane / 4 % 2 ? d[t][2 * t + 1] : d[t][2 * t];
}

// K K^T to kk, but for what stays in d. Rows and columns behind the chunk's last token become 0, whatever the tile held there.
// To k2 |k|^2, to rk 1; with `normalize` to rk 1 / |k|, and to k2 what that makes of it.
__device__ __forceinline__ void keep(Products& d, float* kk, float* rk, float* k2, int valid, int normalize, float eps) {
  const int lane = threadIdx.x % 32, warp = GDR_WARPS == 1 ? 0 : threadIdx.x / 32;
  if (valid < 64)
#pragma unroll
    for (int n = 0; n < 4 / GDR_WARPS; ++n)
#pragma unroll
      for (int J = 0; J < 4; ++J)
#pragma unroll
        for (int t = 0; t < 2; ++t)
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const int row = 16 * (n * GDR_WARPS + warp) + e / 2 * 8 + lane / 4, column = 16 * J + t * 8 + 2 * (lane % 4) + e % 2;
            if (max(row, column) >= valid) d[n][J][t][e] = 0.f;
          }
  float squares[4 / GDR_WARPS][2];
#pragma unroll
  for (int n = 0; n < 4 / GDR_WARPS; ++n) {
    const int I = n * GDR_WARPS + warp;
#pragma unroll
    for (int J = 0; J < 4; ++J) {
      if (J > I) continue;
      const float4 left = make_float4(d[n][J][0][0], d[n][J][0][1], d[n][J][0][2], d[n][J][0][3]);
      const float4 right = make_float4(d[n][J][1][0], d[n][J][1][1], d[n][J][1][2], d[n][J][1][3]);
      if (I > J) {
        if (GDR_WARPS == 1) continue;
        float4* const p = reinterpret_cast<float4*>(kk + KK_REST) + (I * (I - 1) / 2 + J) * 64 + lane;
        p[0] = left;
        p[32] = right;
        continue;
      }
      float* const p = kk + I * KK_DIAGONAL;
      reinterpret_cast<float4*>(p)[lane] = make_float4(left.x, left.y, right.x, right.y);
      reinterpret_cast<float2*>(p + 128)[lane] = make_float2(right.z, right.w);
#pragma unroll
      for (int t = 0; t < 2; ++t) squares[n][t] = diagonal(d[n][J], t, lane);
    }
  }
  if (!on_diagonal(lane)) return;
#pragma unroll
  for (int n = 0; n < 4 / GDR_WARPS; ++n)
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      const int r = 16 * (n * GDR_WARPS + warp) + 8 * t + lane / 4;
      rk[r] = !normalize ? 1.f : r < valid ? rsqrtf(squares[n][t] + eps) : 0.f;
      k2[r] = normalize ? squares[n][t] / (squares[n][t] + eps) : squares[n][t];
    }
}

// 1 / |q| of a chunk's rows to rq by the warps of a block, 1 without `normalize`. The squares are diagonals of Q Q^T. In what order
// columns are taken does not matter to a product of Q with itself: a lane loads eight neighbours of a row.
template <typename T>
__device__ __forceinline__ void q_factors(const T* q, int stride, float* rq, int valid, int normalize, float eps) {
  const int lane = threadIdx.x % 32, warp = GDR_WARPS == 1 ? 0 : threadIdx.x / 32;
  if (!normalize) {
    if (warp == 0) rq[lane] = rq[lane + 32] = 1.f;
    return;
  }
#pragma unroll
  for (int n = 0; n < 4 / GDR_WARPS; ++n) {
    const int r = 16 * (n * GDR_WARPS + warp) + lane / 4;
    uint4 x[2][4];  // of rows r and r + 8
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        x[h][i] = r + 8 * h < valid ? reinterpret_cast<const uint4*>(q + static_cast<long long>(r + 8 * h) * stride)[4 * i + lane % 4]
                                    : make_uint4(0, 0, 0, 0);
    float d[2][4] = {};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const unsigned left[2][4] = {{x[0][i].x, x[1][i].x, x[0][i].y, x[1][i].y}, {x[0][i].z, x[1][i].z, x[0][i].w, x[1][i].w}};
#pragma unroll
      for (int s = 0; s < 2; ++s)
#pragma unroll
        for (int t = 0; t < 2; ++t) mma(d[t], left[s], left[s][t], left[s][2 + t], T());
    }
    if (on_diagonal(lane))
#pragma unroll
      for (int t = 0; t < 2; ++t) rq[r + 8 * t] = rsqrtf(diagonal(d, t, lane) + eps);
  }
}

// Negates the rows of a matrix [64, 64] that the warp wrote whose beta is negative.
template <typename T>
__device__ __forceinline__ void negate_rows(T* out, const float* beta) {
  const int lane = threadIdx.x % 32;
  if (!__any_sync(~0u, min(beta[lane], beta[lane + 32]) < 0.f)) return;
  __syncwarp();
  for (int r = 0; r < 64; ++r)
    if (beta[r] < 0.f) reinterpret_cast<unsigned*>(out + r * 64)[lane] ^= 0x80008000u;
}

}  // namespace gdr

// Gates [2, 64] of a value head: gc, beta; [3, 64] of a warp: bk, rows, cols.
#define GDR_PREPARE(NAME, TYPE)                                                                                          \
  __device__ __forceinline__ void gdr_products_##NAME(float* d, const void* k, int slice) {                              \
    gdr::add_products<TYPE>(*reinterpret_cast<gdr::Products*>(d), k, slice);                                             \
  }                                                                                                                      \
  __device__ __forceinline__ void gdr_q_factors_##NAME(const void* q, int stride, float* rq, int valid, int normalize,   \
                                                       float eps) {                                                      \
    gdr::q_factors(reinterpret_cast<const TYPE*>(q), stride, rq, valid, normalize, eps);                                 \
  }                                                                                                                      \
  __device__ __forceinline__ void gdr_invert_##NAME(float* d, const float* kk, const float* gc, const float* mine,       \
                                                    const float* rk, float* scratch, void* out) {                        \
    const gdr::Gates g = {gc, mine, rk, mine + 64, mine + 128};                                                          \
    gdr::invert<TYPE>(*reinterpret_cast<gdr::Products*>(d), kk, g, scratch, reinterpret_cast<TYPE*>(out));               \
    gdr::negate_rows(reinterpret_cast<TYPE*>(out), gc + 64);                                                             \
  }
GDR_PREPARE(bfloat16, __nv_bfloat16)
GDR_PREPARE(float16, __half)

__device__ __forceinline__ void gdr_keep(float* d, float* kk, float* rk, float* k2, int valid, int normalize, float eps) {
  gdr::keep(*reinterpret_cast<gdr::Products*>(d), kk, rk, k2, valid, normalize, eps);
}
