// Whatever the experts, the ranks, the grid, the placement, the exchange, the rows and the mode:
// what several ranks decode is what one rank decodes.
#include <gtest/gtest.h>

#include <algorithm>

#include "comm/self/self_communicator.h"
#include "tests/mpi/grid_case.h"
#include "tests/mpi/placement_case.h"
#include "tests/mpi/same_tokens.h"
#include "tests/mpi/shared_bundle.h"
#include "tests/mpi/test_model.h"
#include "tests/mpi/world.h"

namespace kdtree {

namespace {

// More than 200 over the numbers of ranks that the suite runs with.
constexpr int kCases = 70;

// Decoded by this rank alone, all experts here.
std::vector<Result> decode_alone(const ModelSource& source, EngineOptions options,
                                 bool round_to_bfloat16, const std::vector<Request>& requests) {
  options.exchange = ExchangeKind::kAllReduce;
  options.placement = nullptr;
  options.grid = {};
  options.fixed_counts = false;
  const std::unique_ptr<ProcessGroup> alone = make_self_process_group();
  SelfCommunicator communicator;
  LoadOptions load;
  load.round_to_bfloat16 = round_to_bfloat16;
  const LoadedModel model(source, options, load, *alone, world().backend);
  Engine engine(model, options, world().backend, communicator, *alone);
  std::vector<Result> results;
  engine.generate(requests, [&results](Result result) { results.push_back(std::move(result)); });
  return results;
}

TEST(ExchangeProperty, SeveralRanksDecodeWhatOneDoes) {
  int groups_without_experts = 0;
  int cases_with_slices = 0;
  std::uint64_t seed = 9000;
  for (int cases = 0; cases < kCases; ++seed) {
    const RandomCase random = random_case(seed, world().size());
    const ModelConfig& config = random.recipe.target;
    if (config.num_moe_layers() == 0) {
      continue;
    }
    ++cases;
    Dice dice(seed);
    const std::vector<ParallelGrid> grids =
        grids_of(config, std::max<std::int64_t>(1, random.recipe.group_size));
    const ParallelGrid grid =
        grids[static_cast<std::size_t>(dice.between(0, std::ssize(grids) - 1))];
    const int num_groups = grid.moe_ep(world().size());
    const SharedPlacement placement =
        dice.one_in(4) ? nullptr : random_placement(dice, config, num_groups);
    const SharedBundle bundle(random.recipe);
    const TestModel model({.target = bundle.path(),
                           .exchange = random.engine.exchange,
                           .round_to_bfloat16 = random.round_to_bfloat16,
                           .placement = placement,
                           .grid = grid});
    EngineOptions options = random.engine;
    options.max_top_logits = config.vocab_size;
    options.mode = dice.one_in(3) ? Mode::kPlain : Mode::kTree;
    const std::unique_ptr<Engine> engine = model.make_engine(options, random.requests);
    const std::vector<Result> results = run_engine(*engine, random.requests);
    for (int group = 0; placement && group < num_groups; ++group) {
      groups_without_experts +=
          placement->layer(config.num_hidden_layers - 1).experts_of(group).empty() ? 1 : 0;
    }
    cases_with_slices += grid.moe_tp > 1 ? 1 : 0;
    if (!world().is_root()) {
      continue;
    }
    SCOPED_TRACE(testing::Message()
                 << "seed " << seed << " on " << world().size() << " ranks, " << grid_name(grid)
                 << ' ' << (placement ? "random placement" : "linear") << ' ' << describe(random));
    const std::vector<Result> want =
        decode_alone(model.source(), engine->options(), random.round_to_bfloat16, random.requests);
    ASSERT_EQ(results.size(), want.size());
    for (std::size_t i = 0; i < want.size(); ++i) {
      expect_same_tokens(results[i], want[i]);
      expect_close_logits(results[i], want[i], config);
    }
  }
  // These must have been among the cases.
  EXPECT_TRUE(world().size() == 1 || groups_without_experts > 0);
  EXPECT_TRUE(world().size() == 1 || cases_with_slices > 0);
}

}  // namespace

}  // namespace kdtree
