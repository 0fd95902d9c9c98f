#include "config/config_sections.h"

#include "core/check.h"

namespace kdtree {

namespace {

constexpr std::int64_t kFloat8Block = 128;
constexpr std::int64_t kMaxPositions = std::int64_t{1} << 31;
constexpr double kSmallestTheta = 1.0 / 1024;

std::string rope_type(const ConfigReader& scaling) {
  const auto choices = {std::string_view("yarn"), std::string_view("deepseek_yarn"),
                        std::string_view("default")};
  const std::string plain = scaling.text_or("type", "", choices);
  std::string type = scaling.text_or("rope_type", plain.empty() ? "default" : plain, choices);
  scaling.require(plain.empty() || plain == type, "type", "the same as rope_type");
  return type;
}

RopeConfig read_yarn(const ConfigReader& scaling, std::int64_t max_positions) {
  RopeConfig rope;
  rope.yarn = true;
  rope.factor = scaling.number("factor", {.low = 1, .high = 1e9});
  rope.beta_fast = scaling.number_or("beta_fast", rope.beta_fast, {.low = 1e-6, .high = 1e9});
  rope.beta_slow = scaling.number_or("beta_slow", rope.beta_slow, {.low = 1e-6, .high = 1e9});
  scaling.require(rope.beta_fast >= rope.beta_slow, "beta_fast", "a number not below beta_slow");
  rope.mscale = scaling.number_or("mscale", rope.mscale, {.low = 0, .high = 1e6});
  rope.mscale_all_dim =
      scaling.number_or("mscale_all_dim", rope.mscale_all_dim, {.low = 0, .high = 1e6});
  rope.original_max_position_embeddings = scaling.integer_or(
      "original_max_position_embeddings", max_positions, {.low = 1, .high = kMaxPositions});
  scaling.require(rope.original_max_position_embeddings > 0, "original_max_position_embeddings",
                  "a positive integer, or max_position_embeddings beside it");
  if (scaling.find("attention_factor") != nullptr) {
    rope.attention_factor = scaling.number("attention_factor", {.low = 1e-6, .high = 1e6});
  }
  scaling.require_absent_or("truncate", true);
  return rope;
}

void check_int4_weights(const ConfigReader& weights) {
  weights.require(weights.integer("num_bits") == 4, "num_bits", "4");
  weights.text("type", {"int"});
  weights.text("strategy", {"group"});
  weights.require(weights.flag_or("symmetric", true), "symmetric", "true");
  weights.require_absent_or("dynamic", false);
  weights.require_absent_or("actorder", nullptr);
  weights.require_absent_or("block_structure", nullptr);
}

std::int64_t read_int4_group(const ConfigReader& group) {
  const nlohmann::json* targets = group.find("targets");
  group.require(targets != nullptr && *targets == nlohmann::json::array({"Linear"}), "targets",
                R"(["Linear"])");
  group.require_absent_or("input_activations", nullptr);
  group.require_absent_or("output_activations", nullptr);
  group.require_absent_or("format", "pack-quantized");
  const auto weights = group.object("weights");
  group.require(weights.has_value(), "weights", "an object");
  check_int4_weights(*weights);
  const std::int64_t size =
      weights->integer("group_size", {.low = kGroupMultiple, .high = kMaxGroupSize});
  weights->require(size % kGroupMultiple == 0, "group_size", "a multiple of 8");
  return size;
}

QuantizationConfig read_compressed_tensors(const ConfigReader& section) {
  section.text("format", {"pack-quantized"});
  section.text_or("quantization_status", "compressed", {"compressed"});
  section.require_absent_or("kv_cache_scheme", nullptr);
  for (const char* key : {"sparsity_config", "transform_config"}) {
    const nlohmann::json* value = section.find(key);
    section.require(value == nullptr || value->empty(), key, "null or {} (not supported)");
  }
  const auto groups = section.object("config_groups");
  section.require(groups && section.find("config_groups")->size() == 1, "config_groups",
                  "an object with one group");
  const std::string name = section.find("config_groups")->begin().key();
  const auto group = groups->object(name);
  groups->require(group.has_value(), name, "an object");
  return {.group_size = read_int4_group(*group)};
}

void check_float8(const ConfigReader& section) {
  section.text_or("fmt", "e4m3", {"e4m3"});
  section.text_or("activation_scheme", "dynamic", {"dynamic"});
  const auto block =
      section.integers_or_empty("weight_block_size", {.low = 1, .high = kMaxGroupSize}, false);
  section.require(block == std::vector<std::int64_t>{kFloat8Block, kFloat8Block},
                  "weight_block_size", "[128, 128]");
}

}  // namespace

RopeConfig read_rope(const ConfigReader& config, std::int64_t max_positions) {
  const NumberBounds theta_bounds{.low = kSmallestTheta, .high = 1e15};
  const auto parameters = config.object("rope_parameters");
  const auto scaling = parameters ? parameters : config.object("rope_scaling");
  RopeConfig rope;
  if (scaling && rope_type(*scaling) != "default") {
    rope = read_yarn(*scaling, max_positions);
  }
  const bool inner_theta = scaling && scaling->find("rope_theta") != nullptr;
  const ConfigReader& holder = inner_theta ? *scaling : config;
  rope.rope_theta = holder.number_or("rope_theta", rope.rope_theta, theta_bounds);
  // YaRN divides by the logarithm of theta.
  holder.require(!rope.yarn || rope.rope_theta > 1, "rope_theta", "a number above 1 with YaRN");
  return rope;
}

QuantizationSection read_quantization(const ConfigReader& config) {
  QuantizationSection result;
  const auto section = config.object("quantization_config");
  if (!section) {
    return result;
  }
  if (section->text("quant_method", {"compressed-tensors", "fp8"}) == "fp8") {
    check_float8(*section);
    result.fp8 = true;
  } else {
    result.int4 = read_compressed_tensors(*section);
  }
  return result;
}

nlohmann::json quantization_to_json(const QuantizationConfig& config) {
  const nlohmann::json weights = {{"num_bits", 4},       {"group_size", config.group_size},
                                  {"strategy", "group"}, {"symmetric", true},
                                  {"type", "int"},       {"dynamic", false},
                                  {"actorder", nullptr}};
  const nlohmann::json group = {{"targets", {"Linear"}},
                                {"input_activations", nullptr},
                                {"output_activations", nullptr},
                                {"weights", weights}};
  return {{"quant_method", "compressed-tensors"},  {"format", "pack-quantized"},
          {"quantization_status", "compressed"},   {"kv_cache_scheme", nullptr},
          {"config_groups", {{"group_0", group}}}, {"ignore", {"lm_head"}}};
}

}  // namespace kdtree
