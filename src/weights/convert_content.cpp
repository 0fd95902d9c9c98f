#include "weights/convert_content.h"

#include <algorithm>
#include <array>
#include <filesystem>
#include <utility>

#include "config/config_sections.h"
#include "core/check.h"
#include "core/json_text.h"
#include "weights/directory_tensors.h"
#include "weights/file.h"
#include "weights/kdtr.h"
#include "weights/weight_store.h"

namespace kdtree {

namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

constexpr const char* kHeaderFile = "kdtree.json";
constexpr const char* kHeaderFormat = "kdtree bundle header";
constexpr std::array kPlainFiles = {
    "config.json",           "generation_config.json",  "tiktoken.model",     "tokenizer.json",
    "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"};

void sort_by_place(std::vector<ContentTensor>& tensors) {
  std::stable_sort(tensors.begin(), tensors.end(),
                   [](const ContentTensor& left, const ContentTensor& right) {
                     return std::pair(left.stored.file, left.stored.file_offset) <
                            std::pair(right.stored.file, right.stored.file_offset);
                   });
}

// ---- from a directory -------------------------------------------------------------------------

// "directory" of the header: see convert_content.h.
Json directory_facts(const std::map<std::string, std::string>& shapes,
                     const std::string& drafter_prefix) {
  Json facts = Json::object();
  std::map<std::string, int> counts;
  for (const auto& [name, dtype] : shapes) {
    ++counts[dtype];
  }
  if (!counts.empty()) {
    const auto most = std::max_element(
        counts.begin(), counts.end(),
        [](const auto& left, const auto& right) { return left.second < right.second; });
    facts["shape_dtype"] = most->first;
    for (const auto& [name, dtype] : shapes) {
      if (dtype != most->first) {
        facts["shape_dtype_of"][name] = dtype;
      }
    }
  }
  if (!drafter_prefix.empty()) {
    facts["drafter_prefix"] = drafter_prefix;
  }
  return facts;
}

void take_files(const Container& container, CheckpointContent& content) {
  const std::string& directory = container.path;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(directory, error)) {
    const std::string name = entry.path().filename().string();
    if (std::find(kPlainFiles.begin(), kPlainFiles.end(), name) != kPlainFiles.end()) {
      content.files[name] = find_model_file(container, name)->content;
    } else if (!name.ends_with(".safetensors") && name != kIndexName && name != kHeaderFile &&
               name != kDrafterFolder) {
      content.left_out.push_back(name);
    }
  }
  require_input(!error, "{}: {}", directory, error.message());
  std::sort(content.left_out.begin(), content.left_out.end());
}

std::int64_t common_group_size(const CheckpointContent& content) {
  const auto& of_target = content.target.config.quantization;
  if (!content.drafter || !content.drafter->config.quantization) {
    return of_target ? of_target->group_size : 0;
  }
  const std::int64_t of_drafter = content.drafter->config.quantization->group_size;
  require_input(!of_target || of_target->group_size == of_drafter,
                "{}: INT4 groups of {}, but {} has groups of {}: one bundle has one size",
                content.drafter->origin, of_drafter, content.target.origin,
                of_target ? of_target->group_size : 0);
  return of_drafter;
}

bool holds_packed(const CheckpointContent& content, bool drafter, std::string_view part = "") {
  if (!drafter && content.experts_become_packed && part.empty()) {
    return true;
  }
  return std::any_of(
      content.tensors.begin(), content.tensors.end(), [&](const ContentTensor& tensor) {
        const std::string& name = tensor.output.name;
        return name.ends_with(".qw") && name.starts_with(kDrafterPrefix) == drafter &&
               name.find(part) != std::string::npos;
      });
}

