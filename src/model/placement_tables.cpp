#include "model/placement_tables.h"

#include <span>
#include <vector>

namespace kdtree {

namespace {

// Of replica_offsets and physical_slots.
std::int64_t num_offsets(const LayerPlacement& placement) {
  return placement.has_replicas() ? placement.n_routed_experts() + 1 : 0;
}

std::int64_t num_replica_slots(const LayerPlacement& placement) {
  return placement.has_replicas() ? placement.num_slots() : 0;
}

}  // namespace

PlacementTables::PlacementTables(Backend& backend, const LayerPlacement& placement, int rank)
    : has_replicas_(placement.has_replicas()),
      slots_here_(backend, DType::kInt32, Shape{placement.num_targets()}),
      ranks_(backend, DType::kInt32, Shape{placement.num_targets()}),
      replica_offsets_(backend, DType::kInt32, Shape{num_offsets(placement)}),
      physical_slots_(backend, DType::kInt32, Shape{num_replica_slots(placement)}) {
  upload(backend, placement, rank);
}

void PlacementTables::update(Backend& backend, const LayerPlacement& placement, int rank) {
  check(placement.has_replicas() == has_replicas_ &&
            placement.num_targets() == slots_here_.view().num_elements(),
        "a placement of {} slots in tables of {}", placement.num_slots(),
        slots_here_.view().num_elements());
  upload(backend, placement, rank);
}

void PlacementTables::upload(Backend& backend, const LayerPlacement& placement, int rank) {
  const std::vector<std::int32_t> slots = placement.slots_on(rank);
  const std::vector<std::int32_t> ranks = placement.ranks_of_targets();
  const std::vector<std::int32_t> offsets = placement.replica_offsets();
  const std::vector<std::int32_t> physical = placement.physical_slots();
  slots_here_.upload(backend, std::span(slots));
  ranks_.upload(backend, std::span(ranks));
  if (has_replicas_) {
    replica_offsets_.upload(backend, std::span(offsets));
    physical_slots_.upload(backend, std::span(physical));
  }
  backend.synchronize();  // the uploads read vectors that end here
}

std::int64_t PlacementTables::bytes(const LayerPlacement& placement) {
  return dtype_bytes(DType::kInt32) *
         (2 * placement.num_targets() + num_offsets(placement) + num_replica_slots(placement));
}

}  // namespace kdtree
