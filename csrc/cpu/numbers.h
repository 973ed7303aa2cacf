// SPDX-License-Identifier: Apache-2.0
// The number formats of tensors and sixteen of them at a time, as GCC and Clang spell vectors
// on every processor.

#pragma once

#include <cstdint>
#include <cstring>

#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

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

typedef float Vector __attribute__((vector_size(64)));
typedef int32_t Integers __attribute__((vector_size(64)));
constexpr int64_t kLanes = 16;
constexpr int64_t kParallel = 1 << 12;  // values from which a second thread pays

inline Vector load(const float* p) {
  Vector v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}

inline Vector load(const BFloat16* p) {
  typedef uint16_t Half __attribute__((vector_size(32)));
  typedef uint32_t Word __attribute__((vector_size(64)));
  Half half;
  std::memcpy(&half, p, sizeof(half));
  return reinterpret_cast<Vector>(__builtin_convertvector(half, Word) << 16);
}

inline void store(Vector v, float* p) { std::memcpy(p, &v, sizeof(v)); }

inline void store(Vector v, BFloat16* p) {
#ifdef __AVX512BF16__
  const __m256bh half = _mm512_cvtneps_pbh(reinterpret_cast<__m512>(v));
  std::memcpy(p, &half, sizeof(half));
#else
  for (int64_t i = 0; i < kLanes; ++i) from_float(v[i], p + i);
#endif
}

inline float total(Vector v) {
  typedef float Half __attribute__((vector_size(32)));
  typedef float Quarter __attribute__((vector_size(16)));
  Half half[2];
  std::memcpy(half, &v, sizeof(v));
  const Half eight = half[0] + half[1];
  Quarter quarter[2];
  std::memcpy(quarter, &eight, sizeof(eight));
  const Quarter four = quarter[0] + quarter[1];
  return (four[0] + four[1]) + (four[2] + four[3]);
}

// e^x for x <= 0 to about 2 ulp (Cephes' expf; the C library's is a call a value). NaN stays NaN.
inline Vector exp_negative(Vector x) {
  x = x < -87.0f ? Vector{} - 87.0f : x;
  // Truncation rounds a negative number less a half to the nearest.
  const Integers whole = __builtin_convertvector(x * 1.44269504f - 0.5f, Integers);
  const Vector n = __builtin_convertvector(whole, Vector);
  const Vector r = x - n * 0.693359375f + n * 2.12194440e-4f;
  Vector p = Vector{} + 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  return p * reinterpret_cast<Vector>((whole + 127) << 23);
}
