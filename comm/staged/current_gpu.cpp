#include "comm/staged/current_gpu.h"

#include <algorithm>
#include <array>
#include <cstdint>

#include "comm/staged/cuda_call.h"
#include "core/gpu_names.h"

namespace kdtree {

GpuOfRank current_gpu() {
  GpuOfRank gpu;
  check_cuda(cudaGetDevice(&gpu.device_index), "cudaGetDevice");
  std::array<char, 32> bus_id{};
  check_cuda(
      cudaDeviceGetPCIBusId(bus_id.data(), static_cast<int>(bus_id.size()), gpu.device_index),
      "cudaDeviceGetPCIBusId");
  gpu.pci_bus_id = bus_id.data();
  cudaDeviceProp properties{};
  check_cuda(cudaGetDeviceProperties(&properties, gpu.device_index), "cudaGetDeviceProperties");
  std::array<std::uint8_t, 16> uuid{};
  std::copy_n(properties.uuid.bytes, uuid.size(), uuid.begin());
  gpu.uuid = format_gpu_uuid(uuid);
  gpu.name = properties.name;
  gpu.numa_node = numa_node_of_pci_device(gpu.pci_bus_id);
  return gpu;
}

}  // namespace kdtree
