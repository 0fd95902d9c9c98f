// What the engine counts of the exchanges.
#include "engine/engine.h"

namespace kdtree {

std::size_t Engine::first_exchange_mark(std::size_t entry) const {
  return kFirstExchangeMark +
         entry * static_cast<std::size_t>(config_.num_moe_layers()) * kMarksAnExchange;
}

void Engine::count_exchanges(std::size_t entry, const StepOutput& output) {
  if (!options_.count_exchanges) {
    return;
  }
  const std::size_t first = first_exchange_mark(entry);
  const auto layers = static_cast<std::size_t>(config_.num_moe_layers());
  for (std::size_t layer = 0; layer < layers; ++layer) {
    const std::size_t begin = first + layer * kMarksAnExchange;
    ExchangeTimes times{};
    for (std::size_t part = 0; part < times.size(); ++part) {
      times[part] = static_cast<float>(
          1000 * context_.backend.milliseconds_between(begin + part, begin + part + 1));
    }
    exchange_times_.push_back(times);
  }
  if (counters_) {
    std::vector<std::int64_t> rows_of_groups = listed_of_groups_;
    for (std::int64_t& rows : rows_of_groups) {
      rows *= sizes_.max_nodes;
    }
    counters_->add_step(output.expert_ids, rows_of_groups);
  }
}

ExchangeReport Engine::exchange_report() {
  check(options_.count_exchanges, "a report of exchanges that were not counted");
  const auto ranks = static_cast<std::size_t>(group_.world_size());
  std::vector<ExchangeTimes> all(exchange_times_.size() * ranks);
  group_.all_gather(exchange_times_.data(),
                    static_cast<std::int64_t>(exchange_times_.size() * sizeof(ExchangeTimes)),
                    all.data());
  return counters_ ? counters_->report(all) : ExchangeReport{};
}

}  // namespace kdtree
