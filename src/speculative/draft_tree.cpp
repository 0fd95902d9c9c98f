#include "speculative/draft_tree.h"

#include <iterator>

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
      block_(backend, DType::kInt32, Shape{words(max_sequences, max_nodes)}) {}

TreeArrays TreeBlock::arrays(std::int64_t num_sequences) const {
  const std::int64_t plane = max_sequences_ * max_nodes_;
  const Shape shape{num_sequences, max_nodes_};
  return {.num_nodes = carve_int32(block_, 0, Shape{num_sequences}),
          .token_ids = carve_int32(block_, max_sequences_, shape),
          .parents = carve_int32(block_, max_sequences_ + plane, shape),
          .depths = carve_int32(block_, max_sequences_ + 2 * plane, shape)};
}

std::vector<DraftTree> read_trees(std::span<const std::int32_t> words, const BlockRoom& room,
                                  std::int64_t num_sequences) {
  check(std::ssize(words) == TreeBlock::words(room.max_sequences, room.max_nodes) &&
            num_sequences <= room.max_sequences,
        "a tree block of {} words for {} sequences of {} nodes, {} of them asked for", words.size(),
        room.max_sequences, room.max_nodes, num_sequences);
  const std::int64_t plane = room.max_sequences * room.max_nodes;
  std::vector<DraftTree> trees(static_cast<std::size_t>(num_sequences));
  for (std::int64_t i = 0; i < num_sequences; ++i) {
    DraftTree& tree = trees[static_cast<std::size_t>(i)];
    const std::int64_t nodes = words[static_cast<std::size_t>(i)];
    check(nodes >= 1 && nodes <= room.max_nodes, "tree {} of a step has {} nodes, room for {}", i,
          nodes, room.max_nodes);
    const auto first = words.begin() + room.max_sequences + i * room.max_nodes;
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
      block_(backend, DType::kInt32, Shape{words(max_sequences, max_path)}) {}

TensorView AcceptBlock::path_lengths(std::int64_t num_sequences) const {
  return carve_int32(block_, 0, Shape{num_sequences});
}

TensorView AcceptBlock::bonus_tokens(std::int64_t num_sequences) const {
  return carve_int32(block_, max_sequences_, Shape{num_sequences});
}

TensorView AcceptBlock::paths(std::int64_t num_sequences) const {
  return carve_int32(block_, 2 * max_sequences_, Shape{num_sequences, max_path_});
}

std::vector<AcceptedPath> read_paths(std::span<const std::int32_t> words, const BlockRoom& room,
                                     std::int64_t num_sequences) {
  check(std::ssize(words) == AcceptBlock::words(room.max_sequences, room.max_nodes) &&
            num_sequences <= room.max_sequences,
        "an accept block of {} words for {} sequences of {} nodes, {} of them asked for",
        words.size(), room.max_sequences, room.max_nodes, num_sequences);
  std::vector<AcceptedPath> paths(static_cast<std::size_t>(num_sequences));
  for (std::int64_t i = 0; i < num_sequences; ++i) {
    AcceptedPath& path = paths[static_cast<std::size_t>(i)];
    const std::int64_t length = words[static_cast<std::size_t>(i)];
    check(length >= 1 && length <= room.max_nodes, "an accepted path of {} nodes, room for {}",
          length, room.max_nodes);
    const auto first = words.begin() + 2 * room.max_sequences + i * room.max_nodes;
    path.nodes.assign(first, first + length);
    path.bonus_token = words[static_cast<std::size_t>(room.max_sequences + i)];
  }
  return paths;
}

}  // namespace kdtree
