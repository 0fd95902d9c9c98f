// The number formats of stored weights: plain floats, fp8 blocks, INT4 groups.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/dtype.h"

namespace kdtree {

// Side of the square blocks that share one scale in fp8 checkpoints; those at the right and lower
// edge may be partial.
inline constexpr std::int64_t kFloat8Block = 128;
inline constexpr std::int64_t kInt4PerWord = 8;

float float_from_float16(std::uint16_t bits);
float float_from_float8_e4m3(std::uint8_t bits);

// out[i] = element i of `source`, exactly. F32, BF16, F16 or F8_E4M3.
void widen(DType dtype, const void* source, std::span<float> out);
// Stores as F32, or rounded to BF16 (nearest, ties to even).
void narrow(std::span<const float> values, DType dtype, void* out);

// Elements of one row of a packed matrix: out[i] = (code i - 8) * scale of i's group, in FP32, not
// rounded further. `words` and `scales` begin with out[0]'s, at a group's border.
void dequantize_int4(std::span<const std::uint32_t> words, std::span<const float> scales,
                     std::int64_t group_size, std::span<float> out);

// A row-major matrix [rows, columns] as INT4 groups.
struct Int4Matrix {
  std::vector<std::uint32_t> words;  // [rows, columns / 8]
  std::vector<float> scales;         // [rows, columns / group_size], exact in scale_dtype
};
// scale = absmax / 7.5 of a group, rounded to scale_dtype (F32 or BF16); code = value / scale,
// halves to even, clamped to -8..7, plus 8. Where that scale is zero it is 1 instead, which readers
// may divide by. `columns` is a multiple of group_size, and that one of 8. (compressed-tensors,
// symmetric INT4: 15 steps wide.)
Int4Matrix quantize_int4(std::span<const float> values, std::int64_t columns,
                         std::int64_t group_size, DType scale_dtype);

}  // namespace kdtree
