// What a decoding step reads and writes on the device: the sequences it advances, the rows of its
// three passes (verify, draft, drafter's context), its two control blocks. All sizes are fixed by
// the number of sequences, so that a step can be recorded once and replayed.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/partition.h"
#include "kernels/device_tensor.h"
#include "speculative/draft_tree.h"

namespace kdtree {

struct StepShape {
  std::int64_t max_sequences = 1;
  std::int64_t max_nodes =
      1;  // rows of a sequence in the verify pass: its tree, root included, and padding
  std::int64_t block_size = 0;  // of the drafter; 0 without
  std::int64_t max_path = 1;    // rows of a sequence in the drafter's context pass
};

// A running sequence as every rank knows it.
struct RunningSequence {
  std::int32_t slot = 0;           // place in the caches
  std::int32_t prefix_length = 0;  // committed rows
  std::int32_t root_token = 0;     // chosen by the target, not yet in the cache
};

// Those of the listed sequences that belong to this rank's attention group; they stand side by
// side.
struct OwnSequences {
  Range listed;                 // indices into the list
  std::int32_t first_slot = 0;  // that the slots of the group's cache count from
};

class StepState {
 public:
  StepState(Backend& backend, const StepShape& shape);

  // Sets the sequences that the next steps advance. Steps keep prefix lengths and roots up to date
  // by themselves (advance): call it again only when the set changes.
  void set_sequences(Backend& backend, std::span<const RunningSequence> sequences,
                     const OwnSequences& own);
  // All of them are this rank's.
  void set_sequences(Backend& backend, std::span<const RunningSequence> sequences);
  std::int64_t num_sequences() const { return num_sequences_; }

  TreeBlock& trees() { return trees_; }
  AcceptBlock& accepted() { return accepted_; }
  ConstTensorView roots() const { return roots_.rows(num_sequences_); }

  // The drafter's blocks, from roots and prefix lengths.
  TreeBatch expand_blocks(Backend& backend, std::int32_t mask_token_id);
  // The verify pass, from the tree block.
  TreeBatch expand_trees(Backend& backend);
  // Of its rows those of this rank's group, with slots of the group's cache; and the first of them.
  TreeBatch own_trees(const TreeBatch& trees) const;
  std::int64_t first_own_row() const { return own_.listed.begin * shape_.max_nodes; }
  std::int64_t num_own_sequences() const { return own_.listed.size(); }
  // The accepted nodes, from the accept block: the drafter's context rows behind the prefixes, and
  // which rows of the verify pass they are.
  struct AcceptedRows {
    TreeBatch batch;
    ConstTensorView rows;  // [sequences * max_path]
  };
  AcceptedRows accepted_rows(Backend& backend);
  // Slots, prefix lengths and paths for compacting the cache of this rank's group.
  CompactParams compact_params() const;
  // Prefix lengths and roots of the next step.
  void advance(Backend& backend);

  static std::int64_t bytes(const StepShape& shape);

 private:
  // Rows of one kind of pass: `rows_per_sequence` of each sequence, in order.
  struct Rows {
    Rows(Backend& backend, std::int64_t max_sequences, std::int64_t rows_of_each);
    std::int64_t rows_per_sequence;
    DeviceTensor token_ids;       // [sequences * rows_per_sequence]
    DeviceTensor positions;       // the same
    DeviceTensor sequence_index;  // row / rows_per_sequence
    DeviceTensor row_offsets;     // [sequences + 1]
  };
  TreeBatch batch_of(const Rows& rows) const;

  StepShape shape_;
  std::int64_t num_sequences_ = 0;
  OwnSequences own_;
  DeviceTensor slots_;
  DeviceTensor cache_slots_;  // the same, counted from own_.first_slot
  DeviceTensor prefix_lengths_;
  DeviceTensor roots_;
  Rows verify_;
  Rows block_;
  Rows context_;
  DeviceTensor ancestor_mask_;  // [sequences * max_nodes, words]
  DeviceTensor context_rows_;   // [sequences, max_path]
  TreeBlock trees_;
  AcceptBlock accepted_;
};

}  // namespace kdtree
