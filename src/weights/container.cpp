#include "weights/container.h"

#include <xxhash.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <memory>
#include <set>
#include <string_view>
#include <utility>

#include "config/config_reader.h"
#include "core/check.h"
#include "core/json_text.h"
#include "weights/file.h"
#include "weights/kdtr.h"
#include "weights/safetensors.h"

namespace kdtree {

namespace {

namespace fs = std::filesystem;

constexpr std::int64_t kMaxModelFileBytes = std::int64_t{256} << 20;
constexpr std::string_view kShardStart = "shard-";

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

std::vector<FileTable> read_indexed(const std::string& directory, const std::string& index_path) {
  const auto file_of = read_index(index_path);
  std::map<std::string, RawTable> files;
  for (const auto& [name, file] : file_of) {
    if (files.contains(file)) {
      continue;
    }
    const std::string path = in_directory(directory, file);
    // A loop of links is found out when the file is opened.
    std::error_code ignored;
    require_input(fs::exists(fs::symlink_status(path, ignored)),
                  "{}: no such file; {} places {} in it", path, index_path, describe_json(name));
    files.emplace(file, read_safetensors_header(path));
  }
  for (const auto& [file, table] : files) {
    for (const auto& [name, tensor] : table) {
      const auto entry = file_of.find(name);
      const std::string path = in_directory(directory, file);
      require_input(entry != file_of.end(), "{} is not in {}", tensor_place(path, name),
                    index_path);
      require_input(entry->second == file, "{} is a second copy: {} places it in {}",
                    tensor_place(path, name), index_path, entry->second);
    }
  }
  for (const auto& [name, file] : file_of) {
    require_input(files.at(file).contains(name), "{} is missing, although {} places it there",
                  tensor_place(in_directory(directory, file), name), index_path);
  }
  std::vector<FileTable> tables;
  tables.reserve(files.size());
  for (auto& [file, table] : files) {
    tables.push_back({in_directory(directory, file), std::move(table)});
  }
  return tables;
}

std::vector<FileTable> read_safetensors_files(const std::string& directory) {
  const std::string single = in_directory(directory, kSingleName);
  const std::string index = in_directory(directory, kIndexName);
  if (fs::exists(single)) {
    return {{single, read_safetensors_header(single)}};
  }
  require_input(fs::exists(index), "{}: holds neither {} nor {}", directory, kSingleName,
                kIndexName);
  return read_indexed(directory, index);
}

bool is_shard_name(const std::string& name) {
  return name.starts_with(kShardStart) && name.ends_with(".kdtr");
}

// The shards of a directory, in order; none if it holds a model's files.
std::set<std::string> shards_in(const std::string& directory) {
  std::set<std::string> names;
  if (fs::exists(in_directory(directory, kConfigName))) {
    return names;
  }
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(directory, error)) {
    if (std::string name = entry.path().filename().string(); is_shard_name(name)) {
      names.insert(std::move(name));
    }
  }
  require_input(!error, "{}: {}", directory, error.message());
  return names;
}

std::string choose_shard(const std::string& directory, const std::set<std::string>& names,
                         const std::optional<ShardOf>& reader) {
  if (!reader) {
    return in_directory(directory, *names.begin());
  }
  const std::string name = shard_name(*reader);
  require_input(names.contains(name), "{}: holds no {} for rank {} of {}, but {} (and others)",
                directory, name, reader->rank, reader->ranks, *names.begin());
  return in_directory(directory, name);
}

std::optional<ShardOf> read_shard(const nlohmann::json& header, const std::string& path) {
  constexpr std::int64_t kMostRanks = 1 << 20;
  const auto section = ConfigReader(header, path).object("shard");
  if (!section) {
    return std::nullopt;
  }
  ShardOf shard;
  shard.ranks = static_cast<int>(section->integer("ranks", {.low = 1, .high = kMostRanks}));
  shard.rank = static_cast<int>(section->integer("rank", {.low = 0, .high = shard.ranks - 1}));
  return shard;
}

Container read_bundle(const std::string& path, const std::optional<ShardOf>& reader) {
  KdtrHeader header = read_kdtr_header(path);
  const std::optional<ShardOf> shard = read_shard(header.json, path);
  const bool fits =
      !shard || !reader || (shard->rank == reader->rank && shard->ranks == reader->ranks);
  require_input(fits,
                "{}: is for rank {} of {}, but read by rank {} of {}: start as many ranks as it "
                "was converted for, with --model its directory",
                path, shard ? shard->rank : 0, shard ? shard->ranks : 0, reader ? reader->rank : 0,
                reader ? reader->ranks : 0);
  return {.path = path,
          .is_bundle = true,
          .files = {{path, std::move(header.tensors)}},
          .header = std::move(header.json),
          .shard = shard};
}

std::optional<NamedText> find_directory_file(const std::string& directory,
                                             const std::string& name) {
  const std::string path = in_directory(directory, name);
  // A link that leads nowhere is an error of its own, not an absent file.
  std::error_code ignored;
  if (!fs::exists(fs::symlink_status(path, ignored))) {
    return std::nullopt;
  }
  const InputFile file(path);
  require_input(file.size() <= kMaxModelFileBytes, "{}: {} bytes, expected at most {}", path,
                file.size(), kMaxModelFileBytes);
  NamedText text{path, std::string(static_cast<std::size_t>(file.size()), '\0')};
  file.read(0, file.size(), text.content.data());
  return text;
}

}  // namespace

