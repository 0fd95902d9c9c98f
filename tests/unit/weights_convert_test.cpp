// Conversions: there and back gives the same bits, and INT4 is what a load would round to.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <string>
#include <vector>

#include "tests/unit/convert_test_support.h"
#include "weights/kdtr.h"
#include "weights/number_formats.h"

namespace kdtree {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

// ---- there and back ---------------------------------------------------------------------------

class WeightsConvertBack : public ::testing::TestWithParam<const char*> {};

TEST_P(WeightsConvertBack, DirectoriesKeepEveryBit) {
  const TemporaryFolder folder;
  const std::string model = folder / "m";
  fs::copy(goldens_path(GetParam()), model, fs::copy_options::recursive);
  write_file(model + "/tokenizer_config.json", "{\"add_bos_token\":\tfalse}\n");
  write_file(model + "/notes.txt", "not part of the model");
  const ConvertReport there = convert_to(model, folder / "m.kdtr");
  EXPECT_NE(std::find(there.left_out.begin(), there.left_out.end(), "notes.txt"),
            there.left_out.end());
  fs::remove(model + "/notes.txt");
  for (const std::string& name : there.left_out) {
    fs::remove_all(fs::path(model) / name);
  }
  EXPECT_FALSE(fs::exists(folder / "m.kdtr.partial"));
  convert_to(folder / "m.kdtr", folder / "back");
  expect_same_directory(model, folder / "back");
  // In several files.
  ConvertOptions options;
  options.max_file_bytes = 40'000;
  const ConvertReport divided = convert_to(folder / "m.kdtr", folder / "divided", options);
  EXPECT_GT(divided.files.size(), 1U);
  expect_same_directory(model, folder / "divided");
  // What names matrices as a bundle does, whoever reads it.
  const KdtrHeader header = read_kdtr_header(folder / "m.kdtr");
  for (const auto& [name, raw] : header.tensors) {
    EXPECT_FALSE(name.ends_with("_packed") || name.ends_with("weight_shape")) << name;
  }
}
INSTANTIATE_TEST_SUITE_P(Goldens, WeightsConvertBack,
                         ::testing::Values("kimi_nested_int4", "deepseek_v3_fp8_groups",
                                           "dflash_trained_bf16/target"));

class WeightsConvertRandom : public ::testing::TestWithParam<int> {};

TEST_P(WeightsConvertRandom, DirectoriesWithDrafters) {
  const TemporaryFolder folder;
  CheckpointRecipe recipe = recipe_of(GetParam());
  write_directory(recipe, folder / "m");
  ConvertOptions with_draft;
  with_draft.draft = folder / "m/draft";
  convert_to(folder / "m", folder / "m.kdtr", with_draft);
  convert_to(folder / "m.kdtr", folder / "back");
  EXPECT_EQ(contents_of(folder / "m"), contents_of(folder / "back"));
  expect_same_directory(folder / "m/draft", folder / "back/drafter");
  // The directory has its drafter with it now.
  EXPECT_TRUE(holds_drafter(folder / "back"));
  convert_to(folder / "back", folder / "again.kdtr");
  EXPECT_EQ(read_file(folder / "again.kdtr"), read_file(folder / "m.kdtr"));
}
INSTANTIATE_TEST_SUITE_P(GroupSizes, WeightsConvertRandom, ::testing::Values(0, 8, 16));

TEST(WeightsConvert, AnotherDrafterKeepsItsOwnNames) {
  const TemporaryFolder folder;
  CheckpointRecipe recipe = recipe_of(8);
  write_directory(recipe, folder / "m");
  fs::copy(folder / "m/draft", folder / "prefixed", fs::copy_options::recursive);
  std::vector<BuiltTensor> tensors = build_tensors(recipe, BuiltNames::kHuggingFace);
  std::erase_if(tensors, [](const BuiltTensor& tensor) {
    return !tensor.info.name.starts_with(kDrafterPrefix);
  });
  for (BuiltTensor& tensor : tensors) {
    tensor.info.name.replace(0, std::string_view(kDrafterPrefix).size(), "model.");
  }
  write_built_safetensors(tensors, folder / "prefixed/model.safetensors");
  ConvertOptions options;
  options.draft = folder / "prefixed";
  convert_to(folder / "m", folder / "m.kdtr", options);
  convert_to(folder / "m.kdtr", folder / "back");
  expect_same_directory(folder / "prefixed", folder / "back/drafter");
  options.draft = folder / "m/draft";
  convert_to(folder / "m.kdtr", folder / "n.kdtr", options);
  convert_to(folder / "n.kdtr", folder / "other");
  expect_same_directory(folder / "m/draft", folder / "other/drafter");
}

TEST(WeightsConvert, BundlesKeepEveryBit) {
  const TemporaryFolder folder;
  for (const bool originals : {false, true}) {
    CheckpointRecipe recipe = recipe_of(8);
    recipe.keep_originals = originals;
    Json header = build_bundle_header(recipe);
    header["goldens"] = {{"original", {{"cases", {1, 2, 3}}}}};
    write_built_bundle(header, build_tensors(recipe, BuiltNames::kBundle), folder / "m.kdtr");
    const std::string name = originals ? "both" : "int4";
    convert_to(folder / "m.kdtr", folder / name);
    convert_to(folder / name, folder / "back.kdtr", {.overwrite = originals});
    const KdtrHeader back = read_kdtr_header(folder / "back.kdtr");
    EXPECT_EQ(back.json, header);
    EXPECT_EQ(contents_of(folder / "back.kdtr"), contents_of(folder / "m.kdtr"));
    // Other readers are told what is packed.
    const Json config = Json::parse(read_file(folder / (name + "/config.json")));
    EXPECT_EQ(config.at("quantization_config").at("quant_method"), "compressed-tensors");
    EXPECT_TRUE(contents_of(folder / name).begin()->first.find(".qw") == std::string::npos);
  }
}

TEST(WeightsConvert, KeepsMixedShapeTensors) {
  const TemporaryFolder folder;
  const CheckpointRecipe recipe = recipe_of(8);
  write_directory(recipe, folder / "m");
  std::vector<BuiltTensor> tensors = build_tensors(recipe, BuiltNames::kHuggingFace);
  std::erase_if(tensors, [](const BuiltTensor& tensor) {
    return tensor.info.name.starts_with("drafter.") ||
           tensor.info.name.ends_with("experts.1.up_proj.weight_shape");
  });
  for (BuiltTensor& tensor : tensors) {
    if (tensor.info.name.ends_with("experts.0.up_proj.weight_shape")) {
      const std::int32_t sizes[] = {
          static_cast<std::int32_t>(*reinterpret_cast<const std::int64_t*>(tensor.data.data())),
          static_cast<std::int32_t>(
              *reinterpret_cast<const std::int64_t*>(tensor.data.data() + 8))};
      tensor.info.dtype = DType::kInt32;
      tensor.data.resize(sizeof(sizes));
      std::memcpy(tensor.data.data(), sizes, sizeof(sizes));
    }
  }
  write_built_safetensors(tensors, folder / "m/model.safetensors");
  convert_to(folder / "m", folder / "m.kdtr");
  convert_to(folder / "m.kdtr", folder / "back");
  EXPECT_EQ(contents_of(folder / "m"), contents_of(folder / "back"));
}

TEST(WeightsConvert, KeepsTensorsThatNobodyUses) {
  const TemporaryFolder folder;
  const CheckpointRecipe recipe = recipe_of(0);
  write_directory(recipe, folder / "m");
  std::vector<BuiltTensor> tensors = build_tensors(recipe, BuiltNames::kHuggingFace);
  std::erase_if(tensors,
                [](const BuiltTensor& tensor) { return tensor.info.name.starts_with("drafter."); });
  tensors.push_back({{"vision_tower.x", DType::kInt64, {3}}, std::vector<std::byte>(24)});
  tensors.push_back({{"model.layers.7.enorm.weight", DType::kFloat16, {0, 4}}, {}});
  write_built_safetensors(tensors, folder / "m/model.safetensors");
  convert_to(folder / "m", folder / "m.kdtr");
  EXPECT_EQ(open_target(folder / "m.kdtr").tensors.size(), tensors.size() - 2);
  convert_to(folder / "m.kdtr", folder / "back");
  EXPECT_EQ(contents_of(folder / "m"), contents_of(folder / "back"));
}

TEST(WeightsConvert, BundlesHoldTheModelsFiles) {
  const TemporaryFolder folder;
  write_directory(recipe_of(0), folder / "m");
  write_file(folder / "m/tokenizer.json", "{\"some\": \"text\"}");
  convert_to(folder / "m", folder / "m.kdtr");
  const ModelFileFinder files = model_files(folder / "m.kdtr");
  ASSERT_TRUE(files("tokenizer.json").has_value());
  EXPECT_EQ(files("tokenizer.json")->content, "{\"some\": \"text\"}");
  EXPECT_EQ(files("config.json")->content, read_file(folder / "m/config.json"));
  EXPECT_FALSE(files("tiktoken.model").has_value());
  std::string damaged = read_file(folder / "m.kdtr");
  damaged[damaged.find("{\"some\"") + 3] ^= 1;
  write_file(folder / "m.kdtr", damaged);
  expect_input_error([&] { model_files(folder / "m.kdtr")("tokenizer.json"); },
                     {folder / "m.kdtr", "tokenizer.json", "checksum"});
  expect_input_error([&] { convert_to(folder / "m.kdtr", folder / "again"); }, {"checksum"});
}

TEST(WeightsConvert, DirectoriesCanBringGoldens) {
  const TemporaryFolder folder;
  CheckpointRecipe recipe = recipe_of(8);
  recipe.drafter.reset();
  write_directory(recipe, folder / "m");
  const Json goldens = {{"quantized", {{"cases", {1, 2}}}}};
  write_file(
      folder / "m/kdtree.json",
      Json({{"format", "kdtree bundle header"}, {"version", 1}, {"header", {{"goldens", goldens}}}})
          .dump());
  convert_to(folder / "m", folder / "m.kdtr");
  EXPECT_EQ(open_target(folder / "m.kdtr").goldens, goldens);
  convert_to(folder / "m.kdtr", folder / "n");
  convert_to(folder / "n", folder / "n.kdtr");
  EXPECT_EQ(read_kdtr_header(folder / "n.kdtr").json, read_kdtr_header(folder / "m.kdtr").json);
  const auto refused = [&](const Json& header, const std::string& part) {
    write_file(
        folder / "m/kdtree.json",
        Json({{"format", "kdtree bundle header"}, {"version", 1}, {"header", header}}).dump());
    expect_input_error([&] { convert_to(folder / "m", folder / "x.kdtr"); },
                       {folder / "m/kdtree.json", part});
  };
  refused(7, "expected \"format\"");
  refused({{"target", 7}}, "header.target is 7");
  refused({{"directory", {{"shape_dtype", 7}}}}, "directory is");
  refused({{"directory", {{"shape_dtype_of", {{"a", "F32"}}}}}}, "directory is");
  refused({{"directory", 7}}, "directory is 7");
  write_file(folder / "m/kdtree.json", "{\"format\": 7}");
  expect_input_error([&] { convert_to(folder / "m", folder / "x.kdtr"); },
                     {folder / "m/kdtree.json", "expected \"format\""});
}

TEST(WeightsConvert, DirectoriesThatWereChangedAreNoBundle) {
  const TemporaryFolder folder;
  CheckpointRecipe recipe = recipe_of(8);
  recipe.drafter.reset();
  write_bundle(recipe, folder / "m.kdtr");
  convert_to(folder / "m.kdtr", folder / "m");
  Json config = Json::parse(read_file(folder / "m/config.json"));
  config["rms_norm_eps"] = 2e-5;
  write_file(folder / "m/config.json", config.dump());
  expect_input_error([&] { convert_to(folder / "m", folder / "n.kdtr"); },
                     {folder / "m/config.json", "was changed", "kdtree.json"});
  fs::remove(folder / "m/kdtree.json");
  convert_to(folder / "m", folder / "n.kdtr");
  EXPECT_EQ(open_target(folder / "n.kdtr").config.rms_norm_eps, 2e-5);
}

// ---- INT4 -------------------------------------------------------------------------------------

class WeightsConvertQuantize : public ::testing::TestWithParam<const char*> {};

TEST_P(WeightsConvertQuantize, EqualsRoundingWhileLoading) {
  const TemporaryFolder folder;
  const std::string model = goldens_path(GetParam());
  ConvertOptions options;
  options.group_size = 32;
  const ConvertReport report = convert_to(model, folder / "m.kdtr", options);
  convert_to(model, folder / "m", options);
  const TargetCheckpoint source = open_target(model);
  const auto backend = make_backend({.name = "cpu"});
  const auto placement = ExpertPlacement::linear(source.config.n_routed_experts, 1);
  LoadOptions load;
  load.weights = WeightsChoice::kInt4;
  const WeightStore want = load_target(source, placement, load, *backend);
  const std::vector<TensorSpec> specs = target_tensor_specs(source.config);
  for (const char* form : {"m.kdtr", "m"}) {
    const TargetCheckpoint converted = open_target(folder / form);
    expect_same_weights(load_target(converted, placement, {}, *backend), want, specs);
  }
  // The errors, computed from a load without rounding.
  const WeightStore plain = load_target(source, placement, {}, *backend);
  std::size_t num_experts = 0;
  for (const TensorSpec& spec : specs) {
    if (spec.kind != WeightKind::kRoutedExperts) {
      continue;
    }
    const auto entry = std::find_if(
        report.quantized.begin(), report.quantized.end(),
        [&](const QuantizedTensor& tensor) { return tensor.name.ends_with(spec.name); });
    ASSERT_NE(entry, report.quantized.end()) << spec.name;
    const WeightView view = plain.matrix(spec.name);
    std::vector<float> values(static_cast<std::size_t>(view.out_features * view.in_features));
    widen(view.format == WeightFormat::kBFloat16 ? DType::kBFloat16 : DType::kFloat32, view.data,
          values);
    const WeightView int4 = want.matrix(spec.name);
    std::vector<float> scales(values.size() / 32);
    widen(DType::kBFloat16, int4.scales, scales);
    std::vector<float> back(values.size());
    dequantize_int4({static_cast<const std::uint32_t*>(int4.data), values.size() / kInt4PerWord},
                    scales, 32, back);
    double error = 0;
    double norm = 0;
    double most = 0;
    for (std::size_t i = 0; i < values.size(); ++i) {
      const double difference = double{values[i]} - double{back[i]};
      error += difference * difference;
      norm += double{values[i]} * double{values[i]};
      most = std::max(most, std::abs(difference));
    }
    EXPECT_NEAR(entry->relative_error, std::sqrt(error / norm), 1e-12);
    EXPECT_EQ(entry->max_abs_error, most);
    EXPECT_GT(entry->relative_error, 0.01);
    ++num_experts;
  }
  EXPECT_EQ(num_experts, report.quantized.size());
}
INSTANTIATE_TEST_SUITE_P(Goldens, WeightsConvertQuantize,
                         ::testing::Values("deepseek_v3_fp8_groups", "dflash_trained_bf16/target"));

TEST(WeightsConvert, KeepsOriginalsBesideInt4) {
  const TemporaryFolder folder;
  write_bundle(recipe_of(0), folder / "m.kdtr");
  ConvertOptions options;
  options.group_size = 8;
  options.keep_originals = true;
  convert_to(folder / "m.kdtr", folder / "both.kdtr", options);
  const TargetCheckpoint both = open_target(folder / "both.kdtr");
  const TargetCheckpoint source = open_target(folder / "m.kdtr");
  EXPECT_EQ(both.config.quantization->group_size, 8);
  const auto backend = make_backend({.name = "cpu"});
  const auto placement = ExpertPlacement::linear(source.config.n_routed_experts, 1);
  LoadOptions original;
  original.weights = WeightsChoice::kOriginal;
  expect_same_weights(load_target(both, placement, original, *backend),
                      load_target(source, placement, {}, *backend),
                      target_tensor_specs(source.config));
}

TEST(WeightsConvert, RefusesWhatCannotBeQuantized) {
  const TemporaryFolder folder;
  write_directory(recipe_of(8), folder / "m");
  ConvertOptions options;
  options.group_size = 8;
  expect_input_error([&] { convert_to(folder / "m", folder / "x.kdtr", options); },
                     {folder / "m", "no routed experts in floats"});
  options.group_size = 16;
  expect_input_error([&] { convert_to(folder / "m", folder / "x.kdtr", options); },
                     {folder / "m", "groups of 8"});
  options.group_size = 64;
  write_directory(recipe_of(0), folder / "plain");
  expect_input_error([&] { convert_to(folder / "plain", folder / "x.kdtr", options); },
                     {"groups of 64 do not divide"});
  EXPECT_FALSE(fs::exists(folder / "x.kdtr"));
  EXPECT_FALSE(fs::exists(folder / "x.kdtr.partial"));
}

}  // namespace
}  // namespace kdtree
