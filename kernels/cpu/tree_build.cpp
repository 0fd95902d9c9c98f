// Best-first draft trees: the most probable prefixes under independent distributions per depth
// (DDTree's Algorithm 1).
#include <algorithm>
#include <cmath>
#include <span>
#include <vector>

#include "kernels/cpu/cpu_backend.h"
#include "kernels/cpu/scalar_math.h"
#include "kernels/cpu/shapes.h"

namespace kdtree {
namespace {

// A node that could be taken next.
struct Entry {
  double log_weight = 0;         // of the path from the root to this node
  double parent_log_weight = 0;  // kept: a sibling's weight is one addition, never a difference
  std::int32_t parent = 0;       // node index
  std::int32_t depth = 0;        // the root's children have 1
  std::int32_t rank = 0;         // place among the candidates of its depth
  std::size_t tuple = 0;         // its rank tuple, `depth` ranks from the root down, in the arena
};

// Memory of one builder; kept from step to step, so that it only grows.
struct BuildScratch {
  std::vector<Entry> heap;
  std::vector<std::int32_t> ranks;       // the tuples' arena
  std::vector<std::int64_t> num_usable;  // [draft_horizon]
};

class TreeBuilder {
 public:
  TreeBuilder(const TreeBuildParams& params, std::int64_t sequence, BuildScratch& scratch)
      : params_(params), sequence_(sequence), scratch_(scratch) {}

  void build() {
    reset();
    write_node(0, params_.roots.data<std::int32_t>()[sequence_], -1, 0);
    std::int32_t num_nodes = 1;
    push(Entry{.depth = 1}, {});
    while (num_nodes <= params_.tree_budget && !scratch_.heap.empty()) {
      const Entry taken = pop();
      const std::int32_t node = num_nodes++;
      write_node(node, candidates(taken.depth)[taken.rank], taken.parent, taken.depth);
      // The next candidate of the same parent, then the first one below this node.
      Entry sibling = taken;
      ++sibling.rank;
      push(sibling, tuple_of(taken).first(static_cast<std::size_t>(taken.depth - 1)));
      push(Entry{.parent_log_weight = taken.log_weight, .parent = node, .depth = taken.depth + 1},
           tuple_of(taken));
    }
    params_.trees.num_nodes.data<std::int32_t>()[sequence_] = num_nodes;
  }

 private:
  void reset() {
    scratch_.heap.clear();
    scratch_.ranks.clear();
    // Each node taken pushes at most two entries.
    const auto entries = static_cast<std::size_t>(2 * params_.tree_budget + 1);
    scratch_.heap.reserve(entries);
    scratch_.ranks.reserve(entries * static_cast<std::size_t>(params_.draft_horizon));
    scratch_.num_usable.resize(static_cast<std::size_t>(params_.draft_horizon));
    for (std::int32_t depth = 1; depth <= params_.draft_horizon; ++depth) {
      std::int64_t count = 0;
      while (count < params_.candidates.size(1) && candidates(depth)[count] >= 0 &&
             log_probs(depth)[count] > kMinusInfinity) {  // false for NaN
        ++count;
      }
      scratch_.num_usable[static_cast<std::size_t>(depth - 1)] = count;
    }
  }

  const float* log_probs(std::int32_t depth) const {
    return params_.log_probs.row<float>(sequence_ * params_.draft_horizon + depth - 1);
  }
  const std::int32_t* candidates(std::int32_t depth) const {
    return params_.candidates.row<std::int32_t>(sequence_ * params_.draft_horizon + depth - 1);
  }
  std::span<const std::int32_t> tuple_of(const Entry& entry) const {
    return std::span(scratch_.ranks).subspan(entry.tuple, static_cast<std::size_t>(entry.depth));
  }

  // Heap order: the entry that comes last is at the front of what remains, so "less" is "taken
  // later".
  bool is_later(const Entry& a, const Entry& b) const {
    if (a.log_weight != b.log_weight) {
      return a.log_weight < b.log_weight;
    }
    const auto tuple_a = tuple_of(a);
    const auto tuple_b = tuple_of(b);
    return std::lexicographical_compare(tuple_b.begin(), tuple_b.end(), tuple_a.begin(),
                                        tuple_a.end());
  }

  // Adds an entry, if its depth and rank exist; log_weight and tuple are filled in here.
  void push(Entry entry, std::span<const std::int32_t> parent_tuple) {
    if (entry.depth > params_.draft_horizon ||
        entry.rank >= scratch_.num_usable[static_cast<std::size_t>(entry.depth - 1)]) {
      return;
    }
    entry.log_weight =
        entry.parent_log_weight + static_cast<double>(log_probs(entry.depth)[entry.rank]);
    entry.tuple = scratch_.ranks.size();
    // Within the reserved memory: the source, a part of the same vector, does not move.
    for (const std::int32_t rank : parent_tuple) {
      scratch_.ranks.push_back(rank);
    }
    scratch_.ranks.push_back(entry.rank);
    scratch_.heap.push_back(entry);
    std::push_heap(scratch_.heap.begin(), scratch_.heap.end(),
                   [this](const Entry& a, const Entry& b) { return is_later(a, b); });
  }

  Entry pop() {
    std::pop_heap(scratch_.heap.begin(), scratch_.heap.end(),
                  [this](const Entry& a, const Entry& b) { return is_later(a, b); });
    const Entry entry = scratch_.heap.back();
    scratch_.heap.pop_back();
    return entry;
  }

  void write_node(std::int32_t node, std::int32_t token, std::int32_t parent,
                  std::int32_t depth) const {
    params_.trees.token_ids.row<std::int32_t>(sequence_)[node] = token;
    params_.trees.parents.row<std::int32_t>(sequence_)[node] = parent;
    params_.trees.depths.row<std::int32_t>(sequence_)[node] = depth;
  }

  const TreeBuildParams& params_;
  std::int64_t sequence_;
  BuildScratch& scratch_;
};

}  // namespace

void CpuBackend::build_trees(const TreeBuildParams& params) {
  check(params.roots.shape().rank() == 1, "roots has {} dimensions, expected 1",
        params.roots.shape().rank());
  const std::int64_t num_sequences = params.roots.size(0);
  read_indices("roots", params.roots, num_sequences);
  check(params.draft_horizon >= 0 && params.tree_budget >= 0, "draft_horizon {} and tree_budget {}",
        params.draft_horizon, params.tree_budget);
  expect_matrix("log_probs", params.log_probs, DType::kFloat32);
  const Shape shape{num_sequences * params.draft_horizon, params.log_probs.size(1)};
  expect_tensor("log_probs [sequences * draft_horizon, K]", params.log_probs, DType::kFloat32,
                shape);
  expect_tensor("candidates [sequences * draft_horizon, K]", params.candidates, DType::kInt32,
                shape);
  const std::int64_t max_nodes = check_trees(params.trees, num_sequences);
  check(params.tree_budget + 1 <= max_nodes,
        "trees of {} nodes and the root do not fit max_nodes {}", params.tree_budget, max_nodes);
  thread_local BuildScratch scratch;
  for (std::int64_t s = 0; s < num_sequences; ++s) {
    TreeBuilder(params, s, scratch).build();
  }
}

}  // namespace kdtree
