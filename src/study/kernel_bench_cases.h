// The cases of the kernel benchmark: what each op needs on the device, how it is called, how its
// result is checked. One function for each group of ops that share data.
#pragma once

#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>

#include "config/model_config.h"
#include "kernels/backend.h"
#include "study/bench_check.h"
#include "study/kernel_bench.h"
#include "weights/weight_store.h"

namespace kdtree {

// One op at one shape. Valid while the function that made it runs.
struct KernelCase {
  std::string kernel;
  nlohmann::ordered_json shape;
  std::int64_t rows = 0;
  // What one call reads and writes, as the README of tests/bench counts it.
  std::int64_t weight_bytes = 0;
  std::int64_t cache_bytes = 0;
  std::int64_t activation_bytes = 0;
  double flops = 0;
  std::int64_t num_copies = 1;
  // Calls the op on copy 0..num_copies - 1. Fixed arguments, no allocation: it may be recorded.
  std::function<void(std::int64_t copy)> run;
  // Compares the result of run(0), which was called once, right before.
  std::function<ResultCheck()> check;
};

struct BenchContext {
  Backend& backend;
  const ModelConfig& config;
  const KernelBenchOptions& options;
  TargetPartition partition;       // rank 0's heads, widths and vocabulary
  std::int64_t working_set_bytes;  // that copies fill
  std::int64_t memory_bytes;       // that a group may take at most
  std::function<void(const KernelCase&)> measure;

  std::int64_t max_rows() const;
  MlaShape mla_shape() const;
  DType activation() const { return backend.activation_dtype(); }
  std::int64_t activation_size() const { return dtype_bytes(backend.activation_dtype()); }
  // Whether the user asked for this kernel.
  bool wants(const std::string& kernel) const;
  // Copies of `bytes` each that fill the working set, as far as the memory goes; at least 1.
  // InputError where not even one fits.
  std::int64_t num_copies(const std::string& kernel, std::int64_t bytes) const;
  // A seed of its own for each `name`.
  std::uint64_t seed(const std::string& name) const;
};

void bench_linears(const BenchContext& context);     // linear
void bench_mla(const BenchContext& context);         // absorb_query, expand_value, rope
void bench_attention(const BenchContext& context);   // tree_attention
void bench_experts(const BenchContext& context);     // experts
void bench_rows(const BenchContext& context);        // rms_norm, add_rms_norm, swiglu
void bench_router(const BenchContext& context);      // router
void bench_vocabulary(const BenchContext& context);  // top_k, log_sum_exp_partials, merge_top_k
void bench_trees(const BenchContext& context);       // build_trees, expand_trees, accept
void bench_compact(const BenchContext& context);     // compact

}  // namespace kdtree
