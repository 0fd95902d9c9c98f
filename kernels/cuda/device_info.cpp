#include "kernels/cuda/device_info.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>

#include "core/check.h"
#include "core/gpu_names.h"

namespace kdtree {

namespace {

void require_success(cudaError_t status, const char* call) {
  if (status != cudaSuccess) {
    fail("{} failed: {} ({})", call, cudaGetErrorString(status), cudaGetErrorName(status));
  }
}

// "13.0" of 13000.
std::string version_text(int version) {
  return fmt::format("{}.{}", version / 1000, version % 1000 / 10);
}

int attribute(cudaDeviceAttr which, int index) {
  int value = 0;
  require_success(cudaDeviceGetAttribute(&value, which, index), "cudaDeviceGetAttribute");
  return value;
}

// Makes a device current for a while.
class CurrentDevice {
 public:
  explicit CurrentDevice(int index) {
    require_success(cudaGetDevice(&before_), "cudaGetDevice");
    require_success(cudaSetDevice(index), "cudaSetDevice");
  }
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;
  ~CurrentDevice() { cudaSetDevice(before_); }

 private:
  int before_ = 0;
};

}  // namespace

int num_devices() {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) {
    cudaGetLastError();  // without a driver there are none, and that is no error of later calls
    return 0;
  }
  return count;
}

DeviceInfo device_info(int index) {
  DeviceInfo info;
  info.index = index;
  cudaDeviceProp properties{};
  require_success(cudaGetDeviceProperties(&properties, index), "cudaGetDeviceProperties");
  info.name = properties.name;
  std::array<std::uint8_t, 16> uuid{};
  std::copy_n(properties.uuid.bytes, uuid.size(), uuid.begin());
  info.uuid = format_gpu_uuid(uuid);
  std::array<char, 32> bus_id{};
  require_success(cudaDeviceGetPCIBusId(bus_id.data(), static_cast<int>(bus_id.size()), index),
                  "cudaDeviceGetPCIBusId");
  info.pci_bus_id = bus_id.data();
  info.numa_node = numa_node_of_pci_device(info.pci_bus_id);
  info.compute_capability_major = properties.major;
  info.compute_capability_minor = properties.minor;
  info.num_multiprocessors = properties.multiProcessorCount;
  info.shared_bytes_per_block = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, index);
  info.l2_bytes = attribute(cudaDevAttrL2CacheSize, index);
  int version = 0;
  require_success(cudaDriverGetVersion(&version), "cudaDriverGetVersion");
  info.driver_cuda = version_text(version);
  require_success(cudaRuntimeGetVersion(&version), "cudaRuntimeGetVersion");
  info.runtime_cuda = version_text(version);
  const CurrentDevice current(index);
  std::size_t free = 0;
  std::size_t total = 0;
  require_success(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
  info.free_bytes = static_cast<std::int64_t>(free);
  info.total_bytes = static_cast<std::int64_t>(total);
  return info;
}

int choose_device(int local_rank) {
  const int count = num_devices();
  require_input(count > 0,
                "no GPU is visible to this process: look at `nvidia-smi`, at CUDA_VISIBLE_DEVICES "
                "and, under Slurm, at --gpus-per-node; or take --backend cpu");
  return local_rank % count;
}

}  // namespace kdtree
