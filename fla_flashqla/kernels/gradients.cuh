// SPDX-License-Identifier: MIT
// Device functions of gradients.py.

namespace gdr {
constexpr int CHUNK = 64;
// Where the rows of `gates` begin that are used here (prepare.py), and those of a head's sums (gradients.py)
enum : int { PR = 3 * CHUNK, DECAY = 5 * CHUNK, GC = 6 * CHUNK, BETA = 7 * CHUNK };
enum : int { SUM_K = CHUNK, SUM_Z = 2 * CHUNK, SUM_BETA = 3 * CHUNK, SUM_BB = 4 * CHUNK, SUM_DOT = 5 * CHUNK, SUM_DECAY = SUM_DOT + 2 };
}  // namespace gdr

// The sequence that a chunk slot belongs to: the last whose first slot is not behind it, `sequences` if it lies behind all. To `rows`,
// the chunk's first row and how many of its rows are the sequence's (or behind all; none or less if the slot has no chunk).
__device__ __forceinline__ int gdr_find(const int* cu, int step, int seqlen, int sequences, int slot, int tokens, int* rows) {
  const auto start = [=](int n) { return seqlen > 0 ? n * seqlen : cu[static_cast<long long>(n) * step]; };
  int n = 0;
  for (int upper = sequences; n < upper;) {
    const int middle = (n + upper + 1) / 2;
    if (start(middle) / gdr::CHUNK + middle <= slot)
      n = middle;
    else
      upper = middle - 1;
  }
  const int bos = start(n), end = n < sequences ? start(n + 1) : tokens;
  rows[0] = bos + (slot - bos / gdr::CHUNK - n) * gdr::CHUNK;
  rows[1] = min(gdr::CHUNK, end - rows[0]);
  return n;
}

namespace gdr {

// The thread's index in its warpgroup. What is derived from it is derived anew each time: kept across the loop, all the addresses
// would take more registers than there are.
__device__ __forceinline__ int thread() {
  int t = threadIdx.x % 128;
  asm volatile("" : "+r"(t));
  return t;
}

// Rows of this thread in an accumulator of a warpgroup: first_row() and the 8th behind; columns 8 n + 2 (lane % 4) + {0, 1}.
__device__ __forceinline__ int first_row(int t) { return t / 32 * 16 + t % 32 / 4; }
__device__ __forceinline__ int first_row() { return first_row(thread()); }

__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// A tile [64 tokens, 64 columns] lies in rows of 128 bytes, swizzled as TMA does; a second one, for columns 64 to 127, 8192 bytes
// behind it. Where this lane's rows of 8 x 8 blocks begin for ldmatrix and stmatrix in accumulator order; 16 columns b further
// are found at ^ 32 (b % 4) + 8192 (b / 4).
__device__ __forceinline__ unsigned lane_in(const void* tile) {
  const int t = thread(), row = t / 32 * 16 + t % 16;
  return static_cast<unsigned>(__cvta_generic_to_shared(tile)) + row * 128 + ((t / 16 % 2) ^ (t % 8)) * 16;
}

__device__ __forceinline__ void ldmatrix(unsigned at, unsigned (&u)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(u[0]), "=r"(u[1]), "=r"(u[2]), "=r"(u[3])
               : "r"(at)
               : "memory");
}

// 16 columns of a tile [64, 128] in accumulator order: x[0], x[1] of the first row, x[2], x[3] of the second, and so on
template <typename T>
__device__ __forceinline__ void columns(unsigned lane, int b, float (&x)[8]) {
  unsigned u[4];
  ldmatrix((lane ^ (b % 4 * 32)) + b / 4 * 8192, u);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 v = unpack(u[i], T());
    x[2 * i] = v.x;
    x[2 * i + 1] = v.y;
  }
}

// b of gradients.py: beta without its sign, but not smaller than FLOOR
__device__ __forceinline__ float floored(float beta) {
  constexpr float FLOOR = 1.f / 64;  // float16 has range enough for so much less
  return fmaxf(fabsf(beta), FLOOR);
}

