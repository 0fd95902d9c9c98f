#include "weights/checkpoint.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <filesystem>
#include <limits>
#include <set>
#include <string_view>
#include <utility>
#include <vector>

#include "config/config_reader.h"
#include "config/config_sections.h"
#include "core/check.h"
#include "core/json_text.h"
#include "weights/container.h"
#include "weights/file.h"
#include "weights/kdtr.h"
#include "weights/raw_tensor.h"

namespace kdtree {

namespace {

namespace fs = std::filesystem;

constexpr std::string_view kModelPrefix = "model.";

nlohmann::json read_directory_config(const std::string& directory, std::string& config_path) {
  config_path = (fs::path(directory) / kConfigName).string();
  require_input(fs::exists(config_path), "{}: holds no {}", directory, kConfigName);
  return read_json_file(config_path);
}

// Of "model.layers.61.enorm.weight" the layer 61; -1 of other names. `part` becomes what follows.
std::int64_t layer_of(std::string_view name, std::string_view& part) {
  constexpr std::string_view kLayers = "model.layers.";
  std::int64_t layer = -1;
  if (!name.starts_with(kLayers)) {
    return -1;
  }
  const char* end_of_name = name.data() + name.size();
  const auto [end, error] = std::from_chars(name.data() + kLayers.size(), end_of_name, layer);
  if (error != std::errc() || end == end_of_name || *end != '.') {
    return -1;
  }
  part = std::string_view(end + 1, static_cast<std::size_t>(end_of_name - end - 1));
  return layer;
}

// The layers behind the last one that hold multi-token prediction. A config that states too few
// layers has others behind it, which must not be passed over.
class PredictionLayers {
 public:
  explicit PredictionLayers(std::int64_t num_hidden_layers)
      : num_hidden_layers_(num_hidden_layers) {}

  void look_at(std::string_view name) {
    constexpr std::array<std::string_view, 4> kOwnParts = {"eh_proj.", "enorm.", "hnorm.",
                                                           "shared_head."};
    std::string_view part;
    const std::int64_t layer = layer_of(name, part);
    if (layer >= num_hidden_layers_ &&
        std::any_of(kOwnParts.begin(), kOwnParts.end(),
                    [part](std::string_view own) { return part.starts_with(own); })) {
      layers_.insert(layer);
    }
  }
  bool contain(std::string_view name) const {
    std::string_view part;
    return layers_.contains(layer_of(name, part));
  }

