// What every part of a model works with; all of it outlives the part.
#pragma once

#include "comm/communicator.h"
#include "comm/rank_groups.h"
#include "kernels/backend.h"

namespace kdtree {

struct ModelContext {
  Backend& backend;
  Communicator& communicator;        // of all ranks
  RankGroups groups = communicator;  // of the same ranks

  // x = sum over all ranks of x.
  void all_reduce_sum(const TensorView& x, CollectiveLabel label) const {
    communicator.all_reduce_sum(x, backend.stream(), label);
  }
};

}  // namespace kdtree
