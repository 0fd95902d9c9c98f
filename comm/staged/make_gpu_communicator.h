// The communicators for device tensors without their CUDA headers, for make_communicator.
#pragma once

#include <memory>

#include "comm/communicator.h"

namespace kdtree {

// `name` is self, mpi or nccl; staging_bytes as in CommunicatorOptions. Collective. With several
// ranks it logs which one uses which GPU; two of them on one GPU are an AgreedError for nccl.
std::unique_ptr<Communicator> make_gpu_communicator(const std::string& name,
                                                    std::int64_t staging_bytes,
                                                    ProcessGroup& group);

}  // namespace kdtree
