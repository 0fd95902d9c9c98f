// The subcommands. Each is collective, prints results on rank 0 and returns the exit code; errors
// are exceptions.
#pragma once

#include "comm/process_group.h"
#include "command_line.h"
#include "config/run_config.h"

namespace kdtree {

int run_generate(const RunConfig& config, ProcessGroup& group);
int run_inspect(const InspectOptions& options, ProcessGroup& group);
int run_convert(const ConvertCommand& command, ProcessGroup& group);
int run_plan(const PlanOptions& options, ProcessGroup& group);
int run_bench_kernels(const BenchKernelsOptions& options, ProcessGroup& group);
int run_bench_acceptance(const BenchAcceptanceOptions& options, ProcessGroup& group);
int run_bench_perplexity(const BenchPerplexityOptions& options, ProcessGroup& group);

}  // namespace kdtree
