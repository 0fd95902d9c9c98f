// How the ranks of a run share the routed experts and the attention between them.
#pragma once

namespace kdtree {

// moe_ep x moe_tp = ranks = attention_tp x attention_dp. Which rank is which: the tensor-parallel
// index counts fastest, so that neighbouring ranks hold slices of the same experts, and heads of
// the same sequences. Ranks are those of all. Both sizes divide the number of ranks.
struct ParallelGrid {
  int moe_tp = 1;        // slices of each routed expert, one a rank of an expert group
  int attention_dp = 1;  // attention groups: each holds sequences of its own

  // Expert groups: the ranks of one hold slices of the same experts.
  int moe_ep(int world_size) const { return world_size / moe_tp; }
  int expert_group(int rank) const { return rank / moe_tp; }
  int expert_slice(int rank) const { return rank % moe_tp; }

  // Ranks of an attention group, which share the heads.
  int attention_tp(int world_size) const { return world_size / attention_dp; }
  int attention_group(int rank, int world_size) const { return rank / attention_tp(world_size); }
  int attention_place(int rank, int world_size) const { return rank % attention_tp(world_size); }

  bool operator==(const ParallelGrid&) const = default;
};

}  // namespace kdtree
