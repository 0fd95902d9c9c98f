// Data of benchmarks: made from a seed, uploaded in pieces, made again element by element where a
// result is checked. Nothing of it is kept on the host, which may have less memory than the device.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/backend.h"
#include "kernels/device_tensor.h"

namespace kdtree {

// A sequence of random numbers, the same on every machine.
class BenchRandom {
 public:
  explicit BenchRandom(std::uint64_t seed) : seed_(seed) {}

  std::uint64_t bits() { return random_bits(seed_, next_++); }
  // Uniform in [low, high).
  double uniform(double low, double high) {
    return low + (high - low) * static_cast<double>(bits() >> 11) * 0x1p-53;
  }
  // Uniform in [0, limit), limit > 0.
  std::int64_t below(std::int64_t limit) {
    return static_cast<std::int64_t>(bits() % static_cast<std::uint64_t>(limit));
  }
  // `count` values uniform in [low, high), as a tensor of `dtype` (F32 or BF16) can hold them.
  std::vector<float> floats(std::int64_t count, double low, double high, DType dtype);

 private:
  std::uint64_t seed_;
  std::int64_t next_ = 0;
};

// Values of a large tensor: n * 2^exponent with n uniform in -128..127, which float32 and bf16
// both hold exactly.
struct LargeValues {
  std::uint64_t seed = 0;
  int exponent = -7;

  float at(std::int64_t index) const;
};

// Fills a contiguous float32 or bf16 tensor; element i becomes values.at(i).
void fill_large(Backend& backend, const LargeValues& values, const TensorView& target);

// Fills `bytes` (a multiple of 8) with random bits: 64-bit word i becomes random_bits(seed, i).
void fill_bits(Backend& backend, std::uint64_t seed, void* target, std::int64_t bytes);

// A contiguous tensor of float32 or bf16 with these values, rounded to it.
DeviceTensor upload_floats(Backend& backend, DType dtype, const Shape& shape,
                           std::span<const float> values);
DeviceTensor upload_indices(Backend& backend, const Shape& shape,
                            std::span<const std::int32_t> values);

// Rows [first, first + count) of a contiguous float32 or bf16 matrix, widened. Waits for the
// device.
std::vector<float> download_rows(Backend& backend, const ConstTensorView& matrix,
                                 std::int64_t first, std::int64_t count);
// All of a contiguous int32 tensor. Waits for the device.
std::vector<std::int32_t> download_indices(Backend& backend, const ConstTensorView& tensor);

// A matrix of random weights on the device, [out, in] in bf16 or in INT4 groups with bf16 scales;
// scaled so that products with values around 1 are around 1.
class BenchMatrix {
 public:
  BenchMatrix(Backend& backend, std::int64_t out, std::int64_t in, std::uint64_t seed);
  BenchMatrix(Backend& backend, std::int64_t out, std::int64_t in, std::int64_t group_size,
              std::uint64_t seed);

  // Valid while this object lives.
  const WeightView& view() const { return view_; }
  // The exact weights of row `out`, [in].
  std::vector<double> row(std::int64_t out) const;
  // Values and scales.
  std::int64_t bytes() const { return data_.bytes() + scales_.bytes(); }

 private:
  double int4_scale(std::int64_t out, std::int64_t group) const;

  std::uint64_t seed_;
  int exponent_;
  DeviceTensor data_;
  DeviceTensor scales_;
  WeightView view_;
};

}  // namespace kdtree