// A quantization_config for what is packed; as "ignore" tells other readers, nothing else is.
Json packed_config(const CheckpointContent& content, bool drafter, std::int64_t group_size) {
  struct Part {
    const char* name_part;
    const char* pattern;
  };
  static constexpr std::array<Part, 4> kParts = {
      {{"lm_head", "lm_head"},
       {"self_attn", "re:.*self_attn.*"},
       {".shared_experts.", "re:.*shared_experts.*"},
       {".mlp.down_proj", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"}}};
  Json config = quantization_to_json({.group_size = group_size});
  config["ignore"] = Json::array();
  for (const Part& part : kParts) {
    if (!holds_packed(content, drafter, part.name_part)) {
      config["ignore"].push_back(part.pattern);
    }
  }
  return config;
}

// "directory" of a header, which may have been written by hand.
void check_directory_facts(const Json& header, const std::string& place) {
  const auto found = header.find("directory");
  if (found == header.end()) {
    return;
  }
  const Json facts = found->is_object() ? *found : Json::object();
  const auto is_dtype = [](const Json& value) {
    return value == "I64" || value == "I32" || value == "none";
  };
  const Json dtype = facts.value("shape_dtype", Json("I64"));
  const Json others = facts.value("shape_dtype_of", Json::object());
  const bool good = found->is_object() && is_dtype(dtype) && others.is_object() &&
                    std::all_of(others.begin(), others.end(), is_dtype) &&
                    facts.value("drafter_prefix", Json("")).is_string();
  require_input(good,
                "{}: directory is {}, expected an object with shape_dtype (I64, I32 or none), "
                "shape_dtype_of and drafter_prefix",
                place, describe_json(*found));
}

// The bundle's header that came with the directory; empty if none did.
Json stored_header(const std::string& directory) {
  const std::string path = in_directory(directory, kHeaderFile);
  if (!fs::exists(path)) {
    return Json::object();
  }
  const Json json = read_json_file(path);
  const auto has = [&json](const char* key, const Json& value) {
    return json.contains(key) && json[key] == value;
  };
  require_input(json.is_object() && has("format", kHeaderFormat) && has("version", 1) &&
                    json.contains("header") && json["header"].is_object(),
                "{}: is {}, expected \"format\": \"{}\", \"version\": 1 and \"header\"", path,
                describe_json(json), kHeaderFormat);
  check_directory_facts(json["header"], path);
  for (const char* part : {"target", "drafter"}) {
    const Json section = json["header"].value(part, Json(nullptr));
    require_input(
        section.is_null() ||
            (section.is_object() && section.contains("config") && section["config"].is_object()),
        "{}: header.{} is {}, expected \"config\" in it", path, part, describe_json(section));
  }
  return json["header"];
}

// What the directory's kdtree.json says must still be true of it.
void check_stored_header(const CheckpointContent& content, const std::string& model) {
  const auto require_equal = [&](const char* part, const std::string& name, const Json& found) {
    require_input(content.header.contains(part) && directory_config(content, part) == found,
                  "{}: was changed since {} was written: remove that file to convert the directory "
                  "as it is",
                  in_directory(model, name), in_directory(model, kHeaderFile));
  };
  require_equal("target", kConfigName, content.target.config_json);
  if (content.drafter) {
    require_equal("drafter", std::string(kDrafterFolder) + "/" + kConfigName,
                  content.drafter->config_json);
  }
}

void read_directory_header(const std::string& model,
                           const std::map<std::string, std::string>& shapes,
                           const std::string& drafter_prefix, bool own_drafter,
                           CheckpointContent& content) {
  content.header = stored_header(model);
  if (content.header.contains("target") && own_drafter == content.header.contains("drafter")) {
    check_stored_header(content, model);
    if (!content.header.contains("directory")) {
      // The bundle was no directory before: its configs are in its header alone.
      content.files.erase(kConfigName);
      content.files.erase(std::string(kDrafterFolder) + "/" + kConfigName);
    }
    return;
  }
  Json header = {{"target", {{"config", content.target.config_json}}},
                 {"directory", directory_facts(shapes, drafter_prefix)}};
  if (content.drafter) {
    header["drafter"] = {{"config", content.drafter->config_json}};
  }
  if (holds_packed(content, false) || holds_packed(content, true)) {
    header["quantization"] = {{"format", "w4a16"}, {"group_size", common_group_size(content)}};
  }
  if (content.header.contains("goldens")) {
    header["goldens"] = content.header["goldens"];
  }
  content.header = std::move(header);
}

void read_drafter_directory(const Container& container, CheckpointContent& content,
                            std::map<std::string, std::string>& shapes, std::string& prefix) {
  DirectoryTensors tensors(container, kDrafterPrefix);
  prefix = tensors.common_prefix();
  tensors.add_to(content.tensors, prefix);
  shapes.insert(tensors.shapes().begin(), tensors.shapes().end());
  content.files[std::string(kDrafterFolder) + "/" + kConfigName] =
      find_model_file(container, kConfigName)->content;
}

// ---- from a bundle ----------------------------------------------------------------------------

void add_bundle_tensors(const Container& bundle, bool target, bool drafter,
                        CheckpointContent& content) {
  for (const auto& [name, raw] : bundle.files.front().tensors) {
    const bool wanted = name.starts_with(kDrafterPrefix) ? drafter : target;
    if (wanted && !name.starts_with(kFilesPrefix)) {
      content.tensors.push_back(content_tensor(bundle.path, name, raw, name));
    }
  }
}

void add_bundle_files(const Container& bundle, CheckpointContent& content) {
  const std::string_view prefix = kFilesPrefix;
  for (const auto& [name, raw] : bundle.files.front().tensors) {
    if (name.starts_with(prefix)) {
      const std::string file = name.substr(prefix.size());
      const bool plain = !file.empty() && file.find("..") == std::string::npos &&
                         file.front() != '/' && file.find('\0') == std::string::npos;
      require_input(plain, "{}: expected the name of a file behind {}",
                    tensor_place(bundle.path, name), prefix);
      content.files[file] = find_model_file(bundle, file)->content;
    }
  }
}

// Replaces, in the header, the drafter's part.
void read_other_drafter(const Container& container, CheckpointContent& content) {
  content.header["drafter"] = {{"config", content.drafter->config_json}};
  content.files.erase(std::string(kDrafterFolder) + "/" + kConfigName);
  if (container.is_bundle) {
    add_bundle_tensors(container, false, true, content);
  } else {
    std::map<std::string, std::string> shapes;
    std::string prefix;
    read_drafter_directory(container, content, shapes, prefix);
    const auto facts = content.header.find("directory");
    if (facts == content.header.end()) {
      content.files.erase(std::string(kDrafterFolder) + "/" + kConfigName);
    } else {
      facts->erase("drafter_prefix");  // the former drafter's
      if (!prefix.empty()) {
        (*facts)["drafter_prefix"] = prefix;
      }
      for (const auto& [name, dtype] : shapes) {
        (*facts)["shape_dtype_of"][name] = dtype;
      }
    }
  }
  if (holds_packed(content, true) && !content.header.contains("quantization")) {
    content.header["quantization"] = {{"format", "w4a16"},
                                      {"group_size", common_group_size(content)}};
  } else if (holds_packed(content, true)) {
    common_group_size(content);
  }
}

void check_models(const CheckpointContent& content) {
  static_cast<void>(target_bytes(
      content.target, ExpertPlacement::linear(content.target.config.n_routed_experts, 1), {}));
  if (content.drafter) {
    check_drafter_fits(content.drafter->config, content.target.config, content.drafter->origin);
    static_cast<void>(drafter_bytes(*content.drafter, {}));
  }
}

void require_no_shard(const Container& container) {
  require_input(!container.shard, "{}: is a shard, expected a whole checkpoint", container.path);
}

}  // namespace

CheckpointContent read_content(const std::string& model, const std::string& draft) {
  CheckpointContent content;
  content.target = open_target(model);
  const Container container = read_container(model, std::nullopt);
  require_no_shard(container);
  std::optional<Container> drafter;
  const bool own_drafter = draft.empty() && holds_drafter(model);
  if (own_drafter || !draft.empty()) {
    const std::string& place = draft.empty() ? model : draft;
    content.drafter = open_drafter(place);
    drafter = read_container(content.drafter->origin, std::nullopt);
    require_no_shard(*drafter);
  }
  check_models(content);
  if (container.is_bundle) {
    check_directory_facts(container.header, container.path);
    content.header = container.header;
    add_bundle_tensors(container, true, own_drafter, content);
    add_bundle_files(container, content);
    if (drafter && !own_drafter) {
      read_other_drafter(*drafter, content);
    }
  } else {
    std::string drafter_prefix;
    DirectoryTensors tensors(container, "");
    tensors.add_to(content.tensors, "");
    std::map<std::string, std::string> shapes = tensors.shapes();
    take_files(container, content);
    if (drafter && drafter->is_bundle) {
      add_bundle_tensors(*drafter, false, true, content);
    } else if (drafter) {
      read_drafter_directory(*drafter, content, shapes, drafter_prefix);
    }
    read_directory_header(model, shapes, drafter_prefix, own_drafter, content);
  }
  sort_by_place(content.tensors);
  return content;
}

nlohmann::json directory_config(const CheckpointContent& content, const char* part) {
  Json config = content.header.at(part).at("config");
  const bool drafter = std::string_view(part) == "drafter";
  const auto section = content.header.find("quantization");
  if (section == content.header.end() || !holds_packed(content, drafter)) {
    return config;
  }
  const std::int64_t group = section->at("group_size").get<std::int64_t>();
  const bool inner = config.contains("text_config") && config["text_config"].is_object() &&
                     config["text_config"].contains("quantization_config");
  Json& holder = inner ? config["text_config"] : config;
  const auto found = holder.find("quantization_config");
  const bool says_so = found != holder.end() && found->is_object() &&
                       found->value("quant_method", "") == "compressed-tensors";
  if (!says_so) {
    holder["quantization_config"] = packed_config(content, drafter, group);
  }
  return config;
}

std::optional<DType> shape_dtype(const nlohmann::json& header, const std::string& name) {
  const auto facts = header.find("directory");
  std::string dtype = "I64";
  if (facts != header.end()) {
    dtype = facts->value("shape_dtype", dtype);
    if (const auto of = facts->find("shape_dtype_of"); of != facts->end()) {
      dtype = of->value(name, dtype);
    }
  }
  if (dtype == "none") {
    return std::nullopt;
  }
  return dtype == "I32" ? DType::kInt32 : DType::kInt64;
}

std::string directory_header(const CheckpointContent& content) {
  if (content.header.contains("directory") && !content.header.contains("goldens")) {
    return "";
  }
  const Json json = {{"format", kHeaderFormat}, {"version", 1}, {"header", content.header}};
  return json.dump(1) + "\n";
}

std::string directory_name(const std::string& bundle_name) {
  std::string base = bundle_name;
  if (take_ending(base, ".qw")) {
    return base + "_packed";
  }
  if (take_ending(base, ".sc")) {
    return base + "_scale";
  }
  return base;
}

}  // namespace kdtree
