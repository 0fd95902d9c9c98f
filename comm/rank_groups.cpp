#include "comm/rank_groups.h"

#include "core/check.h"

namespace kdtree {

RankGroups::RankGroups(Communicator& world) : world_(&world) {}

RankGroups::RankGroups(Communicator& world, const ParallelGrid& grid)
    : world_(&world), grid_(grid) {
  const int ranks = world.world_size();
  check(grid.moe_tp > 0 && ranks % grid.moe_tp == 0 && grid.attention_dp > 0 &&
            ranks % grid.attention_dp == 0,
        "{} ranks in a grid of moe_tp {} and attention_dp {}", ranks, grid.moe_tp,
        grid.attention_dp);
  const int rank = world.rank();
  if (grid.moe_tp > 1) {
    experts_ = world.split(grid.expert_slice(rank));
    slices_ = world.split(grid.expert_group(rank));
  }
  if (grid.attention_dp > 1) {
    const int group = grid.attention_group(rank, ranks);
    attention_ = world.split(group);
    across_ = world.split(grid.attention_place(rank, ranks));
    if (nested()) {
      owners_ = world.split(group * grid.moe_tp + grid.expert_slice(rank));
    }
  }
}

bool RankGroups::nested() const {
  return grid_.attention_tp(world_->world_size()) % grid_.moe_tp == 0;
}

Communicator& RankGroups::owners() const {
  check(nested(), "expert groups of {} ranks do not lie within attention groups", grid_.moe_tp);
  return owners_ ? *owners_ : experts();
}

Communicator& RankGroups::group_or_error(const std::shared_ptr<Communicator>& group) {
  check(group != nullptr, "a group of ranks that this grid does not have");
  return *group;
}

}  // namespace kdtree
