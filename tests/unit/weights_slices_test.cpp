// Slices of routed experts: what the ranks of an expert group load of each.
#include <gtest/gtest.h>

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "comm/expert_placement.h"
#include "tests/unit/checkpoint_builder.h"
#include "tests/unit/weights_test_support.h"
#include "weights/number_formats.h"
#include "weights/quantize.h"
#include "weights/tensor_spec.h"
#include "weights/weight_store.h"

namespace kdtree {

namespace {

std::unique_ptr<Backend> one_cpu_thread() {
  return make_backend({.name = "cpu", .num_threads = 1});
}

// Row-major values of a matrix in any format.
std::vector<float> matrix_values(const WeightView& view) {
  const auto size = static_cast<std::size_t>(view.out_features * view.in_features);
  std::vector<float> values(size);
  if (view.format != WeightFormat::kInt4Group) {
    widen(view.format == WeightFormat::kFloat32 ? DType::kFloat32 : DType::kBFloat16, view.data,
          values);
    return values;
  }
  std::vector<float> scales(size / static_cast<std::size_t>(view.group_size));
  widen(view.scale_dtype, view.scales, scales);
  const std::span words(static_cast<const std::uint32_t*>(view.data),
                        size / static_cast<std::size_t>(kInt4PerWord));
  dequantize_int4(words, scales, view.group_size, values);
  return values;
}

// Rows or columns `part` of a matrix of `columns` columns.
std::vector<float> cut(const std::vector<float>& whole, std::int64_t columns, bool by_columns,
                       Range part) {
  std::vector<float> values;
  const auto rows = static_cast<std::int64_t>(whole.size()) / columns;
  for (std::int64_t row = by_columns ? 0 : part.begin; row < (by_columns ? rows : part.end);
       ++row) {
    const auto first = whole.begin() + row * columns;
    values.insert(values.end(), first + (by_columns ? part.begin : 0),
                  first + (by_columns ? part.end : columns));
  }
  return values;
}

// Loads the target on expert groups of `slices` ranks and compares every routed expert with a load
// of whole ones. `unit`: groups that slices must not cut.
void expect_slices(const TargetCheckpoint& checkpoint, int slices, std::int64_t unit,
                   const LoadOptions& base) {
  SCOPED_TRACE(fmt::format("{} in {} slices", checkpoint.origin, slices));
  constexpr int kGroups = 2;
  const std::int64_t experts = checkpoint.config.n_routed_experts;
  const std::unique_ptr<Backend> backend = one_cpu_thread();
  const WeightStore whole =
      load_target(checkpoint, ExpertPlacement::linear(experts, 1), base, *backend);
  const auto placement = ExpertPlacement::linear(experts, kGroups);
  std::int64_t end = 0;
  for (int rank = 0; rank < kGroups * slices; ++rank) {
    LoadOptions options = base;
    options.rank = rank;
    options.world_size = kGroups * slices;
    options.grid.moe_tp = slices;
    options.grid.attention_dp = kGroups * slices;  // the target has few heads
    const Range part = target_partition(checkpoint.config, options).expert_intermediate;
    EXPECT_GT(part.size(), 0);
    EXPECT_EQ(part.begin, rank % slices == 0 ? 0 : end);
    EXPECT_EQ(part.begin % unit, 0);
    end = part.end;
    const WeightStore store = load_target(checkpoint, placement, options, *backend);
    EXPECT_EQ(store.bytes(), target_bytes(checkpoint, placement, options));
    for (const TensorSpec& spec : target_tensor_specs(checkpoint.config)) {
      if (spec.expert < 0) {
        continue;
      }
      ASSERT_EQ(store.contains(spec.name),
                placement.layer(spec.layer).holds(rank / slices, spec.expert));
      if (store.contains(spec.name)) {
        const WeightView& view = store.matrix(spec.name);
        EXPECT_EQ(view.format, whole.matrix(spec.name).format);
        EXPECT_EQ(matrix_values(view), cut(matrix_values(whole.matrix(spec.name)), spec.shape[1],
                                           spec.split.by_columns, part))
            << spec.name << " rank " << rank;
      }
    }
    EXPECT_TRUE(rank % slices + 1 < slices || end == checkpoint.config.moe_intermediate_size);
  }
}

TEST(WeightsSlices, OfEveryFormatArePartsOfTheWhole) {
  expect_slices(open_target(goldens_path("kimi_nested_int4")), 2, 32, {});
  expect_slices(open_target(goldens_path("deepseek_v3_fp8_groups")), 3, 1, {});
  // Rounded to INT4 on the way: 128 columns are four groups, in three slices.
  expect_slices(open_target(goldens_path("deepseek_v3_fp8_groups")), 3, 32,
                {.weights = WeightsChoice::kInt4});
  expect_slices(open_target(goldens_path("dflash_trained_bf16/target")), 3, 1, {});
  expect_slices(open_target(goldens_path("dflash_trained_bf16/target")), 3, 1,
                {.round_to_bfloat16 = true, .num_threads = 2});
}

TEST(WeightsSlices, OfABundleAreReadAndVerified) {
  const TemporaryFolder folder;
  CheckpointRecipe recipe{.target = tiny_target(), .drafter = {}, .seed = 8, .group_size = 8};
  recipe.target.moe_intermediate_size = 40;
  const std::string path = folder / "model.kdtr";
  write_bundle(recipe, path);
  const TargetCheckpoint checkpoint = open_target(path);
  for (const int slices : {2, 3, 5}) {
    expect_slices(checkpoint, slices, 8, {});
  }
  // All that the ranks read in parts is verified by one of them: experts, shared ones, vocabulary.
  const auto placement = ExpertPlacement::linear(6, 1);
  const std::unique_ptr<Backend> backend = one_cpu_thread();
  std::int64_t checksums = 0;
  std::int64_t stored = 0;
  for (const auto& [name, tensor] : checkpoint.tensors) {
    const auto holds = [&name](const char* word) { return name.find(word) != std::string::npos; };
    const bool parts = holds("experts.") || holds("embed_tokens") || holds("lm_head");
    stored += parts ? tensor.bytes : 0;
  }
  for (int rank = 0; rank < 5; ++rank) {
    const LoadOptions options{
        .rank = rank, .world_size = 5, .grid = {.moe_tp = 5, .attention_dp = 5}};
    const LoadStatistics read =
        load_target(checkpoint, placement, options, *backend).load_statistics();
    EXPECT_EQ(read.bytes_read, read.own_bytes);
    checksums += read.checksum_bytes;
  }
  EXPECT_EQ(checksums, stored);
}

TEST(WeightsSlices, MoreThanThereAreGroupsAreRefused) {
  const TargetCheckpoint checkpoint = open_target(goldens_path("kimi_nested_int4"));
  const auto partition_of = [&](WeightsChoice weights, int slices) {
    return target_partition(checkpoint.config, {.world_size = slices,
                                                .grid = {.moe_tp = slices, .attention_dp = slices},
                                                .weights = weights});
  };
  expect_input_error([&] { partition_of(WeightsChoice::kAuto, 3); },
                     {"--moe-tp 3: the model's moe_intermediate_size 64 is 2 groups of 32, "
                      "expected at most 2"});
  ModelConfig dense = checkpoint.config;
  dense.n_routed_experts = 0;
  expect_input_error(
      [&] { target_partition(dense, {.world_size = 2, .grid = {.moe_tp = 2, .attention_dp = 1}}); },
      {"--moe-tp 2: the model has no routed experts, expected 1"});
}

}  // namespace

}  // namespace kdtree
