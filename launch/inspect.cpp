// kdtree inspect: what a checkpoint holds, from its headers alone.
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>

#include "commands.h"
#include "core/check.h"
#include "core/log.h"
#include "result_output.h"
#include "weights/checkpoint.h"
#include "weights/container.h"
#include "weights/kdtr.h"
#include "weights/region_reader.h"

namespace kdtree {

namespace {

using Json = nlohmann::ordered_json;

bool is_drafter_directory(const std::string& path) {
  std::ifstream stream(std::filesystem::path(path) / "config.json");
  const nlohmann::json config = nlohmann::json::parse(stream, nullptr, /*allow_exceptions=*/false);
  if (!config.is_object() || !config.contains("architectures")) {
    return false;
  }
  const nlohmann::json& names = config["architectures"];
  return names.is_array() &&
         std::find(names.begin(), names.end(), "DFlashDraftModel") != names.end();
}

struct DTypeSum {
  std::int64_t tensors = 0;
  std::int64_t bytes = 0;
};

Json tensors_json(const TensorTable& tensors) {
  std::map<std::string, DTypeSum> sums;
  Json list = Json::array();
  std::int64_t total = 0;
  for (const auto& [name, tensor] : tensors) {
    DTypeSum& sum = sums[std::string(dtype_name(tensor.dtype))];
    ++sum.tensors;
    sum.bytes += tensor.bytes;
    total += tensor.bytes;
    Json shape = Json::array();
    for (std::size_t dim = 0; dim < tensor.shape.rank(); ++dim) {
      shape.push_back(tensor.shape[dim]);
    }
    list.push_back({{"name", name},
                    {"dtype", dtype_name(tensor.dtype)},
                    {"shape", shape},
                    {"bytes", tensor.bytes}});
  }
  Json by_dtype;
  for (const auto& [dtype, sum] : sums) {
    by_dtype[dtype] = {{"tensors", sum.tensors}, {"bytes", sum.bytes}};
  }
  return {{"count", tensors.size()}, {"bytes", total}, {"by_dtype", by_dtype}, {"list", list}};
}

Json goldens_json(const nlohmann::json& goldens) {
  Json result = Json::object();
  if (goldens.is_object()) {
    for (const auto& [weights, golden] : goldens.items()) {
      result[weights] = golden.contains("cases") ? golden["cases"].size() : 0;
    }
  }
  return result;
}

// Of a bundle or a shard: the files that it holds beside tensors, and what it is a part of.
Json bundle_json(const Container& bundle) {
  Json files = Json::array();
  const std::string_view prefix = kFilesPrefix;
  for (const auto& [name, raw] : bundle.files.front().tensors) {
    if (name.starts_with(prefix)) {
      files.push_back({{"name", name.substr(prefix.size())}, {"bytes", raw.bytes}});
    }
  }
  Json json = {{"files", files}};
  if (bundle.shard) {
    json["shard"] = {{"rank", bundle.shard->rank}, {"ranks", bundle.shard->ranks}};
  }
  return json;
}

// Reads all tensors of a bundle. InputError for the first one whose checksum is wrong.
Json verify(const Container& container) {
  constexpr std::int64_t kPieceBytes = std::int64_t{4} << 20;
  require_input(container.is_bundle, "--verify: {} is a directory: safetensors have no checksums",
                container.path);
  FileSet files;
  std::int64_t bytes = 0;
  std::int64_t count = 0;
  for (const auto& [name, raw] : container.files.front().tensors) {
    const StoredTensor tensor = stored_bytes(container.path, name, raw);
    files.open(&tensor);
    verify_tensor(files, tensor, kPieceBytes);
    bytes += raw.bytes;
    ++count;
  }
  return {{"tensors", count}, {"bytes", bytes}};
}

Json inspect(const InspectOptions& options) {
  const std::string& path = options.model;
  Json json = {{"path", path}};
  if (options.verify || !is_model_directory(path)) {
    const Container container = read_container(path, std::nullopt);
    if (options.verify) {
      json["verified"] = verify(container);
    }
    json["bundle"] = bundle_json(container);
  }
  if (std::filesystem::is_directory(path) && is_drafter_directory(path)) {
    const DrafterCheckpoint drafter = open_drafter(path);
    json["drafter"] = {{"config", Json(drafter.config_json)},
                       {"tensors", tensors_json(drafter.tensors)}};
    return json;
  }
  const TargetCheckpoint target = open_target(path);
  json["target"] = {{"config", Json(target.config_json)},
                    {"quantization_group_size",
                     target.config.quantization ? target.config.quantization->group_size : 0},
                    {"tensors", tensors_json(target.tensors)},
                    {"golden_cases", goldens_json(target.goldens)}};
  if (holds_drafter(path)) {
    const DrafterCheckpoint drafter = open_drafter(path);
    json["drafter"] = {{"config", Json(drafter.config_json)},
                       {"tensors", tensors_json(drafter.tensors)}};
  }
  return json;
}

std::string part_text(const std::string& name, const Json& part) {
  std::string text = fmt::format("{}\n  config:\n", name);
  for (const auto& [key, value] : part["config"].items()) {
    text += fmt::format("    {}: {}\n", key, value.dump());
  }
  const Json& tensors = part["tensors"];
  text += fmt::format("  {} tensors, {} bytes\n", tensors["count"].dump(), tensors["bytes"].dump());
  for (const auto& [dtype, sum] : tensors["by_dtype"].items()) {
    text += fmt::format("    {}: {} tensors, {} bytes\n", dtype, sum["tensors"].dump(),
                        sum["bytes"].dump());
  }
  for (const Json& tensor : tensors["list"]) {
    text += fmt::format("    {:<64} {:>8} {}\n", tensor["name"].get<std::string>(),
                        tensor["dtype"].get<std::string>(), tensor["shape"].dump());
  }
  return text;
}

std::string inspect_text(const Json& json) {
  std::string text = json["path"].get<std::string>() + "\n";
  if (json.contains("target")) {
    const Json& target = json["target"];
    text += part_text("target", target);
    const auto group_size = target["quantization_group_size"].get<std::int64_t>();
    text += group_size > 0 ? fmt::format("  quantisation: INT4, groups of {}\n", group_size)
                           : "  quantisation: none\n";
    text += fmt::format("  golden cases: {}\n",
                        target["golden_cases"].empty() ? "none" : target["golden_cases"].dump());
  }
  if (json.contains("drafter")) {
    text += part_text("drafter", json["drafter"]);
  }
  if (json.contains("bundle")) {
    for (const Json& file : json["bundle"]["files"]) {
      text +=
          fmt::format("file {}: {} bytes\n", file["name"].get<std::string>(), file["bytes"].dump());
    }
    if (json["bundle"].contains("shard")) {
      const Json& shard = json["bundle"]["shard"];
      text += fmt::format("shard: what rank {} of {} reads\n", shard["rank"].dump(),
                          shard["ranks"].dump());
    }
  }
  if (json.contains("verified")) {
    text += fmt::format("checksums of {} tensors, {} bytes: right\n",
                        json["verified"]["tensors"].dump(), json["verified"]["bytes"].dump());
  }
  return text;
}

}  // namespace

int run_inspect(const InspectOptions& options, ProcessGroup& group) {
  run_together(group, [&] {
    init_logging("info", group.rank(), group.world_size());
    if (group.rank() == 0) {
      const Json json = inspect(options);
      // A path may hold bytes that are no UTF-8.
      write_stdout(options.output_format == "json"
                       ? json.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n"
                       : inspect_text(json));
    }
  });
  return 0;
}

}  // namespace kdtree
