// Conversions: there and back gives the same bits, INT4 as a load would round it, shards that ranks
// load like the whole, and what is left of interrupted and refused ones.
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "kernels/backend.h"
#include "tests/unit/checkpoint_builder.h"
#include "tests/unit/weights_test_support.h"
#include "weights/container.h"
#include "weights/convert.h"
#include "weights/kdtr.h"
#include "weights/number_formats.h"
#include "weights/quantize.h"
#include "weights/weight_store.h"

namespace kdtree {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

ConvertReport convert_to(const std::string& model, const std::string& output,
                         ConvertOptions options = {}) {
  options.model = model;
  options.output = output;
  options.num_threads = 3;
  options.piece_bytes = 512;
  return convert(options);
}

std::string bytes_of(const std::string& file, const RawTensor& raw) {
  return read_file(file).substr(static_cast<std::size_t>(raw.file_offset),
                                static_cast<std::size_t>(raw.bytes));
}

// dtype, shape and bytes of every tensor by name.
using TensorContents = std::map<std::string, std::tuple<std::string, std::vector<std::int64_t>, std::string>>;
TensorContents contents_of(const std::string& model) {
  TensorContents contents;
  for (const FileTable& table : read_container(model, std::nullopt).files) {
    for (const auto& [name, raw] : table.tensors) {
      contents[name] = {raw.dtype, raw.shape, bytes_of(table.file, raw)};
    }
  }
  return contents;
}

std::map<std::string, std::string> small_files(const std::string& directory) {
  std::map<std::string, std::string> files;
  for (const auto& entry : fs::recursive_directory_iterator(directory)) {
    const std::string name = fs::relative(entry.path(), directory).string();
    if (entry.is_regular_file() && !name.ends_with(".safetensors") &&
        !name.ends_with(".index.json")) {
      files[name] = read_file(entry.path().string());
    }
  }
  return files;
}

void expect_same_directory(const std::string& left, const std::string& right) {
  EXPECT_EQ(contents_of(left), contents_of(right));
  EXPECT_EQ(small_files(left), small_files(right));
}

CheckpointRecipe recipe_of(std::int64_t group_size) {
  return {.target = tiny_target(),
          .drafter = tiny_drafter(),
          .seed = 17,
          .group_size = group_size,
          .scale_dtype = DType::kBFloat16,
          .weight_dtype = DType::kBFloat16};
}

// A view's data and scales as bytes.
std::pair<std::string, std::string> view_bytes(const WeightView& view) {
  const std::int64_t count = view.out_features * view.in_features;
  const auto text = [](const void* data, std::int64_t bytes) {
    return data == nullptr ? std::string()
                           : std::string(static_cast<const char*>(data),
                                         static_cast<std::size_t>(bytes));
  };
  switch (view.format) {
    case WeightFormat::kInt4Group:
      return {text(view.data, count / 2),
              text(view.scales, count / view.group_size * dtype_bytes(view.scale_dtype))};
    case WeightFormat::kBFloat16:
      return {text(view.data, count * 2), ""};
    default:
      return {text(view.data, count * 4), ""};
  }
}

void expect_same_weights(const WeightStore& left, const WeightStore& right,
                         const std::vector<TensorSpec>& specs) {
  for (const TensorSpec& spec : specs) {
    SCOPED_TRACE(spec.name);
    ASSERT_EQ(left.contains(spec.name), right.contains(spec.name));
    if (!left.contains(spec.name)) {
      continue;
    }
    if (spec.is_vector()) {
      const ConstTensorView one = left.vector(spec.name);
      EXPECT_EQ(std::memcmp(one.data<float>(), right.vector(spec.name).data<float>(),
                            static_cast<std::size_t>(spec.shape[0]) * sizeof(float)),
                0);
      continue;
    }
    const WeightView one = left.matrix(spec.name);
    const WeightView other = right.matrix(spec.name);
    EXPECT_EQ(one.format, other.format);
    EXPECT_EQ(one.out_features, other.out_features);
    EXPECT_EQ(one.in_features, other.in_features);
    EXPECT_EQ(one.group_size, other.group_size);
    EXPECT_EQ(view_bytes(one), view_bytes(other));
  }
}

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
          static_cast<std::int32_t>(*reinterpret_cast<const std::int64_t*>(tensor.data.data() + 8))};
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
  std::erase_if(tensors, [](const BuiltTensor& tensor) {
    return tensor.info.name.starts_with("drafter.");
  });
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
  write_file(folder / "m/kdtree.json", Json({{"format", "kdtree bundle header"},
                                             {"version", 1},
                                             {"header", {{"goldens", goldens}}}})
                                           .dump());
  convert_to(folder / "m", folder / "m.kdtr");
  EXPECT_EQ(open_target(folder / "m.kdtr").goldens, goldens);
  convert_to(folder / "m.kdtr", folder / "n");
  convert_to(folder / "n", folder / "n.kdtr");
  EXPECT_EQ(read_kdtr_header(folder / "n.kdtr").json, read_kdtr_header(folder / "m.kdtr").json);
  const auto refused = [&](const Json& header, const std::string& part) {
    write_file(folder / "m/kdtree.json",
               Json({{"format", "kdtree bundle header"}, {"version", 1}, {"header", header}})
                   .dump());
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
                         ::testing::Values("deepseek_v3_fp8_groups",
                                           "dflash_trained_bf16/target"));

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

