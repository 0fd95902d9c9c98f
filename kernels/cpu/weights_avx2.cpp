#include "kernels/cpu/weights_avx2.h"

#include <algorithm>

#include "core/check.h"
#include "core/partition.h"
#include "kernels/cpu/avx2.h"

namespace kdtree {

#if defined(KDTREE_AVX2)

namespace {

// The rows of a tile and where their outputs go.
template <int kRows>
struct RowBlock {
  const float* x[kRows];
  float* y[kRows];
};

// Sums of kOutputs output features of kRows rows, in registers.
template <int kRows, int kOutputs>
struct Sums {
  __m256 of[kRows][kOutputs];
};

// Eight elements of every row, from `i` on, times those of every output feature.
template <int kRows, int kOutputs>
KDTREE_AVX2_INLINE void accumulate(const __m256 (&weights)[kOutputs], const RowBlock<kRows>& rows,
                                   std::int64_t i, Sums<kRows, kOutputs>& sums) {
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    const __m256 x = _mm256_loadu_ps(rows.x[r] + i);
#pragma GCC unroll 8
    for (int o = 0; o < kOutputs; ++o) {
      sums.of[r][o] = _mm256_fmadd_ps(weights[o], x, sums.of[r][o]);
    }
  }
}

KDTREE_AVX2_INLINE __m128 add_halves(__m256 v) {
  return _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
}

// sum_lanes of four vectors.
KDTREE_AVX2_INLINE __m128 sum_lanes_of(__m256 a, __m256 b, __m256 c, __m256 d) {
  const __m128 a4 = add_halves(a);
  const __m128 b4 = add_halves(b);
  const __m128 c4 = add_halves(c);
  const __m128 d4 = add_halves(d);
  const __m128 ab = _mm_add_ps(_mm_movelh_ps(a4, b4), _mm_movehl_ps(b4, a4));
  const __m128 cd = _mm_add_ps(_mm_movelh_ps(c4, d4), _mm_movehl_ps(d4, c4));
  return _mm_add_ps(_mm_shuffle_ps(ab, cd, _MM_SHUFFLE(2, 0, 2, 0)),
                    _mm_shuffle_ps(ab, cd, _MM_SHUFFLE(3, 1, 3, 1)));
}

// sum_lanes.
KDTREE_AVX2_INLINE float sum_lanes_of(__m256 v) {
  const __m128 four = add_halves(v);
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

// Adds the lanes up and writes output features [o, o + kOutputs) of every row.
template <int kRows, int kOutputs>
KDTREE_AVX2_INLINE void write_sums(const Sums<kRows, kOutputs>& sums, const RowBlock<kRows>& rows,
                                   std::int64_t o) {
  static_assert(kOutputs >= 1 && kOutputs <= 4);
  if constexpr (kOutputs == 1) {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      rows.y[r][o] = sum_lanes_of(sums.of[r][0]);
    }
  } else if constexpr (kOutputs == 2) {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; r += 2) {
      const int next = r + 1 < kRows ? r + 1 : r;  // the last of an odd number twice
      const __m128 four =
          sum_lanes_of(sums.of[r][0], sums.of[r][1], sums.of[next][0], sums.of[next][1]);
      _mm_storel_pi(reinterpret_cast<__m64*>(rows.y[r] + o), four);
      _mm_storeh_pi(reinterpret_cast<__m64*>(rows.y[next] + o), four);
    }
  } else {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const auto& of = sums.of[r];
      const __m128 four = sum_lanes_of(of[0], of[1], of[2], of[kOutputs - 1]);
      if constexpr (kOutputs == 4) {
        _mm_storeu_ps(rows.y[r] + o, four);
      } else {
        _mm_storel_pi(reinterpret_cast<__m64*>(rows.y[r] + o), four);
        rows.y[r][o + 2] = _mm_cvtss_f32(_mm_movehl_ps(four, four));
      }
    }
  }
}

