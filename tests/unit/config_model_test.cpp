// parse_model_config: the published models, the goldens' configs, and every refusal.
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

Json yarn(double factor, double beta_fast) {
  return {{"type", "yarn"},
          {"factor", factor},
          {"beta_fast", beta_fast},
          {"beta_slow", 1.0},
          {"mscale", 1.0},
          {"mscale_all_dim", 1.0},
          {"original_max_position_embeddings", 4096}};
}

Json deepseek_v3() {
  Json json = Json::parse(R"({
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3",
    "vocab_size": 129280, "hidden_size": 7168, "num_hidden_layers": 61,
    "first_k_dense_replace": 3, "moe_layer_freq": 1, "intermediate_size": 18432,
    "moe_intermediate_size": 2048, "n_routed_experts": 256, "num_experts_per_tok": 8,
    "n_shared_experts": 1, "num_attention_heads": 128, "num_key_value_heads": 128,
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "n_group": 8,
    "topk_group": 4, "norm_topk_prob": true, "routed_scaling_factor": 2.5, "rms_norm_eps": 1e-06,
    "rope_theta": 10000, "max_position_embeddings": 163840, "num_nextn_predict_layers": 1,
    "tie_word_embeddings": false, "attention_bias": false, "attention_dropout": 0.0,
    "hidden_act": "silu", "bos_token_id": 0, "eos_token_id": 1, "torch_dtype": "bfloat16",
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3",
      "activation_scheme": "dynamic", "weight_block_size": [128, 128]}})");
  json["rope_scaling"] = yarn(40, 32);
  return json;
}

Json int4_section() {
  return Json::parse(R"({
    "quant_method": "compressed-tensors", "format": "pack-quantized",
    "quantization_status": "compressed", "kv_cache_scheme": null,
    "config_groups": {"group_0": {"targets": ["Linear"], "input_activations": null,
      "output_activations": null, "weights": {"num_bits": 4, "group_size": 32,
      "strategy": "group", "symmetric": true, "type": "int", "dynamic": false, "actorder": null,
      "observer": "minmax"}}},
    "ignore": ["lm_head", "re:.*self_attn.*"]})");
}

Json kimi_k2() {
  Json json = deepseek_v3();
  json.update({{"model_type", "kimi_k2"},
               {"vocab_size", 163840},
               {"first_k_dense_replace", 1},
               {"n_routed_experts", 384},
               {"num_attention_heads", 64},
               {"num_key_value_heads", 64},
               {"n_group", 1},
               {"topk_group", 1},
               {"routed_scaling_factor", 2.827},
               {"rope_theta", 50000},
               {"max_position_embeddings", 131072},
               {"eos_token_id", 163585}});
  json["rope_scaling"] = yarn(32, 1);
  return json;
}

Json kimi_k25() {
  Json text = kimi_k2();
  text["rms_norm_eps"] = 1e-5;
  text["max_position_embeddings"] = 262144;
  text["rope_scaling"] = yarn(64, 32);
  text["quantization_config"] = int4_section();
  return {{"architectures", {"KimiK25ForConditionalGeneration"}},
          {"model_type", "kimi_k25"},
          {"text_config", text},
          {"vision_config", {{"vt_hidden_size", 1152}}},
          {"media_placeholder_token_id", 163605}};
}

Json deepseek_v2_lite() {
  Json json = deepseek_v3();
  json.erase("quantization_config");
  json.update({{"architectures", {"DeepseekV2ForCausalLM"}},
               {"model_type", "deepseek_v2"},
               {"vocab_size", 102400},
               {"hidden_size", 2048},
               {"num_hidden_layers", 27},
               {"first_k_dense_replace", 1},
               {"intermediate_size", 10944},
               {"moe_intermediate_size", 1408},
               {"n_routed_experts", 64},
               {"num_experts_per_tok", 6},
               {"n_shared_experts", 2},
               {"num_attention_heads", 16},
               {"num_key_value_heads", 16},
               {"scoring_func", "softmax"},
               {"topk_method", "greedy"},
               {"n_group", 1},
               {"topk_group", 1},
               {"norm_topk_prob", false},
               {"routed_scaling_factor", 1.0},
               {"eos_token_id", 100001}});
  json["q_lora_rank"] = nullptr;
  json["rope_scaling"] = yarn(40, 32);
  json["rope_scaling"]["mscale"] = 0.707;
  json["rope_scaling"]["mscale_all_dim"] = 0.707;
  return json;
}

