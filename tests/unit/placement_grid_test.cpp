// The grid of the ranks from what the user asks for.
#include <gtest/gtest.h>

#include "placement/grid.h"
#include "tests/unit/weights_test_support.h"

namespace kdtree {

namespace {

TEST(Grid, WithoutOptionsIsExpertsByRank) {
  for (const int ranks : {1, 2, 6}) {
    const ParallelGrid grid = make_grid({}, ranks);
    EXPECT_EQ(grid, ParallelGrid());
    EXPECT_EQ(grid.moe_ep(ranks), ranks);
    EXPECT_EQ(grid.attention_tp(ranks), ranks);
  }
}

TEST(Grid, TheMissingSizeOfAPairFollows) {
  EXPECT_EQ(make_grid({.moe_tp = 2}, 6).moe_tp, 2);
  EXPECT_EQ(make_grid({.moe_ep = 2}, 6).moe_tp, 3);
  EXPECT_EQ(make_grid({.moe_ep = 3, .moe_tp = 2}, 6).moe_tp, 2);
  EXPECT_EQ(make_grid({.moe_ep = 6}, 6).moe_tp, 1);
  EXPECT_EQ(make_grid({.moe_ep = 1}, 1).moe_tp, 1);
  EXPECT_EQ(make_grid({.attention_dp = 2}, 6), (ParallelGrid{.moe_tp = 1, .attention_dp = 2}));
  EXPECT_EQ(make_grid({.attention_tp = 2}, 6), (ParallelGrid{.moe_tp = 1, .attention_dp = 3}));
  EXPECT_EQ(make_grid({.moe_ep = 3, .attention_tp = 6, .attention_dp = 1}, 6),
            (ParallelGrid{.moe_tp = 2, .attention_dp = 1}));
}

TEST(Grid, NeighboursShareExpertsAndHeads) {
  const ParallelGrid grid = make_grid({.moe_tp = 2, .attention_dp = 2}, 6);
  EXPECT_EQ(grid.moe_ep(6), 3);
  EXPECT_EQ(grid.attention_tp(6), 3);
  for (int rank = 0; rank < 6; ++rank) {
    EXPECT_EQ(grid.expert_group(rank), rank / 2);
    EXPECT_EQ(grid.expert_slice(rank), rank % 2);
    EXPECT_EQ(grid.attention_group(rank, 6), rank / 3);
    EXPECT_EQ(grid.attention_place(rank, 6), rank % 3);
  }
}

TEST(Grid, OtherSizesAreRefused) {
  expect_input_error([] { make_grid({.moe_tp = 4}, 6); },
                     {"--moe-tp 4: expected a number that divides the 6 ranks of this run"});
  expect_input_error([] { make_grid({.moe_ep = 2}, 1); },
                     {"--moe-ep 2: expected a number that divides the 1 rank of this run"});
  expect_input_error([] { make_grid({.moe_ep = 2, .moe_tp = 2}, 8); },
                     {"--moe-ep 2 and --moe-tp 2: they multiply to 4, expected 8"});
  expect_input_error([] { make_grid({.moe_ep = 6, .moe_tp = 6}, 6); },
                     {"--moe-ep 6 and --moe-tp 6: they multiply to 36, expected 6"});
  expect_input_error([] { make_grid({.attention_dp = 5}, 6); }, {"--attention-dp 5: expected"});
  expect_input_error([] { make_grid({.attention_tp = 2, .attention_dp = 2}, 6); },
                     {"--attention-tp 2 and --attention-dp 2: they multiply to 4, expected 6"});
}

}  // namespace

}  // namespace kdtree
