#include "comm/expert_placement.h"

#include "core/check.h"
#include "core/partition.h"

namespace kdtree {

ExpertPlacement ExpertPlacement::linear(std::int64_t n_routed_experts, int world_size) {
  check(n_routed_experts >= 0 && world_size > 0, "placement of {} experts on {} ranks",
        n_routed_experts, world_size);
  ExpertPlacement placement;
  placement.rank_of_.resize(static_cast<std::size_t>(n_routed_experts));
  placement.experts_of_.resize(static_cast<std::size_t>(world_size));
  for (int rank = 0; rank < world_size; ++rank) {
    const Range range = partition(n_routed_experts, world_size, rank);
    for (std::int64_t expert = range.begin; expert < range.end; ++expert) {
      placement.rank_of_[static_cast<std::size_t>(expert)] = rank;
      placement.experts_of_[static_cast<std::size_t>(rank)].push_back(expert);
    }
  }
  return placement;
}

std::vector<std::int32_t> ExpertPlacement::logical_to_slot(int rank) const {
  std::vector<std::int32_t> slots(rank_of_.size(), -1);
  std::int32_t slot = 0;
  for (const std::int64_t expert : experts_of(rank)) {
    slots[static_cast<std::size_t>(expert)] = slot++;
  }
  return slots;
}

}  // namespace kdtree
