// Device memory for the rows of a step, and how trees and prompt chunks become rows.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/backend.h"
#include "kernels/device_tensor.h"

namespace kdtree {

// One sequence's part of a step, on the host.
struct SequenceRows {
  std::int32_t slot = 0;           // place in the caches
  std::int32_t prefix_length = 0;  // committed rows
  std::span<const std::int32_t> token_ids;
  // Parent index of each node, -1 for the root, parent < node. Empty: a chain (a piece of a prompt,
  // a drafter's block).
  std::span<const std::int32_t> parents;
};

class TreeBatchStorage {
 public:
  // Room for max_rows rows of max_sequences sequences, trees of at most max_nodes nodes.
  TreeBatchStorage(Backend& backend, std::int64_t max_rows, std::int64_t max_sequences,
                   std::int64_t max_nodes);

  // Uploads the rows of these sequences; either all have parents or none has. The views stay valid
  // until the next call. Error if they exceed the room or a tree is malformed.
  TreeBatch fill(std::span<const SequenceRows> sequences);

  // Device memory that the constructor takes.
  static std::int64_t bytes(std::int64_t max_rows, std::int64_t max_sequences,
                            std::int64_t max_nodes);

 private:
  void append_sequence(const SequenceRows& sequence, std::int32_t index, bool trees);

  Backend& backend_;
  std::int64_t max_nodes_;
  std::int64_t mask_words_;
  DeviceTensor token_ids_;
  DeviceTensor positions_;
  DeviceTensor sequence_index_;
  DeviceTensor slots_;
  DeviceTensor prefix_lengths_;
  DeviceTensor row_offsets_;
  DeviceTensor ancestor_mask_;

  // Host copies, filled anew by each call.
  std::vector<std::int32_t> host_token_ids_;
  std::vector<std::int32_t> host_positions_;
  std::vector<std::int32_t> host_sequence_index_;
  std::vector<std::int32_t> host_slots_;
  std::vector<std::int32_t> host_prefix_lengths_;
  std::vector<std::int32_t> host_row_offsets_;
  std::vector<std::int64_t> host_masks_;
};

}  // namespace kdtree
