// Rounding of stored weights to INT4 groups (W4A16), a few rows at a time.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "weights/number_formats.h"

namespace kdtree {

// How far quantised values of one matrix lie from their originals. Sums run in the order of the
// calls, in double: equal calls give equal bits.
class QuantizationError {
 public:
  // `quantized` holds the words and scales of `values`, in groups of group_size.
  void add(std::span<const float> values, const Int4Matrix& quantized, std::int64_t group_size);
  // ||original - quantized|| / ||original|| (Frobenius); 0 if both are zero.
  double relative_frobenius() const;
  // The largest |original - quantized|.
  double max_abs() const { return max_abs_; }

 private:
  double error_squares_ = 0;
  double original_squares_ = 0;
  double max_abs_ = 0;
};

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
