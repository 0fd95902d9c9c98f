#include "run_command.h"

#include <fmt/format.h>

#include <exception>
#include <iostream>

#include "commands.h"
#include "core/check.h"
#include "ranks.h"

namespace kdtree {

namespace {

int run_subcommand(const Command& command, ProcessGroup& group) {
  switch (command.kind) {
    case Command::Kind::kInspect:
      return run_inspect(command.inspect, group);
    case Command::Kind::kConvert:
      return run_convert(command.convert, group);
    case Command::Kind::kPlan:
      return run_plan(command.plan, group);
    case Command::Kind::kBenchKernels:
      return run_bench_kernels(command.bench_kernels, group);
    case Command::Kind::kBenchAcceptance:
      return run_bench_acceptance(command.bench_acceptance, group);
    case Command::Kind::kBenchPerplexity:
      return run_bench_perplexity(command.bench_perplexity, group);
    case Command::Kind::kGenerate:
      return run_generate(command.generate, group);
    case Command::Kind::kPrint:
      break;
  }
  fail("a command that runs nothing");
}

}  // namespace

void print_error(const std::string& text) {
  std::cerr << "kdtree: error: " << text << std::endl;
}

bool agree_on_usage(const std::string& usage_error, ProcessGroup& group) {
  try {
    run_together(group, [&] { require_input(usage_error.empty(), "{}", usage_error); });
    return true;
  } catch (const AgreedError& error) {
    if (group.rank() == 0 && (group.world_size() > 1 || speaks_before_mpi())) {
      print_error(error.what());
    }
    return false;
  }
}

int run_command(const Command& command, ProcessGroup& group) {
  try {
    return run_subcommand(command, group);
  } catch (const AgreedError& error) {
    if (group.rank() == 0) {
      print_error(error.what());
    }
    return kExitFailed;
  } catch (const std::exception& error) {
    print_error(fmt::format("rank {} on {}: {}", group.rank(), group.host_name(), error.what()));
    group.abort(kExitFailed);
  }
  return kExitFailed;
}

}  // namespace kdtree
