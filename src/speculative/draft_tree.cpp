#include "speculative/draft_tree.h"

#include <algorithm>

namespace kdtree {

namespace {

// Layout of the accept block, in int32 words: header, then per-sequence arrays.
constexpr std::int64_t kHeaderWords =
    4;  // next action, prefill slot, prefill request, number of sequences

std::int32_t* int32_at(const DeviceTensor& block, std::int64_t offset) {
  return block.view().data<std::int32_t>() + offset;
}

}  // namespace

TreeBlock::TreeBlock(Backend& backend, std::int64_t max_sequences, std::int64_t max_nodes)
    : max_sequences_(max_sequences),
      max_nodes_(max_nodes),
      block_(backend, DType::kInt32, Shape{max_sequences * (1 + 3 * max_nodes)}),
      host_(static_cast<std::size_t>(max_sequences * (1 + 3 * max_nodes))) {}

TreeArrays TreeBlock::arrays(std::int64_t num_sequences) const {
  const std::int64_t plane = max_sequences_ * max_nodes_;
  const Shape shape{num_sequences, max_nodes_};
  return {.num_nodes = {int32_at(block_, 0), DType::kInt32, Shape{num_sequences}},
          .token_ids = {int32_at(block_, max_sequences_), DType::kInt32, shape},
          .parents = {int32_at(block_, max_sequences_ + plane), DType::kInt32, shape},
          .depths = {int32_at(block_, max_sequences_ + 2 * plane), DType::kInt32, shape}};
}

void TreeBlock::set_roots(Backend& backend, std::span<const std::int32_t> roots) {
  const auto sequences = static_cast<std::size_t>(max_sequences_);
  const auto nodes = static_cast<std::size_t>(max_nodes_);
  std::fill(host_.begin(), host_.end(), 0);
  for (std::size_t i = 0; i < roots.size(); ++i) {
    host_[i] = 1;
    host_[sequences + i * nodes] = roots[i];
    host_[sequences + sequences * nodes + i * nodes] = -1;
  }
  block_.upload(backend, std::span<const std::int32_t>(host_));
}

std::vector<DraftTree> TreeBlock::download(Backend& backend, std::int64_t num_sequences) {
  block_.download(backend, std::span(host_));
  backend.synchronize();
  const std::int64_t plane = max_sequences_ * max_nodes_;
  std::vector<DraftTree> trees(static_cast<std::size_t>(num_sequences));
  for (std::int64_t i = 0; i < num_sequences; ++i) {
    DraftTree& tree = trees[static_cast<std::size_t>(i)];
    const std::int64_t nodes = host_[static_cast<std::size_t>(i)];
    check(nodes >= 1 && nodes <= max_nodes_, "tree {} of a step has {} nodes, room for {}", i,
          nodes, max_nodes_);
    const auto first = host_.begin() + max_sequences_ + i * max_nodes_;
    tree.token_ids.assign(first, first + nodes);
    tree.parents.assign(first + plane, first + plane + nodes);
    tree.depths.assign(first + 2 * plane, first + 2 * plane + nodes);
  }
  return trees;
}

AcceptBlock::AcceptBlock(Backend& backend, std::int64_t max_sequences, std::int64_t max_path)
    : max_sequences_(max_sequences),
      max_path_(max_path),
      block_(backend, DType::kInt32, Shape{kHeaderWords + max_sequences * (3 + max_path)}),
      host_(static_cast<std::size_t>(kHeaderWords + max_sequences * (3 + max_path))) {}

TensorView AcceptBlock::carve(std::int64_t offset, Shape shape) const {
  return {int32_at(block_, kHeaderWords + offset), DType::kInt32, shape};
}

TensorView AcceptBlock::path_lengths(std::int64_t num_sequences) const {
  return carve(0, Shape{num_sequences});
}

TensorView AcceptBlock::bonus_tokens(std::int64_t num_sequences) const {
  return carve(max_sequences_, Shape{num_sequences});
}

// Words [2 * max_sequences, 3 * max_sequences) are the finished flags.
TensorView AcceptBlock::paths(std::int64_t num_sequences) const {
  return carve(3 * max_sequences_, Shape{num_sequences, max_path_});
}

std::vector<AcceptedSequence> AcceptBlock::download(Backend& backend, std::int64_t num_sequences) {
  block_.download(backend, std::span(host_));
  backend.synchronize();
  const auto words = host_.begin() + kHeaderWords;
  std::vector<AcceptedSequence> sequences(static_cast<std::size_t>(num_sequences));
  for (std::int64_t i = 0; i < num_sequences; ++i) {
    AcceptedSequence& sequence = sequences[static_cast<std::size_t>(i)];
    const std::int64_t length = words[i];
    check(length >= 0 && length <= max_path_, "an accepted path of {} nodes, room for {}", length,
          max_path_);
    const auto path = words + 3 * max_sequences_ + i * max_path_;
    sequence.path.assign(path, path + length);
    sequence.bonus_token = words[max_sequences_ + i];
    sequence.finished = words[2 * max_sequences_ + i] != 0;
  }
  return sequences;
}

void AcceptBlock::upload(Backend& backend, const StepDecision& decision) {
  std::fill(host_.begin(), host_.end(), 0);
  host_[0] = static_cast<std::int32_t>(decision.next);
  host_[1] = decision.prefill_slot;
  host_[2] = decision.prefill_request;
  host_[3] = static_cast<std::int32_t>(decision.sequences.size());
  const auto words = host_.begin() + kHeaderWords;
  for (std::size_t index = 0; index < decision.sequences.size(); ++index) {
    const AcceptedSequence& sequence = decision.sequences[index];
    const auto i = static_cast<std::int64_t>(index);
    words[i] = static_cast<std::int32_t>(sequence.path.size());
    words[max_sequences_ + i] = sequence.bonus_token;
    words[2 * max_sequences_ + i] = sequence.finished ? 1 : 0;
    std::copy(sequence.path.begin(), sequence.path.end(),
              words + 3 * max_sequences_ + i * max_path_);
  }
  block_.upload(backend, std::span<const std::int32_t>(host_));
}

StepDecision AcceptBlock::download_decision(Backend& backend) {
  block_.download(backend, std::span(host_));
  backend.synchronize();
  StepDecision decision;
  decision.next = static_cast<NextAction>(host_[0]);
  decision.prefill_slot = host_[1];
  decision.prefill_request = host_[2];
  const std::int64_t num_sequences = host_[3];
  check(num_sequences >= 0 && num_sequences <= max_sequences_,
        "a decision for {} sequences, room for {}", num_sequences, max_sequences_);
  decision.sequences = download(backend, num_sequences);
  return decision;
}

}  // namespace kdtree
