// configs/models: every file parses, and its table of tensors adds up to the published model.
#include <gtest/gtest.h>

#include <string>

#include "config/model_config.h"
#include "core/json_text.h"
#include "study/run_plan.h"
#include "tests/unit/weights_test_support.h"
#include "weights/random_checkpoint.h"
#include "weights/weight_store.h"

namespace kdtree {
namespace {

ModelConfig read_model(const std::string& name) {
  return parse_model_config(read_json_file(models_path(name)), name);
}

std::int64_t bytes_of(const WeightBytes& bytes, WeightKind kind) {
  return bytes[static_cast<std::size_t>(kind)];
}

struct PublishedModel {
  const char* name;
  double published;         // parameters as the model's authors round them
  std::int64_t parameters;  // by hand, from the shapes of attention, feed-forward, router and norms
};

// Of the main model: DeepSeek-V3's layer for predicting a further token is not among them.
constexpr PublishedModel kModels[] = {
    {"kimi-k2-instruct", 1.03e12, 1026408232448}, {"kimi-k2.6", 1.03e12, 1026408232448},
    {"deepseek-v3", 671e9, 671026419200},         {"moonlight-16b", 16e9, 15960110208},
    {"deepseek-v2-lite", 15.7e9, 15706484224},
};

TEST(ConfigModels, HaveThePublishedNumberOfParameters) {
  for (const PublishedModel& model : kModels) {
    const std::int64_t count = count_parameters(read_model(model.name));
    EXPECT_EQ(count, model.parameters) << model.name;
    EXPECT_NEAR(static_cast<double>(count), model.published, 0.005 * model.published) << model.name;
  }
}

TEST(ConfigModels, StateTheirFormats) {
  for (const char* name : {"kimi-k2-instruct", "deepseek-v3"}) {
    const ModelConfig config = read_model(name);
    EXPECT_TRUE(config.float8_blocks) << name;
    EXPECT_FALSE(config.quantization) << name;
  }
  const ModelConfig int4 = read_model("kimi-k2.6");
  EXPECT_FALSE(int4.float8_blocks);
  ASSERT_TRUE(int4.quantization);
  EXPECT_EQ(int4.quantization->group_size, 32);
  for (const char* name : {"moonlight-16b", "deepseek-v2-lite"}) {
    const ModelConfig config = read_model(name);
    EXPECT_FALSE(config.float8_blocks) << name;
    EXPECT_FALSE(config.quantization) << name;
    EXPECT_EQ(config.q_lora_rank, 0) << name;
  }
}

TEST(ConfigModels, StateTheirRouters) {
  const ModelConfig lite = read_model("deepseek-v2-lite");
  EXPECT_EQ(lite.scoring_func, "softmax");
  EXPECT_EQ(lite.topk_method, "greedy");
  EXPECT_FALSE(lite.norm_topk_prob);
  EXPECT_FALSE(lite.routed_scaling_always);
  const ModelConfig deepseek = read_model("deepseek-v3");
  EXPECT_EQ(deepseek.n_group, 8);
  EXPECT_EQ(deepseek.topk_group, 4);
  EXPECT_EQ(deepseek.first_k_dense_replace, 3);
  const ModelConfig kimi = read_model("kimi-k2-instruct");
  EXPECT_EQ(kimi.rope.factor, 32);
  EXPECT_EQ(kimi.rope.beta_fast, 1);
  EXPECT_FALSE(read_model("moonlight-16b").rope.yarn);
}

// fp8 matrices become bf16 or float32 at load; embedding, head and router stay as they are.
TEST(ConfigModels, PlansOfFloat8ModelsCountWhatIsHeld) {
  const TargetCheckpoint target = planned_target(models_path("deepseek-v3"));
  const ExpertPlacement placement = ExpertPlacement::linear(256, 8);
  constexpr std::int64_t kRoutedOfARank = std::int64_t{58} * 32 * 3 * 7168 * 2048;
  for (const std::int64_t bytes : {2, 4}) {
    const WeightBytes held = target_bytes_by_kind(
        target, placement, {.rank = 3, .world_size = 8, .round_to_bfloat16 = bytes == 2});
    EXPECT_EQ(bytes_of(held, WeightKind::kRoutedExperts), kRoutedOfARank * bytes);
    EXPECT_EQ(bytes_of(held, WeightKind::kVocabulary), std::int64_t{2} * 129280 / 8 * 7168 * 2);
  }
}

// Stored as bf16, which is never widened.
TEST(ConfigModels, PlansOfPlainModelsCountEveryParameterOnce) {
  for (const char* name : {"moonlight-16b", "deepseek-v2-lite"}) {
    const TargetCheckpoint target = planned_target(models_path(name));
    const WeightBytes held =
        target_bytes_by_kind(target, ExpertPlacement::linear(64, 1), {.world_size = 1});
    std::int64_t sum = 0;
    for (const std::int64_t bytes : held) {
      sum += bytes;
    }
    // Vectors are held as float32: at most a thousandth more.
    const auto expected = 2 * static_cast<double>(count_parameters(target.config));
    EXPECT_GE(static_cast<double>(sum), expected) << name;
    EXPECT_LE(static_cast<double>(sum), 1.001 * expected) << name;
  }
}

}  // namespace
}  // namespace kdtree