// Asks for the `bytes` from `from` on. They may lie behind the end of the weight: nothing is read.
KDTREE_AVX2_INLINE void prefetch(const void* from, std::int64_t bytes) {
  constexpr std::int64_t kLineBytes = 64;
  const auto* first = static_cast<const char*>(from);
  for (std::int64_t at = 0; at < bytes; at += kLineBytes) {
    _mm_prefetch(first + at, _MM_HINT_T0);
  }
}
// Tiles that weights are asked for ahead of their use.
constexpr std::int64_t kTilesAhead = 2;

// Output features [o, o + kOutputs). Element: float, or uint16_t for bf16.
template <class Element, int kRows, int kOutputs>
KDTREE_AVX2_INLINE void plain_tile(const WeightView& w, const RowBlock<kRows>& rows,
                                   std::int64_t o) {
  const std::int64_t in_features = w.in_features;
  const auto* from = static_cast<const Element*>(w.data) + o * in_features;
  constexpr auto kElementBytes = static_cast<std::int64_t>(sizeof(Element));
  prefetch(from + kTilesAhead * kOutputs * in_features, kOutputs * in_features * kElementBytes);
  Sums<kRows, kOutputs> sums = {};
  __m256 weights[kOutputs];
  std::int64_t i = 0;
  for (; i + kLanes <= in_features; i += kLanes) {
#pragma GCC unroll 8
    for (int k = 0; k < kOutputs; ++k) {
      weights[k] = avx2::decode_8(from + k * in_features + i);
    }
    accumulate(weights, rows, i, sums);
  }
  if (i < in_features) {
    const std::int64_t count = in_features - i;
#pragma GCC unroll 8
    for (int k = 0; k < kOutputs; ++k) {
      weights[k] = avx2::decode_tail(from + k * in_features + i, count);
    }
    float padded[kRows][kLanes];
    RowBlock<kRows> tails = {};
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      _mm256_storeu_ps(padded[r], avx2::decode_tail(rows.x[r] + i, count));
      tails.x[r] = padded[r];
    }
    accumulate(weights, tails, 0, sums);
  }
  write_sums(sums, rows, o);
}

// The same of an INT4 weight. Scale: float, or uint16_t for bf16.
template <class Scale, int kRows, int kOutputs>
KDTREE_AVX2_INLINE void int4_tile(const WeightView& w, const RowBlock<kRows>& rows,
                                  std::int64_t o) {
  const std::int64_t num_groups = w.in_features / w.group_size;
  const std::int64_t num_words = w.in_features / kLanes;
  const std::int64_t group_words = w.group_size / kLanes;
  const auto* words = static_cast<const std::uint32_t*>(w.data) + o * num_words;
  const auto* from = static_cast<const Scale*>(w.scales) + o * num_groups;
  constexpr auto kWordBytes = static_cast<std::int64_t>(sizeof(std::uint32_t));
  prefetch(words + kTilesAhead * kOutputs * num_words, kOutputs * num_words * kWordBytes);
  Sums<kRows, kOutputs> sums = {};
  std::int64_t word = 0;
  for (std::int64_t g = 0; g < num_groups; ++g) {
    __m256 scales[kOutputs];
#pragma GCC unroll 8
    for (int k = 0; k < kOutputs; ++k) {
      scales[k] = avx2::broadcast(from + k * num_groups + g);
    }
    for (const std::int64_t end = word + group_words; word < end; ++word) {
      __m256 weights[kOutputs];
#pragma GCC unroll 8
      for (int k = 0; k < kOutputs; ++k) {
        weights[k] = avx2::decode_8(words + k * num_words + word, scales[k]);
      }
      accumulate(weights, rows, word * kLanes, sums);
    }
  }
  write_sums(sums, rows, o);
}

// Output features in hand for so many rows: as many as registers have sums for.
constexpr int tile_outputs(int num_rows) {
  return num_rows <= 2 ? 4 : num_rows == 3 ? 3 : 2;
}

