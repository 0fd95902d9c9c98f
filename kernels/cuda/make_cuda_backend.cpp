#include "kernels/cuda/cuda_backend.h"
#include "kernels/cuda/cuda_backend_impl.h"

namespace kdtree {

int cuda_device_count() {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) {  // no driver, or one older than this build needs
    cudaGetLastError();
    return 0;
  }
  return count;
}

std::unique_ptr<Backend> make_cuda_backend(const BackendOptions& options) {
  return std::make_unique<CudaBackend>(options);
}

}  // namespace kdtree
