// Which sequences attention groups have.
#pragma once

#include <cstdint>

#include "comm/parallel_grid.h"
#include "core/partition.h"

namespace kdtree {

// The places of sequences (slots), of num_slots in all, that an attention group has; may be none.
inline Range group_slots(const ParallelGrid& grid, std::int64_t num_slots, int group) {
  return partition(num_slots, grid.attention_dp, group);
}

}  // namespace kdtree
