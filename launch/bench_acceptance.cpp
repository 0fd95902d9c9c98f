// kdtree bench acceptance: the same prompts in every mode, what each step accepts, how many experts
// its tree touches, and how quick that is beside plain decoding.
#include <fmt/ranges.h>

#include <algorithm>
#include <chrono>
#include <iostream>
#include <numeric>

#include "commands.h"
#include "core/check.h"
#include "job.h"
#include "line_output.h"
#include "study/acceptance_statistics.h"

namespace kdtree {

namespace {

using Json = nlohmann::ordered_json;

// Tokens that are decoded before the clock starts: memory is touched, and steps are recorded where
// a device replays them.
constexpr std::int64_t kWarmUpTokens = 8;

struct Cell {
  std::string mode;
  std::int64_t tree_budget = 0;  // of mode tree

  EngineOptions engine_options(const EngineOptions& shared) const {
    EngineOptions options = shared;
    options.mode = mode == "plain" ? Mode::kPlain : mode == "chain" ? Mode::kChain : Mode::kTree;
    if (options.mode == Mode::kTree) {
      options.tree_budget = tree_budget;
    }
    return options;
  }
};

// Plain comes first: the others are compared with it.
std::vector<Cell> cells_of(const BenchAcceptanceOptions& options) {
  const auto asked = [&](const char* mode) {
    return std::find(options.modes.begin(), options.modes.end(), mode) != options.modes.end();
  };
  std::vector<Cell> cells;
  for (const char* mode : {"plain", "chain"}) {
    if (asked(mode)) {
      cells.push_back({.mode = mode, .tree_budget = 0});
    }
  }
  for (std::size_t i = 0; asked("tree") && i < options.budgets.size(); ++i) {
    cells.push_back({.mode = "tree", .tree_budget = options.budgets[i]});
  }
  return cells;
}

// What one cell gave; on rank 0.
struct Measurement {
  AcceptanceSummary summary;
  std::vector<Result> results;
  double seconds = 0;          // of all prompts
  double prefill_seconds = 0;  // of these
  std::int64_t num_tokens = 0;

