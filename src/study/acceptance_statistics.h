// What speculative decoding accepts, and how many experts its trees touch: counted step by step.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "engine/request.h"
#include "engine/step_view.h"

namespace kdtree {

// Distinct experts that the nodes of one tree chose in one MoE layer, over steps.
struct ExpertSpread {
  double mean = 0;
  std::int64_t min = 0;
  std::int64_t max = 0;
};

// Of steps; everything 0 or empty without any.
struct AcceptanceSummary {
  std::int64_t num_steps = 0;
  double acceptance_length = 0;  // accepted nodes and the bonus token, mean
  double nodes_per_step = 0;     // of a tree, root included, padding left out
  // By depth, from 1 to the draft horizon: share of all steps that accepted a node there, ...
  std::vector<double> per_depth;
  // ... and of those that accepted one in the depth above; none where there were none.
  std::vector<std::optional<double>> per_depth_given_parent;
  // By branch rank, 0 for the best of a node's children, up to the last that a tree had: nodes of
  // all trees without their roots, and the accepted ones of them.
  std::vector<std::int64_t> nodes_by_branch_rank;
  std::vector<std::int64_t> accepted_by_branch_rank;

  std::vector<ExpertSpread> experts;  // a MoE layer each; empty where nothing was recorded
  double mean_experts = 0;            // of the layers' means
  // The same if every row chose by itself and all experts were equally likely.
  double expected_experts = 0;
  double experts_over_one_row = 0;  // mean_experts over what one row touches
};

// Experts of `num_experts` that n rows touch on average if each row chooses k different ones, all
// sets of k equally likely, rows independent of each other: E (1 - (1 - k / E)^n).
double expected_distinct_experts(std::int64_t num_experts, std::int64_t num_experts_per_tok,
                                 std::int64_t num_rows);

// Different experts that the nodes of a tree chose in the `layer`-th of the MoE layers.
std::int64_t num_distinct_experts(const ExpertChoices& choices, std::int64_t layer);

struct AcceptanceSizes {
  std::int64_t draft_horizon = 0;
  std::int64_t n_routed_experts = 0;
  std::int64_t num_experts_per_tok = 0;
};

class AcceptanceCounter {
 public:
  explicit AcceptanceCounter(const AcceptanceSizes& sizes);

  // A step of one sequence. Error for a path beyond the draft horizon, or another number of MoE
  // layers than the steps before had.
  void add(const StepView& step);
  AcceptanceSummary summary() const;

 private:
  struct LayerCount {
    std::int64_t sum = 0;
    std::int64_t min = 0;
    std::int64_t max = 0;
  };

  void add_branches(const DraftTree& tree, const AcceptedPath& accepted);
  void add_experts(const ExpertChoices& choices);

  AcceptanceSizes sizes_;
  std::int64_t num_steps_ = 0;
  std::int64_t num_nodes_ = 0;
  std::vector<std::int64_t> reached_;  // [draft_horizon + 1] steps that accepted at this depth
  std::vector<std::int64_t> nodes_by_branch_rank_;
  std::vector<std::int64_t> accepted_by_branch_rank_;
  std::vector<LayerCount> layers_;
  double expected_experts_ = 0;  // sum over steps
};

// How the outputs of one mode differ from those of plain decoding.
struct OutputDifference {
  std::int64_t num_different = 0;  // results whose output_ids are not equal
  // Of these, such that first differ where either choice was a near-tie: rounding explains them.
  std::int64_t num_at_near_ties = 0;
};
// Results of the same requests in the same order. Error if they are not as many.
OutputDifference compare_outputs(std::span<const Result> results, std::span<const Result> plain);

}  // namespace kdtree
