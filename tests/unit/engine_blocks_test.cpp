// The two control blocks of a step: what rank 0 writes is what the others read.
#include <gtest/gtest.h>

#include "kernels/backend.h"
#include "speculative/draft_tree.h"

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
    const DraftTree& tree = expected[i];
    arrays.num_nodes.data<std::int32_t>()[i] = static_cast<std::int32_t>(tree.num_nodes());
    std::copy(tree.token_ids.begin(), tree.token_ids.end(), arrays.token_ids.row<std::int32_t>(i));
    std::copy(tree.parents.begin(), tree.parents.end(), arrays.parents.row<std::int32_t>(i));
    std::copy(tree.depths.begin(), tree.depths.end(), arrays.depths.row<std::int32_t>(i));
  }
  copy_block(sender.tensor(), receiver.tensor());
  const std::vector<DraftTree> trees = receiver.download(*backend_, 2);
  ASSERT_EQ(trees.size(), 2U);
  for (std::size_t i = 0; i < 2; ++i) {
    EXPECT_EQ(trees[i].token_ids, expected[i].token_ids);
    EXPECT_EQ(trees[i].parents, expected[i].parents);
    EXPECT_EQ(trees[i].depths, expected[i].depths);
  }
}

TEST_F(EngineBlocks, RootsAreTreesOfOneNode) {
  TreeBlock block(*backend_, 3, 4);
  block.set_roots(*backend_, Ids{11, 0, 12});
  const std::vector<DraftTree> trees = block.download(*backend_, 3);
  for (std::size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(trees[i].token_ids, Ids{(Ids{11, 0, 12}[i])});
    EXPECT_EQ(trees[i].parents, Ids{-1});
    EXPECT_EQ(trees[i].depths, Ids{0});
  }
}

TEST_F(EngineBlocks, NodeCountsOutOfRangeAreErrors) {
  TreeBlock block(*backend_, 2, 4);
  block.set_roots(*backend_, Ids{1, 2});
  for (const std::int32_t nodes : {0, -1, 5}) {
    block.arrays(2).num_nodes.data<std::int32_t>()[1] = nodes;
    EXPECT_THROW(block.download(*backend_, 2), Error) << nodes;
    EXPECT_NO_THROW(block.download(*backend_, 1));
  }
}

TEST_F(EngineBlocks, DecisionsGoRound) {
  AcceptBlock sender(*backend_, 3, 4);
  AcceptBlock receiver(*backend_, 3, 4);
  StepDecision decision;
  decision.sequences = {{.path = {0, 2, 5, 9}, .bonus_token = 77, .finished = true},
                        {.path = {}, .bonus_token = 0, .finished = false}};
  decision.next = NextAction::kPrefill;
  decision.prefill_slot = 2;
  decision.prefill_request = 41;
  sender.upload(*backend_, decision);
  copy_block(sender.tensor(), receiver.tensor());
  const StepDecision received = receiver.download_decision(*backend_);
  ASSERT_EQ(received.sequences.size(), 2U);
  EXPECT_EQ(received.sequences[0].path, (Ids{0, 2, 5, 9}));
  EXPECT_EQ(received.sequences[0].bonus_token, 77);
  EXPECT_TRUE(received.sequences[0].finished);
  EXPECT_TRUE(received.sequences[1].path.empty());
  EXPECT_FALSE(received.sequences[1].finished);
  EXPECT_EQ(received.next, NextAction::kPrefill);
  EXPECT_EQ(received.prefill_slot, 2);
  EXPECT_EQ(received.prefill_request, 41);

  // A shorter decision leaves nothing of the longer one.
  sender.upload(*backend_, {.sequences = {{.path = {0}, .bonus_token = 5, .finished = false}},
                            .next = NextAction::kDecode});
  const StepDecision second = sender.download_decision(*backend_);
  ASSERT_EQ(second.sequences.size(), 1U);
  EXPECT_EQ(second.sequences[0].path, Ids{0});
  EXPECT_FALSE(second.sequences[0].finished);
  EXPECT_EQ(second.next, NextAction::kDecode);
}

TEST_F(EngineBlocks, TheAcceptOpWritesWhereTheBlockReads) {
  AcceptBlock block(*backend_, 2, 3);
  block.path_lengths(2).data<std::int32_t>()[1] = 2;
  block.paths(2).row<std::int32_t>(1)[1] = 6;
  block.bonus_tokens(2).data<std::int32_t>()[1] = 88;
  const std::vector<AcceptedSequence> sequences = block.download(*backend_, 2);
  EXPECT_EQ(sequences[1].path, (Ids{0, 6}));
  EXPECT_EQ(sequences[1].bonus_token, 88);
  EXPECT_TRUE(sequences[0].path.empty());
  block.path_lengths(2).data<std::int32_t>()[0] = 4;
  EXPECT_THROW(block.download(*backend_, 2), Error);
}

}  // namespace

}  // namespace kdtree
