// Which prompt runs where, when a sequence stops and why, and in which order results come.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "engine/near_tie.h"
#include "engine/scheduler.h"

namespace kdtree {

namespace {

using Ids = std::vector<std::int32_t>;

constexpr ChoiceLogits kClear = {.best = 1, .second = -1};

class EngineScheduler : public testing::Test {
 protected:
  Scheduler make(SchedulerOptions options) {
    return {options, requests_, [this](Result result) { results_.push_back(std::move(result)); }};
  }
  void add_request(std::size_t prompt_length, std::int64_t max_new_tokens,
                   bool ignore_eos = false) {
    requests_.push_back({.prompt_ids = Ids(prompt_length, 3),
                         .max_new_tokens = max_new_tokens,
                         .ignore_eos = ignore_eos});
  }
  // Expects the next action to be the prefill of `request` in `slot`.
  static void expect_prefill(Scheduler& scheduler, std::int32_t request, std::int32_t slot) {
    StepDecision decision;
    scheduler.plan_next(decision);
    EXPECT_EQ(decision.next, NextAction::kPrefill);
    EXPECT_EQ(decision.prefill_request, request);
    EXPECT_EQ(decision.prefill_slot, slot);
  }
  static NextAction next(Scheduler& scheduler) {
    StepDecision decision;
    scheduler.plan_next(decision);
    return decision.next;
  }
  // A step whose accepted nodes hold `tokens`, one below the other, with `bonus` behind them.
  static bool advance(Scheduler& scheduler, std::int32_t slot, const Ids& tokens,
                      std::int32_t bonus) {
    DraftTree tree{{0}, {-1}, {0}};
    AcceptedPath accepted{.nodes = {0}, .bonus_token = bonus, .choices = {kClear}};
    for (const std::int32_t token : tokens) {
      const auto node = static_cast<std::int32_t>(tree.num_nodes());
      tree.token_ids.push_back(token);
      tree.parents.push_back(node - 1);
      tree.depths.push_back(node);
      accepted.nodes.push_back(node);
      accepted.choices.push_back(kClear);
    }
    return scheduler.advance_sequence(slot, tree, accepted);
  }

