// What the tests of all ops share: a fixture for each backend, tensors with guards, row
// independence. A test body knows the Backend interface only, so that it runs on every backend that
// this build and machine have.
#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "core/check.h"
#include "kernels/backend.h"
#include "tests/unit/op_compare.h"
#include "tests/unit/op_twice.h"

namespace kdtree::ops_test {

// Sizes around the borders of tiles, and the longest there are.
inline constexpr std::int64_t kRowCounts[] = {1,  2,  7,  8,  9,  16,  17, 31,
                                              32, 33, 63, 64, 65, 128, 512};
inline constexpr std::int64_t kMostRows = 512;
inline constexpr std::int32_t kPrefixLengths[] = {0, 1, 31, 32, 33, 255, 256, 257, 8191};

// Rows of a call of kMostRows that are compared with a slow reference; the bits of the others
// follow from those of shorter calls.
inline const std::vector<std::int64_t> kSampledRows = {0, 1, 31, 32, 64, 129, 300, 511};

// A tensor on a backend's device between two guards; rows may lie apart, with guard bytes in the
// gaps. What nobody has written yet is NaN, in an integer tensor a large negative number.
class GuardedTensor {
 public:
  GuardedTensor(Backend& backend, DType dtype, const Shape& shape, std::int64_t row_stride = 0)
      : backend_(&backend),
        dtype_(dtype),
        shape_(shape),
        row_stride_(row_stride == 0 ? shape.row_elements() : row_stride),
        num_rows_(shape.rank() == 0 ? 0 : shape[0]),
        row_elements_(shape.row_elements()),
        image_(
            static_cast<std::size_t>(2 * kGuardBytes + num_rows_ * row_stride_ * element_bytes()),
            kGuard),
        buffer_(backend.allocate(static_cast<std::int64_t>(image_.size()))) {
    if (row_stride_ == row_elements_) {  // no gaps: all of it is one row
      row_elements_ *= num_rows_;
      num_rows_ = 1;
    }
    const bool integers = dtype == DType::kInt32 || dtype == DType::kInt64;
    for (std::int64_t r = 0; r < num_rows_; ++r) {
      std::memset(row(r), integers ? static_cast<int>(kGuard) : kNanByte, row_bytes());
    }
    push();
  }

  TensorView view() const {
    return {static_cast<std::byte*>(buffer_.data()) + kGuardBytes, dtype_, shape_, row_stride_};
  }

  // All elements, row-major.
  template <class T>
  void upload(const std::vector<T>& values) {
    ASSERT_EQ(kDTypeOf<T>, dtype_);
    ASSERT_EQ(static_cast<std::int64_t>(values.size()), shape_.num_elements());
    for (std::int64_t r = 0; r < num_rows_ && !values.empty(); ++r) {
      std::memcpy(row(r), values.data() + r * row_elements_, row_bytes());
    }
    push();
  }

  // All elements, row-major; fails if a guard was touched.
  template <class T>
  std::vector<T> download() {
    EXPECT_EQ(kDTypeOf<T>, dtype_);
    backend_->download(image_.data(), buffer_.data(), static_cast<std::int64_t>(image_.size()));
    backend_->synchronize();
    std::vector<T> values(static_cast<std::size_t>(shape_.num_elements()));
    std::vector<std::byte> others = image_;
    for (std::int64_t r = 0; r < num_rows_ && !values.empty(); ++r) {
      std::memcpy(values.data() + r * row_elements_, row(r), row_bytes());
      std::memset(others.data() + (row(r) - image_.data()), static_cast<int>(kGuard), row_bytes());
    }
    EXPECT_TRUE(others == std::vector<std::byte>(others.size(), kGuard))
        << "a kernel wrote outside of a tensor " << shape_.to_string();
    return values;
  }

 private:
  static constexpr std::int64_t kGuardBytes = 256;  // keeps the alignment that allocate() promises
  static constexpr std::byte kGuard{0xC7};
  static constexpr int kNanByte = 0xFF;  // of all bytes: NaN in float32 and in bf16