Json moonlight() {
  Json json = deepseek_v2_lite();
  json.update({{"architectures", {"DeepseekV3ForCausalLM"}},
               {"model_type", "deepseek_v3"},
               {"vocab_size", 163840},
               {"intermediate_size", 11264},
               {"scoring_func", "sigmoid"},
               {"topk_method", "noaux_tc"},
               {"norm_topk_prob", true},
               {"routed_scaling_factor", 2.446},
               {"rms_norm_eps", 1e-5},
               {"rope_theta", 50000.0},
               {"max_position_embeddings", 8192},
               {"eos_token_id", 163586}});
  json.erase("rope_scaling");
  return json;
}

ModelConfig parse_target(const Json& json) {
  return parse_model_config(json, "config.json");
}

TEST(ConfigModel, ParsesDeepseekV3) {
  const ModelConfig config = parse_target(deepseek_v3());
  EXPECT_EQ(config.architecture, "DeepseekV3ForCausalLM");
  EXPECT_EQ(config.vocab_size, 129280);
  EXPECT_EQ(config.num_hidden_layers, 61);
  EXPECT_EQ(config.num_attention_heads, 128);
  EXPECT_EQ(config.q_lora_rank, 1536);
  EXPECT_EQ(config.qk_head_dim(), 192);
  EXPECT_EQ(config.n_group, 8);
  EXPECT_EQ(config.topk_group, 4);
  EXPECT_EQ(config.routed_scaling_factor, 2.5);
  EXPECT_TRUE(config.routed_scaling_always);
  EXPECT_FALSE(config.is_moe_layer(2));
  EXPECT_TRUE(config.is_moe_layer(3));
  EXPECT_TRUE(config.rope.yarn);
  EXPECT_EQ(config.rope.factor, 40);
  EXPECT_EQ(config.rope.original_max_position_embeddings, 4096);
  EXPECT_EQ(config.eos_token_ids, std::vector<std::int64_t>{1});
  EXPECT_FALSE(config.quantization.has_value());
  EXPECT_EQ(config.tensor_prefix, "");
}

TEST(ConfigModel, ParsesKimiK2) {
  const ModelConfig config = parse_target(kimi_k2());
  EXPECT_EQ(config.n_routed_experts, 384);
  EXPECT_EQ(config.rope.beta_fast, 1);
  EXPECT_EQ(config.rope.rope_theta, 50000);
  EXPECT_EQ(config.rms_norm_eps, 1e-6);
}

TEST(ConfigModel, ParsesKimiK2Thinking) {
  Json json = kimi_k2();
  json["rope_scaling"] = yarn(64, 1);
  json["rms_norm_eps"] = 1e-5;
  json["quantization_config"] = int4_section();
  const ModelConfig config = parse_target(json);
  ASSERT_TRUE(config.quantization.has_value());
  EXPECT_EQ(config.quantization->group_size, 32);
  EXPECT_EQ(config.tensor_prefix, "");
}

TEST(ConfigModel, ParsesKimiK25Nested) {
  const ModelConfig config = parse_target(kimi_k25());
  EXPECT_EQ(config.architecture, "DeepseekV3ForCausalLM");
  EXPECT_EQ(config.tensor_prefix, "language_model.");
  ASSERT_TRUE(config.quantization.has_value());
  EXPECT_EQ(config.quantization->group_size, 32);
  EXPECT_EQ(config.rms_norm_eps, 1e-5);
}

TEST(ConfigModel, ParsesKimiK26Variants) {
  Json json = kimi_k25();
  Json& text = json["text_config"];
  // A newer writer puts the rope into rope_parameters and the quantisation at the top level.
  json["quantization_config"] = text["quantization_config"];
  text.erase("quantization_config");
  text.erase("rope_theta");
  text.erase("rope_scaling");
  text["rope_parameters"] = yarn(64, 32);
  text["rope_parameters"].erase("type");
  text["rope_parameters"]["rope_type"] = "yarn";
  text["rope_parameters"]["rope_theta"] = 50000.0;
  text["model_type"] = "deepseek_v3";
  text["eos_token_id"] = {163585, 163586};
  text["n_group"] = 1.0;
  const ModelConfig config = parse_target(json);
  EXPECT_EQ(config.quantization->group_size, 32);
  EXPECT_EQ(config.rope.rope_theta, 50000);
  EXPECT_EQ(config.rope.factor, 64);
  EXPECT_EQ(config.eos_token_ids, (std::vector<std::int64_t>{163585, 163586}));
}

