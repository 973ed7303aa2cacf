// SPDX-License-Identifier: Apache-2.0
// Gated activation of rows, and the most likely token of each. vllm/layers/ops/cpu.py calls them.

#include <algorithm>
#include <cmath>

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

// The first largest value's index; -1 for a row with NaN or infinity, or of -infinity alone. The
// row is looked through in parts, of which only the one with the largest value is searched for it.
template <typename T>
int64_t argmax(const T* row, int64_t size) {
  constexpr int64_t kPart = 16 * kLanes;
  Integers broken{};
  float best = -INFINITY;
  int64_t where = 0;
  for (int64_t first = 0; first < size; first += kPart) {
    const int64_t end = std::min(size, first + kPart);
    Vector largest = Vector{} - INFINITY;
    int64_t i = first;
    for (; i + kLanes <= end; i += kLanes) {
      const Vector x = load(row + i);
      broken |= x != x;
      largest = x > largest ? x : largest;
    }
    float part = -INFINITY;
    for (int64_t lane = 0; lane < kLanes; ++lane) part = std::max(part, largest[lane]);
    for (; i < end; ++i) {
      const float x = to_float(row[i]);
      if (x != x) return -1;
      part = std::max(part, x);
    }
    if (part > best) best = part, where = first;
  }
  bool is_broken = std::isinf(best);
  for (int64_t lane = 0; lane < kLanes; ++lane) is_broken |= broken[lane] != 0;
  if (is_broken) return -1;
  while (to_float(row[where]) != best) ++where;
  return where;
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
