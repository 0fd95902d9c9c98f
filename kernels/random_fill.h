// Random tensors whose elements are functions of a seed and their place, the same on every backend
// and in every block of a tensor.
#pragma once

#include <cstdint>

namespace kdtree {

struct RandomFill {
  enum class Kind : std::uint8_t {
    kBits,      // 32 random bits
    kBFloat16,  // uniform in [low, high), rounded to bf16
  };
  Kind kind = Kind::kBits;
  std::uint64_t seed = 0;
  float low = 0;   // kBFloat16
  float high = 0;  // kBFloat16
};

// Where a block lies in its tensor.
struct RandomBlock {
  std::int64_t first_row = 0;
  std::int64_t first_column = 0;
  std::int64_t total_columns = 0;  // of the whole tensor
};

#ifdef __CUDACC__
#define KDTREE_HOST_DEVICE __host__ __device__
#else
#define KDTREE_HOST_DEVICE
#endif

// 64 random bits of element `index`: the finaliser of the SplitMix64 generator (Steele, Lea and
// Flood 2014) at its index-th state.
KDTREE_HOST_DEVICE constexpr std::uint64_t random_bits(std::uint64_t seed, std::int64_t index) {
  std::uint64_t z = seed + (static_cast<std::uint64_t>(index) + 1) * 0x9e3779b97f4a7c15U;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9U;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebU;
  return z ^ (z >> 31);
}

// The share of the way from low to high, in steps of 2^-24: exact in float32.
KDTREE_HOST_DEVICE constexpr float random_share(std::uint64_t bits) {
  return static_cast<float>(bits >> 40) * 0x1p-24F;
}

#undef KDTREE_HOST_DEVICE

}  // namespace kdtree
