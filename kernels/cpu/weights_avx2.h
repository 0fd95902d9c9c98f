// What weights.cpp does, written for x86-64 processors with AVX2 and FMA: the same bits (see
// lanes.h) in less time. Nothing here may be called where has_avx2() is false.
#pragma once

#include <cstdint>

#include "kernels/cpu/weights.h"

namespace kdtree {

bool has_avx2();  // and FMA

// decode_weights.
void decode_weights_avx2(const WeightView& w, std::int64_t row, std::int64_t first,
                         std::int64_t count, float* to);

// linear_outputs for few rows: weights are decoded in registers, used for up to six rows and
// dropped. Up to few_rows() rows that costs less than to keep decoded weights in memory.
constexpr std::int64_t few_rows(WeightFormat format) {
  return format == WeightFormat::kInt4Group ? 8 : 24;
}
void few_rows_outputs_avx2(const LinearProduct& product, std::int64_t first, std::int64_t last);

}  // namespace kdtree
