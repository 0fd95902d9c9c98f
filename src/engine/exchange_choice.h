// `--exchange auto`: which exchange is fastest for this machine, model and batch, measured.
#pragma once

#include <string>
#include <vector>

#include "comm/process_group.h"
#include "engine/loaded_model.h"

namespace kdtree {

struct ExchangeTiming {
  ExchangeKind kind = ExchangeKind::kAllReduce;
  double microseconds = 0;  // median over repeats of the slowest rank's time of one layer
};

struct ExchangeChoice {
  ExchangeKind kind = ExchangeKind::kAllReduce;
  std::int64_t rows = 0;                // of a step, that each was measured with
  std::vector<ExchangeTiming> timings;  // none where there is nothing to choose
};

// The one with the least time; allreduce unless another one takes less than `kFasterThanDefault` of
// its time, so that noise does not decide between equals.
inline constexpr double kFasterThanDefault = 0.95;
ExchangeKind fastest_exchange(const std::vector<ExchangeTiming>& timings);

// Times one layer with experts of the target's sizes and placement, with random weights and rows, a
// full step of the batch, under each exchange. Nothing is left behind: the layer's weights are on
// the device during the call alone. With one rank or without experts nothing is measured.
// Collective; equal on every rank. `load` is that of LoadedModel. AgreedError for what is wrong
// with the target's tensors, but for their data.
ExchangeChoice choose_exchange(const ModelSource& source, const EngineOptions& options,
                               const LoadOptions& load, const ModelContext& context,
                               ProcessGroup& group);

// A table of the measurements and what was chosen, for people.
std::string exchange_table(const ExchangeChoice& choice);

}  // namespace kdtree
