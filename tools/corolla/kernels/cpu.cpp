// The CPU kernels of the compiled decoder: linear layers on packed weights, one or one per expert, and attention on the
// paged KV cache.
//
// Both stream memory that is read once a step, weights and keys, at the speed of the memory; see packing.py for the
// layout of packed weights. Built by build.py for the machine that runs it.

#if defined(__AVX512F__) && !defined(COROLLA_PORTABLE)
#define CPU_CAPABILITY_AVX512
#define CPU_CAPABILITY AVX512
#endif

#include <ATen/ATen.h>
#include <ATen/cpu/vec/functional.h>
#include <torch/library.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "lora.h"
#include "quantized.h"
#include "tile.h"

namespace {

constexpr int64_t SOON = 8;    // positions that keys are prefetched ahead
constexpr int64_t CHUNK = 64;  // positions whose values stay in the nearest cache for all queries that share them

template <typename T, int M>
void tile_rows(const T* x, int64_t inputs, const T* w, const T* bias, int64_t width, T* y, int64_t outputs) {
  alignas(64) float sum[M][TILE] = {};
  if (bias)
    for (int m = 0; m < M; ++m)
      for (int64_t n = 0; n < width; ++n) sum[m][n] = static_cast<float>(bias[n]);
  Tile<T, M>::sums(x, inputs, w, sum);
  for (int m = 0; m < M; ++m) store<T>(sum[m], width, y + m * outputs);
}

// All rows of one tile; after the first pass of ROWS the tile comes from the core's own cache.
template <typename T, int M = ROWS>
void tile_all(int64_t rows, const T* x, int64_t inputs, const T* w, const T* bias, int64_t width, T* y,
              int64_t outputs) {
  for (; rows >= M; rows -= M, x += M * inputs, y += M * outputs)
    tile_rows<T, M>(x, inputs, w, bias, width, y, outputs);
  if constexpr (M > 1) {
    if (rows) tile_all<T, M - 1>(rows, x, inputs, w, bias, width, y, outputs);
  }
}

template <typename T>
void linear(const at::Tensor& x, const at::Tensor& weight, const T* bias, at::Tensor& y) {
  const int64_t inputs = x.size(-1), outputs = y.size(-1), rows = inputs ? x.numel() / inputs : 0;
  const int64_t tiles = weight.size(0), tile_size = weight.size(1) * TILE * group<T>;
  const T* in = x.const_data_ptr<T>();
  const T* w = weight.const_data_ptr<T>();
  T* out = y.mutable_data_ptr<T>();
  corolla::Pool::instance().run(kernel_threads(), tiles, [&](int64_t t) {
    const int64_t first = t * TILE, width = std::min(TILE, outputs - first);
    tile_all<T>(rows, in, inputs, w + t * tile_size, bias ? bias + first : nullptr, width, out + first, outputs);
  });
}

at::Tensor packed_linear(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                         int64_t out_features) {
  const at::Tensor in = x.contiguous();
  std::vector<int64_t> shape = in.sizes().vec();
  shape.back() = out_features;
  at::Tensor y = at::empty(shape, in.options());
  for_dtype(in, "packed_linear", [&](auto zero) {
    using T = decltype(zero);
    TORCH_CHECK(weight.is_contiguous() && weight.dim() == 4 && weight.size(2) == TILE && weight.size(3) == group<T> &&
                    weight.size(0) * TILE >= out_features && weight.size(1) * group<T> >= in.size(-1),
                "packed_linear: weight of shape ", weight.sizes(), " does not fit ", in.sizes());
    linear<T>(in, weight, bias ? bias->const_data_ptr<T>() : nullptr, y);
  });
  return y;
}

// Row i through the linear layer of experts[i], whose packed weight is weight[experts[i]].
at::Tensor expert_linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& experts,
                         int64_t out_features) {
  const at::Tensor order = experts.argsort(), in = x.index_select(0, order), expert = experts.index_select(0, order);
  const int64_t rows = in.size(0), inputs = in.size(1);
  const int64_t tiles = weight.size(1), tile_size = weight.size(2) * TILE * weight.size(4);
  at::Tensor y = at::empty({rows, out_features}, in.options());
  const int64_t* ids = expert.const_data_ptr<int64_t>();
  std::vector<int64_t> starts;  // of the rows of one expert
  for (int64_t row = 0; row < rows; ++row)
    if (!row || ids[row] != ids[row - 1]) starts.push_back(row);
  const int64_t used = starts.size();
  starts.push_back(rows);
  for_dtype(in, "expert_linear", [&](auto zero) {
    using T = decltype(zero);
    TORCH_CHECK(weight.is_contiguous() && weight.dim() == 5 && weight.size(3) == TILE && weight.size(4) == group<T> &&
                    tiles * TILE >= out_features && weight.size(2) * group<T> >= inputs &&
                    (!rows || (ids[0] >= 0 && ids[rows - 1] < weight.size(0))),
                "expert_linear: weight of shape ", weight.sizes(), " does not fit ", in.sizes());
    const T *xs = in.const_data_ptr<T>(), *w = weight.const_data_ptr<T>();
    T* out = y.mutable_data_ptr<T>();
    corolla::Pool::instance().run(kernel_threads(), used * tiles, [&](int64_t task) {
      const int64_t part = task / tiles, t = task % tiles, row = starts[part], first = t * TILE;
      tile_all<T>(starts[part + 1] - row, xs + row * inputs, inputs, w + (ids[row] * tiles + t) * tile_size, nullptr,
                  std::min(TILE, out_features - first), out + row * out_features + first, out_features);
    });
  });
  return at::empty_like(y).index_copy_(0, order, y);
}

