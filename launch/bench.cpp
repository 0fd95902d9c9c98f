// kdtree bench: parts of the engine, measured.
#include <filesystem>
#include <iostream>
#include <nlohmann/json.hpp>

#include "commands.h"
#include "core/build_info.h"
#include "core/check.h"
#include "core/json_text.h"
#include "core/log.h"
#include "line_output.h"
#include "ranks.h"
#include "result_output.h"
#include "study/kernel_bench.h"

namespace kdtree {

namespace {

using Json = nlohmann::ordered_json;

// What all lines of a run share.
Json run_json(const BenchKernelsOptions& options, const Backend& backend, const std::string& host) {
  const BuildInfo& build = build_info();
  return {{"model", std::filesystem::path(options.model_config).stem().string()},
          {"ranks", options.ranks},
          {"seed", options.seed},
          {"repeats", options.repeats},
          {"backend", backend.name()},
          {"threads", backend.num_threads()},
          {"host", host},
          {"device", device_json(backend.device_facts())},
          {"version", build.version},
          {"commit", build.commit},
          {"compiler", build.compiler},
          {"build_type", build.build_type},
          {"cuda", build.cuda}};
}

Json kernel_json(const KernelResult& result, DType activation, const Json& run) {
  Json line = {
      {"kernel", result.kernel},
      {"shape", result.shape},
      {"dtype", activation == DType::kBFloat16 ? "bf16" : "fp32"},
      {"rows", result.rows},
      {"copies", result.num_copies},
      {"weight_bytes", result.weight_bytes},
      {"cache_bytes", result.cache_bytes},
      {"activation_bytes", result.activation_bytes},
      {"bytes", result.weight_bytes + result.cache_bytes + result.activation_bytes},
      {"flops", result.flops},
      {"median_us", result.time.median_us},
      {"min_us", result.time.min_us},
      {"max_us", result.time.max_us},
      {"gb_per_s", result.gb_per_s},
      {"tflop_per_s", result.tflop_per_s},
      {"share_of_ceiling", result.share_of_ceiling},
      {"check",
       {{"max_error_over_bound", result.max_error_over_bound}, {"compared", result.num_compared}}}};
  line.update(run);
  return line;
}

// "out_features 4096, in_features 7168"
std::string shape_text(const Json& shape) {
  std::string text;
  for (const auto& [key, value] : shape.items()) {
    text += fmt::format("{}{} {}", text.empty() ? "" : ", ", key,
                        value.is_string()         ? value.get<std::string>()
                        : value.is_number_float() ? fmt::format("{:.1f}", value.get<double>())
                                                  : value.dump());
  }
  return text;
}

void print_header() {
  std::cerr << fmt::format("{:<20} {:>5} {:>10} {:>10} {:>10} {:>8} {:>8} {:>6} {:>7}  {}\n",
                           "kernel", "rows", "median us", "min us", "max us", "GB/s", "TFLOP/s",
                           "share", "error", "shape");
}

// `share` is that of the read ceiling, `error` the largest one over its bound.
void print_row(const KernelResult& result) {
  std::cerr << fmt::format(
      "{:<20} {:>5} {:>10.2f} {:>10.2f} {:>10.2f} {:>8.1f} {:>8.2f} {:>5.1f}% {:>7.2g}  {}\n",
      result.kernel, result.rows, result.time.median_us, result.time.min_us, result.time.max_us,
      result.gb_per_s, result.tflop_per_s, 100 * result.share_of_ceiling,
      result.max_error_over_bound, shape_text(result.shape));
}

ExpertHistogram histogram_of(const std::string& name) {
  return name == "zipf"  ? ExpertHistogram::kZipf
         : name == "one" ? ExpertHistogram::kOne
                         : ExpertHistogram::kUniform;
}

KernelBenchOptions bench_options(const BenchKernelsOptions& options) {
  constexpr std::int64_t kMegabyte = 1000000;
  return {.num_ranks = options.ranks,
          .rows = options.rows,
          .prefixes = options.prefixes,
          .kernels = options.kernels,
          .histogram = histogram_of(options.histogram),
          .repeats = options.repeats,
          .seed = static_cast<std::uint64_t>(options.seed),
          .working_set_bytes = options.working_set_mb * kMegabyte};
}

int bench_kernels(const BenchKernelsOptions& options, int num_threads, const std::string& host) {
  const ModelConfig config =
      parse_model_config(read_json_file(options.model_config), options.model_config);
  const std::unique_ptr<Backend> backend = make_backend(
      {.name = options.backend,
       .num_threads = num_threads,
       .activation_dtype = options.dtype == "fp32" ? DType::kFloat32 : DType::kBFloat16});
  require_input(backend->name() != "cpu" || options.dtype != "bf16",
                "--dtype bf16: the CPU backend computes in fp32, expected auto or fp32");
  require_input(options.ranks <= config.num_attention_heads,
                "--ranks {}: the model has {} attention heads, expected no more ranks than that",
                options.ranks, config.num_attention_heads);
  LineOutput output(options.output);
  const Json run = run_json(options, *backend, host);
  print_header();
  const std::int64_t num_wrong = run_kernel_bench(
      *backend, config, bench_options(options),
      [&](const KernelResult& result) {
        output.write(kernel_json(result, backend->activation_dtype(), run));
        print_row(result);
      },
      [](const std::string& text) { spdlog::error("wrong result: {}", text); });
  if (num_wrong > 0) {
    spdlog::error("{} cases computed wrong results and were not timed", num_wrong);
  }
  return num_wrong == 0 ? 0 : 1;
}

}  // namespace

int run_bench_kernels(const BenchKernelsOptions& options, ProcessGroup& group) {
  const int num_threads =
      options.threads > 0 ? static_cast<int>(options.threads) : default_num_threads(group);
  int code = 0;
  run_together(group, [&] {
    init_logging("info", group.rank(), group.world_size());
    require_input(group.world_size() == 1,
                  "bench kernels measures one process, expected a start without mpirun or srun "
                  "instead of {} ranks; --ranks says whose part is measured",
                  group.world_size());
    code = bench_kernels(options, num_threads, group.host_name());
  });
  return code;
}

}  // namespace kdtree
