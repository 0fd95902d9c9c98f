// The two control blocks of a step: what rank 0 writes is what the others read, and what the host
// finds in the ring.
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <numeric>

#include "kernels/backend.h"
#include "speculative/draft_tree.h"
#include "speculative/output_ring.h"

namespace kdtree {

namespace {

using Ids = std::vector<std::int32_t>;

class EngineBlocks : public testing::Test {
 protected:
  // What a broadcast does.
  static void copy_block(const TensorView& from, const TensorView& to) {
    ASSERT_EQ(from.shape(), to.shape());
    const auto source = from.span<std::int32_t>();
    std::copy(source.begin(), source.end(), to.span<std::int32_t>().begin());
  }

  template <class Block>
  static std::span<const std::int32_t> words(const Block& block) {
    return ConstTensorView(block.tensor()).span<std::int32_t>();
  }
  // Tree `i` of a block of the CPU backend.
  static void put_tree(const TreeArrays& arrays, std::int64_t i, const DraftTree& tree) {
    arrays.num_nodes.data<std::int32_t>()[i] = static_cast<std::int32_t>(tree.num_nodes());
    std::copy(tree.token_ids.begin(), tree.token_ids.end(), arrays.token_ids.row<std::int32_t>(i));
    std::copy(tree.parents.begin(), tree.parents.end(), arrays.parents.row<std::int32_t>(i));
    std::copy(tree.depths.begin(), tree.depths.end(), arrays.depths.row<std::int32_t>(i));
  }

