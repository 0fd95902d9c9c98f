// The options of kdtree plan.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <string>

#include "config/run_config.h"

namespace kdtree {

struct PlanOptions {
  std::string model_config;  // a Hugging Face config.json
  std::string draft_config;  // of a DFlash drafter; empty: none
  std::int64_t ranks = 1;
  std::string gpu;             // empty: none
  double memory_gb = 0;        // decimal, of a rank; 0: what `gpu` has
  double memory_fraction = 0;  // of that memory, for max_context; 0: max_context counts
  std::int64_t max_context = 0;
  std::int64_t batch_size = 1;
  std::string mode = "auto";
  std::int64_t tree_budget = 16;
  std::string exchange = "auto";
  GridOptions grid;
  PlacementOptions placement;
  std::string write_placement;  // file that gets the placement; empty: none
  std::string weights = "auto";
  std::string backend = "cuda";
  std::string dtype = "auto";
  std::string output_format = "text";

  // InputError for options that exclude or need each other.
  void check() const;
};

// `options` outlives `app`.
void add_plan_options(CLI::App& app, PlanOptions& options);

}  // namespace kdtree
