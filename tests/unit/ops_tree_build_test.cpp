#include "tests/unit/op_test.h"

namespace kdtree::ops_test {
namespace {

constexpr float kInfiniteLogProb = std::numeric_limits<float>::infinity();
constexpr float kNanLogProb = std::numeric_limits<float>::quiet_NaN();

struct Draft {
  std::int64_t horizon = 0;
  std::int64_t k = 0;
  std::vector<float> log_probs;          // [sequences * horizon, k]
  std::vector<std::int32_t> candidates;  // [sequences * horizon, k]
  std::vector<std::int32_t> roots;       // [sequences]
};

struct BuiltTree {
  std::vector<std::int32_t> token_ids;
  std::vector<std::int32_t> parents;
  std::vector<std::int32_t> depths;
  bool operator==(const BuiltTree&) const = default;
};

// All prefixes of one sequence's draft, the most probable first.
BuiltTree brute_force(const Draft& draft, std::size_t sequence, std::int64_t budget) {
  struct Prefix {
    double negative_log_weight = 0;
    std::vector<std::int32_t> ranks;
    auto operator<=>(const Prefix&) const = default;
  };
  std::vector<Prefix> prefixes = {{0, {}}};
  const auto at = [&](std::size_t depth, std::size_t rank) {
    return (sequence * static_cast<std::size_t>(draft.horizon) + depth) *
               static_cast<std::size_t>(draft.k) +
           rank;
  };
  for (std::size_t i = 0; i < prefixes.size(); ++i) {
    const Prefix parent = prefixes[i];
    const std::size_t depth = parent.ranks.size();
    for (std::size_t rank = 0; depth < static_cast<std::size_t>(draft.horizon) &&
                               rank < static_cast<std::size_t>(draft.k);
         ++rank) {
      const float log_prob = draft.log_probs[at(depth, rank)];
      if (std::isnan(log_prob) || log_prob == -kInfiniteLogProb ||
          draft.candidates[at(depth, rank)] < 0) {
        break;
      }
      Prefix child = parent;
      child.negative_log_weight = -(-parent.negative_log_weight + static_cast<double>(log_prob));
      child.ranks.push_back(static_cast<std::int32_t>(rank));
      prefixes.push_back(child);
    }
  }
  std::sort(prefixes.begin() + 1, prefixes.end());
  prefixes.resize(std::min(prefixes.size(), static_cast<std::size_t>(budget) + 1));
  BuiltTree tree = {{draft.roots[sequence]}, {-1}, {0}};
  for (std::size_t i = 1; i < prefixes.size(); ++i) {
    auto parent = prefixes[i].ranks;
    const auto rank = static_cast<std::size_t>(parent.back());
    parent.pop_back();
    const auto place =
        std::find_if(prefixes.begin(), prefixes.begin() + static_cast<std::ptrdiff_t>(i),
                     [&](const Prefix& prefix) { return prefix.ranks == parent; });
    tree.token_ids.push_back(draft.candidates[at(parent.size(), rank)]);
    tree.parents.push_back(static_cast<std::int32_t>(place - prefixes.begin()));
    tree.depths.push_back(static_cast<std::int32_t>(parent.size()) + 1);
  }
  return tree;
}

class BuildTreesTest : public OpTest {
 protected:
  std::vector<BuiltTree> build(const Draft& draft, std::int64_t budget, std::int64_t max_nodes) {
    const auto sequences = static_cast<std::int64_t>(draft.roots.size());
    auto log_probs = make_tensor(backend(), {sequences * draft.horizon, draft.k}, draft.log_probs);
    auto candidates =
        make_tensor(backend(), {sequences * draft.horizon, draft.k}, draft.candidates);
    auto roots = make_indices(backend(), draft.roots);
    GuardedTensor num_nodes(backend(), DType::kInt32, {sequences});
    GuardedTensor token_ids(backend(), DType::kInt32, {sequences, max_nodes});
    GuardedTensor parents(backend(), DType::kInt32, {sequences, max_nodes});
    GuardedTensor depths(backend(), DType::kInt32, {sequences, max_nodes});
    backend().build_trees(
        {.log_probs = log_probs.view(),
         .candidates = candidates.view(),
         .draft_horizon = draft.horizon,
         .roots = roots.view(),
         .tree_budget = budget,
         .trees = {num_nodes.view(), token_ids.view(), parents.view(), depths.view()}});
    const auto counts = num_nodes.download<std::int32_t>();
    const auto all_tokens = token_ids.download<std::int32_t>();
    const auto all_parents = parents.download<std::int32_t>();
    const auto all_depths = depths.download<std::int32_t>();
    std::vector<BuiltTree> trees;
    for (std::int64_t s = 0; s < sequences; ++s) {
      const auto count = counts[static_cast<std::size_t>(s)];
      EXPECT_GE(count, 1);
      EXPECT_LE(count, budget + 1);
      const auto cut = [&](const std::vector<std::int32_t>& values) {
        auto row = row_of(values, s, max_nodes);
        row.resize(static_cast<std::size_t>(std::clamp<std::int64_t>(count, 0, max_nodes)));
        return row;
      };
      trees.push_back({cut(all_tokens), cut(all_parents), cut(all_depths)});
    }
    return trees;
  }