TEST(ConfigModel, ParsesDeepseekV2Lite) {
  const ModelConfig config = parse_target(deepseek_v2_lite());
  EXPECT_EQ(config.q_lora_rank, 0);
  EXPECT_EQ(config.scoring_func, "softmax");
  EXPECT_EQ(config.topk_method, "greedy");
  EXPECT_FALSE(config.norm_topk_prob);
  EXPECT_FALSE(config.routed_scaling_always);
  EXPECT_EQ(config.rope.mscale, 0.707);
  Json json = deepseek_v2_lite();
  json["topk_method"] = "group_limited_greedy";
  json["n_group"] = 8;
  json["topk_group"] = 3;
  EXPECT_EQ(parse_target(json).topk_method, "group_limited_greedy");
}

TEST(ConfigModel, ParsesMoonlightWithoutYarn) {
  const ModelConfig config = parse_target(moonlight());
  EXPECT_FALSE(config.rope.yarn);
  EXPECT_EQ(config.rope.rope_theta, 50000);
  Json json = moonlight();
  json["rope_scaling"] = nullptr;
  json.erase("eos_token_id");
  json.erase("q_lora_rank");
  EXPECT_FALSE(parse_target(json).rope.yarn);
  EXPECT_TRUE(parse_target(json).eos_token_ids.empty());
  json["rope_scaling"] = {{"rope_type", "default"}};
  EXPECT_FALSE(parse_target(json).rope.yarn);
}

TEST(ConfigModel, ParsesDenseModels) {
  Json json = moonlight();
  json["n_routed_experts"] = nullptr;
  json["first_k_dense_replace"] = 27;
  const ModelConfig config = parse_target(json);
  EXPECT_EQ(config.n_routed_experts, 0);
  EXPECT_FALSE(config.is_moe_layer(26));
}

TEST(ConfigModel, ParsesTheGoldens) {
  for (const char* name :
       {"kimi_nested_int4", "deepseek_v3_fp8_groups", "dflash_trained_bf16/target"}) {
    const std::string path = goldens_path(name) + "/config.json";
    const ModelConfig config = parse_model_config(read_json_file(path), path);
    EXPECT_EQ(config.num_hidden_layers, 4) << name;
  }
}

TEST(ConfigModel, SurvivesARoundTrip) {
  for (const Json& json : {deepseek_v3(), kimi_k2(), kimi_k25(), deepseek_v2_lite(), moonlight()}) {
    const ModelConfig config = parse_target(json);
    const Json written = to_json(config);
    EXPECT_EQ(to_json(parse_target(written)), written);
    EXPECT_EQ(parse_target(written).rope.factor, config.rope.factor);
    EXPECT_EQ(parse_target(written).quantization.has_value(), config.quantization.has_value());
  }
}

struct Refusal {
  const char* pointer;  // JSON pointer into the config
  Json value;           // a discarded value erases the key
  const char* key;      // what the message must name
  const char* expected;
};

void expect_refused(Json json, const Refusal& refusal) {
  const Json::json_pointer pointer(refusal.pointer);
  if (refusal.value.is_discarded()) {
    json.at(pointer.parent_pointer()).erase(pointer.back());
  } else {
    json[pointer] = refusal.value;
  }
  try {
    parse_target(json);
    ADD_FAILURE() << refusal.pointer << " = " << refusal.value << " was accepted";
  } catch (const InputError& error) {
    const std::string text = error.what();
    EXPECT_EQ(text.find("config.json: "), 0U) << text;
    EXPECT_NE(text.find(std::string("'") + refusal.key + "'"), std::string::npos) << text;
    EXPECT_NE(text.find(refusal.expected), std::string::npos) << text;
  }
}

const Json kErased = Json(Json::value_t::discarded);

