#include "comm/staged/make_gpu_communicator.h"

#include <vector>

#include "comm/gpu_binding.h"
#include "comm/nccl/nccl_communicator.h"
#include "comm/staged/current_gpu.h"
#include "comm/staged/device_self_communicator.h"
#include "comm/staged/staged_communicator.h"
#include "core/log.h"

namespace kdtree {

std::unique_ptr<Communicator> make_gpu_communicator(const std::string& name,
                                                    std::int64_t staging_bytes,
                                                    ProcessGroup& group) {
  if (name == "self") {
    return std::make_unique<DeviceSelfCommunicator>();
  }
  GpuOfRank own;
  run_together(group, [&] { own = current_gpu(); });
  const std::vector<GpuOfRank> binding = gather_gpu_binding(group, own);
  spdlog::info("GPUs of the ranks:\n{}", format_gpu_binding(binding));
  if (name == "mpi") {
    return std::make_unique<StagedCommunicator>(staging_bytes);
  }
  run_together(group, [&] { require_gpu_for_each_rank(binding); });
  return std::make_unique<NcclCommunicator>(group);
}

}  // namespace kdtree
