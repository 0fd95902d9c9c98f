#include "placement_options.h"

#include <fmt/format.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <utility>
#include <vector>

#include "core/check.h"
#include "option_kinds.h"
#include "placement/expert_loads.h"
#include "placement/placement_file.h"
#include "placement/policies.h"

namespace kdtree {

namespace {

void check_options(const PlacementOptions& options, const ModelConfig& config, int world_size) {
  const std::string& policy = options.policy;
  const bool replicated = policy == "replicated";
  const std::int64_t experts = config.n_routed_experts;
  require_input(policy == "linear" || experts > 0,
                "--placement {}: the model has no routed experts, expected linear", policy);
  require_input(options.expert_load.empty() || replicated || policy == "balanced",
                "--expert-load {}: --placement {} takes no loads, expected balanced or replicated",
                options.expert_load, policy);
  require_input(!options.expert_load.empty() || (!replicated && policy != "balanced"),
                "--placement {} needs the loads of experts: give --expert-load", policy);
  require_input(replicated || options.expert_slots == 0,
                "--expert-slots {}: --placement {} has no replicas, expected replicated",
                options.expert_slots, policy);
  require_input(!replicated || (options.expert_slots >= experts &&
                                options.expert_slots <= experts * world_size),
                "--expert-slots {}: expected {} to {}, a slot for each expert at least and for "
                "each expert of each of {} ranks at most",
                options.expert_slots, experts, experts * world_size, world_size);
}

ExpertPlacement place_by_load(const PlacementOptions& options, const ModelConfig& config,
                              int world_size) {
  const ExpertLoads loads = read_expert_loads(options.expert_load, config);
  const std::int64_t num_slots =
      options.policy == "replicated" ? options.expert_slots : config.n_routed_experts;
  return place_layers(loads, num_slots, config, world_size);
}

std::string cause() {
  return errno == 0 ? "unknown cause" : std::strerror(errno);
}

}  // namespace

void add_placement_options(CLI::App& app, PlacementOptions& options) {
  app.add_option("--placement", options.policy,
                 fmt::format("Which rank holds which routed expert: contiguous parts, in turn, by "
                             "load, by load with hot experts in several slots, or as FILE says "
                             "(default {})",
                             options.policy))
      ->type_name("linear|round-robin|balanced|replicated|FILE");
  add_count(app, "--expert-slots", options.expert_slots, CLI::Range(std::int64_t{0}, kUnbounded),
            "Slots of a layer on all ranks together, for --placement replicated");
  add_path(app, "--expert-load", options.expert_load,
           "File of --record-expert-load, for --placement balanced and replicated");
}

void add_grid_options(CLI::App& app, GridOptions& options) {
  const CLI::Range range(std::int64_t{0}, kUnbounded);
  add_count(app, "--moe-ep", options.moe_ep, range,
            "Groups of ranks, each with experts of its own; 0: the ranks over --moe-tp");
  add_count(
      app, "--moe-tp", options.moe_tp, range,
      "Ranks of such a group, each with a slice of its experts; 0: the ranks over --moe-ep, or "
      "1");
  add_count(app, "--attention-tp", options.attention_tp, range,
            "Ranks of a group that shares attention heads; 0: the ranks over --attention-dp");
  add_count(app, "--attention-dp", options.attention_dp, range,
            "Such groups, each with sequences and a cache of its own; 0: the ranks over "
            "--attention-tp, or 1");
}

ExpertPlacement make_placement(const PlacementOptions& options, const ModelConfig& config,
                               int world_size) {
  const std::string& policy = options.policy;
  check_options(options, config, world_size);
  if (policy == "linear") {
    return ExpertPlacement::linear(config.n_routed_experts, world_size);
  }
  if (policy == "round-robin") {
    return ExpertPlacement(place_round_robin(config.n_routed_experts, world_size));
  }
  if (policy == "balanced" || policy == "replicated") {
    return place_by_load(options, config, world_size);
  }
  std::error_code status;
  require_input(std::filesystem::exists(policy, status),
                "--placement {}: expected linear, round-robin, balanced, replicated or a file, and "
                "there is no such file",
                policy);
  return read_placement(policy, config, world_size);
}

JsonFile::JsonFile(std::string flag, std::string path)
    : flag_(std::move(flag)), path_(std::move(path)) {
  if (wanted()) {
    errno = 0;
    const std::ofstream file(path_, std::ios::app);
    require_input(file.good(), "{}: cannot write {}: {}", flag_, path_, cause());
  }
}

void JsonFile::write(const nlohmann::ordered_json& json) const {
  errno = 0;
  std::ofstream file(path_, std::ios::trunc);
  file << json.dump() << "\n" << std::flush;
  require_input(file.good(), "{}: cannot write {}: {}", flag_, path_, cause());
}

}  // namespace kdtree
