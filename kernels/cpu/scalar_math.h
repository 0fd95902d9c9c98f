// Scalar functions that several ops share.
#pragma once

#include <cmath>
#include <limits>

namespace kdtree {

inline constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

inline float sigmoid(float x) {
  return 1.0F / (1.0F + std::exp(-x));
}

// NaN compares with nothing; choices treat it as the worst value.
inline float nan_to_minus_infinity(float x) {
  return std::isnan(x) ? kMinusInfinity : x;
}

}  // namespace kdtree
