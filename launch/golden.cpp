#include "golden.h"

#include <algorithm>
#include <limits>

#include "core/check.h"
#include "core/log.h"

namespace kdtree {

namespace {

std::vector<std::int32_t> id_list(const nlohmann::json& golden_case, const char* key,
                                  const std::string& origin) {
  const auto entry = golden_case.find(key);
  require_input(entry != golden_case.end() && entry->is_array() && !entry->empty() &&
                    std::all_of(entry->begin(), entry->end(),
                                [](const auto& id) {
                                  return id.is_number_integer() && id >= 0 &&
                                         id <= std::numeric_limits<std::int32_t>::max();
                                }),
                "{}: a golden case has no list of token ids under {}", origin, key);
  return entry->get<std::vector<std::int32_t>>();
}

}  // namespace

GoldenCases read_golden(const TargetCheckpoint& target, const std::string& weights) {
  const nlohmann::json& goldens = target.goldens;
  require_input(goldens.is_object() && goldens.contains(weights) && goldens[weights].is_object() &&
                    goldens[weights].contains("cases") && goldens[weights]["cases"].is_array() &&
                    !goldens[weights]["cases"].empty(),
                "--verify-golden: {} holds no golden outputs for its {} weights", target.origin,
                weights);
  GoldenCases golden{.weights = weights, .cases = {}};
  for (const nlohmann::json& golden_case : goldens[weights]["cases"]) {
    require_input(golden_case.is_object(), "{}: a golden case is not an object", target.origin);
    golden.cases.push_back({.prompt_ids = id_list(golden_case, "prompt_ids", target.origin),
                            .greedy_ids = id_list(golden_case, "greedy_ids", target.origin)});
  }
  return golden;
}

void GoldenReport::compare(const GoldenCases& golden, const Result& result) {
  const std::vector<std::int32_t>& expected =
      golden.cases.at(static_cast<std::size_t>(result.index)).greedy_ids;
  const std::vector<std::int32_t>& actual = result.output_ids;
  tokens_ += static_cast<std::int64_t>(actual.size());
  if (expected == actual) {
    return;
  }
  ++mismatches_;
  const auto [at, other] =
      std::mismatch(expected.begin(), expected.end(), actual.begin(), actual.end());
  spdlog::error("golden prompt {}: output token {} is {}, expected {}", result.index,
                at - expected.begin(), other == actual.end() ? -1 : *other,
                at == expected.end() ? -1 : *at);
}

void GoldenReport::log(const GoldenCases& golden) const {
  if (mismatches_ == 0) {
    spdlog::info("golden outputs ({} weights): all {} prompts, {} tokens equal", golden.weights,
                 golden.cases.size(), tokens_);
  } else {
    spdlog::error("golden outputs ({} weights): {} of {} prompts differ", golden.weights,
                  mismatches_, golden.cases.size());
  }
}

}  // namespace kdtree
