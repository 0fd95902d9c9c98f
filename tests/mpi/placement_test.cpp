// Wherever experts are placed: the same tokens, the same lossless drafting, the same bits of each
// expert's result.
#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>

#include "tests/mpi/decoder_bench.h"
#include "tests/mpi/placement_case.h"
#include "tests/mpi/same_tokens.h"
#include "tests/mpi/shared_bundle.h"
#include "tests/mpi/test_model.h"
#include "tests/mpi/world.h"

namespace kdtree {

namespace {

struct GoldenParam {
  std::string bundle;
  std::string weights;  // the key of the goldens
  ExchangeKind exchange = ExchangeKind::kAllReduce;
};

void PrintTo(const GoldenParam& param, std::ostream* out) {
  *out << param.bundle << " " << exchange_name(param.exchange);
}

class PlacementGoldens : public testing::TestWithParam<GoldenParam> {};

TEST_P(PlacementGoldens, TokensAreThoseOfTheOracle) {
  const GoldenParam& param = GetParam();
  const std::string path = generated_path(param.bundle);
  ModelConfig config;
  run_together(world().group, [&] { config = open_target(path).config; });
  Dice dice(17);
  for (const NamedPlacement& named : all_placements(dice, config, world().size())) {
    const TestModel model({.target = path,
                           .weights = param.weights == "original" ? WeightsChoice::kOriginal
                                                                  : WeightsChoice::kQuantized,
                           .exchange = param.exchange,
                           .placement = named.placement});
    const nlohmann::json& cases = model.source().target.goldens.at(param.weights).at("cases");
    std::vector<Ids> prompts;
    for (const nlohmann::json& golden : cases) {
      prompts.push_back(golden.at("prompt_ids"));
    }
    const auto length = static_cast<std::int64_t>(cases.at(0).at("greedy_ids").size());
    for (const EngineOptions& options :
         {EngineOptions{.mode = Mode::kPlain, .batch_size = 3},
          EngineOptions{.mode = Mode::kTree, .tree_budget = 16, .batch_size = 2}}) {
      const std::vector<Result> results = model.generate(options, make_requests(prompts, length));
      for (std::size_t i = 0; i < results.size(); ++i) {
        EXPECT_EQ(results[i].output_ids, cases.at(i).at("greedy_ids").get<Ids>())
            << named.name << " " << mode_name(options.mode) << " case " << i;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Bundles, PlacementGoldens,
    testing::Values(GoldenParam{"model_tiny.kdtr", "original", ExchangeKind::kAllReduce},
                    GoldenParam{"model_tiny.kdtr", "original", ExchangeKind::kAllToAll},
                    GoldenParam{"model_int4_tiny.kdtr", "quantized", ExchangeKind::kAllReduce},
                    GoldenParam{"model_int4_tiny.kdtr", "quantized", ExchangeKind::kAllToAll}));

TEST(PlacementRandomModels, TokensDoNotFollowThePlacement) {
  int layers = 0;
  for (std::uint64_t seed = 700; seed < 712; ++seed) {
    const RandomCase random = random_case(seed, world().size());
    const SharedBundle bundle(random.recipe);
    Dice dice(seed);
    std::vector<Result> want;
    for (const NamedPlacement& named : all_placements(dice, random.recipe.target, world().size())) {
      if (random.recipe.target.n_routed_experts == 0) {
        continue;
      }
      SCOPED_TRACE(testing::Message() << named.name << " " << describe(random));
      const TestModel model({.target = bundle.path(),
                             .exchange = random.engine.exchange,
                             .round_to_bfloat16 = random.round_to_bfloat16,
                             .placement = named.placement});
      EngineOptions options = random.engine;
      options.max_top_logits = 3;
      options.mode = Mode::kPlain;
      options.batch_size = 1;
      const std::vector<Result> plain = model.generate(options, random.requests);
      options.mode = Mode::kTree;
      options.batch_size = random.engine.batch_size;
      const std::vector<Result> tree = model.generate(options, random.requests);
      if (want.empty()) {
        want = plain;
      }
      for (std::size_t i = 0; i < plain.size(); ++i) {
        // For one placement all bits are equal, whatever rows are in a call.
        EXPECT_EQ(tree[i].output_ids, plain[i].output_ids) << i;
        EXPECT_EQ(tree[i].top_logits, plain[i].top_logits) << i;
        expect_same_tokens(plain[i], want[i]);
      }
      ++layers;
    }
  }
  EXPECT_GT(layers, 12);  // models without experts prove nothing
}

// Logits of a model whose rows have one expert each, so that a sum over ranks has one term.
CheckpointRecipe one_expert_recipe(std::int64_t group_size) {
  CheckpointRecipe recipe{.target = tiny_target(), .seed = 6, .group_size = group_size};
  ModelConfig& config = recipe.target;
  config.num_hidden_layers = 3;
  config.moe_intermediate_size = 48;
  config.n_routed_experts = 10;
  config.num_experts_per_tok = 1;
  config.n_shared_experts = 0;
  config.n_group = 1;
  config.topk_group = 1;
  return recipe;
}

struct BitsParam {
  std::int64_t group_size = 0;
  std::int64_t num_experts_per_tok = 1;
  ExchangeKind exchange = ExchangeKind::kAllReduce;
};

void PrintTo(const BitsParam& param, std::ostream* out) {
  *out << "groups of " << param.group_size << ", " << param.num_experts_per_tok << " experts, "
       << exchange_name(param.exchange);
}

class PlacementBits : public testing::TestWithParam<BitsParam> {};

// An expert's result has the same bits on every rank and in every replica. Rows with several
// experts are equal in bits on one rank alone: on several, the placement says which are added
// first.
TEST_P(PlacementBits, AnExpertsResultIsTheSameInEverySlot) {
  const BitsParam& param = GetParam();
  if (param.num_experts_per_tok > 1 && world().size() > 1) {
    GTEST_SKIP() << "holds on one rank";
  }
  CheckpointRecipe recipe = one_expert_recipe(param.group_size);
  recipe.target.num_experts_per_tok = param.num_experts_per_tok;
  const SharedBundle bundle(recipe);
  Dice dice(23);
  Ids tokens;
  for (int i = 0; i < 100; ++i) {
    tokens.push_back(static_cast<std::int32_t>(dice.between(0, recipe.target.vocab_size - 1)));
  }
  std::vector<Logits> want;
  for (const NamedPlacement& named : all_placements(dice, recipe.target, world().size())) {
    const TestModel model(
        {.target = bundle.path(), .exchange = param.exchange, .placement = named.placement});
    DecoderBench bench(model, param.exchange, 1);
    bench.cache().clear(0);
    const std::vector<Logits> logits = bench.append(0, tokens);
    if (want.empty()) {
      want = logits;
    }
    for (std::size_t row = 0; row < want.size(); ++row) {
      EXPECT_TRUE(same_bits(logits[row], want[row])) << named.name << " row " << row;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Formats, PlacementBits,
                         testing::Values(BitsParam{0, 1, ExchangeKind::kAllReduce},
                                         BitsParam{0, 1, ExchangeKind::kAllToAll},
                                         BitsParam{16, 1, ExchangeKind::kAllReduce},
                                         BitsParam{16, 1, ExchangeKind::kAllToAll},
                                         BitsParam{16, 3, ExchangeKind::kAllReduce},
                                         BitsParam{16, 3, ExchangeKind::kAllToAll}));

}  // namespace

}  // namespace kdtree
