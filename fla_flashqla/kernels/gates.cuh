// SPDX-License-Identifier: MIT
// Device functions of prepare.py and gradients.py: gates and betas from what they are made of, and the derivatives.
// All from e = exp(-|x|), which neither overflows nor cancels: softplus(x) = max(x, 0) + log1p(e), and the derivatives of softplus
// and sigmoid keep their digits where the functions are flat.

namespace gdr {
constexpr float GATE_FLOOR = -128.0f;  // as in prepare.py

__device__ __forceinline__ float folded(float x) { return __expf(-fabsf(x)); }  // e
__device__ __forceinline__ float softplus(float x, float e) { return fmaxf(x, 0.0f) + log1pf(e); }
__device__ __forceinline__ float sigmoid(float x, float e) { return __fdividef(x < 0.0f ? e : 1.0f, 1.0f + e); }

// The lane, derived anew each time: registers of the warp that asks are few.
__device__ __forceinline__ int lane() {
  int t = threadIdx.x % 32;
  asm volatile("" : "+r"(t));
  return t;
}
}  // namespace gdr

// -exp(a) softplus(x)
__device__ __forceinline__ float gdr_gate(float x, float a) { return -__expf(a) * gdr::softplus(x, gdr::folded(x)); }

__device__ __forceinline__ float gdr_sigmoid(float x) { return gdr::sigmoid(x, gdr::folded(x)); }

// By a warp, as all that follows: dbeta of `rows` tokens from `first` on, of a value head of `heads`; raw_beta as in prepare.py.
template <typename T>
__device__ __forceinline__ void gdr_store_betas(const float* sums, T* dbeta, const T* beta, int first, int rows, int head, int heads,
                                                float raw_beta) {
#pragma unroll 1
  for (int t = gdr::lane(); t < rows; t += 32) {
    const long long at = static_cast<long long>(first + t) * heads + head;
    float d = sums[t];
    if (raw_beta > 0.0f) {
      const float e = gdr::folded(static_cast<float>(beta[at]));
      d *= raw_beta * __fdividef(e, (1.0f + e) * (1.0f + e));
    }
    dbeta[at] = static_cast<T>(d);
  }
}

// Likewise dg, the sums from the end of `dgc` (of tokens `lane` and 32 + `lane`) and `last`, and the shares of a chunk. A gate below the
// floor is the floor, which has no gradient: what is left in dg there is rounding, and the slope may be large.
template <typename T>
__device__ __forceinline__ void gdr_store_gates(const float* dgc, float last, T* dg, const T* g, const float* A_log,
                                                const float* dt_bias, float* shares, int first, int rows, int slot, int head, int heads,
                                                int raw_g) {
  float sums[2];
#pragma unroll
  for (int half = 1; half >= 0; --half) {
    sums[half] = dgc[half];
#pragma unroll
    for (int e = 1; e < 32; e *= 2) {
      const float below = __shfl_down_sync(0xffffffffu, sums[half], e);
      if (gdr::lane() + e < 32) sums[half] += below;
    }
    sums[half] += last;
    last = __shfl_sync(0xffffffffu, sums[half], 0);
  }
  float of_rate = 0.0f, of_bias = 0.0f;
#pragma unroll 1
  for (int half = 0; half < 2; ++half) {
    const int t = gdr::lane() + 32 * half;
    if (t < rows) {
      const long long at = static_cast<long long>(first + t) * heads + head;
      float d = half == 0 ? sums[0] : sums[1];
      if (raw_g > 0) {
        const float x = static_cast<float>(g[at]) + (raw_g > 1 ? dt_bias[head] : 0.0f);
        const float e = gdr::folded(x), rate = -__expf(A_log[head]), gate = rate * gdr::softplus(x, e);
        const bool floored = gate < gdr::GATE_FLOOR;
        of_rate += floored ? 0.0f : d * gate;
        d = floored ? 0.0f : d * (rate * gdr::sigmoid(x, e));
        of_bias += d;
      }
      dg[at] = static_cast<T>(d);
    }
  }
  if (raw_g > 0) {
#pragma unroll 1
    for (int e = 1; e < 32; e *= 2) {
      of_rate += __shfl_xor_sync(0xffffffffu, of_rate, e);
      of_bias += __shfl_xor_sync(0xffffffffu, of_bias, e);
    }
    if (gdr::lane() == 0) {
      float* to = shares + 2ll * slot * heads + head;
      to[0] = of_rate;
      to[heads] = of_bias;
    }
  }
}

template <typename T>
__device__ __forceinline__ void gdr_zero(T* x, int count) {
#pragma unroll 1
  for (int j = gdr::lane(); j < count; j += 32) x[j] = static_cast<T>(0.0f);
}