bool is_directory(const std::string& path) {
  std::error_code error;
  const fs::file_status found = fs::status(path, error);
  require_input(
      fs::status_known(found) && (fs::exists(found) || found.type() == fs::file_type::not_found),
      "{}: {}", path, error.message());
  require_input(fs::exists(found), "{}: no such file or directory", path);
  return fs::is_directory(found);
}

bool is_model_directory(const std::string& path) {
  return is_directory(path) && shards_in(path).empty();
}

std::string in_directory(const std::string& directory, const std::string& name) {
  return (fs::path(directory) / name).string();
}

std::string shard_name(const ShardOf& shard) {
  return fmt::format("{}{:05}-of-{:05}.kdtr", kShardStart, shard.rank, shard.ranks);
}

Container read_container(const std::string& path, const std::optional<ShardOf>& reader) {
  if (!is_directory(path)) {
    return read_bundle(path, reader);
  }
  if (const std::set<std::string> shards = shards_in(path); !shards.empty()) {
    return read_bundle(choose_shard(path, shards, reader), reader);
  }
  return {.path = path,
          .is_bundle = false,
          .files = read_safetensors_files(path),
          .header = nullptr,
          .shard = std::nullopt};
}

std::optional<NamedText> find_model_file(const Container& container, const std::string& name) {
  if (!container.is_bundle) {
    return find_directory_file(container.path, name);
  }
  const FileTable& bundle = container.files.front();
  const auto found = bundle.tensors.find(kFilesPrefix + name);
  if (found == bundle.tensors.end()) {
    return std::nullopt;
  }
  const RawTensor& raw = found->second;
  NamedText text{fmt::format("{} ({})", container.path, found->first), {}};
  require_input(raw.dtype == dtype_name(DType::kUInt8), "{} is of dtype {}, expected U8",
                tensor_place(container.path, found->first), raw.dtype);
  require_input(raw.bytes <= kMaxModelFileBytes, "{} has {} bytes, expected at most {}",
                tensor_place(container.path, found->first), raw.bytes, kMaxModelFileBytes);
  text.content.resize(static_cast<std::size_t>(raw.bytes));
  InputFile(container.path).read(raw.file_offset, raw.bytes, text.content.data());
  const std::uint64_t checksum = XXH3_64bits(text.content.data(), text.content.size());
  require_input(checksum == *raw.checksum,
                "{}: checksum is {:016x}, expected {:016x}: the file is damaged",
                tensor_place(container.path, found->first), checksum, *raw.checksum);
  return text;
}

ModelFileFinder model_files(const std::string& path) {
  if (is_model_directory(path)) {
    return [path](const std::string& name) { return find_directory_file(path, name); };
  }
  const auto bundle = std::make_shared<const Container>(read_container(path, std::nullopt));
  return [bundle](const std::string& name) { return find_model_file(*bundle, name); };
}

}  // namespace kdtree
