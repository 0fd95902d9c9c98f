#include "placement/policies.h"

#include <algorithm>
#include <numeric>
#include <optional>
#include <vector>

#include "core/check.h"
#include "core/partition.h"

namespace kdtree {

namespace {

using Experts = std::vector<std::int64_t>;
using Loads = std::vector<std::int64_t>;
using Counts = std::vector<std::int64_t>;

std::size_t index_of(std::int64_t value) {
  return static_cast<std::size_t>(value);
}

bool contains(const Experts& experts, std::int64_t expert) {
  return std::find(experts.begin(), experts.end(), expert) != experts.end();
}

// [experts] slots of each, `num_slots` in all.
Counts replica_counts(std::span<const std::int64_t> loads, std::int64_t num_slots, int world_size) {
  Counts counts(loads.size(), 1);
  const auto share = [&](std::size_t expert) {
    return static_cast<double>(loads[expert]) / static_cast<double>(counts[expert]);
  };
  for (auto left = num_slots - std::ssize(loads); left > 0; --left) {
    std::optional<std::size_t> best;
    for (std::size_t expert = 0; expert < counts.size(); ++expert) {
      if (counts[expert] == world_size) {
        continue;
      }
      // Without any load, replicas are spread.
      const bool better = !best || share(expert) > share(*best) ||
                          (share(expert) == share(*best) && counts[expert] < counts[*best]);
      best = better ? expert : best;
    }
    ++counts[best.value()];
  }
  return counts;
}

// Replicas on their way to ranks.
class Packing {
 public:
  // weights: [experts] load of a replica.
  Packing(std::vector<double> weights, std::int64_t num_slots, int world_size)
      : weights_(std::move(weights)), ranks_(static_cast<std::size_t>(world_size)) {
    for (std::size_t rank = 0; rank < ranks_.size(); ++rank) {
      ranks_[rank].room = partition(num_slots, world_size, static_cast<std::int64_t>(rank)).size();
    }
  }

  void add(std::int64_t expert) {
    Rank* best = nullptr;
    for (Rank& rank : ranks_) {
      if (rank.room == 0 || contains(rank.experts, expert)) {
        continue;
      }
      if (best == nullptr || rank.load < best->load ||
          (rank.load == best->load && rank.experts.size() < best->experts.size())) {
        best = &rank;
      }
    }
    put(expert, best != nullptr ? *best : make_room(expert));
  }

  // Exchanges experts of a most loaded rank as long as that helps.
  void refine() {
    // Loads fall with every exchange; this many are never needed, and bound the time.
    std::size_t most = 0;
    for (const Rank& rank : ranks_) {
      most += 8 * rank.experts.size();
    }
    while (most-- > 0 && exchange_best()) {
    }
  }

  // Load of a most loaded rank.
  double most() const { return ranks_[most_loaded()].load; }
  // Its experts, heaviest first.
  Experts heaviest() const {
    Experts experts = ranks_[most_loaded()].experts;
    std::sort(experts.begin(), experts.end(), [this](std::int64_t left, std::int64_t right) {
      const double a = weights_[index_of(left)];
      const double b = weights_[index_of(right)];
      return a > b || (a == b && left < right);
    });
    return experts;
  }

  std::vector<Experts> experts_of_ranks() const {
    std::vector<Experts> all;
    for (const Rank& rank : ranks_) {
      all.push_back(rank.experts);
      std::sort(all.back().begin(), all.back().end());
    }
    return all;
  }

 private:
  struct Rank {
    Experts experts;
    std::int64_t room = 0;
    double load = 0;
  };

  std::size_t most_loaded() const {
    const auto most = std::max_element(
        ranks_.begin(), ranks_.end(),
        [](const Rank& left, const Rank& right) { return left.load < right.load; });
    return static_cast<std::size_t>(most - ranks_.begin());
  }

  void sum_up(Rank& rank) const {
    rank.load = std::accumulate(
        rank.experts.begin(), rank.experts.end(), 0.0,
        [this](double sum, std::int64_t expert) { return sum + weights_[index_of(expert)]; });
  }

  void put(std::int64_t expert, Rank& rank) const {
    rank.experts.push_back(expert);
    --rank.room;
    sum_up(rank);
  }

