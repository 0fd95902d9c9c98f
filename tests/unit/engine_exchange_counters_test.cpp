// ExchangeCounters against figures worked out by hand, and against a count of its own over random
// choices.
#include <gtest/gtest.h>

#include <random>

#include "engine/exchange_counters.h"
#include "kernels/backend.h"
#include "kernels/replica_choice.h"

namespace kdtree {

namespace {

constexpr std::int64_t kHidden = 16;

ExchangeFacts facts_of(ExchangeKind kind, std::int64_t k, bool fixed = false) {
  return {.kind = kind,
          .fixed_counts = fixed,
          .hidden_size = kHidden,
          .num_experts_per_tok = k,
          .activation_dtype = DType::kFloat32};
}

std::int64_t message_bytes(std::int64_t k) {
  return dispatch_message(kHidden, k, DType::kFloat32).bytes;
}

// Experts 0, 1, 2 on rank 0 and 3, 4 on rank 1; rank 0 owns rows 0 and 1, rank 1 owns row 2.
TEST(ExchangeCountersTest, CountsWhatGoesWhereByHand) {
  const std::vector<std::int32_t> ids = {0, 1,   // row 0: rank 0 alone
                                         0, 3,   // row 1: both
                                         2, 1};  // row 2: rank 0 alone
  ExchangeCounters counters(facts_of(ExchangeKind::kAllToAll, 2), ExpertPlacement::linear(5, 2),
                            {7});
  counters.add_step(ids);
  const ExchangeReport report = counters.report(std::vector<ExchangeTimes>{{1, 10, 2}, {2, 4, 20}});
  EXPECT_EQ(report.num_steps, 1);
  ASSERT_EQ(report.layers.size(), 1U);
  const ExchangeLayer& layer = report.layers[0];
  EXPECT_EQ(layer.layer, 7);
  ASSERT_EQ(layer.ranks.size(), 2U);
  EXPECT_EQ(layer.ranks[0].expert_rows, 5);
  EXPECT_EQ(layer.ranks[1].expert_rows, 1);
  EXPECT_EQ(layer.ranks[0].rows_computed, 3);
  EXPECT_EQ(layer.ranks[1].rows_computed, 1);
  EXPECT_EQ(layer.ranks[0].experts_touched, 3);
  EXPECT_EQ(layer.ranks[1].experts_touched, 1);
  EXPECT_EQ(layer.ranks[0].rows_dispatched, 1);  // row 1
  EXPECT_EQ(layer.ranks[1].rows_dispatched, 1);  // row 2
  // A message out, one result back, own rows to the other.
  constexpr std::int64_t kRowBytes = kHidden * 4;
  EXPECT_EQ(layer.ranks[0].bytes_sent, message_bytes(2) + kRowBytes + 2 * kRowBytes);
  EXPECT_EQ(layer.ranks[1].bytes_sent, message_bytes(2) + kRowBytes + kRowBytes);
  EXPECT_DOUBLE_EQ(layer.load_max_over_mean, 5.0 / 3.0);
  EXPECT_DOUBLE_EQ(layer.ranks[1].combine_us, 20);
  // Compute: 10 and 4, so the mean is 7; the longest rank took 26.
  EXPECT_DOUBLE_EQ(layer.waiting_share, 3.0 / 26.0);
}

TEST(ExchangeCountersTest, FixedCountsSendAMessageARowAndRank) {
  ExchangeCounters counters(facts_of(ExchangeKind::kAllToAll, 1, true),
                            ExpertPlacement::linear(3, 3), {0});
  counters.add_step(std::vector<std::int32_t>{0, 0, 0, 0});  // 2, 1 and 1 rows are owned
  const ExchangeReport report = counters.report(std::vector<ExchangeTimes>(3));
  constexpr std::int64_t kRowBytes = kHidden * 4;
  EXPECT_EQ(report.layers[0].ranks[0].bytes_sent,
            4 * message_bytes(1) + 2 * kRowBytes + 4 * kRowBytes);
  EXPECT_EQ(report.layers[0].ranks[2].bytes_sent,
            2 * message_bytes(1) + 3 * kRowBytes + 2 * kRowBytes);
  EXPECT_EQ(report.layers[0].ranks[0].rows_dispatched, 0);
  EXPECT_EQ(report.layers[0].ranks[1].rows_dispatched, 1);
}

TEST(ExchangeCountersTest, SumsSendWhatAReduceScatterAndAnAllGatherSend) {
  for (const ExchangeKind kind : {ExchangeKind::kAllReduce, ExchangeKind::kAllGather}) {
    ExchangeCounters counters(facts_of(kind, 1), ExpertPlacement::linear(4, 2), {0});
    counters.add_step(std::vector<std::int32_t>{0, 1, 2});
    const ExchangeReport report = counters.report(std::vector<ExchangeTimes>(2));
    constexpr std::int64_t kRowBytes = kHidden * 4;
    // Of 3 rows: all-reduce is cut in the middle, allgather gives rank 0 two of them.
    EXPECT_EQ(report.layers[0].ranks[0].bytes_sent, 3 * kRowBytes);
    EXPECT_EQ(report.layers[0].ranks[1].bytes_sent, 3 * kRowBytes);
    EXPECT_EQ(report.layers[0].ranks[0].rows_dispatched, 0);
    EXPECT_EQ(report.layers[0].ranks[0].rows_computed, 2);
  }
}

TEST(ExchangeCountersTest, OneRankSendsNothing) {
  for (const ExchangeKind kind : kExchangeKinds) {
    ExchangeCounters counters(facts_of(kind, 2, true), ExpertPlacement::linear(4, 1), {0});
    counters.add_step(std::vector<std::int32_t>{0, 1, 3, 2});
    const ExchangeReport report = counters.report(std::vector<ExchangeTimes>(1));
    EXPECT_EQ(report.layers[0].ranks[0].bytes_sent, 0) << exchange_name(kind);
    EXPECT_EQ(report.layers[0].ranks[0].expert_rows, 4);
    EXPECT_DOUBLE_EQ(report.layers[0].load_max_over_mean, 1);
  }
}

// Two groups of two slices: both ranks of a group count what the group does.
TEST(ExchangeCountersTest, SlicesSendWhatTheirGroupSendsAndSumItUp) {
  ExchangeFacts facts = facts_of(ExchangeKind::kAllToAll, 1);
  facts.grid.moe_tp = 2;
  ExchangeCounters counters(facts, ExpertPlacement::linear(2, 2), {0});
  counters.add_step(std::vector<std::int32_t>{0, 1, 0});  // group 0 owns rows 0 and 1
  const ExchangeReport report = counters.report(std::vector<ExchangeTimes>(4));
  ASSERT_EQ(report.layers[0].ranks.size(), 4U);
  constexpr std::int64_t kRowBytes = kHidden * 4;
  for (const std::size_t rank : {0U, 1U}) {
    const ExchangeCount& count = report.layers[0].ranks[rank];
    EXPECT_EQ(count.expert_rows, 2);
    EXPECT_EQ(count.rows_dispatched, 1);
    // A message, a result on its way back, a sum of two rows over two ranks, two rows gathered.
    EXPECT_EQ(count.bytes_sent, message_bytes(1) + kRowBytes + 2 * kRowBytes + 2 * kRowBytes);
  }
  EXPECT_EQ(report.layers[0].ranks[3].expert_rows, 1);
  EXPECT_DOUBLE_EQ(report.layers[0].load_max_over_mean, 2.0 / 1.5);
}

// Two attention groups of one rank, rank 0 with the first two rows: they own what they have, and
// without messages between groups every rank would have to get all rows first.
TEST(ExchangeCountersTest, AttentionGroupsOwnTheirRows) {
  constexpr std::int64_t kRowBytes = kHidden * 4;
  for (const ExchangeKind kind : kExchangeKinds) {
    ExchangeFacts facts = facts_of(kind, 1);
    facts.grid.attention_dp = 2;
    ExchangeCounters counters(facts, ExpertPlacement::linear(2, 2), {0});
    counters.add_step(std::vector<std::int32_t>{0, 1, 0, 0, 0, 0}, std::vector<std::int64_t>{2, 4});
    const ExchangeReport report = counters.report(std::vector<ExchangeTimes>(2));
    const std::vector<ExchangeCount>& ranks = report.layers[0].ranks;
    EXPECT_EQ(ranks[0].expert_rows, 5) << exchange_name(kind);
    if (kind == ExchangeKind::kAllToAll) {
      EXPECT_EQ(ranks[0].rows_dispatched, 1);
      EXPECT_EQ(ranks[1].rows_dispatched, 4);
      EXPECT_EQ(ranks[0].bytes_sent, message_bytes(1) + 4 * kRowBytes);
      EXPECT_EQ(ranks[1].bytes_sent, 4 * message_bytes(1) + kRowBytes);
    } else {
      EXPECT_EQ(ranks[0].bytes_sent, (6 + 2) * kRowBytes) << exchange_name(kind);
      EXPECT_EQ(ranks[1].bytes_sent, (6 + 4) * kRowBytes) << exchange_name(kind);
    }
  }
}

// Replicas: each pair of a row and an expert is computed once, on a rank that holds the expert, and
// it is the replica that the kernels choose.
TEST(ExchangeCountersTest, ReplicasAreCountedWhereTheRowsGo) {
  const LayerPlacement placement(3, {{0, 1}, {1, 2}, {0, 2}});
  std::mt19937 random(5);
  std::vector<std::int32_t> ids;
  std::vector<std::int64_t> want(3);
  const std::vector<std::vector<int>> ranks_of = {{0, 2}, {0, 1}, {1, 2}};
  for (int row = 0; row < 500; ++row) {
    const auto first = static_cast<std::int32_t>(random() % 3);
    const std::array<std::int32_t, 2> experts = {
        first,
        static_cast<std::int32_t>((first + 1 + static_cast<std::int32_t>(random() % 2)) % 3)};
    for (const std::int32_t expert : experts) {
      const std::uint32_t replica = choose_replica(row_bits(experts.data(), 2), expert, 2);
      ++want[static_cast<std::size_t>(ranks_of[static_cast<std::size_t>(expert)][replica])];
      ids.push_back(expert);
    }
  }
  ExchangeCounters counters(facts_of(ExchangeKind::kAllReduce, 2), ExpertPlacement(placement), {0});
  counters.add_step(ids);
  const ExchangeReport report = counters.report(std::vector<ExchangeTimes>(3));
  for (std::size_t rank = 0; rank < 3; ++rank) {
    EXPECT_EQ(report.layers[0].ranks[rank].expert_rows, want[rank]) << rank;
  }
}

TEST(ExchangeCountersTest, StepsAndLayersAddUp) {
  ExchangeCounters counters(facts_of(ExchangeKind::kAllToAll, 1), ExpertPlacement::linear(2, 2),
                            {1, 3});
  counters.add_step(std::vector<std::int32_t>{0, 0, 1, 1});  // layer 1: 0 0, layer 3: 1 1
  counters.add_step(std::vector<std::int32_t>{1, 0});        // one row; layer 1: 1, layer 3: 0
  // [rank][step][layer]
  const std::vector<ExchangeTimes> times = {{1, 2, 3}, {0, 8, 0}, {1, 1, 1}, {0, 2, 0},
                                            {2, 2, 2}, {0, 4, 0}, {5, 5, 5}, {0, 2, 0}};
  const ExchangeReport report = counters.report(times);
  EXPECT_EQ(report.num_steps, 2);
  EXPECT_EQ(report.layers[0].ranks[0].expert_rows, 2);
  EXPECT_EQ(report.layers[0].ranks[1].expert_rows, 1);
  EXPECT_EQ(report.layers[1].ranks[0].expert_rows, 1);
  EXPECT_EQ(report.layers[1].ranks[1].expert_rows, 2);
  EXPECT_EQ(report.layers[0].ranks[0].experts_touched, 1);
  EXPECT_DOUBLE_EQ(report.layers[0].ranks[1].dispatch_us, 7);
  EXPECT_DOUBLE_EQ(report.layers[1].ranks[0].compute_us, 10);
  // Largest 2 and 1, means 1 and 0.5.
  EXPECT_DOUBLE_EQ(report.layers[0].load_max_over_mean, 2);
  // Layer 3: 8 against 4 and 2 against 2: waited 2 of 8 + 2.
  EXPECT_DOUBLE_EQ(report.layers[1].waiting_share, 0.2);
}

}  // namespace

}  // namespace kdtree
