// The GPU that this process uses, for the binding table. Free of CUDA headers.
#pragma once

#include "comm/gpu_binding.h"

namespace kdtree {

// The calling thread's current CUDA device; rank and host are left for the gathering. Error where
// CUDA has none.
GpuOfRank current_gpu();

}  // namespace kdtree