  std::int64_t element_bytes() const { return dtype_bytes(dtype_); }
  std::size_t row_bytes() const {
    return static_cast<std::size_t>(row_elements_ * element_bytes());
  }
  std::byte* row(std::int64_t r) {
    return image_.data() + kGuardBytes + r * row_stride_ * element_bytes();
  }
  void push() {
    backend_->upload(buffer_.data(), image_.data(), static_cast<std::int64_t>(image_.size()));
    backend_->synchronize();
  }

  Backend* backend_;
  DType dtype_;
  Shape shape_;
  std::int64_t row_stride_;
  std::int64_t num_rows_;         // runs of elements without a gap
  std::int64_t row_elements_;     // of such a run
  std::vector<std::byte> image_;  // guard, rows with gaps, guard
  Buffer buffer_;
};

inline std::vector<BFloat16> to_bfloat16(const std::vector<float>& values) {
  std::vector<BFloat16> narrow(values.size());
  std::transform(values.begin(), values.end(), narrow.begin(), BFloat16::from_float);
  return narrow;
}

inline std::vector<float> to_float(const std::vector<BFloat16>& values) {
  std::vector<float> wide(values.size());
  std::transform(values.begin(), values.end(), wide.begin(),
                 [](BFloat16 value) { return value.to_float(); });
  return wide;
}

// The values as a tensor of this type can hold them.
inline std::vector<float> rounded_to(DType dtype, const std::vector<float>& values) {
  return dtype == DType::kFloat32 ? values : to_float(to_bfloat16(values));
}

// A float32 or bf16 tensor with these values, which it must be able to hold.
inline GuardedTensor make_floats(Backend& backend, DType dtype, const Shape& shape,
                                 const std::vector<float>& values, std::int64_t row_stride = 0) {
  GuardedTensor tensor(backend, dtype, shape, row_stride);
  if (dtype == DType::kFloat32) {
    tensor.upload(values);
  } else {
    tensor.upload(to_bfloat16(values));
  }
  return tensor;
}

inline std::vector<float> read_floats(GuardedTensor& tensor) {
  return tensor.view().dtype() == DType::kFloat32 ? tensor.download<float>()
                                                  : to_float(tensor.download<BFloat16>());
}

template <class T>
GuardedTensor make_tensor(Backend& backend, const Shape& shape, const std::vector<T>& values) {
  GuardedTensor tensor(backend, kDTypeOf<T>, shape);
  tensor.upload(values);
  return tensor;
}

inline GuardedTensor make_indices(Backend& backend, const std::vector<std::int32_t>& values) {
  return make_tensor(backend, Shape{static_cast<std::int64_t>(values.size())}, values);
}

// The chosen rows of a dense [rows, cols], one after the other.
template <class T>
std::vector<T> choose_rows(const std::vector<T>& values, const std::vector<std::int64_t>& rows,
                           std::int64_t cols) {
  std::vector<T> chosen;
  for (const std::int64_t row : rows) {
    chosen.insert(chosen.end(), values.begin() + row * cols, values.begin() + (row + 1) * cols);
  }
  return chosen;
}

// The backend of an instance: "cpu", "cuda", and "cuda_bf16" with bf16 activations.
inline std::unique_ptr<Backend> make_test_backend(const std::string& instance, int num_threads) {
  const bool narrow = instance.ends_with("_bf16");
  return make_backend({.name = instance.starts_with("cuda") ? "cuda" : instance,
                       .num_threads = num_threads,
                       .activation_dtype = narrow ? DType::kBFloat16 : DType::kFloat32});
}

// One instance a backend; the parameter is its name. A backend that is not there skips its tests
// visibly.
class OpTest : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    try {
      backend_ = std::make_unique<TwiceBackend>(make_test_backend(GetParam(), 1));
    } catch (const InputError& error) {
      GTEST_SKIP() << error.what();
    }
  }

  // All ops of this one run twice and must give the same bits.
  Backend& backend() { return *backend_; }
  // The same backend, for calls that are compared with another one anyway.
  Backend& once() { return backend_->once(); }
  DType activation() const { return backend_->activation_dtype(); }

  // Random values that an activation tensor holds exactly.
  std::vector<float> activations(Random& random, std::int64_t count, double low = -1,
                                 double high = 1) const {
    return rounded_to(activation(), random.floats(count, low, high));
  }
  GuardedTensor input(const Shape& shape, const std::vector<float>& values,
                      std::int64_t row_stride = 0) {
    return make_floats(backend(), activation(), shape, values, row_stride);
  }
  GuardedTensor output(const Shape& shape, std::int64_t row_stride = 0) {
    return {backend(), activation(), shape, row_stride};
  }
  // What storing a result as an activation adds to its error: bf16 has 8 bits of significand.
  double store_error(double value) const {
    return activation() == DType::kFloat32 ? 0 : 0x1p-8 * std::abs(value);
  }

  // Calls `run` with different choices of rows and numbers of threads. It returns the dense output
  // [chosen rows, any], whose row for one and the same input row must always have the same bits.
  template <class T>
  void expect_row_independence(
      std::int64_t num_rows,
      const std::function<std::vector<T>(Backend&, const std::vector<std::int64_t>&)>& run) {
    std::vector<std::int64_t> all(static_cast<std::size_t>(num_rows));
    std::iota(all.begin(), all.end(), 0);
    const std::vector<T> want = run(backend(), all);
    const auto cols = static_cast<std::int64_t>(want.size()) / num_rows;
    ASSERT_GT(cols, 0);
    for (const int num_threads : {1, 2, 3}) {
      const auto other = make_test_backend(GetParam(), num_threads);
      expect_same_bits(run(*other, all), want, std::to_string(num_threads) + " threads");
      for (std::int64_t row = 0; row < num_rows; ++row) {
        expect_same_bits(run(*other, {row}), row_of(want, row, cols), "row alone");
      }
      std::vector<std::int64_t> some;
      for (std::int64_t row = num_rows - 1; row >= 0; row -= 2) {
        some.push_back(row);
      }
      const std::vector<T> got = run(*other, some);
      for (std::size_t i = 0; i < some.size(); ++i) {
        expect_same_bits(row_of(got, static_cast<std::int64_t>(i), cols),
                         row_of(want, some[i], cols), "every other row, backwards");
      }
    }
  }

  // Calls `run` as above with every number of rows. A row must have the same bits in all calls, and
  // the 64 last ones alone as well. Returns the rows of the longest call.
  template <class T>
  std::vector<T> expect_rows_of_any_call(
      const std::function<std::vector<T>(Backend&, const std::vector<std::int64_t>&)>& run) {
    std::vector<std::int64_t> all(static_cast<std::size_t>(kMostRows));
    std::iota(all.begin(), all.end(), 0);
    const std::vector<T> want = run(backend(), all);
    const auto cols = static_cast<std::int64_t>(want.size()) / kMostRows;
    EXPECT_GT(cols, 0);
    for (const std::int64_t count : kRowCounts) {
      const std::vector<std::int64_t> last(all.end() - count, all.end());
      expect_same_bits(run(once(), last), choose_rows(want, last, cols),
                       std::to_string(count) + " rows");
    }
    for (std::int64_t row = kMostRows - 64; row < kMostRows; ++row) {
      expect_same_bits(run(once(), {row}), row_of(want, row, cols),
                       "row " + std::to_string(row) + " alone");
    }
    return want;
  }

 private:
  std::unique_ptr<TwiceBackend> backend_;
};

// Instances of a suite of OpTests for all backends.
#define KDTREE_TEST_ALL_BACKENDS(suite)                                                    \
  INSTANTIATE_TEST_SUITE_P(Backends, suite, ::testing::Values("cpu", "cuda", "cuda_bf16"), \
                           [](const auto& instance) { return instance.param; })

}  // namespace kdtree::ops_test
