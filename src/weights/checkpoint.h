// Named tensors in files, whatever the container: a KDTR bundle, a Hugging Face directory.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "config/model_config.h"
#include "core/tensor_view.h"
#include "kernels/random_fill.h"

namespace kdtree {

// One tensor as the container's header describes it.
struct StoredTensor {
  DType dtype = DType::kFloat32;
  Shape shape;
  std::string file;              // path of the file that holds it
  std::string name;              // its name in that file, with every prefix
  std::int64_t file_offset = 0;  // of its first byte
  std::int64_t bytes = 0;
  std::optional<std::uint64_t> checksum;  // XXH3-64 of its bytes, where the container has one
  std::optional<RandomFill> random;       // drawn by this rule: `file` holds no bytes of it
};

// Tensors under canonical names: the target's as "model.layers.0...." and "lm_head.weight" without
// any prefix of the container; the drafter's as DFlash names them ("fc.weight", "layers.0....").
using TensorTable = std::map<std::string, StoredTensor>;

struct TargetCheckpoint {
  std::string origin;  // what the user named: the bundle or the directory
  ModelConfig config;
  TensorTable tensors;         // without those that are ignored by rule
  nlohmann::json goldens;      // of a KDTR bundle; null otherwise
  nlohmann::json config_json;  // the config as stored
};

struct DrafterCheckpoint {
  std::string origin;
  std::string name_prefix;  // of its tensors' names in a bundle
  DrafterConfig config;
  TensorTable tensors;
  nlohmann::json config_json;
};

// Opens a bundle (a file) or a directory (config.json and safetensors): parses all headers, reads
// no tensor data. InputError for whatever is wrong with them.
TargetCheckpoint open_target(const std::string& path);
// The drafter of a bundle, or a DFlash directory.
DrafterCheckpoint open_drafter(const std::string& path);
// Whether the bundle `path` holds a drafter; false for directories.
bool holds_drafter(const std::string& path);

// Reads bytes [offset, offset + bytes) of the tensor into `target`. Safe from several threads.
// InputError if the file ends early or cannot be read.
void read_tensor_bytes(const StoredTensor& tensor, std::int64_t offset, std::int64_t bytes,
                       void* target);

}  // namespace kdtree
