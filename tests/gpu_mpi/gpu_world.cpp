#include "tests/gpu_mpi/gpu_world.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <vector>

#include "comm/gpu_binding.h"
#include "comm/staged/cuda_call.h"
#include "comm/staged/current_gpu.h"

namespace kdtree {

GpuWorld::GpuWorld(ProcessGroup& group) : group_(group) {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess) {
    cudaGetLastError();
    devices = 0;
  }
  std::vector<int> all(static_cast<std::size_t>(size()));
  group.all_gather(&devices, sizeof devices, all.data());
  fewest_devices_ = *std::min_element(all.begin(), all.end());
  if (!has_gpu()) {
    return;
  }
  device_ = group.local_rank() % devices;
  use_own_gpu();
  try {
    require_gpu_for_each_rank(gather_gpu_binding(group, current_gpu()));
    distinct_ = true;
  } catch (const InputError&) {
    distinct_ = false;
  }
}

void GpuWorld::use_own_gpu() const {
  check_cuda(cudaSetDevice(device_), "cudaSetDevice");
}

std::string GpuWorld::obstacle(const std::string& name) const {
  if (!has_gpu()) {
    return "a rank sees no GPU";
  }
  if (name == "self" && size() > 1) {
    return "communicator self is for one rank";
  }
  if (name == "nccl" && !has_gpu_for_each()) {
    return "communicator nccl needs a GPU for each rank, and here ranks share one";
  }
  return "";
}

Communicator& GpuWorld::communicator(const std::string& name) {
  std::unique_ptr<Communicator>& kept = name == "self" ? self_ : name == "mpi" ? mpi_ : nccl_;
  if (!kept) {
    // Little staging memory, so that the tests see it grow.
    kept = make_communicator({.name = name, .backend = "cuda", .staging_bytes = 4096}, group_);
  }
  return *kept;
}

void GpuWorld::release() {
  self_.reset();
  mpi_.reset();
  nccl_.reset();
}

}  // namespace kdtree
