#include "placement/expert_loads.h"

#include <spdlog/fmt/fmt.h>

#include "core/check.h"
#include "core/json_text.h"
#include "placement/layer_file.h"

namespace kdtree {

namespace {

constexpr std::string_view kLoadFormat = "kdtree-expert-load";
// Of one expert; sums over experts stay exact in double precision.
constexpr std::int64_t kMostRows = std::int64_t{1} << 40;

}  // namespace

ExpertLoads empty_loads(const ModelConfig& config) {
  ExpertLoads loads;
  loads.layers.resize(static_cast<std::size_t>(config.num_hidden_layers));
  for (std::int64_t layer = 0; layer < config.num_hidden_layers; ++layer) {
    if (config.is_moe_layer(layer)) {
      loads.layers[static_cast<std::size_t>(layer)].resize(
          static_cast<std::size_t>(config.n_routed_experts));
    }
  }
  return loads;
}

nlohmann::ordered_json to_json(const ExpertLoads& loads, const ModelConfig& config) {
  nlohmann::ordered_json json = layer_file(kLoadFormat, config);
  for (std::size_t layer = 0; layer < loads.layers.size(); ++layer) {
    if (!loads.layers[layer].empty()) {
      json["layers"].push_back({{"layer", layer}, {"counts", loads.layers[layer]}});
    }
  }
  return json;
}

ExpertLoads read_expert_loads(const std::string& path, const ModelConfig& config) {
  const nlohmann::json json = read_json_file(path);
  const ConfigReader file(json, path);
  check_header(file, kLoadFormat, config);
  ExpertLoads loads = empty_loads(config);
  read_layers(file, config, [&](const ConfigReader& entry, std::int64_t layer) {
    std::vector<std::int64_t>& counts = loads.layers[static_cast<std::size_t>(layer)];
    std::vector<std::int64_t> read =
        entry.integers_or_empty("counts", {.low = 0, .high = kMostRows}, /*scalar=*/false);
    entry.require(read.size() == counts.size(), "counts",
                  fmt::format("a list of {} integers, one for each expert", counts.size()));
    counts = std::move(read);
  });
  return loads;
}

}  // namespace kdtree
