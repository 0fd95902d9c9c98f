#include "tests/mpi/test_model.h"

#include <algorithm>
#include <cstdlib>

#include "core/check.h"
#include "tests/mpi/world.h"

namespace kdtree {

namespace {

std::string below_variable(const char* variable, const std::string& name) {
  const char* folder = std::getenv(variable);
  require_input(folder != nullptr, "{} is not set: run the tests through ctest", variable);
  return std::string(folder) + "/" + name;
}

}  // namespace

TestModel::TestModel(const TestModelOptions& options)
    : exchange_(options.exchange),
      placement_(options.placement),
      groups_(world().communicator, options.grid) {
  run_together(world().group, [&] {
    source_.target = open_target(options.target);
    if (!options.drafter.empty()) {
      source_.drafter = open_drafter(options.drafter);
    } else if (holds_drafter(options.target)) {
      source_.drafter = open_drafter(options.target);
    }
    if (source_.drafter) {
      check_drafter_fits(source_.drafter->config, source_.target.config, source_.drafter->origin);
    }
    LoadOptions load;
    load.weights = options.weights;
    load.round_to_bfloat16 = options.round_to_bfloat16;
    const EngineOptions engine{.mode = source_.drafter ? Mode::kTree : Mode::kPlain,
                               .max_context = 2,
                               .exchange = options.exchange,
                               .grid = options.grid,
                               .placement = options.placement};
    loaded_.emplace(source_, engine, load, world().group, world().backend);
  });
}

std::unique_ptr<Engine> TestModel::make_engine(EngineOptions options,
                                               const std::vector<Request>& requests) const {
  std::int64_t longest = 2;
  for (const Request& request : requests) {
    const auto length = static_cast<std::int64_t>(request.prompt_ids.size());
    options.max_prompt = std::max(options.max_prompt, length);
    longest = std::max(longest, length + request.max_new_tokens);
  }
  options.max_context = options.max_context > 0 ? options.max_context : longest;
  options.exchange = exchange_;
  options.placement = placement_;
  options.grid = groups_.grid();
  std::unique_ptr<Engine> engine;
  run_together(world().group, [&] {
    engine = std::make_unique<Engine>(*loaded_, options, world().backend, groups_, world().group);
  });
  return engine;
}

std::vector<Result> TestModel::generate(const EngineOptions& options,
                                        const std::vector<Request>& requests) const {
  return run_engine(*make_engine(options, requests), requests);
}

std::vector<Result> run_engine(Engine& engine, const std::vector<Request>& requests) {
  std::vector<Result> results;
  engine.generate(requests, [&results](Result result) { results.push_back(std::move(result)); });
  check(results.size() == (world().is_root() ? requests.size() : 0), "{} results for {} requests",
        results.size(), requests.size());
  for (std::size_t i = 0; i < results.size(); ++i) {
    check(results[i].index == static_cast<std::int64_t>(i), "result {} comes as number {}",
          results[i].index, i);
  }
  return results;
}

std::vector<Request> make_requests(const std::vector<std::vector<std::int32_t>>& prompts,
                                   std::int64_t max_new_tokens, bool ignore_eos) {
  std::vector<Request> requests;
  requests.reserve(prompts.size());
  for (const std::vector<std::int32_t>& prompt : prompts) {
    requests.push_back(
        {.prompt_ids = prompt, .max_new_tokens = max_new_tokens, .ignore_eos = ignore_eos});
  }
  return requests;
}

std::string generated_path(const std::string& name) {
  return below_variable("KDTREE_TEST_DATA", name);
}

std::string source_path(const std::string& name) {
  return below_variable("KDTREE_SOURCE", name);
}

std::string mode_name(Mode mode) {
  return mode == Mode::kPlain ? "plain" : mode == Mode::kChain ? "chain" : "tree";
}

}  // namespace kdtree
