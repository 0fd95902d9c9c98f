#include "placement/layer_file.h"

#include <spdlog/fmt/fmt.h>

#include <string>
#include <vector>

#include "core/check.h"

namespace kdtree {

namespace {

constexpr std::int64_t kVersion = 1;

void expect_integer(const ConfigReader& file, std::string_view key, std::int64_t expected) {
  const nlohmann::json* value = file.find(key);
  file.require(value != nullptr && *value == expected, key, std::to_string(expected));
}

}  // namespace

std::vector<std::int64_t> moe_layers(const ModelConfig& config) {
  std::vector<std::int64_t> layers;
  for (std::int64_t layer = 0; layer < config.num_hidden_layers; ++layer) {
    if (config.is_moe_layer(layer)) {
      layers.push_back(layer);
    }
  }
  return layers;
}

nlohmann::ordered_json layer_file(std::string_view format, const ModelConfig& config) {
  return {{"format", format},
          {"version", kVersion},
          {"num_hidden_layers", config.num_hidden_layers},
          {"n_routed_experts", config.n_routed_experts},
          {"layers", nlohmann::ordered_json::array()}};
}

void check_header(const ConfigReader& file, std::string_view format, const ModelConfig& config) {
  file.text("format", {format});
  expect_integer(file, "version", kVersion);
  expect_integer(file, "num_hidden_layers", config.num_hidden_layers);
  expect_integer(file, "n_routed_experts", config.n_routed_experts);
}

void read_layers(const ConfigReader& file, const ModelConfig& config,
                 const std::function<void(const ConfigReader& entry, std::int64_t layer)>& read) {
  const std::vector<std::int64_t> layers = moe_layers(config);
  const nlohmann::json* list = file.find("layers");
  file.require(
      list != nullptr && list->is_array() && list->size() == layers.size(), "layers",
      fmt::format("a list of {} entries, one for each mixture-of-experts layer", layers.size()));
  for (std::size_t i = 0; i < layers.size(); ++i) {
    const ConfigReader entry((*list)[i], file.origin(), fmt::format("layers[{}]", i));
    expect_integer(entry, "layer", layers[i]);
    read(entry, layers[i]);
  }
}

}  // namespace kdtree
