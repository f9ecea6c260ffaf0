// What the linear layers on packed weights share: threads, and the sums of one tile. See packing.py for the layout.

#pragma once

#include <ATen/ATen.h>

#include <cstring>
#include <type_traits>

#include "pool.h"

#if defined(__AVX512F__) && !defined(COROLLA_PORTABLE)
#include <immintrin.h>
#define COROLLA_AVX512
#if defined(__AVX512BF16__)
#define COROLLA_AVX512_BF16
#endif
#endif

namespace {

constexpr int64_t TILE = 32;        // output features per tile of packed weights
constexpr int64_t ROWS = 8;         // rows per pass over a tile: 2 * 8 vector accumulators
constexpr int64_t AHEAD = 4 << 10;  // bytes that weights are prefetched ahead

std::atomic<int64_t> most_threads{1};

int kernel_threads() { return static_cast<int>(most_threads.load(std::memory_order_relaxed)); }

void set_threads(int64_t threads) { most_threads.store(threads, std::memory_order_relaxed); }

// Packed weights hold `group` neighbouring inputs of one output feature side by side.
template <typename T>
constexpr int64_t group = sizeof(T) == 2 ? 2 : 1;

// y[m][0:32] = bias + x[m] . w for M rows; `w` is one tile [ceil(inputs / group)][32][group], sums are float.
template <typename T, int M>
struct Tile {
  static void sums(const T* x, int64_t inputs, const T* w, float (*sum)[TILE]) {
    constexpr int64_t G = group<T>;
    for (int64_t k = 0; k < inputs; k += G, w += TILE * G) {
      for (int m = 0; m < M; ++m) {
        for (int64_t g = 0; g < G && k + g < inputs; ++g) {
          const float factor = static_cast<float>(x[m * inputs + k + g]);
#pragma omp simd
          for (int64_t n = 0; n < TILE; ++n) sum[m][n] += factor * static_cast<float>(w[n * G + g]);
        }
      }
    }
  }
};

#ifdef COROLLA_AVX512
template <int M>
struct Tile<float, M> {
  static void sums(const float* x, int64_t inputs, const float* w, float (*sum)[TILE]) {
    __m512 low[M], high[M];
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) low[m] = _mm512_loadu_ps(sum[m]), high[m] = _mm512_loadu_ps(sum[m] + 16);
    for (int64_t k = 0; k < inputs; ++k, w += TILE) {
      _mm_prefetch(reinterpret_cast<const char*>(w) + AHEAD, _MM_HINT_T0);
      _mm_prefetch(reinterpret_cast<const char*>(w) + AHEAD + 64, _MM_HINT_T0);
      const __m512 first = _mm512_loadu_ps(w), second = _mm512_loadu_ps(w + 16);
#pragma GCC unroll 16
      for (int m = 0; m < M; ++m) {
        const __m512 factor = _mm512_set1_ps(x[m * inputs + k]);
        low[m] = _mm512_fmadd_ps(factor, first, low[m]);
        high[m] = _mm512_fmadd_ps(factor, second, high[m]);
      }
    }
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) _mm512_storeu_ps(sum[m], low[m]), _mm512_storeu_ps(sum[m] + 16, high[m]);
  }
};
#endif

#ifdef COROLLA_AVX512_BF16
// Adds products to sum[m] for M rows; read(first, second) gives the weights of the next two inputs.
template <int M, typename Read>
void add_products(const at::BFloat16* x, int64_t inputs, const Read& read, float (*sum)[TILE]) {
  __m512 low[M], high[M];  // stay in registers only if these loops are unrolled early
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m) low[m] = _mm512_loadu_ps(sum[m]), high[m] = _mm512_loadu_ps(sum[m] + 16);
  const auto add = [&](int64_t k, auto width) {
    __m512i first, second;
    read(first, second);
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
      int32_t pair = 0;
      std::memcpy(&pair, x + m * inputs + k, width);
      const __m512bh factor = (__m512bh)_mm512_set1_epi32(pair);
      low[m] = _mm512_dpbf16_ps(low[m], factor, (__m512bh)first);
      high[m] = _mm512_dpbf16_ps(high[m], factor, (__m512bh)second);
    }
  };
  for (int64_t k = 0; k + 1 < inputs; k += 2) add(k, std::integral_constant<size_t, 4>{});
  if (inputs % 2) add(inputs - 1, std::integral_constant<size_t, 2>{});
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m) _mm512_storeu_ps(sum[m], low[m]), _mm512_storeu_ps(sum[m] + 16, high[m]);
}

template <int M>
struct Tile<at::BFloat16, M> {
  static void sums(const at::BFloat16* x, int64_t inputs, const at::BFloat16* w, float (*sum)[TILE]) {
    const auto read = [&](__m512i& first, __m512i& second) {
      _mm_prefetch(reinterpret_cast<const char*>(w) + AHEAD, _MM_HINT_T0);
      _mm_prefetch(reinterpret_cast<const char*>(w) + AHEAD + 64, _MM_HINT_T0);
      first = _mm512_loadu_si512(w), second = _mm512_loadu_si512(w + TILE);
      w += 2 * TILE;
    };
    add_products<M>(x, inputs, read, sum);
  }
};
#endif

template <typename T>
void store(const float* sum, int64_t width, T* y) {
  for (int64_t n = 0; n < width; ++n) y[n] = static_cast<T>(sum[n]);
}

#ifdef COROLLA_AVX512_BF16
template <>
void store(const float* sum, int64_t width, at::BFloat16* y) {
  for (int64_t n = 0; n < width; n += 16) {
    const __mmask16 mask = width - n < 16 ? (1 << (width - n)) - 1 : 0xffff;
    _mm256_mask_storeu_epi16(y + n, mask, (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(sum + n)));
  }
}
#endif

template <typename Function>
void for_dtype(const at::Tensor& tensor, const char* name, Function function) {
  switch (tensor.scalar_type()) {
    case at::kFloat: return function(float{});
    case at::kBFloat16: return function(at::BFloat16{});
    default: TORCH_CHECK(false, name, ": dtype ", tensor.scalar_type(), "; allowed: float32, bfloat16");
  }
}

}  // namespace
