#include "study/bench_check.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace kdtree {

namespace {

// Standard deviations, at most, that independent errors come to: 2 exp(-8^2 / 2) = 3e-14.
constexpr double kLikely = 8;

}  // namespace

double store_error(DType dtype, double value) {
  return dtype == DType::kBFloat16 ? 0x1p-8 * std::abs(value) : 0;
}

void ResultCheck::wrong(const std::string& text) {
  if (num_wrong_++ == 0) {
    first_wrong_ = text;
  }
}

void ResultCheck::within(double got, double want, double bound, const char* what,
                         std::int64_t index) {
  ++num_compared_;
  const double error = std::abs(got - want);
  if (!(error <= bound)) {  // also where `got` is no number
    worst_ = std::max(worst_, bound > 0 && std::isfinite(error)
                                  ? error / bound
                                  : std::numeric_limits<double>::infinity());
    wrong(fmt::format("{} {}: got {}, expected {} +- {}", what, index, got, want, bound));
  } else if (bound > 0) {
    worst_ = std::max(worst_, error / bound);
  }
}

void ResultCheck::equal(std::int64_t got, std::int64_t want, const char* what, std::int64_t index) {
  ++num_compared_;
  if (got != want) {
    worst_ = std::numeric_limits<double>::infinity();
    wrong(fmt::format("{} {}: got {}, expected {}", what, index, got, want));
  }
}

std::string ResultCheck::failure() const {
  if (num_compared_ == 0) {
    return "nothing was compared";
  }
  return num_wrong_ == 0 ? ""
                         : fmt::format("{} of {} compared values are wrong; {}", num_wrong_,
                                       num_compared_, first_wrong_);
}

BoundedValue bounded_dot(const std::vector<double>& weights, const std::vector<BoundedValue>& x) {
  check(weights.size() == x.size(), "a product of {} weights and {} values", weights.size(),
        x.size());
  BoundedValue sum;
  double magnitude = 0;
  double worst_passed_on = 0;
  double squares_passed_on = 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    const double passed_on = std::abs(weights[i]) * x[i].error;
    sum.value += weights[i] * x[i].value;
    worst_passed_on += passed_on;
    squares_passed_on += passed_on * passed_on;
    magnitude += std::abs(weights[i]) * (std::abs(x[i].value) + x[i].error);
  }
  const auto roundings = static_cast<double>(x.size() + 1);
  sum.error = std::min(worst_passed_on, kLikely * std::sqrt(squares_passed_on)) +
              1.01 * std::min(roundings, kLikely * std::sqrt(roundings)) * kFloatRound * magnitude;
  return sum;
}

BoundedValue bounded_swiglu(const BoundedValue& gate, const BoundedValue& up) {
  const double silu = gate.value / (1 + std::exp(-gate.value));
  const double silu_error = 1.1 * gate.error;
  BoundedValue result{
      .value = silu * up.value,
      .error = silu_error * std::abs(up.value) + std::abs(silu) * up.error + silu_error * up.error};
  result.error += 5.01 * kFloatRound * (std::abs(result.value) + result.error);
  return result;
}

std::vector<std::int64_t> sample_places(std::int64_t count, std::int64_t most) {
  std::vector<std::int64_t> places;
  const std::int64_t wanted = std::min(count, most);
  for (std::int64_t i = 0; i < wanted; ++i) {
    places.push_back(wanted == 1 ? 0 : i * (count - 1) / (wanted - 1));
  }
  return places;
}

}  // namespace kdtree
