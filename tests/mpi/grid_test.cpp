// Grids of ranks: however they share experts, the tokens are the same.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "tests/mpi/grid_case.h"
#include "tests/mpi/placement_case.h"
#include "tests/mpi/same_tokens.h"
#include "tests/mpi/shared_bundle.h"
#include "tests/mpi/test_model.h"
#include "tests/mpi/world.h"

namespace kdtree {

namespace {

using Ids = std::vector<std::int32_t>;

struct GridParam {
  std::string bundle;
  std::string weights;  // the key of the goldens
  ExchangeKind exchange = ExchangeKind::kAllReduce;
  std::size_t first_grid = 0;  // and every second one behind it
};

void PrintTo(const GridParam& param, std::ostream* out) {
  *out << param.bundle << " " << param.weights << " " << exchange_name(param.exchange);
}

class GridGoldens : public testing::TestWithParam<GridParam> {};

TEST_P(GridGoldens, TokensAreThoseOfTheOracle) {
  const GridParam& param = GetParam();
  const std::string path = generated_path(param.bundle);
  ModelConfig config;
  run_together(world().group, [&] { config = open_target(path).config; });
  const bool quantized = param.weights == "quantized";
  const std::vector<EngineOptions> ways = {
      {.mode = Mode::kTree, .tree_budget = 16, .batch_size = 2},
      {.mode = Mode::kPlain, .batch_size = 3},
      {.mode = Mode::kTree,
       .tree_budget = 9,
       .batch_size = 3,
       .steps_ahead = 1,
       .fixed_counts = true}};
  Dice dice(23);
  const std::vector<ParallelGrid> grids =
      grids_of(config, quantized ? config.quantization->group_size : 1);
  if (param.first_grid >= grids.size()) {
    GTEST_SKIP() << "one rank has one grid";
  }
  for (std::size_t number = param.first_grid; number < grids.size(); number += 2) {
    const ParallelGrid& grid = grids[number];
    const TestModel model(
        {.target = path,
         .weights = quantized ? WeightsChoice::kQuantized : WeightsChoice::kOriginal,
         .exchange = param.exchange,
         .placement = random_placement(dice, config, grid.moe_ep(world().size())),
         .grid = grid});
    const nlohmann::json& cases = model.source().target.goldens.at(param.weights).at("cases");
    std::vector<Ids> prompts;
    for (const nlohmann::json& golden : cases) {
      prompts.push_back(golden.at("prompt_ids"));
    }
    const auto length = static_cast<std::int64_t>(cases.at(0).at("greedy_ids").size());
    const EngineOptions& options = ways[number / 2 % ways.size()];
    const std::vector<Result> results = model.generate(options, make_requests(prompts, length));
    for (std::size_t i = 0; i < results.size(); ++i) {
      EXPECT_EQ(results[i].output_ids, cases.at(i).at("greedy_ids").get<Ids>())
          << grid_name(grid) << " " << mode_name(options.mode) << " case " << i;
    }
  }
}

// Each grid under both exchanges: every second one on one bundle, the others on the other.
INSTANTIATE_TEST_SUITE_P(
    Bundles, GridGoldens,
    testing::Values(GridParam{"model_tiny.kdtr", "original", ExchangeKind::kAllReduce, 0},
                    GridParam{"model_tiny.kdtr", "original", ExchangeKind::kAllToAll, 1},
                    GridParam{"model_int4_tiny2.kdtr", "quantized", ExchangeKind::kAllReduce, 1},
                    GridParam{"model_int4_tiny2.kdtr", "quantized", ExchangeKind::kAllToAll, 0}));

// Decodes the case's requests with and without drafts, which must give the same tokens. The plain
// run's results, on rank 0.
std::vector<Result> decode_twice(const std::string& path, const RandomCase& random,
                                 const ParallelGrid& grid, ExchangeKind exchange) {
  const TestModel model({.target = path,
                         .exchange = exchange,
                         .round_to_bfloat16 = random.round_to_bfloat16,
                         .grid = grid});
  EngineOptions plain = random.engine;
  plain.mode = Mode::kPlain;
  plain.max_top_logits = random.recipe.target.vocab_size;
  std::vector<Result> expected = model.generate(plain, random.requests);
  const std::vector<Result> drafted = model.generate(random.engine, random.requests);
  for (std::size_t i = 0; i < drafted.size(); ++i) {
    EXPECT_EQ(drafted[i].output_ids, expected[i].output_ids) << grid_name(grid) << " request " << i;
  }
  return expected;
}

// Models of odd sizes: drafting changes nothing under any grid, and the logits behind the prompts
// are those without one, up to the order of sums.
TEST(Grids, OfRandomModelsComputeTheSame) {
  for (std::uint64_t seed = 1200; seed < 1206; ++seed) {
    const RandomCase random = random_case(seed, world().size());
    SCOPED_TRACE(describe(random));
    const SharedBundle bundle(random.recipe);
    const std::int64_t unit = std::max<std::int64_t>(1, random.recipe.group_size);
    std::vector<Result> without;
    std::uint64_t turn = seed;
    for (const ParallelGrid& grid : grids_of(random.recipe.target, unit)) {
      const ExchangeKind exchange = kExchangeKinds[turn++ % kExchangeKinds.size()];
      const std::vector<Result> results = decode_twice(bundle.path(), random, grid, exchange);
      without = without.empty() ? results : without;
      for (std::size_t i = 0; i < results.size(); ++i) {
        expect_close_logits(results[i], without[i], random.recipe.target);
      }
    }
  }
}

// What rank 0 tells of rows: those of other attention groups are among them.
struct Told {
  ExpertLoads loads;
  std::vector<std::int32_t> observed;  // experts of the nodes of all steps
  std::vector<double> scores;
};

Told tell(const ParallelGrid& grid, ExchangeKind exchange) {
  const TestModel model({.target = generated_path("model_tiny.kdtr"),
                         .weights = WeightsChoice::kOriginal,
                         .exchange = exchange,
                         .grid = grid});
  const std::vector<Request> requests = make_requests({{5, 6, 7}, {9, 4}, {11, 12, 13, 14}}, 6);
  const std::unique_ptr<Engine> engine = model.make_engine({.mode = Mode::kTree,
                                                            .tree_budget = 6,
                                                            .batch_size = 3,
                                                            .record_experts = true,
                                                            .score_windows = true,
                                                            .count_experts = true},
                                                           requests);
  Told told;
  engine->generate(
      requests, [](const Result&) {}, {},
      [&told](const StepView& step) {
        for (std::int64_t layer = 0; layer < step.experts.num_layers(); ++layer) {
          for (std::int64_t node = 0; node < step.experts.num_nodes(); ++node) {
            const auto experts = step.experts.of(layer, node);
            told.observed.insert(told.observed.end(), experts.begin(), experts.end());
          }
        }
      });
  engine->score({{.token_ids = {5, 6, 7, 8}, .first_scored = 1}},
                [&told](std::size_t, std::span<const double> log_probs) {
                  told.scores.assign(log_probs.begin(), log_probs.end());
                });
  told.loads = engine->expert_loads();
  return told;
}

TEST(Grids, TellOfTheRowsOfAllGroups) {
  const Told expected = tell({}, ExchangeKind::kAllReduce);
  EXPECT_EQ(expected.observed.empty(), !world().is_root());
  ModelConfig config;
  run_together(world().group,
               [&] { config = open_target(generated_path("model_tiny.kdtr")).config; });
  for (const ParallelGrid& grid : grids_of(config, 1)) {
    for (const ExchangeKind exchange : kExchangeKinds) {
      SCOPED_TRACE(grid_name(grid) + " " + exchange_name(exchange));
      const Told told = tell(grid, exchange);
      EXPECT_EQ(told.loads.layers, expected.loads.layers);
      EXPECT_EQ(told.observed, expected.observed);
      EXPECT_EQ(told.scores.size(), expected.scores.size());
      for (std::size_t i = 0; i < std::min(told.scores.size(), expected.scores.size()); ++i) {
        EXPECT_NEAR(told.scores[i], expected.scores[i], 1e-4);
      }
    }
  }
}

}  // namespace

}  // namespace kdtree