// F_ij = factor exp2(row_i - gc_j) F_ij for j <= i (j < i if STRICT) and i < valid, else 0: times b_j to `tile` and times beta_j to
// `out`, an A operand. Whatever the tokens behind the end hold is not selected.
template <typename T, bool STRICT>
__device__ __forceinline__ void decay(const float* f, void* out, const void* tile, const float* row, const float* gates,
                                      float factor, float add0, float add1, int valid) {
  const int t = thread(), warp = t / 32, r = first_row(t), c = t % 4 * 2;
  const float row0 = row[r] + add0, row1 = row[r + 8] + add1;
  const unsigned at = lane_in(tile);
#pragma unroll
  for (int b = 0; b < 4; ++b) {
    float y[8];
    unsigned a[4] = {0, 0, 0, 0};
#pragma unroll
    for (int e = 0; e < 8; ++e) y[e] = 0.f;
    if (b <= warp) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int j = 16 * b + 8 * h + c;
        const float2 p = *reinterpret_cast<const float2*>(gates + GC + j);
        const float2 s = *reinterpret_cast<const float2*>(gates + BETA + j);
        const float* x = f + 8 * b + 4 * h;
        if (j + STRICT <= r && r < valid) y[4 * h] = x[0] * factor * exp2f(row0 - p.x);
        if (j + 1 + STRICT <= r && r < valid) y[4 * h + 1] = x[1] * factor * exp2f(row0 - p.y);
        if (j + STRICT <= r + 8 && r + 8 < valid) y[4 * h + 2] = x[2] * factor * exp2f(row1 - p.x);
        if (j + 1 + STRICT <= r + 8 && r + 8 < valid) y[4 * h + 3] = x[3] * factor * exp2f(row1 - p.y);
        a[2 * h] = pack(y[4 * h] * fabsf(s.x), y[4 * h + 1] * fabsf(s.y), T());
        a[2 * h + 1] = pack(y[4 * h + 2] * fabsf(s.x), y[4 * h + 3] * fabsf(s.y), T());
        const float b0 = floored(s.x), b1 = floored(s.y);
        y[4 * h] *= b0;
        y[4 * h + 1] *= b1;
        y[4 * h + 2] *= b0;
        y[4 * h + 3] *= b1;
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) reinterpret_cast<unsigned*>(out)[4 * b + i] = a[i];
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                 :
                 : "r"(at ^ (32 * b)), "r"(pack(y[0], y[1], T())), "r"(pack(y[2], y[3], T())),
                   "r"(pack(y[4], y[5], T())), "r"(pack(y[6], y[7], T()))
                 : "memory");
  }
}

// sums[i] = tile_i . x_i
template <typename T>
__device__ __forceinline__ void dot(const float* x, const void* tile, float* sums) {
  const unsigned at = lane_in(tile);
  float s0 = 0.f, s1 = 0.f;
#pragma unroll
  for (int b = 0; b < 8; ++b, x += 8) {
    float t[8];
    columns<T>(at, b, t);
    s0 += t[0] * x[0] + t[1] * x[1] + t[4] * x[4] + t[5] * x[5];
    s1 += t[2] * x[2] + t[3] * x[3] + t[6] * x[6] + t[7] * x[7];
  }
  sums[0] = quad_sum(s0);
  sums[1] = quad_sum(s1);
}

// sums[i] = |tile_i|^2
template <typename T>
__device__ __forceinline__ void norm(const void* tile, float* sums) {
  const unsigned at = lane_in(tile);
  float s0 = 0.f, s1 = 0.f;
#pragma unroll
  for (int b = 0; b < 8; ++b) {
    float t[8];
    columns<T>(at, b, t);
    s0 += t[0] * t[0] + t[1] * t[1] + t[4] * t[4] + t[5] * t[5];
    s1 += t[2] * t[2] + t[3] * t[3] + t[6] * t[6] + t[7] * t[7];
  }
  sums[0] = quad_sum(s0);
  sums[1] = quad_sum(s1);
}

