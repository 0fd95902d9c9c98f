// Shape checks that several ops share. All throw Error with the name and the sizes.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "kernels/backend.h"

namespace kdtree {

// A tensor of rank 2, any sizes.
void expect_matrix(std::string_view name, const ConstTensorView& view, DType dtype);

// The int32 values of a tensor [count].
std::span<const std::int32_t> read_indices(std::string_view name, const ConstTensorView& view,
                                           std::int64_t count);

// All values lie in [0, limit).
void check_indices(std::string_view name, std::span<const std::int32_t> values, std::int64_t limit);

// The index arrays of a TreeBatch, checked: offsets ascend and cover the rows, slots and rows exist
// in a cache [num_slots, capacity, ...].
struct BatchIndex {
  std::span<const std::int32_t> sequence_index;
  std::span<const std::int32_t> slots;
  std::span<const std::int32_t> prefix_lengths;
  std::span<const std::int32_t> row_offsets;

  std::int64_t sequence(std::int64_t row) const {
    return sequence_index[static_cast<std::size_t>(row)];
  }
  std::int64_t slot(std::int64_t sequence) const {
    return slots[static_cast<std::size_t>(sequence)];
  }
  std::int64_t prefix(std::int64_t sequence) const {
    return prefix_lengths[static_cast<std::size_t>(sequence)];
  }
  std::int64_t first_row(std::int64_t sequence) const {
    return row_offsets[static_cast<std::size_t>(sequence)];
  }
  std::int64_t num_rows(std::int64_t sequence) const {
    return first_row(sequence + 1) - first_row(sequence);
  }
};
BatchIndex read_batch(const TreeBatch& batch, std::int64_t num_slots, std::int64_t capacity);

// The tensors of TreeArrays for `num_sequences` trees; returns max_nodes.
std::int64_t check_trees(const TreeArrays& trees, std::int64_t num_sequences);

}  // namespace kdtree
