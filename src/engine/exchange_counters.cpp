#include "engine/exchange_counters.h"

#include <algorithm>
#include <numeric>
#include <set>

#include "core/check.h"
#include "core/partition.h"
#include "kernels/backend.h"
#include "kernels/replica_choice.h"

namespace kdtree {

namespace {

// For each expert of a row the expert group that computes it.
class GroupChoice {
 public:
  explicit GroupChoice(const LayerPlacement& placement)
      : offsets_(placement.replica_offsets()), slots_(placement.physical_slots()) {
    for (int group = 0; group < placement.world_size(); ++group) {
      group_of_slot_.insert(group_of_slot_.end(), placement.experts_of(group).size(), group);
    }
  }

  int group_of(std::int32_t expert, std::uint32_t bits) const {
    const auto first = static_cast<std::size_t>(offsets_[static_cast<std::size_t>(expert)]);
    const auto last = static_cast<std::size_t>(offsets_[static_cast<std::size_t>(expert) + 1]);
    const std::size_t place =
        first + choose_replica(bits, expert, static_cast<std::uint32_t>(last - first));
    return group_of_slot_[static_cast<std::size_t>(slots_[place])];
  }

 private:
  std::vector<std::int32_t> offsets_;
  std::vector<std::int32_t> slots_;
  std::vector<int> group_of_slot_;
};

// What a sum over `parts` ranks sends from one that has `own` of `all` elements: a reduce-scatter
// what is not its own, an all-gather its own to each of the others.
std::int64_t elements_of_sum(std::int64_t all, std::int64_t own, std::int64_t parts) {
  return all - own + own * (parts - 1);
}

}  // namespace

ExchangeCounters::ExchangeCounters(const ExchangeFacts& facts, const ExpertPlacement& placement,
                                   const std::vector<std::int64_t>& layers)
    : facts_(facts),
      placement_(placement),
      by_group_(facts.kind == ExchangeKind::kAllToAll && facts.grid.attention_dp > 1 &&
                facts.grid.attention_tp(world_size()) % facts.grid.moe_tp == 0),
      sum_of_largest_(layers.size()),
      sum_of_means_(layers.size()) {
  for (const std::int64_t layer : layers) {
    layers_.push_back(
        {.layer = layer,
         .ranks = std::vector<ExchangeCount>(static_cast<std::size_t>(world_size()))});
  }
}

void ExchangeCounters::divide(std::int64_t rows, std::span<const std::int64_t> rows_of_groups) {
  rows_ = rows;
  rows_of_groups_.assign(rows_of_groups.begin(), rows_of_groups.end());
  if (rows_of_groups_.empty()) {
    rows_of_groups_.push_back(rows);
  }
  owned_.clear();
  const int expert_groups = placement_.world_size();
  if (!by_group_) {
    for (int group = 0; group < expert_groups; ++group) {
      owned_.push_back(partition(rows, expert_groups, group));
    }
    return;
  }
  const int owners = expert_groups / facts_.grid.attention_dp;  // of an attention group's rows
  std::int64_t first = 0;
  for (const std::int64_t group_rows : rows_of_groups_) {
    for (int owner = 0; owner < owners; ++owner) {
      const Range part = partition(group_rows, owners, owner);
      owned_.push_back({first + part.begin, first + part.end});
    }
    first += group_rows;
  }
}

void ExchangeCounters::add_step(std::span<const std::int32_t> expert_ids,
                                std::span<const std::int64_t> rows_of_groups) {
  if (layers_.empty()) {
    return;
  }
  const std::size_t size = expert_ids.size() / layers_.size();
  divide(static_cast<std::int64_t>(size) / facts_.num_experts_per_tok, rows_of_groups);
  for (std::size_t index = 0; index < layers_.size(); ++index) {
    add_layer(index, expert_ids.subspan(index * size, size));
  }
  ++num_steps_;
}

void ExchangeCounters::add_layer(std::size_t index, std::span<const std::int32_t> expert_ids) {
  ExchangeLayer& layer = layers_[index];
  const LayerPlacement& placement = placement_.layer(layer.layer);
  const GroupChoice choice(placement);
  const auto groups = static_cast<std::size_t>(placement.world_size());
  const auto k = static_cast<std::size_t>(facts_.num_experts_per_tok);
  // Of the expert groups; each of a group's ranks has a slice of all of it.
  std::vector<std::int64_t> expert_rows(groups);
  std::vector<std::int64_t> computed(groups);
  std::vector<std::int64_t> sent(groups);      // own rows to others
  std::vector<std::int64_t> returned(groups);  // others' rows that were computed here
  std::vector<std::set<std::int32_t>> touched(groups);
  std::size_t owner = 0;
  for (std::int64_t row = 0; row < rows_; ++row) {
    while (!owned_[owner].contains(row)) {
      ++owner;
    }
    const auto experts = expert_ids.subspan(static_cast<std::size_t>(row) * k, k);
    const std::uint32_t bits = row_bits(experts.data(), facts_.num_experts_per_tok);
    std::vector<bool> goes_to(groups, false);
    for (const std::int32_t expert : experts) {
      const auto group = static_cast<std::size_t>(choice.group_of(expert, bits));
      ++expert_rows[group];
      touched[group].insert(expert);
      goes_to[group] = true;
    }
    for (std::size_t group = 0; group < groups; ++group) {
      if (goes_to[group]) {
        ++computed[group];
        sent[owner] += group == owner ? 0 : 1;
        returned[group] += group == owner ? 0 : 1;
      }
    }
  }
  const bool messages = facts_.kind == ExchangeKind::kAllToAll;
  for (int rank = 0; rank < world_size(); ++rank) {
    const auto group = static_cast<std::size_t>(facts_.grid.expert_group(rank));
    ExchangeCount& count = layer.ranks[static_cast<std::size_t>(rank)];
    count.expert_rows += expert_rows[group];
    count.rows_computed += computed[group];
    count.rows_dispatched += messages ? sent[group] : 0;
    count.experts_touched += std::ssize(touched[group]);
    count.bytes_sent +=
        messages ? bytes_of_messages(rank, sent[group], returned[group]) : bytes_of_sums(rank);
    count.bytes_sent += bytes_of_groups(rank);
  }
  sum_of_largest_[index] +=
      static_cast<double>(*std::max_element(expert_rows.begin(), expert_rows.end()));
  sum_of_means_[index] += static_cast<double>(std::accumulate(expert_rows.begin(),
                                                              expert_rows.end(), std::int64_t{0})) /
                          static_cast<double>(groups);
}

std::int64_t ExchangeCounters::bytes_of_sums(int rank) const {
  // all-reduce is cut between elements, allgather between rows.
  const std::int64_t unit = facts_.kind == ExchangeKind::kAllGather ? facts_.hidden_size : 1;
  const std::int64_t all = rows_ * facts_.hidden_size;
  return elements_of_sum(all, partition(all, world_size(), rank, unit).size(), world_size()) *
         dtype_bytes(facts_.activation_dtype);
}

// Dispatch, the way back, the sum over a group's slices and the gathering of its rows (see
// ExpertExchange).
std::int64_t ExchangeCounters::bytes_of_messages(int rank, std::int64_t sent,
                                                 std::int64_t returned) const {
  const ParallelGrid& grid = facts_.grid;
  const int expert_groups = placement_.world_size();
  const std::int64_t own = owned_[static_cast<std::size_t>(grid.expert_group(rank))].size();
  if (facts_.fixed_counts) {
    sent = own * (expert_groups - 1);
    returned = rows_ - own;
  }
  const std::int64_t message =
      dispatch_message(facts_.hidden_size, facts_.num_experts_per_tok, facts_.activation_dtype)
          .bytes;
  const std::int64_t own_elements = own * facts_.hidden_size;
  const std::int64_t sliced = elements_of_sum(
      own_elements, partition(own_elements, grid.moe_tp, grid.expert_slice(rank)).size(),
      grid.moe_tp);
  const int owners = by_group_ ? expert_groups / grid.attention_dp : expert_groups;
  return sent * message + (returned * facts_.hidden_size + sliced + own_elements * (owners - 1)) *
                              dtype_bytes(facts_.activation_dtype);
}

std::int64_t ExchangeCounters::bytes_of_groups(int rank) const {
  const ParallelGrid& grid = facts_.grid;
  if (by_group_) {
    return 0;
  }
  const auto group = static_cast<std::size_t>(grid.attention_group(rank, world_size()));
  return rows_of_groups_[group] * (grid.attention_dp - 1) * facts_.hidden_size *
         dtype_bytes(facts_.activation_dtype);
}

ExchangeReport ExchangeCounters::report(std::span<const ExchangeTimes> times) const {
  ExchangeReport report{.num_steps = num_steps_, .layers = layers_};
  const auto ranks = static_cast<std::size_t>(world_size());
  const auto steps = static_cast<std::size_t>(num_steps_);
  check(times.size() == ranks * steps * layers_.size(),
        "{} exchange times of {} ranks, {} steps and {} layers", times.size(), ranks, steps,
        layers_.size());
  for (std::size_t index = 0; index < layers_.size(); ++index) {
    ExchangeLayer& layer = report.layers[index];
    if (sum_of_means_[index] > 0) {
      layer.load_max_over_mean = sum_of_largest_[index] / sum_of_means_[index];
    }
    double waited = 0;
    double longest = 0;
    for (std::size_t step = 0; step < steps; ++step) {
      double largest_compute = 0;
      double sum_of_compute = 0;
      double largest = 0;
      for (std::size_t rank = 0; rank < ranks; ++rank) {
        const auto [dispatch, compute, combine] =
            times[(rank * steps + step) * layers_.size() + index];
        ExchangeCount& count = layer.ranks[rank];
        count.dispatch_us += dispatch;
        count.compute_us += compute;
        count.combine_us += combine;
        largest_compute = std::max<double>(largest_compute, compute);
        sum_of_compute += compute;
        largest = std::max<double>(largest, dispatch + compute + combine);
      }
      waited += largest_compute - sum_of_compute / static_cast<double>(ranks);
      longest += largest;
    }
    layer.waiting_share = longest > 0 ? waited / longest : 0;
  }
  return report;
}

}  // namespace kdtree
