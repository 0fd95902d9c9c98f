#include "engine/exchange_choice.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>

#include "engine/group_slots.h"
#include "placement/layer_file.h"
#include "weights/random_checkpoint.h"

namespace kdtree {

namespace {

constexpr int kWarmUps = 3;
constexpr int kRepeats = 11;
constexpr std::size_t kBegin = 0;  // marks of the backend
constexpr std::size_t kEnd = 1;
// Far from the keys of an engine's steps, which count up from 0.
constexpr std::int64_t kRecordingKey = -1;

// One layer with experts as the run will have them, and as little as a model can have besides.
ModelConfig one_layer_of(const ModelConfig& config, const LoadOptions& load, int world_size) {
  ModelConfig layer = config;
  if (load.weights == WeightsChoice::kOriginal) {
    layer.quantization.reset();
  } else if (load.weights == WeightsChoice::kInt4 && !layer.quantization) {
    layer.quantization = QuantizationConfig{.group_size = load.int4_group_size};
  }
  layer.num_hidden_layers = 1;
  layer.first_k_dense_replace = 0;
  layer.moe_layer_freq = 1;
  layer.vocab_size = world_size;
  return layer;
}

class ExchangeBench {
 public:
  ExchangeBench(const ModelSource& source, const EngineOptions& options, const LoadOptions& load,
                const ModelContext& context, ProcessGroup& group)
      : context_(context),
        group_(group),
        options_(options),
        load_(load),
        target_(random_target(one_layer_of(source.target.config, load, group.world_size()), 1)),
        placement_(expert_placement(source.target.config, options, group.world_size())
                       .layer(moe_layers(source.target.config).front())),
        max_nodes_(step_sizes(source, options).max_nodes),
        rows_(options.batch_size * max_nodes_),
        x_(context.backend, context.backend.activation_dtype(),
           Shape{rows_, target_.config.hidden_size}),
        y_(context.backend, context.backend.activation_dtype(),
           Shape{rows_, target_.config.hidden_size}) {
    load_.progress_label = "drawing a layer to measure exchanges with";
    const ParallelGrid& grid = options.grid;
    for (int index = 0; grid.attention_dp > 1 && index < grid.attention_dp; ++index) {
      rows_of_groups_.push_back(group_slots(grid, options.batch_size, index).size() * max_nodes_);
    }
    load_.weights = WeightsChoice::kAuto;
    // As behind a norm: of variance 1.
    constexpr float kBound = 1.7320508F;
    context.backend.fill_random(
        {.kind = RandomFill::Kind::kBFloat16, .seed = 1, .low = -kBound, .high = kBound},
        {.first_row = 0, .first_column = 0, .total_columns = target_.config.hidden_size},
        x_.view());
  }

  std::int64_t rows() const { return rows_; }

  double microseconds(ExchangeKind kind) {
    options_.exchange = kind;
    const LoadOptions load = rank_load_options(load_, group_.rank(), group_.world_size(), options_);
    const ModelConfig& config = target_.config;
    WeightStore weights;
    run_together(group_, [&] {
      weights = load_target(target_, ExpertPlacement(placement_), load, context_.backend);
    });
    const Moe moe(context_, config, weights, 0, placement_);
    const TargetPartition partition = target_partition(config, load);
    const ExchangeSizes sizes{
        .max_rows = rows_,
        .max_group_rows = group_slots(options_.grid, options_.batch_size, 0).size() * max_nodes_,
        .hidden_size = config.hidden_size,
        .num_experts_per_tok = config.num_experts_per_tok,
        .moe_intermediate_size = partition.expert_intermediate.size(),
        .shared_width = partition.shared_intermediate.size(),
        .fixed_counts = options_.fixed_counts || context_.communicator.capturable(),
        .grid = options_.grid};
    const auto exchange = make_expert_exchange(kind, context_.backend, sizes, context_.groups);
    RouterWorkspace workspace(
        context_.backend, config,
        {.max_rows = rows_, .kept_layers = 1, .replicas = placement_.has_replicas()});
    const RouterRows routed = workspace.of_layer(0, rows_);
    const bool replayable = exchange->replayable() && context_.communicator.capturable();
    std::vector<double> times;
    for (int run = 0; run < kWarmUps + kRepeats; ++run) {
      group_.barrier();
      context_.backend.mark(kBegin);
      context_.backend.run_recorded(kRecordingKey, replayable,
                                    [&] { run_layer(moe, routed, *exchange); });
      context_.backend.mark(kEnd);
      context_.backend.synchronize();
      const double slowest = slowest_of(context_.backend.milliseconds_between(kBegin, kEnd));
      if (run >= kWarmUps) {
        times.push_back(slowest * 1000);
      }
    }
    context_.backend.forget_recorded(kRecordingKey);
    std::nth_element(times.begin(), times.begin() + kRepeats / 2, times.end());
    return times[kRepeats / 2];
  }

