// An engine keeps nothing of a generation: the next one is that of a fresh engine.
#include <gtest/gtest.h>

#include "tests/mpi/random_case.h"
#include "tests/mpi/shared_bundle.h"
#include "tests/mpi/test_model.h"
#include "tests/mpi/world.h"

namespace kdtree {

namespace {

// Everything but the timings, drafts' log-probabilities bit for bit.
void expect_equal(const std::vector<Result>& a, const std::vector<Result>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (std::size_t i = 0; i < a.size(); ++i) {
    EXPECT_EQ(a[i].output_ids, b[i].output_ids) << i;
    EXPECT_EQ(a[i].acceptance_lengths, b[i].acceptance_lengths) << i;
    EXPECT_EQ(a[i].stop_reason, b[i].stop_reason) << i;
    EXPECT_EQ(a[i].near_ties, b[i].near_ties) << i;
    EXPECT_EQ(a[i].near_tie_margins, b[i].near_tie_margins) << i;
    EXPECT_EQ(a[i].top_logits, b[i].top_logits) << i;
    ASSERT_EQ(a[i].steps.size(), b[i].steps.size()) << i;
    for (std::size_t step = 0; step < a[i].steps.size(); ++step) {
      EXPECT_EQ(a[i].steps[step].draft_top_log_probs, b[i].steps[step].draft_top_log_probs);
      EXPECT_EQ(a[i].steps[step].token_ids, b[i].steps[step].token_ids);
      EXPECT_EQ(a[i].steps[step].parents, b[i].steps[step].parents);
    }
  }
}

TEST(EngineReuse, ASecondGenerationEqualsTheFirstAndAFreshEngines) {
  for (const std::uint64_t seed : {900, 901, 902, 903}) {
    RandomCase random = random_case(seed, world().size());
    const RandomCase other = random_case(seed + 100, world().size());
    const SharedBundle bundle(random.recipe);
    const TestModel model({.target = bundle.path(), .exchange = random.engine.exchange});
    // Other prompts, within this model's vocabulary.
    std::vector<Request> between = other.requests;
    for (Request& request : between) {
      for (std::int32_t& token : request.prompt_ids) {
        token %= static_cast<std::int32_t>(model.config().vocab_size);
      }
    }
    std::vector<Request> all = random.requests;
    all.insert(all.end(), between.begin(), between.end());
    for (const Mode mode : {Mode::kPlain, Mode::kChain, Mode::kTree}) {
      SCOPED_TRACE(testing::Message() << "seed " << seed << " " << mode_name(mode));
      const EngineOptions options{.mode = mode,
                                  .tree_budget = random.engine.tree_budget,
                                  .batch_size = 2,
                                  .max_top_logits = 3,
                                  .record_steps = true};
      const std::unique_ptr<Engine> engine = model.make_engine(options, all);
      const std::vector<Result> first = run_engine(*engine, random.requests);
      run_engine(*engine, between);
      const std::vector<Result> second = run_engine(*engine, random.requests);
      const std::unique_ptr<Engine> fresh = model.make_engine(options, all);
      const std::vector<Result> third = run_engine(*fresh, random.requests);
      expect_equal(first, second);
      expect_equal(first, third);
    }
  }
}

// Steps that run ahead of the host change nothing of what comes out, whichever sequences end when.
TEST(EngineReuse, StepsAheadOfTheHostGiveTheSame) {
  for (std::uint64_t seed = 920; seed < 926; ++seed) {
    const RandomCase random = random_case(seed, world().size());
    const SharedBundle bundle(random.recipe);
    const TestModel model({.target = bundle.path(), .exchange = random.engine.exchange});
    for (const Mode mode : {Mode::kPlain, Mode::kChain, Mode::kTree}) {
      for (const std::int64_t batch_size : {1, 3}) {
        SCOPED_TRACE(testing::Message()
                     << "seed " << seed << " " << mode_name(mode) << " batch " << batch_size);
        EngineOptions options{.mode = mode,
                              .tree_budget = random.engine.tree_budget,
                              .batch_size = batch_size,
                              .max_top_logits = 3,
                              .steps_ahead = 0};
        const std::unique_ptr<Engine> engine = model.make_engine(options, random.requests);
        const std::vector<Result> want = run_engine(*engine, random.requests);
        options.steps_ahead = 1;
        const std::unique_ptr<Engine> ahead = model.make_engine(options, random.requests);
        expect_equal(run_engine(*ahead, random.requests), want);
        expect_equal(run_engine(*ahead, random.requests), want);
      }
    }
  }
}

TEST(EngineReuse, AnEngineWorksOnAfterRequestsThatItRefuses) {
  RandomCase random = random_case(910, world().size());
  const SharedBundle bundle(random.recipe);
  const TestModel model({.target = bundle.path(), .exchange = random.engine.exchange});
  const std::unique_ptr<Engine> engine =
      model.make_engine({.mode = Mode::kTree, .tree_budget = 8, .batch_size = 2}, random.requests);
  const std::vector<Result> first = run_engine(*engine, random.requests);

  const Request good = random.requests.front();
  const auto refused = [&](const Request& bad) {
    // Only rank 0's requests count, and all ranks learn of the refusal.
    const std::vector<Request> requests =
        world().is_root() ? std::vector<Request>{good, bad} : std::vector<Request>{};
    EXPECT_THROW(engine->generate(requests, [](const Result&) { FAIL() << "a result"; }),
                 AgreedError);
  };
  const auto vocabulary = static_cast<std::int32_t>(model.config().vocab_size);
  refused({.prompt_ids = {}, .max_new_tokens = 3});
  refused({.prompt_ids = {vocabulary}, .max_new_tokens = 3});
  refused({.prompt_ids = {-1}, .max_new_tokens = 3});
  refused({.prompt_ids = {0}, .max_new_tokens = 0});
  refused({.prompt_ids = std::vector<std::int32_t>(1000, 0), .max_new_tokens = 1});

  const std::vector<Result> second = run_engine(*engine, random.requests);
  expect_equal(first, second);
  EXPECT_TRUE(run_engine(*engine, {}).empty());
}

}  // namespace

}  // namespace kdtree
