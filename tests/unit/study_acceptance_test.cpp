// Counting of accepted nodes and of the experts that trees touch; windows of a text.
#include <gtest/gtest.h>

#include <cmath>
#include <numeric>

#include "core/check.h"
#include "study/acceptance_statistics.h"
#include "study/text_windows.h"

namespace kdtree {
namespace {

using Ids = std::vector<std::int32_t>;

// Depths follow from the parents; tokens do not matter.
DraftTree tree_of(const Ids& parents) {
  DraftTree tree{.token_ids = Ids(parents.size(), 7), .parents = parents, .depths = {}};
  for (const std::int32_t parent : parents) {
    tree.depths.push_back(parent < 0 ? 0 : tree.depths[static_cast<std::size_t>(parent)] + 1);
  }
  return tree;
}

AcceptedPath path_of(const Ids& nodes) {
  return {.nodes = nodes, .bonus_token = 1, .choices = {}};
}

void add(AcceptanceCounter& counter, const Ids& parents, const Ids& path,
         const ExpertChoices& experts = {}) {
  const DraftTree tree = tree_of(parents);
  const AcceptedPath accepted = path_of(path);
  counter.add({.request_index = 0, .tree = tree, .accepted = accepted, .experts = experts});
}

TEST(AcceptanceCounterTest, NothingWithoutSteps) {
  const AcceptanceSummary none =
      AcceptanceCounter({.draft_horizon = 2, .n_routed_experts = 8, .num_experts_per_tok = 2})
          .summary();
  EXPECT_EQ(none.num_steps, 0);
  EXPECT_EQ(none.acceptance_length, 0);
  EXPECT_EQ(none.per_depth, (std::vector<double>{0, 0}));
  EXPECT_EQ(none.per_depth_given_parent,
            (std::vector<std::optional<double>>{std::nullopt, std::nullopt}));
  EXPECT_TRUE(none.experts.empty());
}

TEST(AcceptanceCounterTest, DepthsAndBranches) {
  AcceptanceCounter counter({.draft_horizon = 3, .n_routed_experts = 8, .num_experts_per_tok = 2});
  // The root has the children 1 and 2, node 1 has 3, node 2 has 4 and 5.
  const Ids tree = {-1, 0, 0, 1, 2, 2};
  add(counter, tree, {0});
  add(counter, tree, {0, 1});
  add(counter, tree, {0, 2, 5});
  add(counter, {-1, 0}, {0, 1});
  const AcceptanceSummary summary = counter.summary();
  EXPECT_EQ(summary.num_steps, 4);
  EXPECT_EQ(summary.acceptance_length, (1 + 2 + 3 + 2) / 4.0);
  EXPECT_EQ(summary.nodes_per_step, (6 + 6 + 6 + 2) / 4.0);
  EXPECT_EQ(summary.per_depth, (std::vector<double>{0.75, 0.25, 0}));
  EXPECT_EQ(summary.per_depth_given_parent,
            (std::vector<std::optional<double>>{0.75, 1 / 3.0, 0.0}));
  // Best children: 1, 3 and 4 of each large tree and 1 of the small one.
  EXPECT_EQ(summary.nodes_by_branch_rank, (std::vector<std::int64_t>{10, 6}));
  EXPECT_EQ(summary.accepted_by_branch_rank, (std::vector<std::int64_t>{2, 2}));
  EXPECT_THROW(add(counter, {-1, 0, 1, 2, 3}, {0, 1, 2, 3, 4}), Error);
}

// Two layers of a step of two sequences with room for three nodes each, two experts a row; rows 0
// to 2 belong to the first sequence. Experts 90 and on stand in rows that must not be counted.
const Ids kStepExperts = {
    0, 1, 1, 2, 90, 91, 92, 93, 94, 95, 96, 97,  // layer 0: nodes {0, 1}, {1, 2}
    3, 4, 4, 3, 98, 99, 90, 91, 92, 93, 94, 95,  // layer 1: nodes {3, 4}, {4, 3}
};
constexpr ExpertChoices::Layout kLayout = {
    .num_layers = 2, .step_rows = 6, .first_row = 0, .num_nodes = 2, .num_experts_per_tok = 2};

TEST(ExpertChoicesTest, RowsOfOneTree) {
  const ExpertChoices first(kStepExperts, kLayout);
  EXPECT_EQ(num_distinct_experts(first, 0), 3);
  EXPECT_EQ(num_distinct_experts(first, 1), 2);
  ExpertChoices::Layout second = kLayout;
  second.first_row = 3;
  second.num_nodes = 1;
  const ExpertChoices other(kStepExperts, second);
  EXPECT_EQ(Ids(other.of(0, 0).begin(), other.of(0, 0).end()), (Ids{92, 93}));
  EXPECT_EQ(Ids(other.of(1, 0).begin(), other.of(1, 0).end()), (Ids{90, 91}));
  second.num_nodes = 4;
  EXPECT_THROW(ExpertChoices(kStepExperts, second), Error);
  second = kLayout;
  second.num_layers = 3;
  EXPECT_THROW(ExpertChoices(kStepExperts, second), Error);
}

TEST(AcceptanceCounterTest, DistinctExpertsByLayer) {
  AcceptanceCounter counter({.draft_horizon = 1, .n_routed_experts = 8, .num_experts_per_tok = 2});
  const ExpertChoices two_nodes(kStepExperts, kLayout);
  ExpertChoices::Layout root_only = kLayout;
  root_only.num_nodes = 1;
  add(counter, {-1, 0}, {0, 1}, two_nodes);
  add(counter, {-1}, {0}, ExpertChoices(kStepExperts, root_only));
  const AcceptanceSummary summary = counter.summary();
  ASSERT_EQ(summary.experts.size(), 2U);
  EXPECT_EQ(summary.experts[0].mean, 2.5);
  EXPECT_EQ(summary.experts[0].min, 2);
  EXPECT_EQ(summary.experts[0].max, 3);
  EXPECT_EQ(summary.experts[1].mean, 2);
  EXPECT_EQ(summary.experts[1].min, 2);
  EXPECT_EQ(summary.experts[1].max, 2);
  EXPECT_EQ(summary.mean_experts, 2.25);
  EXPECT_EQ(summary.experts_over_one_row, 1.125);
  // Two rows of 2 of 8 touch 8 (1 - (3/4)^2) = 3.5, one row 2.
  EXPECT_DOUBLE_EQ(summary.expected_experts, (3.5 + 2) / 2);
}

// All pairs of rows that choose 2 of 4 experts, counted one by one.
TEST(ExpectedExpertsTest, IsTheMeanOverAllChoices) {
  const std::vector<Ids> rows = {{0, 1}, {0, 2}, {0, 3}, {1, 2}, {1, 3}, {2, 3}};
  std::int64_t sum = 0;
  for (const Ids& a : rows) {
    for (const Ids& b : rows) {
      const Ids ids = {a[0], a[1], b[0], b[1]};
      sum += num_distinct_experts(ExpertChoices(ids, {.num_layers = 1,
                                                      .step_rows = 2,
                                                      .first_row = 0,
                                                      .num_nodes = 2,
                                                      .num_experts_per_tok = 2}),
                                  0);
    }
  }
  EXPECT_DOUBLE_EQ(expected_distinct_experts(4, 2, 2), static_cast<double>(sum) / 36);
  EXPECT_EQ(expected_distinct_experts(4, 2, 1), 2);
  EXPECT_EQ(expected_distinct_experts(4, 4, 3), 4);
  EXPECT_EQ(expected_distinct_experts(4, 2, 0), 0);
}

Result result_of(const Ids& output_ids, const std::vector<std::int64_t>& near_ties) {
  Result result;
  result.output_ids = output_ids;
  result.near_ties = near_ties;
  return result;
}

TEST(CompareOutputsTest, CountsFirstDifferencesAtNearTies) {
  const std::vector<Result> plain = {result_of({1, 2, 3}, {2}), result_of({1, 2, 3}, {}),
                                     result_of({1, 2, 3}, {0}), result_of({1, 2}, {})};
  const std::vector<Result> others = {result_of({1, 2, 4}, {}), result_of({1, 5, 3}, {1}),
                                      result_of({1, 2, 9}, {0, 1}), result_of({1, 2}, {1})};
  const OutputDifference difference = compare_outputs(others, plain);
  EXPECT_EQ(difference.num_different, 3);
  EXPECT_EQ(difference.num_at_near_ties, 2);
  EXPECT_EQ(compare_outputs(plain, plain).num_different, 0);
  EXPECT_THROW(compare_outputs(others, std::span(plain).first(1)), Error);
}

// [begin, end) of each window and its first scored token, as positions of the text 0, 1, 2, ...
std::vector<std::vector<std::int64_t>> cut(std::int64_t num_tokens, const WindowCut& how) {
  Ids ids(static_cast<std::size_t>(num_tokens));
  std::iota(ids.begin(), ids.end(), 0);
  std::vector<std::vector<std::int64_t>> places;
  for (const ScoreWindow& window : cut_windows(ids, how)) {
    places.push_back({window.token_ids.front(), window.token_ids.back() + 1,
                      window.token_ids.front() + window.first_scored});
  }
  return places;
}

TEST(TextWindowsTest, SideBySideAndOverlapping) {
  using Places = std::vector<std::vector<std::int64_t>>;
  const WindowCut side_by_side = {.window = 4, .stride = 4, .max_windows = 0};
  EXPECT_EQ(cut(8, side_by_side), (Places{{0, 4, 1}, {4, 8, 5}}));
  EXPECT_EQ(cut(10, side_by_side), (Places{{0, 4, 1}, {4, 8, 5}, {8, 10, 9}}));
  EXPECT_EQ(cut(9, side_by_side), (Places{{0, 4, 1}, {4, 8, 5}}));  // nothing behind token 8
  EXPECT_EQ(cut(3, side_by_side), (Places{{0, 3, 1}}));
  EXPECT_EQ(cut(1, side_by_side), Places{});
  EXPECT_EQ(cut(0, side_by_side), Places{});
  EXPECT_EQ(cut(10, {.window = 4, .stride = 4, .max_windows = 1}), (Places{{0, 4, 1}}));
  const WindowCut overlapping = {.window = 4, .stride = 3, .max_windows = 0};
  EXPECT_EQ(cut(10, overlapping), (Places{{0, 4, 1}, {3, 7, 4}, {6, 10, 7}}));
  EXPECT_EQ(cut(8, {.window = 4, .stride = 1, .max_windows = 0}),
            (Places{{0, 4, 1}, {1, 5, 4}, {2, 6, 5}, {3, 7, 6}, {4, 8, 7}}));
  EXPECT_THROW(cut(8, {.window = 4, .stride = 5, .max_windows = 0}), Error);
  EXPECT_THROW(cut(8, {.window = 1, .stride = 1, .max_windows = 0}), Error);
}

}  // namespace
}  // namespace kdtree
