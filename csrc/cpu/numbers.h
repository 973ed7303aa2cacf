// SPDX-License-Identifier: Apache-2.0
// The number formats of tensors, as the kernels read and write them.

#pragma once

#include <cstdint>
#include <cstring>

struct BFloat16 {
  uint16_t bits;
};

inline float to_float(float x) { return x; }

inline float to_float(BFloat16 x) {
  uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

inline void from_float(float value, float* target) { *target = value; }

inline void from_float(float value, BFloat16* target) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  if ((bits & 0x7fffffff) > 0x7f800000) {
    target->bits = 0x7fc0;  // NaN stays NaN whatever its payload
  } else {
    target->bits = static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
  }
}