 private:
  std::int64_t num_hidden_layers_;
  std::set<std::int64_t> layers_;
};

bool is_of_no_use(std::string_view name) {
  return name.starts_with("vision_tower.") || name.starts_with("mm_projector.") ||
         name.ends_with(".rotary_emb.inv_freq");
}

std::string_view without_prefix(std::string_view name, std::string_view prefix) {
  return !prefix.empty() && name.starts_with(prefix) ? name.substr(prefix.size()) : name;
}

// Moves the tensors that are not ignored into one table of canonical names.
TensorTable canonical_table(const std::vector<FileTable>& files, std::string_view prefix,
                            std::int64_t num_hidden_layers) {
  TensorTable table;
  PredictionLayers prediction(num_hidden_layers);
  for (const FileTable& file : files) {
    for (const auto& [name, raw] : file.tensors) {
      prediction.look_at(without_prefix(name, prefix));
    }
  }
  for (const FileTable& file : files) {
    for (const auto& [name, raw] : file.tensors) {
      const std::string canonical(without_prefix(name, prefix));
      if (is_of_no_use(canonical) || prediction.contain(canonical)) {
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

// The tensors of one part, without the drafter's prefix and without files.
RawTable part_of(const RawTable& tensors, bool drafter) {
  const std::string_view prefix = kDrafterPrefix;
  RawTable part;
  for (const auto& [name, raw] : tensors) {
    if (name.starts_with(prefix) == drafter && !name.starts_with(kFilesPrefix)) {
      part.emplace(drafter ? name.substr(prefix.size()) : name, raw);
    }
  }
  return part;
}

void check_no_stray_part(const Container& bundle, const char* part, bool drafter) {
  if (bundle_config(bundle.header, bundle.path, part) == nullptr) {
    const RawTable stray = part_of(bundle.files.front().tensors, drafter);
    require_input(stray.empty(), "{}: tensors of the {} ('{}{}', ...) but no {}.config",
                  bundle.path, part, drafter ? kDrafterPrefix : "",
                  stray.empty() ? "" : stray.begin()->first, part);
  }
}

TargetCheckpoint bundle_target(const Container& bundle) {
  const std::string& path = bundle.path;
  const nlohmann::json* config = bundle_config(bundle.header, path, "target");
  require_input(config != nullptr, "{}: the bundle holds no target model", path);
  check_no_stray_part(bundle, "drafter", true);
  TargetCheckpoint checkpoint{.origin = path,
                              .config = parse_model_config(*config, path + " (target.config)"),
                              .tensors = {},
                              .goldens = nullptr,
                              .config_json = *config,
                              .shard = bundle.shard};
  apply_bundle_quantization(bundle.header, path, checkpoint.config.quantization);
  checkpoint.tensors =
      canonical_table({{path, part_of(bundle.files.front().tensors, false)}},
                      checkpoint.config.tensor_prefix, checkpoint.config.num_hidden_layers);
  if (const auto goldens = bundle.header.find("goldens"); goldens != bundle.header.end()) {
    checkpoint.goldens = *goldens;
  }
  return checkpoint;
}

DrafterCheckpoint bundle_drafter(const Container& bundle) {
  const std::string& path = bundle.path;
  const nlohmann::json* config = bundle_config(bundle.header, path, "drafter");
  require_input(config != nullptr, "{}: the bundle holds no drafter", path);
  check_no_stray_part(bundle, "target", false);
  DrafterCheckpoint checkpoint{.origin = path,
                               .name_prefix = kDrafterPrefix,
                               .config = parse_drafter_config(*config, path + " (drafter.config)"),
                               .tensors = {},
                               .config_json = *config,
                               .shard = bundle.shard};
  apply_bundle_quantization(bundle.header, path, checkpoint.config.quantization);
  for (const auto& [name, raw] : part_of(bundle.files.front().tensors, true)) {
    checkpoint.tensors.emplace(name, to_stored(path, kDrafterPrefix + name, raw));
  }
  return checkpoint;
}

}  // namespace

TargetCheckpoint open_target(const Container& container) {
  TargetCheckpoint checkpoint;
  if (container.is_bundle) {
    checkpoint = bundle_target(container);
  } else {
    std::string config_path;
    checkpoint.origin = container.path;
    checkpoint.config_json = read_directory_config(container.path, config_path);
    checkpoint.config = parse_model_config(checkpoint.config_json, config_path);
    checkpoint.tensors = canonical_table(container.files, checkpoint.config.tensor_prefix,
                                         checkpoint.config.num_hidden_layers);
  }
  if (checkpoint.config.quantization) {
    checkpoint.config.quantization->mlp_is_packed = has_packed_mlp(checkpoint.tensors);
  }
  return checkpoint;
}

TargetCheckpoint open_target(const std::string& path, const std::optional<ShardOf>& reader) {
  if (is_model_directory(path)) {
    // The config's mistakes come before those of the tensors.
    std::string config_path;
    const nlohmann::json config = read_directory_config(path, config_path);
    parse_model_config(config, config_path);
  }
  return open_target(read_container(path, reader));
}

DrafterCheckpoint open_drafter(const Container& container) {
  DrafterCheckpoint checkpoint;
  if (container.is_bundle) {
    checkpoint = bundle_drafter(container);
  } else {
    std::string config_path;
    checkpoint.origin = container.path;
    checkpoint.config_json = read_directory_config(container.path, config_path);
    checkpoint.config = parse_drafter_config(checkpoint.config_json, config_path);
    checkpoint.tensors =
        canonical_table(container.files, kModelPrefix, std::numeric_limits<std::int64_t>::max());
  }
  if (checkpoint.config.quantization) {
    checkpoint.config.quantization->mlp_is_packed = has_packed_mlp(checkpoint.tensors);
  }
  return checkpoint;
}

DrafterCheckpoint open_drafter(const std::string& path, const std::optional<ShardOf>& reader) {
  if (!is_model_directory(path)) {
    return open_drafter(read_container(path, reader));
  }
  const std::string own = drafter_folder(path);
  const std::string directory = fs::exists(fs::path(own) / kConfigName) ? own : path;
  std::string config_path;
  const nlohmann::json config = read_directory_config(directory, config_path);
  parse_drafter_config(config, config_path);
  return open_drafter(read_container(directory, reader));
}

std::string drafter_folder(const std::string& path) {
  return (fs::path(path) / kDrafterFolder).string();
}

bool holds_drafter(const std::string& path) {
  if (is_model_directory(path)) {
    return fs::exists(fs::path(drafter_folder(path)) / kConfigName);
  }
  const Container bundle = read_container(path, std::nullopt);
  return bundle_config(bundle.header, bundle.path, "drafter") != nullptr;
}

void read_tensor_bytes(const StoredTensor& tensor, std::int64_t offset, std::int64_t bytes,
                       void* target) {
  check(offset >= 0 && bytes >= 0 && bytes <= tensor.bytes && offset <= tensor.bytes - bytes,
        "bytes [{}, {} + {}) of a tensor of {} bytes", offset, offset, bytes, tensor.bytes);
  InputFile(tensor.file).read(tensor.file_offset + offset, bytes, target);
}

}  // namespace kdtree
