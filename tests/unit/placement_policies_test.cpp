// Policies of placing experts: what every placement must hold, and how even they share loads out.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>

#include "core/check.h"
#include "core/partition.h"
#include "placement/policies.h"

namespace kdtree {

namespace {

using Loads = std::vector<std::int64_t>;

// Rows that chose each expert, where the r-th most frequent is chosen in proportion to r^-exponent;
// which one that is, is drawn.
Loads zipf_loads(std::int64_t num_experts, double exponent, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  Loads loads(static_cast<std::size_t>(num_experts));
  for (std::size_t i = 0; i < loads.size(); ++i) {
    const double expected = 1e5 * std::pow(static_cast<double>(i + 1), -exponent);
    const double noise = 0.9 + 0.2 * static_cast<double>(random() % 1000) / 1000;
    loads[i] = static_cast<std::int64_t>(expected * noise);
  }
  std::shuffle(loads.begin(), loads.end(), random);
  return loads;
}

Loads random_loads(std::int64_t num_experts, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  Loads loads(static_cast<std::size_t>(num_experts));
  for (std::int64_t& load : loads) {
    load = random() % 3 == 0 ? 0 : static_cast<std::int64_t>(random() % 1000);
  }
  return loads;
}

// What LayerPlacement itself promises, and the slots of each rank.
void expect_placed(const LayerPlacement& placement, std::int64_t num_experts,
                   std::int64_t num_slots, int world_size) {
  ASSERT_EQ(placement.n_routed_experts(), num_experts);
  ASSERT_EQ(placement.world_size(), world_size);
  EXPECT_EQ(placement.num_slots(), num_slots);
  std::vector<int> copies(static_cast<std::size_t>(num_experts));
  for (int rank = 0; rank < world_size; ++rank) {
    const std::vector<std::int64_t>& experts = placement.experts_of(rank);
    EXPECT_EQ(std::ssize(experts), partition(num_slots, world_size, rank).size()) << rank;
    EXPECT_TRUE(std::is_sorted(experts.begin(), experts.end()));
    EXPECT_EQ(std::adjacent_find(experts.begin(), experts.end()), experts.end());
    for (const std::int64_t expert : experts) {
      ++copies.at(static_cast<std::size_t>(expert));
    }
  }
  EXPECT_TRUE(std::all_of(copies.begin(), copies.end(), [](int count) { return count > 0; }));
}

TEST(PlacementPolicies, RoundRobinTakesRanksInTurn) {
  const LayerPlacement placement = place_round_robin(7, 3);
  EXPECT_EQ(placement.experts_of_ranks(), (std::vector<Loads>{{0, 3, 6}, {1, 4}, {2, 5}}));
  expect_placed(placement, 7, 7, 3);
  expect_placed(place_round_robin(2, 4), 2, 2, 4);
  EXPECT_THROW(place_round_robin(2, 0), Error);
}

TEST(PlacementPolicies, ASmallCaseByHand) {
  // 9 + 1 + 1 against 4 + 4 + 3: no other sharing out is as even.
  EXPECT_EQ(place_balanced(Loads{1, 4, 9, 4, 1, 3}, 2).experts_of_ranks(),
            (std::vector<Loads>{{0, 2, 4}, {1, 3, 5}}));
  // The hot expert gets the spare slot, half its load on each rank.
  EXPECT_EQ(place_replicated(Loads{2, 12, 3, 1}, 6, 2).experts_of_ranks(),
            (std::vector<Loads>{{0, 1, 2}, {1, 2, 3}}));
}

TEST(PlacementPolicies, RandomLoadsArePlacedWhole) {
  std::mt19937_64 random(3);
  for (std::uint64_t seed = 0; seed < 400; ++seed) {
    const auto num_experts = static_cast<std::int64_t>(1 + random() % 24);
    const int world_size = 1 + static_cast<int>(random() % 9);
    const auto more = static_cast<std::int64_t>(random()) & 0xffff;
    const std::int64_t num_slots = num_experts + more % (num_experts * (world_size - 1) + 1);
    const Loads loads = random_loads(num_experts, seed);
    SCOPED_TRACE(testing::Message() << num_experts << " experts, " << num_slots << " slots, "
                                    << world_size << " ranks, seed " << seed);
    expect_placed(place_balanced(loads, world_size), num_experts, num_experts, world_size);
    const LayerPlacement replicated = place_replicated(loads, num_slots, world_size);
    expect_placed(replicated, num_experts, num_slots, world_size);
    EXPECT_EQ(replicated, place_replicated(loads, num_slots, world_size));
    EXPECT_LE(imbalance(place_balanced(loads, world_size), loads), world_size + 1e-9);
  }
}

TEST(PlacementPolicies, WithoutLoadsReplicasAreSpread) {
  const LayerPlacement placement = place_replicated(Loads(6, 0), 12, 4);
  const std::vector<std::int32_t> offsets = placement.replica_offsets();
  for (std::size_t expert = 0; expert < 6; ++expert) {
    EXPECT_EQ(offsets[expert + 1] - offsets[expert], 2);
  }
  EXPECT_EQ(imbalance(placement, Loads(6, 0)), 1);
}

TEST(PlacementPolicies, RefusesWhatDoesNotFit) {
  EXPECT_THROW(place_replicated(Loads{1, 2}, 1, 2), Error);
  EXPECT_THROW(place_replicated(Loads{1, 2}, 5, 2), Error);
  EXPECT_THROW(place_replicated(Loads{1, -2}, 2, 2), Error);
  EXPECT_THROW(imbalance(place_round_robin(3, 2), Loads{1, 2}), Error);
}

TEST(PlacementPolicies, ImbalanceIsTheMostLoadedRankOverTheMean) {
  const LayerPlacement placement(3, {{0, 1}, {1, 2}});
  // Expert 1 gives half of its 4 rows to each rank: 8 and 4, 6 on average.
  EXPECT_DOUBLE_EQ(imbalance(placement, Loads{6, 4, 2}), 8.0 / 6);
}

// The published EPLB heuristic, without nodes and groups: slots that are left over go one by one to
// the expert with the largest load a replica; then replicas, heaviest first, go to the rank with
// the least load that has room. Returns the load of the most loaded rank over the mean.
double eplb_imbalance(const Loads& loads, std::int64_t num_slots, int world_size) {
  std::vector<int> copies(loads.size(), 1);
  const auto share = [&](std::size_t e) { return static_cast<double>(loads[e]) / copies[e]; };
  for (auto spare = num_slots - std::ssize(loads); spare > 0; --spare) {
    std::size_t hottest = 0;
    for (std::size_t e = 1; e < loads.size(); ++e) {
      hottest = share(e) > share(hottest) ? e : hottest;
    }
    ++copies[hottest];
  }
  std::vector<double> replicas;
  for (std::size_t e = 0; e < loads.size(); ++e) {
    replicas.insert(replicas.end(), static_cast<std::size_t>(copies[e]), share(e));
  }
  std::sort(replicas.rbegin(), replicas.rend());
  const std::int64_t slots_of_each = num_slots / world_size;
  std::vector<double> load(static_cast<std::size_t>(world_size));
  std::vector<std::int64_t> used(load.size());
  for (const double replica : replicas) {
    std::size_t best = load.size();
    for (std::size_t rank = 0; rank < load.size(); ++rank) {
      if (used[rank] < slots_of_each && (best == load.size() || load[rank] < load[best])) {
        best = rank;
      }
    }
    load[best] += replica;
    ++used[best];
  }
  const double sum = std::accumulate(load.begin(), load.end(), 0.0);
  return *std::max_element(load.begin(), load.end()) * world_size / sum;
}

struct EplbCase {
  int world_size;
  std::int64_t num_slots;
};

class PlacementAgainstEplb : public testing::TestWithParam<EplbCase> {};

TEST_P(PlacementAgainstEplb, IsAtLeastAsEven) {
  const auto [world_size, num_slots] = GetParam();
  for (const double exponent : {0.3, 0.6, 1.0, 1.4}) {
    for (std::uint64_t seed = 0; seed < 5; ++seed) {
      const Loads loads = zipf_loads(384, exponent, seed);
      const double ours = imbalance(place_replicated(loads, num_slots, world_size), loads);
      EXPECT_LE(ours, eplb_imbalance(loads, num_slots, world_size) * (1 + 1e-12))
          << "exponent " << exponent << " seed " << seed;
      if (num_slots == 384) {
        EXPECT_EQ(imbalance(place_balanced(loads, world_size), loads), ours);
        EXPECT_LE(ours, imbalance(ExpertPlacement::linear(384, world_size).layer(0), loads));
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Kimi, PlacementAgainstEplb,
                         testing::Values(EplbCase{8, 384}, EplbCase{8, 448}, EplbCase{16, 384},
                                         EplbCase{16, 448}, EplbCase{64, 384}, EplbCase{64, 448},
                                         EplbCase{64, 768}));

}  // namespace

}  // namespace kdtree