// x_i -= tile_i (tile_i . x_i) / (|tile_i|^2 + eps)
template <typename T>
__device__ __forceinline__ void project(float* x, const void* tile, float eps) {
  const unsigned at = lane_in(tile);
  float d[2], n[2];
  dot<T>(x, tile, d);
  norm<T>(tile, n);
  const float f0 = __fdividef(d[0], n[0] + eps), f1 = __fdividef(d[1], n[1] + eps);
#pragma unroll
  for (int b = 0; b < 8; ++b, x += 8) {
    float t[8];
    columns<T>(at, b, t);
#pragma unroll
    for (int e = 0; e < 8; ++e) x[e] -= t[e] * (e & 2 ? f1 : f0);
  }
}

// Rows i < valid of x to global memory, `stride` elements apart. The four threads of a row trade columns, so that each holds eight
// neighbours.
template <typename T>
__device__ __forceinline__ void rows(const float* x, void* out, int stride, int valid) {
  const int t = thread(), l = t % 4;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int r = first_row(t) + 8 * h;
    unsigned* to = static_cast<unsigned*>(out) + (static_cast<long long>(r) * stride) / 2 + 4 * l;
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      unsigned w[4];
#pragma unroll
      for (int b = 0; b < 4; ++b) w[b] = pack(x[(4 * m + b) * 4 + 2 * h], x[(4 * m + b) * 4 + 2 * h + 1], T());
#pragma unroll
      for (int step = 1; step < 4; step *= 2)
#pragma unroll
        for (int b = 0; b < 4; ++b)
          if (!(b & step)) {  // words b and b | step of two lanes, `step` apart, are a 2 x 2 block to transpose
            const bool upper = l & step;
            const unsigned got = __shfl_xor_sync(0xffffffffu, upper ? w[b] : w[b | step], step);
            w[b] = upper ? got : w[b];
            w[b | step] = upper ? w[b | step] : got;
          }
      if (r < valid) *reinterpret_cast<uint4*>(to + 16 * m) = make_uint4(w[0], w[1], w[2], w[3]);
    }
  }
}

// This lane's share of the sum of a o b over half of the columns of two tiles [128, 128], by one warp: that sum is the trace of
// a b^T, of which only the diagonal blocks of 8 x 8 are made, all in one place.
template <typename T>
__device__ __forceinline__ float inner(const void* a, const void* b, int half) {
  const int lane = thread() % 32;
  const unsigned at = half * 16384 + lane % 16 * 128, swizzle = lane % 8 * 16;
  const unsigned x = static_cast<unsigned>(__cvta_generic_to_shared(a)) + at;
  const unsigned y = static_cast<unsigned>(__cvta_generic_to_shared(b)) + at;
  float upper[4] = {}, lower[4] = {};  // the first and the last eight of each 16 rows
#pragma unroll 1
  for (int row = 0; row < 128; row += 32)
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const unsigned to = (row + i / 4 * 16) * 128 + ((i % 4 * 32 + lane / 16 * 16) ^ swizzle);
      unsigned u[4], v[4];
      ldmatrix(x + to, u);
      ldmatrix(y + to, v);
      mma(upper, u, v[0], v[2], T());
      mma(lower, u, v[1], v[3], T());
    }
  // element (lane / 4, 2 (lane % 4) + e) of the upper block, (lane / 4 + 8, ...) of the lower one
  if (lane / 8 != lane % 4) return 0.f;
  return lane / 4 % 2 ? upper[1] + lower[3] : upper[0] + lower[2];
}

}  // namespace gdr

// Rows of an accumulator [64, 128] times sign gate_i
__device__ __forceinline__ void gdr_scale(float* x, const float* gate, float sign) {
  const int r = gdr::first_row();
  const float g0 = gate[r] * sign, g1 = gate[r + 8] * sign;
#pragma unroll
  for (int i = 0; i < 64; ++i) x[i] *= i & 2 ? g1 : g0;
}

