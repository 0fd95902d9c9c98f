#include "weights/checkpoint.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <filesystem>
#include <set>
#include <string_view>
#include <utility>
#include <vector>

#include "config/config_reader.h"
#include "config/config_sections.h"
#include "core/check.h"
#include "core/json_text.h"
#include "weights/file.h"
#include "weights/kdtr.h"
#include "weights/raw_tensor.h"
#include "weights/safetensors.h"

namespace kdtree {

namespace {

namespace fs = std::filesystem;

constexpr const char* kConfigName = "config.json";
constexpr const char* kSingleName = "model.safetensors";
constexpr const char* kIndexName = "model.safetensors.index.json";
constexpr std::string_view kModelPrefix = "model.";

// The tensors of one file, under the names that it uses.
struct FileTable {
  std::string file;
  RawTable tensors;
};

bool is_directory(const std::string& path) {
  std::error_code status;
  const fs::file_status found = fs::status(path, status);
  require_input(fs::exists(found), "{}: no such file or directory", path);
  return fs::is_directory(found);
}

std::map<std::string, std::string> read_index(const std::string& path) {
  const nlohmann::json json = read_json_file(path);
  const ConfigReader index(json, path);
  const nlohmann::json* map = index.find("weight_map");
  index.require(map != nullptr && map->is_object(), "weight_map", "an object");
  std::map<std::string, std::string> file_of;
  for (const auto& [name, file] : map->items()) {
    require_input(file.is_string(), "{}: weight_map[{}] is {}, expected a file name", path,
                  describe_json(name), describe_json(file));
    const auto& text = file.get_ref<const std::string&>();
    const bool plain = !text.empty() && text != "." && text != ".." &&
                       text.find_first_of(std::string_view("/\0", 2)) == std::string::npos;
    require_input(plain, "{}: weight_map[{}] is {}, expected the name of a file beside it", path,
                  describe_json(name), describe_json(file));
    file_of.emplace(name, text);
  }
  return file_of;
}

std::vector<FileTable> read_shards(const std::string& directory, const std::string& index_path) {
  const auto file_of = read_index(index_path);
  std::map<std::string, RawTable> shards;
  for (const auto& [name, file] : file_of) {
    if (shards.contains(file)) {
      continue;
    }
    const std::string path = (fs::path(directory) / file).string();
    require_input(fs::exists(path), "{}: no such file; {} places {} in it", path, index_path,
                  describe_json(name));
    shards.emplace(file, read_safetensors_header(path));
  }
  for (const auto& [file, table] : shards) {
    for (const auto& [name, tensor] : table) {
      const auto entry = file_of.find(name);
      const std::string path = (fs::path(directory) / file).string();
      require_input(entry != file_of.end(), "{} is not in {}", tensor_place(path, name),
                    index_path);
      require_input(entry->second == file, "{} is a second copy: {} places it in {}",
                    tensor_place(path, name), index_path, entry->second);
    }
  }
  for (const auto& [name, file] : file_of) {
    require_input(shards.at(file).contains(name), "{} is missing, although {} places it there",
                  tensor_place((fs::path(directory) / file).string(), name), index_path);
  }
  std::vector<FileTable> tables;
  tables.reserve(shards.size());
  for (auto& [file, table] : shards) {
    tables.push_back({(fs::path(directory) / file).string(), std::move(table)});
  }
  return tables;
}

std::vector<FileTable> read_directory(const std::string& directory) {
  const std::string single = (fs::path(directory) / kSingleName).string();
  const std::string index = (fs::path(directory) / kIndexName).string();
  if (fs::exists(single)) {
    return {{single, read_safetensors_header(single)}};
  }
  require_input(fs::exists(index), "{}: holds neither {} nor {}", directory, kSingleName,
                kIndexName);
  return read_shards(directory, index);
}

nlohmann::json read_directory_config(const std::string& directory, std::string& config_path) {
  config_path = (fs::path(directory) / kConfigName).string();
  require_input(fs::exists(config_path), "{}: holds no {}", directory, kConfigName);
  return read_json_file(config_path);
}

// Layers behind the last one hold multi-token prediction.
bool is_later_layer(std::string_view name, std::int64_t num_hidden_layers) {
  constexpr std::string_view kLayers = "model.layers.";
  if (!name.starts_with(kLayers)) {
    return false;
  }
  std::int64_t layer = -1;
  const char* begin = name.data() + kLayers.size();
  const auto [end, error] = std::from_chars(begin, name.data() + name.size(), layer);
  return error == std::errc() && end != name.data() + name.size() && *end == '.' &&
         layer >= num_hidden_layers;
}

bool is_ignored(std::string_view name, std::int64_t num_hidden_layers) {
  return name.starts_with("vision_tower.") || name.starts_with("mm_projector.") ||
         name.ends_with(".rotary_emb.inv_freq") || is_later_layer(name, num_hidden_layers);
}

std::string_view without_prefix(std::string_view name, std::string_view prefix) {
  return !prefix.empty() && name.starts_with(prefix) ? name.substr(prefix.size()) : name;
}

// Moves the tensors that are not ignored into one table of canonical names.
TensorTable canonical_table(const std::vector<FileTable>& files, std::string_view prefix,
                            std::int64_t num_hidden_layers) {
  TensorTable table;
  for (const FileTable& file : files) {
    for (const auto& [name, raw] : file.tensors) {
      const std::string canonical(without_prefix(name, prefix));
      if (is_ignored(canonical, num_hidden_layers)) {
        continue;
      }
      const bool fresh = table.emplace(canonical, to_stored(file.file, name, raw)).second;
      require_input(fresh, "{} is there both with the prefix '{}' and without",
                    tensor_place(file.file, canonical), prefix);
    }
  }
  return table;
}

bool has_packed_mlp(const TensorTable& table) {
  constexpr std::array kEndings = {std::string_view("mlp.down_proj.weight_packed"),
                                   std::string_view("mlp.down_proj.weight.qw"),
                                   std::string_view("mlp.shared_experts.down_proj.weight_packed"),
                                   std::string_view("mlp.shared_experts.down_proj.weight.qw")};
  return std::any_of(table.begin(), table.end(), [&kEndings](const auto& item) {
    return std::any_of(kEndings.begin(), kEndings.end(),
                       [&item](std::string_view ending) { return item.first.ends_with(ending); });
  });
}

// ---- bundles ----------------------------------------------------------------------------------

// Takes the bundle's own quantisation section over into the config.
void apply_bundle_quantization(const nlohmann::json& bundle, const std::string& path,
                               std::optional<QuantizationConfig>& quantization) {
  const auto section = ConfigReader(bundle, path).object("quantization");
  if (!section) {
    return;
  }
  section->text("format", {"w4a16"});
  const std::int64_t size =
      section->integer("group_size", {.low = kGroupMultiple, .high = kMaxGroupSize});
  section->require(size % kGroupMultiple == 0, "group_size", "a multiple of 8");
  section->require(!quantization || quantization->group_size == size, "group_size",
                   "the same as in the model's quantization_config");
  quantization = QuantizationConfig{.group_size = size};
}

// The config under bundle[part], or nullptr where the bundle has no such part.
const nlohmann::json* bundle_config(const nlohmann::json& bundle, const std::string& path,
                                    const char* part) {
  const auto section = ConfigReader(bundle, path).object(part);
  if (!section) {
    return nullptr;
  }
  const nlohmann::json* config = section->find("config");
  section->require(config != nullptr && config->is_object(), "config", "an object");
  return config;
}

// The tensors of one part, without the drafter's prefix.
RawTable part_of(const RawTable& tensors, bool drafter) {
  const std::string_view prefix = kDrafterPrefix;
  RawTable part;
  for (const auto& [name, raw] : tensors) {
    if (name.starts_with(prefix) == drafter) {
      part.emplace(drafter ? name.substr(prefix.size()) : name, raw);
    }
  }
  return part;
}

void check_no_stray_part(const KdtrHeader& header, const std::string& path, const char* part,
                         bool drafter) {
  if (bundle_config(header.json, path, part) == nullptr) {
    const RawTable stray = part_of(header.tensors, drafter);
    require_input(stray.empty(), "{}: tensors of the {} ('{}{}', ...) but no {}.config", path, part,
                  drafter ? kDrafterPrefix : "", stray.empty() ? "" : stray.begin()->first, part);
  }
}

TargetCheckpoint open_bundle_target(const std::string& path) {
  KdtrHeader header = read_kdtr_header(path);
  const nlohmann::json* config = bundle_config(header.json, path, "target");
  require_input(config != nullptr, "{}: the bundle holds no target model", path);
  check_no_stray_part(header, path, "drafter", true);
  TargetCheckpoint checkpoint{.origin = path,
                              .config = parse_model_config(*config, path + " (target.config)"),
                              .tensors = {},
                              .goldens = nullptr,
                              .config_json = *config};
  apply_bundle_quantization(header.json, path, checkpoint.config.quantization);
  checkpoint.tensors =
      canonical_table({{path, part_of(header.tensors, false)}}, checkpoint.config.tensor_prefix,
                      checkpoint.config.num_hidden_layers);
  if (const auto goldens = header.json.find("goldens"); goldens != header.json.end()) {
    checkpoint.goldens = std::move(*goldens);
  }
  return checkpoint;
}

DrafterCheckpoint open_bundle_drafter(const std::string& path) {
  const KdtrHeader header = read_kdtr_header(path);
  const nlohmann::json* config = bundle_config(header.json, path, "drafter");
  require_input(config != nullptr, "{}: the bundle holds no drafter", path);
  check_no_stray_part(header, path, "target", false);
  DrafterCheckpoint checkpoint{.origin = path,
                               .name_prefix = kDrafterPrefix,
                               .config = parse_drafter_config(*config, path + " (drafter.config)"),
                               .tensors = {},
                               .config_json = *config};
  apply_bundle_quantization(header.json, path, checkpoint.config.quantization);
  for (const auto& [name, raw] : part_of(header.tensors, true)) {
    checkpoint.tensors.emplace(name, to_stored(path, kDrafterPrefix + name, raw));
  }
  return checkpoint;
}

}  // namespace

TargetCheckpoint open_target(const std::string& path) {
  TargetCheckpoint checkpoint;
  if (is_directory(path)) {
    std::string config_path;
    checkpoint.origin = path;
    checkpoint.config_json = read_directory_config(path, config_path);
    checkpoint.config = parse_model_config(checkpoint.config_json, config_path);
    checkpoint.tensors = canonical_table(read_directory(path), checkpoint.config.tensor_prefix,
                                         checkpoint.config.num_hidden_layers);
  } else {
    checkpoint = open_bundle_target(path);
  }
  if (checkpoint.config.quantization) {
    checkpoint.config.quantization->mlp_is_packed = has_packed_mlp(checkpoint.tensors);
  }
  return checkpoint;
}

DrafterCheckpoint open_drafter(const std::string& path) {
  DrafterCheckpoint checkpoint;
  if (is_directory(path)) {
    std::string config_path;
    checkpoint.origin = path;
    checkpoint.config_json = read_directory_config(path, config_path);
    checkpoint.config = parse_drafter_config(checkpoint.config_json, config_path);
    checkpoint.tensors = canonical_table(read_directory(path), kModelPrefix,
                                         std::numeric_limits<std::int64_t>::max());
  } else {
    checkpoint = open_bundle_drafter(path);
  }
  if (checkpoint.config.quantization) {
    checkpoint.config.quantization->mlp_is_packed = has_packed_mlp(checkpoint.tensors);
  }
  return checkpoint;
}

bool holds_drafter(const std::string& path) {
  return !is_directory(path) &&
         bundle_config(read_kdtr_header(path).json, path, "drafter") != nullptr;
}

void read_tensor_bytes(const StoredTensor& tensor, std::int64_t offset, std::int64_t bytes,
                       void* target) {
  check(offset >= 0 && bytes >= 0 && bytes <= tensor.bytes && offset <= tensor.bytes - bytes,
        "bytes [{}, {} + {}) of a tensor of {} bytes", offset, offset, bytes, tensor.bytes);
  InputFile(tensor.file).read(tensor.file_offset + offset, bytes, target);
}

}  // namespace kdtree
