// Errors of MPI calls as exceptions.
#pragma once

#include <mpi.h>

#include <array>
#include <limits>

#include "core/check.h"

namespace kdtree {

// Throws Error with MPI's own text unless `status` is MPI_SUCCESS. `call` names the function.
inline void check_mpi(int status, const char* call) {
  if (status == MPI_SUCCESS) {
    return;
  }
  std::array<char, MPI_MAX_ERROR_STRING> text{};
  int length = 0;
  MPI_Error_string(status, text.data(), &length);
  fail("{} failed: {}", call, text.data());
}

// MPI counts are ints: larger messages are an error, never a wrong size.
inline int mpi_count(std::int64_t count) {
  check(count >= 0 && count <= std::numeric_limits<int>::max(),
        "message of {} elements is beyond MPI's int counts", count);
  return static_cast<int>(count);
}

}  // namespace kdtree
