// See expert_exchange.h.
#pragma once

#include "model/expert_exchange.h"

namespace kdtree {

class AllReduceExchange final : public ExpertExchange {
 public:
  AllReduceExchange(Backend& backend, const ExchangeSizes& sizes);

  std::string name() const override { return "allreduce"; }
  bool replayable() const override { return true; }
  void forward(const ModelContext& context, const RoutedRows& rows, const LayerExperts& experts,
               const TensorView& y) override;

  static std::int64_t bytes(const MemoryTraits& traits, const ExchangeSizes& sizes);

 private:
  DeviceTensor experts_workspace_;
  DeviceTensor shared_;  // [rows, hidden]
  MlpWorkspace mlp_workspace_;
};

}  // namespace kdtree
