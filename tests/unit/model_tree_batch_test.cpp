// How trees and prompt pieces become the rows of a step.
#include <gtest/gtest.h>

#include "kernels/backend.h"
#include "model/tree_batch_storage.h"

namespace kdtree {

namespace {

using Ids = std::vector<std::int32_t>;

class ModelTreeBatch : public testing::Test {
 protected:
  TreeBatchStorage storage(std::int64_t max_nodes = 130) {
    return {*backend_, /*max_rows=*/300, /*max_sequences=*/3, max_nodes};
  }

  std::unique_ptr<Backend> backend_ = make_backend({.name = "cpu"});
};

Ids ids(const ConstTensorView& view) {
  const auto values = view.span<std::int32_t>();
  return {values.begin(), values.end()};
}

bool sees(const TreeBatch& batch, std::int64_t row, std::int64_t node) {
  const std::int64_t* words = batch.ancestor_mask.row<std::int64_t>(row);
  return (static_cast<std::uint64_t>(words[node / 64]) >> (node % 64)) % 2 == 1;
}

TEST_F(ModelTreeBatch, TreesOfTwoSequences) {
  TreeBatchStorage rows = storage();
  const Ids first_tokens = {7, 8, 9, 5, 4};
  const Ids first_parents = {-1, 0, 0, 1, 3};
  const Ids second_tokens = {3, 2};
  const Ids second_parents = {-1, 0};
  const SequenceRows sequences[] = {
      {.slot = 2, .prefix_length = 10, .token_ids = first_tokens, .parents = first_parents},
      {.slot = 0, .prefix_length = 0, .token_ids = second_tokens, .parents = second_parents}};
  const TreeBatch batch = rows.fill(sequences);
  EXPECT_EQ(batch.num_sequences, 2);
  EXPECT_EQ(batch.num_rows, 7);
  EXPECT_EQ(ids(batch.token_ids), (Ids{7, 8, 9, 5, 4, 3, 2}));
  EXPECT_EQ(ids(batch.positions), (Ids{10, 11, 11, 12, 13, 0, 1}));
  EXPECT_EQ(ids(batch.sequence_index), (Ids{0, 0, 0, 0, 0, 1, 1}));
  EXPECT_EQ(ids(batch.slots), (Ids{2, 0}));
  EXPECT_EQ(ids(batch.prefix_lengths), (Ids{10, 0}));
  EXPECT_EQ(ids(batch.row_offsets), (Ids{0, 5, 7}));
  const std::vector<std::vector<int>> visible = {{0},          {0, 1}, {0, 2}, {0, 1, 3},
                                                 {0, 1, 3, 4}, {0},    {0, 1}};
  for (std::int64_t row = 0; row < 7; ++row) {
    const std::vector<int>& nodes = visible[static_cast<std::size_t>(row)];
    for (int node = 0; node < 130; ++node) {
      const bool expected = std::find(nodes.begin(), nodes.end(), node) != nodes.end();
      EXPECT_EQ(sees(batch, row, node), expected) << "row " << row << " node " << node;
    }
  }
}

TEST_F(ModelTreeBatch, MasksCrossWords) {
  TreeBatchStorage rows = storage();
  Ids tokens(130, 1);
  Ids parents(130);
  for (std::int32_t node = 0; node < 130; ++node) {
    parents[static_cast<std::size_t>(node)] = node == 129 ? 63 : node - 1;
  }
  const SequenceRows sequence{
      .slot = 1, .prefix_length = 4, .token_ids = tokens, .parents = parents};
  const TreeBatch batch = rows.fill({&sequence, 1});
  EXPECT_EQ(batch.ancestor_mask.shape(), (Shape{130, 3}));
  for (int node = 0; node < 130; ++node) {
    EXPECT_EQ(sees(batch, 128, node), node <= 128);
    EXPECT_EQ(sees(batch, 129, node), node <= 63 || node == 129);
  }
  EXPECT_EQ(ids(batch.positions)[129], 4 + 64);
}

TEST_F(ModelTreeBatch, ASmallerBatchLeavesNothingOfALargerOne) {
  TreeBatchStorage rows = storage();
  const Ids tokens = {1, 2, 3};
  const Ids chain = {-1, 0, 1};
  const Ids star = {-1, 0, 0};
  const SequenceRows before{.slot = 0, .prefix_length = 5, .token_ids = tokens, .parents = chain};
  const SequenceRows after{.slot = 1, .prefix_length = 6, .token_ids = tokens, .parents = star};
  rows.fill({&before, 1});
  const TreeBatch batch = rows.fill({&after, 1});
  EXPECT_FALSE(sees(batch, 2, 1));
  EXPECT_EQ(ids(batch.positions), (Ids{6, 7, 7}));
}

TEST_F(ModelTreeBatch, ChainsHaveNoMaskAndAnyLength) {
  TreeBatchStorage rows = storage(/*max_nodes=*/1);
  const Ids tokens(200, 6);
  const SequenceRows sequence{.slot = 0, .prefix_length = 3, .token_ids = tokens, .parents = {}};
  const TreeBatch batch = rows.fill({&sequence, 1});
  EXPECT_TRUE(batch.ancestor_mask.empty());
  EXPECT_EQ(batch.num_rows, 200);
  EXPECT_EQ(ids(batch.positions)[199], 202);
  const TreeBatch none = rows.fill({});
  EXPECT_EQ(none.num_rows, 0);
  EXPECT_EQ(ids(none.row_offsets), (Ids{0}));
}

TEST_F(ModelTreeBatch, MalformedTreesAndTooManyRowsAreErrors) {
  TreeBatchStorage rows = storage(/*max_nodes=*/4);
  const Ids tokens = {1, 2, 3};
  const auto fill = [&rows](const Ids& ids_of, const Ids& parents) {
    const SequenceRows sequence{
        .slot = 0, .prefix_length = 0, .token_ids = ids_of, .parents = parents};
    rows.fill({&sequence, 1});
  };
  EXPECT_NO_THROW(fill(tokens, {-1, 0, 1}));
  EXPECT_THROW(fill(tokens, {0, 0, 1}), Error);    // a root with a parent
  EXPECT_THROW(fill(tokens, {-1, -1, 1}), Error);  // two roots
  EXPECT_THROW(fill(tokens, {-1, 1, 1}), Error);   // its own parent
  EXPECT_THROW(fill(tokens, {-1, 2, 0}), Error);   // a later parent
  EXPECT_THROW(fill(tokens, {-1, 0}), Error);      // a parent is missing
  EXPECT_THROW(fill({1, 2, 3, 4, 5}, {-1, 0, 0, 0, 0}), Error);
  EXPECT_THROW(fill(Ids(301, 1), {}), Error);
  const Ids parents = {-1, 0, 1};
  const SequenceRows mixed[] = {
      {.slot = 0, .prefix_length = 0, .token_ids = tokens, .parents = parents},
      {.slot = 1, .prefix_length = 0, .token_ids = tokens, .parents = {}}};
  EXPECT_THROW(rows.fill(mixed), Error);
  EXPECT_NO_THROW(fill(tokens, {-1, 0, 1}));  // and goes on
}

}  // namespace

}  // namespace kdtree
