#include "model/tree_batch_storage.h"

#include <algorithm>

namespace kdtree {

namespace {
constexpr std::int64_t kBitsPerWord = 64;

std::int64_t mask_words(std::int64_t max_nodes) {
  return (max_nodes + kBitsPerWord - 1) / kBitsPerWord;
}
}  // namespace

TreeBatchStorage::TreeBatchStorage(Backend& backend, std::int64_t max_rows,
                                   std::int64_t max_sequences, std::int64_t max_nodes)
    : backend_(backend),
      max_nodes_(max_nodes),
      mask_words_(mask_words(max_nodes)),
      token_ids_(backend, DType::kInt32, Shape{max_rows}),
      positions_(backend, DType::kInt32, Shape{max_rows}),
      sequence_index_(backend, DType::kInt32, Shape{max_rows}),
      slots_(backend, DType::kInt32, Shape{max_sequences}),
      prefix_lengths_(backend, DType::kInt32, Shape{max_sequences}),
      row_offsets_(backend, DType::kInt32, Shape{max_sequences + 1}),
      ancestor_mask_(backend, DType::kInt64, Shape{max_rows, mask_words_}) {
  const auto rows = static_cast<std::size_t>(max_rows);
  const auto sequences = static_cast<std::size_t>(max_sequences);
  for (std::vector<std::int32_t>* values :
       {&host_token_ids_, &host_positions_, &host_sequence_index_}) {
    values->reserve(rows);
  }
  host_slots_.reserve(sequences);
  host_prefix_lengths_.reserve(sequences);
  host_row_offsets_.reserve(sequences + 1);
  host_masks_.reserve(rows * static_cast<std::size_t>(mask_words_));
}

std::int64_t TreeBatchStorage::bytes(std::int64_t max_rows, std::int64_t max_sequences,
                                     std::int64_t max_nodes) {
  return (3 * max_rows + 3 * max_sequences + 1) * dtype_bytes(DType::kInt32) +
         max_rows * mask_words(max_nodes) * dtype_bytes(DType::kInt64);
}

void TreeBatchStorage::append_sequence(const SequenceRows& sequence, std::int32_t index,
                                       bool trees) {
  const std::size_t first = host_positions_.size();
  const auto words = static_cast<std::size_t>(mask_words_);
  check(!trees || static_cast<std::int64_t>(sequence.token_ids.size()) <= max_nodes_,
        "a tree of {} nodes, room for {}", sequence.token_ids.size(), max_nodes_);
  check(!trees || sequence.parents.size() == sequence.token_ids.size(),
        "a tree with {} parents for {} nodes", sequence.parents.size(), sequence.token_ids.size());
  for (std::size_t node = 0; node < sequence.token_ids.size(); ++node) {
    host_token_ids_.push_back(sequence.token_ids[node]);
    host_sequence_index_.push_back(index);
    if (!trees) {
      host_positions_.push_back(sequence.prefix_length + static_cast<std::int32_t>(node));
      continue;
    }
    const std::int32_t parent = sequence.parents[node];
    check(node == 0 ? parent == -1 : parent >= 0 && parent < static_cast<std::int32_t>(node),
          "node {} of a tree has parent {}", node, parent);
    // A node sees what its parent sees, and itself.
    const std::size_t row = first + node;
    host_masks_.resize((row + 1) * words, 0);
    if (node == 0) {
      host_positions_.push_back(sequence.prefix_length);
    } else {
      const std::size_t parent_row = first + static_cast<std::size_t>(parent);
      host_positions_.push_back(host_positions_[parent_row] + 1);
      std::copy_n(host_masks_.begin() + static_cast<std::ptrdiff_t>(parent_row * words), words,
                  host_masks_.begin() + static_cast<std::ptrdiff_t>(row * words));
    }
    std::int64_t& word = host_masks_[row * words + node / kBitsPerWord];
    word = static_cast<std::int64_t>(static_cast<std::uint64_t>(word) |
                                     (std::uint64_t{1} << (node % kBitsPerWord)));
  }
}

TreeBatch TreeBatchStorage::fill(std::span<const SequenceRows> sequences) {
  for (std::vector<std::int32_t>* values :
       {&host_token_ids_, &host_positions_, &host_sequence_index_, &host_slots_,
        &host_prefix_lengths_, &host_row_offsets_}) {
    values->clear();
  }
  host_masks_.clear();
  const bool trees = !sequences.empty() && !sequences.front().parents.empty();
  host_row_offsets_.push_back(0);
  for (std::size_t i = 0; i < sequences.size(); ++i) {
    check(sequences[i].parents.empty() != trees, "a batch mixes trees and chains");
    append_sequence(sequences[i], static_cast<std::int32_t>(i), trees);
    host_slots_.push_back(sequences[i].slot);
    host_prefix_lengths_.push_back(sequences[i].prefix_length);
    host_row_offsets_.push_back(static_cast<std::int32_t>(host_positions_.size()));
  }

  const auto upload = [this](DeviceTensor& tensor,
                             const std::vector<std::int32_t>& values) -> ConstTensorView {
    tensor.upload(backend_, std::span<const std::int32_t>(values));
    return tensor.rows(static_cast<std::int64_t>(values.size()));
  };
  TreeBatch batch;
  batch.num_sequences = static_cast<std::int64_t>(sequences.size());
  batch.num_rows = static_cast<std::int64_t>(host_positions_.size());
  batch.token_ids = upload(token_ids_, host_token_ids_);
  batch.positions = upload(positions_, host_positions_);
  batch.sequence_index = upload(sequence_index_, host_sequence_index_);
  batch.slots = upload(slots_, host_slots_);
  batch.prefix_lengths = upload(prefix_lengths_, host_prefix_lengths_);
  batch.row_offsets = upload(row_offsets_, host_row_offsets_);
  if (trees) {
    ancestor_mask_.upload(backend_, std::span<const std::int64_t>(host_masks_));
    batch.ancestor_mask = ancestor_mask_.rows(batch.num_rows);
  }
  return batch;
}

}  // namespace kdtree
