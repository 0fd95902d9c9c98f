#include "kernels/cpu/cpu_backend.h"
#include "kernels/cpu/shapes.h"

namespace kdtree {
namespace {

struct Tree {
  const std::int32_t* token_ids;
  const std::int32_t* parents;
  std::int32_t num_nodes;
};

// Follows the target's choices from the root and returns the number of nodes on the path. Children
// lie behind their parents, so one pass in ascending order meets every node of the path, and ends
// whatever `parents` holds. Of equal children the lowest wins.
std::int32_t follow(const Tree& tree, const std::int32_t* choices, std::int64_t max_path,
                    std::int32_t* path) {
  path[0] = 0;
  std::int32_t length = 1;
  std::int32_t current = 0;
  for (std::int32_t node = 1; node < tree.num_nodes && length < max_path; ++node) {
    if (tree.parents[node] == current && tree.token_ids[node] == choices[current]) {
      current = node;
      path[length++] = node;
    }
  }
  return length;
}

}  // namespace

void CpuBackend::accept(const AcceptParams& params) {
  expect_matrix("paths", params.paths, DType::kInt32);
  const std::int64_t num_sequences = params.paths.size(0);
  const std::int64_t max_path = params.paths.size(1);
  const std::int64_t max_nodes = check_trees(params.trees, num_sequences);
  check(max_path >= 1, "paths of {} nodes have no place for the root", max_path);
  expect_tensor("path_lengths", params.path_lengths, DType::kInt32, Shape{num_sequences});
  expect_tensor("bonus_tokens", params.bonus_tokens, DType::kInt32, Shape{num_sequences});
  check(params.choices.shape().rank() == 1, "choices has {} dimensions, expected 1",
        params.choices.shape().rank());
  const auto choices = read_indices("choices", params.choices, params.choices.size(0));
  const auto offsets = read_indices("row_offsets", params.row_offsets, num_sequences + 1);
  const auto num_nodes = params.trees.num_nodes.span<std::int32_t>();
  for (std::size_t s = 0; s < num_nodes.size(); ++s) {
    check(num_nodes[s] >= 1 && num_nodes[s] <= max_nodes, "tree {} has {} nodes, max_nodes is {}",
          s, num_nodes[s], max_nodes);
    check(offsets[s] >= 0 && std::int64_t{offsets[s]} + num_nodes[s] <= offsets[s + 1] &&
              offsets[s + 1] <= static_cast<std::int64_t>(choices.size()),
          "tree {} of {} nodes has rows {} to {} of {} choices", s, num_nodes[s], offsets[s],
          offsets[s + 1], choices.size());
  }
  for (std::int64_t s = 0; s < num_sequences; ++s) {
    const Tree tree = {.token_ids = params.trees.token_ids.row<std::int32_t>(s),
                       .parents = params.trees.parents.row<std::int32_t>(s),
                       .num_nodes = num_nodes[static_cast<std::size_t>(s)]};
    const std::int32_t* choice = choices.data() + offsets[static_cast<std::size_t>(s)];
    std::int32_t* path = params.paths.row<std::int32_t>(s);
    const std::int32_t length = follow(tree, choice, max_path, path);
    params.path_lengths.data<std::int32_t>()[s] = length;
    params.bonus_tokens.data<std::int32_t>()[s] = choice[path[length - 1]];
  }
}

}  // namespace kdtree
