#include "placement/placement_file.h"

#include <spdlog/fmt/fmt.h>

#include <algorithm>
#include <vector>

#include "core/check.h"
#include "core/json_text.h"
#include "placement/layer_file.h"

namespace kdtree {

namespace {

constexpr std::string_view kPlacementFormat = "kdtree-expert-placement";

using Experts = std::vector<std::int64_t>;

// The experts of each rank, in slot order.
LayerPlacement read_layer(const ConfigReader& entry, const ModelConfig& config, int world_size) {
  const nlohmann::json* ranks = entry.find("slots");
  entry.require(
      ranks != nullptr && ranks->is_array() && std::ssize(*ranks) == std::int64_t{world_size},
      "slots", fmt::format("a list of {} lists of experts, one for each rank", world_size));
  std::vector<Experts> experts_of_ranks;
  std::vector<bool> placed(static_cast<std::size_t>(config.n_routed_experts));
  for (int rank = 0; rank < world_size; ++rank) {
    // The rank's list as a value of its own, so that an error shows it alone.
    const std::string key = entry.full_key(fmt::format("slots[{}]", rank));
    nlohmann::json object;
    object[key] = (*ranks)[static_cast<std::size_t>(rank)];
    const ConfigReader reader(object, entry.origin());
    reader.require(reader.find(key) != nullptr, key, "a list of experts");
    Experts experts =
        reader.integers_or_empty(key, {.low = 0, .high = config.n_routed_experts - 1}, false);
    Experts sorted = experts;
    std::sort(sorted.begin(), sorted.end());
    const auto twice = std::adjacent_find(sorted.begin(), sorted.end());
    if (twice != sorted.end()) {
      reader.refuse(key, fmt::format("every expert once at most, and {} is there twice", *twice));
    }
    for (const std::int64_t expert : experts) {
      placed[static_cast<std::size_t>(expert)] = true;
    }
    experts_of_ranks.push_back(std::move(experts));
  }
  const auto missing = std::find(placed.begin(), placed.end(), false);
  if (missing != placed.end()) {
    entry.refuse("slots", fmt::format("every expert on a rank, and {} is on none",
                                      std::distance(placed.begin(), missing)));
  }
  return {config.n_routed_experts, std::move(experts_of_ranks)};
}

}  // namespace

nlohmann::ordered_json to_json(const ExpertPlacement& placement, const ModelConfig& config) {
  nlohmann::ordered_json json = layer_file(kPlacementFormat, config);
  json["ranks"] = placement.world_size();
  for (std::int64_t layer = 0; layer < config.num_hidden_layers; ++layer) {
    if (config.is_moe_layer(layer)) {
      json["layers"].push_back(
          {{"layer", layer}, {"slots", placement.layer(layer).experts_of_ranks()}});
    }
  }
  return json;
}

ExpertPlacement read_placement(const std::string& path, const ModelConfig& config, int world_size) {
  const nlohmann::json json = read_json_file(path);
  const ConfigReader file(json, path);
  check_header(file, kPlacementFormat, config);
  const nlohmann::json* ranks = file.find("ranks");
  file.require(
      ranks != nullptr && *ranks == world_size, "ranks",
      fmt::format("{}, as many as this run has (expert groups, with --moe-tp)", world_size));
  const LayerPlacement linear =
      ExpertPlacement::linear(config.n_routed_experts, world_size).layer(0);
  std::vector<LayerPlacement> layers(
      std::max<std::size_t>(1, static_cast<std::size_t>(config.num_hidden_layers)), linear);
  read_layers(file, config, [&](const ConfigReader& entry, std::int64_t layer) {
    layers[static_cast<std::size_t>(layer)] = read_layer(entry, config, world_size);
  });
  return ExpertPlacement(std::move(layers));
}

ExpertPlacement share_placement(const ExpertPlacement& placement, ProcessGroup& group) {
  // alike, layers, experts, ranks; then of each layer and rank the number of slots and its experts.
  std::vector<std::int64_t> words;
  if (group.rank() == 0) {
    words = {placement.alike() ? 1 : 0, std::ssize(placement.layers()),
             placement.n_routed_experts(), placement.world_size()};
    for (const LayerPlacement& layer : placement.layers()) {
      for (const Experts& experts : layer.experts_of_ranks()) {
        words.push_back(std::ssize(experts));
        words.insert(words.end(), experts.begin(), experts.end());
      }
    }
  }
  auto size = static_cast<std::int64_t>(words.size());
  group.broadcast(&size, sizeof size, 0);
  words.resize(static_cast<std::size_t>(size));
  group.broadcast(words.data(), size * static_cast<std::int64_t>(sizeof(std::int64_t)), 0);
  std::vector<LayerPlacement> layers;
  std::size_t at = 4;
  for (std::int64_t layer = 0; layer < words[1]; ++layer) {
    std::vector<Experts> experts_of_ranks;
    for (std::int64_t rank = 0; rank < words[3]; ++rank) {
      const auto first = words.begin() + static_cast<std::ptrdiff_t>(at) + 1;
      const std::int64_t count = words[at];
      experts_of_ranks.emplace_back(first, first + count);
      at += 1 + static_cast<std::size_t>(count);
    }
    layers.emplace_back(words[2], std::move(experts_of_ranks));
  }
  return words[0] != 0 ? ExpertPlacement(std::move(layers.front()))
                       : ExpertPlacement(std::move(layers));
}

}  // namespace kdtree