TEST(ConfigModel, RefusesWhatIsOutOfRange) {
  const std::vector<Refusal> refusals = {
      {"/vocab_size", kErased, "vocab_size", "missing"},
      {"/vocab_size", 0, "vocab_size", "is 0, expected an integer from 1"},
      {"/vocab_size", "many", "vocab_size", "\"many\""},
      {"/vocab_size", 1.5, "vocab_size", "is 1.5"},
      {"/vocab_size", 1e300, "vocab_size", "1e+300"},
      {"/vocab_size", 18446744073709551615ULL, "vocab_size", "18446744073709551615"},
      {"/hidden_size", -4, "hidden_size", "is -4"},
      {"/hidden_size", nullptr, "hidden_size", "is null"},
      {"/intermediate_size", kErased, "intermediate_size", "missing"},
      {"/num_hidden_layers", 100000, "num_hidden_layers", "1024"},
      {"/num_attention_heads", kErased, "num_attention_heads", "missing"},
      {"/num_key_value_heads", 8, "num_key_value_heads", "128, as num_attention_heads"},
      {"/q_lora_rank", -1, "q_lora_rank", "from 0"},
      {"/kv_lora_rank", kErased, "kv_lora_rank", "missing"},
      {"/qk_nope_head_dim", kErased, "qk_nope_head_dim", "missing"},
      {"/qk_rope_head_dim", 63, "qk_rope_head_dim", "even"},
      {"/v_head_dim", 0, "v_head_dim", "from 1"},
      {"/moe_intermediate_size", kErased, "moe_intermediate_size", "missing"},
      {"/num_experts_per_tok", 257, "num_experts_per_tok", "from 1 to 256"},
      {"/n_group", 7, "n_group", "divisor of n_routed_experts 256"},
      {"/n_group", 256, "n_group", "two experts"},
      {"/topk_group", 9, "topk_group", "from 1 to 8"},
      {"/n_routed_experts", nullptr, "n_routed_experts", "first_k_dense_replace"},
      {"/n_routed_experts", -3, "n_routed_experts", "from 0"},
      {"/moe_layer_freq", 0, "moe_layer_freq", "from 1"},
      {"/first_k_dense_replace", -1, "first_k_dense_replace", "from 0"},
      {"/routed_scaling_factor", "2.5", "routed_scaling_factor", "a number"},
      {"/rms_norm_eps", 2, "rms_norm_eps", "from 0 to 1"},
      {"/norm_topk_prob", 1, "norm_topk_prob", "true or false"},
      {"/eos_token_id", "stop", "eos_token_id", "an integer"},
      {"/eos_token_id", {1, -2}, "eos_token_id", "a list"},
      {"/eos_token_id", 129280, "eos_token_id", "from 0 to 129279"},
      {"/rope_theta", 0, "rope_theta", "a number"},
      {"/rope_theta", 1, "rope_theta", "above 1 with YaRN"},
      {"/rope_scaling/factor", kErased, "rope_scaling.factor", "missing"},
      {"/rope_scaling/factor", 0.5, "rope_scaling.factor", "from 1"},
      {"/rope_scaling/beta_slow", 33, "rope_scaling.beta_fast", "not below beta_slow"},
      {"/rope_scaling/original_max_position_embeddings", 0,
       "rope_scaling.original_max_position_embeddings", "from 1"},
  };
  for (const Refusal& refusal : refusals) {
    expect_refused(deepseek_v3(), refusal);
  }
}

TEST(ConfigModel, RefusesWhatIsNotSupported) {
  const std::vector<Refusal> refusals = {
      {"/architectures", {"LlamaForCausalLM"}, "architectures", "DeepseekV3ForCausalLM"},
      {"/architectures", "DeepseekV3ForCausalLM", "architectures", "[\"DeepseekV3ForCausalLM\"]"},
      {"/model_type", "llama", "model_type", "kimi_k2"},
      {"/hidden_act", "gelu", "hidden_act", "silu"},
      {"/attention_bias", true, "attention_bias", "false"},
      {"/scoring_func", "tanh", "scoring_func", "sigmoid or softmax"},
      {"/topk_method", "random", "topk_method", "noaux_tc"},
      {"/rope_scaling/type", "linear", "rope_scaling.type", "yarn"},
      {"/rope_scaling/rope_type", "llama3", "rope_scaling.rope_type", "yarn"},
      {"/rope_scaling/rope_type", "default", "rope_scaling.type", "the same as rope_type"},
      {"/rope_scaling", {1, 2}, "rope_scaling", ""},
      {"/quantization_config/quant_method", "awq", "quantization_config.quant_method", "fp8"},
      {"/quantization_config/quant_method", kErased, "quantization_config.quant_method", "missing"},
      {"/quantization_config/weight_block_size",
       {64, 64},
       "quantization_config.weight_block_size",
       "[128, 128]"},
      {"/quantization_config/activation_scheme", "static", "quantization_config.activation_scheme",
       "dynamic"},
      {"/quantization_config/fmt", "e5m2", "quantization_config.fmt", "e4m3"},
  };
  for (const Refusal& refusal : refusals) {
    if (std::string(refusal.pointer) != "/rope_scaling") {
      expect_refused(deepseek_v3(), refusal);
    }
  }
  Json json = deepseek_v3();
  json["rope_scaling"] = {1, 2};
  EXPECT_THROW(parse_target(json), InputError);
  EXPECT_THROW(parse_target(Json::array()), InputError);
  EXPECT_THROW(parse_target(Json(3)), InputError);
}

