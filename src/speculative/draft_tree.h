// Draft trees on the host, and the two control blocks of a step.
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

  // The arrays of the first `num_sequences` sequences, for the builder and the verify pass.
  TreeArrays arrays(std::int64_t num_sequences) const;
  const TensorView& tensor() const { return block_.view(); }

  // Size of the block in int32.
  static std::int64_t words(std::int64_t max_sequences, std::int64_t max_nodes);

 private:
  std::int64_t max_sequences_;
  std::int64_t max_nodes_;
  DeviceTensor block_;
};

// The target's two largest logits at a node: their distance says how close the choice was.
struct ChoiceLogits {
  float best = 0;
  float second = 0;  // -infinity where the vocabulary has one token only
};

// What a step accepted of one sequence.
struct AcceptedPath {
  std::vector<std::int32_t> nodes;    // accepted tree nodes with the root, ascending
  std::int32_t bonus_token = 0;       // the target's token behind the path: the next root
  std::vector<ChoiceLogits> choices;  // at each of `nodes`
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

  // Size of the block in int32.
  static std::int64_t words(std::int64_t max_sequences, std::int64_t max_path);

 private:
  std::int64_t max_sequences_;
  std::int64_t max_path_;
  DeviceTensor block_;
};

// How many sequences a control block has room for, and how many nodes of each.
struct BlockRoom {
  std::int64_t max_sequences = 0;
  std::int64_t max_nodes = 0;  // of a tree, or of a path
};

// The first `num_sequences` trees of a tree block whose words the host has. Error if one has an
// impossible number of nodes.
std::vector<DraftTree> read_trees(std::span<const std::int32_t> words, const BlockRoom& room,
                                  std::int64_t num_sequences);
// The first `num_sequences` paths of an accept block, without `choices`. Error if one has an
// impossible length.
std::vector<AcceptedPath> read_paths(std::span<const std::int32_t> words, const BlockRoom& room,
                                     std::int64_t num_sequences);

}  // namespace kdtree