  std::vector<Request> requests_;
  std::vector<Result> results_;
};

constexpr std::int64_t kWide = 1000;  // max_context that stops nothing

TEST_F(EngineScheduler, NoRequestsStopAtOnce) {
  Scheduler scheduler = make({.num_slots = 2, .max_context = kWide, .eos_token_ids = {}});
  EXPECT_EQ(next(scheduler), NextAction::kStop);
}

TEST_F(EngineScheduler, FreeSlotsAreFilledBeforeDecoding) {
  for (int i = 0; i < 3; ++i) {
    add_request(2, 2);
  }
  Scheduler scheduler = make({.num_slots = 2, .max_context = kWide, .eos_token_ids = {}});
  expect_prefill(scheduler, 0, 0);
  EXPECT_FALSE(scheduler.start_sequence(0, 5, kClear, {}));
  expect_prefill(scheduler, 1, 1);
  EXPECT_FALSE(scheduler.start_sequence(1, 6, kClear, {}));
  EXPECT_EQ(next(scheduler), NextAction::kDecode);
  EXPECT_FALSE(results_.size() > 0);
  EXPECT_TRUE(advance(scheduler, 1, {}, 7));
  // Slot 1 is free again; the result of request 1 waits for that of request 0.
  expect_prefill(scheduler, 2, 1);
  EXPECT_TRUE(results_.empty());
  EXPECT_FALSE(scheduler.start_sequence(1, 8, kClear, {}));
  EXPECT_TRUE(advance(scheduler, 0, {}, 9));
  EXPECT_TRUE(advance(scheduler, 1, {}, 10));
  EXPECT_EQ(next(scheduler), NextAction::kStop);
  ASSERT_EQ(results_.size(), 3U);
  const std::vector<Ids> expected = {{5, 9}, {6, 7}, {8, 10}};
  for (std::size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(results_[i].index, static_cast<std::int64_t>(i));
    EXPECT_EQ(results_[i].output_ids, expected[i]);
    EXPECT_EQ(results_[i].prompt_ids, (Ids{3, 3}));
    EXPECT_EQ(results_[i].stop_reason, StopReason::kLength);
  }
}

// Three slots of group 0 and two of group 1.
TEST_F(EngineScheduler, PromptsGoToTheGroupWithTheMostRoom) {
  for (int i = 0; i < 7; ++i) {
    add_request(2, 2);
  }
  Scheduler scheduler = make({.num_slots = 5,
                              .grid = {.moe_tp = 1, .attention_dp = 2},
                              .max_context = kWide,
                              .eos_token_ids = {}});
  std::int32_t request = 0;
  for (const std::int32_t slot : {0, 1, 3, 2, 4}) {
    expect_prefill(scheduler, request++, slot);
    EXPECT_FALSE(scheduler.start_sequence(slot, 5, kClear, {}));
  }
  EXPECT_EQ(next(scheduler), NextAction::kDecode);
  // Of two that end, the first of the lower group is taken first.
  EXPECT_TRUE(advance(scheduler, 4, {}, 7));
  EXPECT_TRUE(advance(scheduler, 1, {}, 7));
  expect_prefill(scheduler, 5, 1);
  EXPECT_FALSE(scheduler.start_sequence(1, 5, kClear, {}));
  expect_prefill(scheduler, 6, 4);
}

TEST_F(EngineScheduler, OneTokenEndsWithThePrompt) {
  add_request(2, 1);
  Scheduler scheduler = make({.num_slots = 1, .max_context = kWide, .eos_token_ids = {}});
  expect_prefill(scheduler, 0, 0);
  EXPECT_TRUE(scheduler.start_sequence(0, 5, kClear, {{5, 1.5F}}));
  EXPECT_EQ(next(scheduler), NextAction::kStop);
  ASSERT_EQ(results_.size(), 1U);
  EXPECT_EQ(results_[0].output_ids, Ids{5});
  EXPECT_TRUE(results_[0].acceptance_lengths.empty());
  EXPECT_EQ(results_[0].top_logits, (std::vector<TokenLogit>{{5, 1.5F}}));
}

struct EndCase {
  const char* name;
  std::int64_t max_new_tokens;
  std::int64_t max_context;  // of a prompt of 4
  bool ignore_eos;
  Ids accepted;
  std::int32_t bonus;
  // After the first token 10.
  bool finished;
  Ids output_ids;
  StopReason reason;
};

// End tokens are 1 and 2.
const EndCase kEnds[] = {
    {"goes on", 9, kWide, false, {11, 12}, 13, false, {}, {}},
    {"bonus is the end token", 9, kWide, false, {11}, 2, true, {10, 11, 2}, StopReason::kEos},
    {"end token on the path",
     9,
     kWide,
     false,
     {11, 1, 12},
     13,
     true,
     {10, 11, 1},
     StopReason::kEos},
    {"end token ignored", 9, kWide, true, {11, 1}, 2, false, {}, {}},
    {"limit on the path",
     3,
     kWide,
     false,
     {11, 12, 13},
     14,
     true,
     {10, 11, 12},
     StopReason::kLength},
    {"limit at the bonus", 3, kWide, false, {11}, 12, true, {10, 11, 12}, StopReason::kLength},
    {"context on the path",
     9,
     7,
     false,
     {11, 12, 13},
     14,
     true,
     {10, 11, 12},
     StopReason::kContext},
    {"context and limit at once",
     3,
     7,
     false,
     {11, 12},
     13,
     true,
     {10, 11, 12},
     StopReason::kLength},
    {"end token where the limit is", 3, kWide, false, {11}, 1, true, {10, 11, 1}, StopReason::kEos},
    {"end token behind the limit",
     2,
     kWide,
     false,
     {11, 1},
     1,
     true,
     {10, 11},
     StopReason::kLength},
};

TEST_F(EngineScheduler, SequencesEndWhereTheyShould) {
  for (const EndCase& end : kEnds) {
    SCOPED_TRACE(end.name);
    requests_.clear();
    results_.clear();
    add_request(4, end.max_new_tokens, end.ignore_eos);
    Scheduler scheduler =
        make({.num_slots = 1, .max_context = end.max_context, .eos_token_ids = {1, 2}});
    expect_prefill(scheduler, 0, 0);
    EXPECT_FALSE(scheduler.start_sequence(0, 10, kClear, {}));
    EXPECT_EQ(advance(scheduler, 0, end.accepted, end.bonus), end.finished);
    EXPECT_EQ(next(scheduler), end.finished ? NextAction::kStop : NextAction::kDecode);
    ASSERT_EQ(results_.size(), end.finished ? 1U : 0U);
    if (end.finished) {
      EXPECT_EQ(results_[0].output_ids, end.output_ids);
      EXPECT_EQ(results_[0].stop_reason, end.reason);
      // Not cut: what the step gave.
      EXPECT_EQ(results_[0].acceptance_lengths,
                Ids{static_cast<std::int32_t>(end.accepted.size()) + 1});
    }
  }
}

TEST_F(EngineScheduler, AnEndTokenAsTheFirstTokenEndsTheSequence) {
  add_request(1, 5);
  add_request(1, 5, /*ignore_eos=*/true);
  Scheduler scheduler = make({.num_slots = 2, .max_context = kWide, .eos_token_ids = {7}});
  expect_prefill(scheduler, 0, 0);
  EXPECT_TRUE(scheduler.start_sequence(0, 7, kClear, {}));
  expect_prefill(scheduler, 1, 0);
  EXPECT_FALSE(scheduler.start_sequence(0, 7, kClear, {}));
  ASSERT_EQ(results_.size(), 1U);
  EXPECT_EQ(results_[0].stop_reason, StopReason::kEos);
}

TEST_F(EngineScheduler, StepsAreRecordedWhereAskedFor) {
  add_request(1, 9);
  Scheduler scheduler =
      make({.num_slots = 1, .max_context = kWide, .eos_token_ids = {}, .record_steps = true});
  expect_prefill(scheduler, 0, 0);
  scheduler.start_sequence(0, 10, kClear, {});
  scheduler.record_draft(0, {{{5, -0.5F}}});
  const DraftTree tree{{10, 5, 6, 8}, {-1, 0, 0, 2}, {0, 1, 1, 2}};
  scheduler.advance_sequence(
      0, tree, {.nodes = {0, 2, 3}, .bonus_token = 4, .choices = {kClear, kClear, kClear}});
  scheduler.advance_sequence(0, {{4}, {-1}, {0}},
                             {.nodes = {0}, .bonus_token = 5, .choices = {kClear}});
  while (!advance(scheduler, 0, {1, 1}, 1)) {
  }
  EXPECT_EQ(next(scheduler), NextAction::kStop);
  ASSERT_EQ(results_.size(), 1U);
  const StepRecord& step = results_[0].steps.at(0);
  EXPECT_EQ(step.root, 10);
  EXPECT_EQ(step.token_ids, (Ids{5, 6, 8}));
  EXPECT_EQ(step.depths, (Ids{1, 1, 2}));
  EXPECT_EQ(step.parents, (Ids{-1, 0, 0, 2}));
  EXPECT_EQ(step.accepted_nodes, (Ids{2, 3}));
  EXPECT_EQ(step.bonus_token, 4);
  EXPECT_EQ(step.draft_top_log_probs.at(0).at(0), (TokenLogit{5, -0.5F}));
  EXPECT_TRUE(results_[0].steps.at(1).draft_top_log_probs.empty());
}

TEST_F(EngineScheduler, StageTimesAreKeptForEverySequenceOfAStep) {
  add_request(1, 3);
  Scheduler scheduler = make({.num_slots = 1, .max_context = kWide, .eos_token_ids = {}});
  expect_prefill(scheduler, 0, 0);
  scheduler.start_sequence(0, 10, kClear, {});
  const std::int32_t slot = 0;
  scheduler.add_stage_times({&slot, 1}, {1, 2, 3, 4, 5});
  advance(scheduler, 0, {}, 11);
  scheduler.add_stage_times({&slot, 1}, {1, 1, 1, 1, 1});
  EXPECT_TRUE(advance(scheduler, 0, {}, 12));
  next(scheduler);
  ASSERT_EQ(results_.size(), 1U);
  EXPECT_EQ(results_[0].metrics.steps, (std::vector<StageTimes>{{1, 2, 3, 4, 5}, {1, 1, 1, 1, 1}}));
  EXPECT_GE(results_[0].metrics.total_ms, results_[0].metrics.prefill_ms);
}

TEST_F(EngineScheduler, EmptySlotsAndPathsWithoutARootAreErrors) {
  add_request(1, 3);
  Scheduler scheduler = make({.num_slots = 1, .max_context = kWide, .eos_token_ids = {}});
  EXPECT_THROW(scheduler.start_sequence(0, 1, kClear, {}), Error);
  expect_prefill(scheduler, 0, 0);
  scheduler.start_sequence(0, 10, kClear, {});
  const DraftTree tree{{10, 5}, {-1, 0}, {0, 1}};
  EXPECT_THROW(scheduler.advance_sequence(0, tree, {.nodes = {}, .bonus_token = 1, .choices = {}}),
               Error);
  EXPECT_THROW(
      scheduler.advance_sequence(0, tree, {.nodes = {1}, .bonus_token = 1, .choices = {kClear}}),
      Error);
}

// The prompt's token, then what each step added; what the limit cuts off is not told.
TEST_F(EngineScheduler, TellsTheTokensOfEachStep) {
  add_request(1, 4);
  std::vector<Ids> told;
  std::vector<bool> finished;
  Scheduler scheduler(
      {.num_slots = 1, .max_context = kWide, .eos_token_ids = {}}, requests_,
      [this](Result result) { results_.push_back(std::move(result)); },
      [&](const TokenUpdate& update) {
        EXPECT_EQ(update.index, 0);
        told.emplace_back(update.tokens.begin(), update.tokens.end());
        finished.push_back(update.finished);
      });
  expect_prefill(scheduler, 0, 0);
  EXPECT_FALSE(scheduler.start_sequence(0, 10, kClear, {}));
  EXPECT_FALSE(advance(scheduler, 0, {5}, 6));
  EXPECT_TRUE(advance(scheduler, 0, {7, 8}, 9));
  EXPECT_EQ(told, (std::vector<Ids>{{10}, {5, 6}, {7}}));
  EXPECT_EQ(finished, (std::vector<bool>{false, false, true}));
  EXPECT_EQ(next(scheduler), NextAction::kStop);
  ASSERT_EQ(results_.size(), 1U);
  EXPECT_EQ(results_[0].output_ids, (Ids{10, 5, 6, 7}));
}

// A token is chosen at the node before it; what the limit cuts off is not counted.
TEST_F(EngineScheduler, NearTiesNameTheOutputTokensChosenByThem) {
  constexpr ChoiceLogits kClose = {.best = 8, .second = 7.95F};
  add_request(1, 5);
  Scheduler scheduler =
      make({.num_slots = 1, .max_context = kWide, .eos_token_ids = {}, .near_tie_share = 0.01});
  expect_prefill(scheduler, 0, 0);
  EXPECT_FALSE(scheduler.start_sequence(0, 10, kClose, {}));
  const DraftTree tree{{10, 5, 6}, {-1, 0, 1}, {0, 1, 2}};
  EXPECT_FALSE(scheduler.advance_sequence(
      0, tree, {.nodes = {0, 1, 2}, .bonus_token = 7, .choices = {kClear, kClose, kClear}}));
  EXPECT_TRUE(
      scheduler.advance_sequence(0, {{7, 1}, {-1, 0}, {0, 1}},
                                 {.nodes = {0, 1}, .bonus_token = 9, .choices = {kClose, kClose}}));
  EXPECT_EQ(next(scheduler), NextAction::kStop);
  ASSERT_EQ(results_.size(), 1U);
  EXPECT_EQ(results_[0].output_ids, (Ids{10, 5, 6, 7, 1}));
  EXPECT_EQ(results_[0].near_ties, (std::vector<std::int64_t>{0, 2, 4}));
  ASSERT_EQ(results_[0].near_tie_margins.size(), 3U);
  for (const double margin : results_[0].near_tie_margins) {
    EXPECT_NEAR(margin, 0.05 / 0.08, 1e-5);
  }
}

TEST(EngineNearTie, TheShareFollowsTheFormat) {
  ModelConfig config;
  config.num_hidden_layers = 4;
  config.vocab_size = 512;
  // 8 roundings a layer: sqrt(8 * 4 + 1) of them, each u / sqrt(3), over sqrt(2 ln 512).
  const double rounding = 0x1p-8 * std::sqrt(33.0 / 3);
  const double spread = std::sqrt(2 * std::log(512.0));
  const double dense = 4 * std::sqrt(2.0) * rounding / spread;
  EXPECT_DOUBLE_EQ(near_tie_share(DType::kBFloat16, config), dense);
  EXPECT_DOUBLE_EQ(near_tie_share(DType::kFloat32, config) * 0x1p16, dense);

  // 2 of 4 experts: z = 0, phi = 1 / sqrt(2 pi), g = sqrt(2 pi) / 4, p = 2 r / (sqrt(pi) g).
  config.n_routed_experts = 4;
  config.num_experts_per_tok = 2;
  config.first_k_dense_replace = 1;
  config.moe_layer_freq = 1;
  const double swap = 8 * rounding / (std::sqrt(2.0) * std::acos(-1.0));
  const double router = std::sqrt(3 * swap / 4) / 2;
  EXPECT_NEAR(near_tie_share(DType::kBFloat16, config),
              dense * std::hypot(rounding, router) / rounding, 1e-9);
  // In float32 a change of places is too rare to count.
  EXPECT_DOUBLE_EQ(near_tie_share(DType::kFloat32, config) * 0x1p16, dense);
  // All experts are chosen: there is nothing to change places with.
  config.num_experts_per_tok = 4;
  EXPECT_DOUBLE_EQ(near_tie_share(DType::kBFloat16, config), dense);
}

TEST(EngineNearTie, MarginIsTheDistanceOverTheBound) {
  EXPECT_DOUBLE_EQ(near_tie_margin({.best = 10, .second = 9.9375F}, 0.01), 0.625);
  EXPECT_DOUBLE_EQ(near_tie_margin({.best = -10, .second = -10.0625F}, 0.01), 0.625);
  EXPECT_EQ(near_tie_margin({.best = 0, .second = 0}, 0), 0);
  const float infinity = std::numeric_limits<float>::infinity();
  EXPECT_EQ(near_tie_margin({.best = 10, .second = 9.85F}, 0.01), infinity);
  EXPECT_EQ(near_tie_margin({.best = 1, .second = -infinity}, 0.01), infinity);
  EXPECT_EQ(near_tie_margin({.best = 1, .second = 0.5F}, 0), infinity);
  EXPECT_EQ(near_tie_margin({.best = std::numeric_limits<float>::quiet_NaN(), .second = 1}, 0.01),
            infinity);
}

TEST(EngineNames, StopReasonsAndStages) {
  EXPECT_EQ(stop_reason_name(StopReason::kEos), "eos");
  EXPECT_EQ(stop_reason_name(StopReason::kLength), "length");
  EXPECT_EQ(stop_reason_name(StopReason::kContext), "context");
  const char* names[] = {"draft", "tree_build", "verify", "accept", "commit"};
  for (std::size_t stage = 0; stage < kNumStages; ++stage) {
    EXPECT_EQ(stage_name(static_cast<Stage>(stage)), names[stage]);
  }
}

}  // namespace

}  // namespace kdtree
