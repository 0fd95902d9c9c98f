// The work list of the experts and where the parts of their workspace lie. Needs no CUDA header:
// builds without CUDA plan with it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kdtree {

// Some (row, place) pairs of one slot; a slot with more has several entries. Pair row * k + place
// names both the input row and where its results go.
template <int kMostPairs>
struct alignas(16) ExpertEntryOf {
  const std::byte* codes[3];  // the slot's gate, up, down: here, so that they are one load away
  const std::byte* scales[3];
  std::int32_t slot;
  std::int32_t count;  // of pairs, at least 1
  std::int32_t pairs[kMostPairs];
};

inline constexpr int kEntryPairs = 8;
using ExpertEntry = ExpertEntryOf<kEntryPairs>;

// Entries of slots with many pairs, more than kEntryPairs each. They are of four kinds: with up to
// 64, 48, 32 and 16 pairs (kind 0 to 3); entries of a kind lie together, kind 0 first.
inline constexpr int kLargeEntryPairs = 64;
inline constexpr int kLargeKinds = 4;
using LargeExpertEntry = ExpertEntryOf<kLargeEntryPairs>;

// Large entries that num_pairs pairs can make, at most.
constexpr std::int64_t most_large_entries(std::int64_t num_pairs) {
  return num_pairs / (kEntryPairs + 1);
}

// Offsets in bytes of the parts of a workspace, from its first aligned byte on.
struct ExpertsWorkspaceLayout {
  static constexpr std::int64_t kAlignment = 256;

  std::int64_t counts = 0;  // of entries, and of large ones by kind
  std::int64_t pair_slots = 0;
  std::int64_t entries = 0;
  std::int64_t large_entries = 0;
  std::int64_t inner = 0;
  std::int64_t outer = 0;
  std::int64_t bytes = 0;

  constexpr ExpertsWorkspaceLayout(std::int64_t num_pairs, std::int64_t hidden,
                                   std::int64_t intermediate) {
    const auto place = [this](std::int64_t size) {
      const std::int64_t at = bytes;
      bytes += aligned_bytes(size);
      return at;
    };
    counts = place((1 + kLargeKinds) * static_cast<std::int64_t>(sizeof(std::int32_t)));
    pair_slots = place(num_pairs * static_cast<std::int64_t>(sizeof(std::int32_t)));
    entries = place(num_pairs * static_cast<std::int64_t>(sizeof(ExpertEntry)));
    large_entries =
        place(most_large_entries(num_pairs) * static_cast<std::int64_t>(sizeof(LargeExpertEntry)));
    inner = place(num_pairs * intermediate * static_cast<std::int64_t>(sizeof(float)));
    outer = place(num_pairs * hidden * static_cast<std::int64_t>(sizeof(float)));
    bytes += kAlignment;  // the workspace itself need not be aligned
  }

  static constexpr std::int64_t aligned_bytes(std::int64_t bytes) {
    return (bytes + kAlignment - 1) / kAlignment * kAlignment;
  }
};

}  // namespace kdtree
