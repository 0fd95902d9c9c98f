// Which of an expert's replicas a row takes, the same on every backend.
#pragma once

#include <cstdint>

namespace kdtree {

#ifdef __CUDACC__
#define KDTREE_HOST_DEVICE __host__ __device__
#else
#define KDTREE_HOST_DEVICE
#endif

// Bits that follow from a row's k experts, in their order. Rows that choose a hot expert differ in
// the others, so its rows are spread; rows that are equal are treated alike, whatever call they are
// in.
KDTREE_HOST_DEVICE constexpr std::uint32_t row_bits(const std::int32_t* expert_ids,
                                                    std::int64_t k) {
  std::uint32_t bits = 2166136261U;  // FNV-1a, a word at a time
  for (std::int64_t i = 0; i < k; ++i) {
    bits = (bits ^ static_cast<std::uint32_t>(expert_ids[i])) * 16777619U;
  }
  return bits;
}

// Which of `count` replicas of `expert` (at least one) a row with these bits takes.
KDTREE_HOST_DEVICE constexpr std::uint32_t choose_replica(std::uint32_t bits, std::int32_t expert,
                                                          std::uint32_t count) {
  // Replicas of different experts are chosen independently; the finaliser of MurmurHash3 mixes.
  std::uint32_t mixed = bits ^ (static_cast<std::uint32_t>(expert) * 0x9e3779b9U);
  mixed = (mixed ^ (mixed >> 16)) * 0x85ebca6bU;
  mixed = (mixed ^ (mixed >> 13)) * 0xc2b2ae35U;
  mixed ^= mixed >> 16;
  return mixed % count;
}

#undef KDTREE_HOST_DEVICE

}  // namespace kdtree
