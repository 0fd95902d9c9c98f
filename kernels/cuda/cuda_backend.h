// The CUDA backend, for make_backend; free of CUDA headers.
#pragma once

#include <memory>

#include "kernels/backend.h"

namespace kdtree {

// CUDA devices that this process sees; 0 without a driver.
int cuda_device_count();

// A backend on the device that options.local_rank chooses, with activations of
// options.activation_dtype (kFloat32 or kBFloat16). InputError if there is no such device, or its
// compute capability has no machine code in this build.
std::unique_ptr<Backend> make_cuda_backend(const BackendOptions& options);

}  // namespace kdtree
