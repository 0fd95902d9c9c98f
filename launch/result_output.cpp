#include "result_output.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <iostream>
#include <numeric>
#include <utility>

#include "core/build_info.h"
#include "core/check.h"

namespace kdtree {

namespace {

using Json = nlohmann::ordered_json;

double mean_acceptance_length(const Result& result) {
  const auto& lengths = result.acceptance_lengths;
  if (lengths.empty()) {
    return 0;
  }
  return static_cast<double>(std::accumulate(lengths.begin(), lengths.end(), std::int64_t{0})) /
         static_cast<double>(lengths.size());
}

// Share of the steps whose accepted path reached each depth, 1 to draft_horizon.
std::vector<double> per_depth_acceptance(const Result& result, std::int64_t draft_horizon) {
  std::vector<double> shares;
  const auto steps = static_cast<double>(result.acceptance_lengths.size());
  for (std::int64_t depth = 1; depth <= draft_horizon && steps > 0; ++depth) {
    const auto reached =
        std::count_if(result.acceptance_lengths.begin(), result.acceptance_lengths.end(),
                      [&](std::int32_t length) { return length > depth; });
    shares.push_back(static_cast<double>(reached) / steps);
  }
  return shares;
}

double tokens_per_second(const Result& result) {
  return result.metrics.total_ms > 0
             ? 1000 * static_cast<double>(result.output_ids.size()) / result.metrics.total_ms
             : 0;
}

Json pairs_json(const std::vector<TokenLogit>& pairs) {
  Json list = Json::array();
  for (const auto& [token, value] : pairs) {
    list.push_back(Json::array({token, value}));
  }
  return list;
}

Json step_json(const StepRecord& step) {
  Json draft = Json::array();
  for (const auto& slot : step.draft_top_log_probs) {
    draft.push_back(pairs_json(slot));
  }
  return {{"root", step.root},
          {"draft_top_log_probs", draft},
          {"token_ids", step.token_ids},
          {"depths", step.depths},
          {"parents", step.parents},
          {"accepted_nodes", step.accepted_nodes},
          {"bonus_token", step.bonus_token}};
}

// The value that this share of `samples` does not exceed (nearest rank); 0 without samples.
double percentile(std::vector<double> samples, double share) {
  if (samples.empty()) {
    return 0;
  }
  const auto rank =
      static_cast<std::ptrdiff_t>(std::ceil(share * static_cast<double>(samples.size()))) - 1;
  const auto place = samples.begin() + std::max<std::ptrdiff_t>(rank, 0);
  std::nth_element(samples.begin(), place, samples.end());
  return *place;
}

Json stage_times_json(const SequenceMetrics& metrics) {
  Json sums;
  Json medians;
  sums["prefill"] = metrics.prefill_ms;
  for (std::size_t stage = 0; stage < kNumStages; ++stage) {
    std::vector<double> times(metrics.steps.size());
    std::transform(metrics.steps.begin(), metrics.steps.end(), times.begin(),
                   [stage](const StageTimes& step) { return step[stage]; });
    const std::string name = stage_name(static_cast<Stage>(stage));
    sums[name] = std::accumulate(times.begin(), times.end(), 0.0);
    medians[name] = percentile(std::move(times), 0.5);
  }
  std::vector<double> steps(metrics.steps.size());
  std::transform(
      metrics.steps.begin(), metrics.steps.end(), steps.begin(),
      [](const StageTimes& step) { return std::accumulate(step.begin(), step.end(), 0.0); });
  return {{"stage_ms", sums},
          {"stage_p50_ms", medians},
          {"step_p50_ms", percentile(steps, 0.5)},
          {"step_p99_ms", percentile(steps, 0.99)}};
}

Json metrics_json(const Result& result, const RunFacts& facts) {
  Json json = {{"time_to_first_token_ms", result.metrics.time_to_first_token_ms},
               {"tokens_per_second", tokens_per_second(result)},
               {"total_ms", result.metrics.total_ms}};
  json.update(stage_times_json(result.metrics));
  json.update(Json{{"num_steps", result.acceptance_lengths.size()},
                   {"acceptance_length", mean_acceptance_length(result)},
                   {"per_depth_acceptance", per_depth_acceptance(result, facts.draft_horizon)},
                   {"mode", facts.mode},
                   {"batch_size", facts.batch_size},
                   {"tree_nodes", facts.tree_nodes}});
  json.update(facts_json(facts));
  return json;
}

}  // namespace

Json device_json(const DeviceFacts& device) {
  return {{"name", device.name},
          {"architecture", device.architecture},
          {"uuid", device.uuid},
          {"driver_cuda", device.driver_cuda},
          {"num_processors", device.num_processors},
          {"memory_bytes", device.memory_bytes},
          {"cache_bytes", device.cache_bytes}};
}

Json load_json(const LoadStatistics& load) {
  return {{"bytes_read", load.bytes_read},
          {"checksum_bytes", load.checksum_bytes},
          {"own_bytes", load.own_bytes},
          {"seconds", load.seconds},
          {"gb_per_s", load.gigabytes_per_second()}};
}

std::string model_name(const std::string& path) {
  const auto normal = std::filesystem::path(path).lexically_normal();
  return normal.has_filename() ? normal.filename().string()
                               : normal.parent_path().filename().string();
}

Json facts_json(const RunFacts& facts) {
  const BuildInfo& build = build_info();
  return {{"weights", facts.weights},
          {"dtype", facts.dtype},
          {"backend", facts.backend},
          {"communicator", facts.communicator},
          {"exchange", facts.exchange},
          {"world_size", facts.world_size},
          {"moe_ep", facts.grid.moe_ep(facts.world_size)},
          {"moe_tp", facts.grid.moe_tp},
          {"attention_tp", facts.grid.attention_tp(facts.world_size)},
          {"attention_dp", facts.grid.attention_dp},
          {"threads", facts.threads},
          {"host", facts.host},
          {"load", load_json(facts.load)},
          {"device", device_json(facts.device)},
          {"version", build.version},
          {"commit", build.commit},
          {"compiler", build.compiler}};
}

Json exchange_json(const ExchangeReport& report, const RunFacts& facts) {
  Json layers = Json::array();
  for (const ExchangeLayer& layer : report.layers) {
    Json ranks = Json::array();
    for (const ExchangeCount& count : layer.ranks) {
      ranks.push_back({{"expert_rows", count.expert_rows},
                       {"rows_computed", count.rows_computed},
                       {"rows_dispatched", count.rows_dispatched},
                       {"bytes_sent", count.bytes_sent},
                       {"experts_touched", count.experts_touched},
                       {"dispatch_us", count.dispatch_us},
                       {"compute_us", count.compute_us},
                       {"combine_us", count.combine_us}});
    }
    layers.push_back({{"layer", layer.layer},
                      {"load_max_over_mean", layer.load_max_over_mean},
                      {"waiting_share", layer.waiting_share},
                      {"ranks", std::move(ranks)}});
  }
  return {{"format", "kdtree-exchange"},
          {"version", 1},
          {"steps", report.num_steps},
          {"run", facts_json(facts)},
          {"layers", std::move(layers)}};
}

std::string load_text(const LoadStatistics& load) {
  return fmt::format("loaded {:.4f} GB (own share {:.4f} GB) in {:.2f} s, {:.2f} GB/s",
                     static_cast<double>(load.bytes_read) / 1e9,
                     static_cast<double>(load.own_bytes) / 1e9, load.seconds,
                     load.gigabytes_per_second());
}

Json result_json(const Result& result, const RunFacts& facts,
                 const std::optional<std::string>& text) {
  Json json = {{"index", result.index},
               {"prompt_ids", result.prompt_ids},
               {"output_ids", result.output_ids},
               {"acceptance_lengths", result.acceptance_lengths},
               {"near_ties", result.near_ties},
               {"near_tie_margins", result.near_tie_margins},
               {"stop_reason", stop_reason_name(result.stop_reason)}};
  if (text) {
    json["text"] = *text;
  }
  if (facts.with_top_logits) {
    json["top_logits"] = pairs_json(result.top_logits);
  }
  if (facts.with_steps) {
    Json steps = Json::array();
    for (const StepRecord& step : result.steps) {
      steps.push_back(step_json(step));
    }
    json["steps"] = steps;
  }
  json["metrics"] = metrics_json(result, facts);
  return json;
}

std::string statistics_text(const Result& result) {
  return fmt::format(
      "acceptance length {:.2f} over {} steps, {} near-ties, {:.1f} tokens/s, first token after "
      "{:.1f} ms",
      mean_acceptance_length(result), result.acceptance_lengths.size(), result.near_ties.size(),
      tokens_per_second(result), result.metrics.time_to_first_token_ms);
}

std::string result_text(const Result& result, const RunFacts& facts) {
  std::string text = fmt::format(
      "prompt {} ({} tokens): {}\n  -> {} tokens ({}): {}\n", result.index,
      result.prompt_ids.size(), fmt::join(result.prompt_ids, " "), result.output_ids.size(),
      stop_reason_name(result.stop_reason), fmt::join(result.output_ids, " "));
  if (facts.with_top_logits) {
    text += "  top logits:";
    for (const auto& [token, logit] : result.top_logits) {
      text += fmt::format(" {}:{:.5f}", token, logit);
    }
    text += "\n";
  }
  text += "  " + statistics_text(result) + "\n";
  return text;
}

void write_stdout(const std::string& text) {
  errno = 0;
  std::cout << text << std::flush;
  require_input(std::cout.good(), "cannot write to stdout: {}",
                errno == 0 ? "unknown cause" : std::strerror(errno));
}

}  // namespace kdtree
