// SPDX-License-Identifier: Apache-2.0
// Decode attention over a paged cache on the CPU: one query token a request, K and V read once
// and where they lie. A plain C interface over pointers, so that no torch header is needed and
// one build serves every torch release; vllm/attention/ops/cpu_decode.py calls it.
//
//   out[r, h] = sum_s softmax_s(scale q[r, h] k[s, h / group] + bias[r, h, t - s]) v[s, h / group]
//
// with t the request's last position, s <= t within the window, bias 0 beyond its extent.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include <omp.h>

#include "numbers.h"

namespace {

struct Shape {
  int64_t num_reqs, num_heads, num_kv_heads, head_dim, block_size, table_stride;
  int64_t q_stride_token, q_stride_head, rel_stride_token, rel_stride_head, extent, window;
  float scale;
};

// Sixteen floats at a time, as GCC and Clang spell it on every processor.
typedef float Vector __attribute__((vector_size(64)));
constexpr int64_t kLanes = 16;

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

// scores[j] = query . k[j] for the `count` rows of a block; `dim` is a multiple of kLanes.
template <typename T>
inline void score(float* scores, const float* query, const T* k, int64_t row, int64_t count,
                  int64_t dim) {
  for (int64_t j = 0; j < count; ++j, k += row) {
    Vector sum = load(query) * load(k);
    for (int64_t i = kLanes; i < dim; i += kLanes) sum += load(query + i) * load(k + i);
    scores[j] = total(sum);
  }
}

// sums += sum_j weights[j] v[j]; the sum of sixteen columns stays in a register.
template <typename T>
inline void add_weighted(float* sums, const float* weights, const T* v, int64_t row, int64_t count,
                         int64_t dim) {
  for (int64_t i = 0; i < dim; i += kLanes) {
    Vector sum = load(sums + i);
    for (int64_t j = 0; j < count; ++j) sum += load(v + j * row + i) * weights[j];
    std::memcpy(sums + i, &sum, sizeof(sum));
  }
}

// e^x for x <= 0 to about 2 ulp, in operations that vectorise (Cephes' expf; the C library's
// is a call a value). NaN stays NaN.
inline float exp_negative(float x) {
  const float clamped = x < -87.0f ? -87.0f : x;
  const float n = std::nearbyint(clamped * 1.44269504f);
  const float r = clamped - n * 0.693359375f + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const int32_t bits = (static_cast<int32_t>(n) + 127) << 23;
  float power;
  std::memcpy(&power, &bits, sizeof(power));
  return p * power;
}

// Scores to weights that are not normalised yet; returns their sum.
inline float exponentiate(float* scores, int64_t count) {
  float largest = -INFINITY, sum = 0.0f;
#pragma omp simd reduction(max : largest)
  for (int64_t i = 0; i < count; ++i) largest = std::max(largest, scores[i]);
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < count; ++i) {
    scores[i] = exp_negative(scores[i] - largest);
    sum += scores[i];
  }
  return sum;
}

