// What weights.cpp does, written for x86-64 processors with AVX2: the same bits (see lanes.h) in
// less time. Nothing here may be called where has_avx2() is false.
#pragma once

#include <cstdint>

#include "kernels/cpu/weights.h"

namespace kdtree {

bool has_avx2();

// decode_weights.
void decode_weights_avx2(const WeightView& w, std::int64_t row, std::int64_t first,
                         std::int64_t count, float* to);

// linear_outputs for 1 to kFewRows rows: so few that most of the time goes into decoding. Weights
// are decoded in registers, used for all rows and dropped.
inline constexpr std::int64_t kFewRows = 3;
void few_rows_outputs_avx2(const LinearProduct& product, std::int64_t first, std::int64_t last);

}  // namespace kdtree
