#include "weights/convert.h"

#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <map>
#include <set>
#include <utility>

#include "core/check.h"
#include "weights/convert_content.h"
#include "weights/convert_items.h"
#include "weights/kdtr.h"
#include "weights/load_plan.h"
#include "weights/number_formats.h"
#include "weights/partial_output.h"
#include "weights/safetensors.h"
#include "weights/weight_store.h"

namespace kdtree {

namespace {

using Json = nlohmann::json;

// One file that is to be written: its items' tensors in order.
struct OutputFilePlan {
  std::string name;
  Json header;  // of a bundle
  std::vector<ConvertItem> items;
};

// What is written for the tensors of `content` as they are.
ConvertItem copy_item(const ContentTensor& tensor) {
  return {.outputs = {tensor.output},
          .source = &tensor.stored,
          .block = {.rows = {0, 1}, .columns = {0, tensor.stored.bytes}}};
}

ConvertItem bytes_item(std::string name, std::string bytes) {
  OutputTensor output{.name = std::move(name),
                      .dtype = std::string(dtype_name(DType::kUInt8)),
                      .shape = {std::ssize(bytes)},
                      .bytes = std::ssize(bytes)};
  return {.outputs = {std::move(output)}, .literal = std::move(bytes)};
}

ConvertItem quantize_item(const LoadRegion& region, const std::string& name) {
  const std::int64_t rows = region.rows.size();
  const std::int64_t columns = region.columns.size();
  const std::int64_t group = region.quantize_group;
  return {.outputs = {output_tensor(name + ".qw", DType::kInt32, {rows, columns / kInt4PerWord}),
                      output_tensor(name + ".sc", DType::kBFloat16, {rows, columns / group})},
          .quantize = region};
}

// ---- what to write ----------------------------------------------------------------------------

// Bundle names of the tensors of a content, by file and name there.
class BundleNames {
 public:
  explicit BundleNames(const CheckpointContent& content) {
    for (const ContentTensor& tensor : content.tensors) {
      names_.emplace(std::pair(tensor.stored.file, tensor.stored.name), &tensor);
    }
  }
  const ContentTensor& of(const StoredTensor& stored) const {
    return *names_.at({stored.file, stored.name});
  }

