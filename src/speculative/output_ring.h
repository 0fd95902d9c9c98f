// What steps leave for the host: a ring of host memory that each step writes from the device, in
// stream order, so that the host reads one step while the next one runs.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "kernels/backend.h"
#include "speculative/draft_tree.h"

namespace kdtree {

// A draft's best candidates of each slot: token and log-probability, best first.
using DraftCandidates = std::vector<std::vector<std::pair<std::int32_t, float>>>;

// What a step did, as the host reads it; an entry for each sequence.
struct StepOutput {
  std::vector<DraftTree> trees;
  std::vector<AcceptedPath> accepted;
  std::vector<DraftCandidates> candidates;  // empty unless they are kept
  // [MoE layers, num_sequences * max_nodes, num_experts_per_tok]; empty unless they are kept
  std::vector<std::int32_t> expert_ids;
};

struct OutputSizes {
  std::int64_t max_sequences = 1;
  std::int64_t max_nodes = 1;    // of a tree, root included
  std::int64_t max_path = 1;     // of a path, root included
  std::int64_t num_choices = 2;  // logits of each node: 2, or 1 where the vocabulary has one token
  // Candidates that are kept of each of the max_path - 1 slots of a draft; 0: none.
  std::int64_t num_candidates = 0;
  std::int64_t num_expert_ids = 0;  // of each node, all layers together; 0: they are not kept
};

// What a step hands over, on the device.
struct StepTensors {
  const TreeBlock& trees;
  const AcceptBlock& accepted;
  // [num_sequences * max_nodes, num_choices] float32, descending; row s * max_nodes + node
  ConstTensorView choice_logits;
  // [num_sequences * (max_path - 1), num_candidates] log-probabilities and token ids, or no data
  ConstTensorView candidate_probs;
  ConstTensorView candidate_ids;
  // [MoE layers, num_sequences * max_nodes, num_experts_per_tok], or no data
  ConstTensorView expert_ids;
};

class OutputRing {
 public:
  // Steps that may be unread at a time.
  static constexpr std::size_t kEntries = 2;

  OutputRing(Backend& backend, const OutputSizes& sizes);

  // Copies what a step hands over into entry `entry`. Part of the step: it may be recorded.
  void write(Backend& backend, std::size_t entry, const StepTensors& step) const;
  // Marks the end of the step that wrote the entry. Outside of a recording.
  void close(Backend& backend, std::size_t entry) const;
  // Waits for the step that closed the entry last and reads it. Error for an impossible tree or
  // path.
  StepOutput read(Backend& backend, std::size_t entry, std::int64_t num_sequences) const;

 private:
  struct Entry {
    Buffer trees;
    Buffer accepted;
    Buffer choice_logits;
    Buffer candidate_probs;
    Buffer candidate_ids;
    Buffer expert_ids;
  };

  DraftCandidates read_candidates(const Entry& from, std::int64_t sequence) const;

  OutputSizes sizes_;
  std::array<Entry, kEntries> entries_;
};

}  // namespace kdtree
