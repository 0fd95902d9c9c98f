// The options of kdtree bench.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <string>
#include <vector>

namespace kdtree {

struct BenchKernelsOptions {
  std::string model_config;  // a Hugging Face config.json
  std::int64_t ranks = 1;    // whose rank 0 is measured
  std::string rows_text = "1,2,4,8,16,32,64";
  std::string prefix_text = "1024,8192";
  std::string kernels_text;  // empty: all
  std::string histogram = "uniform";
  std::int64_t repeats = 20;
  std::int64_t seed = 1;
  std::int64_t working_set_mb = 0;  // decimal; 0: by the device
  std::string backend = "auto";
  std::string dtype = "auto";
  std::int64_t threads = 0;
  std::string output;  // file of the JSON lines; empty: stdout

  // Of the texts above.
  std::vector<std::int64_t> rows;
  std::vector<std::int64_t> prefixes;
  std::vector<std::string> kernels;

  // Reads the texts. InputError names the flag, the value and what was expected.
  void read_lists();
};

// `options` outlives `app`.
void add_bench_kernels_options(CLI::App& app, BenchKernelsOptions& options);

}  // namespace kdtree
