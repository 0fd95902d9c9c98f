// What an observer of steps is told: the trees, the paths and the experts of their rows.
#include <gtest/gtest.h>

#include <map>

#include "tests/mpi/random_case.h"
#include "tests/mpi/shared_bundle.h"
#include "tests/mpi/test_model.h"
#include "tests/mpi/world.h"

namespace kdtree {

namespace {

// A processed token of a sequence and the experts that it chose, MoE layer by MoE layer.
struct Processed {
  std::int32_t token = 0;
  std::vector<std::vector<std::int32_t>> experts;

  bool operator==(const Processed&) const = default;
};

struct Observed {
  std::vector<Result> results;
  // By request: the committed tokens of all steps in order. On rank 0.
  std::map<std::int64_t, std::vector<Processed>> sequences;
};

void append_path(const StepView& step, std::vector<Processed>& sequence) {
  for (const std::int32_t node : step.accepted.nodes) {
    Processed processed{.token = step.tree.token_ids[static_cast<std::size_t>(node)],
                        .experts = {}};
    for (std::int64_t layer = 0; layer < step.experts.num_layers(); ++layer) {
      const auto chosen = step.experts.of(layer, node);
      processed.experts.emplace_back(chosen.begin(), chosen.end());
    }
    sequence.push_back(std::move(processed));
  }
}

Observed observe(const TestModel& model, const EngineOptions& options,
                 const std::vector<Request>& requests) {
  Observed observed;
  const std::unique_ptr<Engine> engine = model.make_engine(options, requests);
  std::map<std::int64_t, std::vector<std::int32_t>> lengths;
  engine->generate(
      requests, [&](Result result) { observed.results.push_back(std::move(result)); }, {},
      [&](const StepView& step) {
        append_path(step, observed.sequences[step.request_index]);
        lengths[step.request_index].push_back(
            static_cast<std::int32_t>(step.accepted.nodes.size()));
        EXPECT_LE(step.tree.num_nodes(),
                  options.mode == Mode::kTree ? 1 + options.tree_budget : 64);
      });
  // The steps that are told are those that count.
  for (const Result& result : observed.results) {
    EXPECT_EQ(lengths[result.index], result.acceptance_lengths);
  }
  return observed;
}

// A token's experts do not depend on the tree that it stood in, nor on the other sequences: what
// speculative steps committed is what plain steps did, as far as both went.
void expect_same_tokens(const Observed& plain, const Observed& other) {
  ASSERT_EQ(plain.results.size(), other.results.size());
  for (const auto& [index, sequence] : plain.sequences) {
    const auto found = other.sequences.find(index);
    ASSERT_NE(found, other.sequences.end()) << index;
    const std::size_t common = std::min(sequence.size(), found->second.size());
    ASSERT_GT(common, 0U) << index;
    for (std::size_t i = 0; i < common; ++i) {
      EXPECT_TRUE(sequence[i] == found->second[i]) << "request " << index << ", token " << i;
    }
  }
}

TEST(Observation, ExpertsOfATokenAreThoseOfPlainDecoding) {
  std::int64_t num_compared = 0;
  for (std::uint64_t seed = 1200; seed < 1206; ++seed) {
    const RandomCase random = random_case(seed, world().size());
    const SharedBundle bundle(random.recipe);
    const TestModel model({.target = bundle.path(), .exchange = random.engine.exchange});
    const std::int64_t num_layers = model.config().num_moe_layers();
    EngineOptions options{
        .mode = Mode::kPlain, .tree_budget = random.engine.tree_budget, .record_experts = true};
    const Observed plain = observe(model, options, random.requests);
    for (const auto& [index, sequence] : plain.sequences) {
      for (const Processed& processed : sequence) {
        EXPECT_EQ(std::ssize(processed.experts), num_layers);
        for (const auto& chosen : processed.experts) {
          EXPECT_EQ(std::ssize(chosen), model.config().num_experts_per_tok);
          ++num_compared;
        }
      }
    }
    if (!model.source().drafter) {
      continue;
    }
    for (const Mode mode : {Mode::kChain, Mode::kTree}) {
      for (const std::int64_t batch_size : {1, 3}) {
        SCOPED_TRACE(testing::Message()
                     << describe(random) << " " << mode_name(mode) << " batch " << batch_size);
        options.mode = mode;
        options.batch_size = batch_size;
        expect_same_tokens(plain, observe(model, options, random.requests));
      }
    }
  }
  EXPECT_TRUE(!world().is_root() || num_compared > 0) << "no case had a MoE layer";
}

TEST(Observation, RecordingChangesNoResult) {
  for (const std::uint64_t seed : {1220, 1221, 1222}) {
    const RandomCase random = random_case(seed, world().size());
    const SharedBundle bundle(random.recipe);
    const TestModel model({.target = bundle.path(), .exchange = random.engine.exchange});
    EngineOptions options{.mode = model.source().drafter ? Mode::kTree : Mode::kPlain,
                          .tree_budget = random.engine.tree_budget,
                          .batch_size = 2,
                          .max_top_logits = 3};
    const std::vector<Result> without = model.generate(options, random.requests);
    options.record_experts = true;
    options.steps_ahead = 1;
    const std::vector<Result> with = model.generate(options, random.requests);
    ASSERT_EQ(with.size(), without.size());
    for (std::size_t i = 0; i < with.size(); ++i) {
      EXPECT_EQ(with[i].output_ids, without[i].output_ids);
      EXPECT_EQ(with[i].acceptance_lengths, without[i].acceptance_lengths);
      EXPECT_EQ(with[i].top_logits, without[i].top_logits);
    }
  }
}

}  // namespace

}  // namespace kdtree