// ---- shards -----------------------------------------------------------------------------------

struct ShardCase {
  const char* golden;  // or nullptr for a random checkpoint
  int ranks;
};

class WeightsConvertShards : public ::testing::TestWithParam<ShardCase> {};

TEST_P(WeightsConvertShards, LoadLikeTheWhole) {
  const TemporaryFolder folder;
  const auto [golden, ranks] = GetParam();
  std::string model = folder / "m.kdtr";
  if (golden == nullptr) {
    CheckpointRecipe recipe = recipe_of(8);
    recipe.quantize_all = true;
    write_bundle(recipe, model);
  } else {
    model = goldens_path(golden);
  }
  ConvertOptions options;
  options.shard_for = ranks;
  const ConvertReport report = convert_to(model, folder / "shards", options);
  EXPECT_EQ(report.files.size(), static_cast<std::size_t>(ranks));
  const TargetCheckpoint source = open_target(model);
  const auto backend = make_backend({.name = "cpu"});
  const auto placement = ExpertPlacement::linear(source.config.n_routed_experts, ranks);
  for (int rank = 0; rank < ranks; ++rank) {
    const ShardOf reader{.rank = rank, .ranks = ranks};
    const TargetCheckpoint shard = open_target(folder / "shards", reader);
    for (const bool replicate : {false, true}) {
      LoadOptions load{.rank = rank, .world_size = ranks};
      load.replicate_shared_experts = replicate;
      load.piece_bytes = 256;
      const WeightStore own = load_target(shard, placement, load, *backend);
      const LoadStatistics statistics = own.load_statistics();
      EXPECT_LE(static_cast<double>(statistics.bytes_read),
                1.05 * static_cast<double>(statistics.own_bytes));
      expect_same_weights(own, load_target(source, placement, load, *backend),
                          target_tensor_specs(source.config));
    }
    if (golden == nullptr) {
      const LoadOptions load{.rank = rank, .world_size = ranks};
      const DrafterCheckpoint drafter = open_drafter(folder / "shards", reader);
      expect_same_weights(load_drafter(drafter, load, *backend),
                          load_drafter(open_drafter(model), load, *backend),
                          drafter_tensor_specs(drafter.config));
    }
  }
}
INSTANTIATE_TEST_SUITE_P(Cases, WeightsConvertShards,
                         ::testing::Values(ShardCase{"kimi_nested_int4", 1},
                                           ShardCase{"kimi_nested_int4", 3},
                                           ShardCase{"deepseek_v3_fp8_groups", 2},
                                           ShardCase{"deepseek_v3_fp8_groups", 4},
                                           ShardCase{nullptr, 2}, ShardCase{nullptr, 5}));

