// See expert_exchange.h.
#pragma once

#include <vector>

#include "core/partition.h"
#include "model/expert_exchange.h"

namespace kdtree {

class AllToAllExchange final : public ExpertExchange {
 public:
  AllToAllExchange(Backend& backend, const ExpertPlacement& placement, const ExchangeSizes& sizes,
                   const Communicator& communicator);

  std::string name() const override { return "alltoall"; }
  bool replayable() const override { return false; }  // the host plans the dispatch
  void forward(const ModelContext& context, const RoutedRows& rows, const LayerExperts& experts,
               const TensorView& y) override;

  static std::int64_t bytes(const Backend& backend, const ExchangeSizes& sizes, int world_size);

 private:
  // Which of this rank's rows go to which rank: sent_rows_ (indices into all rows, ranks one after
  // the other), rows_to_ and, told by the other ranks, rows_from_.
  void plan_dispatch(const ModelContext& context, const RoutedRows& rows, const Range& own,
                     std::int64_t layer);
  // Sends the rows of `source` that the plan names; returns what came.
  TensorView dispatch(const ModelContext& context, const ConstTensorView& source,
                      const DeviceTensor& sent, const DeviceTensor& received,
                      CollectiveLabel label);
  std::int64_t received_rows() const;

  const ExpertPlacement& placement_;
  int rank_;
  int world_size_;
  DeviceTensor logical_to_slot_;
  DeviceTensor sent_x_;            // [max sent rows, hidden]
  DeviceTensor sent_ids_;          // [max sent rows, k]
  DeviceTensor sent_weights_;      // [max sent rows, k]
  DeviceTensor received_x_;        // [max received rows, hidden]
  DeviceTensor received_ids_;      // [max received rows, k]
  DeviceTensor received_weights_;  // [max received rows, k]
  DeviceTensor computed_;          // [max received rows, hidden]
  DeviceTensor own_y_;             // [max own rows, hidden]
  DeviceTensor row_indices_;       // [max sent rows]
  DeviceTensor counts_;            // [world, world] int64: rows from rank i to rank j
  DeviceTensor experts_workspace_;
  MlpWorkspace mlp_workspace_;

  std::vector<std::int32_t> host_ids_;
  std::vector<std::int32_t> sent_rows_;
  std::vector<std::int32_t> local_rows_;  // sent_rows_ minus the first own row
  std::vector<std::int64_t> all_counts_;
  std::vector<std::int64_t> rows_to_;
  std::vector<std::int64_t> rows_from_;
  std::vector<std::int64_t> own_counts_;
};

}  // namespace kdtree
