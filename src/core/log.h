// Logging through spdlog, always to stderr: stdout carries results only.
#pragma once

#include <spdlog/spdlog.h>

#include <string>

namespace kdtree {

// Sets up the process's logger. Rank 0 prints from `level` up; the other ranks print warnings and
// errors only, and every line of theirs names the rank. `level` is one of trace, debug, info, warn,
// error, off (InputError otherwise).
void init_logging(const std::string& level, int rank, int world_size);

}  // namespace kdtree