TEST(WeightsConvert, ShardsOfRoundedExperts) {
  const TemporaryFolder folder;
  const std::string model = goldens_path("deepseek_v3_fp8_groups");
  ConvertOptions options;
  options.shard_for = 2;
  options.group_size = 32;
  convert_to(model, folder / "shards", options);
  const TargetCheckpoint source = open_target(model);
  const auto backend = make_backend({.name = "cpu"});
  const auto placement = ExpertPlacement::linear(source.config.n_routed_experts, 2);
  LoadOptions load{.rank = 1, .world_size = 2};
  const WeightStore own =
      load_target(open_target(folder / "shards", ShardOf{1, 2}), placement, load, *backend);
  load.weights = WeightsChoice::kInt4;
  expect_same_weights(own, load_target(source, placement, load, *backend),
                      target_tensor_specs(source.config));
}

TEST(WeightsConvert, ShardsAreForTheirRanksAlone) {
  const TemporaryFolder folder;
  write_bundle(recipe_of(8), folder / "m.kdtr");
  ConvertOptions options;
  options.shard_for = 2;
  convert_to(folder / "m.kdtr", folder / "shards", options);
  expect_input_error([&] { open_target(folder / "shards", ShardOf{0, 3}); },
                     {folder / "shards", "shard-00000-of-00003.kdtr", "rank 0 of 3"});
  const std::string second = folder / "shards/shard-00001-of-00002.kdtr";
  expect_input_error([&] { open_target(second, ShardOf{0, 2}); },
                     {second, "for rank 1 of 2", "rank 0 of 2"});
  expect_input_error([&] { convert_to(folder / "shards", folder / "x.kdtr"); }, {"is a shard"});
  // One rank's parts, another one's numbers.
  const auto backend = make_backend({.name = "cpu"});
  const TargetCheckpoint shard = open_target(second);
  const LoadOptions load{.rank = 0, .world_size = 2};
  const auto placement = ExpertPlacement::linear(shard.config.n_routed_experts, 2);
  expect_input_error([&] { load_target(shard, placement, load, *backend); }, {second, "the shard holds"});
  // A shard that is damaged is named.
  std::string damaged = read_file(second);
  damaged[damaged.size() - 2] ^= 4;
  write_file(second, damaged);
  expect_input_error(
      [&] {
        load_target(open_target(folder / "shards", ShardOf{1, 2}), placement,
                    {.rank = 1, .world_size = 2}, *backend);
        load_drafter(open_drafter(folder / "shards", ShardOf{1, 2}), {.rank = 1, .world_size = 2},
                     *backend);
      },
      {second, "checksum"});
}

// ---- interrupted and refused ------------------------------------------------------------------

// Writes beyond so many bytes of a file fail while it lives.
class FileSizeLimit {
 public:
  explicit FileSizeLimit(rlim_t bytes) {
    old_handler_ = std::signal(SIGXFSZ, SIG_IGN);
    check(::getrlimit(RLIMIT_FSIZE, &old_) == 0, "no limit to read");
    const rlimit limit{.rlim_cur = bytes, .rlim_max = old_.rlim_max};
    check(::setrlimit(RLIMIT_FSIZE, &limit) == 0, "no limit set");
  }
  FileSizeLimit(const FileSizeLimit&) = delete;
  FileSizeLimit& operator=(const FileSizeLimit&) = delete;
  ~FileSizeLimit() {
    ::setrlimit(RLIMIT_FSIZE, &old_);
    std::signal(SIGXFSZ, old_handler_);
  }

 private:
  rlimit old_{};
  void (*old_handler_)(int) = SIG_DFL;
};

class WeightsConvertStops : public ::testing::Test {
 protected:
  void SetUp() override {
    write_bundle(recipe_of(0), folder_ / "m.kdtr");
    options_.group_size = 8;
    convert_to(folder_ / "m.kdtr", folder_ / "whole.kdtr", options_);
    // Far enough behind the header that some tensors are finished.
    const auto bytes = fs::file_size(folder_ / "whole.kdtr");
    const FileSizeLimit limit(bytes * 3 / 4);
    ConvertOptions options = options_;
    options.model = folder_ / "m.kdtr";
    options.output = folder_ / "x.kdtr";
    options.num_threads = 1;
    EXPECT_THROW(convert(options), Error);
    EXPECT_FALSE(fs::exists(folder_ / "x.kdtr"));
    EXPECT_TRUE(fs::exists(partial_));
  }

