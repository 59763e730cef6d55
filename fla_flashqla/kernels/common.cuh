// SPDX-License-Identifier: MIT
// In front of the device functions of every kernel, see `device_functions`.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

// Keeps ordinary shared-memory accesses on their side of a barrier, whose instructions name no memory.
__device__ __forceinline__ void gdr_order() { asm volatile("" ::: "memory"); }

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

// d += left (16 x 16) times right (16 x 8)
__device__ __forceinline__ void mma(float (&d)[4], const unsigned (&l)[4], unsigned r0, unsigned r1, __nv_bfloat16) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(l[0]), "r"(l[1]), "r"(l[2]), "r"(l[3]), "r"(r0), "r"(r1));
}
__device__ __forceinline__ void mma(float (&d)[4], const unsigned (&l)[4], unsigned r0, unsigned r1, __half) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(l[0]), "r"(l[1]), "r"(l[2]), "r"(l[3]), "r"(r0), "r"(r1));
}

}  // namespace gdr
