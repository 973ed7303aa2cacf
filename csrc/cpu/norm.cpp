// SPDX-License-Identifier: Apache-2.0
// RMS norm of rows with the residual added on the way; torch's CPU form is half a dozen
// operations, each with its own pass and its own launch. vllm/layers/ops/cpu.py calls it.

#include <cmath>

#include "numbers.h"

namespace {

constexpr int64_t kParallel = 1 << 15;  // values from which a second thread pays

// out = x / sqrt(mean(x^2) + eps) * weight for `rows` rows of `size`; row r of x begins at
// (r / heads) * stride_token + (r % heads) * stride_head. With a residual, which is dense, x is
// residual + x rounded, and the residual becomes that.
template <typename T>
void rms_norm(T* out, const T* x, T* residual, const T* weight, int64_t rows, int64_t heads,
              int64_t size, int64_t stride_token, int64_t stride_head, float eps) {
#pragma omp parallel for schedule(static) if (rows * size >= kParallel)
  for (int64_t r = 0; r < rows; ++r) {
    const T* row = x + r / heads * stride_token + r % heads * stride_head;
    if (residual != nullptr) {
      T* sum = residual + r * size;
      for (int64_t i = 0; i < size; ++i) from_float(to_float(row[i]) + to_float(sum[i]), sum + i);
      row = sum;
    }
    float squares = 0.0f;
#pragma omp simd reduction(+ : squares)
    for (int64_t i = 0; i < size; ++i) squares += to_float(row[i]) * to_float(row[i]);
    const float inverse = 1.0f / std::sqrt(squares / static_cast<float>(size) + eps);
    T* target = out + r * size;
    for (int64_t i = 0; i < size; ++i) {
      from_float(to_float(row[i]) * inverse * to_float(weight[i]), target + i);
    }
  }
}

}  // namespace

extern "C" void vllm_rms_norm(int is_bfloat16, void* out, const void* x, void* residual,
                              const void* weight, int64_t rows, int64_t heads, int64_t size,
                              int64_t stride_token, int64_t stride_head, float eps) {
  if (is_bfloat16) {
    using T = BFloat16;
    rms_norm(static_cast<T*>(out), static_cast<const T*>(x), static_cast<T*>(residual),
             static_cast<const T*>(weight), rows, heads, size, stride_token, stride_head, eps);
  } else {
    using T = float;
    rms_norm(static_cast<T*>(out), static_cast<const T*>(x), static_cast<T*>(residual),
             static_cast<const T*>(weight), rows, heads, size, stride_token, stride_head, eps);
  }
}
