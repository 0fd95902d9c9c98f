// What the machine's GPUs are, and which of them a rank takes. Free of CUDA headers.
#pragma once

#include <cstdint>
#include <string>

namespace kdtree {

struct DeviceInfo {
  int index = 0;  // among the devices that this process sees
  std::string name;
  std::string pci_bus_id;  // "0000:3B:00.0"
  std::string uuid;        // "GPU-..."
  int compute_capability_major = 0;
  int compute_capability_minor = 0;
  std::int64_t total_bytes = 0;
  std::int64_t free_bytes = 0;
  int num_multiprocessors = 0;
  // Shared memory that one block can be given, in bytes, where a kernel asks for more than 48 KB.
  std::int64_t shared_bytes_per_block = 0;
  std::int64_t l2_bytes = 0;
  int numa_node = -1;        // -1: the system does not say
  std::string driver_cuda;   // newest CUDA that the driver knows, "13.0"
  std::string runtime_cuda;  // CUDA runtime of this program
};

// GPUs that this process sees; 0 without a driver.
int num_devices();

// Error for an index that is not there, or where CUDA fails. Brings up a context on the device to
// ask for its free memory; the calling thread's current device stays as it is.
DeviceInfo device_info(int index);

// The device of a rank that is number local_rank of its host: local_rank where several are visible,
// from the first again where there are more ranks; 0 where the launcher shows each rank one.
// InputError, with what to do, where none is visible. Whether ranks may share a GPU is for the
// communicator to say.
int choose_device(int local_rank);

}  // namespace kdtree
