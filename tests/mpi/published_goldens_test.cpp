// tests/data/goldens: outputs of published reference programs for checkpoints in Hugging Face's
// layouts.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>

#include "tests/mpi/test_model.h"
#include "tests/mpi/world.h"

namespace kdtree {

namespace {

using Ids = std::vector<std::int32_t>;
using Json = nlohmann::json;

Json read_expected(const std::string& name) {
  std::ifstream file(source_path("tests/data/goldens/" + name + "/expected.json"));
  return Json::parse(file);
}

std::vector<Ids> prompts_of(const Json& expected) {
  std::vector<Ids> prompts;
  for (const Json& golden : expected.at("cases")) {
    prompts.push_back(golden.at("prompt_ids"));
  }
  return prompts;
}

// How far two float32 programs that add in different orders may be apart in a logit, relative to
// the largest logit. With u = 2^-24 and terms of random sign, a sum of n products has a rounding
// error of about u * sqrt(n / 6 + 1) times its own typical size: each addition rounds a partial sum
// that grows like sqrt(k), and the squares of n such errors add to u^2 n^2 / 6 of the n that the
// sum's square is made of; the products' own rounding stays below the 1. A logit sits behind P
// matrix products in sequence: six of attention (q_a, q_b, absorbed query, scores, values, output)
// and three of the feed-forward in each layer, and the head. Their errors are independent, those of
// the two programs too, and norms keep gains near 1: together sqrt(2 P). The largest of some
// thousand deviations is 4 sigma. Sigma is meant relative to a typical logit; taking it relative to
// the largest, three times as large, is the room for gains above 1 (SwiGLU, softmax).
double logit_tolerance(const ModelConfig& config) {
  const double u = std::exp2(-24);
  const auto n = static_cast<double>(
      std::max({config.hidden_size, config.intermediate_size, config.moe_intermediate_size,
                config.num_attention_heads * config.v_head_dim, config.q_lora_rank}));
  const auto products = static_cast<double>(9 * config.num_hidden_layers + 1);
  return 4 * std::sqrt(2 * products) * u * std::sqrt(n / 6 + 1);
}

void compare_plain(const std::vector<Result>& results, const Json& expected, double tolerance) {
  for (std::size_t i = 0; i < results.size(); ++i) {
    SCOPED_TRACE(testing::Message() << "case " << i);
    const Json& golden = expected.at("cases").at(i);
    EXPECT_EQ(results[i].output_ids, golden.at("greedy_ids").get<Ids>());
    const auto logits = golden.at("last_logits").get<std::vector<double>>();
    double largest = 0;
    for (const double logit : logits) {
      largest = std::max(largest, std::abs(logit));
    }
    ASSERT_EQ(results[i].top_logits.size(), logits.size());
    double worst = 0;
    for (const auto& [id, logit] : results[i].top_logits) {
      const double difference = std::abs(logit - logits.at(static_cast<std::size_t>(id)));
      worst = std::max(worst, difference / largest);
    }
    EXPECT_LE(worst, tolerance);
  }
}

class PublishedGoldens : public testing::TestWithParam<const char*> {};

TEST_P(PublishedGoldens, PlainDecodingGivesTheirTokensAndLogits) {
  const std::string name = GetParam();
  const std::string target = name == "dflash_trained_bf16" ? name + "/target" : name;
  const Json expected = read_expected(name);
  const auto length = static_cast<std::int64_t>(expected["cases"][0]["greedy_ids"].size());
  const std::vector<Request> requests = make_requests(prompts_of(expected), length);
  for (const ExchangeKind exchange : kExchangeKinds) {
    const TestModel model(
        {.target = source_path("tests/data/goldens/" + target), .exchange = exchange});
    for (const std::int64_t batch : {1, 3}) {
      SCOPED_TRACE(testing::Message() << exchange_name(exchange) << " batch " << batch);
      const EngineOptions options{
          .mode = Mode::kPlain, .batch_size = batch, .max_top_logits = model.config().vocab_size};
      compare_plain(model.generate(options, requests), expected, logit_tolerance(model.config()));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Checkpoints, PublishedGoldens,
                         testing::Values("kimi_nested_int4", "deepseek_v3_fp8_groups",
                                         "dflash_trained_bf16", "deepseek_v2_lite",
                                         "deepseek_v2_groups", "moonlight", "uneven_tied",
                                         "fp8_partial_blocks", "moe_layer_freq"));

// The published drafting programs print log-probabilities to about 1e-5, and the drafter's passes
// differ from ours in the order of addition like the target's.
constexpr double kLogProbTolerance = 1e-4;

void compare_first_block(const StepRecord& step, const Json& block) {
  EXPECT_EQ(step.root, block.at("root").get<std::int32_t>());
  const Json& slots = block.at("draft_log_probs_top8");
  ASSERT_EQ(step.draft_top_log_probs.size(), slots.size());
  for (std::size_t slot = 0; slot < slots.size(); ++slot) {
    const std::vector<TokenLogit>& actual = step.draft_top_log_probs[slot];
    ASSERT_EQ(actual.size(), slots[slot].size());
    for (std::size_t i = 0; i < actual.size(); ++i) {
      EXPECT_EQ(actual[i].first, slots[slot][i][0].get<std::int32_t>()) << slot << " " << i;
      EXPECT_NEAR(actual[i].second, slots[slot][i][1].get<double>(), kLogProbTolerance);
    }
  }
}

void compare_drafting(const Result& result, const Json& golden, const EngineOptions& options) {
  const std::string budget = std::to_string(options.tree_budget);
  const bool chain = options.mode == Mode::kChain;
  const Json& expected = chain ? golden.at("chain") : golden.at("tree").at(budget);
  EXPECT_EQ(result.output_ids, expected.at("output_ids").get<Ids>());
  auto lengths = expected.at("acceptance_lengths").get<Ids>();
  if (result.acceptance_lengths.size() + 1 == lengths.size()) {
    lengths.pop_back();  // a step behind the limit; see the goldens' README
  }
  EXPECT_EQ(result.acceptance_lengths, lengths);
  ASSERT_FALSE(result.steps.empty());
  const StepRecord& step = result.steps.front();
  compare_first_block(step, golden.at("first_block"));
  if (!chain) {
    const Json& tree = golden.at("first_tree").at(budget);
    EXPECT_EQ(step.token_ids, tree.at("token_ids").get<Ids>());
    EXPECT_EQ(step.depths, tree.at("depths").get<Ids>());
    EXPECT_EQ(step.parents, tree.at("parents").get<Ids>());
  }
}

TEST(PublishedDrafting, BlocksTreesAndAcceptanceAreThoseOfThePublishedPrograms) {
  const std::string folder = source_path("tests/data/goldens/dflash_trained_bf16");
  const Json expected = read_expected("dflash_trained_bf16");
  const Json& first = expected.at("cases").at(0);
  std::vector<EngineOptions> runs = {{.mode = Mode::kChain}};
  for (const auto& [budget, tree] : first.at("tree").items()) {
    runs.push_back({.mode = Mode::kTree, .tree_budget = std::stoll(budget)});
  }
  EXPECT_GE(runs.size(), 5U);
  const auto length = static_cast<std::int64_t>(first.at("greedy_ids").size());
  const std::vector<Request> requests = make_requests(prompts_of(expected), length);
  for (const ExchangeKind exchange : kExchangeKinds) {
    const TestModel model(
        {.target = folder + "/target", .drafter = folder + "/draft", .exchange = exchange});
    for (EngineOptions options : runs) {
      options.record_steps = true;
      for (const std::int64_t batch : {1, 3}) {
        options.batch_size = batch;
        const std::vector<Result> results = model.generate(options, requests);
        for (std::size_t i = 0; i < results.size(); ++i) {
          SCOPED_TRACE(testing::Message()
                       << exchange_name(exchange) << " " << mode_name(options.mode) << " budget "
                       << options.tree_budget << " batch " << batch << " case " << i);
          compare_drafting(results[i], expected["cases"][i], options);
        }
      }
    }
  }
}

}  // namespace

}  // namespace kdtree
