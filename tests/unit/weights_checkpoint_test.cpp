// open_target and open_drafter: layouts, prefixes, what is ignored, and what is wrong with files.
#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/unit/checkpoint_builder.h"
#include "tests/unit/weights_test_support.h"
#include "weights/checkpoint.h"
#include "weights/safetensors.h"
#include "weights/weight_store.h"

namespace kdtree {
namespace {

using Json = nlohmann::json;

CheckpointRecipe tiny_recipe() {
  return {.target = tiny_target(), .drafter = tiny_drafter()};
}

BuiltTensor extra(const std::string& name, const Shape& shape = {1}) {
  BuiltTensor tensor{{name, DType::kFloat32, shape}, {}};
  tensor.data.resize(static_cast<std::size_t>(tensor.info.bytes()));
  return tensor;
}

TEST(WeightsCheckpoint, OpensTheGoldens) {
  const TargetCheckpoint kimi = open_target(goldens_path("kimi_nested_int4"));
  EXPECT_TRUE(kimi.tensors.contains("lm_head.weight"));
  EXPECT_TRUE(kimi.tensors.contains("model.layers.3.mlp.experts.15.down_proj.weight_packed"));
  EXPECT_TRUE(std::none_of(kimi.tensors.begin(), kimi.tensors.end(), [](const auto& item) {
    return item.first.starts_with("vision") || item.first.starts_with("language_model");
  }));
  EXPECT_EQ(kimi.config.quantization->group_size, 32);
  EXPECT_FALSE(kimi.config.quantization->mlp_is_packed);
  EXPECT_TRUE(kimi.goldens.is_null());

  const TargetCheckpoint v3 = open_target(goldens_path("deepseek_v3_fp8_groups"));
  EXPECT_TRUE(v3.tensors.contains("model.layers.3.mlp.gate.e_score_correction_bias"));
  EXPECT_FALSE(v3.tensors.contains("model.layers.4.eh_proj.weight"));

  const std::string draft = goldens_path("dflash_trained_bf16/draft");
  const DrafterCheckpoint drafter = open_drafter(draft);
  EXPECT_EQ(drafter.tensors.size(), 11U * 2 + 3);
  EXPECT_EQ(drafter.tensors.at("fc.weight").shape, (Shape{128, 256}));
  EXPECT_FALSE(holds_drafter(draft));
}

TEST(WeightsCheckpoint, OpensBundles) {
  const TemporaryFolder folder;
  const std::string path = folder / "model.kdtr";
  CheckpointRecipe recipe = tiny_recipe();
  recipe.group_size = 8;
  Json header = build_bundle_header(recipe);
  header["goldens"] = {{"prompt", {1, 2}}};
  write_built_bundle(header, build_tensors(recipe, BuiltNames::kBundle), path);
  const TargetCheckpoint target = open_target(path);
  EXPECT_EQ(target.config.quantization->group_size, 8);
  EXPECT_EQ(target.goldens, header["goldens"]);
  EXPECT_EQ(target.config_json, header["target"]["config"]);
  EXPECT_FALSE(target.tensors.contains("drafter.fc.weight"));
  EXPECT_TRUE(holds_drafter(path));
  EXPECT_TRUE(open_drafter(path).tensors.contains("fc.weight"));

  recipe.drafter.reset();
  write_bundle(recipe, path);
  EXPECT_FALSE(holds_drafter(path));
  expect_input_error([&] { open_drafter(path); }, {path, "holds no drafter"});
}

TEST(WeightsCheckpoint, FindsPackedMlps) {
  const TemporaryFolder folder;
  const std::string path = folder / "model.kdtr";
  CheckpointRecipe recipe = tiny_recipe();
  recipe.group_size = 8;
  recipe.quantize_all = true;
  write_bundle(recipe, path);
  EXPECT_TRUE(open_target(path).config.quantization->mlp_is_packed);
  EXPECT_TRUE(open_drafter(path).config.quantization->mlp_is_packed);
}

TEST(WeightsCheckpoint, IgnoresOnlyWhatTheRulesName) {
  const TemporaryFolder folder;
  std::vector<BuiltTensor> tensors =
      build_tensors({.target = tiny_target()}, BuiltNames::kHuggingFace);
  for (const char* name :
       {"vision_tower.x", "mm_projector.y", "model.layers.2.eh_proj.weight",
        "model.layers.2.mlp.gate.weight", "model.layers.0.self_attn.rotary_emb.inv_freq"}) {
    tensors.push_back(extra(name));
  }
  const auto open = [&] {
    write_directory({.target = tiny_target()}, folder / "m");
    write_built_safetensors(tensors, folder / "m/model.safetensors");
    return open_target(folder / "m");
  };
  EXPECT_EQ(open().tensors.size() + 5, tensors.size());
  const auto expect_unknown = [&](const std::string& name) {
    tensors.push_back(extra(name));
    const TargetCheckpoint checkpoint = open();
    const auto placement = ExpertPlacement::linear(6, 1);
    expect_input_error([&] { target_bytes(checkpoint, placement, {}); },
                       {"model.safetensors", name, "unknown"});
    tensors.pop_back();
  };
  expect_unknown("model.layers.1x.weight");
  expect_unknown("model.layers.3.input_layernorm.weight");  // a layer, but not of prediction
  expect_unknown("model.layers.0.mlp.gate_proj.bias");
  expect_unknown("vision_towers");
  expect_unknown("language_model.model.norm.weight");
  expect_unknown("model.layers.0.mlp.down_proj.weight_scale");
  expect_unknown("model.layers.0.input_layernorm.weight_packed");
  expect_unknown("model.layers.1.mlp.gate.weight.qw");
}

TEST(WeightsCheckpoint, NamesWhatIsMissing) {
  const TemporaryFolder folder;
  expect_input_error([&] { open_target(folder / "none"); }, {folder / "none", "no such file"});
  expect_input_error([&] { holds_drafter(folder / "none"); }, {"no such file"});
  const std::string path = folder / "m";
  std::filesystem::create_directories(path);
  expect_input_error([&] { open_target(path); }, {path, "config.json"});
  write_file(path + "/config.json", "{");
  expect_input_error([&] { open_target(path); }, {path + "/config.json", "not valid JSON"});
  write_directory({.target = tiny_target()}, path);
  std::filesystem::remove(path + "/model.safetensors");
  expect_input_error([&] { open_target(path); }, {path, "neither model.safetensors nor"});
  expect_input_error([&] { open_drafter(path); }, {path, "DFlashDraftModel"});
  write_file(folder / "text", "hello, this is no bundle at all, only some text");
  expect_input_error([&] { open_target(folder / "text"); }, {folder / "text", "'hell'"});
}

class WeightsShards : public ::testing::Test {
 protected:
  WeightsShards() : path_(folder_ / "m") {
    write_directory({.target = tiny_target()}, path_);
    std::filesystem::remove(path_ + "/model.safetensors");
    const std::vector<BuiltTensor> tensors =
        build_tensors({.target = tiny_target()}, BuiltNames::kHuggingFace);
    for (std::size_t index = 0; index < tensors.size(); ++index) {
      shards_[index % 2].push_back(tensors[index]);
      map_[tensors[index].info.name] = file(index % 2);
    }
  }
  static std::string file(std::size_t shard) {
    return "model-0000" + std::to_string(shard + 1) + "-of-000002.safetensors";
  }
  void write() const {
    for (std::size_t shard = 0; shard < 2; ++shard) {
      write_built_safetensors(shards_[shard], path_ + "/" + file(shard));
    }
    write_file(path_ + "/model.safetensors.index.json", Json({{"weight_map", map_}}).dump());
  }

