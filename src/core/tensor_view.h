// Views of tensors in memory that somebody else owns: a pointer, an element type, a shape.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>
#include <string_view>

#include "core/check.h"
#include "core/dtype.h"

namespace kdtree {

// Up to four dimensions, outermost first.
class Shape {
 public:
  static constexpr std::size_t kMaxRank = 4;

  Shape() = default;
  Shape(std::initializer_list<std::int64_t> sizes);
  explicit Shape(std::span<const std::int64_t> sizes);

  std::size_t rank() const { return rank_; }
  std::int64_t operator[](std::size_t dim) const {
    check(dim < rank_, "dimension {} of a tensor of rank {}", dim, rank_);
    return sizes_[dim];
  }
  // Product of all sizes; 1 for rank 0.
  std::int64_t num_elements() const;
  // Product of the sizes behind the first dimension; 1 for rank 0 and 1.
  std::int64_t row_elements() const;
  bool operator==(const Shape& other) const = default;
  std::string to_string() const;  // "[2, 3]"

 private:
  std::array<std::int64_t, kMaxRank> sizes_{};
  std::size_t rank_ = 0;
};

// A tensor whose elements are contiguous within one index of the first dimension ("row"); rows may
// lie further apart (row_stride, in elements, at least shape.row_elements()). Void is `void` or
// `const void`.
template <class Void>
class BasicTensorView {
 public:
  template <class T>
  using Element = std::conditional_t<std::is_const_v<Void>, const T, T>;

  BasicTensorView() = default;
  BasicTensorView(Void* data, DType dtype, Shape shape)
      : data_(data), dtype_(dtype), shape_(shape), row_stride_(shape.row_elements()) {}
  BasicTensorView(Void* data, DType dtype, Shape shape, std::int64_t row_stride)
      : data_(data), dtype_(dtype), shape_(shape), row_stride_(row_stride) {
    check(row_stride >= shape.row_elements(), "row stride {} below the row size {}", row_stride,
          shape.row_elements());
  }
  // A mutable view converts to a read-only one.
  template <class Other>
    requires(std::is_const_v<Void> && !std::is_const_v<Other>)
  // NOLINTNEXTLINE(google-explicit-constructor)
  BasicTensorView(const BasicTensorView<Other>& other)
      : data_(other.raw()),
        dtype_(other.dtype()),
        shape_(other.shape()),
        row_stride_(other.row_stride()) {}

  Void* raw() const { return data_; }
  DType dtype() const { return dtype_; }
  const Shape& shape() const { return shape_; }
  std::int64_t size(std::size_t dim) const { return shape_[dim]; }
  std::int64_t row_stride() const { return row_stride_; }
  std::int64_t num_elements() const { return shape_.num_elements(); }
  std::int64_t bytes() const { return num_elements() * dtype_bytes(dtype_); }
  bool contiguous() const { return shape_.rank() == 0 || row_stride_ == shape_.row_elements(); }
  bool empty() const { return data_ == nullptr; }

  // Pointer to the first element; the element type must match.
  template <class T>
  Element<T>* data() const {
    check(dtype_ == kDTypeOf<T>, "tensor of {} read as {}", dtype_name(dtype_),
          dtype_name(kDTypeOf<T>));
    return static_cast<Element<T>*>(data_);
  }
  // Pointer to row `index`.
  template <class T>
  Element<T>* row(std::int64_t index) const {
    return data<T>() + index * row_stride_;
  }
  // All elements of a contiguous view.
  template <class T>
  std::span<Element<T>> span() const {
    check(contiguous(), "a strided view has no single span");
    return {data<T>(), static_cast<std::size_t>(num_elements())};
  }

  // Rows [first, first + count) of the first dimension.
  BasicTensorView rows(std::int64_t first, std::int64_t count) const {
    if (first < 0 || count < 0 || first + count > shape_[0]) {
      fail("rows [{}, {}) of a tensor {}", first, first + count, shape_.to_string());
    }
    return {offset(first * row_stride_), dtype_, with_first(count), row_stride_};
  }
  // Columns [first, first + count) of a two-dimensional view; the result is strided.
  BasicTensorView columns(std::int64_t first, std::int64_t count) const {
    if (shape_.rank() != 2 || first < 0 || count < 0 || first + count > shape_[1]) {
      fail("columns [{}, {}) of a tensor {}", first, first + count, shape_.to_string());
    }
    return {offset(first), dtype_, Shape{shape_[0], count}, row_stride_};
  }
  // The same contiguous elements under another shape.
  BasicTensorView reshape(Shape shape) const {
    if (!contiguous() || shape.num_elements() != num_elements()) {
      fail("reshape of {} to {}", shape_.to_string(), shape.to_string());
    }
    return {data_, dtype_, shape};
  }

 private:
  Void* offset(std::int64_t elements) const {
    using Byte = std::conditional_t<std::is_const_v<Void>, const std::byte, std::byte>;
    return data_ == nullptr ? nullptr : static_cast<Byte*>(data_) + elements * dtype_bytes(dtype_);
  }
  Shape with_first(std::int64_t count) const;

  Void* data_ = nullptr;
  DType dtype_ = DType::kFloat32;
  Shape shape_;
  std::int64_t row_stride_ = 1;
};

using TensorView = BasicTensorView<void>;
using ConstTensorView = BasicTensorView<const void>;

// Throws Error unless `view` has this element type and shape; `name` and the shape are in the
// message.
void expect_tensor(std::string_view name, const ConstTensorView& view, DType dtype,
                   const Shape& shape);

}  // namespace kdtree
