// A tensor that owns memory of a backend's device.
#pragma once

#include <span>
#include <utility>
#include <vector>

#include "kernels/backend.h"

namespace kdtree {

class DeviceTensor {
 public:
  DeviceTensor() = default;
  // Zero-filled.
  DeviceTensor(Backend& backend, DType dtype, Shape shape)
      : buffer_(backend.allocate(shape.num_elements() * dtype_bytes(dtype))),
        view_(buffer_.data(), dtype, shape) {}
  // A one-dimensional tensor with these values.
  template <class T>
  DeviceTensor(Backend& backend, std::span<const T> values)
      : DeviceTensor(backend, kDTypeOf<T>, Shape{static_cast<std::int64_t>(values.size())}) {
    upload(backend, values);
  }

  const TensorView& view() const { return view_; }
  // The first `count` rows.
  TensorView rows(std::int64_t count) const { return view_.rows(0, count); }
  std::int64_t bytes() const { return buffer_.bytes(); }

  // Writes the first values.size() elements.
  template <class T>
  void upload(Backend& backend, std::span<const T> values) {
    check(view_.dtype() == kDTypeOf<T> &&
              static_cast<std::int64_t>(values.size()) <= view_.num_elements(),
          "upload of {} elements into a tensor {}", values.size(), view_.shape().to_string());
    backend.upload(view_.raw(), values.data(), static_cast<std::int64_t>(values.size_bytes()));
  }
  // Reads the first values.size() elements; they are there after backend.synchronize().
  template <class T>
  void download(Backend& backend, std::span<T> values) const {
    check(view_.dtype() == kDTypeOf<T> &&
              static_cast<std::int64_t>(values.size()) <= view_.num_elements(),
          "download of {} elements from a tensor {}", values.size(), view_.shape().to_string());
    backend.download(values.data(), view_.raw(), static_cast<std::int64_t>(values.size_bytes()));
  }

 private:
  Buffer buffer_;
  TensorView view_;
};

}  // namespace kdtree
