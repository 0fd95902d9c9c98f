// Weights of every format, eight of a row at a time, as float32.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "kernels/cuda/int4_layout.h"
#include "kernels/weight_view.h"

namespace kdtree {

// A matrix as kernels address it.
struct MatrixRef {
  const void* data = nullptr;
  const void* scales = nullptr;
  std::int32_t group_size = 1;
  WeightFormat format = WeightFormat::kFloat32;
  bool packed = false;
  bool bf16_scales = false;
  bool aligned = false;  // float32 and bf16: eight neighbours are whole 16-byte pieces
};

inline MatrixRef matrix_ref(const WeightView& w) {
  const std::int64_t bytes = w.format == WeightFormat::kFloat32 ? 4 : 2;
  return {.data = w.data,
          .scales = w.scales,
          .group_size = static_cast<std::int32_t>(w.group_size > 0 ? w.group_size : 1),
          .format = w.format,
          .packed = is_packed_int4(w),
          .bf16_scales = w.scale_dtype == DType::kBFloat16,
          .aligned = reinterpret_cast<std::uintptr_t>(w.data) % 16 == 0 &&
                     w.in_features * bytes % 16 == 0};
}

#ifdef __CUDACC__

__device__ inline float low_bfloat16(std::uint32_t pair) {
  return __uint_as_float(pair << 16);
}
__device__ inline float high_bfloat16(std::uint32_t pair) {
  return __uint_as_float(pair & 0xffff0000U);
}

// `count` <= 8 values from `from` on, zeros behind them. With `aligned`, count 8 may be read in
// 16-byte pieces.
__device__ inline void load8(const float* from, int count, bool aligned, float (&to)[8]) {
  if (aligned && count == 8) {
    const float4 a = *reinterpret_cast<const float4*>(from);
    const float4 b = *reinterpret_cast<const float4*>(from + 4);
    to[0] = a.x, to[1] = a.y, to[2] = a.z, to[3] = a.w;
    to[4] = b.x, to[5] = b.y, to[6] = b.z, to[7] = b.w;
    return;
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    to[i] = i < count ? from[i] : 0.0F;
  }
}

__device__ inline void load8(const __nv_bfloat16* from, int count, bool aligned, float (&to)[8]) {
  if (aligned && count == 8) {
    const uint4 a = *reinterpret_cast<const uint4*>(from);
    to[0] = low_bfloat16(a.x), to[1] = high_bfloat16(a.x);
    to[2] = low_bfloat16(a.y), to[3] = high_bfloat16(a.y);
    to[4] = low_bfloat16(a.z), to[5] = high_bfloat16(a.z);
    to[6] = low_bfloat16(a.w), to[7] = high_bfloat16(a.w);
    return;
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    to[i] = i < count ? __bfloat162float(from[i]) : 0.0F;
  }
}

// Where the codes and the scale of 8 neighbours (row, column..) of a packed matrix lie.
struct PackedPlace {
  std::int64_t unit;  // of the matrix
  int g;              // row % 8
  int t;              // of the lane
  int group;          // in the unit
  int half;           // 0: row g of the tile, 1: row g + 8

  __device__ PackedPlace(std::int64_t row, std::int64_t column, std::int64_t in_features)
      : unit(row / kInt4TileRows * (in_features / kInt4UnitColumns) + column / kInt4UnitColumns),
        g(static_cast<int>(row % 8)),
        t(static_cast<int>(column % kInt4GroupSize / 8)),
        group(static_cast<int>(column % kInt4UnitColumns / kInt4GroupSize)),
        half(static_cast<int>(row % kInt4TileRows / 8)) {}

  __device__ std::int64_t first_word() const { return (unit * 32 + g * 4 + t) * 4 + group * 2; }
  __device__ std::int64_t scale_word() const { return (unit * 8 + g) * 2 + group; }
};

// The four codes of one step, in bits 4 * i as the plain order has them, from a packed word.
__device__ inline std::uint32_t packed_step(std::uint32_t word, int half) {
  const std::uint32_t v = word >> (4 * half);
  return (v & 0xfU) | (v >> 12 & 0xf0U) | (v & 0xf00U) | (v >> 12 & 0xf000U);
}

// Eight codes as the plain order has them, and their scale. `column` is a multiple of 8.
struct Int4Word {
  std::uint32_t codes;
  float scale;
};

__device__ inline Int4Word read_int4(const MatrixRef& w, std::int64_t in_features, std::int64_t row,
                                     std::int64_t column) {
  if (w.packed) {
    const PackedPlace place(row, column, in_features);
    const uint2 words = *reinterpret_cast<const uint2*>(static_cast<const std::uint32_t*>(w.data) +
                                                        place.first_word());
    const std::uint32_t scales = static_cast<const std::uint32_t*>(w.scales)[place.scale_word()];
    return {packed_step(words.x, place.half) | packed_step(words.y, place.half) << 16,
            place.half == 0 ? low_bfloat16(scales) : high_bfloat16(scales)};
  }
  const std::int64_t element = row * in_features + column;
  const std::int64_t group = element / w.group_size;  // groups never cross rows
  return {static_cast<const std::uint32_t*>(w.data)[element / 8],
          w.bf16_scales ? __bfloat162float(static_cast<const __nv_bfloat16*>(w.scales)[group])
                        : static_cast<const float*>(w.scales)[group]};
}

__device__ inline void expand_int4(const Int4Word& word, float (&to)[8]) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    to[i] = static_cast<float>(static_cast<int>(word.codes >> (4 * i) & 15U) - 8) * word.scale;
  }
}

__device__ inline void decode8(const MatrixRef& w, std::int64_t in_features, std::int64_t row,
                               std::int64_t column, int count, float (&to)[8]) {
  switch (w.format) {
    case WeightFormat::kFloat32:
      load8(static_cast<const float*>(w.data) + row * in_features + column, count, w.aligned, to);
      return;
    case WeightFormat::kBFloat16:
      load8(static_cast<const __nv_bfloat16*>(w.data) + row * in_features + column, count,
            w.aligned, to);
      return;
    case WeightFormat::kInt4Group:
      expand_int4(read_int4(w, in_features, row, column), to);
      return;
  }
}

#endif  // __CUDACC__

}  // namespace kdtree
