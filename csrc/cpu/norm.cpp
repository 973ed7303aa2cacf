// SPDX-License-Identifier: Apache-2.0
// RMS norm of rows with the residual added on the way; torch's CPU form is half a dozen
// operations, each with its own pass and its own launch. vllm/layers/ops/cpu.py calls it.

#include "norm.h"

namespace {

// Row r of x begins at (r / heads) * stride_token + (r % heads) * stride_head. With a residual,
// which is dense, x is residual + x rounded, and the residual becomes that.
template <typename T>
void rms_norm(T* out, const T* x, T* residual, const T* weight, int64_t rows, int64_t heads,
              int64_t size, int64_t stride_token, int64_t stride_head, float eps) {
#pragma omp parallel for schedule(static) if (rows * size >= kParallel)
  for (int64_t r = 0; r < rows; ++r) {
    const T* row = x + r / heads * stride_token + r % heads * stride_head;
    if (residual != nullptr) {
      T* sum = residual + r * size;
      int64_t i = 0;
      for (; i + kLanes <= size; i += kLanes) store(load(row + i) + load(sum + i), sum + i);
      for (; i < size; ++i) from_float(to_float(row[i]) + to_float(sum[i]), sum + i);
      row = sum;
    }
    normalize(out + r * size, row, weight, size, eps);
  }
}

}  // namespace

extern "C" void vllm_rms_norm(int is_bfloat16, void* out, const void* x, void* residual,
                              const void* weight, int64_t rows, int64_t heads, int64_t size,
                              int64_t stride_token, int64_t stride_head, float eps) {
  const auto run = [&](auto number) {
    using T = decltype(number);
    rms_norm(static_cast<T*>(out), static_cast<const T*>(x), static_cast<T*>(residual),
             static_cast<const T*>(weight), rows, heads, size, stride_token, stride_head, eps);
  };
  is_bfloat16 ? run(BFloat16{}) : run(float{});
}
