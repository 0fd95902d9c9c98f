// The hyper-parameters of a target model, with the keys of its Hugging Face config.json.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

namespace kdtree {

// rope_scaling / rope_parameters. Without YaRN only rope_theta counts.
struct RopeConfig {
  double rope_theta = 10000;
  bool yarn = false;
  double factor = 1;
  double beta_fast = 32;
  double beta_slow = 1;
  double mscale = 1;
  double mscale_all_dim = 0;
  std::int64_t original_max_position_embeddings = 0;
  // Overrides the amplitude of cosine and sine that the formula gives.
  std::optional<double> attention_factor;
};

// INT4 checkpoints: which group size the packed matrices have. The tensors themselves say which are
// packed.
struct QuantizationConfig {
  std::int64_t group_size = 0;
  // Whether a down_proj of a dense layer or of shared experts is packed: these are then split over
  // ranks between groups only. No key of the config: open_target and open_drafter set it.
  bool mlp_is_packed = false;
};

struct ModelConfig {
  std::string architecture;  // DeepseekV3ForCausalLM, ...
  std::int64_t vocab_size = 0;
  std::int64_t hidden_size = 0;
  std::int64_t intermediate_size = 0;
  std::int64_t moe_intermediate_size = 0;
  std::int64_t num_hidden_layers = 0;
  std::int64_t num_attention_heads = 0;
  std::int64_t n_shared_experts = 0;
  std::int64_t n_routed_experts = 0;
  std::int64_t num_experts_per_tok = 0;
  std::int64_t n_group = 1;
  std::int64_t topk_group = 1;
  std::int64_t first_k_dense_replace = 0;
  std::int64_t moe_layer_freq = 1;
  std::string scoring_func = "sigmoid";  // sigmoid | softmax
  std::string topk_method = "noaux_tc";  // noaux_tc | greedy | group_limited_greedy
  bool norm_topk_prob = true;
  // DeepSeek-V2 multiplies by routed_scaling_factor only when it does not normalise; V3 always.
  bool routed_scaling_always = true;
  double routed_scaling_factor = 1;
  std::int64_t q_lora_rank = 0;  // 0: queries come from q_proj
  std::int64_t kv_lora_rank = 0;
  std::int64_t qk_nope_head_dim = 0;
  std::int64_t qk_rope_head_dim = 0;
  std::int64_t v_head_dim = 0;
  double rms_norm_eps = 1e-6;
  std::int64_t max_position_embeddings = 0;
  RopeConfig rope;
  std::vector<std::int64_t> eos_token_ids;
  bool tie_word_embeddings = false;
  std::optional<QuantizationConfig> quantization;
  // The config states fp8 in blocks of 128 x 128. Which matrices are, the tensors say themselves.
  bool float8_blocks = false;
  // Set where the tensors of the text model carry a prefix in the files ("language_model.").
  std::string tensor_prefix;

  // Whether layer `layer` has routed experts.
  bool is_moe_layer(std::int64_t layer) const;
  std::int64_t num_moe_layers() const;
  std::int64_t qk_head_dim() const { return qk_nope_head_dim + qk_rope_head_dim; }
};

// q_a_layernorm and kv_a_layernorm always use this epsilon, whatever rms_norm_eps says.
inline constexpr double kInnerNormEps = 1e-6;

// The DFlash drafter (architectures DFlashDraftModel).
struct DrafterConfig {
  std::int64_t vocab_size = 0;
  std::int64_t hidden_size = 0;
  std::int64_t intermediate_size = 0;
  std::int64_t num_hidden_layers = 0;
  std::int64_t num_attention_heads = 0;
  std::int64_t num_key_value_heads = 0;
  std::int64_t head_dim = 0;
  double rms_norm_eps = 1e-6;
  RopeConfig rope;
  std::int64_t block_size = 0;
  std::int64_t mask_token_id = 0;
  // 0-based layers of the target whose outputs are tapped, ascending.
  std::vector<std::int64_t> target_layer_ids;
  std::optional<QuantizationConfig> quantization;

  std::int64_t draft_horizon() const { return block_size - 1; }
};

// Parses a config.json. `origin` (the file) appears in every error. InputError names the file, the
// key, the value and what was expected: an unknown architecture, a missing key, a value out of its
// range, an unsupported feature.
ModelConfig parse_model_config(const nlohmann::json& json, const std::string& origin);
DrafterConfig parse_drafter_config(const nlohmann::json& json, const std::string& origin);

// InputError unless the drafter fits the target: hidden size, vocabulary, taps within the layers,
// mask id.
void check_drafter_fits(const DrafterConfig& drafter, const ModelConfig& target,
                        const std::string& origin);

// A config.json that parses back to `config`: flat (without tensor_prefix), Hugging Face keys.
nlohmann::json to_json(const ModelConfig& config);
nlohmann::json to_json(const DrafterConfig& config);

}  // namespace kdtree
