// Sums in a fixed order that vector units can follow. Element i of a dot product belongs to lane
// i % 8, a lane adds its elements in ascending order, each by one fused multiply-add, and the eight
// lanes are added as a fixed tree. Every dot product of the backend runs so, whatever tile it is
// computed in: its bits depend on its two operands alone.
#pragma once

#include <cstdint>
#include <cstring>

// The same loops compiled twice, for AVX2 with FMA and for any x86-64; the loader picks. Both fuse
// what is written as fused and nothing else, and lanes are lanes in both: the bits are equal. (A
// processor is known by what it can do; "arch=haswell" would be that one processor.)
#if defined(__x86_64__)
#define KDTREE_SIMD_CLONES __attribute__((target_clones("arch=x86-64-v3", "default")))
#else
#define KDTREE_SIMD_CLONES
#endif
// Helpers must become part of the clone that calls them.
#define KDTREE_INLINE inline __attribute__((always_inline))

namespace kdtree {

inline constexpr std::int64_t kLanes = 8;

using Lanes = float __attribute__((vector_size(kLanes * sizeof(float))));
using IntLanes = std::int32_t __attribute__((vector_size(kLanes * sizeof(std::int32_t))));
using WordLanes = std::uint32_t __attribute__((vector_size(kLanes * sizeof(std::uint32_t))));
using HalfWordLanes = std::uint16_t __attribute__((vector_size(kLanes * sizeof(std::uint16_t))));

// Lanes travel by reference: by value they would change the calling convention between the clones.
KDTREE_INLINE void load_lanes(const float* from, Lanes& lanes) {
  std::memcpy(&lanes, from, sizeof(Lanes));
}

// The first `count` lanes from memory, zeros behind them.
KDTREE_INLINE void load_lanes(const float* from, std::int64_t count, Lanes& lanes) {
  lanes = Lanes{};
  std::memcpy(&lanes, from, static_cast<std::size_t>(count) * sizeof(float));
}

KDTREE_INLINE void store_lanes(const Lanes& lanes, float* to) {
  std::memcpy(to, &lanes, sizeof(Lanes));
}

// sum += a * b, fused: one rounding a lane.
KDTREE_INLINE void fused_add(const Lanes& a, const Lanes& b, Lanes& sum) {
  Lanes result;
  for (std::int64_t lane = 0; lane < kLanes; ++lane) {
    result[lane] = __builtin_fmaf(a[lane], b[lane], sum[lane]);
  }
  sum = result;
}

KDTREE_INLINE float sum_lanes(const Lanes& v) {
  // ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]))
  const auto four =
      __builtin_shufflevector(v, v, 0, 1, 2, 3) + __builtin_shufflevector(v, v, 4, 5, 6, 7);
  const auto two = four + __builtin_shufflevector(four, four, 2, 3, 0, 1);
  return two[0] + two[1];
}

// sums[r * kOutputs + o] += x[r][0..n) * w[o][0..n), lane by lane. A longer dot product may be cut
// at multiples of kLanes.
template <int kRows, int kOutputs>
KDTREE_INLINE void accumulate_dots(const float* const (&x)[kRows],
                                   const float* const (&w)[kOutputs], std::int64_t n, Lanes* sums) {
  Lanes local[kRows][kOutputs];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int o = 0; o < kOutputs; ++o) {
      local[r][o] = sums[r * kOutputs + o];
    }
  }
  std::int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    Lanes values[kRows];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      load_lanes(x[r] + i, values[r]);
    }
#pragma GCC unroll 8
    for (int o = 0; o < kOutputs; ++o) {
      Lanes weights;
      load_lanes(w[o] + i, weights);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        fused_add(weights, values[r], local[r][o]);
      }
    }
  }
  if (i < n) {
#pragma GCC unroll 8
    for (int o = 0; o < kOutputs; ++o) {
      Lanes weights;
      load_lanes(w[o] + i, n - i, weights);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        Lanes values;
        load_lanes(x[r] + i, n - i, values);
        fused_add(weights, values, local[r][o]);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int o = 0; o < kOutputs; ++o) {
      sums[r * kOutputs + o] = local[r][o];
    }
  }
}

// out[c] += factors[j] * rows[j][c] for all c in [0, n), fused, in ascending j for each c.
template <int kRows>
KDTREE_INLINE void add_scaled(const float* factors, const float* const (&rows)[kRows],
                              std::int64_t n, float* out) {
  std::int64_t c = 0;
  for (; c + kLanes <= n; c += kLanes) {
    Lanes sum;
    load_lanes(out + c, sum);
#pragma GCC unroll 8
    for (int j = 0; j < kRows; ++j) {
      Lanes row;
      load_lanes(rows[j] + c, row);
      fused_add(Lanes{} + factors[j], row, sum);
    }
    store_lanes(sum, out + c);
  }
  for (; c < n; ++c) {
#pragma GCC unroll 8
    for (int j = 0; j < kRows; ++j) {
      out[c] = __builtin_fmaf(factors[j], rows[j][c], out[c]);
    }
  }
}

}  // namespace kdtree
