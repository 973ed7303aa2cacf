// SPDX-License-Identifier: Apache-2.0
// One row's RMS norm.

#pragma once

#include <cmath>

#include "numbers.h"

// out = x / sqrt(mean(x^2) + eps) * weight
template <typename T>
inline void normalize(T* out, const T* x, const T* weight, int64_t size, float eps) {
  Vector squares{};
  float rest = 0.0f;
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) squares += load(x + i) * load(x + i);
  for (; i < size; ++i) rest += to_float(x[i]) * to_float(x[i]);
  const float mean = (total(squares) + rest) / static_cast<float>(size);
  const float inverse = 1.0f / std::sqrt(mean + eps);
  for (i = 0; i + kLanes <= size; i += kLanes) {
    store(load(x + i) * inverse * load(weight + i), out + i);
  }
  for (; i < size; ++i) from_float(to_float(x[i]) * inverse * to_float(weight[i]), out + i);
}
