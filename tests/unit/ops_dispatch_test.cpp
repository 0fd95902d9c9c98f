// Dispatch: each row once to every rank that holds one of its experts, in messages of fixed size.
#include <cstring>

#include "tests/unit/op_test.h"

namespace kdtree::ops_test {

namespace {

class DispatchTest : public OpTest {
 protected:
  struct Plan {
    std::vector<std::int32_t> rows;    // of each place
    std::vector<std::int64_t> counts;  // of each rank
  };

  Plan run(const std::vector<std::int32_t>& ids, std::int64_t k,
           const std::vector<std::int32_t>& rank_of, std::int64_t num_ranks,
           std::int64_t places_a_rank, std::int64_t places) {
    const std::int64_t rows = k == 0 ? 0 : static_cast<std::int64_t>(ids.size()) / k;
    GuardedTensor expert_ids(backend(), DType::kInt32, {rows, k}, k + 3);
    expert_ids.upload(ids);
    auto ranks = make_indices(backend(), rank_of);
    GuardedTensor row_indices(backend(), DType::kInt32, {places});
    GuardedTensor counts(backend(), DType::kInt64, {num_ranks});
    backend().plan_dispatch({.expert_ids = expert_ids.view(),
                             .rank_of = ranks.view(),
                             .places_a_rank = places_a_rank,
                             .row_indices = row_indices.view(),
                             .counts = counts.view()});
    return {row_indices.download<std::int32_t>(), counts.download<std::int64_t>()};
  }

