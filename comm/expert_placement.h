// Where each routed expert lives: logical experts (the router's numbers) on physical slots of the
// ranks.
#pragma once

#include <cstdint>
#include <vector>

namespace kdtree {

class ExpertPlacement {
 public:
  // Contiguous parts in rank order, the remainder on the low ranks; every expert once.
  static ExpertPlacement linear(std::int64_t n_routed_experts, int world_size);

  std::int64_t n_routed_experts() const { return static_cast<std::int64_t>(rank_of_.size()); }
  // Rank that computes logical expert `expert`.
  int rank_of(std::int64_t expert) const { return rank_of_[static_cast<std::size_t>(expert)]; }
  // Logical experts of `rank`, in slot order.
  const std::vector<std::int64_t>& experts_of(int rank) const {
    return experts_of_[static_cast<std::size_t>(rank)];
  }
  // For each logical expert its slot on `rank`, or -1.
  std::vector<std::int32_t> logical_to_slot(int rank) const;

 private:
  std::vector<int> rank_of_;
  std::vector<std::vector<std::int64_t>> experts_of_;
};

}  // namespace kdtree
