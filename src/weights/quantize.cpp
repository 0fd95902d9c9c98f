#include "weights/quantize.h"

#include <algorithm>
#include <cmath>

#include "core/check.h"

namespace kdtree {

namespace {

void check_finite(const QuantizeRows& rows, const std::string& place) {
  const auto bad = std::find_if(rows.values.begin(), rows.values.end(),
                                [](float value) { return !std::isfinite(value); });
  if (bad != rows.values.end()) {
    const std::int64_t index = bad - rows.values.begin();
    fail_input("{}: row {}, column {} is {}, expected a finite number", place,
               rows.first_row + index / rows.columns, rows.first_column + index % rows.columns,
               *bad);
  }
}

}  // namespace

void QuantizationError::add(std::span<const float> values, const Int4Matrix& quantized,
                            std::int64_t group_size) {
  std::vector<float> back(values.size());
  dequantize_int4(quantized.words, quantized.scales, group_size, back);
  for (std::size_t i = 0; i < values.size(); ++i) {
    const double value = values[i];
    const double difference = value - static_cast<double>(back[i]);
    error_squares_ += difference * difference;
    original_squares_ += value * value;
    max_abs_ = std::max(max_abs_, std::abs(difference));
  }
}

double QuantizationError::relative_frobenius() const {
  return original_squares_ == 0 ? 0 : std::sqrt(error_squares_ / original_squares_);
}

void check_group_size(std::int64_t columns, std::int64_t group_size, const std::string& place) {
  require_input(group_size > 0 && group_size % kInt4PerWord == 0,
                "{}: group size is {}, expected a positive multiple of {}", place, group_size,
                kInt4PerWord);
  require_input(columns % group_size == 0, "{}: groups of {} do not divide its {} columns", place,
                group_size, columns);
}

Int4Matrix quantize_rows(const QuantizeRows& rows, const std::string& place) {
  check_group_size(rows.columns, rows.group_size, place);
  const auto num_values = static_cast<std::int64_t>(rows.values.size());
  check(rows.columns > 0 && num_values % rows.columns == 0, "{} values in rows of {}", num_values,
        rows.columns);
  check_finite(rows, place);
  return quantize_int4(rows.values, rows.columns, rows.group_size, DType::kBFloat16);
}

}  // namespace kdtree
