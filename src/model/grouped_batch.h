// The rows of a call with those of this rank's attention group.
#pragma once

#include <cstdint>
#include <span>

#include "kernels/backend.h"

namespace kdtree {

struct GroupedBatch {
  // One attention group: all rows are this rank's.
  GroupedBatch(const TreeBatch& batch)  // NOLINT(google-explicit-constructor): the usual case
      : all(batch), own(batch) {}
  // all_rows in the order of the groups; own_rows are `first` of them and those behind, with slots
  // that count from the first of the group's cache. group_rows outlives the batch.
  GroupedBatch(const TreeBatch& all_rows, const TreeBatch& own_rows, std::int64_t first,
               std::span<const std::int64_t> group_rows)
      : all(all_rows), own(own_rows), first_row(first), rows_of_groups(group_rows) {}

  TreeBatch all;
  TreeBatch own;  // of this rank's group; may have no rows
  std::int64_t first_row = 0;
  std::span<const std::int64_t> rows_of_groups;  // [attention_dp]; empty for one group
};

}  // namespace kdtree
