#include "study/kernel_bench.h"

#include <algorithm>
#include <cmath>
#include <memory>

#include "core/check.h"
#include "study/bench_data.h"
#include "study/kernel_bench_cases.h"

namespace kdtree {

namespace {

constexpr std::int64_t kRecordingKey = 1;
constexpr const char* kReadKernel = "sum_words";  // the plain read, the ceiling of all others
constexpr std::size_t kBeginMark = 0;
constexpr std::size_t kEndMark = 1;
constexpr int kWarmUps = 3;
constexpr double kWarmUpUs = 10000;  // at least so long, by the backend's own clock
// Calls of one measurement: as many as take about this long, so that neither the clock's steps nor
// the start of a replay count.
constexpr double kMeasurementUs = 2000;
constexpr std::int64_t kMostCalls = 256;
constexpr std::int64_t kMostCopies = 512;

constexpr std::int64_t kMegabyte = 1000000;
constexpr std::int64_t kGpuWorkingSet = 512 * kMegabyte;
constexpr std::int64_t kCpuWorkingSet = 256 * kMegabyte;
constexpr std::int64_t kCachesOfWorkingSet = 4;
constexpr std::int64_t kGpuReadBytes = std::int64_t{4} << 30;

struct KernelGroup {
  std::vector<std::string> names;
  void (*measure)(const BenchContext&);
};

const std::vector<KernelGroup>& kernel_groups() {
  static const std::vector<KernelGroup> kGroups = {
      {{"linear"}, bench_linears},
      {{"experts"}, bench_experts},
      {{"tree_attention"}, bench_attention},
      {{"absorb_query", "expand_value", "rope"}, bench_mla},
      {{"rms_norm", "add_rms_norm", "swiglu"}, bench_rows},
      {{"router"}, bench_router},
      {{"top_k", "log_sum_exp_partials", "merge_top_k"}, bench_vocabulary},
      {{"build_trees", "expand_trees", "accept"}, bench_trees},
      {{"compact"}, bench_compact},
  };
  return kGroups;
}

std::int64_t working_set(const Backend& backend, const KernelBenchOptions& options) {
  if (options.working_set_bytes > 0) {
    return options.working_set_bytes;
  }
  return backend.name() == "cuda"
             ? std::max(kGpuWorkingSet, kCachesOfWorkingSet * backend.device_facts().cache_bytes)
             : kCpuWorkingSet;
}

std::string case_text(const KernelCase& one) {
  return fmt::format("{} {} rows {}", one.kernel, one.shape.dump(), one.rows);
}

double time_call(Backend& backend, const KernelCase& one) {
  backend.mark(kBeginMark);
  one.run(0);
  backend.mark(kEndMark);
  backend.synchronize();
  return 1000 * backend.milliseconds_between(kBeginMark, kEndMark);
}

// Time of one call, out of measurements of many that cycle over the copies.
TimeSummary time_case(Backend& backend, const KernelCase& one, std::int64_t repeats) {
  const double call_us = std::max(time_call(backend, one), 0.1);
  const auto wanted = static_cast<std::int64_t>(std::ceil(kMeasurementUs / call_us));
  // Whole turns over the copies: each counts alike, and all of the working set is used.
  const std::int64_t turns =
      (std::clamp<std::int64_t>(wanted, 1, kMostCalls) + one.num_copies - 1) / one.num_copies;
  const std::int64_t calls = turns * one.num_copies;
  const auto measure = [&] {
    backend.mark(kBeginMark);
    for (std::int64_t call = 0; call < calls; ++call) {
      one.run(call % one.num_copies);
    }
    backend.mark(kEndMark);
  };
  const auto measured_us = [&] {
    backend.run_recorded(kRecordingKey, true, measure);
    backend.synchronize();
    return 1000 * backend.milliseconds_between(kBeginMark, kEndMark);
  };
  // The first run is not recorded and the second one is; then the clocks have time to rise.
  double warm_up_us = 0;
  for (int run = 0; run < kWarmUps || warm_up_us < kWarmUpUs; ++run) {
    warm_up_us += std::max(measured_us(), 1.0);
  }
  std::vector<double> samples_us;
  for (std::int64_t repeat = 0; repeat < repeats; ++repeat) {
    samples_us.push_back(measured_us() / static_cast<double>(calls));
  }
  backend.forget_recorded(kRecordingKey);
  return summarize_times(samples_us);
}

class KernelBench {
 public:
  KernelBench(Backend& backend, const KernelBenchOptions& options,
              const std::function<void(const KernelResult&)>& on_result,
              const std::function<void(const std::string&)>& on_wrong)
      : backend_(backend), options_(options), on_result_(on_result), on_wrong_(on_wrong) {}

  void measure(const KernelCase& one) {
    one.run(0);
    backend_.synchronize();
    const ResultCheck check = one.check();
    if (!check.passed()) {
      ++num_wrong_;
      on_wrong_(fmt::format("{}: {}", case_text(one), check.failure()));
      return;
    }
    KernelResult result{.kernel = one.kernel,
                        .shape = one.shape,
                        .rows = one.rows,
                        .num_copies = one.num_copies,
                        .weight_bytes = one.weight_bytes,
                        .cache_bytes = one.cache_bytes,
                        .activation_bytes = one.activation_bytes,
                        .flops = one.flops,
                        .time = time_case(backend_, one, options_.repeats),
                        .max_error_over_bound = check.max_error_over_bound(),
                        .num_compared = check.num_compared()};
    const auto bytes =
        static_cast<double>(one.weight_bytes + one.cache_bytes + one.activation_bytes);
    // A time too short for the clock has no rate.
    const double us = result.time.median_us;
    result.gb_per_s = us > 0 ? bytes / us * 1e-3 : 0;
    result.tflop_per_s = us > 0 ? one.flops / us * 1e-6 : 0;
    if (one.kernel == kReadKernel) {
      ceiling_gb_per_s_ = result.gb_per_s;  // it comes first
    }
    result.share_of_ceiling = ceiling_gb_per_s_ > 0 ? result.gb_per_s / ceiling_gb_per_s_ : 0;
    on_result_(result);
  }

