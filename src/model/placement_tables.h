// A layer's placement in the memory of the device, as its experts are dispatched by it.
#pragma once

#include <cstdint>

#include "comm/expert_placement.h"
#include "kernels/device_tensor.h"

namespace kdtree {

class PlacementTables {
 public:
  // As `rank` of the placement (an expert group) needs it.
  PlacementTables(Backend& backend, const LayerPlacement& placement, int rank);

  // Takes another placement in the same memory, so that recorded steps follow it. Not while a step
  // is in flight. Error unless it has as many slots as the first.
  void update(Backend& backend, const LayerPlacement& placement, int rank);

  // With replicas, experts are dispatched by the physical slots that choose_replicas takes;
  // without, by their own numbers.
  bool has_replicas() const { return has_replicas_; }
  // [targets] slot on this rank, or -1; and the rank (expert group) that holds it.
  ConstTensorView slots_here() const { return slots_here_.view(); }
  ConstTensorView ranks() const { return ranks_.view(); }
  // Of choose_replicas; only with replicas.
  ConstTensorView replica_offsets() const { return replica_offsets_.view(); }
  ConstTensorView physical_slots() const { return physical_slots_.view(); }

  static std::int64_t bytes(const LayerPlacement& placement);

 private:
  void upload(Backend& backend, const LayerPlacement& placement, int rank);

  bool has_replicas_;
  DeviceTensor slots_here_;       // [targets]
  DeviceTensor ranks_;            // [targets]
  DeviceTensor replica_offsets_;  // [n_routed_experts + 1], or empty
  DeviceTensor physical_slots_;   // [slots], or empty
};

}  // namespace kdtree
