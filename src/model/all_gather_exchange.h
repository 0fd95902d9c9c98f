// See expert_exchange.h.
#pragma once

#include <vector>

#include "model/all_reduce_exchange.h"

namespace kdtree {

class AllGatherExchange final : public ExpertExchange {
 public:
  AllGatherExchange(Backend& backend, const ExchangeSizes& sizes, const RankGroups& groups);

  std::string name() const override { return "allgather"; }
  bool replayable() const override { return true; }
  void forward(const ModelContext& context, const RoutedRows& rows, const LayerExperts& experts,
               const TensorView& y) override;

  static std::int64_t bytes(const MemoryTraits& traits, const ExchangeSizes& sizes, int world_size);

 private:
  int rank_;
  int world_size_;
  LocalExperts local_;
  DeviceTensor own_y_;                  // [max own rows, hidden]
  std::vector<std::int64_t> own_rows_;  // that each rank owns
};

}  // namespace kdtree
