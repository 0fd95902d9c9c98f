// What a checkpoint is stored in: a KDTR bundle, shards of one, or a Hugging Face directory. Names
// and types are as stored; checkpoint.h gives them a meaning.
#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "text/tokenizer.h"
#include "weights/raw_tensor.h"

namespace kdtree {

inline constexpr const char* kConfigName = "config.json";
inline constexpr const char* kSingleName = "model.safetensors";
inline constexpr const char* kIndexName = "model.safetensors.index.json";
// Folder of a model's directory that holds its drafter, a directory itself.
inline constexpr const char* kDrafterFolder = "drafter";

// The tensors of one file, under the names that it uses.
struct FileTable {
  std::string file;
  RawTable tensors;
};

struct Container {
  std::string path;  // of the bundle or directory
  bool is_bundle = false;
  std::vector<FileTable> files;  // of a bundle one, its "files/..." tensors among the others
  nlohmann::json header;         // of a bundle, without "tensors"
  std::optional<ShardOf> shard;  // what the bundle says it is
};

// Reads the headers of all files and checks them, no tensor data. `path` is a bundle, a directory
// of safetensors, or a directory of shards, of which `reader`'s is taken (the first one if there is
// no reader). InputError for whatever is wrong, among it a shard for another number of ranks.
Container read_container(const std::string& path, const std::optional<ShardOf>& reader);

std::string in_directory(const std::string& directory, const std::string& name);

// "shard-00001-of-00004.kdtr".
std::string shard_name(const ShardOf& shard);

bool is_directory(const std::string& path);  // InputError if there is nothing
// Whether it is a directory of a model's files, not of shards. InputError as above.
bool is_model_directory(const std::string& path);

// The model's file `name` ("tokenizer.json"), from a directory or a bundle, with its checksum
// verified; none if there is none. InputError if it cannot be read, or has more than 256 MB.
std::optional<NamedText> find_model_file(const Container& container, const std::string& name);
// The same from `path` as read_container takes it; a bundle's header is read once.
ModelFileFinder model_files(const std::string& path);

}  // namespace kdtree
