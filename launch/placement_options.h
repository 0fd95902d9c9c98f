// The options that say which rank holds which experts, or parts of them, and what follows from
// them.
#pragma once

#include <CLI/CLI.hpp>
#include <string>

#include "comm/expert_placement.h"
#include "config/model_config.h"
#include "config/run_config.h"

namespace kdtree {

// --placement, --expert-slots and --expert-load; `options` outlives `app`.
void add_placement_options(CLI::App& app, PlacementOptions& options);

// --moe-ep, --moe-tp, --attention-tp and --attention-dp; `options` outlives `app`.
void add_grid_options(CLI::App& app, GridOptions& options);

// The placement of a model on world_size ranks (expert groups). Reads files: in a run on rank 0
// alone. InputError names flag or file, key, value and what was expected.
ExpertPlacement make_placement(const PlacementOptions& options, const ModelConfig& config,
                               int world_size);

// A file that is written at the end of a run.
class JsonFile {
 public:
  // InputError, naming `flag` and `path`, if the file cannot be written; it is left as it was.
  // Nothing is written for an empty path.
  JsonFile(std::string flag, std::string path);
  bool wanted() const { return !path_.empty(); }
  // As one line. InputError as above.
  void write(const nlohmann::ordered_json& json) const;

 private:
  std::string flag_;
  std::string path_;
};

}  // namespace kdtree
