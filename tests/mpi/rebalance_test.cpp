// Experts move while an engine lives: it then is what an engine made for the new placement is.
#include <gtest/gtest.h>

#include <algorithm>

#include "tests/mpi/placement_case.h"
#include "tests/mpi/shared_bundle.h"
#include "tests/mpi/test_model.h"
#include "tests/mpi/world.h"

namespace kdtree {

namespace {

// A random model that has routed experts.
RandomCase case_with_experts(std::uint64_t seed) {
  for (;; seed += 1000) {
    RandomCase random = random_case(seed, world().size());
    const ModelConfig& config = random.recipe.target;
    if (config.n_routed_experts > 1 && config.is_moe_layer(config.num_hidden_layers - 1)) {
      return random;
    }
  }
}

void expect_equal_outputs(const std::vector<Result>& got, const std::vector<Result>& want) {
  ASSERT_EQ(got.size(), want.size());
  for (std::size_t i = 0; i < got.size(); ++i) {
    EXPECT_EQ(got[i].output_ids, want[i].output_ids) << i;
    EXPECT_EQ(got[i].acceptance_lengths, want[i].acceptance_lengths) << i;
    EXPECT_EQ(got[i].top_logits, want[i].top_logits) << i;
    EXPECT_EQ(got[i].near_ties, want[i].near_ties) << i;
  }
}

SharedPlacement placed(Dice& dice, const ModelConfig& config, std::int64_t num_slots) {
  return std::make_shared<const ExpertPlacement>(
      place_layers(random_loads(dice, config), num_slots, config, world().size()));
}

TEST(Rebalance, AnEngineIsThenOneOfTheNewPlacement) {
  for (std::uint64_t seed = 800; seed < 806; ++seed) {
    const RandomCase random = case_with_experts(seed);
    const ModelConfig& config = random.recipe.target;
    const SharedBundle bundle(random.recipe);
    Dice dice(seed);
    // As many slots as experts, or some more.
    const std::int64_t most = config.n_routed_experts * world().size();
    const std::int64_t slots =
        seed % 2 == 0 ? config.n_routed_experts : dice.between(config.n_routed_experts, most);
    const SharedPlacement first = placed(dice, config, slots);
    const SharedPlacement second = placed(dice, config, slots);
    SCOPED_TRACE(testing::Message() << slots << " slots, " << describe(random));
    TestModelOptions of_model{.target = bundle.path(),
                              .exchange = random.engine.exchange,
                              .round_to_bfloat16 = random.round_to_bfloat16,
                              .placement = first};
    TestModel model(of_model);
    of_model.placement = second;
    const TestModel other(of_model);
    EngineOptions options = random.engine;
    options.max_top_logits = 3;
    const std::unique_ptr<Engine> engine = model.make_engine(options, random.requests);
    const std::vector<Result> before = run_engine(*engine, random.requests);
    engine->rebalance(*second, model.loaded());
    EXPECT_TRUE(model.loaded().placement().same_slots(*second));
    expect_equal_outputs(run_engine(*engine, random.requests),
                         other.generate(options, random.requests));
    engine->rebalance(*first, model.loaded());
    expect_equal_outputs(run_engine(*engine, random.requests), before);
    // A new engine of a model whose experts have moved.
    engine->rebalance(*second, model.loaded());
    expect_equal_outputs(run_engine(*model.make_engine(options, random.requests), random.requests),
                         other.generate(options, random.requests));
  }
}

TEST(Rebalance, DuringAGenerationNoRequestAndNoTokenIsLost) {
  int moves = 0;
  for (std::uint64_t seed = 820; seed < 830; ++seed) {
    const RandomCase random = case_with_experts(seed);
    const ModelConfig& config = random.recipe.target;
    const SharedBundle bundle(random.recipe);
    Dice dice(seed);
    std::vector<Request> requests = random.requests;
    requests.insert(requests.end(), random.requests.begin(), random.requests.end());
    const std::int64_t slots =
        dice.between(config.n_routed_experts, config.n_routed_experts * world().size());
    SCOPED_TRACE(testing::Message() << slots << " slots, " << describe(random));
    TestModel model({.target = bundle.path(),
                     .exchange = random.engine.exchange,
                     .round_to_bfloat16 = random.round_to_bfloat16,
                     .placement = placed(dice, config, slots)});
    EngineOptions options = random.engine;
    options.count_experts = true;
    const std::vector<Result> want = model.generate(options, requests);
    const ExpertPlacement before = model.loaded().placement();
    const std::unique_ptr<Engine> engine = model.make_engine(options, requests);
    engine->rebalance_every(2, model.loaded());
    const std::vector<Result> got = run_engine(*engine, requests);
    for (std::size_t i = 0; i < got.size(); ++i) {
      const auto [a, b] = std::mismatch(got[i].output_ids.begin(), got[i].output_ids.end(),
                                        want[i].output_ids.begin(), want[i].output_ids.end());
      const std::int64_t first = a - got[i].output_ids.begin();
      const auto near_tie = [first](const Result& result) {
        return std::count(result.near_ties.begin(), result.near_ties.end(), first) > 0;
      };
      EXPECT_TRUE(got[i].output_ids == want[i].output_ids || near_tie(got[i]) || near_tie(want[i]))
          << "request " << i << " token " << first;
    }
    moves += before.layers() == model.loaded().placement().layers() ? 0 : 1;
  }
  if (world().size() > 1) {
    EXPECT_GT(moves, 0);
  }
}

TEST(Rebalance, APlacementWithOtherSlotsIsRefused) {
  if (world().size() == 1) {
    GTEST_SKIP() << "one rank has one number of slots";
  }
  const RandomCase random = case_with_experts(840);
  const ModelConfig& config = random.recipe.target;
  const SharedBundle bundle(random.recipe);
  Dice dice(1);
  TestModel model({.target = bundle.path(), .exchange = random.engine.exchange});
  const std::unique_ptr<Engine> engine = model.make_engine(random.engine, random.requests);
  const std::vector<Result> before = run_engine(*engine, random.requests);
  const SharedPlacement more = placed(dice, config, config.n_routed_experts + 1);
  EXPECT_THROW(engine->rebalance(*more, model.loaded()), AgreedError);
  expect_equal_outputs(run_engine(*engine, random.requests), before);
}

}  // namespace

}  // namespace kdtree
