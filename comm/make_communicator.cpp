#include "comm/communicator.h"
#include "comm/mpi/make_mpi_communicator.h"
#include "comm/self/self_communicator.h"
#include "core/check.h"

namespace kdtree {

namespace {

constexpr const char* kKnown = "auto, self, mpi or nccl";

std::string resolve(const CommunicatorOptions& options, int world_size) {
  if (options.name != "auto") {
    return options.name;
  }
  return world_size == 1 ? "self" : "mpi";
}

}  // namespace

void check_communicator(const CommunicatorOptions& options, const ProcessGroup& group) {
  const std::string name = resolve(options, group.world_size());
  if (name == "self") {
    require_input(group.world_size() == 1,
                  "--communicator self is for one rank, but this run has {}", group.world_size());
  } else if (name == "mpi") {
    require_mpi_job(group);
  } else {
    require_input(name == "nccl", "--communicator: unknown '{}', expected {}", name, kKnown);
    fail_input(
        "--communicator nccl needs tensors on GPUs, and the backend is {}: use --communicator mpi",
        options.backend);
  }
}

std::unique_ptr<Communicator> make_communicator(const CommunicatorOptions& options,
                                                ProcessGroup& group) {
  check_communicator(options, group);
  if (resolve(options, group.world_size()) == "self") {
    return std::make_unique<SelfCommunicator>();
  }
  return make_mpi_communicator();
}

}  // namespace kdtree
