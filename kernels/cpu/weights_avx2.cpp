#include "kernels/cpu/weights_avx2.h"

#include <algorithm>

#include "core/check.h"
#include "core/partition.h"
#include "kernels/cpu/avx2.h"

namespace kdtree {

#if defined(KDTREE_AVX2)

namespace {

// Output features that share what is read of x.
constexpr int kTileOutputs = 4;

// Sums of kOutputs output features of kRows rows, in registers.
template <int kRows, int kOutputs>
struct Tile {
  const float* x[kRows];
  __m256 sums[kRows][kOutputs];
};

template <int kRows, int kOutputs>
KDTREE_AVX2_INLINE void begin_tile(const LinearProduct& product, std::int64_t first_row,
                                   Tile<kRows, kOutputs>& tile) {
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    tile.x[r] = product.x.row(first_row + r);
  }
}

template <int kRows, int kOutputs>
KDTREE_AVX2_INLINE void accumulate(const __m256 (&x)[kRows], __m256 weights, int o,
                                   Tile<kRows, kOutputs>& tile) {
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    tile.sums[r][o] = _mm256_add_ps(tile.sums[r][o], _mm256_mul_ps(weights, x[r]));
  }
}

// sum_lanes.
KDTREE_AVX2_INLINE float sum_of(__m256 v) {
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

template <int kRows, int kOutputs>
KDTREE_AVX2_INLINE void end_tile(const LinearProduct& product, std::int64_t first_row,
                                 Range outputs, const Tile<kRows, kOutputs>& tile) {
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    float* y = product.y.row(first_row + r) + outputs.begin;
#pragma GCC unroll 8
    for (int o = 0; o < kOutputs; ++o) {
      // Features behind the last one of a broken tile repeat it and are dropped.
      if (o < outputs.size()) {
        y[o] = sum_of(tile.sums[r][o]);
      }
    }
  }
}

// Element: float, or uint16_t for bf16.
template <class Element, int kRows, int kOutputs>
KDTREE_AVX2_INLINE void plain_tile(const LinearProduct& product, std::int64_t first_row,
                                   Range outputs) {
  const std::int64_t in_features = product.w.in_features;
  const Element* w[kOutputs];
#pragma GCC unroll 8
  for (int o = 0; o < kOutputs; ++o) {
    w[o] = static_cast<const Element*>(product.w.data) +
           std::min(outputs.begin + o, outputs.end - 1) * in_features;
  }
  Tile<kRows, kOutputs> tile = {};
  begin_tile(product, first_row, tile);
  std::int64_t i = 0;
  for (; i + kLanes <= in_features; i += kLanes) {
    __m256 x[kRows];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      x[r] = _mm256_loadu_ps(tile.x[r] + i);
    }
#pragma GCC unroll 8
    for (int o = 0; o < kOutputs; ++o) {
      accumulate(x, avx2::decode_8(w[o] + i), o, tile);
    }
  }
  if (i < in_features) {
    __m256 x[kRows];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      x[r] = avx2::decode_tail(tile.x[r] + i, in_features - i);
    }
#pragma GCC unroll 8
    for (int o = 0; o < kOutputs; ++o) {
      accumulate(x, avx2::decode_tail(w[o] + i, in_features - i), o, tile);
    }
  }
  end_tile(product, first_row, outputs, tile);
}

template <int kRows, int kOutputs>
KDTREE_AVX2_INLINE void int4_tile(const LinearProduct& product, std::int64_t first_row,
                                  Range outputs) {
  const WeightView& w = product.w;
  const std::int64_t num_groups = w.in_features / w.group_size;
  const std::int64_t group_words = w.group_size / kLanes;
  const std::uint32_t* words[kOutputs];
  std::int64_t scale_index[kOutputs];
#pragma GCC unroll 8
  for (int o = 0; o < kOutputs; ++o) {
    const std::int64_t row = std::min(outputs.begin + o, outputs.end - 1);
    words[o] = static_cast<const std::uint32_t*>(w.data) + row * num_groups * group_words;
    scale_index[o] = row * num_groups;
  }
  Tile<kRows, kOutputs> tile = {};
  begin_tile(product, first_row, tile);
  std::int64_t word = 0;
  for (std::int64_t g = 0; g < num_groups; ++g) {
    __m256 scales[kOutputs];
#pragma GCC unroll 8
    for (int o = 0; o < kOutputs; ++o) {
      scales[o] = _mm256_set1_ps(read_scale(w, scale_index[o] + g));
    }
    for (const std::int64_t end = word + group_words; word < end; ++word) {
      __m256 x[kRows];
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        x[r] = _mm256_loadu_ps(tile.x[r] + word * kLanes);
      }
#pragma GCC unroll 8
      for (int o = 0; o < kOutputs; ++o) {
        accumulate(x, avx2::decode_8(words[o] + word, scales[o]), o, tile);
      }
    }
  }
  end_tile(product, first_row, outputs, tile);
}