  // The rule of backend.h, written down once more: for each rank its rows in order.
  static Plan expected(const std::vector<std::int32_t>& ids, std::int64_t k,
                       const std::vector<std::int32_t>& rank_of, std::int64_t num_ranks,
                       std::int64_t places_a_rank, std::int64_t places) {
    Plan plan;
    plan.rows.assign(static_cast<std::size_t>(places), -1);
    std::size_t place = 0;
    for (std::int64_t rank = 0; rank < num_ranks; ++rank) {
      if (places_a_rank > 0) {
        place = static_cast<std::size_t>(rank * places_a_rank);
      }
      std::int64_t count = 0;
      for (std::size_t row = 0; row * static_cast<std::size_t>(k) < ids.size(); ++row) {
        bool needed = false;
        for (std::int64_t i = 0; i < k; ++i) {
          const std::int32_t id =
              ids[row * static_cast<std::size_t>(k) + static_cast<std::size_t>(i)];
          needed = needed || (id >= 0 && rank_of[static_cast<std::size_t>(id)] == rank);
        }
        if (needed) {
          plan.rows[place++] = static_cast<std::int32_t>(row);
          ++count;
        }
      }
      plan.counts.push_back(count);
    }
    return plan;
  }
};
KDTREE_TEST_ALL_BACKENDS(DispatchTest);

TEST_P(DispatchTest, PlansEveryRowForEveryRankThatNeedsIt) {
  Random random(1);
  for (const std::int64_t rows : {0, 1, 2, 7, 31, 32, 33, 64, 65, 512}) {
    for (const std::int64_t num_ranks : {1, 2, 3, 8, 40}) {
      for (const std::int64_t k : {1, 4, 8}) {
        const std::int64_t num_experts = 48;
        std::vector<std::int32_t> ids;
        for (std::int64_t r = 0; r < rows; ++r) {
          auto chosen = random.permutation(num_experts);
          for (std::int64_t i = 0; i < k; ++i) {
            ids.push_back(random.below(8) == 0 ? -1 : chosen[static_cast<std::size_t>(i)]);
          }
        }
        const std::vector<std::int32_t> rank_of = random.integers(num_experts, num_ranks);
        SCOPED_TRACE(testing::Message() << rows << " rows, " << num_ranks << " ranks, k " << k);
        for (const std::int64_t spare : {0, 5}) {
          const std::int64_t compact = rows * std::min(k, num_ranks) + spare;
          const Plan got = run(ids, k, rank_of, num_ranks, 0, compact);
          const Plan want = expected(ids, k, rank_of, num_ranks, 0, compact);
          EXPECT_EQ(got.rows, want.rows);
          EXPECT_EQ(got.counts, want.counts);
          const std::int64_t each = rows + spare;
          if (each > 0) {
            const Plan fixed = run(ids, k, rank_of, num_ranks, each, num_ranks * each);
            const Plan fixed_want = expected(ids, k, rank_of, num_ranks, each, num_ranks * each);
            EXPECT_EQ(fixed.rows, fixed_want.rows);
            EXPECT_EQ(fixed.counts, fixed_want.counts);
          }
        }
      }
    }
  }
}

// Every byte of a message: the row's values, then ids, then weights, zeros up to each boundary.
TEST_P(DispatchTest, PacksRowsAndEmptyPlaces) {
  Random random(2);
  for (const std::int64_t hidden : {1, 7, 8, 64, 1000}) {
    for (const std::int64_t k : {1, 3, 8}) {
      const std::int64_t rows = 5;
      const std::vector<std::int32_t> places = {4, -1, 0, 0, 3, -1, 2, 1};
      const std::vector<float> x = activations(random, rows * hidden);
      const std::vector<std::int32_t> ids = random.integers(rows * k, 100);
      const std::vector<float> weights = random.floats(rows * k);
      const DispatchMessage message = dispatch_message(hidden, k, activation());
      EXPECT_EQ(message.bytes % 16, 0);
      auto x_tensor = input({rows, hidden}, x, hidden + 8);
      GuardedTensor id_tensor(backend(), DType::kInt32, {rows, k}, k + 1);
      id_tensor.upload(ids);
      auto weight_tensor = make_tensor(backend(), {rows, k}, weights);
      auto place_tensor = make_indices(backend(), places);
      const auto num_places = static_cast<std::int64_t>(places.size());
      GuardedTensor messages(backend(), DType::kUInt8, {num_places, message.bytes});
      backend().pack_dispatch({.x = x_tensor.view(),
                               .expert_ids = id_tensor.view(),
                               .expert_weights = weight_tensor.view(),
                               .row_indices = place_tensor.view(),
                               .messages = messages.view()});
      const std::vector<std::uint8_t> got = messages.download<std::uint8_t>();

      std::vector<std::uint8_t> want(got.size(), 0);
      for (std::size_t p = 0; p < places.size(); ++p) {
        std::uint8_t* to = want.data() + p * static_cast<std::size_t>(message.bytes);
        if (places[p] < 0) {
          std::memset(to + message.ids_offset, 0xff, static_cast<std::size_t>(4 * k));
          continue;
        }
        const std::vector<float> row = row_of(x, places[p], hidden);
        const std::vector<BFloat16> narrow = to_bfloat16(row);
        const bool wide = activation() == DType::kFloat32;
        std::memcpy(to, wide ? static_cast<const void*>(row.data()) : narrow.data(),
                    static_cast<std::size_t>(hidden * dtype_bytes(activation())));
        std::memcpy(to + message.ids_offset, ids.data() + places[p] * k,
                    static_cast<std::size_t>(4 * k));
        std::memcpy(to + message.weights_offset, weights.data() + places[p] * k,
                    static_cast<std::size_t>(4 * k));
      }
      EXPECT_EQ(got, want) << hidden << " " << k;
    }
  }
}

TEST_P(DispatchTest, MalformedShapesThrow) {
  auto ids = make_tensor(backend(), {2, 2}, std::vector<std::int32_t>{0, 1, 1, 0});
  auto rank_of = make_indices(backend(), {0, 1});
  GuardedTensor places(backend(), DType::kInt32, {4});
  GuardedTensor counts(backend(), DType::kInt64, {2});
  DispatchPlanParams plan = {.expert_ids = ids.view(),
                             .rank_of = rank_of.view(),
                             .places_a_rank = 0,
                             .row_indices = places.view(),
                             .counts = counts.view()};
  backend().plan_dispatch(plan);
  plan.places_a_rank = 1;  // fewer than rows
  EXPECT_THROW(backend().plan_dispatch(plan), Error);
  plan.places_a_rank = 3;  // 6 places
  EXPECT_THROW(backend().plan_dispatch(plan), Error);
  plan.places_a_rank = 0;
  plan.row_indices = places.view().rows(0, 3);
  EXPECT_THROW(backend().plan_dispatch(plan), Error);

  auto x = input({2, 4}, std::vector<float>(8, 1.0F));
  auto weights = make_tensor(backend(), {2, 2}, std::vector<float>(4, 1.0F));
  const DispatchMessage message = dispatch_message(4, 2, activation());
  GuardedTensor messages(backend(), DType::kUInt8, {4, message.bytes});
  GuardedTensor short_messages(backend(), DType::kUInt8, {4, message.bytes - 16});
  PackDispatchParams pack = {.x = x.view(),
                             .expert_ids = ids.view(),
                             .expert_weights = weights.view(),
                             .row_indices = places.view(),
                             .messages = messages.view()};
  backend().pack_dispatch(pack);
  pack.messages = short_messages.view();
  EXPECT_THROW(backend().pack_dispatch(pack), Error);
  pack.messages = messages.view();
  pack.expert_weights = weights.view().rows(0, 1);
  EXPECT_THROW(backend().pack_dispatch(pack), Error);
}

}  // namespace

}  // namespace kdtree::ops_test
