// Draft trees on the host and in the two control blocks of a step.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/device_tensor.h"

namespace kdtree {

// A draft tree: node 0 is the root, a token that the target has chosen but not yet seen.
struct DraftTree {
  std::vector<std::int32_t> token_ids;
  std::vector<std::int32_t> parents;  // the root's is -1; parent < node
  std::vector<std::int32_t> depths;   // the root's is 0

  std::int64_t num_nodes() const { return static_cast<std::int64_t>(token_ids.size()); }
};

// First control block: the trees of a step, one fixed-size tensor that is broadcast as it is.
class TreeBlock {
 public:
  TreeBlock(Backend& backend, std::int64_t max_sequences, std::int64_t max_nodes);

  // The arrays of the first `num_sequences` sequences, for the builder.
  TreeArrays arrays(std::int64_t num_sequences) const;
  const TensorView& tensor() const { return block_.view(); }
  std::int64_t max_nodes() const { return max_nodes_; }

  // Writes root-only trees.
  void set_roots(Backend& backend, std::span<const std::int32_t> roots);
  // Reads the first `num_sequences` trees. Error if a tree is malformed.
  std::vector<DraftTree> download(Backend& backend, std::int64_t num_sequences);

 private:
  std::int64_t max_sequences_;
  std::int64_t max_nodes_;
  DeviceTensor block_;
  std::vector<std::int32_t> host_;
};

// What rank 0 decided at the end of a step.
enum class NextAction : std::int32_t { kStop = 0, kDecode = 1, kPrefill = 2 };

struct AcceptedSequence {
  std::vector<std::int32_t> path;  // accepted nodes with the root, ascending; empty after a prompt
  std::int32_t bonus_token = 0;    // the target's token behind the path: the next root
  bool finished = false;
};

struct StepDecision {
  std::vector<AcceptedSequence> sequences;  // in the order of the step's batch
  NextAction next = NextAction::kStop;
  std::int32_t prefill_slot = 0;     // kPrefill only
  std::int32_t prefill_request = 0;  // kPrefill only
};

// Second control block: acceptance, stops and what comes next, one fixed-size tensor that is
// broadcast as it is.
class AcceptBlock {
 public:
  AcceptBlock(Backend& backend, std::int64_t max_sequences, std::int64_t max_path);

  // Where the accept op writes for the first `num_sequences` sequences.
  TensorView path_lengths(std::int64_t num_sequences) const;
  TensorView paths(std::int64_t num_sequences) const;
  TensorView bonus_tokens(std::int64_t num_sequences) const;
  const TensorView& tensor() const { return block_.view(); }

  // Reads what the accept op wrote.
  std::vector<AcceptedSequence> download(Backend& backend, std::int64_t num_sequences);
  void upload(Backend& backend, const StepDecision& decision);
  StepDecision download_decision(Backend& backend);

 private:
  TensorView carve(std::int64_t offset, Shape shape) const;

  std::int64_t max_sequences_;
  std::int64_t max_path_;
  DeviceTensor block_;
  std::vector<std::int32_t> host_;
};

}  // namespace kdtree
