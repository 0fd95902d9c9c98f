// Which rank uses which GPU: gathered over the ranks, printed at the start, and checked for GPUs
// that two ranks share.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "comm/process_group.h"

namespace kdtree {

// The GPU of one rank. Texts longer than 63 bytes are cut where they are gathered.
struct GpuOfRank {
  int rank = 0;
  std::string host;
  int device_index = 0;    // among the devices that the rank sees
  std::string pci_bus_id;  // "0000:3B:00.0"
  std::string uuid;        // "GPU-..."
  std::string name;
  int numa_node = -1;  // -1: the system does not say
};

// Every rank's GPU, in rank order. Collective; rank and host of `own` are filled in from the group.
std::vector<GpuOfRank> gather_gpu_binding(ProcessGroup& group, const GpuOfRank& own);

// A table with one line a rank, for the log; no line break at the end.
std::string format_gpu_binding(std::span<const GpuOfRank> binding);

// InputError that names every GPU (host and PCI bus id) with more than one rank, and what to do.
void require_gpu_for_each_rank(std::span<const GpuOfRank> binding);

}  // namespace kdtree
