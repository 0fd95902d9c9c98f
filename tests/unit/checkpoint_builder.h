// Random model checkpoints for tests, in the containers that the engine reads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "config/model_config.h"
#include "core/dtype.h"
#include "weights/raw_tensor.h"

namespace kdtree {

struct CheckpointRecipe {
  ModelConfig target;  // quantization is not looked at
  std::optional<DrafterConfig> drafter = std::nullopt;
  // Equal seeds give equal values to a tensor of equal name and shape.
  std::uint64_t seed = 0;
  // > 0: routed experts are stored as INT4 in groups of this size, where it divides their columns.
  std::int64_t group_size = 0;
  bool quantize_all = false;             // INT4 for every Linear and the embedding instead
  DType scale_dtype = DType::kFloat32;   // F32 or BF16
  DType weight_dtype = DType::kFloat32;  // F32 or BF16
  bool keep_originals = false;           // bundles only: the plain copy beside the INT4 one
};

// Norm weights are 1 + 0.1 n, correction biases 0.1 n, matrices 1.5 / sqrt(columns) n, lm_head
// larger, with n about normal: activations stay around 1 and logits differ.
void write_bundle(const CheckpointRecipe& recipe, const std::string& path);
// Hugging Face's layout: config.json and model.safetensors under `path`, which is made; the
// drafter, if there is one, under path + "/draft".
void write_directory(const CheckpointRecipe& recipe, const std::string& path);

// ---- for tests of damaged checkpoints ----------------------------------------------------------

struct TensorInfo {
  std::string name;
  DType dtype = DType::kFloat32;
  Shape shape;

  std::int64_t bytes() const { return shape.num_elements() * dtype_bytes(dtype); }
};

// A tensor in memory.
struct BuiltTensor {
  TensorInfo info;
  std::vector<std::byte> data;
};

enum class BuiltNames { kBundle, kHuggingFace };  // NAME.qw and .sc, or NAME_packed and so on

// The tensors that write_bundle / write_directory store, the drafter's with "drafter." in front.
std::vector<BuiltTensor> build_tensors(const CheckpointRecipe& recipe, BuiltNames names);
// The bundle's JSON header without its tensor table.
nlohmann::json build_bundle_header(const CheckpointRecipe& recipe);
void write_built_bundle(const nlohmann::json& header, const std::vector<BuiltTensor>& tensors,
                        const std::string& path);
void write_built_safetensors(const std::vector<BuiltTensor>& tensors, const std::string& path);

}  // namespace kdtree
