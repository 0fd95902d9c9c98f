#include "job.h"

#include <algorithm>
#include <limits>

#include "core/check.h"
#include "core/log.h"
#include "engine/exchange_choice.h"
#include "engine/memory_plan.h"
#include "model/rope.h"
#include "placement/grid.h"
#include "placement/placement_file.h"
#include "placement/policies.h"
#include "ranks.h"
#include "weights/container.h"
#include "weights/random_checkpoint.h"

namespace kdtree {

namespace {

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
    require_input(config.draft_length == 0, "--draft-length {}: --mode plain has no drafter",
                  config.draft_length);
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
  require_input(source.drafter || config.draft_length == 0,
                "--draft-length {} needs a drafter, and {} holds none", config.draft_length,
                config.model);
  require_input(!source.drafter || config.draft_length <= source.drafter->config.draft_horizon(),
                "--draft-length {}: the drafter {} proposes {} tokens at most", config.draft_length,
                source.drafter ? source.drafter->origin : "",
                source.drafter ? source.drafter->config.draft_horizon() : 0);
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

// What the input needs where the user set nothing.
std::int64_t max_context(const RunConfig& config, const ModelConfig& model, const InputNeed& need) {
  const std::int64_t limit = context_limit(model);
  require_input(config.max_context <= limit,
                "--max-context {} is beyond the model's max_position_embeddings {}",
                config.max_context, limit);
  return config.max_context > 0 ? config.max_context : std::min(need.longest_sequence, limit);
}

// `need` is set on rank 0.
// The placement and the files that get it and the experts' loads.
void plan_placement(const RunConfig& config, int world_size, Job& job) {
  const ModelConfig& model = job.source.target.config;
  job.engine.placement = std::make_shared<const ExpertPlacement>(
      make_placement(config.placement, model, job.engine.grid.moe_ep(world_size)));
  require_input(config.record_expert_load.empty() || model.n_routed_experts > 0,
                "--record-expert-load {}: {} has no routed experts", config.record_expert_load,
                config.model);
  require_input(config.rebalance_every == 0 || model.n_routed_experts > 0,
                "--rebalance-every {}: {} has no routed experts", config.rebalance_every,
                config.model);
  const bool is_shard = job.source.target.shard.has_value();
  require_input(!is_shard || (config.placement.policy == "linear" && config.rebalance_every == 0),
                "--placement {}, --rebalance-every {}: the shards of {} hold the experts of a "
                "linear placement alone: expected these, or the checkpoint as it was before "
                "kdtree convert --shard-for",
                config.placement.policy, config.rebalance_every, config.model);
  require_input(
      config.rebalance_every == 0 ||
          place_layers_anew(empty_loads(model), *job.engine.placement, model)
              .same_slots(*job.engine.placement),
      "--rebalance-every {}: --placement {} does not share the slots of each layer out evenly, "
      "expected as many on every rank, a remainder on the low ones",
      config.rebalance_every, config.placement.policy);
  job.load_file.emplace("--record-expert-load", config.record_expert_load);
  job.exchange_file.emplace("--record-exchange", config.record_exchange);
  job.placement_file.emplace("--write-placement", config.write_placement);
}

// Rank 0's placement on every rank.
void share_placement_of(Job& job, ProcessGroup& group) {
  const std::int64_t experts = job.source.target.config.n_routed_experts;
  const int groups = job.engine.grid.moe_ep(group.world_size());
  job.engine.placement = std::make_shared<const ExpertPlacement>(share_placement(
      group.rank() == 0 ? *job.engine.placement : ExpertPlacement::linear(experts, groups), group));
}

// The grid of the ranks, and whether the model's sizes allow it.
void plan_grid(const RunConfig& config, const ProcessGroup& group, Job& job) {
  job.engine.grid = make_grid(config.grid, group.world_size());
  const ParallelGrid& grid = job.engine.grid;
  const bool is_shard = job.source.target.shard.has_value();
  require_input(!is_shard || grid == ParallelGrid(),
                "--moe-tp {}, --attention-dp {}: the shards of {} hold whole experts and every "
                "rank's share of all heads: expected 1 and 1, or the checkpoint as it was before "
                "kdtree convert --shard-for",
                grid.moe_tp, grid.attention_dp, config.model);
  const std::int64_t heads = job.source.target.config.num_attention_heads;
  const int ranks = grid.attention_tp(group.world_size());
  require_input(grid.attention_dp > 1 || ranks <= heads,
                "{} ranks, but {} has {} attention heads, and each rank needs at least one: start "
                "at most {} ranks, or divide sequences among them with --attention-dp",
                ranks, config.model, heads, heads);
  require_input(ranks <= heads,
                "--attention-tp {}: {} has {} attention heads, and each rank of a group needs at "
                "least one: expected at most {}",
                ranks, config.model, heads, heads);
  target_partition(job.source.target.config,
                   rank_load_options(job.load, group.rank(), group.world_size(), job.engine));
}

Job plan_job(const RunConfig& config, const ReadInput& read, const ProcessGroup& group,
             InputNeed& need) {
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
  job.engine.draft_length = config.draft_length;
  job.engine.max_top_logits = config.top_logits;
  job.engine.record_steps = config.dump_steps;
  job.engine.exchange = find_exchange(config.exchange).value_or(ExchangeKind::kAllReduce);
  const ModelConfig& model = job.source.target.config;
  require_input(config.memory_fraction == 0 || config.max_context == 0,
                "give --max-context or --memory-fraction, not both");
  require_input(config.top_logits <= model.vocab_size,
                "--top-logits {} is beyond the vocabulary of {}", config.top_logits,
                model.vocab_size);
  plan_grid(config, group, job);
  if (config.verify_golden) {
    require_input(config.prompt_ids.empty() && config.prompts.empty() && config.prompt.empty() &&
                      config.chat.empty(),
                  "--verify-golden decodes the bundle's own prompts: give no others");
    job.golden = read_golden(job.source.target, job.weights);
    require_input(config.dtype != "bf16",
                  "--verify-golden: goldens are for weights as stored, not for --dtype bf16");
  }
  require_input(config.record_exchange.empty() ||
                    (model.num_moe_layers() > 0 && model.num_moe_layers() <= kMostCountedLayers),
                "--record-exchange {}: {} has {} layers with experts, expected 1 to {}",
                config.record_exchange, config.model, model.num_moe_layers(), kMostCountedLayers);
  job.engine.count_exchanges = !config.record_exchange.empty();
  job.engine.record_experts = job.engine.count_exchanges;
  job.engine.count_experts = !config.record_expert_load.empty() || config.rebalance_every > 0;
  if (group.rank() == 0) {
    plan_placement(config, group.world_size(), job);
    need = read(job);
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

}  // namespace

void load_text_model(const RunConfig& config, Job& job) {
  const TokenizerSource source{
      .model = config.model, .files = files_of(config), .chosen = config.tokenizer};
  job.text.emplace(source, job.source.target.config);
}

InputNeed read_requests(const RunConfig& config, Job& job) {
  const std::vector<PromptInput> prompts = read_prompts(config);
  const bool has_text = std::any_of(prompts.begin(), prompts.end(), [](const auto& prompt) {
    return prompt.kind != PromptInput::Kind::kIds;
  });
  if (has_text || !config.tokenizer.empty()) {
    load_text_model(config, job);
  }
  add_end_tokens(files_of(config), job.text ? &*job.text : nullptr, job.source.target.config);
  job.requests = make_requests(config, prompts, job);
  InputNeed need;
  for (const Request& request : job.requests) {
    const auto length = static_cast<std::int64_t>(request.prompt_ids.size());
    need.longest_prompt = std::max(need.longest_prompt, length);
    need.longest_sequence = std::max(need.longest_sequence, length + request.max_new_tokens);
  }
  need.num_sequences = std::ssize(job.requests);
  return need;
}

std::int64_t context_limit(const ModelConfig& model) {
  return model.max_position_embeddings > 0 ? model.max_position_embeddings
                                           : std::numeric_limits<std::int32_t>::max();
}

Job agree_on_job(const RunConfig& config, const std::string& more_options, const ReadInput& read,
                 ProcessGroup& group) {
  Job job;
  InputNeed need;
  const std::string own_options = options_text(config) + more_options;
  const std::string rank0_options = share_text(own_options, group);
  run_together(group, [&] {
    init_logging(config.log_level, group.rank(), group.world_size());
    require_input(own_options == rank0_options,
                  "started with other options than rank 0: {} (rank 0: {})", own_options,
                  rank0_options);
    job = plan_job(config, read, group, need);
  });
  share_placement_of(job, group);
  group.broadcast(&need, sizeof need, 0);
  job.engine.batch_size = std::min(config.batch_size, need.num_sequences);
  job.engine.max_prompt = need.longest_prompt;
  run_together(group, [&] {
    const ModelConfig& target = job.source.target.config;
    job.engine.max_context = max_context(config, target, need);
    check_requests(job.requests, target, job.engine);
  });
  return job;
}

LoadedJob load_job(const RunConfig& config, Job& job, ProcessGroup& group) {
  LoadedJob loaded;
  loaded.backend = start_backend(config, group);
  const Backend& backend = *loaded.backend;
  job.load.num_threads = backend.num_threads();
  job.load.round_to_bfloat16 =
      config.dtype == "bf16" || backend.activation_dtype() == DType::kBFloat16;
  loaded.communicator = make_communicator(
      {.name = config.communicator,
       .backend = backend.name(),
       .staging_bytes = step_sizes(job.source, job.engine).max_rows *
                        job.source.target.config.hidden_size * dtype_bytes(DType::kFloat32)},
      group);
  loaded.groups.emplace(*loaded.communicator, job.engine.grid);
  if (config.exchange == "auto") {
    const ExchangeChoice choice =
        choose_exchange(job.source, job.engine, job.load,
                        {*loaded.backend, *loaded.communicator, *loaded.groups}, group);
    job.engine.exchange = choice.kind;
    if (group.rank() == 0) {
      spdlog::info("{}", exchange_table(choice));
    }
  }
  if (config.memory_fraction > 0) {
    job.engine.max_context = context_for_memory(
        {.source = job.source, .options = job.engine, .load = job.load},
        {.fraction = config.memory_fraction, .limit = context_limit(job.source.target.config)},
        group, backend);
    spdlog::info("context of {} tokens for {} sequences", job.engine.max_context,
                 job.engine.batch_size);
  }
  run_together(group, [&] {
    loaded.model.emplace(job.source, job.engine, job.load, group, *loaded.backend);
  });
  return loaded;
}

RunFacts job_facts(const Job& job, const LoadedJob& loaded, ProcessGroup& group) {
  const Backend& backend = *loaded.backend;
  return {.backend = backend.name(),
          .communicator = loaded.communicator->name(),
          .exchange = exchange_name(job.engine.exchange),
          .mode = job.mode,
          .weights = job.weights,
          .dtype = backend.activation_dtype() == DType::kBFloat16 ? "bf16" : "fp32",
          .host = group.host_name(),
          .load = load_of_all_ranks(loaded.model->load_statistics(), group),
          .device = backend.device_facts(),
          .world_size = group.world_size(),
          .grid = job.engine.grid,
          .threads = backend.num_threads(),
          .batch_size = job.engine.batch_size,
          .tree_nodes = step_sizes(job.source, job.engine).max_nodes,
          .draft_horizon = job.source.drafter ? job.source.drafter->config.draft_horizon() : 0,
          .with_top_logits = job.engine.max_top_logits > 0,
          .with_steps = job.engine.record_steps};
}

void log_facts(const RunFacts& facts) {
  spdlog::info(
      "{} ranks, {} threads each, backend {}, communicator {}, exchange {}, mode {}, {} weights",
      facts.world_size, facts.threads, facts.backend, facts.communicator, facts.exchange,
      facts.mode, facts.weights);
  if (facts.grid != ParallelGrid()) {
    spdlog::info(
        "experts in {} groups of {} ranks, a slice of each expert a rank; sequences in {} groups "
        "of "
        "{} ranks",
        facts.grid.moe_ep(facts.world_size), facts.grid.moe_tp, facts.grid.attention_dp,
        facts.grid.attention_tp(facts.world_size));
  }
  spdlog::info("{}", load_text(facts.load));
}

}  // namespace kdtree
