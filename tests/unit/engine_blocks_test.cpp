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

TEST_F(EngineBlocks, NodeCountsOutOfRangeAreErrors) {
  TreeBlock block(*backend_, 2, 4);
  block.arrays(2).num_nodes.data<std::int32_t>()[0] = 1;
  for (const std::int32_t nodes : {0, -1, 5}) {
    block.arrays(2).num_nodes.data<std::int32_t>()[1] = nodes;
    EXPECT_THROW(block.download(*backend_, 2), Error) << nodes;
    EXPECT_NO_THROW(block.download(*backend_, 1));
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
  const std::vector<AcceptedPath> paths = receiver.download(*backend_, 2);
  EXPECT_EQ(paths[0].nodes, Ids{0});
  EXPECT_EQ(paths[1].nodes, (Ids{0, 6}));
  EXPECT_EQ(paths[1].bonus_token, 88);
  for (const std::int32_t length : {0, 4}) {
    sender.path_lengths(2).data<std::int32_t>()[0] = length;
    EXPECT_THROW(sender.download(*backend_, 2), Error) << length;
  }
}

}  // namespace

}  // namespace kdtree
