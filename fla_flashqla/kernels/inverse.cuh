// SPDX-License-Identifier: MIT
// A = (I + L)^-1 diag(beta) of one 64-token chunk, by one warp;
// L_ij = beta_i rk_i rk_j kk_ij 2^(gc_i - gc_j) for i > j, else 0.
//
// In 16 x 16 blocks: the four diagonal blocks are inverted in float32 by forward substitution, a column per lane; then
//     T10 = -T1 (L10 T0),   T32 = -T3 (L32 T2)                                 [16, 16]
//     T_BA = -T_B (L_BA T_A),  T_A = [T0 0; T10 T1],  T_B = [T2 0; T32 T3]     [32, 32]
// on tensor cores. Each product P = X Y is taken as P^T = Y^T X^T or P = X (Y^T)^T, whichever makes the accumulator of one
// product the right operand of the next without leaving registers: the accumulator layout of Z is the right-operand layout of Z^T.
// Operands are split into a high and a low bfloat16 half, three products each (relative error about 2^-16): single halves lose
// their digits to the condition of I + L (equal keys, beta near 2, keys that are not normalised).
#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace gdr {

constexpr int BLOCK_STRIDE = 264;  // floats from one 16 x 16 block to the next: 8 banks further

// Element (r, c) of a 16 x 16 block: rows r and r + 2 use different banks.
__device__ __forceinline__ int block_at(int r, int c) { return r * 16 + (c ^ (r & 2) * 4); }

// Element (r, c) of kk [64, 64], c even: rows are swizzled so that accumulator-shaped accesses meet no bank twice.
__device__ __forceinline__ int kk_at(int r, int c) { return r * 64 + (c ^ r % 4 * 8); }

struct Split {  // four registers each: a left operand, or the right operands of two 8-column tiles
  unsigned hi[4], lo[4];
};

__device__ __forceinline__ unsigned pack(float x, float y) {
  __nv_bfloat162 p = __floats2bfloat162_rn(x, y);
  return *reinterpret_cast<unsigned*>(&p);
}

__device__ __forceinline__ void split2(float x, float y, unsigned& hi, unsigned& lo) {
  hi = pack(x, y);
  lo = pack(x - __uint_as_float(hi << 16), y - __uint_as_float(hi & 0xffff0000u));
}

// d[t][..] += left (16 x 16) times right (16 x 8 tiles t = 0, 1)
__device__ __forceinline__ void mma(float (&d)[2][4], const unsigned (&l)[4], const unsigned (&r)[4]) {
#pragma unroll
  for (int t = 0; t < 2; ++t)
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[t][0]), "+f"(d[t][1]), "+f"(d[t][2]), "+f"(d[t][3])
        : "r"(l[0]), "r"(l[1]), "r"(l[2]), "r"(l[3]), "r"(r[2 * t]), "r"(r[2 * t + 1]));
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
  const float *bk;    // [64] beta_i rk_i
  const float *rk;    // [64]
  const float *rows;  // [64] bk_i 2^(gc_i - s_I)
  const float *cols;  // [64] rk_j 2^(s_J+1 - gc_j)
  const float *beta;  // [64]
};

// Right operand L_IJ^T, I > J.
__device__ __forceinline__ Split right_l(const float* kk, const Gates& g, int I, int J, int lane) {
  float z[2][4];
  const float between = I == J + 1 ? 1.f : exp2f(g.gc[16 * I - 1] - g.gc[16 * J + 15]);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int i = 16 * I + 8 * h + lane / 4;
    const float row = g.rows[i] * between;
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      const int j = 16 * J + 8 * t + 2 * (lane % 4);
      const float2 x = *reinterpret_cast<const float2*>(kk + kk_at(i, j));
      const float2 c = *reinterpret_cast<const float2*>(g.cols + j);
      z[t][2 * h] = x.x * c.x * row;
      z[t][2 * h + 1] = x.y * c.y * row;
    }
  }
  return right_of(z);
}

