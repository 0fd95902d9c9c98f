// The sections that a target's and a drafter's config.json share.
#pragma once

#include <optional>

#include "config/config_reader.h"
#include "config/model_config.h"

namespace kdtree {

// rope_parameters, or rope_scaling beside rope_theta; neither means plain RoPE. `max_positions`
// stands in for an absent original_max_position_embeddings. InputError for unsupported rope types.
RopeConfig read_rope(const ConfigReader& config, std::int64_t max_positions);

// What quantization_config says; `config` is the object that may hold it.
struct QuantizationSection {
  bool fp8 = false;                        // fp8 blocks of 128 x 128
  std::optional<QuantizationConfig> int4;  // compressed-tensors pack-quantized
};
QuantizationSection read_quantization(const ConfigReader& config);

// The INT4 section that read_quantization() reads back.
nlohmann::json quantization_to_json(const QuantizationConfig& config);

// Largest group of neighbours that may share a scale, and the multiple that every group must be.
inline constexpr std::int64_t kMaxGroupSize = std::int64_t{1} << 20;
inline constexpr std::int64_t kGroupMultiple = 8;

// Bounds that keep every product of two sizes and an element size far inside 64 bits.
inline constexpr IntegerBounds kWidthBounds{.low = 1, .high = 1 << 24};
inline constexpr IntegerBounds kHeadsBounds{.low = 1, .high = 1 << 16};
inline constexpr IntegerBounds kLayersBounds{.low = 1, .high = 1024};
inline constexpr IntegerBounds kTokensBounds{.low = 1, .high = (std::int64_t{1} << 31) - 1};

}  // namespace kdtree
