// The options of kdtree bench.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <string>
#include <vector>

#include "config/run_config.h"

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

struct BenchAcceptanceOptions {
  RunConfig run;
  std::string modes_text = "plain,chain,tree";
  std::string budgets_text = "4,8,16,32,64";
  std::string output;  // file of the JSON lines; empty: stdout

  // Of the texts above.
  std::vector<std::string> modes;
  std::vector<std::int64_t> budgets;

  // Reads the texts, and sets run.mode and run.tree_budget to those that need the most.
  // InputError names the flag, the value and what was expected.
  void read_lists();
};

inline constexpr std::int64_t kDefaultWindow = 512;

struct BenchPerplexityOptions {
  RunConfig run;
  std::string text;          // a text, or .jsonl with windows of token ids
  std::int64_t window = 0;   // tokens; 0: kDefaultWindow
  std::int64_t stride = 0;   // 0: the window
  std::int64_t windows = 0;  // at most; 0: all
  std::string output;        // file of the JSON line; empty: stdout

  // InputError for options that exclude or need each other.
  void check() const;
  bool text_is_windows() const { return text.ends_with(".jsonl"); }
};

// `options` outlives `app`.
void add_bench_kernels_options(CLI::App& app, BenchKernelsOptions& options);
void add_bench_acceptance_options(CLI::App& app, BenchAcceptanceOptions& options);
void add_bench_perplexity_options(CLI::App& app, BenchPerplexityOptions& options);

}  // namespace kdtree
