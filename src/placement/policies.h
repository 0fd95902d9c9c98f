// How the experts of one layer are shared out to ranks. All of it is a pure function of its
// arguments: equal arguments give equal placements, ties go to the lower index.
#pragma once

#include <cstdint>
#include <span>

#include "comm/expert_placement.h"
#include "placement/expert_loads.h"

namespace kdtree {

// Expert e on rank e % world_size, in the order of experts.
LayerPlacement place_round_robin(std::int64_t n_routed_experts, int world_size);

// Every expert once: those with the largest loads first, each to the rank that has the least load
// and a slot left; then experts change places as long as that lowers the load of a most loaded
// rank. Ranks have the slots that partition() gives them: at most ceil(experts / ranks).
// loads: [n_routed_experts] rows that chose each expert, not negative.
LayerPlacement place_balanced(std::span<const std::int64_t> loads, int world_size);

// num_slots slots in all, from the number of experts to experts x ranks: one by one, the slots that
// are left over go to the expert with the largest load a replica, as long as it has fewer replicas
// than there are ranks (a second one on a rank would take none of its load away). Then as
// place_balanced, a replica having an equal share of its expert's load; and replicas change experts
// as long as that lowers the load of a most loaded rank. Error for any other number.
LayerPlacement place_replicated(std::span<const std::int64_t> loads, std::int64_t num_slots,
                                int world_size);

// place_replicated for each mixture-of-experts layer; with as many slots as experts, that is
// place_balanced.
ExpertPlacement place_layers(const ExpertLoads& loads, std::int64_t num_slots,
                             const ModelConfig& config, int world_size);

// The same with as many slots in each layer as `current` has.
ExpertPlacement place_layers_anew(const ExpertLoads& loads, const ExpertPlacement& current,
                                  const ModelConfig& config);

// Load of the most loaded rank over the mean, at least 1; 1 without any load.
double imbalance(const LayerPlacement& placement, std::span<const std::int64_t> loads);

}  // namespace kdtree
