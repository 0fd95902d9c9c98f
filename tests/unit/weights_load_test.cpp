// Loading: the parts of all ranks, put together, are the whole.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "kernels/backend.h"
#include "tests/unit/checkpoint_builder.h"
#include "tests/unit/weights_test_support.h"
#include "weights/number_formats.h"
#include "weights/tensor_spec.h"
#include "weights/weight_store.h"

namespace kdtree {
namespace {

const char* const kDense = "model.layers.0.mlp.down_proj.weight";

std::unique_ptr<Backend> cpu() {
  return make_backend({.name = "cpu"});
}

std::vector<std::byte> stored_bytes(const StoredTensor& tensor) {
  std::vector<std::byte> bytes(static_cast<std::size_t>(tensor.bytes));
  read_tensor_bytes(tensor, 0, tensor.bytes, bytes.data());
  return bytes;
}

std::vector<float> stored_floats(const StoredTensor& tensor) {
  std::vector<float> values(static_cast<std::size_t>(tensor.shape.num_elements()));
  widen(tensor.dtype, stored_bytes(tensor).data(), values);
  return values;
}

std::vector<float> decode_int4(const std::byte* words, const std::vector<float>& scales,
                               std::size_t num_values) {
  std::vector<float> values(num_values);
  const std::size_t group = scales.empty() ? 1 : num_values / scales.size();
  for (std::size_t i = 0; i < num_values; ++i) {
    const auto byte = std::to_integer<unsigned>(words[i / 2]);
    const int code = static_cast<int>(i % 2 == 0 ? byte & 15U : byte >> 4U) - 8;
    values[i] = static_cast<float>(code) * scales[i / group];
  }
  return values;
}

bool prefer_int4(WeightsChoice choice) {
  return choice != WeightsChoice::kOriginal;
}

// The whole of one matrix or vector, straight from the files.
std::vector<float> whole_tensor(const TensorTable& table, const TensorSpec& spec,
                                WeightsChoice choice) {
  for (const char* names : {"_packed _scale", ".qw .sc"}) {
    const std::string text = names;
    const std::string words_name = spec.name + text.substr(0, text.find(' '));
    if (table.contains(words_name) && prefer_int4(choice)) {
      const std::vector<float> scales =
          stored_floats(table.at(spec.name + text.substr(text.find(' ') + 1)));
      return decode_int4(stored_bytes(table.at(words_name)).data(), scales,
                         static_cast<std::size_t>(spec.shape.num_elements()));
    }
  }
  std::vector<float> values = stored_floats(table.at(spec.name));
  if (table.contains(spec.name + "_scale_inv")) {
    const std::vector<float> scales = stored_floats(table.at(spec.name + "_scale_inv"));
    const auto columns = static_cast<std::size_t>(spec.shape[1]);
    for (std::size_t i = 0; i < values.size(); ++i) {
      values[i] *= scales[i / columns / 128 * ((columns + 127) / 128) + i % columns / 128];
    }
  }
  return values;
}

std::vector<float> floats_of(const WeightView& view) {
  const auto size = static_cast<std::size_t>(view.out_features * view.in_features);
  std::vector<float> values(size);
  if (size == 0) {
    return values;
  }
  if (view.format == WeightFormat::kInt4Group) {
    std::vector<float> scales(size / static_cast<std::size_t>(view.group_size));
    widen(view.scale_dtype, view.scales, scales);
    return decode_int4(static_cast<const std::byte*>(view.data), scales, size);
  }
  widen(view.format == WeightFormat::kFloat32 ? DType::kFloat32 : DType::kBFloat16, view.data,
        values);
  return values;
}

// What loading several ranks gave.
struct Loaded {
  std::unique_ptr<Backend> backend = cpu();
  std::vector<WeightStore> ranks;
};

// Checks one tensor of all ranks: blocks tile the whole in rank order and hold its values.
// `parts[r]` is the range of rank r in units of the split; neighbours may overlap.
void expect_tiles(const Loaded& loaded, const TensorSpec& spec, const std::vector<float>& whole,
                  const std::vector<Range>& parts) {
  const std::int64_t columns = spec.shape[1];
  std::vector<bool> seen(whole.size(), false);
  for (std::size_t rank = 0; rank < loaded.ranks.size(); ++rank) {
    const WeightView& view = loaded.ranks[rank].matrix(spec.name);
    Range rows{0, spec.shape[0]};
    Range cols{0, columns};
    if (spec.split.part != PartOf::kNothing) {
      (spec.split.by_columns ? cols : rows) =
          Range{parts[rank].begin * spec.split.unit, parts[rank].end * spec.split.unit};
    }
    ASSERT_EQ(view.out_features, rows.size()) << spec.name << " rank " << rank;
    ASSERT_EQ(view.in_features, cols.size()) << spec.name << " rank " << rank;
    const std::vector<float> values = floats_of(view);
    for (std::int64_t row = 0; row < rows.size(); ++row) {
      for (std::int64_t column = 0; column < cols.size(); ++column) {
        const auto place =
            static_cast<std::size_t>((rows.begin + row) * columns + cols.begin + column);
        seen[place] = true;
        ASSERT_EQ(values[static_cast<std::size_t>(row * cols.size() + column)], whole[place])
            << spec.name << " rank " << rank << " [" << row << ", " << column << "]";
      }
    }
  }
  EXPECT_EQ(std::count(seen.begin(), seen.end(), true), std::ssize(seen)) << spec.name;
}

LoadOptions options_of(const LoadOptions& base, int rank, int world_size) {
  LoadOptions options = base;
  options.rank = rank;
  options.world_size = world_size;
  return options;
}

Range range_of(const TargetPartition& part, PartOf kind) {
  switch (kind) {
    case PartOf::kHeads:
      return part.heads;
    case PartOf::kIntermediate:
      return part.intermediate;
    case PartOf::kSharedIntermediate:
      return part.shared_intermediate;
    case PartOf::kVocabulary:
      return part.vocabulary;
    default:
      return {};
  }
}

Range range_of(const DrafterPartition& part, PartOf kind) {
  switch (kind) {
    case PartOf::kHeads:
      return part.heads;
    case PartOf::kKeyValueHeads:
      return part.key_value_heads;
    case PartOf::kIntermediate:
      return part.intermediate;
    case PartOf::kContext:
      return part.context;
    default:
      return {};
  }
}

void round_like(const WeightView& view, bool round, std::vector<float>& values) {
  if (round && view.format == WeightFormat::kBFloat16) {
    for (float& value : values) {
      value = BFloat16::from_float(value).to_float();
    }
  }
}

template <class Partition>
void expect_spec(const Loaded& loaded, const TensorSpec& spec, std::vector<float> whole,
                 const std::vector<Partition>& partitions) {
  if (spec.is_vector()) {
    for (const WeightStore& store : loaded.ranks) {
      const auto values = store.vector(spec.name).span<float>();
      EXPECT_TRUE(std::equal(values.begin(), values.end(), whole.begin(), whole.end()))
          << spec.name;
    }
    return;
  }
  std::vector<Range> parts;
  parts.reserve(partitions.size());
  for (const Partition& partition : partitions) {
    parts.push_back(range_of(partition, spec.split.part));
  }
  round_like(loaded.ranks.front().matrix(spec.name), true, whole);
  expect_tiles(loaded, spec, whole, parts);
}

// Loads the target on `world_size` simulated ranks and compares everything with the files.
void expect_target(const TargetCheckpoint& checkpoint, int world_size, const LoadOptions& base) {
  const auto placement = ExpertPlacement::linear(checkpoint.config.n_routed_experts, world_size);
  Loaded loaded;
  std::vector<TargetPartition> partitions;
  for (int rank = 0; rank < world_size; ++rank) {
    const LoadOptions options = options_of(base, rank, world_size);
    loaded.ranks.push_back(load_target(checkpoint, placement, options, *loaded.backend));
    EXPECT_EQ(loaded.ranks.back().bytes(), target_bytes(checkpoint, placement, options));
    partitions.push_back(target_partition(checkpoint.config, options));
  }
  for (const TensorSpec& spec : target_tensor_specs(checkpoint.config)) {
    TensorSpec source = spec;
    if (spec.tied) {
      source.name = "model.embed_tokens.weight";
    }
    std::vector<float> whole = whole_tensor(checkpoint.tensors, source, base.weights);
    if (spec.expert < 0) {
      expect_spec(loaded, spec, whole, partitions);
      continue;
    }
    for (int rank = 0; rank < world_size; ++rank) {
      const WeightStore& store = loaded.ranks[static_cast<std::size_t>(rank)];
      ASSERT_EQ(store.contains(spec.name), placement.layer(spec.layer).holds(rank, spec.expert))
          << spec.name;
      if (store.contains(spec.name)) {
        round_like(store.matrix(spec.name), true, whole);
        EXPECT_EQ(floats_of(store.matrix(spec.name)), whole) << spec.name;
      }
    }
  }
}

void expect_drafter(const DrafterCheckpoint& checkpoint, int world_size, const LoadOptions& base) {
  Loaded loaded;
  std::vector<DrafterPartition> partitions;
  for (int rank = 0; rank < world_size; ++rank) {
    const LoadOptions options = options_of(base, rank, world_size);
    loaded.ranks.push_back(load_drafter(checkpoint, options, *loaded.backend));
    EXPECT_EQ(loaded.ranks.back().bytes(), drafter_bytes(checkpoint, options));
    partitions.push_back(drafter_partition(checkpoint.config, options));
  }
  for (const TensorSpec& spec : drafter_tensor_specs(checkpoint.config)) {
    expect_spec(loaded, spec, whole_tensor(checkpoint.tensors, spec, base.weights), partitions);
  }
}

class WeightsLoadGoldens : public ::testing::TestWithParam<int> {};

TEST_P(WeightsLoadGoldens, Int4) {
  expect_target(open_target(goldens_path("kimi_nested_int4")), GetParam(), {.num_threads = 2});
}
TEST_P(WeightsLoadGoldens, Float8) {
  const TargetCheckpoint checkpoint = open_target(goldens_path("deepseek_v3_fp8_groups"));
  expect_target(checkpoint, GetParam(), {});
  expect_target(checkpoint, GetParam(),
                {.round_to_bfloat16 = true, .replicate_shared_experts = true, .num_threads = 3});
}
TEST_P(WeightsLoadGoldens, TargetAndDrafter) {
  expect_target(open_target(goldens_path("dflash_trained_bf16/target")), GetParam(), {});
  expect_drafter(open_drafter(goldens_path("dflash_trained_bf16/draft")), GetParam(), {});
}
INSTANTIATE_TEST_SUITE_P(Ranks, WeightsLoadGoldens, ::testing::Range(1, 5));

// Bundles and directories of the tiny model, in every combination that changes the path taken.
struct Variant {
  const char* name;
  std::int64_t group_size = 0;
  bool quantize_all = false;
  DType scale_dtype = DType::kFloat32;
  DType weight_dtype = DType::kFloat32;
  bool keep_originals = false;
  bool directory = false;
  WeightsChoice weights = WeightsChoice::kAuto;
  bool round_to_bfloat16 = false;
};

CheckpointRecipe recipe_of(const Variant& variant) {
  return {.target = tiny_target(),
          .drafter = tiny_drafter(),
          .seed = 5,
          .group_size = variant.group_size,
          .quantize_all = variant.quantize_all,
          .scale_dtype = variant.scale_dtype,
          .weight_dtype = variant.weight_dtype,
          .keep_originals = variant.keep_originals};
}

class WeightsLoad : public ::testing::TestWithParam<std::tuple<Variant, int>> {};

TEST_P(WeightsLoad, PartsMakeTheWhole) {
  const auto& [variant, world_size] = GetParam();
  const TemporaryFolder folder;
  const CheckpointRecipe recipe = recipe_of(variant);
  const std::string path = folder / "model";
  if (variant.directory) {
    write_directory(recipe, path);
  } else {
    write_bundle(recipe, path);
  }
  const LoadOptions options{
      .weights = variant.weights, .round_to_bfloat16 = variant.round_to_bfloat16, .num_threads = 2};
  expect_target(open_target(path), world_size, options);
  const DrafterCheckpoint drafter = open_drafter(variant.directory ? path + "/draft" : path);
  if (variant.weights != WeightsChoice::kQuantized || variant.quantize_all) {
    expect_drafter(drafter, world_size, options);
  }
}

INSTANTIATE_TEST_SUITE_P(
    Variants, WeightsLoad,
    ::testing::Combine(
        ::testing::Values(Variant{.name = "plain"},
                          Variant{.name = "bf16", .weight_dtype = DType::kBFloat16},
                          Variant{.name = "rounded", .round_to_bfloat16 = true},
                          Variant{.name = "directory", .group_size = 8, .directory = true},
                          Variant{.name = "int4", .group_size = 8, .scale_dtype = DType::kBFloat16},
                          Variant{.name = "int4all", .group_size = 8, .quantize_all = true},
                          Variant{.name = "int4all_rounded",
                                  .group_size = 8,
                                  .quantize_all = true,
                                  .weights = WeightsChoice::kQuantized,
                                  .round_to_bfloat16 = true},
                          Variant{.name = "both_int4",
                                  .group_size = 8,
                                  .keep_originals = true,
                                  .weights = WeightsChoice::kQuantized},
                          Variant{.name = "both_original",
                                  .group_size = 8,
                                  .quantize_all = true,
                                  .keep_originals = true,
                                  .weights = WeightsChoice::kOriginal}),
        ::testing::Values(1, 2, 3, 5)),
    [](const auto& variant) {
      return std::string(std::get<0>(variant.param).name) + "_" +
             std::to_string(std::get<1>(variant.param));
    });

// The bundles that the Python generators wrote.
TEST(WeightsLoadGenerated, PartsMakeTheWhole) {
  const char* folder = std::getenv("KDTREE_TEST_DATA");
  if (folder == nullptr || !std::filesystem::exists(std::string(folder) + "/model_tiny.kdtr")) {
    GTEST_SKIP() << "KDTREE_TEST_DATA names no folder with generated bundles";
  }
  for (const char* name : {"/model_tiny.kdtr", "/model_int4_tiny.kdtr"}) {
    const TargetCheckpoint checkpoint = open_target(std::string(folder) + name);
    EXPECT_FALSE(checkpoint.goldens.is_null());
    for (int world_size = 1; world_size <= 3; ++world_size) {
      expect_target(checkpoint, world_size, {});
      expect_target(checkpoint, world_size, {.weights = WeightsChoice::kOriginal});
      expect_drafter(open_drafter(std::string(folder) + name), world_size, {});
    }
  }
}

TEST(WeightsLoadTied, UsesTheEmbedding) {
  const TemporaryFolder folder;
  CheckpointRecipe recipe{.target = tiny_target()};
  recipe.target.tie_word_embeddings = true;
  write_bundle(recipe, folder / "m");
  expect_target(open_target(folder / "m"), 2, {});
  const auto backend = cpu();
  const WeightStore store =
      load_target(open_target(folder / "m"), ExpertPlacement::linear(6, 1), {}, *backend);
  EXPECT_EQ(store.matrix("lm_head.weight").data, store.matrix("model.embed_tokens.weight").data);
  EXPECT_THROW(store.matrix("model.none"), Error);
  EXPECT_THROW(store.vector("lm_head.weight"), Error);
}

TEST(WeightsLoadFloat16, WidensToFloat32) {
  const TemporaryFolder folder;
  const CheckpointRecipe recipe{.target = tiny_target()};
  std::vector<BuiltTensor> tensors = build_tensors(recipe, BuiltNames::kBundle);
  for (BuiltTensor& tensor : tensors) {
    if (tensor.info.name == kDense || tensor.info.name == "model.norm.weight") {
      tensor.info.dtype = DType::kFloat16;
      tensor.data.resize(static_cast<std::size_t>(tensor.info.bytes()));
      for (std::size_t i = 1; i < tensor.data.size(); i += 2) {
        tensor.data[i] = std::byte{0x38};  // 0.5 and a little more
      }
    }
  }
  write_built_bundle(build_bundle_header(recipe), tensors, folder / "m");
  expect_target(open_target(folder / "m"), 3, {});
}

TEST(WeightsPartition, DrafterRanksWithoutHeads) {
  const TemporaryFolder folder;
  CheckpointRecipe recipe{.target = tiny_target(), .drafter = tiny_drafter()};
  write_bundle(recipe, folder / "m");
  expect_drafter(open_drafter(folder / "m"), 8, {});
  const DrafterPartition last = drafter_partition(tiny_drafter(), {.rank = 7, .world_size = 8});
  EXPECT_EQ(last.heads.size(), 0);
  EXPECT_EQ(last.key_value_heads.size(), 0);
  const DrafterPartition middle = drafter_partition(tiny_drafter(), {.rank = 1, .world_size = 3});
  EXPECT_EQ(middle.heads, (Range{2, 4}));
  EXPECT_EQ(middle.key_value_heads, (Range{0, 2}));
}

}  // namespace
}  // namespace kdtree