TEST(ConfigModel, RefusesOtherCompressedTensors) {
  const std::string section = "/text_config/quantization_config";
  const std::string group = section + "/config_groups/group_0";
  const std::string key = "text_config.quantization_config";
  const std::string group_key = key + ".config_groups.group_0";
  struct Change {
    std::string pointer;
    Json value;
    std::string key;
    const char* expected;
  };
  const std::vector<Change> changes = {
      {section + "/format", "marlin-24", key + ".format", "pack-quantized"},
      {section + "/quantization_status", "frozen", key + ".quantization_status", "compressed"},
      {section + "/kv_cache_scheme", {{"num_bits", 8}}, key + ".kv_cache_scheme", "null"},
      {section + "/sparsity_config", {{"format", "24"}}, key + ".sparsity_config", "null"},
      {section + "/config_groups/group_1", Json::object(), key + ".config_groups", "one group"},
      {group + "/targets", {"Conv2d"}, group_key + ".targets", "Linear"},
      {group + "/input_activations", {{"num_bits", 8}}, group_key + ".input_activations", "null"},
      {group + "/weights", nullptr, group_key + ".weights", "an object"},
      {group + "/weights/num_bits", 8, group_key + ".weights.num_bits", "4"},
      {group + "/weights/type", "float", group_key + ".weights.type", "int"},
      {group + "/weights/strategy", "channel", group_key + ".weights.strategy", "group"},
      {group + "/weights/symmetric", false, group_key + ".weights.symmetric", "true"},
      {group + "/weights/group_size", 12, group_key + ".weights.group_size", "multiple of 8"},
      {group + "/weights/group_size", -1, group_key + ".weights.group_size", "from 8"},
      {group + "/weights/actorder", "group", group_key + ".weights.actorder", "null"},
      {group + "/weights/dynamic", true, group_key + ".weights.dynamic", "false"},
  };
  for (const Change& change : changes) {
    expect_refused(kimi_k25(),
                   {change.pointer.c_str(), change.value, change.key.c_str(), change.expected});
  }
}

TEST(ConfigModel, RefusesContradictingQuantization) {
  Json json = kimi_k25();
  json["quantization_config"] = int4_section();
  EXPECT_EQ(parse_target(json).quantization->group_size, 32);
  json["quantization_config"]["config_groups"]["group_0"]["weights"]["group_size"] = 64;
  EXPECT_THROW(parse_target(json), InputError);
}

TEST(ConfigModel, RefusesWrongNesting) {
  Json json = kimi_k25();
  json.erase("text_config");
  EXPECT_THROW(parse_target(json), InputError);
  json = kimi_k25();
  json["architectures"] = {"DeepseekV3ForCausalLM"};
  EXPECT_THROW(parse_target(json), InputError);
}

TEST(ConfigJson, OrderedKeysStayInOrder) {
  const char* text = R"({"b":1,"a":{"d":[2],"c":"ü"}})";
  EXPECT_EQ(parse_ordered_json(text, "x.json").dump(), text);
  EXPECT_NE(parse_json(text, "x.json").dump(), text);
  expect_input_error([] { parse_ordered_json(R"({"a":1,"a":2})", "x.json"); }, {"x.json", "twice"});
  expect_input_error([] { parse_ordered_json("{", "x.json"); }, {"x.json", "not valid JSON"});
}

TEST(ConfigJson, NamesTheFileForEveryMistake) {
  const std::vector<std::pair<std::string, std::string>> texts = {
      {R"({"a": 1, "b": {"c": 1, "c": 2}})", "holds the key \"c\" twice"},
      {"{\"a\": \"\xff\"}", "not valid JSON"},
      {"{\"a\": \"\xc3\x28\"}", "not valid JSON"},
      {R"({"a": 1,})", "not valid JSON"},
      {"", "not valid JSON"},
      {R"({"a": 1e999})", "not valid JSON"},
      {std::string(100000, '['), "deeper than 64 levels"},
      {R"({"a": 1} x)", "not valid JSON"},
  };
  for (const auto& [text, expected] : texts) {
    try {
      parse_json(text, "some/config.json");
      ADD_FAILURE() << text.substr(0, 80) << " was accepted";
    } catch (const InputError& error) {
      const std::string message = error.what();
      EXPECT_EQ(message.find("some/config.json: "), 0U) << message;
      EXPECT_NE(message.find(expected), std::string::npos) << message;
    }
  }
  EXPECT_EQ(parse_json(R"({"a": {"x": 1}, "b": {"x": 1}, "c": [{"x": 1}, {"x": 2}]})", "f").size(),
            3U);
  EXPECT_THROW(read_json_file("/nonexistent/config.json"), InputError);
}

}  // namespace
}  // namespace kdtree
