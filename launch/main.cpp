// kdtree: parses the command line, brings up the ranks, runs one subcommand. Exit codes: 0 done, 1
// failed, 2 a wrong command line.
#include <fcntl.h>

#include <cstdio>
#include <exception>
#include <iostream>
#include <memory>

#include "command_line.h"
#include "commands.h"
#include "core/check.h"
#include "core/log.h"
#include "ranks.h"
#include "result_output.h"

namespace {

using kdtree::Command;

constexpr int kFailed = 1;
constexpr int kWrongUsage = 2;

void print_error(const std::string& text) {
  std::cerr << "kdtree: error: " << text << std::endl;
}

// A program started with stdin, stdout or stderr closed would get their numbers for the next file
// or socket that it opens, and write its results there. A stdout that cannot be written stays an
// error.
void occupy_standard_descriptors() {
  for (const int descriptor : {0, 1, 2}) {
    if (fcntl(descriptor, F_GETFD) == -1) {
      // The lowest free number is this one.
      static_cast<void>(open("/dev/null", descriptor == 2 ? O_WRONLY : O_RDONLY));
    }
  }
}

// Runs the subcommand on this rank. An error that all ranks share is printed once; any other ends
// all ranks at once.
int run(const Command& command, kdtree::ProcessGroup& group) {
  try {
    if (command.kind == Command::Kind::kInspect) {
      return kdtree::run_inspect(command.inspect, group);
    }
    if (command.kind == Command::Kind::kBenchKernels) {
      return kdtree::run_bench_kernels(command.bench_kernels, group);
    }
    return kdtree::run_generate(command.generate, group);
  } catch (const kdtree::AgreedError& error) {
    if (group.rank() == 0) {
      print_error(error.what());
    }
    return kFailed;
  } catch (const std::exception& error) {
    print_error(fmt::format("rank {} on {}: {}", group.rank(), group.host_name(), error.what()));
    group.abort(kFailed);
  }
  return kFailed;
}

// Whether all ranks could read their command lines, a TOML file included, which may be missing on
// one host alone. One rank prints, also where MPI takes each for the only one.
bool agree_on_usage(const std::string& usage_error, kdtree::ProcessGroup& group) {
  try {
    kdtree::run_together(group,
                         [&] { kdtree::require_input(usage_error.empty(), "{}", usage_error); });
    return true;
  } catch (const kdtree::AgreedError& error) {
    if (group.rank() == 0 && (group.world_size() > 1 || kdtree::speaks_before_mpi())) {
      print_error(error.what());
    }
    return false;
  }
}

int start(int argc, char** argv) {
  Command command;
  std::string usage_error;
  try {
    command = kdtree::parse_command_line(argc, argv);
  } catch (const kdtree::InputError& error) {
    usage_error = error.what();
  }
  if (usage_error.empty() && command.kind == Command::Kind::kPrint) {
    if (kdtree::speaks_before_mpi()) {
      kdtree::write_stdout(command.text);
    }
    return 0;
  }
  const bool single = !usage_error.empty() || command.kind != Command::Kind::kGenerate ||
                      command.generate.communicator == "self";
  std::unique_ptr<kdtree::ProcessGroup> group = kdtree::start_process_group(&argc, &argv, single);
  return agree_on_usage(usage_error, *group) ? run(command, *group) : kWrongUsage;
}

}  // namespace

int main(int argc, char** argv) {
  occupy_standard_descriptors();
  try {
    return start(argc, argv);
  } catch (const std::exception& error) {
    if (kdtree::speaks_before_mpi()) {
      print_error(error.what());
    }
    return kFailed;
  }
}
