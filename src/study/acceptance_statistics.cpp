#include "study/acceptance_statistics.h"

#include <algorithm>
#include <cmath>
#include <set>

#include "core/check.h"

namespace kdtree {

namespace {

double ratio(std::int64_t part, std::int64_t whole) {
  return whole == 0 ? 0 : static_cast<double>(part) / static_cast<double>(whole);
}

void count_at(std::vector<std::int64_t>& counts, std::size_t index) {
  if (counts.size() <= index) {
    counts.resize(index + 1);
  }
  ++counts[index];
}

bool is_near_tie(const Result& result, std::int64_t token) {
  return std::find(result.near_ties.begin(), result.near_ties.end(), token) !=
         result.near_ties.end();
}

}  // namespace

double expected_distinct_experts(std::int64_t num_experts, std::int64_t num_experts_per_tok,
                                 std::int64_t num_rows) {
  const auto experts = static_cast<double>(num_experts);
  const double left_alone = 1 - ratio(num_experts_per_tok, num_experts);
  return experts * (1 - std::pow(left_alone, static_cast<double>(num_rows)));
}

std::int64_t num_distinct_experts(const ExpertChoices& choices, std::int64_t layer) {
  std::set<std::int32_t> experts;
  for (std::int64_t node = 0; node < choices.num_nodes(); ++node) {
    const auto chosen = choices.of(layer, node);
    experts.insert(chosen.begin(), chosen.end());
  }
  return std::ssize(experts);
}

AcceptanceCounter::AcceptanceCounter(const AcceptanceSizes& sizes)
    : sizes_(sizes), reached_(static_cast<std::size_t>(sizes.draft_horizon + 1)) {}

void AcceptanceCounter::add(const StepView& step) {
  const std::size_t length = step.accepted.nodes.size();
  check(length >= 1 && length <= reached_.size(), "a path of {} nodes, expected 1 to {}", length,
        reached_.size());
  ++num_steps_;
  num_nodes_ += step.tree.num_nodes();
  for (std::size_t depth = 0; depth < length; ++depth) {
    ++reached_[depth];
  }
  add_branches(step.tree, step.accepted);
  if (step.experts.num_layers() > 0) {
    add_experts(step.experts);
  }
}

// A builder adds a node's children in the order of their candidates, so the earlier ones are the
// better ones.
void AcceptanceCounter::add_branches(const DraftTree& tree, const AcceptedPath& accepted) {
  std::vector<std::size_t> num_children(tree.parents.size());
  std::vector<std::size_t> branch_ranks(tree.parents.size());
  for (std::size_t node = 1; node < tree.parents.size(); ++node) {
    branch_ranks[node] = num_children.at(static_cast<std::size_t>(tree.parents[node]))++;
    count_at(nodes_by_branch_rank_, branch_ranks[node]);
  }
  accepted_by_branch_rank_.resize(nodes_by_branch_rank_.size());
  for (std::size_t i = 1; i < accepted.nodes.size(); ++i) {
    ++accepted_by_branch_rank_[branch_ranks.at(static_cast<std::size_t>(accepted.nodes[i]))];
  }
}

void AcceptanceCounter::add_experts(const ExpertChoices& choices) {
  const auto num_layers = static_cast<std::size_t>(choices.num_layers());
  check(layers_.empty() || layers_.size() == num_layers, "{} MoE layers in a step, {} before",
        num_layers, layers_.size());
  const bool first = layers_.empty();
  layers_.resize(num_layers);
  for (std::size_t layer = 0; layer < num_layers; ++layer) {
    const std::int64_t count = num_distinct_experts(choices, static_cast<std::int64_t>(layer));
    LayerCount& counted = layers_[layer];
    counted.sum += count;
    counted.min = first ? count : std::min(counted.min, count);
    counted.max = std::max(counted.max, count);
  }
  expected_experts_ += expected_distinct_experts(sizes_.n_routed_experts,
                                                 sizes_.num_experts_per_tok, choices.num_nodes());
}

AcceptanceSummary AcceptanceCounter::summary() const {
  AcceptanceSummary summary;
  summary.num_steps = num_steps_;
  summary.nodes_per_step = ratio(num_nodes_, num_steps_);
  for (std::size_t depth = 0; depth < reached_.size(); ++depth) {
    summary.acceptance_length += ratio(reached_[depth], num_steps_);
    if (depth > 0) {
      summary.per_depth.push_back(ratio(reached_[depth], num_steps_));
      const std::int64_t parents = reached_[depth - 1];
      summary.per_depth_given_parent.push_back(
          parents == 0 ? std::nullopt : std::optional(ratio(reached_[depth], parents)));
    }
  }
  summary.nodes_by_branch_rank = nodes_by_branch_rank_;
  summary.accepted_by_branch_rank = accepted_by_branch_rank_;
  if (layers_.empty()) {
    return summary;
  }
  for (const LayerCount& layer : layers_) {
    summary.experts.push_back(
        {.mean = ratio(layer.sum, num_steps_), .min = layer.min, .max = layer.max});
    summary.mean_experts += summary.experts.back().mean / static_cast<double>(layers_.size());
  }
  summary.expected_experts = expected_experts_ / static_cast<double>(num_steps_);
  summary.experts_over_one_row =
      summary.mean_experts / static_cast<double>(sizes_.num_experts_per_tok);
  return summary;
}

OutputDifference compare_outputs(std::span<const Result> results, std::span<const Result> plain) {
  check(results.size() == plain.size(), "{} results compared with {}", results.size(),
        plain.size());
  OutputDifference difference;
  for (std::size_t i = 0; i < results.size(); ++i) {
    const auto& ids = results[i].output_ids;
    const auto& plain_ids = plain[i].output_ids;
    if (ids == plain_ids) {
      continue;
    }
    ++difference.num_different;
    const auto [at, other] =
        std::mismatch(ids.begin(), ids.end(), plain_ids.begin(), plain_ids.end());
    const std::int64_t token = at - ids.begin();
    if (is_near_tie(results[i], token) || is_near_tie(plain[i], token)) {
      ++difference.num_at_near_ties;
    }
  }
  return difference;
}

}  // namespace kdtree