  double tokens_per_second() const { return static_cast<double>(num_tokens) / seconds; }
  // Of the tokens behind the first ones, in the time outside the prefills.
  double decode_tokens_per_second() const {
    const std::int64_t decoded = num_tokens - std::ssize(results);
    return decoded == 0 ? 0 : static_cast<double>(decoded) / (seconds - prefill_seconds);
  }
  double tokens_per_step() const {
    return summary.num_steps == 0 ? 0
                                  : static_cast<double>(num_tokens - std::ssize(results)) /
                                        static_cast<double>(summary.num_steps);
  }
};

AcceptanceSizes counter_sizes(const Job& job, const Cell& cell) {
  const ModelConfig& model = job.source.target.config;
  return {.draft_horizon = cell.mode == "plain" ? 0 : job.source.drafter->config.draft_horizon(),
          .n_routed_experts = model.n_routed_experts,
          .num_experts_per_tok = model.num_experts_per_tok};
}

// Collective.
Measurement measure(const Job& job, const LoadedJob& loaded, const Cell& cell,
                    ProcessGroup& group) {
  using Clock = std::chrono::steady_clock;
  std::optional<Engine> engine;
  run_together(group, [&] {
    engine.emplace(*loaded.model, cell.engine_options(job.engine), *loaded.backend, *loaded.groups,
                   group);
  });
  std::vector<Request> first(job.requests.begin(),
                             job.requests.begin() + (job.requests.empty() ? 0 : 1));
  for (Request& request : first) {
    request.max_new_tokens = std::min(request.max_new_tokens, kWarmUpTokens);
  }
  engine->generate(first, [](const Result&) {});

  Measurement measured;
  AcceptanceCounter counter(counter_sizes(job, cell));
  const Clock::time_point start = Clock::now();
  engine->generate(
      job.requests,
      [&](Result result) {
        measured.num_tokens += std::ssize(result.output_ids);
        measured.prefill_seconds += result.metrics.prefill_ms / 1000;
        measured.results.push_back(std::move(result));
      },
      {}, [&](const StepView& step) { counter.add(step); });
  measured.seconds = std::chrono::duration<double>(Clock::now() - start).count();
  measured.summary = counter.summary();
  return measured;
}

// Means over the steps of all sequences; the sequences of a batch share a step's times.
Json stage_means_json(const std::vector<Result>& results) {
  StageTimes sums{};
  std::int64_t num_steps = 0;
  for (const Result& result : results) {
    for (const StageTimes& step : result.metrics.steps) {
      std::transform(sums.begin(), sums.end(), step.begin(), sums.begin(), std::plus<>());
      ++num_steps;
    }
  }
  Json means;
  for (std::size_t stage = 0; stage < kNumStages; ++stage) {
    means[stage_name(static_cast<Stage>(stage))] =
        num_steps == 0 ? 0 : sums[stage] / static_cast<double>(num_steps);
  }
  return means;
}

Json experts_json(const AcceptanceSummary& summary, const ModelConfig& model) {
  Json layers = Json::array();
  std::size_t index = 0;
  for (std::int64_t layer = 0; layer < model.num_hidden_layers; ++layer) {
    if (model.is_moe_layer(layer) && index < summary.experts.size()) {
      const ExpertSpread& spread = summary.experts[index++];
      layers.push_back(
          {{"layer", layer}, {"mean", spread.mean}, {"min", spread.min}, {"max", spread.max}});
    }
  }
  return {{"n_routed_experts", model.n_routed_experts},
          {"num_experts_per_tok", model.num_experts_per_tok},
          {"mean", summary.mean_experts},
          {"expected_uniform", summary.expected_experts},
          {"over_one_row", summary.experts_over_one_row},
          {"layers", layers}};
}

Json depths_json(const AcceptanceSummary& summary) {
  Json given_parent = Json::array();
  for (const std::optional<double>& share : summary.per_depth_given_parent) {
    given_parent.push_back(share ? Json(*share) : Json(nullptr));
  }
  return {{"acceptance_length", summary.acceptance_length},
          {"per_depth_acceptance", summary.per_depth},
          {"per_depth_given_parent", given_parent},
          {"nodes_by_branch_rank", summary.nodes_by_branch_rank},
          {"accepted_by_branch_rank", summary.accepted_by_branch_rank}};
}

// Keys that compare with plain decoding are null where it was not measured.
Json comparison_json(const Measurement& measured, const Measurement* plain) {
  if (plain == nullptr) {
    return {{"ratio_to_plain", nullptr},
            {"decode_ratio_to_plain", nullptr},
            {"identical_output", nullptr},
            {"num_different", nullptr},
            {"num_different_at_near_ties", nullptr}};
  }
  const OutputDifference difference = compare_outputs(measured.results, plain->results);
  const double decode = plain->decode_tokens_per_second();
  return {{"ratio_to_plain", measured.tokens_per_second() / plain->tokens_per_second()},
          {"decode_ratio_to_plain",
           decode > 0 ? Json(measured.decode_tokens_per_second() / decode) : Json(nullptr)},
          {"identical_output", difference.num_different == 0},
          {"num_different", difference.num_different},
          {"num_different_at_near_ties", difference.num_at_near_ties}};
}

Json cell_json(const Cell& cell, const Measurement& measured, const Measurement* plain,
               const ModelConfig& model) {
  const AcceptanceSummary& summary = measured.summary;
  Json line = {{"mode", cell.mode},
               {"tree_budget", cell.mode == "tree" ? Json(cell.tree_budget) : Json(nullptr)}};
  line.update(depths_json(summary));
  line.update(Json{{"nodes_per_step", summary.nodes_per_step},
                   {"num_prompts", measured.results.size()},
                   {"num_steps", summary.num_steps},
                   {"num_tokens", measured.num_tokens},
                   {"tokens_per_step", measured.tokens_per_step()},
                   {"seconds", measured.seconds},
                   {"prefill_seconds", measured.prefill_seconds},
                   {"tokens_per_second", measured.tokens_per_second()},
                   {"decode_tokens_per_second", measured.decode_tokens_per_second()}});
  line.update(comparison_json(measured, plain));
  const auto near_ties = std::accumulate(
      measured.results.begin(), measured.results.end(), std::int64_t{0},
      [](std::int64_t sum, const Result& result) { return sum + std::ssize(result.near_ties); });
  line.update(Json{{"near_ties", near_ties},
                   {"stage_mean_ms", stage_means_json(measured.results)},
                   {"experts", experts_json(summary, model)}});
  return line;
}

void print_acceptance_header() {
  std::cerr << fmt::format(
      "{:<6} {:>6} {:>7} {:>6} {:>6} {:>7} {:>8} {:>8} {:>6} {:>5} {:>8} "
      "{:>8} {:>6}  {}\n",
      "mode", "budget", "accept", "nodes", "steps", "tokens", "tok/step", "tok/s", "ratio", "same",
      "experts", "uniform", "x row", "accepted at depth 1, 2, ...");
}

// `ratio` and `same` are against plain decoding, `uniform` is what independent rows would touch.
void print_acceptance_row(const Json& line) {
  const Json& ratio = line["ratio_to_plain"];
  const Json& same = line["identical_output"];
  const Json& budget = line["tree_budget"];
  const Json& experts = line["experts"];
  std::cerr << fmt::format(
      "{:<6} {:>6} {:>7.3f} {:>6.1f} {:>6} {:>7} {:>8.3f} {:>8.1f} {:>6} {:>5} {:>8.2f} {:>8.2f} "
      "{:>6.2f}  {:.3f}\n",
      line["mode"].get<std::string>(), budget.is_null() ? "-" : budget.dump(),
      line["acceptance_length"].get<double>(), line["nodes_per_step"].get<double>(),
      line["num_steps"].get<std::int64_t>(), line["num_tokens"].get<std::int64_t>(),
      line["tokens_per_step"].get<double>(), line["tokens_per_second"].get<double>(),
      ratio.is_null() ? "-" : fmt::format("{:.2f}", ratio.get<double>()),
      same.is_null()     ? "-"
      : same.get<bool>() ? "yes"
                         : "no",
      experts["mean"].get<double>(), experts["expected_uniform"].get<double>(),
      experts["over_one_row"].get<double>(),
      fmt::join(line["per_depth_acceptance"].get<std::vector<double>>(), " "));
}

// The plan, which the load is checked against, is that of the largest cell.
void size_for_all(const std::vector<Cell>& cells, Job& job) {
  const EngineOptions shared = job.engine;
  std::int64_t most_nodes = 0;
  for (const Cell& cell : cells) {
    const EngineOptions options = cell.engine_options(shared);
    const std::int64_t nodes = step_sizes(job.source, options).max_nodes;
    if (nodes > most_nodes) {
      most_nodes = nodes;
      job.engine = options;
      job.mode = cell.mode;
    }
  }
}

}  // namespace

int run_bench_acceptance(const BenchAcceptanceOptions& options, ProcessGroup& group) {
  const std::vector<Cell> cells = cells_of(options);
  Job job = agree_on_job(
      options.run, fmt::format(" modes {} budgets {}", options.modes_text, options.budgets_text),
      [&](Job& planned) { return read_requests(options.run, planned); }, group);
  job.engine.record_experts = true;
  size_for_all(cells, job);
  std::optional<LineOutput> output = open_on_rank0(options.output, group);
  const LoadedJob loaded = load_job(options.run, job, group);
  const RunFacts facts = job_facts(job, loaded, group);
  log_facts(facts);
  if (output) {
    print_acceptance_header();
  }
  std::optional<Measurement> plain;
  for (const Cell& cell : cells) {
    Measurement measured = measure(job, loaded, cell, group);
    if (cell.mode == "plain") {
      plain = measured;
    }
    run_together(group, [&] {
      if (output) {
        Json line = cell_json(cell, measured, plain ? &*plain : nullptr, job.source.target.config);
        line.update(Json{{"max_new_tokens", options.run.max_new_tokens},
                         {"batch_size", job.engine.batch_size},
                         {"model", model_name(options.run.model)}});
        line.update(facts_json(facts));
        output->write(line);
        print_acceptance_row(line);
      }
    });
  }
  return 0;
}

}  // namespace kdtree
