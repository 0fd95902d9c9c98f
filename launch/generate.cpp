// kdtree generate: prompts in, tokens out.
#include <algorithm>
#include <optional>
#include <string>

#include "commands.h"
#include "core/log.h"
#include "job.h"
#include "placement/placement_file.h"
#include "placement/policies.h"

namespace kdtree {

namespace {

// Decodes the requests; rank 0 shows what comes, and compares it with goldens: the number of
// requests that differ, 0 on other ranks.
std::int64_t decode(const Job& job, const RunFacts& facts, bool json, Engine& engine) {
  GoldenReport report;
  std::optional<TextStream> stream;
  if (job.text && !json && job.requests.size() == 1) {
    stream.emplace(*job.text, job.source.target.config.eos_token_ids);
  }
  const auto show = [&](const Result& result) {
    std::optional<std::string> text;
    if (job.text && !stream) {  // else it was written as it came
      text = job.text->decode(result.output_ids, job.source.target.config.eos_token_ids);
    }
    if (json) {
      write_stdout(result_json(result, facts, text).dump() + "\n");
    } else if (job.text) {
      write_stdout(stream ? "\n" : fmt::format("prompt {}: {}\n", result.index, *text));
      spdlog::info("prompt {}: {} tokens ({}), {}", result.index, result.output_ids.size(),
                   stop_reason_name(result.stop_reason), statistics_text(result));
    } else {
      write_stdout(result_text(result, facts));
    }
    if (job.golden) {
      report.compare(*job.golden, result);
    }
  };
  engine.generate(job.requests, show, [&](const TokenUpdate& update) {
    if (stream) {
      write_stdout(stream->push(update));
    }
  });
  if (job.golden && !job.requests.empty()) {  // on rank 0
    report.log(*job.golden);
  }
  return report.mismatches();
}

// "the most loaded rank computed 1.31 times the mean of all ranks": on average over layers.
void log_imbalance(const ExpertLoads& loads, const ExpertPlacement& placement) {
  double sum = 0;
  std::int64_t layers = 0;
  for (std::size_t layer = 0; layer < loads.layers.size(); ++layer) {
    if (!loads.layers[layer].empty()) {
      sum += imbalance(placement.layer(static_cast<std::int64_t>(layer)), loads.layers[layer]);
      ++layers;
    }
  }
  spdlog::info(
      "experts: the most loaded rank has {:.3f} times the mean load, on average over {} "
      "layers",
      sum / static_cast<double>(layers), layers);
}

// Collective: writes the files about experts that were asked for.
void write_expert_files(const Job& job, const LoadedModel& model, Engine& engine,
                        ProcessGroup& group) {
  run_together(group, [&] {
    const ModelConfig& config = job.source.target.config;
    if (group.rank() == 0 && job.load_file->wanted()) {
      const ExpertLoads loads = engine.expert_loads();
      log_imbalance(loads, model.placement());
      job.load_file->write(to_json(loads, config));
    }
    if (group.rank() == 0 && job.placement_file->wanted()) {
      job.placement_file->write(to_json(model.placement(), config));
    }
  });
}

// A few words on all layers together, for people.
void log_exchanges(const ExchangeReport& report, const std::string& exchange) {
  double us = 0;
  double rows = 0;
  double bytes = 0;
  double waiting = 0;
  for (const ExchangeLayer& layer : report.layers) {
    waiting += layer.waiting_share / static_cast<double>(report.layers.size());
    for (const ExchangeCount& count : layer.ranks) {
      us += (count.dispatch_us + count.combine_us) / static_cast<double>(layer.ranks.size());
      rows += static_cast<double>(count.rows_dispatched);
      bytes += static_cast<double>(count.bytes_sent);
    }
  }
  const auto steps = static_cast<double>(std::max<std::int64_t>(report.num_steps, 1));
  spdlog::info(
      "exchange {}, a step: {:.1f} us in exchange on a rank, {:.1f} rows dispatched and {:.1f} kB "
      "sent by all ranks, {:.1f} % of the time of layers with experts waited for the most loaded "
      "rank",
      exchange, us / steps, rows / steps, bytes / steps / 1000, 100 * waiting);
}

// Collective: writes what was counted of the exchanges, if it was asked for.
void write_exchange_file(const Job& job, const RunFacts& facts, Engine& engine,
                         ProcessGroup& group) {
  if (!job.engine.count_exchanges) {
    return;
  }
  const ExchangeReport report = engine.exchange_report();
  run_together(group, [&] {
    if (group.rank() == 0) {
      log_exchanges(report, facts.exchange);
      job.exchange_file->write(exchange_json(report, facts));
    }
  });
}

}  // namespace

int run_generate(const RunConfig& config, ProcessGroup& group) {
  Job job = agree_on_job(
      config, "", [&](Job& read) { return read_requests(config, read); }, group);
  LoadedJob loaded = load_job(config, job, group);
  std::optional<Engine> engine;
  run_together(group, [&] {
    engine.emplace(*loaded.model, job.engine, *loaded.backend, *loaded.groups, group);
  });
  if (config.rebalance_every > 0) {
    engine->rebalance_every(config.rebalance_every, *loaded.model);
  }
  const RunFacts facts = job_facts(job, loaded, group);
  log_facts(facts);
  std::int64_t mismatches = decode(job, facts, config.output_format == "json", *engine);
  write_expert_files(job, *loaded.model, *engine, group);
  write_exchange_file(job, facts, *engine, group);
  // Every rank ends with the same exit code.
  group.broadcast(&mismatches, sizeof mismatches, 0);
  return mismatches == 0 ? 0 : 1;
}

}  // namespace kdtree
