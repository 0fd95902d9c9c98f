// How often each routed expert was chosen, and the file that keeps it.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "config/model_config.h"

namespace kdtree {

struct ExpertLoads {
  // [num_hidden_layers][n_routed_experts] rows that chose each expert; dense layers are empty.
  std::vector<std::vector<std::int64_t>> layers;

  bool operator==(const ExpertLoads&) const = default;
};

// Nothing counted yet, in the shape of the model.
ExpertLoads empty_loads(const ModelConfig& config);

// format, version, the sizes of the model and, of each mixture-of-experts layer, its number and
// counts.
nlohmann::ordered_json to_json(const ExpertLoads& loads, const ModelConfig& config);
// InputError, naming file, key, value and what was expected, unless the file holds such a load of a
// model of these sizes.
ExpertLoads read_expert_loads(const std::string& path, const ModelConfig& config);

}  // namespace kdtree
