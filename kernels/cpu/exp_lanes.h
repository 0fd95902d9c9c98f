// Exponentials of eight lanes at a time, the same bits in every lane, clone and call. For loops in
// functions with KDTREE_SIMD_CLONES.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/cpu/lanes.h"

namespace kdtree {

// x = exp(x), within 2 * 2^-24 of the exact value: n = round(x / ln 2), r = x - n ln 2 with ln 2 in
// two parts, exp(r) = 1 + r + r^2 p(r), times 2^n in two steps so that small results lose bits only
// once. Infinities and NaN give what std::exp gives. The polynomial is that of Cephes' expf.
KDTREE_INLINE void exp_lanes(Lanes& x) {
  constexpr float kRound = 12582912.0F;  // 1.5 * 2^23: the sum's last bits are a whole number
  constexpr float kLog2E = 1.44269504088896341F;
  constexpr float kLn2High = 0.693359375F;
  constexpr float kLn2Low = -2.12194440e-4F;
  // Beyond these the result is 0 or infinity, with n that 2^n can be made of.
  constexpr float kLowest = -150;
  constexpr float kHighest = 100;
  const Lanes lowest = Lanes{} + kLowest;
  const Lanes highest = Lanes{} + kHighest;
  x = x < lowest ? lowest : x;  // false for NaN
  x = x > highest ? highest : x;
  const Lanes rounded = x * kLog2E + kRound;
  const Lanes n = rounded - kRound;
  const Lanes r = (x - n * kLn2High) - n * kLn2Low;
  Lanes p = r * 1.9875691500e-4F + 1.3981999507e-3F;
  p = p * r + 8.3334519073e-3F;
  p = p * r + 4.1665795894e-2F;
  p = p * r + 1.6666665459e-1F;
  p = p * r + 5.0000001201e-1F;
  const Lanes y = (p * (r * r) + r) + 1.0F;
  IntLanes bits;
  std::memcpy(&bits, &rounded, sizeof(bits));
  constexpr std::int32_t kRoundBits = 0x4b400000;  // of kRound
  const IntLanes whole = bits - kRoundBits;
  const IntLanes half = whole >> 1;
  const IntLanes first = (half + 127) << 23;
  const IntLanes second = (whole - half + 127) << 23;
  Lanes scale_first;
  Lanes scale_second;
  std::memcpy(&scale_first, &first, sizeof(first));
  std::memcpy(&scale_second, &second, sizeof(second));
  x = y * scale_first * scale_second;
}

// The largest of n > 0 values, none of them NaN.
KDTREE_INLINE float largest(const float* values, std::int64_t n) {
  Lanes best = Lanes{} + values[0];
  std::int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    Lanes v;
    load_lanes(values + i, v);
    best = v > best ? v : best;
  }
  float highest = values[0];
  for (std::int64_t lane = 0; lane < kLanes; ++lane) {
    highest = best[lane] > highest ? best[lane] : highest;
  }
  for (; i < n; ++i) {
    highest = values[i] > highest ? values[i] : highest;
  }
  return highest;
}

// to[i] = silu(gate[i]) * up[i]; `to` may be gate.
void swiglu_row(const float* gate, const float* up, std::int64_t n, float* to);

}  // namespace kdtree
