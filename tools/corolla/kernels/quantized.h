// Linear layers on quantized weights, which are packed like those of tile.h; see quantized_packing.py.
//
// A tile is turned into floats or bfloat16 a few inputs at a time, in the core's own cache, and multiplied there, so
// that only the quantized numbers come from memory. INT8 has one scale per output feature, NF4 one per group of inputs.

#pragma once

#include <torch/library.h>

#include <algorithm>
#include <vector>

#include "tile.h"

namespace {

constexpr int64_t STRIP = 64;  // inputs that are turned into floats at once: those of one scale of NF4
constexpr int64_t MANY = 64;   // rows that share them

constexpr float NF4_CODE[16] = {
    -1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f,
    -0.28444138169288635f, -0.18477343022823334f, -0.09105003625154495f, 0.0f,
    0.07958029955625534f, 0.16093020141124725f, 0.24611230194568634f, 0.33791524171829224f,
    0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1.0f};

#ifdef COROLLA_AVX512
inline void store_run(__m512 low, __m512 high, float* to) {
  _mm512_storeu_ps(to, low), _mm512_storeu_ps(to + 16, high);
}

// Each of 16 / G scales, G times.
template <int64_t G>
__m512 spread(const float* scales) {
  if constexpr (G == 1) return _mm512_loadu_ps(scales);
  const __m512i twice = _mm512_set_epi32(7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0);
  return _mm512_permutexvar_ps(twice, _mm512_castps256_ps512(_mm256_loadu_ps(scales)));
}
#endif
#ifdef COROLLA_AVX512_BF16
inline void store_run(__m512 low, __m512 high, at::BFloat16* to) {
  _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh(high, low));
}
#endif

// Whether there are instructions for runs of 32 weights in T.
#if defined(COROLLA_AVX512_BF16)
template <typename T>
constexpr bool vectors = true;
#elif defined(COROLLA_AVX512)
template <typename T>
constexpr bool vectors = std::is_same_v<T, float>;
#else
template <typename T>
constexpr bool vectors = false;
#endif

// One byte per weight.
template <typename T>
struct Int8Weights {
  const int8_t* weights;  // [tiles][inputs, rounded up to whole groups][TILE]
  const float* scales;    // [tiles][TILE]
  int64_t inputs;

  // Weights of `width` inputs from input `first` on, in the order of packed ones and without their scale.
  void read(int64_t tile, int64_t first, int64_t width, T* to) const {
    constexpr int64_t G = group<T>;
    const int8_t* from = weights + (tile * ((inputs + G - 1) / G * G) + first) * TILE;
    const int64_t count = (width + G - 1) / G * G * TILE;
    for (int64_t i = 0; i < count; i += 32) {
      __builtin_prefetch(from + i + AHEAD);
      if constexpr (vectors<T>) {
        const auto wide = [&](int64_t offset) {
          return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)(from + i + offset))));
        };
        store_run(wide(0), wide(16), to + i);
      } else {
        for (int64_t n = i; n < i + 32; ++n) to[n] = static_cast<T>(static_cast<float>(from[n]));
      }
    }
  }

  void scale(int64_t tile, float* sum) const {
    for (int64_t n = 0; n < TILE; ++n) sum[n] *= scales[tile * TILE + n];
  }
};

// Half a byte per weight: byte i of a run of 32 holds weight i below and weight 16 + i above.
template <typename T>
struct NF4Weights {
  const uint8_t* weights;  // [tiles][inputs, rounded up to whole groups][TILE / 2]
  const float* scales;     // [tiles][inputs / span][TILE]
  int64_t inputs;
  int64_t span;  // inputs per scale; divides STRIP

  // Like that of Int8Weights, but with their scale: the very numbers that bitsandbytes computes with.
  void read(int64_t tile, int64_t first, int64_t width, T* to) const {
    const uint8_t* from = weights + (tile * inputs + first) * TILE / 2;
    const float* scale = scales + (tile * inputs + first) / span * TILE;
    for (int64_t k = 0; k < width; k += span, scale += TILE, from += span * TILE / 2, to += span * TILE)
      read_span(from, scale, to);
  }

  void read_span(const uint8_t* from, const float* scale, T* to) const {
    constexpr int64_t G = group<T>;
    if constexpr (vectors<T>) {
      const __m512 code = _mm512_loadu_ps(NF4_CODE);
      __m512 wide[2 * G];  // the scales of G inputs, in the order of their weights
      for (int64_t i = 0; i < 2 * G; ++i) wide[i] = spread<G>(scale + i * 16 / G);
      for (int64_t step = 0; step < span; step += G) {
        __builtin_prefetch(from + AHEAD);
        for (int64_t i = 0; i < 2 * G; i += 2, from += 16, to += 32) {
          const __m512i pairs = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)from));
          const __m512 low = _mm512_permutexvar_ps(pairs, code);  // looks at the lowest four bits
          const __m512 high = _mm512_permutexvar_ps(_mm512_srli_epi32(pairs, 4), code);
          store_run(_mm512_mul_ps(low, wide[i]), _mm512_mul_ps(high, wide[i + 1]), to);
        }
      }
    } else {
      for (int64_t step = 0; step < span; step += G)
        for (int64_t run = 0; run < TILE * G; run += 32, from += 16, to += 32)
          for (int64_t i = 0; i < 16; ++i) {
            to[i] = static_cast<T>(NF4_CODE[from[i] & 15] * scale[(run + i) / G]);
            to[16 + i] = static_cast<T>(NF4_CODE[from[i] >> 4] * scale[(run + 16 + i) / G]);
          }
    }
  }

  void scale(int64_t, float*) const {}
};

