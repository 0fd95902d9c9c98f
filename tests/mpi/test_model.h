// Opens and loads a model and runs the engine on it, in process on all ranks.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/engine.h"

namespace kdtree {

struct TestModelOptions {
  std::string target;        // a bundle or a directory
  std::string drafter = {};  // empty: the bundle's own, if it has one
  WeightsChoice weights = WeightsChoice::kAuto;
  ExchangeKind exchange = ExchangeKind::kAllReduce;
  bool round_to_bfloat16 = false;
  std::shared_ptr<const ExpertPlacement> placement = {};  // nullptr: linear
  ParallelGrid grid = {};
};

// Every call is collective.
class TestModel {
 public:
  explicit TestModel(const TestModelOptions& options);

  const ModelSource& source() const { return source_; }
  const ModelConfig& config() const { return source_.target.config; }
  const LoadedModel& loaded() const { return *loaded_; }
  LoadedModel& loaded() { return *loaded_; }

  // An engine for these requests: max_prompt, max_context (where it is 0), exchange, placement and
  // grid are filled in. The model outlives it.
  std::unique_ptr<Engine> make_engine(EngineOptions options,
                                      const std::vector<Request>& requests) const;
  // The results on rank 0, in the order of the requests; none on the others.
  std::vector<Result> generate(const EngineOptions& options,
                               const std::vector<Request>& requests) const;

 private:
  ModelSource source_;
  ExchangeKind exchange_;
  std::shared_ptr<const ExpertPlacement> placement_;
  RankGroups groups_;
  std::optional<LoadedModel> loaded_;
};

std::vector<Result> run_engine(Engine& engine, const std::vector<Request>& requests);

// For each prompt a request.
std::vector<Request> make_requests(const std::vector<std::vector<std::int32_t>>& prompts,
                                   std::int64_t max_new_tokens, bool ignore_eos = true);

// Files: of the CTest fixture (KDTREE_TEST_DATA) and below the project (KDTREE_SOURCE).
std::string generated_path(const std::string& name);
std::string source_path(const std::string& name);

std::string mode_name(Mode mode);

}  // namespace kdtree
