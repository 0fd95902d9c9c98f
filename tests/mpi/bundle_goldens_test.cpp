// The outputs of the numpy oracle that the generated bundles carry: the same tokens whatever the
// number of ranks, the exchange, the mode, the budget and the batch.
#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "tests/mpi/test_model.h"
#include "tests/mpi/world.h"

namespace kdtree {

namespace {

using Ids = std::vector<std::int32_t>;

struct BundleParam {
  std::string bundle;
  std::string weights;  // "original" or "quantized", the key of the goldens
  ExchangeKind exchange = ExchangeKind::kAllReduce;
};

void PrintTo(const BundleParam& param, std::ostream* out) {
  *out << param.bundle << " " << param.weights << " " << exchange_name(param.exchange);
}

class BundleGoldens : public testing::TestWithParam<BundleParam> {};

// The oracle's loop may run one more step after the limit is reached by the pending root token.
void expect_acceptance(const Ids& actual, const nlohmann::json& golden) {
  auto expected = golden.at("acceptance_lengths").get<Ids>();
  if (actual.size() + 1 == expected.size()) {
    expected.pop_back();
  }
  EXPECT_EQ(actual, expected);
}

void compare(const std::vector<Result>& results, const nlohmann::json& cases,
             const EngineOptions& options, std::size_t max_new_tokens) {
  for (std::size_t i = 0; i < results.size(); ++i) {
    SCOPED_TRACE(testing::Message() << "case " << i);
    const nlohmann::json& golden = cases.at(i);
    Ids expected = golden.at("greedy_ids");
    expected.resize(std::min(expected.size(), max_new_tokens));
    EXPECT_EQ(results[i].output_ids, expected);
    if (options.mode == Mode::kPlain) {
      EXPECT_EQ(results[i].acceptance_lengths, Ids(expected.size() - 1, 1));
      continue;
    }
    const std::string budget = std::to_string(options.tree_budget);
    const nlohmann::json known =
        options.mode == Mode::kChain ? golden.value("chain", nlohmann::json())
        : golden.contains("tree")    ? golden["tree"].value(budget, nlohmann::json())
                                     : nlohmann::json();
    if (!known.is_null()) {
      EXPECT_EQ(results[i].output_ids, known.at("output_ids").get<Ids>());
      expect_acceptance(results[i].acceptance_lengths, known);
    }
  }
}

TEST_P(BundleGoldens, TokensAndAcceptanceAreThoseOfTheOracle) {
  const BundleParam& param = GetParam();
  const TestModel model({.target = generated_path(param.bundle),
                         .weights = param.weights == "original" ? WeightsChoice::kOriginal
                                                                : WeightsChoice::kQuantized,
                         .exchange = param.exchange});
  const nlohmann::json& cases = model.source().target.goldens.at(param.weights).at("cases");
  std::vector<Ids> prompts;
  for (const nlohmann::json& golden : cases) {
    prompts.push_back(golden.at("prompt_ids"));
  }
  const auto length = static_cast<std::int64_t>(cases.at(0).at("greedy_ids").size());
  std::vector<EngineOptions> runs = {{.mode = Mode::kPlain}, {.mode = Mode::kChain}};
  for (const std::int64_t budget : {1, 7, 16, 64, 128}) {
    runs.push_back({.mode = Mode::kTree, .tree_budget = budget});
  }
  for (std::size_t run = 0; run < runs.size(); ++run) {
    EngineOptions options = runs[run];
    // Each run has one batch size with one exchange and the other with the other.
    options.batch_size = (run % 2 == 0) == (param.exchange == ExchangeKind::kAllReduce) ? 1 : 3;
    // Trees of two mask words are slow on a CPU and need no long texts.
    const std::int64_t tokens = options.tree_budget > 64 ? 12 : length;
    SCOPED_TRACE(testing::Message() << mode_name(options.mode) << " budget " << options.tree_budget
                                    << " batch " << options.batch_size);
    compare(model.generate(options, make_requests(prompts, tokens)), cases, options,
            static_cast<std::size_t>(tokens));
  }
}

std::vector<BundleParam> all_bundles() {
  std::vector<BundleParam> params;
  for (const ExchangeKind exchange : kExchangeKinds) {
    params.push_back({"model_tiny.kdtr", "original", exchange});
    if (exchange == ExchangeKind::kAllGather) {
      continue;  // the sums of allreduce, by other messages
    }
    for (const char* bundle : {"model_int4_tiny.kdtr", "model_int4_tiny2.kdtr"}) {
      for (const char* weights : {"original", "quantized"}) {
        params.push_back({bundle, weights, exchange});
      }
    }
  }
  return params;
}

INSTANTIATE_TEST_SUITE_P(Bundles, BundleGoldens, testing::ValuesIn(all_bundles()));

}  // namespace

}  // namespace kdtree
