#include "kernels/cpu/weights.h"

#include <algorithm>

#include "core/check.h"
#include "core/partition.h"
#include "kernels/cpu/lanes.h"
#include "kernels/cpu/weights_avx2.h"

namespace kdtree {
namespace {

// Elements of a weight row in hand at a time: decoded once, they stay in the nearest cache for all
// rows of the call.
constexpr std::int64_t kChunk = 512;
static_assert(kChunk % kLanes == 0);
// Output features and rows that share a chunk. Tile shapes change no bits.
constexpr int kTileOutputs = 4;
constexpr int kTileRows = 3;
// Rows whose sums are kept while the chunks of a weight row pass by; more rows read the weights
// again.
constexpr std::int64_t kRowBlock = 64;

void decode_bfloat16(const std::uint16_t* from, std::int64_t count, float* to) {
  std::int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    HalfWordLanes halves;
    std::memcpy(&halves, from + i, sizeof(halves));
    const WordLanes words = __builtin_convertvector(halves, WordLanes) << 16;
    std::memcpy(to + i, &words, sizeof(words));
  }
  for (; i < count; ++i) {
    to[i] = BFloat16{from[i]}.to_float();
  }
}

void decode_int4(const WeightView& w, std::int64_t row, std::int64_t first, std::int64_t count,
                 float* to) {
  constexpr WordLanes kShifts = {0, 4, 8, 12, 16, 20, 24, 28};
  const auto* words = static_cast<const std::uint32_t*>(w.data) + (row * w.in_features + first) / 8;
  std::int64_t group = (row * w.in_features + first) / w.group_size;  // groups never cross rows
  std::int64_t left = w.group_size - first % w.group_size;            // in the current group
  while (count > 0) {
    const float scale = read_scale(w, group);
    const std::int64_t run = std::min(left, count);
    for (std::int64_t i = 0; i < run; i += 8) {
      const WordLanes codes = ((WordLanes{} + *words) >> kShifts) & 15U;
      const IntLanes integers = __builtin_convertvector(codes, IntLanes) - 8;
      const Lanes values = __builtin_convertvector(integers, Lanes) * scale;
      store_lanes(values, to);
      ++words;
      to += 8;
    }
    count -= run;
    left = w.group_size;
    ++group;
  }
}

void decode(const WeightView& w, std::int64_t row, std::int64_t first, std::int64_t count,
            float* to) {
  switch (w.format) {
    case WeightFormat::kFloat32:
      std::memcpy(to, static_cast<const float*>(w.data) + row * w.in_features + first,
                  static_cast<std::size_t>(count) * sizeof(float));
      return;
    case WeightFormat::kBFloat16:
      decode_bfloat16(static_cast<const std::uint16_t*>(w.data) + row * w.in_features + first,
                      count, to);
      return;
    case WeightFormat::kInt4Group:
      decode_int4(w, row, first, count, to);
      return;
  }
}

// `count` weights of the row from `first` on: in place where they lie as float32, else decoded to
// `scratch`.
KDTREE_INLINE const float* read_weights(const WeightView& w, std::int64_t row, std::int64_t first,
                                        std::int64_t count, float* scratch) {
  if (w.format == WeightFormat::kFloat32) {
    return static_cast<const float*>(w.data) + row * w.in_features + first;
  }
  decode_weights(w, row, first, count, scratch);
  return scratch;
}

// A few output features in hand, over one chunk of the input.
struct WeightTile {
  const float* rows[kTileOutputs] = {};
  std::int64_t offset = 0;  // of the chunk in a row
  std::int64_t count = 0;   // elements of the chunk
};

template <int kRows>
KDTREE_INLINE void accumulate_rows(const WeightTile& tile, const InputRows& x,
                                   std::int64_t first_row, Lanes* sums) {
  const float* rows[kRows];
  for (int r = 0; r < kRows; ++r) {
    rows[r] = x.row(first_row + r) + tile.offset;
  }
  accumulate_dots<kRows, kTileOutputs>(rows, tile.rows, tile.count, sums);
}

// At most kTileOutputs output features of at most kRowBlock rows.
KDTREE_INLINE void linear_tile(const LinearProduct& product, Range outputs, Range rows) {
  const WeightView& w = product.w;
  Lanes sums[kRowBlock * kTileOutputs];
  float decoded[kTileOutputs][kChunk];
  std::fill_n(sums, rows.size() * kTileOutputs, Lanes{});
  for (std::int64_t k = 0; k < w.in_features; k += kChunk) {
    WeightTile tile = {.rows = {}, .offset = k, .count = std::min(kChunk, w.in_features - k)};
    for (int o = 0; o < kTileOutputs; ++o) {
      // A broken tile computes its last feature again and drops it.
      tile.rows[o] = o > 0 && o >= outputs.size()
                         ? tile.rows[o - 1]
                         : read_weights(w, outputs.begin + o, k, tile.count, decoded[o]);
    }
    std::int64_t r = rows.begin;
    for (; r + kTileRows <= rows.end; r += kTileRows) {
      accumulate_rows<kTileRows>(tile, product.x, r, sums + (r - rows.begin) * kTileOutputs);
    }
    if (rows.end - r == 2) {
      accumulate_rows<2>(tile, product.x, r, sums + (r - rows.begin) * kTileOutputs);
    } else if (rows.end - r == 1) {
      accumulate_rows<1>(tile, product.x, r, sums + (r - rows.begin) * kTileOutputs);
    }
  }
  for (std::int64_t r = rows.begin; r < rows.end; ++r) {
    float* y = product.y.row(r);
    for (std::int64_t o = outputs.begin; o < outputs.end; ++o) {
      y[o] = sum_lanes(sums[(r - rows.begin) * kTileOutputs + (o - outputs.begin)]);
    }
  }
}

KDTREE_SIMD_CLONES
void many_rows_outputs(const LinearProduct& product, std::int64_t first, std::int64_t last) {
  for (std::int64_t r = 0; r < product.num_rows; r += kRowBlock) {
    const Range rows = {r, std::min(r + kRowBlock, product.num_rows)};
    for (std::int64_t o = first; o < last; o += kTileOutputs) {
      linear_tile(product, {o, std::min<std::int64_t>(o + kTileOutputs, last)}, rows);
    }
  }
}

}  // namespace

