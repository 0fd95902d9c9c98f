// The communicators of a grid of ranks.
#pragma once

#include <memory>

#include "comm/communicator.h"
#include "comm/parallel_grid.h"

namespace kdtree {

// Copies refer to the same communicators. Every rank makes its calls on them in one order: what a
// rank calls on one group, all ranks call on theirs of that kind.
class RankGroups {
 public:
  // Experts whole, all heads of a sequence on all ranks. `world`, that of all ranks, outlives the
  // object.
  RankGroups(Communicator& world);  // NOLINT(google-explicit-constructor): the usual case
  // Collective over `world` for any other grid. Error unless its sizes divide the number of ranks.
  RankGroups(Communicator& world, const ParallelGrid& grid);

  const ParallelGrid& grid() const { return grid_; }
  Communicator& world() const { return *world_; }
  int moe_ep() const { return grid_.moe_ep(world_->world_size()); }
  int expert_group() const { return grid_.expert_group(world_->rank()); }  // of this rank
  int attention_group() const {
    return grid_.attention_group(world_->rank(), world_->world_size());
  }

  // One rank of each expert group, in their order: those with this rank's slices.
  Communicator& experts() const { return group_or_world(experts_); }
  // This rank's expert group. Error with moe_tp 1.
  Communicator& slices() const { return group_or_error(slices_); }
  // This rank's attention group.
  Communicator& attention() const { return group_or_world(attention_); }
  // One rank of each attention group, in their order: those with this rank's heads. Error with
  // attention_dp 1.
  Communicator& across() const { return group_or_error(across_); }

  // Whether expert groups lie within attention groups, so that their ranks have the same sequences.
  bool nested() const;
  // Those ranks of this rank's attention group that have its slices: an expert group each. Error
  // unless nested.
  Communicator& owners() const;

 private:
  Communicator& group_or_world(const std::shared_ptr<Communicator>& group) const {
    return group ? *group : *world_;
  }
  static Communicator& group_or_error(const std::shared_ptr<Communicator>& group);

  Communicator* world_;
  ParallelGrid grid_;
  // Empty where it would be all ranks, or (slices, across) one.
  std::shared_ptr<Communicator> experts_;
  std::shared_ptr<Communicator> slices_;
  std::shared_ptr<Communicator> attention_;
  std::shared_ptr<Communicator> across_;
  std::shared_ptr<Communicator> owners_;  // empty where it is experts_
};

}  // namespace kdtree
