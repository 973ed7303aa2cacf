// SPDX-License-Identifier: Apache-2.0
// Queries and keys normalised by head where the model does that and turned by their positions;
// keys and values written to their cache rows. vllm/layers/ops/cpu.py calls it.

#include <algorithm>
#include <vector>

#include "norm.h"

namespace {

struct Shape {
  int64_t num_tokens, num_heads, num_kv_heads, head_dim, stride_token, v_stride_token;
};

// y[i] = x[i] cos - x[i + half] sin, y[i + half] = x[i + half] cos + x[i] sin
template <typename T>
inline void turn(T* out, const T* x, const float* cos, const float* sin, int64_t half) {
  int64_t i = 0;
  for (; i + kLanes <= half; i += kLanes) {
    const Vector left = load(x + i), right = load(x + half + i);
    const Vector c = load(cos + i), s = load(sin + i);
    store(left * c - right * s, out + i);
    store(right * c + left * s, out + half + i);
  }
  for (; i < half; ++i) {
    const float left = to_float(x[i]), right = to_float(x[half + i]);
    from_float(left * cos[i] - right * sin[i], out + i);
    from_float(right * cos[i] + left * sin[i], out + half + i);
  }
}

template <typename T>
struct Tensors {
  T *out, *k_cache, *v_cache;
  const T *qk, *v, *q_weight, *k_weight;
  const int64_t* slots;
  const float *cos, *sin;
};

template <typename T>
void rotary_and_cache(const Shape& s, const Tensors<T>& t, float eps) {
  const int64_t dim = s.head_dim, half = dim / 2, row = s.num_kv_heads * dim;
  const int64_t values = s.num_tokens * (s.num_heads + s.num_kv_heads) * dim;
#pragma omp parallel if (values >= kParallel)
  {
    std::vector<T> normed(dim);
#pragma omp for schedule(static)
    for (int64_t token = 0; token < s.num_tokens; ++token) {
      const int64_t slot = t.slots[token];
      const int64_t turned = s.num_heads + (slot < 0 ? 0 : s.num_kv_heads);
      for (int64_t head = 0; head < turned; ++head) {
        const bool is_query = head < s.num_heads;
        const T* x = t.qk + token * s.stride_token + head * dim;
        if (t.q_weight != nullptr) {
          normalize(normed.data(), x, is_query ? t.q_weight : t.k_weight, dim, eps);
          x = normed.data();
        }
        T* target = is_query ? t.out + (token * s.num_heads + head) * dim
                             : t.k_cache + slot * row + (head - s.num_heads) * dim;
        turn(target, x, t.cos + token * half, t.sin + token * half, half);
      }
      if (slot < 0) continue;
      const T* v = t.v + token * s.v_stride_token;
      std::copy(v, v + row, t.v_cache + slot * row);
    }
  }
}

}  // namespace

// `sizes` in the order of Shape; the heads of a token lie side by side. cos and sin:
// (num_tokens, head_dim / 2). Weights may be null, together. A slot of -1 stores nothing.
extern "C" void vllm_rotary_and_cache(int is_bfloat16, void* out, const void* qk, const void* v,
                                      void* k_cache, void* v_cache, const int64_t* slots,
                                      const float* cos, const float* sin, const void* q_weight,
                                      const void* k_weight, const int64_t* sizes, float eps) {
  const Shape s{sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5]};
  const auto run = [&](auto number) {
    using T = decltype(number);
    rotary_and_cache<T>(
        s,
        {static_cast<T*>(out), static_cast<T*>(k_cache), static_cast<T*>(v_cache),
         static_cast<const T*>(qk), static_cast<const T*>(v), static_cast<const T*>(q_weight),
         static_cast<const T*>(k_weight), slots, cos, sin},
        eps);
  };
  is_bfloat16 ? run(BFloat16{}) : run(float{});
}
