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

#include "compact.h"
#include "lora.h"
#include "quantized.h"
#include "tile.h"

namespace {

constexpr int64_t SOON = 8;    // positions that keys are prefetched ahead
constexpr int64_t CHUNK = 64;  // positions whose values stay in the nearest cache for all queries that share them

constexpr int64_t FEW_ROWS = 2 * ROWS;  // up to so many, reading compact weights again takes less than expanding them

// Packed weights of a layer or of several in a row, by the number of the tile.
template <typename T>
struct PackedTiles {
  struct At {
    const T* weights;
    int64_t inputs;
    template <int M>
    void sums(const T* x, float (*sum)[TILE]) const {
      Tile<T, M>::sums(x, inputs, weights, sum);
    }
  };
  const T* weights;
  int64_t inputs;
  At at(int64_t tile) const { return {weights + tile * ((inputs + group<T> - 1) / group<T>)*group<T> * TILE, inputs}; }
};

struct CompactTiles {
  const uint8_t* bytes;
  int64_t inputs;
  CompactTile at(int64_t tile) const { return {bytes + tile * compact_tile_bytes(inputs), inputs}; }
};

template <int M, typename T, typename OneTile>
void tile_rows(const T* x, const OneTile& tile, const T* bias, int64_t width, T* y, int64_t outputs) {
  alignas(64) float sum[M][TILE] = {};
  if (bias)
    for (int m = 0; m < M; ++m)
      for (int64_t n = 0; n < width; ++n) sum[m][n] = static_cast<float>(bias[n]);
  tile.template sums<M>(x, sum);
  for (int m = 0; m < M; ++m) store<T>(sum[m], width, y + m * outputs);
}

// All rows of one tile; after the first pass of ROWS the tile comes from the core's own cache.
template <int M = ROWS, typename T, typename OneTile>
void tile_all(int64_t rows, const T* x, int64_t inputs, const OneTile& tile, const T* bias, int64_t width, T* y,
              int64_t outputs) {
  for (; rows >= M; rows -= M, x += M * inputs, y += M * outputs) tile_rows<M>(x, tile, bias, width, y, outputs);
  if constexpr (M > 1) {
    if (rows) tile_all<M - 1>(rows, x, inputs, tile, bias, width, y, outputs);
  }
}

void tile_all(int64_t rows, const at::BFloat16* x, int64_t inputs, const CompactTile& tile, const at::BFloat16* bias,
              int64_t width, at::BFloat16* y, int64_t outputs) {
  if (rows <= FEW_ROWS) return tile_all<ROWS>(rows, x, inputs, tile, bias, width, y, outputs);
  thread_local std::vector<at::BFloat16> expanded;
  expanded.resize((inputs + 1) / 2 * GROUP_WEIGHTS);
  tile.expand(expanded.data());
  const PackedTiles<at::BFloat16>::At packed{expanded.data(), inputs};
  tile_all<ROWS>(rows, x, inputs, packed, bias, width, y, outputs);
}

// function(T{}, tiles) for the tiles of a weight; `leading` is how many dimensions it has before those of a layer.
template <typename Function>
void for_tiles(const at::Tensor& in, const at::Tensor& weight, int64_t leading, int64_t out_features, const char* name,
               Function function) {
  const int64_t inputs = in.size(-1), tiles = (out_features + TILE - 1) / TILE;
  const auto check = [&](bool fits) {
    TORCH_CHECK(fits && weight.is_contiguous() && weight.size(leading) == tiles, name, ": weight of shape ",
                weight.sizes(), " does not fit ", in.sizes(), " and ", out_features, " features");
  };
  if (weight.scalar_type() == at::kByte) {
    check(in.scalar_type() == at::kBFloat16 && weight.dim() == leading + 2 &&
          weight.size(leading + 1) == compact_tile_bytes(inputs));
    return function(at::BFloat16{}, CompactTiles{weight.const_data_ptr<uint8_t>(), inputs});
  }
  for_dtype(in, name, [&](auto zero) {
    using T = decltype(zero);
    check(weight.dim() == leading + 4 && weight.size(leading + 1) == (inputs + group<T> - 1) / group<T> &&
          weight.size(leading + 2) == TILE && weight.size(leading + 3) == group<T>);
    function(zero, PackedTiles<T>{weight.const_data_ptr<T>(), inputs});
  });
}

at::Tensor packed_linear(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                         int64_t out_features) {
  const at::Tensor in = x.contiguous();
  std::vector<int64_t> shape = in.sizes().vec();
  shape.back() = out_features;
  at::Tensor y = at::empty(shape, in.options());
  for_tiles(in, weight, 0, out_features, "packed_linear", [&](auto zero, const auto& tiles) {
    using T = decltype(zero);
    const int64_t inputs = in.size(-1), rows = inputs ? in.numel() / inputs : 0;
    const T *xs = in.const_data_ptr<T>(), *added = bias ? bias->const_data_ptr<T>() : nullptr;
    T* out = y.mutable_data_ptr<T>();
    corolla::Pool::instance().run(kernel_threads(), weight.size(0), [&](int64_t t) {
      const int64_t first = t * TILE, width = std::min(TILE, out_features - first);
      tile_all(rows, xs, inputs, tiles.at(t), added ? added + first : nullptr, width, out + first, out_features);
    });
  });
  return y;
}

// Row i through the linear layer of experts[i], whose packed weight is weight[experts[i]].
at::Tensor expert_linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& experts,
                         int64_t out_features) {
  const at::Tensor order = experts.argsort(), in = x.index_select(0, order), expert = experts.index_select(0, order);
  const int64_t rows = in.size(0), inputs = in.size(1), tiles = (out_features + TILE - 1) / TILE;
  at::Tensor y = at::empty({rows, out_features}, in.options());
  const int64_t* ids = expert.const_data_ptr<int64_t>();
  std::vector<int64_t> starts;  // of the rows of one expert
  for (int64_t row = 0; row < rows; ++row)
    if (!row || ids[row] != ids[row - 1]) starts.push_back(row);
  const int64_t used = starts.size();
  starts.push_back(rows);
  TORCH_CHECK(!rows || (ids[0] >= 0 && ids[rows - 1] < weight.size(0)), "expert_linear: expert ", ids[0], " to ",
              ids[rows - 1], "; allowed: 0 to ", weight.size(0) - 1);
  for_tiles(in, weight, 1, out_features, "expert_linear", [&](auto zero, const auto& weights) {
    using T = decltype(zero);
    const T* xs = in.const_data_ptr<T>();
    T* out = y.mutable_data_ptr<T>();
    corolla::Pool::instance().run(kernel_threads(), used * tiles, [&](int64_t task) {
      const int64_t part = task / tiles, t = task % tiles, row = starts[part], first = t * TILE;
      const T* no_bias = nullptr;
      tile_all(starts[part + 1] - row, xs + row * inputs, inputs, weights.at(ids[row] * tiles + t), no_bias,
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

TORCH_LIBRARY_FRAGMENT(corolla, library) {
  library.def("set_threads", set_threads);
  library.def("compact_weight(Tensor packed, int inputs, int outputs) -> Tensor");
}

TORCH_LIBRARY_IMPL(corolla, CPU, library) {
  library.impl("compact_weight", compact_weight);
  library.impl("packed_linear", packed_linear);
  library.impl("expert_linear", expert_linear);
  library.impl("paged_attention", paged_attention);
  library.impl("lora_add", [](const at::Tensor& y, const at::Tensor& x, const at::Tensor& adapters, int64_t layer) {
    return corolla::lora_add(y, x, adapters, layer, kernel_threads());
  });
}