  // All ranks with a slot left hold `expert` already: a full one that does not gives one of its
  // experts away. There is one, as no expert has more replicas than there are ranks, and it has an
  // expert that the other lacks, as it holds no fewer and the other holds `expert`.
  Rank& make_room(std::int64_t expert) {
    for (Rank& open : ranks_) {
      for (Rank& full : ranks_) {
        if (open.room == 0 || full.room > 0 || contains(full.experts, expert)) {
          continue;
        }
        // The last is one of the lightest: experts come by weight.
        const auto given =
            std::find_if(full.experts.rbegin(), full.experts.rend(),
                         [&](std::int64_t other) { return !contains(open.experts, other); });
        if (given == full.experts.rend()) {
          continue;
        }
        put(*given, open);
        full.experts.erase(std::next(given).base());
        ++full.room;
        return full;
      }
    }
    fail("no slot for expert {}", expert);
  }

  bool exchange_best() {
    Rank& loaded = ranks_[most_loaded()];
    double least = loaded.load;
    Rank* other = nullptr;
    std::size_t out = 0;
    std::size_t in = 0;
    for (Rank& rank : ranks_) {
      for (std::size_t i = 0; i < loaded.experts.size(); ++i) {
        for (std::size_t j = 0; j < rank.experts.size(); ++j) {
          const double moved =
              weights_[index_of(loaded.experts[i])] - weights_[index_of(rank.experts[j])];
          const double high = std::max(loaded.load - moved, rank.load + moved);
          if (moved > 0 && high < least && !contains(rank.experts, loaded.experts[i]) &&
              !contains(loaded.experts, rank.experts[j])) {
            least = high;
            other = &rank;
            out = i;
            in = j;
          }
        }
      }
    }
    if (other == nullptr) {
      return false;
    }
    const double before = loaded.load;
    std::swap(loaded.experts[out], other->experts[in]);
    sum_up(loaded);
    sum_up(*other);
    // Rounding may leave nothing of the gain.
    return std::max(loaded.load, other->load) < before;
  }

  std::vector<double> weights_;
  std::vector<Rank> ranks_;
};

// counts: [experts] replicas of each.
Packing pack(std::span<const std::int64_t> loads, const Counts& counts, int world_size) {
  std::vector<double> weights;
  for (std::size_t expert = 0; expert < loads.size(); ++expert) {
    weights.push_back(static_cast<double>(loads[expert]) / static_cast<double>(counts[expert]));
  }
  Experts order(loads.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](std::int64_t left, std::int64_t right) {
    return weights[index_of(left)] > weights[index_of(right)];
  });
  Packing packing(weights, std::accumulate(counts.begin(), counts.end(), std::int64_t{0}),
                  world_size);
  for (const std::int64_t expert : order) {
    for (std::int64_t replica = 0; replica < counts[index_of(expert)]; ++replica) {
      packing.add(expert);
    }
  }
  packing.refine();
  return packing;
}

// The counts with a replica more of `expert`, taken from the expert whose replicas stay lightest
// without it; none if there is no such.
std::optional<Counts> one_replica_more(std::span<const std::int64_t> loads, Counts counts,
                                       std::int64_t expert, int world_size) {
  std::optional<std::size_t> giver;
  const auto share_without = [&](std::size_t other) {
    return static_cast<double>(loads[other]) / static_cast<double>(counts[other] - 1);
  };
  for (std::size_t other = 0; other < counts.size(); ++other) {
    if (counts[other] > 1 && other != index_of(expert) &&
        (!giver || share_without(other) < share_without(*giver))) {
      giver = other;
    }
  }
  if (!giver || counts[index_of(expert)] == world_size) {
    return std::nullopt;
  }
  --counts[*giver];
  ++counts[index_of(expert)];
  return counts;
}

// Gives a heavy expert of a most loaded rank a replica more, if that lowers the load of a most
// loaded rank. False if it does for none of the experts that are tried.
bool improve(std::span<const std::int64_t> loads, int world_size, Counts& counts, Packing& best) {
  constexpr int kTriedExperts = 3;
  int tried = 0;
  for (const std::int64_t expert : best.heaviest()) {
    const std::optional<Counts> changed = one_replica_more(loads, counts, expert, world_size);
    if (!changed) {
      continue;
    }
    Packing next = pack(loads, *changed, world_size);
    if (next.most() < best.most()) {
      best = std::move(next);
      counts = *changed;
      return true;
    }
    if (++tried == kTriedExperts) {
      break;
    }
  }
  return false;
}

// Each layer in slots_of(layer) slots.
template <class SlotsOf>
ExpertPlacement place_each(const ExpertLoads& loads, const ModelConfig& config, int world_size,
                           const SlotsOf& slots_of) {
  check(std::ssize(loads.layers) == config.num_hidden_layers,
        "loads of {} layers, the model has {}", loads.layers.size(), config.num_hidden_layers);
  const Loads none(index_of(config.n_routed_experts));
  std::vector<LayerPlacement> layers;
  for (std::int64_t layer = 0; layer < config.num_hidden_layers; ++layer) {
    // The placement of a dense layer is not looked at.
    const Loads& own = config.is_moe_layer(layer) ? loads.layers[index_of(layer)] : none;
    layers.push_back(place_replicated(own, slots_of(layer), world_size));
  }
  return ExpertPlacement(std::move(layers));
}

}  // namespace

