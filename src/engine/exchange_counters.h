// What the exchange of tokens and experts did in the steps of a run: who computed how much, what
// was sent, how long it took and who waited. Worked out on rank 0 from what the routers chose, so
// that counting changes no step.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "comm/expert_placement.h"
#include "core/partition.h"
#include "model/expert_exchange.h"

namespace kdtree {

// What an exchange needs to know to be counted.
struct ExchangeFacts {
  ExchangeKind kind = ExchangeKind::kAllReduce;
  bool fixed_counts = false;  // ExchangeSizes::fixed_counts
  ParallelGrid grid = {};
  std::int64_t hidden_size = 0;
  std::int64_t num_experts_per_tok = 0;
  DType activation_dtype = DType::kFloat32;
};

// Of one layer on one rank, sums over steps. Rows of a step count, padding included: they are
// computed and sent like the others. Rows of prompts do not.
struct ExchangeCount {
  std::int64_t expert_rows = 0;    // pairs of a row and an expert that were computed here
  std::int64_t rows_computed = 0;  // rows with at least one expert here
  // Pairs of a row of this rank's expert group and another group that has one of its experts: what
  // an all-to-all has to send. 0 under the other exchanges, where every rank has all rows.
  std::int64_t rows_dispatched = 0;
  // Bytes that this rank sends to others, rows of its attention group included: messages as they
  // are, of all-reduce what a reduce-scatter and an all-gather of it send, the least that gives
  // every rank the sum.
  std::int64_t bytes_sent = 0;
  std::int64_t experts_touched = 0;  // distinct experts of a step that were computed here
  // Microseconds: until this rank's experts have their rows, for the experts (and what of the
  // shared ones comes with them), and from there until the rows are complete everywhere.
  double dispatch_us = 0;
  double compute_us = 0;
  double combine_us = 0;
};

// Of one layer.
struct ExchangeLayer {
  std::int64_t layer = 0;            // of the model
  std::vector<ExchangeCount> ranks;  // [world_size]
  // Sum over steps of the largest expert_rows of a rank, over that of the mean; 0 without rows.
  double load_max_over_mean = 0;
  // Sum over steps of the largest compute_us of a rank less the mean, over the sum of the largest
  // time of a rank for the whole layer; 0 without times.
  double waiting_share = 0;
};

struct ExchangeReport {
  std::int64_t num_steps = 0;
  std::vector<ExchangeLayer> layers;  // those with experts
};

// Dispatch, compute and combine of one layer in one step, microseconds.
using ExchangeTimes = std::array<float, 3>;

class ExchangeCounters {
 public:
  // `layers`: the model's numbers of its layers with experts.
  ExchangeCounters(const ExchangeFacts& facts, const ExpertPlacement& placement,
                   const std::vector<std::int64_t>& layers);

  // Where experts are from now on: on which expert group of the grid.
  void set_placement(const ExpertPlacement& placement) { placement_ = placement; }
  // Counts a step: expert_ids [layers, rows, num_experts_per_tok] logical experts; rows_of_groups
  // [attention_dp], which lie one behind the other, or nothing for one group.
  void add_step(std::span<const std::int32_t> expert_ids,
                std::span<const std::int64_t> rows_of_groups = {});
  // times [world_size, steps, layers], of the steps that have been counted.
  ExchangeReport report(std::span<const ExchangeTimes> times) const;

 private:
  void add_layer(std::size_t index, std::span<const std::int32_t> expert_ids);
  int world_size() const { return placement_.world_size() * facts_.grid.moe_tp; }
  // Cuts the rows of a step into those that each expert group owns.
  void divide(std::int64_t rows, std::span<const std::int64_t> rows_of_groups);
  std::int64_t bytes_of_sums(int rank) const;
  std::int64_t bytes_of_messages(int rank, std::int64_t sent, std::int64_t returned) const;
  // Of the rows of all attention groups, where the exchange needs them everywhere.
  std::int64_t bytes_of_groups(int rank) const;

  ExchangeFacts facts_;
  ExpertPlacement placement_;
  bool by_group_;  // ExpertExchange::by_group()
  // Of the step that is being counted.
  std::int64_t rows_ = 0;
  std::vector<std::int64_t> rows_of_groups_;  // [attention_dp]
  std::vector<Range> owned_;                  // [expert groups] rows
  std::vector<ExchangeLayer> layers_;
  std::vector<double> sum_of_largest_;  // [layers] expert_rows, over steps
  std::vector<double> sum_of_means_;
  std::int64_t num_steps_ = 0;
};

}  // namespace kdtree
