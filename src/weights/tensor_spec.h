// The table of tensors: what a model of a given config must have, and how ranks share it.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "config/model_config.h"
#include "core/tensor_view.h"

namespace kdtree {

// What is divided among the ranks.
enum class PartOf : std::uint8_t {
  kNothing,  // every rank has the whole tensor
  kHeads,
  kKeyValueHeads,
  kIntermediate,
  kSharedIntermediate,
  kExpertIntermediate,  // of routed experts
  kVocabulary,
  kContext,
};
inline constexpr std::size_t kNumParts = 8;

// What a tensor belongs to, for memory plans.
enum class WeightKind : std::uint8_t {
  kRoutedExperts,
  kSharedExperts,
  kDenseLayers,  // feed-forward of the dense layers
  kAttention,
  kRouter,
  kVocabulary,  // embedding and head
  kNorms,
  kDrafter,
};
inline constexpr std::size_t kNumWeightKinds = 8;
// "routed experts", ...
std::string_view weight_kind_name(WeightKind kind);

// Part i of `part` is rows (or columns) [i * unit, (i + 1) * unit).
struct SplitRule {
  PartOf part = PartOf::kNothing;
  bool by_columns = false;
  std::int64_t unit = 1;
};

struct TensorSpec {
  std::string name;  // canonical: "model.layers.0.mlp.down_proj.weight"
  Shape shape;       // of the logical tensor: [n] for a vector, [out, in] for a matrix
  SplitRule split;
  WeightKind kind = WeightKind::kDrafter;
  std::int64_t expert = -1;  // routed expert that it belongs to: only the ranks of that have it
  std::int64_t layer = -1;   // of that expert
  // A Linear, which may be stored as INT4 groups or fp8 blocks instead of plain floats.
  bool may_be_quantized = false;
  // Ops need it as plain floats: INT4 is dequantised when loaded.
  bool dequantize = false;
  // Keeps FP32 even where matrices are rounded to bf16 (the router).
  bool keep_float32 = false;
  // May be absent: lm_head.weight under tie_word_embeddings, which is not loaded even if present.
  bool tied = false;

  bool is_vector() const { return shape.rank() == 1; }
};

// Plain tensors and vectors may be F32, BF16 or F16; vectors are widened to F32 when loaded.
std::vector<TensorSpec> target_tensor_specs(const ModelConfig& config);
std::vector<TensorSpec> drafter_tensor_specs(const DrafterConfig& config);

}  // namespace kdtree
