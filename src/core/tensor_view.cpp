#include "core/tensor_view.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <functional>
#include <numeric>

namespace kdtree {

Shape::Shape(std::initializer_list<std::int64_t> sizes)
    : Shape(std::span(sizes.begin(), sizes.size())) {}

Shape::Shape(std::span<const std::int64_t> sizes) : rank_(sizes.size()) {
  check(sizes.size() <= kMaxRank, "tensors have at most {} dimensions, not {}", kMaxRank,
        sizes.size());
  std::copy(sizes.begin(), sizes.end(), sizes_.begin());
}

std::int64_t Shape::num_elements() const {
  return std::accumulate(sizes_.begin(), sizes_.begin() + static_cast<std::ptrdiff_t>(rank_),
                         std::int64_t{1}, std::multiplies<>());
}

std::int64_t Shape::row_elements() const {
  if (rank_ < 2) {
    return 1;
  }
  return std::accumulate(sizes_.begin() + 1, sizes_.begin() + static_cast<std::ptrdiff_t>(rank_),
                         std::int64_t{1}, std::multiplies<>());
}

std::string Shape::to_string() const {
  return fmt::format(
      "[{}]", fmt::join(sizes_.begin(), sizes_.begin() + static_cast<std::ptrdiff_t>(rank_), ", "));
}

template <class Void>
Shape BasicTensorView<Void>::with_first(std::int64_t count) const {
  std::array<std::int64_t, Shape::kMaxRank> sizes{};
  for (std::size_t dim = 0; dim < shape_.rank(); ++dim) {
    sizes[dim] = dim == 0 ? count : shape_[dim];
  }
  return Shape(std::span<const std::int64_t>(sizes.data(), shape_.rank()));
}

template class BasicTensorView<void>;
template class BasicTensorView<const void>;

void expect_tensor(std::string_view name, const ConstTensorView& view, DType dtype,
                   const Shape& shape) {
  // The texts are made only for a failure: a step passes here for every tensor of every op.
  if (view.dtype() != dtype || view.shape() != shape) {
    fail("{} must be {} {}, got {} {}", name, dtype_name(dtype), shape.to_string(),
         dtype_name(view.dtype()), view.shape().to_string());
  }
}

}  // namespace kdtree
