#include "speculative/output_ring.h"

#include <limits>
#include <span>

namespace kdtree {

namespace {

std::span<const std::int32_t> words_of(const Buffer& buffer) {
  return {static_cast<const std::int32_t*>(buffer.data()),
          static_cast<std::size_t>(buffer.bytes()) / sizeof(std::int32_t)};
}

}  // namespace

OutputRing::OutputRing(Backend& backend, const OutputSizes& sizes) : sizes_(sizes) {
  const std::int64_t word = dtype_bytes(DType::kInt32);
  const std::int64_t nodes = sizes.max_sequences * sizes.max_nodes;
  const std::int64_t candidates = sizes.max_sequences * (sizes.max_path - 1) * sizes.num_candidates;
  for (Entry& entry : entries_) {
    entry.trees =
        backend.allocate_host(TreeBlock::words(sizes.max_sequences, sizes.max_nodes) * word);
    entry.accepted =
        backend.allocate_host(AcceptBlock::words(sizes.max_sequences, sizes.max_path) * word);
    entry.choice_logits = backend.allocate_host(nodes * sizes.num_choices * word);
    entry.candidate_probs = backend.allocate_host(candidates * word);
    entry.candidate_ids = backend.allocate_host(candidates * word);
    entry.expert_ids = backend.allocate_host(nodes * sizes.num_expert_ids * word);
  }
}

void OutputRing::write(Backend& backend, std::size_t entry, const StepTensors& step) const {
  const Entry& to = entries_.at(entry);
  const auto copy = [&](const Buffer& host, const ConstTensorView& from) {
    check(from.contiguous() && from.bytes() <= host.bytes(), "{} does not fit the ring's {} bytes",
          from.shape().to_string(), host.bytes());
    backend.download(host.data(), from.raw(), from.bytes());
  };
  copy(to.trees, step.trees.tensor());
  copy(to.accepted, step.accepted.tensor());
  copy(to.choice_logits, step.choice_logits);
  if (sizes_.num_candidates > 0) {
    copy(to.candidate_probs, step.candidate_probs);
    copy(to.candidate_ids, step.candidate_ids);
  }
  if (sizes_.num_expert_ids > 0) {
    copy(to.expert_ids, step.expert_ids);
  }
}

void OutputRing::close(Backend& backend, std::size_t entry) const {
  backend.set_fence(entry);
}

DraftCandidates OutputRing::read_candidates(const Entry& from, std::int64_t sequence) const {
  const std::int64_t slots = sizes_.max_path - 1;
  const std::int64_t first = sequence * slots * sizes_.num_candidates;
  const auto* probs = static_cast<const float*>(from.candidate_probs.data()) + first;
  const auto* ids = static_cast<const std::int32_t*>(from.candidate_ids.data()) + first;
  DraftCandidates candidates(static_cast<std::size_t>(slots));
  for (auto& slot : candidates) {
    for (std::int64_t i = 0; i < sizes_.num_candidates; ++i) {
      slot.emplace_back(*ids++, *probs++);
    }
  }
  return candidates;
}

StepOutput OutputRing::read(Backend& backend, std::size_t entry, std::int64_t num_sequences) const {
  backend.wait_fence(entry);
  const Entry& from = entries_.at(entry);
  StepOutput output{.trees = read_trees(words_of(from.trees),
                                        {sizes_.max_sequences, sizes_.max_nodes}, num_sequences),
                    .accepted = read_paths(words_of(from.accepted),
                                           {sizes_.max_sequences, sizes_.max_path}, num_sequences),
                    .candidates = {},
                    .expert_ids = {}};
  const auto ids = words_of(from.expert_ids)
                       .first(static_cast<std::size_t>(num_sequences * sizes_.max_nodes *
                                                       sizes_.num_expert_ids));
  output.expert_ids.assign(ids.begin(), ids.end());
  for (std::int64_t i = 0; i < num_sequences && sizes_.num_candidates > 0; ++i) {
    output.candidates.push_back(read_candidates(from, i));
  }
  const auto* logits = static_cast<const float*>(from.choice_logits.data());
  for (std::size_t i = 0; i < output.accepted.size(); ++i) {
    AcceptedPath& path = output.accepted[i];
    for (const std::int32_t node : path.nodes) {
      check(node >= 0 && node < sizes_.max_nodes, "an accepted path has node {} of {}", node,
            sizes_.max_nodes);
      const float* row =
          logits + (static_cast<std::int64_t>(i) * sizes_.max_nodes + node) * sizes_.num_choices;
      path.choices.push_back(
          {.best = row[0],
           .second = sizes_.num_choices > 1 ? row[1] : -std::numeric_limits<float>::infinity()});
    }
  }
  return output;
}

}  // namespace kdtree
