#include "weights/tensor_spec.h"

#include <spdlog/fmt/fmt.h>

#include <utility>

namespace kdtree {

namespace {

class SpecList {
 public:
  // Of the tensors that follow.
  void set_kind(WeightKind kind) { kind_ = kind; }
  // Of the routed experts that follow.
  void set_layer(std::int64_t layer) { layer_ = layer; }
  void vector(std::string name, std::int64_t size) {
    specs_.push_back({.name = std::move(name), .shape = Shape{size}, .split = {}, .kind = kind_});
  }
  // A vector of a target, whatever it stands beside.
  void norm(std::string name, std::int64_t size) {
    vector(std::move(name), size);
    specs_.back().kind = WeightKind::kNorms;
  }
  TensorSpec& matrix(std::string name, std::int64_t rows, std::int64_t columns) {
    specs_.push_back(
        {.name = std::move(name), .shape = Shape{rows, columns}, .split = {}, .kind = kind_});
    return specs_.back();
  }
  TensorSpec& linear(std::string name, Shape shape, SplitRule split = {}) {
    specs_.push_back({.name = std::move(name),
                      .shape = shape,
                      .split = split,
                      .kind = kind_,
                      .may_be_quantized = true});
    return specs_.back();
  }
  // gate_proj, up_proj and down_proj of one MLP whose width is divided as `part`.
  void mlp(const std::string& prefix, std::int64_t hidden, std::int64_t width, PartOf part,
           std::int64_t expert = -1) {
    const SplitRule rows{.part = part};
    const SplitRule columns{.part = part, .by_columns = true};
    linear(prefix + "gate_proj.weight", {width, hidden}, rows);
    linear(prefix + "up_proj.weight", {width, hidden}, rows);
    linear(prefix + "down_proj.weight", {hidden, width}, columns);
    for (auto spec = specs_.end() - 3; spec != specs_.end(); ++spec) {
      spec->expert = expert;
      spec->layer = expert < 0 ? -1 : layer_;
    }
  }
  std::vector<TensorSpec> take() { return std::move(specs_); }

