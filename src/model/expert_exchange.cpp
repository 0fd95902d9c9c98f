#include "model/expert_exchange.h"

#include "model/all_reduce_exchange.h"
#include "model/all_to_all_exchange.h"

namespace kdtree {

std::int64_t experts_workspace_bytes(const MemoryTraits& traits, const ExchangeSizes& sizes) {
  return traits.experts_workspace_bytes(sizes.max_rows, sizes.num_experts_per_tok,
                                        sizes.hidden_size, sizes.moe_intermediate_size);
}

std::unique_ptr<ExpertExchange> make_expert_exchange(ExchangeKind kind, Backend& backend,
                                                     const ExchangeSizes& sizes,
                                                     Communicator& communicator) {
  if (kind == ExchangeKind::kAllReduce) {
    return std::make_unique<AllReduceExchange>(backend, sizes);
  }
  return std::make_unique<AllToAllExchange>(backend, sizes, communicator);
}

std::int64_t exchange_bytes(ExchangeKind kind, const MemoryTraits& traits,
                            const ExchangeSizes& sizes, int world_size) {
  if (kind == ExchangeKind::kAllReduce) {
    return AllReduceExchange::bytes(traits, sizes);
  }
  return AllToAllExchange::bytes(traits, sizes, world_size);
}

}  // namespace kdtree
