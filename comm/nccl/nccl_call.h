// Errors of NCCL calls as exceptions.
#pragma once

#include <nccl.h>

#include "core/check.h"

namespace kdtree {

// Throws Error with NCCL's own text unless `status` is ncclSuccess. `call` names the function.
inline void check_nccl(ncclResult_t status, const char* call, ncclComm_t comm = nullptr) {
  if (status != ncclSuccess) {
    fail("{} failed: {} ({}); NCCL_DEBUG=WARN says more", call, ncclGetErrorString(status),
         ncclGetLastError(comm));
  }
}

}  // namespace kdtree
