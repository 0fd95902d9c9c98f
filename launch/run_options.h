// The options that the subcommands which run a model share.
#pragma once

#include <CLI/CLI.hpp>

#include "config/run_config.h"

namespace kdtree {

// `config` outlives `app`.

// --model. That it is there is checked after parsing: a TOML file may name it.
void add_target_option(CLI::App& app, RunConfig& config);
// --draft, --draft-rope-amplitude.
void add_drafter_options(CLI::App& app, RunConfig& config);
// Which weights, computed where and how: --weights to --dtype.
void add_backend_options(CLI::App& app, RunConfig& config);
// --threads, --log-level.
void add_process_options(CLI::App& app, RunConfig& config);

}  // namespace kdtree