template <class Element, int kRows>
KDTREE_AVX2_INLINE void plain_rows(const WeightView& w, const RowBlock<kRows>& rows,
                                   Range outputs) {
  constexpr int kOutputs = tile_outputs(kRows);
  std::int64_t o = outputs.begin;
  for (; o + kOutputs <= outputs.end; o += kOutputs) {
    plain_tile<Element, kRows, kOutputs>(w, rows, o);
  }
  for (; o < outputs.end; ++o) {
    plain_tile<Element, kRows, 1>(w, rows, o);
  }
}

template <class Scale, int kRows>
KDTREE_AVX2_INLINE void int4_rows(const WeightView& w, const RowBlock<kRows>& rows, Range outputs) {
  constexpr int kOutputs = tile_outputs(kRows);
  std::int64_t o = outputs.begin;
  for (; o + kOutputs <= outputs.end; o += kOutputs) {
    int4_tile<Scale, kRows, kOutputs>(w, rows, o);
  }
  for (; o < outputs.end; ++o) {
    int4_tile<Scale, kRows, 1>(w, rows, o);
  }
}

// kRows rows from `first_row` on: weights are decoded once for all of them.
template <int kRows>
KDTREE_AVX2 void block_outputs(const LinearProduct& product, std::int64_t first_row,
                               Range outputs) {
  RowBlock<kRows> rows = {};
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    rows.x[r] = product.x.row(first_row + r);
    rows.y[r] = product.y.row(first_row + r);
  }
  switch (product.w.format) {
    case WeightFormat::kFloat32:
      plain_rows<float>(product.w, rows, outputs);
      break;
    case WeightFormat::kBFloat16:
      plain_rows<std::uint16_t>(product.w, rows, outputs);
      break;
    case WeightFormat::kInt4Group:
      if (product.w.scale_dtype == DType::kFloat32) {
        int4_rows<float>(product.w, rows, outputs);
      } else {
        int4_rows<std::uint16_t>(product.w, rows, outputs);
      }
      break;
  }
}

// Rows from `first_row` on as one block; returns how many were taken. Of more rows than a block
// holds none is left alone.
KDTREE_AVX2 std::int64_t next_block(const LinearProduct& product, std::int64_t first_row,
                                    Range outputs) {
  constexpr std::int64_t kMost = 6;
  const std::int64_t left = product.num_rows - first_row;
  const std::int64_t taken = left <= kMost ? left : std::min(kMost, (left + 1) / 2);
  switch (taken) {
    case 1:
      block_outputs<1>(product, first_row, outputs);
      break;
    case 2:
      block_outputs<2>(product, first_row, outputs);
      break;
    case 3:
      block_outputs<3>(product, first_row, outputs);
      break;
    case 4:
      block_outputs<4>(product, first_row, outputs);
      break;
    case 5:
      block_outputs<5>(product, first_row, outputs);
      break;
    default:
      block_outputs<kMost>(product, first_row, outputs);
      break;
  }
  return taken;
}

std::int64_t row_bytes(const WeightView& w) {
  switch (w.format) {
    case WeightFormat::kFloat32:
      return w.in_features * 4;
    case WeightFormat::kBFloat16:
      return w.in_features * 2;
    case WeightFormat::kInt4Group:
      return w.in_features / 2;
  }
  return 0;
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
  return __builtin_cpu_supports("avx2") != 0 && __builtin_cpu_supports("fma") != 0;
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

void few_rows_outputs_avx2(const LinearProduct& product, std::int64_t first, std::int64_t last) {
  // Weights that stay in the nearest cache while all blocks of rows pass by.
  constexpr std::int64_t kCachedBytes = 16384;
  const std::int64_t whole_tiles =
      kCachedBytes / std::max<std::int64_t>(1, row_bytes(product.w)) / 4 * 4;
  const std::int64_t step = std::max<std::int64_t>(4, whole_tiles);
  for (std::int64_t o = first; o < last; o += step) {
    const Range outputs = {o, std::min(o + step, last)};
    for (std::int64_t row = 0; row < product.num_rows;) {
      row += next_block(product, row, outputs);
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
