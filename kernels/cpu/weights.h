// Reading weight matrices of every format, and products with them for a range of output features.
#pragma once

#include <cstdint>
#include <string_view>

#include "kernels/weight_view.h"

namespace kdtree {

// Rows of float32: row r begins at base + r * stride, or at base + index[r] * stride.
struct InputRows {
  const float* base = nullptr;
  std::int64_t stride = 0;
  const std::int32_t* index = nullptr;

  const float* row(std::int64_t r) const {
    return base + (index == nullptr ? r : index[r]) * stride;
  }
};

struct OutputRows {
  float* base = nullptr;
  std::int64_t stride = 0;

  float* row(std::int64_t r) const { return base + r * stride; }
};

// Throws Error unless `w` is complete: known format, pointers there, groups that divide the row.
void check_weight(std::string_view name, const WeightView& w);

// Scale number `index` of a kInt4Group weight.
inline float read_scale(const WeightView& w, std::int64_t index) {
  return w.scale_dtype == DType::kFloat32
             ? static_cast<const float*>(w.scales)[index]
             : static_cast<const BFloat16*>(w.scales)[index].to_float();
}

// Elements [first, first + count) of row `row` as float32. A multiple of 8 for kInt4Group.
void decode_weights(const WeightView& w, std::int64_t row, std::int64_t first, std::int64_t count,
                    float* to);

// y[r][o] = sum_i w[o, i] * x[r][i] for all num_rows rows r and the output features o from `first`
// up to `last`. The weight must have been checked.
struct LinearProduct {
  const WeightView& w;
  InputRows x;
  OutputRows y;
  std::int64_t num_rows = 0;
};
void linear_outputs(const LinearProduct& product, std::int64_t first, std::int64_t last);

// out[r][c] = sum_j factors[r][j] * w[first_row + j, c] for j in [0, num_factors), ascending in j:
// the product with the transposed rows. Not for kInt4Group.
struct TransposedProduct {
  std::int64_t first_row = 0;
  std::int64_t num_factors = 0;
  InputRows factors;
  OutputRows out;
  std::int64_t num_rows = 0;
};
void linear_transposed(const WeightView& w, const TransposedProduct& product);

}  // namespace kdtree
