// Routed experts that become INT4 while they are loaded, against the same rounding of what a load
// without it gives.
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <vector>

#include "kernels/backend.h"
#include "weights/quantize.h"
#include "weights/weight_store.h"
#include "weights_test_support.h"

namespace kdtree {
namespace {

std::vector<float> plain_floats(const WeightView& view) {
  std::vector<float> values(static_cast<std::size_t>(view.out_features * view.in_features));
  widen(view.format == WeightFormat::kBFloat16 ? DType::kBFloat16 : DType::kFloat32, view.data,
        values);
  return values;
}

void expect_rounded(const WeightView& plain, const WeightView& int4) {
  ASSERT_EQ(int4.format, WeightFormat::kInt4Group);
  ASSERT_EQ(int4.scale_dtype, DType::kBFloat16);
  ASSERT_EQ(int4.group_size, kLoadGroupSize);
  ASSERT_EQ(int4.out_features, plain.out_features);
  ASSERT_EQ(int4.in_features, plain.in_features);
  const std::vector<float> values = plain_floats(plain);
  const Int4Matrix want = quantize_rows({.values = values,
                                         .first_row = 0,
                                         .first_column = 0,
                                         .columns = plain.in_features,
                                         .group_size = kLoadGroupSize},
                                        "expected");
  EXPECT_EQ(std::memcmp(int4.data, want.words.data(), want.words.size() * sizeof(want.words[0])),
            0);
  std::vector<float> scales(want.scales.size());
  widen(DType::kBFloat16, int4.scales, scales);
  EXPECT_EQ(scales, want.scales);
}

class WeightsLoadInt4 : public ::testing::TestWithParam<const char*> {};

TEST_P(WeightsLoadInt4, EqualsRoundingAfterwards) {
  const TargetCheckpoint checkpoint = open_target(goldens_path(GetParam()));
  const std::unique_ptr<Backend> backend = make_backend({.name = "cpu"});
  const ExpertPlacement placement = ExpertPlacement::linear(checkpoint.config.n_routed_experts, 2);
  for (int rank = 0; rank < 2; ++rank) {
    LoadOptions options;
    options.rank = rank;
    options.world_size = 2;
    options.num_threads = 3;
    const WeightStore plain = load_target(checkpoint, placement, options, *backend);
    options.weights = WeightsChoice::kInt4;
    const WeightStore int4 = load_target(checkpoint, placement, options, *backend);
    EXPECT_EQ(int4.bytes(), target_bytes(checkpoint, placement, options));
    EXPECT_LT(int4.bytes(), plain.bytes());
    std::int64_t num_experts = 0;
    for (const TensorSpec& spec : target_tensor_specs(checkpoint.config)) {
      if (spec.is_vector() || spec.tied || !int4.contains(spec.name)) {
        continue;
      }
      SCOPED_TRACE(spec.name);
      if (spec.kind == WeightKind::kRoutedExperts) {
        expect_rounded(plain.matrix(spec.name), int4.matrix(spec.name));
        ++num_experts;
      } else {
        EXPECT_EQ(int4.matrix(spec.name).format, plain.matrix(spec.name).format);
        EXPECT_EQ(plain_floats(int4.matrix(spec.name)), plain_floats(plain.matrix(spec.name)));
      }
    }
    EXPECT_GT(num_experts, 0);
  }
}
INSTANTIATE_TEST_SUITE_P(Goldens, WeightsLoadInt4,
                         ::testing::Values("deepseek_v3_fp8_groups", "dflash_trained_bf16/target"));

// What is packed already stays as it is stored.
TEST(WeightsLoadInt4Stored, IsLeftAlone) {
  const TargetCheckpoint checkpoint = open_target(goldens_path("kimi_nested_int4"));
  const ExpertPlacement placement = ExpertPlacement::linear(checkpoint.config.n_routed_experts, 1);
  LoadOptions options;
  const std::int64_t bytes = target_bytes(checkpoint, placement, options);
  options.weights = WeightsChoice::kInt4;
  EXPECT_EQ(target_bytes(checkpoint, placement, options), bytes);
}

}  // namespace
}  // namespace kdtree
