// What the engine does about the placement of experts: counts their loads, moves them.
#include "core/log.h"
#include "engine/engine.h"
#include "placement/placement_file.h"
#include "placement/policies.h"

namespace kdtree {

ExpertLoads Engine::expert_loads() {
  ExpertLoads loads = empty_loads(config_);
  const ConstTensorView counts = decoder_.expert_counts();
  std::int64_t row = 0;
  for (std::vector<std::int64_t>& layer : loads.layers) {
    if (!layer.empty() && row < counts.size(0)) {
      context_.backend.download(layer.data(), counts.rows(row++, 1).raw(),
                                static_cast<std::int64_t>(layer.size() * sizeof(layer[0])));
    }
  }
  context_.backend.synchronize();
  return loads;
}

void Engine::rebalance(const ExpertPlacement& placement, LoadedModel& model) {
  LoadStatistics read;
  run_together(group_, [&] {
    require_input(placement.same_slots(model.placement()),
                  "experts cannot be moved to a placement with other slots: expected as many on "
                  "every rank as there are");
    read = model.move_experts(placement, context_.backend);
  });
  decoder_.set_placement(model.placement());
  if (counters_) {
    counters_->set_placement(model.placement());
  }
  spdlog::info("rank {}: experts moved, {:.3f} GB read in {:.2f} s", group_.rank(),
               static_cast<double>(read.bytes_read) / 1e9, read.seconds);
}

void Engine::rebalance_every(std::int64_t num_prompts, LoadedModel& model) {
  check(num_prompts > 0 && options_.count_experts, "rebalancing every {} prompts, loads {}counted",
        num_prompts, options_.count_experts ? "" : "not ");
  loads_before_ = expert_loads();
  check(place_layers_anew(loads_before_, model.placement(), config_).same_slots(model.placement()),
        "the ranks have uneven numbers of slots");
  rebalance_every_ = num_prompts;
  moved_model_ = &model;
}

// No step is in flight here, on any rank: that is when prompts are admitted.
void Engine::count_admission() {
  if (rebalance_every_ == 0 || admissions_++ < rebalance_every_) {
    return;
  }
  admissions_ = 1;
  ExpertPlacement placement = moved_model_->placement();
  run_together(group_, [&] {
    const ExpertLoads all = expert_loads();
    if (group_.rank() == 0) {
      ExpertLoads since = all;
      for (std::size_t layer = 0; layer < since.layers.size(); ++layer) {
        for (std::size_t expert = 0; expert < since.layers[layer].size(); ++expert) {
          since.layers[layer][expert] -= loads_before_.layers[layer][expert];
        }
      }
      placement = place_layers_anew(since, placement, config_);
    }
    loads_before_ = all;
  });
  rebalance(share_placement(placement, group_), *moved_model_);
}

}  // namespace kdtree
