// Grids of ranks: however they share experts, the tokens are the same.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "tests/mpi/grid_case.h"
#include "tests/mpi/placement_case.h"
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
  Dice dice(23);
  for (const ParallelGrid& grid :
       grids_of(config, quantized ? config.quantization->group_size : 1)) {
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
    for (const EngineOptions& options :
         {EngineOptions{.mode = Mode::kPlain, .batch_size = 3},
          EngineOptions{.mode = Mode::kTree, .tree_budget = 16, .batch_size = 2},
          EngineOptions{.mode = Mode::kTree,
          .tree_budget = 9,
          .batch_size = 3,
          .steps_ahead = 1,
          .fixed_counts = true}}) {
      const std::vector<Result> results = model.generate(options, make_requests(prompts, length));
      for (std::size_t i = 0; i < results.size(); ++i) {
        EXPECT_EQ(results[i].output_ids, cases.at(i).at("greedy_ids").get<Ids>())
            << grid_name(grid) << " " << mode_name(options.mode) << " case " << i;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Bundles, GridGoldens,
    testing::Values(GridParam{"model_tiny.kdtr", "original", ExchangeKind::kAllReduce},
                    GridParam{"model_tiny.kdtr", "original", ExchangeKind::kAllToAll},
                    GridParam{"model_int4_tiny2.kdtr", "quantized", ExchangeKind::kAllReduce},
                    GridParam{"model_int4_tiny2.kdtr", "quantized", ExchangeKind::kAllToAll}));

// Decodes the case's requests with and without drafts; whether the tokens differ is told by the
// caller's messages. The plain run's results, on rank 0.
std::vector<Result> decode_twice(const std::string& path, const RandomCase& random,
                                 const ParallelGrid& grid, ExchangeKind exchange) {
  const TestModel model({.target = path,
                         .exchange = exchange,
                         .round_to_bfloat16 = random.round_to_bfloat16,
                         .grid = grid});
  EngineOptions plain = random.engine;
  plain.mode = Mode::kPlain;
  plain.max_top_logits = std::min<std::int64_t>(4, random.recipe.target.vocab_size);
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
  for (std::uint64_t seed = 1200; seed < 1216; ++seed) {
    const RandomCase random = random_case(seed, world().size());
    SCOPED_TRACE(describe(random));
    const SharedBundle bundle(random.recipe);
    const std::int64_t unit = std::max<std::int64_t>(1, random.recipe.group_size);
    std::vector<Result> without;
    for (const ParallelGrid& grid : grids_of(random.recipe.target, unit)) {
      for (const ExchangeKind exchange : {ExchangeKind::kAllReduce, ExchangeKind::kAllToAll}) {
        const std::vector<Result> results = decode_twice(bundle.path(), random, grid, exchange);
        without = without.empty() ? results : without;
        for (std::size_t i = 0; i < results.size(); ++i) {
          const auto& logits = results[i].top_logits;
          const auto& expected = without[i].top_logits;
          const double scale = 1 + std::abs(static_cast<double>(expected.front().second));
          for (std::size_t k = 0; k < logits.size(); ++k) {
            EXPECT_NEAR(logits[k].second, expected[k].second, 2e-4 * scale)
                << grid_name(grid) << " " << exchange_name(exchange) << " request " << i;
          }
        }
      }
    }
  }
}

}  // namespace

}  // namespace kdtree
