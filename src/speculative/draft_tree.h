// Draft trees on the host, and the two control blocks of a step.
#pragma once

#include <cstdint>
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

  // The arrays of the first `num_sequences` sequences, for the builder and the verify pass.
  TreeArrays arrays(std::int64_t num_sequences) const;
  const TensorView& tensor() const { return block_.view(); }

  // Reads the first `num_sequences` trees. Error if one has an impossible number of nodes.
  std::vector<DraftTree> download(Backend& backend, std::int64_t num_sequences);

  // Size of the block in int32.
  static std::int64_t words(std::int64_t max_sequences, std::int64_t max_nodes);

 private:
  std::int64_t max_sequences_;
  std::int64_t max_nodes_;
  DeviceTensor block_;
  std::vector<std::int32_t> host_;
};

// What a step accepted of one sequence.
struct AcceptedPath {
  std::vector<std::int32_t> nodes;  // accepted tree nodes with the root, ascending
  std::int32_t bonus_token = 0;     // the target's token behind the path: the next root
};

// Second control block: accepted paths and bonus tokens, one fixed-size tensor that is broadcast as
// it is.
class AcceptBlock {
 public:
  AcceptBlock(Backend& backend, std::int64_t max_sequences, std::int64_t max_path);

  // Where the accept op writes for the first `num_sequences` sequences.
  TensorView path_lengths(std::int64_t num_sequences) const;
  TensorView paths(std::int64_t num_sequences) const;
  TensorView bonus_tokens(std::int64_t num_sequences) const;
  const TensorView& tensor() const { return block_.view(); }

  // Reads the first `num_sequences` paths. Error if one has an impossible length.
  std::vector<AcceptedPath> download(Backend& backend, std::int64_t num_sequences);

  // Size of the block in int32.
  static std::int64_t words(std::int64_t max_sequences, std::int64_t max_path);

 private:
  std::int64_t max_sequences_;
  std::int64_t max_path_;
  DeviceTensor block_;
  std::vector<std::int32_t> host_;
};

}  // namespace kdtree
