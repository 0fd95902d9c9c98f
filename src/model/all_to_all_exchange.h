// See expert_exchange.h. The dispatch is planned on the device. Where collectives can be recorded,
// their sizes must not follow the plan: a rank then sends each other one a fixed number of
// messages, as many as it owns rows, which can never be too few; places without a row name no
// expert. Otherwise the host reads how many messages there are and exactly those are sent.
//
// Owners of rows are expert groups. With attention groups, a group's rows are divided over the
// expert groups within it, and gathered within it alone: by_group(). Where expert groups reach from
// one attention group into another, all rows are divided over all expert groups instead.
#pragma once

#include <vector>

#include "core/partition.h"
#include "model/expert_exchange.h"

namespace kdtree {

class AllToAllExchange final : public ExpertExchange {
 public:
  AllToAllExchange(Backend& backend, const ExchangeSizes& sizes, const RankGroups& groups);

  std::string name() const override { return "alltoall"; }
  bool replayable() const override { return fixed_counts_; }
  bool by_group() const override { return by_group_; }
  void forward(const ModelContext& context, const RoutedRows& rows, const LayerExperts& experts,
               const TensorView& y) override;

  static std::int64_t bytes(const MemoryTraits& traits, const ExchangeSizes& sizes, int world_size);

 private:
  // Sets own_rows_; the rows of `rows` that this rank owns.
  Range divide(const RoutedRows& rows);
  // Plans which of this rank's rows go to which rank: row_indices_ (counted from the first own
  // row), rows_to_ and rows_from_.
  void plan(const ModelContext& context, const RoutedRows& own, const LayerExperts& experts);
  // Sends the planned messages; what came, as rows.
  RoutedRows dispatch(const ModelContext& context, const RoutedRows& own,
                      const LayerExperts& experts);

  int rank_;        // expert group
  int num_ranks_;   // expert groups
  int num_owners_;  // that share the rows of an attention group, or all rows
  bool by_group_;
  bool sliced_;  // moe_tp > 1
  bool fixed_counts_;
  DispatchMessage message_;
  DeviceTensor sent_;         // [max sent rows, message bytes]
  DeviceTensor received_;     // [max received rows, message bytes]
  DeviceTensor computed_;     // [max received rows, hidden]
  DeviceTensor returned_;     // [max sent rows, hidden]
  DeviceTensor own_y_;        // [max own rows, hidden]
  DeviceTensor row_indices_;  // [max sent rows]
  DeviceTensor own_counts_;   // [ranks] int64: rows from this rank to each
  DeviceTensor counts_;       // [ranks, ranks] int64: rows from rank i to rank j
  DeviceTensor experts_workspace_;
  MlpWorkspace mlp_workspace_;

  std::vector<std::int64_t> all_counts_;
  std::vector<std::int64_t> rows_to_;
  std::vector<std::int64_t> rows_from_;
  std::vector<std::int64_t> own_rows_;  // that each expert group owns
};

}  // namespace kdtree