// The pages of one row: position -> keys or values of one head.
template <typename T>
struct Pages {
  T* memory;
  const int32_t* pages;
  int64_t page_size, heads, head_dim;
  T* at(int64_t position, int64_t head) const {
    int64_t place;
    find(head, position, position + 1, &place);
    return memory + place;
  }
  // Where in `memory` the positions from `first` up to `end` begin.
  void find(int64_t head, int64_t first, int64_t end, int64_t* places) const {
    int64_t page = first / page_size, offset = first % page_size;
    for (int64_t position = first; position < end; ++position) {
      *places++ = ((pages[page] * page_size + offset) * heads + head) * head_dim;
      if (++offset == page_size) ++page, offset = 0;
    }
  }
};

// The linear biases of the query heads that share a key-value head.
struct Biases {
  const float* slopes;
  bool rounded;  // slopes and positions are bfloat16
  float at(int64_t query, int64_t position) const {
    if (!rounded) return slopes[query] * static_cast<float>(position);
    return at::BFloat16(slopes[query] * static_cast<float>(at::BFloat16(static_cast<float>(position))));
  }
};

using Floats = at::vec::Vectorized<float>;

template <typename T>
Floats floats_at(const T* from) {
  if constexpr (std::is_same_v<T, float>) {
    return Floats::loadu(from);
  } else {
    Floats loaded;
    at::vec::load_fp32_from_bf16(from, loaded);
    return loaded;
  }
}

template <typename T, int64_t DIM>
float dot(const T* a, const T* b, int64_t dim) {
  if constexpr (DIM == 0) {
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t d = 0; d < dim; ++d) sum += static_cast<float>(a[d]) * static_cast<float>(b[d]);
    return sum;
  } else {
    Floats sum(0.0f);
    for (int64_t d = 0; d < DIM; d += Floats::size()) sum = at::vec::fmadd(floats_at(a + d), floats_at(b + d), sum);
    return at::vec::vec_reduce_all<float>([](Floats& x, Floats& y) { return x + y; }, sum);
  }
}

void softmax(float* scores, int64_t length) {
  const auto larger = [](Floats a, Floats b) { return at::vec::maximum(a, b); };
  const float most = at::vec::reduce_all<float>(larger, scores, length);
  at::vec::map<float>([&](Floats score) { return (score - Floats(most)).exp(); }, scores, scores, length);
  const float total = at::vec::reduce_all<float>([](Floats a, Floats b) { return a + b; }, scores, length);
  at::vec::map<float>([&](Floats score) { return score / Floats(total); }, scores, scores, length);
}

// sums[0:dim] += weights[p] * values[places[p]:][0:dim] for every p below `count`.
template <typename T, int64_t DIM>
void add_weighted(const float* weights, const T* values, const int64_t* places, int64_t count, float* sums,
                  int64_t dim) {
  if constexpr (DIM == 0) {
    for (int64_t p = 0; p < count; ++p)
#pragma omp simd
      for (int64_t d = 0; d < dim; ++d) sums[d] += weights[p] * static_cast<float>(values[places[p] + d]);
  } else {
    constexpr int64_t WIDTH = Floats::size();
    Floats sum[DIM / WIDTH];
    for (int64_t i = 0; i < DIM / WIDTH; ++i) sum[i] = Floats::loadu(sums + i * WIDTH);
    for (int64_t p = 0; p < count; ++p)
      for (int64_t i = 0; i < DIM / WIDTH; ++i)
        sum[i] = at::vec::fmadd(Floats(weights[p]), floats_at(values + places[p] + i * WIDTH), sum[i]);
    for (int64_t i = 0; i < DIM / WIDTH; ++i) sum[i].store(sums + i * WIDTH);
  }
}

