// Random models: whatever the drafter proposes, output is that of plain decoding. Vocabularies are
// tiny, so that drafts without any training are often accepted.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <numeric>

#include "tests/mpi/random_case.h"
#include "tests/mpi/shared_bundle.h"
#include "tests/mpi/test_model.h"
#include "tests/mpi/world.h"

namespace kdtree {

namespace {

using Ids = std::vector<std::int32_t>;

// Configurations by number of ranks.
constexpr std::array<int, 4> kConfigurations = {400, 200, 120, 100};
static_assert(kConfigurations[0] + kConfigurations[1] + kConfigurations[2] + kConfigurations[3] >=
              200);

// What a suite of random cases must have met to be worth anything.
struct Events {
  int token_zero = 0;          // token 0 came out
  int mask_token = 0;          // the drafter's mask token came out
  int eos_inside_path = 0;     // an accepted node ended a sequence, known tokens behind it
  int length_inside_path = 0;  // max_new_tokens reached before the end of what a step gave
  int context_inside_path = 0;
  int context_reached = 0;
  int accepted_tokens = 0;   // draft tokens
  int tree_beats_chain = 0;  // an accepted path leaves the most probable chain
};

struct Ending {
  Ids output_ids;
  StopReason stop_reason = StopReason::kLength;
};

// What must come out, given enough tokens of plain decoding that stops nowhere.
Ending cut(const Ids& endless, const Request& request, const ModelConfig& config,
           std::int64_t max_context) {
  const auto prompt = static_cast<std::int64_t>(request.prompt_ids.size());
  const std::int64_t room = max_context > 0 ? max_context - prompt : request.max_new_tokens;
  const bool at_context = room < request.max_new_tokens;
  const auto limit = static_cast<std::size_t>(std::min(room, request.max_new_tokens));
  Ending ending{{}, at_context ? StopReason::kContext : StopReason::kLength};
  for (const std::int32_t token : endless) {
    ending.output_ids.push_back(token);
    const auto& ends = config.eos_token_ids;
    if (!request.ignore_eos && std::find(ends.begin(), ends.end(), token) != ends.end()) {
      ending.stop_reason = StopReason::kEos;
      return ending;
    }
    if (ending.output_ids.size() == limit) {
      return ending;
    }
  }
  return ending;
}

void count_events(const Result& result, const RandomCase& random, Events& events) {
  const auto has = [&result](std::int64_t id) {
    return std::find(result.output_ids.begin(), result.output_ids.end(), id) !=
           result.output_ids.end();
  };
  events.token_zero += has(0) ? 1 : 0;
  events.mask_token += has(random.recipe.drafter->mask_token_id) ? 1 : 0;
  events.context_reached += result.stop_reason == StopReason::kContext ? 1 : 0;
  if (result.steps.empty()) {
    return;
  }
  const auto known = 1 + std::accumulate(result.acceptance_lengths.begin(),
                                         result.acceptance_lengths.end(), std::size_t{0});
  const bool inside = known > result.output_ids.size();
  events.length_inside_path += inside && result.stop_reason == StopReason::kLength ? 1 : 0;
  events.context_inside_path += inside && result.stop_reason == StopReason::kContext ? 1 : 0;
  events.eos_inside_path += inside && result.stop_reason == StopReason::kEos ? 1 : 0;
  for (const StepRecord& step : result.steps) {
    events.accepted_tokens += static_cast<int>(step.accepted_nodes.size());
    for (std::size_t depth = 0; depth < step.accepted_nodes.size(); ++depth) {
      const std::int32_t token =
          step.token_ids.at(static_cast<std::size_t>(step.accepted_nodes[depth]) - 1);
      if (token != step.draft_top_log_probs.at(depth).front().first) {
        ++events.tree_beats_chain;
        break;
      }
    }
  }
}

// A sequence ends in the first step that brings enough tokens, and each step brings at least one.
void expect_steps(const Result& result, Mode mode) {
  const Ids& lengths = result.acceptance_lengths;
  const auto known = std::accumulate(lengths.begin(), lengths.end(), std::size_t{1});
  EXPECT_GE(known, result.output_ids.size());
  if (!lengths.empty()) {
    EXPECT_LT(known - static_cast<std::size_t>(lengths.back()), result.output_ids.size());
    EXPECT_GE(*std::min_element(lengths.begin(), lengths.end()), 1);
  }
  if (mode == Mode::kPlain) {
    EXPECT_EQ(known, result.output_ids.size());
  }
}

void check_case(const RandomCase& random, Events& events) {
  const SharedBundle bundle(random.recipe);
  const TestModel model({.target = bundle.path(),
                         .exchange = random.engine.exchange,
                         .round_to_bfloat16 = random.round_to_bfloat16});
  // Alone, to the end, without any limit of the case.
  std::vector<Request> endless = random.requests;
  for (Request& request : endless) {
    request.ignore_eos = true;
  }
  const std::vector<Result> reference = model.generate({.mode = Mode::kPlain}, endless);
  const auto check_run = [&](const EngineOptions& options) {
    std::vector<Result> results = model.generate(options, random.requests);
    for (std::size_t i = 0; i < results.size(); ++i) {
      SCOPED_TRACE(testing::Message() << mode_name(options.mode) << " prompt " << i);
      const Ending expected = cut(reference[i].output_ids, random.requests[i], model.config(),
                                  random.engine.max_context);
      EXPECT_EQ(results[i].output_ids, expected.output_ids);
      EXPECT_EQ(results[i].stop_reason, expected.stop_reason);
      expect_steps(results[i], options.mode);
    }
    return results;
  };
  for (const Mode mode : {Mode::kPlain, Mode::kChain, Mode::kTree}) {
    EngineOptions options = random.engine;
    options.mode = mode;
    options.record_steps = mode != Mode::kPlain;
    for (const Result& result : check_run(options)) {
      count_events(result, random, events);
    }
  }
  // Slots that a small tree does not reach need not predict: what is drafted stays the same. A
  // recorded step shows all slots.
  const std::int64_t horizon = random.recipe.drafter->draft_horizon();
  EngineOptions small = random.engine;
  small.mode = Mode::kTree;
  small.tree_budget = 1 + static_cast<std::int64_t>(random.recipe.seed) % horizon;
  const std::vector<Result> not_shown = check_run(small);
  small.record_steps = true;
  const std::vector<Result> shown = check_run(small);
  for (std::size_t i = 0; i < shown.size(); ++i) {
    EXPECT_EQ(not_shown[i].acceptance_lengths, shown[i].acceptance_lengths);
  }
  // Shorter blocks.
  EngineOptions brief = random.engine;
  brief.mode = random.recipe.seed % 2 == 0 ? Mode::kChain : Mode::kTree;
  brief.draft_length = 1 + static_cast<std::int64_t>(random.recipe.seed / 2) % horizon;
  check_run(brief);
}

TEST(LosslessRandomModels, DraftingNeverChangesTheOutput) {
  const int count = kConfigurations.at(static_cast<std::size_t>(std::min(world().size(), 4) - 1));
  Events events;
  for (int index = 0; index < count; ++index) {
    const RandomCase random = random_case(static_cast<std::uint64_t>(index) + 1, world().size());
    SCOPED_TRACE(testing::Message() << "case " << index << ": " << describe(random));
    check_case(random, events);
  }
  if (!world().is_root()) {
    return;
  }
  fmt::print(
      "{} configurations on {} ranks; token 0 {}, mask token {}, end inside a path: token {}, "
      "length {}, context {}; context reached {}, accepted draft tokens {}, off the chain {}\n",
      count, world().size(), events.token_zero, events.mask_token, events.eos_inside_path,
      events.length_inside_path, events.context_inside_path, events.context_reached,
      events.accepted_tokens, events.tree_beats_chain);
  EXPECT_GT(events.token_zero, 0);
  EXPECT_GT(events.mask_token, 0);
  EXPECT_GT(events.eos_inside_path, 0);
  EXPECT_GT(events.length_inside_path, 0);
  EXPECT_GT(events.context_inside_path, 0);
  EXPECT_GT(events.context_reached, 0);
  EXPECT_GT(events.accepted_tokens, 100);
  EXPECT_GT(events.tree_beats_chain, 0);
}

}  // namespace

}  // namespace kdtree
