// The kernel benchmark: every op of a Backend at the shapes of a model, each result checked before
// it is timed.
#pragma once

#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "config/model_config.h"
#include "kernels/backend.h"
#include "study/bench_check.h"
#include "study/bench_statistics.h"
#include "study/expert_lists.h"

namespace kdtree {

struct KernelBenchOptions {
  std::int64_t num_ranks = 1;  // the slice of rank 0 of so many is measured
  std::vector<std::int64_t> rows = {1, 2, 4, 8, 16, 32, 64};
  std::vector<std::int64_t> prefixes = {1024, 8192};
  std::vector<std::string> kernels;  // names to measure; empty: all
  ExpertHistogram histogram = ExpertHistogram::kUniform;
  std::int64_t repeats = 20;  // measurements of a case
  std::uint64_t seed = 1;
  std::int64_t working_set_bytes = 0;  // what the copies of a weight fill; 0: by the device
};

// The names that KernelBenchOptions::kernels may hold.
const std::vector<std::string>& bench_kernel_names();

struct KernelResult {
  std::string kernel;
  nlohmann::ordered_json shape;  // sizes by name; strings where a case has kinds
  std::int64_t rows = 0;
  std::int64_t num_copies = 1;  // places that the calls cycle over
  std::int64_t weight_bytes = 0;
  std::int64_t cache_bytes = 0;
  std::int64_t activation_bytes = 0;
  double flops = 0;  // of products and attention; 0 for other ops
  TimeSummary time;
  double gb_per_s = 0;  // decimal, of all three kinds of bytes
  double tflop_per_s = 0;
  double share_of_ceiling = 0;  // gb_per_s over that of the plain read
  double max_error_over_bound = 0;
  std::int64_t num_compared = 0;
};

// The plain read comes first, then case after case as they end. `on_result` gets those that are
// right, `on_wrong` a kernel with its shape and what is wrong with it. Returns the number of wrong
// ones. InputError where the model cannot be divided over that many ranks, or a case does not fit
// into the device's memory.
std::int64_t run_kernel_bench(Backend& backend, const ModelConfig& config,
                              const KernelBenchOptions& options,
                              const std::function<void(const KernelResult&)>& on_result,
                              const std::function<void(const std::string&)>& on_wrong);

}  // namespace kdtree
