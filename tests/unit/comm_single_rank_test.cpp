// Placement of experts, and the collectives of one rank outside an MPI job.
#include <gtest/gtest.h>

#include "comm/communicator.h"
#include "comm/expert_placement.h"
#include "comm/process_group.h"
#include "tests/unit/weights_test_support.h"

namespace kdtree {

namespace {

TEST(CommPlacement, EveryExpertIsOnOneRank) {
  for (const std::int64_t experts : {0, 1, 3, 7, 12}) {
    for (const int ranks : {1, 2, 4, 5}) {
      const ExpertPlacement placement = ExpertPlacement::linear(experts, ranks);
      EXPECT_EQ(placement.n_routed_experts(), experts);
      std::int64_t next = 0;
      for (int rank = 0; rank < ranks; ++rank) {
        const std::vector<std::int32_t> slots = placement.layer(0).slots_on(rank);
        ASSERT_EQ(slots.size(), static_cast<std::size_t>(experts));
        std::int32_t slot = 0;
        for (const std::int64_t expert : placement.layer(0).experts_of(rank)) {
          EXPECT_EQ(expert, next++);
          EXPECT_EQ(placement.layer(0).ranks_of_targets()[static_cast<std::size_t>(expert)], rank);
          EXPECT_EQ(slots[static_cast<std::size_t>(expert)], slot++);
        }
        EXPECT_EQ(std::count(slots.begin(), slots.end(), -1), experts - slot);
      }
      EXPECT_EQ(next, experts);
    }
  }
}

TEST(CommPlacement, TheRemainderGoesToTheLowRanks) {
  const LayerPlacement placement = ExpertPlacement::linear(11, 4).layer(0);
  EXPECT_EQ(placement.experts_of(0), (std::vector<std::int64_t>{0, 1, 2}));
  EXPECT_EQ(placement.experts_of(3), (std::vector<std::int64_t>{9, 10}));
  EXPECT_TRUE(ExpertPlacement::linear(2, 4).layer(0).experts_of(3).empty());
  EXPECT_THROW(ExpertPlacement::linear(2, 0), Error);
  EXPECT_THROW(ExpertPlacement::linear(-1, 2), Error);
}

TEST(CommSelf, CollectivesOfOneRankCopy) {
  const auto group = make_self_process_group();
  const auto communicator = make_communicator({.name = "auto", .backend = "cpu"}, *group);
  EXPECT_EQ(communicator->name(), "self");
  EXPECT_EQ(communicator->world_size(), 1);
  std::vector<float> part = {1, -0.0F, 3, 4};
  std::vector<float> whole(4, -1);
  const TensorView from(part.data(), DType::kFloat32, Shape{2, 2});
  const TensorView to(whole.data(), DType::kFloat32, Shape{2, 2});
  communicator->all_reduce_sum(from, {}, {});
  communicator->broadcast(from, 0, {}, {});
  EXPECT_EQ(part, (std::vector<float>{1, -0.0F, 3, 4}));
  communicator->all_gather(from, to, {}, {});
  EXPECT_EQ(whole, part);
  whole.assign(4, -1);
  const std::vector<std::int64_t> rows = {2};
  communicator->all_gather_rows(from, to, rows, {}, {});
  EXPECT_EQ(whole, part);
  whole.assign(4, -1);
  communicator->all_to_all(from, to, {.rows_to = rows, .rows_from = rows}, {}, {});
  EXPECT_EQ(whole, part);
  communicator->all_to_all(
      from.rows(0, 0), to.rows(0, 0),
      {.rows_to = std::vector<std::int64_t>{0}, .rows_from = std::vector<std::int64_t>{0}}, {}, {});
  const std::vector<std::int64_t> other = {1};
  EXPECT_THROW(communicator->all_gather_rows(from, to, other, {}, {}), Error);
  EXPECT_THROW(communicator->all_to_all(from, to, {.rows_to = rows, .rows_from = other}, {}, {}),
               Error);
  EXPECT_THROW(communicator->broadcast(from, 1, {}, {}), Error);
}

TEST(CommSelf, WhatIsNotThereIsNamed) {
  const auto group = make_self_process_group();
  const auto verdict = [&group](const char* name) {
    check_communicator({.name = name, .backend = "cpu"}, *group);
  };
  EXPECT_NO_THROW(verdict("auto"));
  EXPECT_NO_THROW(verdict("self"));
  expect_input_error([&] { verdict("mpi"); }, {"mpirun"});
  expect_input_error([&] { verdict("nccl"); }, {"nccl"});
  expect_input_error([&] { verdict("gloo"); }, {"gloo", "self, mpi"});
}

TEST(CommSelf, RunTogetherOfOneRank) {
  const auto group = make_self_process_group();
  EXPECT_NO_THROW(run_together(*group, [] {}));
  try {
    run_together(*group, [] { throw InputError("broken"); });
    FAIL() << "no error";
  } catch (const AgreedError& error) {
    EXPECT_STREQ(error.what(), "broken");
  }
}

}  // namespace

}  // namespace kdtree