// sum[m] += x[m] . w for all rows; x is [rows][inputs].
template <typename T, int M = ROWS>
void add_rows(int64_t rows, const T* x, int64_t inputs, const T* w, float (*sum)[TILE]) {
  for (; rows >= M; rows -= M, x += M * inputs, sum += M) Tile<T, M>::sums(x, inputs, w, sum);
  if constexpr (M > 1) {
    if (rows) add_rows<T, M - 1>(rows, x, inputs, w, sum);
  }
}

// x [rows][inputs], cut into chunks of inputs: [chunks][rows][STRIP], the last one maybe narrower.
template <typename T>
std::vector<T> in_chunks(const T* x, int64_t rows, int64_t inputs) {
  std::vector<T> chunks(rows * inputs);
  T* next = chunks.data();
  for (int64_t k = 0; k < inputs; k += STRIP) {
    const int64_t width = std::min(STRIP, inputs - k);
    for (int64_t m = 0; m < rows; ++m, next += width) std::memcpy(next, x + m * inputs + k, width * sizeof(T));
  }
  return chunks;
}

template <typename T, typename Weights>
at::Tensor quantized_linear(const at::Tensor& x, const Weights& weights, int64_t tiles,
                            const std::optional<at::Tensor>& bias, int64_t outputs) {
  const int64_t inputs = weights.inputs, rows = x.numel() / inputs;
  std::vector<int64_t> shape = x.sizes().vec();
  shape.back() = outputs;
  at::Tensor y = at::empty(shape, x.options());
  const std::vector<T> chunks = in_chunks(x.const_data_ptr<T>(), rows, inputs);
  const T* added = bias ? bias->const_data_ptr<T>() : nullptr;
  T* out = y.mutable_data_ptr<T>();
  corolla::Pool::instance().run(kernel_threads(), tiles, [&](int64_t tile) {
    alignas(64) T w[STRIP * TILE];
    alignas(64) float sum[MANY][TILE];
    const int64_t first = tile * TILE, width = std::min(TILE, outputs - first);
    for (int64_t row = 0; row < rows; row += MANY) {
      const int64_t count = std::min(MANY, rows - row);
      std::fill_n(&sum[0][0], count * TILE, 0.0f);
      for (int64_t k = 0; k < inputs; k += STRIP) {
        const int64_t many = std::min(STRIP, inputs - k);
        weights.read(tile, k, many, w);
        add_rows(count, chunks.data() + k * rows + row * many, many, w, sum);
      }
      for (int64_t m = 0; m < count; ++m) {
        weights.scale(tile, sum[m]);
        if (added)
          for (int64_t n = 0; n < width; ++n) sum[m][n] += static_cast<float>(added[first + n]);
        store<T>(sum[m], width, out + (row + m) * outputs + first);
      }
    }
  });
  return y;
}

at::Tensor packed_linear_int8(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& scales,
                              const std::optional<at::Tensor>& bias, int64_t out_features) {
  const at::Tensor in = x.contiguous();
  at::Tensor y;
  for_dtype(in, "packed_linear_int8", [&](auto zero) {
    using T = decltype(zero);
    const int64_t inputs = in.size(-1), tiles = scales.size(0), steps = (inputs + group<T> - 1) / group<T>;
    TORCH_CHECK(weight.is_contiguous() && weight.sizes() == at::IntArrayRef({tiles, steps, TILE, group<T>}) &&
                    scales.is_contiguous() && scales.size(1) == TILE && tiles * TILE >= out_features,
                "packed_linear_int8: weight of shape ", weight.sizes(), " does not fit ", in.sizes());
    const Int8Weights<T> weights{weight.const_data_ptr<int8_t>(), scales.const_data_ptr<float>(), inputs};
    y = quantized_linear<T>(in, weights, tiles, bias, out_features);
  });
  return y;
}

at::Tensor packed_linear_nf4(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& scales,
                             const std::optional<at::Tensor>& bias, int64_t out_features) {
  const at::Tensor in = x.contiguous();
  at::Tensor y;
  for_dtype(in, "packed_linear_nf4", [&](auto zero) {
    using T = decltype(zero);
    const int64_t inputs = in.size(-1), tiles = scales.size(0), span = inputs / scales.size(1);
    TORCH_CHECK(weight.is_contiguous() && span * scales.size(1) == inputs && STRIP % span == 0 && span % group<T> == 0 &&
                    weight.sizes() == at::IntArrayRef({tiles, inputs / group<T>, TILE / 2 * group<T>}) &&
                    scales.is_contiguous() && scales.size(2) == TILE && tiles * TILE >= out_features,
                "packed_linear_nf4: weight of shape ", weight.sizes(), " does not fit ", in.sizes());
    const NF4Weights<T> weights{weight.const_data_ptr<uint8_t>(), scales.const_data_ptr<float>(), inputs, span};
    y = quantized_linear<T>(in, weights, tiles, bias, out_features);
  });
  return y;
}

}  // namespace

TORCH_LIBRARY_IMPL(corolla, CPU, library) {
  library.impl("packed_linear_int8", packed_linear_int8);
  library.impl("packed_linear_nf4", packed_linear_nf4);
}
