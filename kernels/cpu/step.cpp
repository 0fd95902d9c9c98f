// What turns trees, blocks and accepted paths into the rows of the next pass.
#include <algorithm>

#include "core/check.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/cpu/shapes.h"

namespace kdtree {
namespace {

constexpr std::int64_t kBitsPerWord = 64;

// One tree and where its rows go.
struct TreeRows {
  const std::int32_t* parents;
  const std::int32_t* tokens;
  std::int64_t num_nodes;
  std::int32_t prefix;
  std::int32_t* token_ids;  // [max_nodes]
  std::int32_t* positions;  // [max_nodes]
  std::int64_t* masks;      // [max_nodes, words]
};

void set_bit(std::int64_t* mask, std::int64_t node) {
  auto& word = mask[node / kBitsPerWord];
  word = static_cast<std::int64_t>(static_cast<std::uint64_t>(word) |
                                   (std::uint64_t{1} << (node % kBitsPerWord)));
}

void expand_tree(const TreeRows& tree, std::int64_t max_nodes, std::int64_t words) {
  for (std::int64_t node = 0; node < max_nodes; ++node) {
    std::int64_t* mask = tree.masks + node * words;
    tree.token_ids[node] = 0;
    tree.positions[node] = tree.prefix;
    std::fill_n(mask, words, std::int64_t{0});
    if (node < tree.num_nodes) {
      tree.token_ids[node] = tree.tokens[node];
      if (node > 0) {  // a node sees what its parent sees, and itself
        const std::int64_t parent = tree.parents[node];
        check(parent >= 0 && parent < node, "node {} of a tree has parent {}", node, parent);
        tree.positions[node] = tree.positions[parent] + 1;
        std::copy_n(tree.masks + parent * words, words, mask);
      }
    }
    set_bit(mask, node);
  }
}

}  // namespace

void CpuBackend::expand_trees(const ExpandTreesParams& params) {
  const std::int64_t num_sequences = params.prefix_lengths.size(0);
  const std::int64_t max_nodes = check_trees(params.trees, num_sequences);
  const std::int64_t rows = num_sequences * max_nodes;
  const std::int64_t words = params.ancestor_mask.size(1);
  const auto prefixes = read_indices("prefix_lengths", params.prefix_lengths, num_sequences);
  expect_tensor("expand_trees' token_ids", params.token_ids, DType::kInt32, Shape{rows});
  expect_tensor("expand_trees' positions", params.positions, DType::kInt32, Shape{rows});
  expect_tensor("ancestor_mask", params.ancestor_mask, DType::kInt64, Shape{rows, words});
  check(words * kBitsPerWord >= max_nodes, "masks of {} words for {} nodes", words, max_nodes);
  for (std::int64_t s = 0; s < num_sequences; ++s) {
    const std::int64_t num_nodes = params.trees.num_nodes.data<std::int32_t>()[s];
    check(num_nodes >= 1 && num_nodes <= max_nodes, "tree {} has {} nodes, max_nodes is {}", s,
          num_nodes, max_nodes);
    const std::int64_t first = s * max_nodes;
    expand_tree({.parents = params.trees.parents.row<std::int32_t>(s),
                 .tokens = params.trees.token_ids.row<std::int32_t>(s),
                 .num_nodes = num_nodes,
                 .prefix = prefixes[static_cast<std::size_t>(s)],
                 .token_ids = params.token_ids.data<std::int32_t>() + first,
                 .positions = params.positions.data<std::int32_t>() + first,
                 .masks = params.ancestor_mask.row<std::int64_t>(first)},
                max_nodes, words);
  }
}

void CpuBackend::expand_blocks(const ExpandBlocksParams& params) {
  expect_matrix("expand_blocks' token_ids", params.token_ids, DType::kInt32);
  const std::int64_t num_sequences = params.token_ids.size(0);
  const std::int64_t block_size = params.token_ids.size(1);
  expect_tensor("expand_blocks' positions", params.positions, DType::kInt32,
                params.token_ids.shape());
  const auto roots = read_indices("roots", params.roots, num_sequences);
  const auto prefixes = read_indices("prefix_lengths", params.prefix_lengths, num_sequences);
  for (std::int64_t s = 0; s < num_sequences; ++s) {
    const auto i = static_cast<std::size_t>(s);
    std::int32_t* tokens = params.token_ids.row<std::int32_t>(s);
    std::int32_t* positions = params.positions.row<std::int32_t>(s);
    for (std::int64_t place = 0; place < block_size; ++place) {
      tokens[place] = place == 0 ? roots[i] : params.mask_token_id;
      positions[place] = prefixes[i] + static_cast<std::int32_t>(place);
    }
  }
}

void CpuBackend::accepted_rows(const AcceptedRowsParams& params) {
  expect_matrix("paths", params.paths, DType::kInt32);
  const std::int64_t num_sequences = params.paths.size(0);
  const std::int64_t max_path = params.paths.size(1);
  const auto lengths = read_indices("path_lengths", params.path_lengths, num_sequences);
  const auto prefixes = read_indices("prefix_lengths", params.prefix_lengths, num_sequences);
  expect_tensor("accepted_rows' rows", params.rows, DType::kInt32, params.paths.shape());
  expect_tensor("accepted_rows' positions", params.positions, DType::kInt32, params.paths.shape());
  for (std::int64_t s = 0; s < num_sequences; ++s) {
    const auto i = static_cast<std::size_t>(s);
    const std::int32_t* path = params.paths.row<std::int32_t>(s);
    check(lengths[i] >= 1 && lengths[i] <= max_path, "path {} has {} nodes, max_path is {}", s,
          lengths[i], max_path);
    for (std::int64_t place = 0; place < max_path; ++place) {
      const std::int32_t node = path[std::min<std::int64_t>(place, lengths[i] - 1)];
      check(node >= 0 && node < params.max_nodes, "path {} holds node {} of {}", s, node,
            params.max_nodes);
      params.rows.row<std::int32_t>(s)[place] =
          static_cast<std::int32_t>(s * params.max_nodes) + node;
      params.positions.row<std::int32_t>(s)[place] = prefixes[i] + static_cast<std::int32_t>(place);
    }
  }
}

void CpuBackend::advance(ConstTensorView path_lengths, ConstTensorView bonus_tokens,
                         TensorView prefix_lengths, TensorView roots) {
  const std::int64_t num_sequences = prefix_lengths.size(0);
  const auto lengths = read_indices("path_lengths", path_lengths, num_sequences);
  const auto tokens = read_indices("bonus_tokens", bonus_tokens, num_sequences);
  expect_tensor("prefix_lengths", prefix_lengths, DType::kInt32, Shape{num_sequences});
  expect_tensor("roots", roots, DType::kInt32, Shape{num_sequences});
  for (std::size_t s = 0; s < lengths.size(); ++s) {
    prefix_lengths.data<std::int32_t>()[s] += lengths[s];
    roots.data<std::int32_t>()[s] = tokens[s];
  }
}

}  // namespace kdtree
