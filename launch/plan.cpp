// kdtree plan: what every rank of a run would hold, from configs alone.
#include <algorithm>
#include <filesystem>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <vector>

#include "commands.h"
#include "core/check.h"
#include "core/log.h"
#include "placement/grid.h"
#include "placement/placement_file.h"
#include "placement_options.h"
#include "result_output.h"
#include "study/run_plan.h"
#include "weights/random_checkpoint.h"

namespace kdtree {

namespace {

using Json = nlohmann::ordered_json;

// Where nothing is asked for.
constexpr std::int64_t kUsualContext = 8192;
// The shortest that the engine decodes: a token of prompt and one of output.
constexpr std::int64_t kLeastContext = 2;
constexpr int kTotalWidth = 12;

// What was asked for, worked out.
struct PlanJob {
  ModelSource source;
  RunPlanOptions run;
  std::string model;  // for people
  std::string mode;
  std::string dtype;              // of activations
  std::int64_t memory_bytes = 0;  // of a rank; 0: not told
  std::vector<std::string> notes;
};

// "configs/models/kimi-k2.6.json" and "kimi-k2.6/config.json" are both kimi-k2.6.
std::string model_name(const std::string& file) {
  const std::filesystem::path path(file);
  return path.stem() == "config" && path.has_parent_path() ? path.parent_path().filename().string()
                                                           : path.stem().string();
}

void require_there(const std::string& flag, const std::string& path) {
  namespace fs = std::filesystem;
  std::error_code status;
  const bool directory = fs::is_directory(path, status);
  require_input(fs::exists(directory ? fs::path(path) / "config.json" : fs::path(path), status),
                "{} {}: {}, expected a config.json or a directory that holds one", flag, path,
                directory ? "holds no config.json" : "no such file");
}

ModelSource open_source(const PlanOptions& options) {
  require_there("--model-config", options.model_config);
  if (!options.draft_config.empty()) {
    require_there("--draft-config", options.draft_config);
  }
  ModelSource source{.target = planned_target(options.model_config), .drafter = std::nullopt};
  if (!options.draft_config.empty() && options.mode != "plain") {
    source.drafter = random_drafter(options.draft_config, 0);
    check_drafter_fits(source.drafter->config, source.target.config, source.drafter->origin);
    require_input(source.drafter->config.draft_horizon() >= 1,
                  "{}: block_size {} leaves nothing to draft", source.drafter->origin,
                  source.drafter->config.block_size);
  }
  return source;
}

std::int64_t memory_of(const PlanOptions& options) {
  for (const GpuModel& gpu : gpu_models()) {
    if (gpu.name == options.gpu) {
      return gpu.memory_bytes;
    }
  }
  return static_cast<std::int64_t>(options.memory_gb * 1e9);
}

void set_context(const PlanOptions& options, PlanJob& job) {
  EngineOptions& engine = job.run.engine;
  const std::int64_t stated = job.source.target.config.max_position_embeddings;
  const std::int64_t limit = stated > 0 ? stated : std::numeric_limits<std::int32_t>::max();
  require_input(options.max_context <= limit,
                "--max-context {} is beyond the model's max_position_embeddings {}",
                options.max_context, limit);
  require_input(options.max_context == 0 || options.max_context >= kLeastContext,
                "--max-context {}: expected 0 or at least {}", options.max_context, kLeastContext);
  if (options.memory_fraction > 0) {
    engine.max_context = kLeastContext;
    engine.max_prompt = limit;
    job.run.room = {.memory_bytes = job.memory_bytes,
                    .goal = {.fraction = options.memory_fraction, .limit = limit}};
    return;
  }
  engine.max_context =
      options.max_context > 0 ? options.max_context : std::min(kUsualContext, limit);
  engine.max_prompt = engine.max_context;
}

PlanJob make_job(const PlanOptions& options) {
  PlanJob job;
  job.source = open_source(options);
  const ModelConfig& target = job.source.target.config;
  job.run.num_ranks = static_cast<int>(options.ranks);
  EngineOptions& engine = job.run.engine;
  engine.grid = make_grid(options.grid, job.run.num_ranks);
  const bool grouped = engine.grid.attention_dp > 1;
  require_input(
      engine.grid.attention_tp(job.run.num_ranks) <= target.num_attention_heads,
      "--ranks {}{}: the model has {} attention heads, expected no more ranks than that{}",
      options.ranks, grouped ? fmt::format(" in {} groups", engine.grid.attention_dp) : "",
      target.num_attention_heads, grouped ? " in a group" : ", or --attention-dp");
  job.model = model_name(options.model_config);
  job.mode = options.mode != "auto" ? options.mode : job.source.drafter ? "tree" : "plain";
  job.memory_bytes = memory_of(options);
  engine.mode = job.mode == "plain"   ? Mode::kPlain
                : job.mode == "chain" ? Mode::kChain
                                      : Mode::kTree;
  engine.tree_budget = options.tree_budget;
  engine.batch_size = options.batch_size;
  engine.exchange = find_exchange(options.exchange).value_or(ExchangeKind::kAllReduce);
  engine.placement = std::make_shared<const ExpertPlacement>(
      make_placement(options.placement, target, engine.grid.moe_ep(job.run.num_ranks)));
  set_context(options, job);
  const bool exact = options.backend == "cpu" || options.dtype == "fp32";
  job.dtype = exact ? "fp32" : "bf16";
  job.run.load.round_to_bfloat16 =
      options.dtype == "bf16" || (options.backend == "cuda" && options.dtype == "auto");
  const bool int4 = options.weights == "int4";
  job.run.load.weights = int4 ? WeightsChoice::kInt4 : WeightsChoice::kAuto;
  if (target.float8_blocks) {
    job.notes.push_back(fmt::format("fp8 matrices{} are held as {}: they are dequantised at load",
                                    int4 ? " other than routed experts" : "",
                                    job.run.load.round_to_bfloat16 ? "bf16" : "fp32"));
  }
  return job;
}

Json plan_json(const PlanOptions& options, const PlanJob& job, const RunPlan& plan) {
  Json json = {
      {"model", job.model},
      {"parameters", plan.num_parameters},
      {"ranks", options.ranks},
      {"backend", options.backend},
      {"dtype", job.dtype},
      {"mode", job.mode},
      {"exchange", exchange_name(job.run.engine.exchange)},
      {"moe_ep", job.run.engine.grid.moe_ep(job.run.num_ranks)},
      {"moe_tp", job.run.engine.grid.moe_tp},
      {"attention_tp", job.run.engine.grid.attention_tp(job.run.num_ranks)},
      {"attention_dp", job.run.engine.grid.attention_dp},
      {"placement", options.placement.policy},
      {"batch_size", options.batch_size},
      {"tree_nodes", step_sizes(job.source, job.run.engine).max_nodes},
      {"max_context", plan.max_context},
      {"gpu", options.gpu.empty() ? Json() : Json(options.gpu)},
      {"memory_bytes", job.memory_bytes > 0 ? Json(job.memory_bytes) : Json()},
      {"peak_bytes", plan.peak_bytes()},
      {"fits", job.memory_bytes > 0 ? Json(plan.peak_bytes() <= job.memory_bytes) : Json()},
      {"notes", job.notes}};
  Json ranks = Json::array();
  for (const MemoryPlan& rank : plan.ranks) {
    Json bytes = Json::object();
    for (const MemoryPlan::Entry& entry : rank.entries) {
      std::string key = entry.what;
      std::replace(key.begin(), key.end(), ' ', '_');
      bytes[key] = entry.bytes;
    }
    bytes["total"] = rank.total_bytes();
    ranks.push_back(std::move(bytes));
  }
  json["bytes_of_rank"] = std::move(ranks);
  return json;
}

// Neighbouring ranks that hold the same: [first, last].
struct AlikeRanks {
  std::size_t first = 0;
  std::size_t last = 0;
};

std::vector<AlikeRanks> alike_ranks(const RunPlan& plan) {
  const auto alike = [&plan](std::size_t left, std::size_t right) {
    const auto& a = plan.ranks[left].entries;
    const auto& b = plan.ranks[right].entries;
    return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                      [](const auto& x, const auto& y) { return x.bytes == y.bytes; });
  };
  std::vector<AlikeRanks> groups;
  for (std::size_t rank = 0; rank < plan.ranks.size(); ++rank) {
    if (groups.empty() || !alike(groups.back().first, rank)) {
      groups.push_back({rank, rank});
    }
    groups.back().last = rank;
  }
  return groups;
}

std::string table_line(const std::string& what, const std::vector<std::string>& values) {
  std::string line = fmt::format("{:<22}", what);
  for (const std::string& value : values) {
    line += fmt::format("{:>{}}", value, kTotalWidth);
  }
  return line + "\n";
}

std::string gigabytes(std::int64_t bytes) {
  return fmt::format("{:.3f}", static_cast<double>(bytes) / 1e9);
}

std::string fit_text(const PlanOptions& options, const PlanJob& job, const RunPlan& plan) {
  if (job.memory_bytes == 0) {
    return "";
  }
  const std::int64_t rest = job.memory_bytes - plan.peak_bytes();
  const std::string memory = fmt::format("{} GB of {}", gigabytes(job.memory_bytes),
                                         options.gpu.empty() ? "memory" : options.gpu);
  return rest >= 0 ? fmt::format("fits {}: {} GB are left\n", memory, gigabytes(rest))
                   : fmt::format("does not fit {}: {} GB are missing\n", memory, gigabytes(-rest));
}

std::string plan_text(const PlanOptions& options, const PlanJob& job, const RunPlan& plan) {
  std::string text = fmt::format(
      "{}: {:.3f} billion parameters on {} rank{}, {} {}\nmode {}, exchange {}, batch of {}, "
      "context of {} tokens\n\n",
      job.model, static_cast<double>(plan.num_parameters) / 1e9, options.ranks,
      options.ranks == 1 ? "" : "s", options.backend, job.dtype, job.mode,
      exchange_name(job.run.engine.exchange), options.batch_size, plan.max_context);
  const std::vector<AlikeRanks> groups = alike_ranks(plan);
  const auto line = [&](const std::string& what, const auto& value_of) {
    std::vector<std::string> values;
    values.reserve(groups.size());
    for (const AlikeRanks& group : groups) {
      values.push_back(value_of(group));
    }
    text += table_line(what, values);
  };
  line("GB (10^9 bytes)", [](const AlikeRanks& group) {
    return group.first == group.last ? fmt::format("rank {}", group.first)
                                     : fmt::format("ranks {}-{}", group.first, group.last);
  });
  for (std::size_t i = 0; i < plan.ranks.front().entries.size(); ++i) {
    line(plan.ranks.front().entries[i].what, [&](const AlikeRanks& group) {
      return gigabytes(plan.ranks[group.first].entries[i].bytes);
    });
  }
  line("total",
       [&](const AlikeRanks& group) { return gigabytes(plan.ranks[group.first].total_bytes()); });
  text += "\n" + fit_text(options, job, plan);
  for (const std::string& note : job.notes) {
    text += note + "\n";
  }
  return text;
}

}  // namespace

int run_plan(const PlanOptions& options, ProcessGroup& group) {
  run_together(group, [&] {
    init_logging("info", group.rank(), group.world_size());
    require_input(group.world_size() == 1,
                  "plan is one process, expected a start without mpirun or srun instead of {} "
                  "ranks; --ranks says how many share the model",
                  group.world_size());
    const PlanJob job = make_job(options);
    const JsonFile file("--write-placement", options.write_placement);
    const DType dtype = job.dtype == "bf16" ? DType::kBFloat16 : DType::kFloat32;
    const RunPlan plan = plan_run(job.source, job.run, *make_memory_traits(options.backend, dtype));
    // A path may hold bytes that are no UTF-8.
    write_stdout(
        options.output_format == "json"
            ? plan_json(options, job, plan).dump(-1, ' ', false, Json::error_handler_t::replace) +
                  "\n"
            : plan_text(options, job, plan));
    if (file.wanted()) {
      file.write(to_json(*job.run.engine.placement, job.source.target.config));
    }
  });
  return 0;
}

}  // namespace kdtree