void check_weight(std::string_view name, const WeightView& w) {
  check(w.out_features >= 0 && w.in_features >= 0,
        "weight {} has {} out_features and {} in_features", name, w.out_features, w.in_features);
  if (w.out_features == 0 || w.in_features == 0) {
    return;
  }
  check(w.data != nullptr, "weight {} has no data", name);
  if (w.format != WeightFormat::kInt4Group) {
    return;
  }
  check(w.scales != nullptr, "INT4 weight {} has no scales", name);
  check(w.scale_dtype == DType::kFloat32 || w.scale_dtype == DType::kBFloat16,
        "INT4 weight {} has scales of {}, expected F32 or BF16", name, dtype_name(w.scale_dtype));
  check(
      w.group_size > 0 && w.group_size % 8 == 0 && w.in_features % w.group_size == 0,
      "INT4 weight {} has group_size {}, which must be a multiple of 8 that divides in_features {}",
      name, w.group_size, w.in_features);
}

void decode_weights(const WeightView& w, std::int64_t row, std::int64_t first, std::int64_t count,
                    float* to) {
  if (has_avx2()) {
    decode_weights_avx2(w, row, first, count, to);
    return;
  }
  decode(w, row, first, count, to);
}

void linear_outputs(const LinearProduct& product, std::int64_t first, std::int64_t last) {
  if (product.num_rows <= few_rows(product.w.format) && has_avx2()) {
    few_rows_outputs_avx2(product, first, last);
    return;
  }
  many_rows_outputs(product, first, last);
}

KDTREE_SIMD_CLONES
void linear_transposed(const WeightView& w, const TransposedProduct& product) {
  constexpr int kTile = 4;
  float decoded[kTile][kChunk];
  for (std::int64_t r = 0; r < product.num_rows; ++r) {
    std::fill_n(product.out.row(r), w.in_features, 0.0F);
  }
  for (std::int64_t c = 0; c < w.in_features; c += kChunk) {
    const std::int64_t count = std::min(kChunk, w.in_features - c);
    for (std::int64_t j = 0; j < product.num_factors; j += kTile) {
      const int tile = static_cast<int>(std::min<std::int64_t>(kTile, product.num_factors - j));
      const float* rows[kTile];
      for (int t = 0; t < kTile; ++t) {
        rows[t] =
            t < tile ? read_weights(w, product.first_row + j + t, c, count, decoded[t]) : nullptr;
      }
      for (std::int64_t r = 0; r < product.num_rows; ++r) {
        const float* factors = product.factors.row(r) + j;
        float* out = product.out.row(r) + c;
        if (tile == kTile) {
          add_scaled<kTile>(factors, rows, count, out);
          continue;
        }
        for (int t = 0; t < tile; ++t) {
          const float* const one[1] = {rows[t]};
          add_scaled<1>(factors + t, one, count, out);
        }
      }
    }
  }
}

}  // namespace kdtree
