#include "speculative/step_state.h"

namespace kdtree {

namespace {

constexpr std::int64_t kBitsPerWord = 64;

std::int64_t mask_words(std::int64_t max_nodes) {
  return (max_nodes + kBitsPerWord - 1) / kBitsPerWord;
}

}  // namespace

StepState::Rows::Rows(Backend& backend, std::int64_t max_sequences, std::int64_t rows_of_each)
    : rows_per_sequence(rows_of_each),
      token_ids(backend, DType::kInt32, Shape{max_sequences * rows_per_sequence}),
      positions(backend, DType::kInt32, Shape{max_sequences * rows_per_sequence}) {
  std::vector<std::int32_t> index;
  std::vector<std::int32_t> offsets{0};
  for (std::int64_t sequence = 0; sequence < max_sequences; ++sequence) {
    index.insert(index.end(), static_cast<std::size_t>(rows_per_sequence),
                 static_cast<std::int32_t>(sequence));
    offsets.push_back(static_cast<std::int32_t>(index.size()));
  }
  sequence_index = DeviceTensor(backend, std::span<const std::int32_t>(index));
  row_offsets = DeviceTensor(backend, std::span<const std::int32_t>(offsets));
  backend.synchronize();  // the uploads read index and offsets
}

StepState::StepState(Backend& backend, const StepShape& shape)
    : shape_(shape),
      slots_(backend, DType::kInt32, Shape{shape.max_sequences}),
      cache_slots_(backend, DType::kInt32, Shape{shape.max_sequences}),
      prefix_lengths_(backend, DType::kInt32, Shape{shape.max_sequences}),
      roots_(backend, DType::kInt32, Shape{shape.max_sequences}),
      verify_(backend, shape.max_sequences, shape.max_nodes),
      block_(backend, shape.max_sequences, shape.block_size),
      context_(backend, shape.max_sequences, shape.max_path),
      ancestor_mask_(backend, DType::kInt64,
                     Shape{shape.max_sequences * shape.max_nodes, mask_words(shape.max_nodes)}),
      context_rows_(backend, DType::kInt32, Shape{shape.max_sequences, shape.max_path}),
      trees_(backend, shape.max_sequences, shape.max_nodes),
      accepted_(backend, shape.max_sequences, shape.max_path) {}

std::int64_t StepState::bytes(const StepShape& shape) {
  const std::int64_t rows = shape.max_nodes + shape.block_size + shape.max_path;
  const std::int64_t words = 4 + 3 * rows + 3 + shape.max_path +
                             TreeBlock::words(1, shape.max_nodes) +
                             AcceptBlock::words(1, shape.max_path);
  return shape.max_sequences * (4 * words + 8 * shape.max_nodes * mask_words(shape.max_nodes)) + 12;
}

void StepState::set_sequences(Backend& backend, std::span<const RunningSequence> sequences) {
  set_sequences(backend, sequences, {.listed = {0, std::ssize(sequences)}, .first_slot = 0});
}

void StepState::set_sequences(Backend& backend, std::span<const RunningSequence> sequences,
                              const OwnSequences& own) {
  check(static_cast<std::int64_t>(sequences.size()) <= shape_.max_sequences,
        "{} sequences in a step, room for {}", sequences.size(), shape_.max_sequences);
  std::vector<std::int32_t> slots;
  std::vector<std::int32_t> cache_slots;
  std::vector<std::int32_t> prefix_lengths;
  std::vector<std::int32_t> roots;
  for (const RunningSequence& sequence : sequences) {
    slots.push_back(sequence.slot);
    cache_slots.push_back(sequence.slot - own.first_slot);
    prefix_lengths.push_back(sequence.prefix_length);
    roots.push_back(sequence.root_token);
  }
  num_sequences_ = static_cast<std::int64_t>(sequences.size());
  own_ = own;
  slots_.upload(backend, std::span<const std::int32_t>(slots));
  cache_slots_.upload(backend, std::span<const std::int32_t>(cache_slots));
  prefix_lengths_.upload(backend, std::span<const std::int32_t>(prefix_lengths));
  roots_.upload(backend, std::span<const std::int32_t>(roots));
  backend.synchronize();  // the uploads read these vectors
}

TreeBatch StepState::batch_of(const Rows& rows) const {
  TreeBatch batch;
  batch.num_sequences = num_sequences_;
  batch.num_rows = num_sequences_ * rows.rows_per_sequence;
  batch.token_ids = rows.token_ids.rows(batch.num_rows);
  batch.positions = rows.positions.rows(batch.num_rows);
  batch.sequence_index = rows.sequence_index.rows(batch.num_rows);
  batch.slots = slots_.rows(num_sequences_);
  batch.prefix_lengths = prefix_lengths_.rows(num_sequences_);
  batch.row_offsets = rows.row_offsets.rows(num_sequences_ + 1);
  return batch;
}

TreeBatch StepState::expand_blocks(Backend& backend, std::int32_t mask_token_id) {
  const TreeBatch batch = batch_of(block_);
  const Shape shape{num_sequences_, shape_.block_size};
  backend.expand_blocks({.roots = roots(),
                         .prefix_lengths = batch.prefix_lengths,
                         .mask_token_id = mask_token_id,
                         .token_ids = block_.token_ids.rows(batch.num_rows).reshape(shape),
                         .positions = block_.positions.rows(batch.num_rows).reshape(shape)});
  return batch;
}

TreeBatch StepState::expand_trees(Backend& backend) {
  TreeBatch batch = batch_of(verify_);
  backend.expand_trees({.trees = trees_.arrays(num_sequences_),
                        .prefix_lengths = batch.prefix_lengths,
                        .token_ids = verify_.token_ids.rows(batch.num_rows),
                        .positions = verify_.positions.rows(batch.num_rows),
                        .ancestor_mask = ancestor_mask_.rows(batch.num_rows)});
  batch.ancestor_mask = ancestor_mask_.rows(batch.num_rows);
  batch.num_real_rows = trees_.arrays(num_sequences_).num_nodes;
  return batch;
}

TreeBatch StepState::own_trees(const TreeBatch& trees) const {
  const std::int64_t sequences = num_own_sequences();
  const std::int64_t first = first_own_row();
  const std::int64_t rows = sequences * verify_.rows_per_sequence;
  TreeBatch own;
  own.num_sequences = sequences;
  own.num_rows = rows;
  own.token_ids = trees.token_ids.rows(first, rows);
  own.positions = trees.positions.rows(first, rows);
  // Of trees of one size: the first ones count from 0.
  own.sequence_index = verify_.sequence_index.rows(rows);
  own.slots = cache_slots_.view().rows(own_.listed.begin, sequences);
  own.prefix_lengths = trees.prefix_lengths.rows(own_.listed.begin, sequences);
  own.row_offsets = verify_.row_offsets.rows(sequences + 1);
  own.ancestor_mask = trees.ancestor_mask.rows(first, rows);
  own.num_real_rows = trees.num_real_rows.rows(own_.listed.begin, sequences);
  return own;
}

StepState::AcceptedRows StepState::accepted_rows(Backend& backend) {
  const TreeBatch batch = batch_of(context_);
  const TensorView rows = context_rows_.rows(num_sequences_);
  backend.accepted_rows(
      {.paths = accepted_.paths(num_sequences_),
       .path_lengths = accepted_.path_lengths(num_sequences_),
       .prefix_lengths = batch.prefix_lengths,
       .max_nodes = shape_.max_nodes,
       .rows = rows,
       .positions = context_.positions.rows(batch.num_rows).reshape(rows.shape())});
  return {.batch = batch, .rows = rows.reshape(Shape{batch.num_rows})};
}

CompactParams StepState::compact_params() const {
  const std::int64_t first = own_.listed.begin;
  const std::int64_t sequences = num_own_sequences();
  return {.cache = {},
          .slots = cache_slots_.view().rows(first, sequences),
          .prefix_lengths = prefix_lengths_.view().rows(first, sequences),
          .path_lengths = accepted_.path_lengths(num_sequences_).rows(first, sequences),
          .paths = accepted_.paths(num_sequences_).rows(first, sequences)};
}

void StepState::advance(Backend& backend) {
  backend.advance(accepted_.path_lengths(num_sequences_), accepted_.bonus_tokens(num_sequences_),
                  prefix_lengths_.rows(num_sequences_), roots_.rows(num_sequences_));
}

}  // namespace kdtree