template <typename T>
__device__ __forceinline__ unsigned pack_out(float x, float y);
template <>
__device__ __forceinline__ unsigned pack_out<__nv_bfloat16>(float x, float y) {
  return pack(x, y);
}
template <>
__device__ __forceinline__ unsigned pack_out<__half>(float x, float y) {
  __half2 p = __floats2half2_rn(x, y);
  return *reinterpret_cast<unsigned*>(&p);
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

// Blocks (I, J) and (I, J + 1) times diag(beta) to the result. Neighbouring lanes exchange halves: 16 bytes a lane and row.
template <typename T>
__device__ __forceinline__ void store(T* out, const Gates& g, int I, int J, const Rows& x, const Rows& y, int lane) {
  const float4 bx = *reinterpret_cast<const float4*>(g.beta + 16 * J + 4 * (lane % 4));
  const float4 by = *reinterpret_cast<const float4*>(g.beta + 16 * J + 16 + 4 * (lane % 4));
  const bool odd = lane % 2;
  uint4* p = reinterpret_cast<uint4*>(out) + lane / 4 * 8 + 2 * (lane % 2) + lane % 4 / 2 + (16 * I * 8 + 2 * J);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float4 a = h ? x.bottom : x.top, b = h ? y.bottom : y.top;
    const uint2 left = make_uint2(pack_out<T>(a.x * bx.x, a.y * bx.y), pack_out<T>(a.z * bx.z, a.w * bx.w));
    const uint2 right = make_uint2(pack_out<T>(b.x * by.x, b.y * by.y), pack_out<T>(b.z * by.z, b.w * by.w));
    const uint2 mine = odd ? right : left, send = odd ? left : right;
    const uint2 other = make_uint2(__shfl_xor_sync(~0u, send.x, 1), __shfl_xor_sync(~0u, send.y, 1));
    const uint2 first = odd ? other : mine, second = odd ? mine : other;
    p[h * 64] = make_uint4(first.x, first.y, second.x, second.y);
  }
}

// kk [64, 64], the gates and 6 blocks of scratch for this warp in shared memory, out [64, 64] in global memory. Called by a whole
// warp.
template <typename T>
__device__ __forceinline__ void invert(const float* kk, const Gates& g, float* diag, T* out) {
  int lane = threadIdx.x % 32;
  asm volatile("" : "+r"(lane));  // or the addresses below are made once for all heads, and spilled
  float* const off = diag + 4 * BLOCK_STRIDE;
  // transposed diagonal blocks of L, from the symmetric kk
#pragma unroll
  for (int b = 0; b < 4; ++b) {
    float2 gc[2], f[2];
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      gc[t] = *reinterpret_cast<const float2*>(g.gc + 16 * b + 8 * t + 2 * (lane % 4));
      f[t] = *reinterpret_cast<const float2*>(g.bk + 16 * b + 8 * t + 2 * (lane % 4));
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int r = 8 * h + lane / 4, j = 16 * b + r;
      const float col_gc = g.gc[j], col_rk = g.rk[j];
#pragma unroll
      for (int t = h; t < 2; ++t) {  // the rest is never read
        const int c = 8 * t + 2 * (lane % 4);
        const float2 x = *reinterpret_cast<const float2*>(kk + kk_at(j, 16 * b + c));
        float2 y;
        y.x = c > r ? x.x * f[t].x * col_rk * exp2f(gc[t].x - col_gc) : 0.f;
        y.y = c + 1 > r ? x.y * f[t].y * col_rk * exp2f(gc[t].y - col_gc) : 0.f;
        *reinterpret_cast<float2*>(diag + b * BLOCK_STRIDE + block_at(r, c)) = y;
      }
    }
  }
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
#pragma unroll 1
  for (int b = 0; b < 2; ++b) {
    store(out, g, 2 * b, 2 * b, load_rows(diag + 2 * b * BLOCK_STRIDE, lane), zero, lane);
    float y[2][4] = {}, d[2][4] = {};
    mma_split(y, left_transposed(diag + 2 * b * BLOCK_STRIDE, lane), right_l(kk, g, 2 * b + 1, 2 * b, lane));
    mma_split(d, left(diag + (2 * b + 1) * BLOCK_STRIDE, lane), right_of(y));
    const Rows t = negated(d);
    store_rows(off + b * BLOCK_STRIDE, t, lane);
    store(out, g, 2 * b + 1, 2 * b, t, load_rows(diag + (2 * b + 1) * BLOCK_STRIDE, lane), lane);
  }
  __syncwarp();
  // T_BA: y[i][j] = the rows of Y^T, Y = L_BA T_A, that belong to block column i and block row j of Y
  Split right[2][2];
  {
    float y[2][2][2][4] = {};
    {
      const Split t10 = left_transposed(off, lane), t1 = left_transposed(diag + BLOCK_STRIDE, lane);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const Split l = right_l(kk, g, 2 + j, 1, lane);
        mma_split(y[0][j], t10, l);
        mma_split(y[1][j], t1, l);
      }
    }
    const Split t0 = left_transposed(diag, lane);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      mma_split(y[0][j], t0, right_l(kk, g, 2 + j, 0, lane));
