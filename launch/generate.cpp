// kdtree generate: prompts in, tokens out.
#include <fmt/ranges.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <string>

#include "commands.h"
#include "core/check.h"
#include "core/log.h"
#include "engine/engine.h"
#include "engine/memory_plan.h"
#include "golden.h"
#include "model/rope.h"
#include "ranks.h"
#include "result_output.h"
#include "text_output.h"
#include "weights/container.h"
#include "weights/random_checkpoint.h"

namespace kdtree {

namespace {

// A run, worked out from flags and files; equal on every rank but for the prompts, which rank 0
// alone needs.
struct Job {
  ModelSource source;
  EngineOptions engine;
  LoadOptions load;
  std::vector<Request> requests;
  std::optional<GoldenCases> golden;
  std::optional<TextModel> text;  // rank 0, where prompts or outputs are text
  std::string mode;
  std::string weights;
};

// The model's files beside its tensors. A config alone, for random weights, has none.
ModelFileFinder files_of(const RunConfig& config) {
  if (config.weights == "random" && !is_directory(config.model)) {
    return [](const std::string&) { return std::nullopt; };
  }
  return model_files(config.model);
}

ModelSource open_source(const RunConfig& config, const ShardOf& reader) {
  const bool random = config.weights == "random";
  const auto seed = static_cast<std::uint64_t>(config.weights_seed);
  ModelSource source{
      .target = random ? random_target(config.model, seed) : open_target(config.model, reader),
      .drafter = std::nullopt};
  if (config.mode == "plain") {
    require_input(config.draft_rope_amplitude == "auto",
                  "--draft-rope-amplitude {}: --mode plain has no drafter",
                  config.draft_rope_amplitude);
    return source;
  }
  if (!config.draft.empty()) {
    source.drafter =
        random ? random_drafter(config.draft, seed) : open_drafter(config.draft, reader);
  } else if (!random && holds_drafter(config.model)) {
    source.drafter = open_drafter(config.model, reader);
  }
  require_input(source.drafter || config.mode == "auto",
                "--mode {} needs a drafter, and {} holds none: give --draft, or --mode plain",
                config.mode, config.model);
  if (source.drafter) {
    check_drafter_fits(source.drafter->config, source.target.config, source.drafter->origin);
    require_input(source.drafter->config.draft_horizon() >= 1,
                  "{}: block_size {} leaves nothing to draft", source.drafter->origin,
                  source.drafter->config.block_size);
  }
  if (config.draft_rope_amplitude != "auto") {
    require_input(source.drafter.has_value(),
                  "--draft-rope-amplitude {} needs a drafter, and {} holds none",
                  config.draft_rope_amplitude, config.model);
    override_rope_amplitude(source.drafter->config.rope, std::stod(config.draft_rope_amplitude),
                            source.drafter->origin);
  }
  return source;
}

bool holds_quantized(const TargetCheckpoint& target) {
  return std::any_of(target.tensors.begin(), target.tensors.end(), [](const auto& entry) {
    return entry.first.ends_with(".qw") || entry.first.ends_with(".weight_packed");
  });
}

LoadOptions load_options(const RunConfig& config) {
  LoadOptions load;
  load.weights = config.weights == "original"    ? WeightsChoice::kOriginal
                 : config.weights == "quantized" ? WeightsChoice::kQuantized
                 : config.weights == "int4"      ? WeightsChoice::kInt4
                                                 : WeightsChoice::kAuto;
  return load;
}

// job.text is there for all but ids.
std::vector<std::int32_t> prompt_tokens(const RunConfig& config, const PromptInput& prompt,
                                        const Job& job) {
  switch (prompt.kind) {
    case PromptInput::Kind::kIds:
      return prompt.ids;
    case PromptInput::Kind::kText:
      return job.text->encode_prompt(prompt.text, prompt.origin, config.parse_special);
    case PromptInput::Kind::kChat:
      return job.text->encode_conversation(
          parse_chat(prompt.chat, prompt.origin),
          choose_chat_template(config.chat_template, job.source.target), config.thinking == "on");
  }
  fail("an unknown kind of prompt");
}

// Of the job's goldens if it has any, else of the prompts.
std::vector<Request> make_requests(const RunConfig& config, const std::vector<PromptInput>& prompts,
                                   const Job& job) {
  std::vector<Request> requests;
  if (job.golden) {
    for (const GoldenCase& golden_case : job.golden->cases) {
      requests.push_back(
          {.prompt_ids = golden_case.prompt_ids,
           .max_new_tokens = static_cast<std::int64_t>(golden_case.greedy_ids.size()),
           .ignore_eos = true});
    }
    return requests;
  }
  for (const PromptInput& prompt : prompts) {
    requests.push_back({.prompt_ids = prompt_tokens(config, prompt, job),
                        .max_new_tokens = config.max_new_tokens,
                        .ignore_eos = config.ignore_eos});
  }
  return requests;
}

// Lengths that rank 0's prompts need, for all ranks' workspaces.
struct PromptNeed {
  std::int64_t longest_prompt = 1;
  std::int64_t longest_sequence = 2;
};
PromptNeed prompt_need(const std::vector<Request>& requests) {
  PromptNeed need;
  for (const Request& request : requests) {
    const auto length = static_cast<std::int64_t>(request.prompt_ids.size());
    need.longest_prompt = std::max(need.longest_prompt, length);
    need.longest_sequence = std::max(need.longest_sequence, length + request.max_new_tokens);
  }
  return need;
}

// Positions beyond max_position_embeddings are outside what the model was made for; a config
// without the key sets no limit.
std::int64_t context_limit(const ModelConfig& model) {
  return model.max_position_embeddings > 0 ? model.max_position_embeddings
                                           : std::numeric_limits<std::int32_t>::max();
}

// What the prompts need where the user set nothing.
std::int64_t max_context(const RunConfig& config, const ModelConfig& model,
                         const PromptNeed& need) {
  const std::int64_t limit = context_limit(model);
  require_input(config.max_context <= limit,
                "--max-context {} is beyond the model's max_position_embeddings {}",
                config.max_context, limit);
  return config.max_context > 0 ? config.max_context : std::min(need.longest_sequence, limit);
}

Job plan_job(const RunConfig& config, const ProcessGroup& group) {
  Job job;
  job.source = open_source(config, {.rank = group.rank(), .ranks = group.world_size()});
  job.load = load_options(config);
  const bool quantized = config.weights != "original" && holds_quantized(job.source.target);
  job.weights = config.weights == "random" || config.weights == "int4" ? config.weights
                : quantized                                            ? "quantized"
                                                                       : "original";
  job.mode = config.mode != "auto" ? config.mode : job.source.drafter ? "tree" : "plain";
  job.engine.mode = job.mode == "plain"   ? Mode::kPlain
                    : job.mode == "chain" ? Mode::kChain
                                          : Mode::kTree;
  job.engine.tree_budget = config.tree_budget;
  job.engine.max_top_logits = config.top_logits;
  job.engine.record_steps = config.dump_steps;
  job.engine.exchange =
      config.exchange == "alltoall" ? ExchangeKind::kAllToAll : ExchangeKind::kAllReduce;
  const ModelConfig& model = job.source.target.config;
  require_input(config.memory_fraction == 0 || config.max_context == 0,
                "give --max-context or --memory-fraction, not both");
  require_input(config.top_logits <= model.vocab_size,
                "--top-logits {} is beyond the vocabulary of {}", config.top_logits,
                model.vocab_size);
  require_input(group.world_size() <= model.num_attention_heads,
                "{} ranks, but {} has {} attention heads, and each rank needs at least one: start "
                "at most {} ranks",
                group.world_size(), config.model, model.num_attention_heads,
                model.num_attention_heads);
  if (config.verify_golden) {
    require_input(config.prompt_ids.empty() && config.prompts.empty() && config.prompt.empty() &&
                      config.chat.empty(),
                  "--verify-golden decodes the bundle's own prompts: give no others");
    job.golden = read_golden(job.source.target, job.weights);
    require_input(config.dtype != "bf16",
                  "--verify-golden: goldens are for weights as stored, not for --dtype bf16");
  }
  if (group.rank() == 0) {
    const std::vector<PromptInput> prompts = read_prompts(config);
    const bool has_text = std::any_of(prompts.begin(), prompts.end(), [](const auto& prompt) {
      return prompt.kind != PromptInput::Kind::kIds;
    });
    const ModelFileFinder files = files_of(config);
    if (has_text || !config.tokenizer.empty()) {
      const TokenizerSource source{
          .model = config.model, .files = files, .chosen = config.tokenizer};
      job.text.emplace(source, model);
    }
    add_end_tokens(files, job.text ? &*job.text : nullptr, job.source.target.config);
    job.requests = make_requests(config, prompts, job);
  }
  return job;
}

// Rank 0's text on every rank.
std::string share_text(const std::string& own, ProcessGroup& group) {
  auto size = static_cast<std::int64_t>(own.size());
  group.broadcast(&size, sizeof size, 0);
  std::string shared = own;
  shared.resize(static_cast<std::size_t>(size));
  group.broadcast(shared.data(), size, 0);
  return shared;
}

// Collective: the bytes of all ranks together, the seconds of the slowest.
LoadStatistics load_of_all_ranks(const LoadStatistics& own, ProcessGroup& group) {
  std::vector<LoadStatistics> ranks(static_cast<std::size_t>(group.world_size()));
  group.all_gather(&own, sizeof own, ranks.data());
  LoadStatistics all;
  double slowest = 0;
  for (const LoadStatistics& rank : ranks) {
    all += rank;
    slowest = std::max(slowest, rank.seconds);
  }
  all.seconds = slowest;
  return all;
}

std::unique_ptr<Backend> start_backend(const RunConfig& config, ProcessGroup& group) {
  BackendOptions options;
  options.name = config.backend;
  options.local_rank = group.local_rank();
  // Goldens are for exact arithmetic.
  const bool exact = config.dtype == "fp32" || (config.dtype == "auto" && config.verify_golden);
  options.activation_dtype = exact ? DType::kFloat32 : DType::kBFloat16;
  const int num_threads = default_num_threads(group);
  options.num_threads = config.threads > 0 ? static_cast<int>(config.threads) : num_threads;
  std::unique_ptr<Backend> backend;
  run_together(group, [&] {
    backend = make_backend(options);
    check_communicator({.name = config.communicator, .backend = backend->name()}, group);
  });
  return backend;
}

// Collective: the job of equal options on all ranks, sized for rank 0's prompts.
Job agree_on_job(const RunConfig& config, ProcessGroup& group) {
  Job job;
  const std::string rank0_options = share_text(options_text(config), group);
  run_together(group, [&] {
    init_logging(config.log_level, group.rank(), group.world_size());
    require_input(options_text(config) == rank0_options,
                  "started with other options than rank 0: {} (rank 0: {})", options_text(config),
                  rank0_options);
    job = plan_job(config, group);
  });
  PromptNeed need = prompt_need(job.requests);
  group.broadcast(&need, sizeof need, 0);
  auto num_requests = static_cast<std::int64_t>(job.requests.size());
  group.broadcast(&num_requests, sizeof num_requests, 0);
  job.engine.batch_size = std::min(config.batch_size, num_requests);
  job.engine.max_prompt = need.longest_prompt;
  run_together(group, [&] {
    const ModelConfig& target = job.source.target.config;
    job.engine.max_context = max_context(config, target, need);
    check_requests(job.requests, target, job.engine);
  });
  return job;
}

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

}  // namespace

int run_generate(const RunConfig& config, ProcessGroup& group) {
  Job job = agree_on_job(config, group);
  const std::unique_ptr<Backend> backend = start_backend(config, group);
  job.load.num_threads = backend->num_threads();
  job.load.round_to_bfloat16 =
      config.dtype == "bf16" || backend->activation_dtype() == DType::kBFloat16;
  if (config.memory_fraction > 0) {
    job.engine.max_context = context_for_memory(
        {.source = job.source, .options = job.engine, .load = job.load},
        {.fraction = config.memory_fraction, .limit = context_limit(job.source.target.config)},
        group, *backend);
    spdlog::info("context of {} tokens for {} sequences", job.engine.max_context,
                 job.engine.batch_size);
  }
  const StepSizes sizes = step_sizes(job.source, job.engine);
  const std::unique_ptr<Communicator> communicator =
      make_communicator({.name = config.communicator,
                         .backend = backend->name(),
                         .staging_bytes = sizes.max_rows * job.source.target.config.hidden_size *
                                          dtype_bytes(DType::kFloat32)},
                        group);
  std::optional<LoadedModel> model;
  std::optional<Engine> engine;
  run_together(group, [&] { model.emplace(job.source, job.engine, job.load, group, *backend); });
  run_together(group, [&] { engine.emplace(*model, job.engine, *backend, *communicator, group); });

  RunFacts facts{
      .backend = backend->name(),
      .communicator = communicator->name(),
      .exchange = job.engine.exchange == ExchangeKind::kAllToAll ? "alltoall" : "allreduce",
      .mode = job.mode,
      .weights = job.weights,
      .dtype = backend->activation_dtype() == DType::kBFloat16 ? "bf16" : "fp32",
      .host = group.host_name(),
      .load = load_of_all_ranks(model->load_statistics(), group),
      .device = backend->device_facts(),
      .world_size = group.world_size(),
      .threads = backend->num_threads(),
      .batch_size = job.engine.batch_size,
      .tree_nodes = sizes.max_nodes,
      .draft_horizon = job.source.drafter ? job.source.drafter->config.draft_horizon() : 0,
      .with_top_logits = config.top_logits > 0,
      .with_steps = config.dump_steps};
  spdlog::info(
      "{} ranks, {} threads each, backend {}, communicator {}, exchange {}, mode {}, {} weights",
      facts.world_size, facts.threads, facts.backend, facts.communicator, facts.exchange,
      facts.mode, facts.weights);
  spdlog::info("{}", load_text(facts.load));
  std::int64_t mismatches = decode(job, facts, config.output_format == "json", *engine);
  // Every rank ends with the same exit code.
  group.broadcast(&mismatches, sizeof mismatches, 0);
  return mismatches == 0 ? 0 : 1;
}

}  // namespace kdtree
