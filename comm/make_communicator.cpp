#include "comm/communicator.h"
#include "comm/mpi/collective_watch.h"
#include "comm/mpi/make_mpi_communicator.h"
#include "comm/self/self_communicator.h"
#include "core/check.h"
#ifdef KDTREE_WITH_CUDA
#include "comm/staged/make_gpu_communicator.h"
#endif

namespace kdtree {

namespace {

constexpr const char* kKnown = "auto, self, mpi or nccl";

bool on_gpus(const CommunicatorOptions& options) {
  return options.backend == "cuda";
}

std::string resolve(const CommunicatorOptions& options, int world_size) {
  if (options.name != "auto") {
    return options.name;
  }
  if (world_size == 1) {
    return "self";
  }
  return on_gpus(options) ? "nccl" : "mpi";
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
    require_input(
        on_gpus(options),
        "--communicator nccl needs tensors on GPUs, and the backend is {}: use --communicator mpi",
        options.backend);
    collective_time_limit();  // an InputError here is one that every rank knows of
  }
}

std::unique_ptr<Communicator> make_communicator(const CommunicatorOptions& options,
                                                ProcessGroup& group) {
  check_communicator(options, group);
  const std::string name = resolve(options, group.world_size());
  if (on_gpus(options)) {
#ifdef KDTREE_WITH_CUDA
    return make_gpu_communicator(name, options.staging_bytes, group);
#else
    fail_input("tensors on GPUs, but this build has no CUDA: build with `cmake --preset cuda`");
#endif
  }
  if (name == "self") {
    return std::make_unique<SelfCommunicator>();
  }
  return make_mpi_communicator();
}

}  // namespace kdtree
