// The grid of a run's ranks, from what the user asked for.
#pragma once

#include "comm/parallel_grid.h"
#include "config/run_config.h"

namespace kdtree {

// Of world_size ranks. Of a pair the size that is not given follows from the other one; without
// both, every rank has experts of its own and all share the heads. InputError names flag and value
// where a size does not divide the ranks, or a pair does not multiply to them. Whether the model's
// sizes allow it is said by target_partition (weights/weight_store.h).
ParallelGrid make_grid(const GridOptions& options, int world_size);

}  // namespace kdtree