  TemporaryFolder folder_;
  std::string path_;
  std::vector<BuiltTensor> shards_[2];
  Json map_;
};

TEST_F(WeightsShards, Open) {
  write();
  EXPECT_EQ(open_target(path_).tensors.size(), map_.size());
}

TEST_F(WeightsShards, RefuseAMissingTensor) {
  const std::string name = shards_[1].back().info.name;
  shards_[1].pop_back();
  write();
  expect_input_error([&] { open_target(path_); }, {file(1), name, "is missing"});
}

TEST_F(WeightsShards, RefuseAMissingFile) {
  write();
  std::filesystem::remove(path_ + "/" + file(1));
  expect_input_error([&] { open_target(path_); }, {file(1), "no such file", "index.json"});
}

TEST_F(WeightsShards, RefuseASecondCopy) {
  shards_[1].push_back(shards_[0].front());
  write();
  expect_input_error([&] { open_target(path_); },
                     {file(1), shards_[0].front().info.name, "second copy"});
}

TEST_F(WeightsShards, RefuseWhatTheIndexLacks) {
  map_.erase(shards_[0].front().info.name);
  write();
  expect_input_error([&] { open_target(path_); },
                     {file(0), shards_[0].front().info.name, "is not in"});
}

TEST_F(WeightsShards, RefuseABadIndex) {
  write();
  const std::string index = path_ + "/model.safetensors.index.json";
  for (const char* text : {R"({"weight_map": []})", "{}", R"({"weight_map": {"a": 3}})",
                           R"({"weight_map": {"a": "../x"}})", R"({"weight_map": {"a": ""}})",
                           R"({"weight_map": {"a": "x", "a": "y"}})"}) {
    write_file(index, text);
    expect_input_error([&] { open_target(path_); }, {index});
  }
}

TEST(WeightsCheckpoint, ReadsDraftersWithAndWithoutPrefix) {
  const TemporaryFolder folder;
  write_directory(tiny_recipe(), folder / "m");
  const std::string path = folder / "m/draft";
  const std::size_t size = open_drafter(path).tensors.size();
  std::vector<BuiltTensor> tensors;
  for (BuiltTensor& tensor : build_tensors(tiny_recipe(), BuiltNames::kHuggingFace)) {
    if (tensor.info.name.starts_with("drafter.")) {
      tensor.info.name.replace(0, 7, "model");
      tensors.push_back(tensor);
    }
  }
  write_built_safetensors(tensors, path + "/model.safetensors");
  EXPECT_EQ(open_drafter(path).tensors.size(), size);
  EXPECT_TRUE(open_drafter(path).tensors.contains("layers.1.self_attn.k_norm.weight"));
  tensors.push_back(tensors.front());
  tensors.back().info.name.erase(0, 6);
  write_built_safetensors(tensors, path + "/model.safetensors");
  expect_input_error([&] { open_drafter(path); }, {"both with the prefix 'model.'"});
}

TEST(WeightsCheckpoint, RefusesBundlesThatContradictThemselves) {
  const TemporaryFolder folder;
  const std::string path = folder / "model.kdtr";
  const CheckpointRecipe recipe = tiny_recipe();
  const std::vector<BuiltTensor> tensors = build_tensors(recipe, BuiltNames::kBundle);
  const auto refused = [&](const Json& header, std::initializer_list<std::string> parts) {
    write_built_bundle(header, tensors, path);
    expect_input_error([&] { open_target(path); }, parts);
  };
  Json header = build_bundle_header(recipe);
  header.erase("drafter");
  refused(header, {path, "drafter.fc.weight", "no drafter.config"});
  header = build_bundle_header(recipe);
  header.erase("target");
  refused(header, {path, "no target"});
  header = build_bundle_header(recipe);
  header["target"] = Json::object();
  refused(header, {path, "'target.config'"});
  header = build_bundle_header(recipe);
  header["target"]["config"]["hidden_size"] = 0;
  refused(header, {path, "'hidden_size'"});
  header = build_bundle_header(recipe);
  header["quantization"] = {{"format", "w8a8"}, {"group_size", 32}};
  refused(header, {path, "'quantization.format'", "w4a16"});
  header["quantization"] = {{"format", "w4a16"}, {"group_size", 12}};
  refused(header, {path, "'quantization.group_size'", "multiple of 8"});
}

TEST(WeightsCheckpoint, ReadsTensorBytes) {
  const TemporaryFolder folder;
  const std::string path = folder / "model.kdtr";
  write_bundle(tiny_recipe(), path);
  const TargetCheckpoint checkpoint = open_target(path);
  StoredTensor tensor = checkpoint.tensors.at("model.norm.weight");
  std::vector<float> all(32);
  read_tensor_bytes(tensor, 0, tensor.bytes, all.data());
  float one = 0;
  read_tensor_bytes(tensor, 31 * 4, 4, &one);
  EXPECT_EQ(one, all[31]);
  EXPECT_THROW(read_tensor_bytes(tensor, 31 * 4, 8, all.data()), Error);
  EXPECT_THROW(read_tensor_bytes(tensor, -4, 4, all.data()), Error);
  tensor.file_offset = 1 << 30;
  expect_input_error([&] { read_tensor_bytes(tensor, 0, 4, &one); }, {path, "ends at byte"});
}

}  // namespace
}  // namespace kdtree