// Rows of an accumulator [64, 128] times b_i exp2(log2 decay - gc_i)
__device__ __forceinline__ void gdr_decay(float* x, const float* gates) {
  const float* g = gates + gdr::first_row();
  const float last = gates[gdr::DECAY + 1];
  const float g0 = gdr::floored(g[gdr::BETA]) * exp2f(last - g[gdr::GC]);
  const float g1 = gdr::floored(g[gdr::BETA + 8]) * exp2f(last - g[gdr::GC + 8]);
#pragma unroll
  for (int i = 0; i < 64; ++i) x[i] *= i & 2 ? g1 : g0;
}

__device__ __forceinline__ void gdr_clear(float* total) {
#pragma unroll
  for (int i = 0; i < 64; ++i) total[i] = 0.f;
}

__device__ __forceinline__ void gdr_add(float* total, const float* x) {
#pragma unroll
  for (int i = 0; i < 64; ++i) total[i] += x[i];
}

// total_i += beta_i / b_i x_i
__device__ __forceinline__ void gdr_add_beta(float* total, const float* x, const float* gates) {
  const float* beta = gates + gdr::BETA + gdr::first_row();
  const float g0 = __fdividef(fabsf(beta[0]), gdr::floored(beta[0]));
  const float g1 = __fdividef(fabsf(beta[8]), gdr::floored(beta[8]));
#pragma unroll
  for (int i = 0; i < 64; ++i) total[i] += x[i] * (i & 2 ? g1 : g0);
}

// Row sums, alike in the four threads of a row, to shared memory
__device__ __forceinline__ void gdr_put(const float* sums, float* to) {
  const int t = gdr::thread(), r = gdr::first_row(t);
  if (t % 4 == 0) {
    to[r] = sums[0];
    to[r + 8] = sums[1];
  }
}

// ... K . Z times beta_i / b_i, and the decay
__device__ __forceinline__ void gdr_put_z(const float* kz, float* sums, const float* gates) {
  const int t = gdr::thread(), r = gdr::first_row(t);
  const float* beta = gates + gdr::BETA + r;
  if (t % 4 == 0) {
    sums[gdr::SUM_Z + r] = fabsf(beta[0]) * __fdividef(kz[0], gdr::floored(beta[0]));
    sums[gdr::SUM_Z + r + 8] = fabsf(beta[8]) * __fdividef(kz[1], gdr::floored(beta[8]));
  }
  if (t == 0) sums[gdr::SUM_DECAY] = gates[gdr::DECAY];
}

// ... dbeta and K . dK-, given K . dK~
__device__ __forceinline__ void gdr_put_beta(const float* kdk, float* sums, const float* gates) {
  const int t = gdr::thread(), r = gdr::first_row(t);
  const float* beta = gates + gdr::BETA + r;
  if (t % 4 == 0) {
    const float x0 = __fdividef(kdk[0], gdr::floored(beta[0])), x1 = __fdividef(kdk[1], gdr::floored(beta[8]));
    sums[gdr::SUM_BETA + r] = beta[0] < 0.f ? -x0 : x0;
    sums[gdr::SUM_BETA + r + 8] = beta[8] < 0.f ? -x1 : x1;
    sums[gdr::SUM_BB + r] = fabsf(beta[0]) * x0;
    sums[gdr::SUM_BB + r + 8] = fabsf(beta[8]) * x1;
  }
}

// By one warp: the rows of a tile [64, 128] from `rows` on become zero
__device__ __forceinline__ void gdr_clean(const void* tile, int rows) {
  const int lane = gdr::thread() % 32;
  char* to = static_cast<char*>(const_cast<void*>(tile)) + lane / 16 * 8192 + lane % 16 * 8;
#pragma unroll 1
  for (int r = rows; r < 64; ++r) *reinterpret_cast<uint2*>(to + r * 128) = make_uint2(0, 0);
}

// By one warp: `heads` neighbouring heads of 128 elements become zero
__device__ __forceinline__ void gdr_blank(void* x, int heads) {
  uint2* to = static_cast<uint2*>(x) + gdr::thread() % 32;
#pragma unroll 1
  for (int h = 0; h < heads; ++h) to[32 * h] = make_uint2(0, 0);
}

