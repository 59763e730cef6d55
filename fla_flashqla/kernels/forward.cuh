// SPDX-License-Identifier: MIT
// Device functions of forward.py.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

// Keeps the causal comparisons of the P warpgroup inside its loop: hoisted, they would hold 30 registers.
__device__ __forceinline__ int gdr_opaque(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

// Keeps ordinary shared-memory accesses on their side of a barrier, whose instructions name no memory.
__device__ __forceinline__ void gdr_order() { asm volatile("" ::: "memory"); }

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

__device__ __forceinline__ unsigned pack(float x, float y, __nv_bfloat16) {
  const __nv_bfloat162 p = __floats2bfloat162_rn(x, y);
  return *reinterpret_cast<const unsigned*>(&p);
}
__device__ __forceinline__ unsigned pack(float x, float y, __half) {
  const __half2 p = __floats2half2_rn(x, y);
  return *reinterpret_cast<const unsigned*>(&p);
}
__device__ __forceinline__ float2 unpack(unsigned u, __nv_bfloat16) {
  return make_float2(__uint_as_float(u << 16), __uint_as_float(u & 0xffff0000u));
}
__device__ __forceinline__ float2 unpack(unsigned u, __half) { return __half22float2(*reinterpret_cast<__half2*>(&u)); }

// A tile [64 tokens, 64 columns] of a warpgroup lies in rows of 128 bytes, swizzled as TMA does. Where this lane's rows of 8 x 8
// blocks begin for ldmatrix.trans and stmatrix.trans, which make of it the transposed tile in accumulator order; 16 tokens
// further are 2048 bytes further.
__device__ __forceinline__ unsigned lane_in(const void* tile) {
  const int t = threadIdx.x, row = t % 8, column = t % 128 / 32 * 2 + t / 8 % 2;
  const int at = t / 128 * 4096 + t % 32 / 16 * 512 + row * 64 + (column ^ row) * 8;
  return static_cast<unsigned>(__cvta_generic_to_shared(tile)) + 2 * at;
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

// O^T to a tile of o
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
  const unsigned at = gdr::lane_in(v);
#pragma unroll
  for (int i = 0; i < 4; ++i, vt += 4)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(vt[0]), "=r"(vt[1]), "=r"(vt[2]), "=r"(vt[3])
                 : "r"(at + 2048 * i)
                 : "memory");
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float2 g = *reinterpret_cast<const float2*>(gates + 8 * i + threadIdx.x % 4 * 2);
    xg[2 * i] = g.x;
    xg[2 * i + 1] = g.y;
  }
}

#define GDR_DTYPE(NAME, TYPE)                                                                                    \
  __device__ __forceinline__ void gdr_w_##NAME(const float* x, const unsigned* vt, const float* xg, void* out) { \
    gdr::w<TYPE>(x, vt, xg, out);                                                                                \
  }                                                                                                              \
  __device__ __forceinline__ void gdr_store_##NAME(const float* o, const void* tile) { gdr::store<TYPE>(o, tile); }
GDR_DTYPE(bfloat16, __nv_bfloat16)
GDR_DTYPE(float16, __half)
