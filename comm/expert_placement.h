// Where each routed expert lives: logical experts (the router's numbers) on physical slots of the
// ranks. Values without owner or device; equal on every rank of a run.
#pragma once

#include <cstdint>
#include <vector>

namespace kdtree {

// One layer. Every expert is in at least one slot, in at most one of a rank. Physical slots count
// rank 0's first, then rank 1's and so on; a rank may have none.
class LayerPlacement {
 public:
  LayerPlacement() = default;  // no experts, no ranks
  // experts_of_ranks[rank]: the rank's logical experts, in slot order. Error unless they are within
  // [0, n_routed_experts), every one is there, and none twice on a rank.
  LayerPlacement(std::int64_t n_routed_experts,
                 std::vector<std::vector<std::int64_t>> experts_of_ranks);

  std::int64_t n_routed_experts() const { return n_routed_experts_; }
  int world_size() const { return static_cast<int>(experts_of_.size()); }
  std::int64_t num_slots() const { return num_slots_; }  // of all ranks
  // Whether an expert is in more than one slot.
  bool has_replicas() const { return num_slots_ > n_routed_experts_; }
  // Logical experts of `rank`, in slot order.
  const std::vector<std::int64_t>& experts_of(int rank) const {
    return experts_of_[static_cast<std::size_t>(rank)];
  }
  const std::vector<std::vector<std::int64_t>>& experts_of_ranks() const { return experts_of_; }
  bool holds(int rank, std::int64_t expert) const;

  // What a row's experts are dispatched by. Without replicas the logical experts themselves; with
  // replicas the physical slots, of which choose_replicas (kernels/backend.h) takes one for each
  // expert of a row.
  std::int64_t num_targets() const { return has_replicas() ? num_slots_ : n_routed_experts_; }
  // [num_targets] the rank of each.
  std::vector<std::int32_t> ranks_of_targets() const;
  // [num_targets] the slot of each on `rank`, counted from the rank's first; -1 elsewhere.
  std::vector<std::int32_t> slots_on(int rank) const;
  // [n_routed_experts + 1]: expert e has places offsets[e] to offsets[e + 1] of physical_slots().
  std::vector<std::int32_t> replica_offsets() const;
  // [num_slots] physical slots, ordered by expert, then by rank.
  std::vector<std::int32_t> physical_slots() const;

  // Whether every rank has as many slots as there.
  bool same_slots(const LayerPlacement& other) const;
  // The same experts on every rank, those that are there in `before` in the slots that they have
  // there. Error unless same_slots.
  LayerPlacement kept_in_place(const LayerPlacement& before) const;

  bool operator==(const LayerPlacement&) const = default;

 private:
  // Calls visit(expert, rank, slot of the rank, physical slot) for every slot, in order.
  template <class Visit>
  void visit_slots(const Visit& visit) const;

  std::int64_t n_routed_experts_ = 0;
  std::int64_t num_slots_ = 0;
  std::vector<std::vector<std::int64_t>> experts_of_;  // [world_size][slots of the rank]
};

// All layers of a model.
class ExpertPlacement {
 public:
  // Contiguous parts in rank order, the remainder on the low ranks; every expert once, every layer
  // alike.
  static ExpertPlacement linear(std::int64_t n_routed_experts, int world_size);
  // Every layer alike, whatever the number of layers.
  explicit ExpertPlacement(LayerPlacement every_layer);
  // layers[i] is layer i of the model; those of dense layers are not looked at. At least one, all
  // of the same numbers of experts and ranks.
  explicit ExpertPlacement(std::vector<LayerPlacement> layers);

  std::int64_t n_routed_experts() const { return layers_.front().n_routed_experts(); }
  int world_size() const { return layers_.front().world_size(); }
  bool alike() const { return alike_; }  // one placement for every layer
  const LayerPlacement& layer(std::int64_t layer) const;
  // Of every layer.
  bool same_slots(const ExpertPlacement& other) const;
  ExpertPlacement kept_in_place(const ExpertPlacement& before) const;
  // Of all layers; one where they are alike.
  const std::vector<LayerPlacement>& layers() const { return layers_; }

 private:
  bool alike_ = true;
  std::vector<LayerPlacement> layers_;
};

}  // namespace kdtree
