// Rope frequencies, amplitude and softmax scale of the published configurations.
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "core/check.h"
#include "model/rope.h"

namespace kdtree {

namespace {

constexpr std::int64_t kRopeDim = 64;
constexpr std::int64_t kHeadDim = 192;

struct YarnCase {
  const char* name;
  RopeConfig rope;
  // Pairs below `low` keep their frequency, from `high` on it is divided by the factor.
  std::int64_t low = 0;
  std::int64_t high = 0;
  double scale = 0;  // of the scores, for heads of 192
};

RopeConfig yarn(double theta, double factor, double beta_fast, double mscale) {
  return {.rope_theta = theta,
          .yarn = true,
          .factor = factor,
          .beta_fast = beta_fast,
          .beta_slow = 1,
          .mscale = mscale,
          .mscale_all_dim = mscale,
          .original_max_position_embeddings = 4096,
          .attention_factor = std::nullopt};
}

// Worked out apart from the program, from DeepSeek's formulas.
const YarnCase kCases[] = {
    {"DeepSeek-V3", yarn(10000, 40, 32, 1), 10, 23, 0.135233778861},
    {"DeepSeek-V2-Lite", yarn(10000, 40, 32, 0.707), 10, 23, 0.114721386793},
    {"Kimi-K2-Instruct", yarn(50000, 32, 1, 1), 19, 20, 0.130860799963},
    {"Kimi-K2-Thinking", yarn(50000, 64, 1, 1), 19, 20, 0.144679625803},
    {"Kimi-K2.5", yarn(50000, 64, 32, 1), 8, 20, 0.144679625803},
};

TEST(ModelRope, YarnBlendsBetweenTheRightPairs) {
  for (const YarnCase& published : kCases) {
    SCOPED_TRACE(published.name);
    const std::vector<double> frequencies = rope_inverse_frequencies(published.rope, kRopeDim);
    ASSERT_EQ(frequencies.size(), 32U);
    for (std::int64_t i = 0; i < kRopeDim / 2; ++i) {
      const double plain =
          std::pow(published.rope.rope_theta, -2.0 * static_cast<double>(i) / kRopeDim);
      const double share = static_cast<double>(i - published.low) /
                           static_cast<double>(published.high - published.low);
      const double ramp = std::min(std::max(share, 0.0), 1.0);
      const double expected = plain * (1 - ramp) + plain / published.rope.factor * ramp;
      EXPECT_NEAR(frequencies[static_cast<std::size_t>(i)] / expected, 1, 1e-12) << "pair " << i;
    }
  }
}

TEST(ModelRope, SoftmaxScaleAndAmplitude) {
  for (const YarnCase& published : kCases) {
    SCOPED_TRACE(published.name);
    EXPECT_NEAR(softmax_scale(published.rope, kHeadDim), published.scale, 1e-11);
    EXPECT_DOUBLE_EQ(rope_amplitude(published.rope), 1);
  }
  const RopeConfig plain{.rope_theta = 50000, .attention_factor = std::nullopt};
  EXPECT_NEAR(softmax_scale(plain, kHeadDim), 0.072168783649, 1e-11);
  EXPECT_EQ(rope_amplitude(plain), 1);
}

TEST(ModelRope, AmplitudeFollowsBothStrengthsOrTheConfig) {
  RopeConfig rope = yarn(10000, 40, 32, 1);
  rope.mscale_all_dim = 0;
  // Without mscale_all_dim the scores are not scaled and the amplitude is mscale's alone.
  EXPECT_NEAR(rope_amplitude(rope), 0.1 * std::log(40.0) + 1, 1e-12);
  EXPECT_NEAR(softmax_scale(rope, kHeadDim), 1 / std::sqrt(192.0), 1e-15);
  rope.attention_factor = 1.25;
  EXPECT_EQ(rope_amplitude(rope), 1.25);
  RopeConfig small = yarn(10000, 1, 32, 1);
  small.mscale_all_dim = 0;
  EXPECT_EQ(rope_amplitude(small), 1);  // a factor of 1 has no strength
}

// Kimi's DFlash drafts: the ratio of equal strengths is 1, and a set amplitude multiplies every
// cosine and sine without moving a frequency.
TEST(ModelRope, ASetAmplitudeMultipliesTheWholeTable) {
  constexpr std::int64_t kHead = 128;
  constexpr std::int64_t kPositions = 9;
  const double amplitude = 0.1 * std::log(64.0) + 1;
  EXPECT_NEAR(amplitude, 1.4158883, 1e-7);
  const RopeConfig as_config = yarn(50000, 64, 32, 1);
  RopeConfig changed = as_config;
  override_rope_amplitude(changed, amplitude, "draft");
  EXPECT_EQ(rope_inverse_frequencies(changed, kHead), rope_inverse_frequencies(as_config, kHead));
  const std::vector<float> table = rope_table(changed, kHead, kPositions);
  const std::vector<float> unit = rope_table(as_config, kHead, kPositions);
  ASSERT_EQ(table.size(), unit.size());
  EXPECT_EQ(unit.front(), 1);  // cosine of position 0
  EXPECT_EQ(table.front(), static_cast<float>(amplitude));
  for (std::size_t i = 0; i < table.size(); ++i) {
    EXPECT_NEAR(table[i], amplitude * static_cast<double>(unit[i]), 3e-7) << i;
  }
}

TEST(ModelRope, NoAmplitudeCanBeSetWithoutYarn) {
  RopeConfig plain{.rope_theta = 50000, .attention_factor = std::nullopt};
  try {
    override_rope_amplitude(plain, 1.5, "draft/config.json");
    ADD_FAILURE() << "no error";
  } catch (const InputError& error) {
    EXPECT_EQ(std::string(error.what()).find("draft/config.json: the rotary amplitude"), 0U)
        << error.what();
  }
}

TEST(ModelRope, PairsThatWouldMeetAreKeptApart) {
  // Both betas at the same whole pair: theta = e^2 and dim = 2 pi make correction dims whole.
  RopeConfig rope = yarn(50000, 4, 1, 1);
  rope.original_max_position_embeddings = 1;  // far below the first pair: low = high = 0
  for (const double frequency : rope_inverse_frequencies(rope, 8)) {
    EXPECT_TRUE(std::isfinite(frequency));
    EXPECT_GT(frequency, 0);
  }
}

TEST(ModelRope, TableHoldsCosinesThenSines) {
  const RopeConfig rope = yarn(10000, 40, 32, 1);
  const std::vector<double> frequencies = rope_inverse_frequencies(rope, 8);
  const std::vector<float> table = rope_table(rope, 8, 5);
  ASSERT_EQ(table.size(), 40U);
  for (std::size_t position = 0; position < 5; ++position) {
    for (std::size_t i = 0; i < 4; ++i) {
      const double angle = static_cast<double>(position) * frequencies[i];
      EXPECT_EQ(table[position * 8 + i], static_cast<float>(std::cos(angle)));
      EXPECT_EQ(table[position * 8 + 4 + i], static_cast<float>(std::sin(angle)));
    }
  }
  EXPECT_TRUE(rope_table(rope, 8, 0).empty());
}

}  // namespace

}  // namespace kdtree
