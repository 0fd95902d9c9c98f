// parse_drafter_config and check_drafter_fits.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "config/model_config.h"
#include "core/check.h"
#include "core/json_text.h"
#include "tests/unit/weights_test_support.h"

namespace kdtree {
namespace {

using Json = nlohmann::json;

Json kimi_draft() {
  return Json::parse(R"({
    "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "hidden_size": 7168,
    "num_hidden_layers": 6, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128,
    "intermediate_size": 18432, "vocab_size": 163840, "num_target_layers": 61, "block_size": 8,
    "rms_norm_eps": 1e-5, "attention_bias": false, "hidden_act": "silu",
    "dflash_config": {"target_layer_ids": [1, 12, 24, 35, 47, 58], "mask_token_id": 163838},
    "rope_theta": 50000, "max_position_embeddings": 262144,
    "rope_scaling": {"type": "yarn", "factor": 64.0, "beta_fast": 32.0, "beta_slow": 1.0,
      "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096}})");
}

DrafterConfig parse(const Json& json) {
  return parse_drafter_config(json, "draft.json");
}

TEST(ConfigDrafter, ParsesTheKimiDrafts) {
  const DrafterConfig config = parse(kimi_draft());
  EXPECT_EQ(config.hidden_size, 7168);
  EXPECT_EQ(config.num_key_value_heads, 8);
  EXPECT_EQ(config.block_size, 8);
  EXPECT_EQ(config.draft_horizon(), 7);
  EXPECT_EQ(config.mask_token_id, 163838);
  EXPECT_EQ(config.target_layer_ids, (std::vector<std::int64_t>{1, 12, 24, 35, 47, 58}));
  EXPECT_TRUE(config.rope.yarn);
  EXPECT_FALSE(config.rope.attention_factor.has_value());

  Json json = kimi_draft();
  json.erase("rope_scaling");
  json.erase("rope_theta");
  json["rope_parameters"] = {{"rope_type", "deepseek_yarn"},
                             {"rope_theta", 50000.0},
                             {"factor", 64.0},
                             {"attention_factor", 1.4158883},
                             {"original_max_position_embeddings", 4096}};
  EXPECT_EQ(parse(json).rope.attention_factor, 1.4158883);
  EXPECT_EQ(parse(json).rope.rope_theta, 50000);
}

TEST(ConfigDrafter, FillsInDefaults) {
  Json json = kimi_draft();
  json["dflash_config"].erase("target_layer_ids");
  json.erase("head_dim");
  json["num_attention_heads"] = 56;
  json.erase("num_key_value_heads");
  json["dflash_config"]["block_size"] = json["block_size"];
  json.erase("block_size");
  const DrafterConfig config = parse(json);
  // round_half_even(1 + i * 57 / 5)
  EXPECT_EQ(config.target_layer_ids, (std::vector<std::int64_t>{1, 12, 24, 35, 47, 58}));
  EXPECT_EQ(config.head_dim, 128);
  EXPECT_EQ(config.num_key_value_heads, 56);
  EXPECT_EQ(config.block_size, 8);
  json["num_hidden_layers"] = 1;
  EXPECT_EQ(parse(json).target_layer_ids, std::vector<std::int64_t>{30});
  json["num_hidden_layers"] = 5;
  json["num_target_layers"] = 36;
  EXPECT_EQ(parse(json).target_layer_ids, (std::vector<std::int64_t>{1, 9, 17, 25, 33}));
}

TEST(ConfigDrafter, ParsesTheGolden) {
  const std::string path = goldens_path("dflash_trained_bf16/draft/config.json");
  const DrafterConfig config = parse_drafter_config(read_json_file(path), path);
  EXPECT_EQ(config.target_layer_ids, (std::vector<std::int64_t>{0, 2}));
  EXPECT_FALSE(config.rope.yarn);
}

TEST(ConfigDrafter, SurvivesARoundTrip) {
  const Json written = to_json(parse(kimi_draft()));
  EXPECT_EQ(to_json(parse(written)), written);
}

TEST(ConfigDrafter, NamesTheKindsThatAreNotSupported) {
  const auto refused = [](const char* pointer, const Json& value, const std::string& kind) {
    Json json = kimi_draft();
    json[Json::json_pointer(pointer)] = value;
    expect_input_error([&] { parse(json); },
                       {"draft.json: key '",
                        "this is a " + kind + " drafter, which is not supported; DFlash ones are"});
  };
  refused("/architectures", {"DFlash2DraftModel"}, "DFlash2");
  refused("/architectures", {"DominoDraftModel"}, "Domino");
  refused("/dflash_config/conv_kernel_size", 3, "DFlash2");
  refused("/selector_top_k", 16, "DFlash2");
  refused("/dflash_config/attention_mode", "mla", "DFlash2");
  refused("/dflash_config/projector_type", "domino", "Domino");
  refused("/gru_hidden_dim", 1024, "Domino");
}

void expect_refused(const char* pointer, const Json& value, const std::string& key) {
  Json json = kimi_draft();
  json[Json::json_pointer(pointer)] = value;
  try {
    parse(json);
    ADD_FAILURE() << pointer << " = " << value << " was accepted";
  } catch (const InputError& error) {
    const std::string text = error.what();
    EXPECT_EQ(text.find("draft.json: "), 0U) << text;
    EXPECT_NE(text.find("'" + key + "'"), std::string::npos) << text;
  }
}

TEST(ConfigDrafter, RefusesRelativesOfDFlash) {
  for (const char* key : {"conv_kernel_size", "selector_rank", "final_logit_softcapping"}) {
    expect_refused((std::string("/") + key).c_str(), 4, key);
    expect_refused((std::string("/dflash_config/") + key).c_str(), 4,
                   std::string("dflash_config.") + key);
  }
  for (const char* key : {"use_swa", "causal", "attention_sink_bias"}) {
    expect_refused((std::string("/dflash_config/") + key).c_str(), true,
                   std::string("dflash_config.") + key);
  }
  expect_refused("/attention_mode", "mla", "attention_mode");
  expect_refused("/dflash_config/projector_type", "domino", "dflash_config.projector_type");
  expect_refused("/dflash_config/output_multiplier", 2.0, "dflash_config.output_multiplier");
  expect_refused("/is_causal", true, "is_causal");
  expect_refused("/attention_bias", true, "attention_bias");
  expect_refused("/use_sliding_window", true, "use_sliding_window");
  expect_refused("/layer_types", {"full_attention", "sliding_attention"}, "layer_types");
  expect_refused("/architectures", {"DFlash2DraftModel"}, "architectures");
  expect_refused("/hidden_act", "gelu", "hidden_act");
}

TEST(ConfigDrafter, RefusesWhatIsOutOfRange) {
  expect_refused("/num_key_value_heads", 7, "num_key_value_heads");
  expect_refused("/head_dim", 127, "head_dim");
  expect_refused("/block_size", 1, "block_size");
  expect_refused("/dflash_config/mask_token_id", 163840, "dflash_config.mask_token_id");
  expect_refused("/dflash_config/mask_token_id", nullptr, "dflash_config.mask_token_id");
  expect_refused("/dflash_config/block_size", 16, "dflash_config.block_size");
  expect_refused("/dflash_config/target_layer_ids", {3, 3}, "dflash_config.target_layer_ids");
  expect_refused("/dflash_config/target_layer_ids", Json::array(),
                 "dflash_config.target_layer_ids");
  expect_refused("/dflash_config/target_layer_ids", {-1}, "dflash_config.target_layer_ids");
  expect_refused("/dflash_config", nullptr, "dflash_config");
  expect_refused("/vocab_size", nullptr, "vocab_size");
}

TEST(ConfigDrafter, MustFitItsTarget) {
  const DrafterConfig drafter = parse(kimi_draft());
  ModelConfig target;
  target.hidden_size = 7168;
  target.vocab_size = 163840;
  target.num_hidden_layers = 61;
  EXPECT_NO_THROW(check_drafter_fits(drafter, target, "draft"));
  const auto expect_misfit = [&](auto change, const std::string& named) {
    ModelConfig other = target;
    change(other);
    try {
      check_drafter_fits(drafter, other, "draft");
      ADD_FAILURE() << named;
    } catch (const InputError& error) {
      EXPECT_NE(std::string(error.what()).find(named), std::string::npos) << error.what();
    }
  };
  expect_misfit([](ModelConfig& config) { config.hidden_size = 4096; }, "hidden_size");
  expect_misfit([](ModelConfig& config) { config.vocab_size = 129280; }, "vocab_size");
  expect_misfit([](ModelConfig& config) { config.num_hidden_layers = 58; }, "layer 58");
}

}  // namespace
}  // namespace kdtree
