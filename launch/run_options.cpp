#include "run_options.h"

#include <limits>

#include "option_kinds.h"
#include "placement_options.h"

namespace kdtree {

void add_target_option(CLI::App& app, RunConfig& config) {
  add_path(app, "--model", config.model,
           "Target: KDTR bundle or Hugging Face directory (required)");
}

void add_drafter_options(CLI::App& app, RunConfig& config) {
  add_path(app, "--draft", config.draft,
           "Drafter: DFlash directory or KDTR bundle (default: the one in the target's bundle)");
  add_auto_or_factor(
      app, "--draft-rope-amplitude", config.draft_rope_amplitude,
      "What the drafter's rotary cosines and sines are multiplied by, for drafters "
      "trained with another YaRN amplitude than their config gives; auto: the config");
  add_count(app, "--draft-length", config.draft_length,
            CLI::Range(std::int64_t{0}, std::int64_t{4096}),
            "Tokens that the drafter proposes a step, in a block that much shorter; 0: its "
            "block_size - 1");
}

void add_backend_options(CLI::App& app, RunConfig& config) {
  add_choice(app, "--weights", config.weights, {"auto", "original", "quantized", "int4", "random"},
             "Which copy of a bundle that holds both; auto: quantized where there is one; int4: "
             "routed experts rounded to INT4 groups of 32 while loading; random: "
             "drawn for the sizes of --model and --draft, each a config.json");
  add_count(app, "--weights-seed", config.weights_seed,
            CLI::Range(std::int64_t{0}, std::int64_t{std::numeric_limits<std::int32_t>::max()}),
            "What random weights are drawn from");
  add_choice(app, "--backend", config.backend, {"auto", "cpu", "cuda"},
             "Where tensors are computed; auto: a GPU where there is one");
  add_choice(app, "--communicator", config.communicator, {"auto", "self", "mpi", "nccl"},
             "How ranks exchange tensors; self: a single rank");
  add_choice(
      app, "--exchange", config.exchange, {"auto", "allreduce", "allgather", "alltoall"},
      "How tokens reach their experts; auto measures them at the start, for this model and batch");
  add_grid_options(app, config.grid);
  add_placement_options(app, config.placement);
  add_choice(app, "--dtype", config.dtype, {"auto", "fp32", "bf16"},
             "fp32: exact; bf16: FP32 matrices rounded, on GPUs activations as well; auto: fp32 on "
             "the CPU "
             "and with --verify-golden, else bf16");
}

void add_process_options(CLI::App& app, RunConfig& config) {
  add_count(app, "--threads", config.threads, CLI::Range(std::int64_t{0}, std::int64_t{4096}),
            "CPU threads of a rank; 0: OMP_NUM_THREADS, else the host's cores shared among its "
            "ranks");
  add_choice(app, "--log-level", config.log_level,
             {"trace", "debug", "info", "warn", "error", "off"}, "What stderr carries");
}

}  // namespace kdtree
