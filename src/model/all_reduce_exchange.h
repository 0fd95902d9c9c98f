// See expert_exchange.h.
#pragma once

#include "model/expert_exchange.h"

namespace kdtree {

// The share that this rank's experts, and its part of the shared ones, have in every row.
class LocalExperts {
 public:
  LocalExperts(Backend& backend, const ExchangeSizes& sizes);

  // y [rows, hidden] = that share: the sum over ranks is the layer's result.
  void forward(Backend& backend, const RoutedRows& rows, const LayerExperts& experts,
               const TensorView& y);

  static std::int64_t bytes(const MemoryTraits& traits, const ExchangeSizes& sizes);

 private:
  DeviceTensor experts_workspace_;
  DeviceTensor shared_;  // [rows, hidden]
  MlpWorkspace mlp_workspace_;
};

class AllReduceExchange final : public ExpertExchange {
 public:
  AllReduceExchange(Backend& backend, const ExchangeSizes& sizes) : local_(backend, sizes) {}

  std::string name() const override { return "allreduce"; }
  bool replayable() const override { return true; }
  void forward(const ModelContext& context, const RoutedRows& rows, const LayerExperts& experts,
               const TensorView& y) override;

  static std::int64_t bytes(const MemoryTraits& traits, const ExchangeSizes& sizes) {
    return LocalExperts::bytes(traits, sizes);
  }

 private:
  LocalExperts local_;
};

}  // namespace kdtree
