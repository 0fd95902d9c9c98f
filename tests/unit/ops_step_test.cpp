// expand_trees, expand_blocks, accepted_rows, advance and add_rms_norm against plain loops.
#include <algorithm>

#include "tests/unit/op_test.h"

namespace kdtree::ops_test {
namespace {

using Ids = std::vector<std::int32_t>;

class StepOpsTest : public OpTest {};
KDTREE_TEST_ALL_BACKENDS(StepOpsTest);

struct Trees {
  std::int64_t max_nodes = 0;
  Ids num_nodes;
  Ids token_ids;  // [sequences, max_nodes]; what lies behind a tree's last node is garbage
  Ids parents;
  Ids depths;
};

Trees random_trees(Random& random, std::int64_t sequences, std::int64_t max_nodes) {
  Trees trees;
  trees.max_nodes = max_nodes;
  for (std::int64_t s = 0; s < sequences; ++s) {
    // The first tree is full, the last one a root alone.
    const auto nodes =
        static_cast<std::int32_t>(s == 0               ? max_nodes
                                  : s + 1 == sequences ? 1
                                                       : 1 + random.below(max_nodes));
    trees.num_nodes.push_back(nodes);
    for (std::int32_t node = 0; node < max_nodes; ++node) {
      const bool inside = node < nodes;
      trees.token_ids.push_back(static_cast<std::int32_t>(random.below(500)));
      trees.parents.push_back(!inside ? 12345
                                      : static_cast<std::int32_t>(random.below(std::max(node, 1))));
      if (node == 0) {
        trees.parents.back() = -1;
      }
      const std::size_t first = static_cast<std::size_t>(s * max_nodes);
      trees.depths.push_back(
          !inside || node == 0
              ? 0
              : trees.depths[first + static_cast<std::size_t>(trees.parents.back())] + 1);
    }
  }
  return trees;
}

// Whether `node` is `other` or lies below it.
bool sees(const Trees& trees, std::int64_t sequence, std::int64_t node, std::int64_t other) {
  while (node > other) {
    node = trees.parents[static_cast<std::size_t>(sequence * trees.max_nodes + node)];
  }
  return node == other;
}

TEST_P(StepOpsTest, ExpandTrees) {
  Random random(3);
  for (const std::int64_t max_nodes : {1, 2, 17, 63, 64, 65, 129, 513}) {
    constexpr std::int64_t kSequences = 3;
    const Trees trees = random_trees(random, kSequences, max_nodes);
    const Ids prefixes = {0, 7, 4000};
    auto num_nodes = make_tensor(backend(), {kSequences}, trees.num_nodes);
    auto tokens = make_tensor(backend(), {kSequences, max_nodes}, trees.token_ids);
    auto parents = make_tensor(backend(), {kSequences, max_nodes}, trees.parents);
    auto depths = make_tensor(backend(), {kSequences, max_nodes}, trees.depths);
    auto prefix_lengths = make_tensor(backend(), {kSequences}, prefixes);
    const std::int64_t rows = kSequences * max_nodes;
    const std::int64_t words = (max_nodes + 63) / 64;
    GuardedTensor token_ids(backend(), DType::kInt32, {rows});
    GuardedTensor positions(backend(), DType::kInt32, {rows});
    GuardedTensor masks(backend(), DType::kInt64, {rows, words});
    backend().expand_trees({.trees = {.num_nodes = num_nodes.view(),
                                      .token_ids = tokens.view(),
                                      .parents = parents.view(),
                                      .depths = depths.view()},
                            .prefix_lengths = prefix_lengths.view(),
                            .token_ids = token_ids.view(),
                            .positions = positions.view(),
                            .ancestor_mask = masks.view()});
    const auto got_tokens = token_ids.download<std::int32_t>();
    const auto got_positions = positions.download<std::int32_t>();
    const auto got_masks = masks.download<std::int64_t>();
    for (std::int64_t row = 0; row < rows; ++row) {
      const std::int64_t s = row / max_nodes;
      const std::int64_t node = row % max_nodes;
      const auto at = static_cast<std::size_t>(row);
      const bool inside = node < trees.num_nodes[static_cast<std::size_t>(s)];
      EXPECT_EQ(got_tokens[at], inside ? trees.token_ids[at] : 0);
      EXPECT_EQ(got_positions[at],
                prefixes[static_cast<std::size_t>(s)] + (inside ? trees.depths[at] : 0));
      for (std::int64_t bit = 0; bit < words * 64; ++bit) {
        const auto word =
            static_cast<std::uint64_t>(got_masks[static_cast<std::size_t>(row * words + bit / 64)]);
        const bool expected = bit == node || (inside && bit < node && sees(trees, s, node, bit));
        ASSERT_EQ((word >> (bit % 64)) & 1U, expected ? 1U : 0U)
            << "row " << row << " bit " << bit << " of " << max_nodes << " nodes";
      }
    }
  }
}

TEST_P(StepOpsTest, ExpandBlocks) {
  auto roots = make_tensor(backend(), {2}, Ids{0, 41});
  auto prefixes = make_tensor(backend(), {2}, Ids{9, 0});
  GuardedTensor tokens(backend(), DType::kInt32, {2, 4});
  GuardedTensor positions(backend(), DType::kInt32, {2, 4});
  backend().expand_blocks({.roots = roots.view(),
                           .prefix_lengths = prefixes.view(),
                           .mask_token_id = 77,
                           .token_ids = tokens.view(),
                           .positions = positions.view()});
  EXPECT_EQ(tokens.download<std::int32_t>(), (Ids{0, 77, 77, 77, 41, 77, 77, 77}));
  EXPECT_EQ(positions.download<std::int32_t>(), (Ids{9, 10, 11, 12, 0, 1, 2, 3}));
}

TEST_P(StepOpsTest, AcceptedRowsRepeatTheLastNode) {
  auto paths = make_tensor(backend(), {2, 4}, Ids{0, 2, 5, -9, 0, -9, -9, -9});
  auto lengths = make_tensor(backend(), {2}, Ids{3, 1});
  auto prefixes = make_tensor(backend(), {2}, Ids{10, 0});
  GuardedTensor rows(backend(), DType::kInt32, {2, 4});
  GuardedTensor positions(backend(), DType::kInt32, {2, 4});
  backend().accepted_rows({.paths = paths.view(),
                           .path_lengths = lengths.view(),
                           .prefix_lengths = prefixes.view(),
                           .max_nodes = 6,
                           .rows = rows.view(),
                           .positions = positions.view()});
  EXPECT_EQ(rows.download<std::int32_t>(), (Ids{0, 2, 5, 5, 6, 6, 6, 6}));
  EXPECT_EQ(positions.download<std::int32_t>(), (Ids{10, 11, 12, 13, 0, 1, 2, 3}));
}

TEST_P(StepOpsTest, AdvanceMovesPrefixAndRoot) {
  auto lengths = make_tensor(backend(), {3}, Ids{1, 8, 3});
  auto bonus = make_tensor(backend(), {3}, Ids{0, 5, 9});
  auto prefixes = make_tensor(backend(), {3}, Ids{4, 0, 100});
  auto roots = make_tensor(backend(), {3}, Ids{7, 7, 7});
  backend().advance(lengths.view(), bonus.view(), prefixes.view(), roots.view());
  EXPECT_EQ(prefixes.download<std::int32_t>(), (Ids{5, 8, 103}));
  EXPECT_EQ(roots.download<std::int32_t>(), (Ids{0, 5, 9}));
}

// Fused and apart give the same bits, whatever the number of rows.
TEST_P(StepOpsTest, AddRmsNormEqualsItsParts) {
  Random random(5);
  for (const std::int64_t cols : {1, 33, 128, 1000}) {
    for (const std::int64_t rows : kRowCounts) {
      const auto values = activations(random, rows * cols);
      const auto deltas = activations(random, rows * cols);
      auto delta = input({rows, cols}, deltas);
      auto weight = make_tensor(backend(), {cols}, random.floats(cols));
      auto fused = input({rows, cols}, values);
      auto fused_normed = output({rows, cols});
      backend().add_rms_norm(fused.view(), delta.view(), weight.view(), 1e-5F, fused_normed.view());
      auto apart = input({rows, cols}, values);
      auto apart_normed = output({rows, cols});
      backend().add(apart.view(), delta.view());
      backend().rms_norm(apart.view(), weight.view(), 1e-5F, apart_normed.view());
      expect_same_bits(read_floats(fused), read_floats(apart), "sum");
      expect_same_bits(read_floats(fused_normed), read_floats(apart_normed), "norm of the sum");
    }
  }
}

// Recorded work gives what the first, unrecorded run gave, with new data in the same places.
TEST_P(StepOpsTest, RecordedWorkReplays) {
  Random random(6);
  constexpr std::int64_t kRows = 3;
  constexpr std::int64_t kCols = 64;
  auto weight = make_tensor(backend(), {kCols}, random.floats(kCols));
  auto x = input({kRows, kCols}, activations(random, kRows * kCols));
  auto y = output({kRows, kCols});
  const auto body = [&] {
    backend().mark(0);
    backend().rms_norm(x.view(), weight.view(), 1e-5F, y.view());
    backend().mark(1);
  };
  constexpr std::int64_t kKey = 991;
  for (int run = 0; run < 5; ++run) {
    auto fresh = input({kRows, kCols}, activations(random, kRows * kCols));
    backend().copy(fresh.view(), x.view());
    backend().run_recorded(kKey, true, body);
    const auto replayed = read_floats(y);  // synchronises
    EXPECT_GE(backend().milliseconds_between(0, 1), 0.0);
    body();
    EXPECT_EQ(replayed, read_floats(y)) << "run " << run;
  }
  backend().forget_recorded(kKey);
}

}  // namespace
}  // namespace kdtree::ops_test