  void expect_brute_force(const Draft& draft, std::int64_t budget, std::int64_t spare_nodes) {
    const auto got = build(draft, budget, budget + 1 + spare_nodes);
    for (std::size_t s = 0; s < draft.roots.size(); ++s) {
      const BuiltTree want = brute_force(draft, s, budget);
      EXPECT_EQ(got[s].token_ids, want.token_ids) << "sequence " << s << " budget " << budget;
      EXPECT_EQ(got[s].parents, want.parents) << "sequence " << s << " budget " << budget;
      EXPECT_EQ(got[s].depths, want.depths) << "sequence " << s << " budget " << budget;
    }
  }

  // Descending log-probabilities from `values`; random tokens, 0 among them.
  static Draft random_draft(Random& random, std::int64_t sequences, std::int64_t horizon,
                            std::int64_t k, bool tied) {
    Draft draft = {.horizon = horizon,
                   .k = k,
                   .log_probs = {},
                   .candidates = random.integers(sequences * horizon * k, 5),
                   .roots = random.integers(sequences, 5)};
    for (std::int64_t slot = 0; slot < sequences * horizon; ++slot) {
      auto row = random.floats(k, -6, 0);
      for (float& value : row) {
        // Multiples of 1/4 have exact sums, so that many prefixes are equally probable.
        value = tied ? std::round(value) / 4 : value;
      }
      std::sort(row.rbegin(), row.rend());
      draft.log_probs.insert(draft.log_probs.end(), row.begin(), row.end());
    }
    return draft;
  }
};
KDTREE_TEST_ALL_BACKENDS(BuildTreesTest);

TEST_P(BuildTreesTest, EqualsBruteForce) {
  Random random(1);
  for (const auto& [horizon, k] :
       {std::pair{1, 1}, {1, 9}, {2, 5}, {3, 7}, {5, 4}, {7, 2}, {7, 1}, {2, 40}}) {
    for (const std::int64_t budget : {0, 1, 2, 3, 7, 16, 63, 64, 200, 512}) {
      for (const bool tied : {false, true}) {
        expect_brute_force(random_draft(random, 1, horizon, k, tied), budget, budget % 3);
      }
    }
  }
}

TEST_P(BuildTreesTest, SeveralSequences) {
  Random random(2);
  for (const bool tied : {false, true}) {
    expect_brute_force(random_draft(random, 6, 4, 4, tied), 30, 5);
  }
  EXPECT_TRUE(build(random_draft(random, 0, 3, 2, false), 4, 5).empty());
}

// All log-probabilities zero: everything is tied, and the order is that of the rank tuples alone.
TEST_P(BuildTreesTest, AllTied) {
  Random random(3);
  for (const std::int64_t budget : {1, 5, 20, 84, 100}) {
    Draft draft = random_draft(random, 1, 3, 4, false);
    std::fill(draft.log_probs.begin(), draft.log_probs.end(), 0.0F);
    expect_brute_force(draft, budget, 0);
  }
}

TEST_P(BuildTreesTest, UnusableCandidatesEndTheirSlot) {
  Random random(4);
  for (int repeat = 0; repeat < 60; ++repeat) {
    Draft draft = random_draft(random, 3, 3, 5, repeat % 2 == 0);
    for (int i = 0; i < 6; ++i) {
      const auto place =
          static_cast<std::size_t>(random.below(static_cast<std::int64_t>(draft.log_probs.size())));
      switch (random.below(3)) {
        case 0:
          draft.log_probs[place] = kNanLogProb;
          break;
        case 1:
          draft.log_probs[place] = -kInfiniteLogProb;
          break;
        default:
          draft.candidates[place] = -1;
      }
    }
    expect_brute_force(draft, 40, 0);
  }
}

TEST_P(BuildTreesTest, NothingToDraft) {
  const Draft no_horizon = {
      .horizon = 0, .k = 3, .log_probs = {}, .candidates = {}, .roots = {11, 0}};
  EXPECT_EQ(build(no_horizon, 4, 5), (std::vector<BuiltTree>{{{11}, {-1}, {0}}, {{0}, {-1}, {0}}}));
  const Draft no_candidates = {
      .horizon = 2, .k = 0, .log_probs = {}, .candidates = {}, .roots = {7}};
  EXPECT_EQ(build(no_candidates, 4, 5), (std::vector<BuiltTree>{{{7}, {-1}, {0}}}));
  const Draft all_nan = {
      .horizon = 1, .k = 2, .log_probs = {kNanLogProb, 0}, .candidates = {1, 2}, .roots = {7}};
  EXPECT_EQ(build(all_nan, 4, 5), (std::vector<BuiltTree>{{{7}, {-1}, {0}}}));
}

// A worked example: budget 4 over two slots. Weights: a .6, b .3; then c .5, d .4. Prefixes: a .6,
// ac .3, b .3, ad .24, bc .15; the tie of ac (0, 0) and b (1) goes to the smaller tuple.
TEST_P(BuildTreesTest, WorkedExample) {
  const Draft draft = {.horizon = 2,
                       .k = 2,
                       .log_probs = {-0.5F, -1.25F, -0.75F, -1.0F},
                       .candidates = {10, 11, 20, 21},
                       .roots = {9}};
  EXPECT_EQ(build(draft, 4, 5),
            (std::vector<BuiltTree>{{{9, 10, 20, 11, 21}, {-1, 0, 1, 0, 1}, {0, 1, 2, 1, 2}}}));
}

// Weights add up in float64: in float32 the two paths below would tie, and the wrong one would win.
TEST_P(BuildTreesTest, WeightsAreFloat64) {
  const float tiny = 0x1p-30F;
  const Draft draft = {.horizon = 2,
                       .k = 2,
                       .log_probs = {-1.0F, -1.0F - 0x1p-23F, -0x1p-23F - tiny, -5.0F},
                       .candidates = {10, 11, 20, 21},
                       .roots = {9}};
  // (0, 0) weighs -1 - 2^-23 - 2^-30, just below (1).
  EXPECT_EQ(build(draft, 2, 3), (std::vector<BuiltTree>{{{9, 10, 11}, {-1, 0, 0}, {0, 1, 1}}}));
}

TEST_P(BuildTreesTest, LargestBudgetOverWideSlots) {
  Random random(5);
  expect_brute_force(random_draft(random, 1, 2, 128, false), 512, 0);
  expect_brute_force(random_draft(random, 1, 1, 512, true), 512, 0);
}

TEST_P(BuildTreesTest, MalformedShapesThrow) {
  Random random(6);
  const Draft draft = random_draft(random, 2, 3, 4, false);
  EXPECT_THROW(build(draft, 5, 5), Error);  // no room for the root
  EXPECT_THROW(build(draft, -1, 5), Error);
  auto log_probs = make_tensor(backend(), {6, 4}, draft.log_probs);
  auto narrow = make_tensor(backend(), {8, 3}, draft.candidates);
  auto roots = make_indices(backend(), draft.roots);
  GuardedTensor num_nodes(backend(), DType::kInt32, {2});
  GuardedTensor nodes(backend(), DType::kInt32, {2, 9});
  const TreeArrays trees = {num_nodes.view(), nodes.view(), nodes.view(), nodes.view()};
  EXPECT_THROW(backend().build_trees({log_probs.view(), narrow.view(), 3, roots.view(), 8, trees}),
               Error);
}

}  // namespace
}  // namespace kdtree::ops_test
