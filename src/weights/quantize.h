// Rounding of stored weights to INT4 groups (W4A16), a few rows at a time.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "weights/number_formats.h"

namespace kdtree {

// Rows of a row-major matrix, or a part of one row.
struct QuantizeRows {
  std::span<const float> values;  // [count, columns]
  std::int64_t first_row = 0;     // in the matrix, for error messages; first_column too
  std::int64_t first_column = 0;
  std::int64_t columns = 0;
  std::int64_t group_size = 0;  // along the columns
};

// InputError, beginning with `place` (as tensor_place() gives it), unless group_size is a positive
// multiple of 8 that divides `columns`.
void check_group_size(std::int64_t columns, std::int64_t group_size, const std::string& place);

// The rows as quantize_int4() rounds them, with BF16 scales.
// Rows are independent of each other: any division into calls gives the same words and scales.
// InputError as check_group_size, or for a NaN or an infinity, with its row and column.
Int4Matrix quantize_rows(const QuantizeRows& rows, const std::string& place);

}  // namespace kdtree