  // One read of a buffer that no cache holds.
  void measure_ceiling(std::int64_t bytes, std::uint64_t seed) {
    const std::int64_t num_words = bytes / 8 * 2;
    const DeviceTensor words(backend_, DType::kInt32, Shape{num_words});
    const DeviceTensor sum(backend_, DType::kInt32, Shape{1});
    fill_bits(backend_, seed, words.view().raw(), words.bytes());
    measure({.kernel = kReadKernel,
             .shape = {{"words", num_words}},
             .rows = 1,
             .activation_bytes = words.bytes(),
             .run = [&](std::int64_t) { backend_.sum_words(words.view(), sum.view()); },
             .check =
                 [&] {
                   std::uint32_t want = 0;
                   for (std::int64_t i = 0; i < num_words / 2; ++i) {
                     const std::uint64_t pair = random_bits(seed, i);
                     want +=
                         static_cast<std::uint32_t>(pair) + static_cast<std::uint32_t>(pair >> 32);
                   }
                   ResultCheck check;
                   check.equal(download_indices(backend_, sum.view())[0],
                               static_cast<std::int32_t>(want), "sum", 0);
                   return check;
                 }});
  }

  std::int64_t num_wrong() const { return num_wrong_; }

 private:
  Backend& backend_;
  const KernelBenchOptions& options_;
  const std::function<void(const KernelResult&)>& on_result_;
  const std::function<void(const std::string&)>& on_wrong_;
  double ceiling_gb_per_s_ = 0;  // 0: the plain read was wrong
  std::int64_t num_wrong_ = 0;
};

}  // namespace

const std::vector<std::string>& bench_kernel_names() {
  static const std::vector<std::string> kNames = [] {
    std::vector<std::string> names;
    for (const KernelGroup& group : kernel_groups()) {
      names.insert(names.end(), group.names.begin(), group.names.end());
    }
    return names;
  }();
  return kNames;
}

std::int64_t BenchContext::max_rows() const {
  return *std::max_element(options.rows.begin(), options.rows.end());
}

MlaShape BenchContext::mla_shape() const {
  return {.num_heads = partition.heads.size(),
          .qk_nope_head_dim = config.qk_nope_head_dim,
          .qk_rope_head_dim = config.qk_rope_head_dim,
          .v_head_dim = config.v_head_dim,
          .kv_lora_rank = config.kv_lora_rank};
}

bool BenchContext::wants(const std::string& kernel) const {
  const std::vector<std::string>& names = options.kernels;
  return names.empty() || std::find(names.begin(), names.end(), kernel) != names.end();
}

std::int64_t BenchContext::num_copies(const std::string& kernel, std::int64_t bytes) const {
  require_input(bytes <= memory_bytes,
                "{}: one copy takes {} bytes, but {} may be used of the free memory", kernel, bytes,
                memory_bytes);
  const std::int64_t wanted = (working_set_bytes + bytes - 1) / std::max<std::int64_t>(bytes, 1);
  const std::int64_t most = std::min(kMostCopies, memory_bytes / std::max<std::int64_t>(bytes, 1));
  return std::clamp<std::int64_t>(wanted, 1, most);
}

std::uint64_t BenchContext::seed(const std::string& name) const {
  std::uint64_t hash = options.seed;
  for (const char c : name) {
    hash = random_bits(hash, static_cast<unsigned char>(c));
  }
  return hash;
}

std::int64_t run_kernel_bench(Backend& backend, const ModelConfig& config,
                              const KernelBenchOptions& options,
                              const std::function<void(const KernelResult&)>& on_result,
                              const std::function<void(const std::string&)>& on_wrong) {
  LoadOptions load;
  load.world_size = static_cast<int>(options.num_ranks);
  KernelBench bench(backend, options, on_result, on_wrong);
  // More than half of the memory, but not what others may need meanwhile.
  const std::int64_t memory = backend.free_bytes() / 5 * 3;
  const BenchContext context{.backend = backend,
                             .config = config,
                             .options = options,
                             .partition = target_partition(config, load),
                             .working_set_bytes = working_set(backend, options),
                             .memory_bytes = memory,
                             .measure = [&bench](const KernelCase& one) { bench.measure(one); }};
  const std::int64_t read_bytes = backend.name() == "cuda" && options.working_set_bytes == 0
                                      ? kGpuReadBytes
                                      : context.working_set_bytes;
  bench.measure_ceiling(std::min(read_bytes, memory), context.seed("sum_words"));
  for (const KernelGroup& group : kernel_groups()) {
    const bool wanted = std::any_of(group.names.begin(), group.names.end(),
                                    [&](const std::string& name) { return context.wants(name); });
    if (wanted) {
      group.measure(context);
    }
  }
  return bench.num_wrong();
}

}  // namespace kdtree
