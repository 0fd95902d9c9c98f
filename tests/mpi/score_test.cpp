// Log-probabilities of given tokens against the logits that decoding gives for each prefix.
#include <gtest/gtest.h>

#include <cmath>

#include "tests/mpi/random_case.h"
#include "tests/mpi/shared_bundle.h"
#include "tests/mpi/test_model.h"
#include "tests/mpi/world.h"

namespace kdtree {

namespace {

using Scores = std::vector<std::vector<double>>;

Scores score(Engine& engine, const std::vector<ScoreWindow>& windows) {
  Scores scores;
  engine.score(windows, [&](std::size_t index, std::span<const double> log_probs) {
    EXPECT_EQ(index, scores.size());
    scores.emplace_back(log_probs.begin(), log_probs.end());
  });
  return scores;
}

std::unique_ptr<Engine> score_engine(const TestModel& model, std::int64_t longest) {
  return model.make_engine(
      {.max_context = longest, .max_prompt = longest - 1, .score_windows = true}, {});
}

// log-softmax in double of all logits behind each prefix of the window. Collective.
std::vector<double> by_prefixes(const TestModel& model, const ScoreWindow& window) {
  const std::int64_t vocab_size = model.config().vocab_size;
  std::vector<Request> requests;
  for (std::size_t end = static_cast<std::size_t>(window.first_scored);
       end < window.token_ids.size(); ++end) {
    requests.push_back({.prompt_ids = {window.token_ids.begin(),
                                       window.token_ids.begin() + static_cast<std::ptrdiff_t>(end)},
                        .max_new_tokens = 1,
                        .ignore_eos = true});
  }
  const std::vector<Result> results = model.generate(
      {.mode = Mode::kPlain, .batch_size = 1, .max_top_logits = vocab_size}, requests);
  std::vector<double> log_probs;
  for (const Result& result : results) {
    EXPECT_EQ(std::ssize(result.top_logits), vocab_size);
    const double highest = result.top_logits.front().second;
    const std::int32_t token = window.token_ids[result.prompt_ids.size()];
    double sum = 0;
    double own = 0;
    for (const auto& [id, logit] : result.top_logits) {
      sum += std::exp(logit - highest);
      own = id == token ? logit : own;
    }
    log_probs.push_back(own - highest - std::log(sum));
  }
  return log_probs;
}

ScoreWindow random_window(Dice& dice, std::int64_t length, std::int64_t vocab_size) {
  ScoreWindow window{.token_ids = {}, .first_scored = dice.between(1, length - 1)};
  for (std::int64_t i = 0; i < length; ++i) {
    window.token_ids.push_back(static_cast<std::int32_t>(dice.between(0, vocab_size - 1)));
  }
  return window;
}

TEST(Score, IsTheLogSoftmaxBehindEachPrefix) {
  for (std::uint64_t seed = 1300; seed < 1306; ++seed) {
    const RandomCase random = random_case(seed, world().size());
    const SharedBundle bundle(random.recipe);
    for (const ExchangeKind exchange : kExchangeKinds) {
      SCOPED_TRACE(testing::Message() << describe(random) << " " << exchange_name(exchange));
      const TestModel model({.target = bundle.path(), .exchange = exchange});
      Dice dice(seed);
      std::vector<ScoreWindow> windows;
      for (const std::int64_t length : {2, 7, 13}) {
        windows.push_back(random_window(dice, length, model.config().vocab_size));
      }
      const Scores scores = score(*score_engine(model, 13), windows);
      EXPECT_EQ(scores.size(), world().is_root() ? windows.size() : 0);
      for (std::size_t i = 0; i < windows.size(); ++i) {
        const std::vector<double> expected = by_prefixes(model, windows[i]);
        if (!world().is_root()) {
          continue;
        }
        ASSERT_EQ(scores[i].size(), expected.size());
        // The logits are the same bit for bit; the sums of a part are rounded to float once.
        for (std::size_t t = 0; t < expected.size(); ++t) {
          EXPECT_NEAR(scores[i][t], expected[t], 1e-5) << "window " << i << ", token " << t;
        }
      }
    }
  }
}

// A window of several pieces, whose rows are scored in several calls: each token's score is that of
// a window that ends with it.
TEST(Score, LongWindowsAreCutIntoPieces) {
  const RandomCase random = random_case(1310, world().size());
  const SharedBundle bundle(random.recipe);
  const TestModel model({.target = bundle.path(), .exchange = random.engine.exchange});
  constexpr std::int64_t kLength = 700;  // more than a prefill call takes
  Dice dice(1310);
  ScoreWindow window = random_window(dice, kLength, model.config().vocab_size);
  window.first_scored = 1;
  const std::unique_ptr<Engine> engine = score_engine(model, kLength);
  const Scores whole = score(*engine, {window});
  for (const std::int64_t end : {2, 128, 129, 130, 512, 513, 514, 700}) {
    ScoreWindow part{.token_ids = {window.token_ids.begin(), window.token_ids.begin() + end},
                     .first_scored = end - 1};
    const Scores last = score(*engine, {part});
    if (world().is_root()) {
      ASSERT_EQ(last.front().size(), 1U);
      EXPECT_EQ(last.front().front(), whole.front()[static_cast<std::size_t>(end - 2)]) << end;
    }
  }
}

TEST(Score, RefusesWindowsThatHaveNothingToScore) {
  const RandomCase random = random_case(1311, world().size());
  const SharedBundle bundle(random.recipe);
  const TestModel model({.target = bundle.path(), .exchange = random.engine.exchange});
  const std::unique_ptr<Engine> engine = score_engine(model, 4);
  const auto vocabulary = static_cast<std::int32_t>(model.config().vocab_size);
  const std::vector<ScoreWindow> bad_windows = {
      {.token_ids = {}, .first_scored = 1},
      {.token_ids = {0}, .first_scored = 1},
      {.token_ids = {0, 0}, .first_scored = 0},
      {.token_ids = {0, 0}, .first_scored = 2},
      {.token_ids = {0, vocabulary}, .first_scored = 1},
      {.token_ids = {0, -1}, .first_scored = 1},
      {.token_ids = {0, 0, 0, 0, 0, 0}, .first_scored = 1}};
  for (const ScoreWindow& bad : bad_windows) {
    // Only rank 0's windows count, and all ranks learn of the refusal.
    const std::vector<ScoreWindow> windows =
        world().is_root() ? std::vector<ScoreWindow>{bad} : std::vector<ScoreWindow>{};
    EXPECT_THROW(score(*engine, windows), AgreedError);
  }
  EXPECT_EQ(score(*engine, {{.token_ids = {0, 0, 0, 0}, .first_scored = 2}}).size(),
            world().is_root() ? 1U : 0U);
  // Decoding after scoring is that of a fresh engine.
  const std::vector<Request> requests = make_requests({{0, 0}}, 2);
  const std::vector<Result> after = run_engine(*engine, requests);
  const std::vector<Result> fresh = run_engine(*score_engine(model, 4), requests);
  if (world().is_root()) {
    EXPECT_EQ(after.front().output_ids, fresh.front().output_ids);
  }
}

}  // namespace

}  // namespace kdtree
