// kdtree: parses the command line, brings up the ranks, runs one subcommand. Exit codes: 0 done, 1
// failed, 2 a wrong command line.
#include <fcntl.h>

#include <exception>
#include <memory>
#include <string>

#include "command_line.h"
#include "core/check.h"
#include "ranks.h"
#include "result_output.h"
#include "run_command.h"

namespace {

using kdtree::Command;

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
  const kdtree::RunConfig* run = command.run();
  const bool single = !usage_error.empty() || run == nullptr || run->communicator == "self";
  std::unique_ptr<kdtree::ProcessGroup> group = kdtree::start_process_group(&argc, &argv, single);
  return kdtree::agree_on_usage(usage_error, *group) ? kdtree::run_command(command, *group)
                                                     : kdtree::kExitWrongUsage;
}

}  // namespace

int main(int argc, char** argv) {
  occupy_standard_descriptors();
  try {
    return start(argc, argv);
  } catch (const std::exception& error) {
    if (kdtree::speaks_before_mpi()) {
      kdtree::print_error(error.what());
    }
    return kdtree::kExitFailed;
  }
}
