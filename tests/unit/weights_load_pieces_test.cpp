// Loading in small pieces: the same weights, within the bound of host memory.
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "kernels/backend.h"
#include "tests/unit/checkpoint_builder.h"
#include "tests/unit/weights_test_support.h"
#include "weights/tensor_spec.h"
#include "weights/weight_store.h"

namespace kdtree {
namespace {

// Holds one group of 32 FP32 values; every row of the models here is longer.
constexpr std::int64_t kSmallPiece = 128;

ModelConfig wide_target() {
  ModelConfig config = tiny_target();
  config.hidden_size = 160;
  config.moe_intermediate_size = 96;
  return config;
}

std::vector<std::byte> all_bytes(const WeightView& view) {
  const std::int64_t elements = view.out_features * view.in_features;
  const bool packed = view.format == WeightFormat::kInt4Group;
  const std::int64_t data_bytes = packed                                   ? elements / 2
                                  : view.format == WeightFormat::kBFloat16 ? elements * 2
                                                                           : elements * 4;
  const auto* data = static_cast<const std::byte*>(view.data);
  std::vector<std::byte> bytes(data, data + data_bytes);
  if (packed) {
    const auto* scales = static_cast<const std::byte*>(view.scales);
    bytes.insert(bytes.end(), scales,
                 scales + elements / view.group_size * dtype_bytes(view.scale_dtype));
  }
  return bytes;
}

// Loads all of `path` in whole rows and in small pieces, and compares.
void expect_pieces_change_nothing(const std::string& path, LoadOptions options) {
  const std::unique_ptr<Backend> backend = make_backend({.name = "cpu"});
  const TargetCheckpoint checkpoint = open_target(path);
  const ExpertPlacement placement = ExpertPlacement::linear(checkpoint.config.n_routed_experts, 1);
  options.num_threads = 3;
  const WeightStore whole = load_target(checkpoint, placement, options, *backend);
  EXPECT_LE(whole.load_statistics().staging_bytes,
            max_staging_bytes(options.num_threads, options.piece_bytes));
  options.piece_bytes = kSmallPiece;
  const WeightStore cut = load_target(checkpoint, placement, options, *backend);
  EXPECT_GT(cut.load_statistics().staging_bytes, 0);
  EXPECT_LE(cut.load_statistics().staging_bytes,
            max_staging_bytes(options.num_threads, kSmallPiece));
  EXPECT_EQ(cut.load_statistics().bytes_read, whole.load_statistics().bytes_read);
  for (const TensorSpec& spec : target_tensor_specs(checkpoint.config)) {
    if (spec.is_vector()) {
      const auto size = static_cast<std::size_t>(spec.shape[0]);
      EXPECT_EQ(std::memcmp(whole.vector(spec.name).data<float>(),
                            cut.vector(spec.name).data<float>(), size * sizeof(float)),
                0)
          << spec.name;
    } else {
      EXPECT_EQ(all_bytes(whole.matrix(spec.name)), all_bytes(cut.matrix(spec.name))) << spec.name;
    }
  }
}

TEST(WeightsLoadPieces, OfEveryStoredFormGiveTheSameWeights) {
  const TemporaryFolder folder;
  const std::string path = folder / "model.kdtr";
  for (const bool round : {false, true}) {
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
      for (const std::int64_t group_size : {0, 32}) {
        SCOPED_TRACE(testing::Message()
                     << round << " " << dtype_name(dtype) << " groups of " << group_size);
        write_bundle({.target = wide_target(),
                      .drafter = std::nullopt,
                      .seed = 977,
                      .group_size = group_size,
                      .quantize_all = group_size > 0,
                      .scale_dtype = dtype,
                      .weight_dtype = dtype,
                      .keep_originals = false},
                     path);
        LoadOptions options;
        options.round_to_bfloat16 = round;
        expect_pieces_change_nothing(path, options);
      }
    }
  }
}

TEST(WeightsLoadPieces, OfFloat8AndOfExpertsRoundedToInt4GiveTheSameWeights) {
  expect_pieces_change_nothing(goldens_path("fp8_partial_blocks"), {});
  expect_pieces_change_nothing(goldens_path("deepseek_v3_fp8_groups"), {});
  const TemporaryFolder folder;
  const std::string path = folder / "model.kdtr";
  CheckpointRecipe recipe;
  recipe.target = wide_target();
  write_bundle(recipe, path);
  LoadOptions options;
  options.weights = WeightsChoice::kInt4;
  expect_pieces_change_nothing(path, options);
}

TEST(WeightsLoadPieces, BoundIsSixPiecesAThread) {
  const std::int64_t piece = LoadOptions{}.piece_bytes;
  EXPECT_EQ(piece, 4 << 20);
  EXPECT_EQ(max_staging_bytes(5, piece), 30 * piece);
}

}  // namespace
}  // namespace kdtree
