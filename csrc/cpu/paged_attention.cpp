// SPDX-License-Identifier: Apache-2.0
// Attention over a paged cache on the CPU; K and V are read where they lie. A plain C interface
// over pointers, so that no torch header is needed and one build serves every torch release;
// vllm/attention/ops/cpu_attention.py calls it.
//
//   out[t, h] = sum_s softmax_s(scale q[t, h] k[s, h / group] + bias[t, h, p - s]) v[s, h / group]
//
// with p the position of token t, s <= p within the window, bias 0 beyond its extent.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <type_traits>
#include <utility>
#include <vector>

#include <omp.h>

#include "numbers.h"

namespace {

struct Shape {
  int64_t num_reqs, num_heads, num_kv_heads, head_dim, block_size, table_stride;
  int64_t q_stride_token, q_stride_head, rel_stride_token, rel_stride_head, extent, window;
  float scale;
};

template <typename T>
struct Tensors {
  T* out;
  const T *q, *k_cache, *v_cache, *rel;
};

// Tokens [first, last) of a request and KV heads [head, end): what one thread does at a time.
struct Task {
  int64_t first, last, head, end;
  const int32_t* table;
  int64_t position;  // of the first token
};

// Query tokens that share a reading of K and V.
constexpr int64_t kTileTokens = 8;

// Blocks lie anywhere, so the processor does not guess the next one. Towards the second cache:
// `width` values of each of `count` rows.
template <typename T>
inline void prefetch(const T* rows, int64_t row, int64_t count, int64_t width) {
  for (int64_t j = 0; j < count; ++j) {
    for (int64_t i = 0; i < width; i += 64 / sizeof(T)) __builtin_prefetch(rows + j * row + i, 0, 2);
  }
}

// Lanewise sums of a . b.
inline Vector dot(const float* a, const float* b, int64_t dim) {
  Vector sum = load(a) * load(b);
  for (int64_t i = kLanes; i < dim; i += kLanes) sum += load(a + i) * load(b + i);
  return sum;
}

inline Vector dot(const BFloat16* a, const BFloat16* b, int64_t dim) {
  Vector sum{};
  int64_t i = 0;
#ifdef __AVX512BF16__
  for (; i + 2 * kLanes <= dim; i += 2 * kLanes) {
    const auto x = reinterpret_cast<__m512bh>(_mm512_loadu_si512(a + i));
    const auto y = reinterpret_cast<__m512bh>(_mm512_loadu_si512(b + i));
    sum = reinterpret_cast<Vector>(_mm512_dpbf16_ps(reinterpret_cast<__m512>(sum), x, y));
  }
#endif
  for (; i < dim; i += kLanes) sum += load(a + i) * load(b + i);
  return sum;
}

// Lanes of x (0 to 15) and of y (16 to 31), in the order that is named.
template <int... kLane>
inline Vector pick(Vector x, Vector y) {
#if defined(__clang__) || __GNUC__ >= 12
  return __builtin_shufflevector(x, y, kLane...);
#else
  return __builtin_shuffle(x, y, Integers{kLane...});
#endif
}

// A step of summing the lanes of many vectors at once: of every 2 kHalf lanes of x and of y the
// two halves are added, x's sums before y's.
template <int kHalf, int... kLane>
inline Vector fold(Vector x, Vector y, std::integer_sequence<int, kLane...>) {
  constexpr int kWide = kLanes;
  return pick<(kLane % (2 * kHalf) < kHalf ? kLane : kLane - kHalf + kWide)...>(x, y) +
         pick<(kLane % (2 * kHalf) < kHalf ? kLane + kHalf : kLane + kWide)...>(x, y);
}

template <int kHalf>
inline void fold_pairs(Vector* v) {
  for (int i = 0; i < kHalf; ++i) {
    v[i] = fold<kHalf>(v[i], v[i + kHalf], std::make_integer_sequence<int, kLanes>());
  }
}

// scores[j] = scale query . k[j] for `count` <= kLanes rows; all kLanes scores are written.
template <typename T>
inline void score(float* scores, const T* query, const T* k, int64_t row, int64_t count,
                  int64_t dim, float scale) {
  Vector sums[kLanes];
  for (int64_t j = 0; j < kLanes; ++j) sums[j] = dot(query, k + std::min(j, count - 1) * row, dim);
  fold_pairs<8>(sums);
  fold_pairs<4>(sums);
  fold_pairs<2>(sums);
  fold_pairs<1>(sums);
  store(sums[0] * scale, scores);
}

// What softmax weights are held in for V of type T.
#ifdef __AVX512BF16__
template <typename T>
using Weight = T;
#else
template <typename T>
using Weight = float;
#endif

// sums[r] += sum_j weights[r, j] v[j] for kRows query rows and 16 kVectors columns; a row of V is
// read once for all of them, and the sums stay in registers.
template <int kRows, int kVectors, typename T>
inline void add_weighted(float* sums, int64_t sums_row, const Weight<T>* weights,
                         int64_t weights_row, const T* v, int64_t v_row, int64_t count) {
  Vector held[kRows][kVectors] = {};
  for (int64_t j = 0; j < count; ++j, v += v_row) {
    for (int i = 0; i < kVectors; ++i) {
      const Vector value = load(v + i * kLanes);
      for (int r = 0; r < kRows; ++r) held[r][i] += value * to_float(weights[r * weights_row + j]);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    float* target = sums + r * sums_row;
    for (int i = 0; i < kVectors; ++i, target += kLanes) store(load(target) + held[r][i], target);
  }
}

#ifdef __AVX512BF16__
// The same for an even number of vectors and two rows of V at a time, their values side by side
// as the instruction takes them, which leaves the columns in another order while they are summed.
template <int kRows, int kVectors>
inline void add_weighted_pairs(float* sums, int64_t sums_row, const BFloat16* weights,
                               int64_t weights_row, const BFloat16* v, int64_t v_row,
                               int64_t count) {
  __m512 held[kRows][kVectors] = {};
  for (int64_t j = 0; j < count; j += 2, v += 2 * v_row) {
    for (int i = 0; i < kVectors; i += 2) {
      const __m512i even = _mm512_loadu_si512(v + i * kLanes);
      const __m512i odd = j + 1 < count ? _mm512_loadu_si512(v + v_row + i * kLanes) : __m512i{};
      const auto low = reinterpret_cast<__m512bh>(_mm512_unpacklo_epi16(even, odd));
      const auto high = reinterpret_cast<__m512bh>(_mm512_unpackhi_epi16(even, odd));
      for (int r = 0; r < kRows; ++r) {
        int32_t both;
        std::memcpy(&both, weights + r * weights_row + j, sizeof(both));
        const auto pair = reinterpret_cast<__m512bh>(_mm512_set1_epi32(both));
        held[r][i] = _mm512_dpbf16_ps(held[r][i], low, pair);
        held[r][i + 1] = _mm512_dpbf16_ps(held[r][i + 1], high, pair);
      }
    }
  }
  for (int r = 0; r < kRows; ++r) {
    float* target = sums + r * sums_row;
    for (int i = 0; i < kVectors; i += 2, target += 2 * kLanes) {
      const auto low = reinterpret_cast<Vector>(held[r][i]);
      const auto high = reinterpret_cast<Vector>(held[r][i + 1]);
      const Vector first =
          pick<0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23>(low, high);
      const Vector second =
          pick<8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31>(low, high);
      store(load(target) + first, target);
      store(load(target + kLanes) + second, target + kLanes);
    }
  }
}
#endif

// The same for any number of rows and a whole head.
template <typename T>
inline void add_weighted(float* sums, int64_t rows, const Weight<T>* weights, int64_t weights_row,
                         const T* v, int64_t v_row, int64_t count, int64_t dim) {
  const auto tile = [&](auto num_rows, auto num_vectors, int64_t r, int64_t i) {
    constexpr int kRows = decltype(num_rows)::value, kVectors = decltype(num_vectors)::value;
    float* target = sums + r * dim + i;
    const Weight<T>* own = weights + r * weights_row;
#ifdef __AVX512BF16__
    if constexpr (std::is_same_v<T, BFloat16> && kVectors % 2 == 0) {
      add_weighted_pairs<kRows, kVectors>(target, dim, own, weights_row, v + i, v_row, count);
      return;
    }
#endif
    add_weighted<kRows, kVectors>(target, dim, own, weights_row, v + i, v_row, count);
  };
  const auto rows_of = [&](auto num_vectors, int64_t i) {
    int64_t r = 0;
    for (; r + 4 <= rows; r += 4) tile(std::integral_constant<int, 4>{}, num_vectors, r, i);
    for (; r + 2 <= rows; r += 2) tile(std::integral_constant<int, 2>{}, num_vectors, r, i);
    for (; r < rows; ++r) tile(std::integral_constant<int, 1>{}, num_vectors, r, i);
  };
  int64_t i = 0;
  for (; i + 4 * kLanes <= dim; i += 4 * kLanes) rows_of(std::integral_constant<int, 4>{}, i);
  for (; i < dim; i += kLanes) rows_of(std::integral_constant<int, 1>{}, i);
}

// Scores [first, end) to weights that are not normalised yet, in their place, and those outside to
// 0; returns their sum. `size`, a multiple of kLanes, holds them all.
template <typename T>
inline float exponentiate(float* scores, int64_t first, int64_t end, int64_t size) {
  std::fill(scores, scores + first, -INFINITY);
  std::fill(scores + end, scores + size, -INFINITY);
  Vector largest = load(scores);
  for (int64_t i = kLanes; i < size; i += kLanes) {
    const Vector next = load(scores + i);
    largest = next > largest ? next : largest;
  }
  float maximum = largest[0];
  for (int64_t i = 1; i < kLanes; ++i) maximum = std::max(maximum, largest[i]);
  auto* weights = reinterpret_cast<Weight<T>*>(scores);
  Vector sum{};
  for (int64_t i = 0; i < size; i += kLanes) {
    const Vector weight = exp_negative(load(scores + i) - maximum);
    store(weight, weights + i);
    sum += weight;
  }
  return total(sum);
}

template <typename T>
void attend(const Shape& s, const Task& task, const Tensors<T>& t, std::vector<float>& scratch) {
  const int64_t group = s.num_heads / s.num_kv_heads, dim = s.head_dim;
  const int64_t tokens = task.last - task.first;
  const int64_t rows_each = tokens * group, rows = (task.end - task.head) * rows_each;
  const int64_t row = s.num_kv_heads * dim, length = task.position + tokens;
  const int64_t oldest = s.window > 0 ? std::max<int64_t>(0, task.position + 1 - s.window) : 0;
  // Keys are counted from the block of the oldest, scores are padded to whole vectors.
  const int64_t base = oldest / s.block_size * s.block_size;
  const int64_t size = (length - base + kLanes - 1) / kLanes * kLanes;
  const int64_t stride = size + kLanes;
  scratch.resize(rows * (dim + stride + 1));
  float* sums = scratch.data();
  float* scores = sums + rows * dim;
  float* totals = scores + rows * stride;
  const auto place = [&](int64_t key) {
    return (task.table[key / s.block_size] * s.block_size + key % s.block_size) * row;
  };
  // Keys up to here lie in one block and fill one vector of scores.
  const auto upto = [&](int64_t key) {
    return std::min({length, key / s.block_size * s.block_size + s.block_size, key + kLanes});
  };
  // Row (h, i, g) is query head h * group + g of token i. A block at a time: its rows stay in the
  // nearest cache for every query.
  for (int64_t key = base, next; key < length; key = next) {
    next = upto(key);
    const T* k = t.k_cache + place(key);
    const int64_t ahead = next < length ? next : oldest;
    const T* coming = (next < length ? t.k_cache : t.v_cache) + place(ahead);
    for (int64_t head = task.head; head < task.end; ++head) {
      prefetch(coming + head * dim, row, upto(ahead) - ahead, dim);
      for (int64_t i = 0; i < rows_each; ++i) {
        const T* query = t.q + (task.first + i / group) * s.q_stride_token +
                         (head * group + i % group) * s.q_stride_head;
        score(scores + ((head - task.head) * rows_each + i) * stride + key - base, query,
              k + head * dim, row, next - key, dim, s.scale);
      }
    }
  }
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t index = r % rows_each / group, last = task.position + index;
    const int64_t first = s.window > 0 ? std::max(oldest, last + 1 - s.window) : 0;
    float* own = scores + r * stride;
    if (t.rel != nullptr) {
      const int64_t head = (task.head + r / rows_each) * group + r % group;
      const T* bias = t.rel + (task.first + index) * s.rel_stride_token + head * s.rel_stride_head;
      for (int64_t key = std::max(first, last + 1 - s.extent); key <= last; ++key) {
        own[key - base] += to_float(bias[last - key]);
      }
    }
    totals[r] = exponentiate<T>(own, first - base, last + 1 - base, size);
  }
  std::fill(sums, sums + rows * dim, 0.0f);
  const int64_t weights_row = stride * sizeof(float) / sizeof(Weight<T>);
  for (int64_t key = oldest, next; key < length; key = next) {
    next = upto(key);
    const T* v = t.v_cache + place(key);
    const T* coming = next < length ? t.v_cache + place(next) : nullptr;
    for (int64_t head = task.head; head < task.end; ++head) {
      const int64_t r = (head - task.head) * rows_each;
      if (coming != nullptr) prefetch(coming + head * dim, row, upto(next) - next, dim);
      const auto* weights = reinterpret_cast<const Weight<T>*>(scores + r * stride) + key - base;
      add_weighted(sums + r * dim, rows_each, weights, weights_row, v + head * dim, row,
                   next - key, dim);
    }
  }
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t head = (task.head + r / rows_each) * group + r % group;
    T* target = t.out + ((task.first + r % rows_each / group) * s.num_heads + head) * dim;
    // The largest weight is 1, so only a request without keys has a smaller total: it gets zeros.
    const float whole = std::max(totals[r], 1.0f);
    for (int64_t i = 0; i < dim; i += kLanes) store(load(sums + r * dim + i) / whole, target + i);
  }
}

