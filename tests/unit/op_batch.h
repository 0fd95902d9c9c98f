// Batches of sequences with draft trees, on the host and on a device.
#pragma once

#include <cstdint>
#include <vector>

#include "tests/unit/op_test.h"

namespace kdtree::ops_test {

struct HostSequence {
  std::int32_t slot = 0;
  std::int32_t prefix = 0;
  std::vector<std::int32_t> parents;  // of each node, below its own index; the root's is -1

  std::int64_t num_nodes() const { return static_cast<std::int64_t>(parents.size()); }
  // The node's ancestors and itself, ascending.
  std::vector<std::int32_t> path(std::int32_t node) const {
    std::vector<std::int32_t> nodes;
    for (; node >= 0; node = parents[static_cast<std::size_t>(node)]) {
      nodes.insert(nodes.begin(), node);
    }
    return nodes;
  }
};

inline std::vector<std::int32_t> random_tree(Random& random, std::int64_t num_nodes) {
  std::vector<std::int32_t> parents = {-1};
  while (static_cast<std::int64_t>(parents.size()) < num_nodes) {
    // Mostly recent nodes, so that the tree is deep as well as wide.
    const auto size = static_cast<std::int64_t>(parents.size());
    const std::int64_t back = random.below(2) == 0 ? std::min<std::int64_t>(size, 3) : size;
    parents.push_back(static_cast<std::int32_t>(size - 1 - random.below(back)));
  }
  return parents;
}

inline std::vector<std::int32_t> chain(std::int64_t num_nodes) {
  std::vector<std::int32_t> parents(static_cast<std::size_t>(num_nodes));
  std::iota(parents.begin(), parents.end(), -1);
  return parents;
}

// The device tensors of a TreeBatch. Without a mask the sequences must be chains.
class DeviceBatch {
 public:
  DeviceBatch(Backend& backend, const std::vector<HostSequence>& sequences, bool with_mask) {
    std::vector<std::int32_t> slots;
    std::vector<std::int32_t> prefixes;
    std::vector<std::int32_t> offsets = {0};
    std::vector<std::int32_t> positions;
    std::vector<std::int32_t> index;
    std::int64_t words = 1;
    for (const HostSequence& sequence : sequences) {
      words = std::max(words, (sequence.num_nodes() + 63) / 64);
    }
    std::vector<std::int64_t> mask;
    for (const HostSequence& sequence : sequences) {
      for (std::int32_t node = 0; node < sequence.num_nodes(); ++node) {
        const auto path = sequence.path(node);
        positions.push_back(sequence.prefix + static_cast<std::int32_t>(path.size()) - 1);
        index.push_back(static_cast<std::int32_t>(slots.size()));
        mask.resize(mask.size() + static_cast<std::size_t>(words));
        std::int64_t* bits = mask.data() + mask.size() - words;
        for (const std::int32_t ancestor : path) {
          bits[ancestor / 64] =
              static_cast<std::int64_t>(static_cast<std::uint64_t>(bits[ancestor / 64]) |
                                        std::uint64_t{1} << (ancestor % 64));
        }
      }
      slots.push_back(sequence.slot);
      prefixes.push_back(sequence.prefix);
      offsets.push_back(offsets.back() + static_cast<std::int32_t>(sequence.num_nodes()));
    }
    batch_.num_sequences = static_cast<std::int64_t>(slots.size());
    batch_.num_rows = offsets.back();
    batch_.token_ids = keep(make_indices(backend, std::vector<std::int32_t>(positions.size())));
    batch_.positions = keep(make_indices(backend, positions));
    batch_.sequence_index = keep(make_indices(backend, index));
    batch_.slots = keep(make_indices(backend, slots));
    batch_.prefix_lengths = keep(make_indices(backend, prefixes));
    batch_.row_offsets = keep(make_indices(backend, offsets));
    if (with_mask) {
      batch_.ancestor_mask = keep(make_tensor(backend, {batch_.num_rows, words}, mask));
    }
  }

  const TreeBatch& view() const { return batch_; }

 private:
  TensorView keep(GuardedTensor tensor) {
    tensors_.push_back(std::move(tensor));
    return tensors_.back().view();
  }

  std::vector<GuardedTensor> tensors_;
  TreeBatch batch_;
};

}  // namespace kdtree::ops_test
