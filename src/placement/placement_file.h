// Placements as files, and from rank 0 to all ranks.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "comm/expert_placement.h"
#include "comm/process_group.h"
#include "config/model_config.h"

namespace kdtree {

// format, version, the sizes of the model, the number of ranks and, of each mixture-of-experts
// layer, its number and the experts of each rank in slot order.
nlohmann::ordered_json to_json(const ExpertPlacement& placement, const ModelConfig& config);
// InputError, naming file, key, value and what was expected, unless the file holds such a placement
// of a model of these sizes on world_size ranks.
ExpertPlacement read_placement(const std::string& path, const ModelConfig& config, int world_size);

// Rank 0's placement on every rank; the other ranks' is not looked at. Collective.
ExpertPlacement share_placement(const ExpertPlacement& placement, ProcessGroup& group);

}  // namespace kdtree
