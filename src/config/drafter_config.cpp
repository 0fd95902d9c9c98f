#include <cmath>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "config/config_reader.h"
#include "config/config_sections.h"
#include "config/model_config.h"
#include "core/check.h"

namespace kdtree {

namespace {

constexpr IntegerBounds kTokenId{.low = 0, .high = (std::int64_t{1} << 31) - 1};
constexpr IntegerBounds kBlock{.low = 2, .high = 1024};

// What errors say to the owner of a drafter of another kind.
std::string only_dflash(std::string_view kind) {
  return fmt::format("this is a {} drafter, which is not supported; DFlash ones are", kind);
}

void require_dflash(const ConfigReader& config) {
  const nlohmann::json* list = config.find("architectures");
  std::string expected = R"(["DFlashDraftModel"])";
  const std::string name =
      list != nullptr && list->is_array() && list->size() == 1 && list->front().is_string()
          ? list->front().get<std::string>()
          : "";
  for (const char* kind : {"DFlash2", "Domino"}) {
    if (name.starts_with(kind)) {
      expected += ": " + only_dflash(kind);
    }
  }
  config.require(name == "DFlashDraftModel", "architectures", expected);
}

// Keys of DFlash's relatives that change the computation; absent, null or harmless here. Some
// drafters state DFlash's architecture and are of another kind by their keys alone.
void refuse_unsupported(const ConfigReader& config) {
  for (const char* key :
       {"conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"}) {
    config.require(config.find(key) == nullptr, key, "null: " + only_dflash("DFlash2"));
  }
  const nlohmann::json* projector = config.find("projector_type");
  if (projector != nullptr && *projector == "domino") {
    config.refuse("projector_type", "null: " + only_dflash("Domino"));
  }
  for (const char* key : {"gru_hidden_dim", "emb_dim"}) {
    config.require(config.find(key) == nullptr, key, "null: " + only_dflash("Domino"));
  }
  for (const char* key : {"final_logit_softcapping", "projector_type"}) {
    config.require_absent_or(key, nullptr);
  }
  for (const char* key : {"use_swa", "use_sliding_window", "causal", "is_causal",
                          "attention_sink_bias", "attention_bias", "mlp_bias"}) {
    config.require_absent_or(key, false);
  }
  for (const char* key : {"output_multiplier", "attention_value_scale"}) {
    config.require(config.number_or(key, 1, {.low = -1e9, .high = 1e9}) == 1, key,
                   "1 (not supported otherwise)");
  }
  const nlohmann::json* attention = config.find("attention_mode");
  if (attention != nullptr && *attention == "mla") {
    config.refuse("attention_mode", "\"gqa\": " + only_dflash("DFlash2"));
  }
  config.text_or("attention_mode", "gqa", {"gqa"});
  if (const nlohmann::json* types = config.find("layer_types")) {
    config.require(types->is_array(), "layer_types", "a list");
    for (const nlohmann::json& type : *types) {
      config.require(type == "full_attention", "layer_types",
                     "full_attention for every layer (sliding_attention is not supported)");
    }
  }
}

// The published default (facts: DFlash 1.1): one layer taps the middle, more are spread evenly
// from layer 1 to the third from the end, halves rounded to even.
std::vector<std::int64_t> default_target_layer_ids(std::int64_t num_target_layers,
                                                   std::int64_t num_draft_layers) {
  if (num_draft_layers == 1) {
    return {num_target_layers / 2};
  }
  std::vector<std::int64_t> ids;
  const auto span = static_cast<double>(num_target_layers - 3 - 1);
  for (std::int64_t index = 0; index < num_draft_layers; ++index) {
    const double id =
        1 + static_cast<double>(index) * span / static_cast<double>(num_draft_layers - 1);
    ids.push_back(static_cast<std::int64_t>(std::nearbyint(id)));
  }
  return ids;
}

void read_taps(const ConfigReader& config, const ConfigReader& dflash, DrafterConfig& drafter) {
  const IntegerBounds bounds{.low = 0, .high = kLayersBounds.high};
  drafter.target_layer_ids = dflash.integers_or_empty("target_layer_ids", bounds, false);
  const bool given = dflash.find("target_layer_ids") != nullptr;
  if (!given) {
    const std::int64_t layers = config.integer("num_target_layers", kLayersBounds);
    config.require(drafter.num_hidden_layers == 1 || layers >= 4, "num_target_layers",
                   "an integer of at least 4, or dflash_config.target_layer_ids");
    drafter.target_layer_ids = default_target_layer_ids(layers, drafter.num_hidden_layers);
  }
  const auto& ids = drafter.target_layer_ids;
  bool ascending = !ids.empty();
  for (std::size_t index = 1; index < ids.size(); ++index) {
    ascending = ascending && ids[index - 1] < ids[index];
  }
  if (given) {
    dflash.require(ascending, "target_layer_ids", "a list of ascending layers");
  } else {
    config.require(ascending, "num_target_layers",
                   "as many layers as give every drafter layer a tap of its own");
  }
}

void read_dflash(const ConfigReader& config, DrafterConfig& drafter) {
  const auto dflash = config.object("dflash_config");
  config.require(dflash.has_value(), "dflash_config", "an object");
  refuse_unsupported(*dflash);
  const ConfigReader& block = config.find("block_size") != nullptr ? config : *dflash;
  drafter.block_size = block.integer("block_size", kBlock);
  dflash->require(
      dflash->integer_or("block_size", drafter.block_size, kBlock) == drafter.block_size,
      "block_size", "the same as the top level's block_size");
  drafter.mask_token_id = dflash->integer("mask_token_id", kTokenId);
  dflash->require(drafter.mask_token_id < drafter.vocab_size, "mask_token_id",
                  fmt::format("an id below vocab_size {}", drafter.vocab_size));
  read_taps(config, *dflash, drafter);
}

void read_heads(const ConfigReader& config, DrafterConfig& drafter) {
  drafter.num_attention_heads = config.integer("num_attention_heads", kHeadsBounds);
  drafter.num_key_value_heads =
      config.integer_or("num_key_value_heads", drafter.num_attention_heads, kHeadsBounds);
  config.require(drafter.num_attention_heads % drafter.num_key_value_heads == 0,
                 "num_key_value_heads",
                 fmt::format("a divisor of num_attention_heads {}", drafter.num_attention_heads));
  const std::int64_t default_dim = drafter.hidden_size / drafter.num_attention_heads;
  drafter.head_dim = config.integer_or("head_dim", default_dim, {.low = 1, .high = 1 << 16});
  config.require(drafter.head_dim > 0 && drafter.head_dim % 2 == 0, "head_dim", "an even integer");
}

}  // namespace

DrafterConfig parse_drafter_config(const nlohmann::json& json, const std::string& origin) {
  const ConfigReader config(json, origin);
  require_dflash(config);
  config.text_or("hidden_act", "silu", {"silu"});
  refuse_unsupported(config);

  DrafterConfig drafter;
  drafter.vocab_size = config.integer("vocab_size", kTokensBounds);
  drafter.hidden_size = config.integer("hidden_size", kWidthBounds);
  drafter.intermediate_size = config.integer("intermediate_size", kWidthBounds);
  drafter.num_hidden_layers = config.integer("num_hidden_layers", kLayersBounds);
  drafter.rms_norm_eps =
      config.number_or("rms_norm_eps", drafter.rms_norm_eps, {.low = 0, .high = 1});
  read_heads(config, drafter);
  read_dflash(config, drafter);
  drafter.rope = read_rope(config, config.integer_or("max_position_embeddings", 0, kTokensBounds));
  drafter.quantization = read_quantization(config).int4;
  return drafter;
}

void check_drafter_fits(const DrafterConfig& drafter, const ModelConfig& target,
                        const std::string& origin) {
  require_input(drafter.hidden_size == target.hidden_size,
                "{}: the drafter's hidden_size is {}, the target's {}", origin, drafter.hidden_size,
                target.hidden_size);
  require_input(drafter.vocab_size == target.vocab_size,
                "{}: the drafter's vocab_size is {}, the target's {}", origin, drafter.vocab_size,
                target.vocab_size);
  for (const std::int64_t layer : drafter.target_layer_ids) {
    require_input(layer >= 0 && layer < target.num_hidden_layers,
                  "{}: target_layer_ids names layer {}, the target has layers 0 to {}", origin,
                  layer, target.num_hidden_layers - 1);
  }
  require_input(drafter.mask_token_id < target.vocab_size,
                "{}: mask_token_id is {}, the target's vocabulary has {} tokens", origin,
                drafter.mask_token_id, target.vocab_size);
}

}  // namespace kdtree
