// What the engine does about attention groups: whose sequences and rows are whose.
#include <algorithm>
#include <numeric>

#include "engine/engine.h"
#include "engine/group_slots.h"

namespace kdtree {

void Engine::set_groups() {
  const ParallelGrid& grid = options_.grid;
  check(grid == context_.groups.grid(), "an engine and its ranks with different grids");
  const auto groups = static_cast<std::size_t>(grid.attention_dp);
  listed_of_groups_.resize(groups);
  rows_of_groups_.resize(groups);
  std::vector<std::int32_t> cache_slots;
  for (int group = 0; group < grid.attention_dp; ++group) {
    const Range slots = group_slots(grid, options_.batch_size, group);
    for (std::int64_t place = 0; place < slots.size(); ++place) {
      groups_of_slots_.push_back(group);
      cache_slots.push_back(static_cast<std::int32_t>(place));
    }
  }
  if (groups > 1) {
    cache_slots_ = DeviceTensor(context_.backend, std::span<const std::int32_t>(cache_slots));
    context_.backend.synchronize();  // the upload reads cache_slots
  }
}

GroupedBatch Engine::group_piece(std::int32_t slot, const TreeBatch& piece) {
  if (options_.grid.attention_dp == 1) {
    return piece;
  }
  const int group = group_of(slot);
  const int own_group = context_.groups.attention_group();
  std::fill(rows_of_groups_.begin(), rows_of_groups_.end(), 0);
  rows_of_groups_[static_cast<std::size_t>(group)] = piece.num_rows;
  TreeBatch own;
  if (group == own_group) {
    own = piece;
    own.slots = cache_slots_.view().rows(slot, 1);
  }
  return {piece, own, own_group > group ? piece.num_rows : 0, rows_of_groups_};
}

GroupedBatch Engine::group_trees(const TreeBatch& trees) {
  if (options_.grid.attention_dp == 1) {
    return trees;
  }
  for (std::size_t group = 0; group < rows_of_groups_.size(); ++group) {
    rows_of_groups_[group] = listed_of_groups_[group] * sizes_.max_nodes;
  }
  return {trees, step_.own_trees(trees), step_.first_own_row(), rows_of_groups_};
}

// Slots are listed in ascending order, and a group's are side by side.
OwnSequences Engine::divide_listed() {
  std::fill(listed_of_groups_.begin(), listed_of_groups_.end(), 0);
  for (const std::int32_t slot : listed_) {
    ++listed_of_groups_[static_cast<std::size_t>(group_of(slot))];
  }
  const int own_group = context_.groups.attention_group();
  const auto own = listed_of_groups_.begin() + own_group;
  const std::int64_t first = std::accumulate(listed_of_groups_.begin(), own, std::int64_t{0});
  const Range slots = group_slots(options_.grid, options_.batch_size, own_group);
  return {.listed = {first, first + *own}, .first_slot = static_cast<std::int32_t>(slots.begin)};
}

std::int64_t Engine::layout_index() {
  return layouts_.try_emplace(listed_of_groups_, std::ssize(layouts_)).first->second;
}

}  // namespace kdtree
