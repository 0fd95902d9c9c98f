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

// For each expert of a row the rank that computes it.
class RankChoice {
 public:
  explicit RankChoice(const LayerPlacement& placement)
      : offsets_(placement.replica_offsets()), slots_(placement.physical_slots()) {
    for (int rank = 0; rank < placement.world_size(); ++rank) {
      rank_of_slot_.insert(rank_of_slot_.end(), placement.experts_of(rank).size(), rank);
    }
  }

  int rank_of(std::int32_t expert, std::uint32_t bits) const {
    const auto first = static_cast<std::size_t>(offsets_[static_cast<std::size_t>(expert)]);
    const auto last = static_cast<std::size_t>(offsets_[static_cast<std::size_t>(expert) + 1]);
    const std::size_t place =
        first + choose_replica(bits, expert, static_cast<std::uint32_t>(last - first));
    return rank_of_slot_[static_cast<std::size_t>(slots_[place])];
  }

 private:
  std::vector<std::int32_t> offsets_;
  std::vector<std::int32_t> slots_;
  std::vector<int> rank_of_slot_;
};

int owner_of(std::int64_t row, std::int64_t rows, int world_size) {
  int owner = 0;
  while (!partition(rows, world_size, owner).contains(row)) {
    ++owner;
  }
  return owner;
}

}  // namespace

ExchangeCounters::ExchangeCounters(const ExchangeFacts& facts, const ExpertPlacement& placement,
                                   std::vector<std::int64_t> layers)
    : facts_(facts),
      placement_(placement),
      sum_of_largest_(layers.size()),
      sum_of_means_(layers.size()) {
  for (const std::int64_t layer : layers) {
    layers_.push_back(
        {.layer = layer,
         .ranks = std::vector<ExchangeCount>(static_cast<std::size_t>(placement.world_size()))});
  }
}

void ExchangeCounters::add_step(std::span<const std::int32_t> expert_ids) {
  if (layers_.empty()) {
    return;
  }
  const std::size_t size = expert_ids.size() / layers_.size();
  const std::int64_t rows = static_cast<std::int64_t>(size) / facts_.num_experts_per_tok;
  for (std::size_t index = 0; index < layers_.size(); ++index) {
    add_layer(index, expert_ids.subspan(index * size, size), rows);
  }
  ++num_steps_;
}

void ExchangeCounters::add_layer(std::size_t index, std::span<const std::int32_t> expert_ids,
                                 std::int64_t rows) {
  ExchangeLayer& layer = layers_[index];
  const LayerPlacement& placement = placement_.layer(layer.layer);
  const RankChoice choice(placement);
  const int world_size = placement.world_size();
  const auto ranks = static_cast<std::size_t>(world_size);
  const auto k = static_cast<std::size_t>(facts_.num_experts_per_tok);
  std::vector<std::int64_t> expert_rows(ranks);
  std::vector<std::int64_t> computed(ranks);
  std::vector<std::int64_t> sent(ranks);      // own rows to others
  std::vector<std::int64_t> returned(ranks);  // others' rows that were computed here
  std::vector<std::set<std::int32_t>> touched(ranks);
  for (std::int64_t row = 0; row < rows; ++row) {
    const auto owner = static_cast<std::size_t>(owner_of(row, rows, world_size));
    const auto experts = expert_ids.subspan(static_cast<std::size_t>(row) * k, k);
    const std::uint32_t bits = row_bits(experts.data(), facts_.num_experts_per_tok);
    std::vector<bool> goes_to(ranks, false);
    for (const std::int32_t expert : experts) {
      const auto rank = static_cast<std::size_t>(choice.rank_of(expert, bits));
      ++expert_rows[rank];
      touched[rank].insert(expert);
      goes_to[rank] = true;
    }
    for (std::size_t rank = 0; rank < ranks; ++rank) {
      if (goes_to[rank]) {
        ++computed[rank];
        sent[owner] += rank == owner ? 0 : 1;
        returned[rank] += rank == owner ? 0 : 1;
      }
    }
  }
  const bool messages = facts_.kind == ExchangeKind::kAllToAll;
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    ExchangeCount& count = layer.ranks[rank];
    count.expert_rows += expert_rows[rank];
    count.rows_computed += computed[rank];
    count.rows_dispatched += messages ? sent[rank] : 0;
    count.experts_touched += std::ssize(touched[rank]);
    count.bytes_sent +=
        messages ? bytes_of_messages(rows, static_cast<int>(rank), sent[rank], returned[rank])
                 : bytes_of_sums(rows, static_cast<int>(rank));
  }
  sum_of_largest_[index] +=
      static_cast<double>(*std::max_element(expert_rows.begin(), expert_rows.end()));
  sum_of_means_[index] += static_cast<double>(std::accumulate(expert_rows.begin(),
                                                              expert_rows.end(), std::int64_t{0})) /
                          static_cast<double>(ranks);
}

// A reduce-scatter sends what is not the rank's own, an all-gather its own to every other rank.
std::int64_t ExchangeCounters::bytes_of_sums(std::int64_t rows, int rank) const {
  const int world_size = placement_.world_size();
  // all-reduce is cut between elements, allgather between rows.
  const std::int64_t unit = facts_.kind == ExchangeKind::kAllGather ? facts_.hidden_size : 1;
  const std::int64_t all = rows * facts_.hidden_size;
  const std::int64_t own = partition(all, world_size, rank, unit).size();
  return (all - own + own * (world_size - 1)) * dtype_bytes(facts_.activation_dtype);
}

// Dispatch, the way back and the gathering of own rows (see ExpertExchange).
std::int64_t ExchangeCounters::bytes_of_messages(std::int64_t rows, int rank, std::int64_t sent,
                                                 std::int64_t returned) const {
  const std::int64_t others = placement_.world_size() - 1;
  const std::int64_t own = partition(rows, placement_.world_size(), rank).size();
  if (facts_.fixed_counts) {
    sent = own * others;
    returned = rows - own;
  }
  const std::int64_t message =
      dispatch_message(facts_.hidden_size, facts_.num_experts_per_tok, facts_.activation_dtype)
          .bytes;
  return sent * message +
         (returned + own * others) * facts_.hidden_size * dtype_bytes(facts_.activation_dtype);
}

ExchangeReport ExchangeCounters::report(std::span<const ExchangeTimes> times) const {
  ExchangeReport report{.num_steps = num_steps_, .layers = layers_};
  const auto ranks = static_cast<std::size_t>(placement_.world_size());
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