// Heads [head, end) of the KV heads of one request. A row of K or V is read once for all of
// them and for the query heads that share them.
template <typename T>
void attend(const Shape& s, int64_t head, int64_t end, T* out, const T* q, const T* k_cache,
            const T* v_cache, const int32_t* table, int64_t length, const T* rel,
            std::vector<float>& scratch) {
  const int64_t group = s.num_heads / s.num_kv_heads, dim = s.head_dim;
  const int64_t row = s.num_kv_heads * dim, rows = (end - head) * group;
  const int64_t first = s.window > 0 ? std::max<int64_t>(0, length - s.window) : 0;
  const int64_t count = length - first;
  scratch.resize(rows * (2 * dim + count + 1));
  float* queries = scratch.data();
  float* sums = queries + rows * dim;
  float* scores = sums + rows * dim;
  float* totals = scores + rows * count;
  for (int64_t r = 0; r < rows; ++r) {
    const T* query = q + (head * group + r) * s.q_stride_head;
    for (int64_t i = 0; i < dim; ++i) queries[r * dim + i] = s.scale * to_float(query[i]);
  }
  // A block at a time: its rows stay in the nearest cache for every query head.
  for (int64_t key = first, next; key < length; key = next) {
    next = std::min(length, (key / s.block_size + 1) * s.block_size);
    const T* k = k_cache + (table[key / s.block_size] * s.block_size + key % s.block_size) * row;
    for (int64_t r = 0; r < rows; ++r) {
      score(scores + r * count + key - first, queries + r * dim, k + (head + r / group) * dim, row,
            next - key, dim);
    }
  }
  const int64_t biased = std::max(first, length - s.extent);
  for (int64_t r = 0; rel != nullptr && r < rows; ++r) {
    const T* bias = rel + (head * group + r) * s.rel_stride_head;
    for (int64_t key = biased; key < length; ++key) {
      scores[r * count + key - first] += to_float(bias[length - 1 - key]);
    }
  }
  for (int64_t r = 0; r < rows; ++r) totals[r] = exponentiate(scores + r * count, count);
  std::fill(sums, sums + rows * dim, 0.0f);
  for (int64_t key = first, next; key < length; key = next) {
    next = std::min(length, (key / s.block_size + 1) * s.block_size);
    const T* v = v_cache + (table[key / s.block_size] * s.block_size + key % s.block_size) * row;
    for (int64_t r = 0; r < rows; ++r) {
      add_weighted(sums + r * dim, scores + r * count + key - first, v + (head + r / group) * dim,
                   row, next - key, dim);
    }
  }
  T* target = out + head * group * dim;
  for (int64_t i = 0; i < rows * dim; ++i) from_float(sums[i] / totals[i / dim], target + i);
}

template <typename T>
void decode(const Shape& s, T* out, const T* q, const T* k_cache, const T* v_cache,
            const int32_t* block_table, const int32_t* seq_lens, const T* rel) {
  // All heads of a request together read memory in order; few requests are cut by heads.
  const int64_t cuts = s.num_reqs >= 2 * omp_get_max_threads() ? 1 : s.num_kv_heads;
  const int64_t heads = s.num_kv_heads / cuts;
#pragma omp parallel
  {
    std::vector<float> scratch;
#pragma omp for schedule(dynamic, 1)
    for (int64_t task = 0; task < s.num_reqs * cuts; ++task) {
      const int64_t r = task / cuts, head = task % cuts * heads;
      if (seq_lens[r] == 0) continue;
      attend(s, head, head + heads, out + r * s.num_heads * s.head_dim, q + r * s.q_stride_token,
             k_cache, v_cache, block_table + r * s.table_stride, seq_lens[r],
             rel == nullptr ? nullptr : rel + r * s.rel_stride_token, scratch);
    }
  }
}

}  // namespace

extern "C" {

// Head widths must be a multiple of this.
int64_t vllm_decode_lanes() { return kLanes; }

// is_bfloat16: 0 for float32. `sizes` in the order of Shape; rel may be null.
void vllm_paged_decode(int is_bfloat16, void* out, const void* q, const void* k_cache,
                       const void* v_cache, const int32_t* block_table, const int32_t* seq_lens,
                       const void* rel, const int64_t* sizes, float scale) {
  Shape s{sizes[0], sizes[1], sizes[2], sizes[3], sizes[4],  sizes[5], sizes[6],
          sizes[7], sizes[8], sizes[9], sizes[10], sizes[11], scale};
  if (is_bfloat16) {
    using T = BFloat16;
    decode(s, static_cast<T*>(out), static_cast<const T*>(q), static_cast<const T*>(k_cache),
           static_cast<const T*>(v_cache), block_table, seq_lens, static_cast<const T*>(rel));
  } else {
    using T = float;
    decode(s, static_cast<T*>(out), static_cast<const T*>(q), static_cast<const T*>(k_cache),
           static_cast<const T*>(v_cache), block_table, seq_lens, static_cast<const T*>(rel));
  }
}
}
