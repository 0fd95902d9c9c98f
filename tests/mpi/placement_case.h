// Placements of experts for tests, equal on every rank for equal arguments.
#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include "comm/expert_placement.h"
#include "config/model_config.h"
#include "placement/policies.h"
#include "tests/mpi/random_case.h"

namespace kdtree {

using SharedPlacement = std::shared_ptr<const ExpertPlacement>;

// Any placement: each expert on some ranks, in any order of slots, every layer otherwise; ranks may
// have no expert of a layer.
inline SharedPlacement random_placement(Dice& dice, const ModelConfig& config, int world_size) {
  std::vector<LayerPlacement> layers;
  for (std::int64_t layer = 0; layer < config.num_hidden_layers; ++layer) {
    std::vector<std::vector<std::int64_t>> experts(static_cast<std::size_t>(world_size));
    for (std::int64_t expert = 0; expert < config.n_routed_experts; ++expert) {
      const std::int64_t home = dice.between(0, world_size - 1);
      for (int rank = 0; rank < world_size; ++rank) {
        if (rank == home || dice.one_in(3)) {
          std::vector<std::int64_t>& slots = experts[static_cast<std::size_t>(rank)];
          slots.insert(slots.begin() + dice.between(0, std::ssize(slots)), expert);
        }
      }
    }
    layers.emplace_back(config.n_routed_experts, std::move(experts));
  }
  return std::make_shared<const ExpertPlacement>(std::move(layers));
}

inline ExpertLoads random_loads(Dice& dice, const ModelConfig& config) {
  ExpertLoads loads = empty_loads(config);
  for (std::vector<std::int64_t>& layer : loads.layers) {
    for (std::int64_t& load : layer) {
      load = dice.one_in(4) ? dice.between(0, 1000) : dice.between(0, 50);
    }
  }
  return loads;
}

// One of each policy, replicated with some number of slots, and a random one.
struct NamedPlacement {
  const char* name;
  SharedPlacement placement;
};
inline std::vector<NamedPlacement> all_placements(Dice& dice, const ModelConfig& config,
                                                  int world_size) {
  const std::int64_t experts = config.n_routed_experts;
  const auto by_load = [&](std::int64_t num_slots) {
    return std::make_shared<const ExpertPlacement>(
        place_layers(random_loads(dice, config), num_slots, config, world_size));
  };
  return {{"linear", nullptr},
          {"round-robin",
           std::make_shared<const ExpertPlacement>(place_round_robin(experts, world_size))},
          {"balanced", by_load(experts)},
          {"replicated", by_load(dice.between(experts, experts * world_size))},
          {"replicated everywhere", by_load(experts * world_size)},
          {"random", random_placement(dice, config, world_size)}};
}

}  // namespace kdtree
