// SPDX-License-Identifier: MIT
// Reproducer for what `compute-sanitizer --tool racecheck` reports on the forward kernel: a warp reads shared memory, __syncwarp, one
// lane arrives on an mbarrier; another warp waits for it and writes. The PTX memory model orders the two (bar.warp.sync orders the
// lanes, the arrival releases and is cumulative), racecheck knows only the lane that arrived. With -DPER_LANE every lane arrives
// and nothing is reported.
//
//   nvcc -arch=sm_90a -lineinfo -o elected tests/racecheck_elected_arrival.cu && compute-sanitizer --tool racecheck ./elected
//   nvcc -arch=sm_90a -lineinfo -DPER_LANE -o each tests/racecheck_elected_arrival.cu && compute-sanitizer --tool racecheck ./each
#include <cstdint>
#include <cstdio>

#ifdef PER_LANE
constexpr int ARRIVALS = 32;
#else
constexpr int ARRIVALS = 1;
#endif

__global__ void kernel(float* out) {
  __shared__ float tile[32];
  __shared__ uint64_t barrier;
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(&barrier));
  const int lane = threadIdx.x % 32;
  if (threadIdx.x == 0) asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address), "r"(ARRIVALS) : "memory");
  if (threadIdx.x < 32) tile[lane] = lane;
  __syncthreads();
  if (threadIdx.x < 32) {
    out[lane] = tile[31 - lane];
    __syncwarp();
    if (ARRIVALS == 32 || lane == 0) asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address) : "memory");
  } else {
    uint32_t done = 0;
    while (!done)
      asm volatile(
          "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0; selp.b32 %0, 1, 0, p; }"
          : "=r"(done)
          : "r"(address)
          : "memory");
    tile[lane] = -1.f;
  }
}

int main() {
  float *out, host[32];
  cudaMalloc(&out, sizeof(host));
  kernel<<<1, 64>>>(out);
  cudaMemcpy(host, out, sizeof(host), cudaMemcpyDeviceToHost);
  for (int i = 0; i < 32; ++i)
    if (host[i] != 31 - i) return 1;
  std::puts("right");
  return 0;
}