// Whole requests that decode, while there are enough of them, so that memory is read in order;
// else a KV head at a time, a prompt in tiles.
std::vector<Task> divide(const Shape& s, const int32_t* block_table, const int32_t* starts,
                         const int32_t* seq_lens) {
  std::vector<Task> tasks;
  const bool many = s.num_reqs >= 2 * omp_get_max_threads();
  for (int64_t r = 0; r < s.num_reqs; ++r) {
    const int64_t history = seq_lens[r] - (starts[r + 1] - starts[r]);
    const int64_t heads = many && starts[r + 1] - starts[r] == 1 ? s.num_kv_heads : 1;
    for (int64_t head = 0; head < s.num_kv_heads; head += heads) {
      for (int64_t first = starts[r]; first < starts[r + 1]; first += kTileTokens) {
        const int64_t last = std::min<int64_t>(starts[r + 1], first + kTileTokens);
        tasks.push_back({first, last, head, head + heads, block_table + r * s.table_stride,
                         history + first - starts[r]});
      }
    }
  }
  return tasks;
}

template <typename T>
void attention(const Shape& s, const Tensors<T>& tensors, const std::vector<Task>& tasks) {
#pragma omp parallel
  {
    std::vector<float> scratch;
#pragma omp for schedule(dynamic, 1)
    for (size_t i = 0; i < tasks.size(); ++i) attend(s, tasks[i], tensors, scratch);
  }
}

}  // namespace

extern "C" {

// Head widths must be a multiple of this.
int64_t vllm_attention_lanes() { return kLanes; }

// is_bfloat16: 0 for float32. `sizes` in the order of Shape; rel may be null.
void vllm_paged_attention(int is_bfloat16, void* out, const void* q, const void* k_cache,
                          const void* v_cache, const int32_t* block_table, const int32_t* starts,
                          const int32_t* seq_lens, const void* rel, const int64_t* sizes,
                          float scale) {
  const Shape s{sizes[0], sizes[1], sizes[2], sizes[3], sizes[4],  sizes[5], sizes[6],
                sizes[7], sizes[8], sizes[9], sizes[10], sizes[11], scale};
  const std::vector<Task> tasks = divide(s, block_table, starts, seq_lens);
  const auto run = [&](auto number) {
    using T = decltype(number);
    attention<T>(s,
                 {static_cast<T*>(out), static_cast<const T*>(q), static_cast<const T*>(k_cache),
                  static_cast<const T*>(v_cache), static_cast<const T*>(rel)},
                 tasks);
  };
  is_bfloat16 ? run(BFloat16{}) : run(float{});
}
}