  std::int64_t resume() {
    const ConvertReport report = convert_to(folder_ / "m.kdtr", folder_ / "x.kdtr", options_);
    EXPECT_EQ(read_file(folder_ / "x.kdtr"), read_file(folder_ / "whole.kdtr"));
    EXPECT_FALSE(fs::exists(folder_ / "x.kdtr.partial"));
    EXPECT_GT(report.quantized.front().relative_error, 0);
    return report.num_resumed;
  }

  TemporaryFolder folder_;
  ConvertOptions options_;
  std::string partial_ = folder_ / "x.kdtr.partial/bundle.kdtr";
};

TEST_F(WeightsConvertStops, GoOnWhereTheyWere) {
  EXPECT_GT(resume(), 3);
}

TEST_F(WeightsConvertStops, ReadWhatIsThereAgain) {
  std::string content = read_file(partial_);
  // Somewhere in the tensors that are there; only one of them is affected.
  content[content.size() * 5 / 6] ^= 1;
  write_file(partial_, content);
  const std::int64_t num = resume();
  EXPECT_GT(num, 2);
}

TEST_F(WeightsConvertStops, AcceptATornJournal) {
  const std::string journal = folder_ / "x.kdtr.partial/convert.journal";
  std::string content = read_file(journal);
  write_file(journal, content.substr(0, content.size() - 7));
  EXPECT_GT(resume(), 2);
}

TEST_F(WeightsConvertStops, StartOverForSomethingElse) {
  options_.group_size = 16;
  convert_to(folder_ / "m.kdtr", folder_ / "whole.kdtr",
             {.group_size = 16, .overwrite = true});
  EXPECT_EQ(resume(), 0);
}

TEST_F(WeightsConvertStops, StartOverWhenTheSourceHasChanged) {
  fs::last_write_time(folder_ / "m.kdtr", fs::file_time_type::clock::now() + std::chrono::hours(1));
  EXPECT_EQ(resume(), 0);
}

TEST(WeightsConvert, NothingIsReplacedUnasked) {
  const TemporaryFolder folder;
  write_bundle(recipe_of(0), folder / "m.kdtr");
  write_file(folder / "x.kdtr", "precious");
  expect_input_error([&] { convert_to(folder / "m.kdtr", folder / "x.kdtr"); },
                     {folder / "x.kdtr", "exists", "--overwrite"});
  EXPECT_EQ(read_file(folder / "x.kdtr"), "precious");
  convert_to(folder / "m.kdtr", folder / "x.kdtr", {.overwrite = true});
  EXPECT_EQ(contents_of(folder / "x.kdtr"), contents_of(folder / "m.kdtr"));

  convert_to(folder / "m.kdtr", folder / "d/");
  expect_input_error([&] { convert_to(folder / "m.kdtr", folder / "d"); }, {"--overwrite"});
  write_file(folder / "d/thesis.tex", "precious");
  expect_input_error([&] { convert_to(folder / "m.kdtr", folder / "d", {.overwrite = true}); },
                     {folder / "d/thesis.tex", "remove it first"});
  fs::remove(folder / "d/thesis.tex");
  const TensorContents before = contents_of(folder / "d");
  convert_to(folder / "m.kdtr", folder / "d", {.overwrite = true});
  EXPECT_EQ(contents_of(folder / "d"), before);
  EXPECT_FALSE(fs::exists(folder / "d/convert.journal"));
  EXPECT_FALSE(fs::exists(folder / "d.partial"));

  write_file(folder / "y.kdtr.partial", "somebody's");
  expect_input_error([&] { convert_to(folder / "m.kdtr", folder / "y.kdtr"); },
                     {folder / "y.kdtr.partial", "in the way"});
  EXPECT_THROW(convert_to(folder / "m.kdtr", folder / "no/such/x.kdtr"), InputError);
}

}  // namespace
}  // namespace kdtree
