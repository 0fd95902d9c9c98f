// Random inputs and comparisons for the tests of ops.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

namespace kdtree::ops_test {

// Unit roundoff of float32: an operation's result is the exact one times (1 + d), |d| <= kRound.
inline constexpr double kRound = 0x1p-24;

// Numbers that are the same on every standard library.
class Random {
 public:
  explicit Random(std::uint64_t seed) : engine_(seed) {}

  double uniform(double low, double high) {
    return low + (high - low) * static_cast<double>(engine_() >> 11) * 0x1p-53;
  }
  std::int64_t below(std::int64_t limit) {
    return static_cast<std::int64_t>(engine_() % static_cast<std::uint64_t>(limit));
  }
  std::vector<float> floats(std::int64_t count, double low = -1, double high = 1) {
    std::vector<float> values(static_cast<std::size_t>(count));
    for (float& value : values) {
      value = static_cast<float>(uniform(low, high));
    }
    return values;
  }
  std::vector<std::int32_t> integers(std::int64_t count, std::int64_t limit) {
    std::vector<std::int32_t> values(static_cast<std::size_t>(count));
    for (std::int32_t& value : values) {
      value = static_cast<std::int32_t>(below(limit));
    }
    return values;
  }
  std::vector<std::int32_t> permutation(std::int64_t count) {
    std::vector<std::int32_t> values(static_cast<std::size_t>(count));
    for (std::int64_t i = 0; i < count; ++i) {
      const auto j = static_cast<std::size_t>(below(i + 1));
      values[static_cast<std::size_t>(i)] = values[j];
      values[j] = static_cast<std::int32_t>(i);
    }
    return values;
  }

 private:
  std::mt19937_64 engine_;
};

// A reference result and how far a correct float32 computation may lie from it.
struct Expected {
  std::vector<double> values;
  std::vector<double> bounds;

  void add(double value, double bound) {
    values.push_back(value);
    bounds.push_back(bound);
  }
};

// Every value within its bound; infinities and NaN must be the same ones. Names the worst place.
inline void expect_within(const std::vector<float>& got, const Expected& want,
                          const std::string& what) {
  ASSERT_EQ(got.size(), want.values.size()) << what;
  std::size_t worst = 0;
  double worst_excess = 0;
  std::size_t num_wrong = 0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    const double value = want.values[i];
    const bool same = std::isfinite(value) ? std::abs(got[i] - value) <= want.bounds[i]
                      : std::isnan(value)  ? std::isnan(got[i])
                                           : got[i] == value;
    if (same) {
      continue;
    }
    ++num_wrong;
    const double excess = std::abs(got[i] - value) / std::max(want.bounds[i], 1e-300);
    if (num_wrong == 1 || !(excess <= worst_excess)) {
      worst = i;
      worst_excess = excess;
    }
  }
  if (num_wrong > 0) {
    ADD_FAILURE() << what << ": " << num_wrong << " of " << got.size() << " wrong; worst at "
                  << worst << ": got " << got[worst] << ", expected " << want.values[worst]
                  << " +- " << want.bounds[worst];
  }
}

// The same bits: zeros of equal sign, NaN of equal payload. T has 32 bits.
template <class T>
void expect_same_bits(const std::vector<T>& got, const std::vector<T>& want,
                      const std::string& what) {
  ASSERT_EQ(got.size(), want.size()) << what;
  for (std::size_t i = 0; i < got.size(); ++i) {
    if (std::bit_cast<std::uint32_t>(got[i]) != std::bit_cast<std::uint32_t>(want[i])) {
      ADD_FAILURE() << what << ": bits differ at " << i << ": got " << got[i] << ", expected "
                    << want[i];
      return;
    }
  }
}

// Row `row` of a dense [rows, cols].
template <class T>
std::vector<T> row_of(const std::vector<T>& values, std::int64_t row, std::int64_t cols) {
  return {values.begin() + row * cols, values.begin() + (row + 1) * cols};
}

}  // namespace kdtree::ops_test