 private:
  std::map<std::pair<std::string, std::string>, const ContentTensor*> names_;
};

LoadPlan target_load_plan(const CheckpointContent& content, const LoadOptions& options) {
  return plan_target(
      content.target,
      ExpertPlacement::linear(content.target.config.n_routed_experts, options.world_size), options);
}

LoadOptions load_options(const ConvertOptions& options, int rank, int ranks) {
  LoadOptions load;
  load.rank = rank;
  load.world_size = ranks;
  load.verify_checksums = false;
  load.replicate_shared_experts = true;  // so that either exchange finds what it needs
  load.weights = options.group_size > 0 ? WeightsChoice::kInt4 : WeightsChoice::kAuto;
  if (options.group_size > 0) {
    load.int4_group_size = options.group_size;
  }
  return load;
}

// All tensors of the content; with a group size routed experts become INT4.
std::vector<ConvertItem> whole_items(const CheckpointContent& content,
                                     const ConvertOptions& options) {
  std::set<const ContentTensor*> replaced;
  std::vector<ConvertItem> quantized;
  if (options.group_size > 0) {
    const BundleNames names(content);
    for (const LoadRegion& region :
         target_load_plan(content, load_options(options, 0, 1)).regions) {
      if (region.quantize_group > 0) {
        quantized.push_back(quantize_item(region, names.of(*region.values).output.name));
        replaced.insert(&names.of(*region.values));
        if (region.scales != nullptr) {
          replaced.insert(&names.of(*region.scales));
        }
      }
    }
  }
  std::vector<ConvertItem> items;
  for (const ContentTensor& tensor : content.tensors) {
    if (options.keep_originals || !replaced.contains(&tensor)) {
      items.push_back(copy_item(tensor));
    }
  }
  std::move(quantized.begin(), quantized.end(), std::back_inserter(items));
  return items;
}

// A block of a stored matrix, or all of a vector.
ConvertItem block_item(const StoredTensor& stored, const StoredSlice& block,
                       const ContentTensor& tensor) {
  const StoredSlice all = stored_extent(stored);
  if (block == all) {
    return copy_item(tensor);
  }
  ConvertItem item{.outputs = {output_tensor(tensor.output.name, stored.dtype,
                                             {block.rows.size(), block.columns.size()})},
                   .source = &stored,
                   .block = block};
  item.outputs.front().full_shape = {all.rows.end, all.columns.end};
  item.outputs.front().first = {block.rows.begin, block.columns.begin};
  return item;
}

// What rank load.rank reads of the plan's tensors.
void add_shard_items(const LoadPlan& plan, const BundleNames& names,
                     std::vector<ConvertItem>& items) {
  for (const LoadRegion& region : plan.regions) {
    const ContentTensor& values = names.of(*region.values);
    if (region.quantize_group > 0) {
      items.push_back(quantize_item(region, values.output.name));
      continue;
    }
    items.push_back(block_item(*region.values, stored_values(region), values));
    if (region.scales != nullptr) {
      items.push_back(block_item(*region.scales, stored_scales(region), names.of(*region.scales)));
    }
  }
}

void add_file_items(const CheckpointContent& content, std::vector<ConvertItem>& items) {
  for (const auto& [name, text] : content.files) {
    items.push_back(bytes_item(kFilesPrefix + name, text));
  }
}

OutputFilePlan shard_plan(const CheckpointContent& content, const BundleNames& names,
                          const ConvertOptions& options, int rank) {
  const ShardOf shard{.rank = rank, .ranks = options.shard_for};
  OutputFilePlan file{.name = shard_name(shard), .header = content.header, .items = {}};
  file.header["shard"] = {{"rank", shard.rank}, {"ranks", shard.ranks}};
  const LoadOptions load = load_options(options, shard.rank, shard.ranks);
  add_file_items(content, file.items);
  add_shard_items(target_load_plan(content, load), names, file.items);
  if (content.drafter) {
    add_shard_items(plan_drafter(*content.drafter, load), names, file.items);
  }
  return file;
}

// The tensors of a directory under their names there, and weight_shapes.
std::vector<ConvertItem> directory_items(std::vector<ConvertItem> items, const Json& header,
                                         const std::string& prefix) {
  std::vector<ConvertItem> result;
  for (ConvertItem& item : items) {
    std::vector<ConvertItem> shapes;
    for (OutputTensor& output : item.outputs) {
      if (output.name.ends_with(".qw")) {
        const std::string base = output.name.substr(0, output.name.size() - 3);
        if (const auto dtype = shape_dtype(header, base)) {
          const std::array<std::int64_t, 2> sizes = {output.shape[0],
                                                     output.shape[1] * kInt4PerWord};
          const std::array<std::int32_t, 2> narrow_sizes = {static_cast<std::int32_t>(sizes[0]),
                                                            static_cast<std::int32_t>(sizes[1])};
          ConvertItem shape{.outputs = {output_tensor(base + "_shape", *dtype, Shape{2})}};
          shape.literal.resize(static_cast<std::size_t>(shape.outputs.front().bytes));
          std::memcpy(shape.literal.data(),
                      *dtype == DType::kInt64 ? static_cast<const void*>(sizes.data())
                                              : narrow_sizes.data(),
                      shape.literal.size());
          shapes.push_back(std::move(shape));
        }
      }
      output.name = directory_name(output.name);
    }
    result.push_back(std::move(item));
    std::move(shapes.begin(), shapes.end(), std::back_inserter(result));
  }
  for (ConvertItem& item : result) {
    for (OutputTensor& output : item.outputs) {
      std::string& name = output.name;
      if (name.starts_with(kDrafterPrefix)) {
        name.replace(0, std::string_view(kDrafterPrefix).size(), prefix);
      }
    }
  }
  return result;
}

// Divides items into files of about max_file_bytes: "model-00001-of-00003.safetensors", or a single
// "model.safetensors".
std::vector<OutputFilePlan> divide(std::vector<ConvertItem> items, const std::string& folder,
                                   std::int64_t max_file_bytes) {
  std::vector<OutputFilePlan> files(1);
  std::int64_t bytes = 0;
  for (ConvertItem& item : items) {
    std::int64_t more = 0;
    for (const OutputTensor& output : item.outputs) {
      more += output.bytes;
    }
    if (bytes > 0 && bytes + more > max_file_bytes) {
      files.emplace_back();
      bytes = 0;
    }
    bytes += more;
    files.back().items.push_back(std::move(item));
  }
  for (std::size_t i = 0; i < files.size(); ++i) {
    files[i].name = folder + (files.size() == 1 ? kSingleName
                                                : fmt::format("model-{:05}-of-{:05}.safetensors",
                                                              i + 1, files.size()));
  }
  return files;
}

std::vector<OutputFilePlan> directory_plan(const CheckpointContent& content,
                                           const ConvertOptions& options) {
  const Json& header = content.header;
  std::vector<ConvertItem> target;
  std::vector<ConvertItem> drafter;
  for (ConvertItem& item : whole_items(content, options)) {
    const bool of_drafter = item.outputs.front().name.starts_with(kDrafterPrefix);
    (of_drafter ? drafter : target).push_back(std::move(item));
  }
  std::string prefix;
  if (const auto facts = header.find("directory"); facts != header.end()) {
    prefix = facts->value("drafter_prefix", "");
  }
  std::vector<OutputFilePlan> files =
      divide(directory_items(std::move(target), header, ""), "", options.max_file_bytes);
  if (content.drafter) {
    std::vector<OutputFilePlan> of_drafter =
        divide(directory_items(std::move(drafter), header, prefix),
               std::string(kDrafterFolder) + "/", options.max_file_bytes);
    std::move(of_drafter.begin(), of_drafter.end(), std::back_inserter(files));
  }
  return files;
}

// ---- writing ----------------------------------------------------------------------------------

// A file's layout, whatever the container.
struct LaidOutFile {
  std::vector<OutputTensor> tensors;
  std::vector<std::int64_t> offsets;
  std::int64_t bytes = 0;
  std::optional<KdtrLayout> kdtr;
  std::string head;  // of safetensors
};

LaidOutFile lay_out(const OutputFilePlan& plan, bool bundle) {
  LaidOutFile file;
  for (const ConvertItem& item : plan.items) {
    file.tensors.insert(file.tensors.end(), item.outputs.begin(), item.outputs.end());
  }
  if (bundle) {
    file.kdtr = kdtr_layout(plan.header, file.tensors);
    file.offsets = file.kdtr->offsets;
    file.bytes = file.kdtr->file_bytes;
  } else {
    SafetensorsLayout layout = safetensors_layout(file.tensors);
    file.offsets = std::move(layout.offsets);
    file.bytes = layout.file_bytes;
    file.head = std::move(layout.head);
  }
  return file;
}

// A run with an equal key writes equal bytes.
std::string run_key(const std::vector<OutputFilePlan>& plans, const std::vector<LaidOutFile>& files,
                    const std::map<std::string, std::string>& texts) {
  std::set<std::string> sources;
  Json facts = {{"texts", texts}, {"files", Json::array()}, {"sources", Json::array()}};
  for (std::size_t i = 0; i < files.size(); ++i) {
    facts["files"].push_back(
        {plans[i].name, files[i].kdtr ? files[i].kdtr->header.dump() : files[i].head});
    for (const ConvertItem& item : plans[i].items) {
      for (const StoredTensor* source : item.sources()) {
        sources.insert(source->file);
      }
      if (!item.literal.empty()) {
        facts["files"].push_back(checksum_text(item.literal));
      }
    }
  }
  for (const std::string& source : sources) {
    struct stat status {};
    check(::stat(source.c_str(), &status) == 0, "{}: cannot be looked at", source);
    facts["sources"].push_back(
        {source, status.st_size, status.st_mtim.tv_sec, status.st_mtim.tv_nsec});
  }
  return checksum_text(facts.dump(-1, ' ', false, Json::error_handler_t::replace));
}

// The names that an index gives to the tensors of several files.
std::string index_text(const std::vector<OutputFilePlan>& plans, const std::string& folder) {
  Json map = Json::object();
  std::int64_t bytes = 0;
  for (const OutputFilePlan& plan : plans) {
    if (plan.name.starts_with(kDrafterFolder) != !folder.empty()) {
      continue;
    }
    for (const ConvertItem& item : plan.items) {
      for (const OutputTensor& output : item.outputs) {
        map[output.name] = plan.name.substr(folder.size());
        bytes += output.bytes;
      }
    }
  }
  return Json({{"metadata", {{"total_size", bytes}}}, {"weight_map", map}}).dump(1) + "\n";
}

// The small files of a directory.
std::map<std::string, std::string> directory_texts(const CheckpointContent& content,
                                                   const std::vector<OutputFilePlan>& plans) {
  std::map<std::string, std::string> texts = content.files;
  const auto set_config = [&](const char* part, const std::string& name) {
    const Json config = directory_config(content, part);
    const auto stored = texts.find(name);
    if (stored == texts.end() ||
        Json::parse(stored->second, nullptr, /*allow_exceptions=*/false) != config) {
      texts[name] = config.dump(1) + "\n";
    }
  };
  const std::string folder = std::string(kDrafterFolder) + "/";
  set_config("target", kConfigName);
  if (content.drafter) {
    set_config("drafter", folder + kConfigName);
  }
  if (const std::string header = directory_header(content); !header.empty()) {
    texts["kdtree.json"] = header;
  }
  for (const std::string& place : {std::string(), folder}) {
    const bool divided = std::any_of(plans.begin(), plans.end(), [&place](const auto& plan) {
      return plan.name.starts_with(place + "model-00001-of-");
    });
    if (divided) {
      texts[place + kIndexName] = index_text(plans, place);
    }
  }
  return texts;
}

// What the routed experts' INT4 changes about the checkpoint as a whole.
void note_quantization(const ConvertOptions& options, CheckpointContent& content) {
  content.header["quantization"] = {{"format", "w4a16"}, {"group_size", options.group_size}};
  content.experts_become_packed = true;
  // Both belong to the checkpoint as it was.
  content.header.erase("directory");
  content.files.erase(kConfigName);
  content.files.erase(std::string(kDrafterFolder) + "/" + kConfigName);
  if (const auto goldens = content.header.find("goldens"); goldens != content.header.end()) {
    goldens->erase("quantized");
    if (!options.keep_originals) {
      goldens->erase("original");
    }
    if (goldens->empty()) {
      content.header.erase("goldens");
    }
  }
}

void check_quantization(const ConvertOptions& options, const CheckpointContent& content) {
  const std::optional<QuantizationConfig>& stored = content.target.config.quantization;
  require_input(!stored || stored->group_size == options.group_size,
                "{}: holds INT4 groups of {}: expected --group-size {}", content.target.origin,
                stored ? stored->group_size : 0, stored ? stored->group_size : 0);
  const LoadPlan plan = target_load_plan(content, load_options(options, 0, 1));
  require_input(std::any_of(plan.regions.begin(), plan.regions.end(),
                            [](const LoadRegion& region) { return region.quantize_group > 0; }),
                "{}: holds no routed experts in floats or fp8 that could be quantised",
                content.target.origin);
}

}  // namespace

ConvertReport convert(const ConvertOptions& options) {
  const auto start = std::chrono::steady_clock::now();
  CheckpointContent content = read_content(options.model, options.draft);
  if (options.group_size > 0) {
    check_quantization(options, content);
    note_quantization(options, content);
  }
  const bool bundle = options.shard_for > 0 || options.output.ends_with(".kdtr");
  std::vector<OutputFilePlan> plans;
  std::map<std::string, std::string> texts;
  if (options.shard_for > 0) {
    const BundleNames names(content);
    for (int rank = 0; rank < options.shard_for; ++rank) {
      plans.push_back(shard_plan(content, names, options, rank));
    }
  } else if (bundle) {
    plans.push_back({.name = "bundle.kdtr", .header = content.header, .items = {}});
    add_file_items(content, plans.front().items);
    std::vector<ConvertItem> items = whole_items(content, options);
    std::move(items.begin(), items.end(), std::back_inserter(plans.front().items));
  } else {
    plans = directory_plan(content, options);
    texts = directory_texts(content, plans);
  }

  OutputPlan output{.path = options.output,
                    .is_directory = options.shard_for > 0 || !bundle,
                    .overwrite = options.overwrite};
  std::vector<LaidOutFile> files;
  std::vector<PlacedItem> items;
  for (std::size_t i = 0; i < plans.size(); ++i) {
    files.push_back(lay_out(plans[i], bundle));
    output.files.push_back(plans[i].name);
    output.bytes += files.back().bytes;
    std::size_t first = 0;
    for (const ConvertItem& item : plans[i].items) {
      items.push_back({.item = &item, .file = i, .offsets = {}});
      for (std::size_t index = 0; index < item.outputs.size(); ++index) {
        items.back().offsets.push_back(files.back().offsets[first++]);
      }
    }
  }
  output.key = run_key(plans, files, texts);
  PartialOutput partial(output);
  const ItemResults results = write_items(
      items, partial, {.num_threads = options.num_threads, .piece_bytes = options.piece_bytes});
  std::size_t first = 0;
  for (std::size_t i = 0; i < files.size(); ++i) {
    const auto count = files[i].tensors.size();
    const std::vector<std::uint64_t> checksums(results.checksums.begin() + first,
                                               results.checksums.begin() + first + count);
    first += count;
    const std::string head =
        files[i].kdtr ? kdtr_head(*files[i].kdtr, files[i].tensors, checksums) : files[i].head;
    partial.file(i).write(0, head.data(), std::ssize(head));
    partial.file(i).resize(files[i].bytes);
  }
  for (const auto& [name, text] : texts) {
    partial.write_text(name, text);
  }
  partial.finish();

  ConvertReport report;
  for (const OutputFilePlan& plan : plans) {
    report.files.push_back(output.is_directory
                               ? (std::filesystem::path(options.output) / plan.name).string()
                               : options.output);
  }
  report.num_tensors = static_cast<std::int64_t>(results.checksums.size());
  report.bytes = output.bytes;
  report.num_resumed = results.num_resumed;
  report.quantized = results.quantized;
  report.left_out = content.left_out;
  report.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return report;
}

}  // namespace kdtree
