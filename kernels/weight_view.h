// A weight matrix as kernels see it: where it lies and how its elements are stored.
#pragma once

#include <cstdint>

#include "core/dtype.h"

namespace kdtree {

enum class WeightFormat : std::uint8_t {
  kFloat32,
  kBFloat16,
  // 4-bit integers with one scale a group of `group_size` neighbours of a row: w = (code - 8) *
  // scale in FP32, the product not rounded. Codes: 32-bit words, element k of a row in word k / 8
  // at bits 4 * (k % 8).
  kInt4Group,
};

// Row-major matrix [out_features, in_features]: y = W x. Not owned. Any size may be 0 (a rank's
// empty part).
struct WeightView {
  WeightFormat format = WeightFormat::kFloat32;
  std::int64_t out_features = 0;
  std::int64_t in_features = 0;
  const void* data = nullptr;           // [out, in] float32 / bf16, or [out, in / 8] words
  const void* scales = nullptr;         // [out, in / group_size]; kInt4Group only
  DType scale_dtype = DType::kFloat32;  // kFloat32 or kBFloat16
  std::int64_t group_size = 0;          // divides in_features, multiple of 8; kInt4Group only
};

}  // namespace kdtree