LayerPlacement place_round_robin(std::int64_t n_routed_experts, int world_size) {
  check(n_routed_experts >= 0 && world_size > 0, "placement of {} experts on {} ranks",
        n_routed_experts, world_size);
  std::vector<Experts> experts(static_cast<std::size_t>(world_size));
  for (std::int64_t expert = 0; expert < n_routed_experts; ++expert) {
    experts[index_of(expert % world_size)].push_back(expert);
  }
  return {n_routed_experts, std::move(experts)};
}

LayerPlacement place_balanced(std::span<const std::int64_t> loads, int world_size) {
  return place_replicated(loads, std::ssize(loads), world_size);
}

LayerPlacement place_replicated(std::span<const std::int64_t> loads, std::int64_t num_slots,
                                int world_size) {
  const std::int64_t num_experts = std::ssize(loads);
  check(world_size > 0 && num_slots >= num_experts && num_slots <= num_experts * world_size,
        "{} slots for {} experts on {} ranks", num_slots, num_experts, world_size);
  for (std::size_t expert = 0; expert < loads.size(); ++expert) {
    check(loads[expert] >= 0, "expert {} has load {}", expert, loads[expert]);
  }
  constexpr int kMostImprovements = 32;  // bounds the time; a handful is usual
  Counts counts = replica_counts(loads, num_slots, world_size);
  Packing packing = pack(loads, counts, world_size);
  for (int i = 0; i < kMostImprovements && improve(loads, world_size, counts, packing); ++i) {
  }
  return {num_experts, packing.experts_of_ranks()};
}

ExpertPlacement place_layers(const ExpertLoads& loads, std::int64_t num_slots,
                             const ModelConfig& config, int world_size) {
  return place_each(loads, config, world_size, [num_slots](std::int64_t) { return num_slots; });
}

ExpertPlacement place_layers_anew(const ExpertLoads& loads, const ExpertPlacement& current,
                                  const ModelConfig& config) {
  return place_each(loads, config, current.world_size(),
                    [&](std::int64_t layer) { return current.layer(layer).num_slots(); });
}

double imbalance(const LayerPlacement& placement, std::span<const std::int64_t> loads) {
  check(std::ssize(loads) == placement.n_routed_experts(), "{} loads of {} experts", loads.size(),
        placement.n_routed_experts());
  const std::vector<std::int32_t> offsets = placement.replica_offsets();
  double sum = 0;
  double most = 0;
  for (const Experts& experts : placement.experts_of_ranks()) {
    double load = 0;
    for (const std::int64_t expert : experts) {
      const std::size_t index = index_of(expert);
      load += static_cast<double>(loads[index]) / (offsets[index + 1] - offsets[index]);
    }
    sum += load;
    most = std::max(most, load);
  }
  return sum == 0 ? 1 : std::max(1.0, most * placement.world_size() / sum);
}

}  // namespace kdtree
