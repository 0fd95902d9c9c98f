#include "bench_options.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <limits>

#include "core/check.h"
#include "option_kinds.h"
#include "run_options.h"
#include "study/kernel_bench.h"

namespace kdtree {

namespace {

constexpr std::int64_t kMostRows = 4096;
constexpr std::int64_t kMostTokens = std::numeric_limits<std::int32_t>::max();
constexpr std::int64_t kLongestPrefix = std::int64_t{1} << 20;

void add_list(CLI::App& app, const std::string& flag, std::string& value, const std::string& help) {
  app.add_option(flag, value, fmt::format("{} (default {})", help, value.empty() ? "all" : value))
      ->type_name("LIST");
}

}  // namespace

void BenchKernelsOptions::read_lists() {
  rows = parse_number_list("--rows", rows_text, 1, kMostRows);
  prefixes = parse_number_list("--prefix", prefix_text, 0, kLongestPrefix);
  kernels = parse_name_list("--kernels", kernels_text, bench_kernel_names());
}

void add_bench_kernels_options(CLI::App& app, BenchKernelsOptions& options) {
  add_path(app, "--model-config", options.model_config,
           "config.json of the model whose shapes are measured (required)");
  add_count(app, "--ranks", options.ranks, CLI::Range(std::int64_t{1}, std::int64_t{4096}),
            "Ranks that share the model; the part of rank 0 is measured");
  add_list(app, "--rows", options.rows_text, "Rows of a call");
  add_list(app, "--prefix", options.prefix_text, "Committed cache rows below a tree");
  add_list(app, "--kernels", options.kernels_text,
           fmt::format("Kernels to measure, of {}", fmt::join(bench_kernel_names(), ", ")));
  add_choice(app, "--histogram", options.histogram, {"uniform", "zipf", "one"},
             "Popularity of experts; one: all rows choose the same");
  add_count(app, "--repeats", options.repeats, CLI::Range(std::int64_t{1}, std::int64_t{10000}),
            "Measurements of a case, each of many calls");
  add_count(app, "--seed", options.seed,
            CLI::Range(std::int64_t{0}, std::int64_t{std::numeric_limits<std::int32_t>::max()}),
            "Of all data");
  add_count(app, "--working-set-mb", options.working_set_mb,
            CLI::Range(std::int64_t{0}, std::int64_t{1000000}),
            "What the copies of a weight or cache fill; 0: 4 times the L2 and at least 512 on a "
            "GPU, 256 on the CPU");
  add_choice(app, "--backend", options.backend, {"auto", "cpu", "cuda"},
             "Where tensors are computed; auto: a GPU where there is one");
  add_choice(app, "--dtype", options.dtype, {"auto", "fp32", "bf16"},
             "Activations on a GPU; auto: bf16. The CPU has fp32");
  add_count(app, "--threads", options.threads, CLI::Range(std::int64_t{0}, std::int64_t{4096}),
            "CPU threads; 0: OMP_NUM_THREADS, else the host's cores");
  add_path(app, "--output", options.output, "File for the JSON lines (default: stdout)");
}

void BenchAcceptanceOptions::read_lists() {
  modes = parse_name_list("--modes", modes_text, {"plain", "chain", "tree"});
  require_input(!modes.empty(), "--modes is empty, expected a list of: plain, chain, tree");
  budgets = parse_number_list("--budgets", budgets_text, 1, kMaxTreeBudget);
  const auto asked = [this](const char* mode) {
    return std::find(modes.begin(), modes.end(), mode) != modes.end();
  };
  run.mode = asked("tree") ? "tree" : asked("chain") ? "chain" : "plain";
  run.tree_budget = *std::max_element(budgets.begin(), budgets.end());
}

void add_bench_acceptance_options(CLI::App& app, BenchAcceptanceOptions& options) {
  RunConfig& run = options.run;
  add_target_option(app, run);
  add_drafter_options(app, run);
  add_path(app, "--prompts", run.prompts,
           R"(File of prompts, a JSON object a line: {"prompt_ids": [1, 2, 3]}, {"prompt": "Hi"} )"
           R"(or {"messages": [...]} (required))");
  add_path(app, "--tokenizer", run.tokenizer,
           "Directory or file of the tokenizer (default: the model's directory)");
  add_list(app, "--modes", options.modes_text,
           "Modes to measure; plain, which the others are compared with, runs first");
  add_list(app, "--budgets", options.budgets_text, "Tree budgets of mode tree");
  add_count(app, "--batch-size", run.batch_size, CLI::Range(std::int64_t{1}, std::int64_t{4096}),
            "Sequences decoded together");
  add_count(app, "--max-new-tokens", run.max_new_tokens, CLI::Range(std::int64_t{1}, kMostTokens),
            "Output tokens of a prompt, at most");
  app.add_flag("--ignore-eos", run.ignore_eos, "Go on after an end token");
  add_backend_options(app, run);
  add_process_options(app, run);
  add_path(app, "--output", options.output, "File for the JSON lines (default: stdout)");
}

void BenchPerplexityOptions::check() const {
  require_input(!text.empty(), "--text is required");
  require_input(!text_is_windows() || (window == 0 && stride == 0),
                "--window and --stride cut a text, and {} holds windows already", text);
  require_input(window != 1, "--window 1 leaves nothing to score, expected at least 2");
  const std::int64_t most = window == 0 ? kDefaultWindow : window;
  require_input(stride <= most, "--stride {} is beyond the window of {} tokens", stride, most);
}

void add_bench_perplexity_options(CLI::App& app, BenchPerplexityOptions& options) {
  RunConfig& run = options.run;
  const CLI::Range tokens(std::int64_t{0}, kMostTokens);
  add_target_option(app, run);
  add_path(app, "--text", options.text,
           R"(Text file in UTF-8, or FILE.jsonl with a window of tokens a line: )"
           R"({"prompt_ids": [1, 2, 3]} (required))");
  add_path(app, "--tokenizer", run.tokenizer,
           "Directory or file of the tokenizer (default: the model's directory)");
  add_count(app, "--window", options.window, tokens,
            fmt::format("Tokens of a window that a text is cut into; 0: {}", kDefaultWindow));
  add_count(app, "--stride", options.stride, tokens,
            "Tokens from the start of a window to that of the next; 0: the window. A token in "
            "several windows is scored in the first");
  add_count(app, "--windows", options.windows, tokens, "Windows to score at most; 0: all");
  add_backend_options(app, run);
  add_process_options(app, run);
  add_path(app, "--output", options.output, "File for the JSON line (default: stdout)");
}

}  // namespace kdtree
