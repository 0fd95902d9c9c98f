// The memory plans of all ranks of a run, from configs alone: no weights, no device, one process.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "engine/memory_plan.h"

namespace kdtree {

// A GPU that plans are made for.
struct GpuModel {
  std::string_view name;          // as --gpu takes it
  std::int64_t memory_bytes = 0;  // that the driver reports as the card's total
};
std::span<const GpuModel> gpu_models();

struct RunPlanOptions {
  EngineOptions engine;
  LoadOptions load;  // its rank and world_size are not looked at
  int num_ranks = 1;
  // Set: engine.max_context grows to what `room` holds.
  struct Room {
    std::int64_t memory_bytes = 0;  // of a rank
    ContextGoal goal;
  };
  std::optional<Room> room;
};

struct RunPlan {
  std::vector<MemoryPlan> ranks;  // the same entries for each, in the same order
  std::int64_t max_context = 0;
  std::int64_t num_parameters = 0;  // of the target, without the drafter
  std::int64_t peak_bytes() const;  // of the rank that needs the most
};

// `source.target` as planned_target, the drafter as random_drafter makes it: all experts of a layer
// are stored alike. InputError as target_partition, load_target and largest_context.
RunPlan plan_run(const ModelSource& source, const RunPlanOptions& options,
                 const MemoryTraits& traits);

// Values of all tensors that a checkpoint of this config holds; tied ones count once.
std::int64_t count_parameters(const ModelConfig& config);

}  // namespace kdtree
