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

// K K^T is kept by blocks of 16 x 16 as accumulators lie in a warp: (I, J), I > J, four floats (row lane / 4, its two columns; row
// lane / 4 + 8) a lane for the left 8 columns, then four for the right; of a diagonal block, whose lower left is never read, the
// upper four of both sides, then the lower right two.
constexpr int KK_DIAGONAL = 6 * 256, KK_SIZE = KK_DIAGONAL + 4 * 192;  // floats
constexpr int SCRATCH = 3 * BLOCK_STRIDE + 3 * 256;

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
__device__ __forceinline__ Split right_l(const float* kk, const Gates& g, int I, int J, int lane) {
  float z[2][4];
  const float between = I == J + 1 ? 1.f : exp2f(g.gc[16 * I - 1] - g.gc[16 * J + 15]);
  const float row[2] = {g.rows[16 * I + lane / 4] * between, g.rows[16 * I + 8 + lane / 4] * between};
#pragma unroll
  for (int t = 0; t < 2; ++t) {
    const float4 x = reinterpret_cast<const float4*>(kk)[(I * (I - 1) / 2 + J) * 64 + t * 32 + lane];
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

// kk, the gates and SCRATCH floats for this warp in shared memory, out [64, 64] in global memory. Called by a whole
// warp.
template <typename T>
__device__ __forceinline__ void invert(const float* kk, const Gates& g, float* diag, T* out) {
  int lane = threadIdx.x % 32;
  asm volatile("" : "+r"(lane));  // or the addresses below are made once for all heads, and spilled
  float* const off = diag + 3 * BLOCK_STRIDE + 256;
  // transposed diagonal blocks of L, from the symmetric kk
#pragma unroll
  for (int b = 0; b < 4; ++b) {
    const float* const z = kk + KK_DIAGONAL + b * 192;
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
        float2 y;  // column r of L, rows c and c + 1
        y.x = c > r ? x.x * f[t].x * col_bk * exp2f(gc[t].x - col_gc) : 0.f;
        y.y = c + 1 > r ? x.y * f[t].y * col_bk * exp2f(gc[t].y - col_gc) : 0.f;
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
    store(out, 2 * b, 2 * b, load_rows(diag + 2 * b * BLOCK_STRIDE, lane), zero, lane);
    float y[2][4] = {}, d[2][4] = {};
    mma_split(y, left_transposed(diag + 2 * b * BLOCK_STRIDE, lane), right_l(kk, g, 2 * b + 1, 2 * b, lane));
    mma_split(d, left(diag + (2 * b + 1) * BLOCK_STRIDE, lane), right_of(y));
    const Rows t = negated(d);
    store_rows(off + b * 256, t, lane);
    store(out, 2 * b + 1, 2 * b, t, load_rows(diag + (2 * b + 1) * BLOCK_STRIDE, lane), lane);
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
    store(out, 2, 0, negated(d[0]), negated(d[1]), lane);
  }
  float e[2][2][4] = {};
  {
    const Split t32 = left(off + 256, lane);
#pragma unroll
    for (int i = 0; i < 2; ++i) mma_split(e[i], t32, right[i][0]);
  }
  {
    const Split t3 = left(diag + 3 * BLOCK_STRIDE, lane);
#pragma unroll
    for (int i = 0; i < 2; ++i) mma_split(e[i], t3, right[i][1]);
  }
  store(out, 3, 0, negated(e[0]), negated(e[1]), lane);
}

}  // namespace gdr

namespace gdr {

// Rows 16 I .. 16 I + 15 and columns 16 s .. 16 s + 15 of a tile [64, 128] as TMA swizzles it, as a left operand; registers
// 0 and 2, 1 and 3 are the right operands of its transpose.
__device__ __forceinline__ void load_k(unsigned (&x)[4], unsigned tile, int I, int s) {
  const int lane = threadIdx.x % 32;
  const unsigned at = tile + s / 4 * 8192 + (16 * I + lane % 16) * 128 + ((s % 4 * 2 + lane / 16) ^ lane % 8) * 16;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(at)
               : "memory");
}

// K K^T, lower blocks, by the GDR_WARPS warps of a block, from the tile of K and into its place. Rows and columns behind the
// chunk's last token become 0, whatever the tile holds there. To k2 |k|^2; with `normalize` 1 / |k| to rk, and to k2 what that makes of it.
template <typename T>
__device__ __forceinline__ void kk(void* tile, float* rk, float* k2, int valid, int normalize, float eps) {
  constexpr int OWN = 4 / GDR_WARPS;  // block rows of a warp
  const int lane = threadIdx.x % 32, warp = GDR_WARPS == 1 ? 0 : threadIdx.x / 32;
  const unsigned base = static_cast<unsigned>(__cvta_generic_to_shared(tile));
  float* const kk = reinterpret_cast<float*>(tile);
  float d[OWN][4][2][4] = {};
#pragma unroll
  for (int s = 0; s < 8; ++s) {
    unsigned x[4][4], row[4];
    if (GDR_WARPS > 1) load_k(row, base, warp, s);
#pragma unroll
    for (int J = 0; J < 4; ++J)
      if (GDR_WARPS == 1 || J <= warp) load_k(x[J], base, J, s);
#pragma unroll
    for (int n = 0; n < OWN; ++n)
#pragma unroll
      for (int J = 0; J < 4; ++J)
        if (J <= n * GDR_WARPS + warp)
#pragma unroll
          for (int t = 0; t < 2; ++t) mma(d[n][J][t], GDR_WARPS == 1 ? x[n] : row, x[J][t], x[J][2 + t], T());
  }
  __syncthreads();
#pragma unroll
  for (int n = 0; n < OWN; ++n) {
    const int I = n * GDR_WARPS + warp;
#pragma unroll
    for (int J = 0; J < 4; ++J) {
      if (J > I) continue;
      float4 x[2];  // the left and the right 8 columns
#pragma unroll
      for (int t = 0; t < 2; ++t) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int r = 16 * I + e / 2 * 8 + lane / 4, c = 16 * J + t * 8 + 2 * (lane % 4) + e % 2;
          if (max(r, c) >= valid) d[n][J][t][e] = 0.f;
          if (e / 2 == t && r == c) {
            const float square = d[n][J][t][e];
            if (normalize) rk[r] = r < valid ? rsqrtf(square + eps) : 0.f;
            k2[r] = normalize ? square / (square + eps) : square;
          }
        }
        x[t] = make_float4(d[n][J][t][0], d[n][J][t][1], d[n][J][t][2], d[n][J][t][3]);
      }
      if (I > J) {
        float4* const p = reinterpret_cast<float4*>(kk) + (I * (I - 1) / 2 + J) * 64 + lane;
        p[0] = x[0];
        p[32] = x[1];
      } else {
        float* const p = kk + KK_DIAGONAL + I * 192;
        reinterpret_cast<float4*>(p)[lane] = make_float4(x[0].x, x[0].y, x[1].x, x[1].y);
        reinterpret_cast<float2*>(p + 128)[lane] = make_float2(x[1].z, x[1].w);
      }
    }
  }
  __syncthreads();
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
#define GDR_PREPARE(NAME, TYPE)                                                                                      \
  __device__ __forceinline__ void gdr_kk_##NAME(void* tile, float* rk, float* k2, int valid, int normalize,          \
                                                float eps) {                                                         \
    gdr::kk<TYPE>(tile, rk, k2, valid, normalize, eps);                                                              \
  }                                                                                                                  \
  __device__ __forceinline__ void gdr_invert_##NAME(void* tile, const float* gc, const float* mine, const float* rk, \
                                                    float* scratch, void* out) {                                     \
    const gdr::Gates g = {gc, mine, rk, mine + 64, mine + 128};                                                      \
    const int warp = threadIdx.x / 32;                                                                               \
    float* const kk = reinterpret_cast<float*>(tile);                                                                \
    float* const own = warp ? scratch + (warp - 1) * gdr::SCRATCH : kk + gdr::KK_SIZE;                               \
    gdr::invert<TYPE>(kk, g, own, reinterpret_cast<TYPE*>(out));                                                     \
    gdr::negate_rows(reinterpret_cast<TYPE*>(out), gc + 64);                                                         \
  }
GDR_PREPARE(bfloat16, __nv_bfloat16)
GDR_PREPARE(float16, __half)