// kRows rows from `first_row` on. Every tile of output features reads its weights once for them.
template <int kRows>
KDTREE_AVX2_INLINE void tile_outputs(const LinearProduct& product, std::int64_t first_row,
                                     Range outputs) {
  switch (product.w.format) {
    case WeightFormat::kFloat32:
      plain_tile<float, kRows, kTileOutputs>(product, first_row, outputs);
      break;
    case WeightFormat::kBFloat16:
      plain_tile<std::uint16_t, kRows, kTileOutputs>(product, first_row, outputs);
      break;
    case WeightFormat::kInt4Group:
      if constexpr (kRows < 3) {
        int4_tile<kRows, kTileOutputs>(product, first_row, outputs);
      } else {
        // Beside the constants that decode, registers hold the sums of half a tile.
        constexpr int kHalf = kTileOutputs / 2;
        const std::int64_t middle = std::min(outputs.begin + kHalf, outputs.end);
        int4_tile<kRows, kHalf>(product, first_row, {outputs.begin, middle});
        if (middle < outputs.end) {
          int4_tile<kRows, kHalf>(product, first_row, {middle, outputs.end});
        }
      }
      break;
  }
}

KDTREE_AVX2 void decode_bfloat16(const std::uint16_t* from, std::int64_t count, float* to) {
  std::int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    _mm256_storeu_ps(to + i, avx2::decode_8(from + i));
  }
  for (; i < count; ++i) {
    to[i] = BFloat16{from[i]}.to_float();
  }
}

KDTREE_AVX2 void decode_int4(const WeightView& w, std::int64_t row, std::int64_t first,
                             std::int64_t count, float* to) {
  const std::int64_t place = row * w.in_features + first;
  const auto* words = static_cast<const std::uint32_t*>(w.data) + place / kLanes;
  std::int64_t group = place / w.group_size;                // groups never cross rows
  std::int64_t left = w.group_size - place % w.group_size;  // in the current group
  while (count > 0) {
    const __m256 scale = _mm256_set1_ps(read_scale(w, group));
    const std::int64_t run = std::min(left, count);
    for (std::int64_t i = 0; i < run; i += kLanes) {
      _mm256_storeu_ps(to + i, avx2::decode_8(words + i / kLanes, scale));
    }
    words += run / kLanes;
    to += run;
    count -= run;
    left = w.group_size;
    ++group;
  }
}

}  // namespace

bool has_avx2() {
  return __builtin_cpu_supports("avx2") != 0;
}

void decode_weights_avx2(const WeightView& w, std::int64_t row, std::int64_t first,
                         std::int64_t count, float* to) {
  const std::int64_t place = row * w.in_features + first;
  switch (w.format) {
    case WeightFormat::kFloat32:
      std::copy_n(static_cast<const float*>(w.data) + place, count, to);
      return;
    case WeightFormat::kBFloat16:
      decode_bfloat16(static_cast<const std::uint16_t*>(w.data) + place, count, to);
      return;
    case WeightFormat::kInt4Group:
      decode_int4(w, row, first, count, to);
      return;
  }
}

KDTREE_AVX2 void few_rows_outputs_avx2(const LinearProduct& product, std::int64_t first,
                                       std::int64_t last) {
  for (std::int64_t o = first; o < last; o += kTileOutputs) {
    const Range outputs = {o, std::min<std::int64_t>(o + kTileOutputs, last)};
    std::int64_t r = 0;
    for (; r + 3 <= product.num_rows; r += 3) {
      tile_outputs<3>(product, r, outputs);
    }
    if (product.num_rows - r == 2) {
      tile_outputs<2>(product, r, outputs);
    } else if (product.num_rows - r == 1) {
      tile_outputs<1>(product, r, outputs);
    }
  }
}

#else

bool has_avx2() {
  return false;
}

void decode_weights_avx2(const WeightView&, std::int64_t, std::int64_t, std::int64_t, float*) {
  check(false, "no AVX2 in this build");
}

void few_rows_outputs_avx2(const LinearProduct&, std::int64_t, std::int64_t) {
  check(false, "no AVX2 in this build");
}

#endif

}  // namespace kdtree
