// Packed weights in bfloat16 that take twelve bits each and lose nothing; see compact_packing.py for the layout.

#pragma once

#include <ATen/ATen.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <vector>

#include "tile.h"

namespace {

constexpr int64_t EXPONENTS = 16;    // in a row, that four bits tell apart
constexpr int64_t GROUP_BYTES = 96;  // of two inputs of all features of a tile
constexpr int64_t GROUP_WEIGHTS = 2 * TILE;

// A weight whose exponent is none of those of its tile. Its code means the smallest weight that has one.
struct Outlier {
  int32_t place;  // input * TILE + output
  float value;
};

struct CompactHead {
  int32_t exponent;  // the smallest one, with the bias of the format
  int32_t outliers;  // how many follow
};

int64_t most_outliers(int64_t inputs) { return 8 + inputs / 16; }

int64_t codes_begin(int64_t inputs) {
  return (sizeof(CompactHead) + most_outliers(inputs) * sizeof(Outlier) + 63) / 64 * 64;
}

int64_t compact_tile_bytes(int64_t inputs) { return codes_begin(inputs) + (inputs + 1) / 2 * GROUP_BYTES; }

#ifdef COROLLA_AVX512_BF16
// The weights of one group, in the order of packed ones.
inline void read_group(const uint8_t* codes, __m512i smallest, __m512i& first, __m512i& second) {
  const __m512i own = _mm512_set1_epi16(static_cast<short>(0x87ff)), rest = _mm512_set1_epi16(0x0780);
  const __m512i signs = _mm512_set1_epi16(static_cast<short>(0x807f));
  const __m512i words = _mm512_loadu_si512(codes);
  const __m512i bytes = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)(codes + 64)));
  constexpr int BOTH = 0xea;  // (a & b) | c
  first = _mm512_add_epi16(_mm512_and_si512(words, own), smallest);
  const __m512i joined =
      _mm512_ternarylogic_epi64(_mm512_srli_epi16(words, 4), rest, _mm512_and_si512(bytes, signs), BOTH);
  second = _mm512_add_epi16(joined, smallest);
}
#endif

inline void read_group(const uint8_t* codes, int32_t exponent, uint16_t* to) {
  for (int64_t i = 0; i < TILE; ++i) {
    uint16_t word;
    std::memcpy(&word, codes + 2 * i, 2);
    const uint16_t byte = codes[2 * TILE + i];
    to[i] = (word & 0x87ff) + (exponent << 7);
    to[TILE + i] = ((byte & 0x80) << 8 | (word >> 4 & 0x0780) | (byte & 0x7f)) + (exponent << 7);
  }
}

inline void write_group(const uint16_t* from, int32_t exponent, uint8_t* codes) {
  for (int64_t i = 0; i < TILE; ++i) {
    const uint16_t first = from[i] - (exponent << 7), second = from[TILE + i] - (exponent << 7);
    const uint16_t word = (first & 0x87ff) | (second & 0x0780) << 4;
    std::memcpy(codes + 2 * i, &word, 2);
    codes[2 * TILE + i] = (second >> 8 & 0x80) | (second & 0x7f);
  }
}

class CompactTile {
 public:
  CompactTile(const uint8_t* bytes, int64_t inputs) : inputs_(inputs), codes_(bytes + codes_begin(inputs)) {
    std::memcpy(&head_, bytes, sizeof head_);
    outliers_ = reinterpret_cast<const Outlier*>(bytes + sizeof head_);
  }

  // Adds x[m] . w to sum[m] for M rows.
  template <int M>
  void sums(const at::BFloat16* x, float (*sum)[TILE]) const {
    sums_inside<M>(x, sum);
    for (int32_t i = 0; i < head_.outliers; ++i) {
      const int64_t input = outliers_[i].place / TILE, output = outliers_[i].place % TILE;
      const float missing = outliers_[i].value - smallest();
      for (int m = 0; m < M; ++m) sum[m][output] += static_cast<float>(x[m * inputs_ + input]) * missing;
    }
  }

  // All weights, in the order of packed ones.
  void expand(at::BFloat16* to) const {
    uint16_t* bits = reinterpret_cast<uint16_t*>(to);
    const uint8_t* codes = codes_;
    for (int64_t k = 0; k < inputs_; k += 2, codes += GROUP_BYTES, bits += GROUP_WEIGHTS) {
      __builtin_prefetch(codes + AHEAD), __builtin_prefetch(codes + AHEAD + 64);
#ifdef COROLLA_AVX512_BF16
      __m512i first, second;
      read_group(codes, _mm512_set1_epi16(head_.exponent << 7), first, second);
      _mm512_storeu_si512(bits, first), _mm512_storeu_si512(bits + TILE, second);
#else
      read_group(codes, head_.exponent, bits);
#endif
    }
    for (int32_t i = 0; i < head_.outliers; ++i) {
      const int64_t input = outliers_[i].place / TILE, output = outliers_[i].place % TILE;
      to[input / 2 * GROUP_WEIGHTS + output * 2 + input % 2] = outliers_[i].value;
    }
  }

 private:
  float smallest() const {
    const uint32_t bits = static_cast<uint32_t>(head_.exponent) << 23;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
  }

