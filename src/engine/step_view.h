// What a step did of one sequence, as an observer sees it.
#pragma once

#include <cstdint>
#include <span>

#include "core/check.h"
#include "speculative/draft_tree.h"

namespace kdtree {

// The experts that the router chose for the nodes of one tree. Not owned.
class ExpertChoices {
 public:
  struct Layout {
    std::int64_t num_layers = 0;  // MoE layers; 0: nothing was recorded
    std::int64_t step_rows = 0;   // rows of a layer, those of all sequences and padding
    std::int64_t first_row = 0;   // of the tree's root
    std::int64_t num_nodes = 0;   // of the tree, root included; padding is left out
    std::int64_t num_experts_per_tok = 0;
  };

  ExpertChoices() = default;
  // ids [num_layers, step_rows, num_experts_per_tok]. Error if they are fewer.
  ExpertChoices(std::span<const std::int32_t> ids, const Layout& layout)
      : ids_(ids), layout_(layout) {
    check(std::ssize(ids) >= layout.num_layers * layout.step_rows * layout.num_experts_per_tok &&
              layout.first_row + layout.num_nodes <= layout.step_rows,
          "{} expert ids of {} layers with {} rows", ids.size(), layout.num_layers,
          layout.step_rows);
  }

  std::int64_t num_layers() const { return layout_.num_layers; }
  std::int64_t num_nodes() const { return layout_.num_nodes; }
  // [num_experts_per_tok] logical experts of a node in the `layer`-th of the MoE layers.
  std::span<const std::int32_t> of(std::int64_t layer, std::int64_t node) const {
    const std::int64_t row = layer * layout_.step_rows + layout_.first_row + node;
    return ids_.subspan(static_cast<std::size_t>(row * layout_.num_experts_per_tok),
                        static_cast<std::size_t>(layout_.num_experts_per_tok));
  }

 private:
  std::span<const std::int32_t> ids_;
  Layout layout_;
};

// Valid during the call that hands it over.
struct StepView {
  std::int64_t request_index = 0;
  const DraftTree& tree;
  const AcceptedPath& accepted;
  ExpertChoices experts;  // nothing unless EngineOptions::record_experts
};

}  // namespace kdtree
