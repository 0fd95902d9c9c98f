// What one rank holds in the memory of its device, worked out before anything is allocated.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "engine/loaded_model.h"

namespace kdtree {

// What an asynchronous backend takes besides the tensors of model and engine: the CUDA context,
// libraries and their workspaces, scratch of ops, recorded steps, buffers of communicators. An
// allowance, not a sum.
inline constexpr std::int64_t kDeviceReserveBytes = 2'000'000'000;

struct MemoryPlan {
  struct Entry {
    std::string what;
    std::int64_t bytes = 0;
  };
  std::vector<Entry> entries;
  std::int64_t total_bytes() const;
};

// Of load.rank. Weights by what they belong to, and all else. Both from the configs, the sizes of
// a step and the table of tensors, as LoadedModel and Engine use them. `load` as rank_load_options
// makes it. InputError as load_target.
MemoryPlan weights_plan(const ModelSource& source, const EngineOptions& options,
                        const LoadOptions& load);
MemoryPlan workspace_plan(const ModelSource& source, const EngineOptions& options,
                          const LoadOptions& load, const MemoryTraits& traits);
// The two together.
MemoryPlan memory_plan(const ModelSource& source, const EngineOptions& options,
                       const LoadOptions& load, const MemoryTraits& traits);

// What a rank has, what the least context takes, and each token more.
struct ContextNeed {
  double room = 0;  // bytes, as the others
  double least = 0;
  double of_token = 0;
};
// Of load.rank, from options.max_context on; weight_bytes as weights_plan sums them up.
ContextNeed context_need(const ModelSource& source, const EngineOptions& options,
                         const LoadOptions& load, std::int64_t weight_bytes,
                         const MemoryTraits& traits);
// How much context to make room for.
struct ContextGoal {
  double fraction = 0;     // of the memory that is there
  std::int64_t limit = 0;  // tokens of a sequence, at most
};
// The largest context up to goal.limit that every rank has room for, at least `least`. InputError
// names the rank that has too little for `least`.
std::int64_t largest_context(const std::vector<ContextNeed>& needs, std::int64_t least,
                             const ContextGoal& goal);

// A run to be planned; nothing of it is owned.
struct PlannedRun {
  const ModelSource& source;
  const EngineOptions& options;
  const LoadOptions& load;  // rank and world size are the group's
};
// The largest max_context up to goal.limit whose memory plan stays within goal.fraction of the
// free memory on every rank. Collective. AgreedError if not even run.options.max_context
// fits.
std::int64_t context_for_memory(const PlannedRun& run, const ContextGoal& goal, ProcessGroup& group,
                                const Backend& backend);

// Prints the plan of this rank. InputError if it needs more than is free.
void check_memory(const MemoryPlan& plan, const ProcessGroup& group, const Backend& backend);

}  // namespace kdtree
