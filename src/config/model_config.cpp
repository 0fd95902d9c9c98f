#include "config/model_config.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string_view>

#include "config/config_reader.h"
#include "config/config_sections.h"
#include "core/check.h"

namespace kdtree {

namespace {

constexpr std::string_view kV3 = "DeepseekV3ForCausalLM";
constexpr std::string_view kV2 = "DeepseekV2ForCausalLM";
constexpr std::string_view kKimiNested = "KimiK25ForConditionalGeneration";
constexpr std::string_view kNestedPrefix = "language_model.";

constexpr IntegerBounds kHeadDim{.low = 1, .high = 1 << 16};
constexpr IntegerBounds kExperts{.low = 1, .high = 1 << 14};

// The first entry of `architectures`, which must be one of `choices`; `absent` where the key is.
std::string read_architecture(const ConfigReader& config, std::string_view absent,
                              std::initializer_list<std::string_view> choices) {
  const nlohmann::json* list = config.find("architectures");
  if (list == nullptr && !absent.empty()) {
    return std::string(absent);
  }
  std::string expected;
  for (const std::string_view choice : choices) {
    if (list != nullptr && list->is_array() && list->size() == 1 && list->front() == choice) {
      return std::string(choice);
    }
    expected += fmt::format("{}[\"{}\"]", expected.empty() ? "" : " or ", choice);
  }
  config.refuse("architectures", expected);
}

void read_attention(const ConfigReader& config, ModelConfig& model) {
  model.num_attention_heads = config.integer("num_attention_heads", kHeadsBounds);
  config.require(config.integer_or("num_key_value_heads", model.num_attention_heads,
                                   kHeadsBounds) == model.num_attention_heads,
                 "num_key_value_heads",
                 fmt::format("{}, as num_attention_heads", model.num_attention_heads));
  model.q_lora_rank = config.integer_or("q_lora_rank", 0, {.low = 0, .high = kWidthBounds.high});
  model.kv_lora_rank = config.integer("kv_lora_rank", kWidthBounds);
  model.qk_nope_head_dim = config.integer("qk_nope_head_dim", kHeadDim);
  model.qk_rope_head_dim = config.integer("qk_rope_head_dim", kHeadDim);
  config.require(model.qk_rope_head_dim % 2 == 0, "qk_rope_head_dim", "an even integer");
  model.v_head_dim = config.integer("v_head_dim", kHeadDim);
  config.require_absent_or("attention_bias", false);
}

void read_router(const ConfigReader& config, ModelConfig& model) {
  const bool v2 = model.architecture == kV2;
  model.scoring_func =
      config.text_or("scoring_func", v2 ? "softmax" : "sigmoid", {"sigmoid", "softmax"});
  model.topk_method = config.text_or("topk_method", v2 ? "greedy" : "noaux_tc",
                                     {"noaux_tc", "greedy", "group_limited_greedy"});
  model.norm_topk_prob = config.flag_or("norm_topk_prob", !v2);
  model.routed_scaling_always = !v2;
  model.routed_scaling_factor =
      config.number_or("routed_scaling_factor", 1, {.low = 0, .high = 1e9});

  const std::int64_t experts = model.n_routed_experts;
  model.num_experts_per_tok = config.integer("num_experts_per_tok", {.low = 1, .high = experts});
  model.n_group = config.integer_or("n_group", 1, {.low = 1, .high = experts});
  config.require(experts % model.n_group == 0, "n_group",
                 fmt::format("a divisor of n_routed_experts {}", experts));
  model.topk_group = config.integer_or("topk_group", 1, {.low = 1, .high = model.n_group});
  // noaux_tc rates a group by its two best experts.
  config.require(
      model.topk_method != "noaux_tc" || model.n_group == 1 || experts / model.n_group >= 2,
      "n_group", "groups of two experts at least with topk_method noaux_tc");
}

void read_experts(const ConfigReader& config, ModelConfig& model) {
  model.n_routed_experts =
      config.integer_or("n_routed_experts", 0, {.low = 0, .high = kExperts.high});
  model.first_k_dense_replace =
      config.integer_or("first_k_dense_replace", 0, {.low = 0, .high = kLayersBounds.high});
  model.moe_layer_freq = config.integer_or("moe_layer_freq", 1, kLayersBounds);
  model.n_shared_experts = config.integer_or("n_shared_experts", 0, {.low = 0, .high = 1024});
  if (model.n_routed_experts == 0) {
    config.require(model.first_k_dense_replace >= model.num_hidden_layers, "n_routed_experts",
                   fmt::format("a positive integer, because layers from first_k_dense_replace = {} "
                               "on have experts",
                               model.first_k_dense_replace));
    return;
  }
  model.moe_intermediate_size = config.integer("moe_intermediate_size", kWidthBounds);
  read_router(config, model);
}

// quantization_config stands at the top level or in text_config; where in both, they must agree.
void read_all_quantization(const ConfigReader& top, const ConfigReader& text, ModelConfig& model) {
  const QuantizationSection outer = read_quantization(top);
  const QuantizationSection inner = read_quantization(text);
  const bool both =
      top.find("quantization_config") != nullptr && text.find("quantization_config") != nullptr;
  const auto group_of = [](const QuantizationSection& section) {
    return section.int4 ? section.int4->group_size : 0;
  };
  top.require(!both || (outer.fp8 == inner.fp8 && group_of(outer) == group_of(inner)),
              "quantization_config", "the same as in text_config");
  model.quantization = inner.int4 ? inner.int4 : outer.int4;
  model.float8_blocks = inner.fp8 || outer.fp8;
}

ModelConfig read_model(const ConfigReader& top, const ConfigReader& config,
                       const std::string& architecture) {
  ModelConfig model;
  model.architecture = architecture;
  config.text_or("model_type", "", {"deepseek_v3", "kimi_k2", "kimi_k25", "deepseek_v2"});
  config.text_or("hidden_act", "silu", {"silu"});
  model.vocab_size = config.integer("vocab_size", kTokensBounds);
  model.hidden_size = config.integer("hidden_size", kWidthBounds);
  model.intermediate_size = config.integer("intermediate_size", kWidthBounds);
  model.num_hidden_layers = config.integer("num_hidden_layers", kLayersBounds);
  model.max_position_embeddings = config.integer_or("max_position_embeddings", 0, kTokensBounds);
  model.rms_norm_eps = config.number_or("rms_norm_eps", model.rms_norm_eps, {.low = 0, .high = 1});
  read_attention(config, model);
  read_experts(config, model);
  model.rope = read_rope(config, model.max_position_embeddings);
  const ConfigReader& eos = config.find("eos_token_id") != nullptr ? config : top;
  model.eos_token_ids =
      eos.integers_or_empty("eos_token_id", {.low = 0, .high = model.vocab_size - 1}, true);
  const ConfigReader& tie = config.find("tie_word_embeddings") != nullptr ? config : top;
  model.tie_word_embeddings = tie.flag_or("tie_word_embeddings", false);
  read_all_quantization(top, config, model);
  return model;
}

std::string_view architecture_of_type(const ConfigReader& config) {
  const nlohmann::json* type = config.find("model_type");
  if (type == nullptr) {
    return "";
  }
  return *type == "deepseek_v2" ? kV2 : kV3;
}

}  // namespace

bool ModelConfig::is_moe_layer(std::int64_t layer) const {
  return n_routed_experts > 0 && layer >= first_k_dense_replace && layer % moe_layer_freq == 0;
}

std::int64_t ModelConfig::num_moe_layers() const {
  std::int64_t count = 0;
  for (std::int64_t layer = 0; layer < num_hidden_layers; ++layer) {
    count += is_moe_layer(layer) ? 1 : 0;
  }
  return count;
}

ModelConfig parse_model_config(const nlohmann::json& json, const std::string& origin) {
  const ConfigReader top(json, origin);
  const auto text = top.object("text_config");
  if (!text) {
    // A nested architecture without its text_config gets the clearer error.
    const nlohmann::json* list = top.find("architectures");
    top.require(list == nullptr || *list != nlohmann::json::array({kKimiNested}), "text_config",
                fmt::format("an object, as {} has", kKimiNested));
    return read_model(top, top, read_architecture(top, architecture_of_type(top), {kV3, kV2}));
  }
  read_architecture(top, "", {kKimiNested});
  top.text_or("model_type", "", {"kimi_k25"});
  ModelConfig model = read_model(top, *text, read_architecture(*text, kV3, {kV3, kV2}));
  model.tensor_prefix = kNestedPrefix;
  return model;
}

}  // namespace kdtree
