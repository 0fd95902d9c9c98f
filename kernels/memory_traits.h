// What of a backend decides how much memory a model takes on it.
#pragma once

#include <cstdint>

#include "core/dtype.h"

namespace kdtree {

// Every Backend is one; make_memory_traits makes one without the device that it speaks of, for
// plans.
class MemoryTraits {
 public:
  MemoryTraits() = default;
  MemoryTraits(const MemoryTraits&) = delete;
  MemoryTraits& operator=(const MemoryTraits&) = delete;
  virtual ~MemoryTraits() = default;

  virtual DType activation_dtype() const = 0;
  // Whether calls may return before their work is done, so that a host has something to do
  // meanwhile.
  virtual bool asynchronous() const = 0;
  // Bytes of ExpertsParams::workspace for calls of up to max_rows rows.
  virtual std::int64_t experts_workspace_bytes(std::int64_t max_rows,
                                               std::int64_t num_experts_per_tok,
                                               std::int64_t hidden_size,
                                               std::int64_t moe_intermediate_size) const = 0;
};

}  // namespace kdtree
