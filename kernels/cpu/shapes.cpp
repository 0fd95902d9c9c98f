#include "kernels/cpu/shapes.h"

namespace kdtree {
namespace {

void check_offsets(std::span<const std::int32_t> offsets, std::int64_t num_rows) {
  check(offsets.front() == 0 && offsets.back() == num_rows,
        "row_offsets run from {} to {}, expected 0 to num_rows {}", offsets.front(), offsets.back(),
        num_rows);
  for (std::size_t s = 0; s + 1 < offsets.size(); ++s) {
    check(offsets[s] <= offsets[s + 1], "row_offsets[{}] is {}, above row_offsets[{}] {}", s,
          offsets[s], s + 1, offsets[s + 1]);
  }
}

}  // namespace

void expect_matrix(std::string_view name, const ConstTensorView& view, DType dtype) {
  if (view.dtype() != dtype || view.shape().rank() != 2) {
    fail("{} must be {} with two dimensions, got {} {}", name, dtype_name(dtype),
         dtype_name(view.dtype()), view.shape().to_string());
  }
}

std::span<const std::int32_t> read_indices(std::string_view name, const ConstTensorView& view,
                                           std::int64_t count) {
  expect_tensor(name, view, DType::kInt32, Shape{count});
  return view.span<std::int32_t>();
}

void check_indices(std::string_view name, std::span<const std::int32_t> values,
                   std::int64_t limit) {
  for (std::size_t i = 0; i < values.size(); ++i) {
    check(values[i] >= 0 && values[i] < limit, "{}[{}] is {}, expected [0, {})", name, i, values[i],
          limit);
  }
}

BatchIndex read_batch(const TreeBatch& batch, std::int64_t num_slots, std::int64_t capacity) {
  check(batch.num_sequences >= 0 && batch.num_rows >= 0, "batch of {} sequences and {} rows",
        batch.num_sequences, batch.num_rows);
  const BatchIndex index = {
      .sequence_index = read_indices("sequence_index", batch.sequence_index, batch.num_rows),
      .slots = read_indices("slots", batch.slots, batch.num_sequences),
      .prefix_lengths = read_indices("prefix_lengths", batch.prefix_lengths, batch.num_sequences),
      .row_offsets = read_indices("row_offsets", batch.row_offsets, batch.num_sequences + 1),
  };
  check_offsets(index.row_offsets, batch.num_rows);
  for (std::int64_t s = 0; s < batch.num_sequences; ++s) {
    check(index.slot(s) >= 0 && index.slot(s) < num_slots, "sequence {} has slot {} of {}", s,
          index.slot(s), num_slots);
    check(index.prefix(s) >= 0 && index.prefix(s) + index.num_rows(s) <= capacity,
          "sequence {} has {} committed and {} new rows, the cache's capacity is {}", s,
          index.prefix(s), index.num_rows(s), capacity);
    for (std::int64_t r = index.first_row(s); r < index.first_row(s + 1); ++r) {
      check(index.sequence(r) == s,
            "row {} belongs to sequence {} by row_offsets, to {} by sequence_index", r, s,
            index.sequence(r));
    }
  }
  return index;
}

std::int64_t check_trees(const TreeArrays& trees, std::int64_t num_sequences) {
  expect_tensor("num_nodes", trees.num_nodes, DType::kInt32, Shape{num_sequences});
  expect_matrix("tree token_ids", trees.token_ids, DType::kInt32);
  const std::int64_t max_nodes = trees.token_ids.size(1);
  check(max_nodes >= 1, "trees with room for {} nodes have no place for the root", max_nodes);
  const Shape shape{num_sequences, max_nodes};
  expect_tensor("tree token_ids", trees.token_ids, DType::kInt32, shape);
  expect_tensor("tree parents", trees.parents, DType::kInt32, shape);
  expect_tensor("tree depths", trees.depths, DType::kInt32, shape);
  return max_nodes;
}

}  // namespace kdtree
