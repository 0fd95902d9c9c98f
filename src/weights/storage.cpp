#include "weights/storage.h"

#include <algorithm>
#include <initializer_list>
#include <utility>

#include "core/check.h"
#include "weights/number_formats.h"
#include "weights/raw_tensor.h"

namespace kdtree {

namespace {

void expect_stored(const StoredTensor& tensor, const Shape& shape,
                   std::initializer_list<DType> dtypes) {
  std::string names;
  for (const DType dtype : dtypes) {
    names += fmt::format("{}{}", names.empty() ? "" : " or ", dtype_name(dtype));
  }
  require_input(std::find(dtypes.begin(), dtypes.end(), tensor.dtype) != dtypes.end(),
                "{} is {}, expected {}", tensor_place(tensor), dtype_name(tensor.dtype), names);
  require_input(tensor.shape == shape, "{} has shape {}, expected {}", tensor_place(tensor),
                tensor.shape.to_string(), shape.to_string());
}

std::int64_t divide_up(std::int64_t value, std::int64_t divisor) {
  return (value + divisor - 1) / divisor;
}

}  // namespace

StorageResolver::StorageResolver(const TensorTable& table, std::string origin,
                                 std::string name_prefix,
                                 std::optional<QuantizationConfig> quantization)
    : table_(table),
      origin_(std::move(origin)),
      name_prefix_(std::move(name_prefix)),
      quantization_(quantization) {}

std::string StorageResolver::place_of(const TensorSpec& spec) const {
  return tensor_place(origin_, name_prefix_ + spec.name);
}

const StoredTensor* StorageResolver::take(const std::string& name) {
  const auto found = table_.find(name);
  if (found == table_.end()) {
    return nullptr;
  }
  taken_.insert(&found->second);
  return &found->second;
}

StoredCopy StorageResolver::int4_copy(const TensorSpec& spec, const StoredTensor& words,
                                      const std::string& scales_name) {
  const std::string place = tensor_place(words);
  require_input(quantization_.has_value(),
                "{} is packed INT4, but the config states no quantisation", place);
  const std::int64_t group = quantization_->group_size;
  const std::int64_t rows = spec.shape[0];
  const std::int64_t columns = spec.shape[1];
  require_input(columns % group == 0,
                "{} is packed INT4, but groups of {} do not divide {} columns", place, group,
                columns);
  expect_stored(words, {rows, columns / kInt4PerWord}, {DType::kInt32});
  const StoredTensor* scales = take(scales_name);
  require_input(scales != nullptr, "{} is packed INT4, but '{}' is missing", place, scales_name);
  expect_stored(*scales, {rows, columns / group}, {DType::kFloat32, DType::kBFloat16});
  return {.form = StorageForm::kInt4, .values = &words, .scales = scales, .group_size = group};
}

StoredCopy StorageResolver::original_copy(const TensorSpec& spec, const StoredTensor& values) {
  const std::string scales_name = spec.name + "_scale_inv";
  if (values.dtype != DType::kFloat8E4M3 || !spec.may_be_quantized) {
    expect_stored(values, spec.shape, {DType::kFloat32, DType::kBFloat16, DType::kFloat16});
    require_input(!table_.contains(scales_name), "{} is {}, but '{}' belongs to fp8 values",
                  tensor_place(values), dtype_name(values.dtype), scales_name);
    return {.form = StorageForm::kPlain, .values = &values};
  }
  expect_stored(values, spec.shape, {DType::kFloat8E4M3});
  const StoredTensor* scales = take(scales_name);
  require_input(scales != nullptr, "{} is fp8, but '{}' is missing", tensor_place(values),
                scales_name);
  expect_stored(*scales,
                {divide_up(spec.shape[0], kFloat8Block), divide_up(spec.shape[1], kFloat8Block)},
                {DType::kFloat32, DType::kBFloat16});
  return {.form = StorageForm::kFloat8, .values = &values, .scales = scales};
}

StoredCopies StorageResolver::resolve(const TensorSpec& spec) {
  StoredCopies copies;
  if (const StoredTensor* values = take(spec.name)) {
    copies.original = original_copy(spec, *values);
  }
  if (spec.may_be_quantized) {
    const StoredTensor* packed = take(spec.name + "_packed");
    const StoredTensor* words = take(spec.name + ".qw");
    require_input(packed == nullptr || words == nullptr,
                  "{} is there twice as INT4, as '_packed' and as '.qw'", place_of(spec));
    if (packed != nullptr) {
      copies.quantized = int4_copy(spec, *packed, spec.name + "_scale");
      copies.quantized->packed_shape = take(spec.name + "_shape");
      if (copies.quantized->packed_shape != nullptr) {
        expect_stored(*copies.quantized->packed_shape, {2}, {DType::kInt64, DType::kInt32});
      }
    } else if (words != nullptr) {
      copies.quantized = int4_copy(spec, *words, spec.name + ".sc");
    }
  }
  require_input(spec.tied || copies.original || copies.quantized,
                "{} is missing, expected with shape {}", place_of(spec), spec.shape.to_string());
  return copies;
}

void StorageResolver::require_nothing_left() const {
  for (const auto& [name, tensor] : table_) {
    require_input(taken_.contains(&tensor),
                  "{} is unknown: a model of this config has no use for it", tensor_place(tensor));
  }
}

}  // namespace kdtree
