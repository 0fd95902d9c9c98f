#include "plan_options.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <vector>

#include "config/run_config.h"
#include "core/check.h"
#include "option_kinds.h"
#include "placement_options.h"
#include "study/run_plan.h"

namespace kdtree {

namespace {

std::vector<std::string> gpu_names() {
  std::vector<std::string> names;
  for (const GpuModel& gpu : gpu_models()) {
    names.emplace_back(gpu.name);
  }
  return names;
}

}  // namespace

void PlanOptions::check() const {
  require_input(!model_config.empty(), "--model-config is required");
  require_input(gpu.empty() || memory_gb == 0, "--gpu {} and --memory-gb {}: give one of the two",
                gpu, memory_gb);
  require_input(memory_fraction == 0 || max_context == 0,
                "--max-context {} and --memory-fraction {}: give one of the two", max_context,
                memory_fraction);
  require_input(memory_fraction == 0 || !gpu.empty() || memory_gb > 0,
                "--memory-fraction {}: a share of which memory? Give --gpu or --memory-gb",
                memory_fraction);
  require_input(backend == "cuda" || gpu.empty(),
                "--backend cpu with --gpu {}: expected --backend cuda", gpu);
  require_input(mode == "auto" || mode == "plain" || !draft_config.empty(),
                "--mode {} needs a drafter: give --draft-config, or --mode plain", mode);
}

void add_plan_options(CLI::App& app, PlanOptions& options) {
  add_path(app, "--model-config", options.model_config,
           "config.json of the target, or a directory that holds one (required)");
  add_path(app, "--draft-config", options.draft_config,
           "config.json of a DFlash drafter, or a directory that holds one (default: none)");
  add_count(app, "--ranks", options.ranks, CLI::Range(std::int64_t{1}, std::int64_t{4096}),
            "Ranks that share the model, one a GPU");
  add_choice(app, "--gpu", options.gpu, gpu_names(),
             "GPU of every rank, whose memory must hold it");
  add_amount(app, "--memory-gb", options.memory_gb,
             "Memory of every rank in GB of 10^9 bytes, instead of --gpu");
  add_share(app, "--memory-fraction", options.memory_fraction,
            "As large a context as this share of that memory holds, above 0 to 1; instead of "
            "--max-context");
  add_count(app, "--max-context", options.max_context, CLI::Range(std::int64_t{0}, kUnbounded),
            "Tokens of prompt and output together; 0: 8192, or what the model is made for");
  add_count(app, "--batch-size", options.batch_size,
            CLI::Range(std::int64_t{1}, std::int64_t{4096}), "Sequences decoded together");
  add_choice(app, "--mode", options.mode, {"auto", "plain", "chain", "tree"},
             "As of generate; auto: tree where there is a drafter");
  add_count(app, "--tree-budget", options.tree_budget, CLI::Range(std::int64_t{1}, kMaxTreeBudget),
            fmt::format("Nodes of a draft tree without its root, 1 to {}", kMaxTreeBudget));
  add_choice(app, "--exchange", options.exchange, {"auto", "allreduce", "allgather", "alltoall"},
             "How tokens reach their experts; auto: allreduce");
  add_grid_options(app, options.grid);
  add_placement_options(app, options.placement);
  add_path(app, "--write-placement", options.write_placement,
           "File that gets the placement, for --placement FILE");
  add_choice(
      app, "--weights", options.weights, {"auto", "int4"},
      "As of generate; int4: routed experts in floats or fp8 are rounded to INT4 while loading");
  add_choice(app, "--backend", options.backend, {"cuda", "cpu"},
             "Where tensors would be computed; needs neither here");
  add_choice(app, "--dtype", options.dtype, {"auto", "fp32", "bf16"},
             "As of generate; auto: bf16. Activations on the CPU are fp32 with either");
  add_choice(app, "--output-format", options.output_format, {"text", "json"},
             "text: GB; json: bytes, every rank");
}

}  // namespace kdtree
