// Whether an op's result is right: compared with sums in double precision, within what the number
// formats allow, before anything is timed.
//
// Bounds. u = 2^-24 is the unit roundoff of float32. A sum of n products has at most n roundings on
// the path of each product, in any order: |error| <= n u sum |products| to first order; the first
// order is multiplied by 1.01 or more to cover the rest. Storing a value as bf16 adds 2^-8 |value|.
//
// At a model's sizes that worst case, all errors at their largest and of one sign, is so far off
// that a wrong result could hide below it. Long sums are held to a likely bound instead: n
// independent errors of mean 0 and size e_i stay below 8 sqrt(sum e_i^2) but for one case in 10^13
// (Hoeffding; for sums Higham and Mary 2019). Short ones keep the worst case, where it is lower.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/check.h"
#include "core/dtype.h"

namespace kdtree {

inline constexpr double kFloatRound = 0x1p-24;

// What storing a value as `dtype` (F32 or BF16) adds to its error.
double store_error(DType dtype, double value);

class ResultCheck {
 public:
  // Counts `got`, which may lie up to `bound` from `want`; `index` is for the message.
  void within(double got, double want, double bound, const char* what, std::int64_t index);
  // Counts a value that must be equal.
  void equal(std::int64_t got, std::int64_t want, const char* what, std::int64_t index);

  bool passed() const { return num_wrong_ == 0 && num_compared_ > 0; }
  // The largest error divided by its bound; 0 where everything was exact.
  double max_error_over_bound() const { return worst_; }
  std::int64_t num_compared() const { return num_compared_; }
  // The first wrong value and how many there are; empty where the check passed.
  std::string failure() const;

 private:
  void wrong(const std::string& text);

  double worst_ = 0;
  std::int64_t num_compared_ = 0;
  std::int64_t num_wrong_ = 0;
  std::string first_wrong_;
};

// A value with the error that a correct computation may have made.
struct BoundedValue {
  double value = 0;
  double error = 0;
};

// sum_i weights[i] * x[i] as a float32 computation has it, with the errors of x passed on, both by
// the lower one of the two bounds. One more rounding than products: that of code * scale of an INT4
// weight.
BoundedValue bounded_dot(const std::vector<double>& weights, const std::vector<BoundedValue>& x);

// silu(gate) * up in float32: exp within 2 u, 1 + e, the quotient and the product round once each.
// silu's slope is at most 1.1.
BoundedValue bounded_swiglu(const BoundedValue& gate, const BoundedValue& up);

// Up to `most` different places of [0, count): the first, the last, and others between them.
std::vector<std::int64_t> sample_places(std::int64_t count, std::int64_t most);

}  // namespace kdtree