 private:
  WeightKind kind_ = WeightKind::kDrafter;
  std::int64_t layer_ = -1;
  std::vector<TensorSpec> specs_;
};

void add_attention(SpecList& list, const ModelConfig& config, const std::string& prefix) {
  const std::int64_t heads = config.num_attention_heads;
  const std::int64_t hidden = config.hidden_size;
  const SplitRule query_rows{.part = PartOf::kHeads, .unit = config.qk_head_dim()};
  list.set_kind(WeightKind::kAttention);
  if (config.q_lora_rank == 0) {
    list.linear(prefix + "q_proj.weight", {heads * config.qk_head_dim(), hidden}, query_rows);
  } else {
    list.linear(prefix + "q_a_proj.weight", {config.q_lora_rank, hidden});
    list.norm(prefix + "q_a_layernorm.weight", config.q_lora_rank);
    list.linear(prefix + "q_b_proj.weight", {heads * config.qk_head_dim(), config.q_lora_rank},
                query_rows);
  }
  list.linear(prefix + "kv_a_proj_with_mqa.weight",
              {config.kv_lora_rank + config.qk_rope_head_dim, hidden});
  list.norm(prefix + "kv_a_layernorm.weight", config.kv_lora_rank);
  const std::int64_t kv_rows = config.qk_nope_head_dim + config.v_head_dim;
  list.linear(prefix + "kv_b_proj.weight", {heads * kv_rows, config.kv_lora_rank},
              {.part = PartOf::kHeads, .unit = kv_rows})
      .dequantize = true;
  list.linear(prefix + "o_proj.weight", {hidden, heads * config.v_head_dim},
              {.part = PartOf::kHeads, .by_columns = true, .unit = config.v_head_dim});
}

void add_experts(SpecList& list, const ModelConfig& config, const std::string& prefix) {
  const std::int64_t hidden = config.hidden_size;
  list.set_kind(WeightKind::kRouter);
  list.matrix(prefix + "gate.weight", config.n_routed_experts, hidden).keep_float32 = true;
  if (config.topk_method == "noaux_tc") {
    list.vector(prefix + "gate.e_score_correction_bias", config.n_routed_experts);
  }
  if (config.n_shared_experts > 0) {
    list.set_kind(WeightKind::kSharedExperts);
    list.mlp(prefix + "shared_experts.", hidden,
             config.n_shared_experts * config.moe_intermediate_size, PartOf::kSharedIntermediate);
  }
  list.set_kind(WeightKind::kRoutedExperts);
  for (std::int64_t expert = 0; expert < config.n_routed_experts; ++expert) {
    list.mlp(fmt::format("{}experts.{}.", prefix, expert), hidden, config.moe_intermediate_size,
             PartOf::kExpertIntermediate, expert);
  }
}

}  // namespace

std::string_view weight_kind_name(WeightKind kind) {
  switch (kind) {
    case WeightKind::kRoutedExperts:
      return "routed experts";
    case WeightKind::kSharedExperts:
      return "shared experts";
    case WeightKind::kDenseLayers:
      return "dense layers";
    case WeightKind::kAttention:
      return "attention";
    case WeightKind::kRouter:
      return "router";
    case WeightKind::kVocabulary:
      return "embedding and head";
    case WeightKind::kNorms:
      return "norms";
    case WeightKind::kDrafter:
      return "drafter weights";
  }
  return "";
}

std::vector<TensorSpec> target_tensor_specs(const ModelConfig& config) {
  SpecList list;
  const std::int64_t hidden = config.hidden_size;
  list.set_kind(WeightKind::kVocabulary);
  list.linear("model.embed_tokens.weight", {config.vocab_size, hidden},
              {.part = PartOf::kVocabulary})
      .dequantize = true;
  for (std::int64_t layer = 0; layer < config.num_hidden_layers; ++layer) {
    const std::string prefix = fmt::format("model.layers.{}.", layer);
    list.norm(prefix + "input_layernorm.weight", hidden);
    list.norm(prefix + "post_attention_layernorm.weight", hidden);
    add_attention(list, config, prefix + "self_attn.");
    if (config.is_moe_layer(layer)) {
      list.set_layer(layer);
      add_experts(list, config, prefix + "mlp.");
    } else {
      list.set_kind(WeightKind::kDenseLayers);
      list.mlp(prefix + "mlp.", hidden, config.intermediate_size, PartOf::kIntermediate);
    }
  }
  list.norm("model.norm.weight", hidden);
  list.set_kind(WeightKind::kVocabulary);
  list.linear("lm_head.weight", {config.vocab_size, hidden}, {.part = PartOf::kVocabulary}).tied =
      config.tie_word_embeddings;
  return list.take();
}

std::vector<TensorSpec> drafter_tensor_specs(const DrafterConfig& config) {
  SpecList list;
  const std::int64_t hidden = config.hidden_size;
  const std::int64_t query_width = config.num_attention_heads * config.head_dim;
  const std::int64_t key_width = config.num_key_value_heads * config.head_dim;
  const SplitRule query_rows{.part = PartOf::kHeads, .unit = config.head_dim};
  const SplitRule key_rows{.part = PartOf::kKeyValueHeads, .unit = config.head_dim};
  const auto num_taps = static_cast<std::int64_t>(config.target_layer_ids.size());
  list.linear("fc.weight", {hidden, num_taps * hidden}, {.part = PartOf::kContext});
  list.vector("hidden_norm.weight", hidden);
  list.vector("norm.weight", hidden);
  for (std::int64_t layer = 0; layer < config.num_hidden_layers; ++layer) {
    const std::string prefix = fmt::format("layers.{}.", layer);
    list.vector(prefix + "input_layernorm.weight", hidden);
    list.vector(prefix + "post_attention_layernorm.weight", hidden);
    list.linear(prefix + "self_attn.q_proj.weight", {query_width, hidden}, query_rows);
    list.linear(prefix + "self_attn.k_proj.weight", {key_width, hidden}, key_rows);
    list.linear(prefix + "self_attn.v_proj.weight", {key_width, hidden}, key_rows);
    list.linear(prefix + "self_attn.o_proj.weight", {hidden, query_width},
                {.part = PartOf::kHeads, .by_columns = true, .unit = config.head_dim});
    list.vector(prefix + "self_attn.q_norm.weight", config.head_dim);
    list.vector(prefix + "self_attn.k_norm.weight", config.head_dim);
    list.mlp(prefix + "mlp.", hidden, config.intermediate_size, PartOf::kIntermediate);
  }
  return list.take();
}

}  // namespace kdtree