// Half of an accumulator [64, 128] to the thread of another warpgroup that holds the same elements
__device__ __forceinline__ void gdr_give(const float* x, void* through, int half) {
  float4* to = static_cast<float4*>(through) + gdr::thread();
#pragma unroll
  for (int i = 0; i < 8; ++i, to += 128) {
    const float* e = x + half * 32 + 4 * i;
    *to = make_float4(e[0], e[1], e[2], e[3]);
  }
}
__device__ __forceinline__ void gdr_take(float* x, const void* through, int half) {
  const float4* from = static_cast<const float4*>(through) + gdr::thread();
#pragma unroll
  for (int i = 0; i < 8; ++i, from += 128) {
    const float4 v = *from;
    float* e = x + half * 32 + 4 * i;
    e[0] += v.x;
    e[1] += v.y;
    e[2] += v.z;
    e[3] += v.w;
  }
}

#define GDR_DTYPE(NAME, TYPE)                                                                                        \
  __device__ __forceinline__ void gdr_f1_##NAME(const float* f, void* out, const void* tile, const float* gates,     \
                                                float scale, int valid) {                                            \
    gdr::decay<TYPE, false>(f, out, tile, gates + gdr::PR, gates, scale, 0.f, 0.f, valid);                           \
  }                                                                                                                  \
  __device__ __forceinline__ void gdr_f2_##NAME(const float* f, void* out, const void* tile, const float* gates,     \
                                                const float* lk, int valid) {                                        \
    gdr::decay<TYPE, true>(f, out, tile, gates + gdr::GC, gates, -1.f, lk[0], lk[1], valid);                         \
  }                                                                                                                  \
  __device__ __forceinline__ void gdr_dot_##NAME(const float* x, const void* tile, float* sums) {                    \
    gdr::dot<TYPE>(x, tile, sums);                                                                                   \
  }                                                                                                                  \
  /* 2 log2 rk of this thread's rows */                                                                              \
  __device__ __forceinline__ void gdr_log_norm_##NAME(const void* tile, float* lk, float eps) {                      \
    float n[2];                                                                                                      \
    gdr::norm<TYPE>(tile, n);                                                                                        \
    lk[0] = -log2f(n[0] + eps);                                                                                      \
    lk[1] = -log2f(n[1] + eps);                                                                                      \
  }                                                                                                                  \
  __device__ __forceinline__ void gdr_project_##NAME(float* x, const void* tile, float eps) {                        \
    gdr::project<TYPE>(x, tile, eps);                                                                                \
  }                                                                                                                  \
  __device__ __forceinline__ void gdr_rows_##NAME(const float* x, void* out, int stride, int valid) {                \
    gdr::rows<TYPE>(x, out, stride, valid);                                                                          \
  }                                                                                                                  \
  __device__ __forceinline__ float gdr_inner_##NAME(const void* a, const void* b, int half) {                             \
    return gdr::inner<TYPE>(a, b, half);                                                                             \
  }
GDR_DTYPE(bfloat16, __nv_bfloat16)
GDR_DTYPE(float16, __half)

// By a warp: to `dgc` what the row sums of a head make of tokens `lane` and 32 + `lane`; returns `last`.
__device__ __forceinline__ float gdr_sums(const float* sums, float* dgc, int rows) {
  float last = 0.0f;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int t = threadIdx.x % 32 + 32 * half;
    dgc[half] = 0.0f;
    if (t < rows) {
      last += sums[gdr::SUM_Z + t];
      dgc[half] = sums[t] + sums[gdr::SUM_K + t] - sums[gdr::SUM_BB + t];
    }
  }
#pragma unroll
  for (int e = 1; e < 32; e *= 2) last += __shfl_xor_sync(0xffffffffu, last, e);
  return last + sums[gdr::SUM_DECAY] * (sums[gdr::SUM_DOT] + sums[gdr::SUM_DOT + 1]);
}
