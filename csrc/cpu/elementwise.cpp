// SPDX-License-Identifier: Apache-2.0
// Gated activation of rows, and the most likely token of each. vllm/layers/ops/cpu.py calls them.

#include <cmath>
#include <limits>

#include "numbers.h"

namespace {

// x / (1 + e^-x), whose exponential is taken of -|x| so that it cannot overflow.
inline Vector silu(Vector x) {
  const Vector e = exp_negative(x < 0.0f ? x : -x);
  return x * (x < 0.0f ? e : Vector{} + 1.0f) / (1.0f + e);
}

// out[r] = silu(x[r, :size]) * x[r, size:]; `size` is a multiple of kLanes.
template <typename T>
void silu_and_mul(T* out, const T* x, int64_t rows, int64_t size) {
#pragma omp parallel for schedule(static) if (rows * size >= kParallel)
  for (int64_t r = 0; r < rows; ++r) {
    const T* gate = x + r * 2 * size;
    for (int64_t i = 0; i < size; i += kLanes) {
      store(silu(load(gate + i)) * load(gate + size + i), out + r * size + i);
    }
  }
}

// The first largest value's index; -1 for a row with NaN or infinity, or of -infinity alone.
template <typename T>
int64_t argmax(const T* row, int64_t size) {
  Vector largest = Vector{} - INFINITY;
  Integers broken{};
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    const Vector x = load(row + i);
    broken |= x != x;
    largest = x > largest ? x : largest;
  }
  float best = -INFINITY;
  bool is_broken = false;
  for (int64_t lane = 0; lane < kLanes; ++lane) {
    best = largest[lane] > best ? largest[lane] : best;
    is_broken |= broken[lane] != 0;
  }
  for (; i < size; ++i) {
    const float x = to_float(row[i]);
    is_broken |= x != x;
    best = x > best ? x : best;
  }
  if (is_broken || std::isinf(best)) return -1;
  for (i = 0; to_float(row[i]) != best;) ++i;
  return i;
}

template <typename T>
void argmax_rows(int64_t* out, const T* x, int64_t rows, int64_t size, int64_t stride) {
#pragma omp parallel for schedule(static) if (rows * size >= kParallel)
  for (int64_t r = 0; r < rows; ++r) out[r] = argmax(x + r * stride, size);
}

}  // namespace

extern "C" {

void vllm_silu_and_mul(int is_bfloat16, void* out, const void* x, int64_t rows, int64_t size) {
  const auto run = [&](auto number) {
    using T = decltype(number);
    silu_and_mul(static_cast<T*>(out), static_cast<const T*>(x), rows, size);
  };
  is_bfloat16 ? run(BFloat16{}) : run(float{});
}

void vllm_argmax(int is_bfloat16, int64_t* out, const void* x, int64_t rows, int64_t size,
                 int64_t stride) {
  const auto run = [&](auto number) {
    using T = decltype(number);
    argmax_rows(out, static_cast<const T*>(x), rows, size, stride);
  };
  is_bfloat16 ? run(BFloat16{}) : run(float{});
}
}
