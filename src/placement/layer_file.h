// What placement and load files have in common: a header that names format, version and the sizes
// of the model, and a list with an entry for each mixture-of-experts layer.
#pragma once

#include <functional>
#include <nlohmann/json.hpp>
#include <string_view>
#include <vector>

#include "config/config_reader.h"
#include "config/model_config.h"

namespace kdtree {

// The model's numbers of its layers with experts, ascending.
std::vector<std::int64_t> moe_layers(const ModelConfig& config);

// The header for `format`, with an empty list of layers.
nlohmann::ordered_json layer_file(std::string_view format, const ModelConfig& config);

// InputError unless `file` has that header, in the version that this program writes.
void check_header(const ConfigReader& file, std::string_view format, const ModelConfig& config);

// Calls read(entry, layer) for each entry of the list of layers. InputError unless it has each
// mixture-of-experts layer once, in order.
void read_layers(const ConfigReader& file, const ModelConfig& config,
                 const std::function<void(const ConfigReader& entry, std::int64_t layer)>& read);

}  // namespace kdtree
