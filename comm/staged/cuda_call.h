// Errors of CUDA calls as exceptions.
#pragma once

#include <cuda_runtime_api.h>

#include "core/buffer.h"
#include "core/check.h"

namespace kdtree {

// Throws Error with CUDA's own text unless `status` is cudaSuccess. `call` names the function.
inline void check_cuda(cudaError_t status, const char* call) {
  if (status != cudaSuccess) {
    fail("{} failed: {} ({})", call, cudaGetErrorString(status), cudaGetErrorName(status));
  }
}

inline cudaStream_t cuda_stream(Stream stream) {
  return static_cast<cudaStream_t>(stream.handle);
}

// Whether work given to `stream` goes into a CUDA graph that is being captured.
inline bool capturing(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check_cuda(cudaStreamIsCapturing(stream, &status), "cudaStreamIsCapturing");
  return status != cudaStreamCaptureStatusNone;
}

}  // namespace kdtree
