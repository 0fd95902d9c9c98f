#include <nlohmann/json.hpp>

#include "config/config_sections.h"
#include "config/model_config.h"

namespace kdtree {

namespace {

void add_rope(nlohmann::json& json, const RopeConfig& rope) {
  json["rope_theta"] = rope.rope_theta;
  if (!rope.yarn) {
    json["rope_scaling"] = nullptr;
    return;
  }
  nlohmann::json scaling = {
      {"type", "yarn"},
      {"factor", rope.factor},
      {"beta_fast", rope.beta_fast},
      {"beta_slow", rope.beta_slow},
      {"mscale", rope.mscale},
      {"mscale_all_dim", rope.mscale_all_dim},
      {"original_max_position_embeddings", rope.original_max_position_embeddings}};
  if (rope.attention_factor) {
    scaling["attention_factor"] = *rope.attention_factor;
  }
  json["rope_scaling"] = scaling;
}

void add_experts(nlohmann::json& json, const ModelConfig& config) {
  json["first_k_dense_replace"] = config.first_k_dense_replace;
  json["moe_layer_freq"] = config.moe_layer_freq;
  json["n_shared_experts"] = config.n_shared_experts;
  if (config.n_routed_experts == 0) {
    json["n_routed_experts"] = nullptr;
    return;
  }
  json["n_routed_experts"] = config.n_routed_experts;
  json["num_experts_per_tok"] = config.num_experts_per_tok;
  json["moe_intermediate_size"] = config.moe_intermediate_size;
  json["n_group"] = config.n_group;
  json["topk_group"] = config.topk_group;
  json["scoring_func"] = config.scoring_func;
  json["topk_method"] = config.topk_method;
  json["norm_topk_prob"] = config.norm_topk_prob;
  json["routed_scaling_factor"] = config.routed_scaling_factor;
}

std::string architecture_of(const ModelConfig& config) {
  if (!config.architecture.empty()) {
    return config.architecture;
  }
  return config.routed_scaling_always ? "DeepseekV3ForCausalLM" : "DeepseekV2ForCausalLM";
}

}  // namespace

nlohmann::json to_json(const ModelConfig& config) {
  const std::string architecture = architecture_of(config);
  const bool v2 = architecture == "DeepseekV2ForCausalLM";
  nlohmann::json json = {{"architectures", {architecture}},
                         {"model_type", v2 ? "deepseek_v2" : "deepseek_v3"},
                         {"vocab_size", config.vocab_size},
                         {"hidden_size", config.hidden_size},
                         {"intermediate_size", config.intermediate_size},
                         {"num_hidden_layers", config.num_hidden_layers},
                         {"num_attention_heads", config.num_attention_heads},
                         {"num_key_value_heads", config.num_attention_heads},
                         {"kv_lora_rank", config.kv_lora_rank},
                         {"qk_nope_head_dim", config.qk_nope_head_dim},
                         {"qk_rope_head_dim", config.qk_rope_head_dim},
                         {"v_head_dim", config.v_head_dim},
                         {"hidden_act", "silu"},
                         {"attention_bias", false},
                         {"rms_norm_eps", config.rms_norm_eps},
                         {"tie_word_embeddings", config.tie_word_embeddings}};
  json["q_lora_rank"] =
      config.q_lora_rank == 0 ? nlohmann::json() : nlohmann::json(config.q_lora_rank);
  if (config.max_position_embeddings > 0) {
    json["max_position_embeddings"] = config.max_position_embeddings;
  }
  if (!config.eos_token_ids.empty()) {
    json["eos_token_id"] = config.eos_token_ids;
  }
  add_experts(json, config);
  add_rope(json, config.rope);
  if (config.quantization) {
    json["quantization_config"] = quantization_to_json(*config.quantization);
  }
  return json;
}

nlohmann::json to_json(const DrafterConfig& config) {
  nlohmann::json json = {
      {"architectures", {"DFlashDraftModel"}},
      {"model_type", "qwen3"},
      {"vocab_size", config.vocab_size},
      {"hidden_size", config.hidden_size},
      {"intermediate_size", config.intermediate_size},
      {"num_hidden_layers", config.num_hidden_layers},
      {"num_attention_heads", config.num_attention_heads},
      {"num_key_value_heads", config.num_key_value_heads},
      {"head_dim", config.head_dim},
      {"hidden_act", "silu"},
      {"attention_bias", false},
      {"rms_norm_eps", config.rms_norm_eps},
      {"block_size", config.block_size},
      {"dflash_config",
       {{"mask_token_id", config.mask_token_id}, {"target_layer_ids", config.target_layer_ids}}}};
  add_rope(json, config.rope);
  if (config.quantization) {
    json["quantization_config"] = quantization_to_json(*config.quantization);
  }
  return json;
}

}  // namespace kdtree
