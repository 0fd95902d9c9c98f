// Checkpoints without files: what is drawn has the layout of a real one, whoever draws it.
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "kernels/backend.h"
#include "tests/unit/weights_test_support.h"
#include "weights/number_formats.h"
#include "weights/random_checkpoint.h"
#include "weights/weight_store.h"

namespace kdtree {
namespace {

const std::string kKimi = "kimi_nested_int4";

class WeightsRandom : public testing::Test {
 protected:
  WeightStore load(const TargetCheckpoint& checkpoint, int rank, int world_size) {
    const auto placement = ExpertPlacement::linear(checkpoint.config.n_routed_experts, world_size);
    return load_target(checkpoint, placement, {.rank = rank, .world_size = world_size}, *backend_);
  }
  static std::vector<float> floats(const WeightView& view) {
    std::vector<float> values(static_cast<std::size_t>(view.out_features * view.in_features));
    widen(view.format == WeightFormat::kFloat32 ? DType::kFloat32 : DType::kBFloat16, view.data,
          values);
    return values;
  }

  std::unique_ptr<Backend> backend_ = make_backend({.name = "cpu"});
};

TEST_F(WeightsRandom, HasTheFormatsOfTheConfig) {
  const TargetCheckpoint checkpoint = random_target(goldens_path(kKimi), 3);
  const WeightStore store = load(checkpoint, 0, 1);
  const WeightView& expert = store.matrix("model.layers.1.mlp.experts.0.gate_proj.weight");
  EXPECT_EQ(expert.format, WeightFormat::kInt4Group);
  EXPECT_EQ(expert.group_size, checkpoint.config.quantization->group_size);
  EXPECT_EQ(expert.scale_dtype, DType::kBFloat16);
  EXPECT_EQ(store.matrix("model.layers.0.self_attn.o_proj.weight").format, WeightFormat::kBFloat16);
  const ConstTensorView norm = store.vector("model.norm.weight");
  for (const float value : norm.span<float>()) {
    EXPECT_EQ(value, 1.0F);
  }
  // Uniform: 1 / columns is the variance; within five deviations of its estimate.
  const WeightView& head = store.matrix("lm_head.weight");
  const std::vector<float> values = floats(head);
  double squares = 0;
  for (const float value : values) {
    squares += double{value} * value * static_cast<double>(head.in_features);
  }
  const auto count = static_cast<double>(values.size());
  // A uniform value's square has the variance 4/5 of its squared mean.
  EXPECT_NEAR(squares / count, 1, 5 * std::sqrt(0.8 / count) + 0x1p-8);
}

TEST_F(WeightsRandom, SeedsAndNamesMakeDifferentTensors) {
  const auto head = [&](std::uint64_t seed, const char* name) {
    return floats(load(random_target(goldens_path(kKimi), seed), 0, 1).matrix(name));
  };
  const char* const output = "lm_head.weight";
  EXPECT_EQ(head(3, output), head(3, output));
  EXPECT_NE(head(3, output), head(4, output));
  EXPECT_NE(head(3, "model.layers.0.self_attn.o_proj.weight"),
            head(3, "model.layers.1.self_attn.o_proj.weight"));
}

// Rows and columns of ranks are those of the whole.
TEST_F(WeightsRandom, RanksDrawTheirPartsOfTheWhole) {
  const TargetCheckpoint checkpoint = random_target(goldens_path(kKimi) + "/config.json", 5);
  const WeightStore whole = load(checkpoint, 0, 1);
  for (const char* name : {"lm_head.weight", "model.layers.0.self_attn.o_proj.weight"}) {
    const WeightView& full = whole.matrix(name);
    const std::vector<float> want = floats(full);
    const bool by_columns = std::string(name) != "lm_head.weight";
    std::int64_t at = 0;
    for (int rank = 0; rank < 3; ++rank) {
      const WeightStore part_store = load(checkpoint, rank, 3);
      const WeightView& part = part_store.matrix(name);
      const std::vector<float> got = floats(part);
      for (std::int64_t r = 0; r < part.out_features; ++r) {
        for (std::int64_t c = 0; c < part.in_features; ++c) {
          const std::int64_t row = by_columns ? r : at + r;
          const std::int64_t column = by_columns ? at + c : c;
          ASSERT_EQ(got[static_cast<std::size_t>(r * part.in_features + c)],
                    want[static_cast<std::size_t>(row * full.in_features + column)])
              << name << " rank " << rank;
        }
      }
      at += by_columns ? part.in_features : part.out_features;
    }
    EXPECT_EQ(at, by_columns ? full.in_features : full.out_features);
  }
}

TEST_F(WeightsRandom, DraftersAreDrawnAsWell) {
  const std::string path = goldens_path("dflash_trained_bf16") + "/draft";
  const DrafterCheckpoint checkpoint = random_drafter(path, 1);
  const WeightStore store = load_drafter(checkpoint, {}, *backend_);
  EXPECT_EQ(store.matrix("fc.weight").out_features, checkpoint.config.hidden_size);
  EXPECT_EQ(store.bytes(), load_drafter(open_drafter(path), {}, *backend_).bytes());
}

TEST_F(WeightsRandom, NeedsAConfig) {
  const TemporaryFolder folder;
  expect_input_error([&] { random_target(folder / "none.json", 1); },
                     {"none.json: no such file", "config.json"});
  write_file(folder / "config.json", "{}");
  expect_input_error([&] { random_drafter(folder / "", 1); }, {"config.json"});
}

}  // namespace
}  // namespace kdtree