#pragma unroll
      for (int i = 0; i < 2; ++i) right[i][j] = right_of(y[i][j]);
    }
  }
  float d[2][2][4] = {};
  {
    const Split t2 = left(diag + 2 * BLOCK_STRIDE, lane);
#pragma unroll
    for (int i = 0; i < 2; ++i) mma_split(d[i], t2, right[i][0]);
    store(out, g, 2, 0, negated(d[0]), negated(d[1]), lane);
  }
  float e[2][2][4] = {};
  {
    const Split t32 = left(off + BLOCK_STRIDE, lane);
#pragma unroll
    for (int i = 0; i < 2; ++i) mma_split(e[i], t32, right[i][0]);
  }
  {
    const Split t3 = left(diag + 3 * BLOCK_STRIDE, lane);
#pragma unroll
    for (int i = 0; i < 2; ++i) mma_split(e[i], t3, right[i][1]);
  }
  store(out, g, 3, 0, negated(e[0]), negated(e[1]), lane);
}

}  // namespace gdr

// K K^T from the accumulator of a warpgroup [64, 64] to shared memory; rows and columns behind the chunk's last token become 0,
// whatever the memory that K was read from holds there.
__device__ __forceinline__ void gdr_store_kk(const float* z, void* kk, int valid) {
  const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, column = 2 * (threadIdx.x % 4);
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const int r = row + i % 2 * 8, c = column + i / 2 * 8;
    float2 x = make_float2(z[2 * i], z[2 * i + 1]);
    if (valid < 64) x = make_float2(r < valid && c < valid ? x.x : 0.f, r < valid && c + 1 < valid ? x.y : 0.f);
    *reinterpret_cast<float2*>(reinterpret_cast<float*>(kk) + gdr::kk_at(r, c)) = x;
  }
}

// gates [5, 64]: gc, bk, rows, cols, beta of `gdr::Gates`.
#define GDR_INVERT(NAME, TYPE)                                                                                           \
  __device__ __forceinline__ void NAME(const void* kk, const float* gates, const float* rk, float* scratch, void* out) { \
    const gdr::Gates g = {gates, gates + 64, rk, gates + 128, gates + 192, gates + 256};                                 \
    gdr::invert<TYPE>(reinterpret_cast<const float*>(kk), g, scratch, reinterpret_cast<TYPE*>(out));                     \
  }
GDR_INVERT(gdr_invert_bfloat16, __nv_bfloat16)
GDR_INVERT(gdr_invert_float16, __half)