  std::unique_ptr<Backend> backend_ = make_backend({.name = "cpu"});
};

TEST_F(EngineBlocks, TreesGoRound) {
  TreeBlock sender(*backend_, 3, 5);
  TreeBlock receiver(*backend_, 3, 5);
  const TreeArrays arrays = sender.arrays(2);
  EXPECT_EQ(arrays.token_ids.shape(), (Shape{2, 5}));
  const DraftTree expected[] = {{{9, 8, 7, 6, 5}, {-1, 0, 0, 1, 3}, {0, 1, 1, 2, 3}},
                                {{4}, {-1}, {0}}};
  for (std::int64_t i = 0; i < 2; ++i) {
    put_tree(arrays, i, expected[i]);
  }
  copy_block(sender.tensor(), receiver.tensor());
  const std::vector<DraftTree> trees = read_trees(words(receiver), {3, 5}, 2);
  ASSERT_EQ(trees.size(), 2U);
  for (std::size_t i = 0; i < 2; ++i) {
    EXPECT_EQ(trees[i].token_ids, expected[i].token_ids);
    EXPECT_EQ(trees[i].parents, expected[i].parents);
    EXPECT_EQ(trees[i].depths, expected[i].depths);
  }
}

TEST_F(EngineBlocks, NodeCountsOutOfRangeAreErrors) {
  TreeBlock block(*backend_, 2, 4);
  block.arrays(2).num_nodes.data<std::int32_t>()[0] = 1;
  for (const std::int32_t nodes : {0, -1, 5}) {
    block.arrays(2).num_nodes.data<std::int32_t>()[1] = nodes;
    EXPECT_THROW(read_trees(words(block), {2, 4}, 2), Error) << nodes;
    EXPECT_NO_THROW(read_trees(words(block), {2, 4}, 1));
  }
}

TEST_F(EngineBlocks, TheAcceptOpWritesWhereTheBlockReads) {
  AcceptBlock sender(*backend_, 2, 3);
  AcceptBlock receiver(*backend_, 2, 3);
  sender.path_lengths(2).data<std::int32_t>()[0] = 1;
  sender.path_lengths(2).data<std::int32_t>()[1] = 2;
  sender.paths(2).row<std::int32_t>(1)[1] = 6;
  sender.bonus_tokens(2).data<std::int32_t>()[1] = 88;
  copy_block(sender.tensor(), receiver.tensor());
  const std::vector<AcceptedPath> paths = read_paths(words(receiver), {2, 3}, 2);
  EXPECT_EQ(paths[0].nodes, Ids{0});
  EXPECT_EQ(paths[1].nodes, (Ids{0, 6}));
  EXPECT_EQ(paths[1].bonus_token, 88);
  for (const std::int32_t length : {0, 4}) {
    sender.path_lengths(2).data<std::int32_t>()[0] = length;
    EXPECT_THROW(read_paths(words(sender), {2, 3}, 2), Error) << length;
  }
}

TEST_F(EngineBlocks, ABlockOfOtherSizesIsAnError) {
  const TreeBlock trees(*backend_, 2, 4);
  const AcceptBlock accepted(*backend_, 2, 4);
  EXPECT_THROW(read_trees(words(trees), {2, 5}, 1), Error);
  EXPECT_THROW(read_trees(words(trees), {2, 4}, 3), Error);
  EXPECT_THROW(read_paths(words(accepted), {3, 4}, 1), Error);
  EXPECT_THROW(read_paths(words(accepted), {2, 4}, 3), Error);
}

// Two steps lie in the ring; each has its own trees, paths, logits and experts.
TEST_F(EngineBlocks, TheRingKeepsTwoSteps) {
  constexpr std::int64_t kNodes = 4;
  const OutputRing ring(*backend_, {.max_sequences = 3,
                                    .max_nodes = kNodes,
                                    .max_path = 3,
                                    .num_choices = 2,
                                    .num_candidates = 2,
                                    .num_expert_ids = 3});
  TreeBlock trees(*backend_, 3, kNodes);
  AcceptBlock accepted(*backend_, 3, 3);
  const DeviceTensor logits(*backend_, DType::kFloat32, Shape{3 * kNodes, 2});
  const DeviceTensor probs(*backend_, DType::kFloat32, Shape{3 * 2, 2});
  const DeviceTensor ids(*backend_, DType::kInt32, Shape{3 * 2, 2});
  const DeviceTensor experts(*backend_, DType::kInt32, Shape{3 * kNodes, 3});
  for (std::int32_t step = 0; step < 2; ++step) {
    put_tree(trees.arrays(2), 0, {{step, 8, 7, 6}, {-1, 0, 0, 2}, {0, 1, 1, 2}});
    put_tree(trees.arrays(2), 1, {{step + 10}, {-1}, {0}});
    accepted.path_lengths(2).data<std::int32_t>()[0] = 3;
    accepted.path_lengths(2).data<std::int32_t>()[1] = 1;
    accepted.paths(2).row<std::int32_t>(0)[1] = 2;
    accepted.paths(2).row<std::int32_t>(0)[2] = 3;
    accepted.bonus_tokens(2).data<std::int32_t>()[0] = step + 20;
    for (std::int64_t row = 0; row < 2 * kNodes; ++row) {
      logits.view().row<float>(row)[0] = static_cast<float>(100 * step + row);
      logits.view().row<float>(row)[1] = static_cast<float>(-row);
    }
    for (std::int32_t i = 0; i < 8; ++i) {
      probs.view().data<float>()[i] = static_cast<float>(-10 * step - i);
      ids.view().data<std::int32_t>()[i] = 10 * step + i;
    }
    // A layer with three experts a node, of the two sequences that are there.
    Ids chosen(2 * kNodes * 3);
    std::iota(chosen.begin(), chosen.end(), 1000 * step);
    std::copy(chosen.begin(), chosen.end(), experts.view().data<std::int32_t>());
    ring.write(*backend_, static_cast<std::size_t>(step),
               {.trees = trees,
                .accepted = accepted,
                .choice_logits = logits.rows(2 * kNodes),
                .candidate_probs = probs.rows(2 * 2),
                .candidate_ids = ids.rows(2 * 2),
                .expert_ids = experts.rows(2 * kNodes)});
    ring.close(*backend_, static_cast<std::size_t>(step));
  }
  for (std::int32_t step = 0; step < 2; ++step) {
    const StepOutput output = ring.read(*backend_, static_cast<std::size_t>(step), 2);
    ASSERT_EQ(output.trees.size(), 2U);
    EXPECT_EQ(output.trees[0].token_ids, (Ids{step, 8, 7, 6}));
    EXPECT_EQ(output.trees[1].token_ids, Ids{step + 10});
    ASSERT_EQ(output.accepted.size(), 2U);
    EXPECT_EQ(output.accepted[0].nodes, (Ids{0, 2, 3}));
    EXPECT_EQ(output.accepted[0].bonus_token, step + 20);
    const float rows[] = {0, 2, 3};
    ASSERT_EQ(output.accepted[0].choices.size(), 3U);
    for (std::size_t i = 0; i < 3; ++i) {
      EXPECT_EQ(output.accepted[0].choices[i].best, static_cast<float>(100 * step) + rows[i]);
      EXPECT_EQ(output.accepted[0].choices[i].second, -rows[i]);
    }
    EXPECT_EQ(output.accepted[1].choices.at(0).best, static_cast<float>(100 * step + kNodes));
    const std::int32_t first = 10 * step + 4;  // of the second sequence
    const auto value = static_cast<float>(-first);
    const DraftCandidates expected = {{{first, value}, {first + 1, value - 1}},
                                      {{first + 2, value - 2}, {first + 3, value - 3}}};
    ASSERT_EQ(output.candidates.size(), 2U);
    EXPECT_EQ(output.candidates[1], expected);
    Ids chosen(2 * kNodes * 3);
    std::iota(chosen.begin(), chosen.end(), 1000 * step);
    EXPECT_EQ(output.expert_ids, chosen);
  }
}

TEST_F(EngineBlocks, TheRingRefusesAPathOutsideOfTheTree) {
  const OutputRing ring(*backend_,
                        {.max_sequences = 1, .max_nodes = 2, .max_path = 3, .num_choices = 1});
  TreeBlock trees(*backend_, 1, 2);
  AcceptBlock accepted(*backend_, 1, 3);
  const DeviceTensor logits(*backend_, DType::kFloat32, Shape{2, 1});
  put_tree(trees.arrays(1), 0, {{4, 5}, {-1, 0}, {0, 1}});
  accepted.path_lengths(1).data<std::int32_t>()[0] = 2;
  accepted.paths(1).row<std::int32_t>(0)[1] = 1;
  const auto write = [&](const TensorView& choice_logits) {
    ring.write(*backend_, 0,
               {.trees = trees,
                .accepted = accepted,
                .choice_logits = choice_logits,
                .candidate_probs = {},
                .candidate_ids = {},
                .expert_ids = {}});
  };
  write(logits.view());
  EXPECT_EQ(ring.read(*backend_, 0, 1).accepted.at(0).choices.at(1).second,
            -std::numeric_limits<float>::infinity());
  accepted.paths(1).row<std::int32_t>(0)[1] = 2;
  write(logits.view());
  EXPECT_THROW(ring.read(*backend_, 0, 1), Error);
  const DeviceTensor larger(*backend_, DType::kFloat32, Shape{3, 1});
  EXPECT_THROW(write(larger.view()), Error);
}

}  // namespace

}  // namespace kdtree
