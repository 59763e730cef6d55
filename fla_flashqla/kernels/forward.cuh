// SPDX-License-Identifier: MIT
// Device functions of forward.py.

// Keeps the causal comparisons of the P warpgroup inside its loop: hoisted, they would hold 30 registers.
__device__ __forceinline__ int gdr_opaque(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

// Keeps ordinary shared-memory accesses on their side of a barrier, whose instructions name no memory.
__device__ __forceinline__ void gdr_order() { asm volatile("" ::: "memory"); }