  template <int M>
  void sums_inside(const at::BFloat16* x, float (*sum)[TILE]) const {
    const uint8_t* codes = codes_;
#ifdef COROLLA_AVX512_BF16
    const __m512i smallest = _mm512_set1_epi16(head_.exponent << 7);
    const auto read = [&](__m512i& first, __m512i& second) {
      _mm_prefetch(reinterpret_cast<const char*>(codes) + AHEAD, _MM_HINT_NTA);
      _mm_prefetch(reinterpret_cast<const char*>(codes) + AHEAD + 64, _MM_HINT_NTA);
      read_group(codes, smallest, first, second);
      codes += GROUP_BYTES;
    };
    add_products<M>(x, inputs_, read, sum);
#else
    for (int64_t k = 0; k < inputs_; k += 2, codes += GROUP_BYTES) {
      alignas(64) uint16_t bits[GROUP_WEIGHTS];
      read_group(codes, head_.exponent, bits);
      const at::BFloat16* w = reinterpret_cast<const at::BFloat16*>(bits);
      for (int m = 0; m < M; ++m)
        for (int64_t g = 0; g < 2 && k + g < inputs_; ++g) {
          const float factor = static_cast<float>(x[m * inputs_ + k + g]);
          for (int64_t n = 0; n < TILE; ++n) sum[m][n] += factor * static_cast<float>(w[n * 2 + g]);
        }
    }
#endif
  }

  int64_t inputs_;
  const uint8_t* codes_;
  const Outlier* outliers_;
  CompactHead head_;
};

// The smallest of the exponents in a row that most weights have.
inline int32_t commonest_exponents(const uint16_t* bits, int64_t groups, int64_t inputs, int64_t width) {
  int32_t counts[256] = {};
  for (int64_t i = 0; i < groups * GROUP_WEIGHTS; ++i)
    if (i % GROUP_WEIGHTS / 2 < width && i / GROUP_WEIGHTS * 2 + i % 2 < inputs) ++counts[bits[i] >> 7 & 255];
  int64_t inside = 0, most = 0;
  int32_t best = 0;
  for (int32_t last = 0; last < 256; ++last) {
    inside += counts[last] - (last >= EXPONENTS ? counts[last - EXPONENTS] : 0);
    if (inside > most) most = inside, best = std::max<int32_t>(0, last + 1 - EXPONENTS);
  }
  return best;
}

// False for a tile with too many outliers. `width` are its outputs; missing outputs and inputs get the code 0.
inline bool write_compact_tile(const uint16_t* bits, int64_t inputs, int64_t width, uint8_t* to) {
  const int64_t groups = (inputs + 1) / 2;
  CompactHead head{commonest_exponents(bits, groups, inputs, width), 0};
  uint8_t* codes = to + codes_begin(inputs);
  for (int64_t group = 0; group < groups; ++group, bits += GROUP_WEIGHTS, codes += GROUP_BYTES) {
    uint16_t own[GROUP_WEIGHTS];
    for (int64_t i = 0; i < GROUP_WEIGHTS; ++i) {
      const int64_t input = group * 2 + i % 2, output = i / 2;
      const int32_t exponent = bits[i] >> 7 & 255;
      own[i] = head.exponent << 7;
      if (output >= width || input >= inputs) continue;
      if (exponent >= head.exponent && exponent < head.exponent + EXPONENTS) {
        own[i] = bits[i];
        continue;
      }
      if (head.outliers == most_outliers(inputs)) return false;
      at::BFloat16 value;
      value.x = bits[i];
      const Outlier outlier{static_cast<int32_t>(input * TILE + output), value};
      std::memcpy(to + sizeof head + head.outliers++ * sizeof outlier, &outlier, sizeof outlier);
    }
    write_group(own, head.exponent, codes);
  }
  std::memcpy(to, &head, sizeof head);
  return true;
}

// A packed weight [tiles, groups, TILE, 2] of a layer of `inputs` and `outputs` as [tiles, bytes]; empty where a tile
// has too many outliers.
at::Tensor compact_weight(const at::Tensor& packed, int64_t inputs, int64_t outputs) {
  TORCH_CHECK(packed.is_contiguous() && packed.scalar_type() == at::kBFloat16 && packed.dim() == 4 &&
                  packed.size(0) == (outputs + TILE - 1) / TILE && packed.size(1) == (inputs + 1) / 2 &&
                  packed.size(2) == TILE && packed.size(3) == 2,
              "compact_weight: ", packed.scalar_type(), " of shape ", packed.sizes(), " is no packed weight of ",
              inputs, " inputs and ", outputs, " outputs");
  const int64_t tiles = packed.size(0), bytes = compact_tile_bytes(inputs), weights = packed.size(1) * GROUP_WEIGHTS;
  at::Tensor compact = at::zeros({tiles, bytes}, packed.options().dtype(at::kByte));
  const uint16_t* from = reinterpret_cast<const uint16_t*>(packed.const_data_ptr<at::BFloat16>());
  uint8_t* to = compact.mutable_data_ptr<uint8_t>();
  std::atomic<bool> fits{true};
  corolla::Pool::instance().run(kernel_threads(), tiles, [&](int64_t t) {
    const int64_t width = std::min(TILE, outputs - t * TILE);
    if (fits.load(std::memory_order_relaxed) && !write_compact_tile(from + t * weights, inputs, width, to + t * bytes))
      fits = false;
  });
  return fits ? compact : at::empty({0}, compact.options());
}

}  // namespace
