#include "comm/expert_placement.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "core/check.h"
#include "core/partition.h"

namespace kdtree {

LayerPlacement::LayerPlacement(std::int64_t n_routed_experts,
                               std::vector<std::vector<std::int64_t>> experts_of_ranks)
    : n_routed_experts_(n_routed_experts), experts_of_(std::move(experts_of_ranks)) {
  check(n_routed_experts_ >= 0 && !experts_of_.empty(), "placement of {} experts on {} ranks",
        n_routed_experts_, experts_of_.size());
  std::vector<int> last_rank(static_cast<std::size_t>(n_routed_experts_), -1);
  for (int rank = 0; rank < world_size(); ++rank) {
    for (const std::int64_t expert : experts_of(rank)) {
      check(expert >= 0 && expert < n_routed_experts_, "expert {} of {} on rank {}", expert,
            n_routed_experts_, rank);
      int& last = last_rank[static_cast<std::size_t>(expert)];
      check(last != rank, "expert {} is twice on rank {}", expert, rank);
      last = rank;
      ++num_slots_;
    }
  }
  const auto missing = std::find(last_rank.begin(), last_rank.end(), -1);
  check(missing == last_rank.end(), "expert {} is on no rank",
        std::distance(last_rank.begin(), missing));
}

bool LayerPlacement::holds(int rank, std::int64_t expert) const {
  const std::vector<std::int64_t>& experts = experts_of(rank);
  return std::find(experts.begin(), experts.end(), expert) != experts.end();
}

bool LayerPlacement::same_slots(const LayerPlacement& other) const {
  return n_routed_experts_ == other.n_routed_experts_ &&
         std::equal(experts_of_.begin(), experts_of_.end(), other.experts_of_.begin(),
                    other.experts_of_.end(), [](const auto& left, const auto& right) {
                      return left.size() == right.size();
                    });
}

LayerPlacement LayerPlacement::kept_in_place(const LayerPlacement& before) const {
  check(same_slots(before), "a placement with other numbers of slots");
  std::vector<std::vector<std::int64_t>> all;
  for (int rank = 0; rank < world_size(); ++rank) {
    std::vector<std::int64_t> slots = before.experts_of(rank);
    std::vector<std::int64_t> arrived;
    std::copy_if(experts_of(rank).begin(), experts_of(rank).end(), std::back_inserter(arrived),
                 [&](std::int64_t expert) { return !before.holds(rank, expert); });
    auto next = arrived.begin();
    for (std::int64_t& slot : slots) {
      if (!holds(rank, slot)) {
        slot = *next++;
      }
    }
    all.push_back(std::move(slots));
  }
  return {n_routed_experts_, std::move(all)};
}

template <class Visit>
void LayerPlacement::visit_slots(const Visit& visit) const {
  std::int32_t physical = 0;
  for (int rank = 0; rank < world_size(); ++rank) {
    std::int32_t slot = 0;
    for (const std::int64_t expert : experts_of(rank)) {
      visit(static_cast<std::size_t>(expert), rank, slot++, physical++);
    }
  }
}

std::vector<std::int32_t> LayerPlacement::ranks_of_targets() const {
  std::vector<std::int32_t> ranks(static_cast<std::size_t>(num_targets()));
  visit_slots([&](std::size_t expert, int rank, std::int32_t, std::int32_t physical) {
    ranks[has_replicas() ? static_cast<std::size_t>(physical) : expert] = rank;
  });
  return ranks;
}

std::vector<std::int32_t> LayerPlacement::slots_on(int rank) const {
  std::vector<std::int32_t> slots(static_cast<std::size_t>(num_targets()), -1);
  visit_slots([&](std::size_t expert, int owner, std::int32_t slot, std::int32_t physical) {
    if (owner == rank) {
      slots[has_replicas() ? static_cast<std::size_t>(physical) : expert] = slot;
    }
  });
  return slots;
}

std::vector<std::int32_t> LayerPlacement::replica_offsets() const {
  std::vector<std::int32_t> offsets(static_cast<std::size_t>(n_routed_experts_) + 1);
  visit_slots([&](std::size_t expert, int, std::int32_t, std::int32_t) { ++offsets[expert + 1]; });
  std::partial_sum(offsets.begin(), offsets.end(), offsets.begin());
  return offsets;
}

std::vector<std::int32_t> LayerPlacement::physical_slots() const {
  std::vector<std::int32_t> places = replica_offsets();
  std::vector<std::int32_t> slots(static_cast<std::size_t>(num_slots_));
  visit_slots([&](std::size_t expert, int, std::int32_t, std::int32_t physical) {
    slots[static_cast<std::size_t>(places[expert]++)] = physical;
  });
  return slots;
}

ExpertPlacement ExpertPlacement::linear(std::int64_t n_routed_experts, int world_size) {
  check(n_routed_experts >= 0 && world_size > 0, "placement of {} experts on {} ranks",
        n_routed_experts, world_size);
  std::vector<std::vector<std::int64_t>> experts(static_cast<std::size_t>(world_size));
  for (int rank = 0; rank < world_size; ++rank) {
    const Range range = partition(n_routed_experts, world_size, rank);
    for (std::int64_t expert = range.begin; expert < range.end; ++expert) {
      experts[static_cast<std::size_t>(rank)].push_back(expert);
    }
  }
  return ExpertPlacement(LayerPlacement(n_routed_experts, std::move(experts)));
}

ExpertPlacement::ExpertPlacement(LayerPlacement every_layer) : layers_{std::move(every_layer)} {}

ExpertPlacement::ExpertPlacement(std::vector<LayerPlacement> layers)
    : alike_(false), layers_(std::move(layers)) {
  check(!layers_.empty(), "a placement of no layers");
  for (const LayerPlacement& layer : layers_) {
    check(layer.n_routed_experts() == n_routed_experts() && layer.world_size() == world_size(),
          "a layer of {} experts on {} ranks, another of {} on {}", layer.n_routed_experts(),
          layer.world_size(), n_routed_experts(), world_size());
  }
}

bool ExpertPlacement::same_slots(const ExpertPlacement& other) const {
  const auto count = static_cast<std::int64_t>(std::max(layers_.size(), other.layers_.size()));
  for (std::int64_t index = 0; index < count; ++index) {
    if (!layer(index).same_slots(other.layer(index))) {
      return false;
    }
  }
  return true;
}

ExpertPlacement ExpertPlacement::kept_in_place(const ExpertPlacement& before) const {
  std::vector<LayerPlacement> layers;
  const auto count = static_cast<std::int64_t>(std::max(layers_.size(), before.layers_.size()));
  for (std::int64_t index = 0; index < count; ++index) {
    layers.push_back(layer(index).kept_in_place(before.layer(index)));
  }
  return alike_ && before.alike_ ? ExpertPlacement(std::move(layers.front()))
                                 : ExpertPlacement(std::move(layers));
}

const LayerPlacement& ExpertPlacement::layer(std::int64_t layer) const {
  const auto index = static_cast<std::size_t>(alike_ ? 0 : layer);
  check(index < layers_.size(), "layer {} of a placement of {}", layer, layers_.size());
  return layers_[index];
}

}  // namespace kdtree
