// How tokens reach their experts and results come back.
//
//   allreduce  Activations are replicated: every rank computes the share of its experts (and of its
//              part of the shared experts) for all rows; one all-reduce combines.
//   allgather  Every rank computes as above for all rows; the sum of a row is formed on the rank
//   that
//              owns it (reduce-scatter) and gathered from there. As many bytes as an all-reduce, in
//              two collectives.
//   alltoall   Rows are divided over the ranks. The owner of a row sends it once to each rank that
//              holds one of its experts (dispatch) and adds what comes back (combine), in rank
//              order; it computes the shared experts of its rows itself, whole; an all-gather then
//              gives every rank all rows.
//
// Where experts are cut into slices (moe_tp), each rank has those of its expert group. allreduce
// sums them up with all else. Under alltoall an expert group owns rows together: each of its ranks
// sends them to the ranks that have its slices in other groups, and computes its slice of the
// shared experts; a sum over the group comes before the all-gather.
//
// In all of them a row's result does not depend on the other rows: experts are added in the
// router's order within a rank, ranks in rank order, and which replica of an expert a row takes
// follows from the row's own experts (kernels/replica_choice.h). What an expert gives for a row has
// the same bits on every rank; which of them are added on one rank before ranks are added follows
// the placement.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/device_tensor.h"
#include "model/mlp.h"
#include "model/model_context.h"
#include "model/placement_tables.h"

namespace kdtree {

struct ExchangeSizes {
  std::int64_t max_rows = 0;
  std::int64_t max_group_rows = 0;  // of an attention group
  std::int64_t hidden_size = 0;
  std::int64_t num_experts_per_tok = 0;
  std::int64_t moe_intermediate_size = 0;  // of this rank's slices
  std::int64_t shared_width = 0;           // of this rank's part of the shared experts; 0 without
  bool fixed_counts = false;  // alltoall: message counts that depend on the sizes alone
  ParallelGrid grid = {};
};

// What Backend::experts needs for max_rows rows.
std::int64_t experts_workspace_bytes(const MemoryTraits& traits, const ExchangeSizes& sizes);

// Rows with the router's decision: all of a call, alike on every rank, or, where the exchange works
// by_group(), those of this rank's attention group, alike on its ranks.
struct RoutedRows {
  ConstTensorView x;  // [rows, hidden]
  // [rows, num_experts_per_tok] logical experts or, where the layer has replicas, physical slots
  ConstTensorView targets;
  ConstTensorView expert_weights;  // [rows, num_experts_per_tok]
  // [attention_dp] rows of each attention group; where the exchange works by_group() only
  std::span<const std::int64_t> rows_of_groups = {};
};

// What a layer's experts are on this rank.
struct LayerExperts {
  std::int64_t layer = 0;
  const ExpertSet* experts = nullptr;
  const Mlp* shared = nullptr;  // nullptr without shared experts
  const PlacementTables* placement = nullptr;
};

// Places in a layer's exchange, in stream order, that its times are taken at.
enum class ExchangeMark : std::uint8_t {
  kBegin,
  kDispatched,  // this rank's experts have their rows
  kComputed,    // they, and what of the shared experts comes with them, are done
  kEnd,         // the rows are complete everywhere
};
inline constexpr std::size_t kMarksAnExchange = 4;

class ExpertExchange {
 public:
  ExpertExchange() = default;
  ExpertExchange(const ExpertExchange&) = delete;
  ExpertExchange& operator=(const ExpertExchange&) = delete;
  virtual ~ExpertExchange() = default;

  virtual std::string name() const = 0;
  // Whether forward() neither asks the host nor changes its calls with the rows' routing, so that
  // it can be recorded.
  virtual bool replayable() const = 0;
  // Whether a rank gives and gets the rows of its attention group alone, rather than all rows.
  virtual bool by_group() const { return false; }
  // y [rows, hidden] = routed + shared experts of every row, complete on every rank that gave it.
  virtual void forward(const ModelContext& context, const RoutedRows& rows,
                       const LayerExperts& experts, const TensorView& y) = 0;

  // From now on forward() stamps the backend's marks first_mark to first_mark + kMarksAnExchange -
  // 1 (Backend::mark); nothing: none.
  void set_marks(std::optional<std::size_t> first_mark) { first_mark_ = first_mark; }

 protected:
  void mark(const ModelContext& context, ExchangeMark place) const {
    if (first_mark_) {
      context.backend.mark(*first_mark_ + static_cast<std::size_t>(place));
    }
  }

 private:
  std::optional<std::size_t> first_mark_;
};

enum class ExchangeKind : std::uint8_t { kAllReduce, kAllGather, kAllToAll };

inline constexpr std::array kExchangeKinds = {ExchangeKind::kAllReduce, ExchangeKind::kAllGather,
                                              ExchangeKind::kAllToAll};
// As on the command line: "allreduce", "allgather", "alltoall".
const char* exchange_name(ExchangeKind kind);
// The one of that name; nothing for another word, such as "auto".
std::optional<ExchangeKind> find_exchange(std::string_view name);

std::unique_ptr<ExpertExchange> make_expert_exchange(ExchangeKind kind, Backend& backend,
                                                     const ExchangeSizes& sizes,
                                                     const RankGroups& groups);

// Device memory that make_expert_exchange takes on one of `world_size` ranks.
std::int64_t exchange_bytes(ExchangeKind kind, const MemoryTraits& traits,
                            const ExchangeSizes& sizes, int world_size);

}  // namespace kdtree
