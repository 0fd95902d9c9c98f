#include "kernels/cuda/cuda_call.h"
#include "kernels/cuda/device_code.h"

namespace kdtree {
namespace {

__global__ void probe_kernel() {}

}  // namespace

bool has_device_code() {
  cudaFuncAttributes attributes{};
  const cudaError_t status = cudaFuncGetAttributes(&attributes, probe_kernel);
  if (status == cudaErrorNoKernelImageForDevice || status == cudaErrorInvalidDeviceFunction ||
      status == cudaErrorUnsupportedPtxVersion) {
    cudaGetLastError();  // or the next launch check would report it again
    return false;
  }
  check_cuda(status, "cudaFuncGetAttributes");
  return true;
}

}  // namespace kdtree
