// Errors of CUDA and cuBLAS calls and of kernel launches as exceptions.
#pragma once

#include <cublas_v2.h>
#include <cuda_runtime.h>

#include <source_location>

#include "core/check.h"

namespace kdtree {

// Throws Error with CUDA's name and text of the failure.
inline void check_cuda(cudaError_t status, const char* what,
                       std::source_location where = std::source_location::current()) {
  if (status != cudaSuccess) {
    throw Error(fmt::format("{}: {} ({}) [{}:{}]", what, cudaGetErrorName(status),
                            cudaGetErrorString(status), where.file_name(), where.line()));
  }
}

inline void check_cublas(cublasStatus_t status, const char* what,
                         std::source_location where = std::source_location::current()) {
  if (status != CUBLAS_STATUS_SUCCESS) {
    throw Error(fmt::format("{}: {} [{}:{}]", what, cublasGetStatusString(status),
                            where.file_name(), where.line()));
  }
}

// After a kernel launch: launch errors only, no synchronisation.
inline void check_launch(const char* kernel,
                         std::source_location where = std::source_location::current()) {
  check_cuda(cudaGetLastError(), kernel, where);
}

}  // namespace kdtree
