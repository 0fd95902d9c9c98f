#include "bench_options.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <limits>

#include "option_kinds.h"
#include "study/kernel_bench.h"

namespace kdtree {

namespace {

constexpr std::int64_t kMostRows = 4096;
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

}  // namespace kdtree
