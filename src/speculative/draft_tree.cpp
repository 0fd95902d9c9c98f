#include "speculative/draft_tree.h"

namespace kdtree {

namespace {

TensorView carve_int32(const DeviceTensor& block, std::int64_t offset, Shape shape) {
  return {block.view().data<std::int32_t>() + offset, DType::kInt32, shape};
}

}  // namespace

// Layout: numbers of nodes, then token ids, parents and depths of all sequences.
std::int64_t TreeBlock::words(std::int64_t max_sequences, std::int64_t max_nodes) {
  return max_sequences * (1 + 3 * max_nodes);
}

TreeBlock::TreeBlock(Backend& backend, std::int64_t max_sequences, std::int64_t max_nodes)
    : max_sequences_(max_sequences),
      max_nodes_(max_nodes),
      block_(backend, DType::kInt32, Shape{words(max_sequences, max_nodes)}),
      host_(static_cast<std::size_t>(words(max_sequences, max_nodes))) {}

TreeArrays TreeBlock::arrays(std::int64_t num_sequences) const {
  const std::int64_t plane = max_sequences_ * max_nodes_;
  const Shape shape{num_sequences, max_nodes_};
  return {.num_nodes = carve_int32(block_, 0, Shape{num_sequences}),
          .token_ids = carve_int32(block_, max_sequences_, shape),
          .parents = carve_int32(block_, max_sequences_ + plane, shape),
          .depths = carve_int32(block_, max_sequences_ + 2 * plane, shape)};
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

// Layout: path lengths, bonus tokens, then the paths of all sequences.
std::int64_t AcceptBlock::words(std::int64_t max_sequences, std::int64_t max_path) {
  return max_sequences * (2 + max_path);
}

AcceptBlock::AcceptBlock(Backend& backend, std::int64_t max_sequences, std::int64_t max_path)
    : max_sequences_(max_sequences),
      max_path_(max_path),
      block_(backend, DType::kInt32, Shape{words(max_sequences, max_path)}),
      host_(static_cast<std::size_t>(words(max_sequences, max_path))) {}

TensorView AcceptBlock::path_lengths(std::int64_t num_sequences) const {
  return carve_int32(block_, 0, Shape{num_sequences});
}

TensorView AcceptBlock::bonus_tokens(std::int64_t num_sequences) const {
  return carve_int32(block_, max_sequences_, Shape{num_sequences});
}

TensorView AcceptBlock::paths(std::int64_t num_sequences) const {
  return carve_int32(block_, 2 * max_sequences_, Shape{num_sequences, max_path_});
}

std::vector<AcceptedPath> AcceptBlock::download(Backend& backend, std::int64_t num_sequences) {
  block_.download(backend, std::span(host_));
  backend.synchronize();
  std::vector<AcceptedPath> paths(static_cast<std::size_t>(num_sequences));
  for (std::int64_t i = 0; i < num_sequences; ++i) {
    AcceptedPath& path = paths[static_cast<std::size_t>(i)];
    const std::int64_t length = host_[static_cast<std::size_t>(i)];
    check(length >= 1 && length <= max_path_, "an accepted path of {} nodes, room for {}", length,
          max_path_);
    const auto first = host_.begin() + 2 * max_sequences_ + i * max_path_;
    path.nodes.assign(first, first + length);
    path.bonus_token = host_[static_cast<std::size_t>(max_sequences_ + i)];
  }
  return paths;
}

}  // namespace kdtree