// The query heads that share one key-value head of one row, at the positions from `first` up to `end`. DIM is the head
// dimension, 0 for any.
template <typename T, int64_t DIM>
void attend(const T* query, const Pages<T>& keys, const Pages<T>& values, int64_t head, int64_t first, int64_t end,
            int64_t queries, float scale, const Biases& biases, T* out) {
  const int64_t dim = DIM ? DIM : keys.head_dim, length = end - first;
  thread_local std::vector<float> scores, sums;
  thread_local std::vector<int64_t> places;
  scores.resize(queries * length), places.resize(length);
  sums.assign(queries * dim, 0.0f);
  keys.find(head, first, end, places.data());
  const auto fetch = [&](const T* address) {
    for (int64_t d = 0; d < dim; d += 64 / sizeof(T)) __builtin_prefetch(address + d);
  };
  for (int64_t p = 0; p < length; ++p) {
    if (p + SOON < length) fetch(keys.memory + places[p + SOON]);
    fetch(values.memory + places[p]);
    for (int64_t q = 0; q < queries; ++q)
      scores[q * length + p] = scale * dot<T, DIM>(query + q * dim, keys.memory + places[p], dim);
  }
  for (int64_t q = 0; q < queries; ++q) {
    float* mine = scores.data() + q * length;
    if (biases.slopes)
      for (int64_t p = 0; p < length; ++p) mine[p] += scale * biases.at(q, first + p);
    softmax(mine, length);
  }
  for (int64_t start = 0; start < length; start += CHUNK) {
    const int64_t count = std::min(CHUNK, length - start);
    for (int64_t q = 0; q < queries; ++q)
      add_weighted<T, DIM>(scores.data() + q * length + start, values.memory, places.data() + start, count,
                           sums.data() + q * dim, dim);
  }
  for (int64_t i = 0; i < queries * dim; ++i) out[i] = static_cast<T>(sums[i]);
}

template <typename T>
auto attend_for(int64_t dim) {
  switch (dim) {
    case 64: return attend<T, 64>;
    case 80: return attend<T, 80>;
    case 96: return attend<T, 96>;
    case 128: return attend<T, 128>;
    case 256: return attend<T, 256>;
    default: return attend<T, 0>;
  }
}

at::Tensor paged_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                           const at::Tensor& keys, const at::Tensor& values, const at::Tensor& pages,
                           const at::Tensor& positions, double scale, int64_t window,
                           const std::optional<at::Tensor>& slopes) {
  const at::Tensor q = query.contiguous(), k = key.contiguous(), v = value.contiguous();
  const int64_t rows = q.size(0), heads = q.size(1), dim = q.size(2), kv_heads = k.size(1), shared = heads / kv_heads;
  const int64_t page_size = keys.size(1), width = pages.size(1);
  const int32_t* table = pages.const_data_ptr<int32_t>();
  const int64_t* ends = positions.const_data_ptr<int64_t>();
  const at::Tensor wide_slopes = slopes ? slopes->to(at::kFloat).contiguous() : at::Tensor();
  const float* slope = slopes ? wide_slopes.const_data_ptr<float>() : nullptr;
  const bool rounded = slopes && slopes->scalar_type() == at::kBFloat16;
  at::Tensor out = at::zeros_like(q);
  for_dtype(q, "paged_attention", [&](auto zero) {
    using T = decltype(zero);
    T* key_memory = const_cast<T*>(keys.const_data_ptr<T>());
    T* value_memory = const_cast<T*>(values.const_data_ptr<T>());
    const auto pages_of = [&](T* memory, int64_t row) {
      return Pages<T>{memory, table + row * width, page_size, kv_heads, dim};
    };
    const T *qs = q.const_data_ptr<T>(), *ks = k.const_data_ptr<T>(), *vs = v.const_data_ptr<T>();
    T* results = out.mutable_data_ptr<T>();
    const int64_t bytes = kv_heads * dim * sizeof(T);
    int64_t work = 0;
    for (int64_t row = 0; row < rows; ++row) {
      if (ends[row] < 0) continue;
      work += window ? std::min(window, ends[row] + 1) : ends[row] + 1;
      std::memcpy(pages_of(key_memory, row).at(ends[row], 0), ks + row * kv_heads * dim, bytes);
      std::memcpy(pages_of(value_memory, row).at(ends[row], 0), vs + row * kv_heads * dim, bytes);
    }
    const int threads = work * heads * dim > 1 << 15 ? kernel_threads() : 1;
    corolla::Pool::instance().run(threads, rows * kv_heads, [&](int64_t task) {
      const int64_t row = task / kv_heads, head = task % kv_heads, first = (row * heads + head * shared) * dim;
      const auto attend_in = attend_for<T>(dim);
      const int64_t oldest = window ? std::max<int64_t>(0, ends[row] + 1 - window) : 0;
      const Biases biases{slope ? slope + head * shared : nullptr, rounded};
      if (ends[row] >= 0)
        attend_in(qs + first, pages_of(key_memory, row), pages_of(value_memory, row), head, oldest, ends[row] + 1,
                  shared, static_cast<float>(scale), biases, results + first);
    });
  });
  return out;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(corolla, library) { library.def("set_threads", set_threads); }

TORCH_LIBRARY_IMPL(corolla, CPU, library) {
  library.impl("packed_linear", packed_linear);
  library.impl("expert_linear", expert_linear);
  library.impl("paged_attention", paged_attention);
  library.impl("lora_add", [](const at::Tensor& y, const at::Tensor& x, const at::Tensor& adapters, int64_t layer) {
    return corolla::lora_add(y, x, adapters, layer, kernel_threads());
  });
}
