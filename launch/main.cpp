// kdtree: parses the command line, brings up the ranks, runs one subcommand. Exit codes: 0 done, 1
// failed, 2 a wrong command line.
#include <cstdio>
#include <exception>
#include <iostream>
#include <memory>

#include "command_line.h"
#include "commands.h"
#include "core/check.h"
#include "core/log.h"
#include "ranks.h"

namespace {

using kdtree::Command;

constexpr int kFailed = 1;
constexpr int kWrongUsage = 2;

void print_error(const char* text) {
  std::cerr << "kdtree: error: " << text << std::endl;
}

// Runs the subcommand on this rank. An error that all ranks share is printed once; any other ends
// all ranks at once.
int run(const Command& command, kdtree::ProcessGroup& group) {
  try {
    if (command.kind == Command::Kind::kInspect) {
      return kdtree::run_inspect(command.inspect, group);
    }
    return kdtree::run_generate(command.generate, group);
  } catch (const kdtree::AgreedError& error) {
    if (group.rank() == 0) {
      print_error(error.what());
    }
    return kFailed;
  } catch (const std::exception& error) {
    print_error(
        fmt::format("rank {} on {}: {}", group.rank(), group.host_name(), error.what()).c_str());
    group.abort(kFailed);
  }
  return kFailed;
}

// Every rank parses the same words, so all agree on a wrong command line; one of them prints.
int usage_error(int argc, char** argv, const char* text) {
  std::unique_ptr<kdtree::ProcessGroup> group = kdtree::start_process_group(&argc, &argv, true);
  if (group->rank() == 0) {
    print_error(text);
  }
  return kWrongUsage;
}

int start(int argc, char** argv) {
  Command command;
  try {
    command = kdtree::parse_command_line(argc, argv);
  } catch (const kdtree::InputError& error) {
    return usage_error(argc, argv, error.what());
  }
  if (command.kind == Command::Kind::kPrint) {
    if (kdtree::speaks_before_mpi()) {
      std::cout << command.text << std::flush;
    }
    return 0;
  }
  const bool single =
      command.kind == Command::Kind::kInspect || command.generate.communicator == "self";
  std::unique_ptr<kdtree::ProcessGroup> group = kdtree::start_process_group(&argc, &argv, single);
  return run(command, *group);
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return start(argc, argv);
  } catch (const std::exception& error) {
    if (kdtree::speaks_before_mpi()) {
      print_error(error.what());
    }
    return kFailed;
  }
}
