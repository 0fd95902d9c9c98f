// Named tensors in files, whatever the container: a KDTR bundle, a Hugging Face directory.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "config/model_config.h"
#include "core/partition.h"
#include "core/tensor_view.h"
#include "kernels/random_fill.h"

namespace kdtree {

// The rows and columns of a matrix, in stored elements.
struct StoredSlice {
  Range rows;
  Range columns;
  bool operator==(const StoredSlice&) const = default;
};

// One tensor as the container's header describes it.
struct StoredTensor {
  DType dtype = DType::kFloat32;
  Shape shape;                   // of the whole tensor
  std::string file;              // path of the file that holds it
  std::string name;              // its name in that file, with every prefix
  std::int64_t file_offset = 0;  // of its first byte
  std::int64_t bytes = 0;
  std::optional<std::uint64_t> checksum;  // XXH3-64 of its bytes, where the container has one
  std::optional<StoredSlice> slice;       // of a shard: all that is stored of it
  std::optional<RandomFill> random;       // drawn by this rule: `file` holds no bytes of it
};

// Tensors under canonical names: the target's as "model.layers.0...." and "lm_head.weight" without
// any prefix of the container; the drafter's as DFlash names them ("fc.weight", "layers.0....").
using TensorTable = std::map<std::string, StoredTensor>;

struct Container;

// One of the ranks that a checkpoint is divided among.
struct ShardOf {
  int rank = 0;
  int ranks = 1;
};

struct TargetCheckpoint {
  std::string origin;  // what the user named: the bundle or the directory
  ModelConfig config;
  TensorTable tensors;           // without those that are ignored by rule
  nlohmann::json goldens;        // of a KDTR bundle; null otherwise
  nlohmann::json config_json;    // the config as stored
  std::optional<ShardOf> shard;  // the tensors are no more than what this rank reads
};

struct DrafterCheckpoint {
  std::string origin;
  std::string name_prefix;  // of its tensors' names in a bundle
  DrafterConfig config;
  TensorTable tensors;
  nlohmann::json config_json;
  std::optional<ShardOf> shard;
};

// Opens a bundle (a file), a directory (config.json and safetensors) or `reader`'s part of a
// directory of shards: parses all headers, reads no tensor data. InputError for whatever is wrong
// with them. Without a reader any shard will do: for what does not load tensors.
TargetCheckpoint open_target(const std::string& path,
                             const std::optional<ShardOf>& reader = std::nullopt);
// The drafter of a bundle or of a target's directory (its folder "drafter"), or a DFlash directory.
DrafterCheckpoint open_drafter(const std::string& path,
                               const std::optional<ShardOf>& reader = std::nullopt);
// The same for headers that have been read.
TargetCheckpoint open_target(const Container& container);
DrafterCheckpoint open_drafter(const Container& container);
// Whether the target's bundle or directory `path` holds a drafter.
bool holds_drafter(const std::string& path);
std::string drafter_folder(const std::string& path);

// Reads bytes [offset, offset + bytes) of the tensor into `target`. Safe from several threads.
// InputError if the file ends early or cannot be read.
void read_tensor_bytes(const StoredTensor& tensor, std::int64_t offset, std::int64_t bytes,
                       void* target);

}  // namespace kdtree
