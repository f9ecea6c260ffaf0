// What the low-rank adapters of rows add to the output of a linear layer; see model/lora.py.

#pragma once

#include <ATen/ATen.h>

#include <vector>

#include "pool.h"

namespace corolla {

// The adapter of one row: A [rank, inputs] and B [rank, outputs], float32. Rank 0 is none.
struct LowRank {
  const float* a;
  const float* b;
  int64_t rank;
};

// y + (x . A^T) . B for one row; sums are float.
template <typename T>
void add_low_rank(const LowRank& adapter, const T* x, int64_t inputs, int64_t outputs, T* y) {
  std::vector<float> wide(inputs), sum(outputs);
  for (int64_t k = 0; k < inputs; ++k) wide[k] = static_cast<float>(x[k]);
  for (int64_t n = 0; n < outputs; ++n) sum[n] = static_cast<float>(y[n]);
  for (int64_t r = 0; r < adapter.rank; ++r) {
    const float* a = adapter.a + r * inputs;
    const float* b = adapter.b + r * outputs;
    float product = 0;
#pragma omp simd reduction(+ : product)
    for (int64_t k = 0; k < inputs; ++k) product += wide[k] * a[k];
#pragma omp simd
    for (int64_t n = 0; n < outputs; ++n) sum[n] += product * b[n];
  }
  for (int64_t n = 0; n < outputs; ++n) y[n] = static_cast<T>(sum[n]);
}

// `y` [N, ..., outputs] and `x` [N, ..., inputs] of one position per row; `adapters` [layers, N, 3] int64 holds
// addresses of A and B and the rank, by layer and row.
inline at::Tensor lora_add(
    const at::Tensor& y, const at::Tensor& x, const at::Tensor& adapters, int64_t layer, int threads) {
  const int64_t rows = adapters.size(1), inputs = x.size(-1), outputs = y.size(-1);
  TORCH_CHECK(adapters.is_contiguous() && layer < adapters.size(0), "lora_add: adapters by layer and row");
  TORCH_CHECK(x.numel() == rows * inputs && y.numel() == rows * outputs, "lora_add: one position per row");
  TORCH_CHECK(x.scalar_type() == y.scalar_type(), "lora_add: x and y of one type");
  const at::Tensor given = x.contiguous();
  at::Tensor output = y.clone(at::MemoryFormat::Contiguous);
  static_assert(sizeof(LowRank) == 3 * sizeof(int64_t));
  const auto* table = reinterpret_cast<const LowRank*>(adapters.const_data_ptr<int64_t>()) + layer * rows;
  const auto run = [&](auto type) {
    using T = decltype(type);
    const T* from = given.const_data_ptr<T>();
    T* to = output.mutable_data_ptr<T>();
    Pool::instance().run(threads, rows, [&](int64_t row) {
      if (table[row].rank) add_low_rank(table[row], from + row * inputs, inputs, outputs, to + row * outputs);
    });
  };
  if (x.scalar_type() == at::kBFloat16) {
    run(at::BFloat16{});
  } else {
    TORCH_CHECK(x.scalar_type() == at::kFloat, "lora_add: float32 or bfloat16");
    run(float{});
  }
  return output;
}

}  // namespace corolla
