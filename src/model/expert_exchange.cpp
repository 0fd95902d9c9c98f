#include "model/expert_exchange.h"

#include "model/all_gather_exchange.h"
#include "model/all_reduce_exchange.h"
#include "model/all_to_all_exchange.h"

namespace kdtree {

std::int64_t experts_workspace_bytes(const MemoryTraits& traits, const ExchangeSizes& sizes) {
  return traits.experts_workspace_bytes(sizes.max_rows, sizes.num_experts_per_tok,
                                        sizes.hidden_size, sizes.moe_intermediate_size);
}

const char* exchange_name(ExchangeKind kind) {
  switch (kind) {
    case ExchangeKind::kAllReduce:
      return "allreduce";
    case ExchangeKind::kAllGather:
      return "allgather";
    case ExchangeKind::kAllToAll:
      return "alltoall";
  }
  check(false, "unknown exchange");
  return "";
}

std::optional<ExchangeKind> find_exchange(std::string_view name) {
  for (const ExchangeKind kind : kExchangeKinds) {
    if (name == exchange_name(kind)) {
      return kind;
    }
  }
  return std::nullopt;
}

std::unique_ptr<ExpertExchange> make_expert_exchange(ExchangeKind kind, Backend& backend,
                                                     const ExchangeSizes& sizes,
                                                     const RankGroups& groups) {
  switch (kind) {
    case ExchangeKind::kAllReduce:
      return std::make_unique<AllReduceExchange>(backend, sizes);
    case ExchangeKind::kAllGather:
      return std::make_unique<AllGatherExchange>(backend, sizes, groups);
    case ExchangeKind::kAllToAll:
      return std::make_unique<AllToAllExchange>(backend, sizes, groups);
  }
  check(false, "unknown exchange");
  return nullptr;
}

std::int64_t exchange_bytes(ExchangeKind kind, const MemoryTraits& traits,
                            const ExchangeSizes& sizes, int world_size) {
  switch (kind) {
    case ExchangeKind::kAllReduce:
      return AllReduceExchange::bytes(traits, sizes);
    case ExchangeKind::kAllGather:
      return AllGatherExchange::bytes(traits, sizes, world_size);
    case ExchangeKind::kAllToAll:
      return AllToAllExchange::bytes(traits, sizes, world_size);
  }
  check(false, "unknown exchange");
  return 0;
}

}  // namespace kdtree