 private:
  // As Decoder does it, the gathering of other groups' rows included.
  void run_layer(const Moe& moe, const RouterRows& routed, ExpertExchange& exchange) {
    if (rows_of_groups_.empty()) {
      moe.forward(context_, {.x = x_.view(), .y = y_.view()}, routed, exchange);
      return;
    }
    const Range slots =
        group_slots(options_.grid, options_.batch_size, context_.groups.attention_group());
    const std::int64_t first = slots.begin * max_nodes_;
    const std::int64_t count = slots.size() * max_nodes_;
    if (exchange.by_group()) {
      moe.forward(context_,
                  {.x = x_.view().rows(first, count),
                   .y = y_.view().rows(first, count),
                   .rows_of_groups = rows_of_groups_},
                  routed.part(first, count), exchange);
    } else {
      context_.groups.across().all_gather_rows(x_.view().rows(first, count), x_.view(),
                                               rows_of_groups_, context_.backend.stream(),
                                               {.what = "rows of all groups"});
      moe.forward(context_, {.x = x_.view(), .y = y_.view()}, routed, exchange);
    }
  }

  double slowest_of(double own) {
    std::vector<double> all(static_cast<std::size_t>(group_.world_size()));
    group_.all_gather(&own, sizeof own, all.data());
    return *std::max_element(all.begin(), all.end());
  }

  ModelContext context_;
  ProcessGroup& group_;
  EngineOptions options_;
  LoadOptions load_;
  TargetCheckpoint target_;
  LayerPlacement placement_;
  std::int64_t max_nodes_;
  std::int64_t rows_;
  std::vector<std::int64_t> rows_of_groups_;  // [attention_dp]; empty for one group
  DeviceTensor x_;                            // [rows, hidden]
  DeviceTensor y_;
};

}  // namespace

ExchangeKind fastest_exchange(const std::vector<ExchangeTiming>& timings) {
  double best = std::numeric_limits<double>::infinity();
  for (const ExchangeTiming& timing : timings) {
    if (timing.kind == ExchangeKind::kAllReduce) {
      best = timing.microseconds * kFasterThanDefault;
    }
  }
  ExchangeKind kind = ExchangeKind::kAllReduce;
  for (const ExchangeTiming& timing : timings) {
    if (timing.kind != ExchangeKind::kAllReduce && timing.microseconds < best) {
      best = timing.microseconds;
      kind = timing.kind;
    }
  }
  return kind;
}

ExchangeChoice choose_exchange(const ModelSource& source, const EngineOptions& options,
                               const LoadOptions& load, const ModelContext& context,
                               ProcessGroup& group) {
  ExchangeChoice choice;
  if (group.world_size() == 1 || source.target.config.num_moe_layers() == 0) {
    return choice;
  }
  // What is wrong with the model is told of its own files, not of the layer that is made up here.
  run_together(group, [&] {
    target_bytes(source.target, expert_placement(source.target.config, options, group.world_size()),
                 rank_load_options(load, group.rank(), group.world_size(), options));
  });
  ExchangeBench bench(source, options, load, context, group);
  choice.rows = bench.rows();
  for (const ExchangeKind kind : kExchangeKinds) {
    choice.timings.push_back({.kind = kind, .microseconds = bench.microseconds(kind)});
  }
  choice.kind = fastest_exchange(choice.timings);
  return choice;
}

std::string exchange_table(const ExchangeChoice& choice) {
  if (choice.timings.empty()) {
    return fmt::format("exchange {}: nothing to choose", exchange_name(choice.kind));
  }
  const double default_time = choice.timings.front().microseconds;
  std::string text = fmt::format("exchanges, one layer with experts, {} rows a step:", choice.rows);
  for (const ExchangeTiming& timing : choice.timings) {
    text +=
        fmt::format("\n  {:<10} {:>10.1f} us  {:>5.2f} of allreduce{}", exchange_name(timing.kind),
                    timing.microseconds, timing.microseconds / default_time,
                    timing.kind == choice.kind ? "  <- chosen" : "");
  }
  return text;
}

}  // namespace kdtree
