// Runs a command on this rank, and says how it failed.
#pragma once

#include <string>

#include "comm/process_group.h"
#include "command_line.h"

namespace kdtree {

inline constexpr int kExitFailed = 1;
inline constexpr int kExitWrongUsage = 2;

// One line on stderr: "kdtree: error: TEXT".
void print_error(const std::string& text);

// Whether all ranks could read their command lines, a TOML file included, which may be missing on
// one host alone; `usage_error` is this rank's, or empty. One rank prints, also where MPI takes
// each for the only one.
bool agree_on_usage(const std::string& usage_error, ProcessGroup& group);

// Runs the subcommand; the exit code. An error that all ranks share is printed once; any other ends
// all ranks at once.
int run_command(const Command& command, ProcessGroup& group);

}  // namespace kdtree
