// The routed experts of one layer, gate, up and down in one call, in INT4.
#include <algorithm>
#include <memory>
#include <vector>

#include "comm/expert_placement.h"
#include "study/bench_data.h"
#include "study/kernel_bench_cases.h"

namespace kdtree {

namespace {

constexpr std::int64_t kDefaultGroupSize = 32;
constexpr std::int64_t kMatricesOfExpert = 3;
// An expert's whole inner row is needed for one output: a sample costs seconds at full size.
constexpr std::int64_t kSampledExpertRows = 2;
constexpr std::int64_t kSampledExpertColumns = 32;
constexpr std::int64_t kMostLists = 32;

struct ExpertSizes {
  std::int64_t hidden = 0;
  std::int64_t intermediate = 0;
  std::int64_t group_size = 0;

  // INT4 codes and bf16 scales of gate, up and down.
  std::int64_t bytes() const {
    const std::int64_t weights = kMatricesOfExpert * hidden * intermediate;
    return weights / 2 + weights / group_size * dtype_bytes(DType::kBFloat16);
  }
};

// The slots of a rank. Where memory does not suffice for all, slots share stored experts.
class BenchExperts {
 public:
  BenchExperts(Backend& backend, const ExpertSizes& sizes, std::int64_t num_slots,
               std::int64_t num_stored, std::uint64_t seed)
      : num_stored_(num_stored) {
    const auto make = [&](std::int64_t out, std::int64_t in) {
      return std::make_unique<BenchMatrix>(backend, out, in, sizes.group_size, ++seed);
    };
    for (std::int64_t i = 0; i < num_stored; ++i) {
      gate_.push_back(make(sizes.intermediate, sizes.hidden));
      up_.push_back(make(sizes.intermediate, sizes.hidden));
      down_.push_back(make(sizes.hidden, sizes.intermediate));
    }
    std::vector<WeightView> gate;
    std::vector<WeightView> up;
    std::vector<WeightView> down;
    for (std::int64_t slot = 0; slot < num_slots; ++slot) {
      gate.push_back(this->gate(slot).view());
      up.push_back(this->up(slot).view());
      down.push_back(this->down(slot).view());
    }
    set_ = backend.make_expert_set({.gate = gate, .up = up, .down = down});
  }

  const ExpertSet* set() const { return set_.get(); }
  const BenchMatrix& gate(std::int64_t slot) const { return stored(gate_, slot); }
  const BenchMatrix& up(std::int64_t slot) const { return stored(up_, slot); }
  const BenchMatrix& down(std::int64_t slot) const { return stored(down_, slot); }

 private:
  using Matrices = std::vector<std::unique_ptr<BenchMatrix>>;

  const BenchMatrix& stored(const Matrices& matrices, std::int64_t slot) const {
    return *matrices[static_cast<std::size_t>(slot % num_stored_)];
  }

  std::int64_t num_stored_;
  Matrices gate_;
  Matrices up_;
  Matrices down_;
  std::unique_ptr<ExpertSet> set_;
};

// What one call is given.
struct ExpertCall {
  std::vector<std::int32_t> ids;  // [rows, k]
  DeviceTensor device_ids;
};

struct ExpertInputs {
  std::int64_t k = 0;
  std::vector<float> x;        // [rows, hidden]
  std::vector<float> weights;  // [rows, k]
  std::vector<std::int32_t> logical_to_slot;
};

// The inner row of an expert for one row of x: [intermediate], stored as an activation.
std::vector<BoundedValue> inner_row(const BenchMatrix& gate, const BenchMatrix& up,
                                    const std::vector<BoundedValue>& x, DType activation) {
  std::vector<BoundedValue> inner;
  for (std::int64_t o = 0; o < gate.view().out_features; ++o) {
    inner.push_back(bounded_swiglu(bounded_dot(gate.row(o), x), bounded_dot(up.row(o), x)));
    inner.back().error += store_error(activation, inner.back().value);
  }
  return inner;
}

// A weighted sum over k experts: k products and additions.
ResultCheck check_experts(const BenchExperts& experts, const ExpertInputs& inputs,
                          const std::vector<std::int32_t>& ids, const std::vector<float>& y,
                          DType activation) {
  const auto rows = static_cast<std::int64_t>(ids.size()) / inputs.k;
  const auto hidden = static_cast<std::int64_t>(y.size()) / rows;
  const std::vector<std::int64_t> columns = sample_places(hidden, kSampledExpertColumns);
  ResultCheck check;
  for (const std::int64_t row : sample_places(rows, kSampledExpertRows)) {
    std::vector<BoundedValue> x;
    for (std::int64_t i = 0; i < hidden; ++i) {
      x.push_back({inputs.x[static_cast<std::size_t>(row * hidden + i)], 0});
    }
    std::vector<BoundedValue> sums(columns.size());
    for (std::int64_t choice = row * inputs.k; choice < (row + 1) * inputs.k; ++choice) {
      const std::int32_t expert = ids[static_cast<std::size_t>(choice)];
      const std::int32_t slot = inputs.logical_to_slot[static_cast<std::size_t>(expert)];
      if (slot < 0) {
        continue;
      }
      const auto inner = inner_row(experts.gate(slot), experts.up(slot), x, activation);
      const double weight = inputs.weights[static_cast<std::size_t>(choice)];
      for (std::size_t c = 0; c < columns.size(); ++c) {
        const BoundedValue down = bounded_dot(experts.down(slot).row(columns[c]), inner);
        sums[c].value += weight * down.value;
        sums[c].error +=
            weight * (down.error + 1.01 * static_cast<double>(inputs.k + 1) * kFloatRound *
                                       (std::abs(down.value) + down.error));
      }
    }
    for (std::size_t c = 0; c < columns.size(); ++c) {
      const std::int64_t place = row * hidden + columns[c];
      check.within(y[static_cast<std::size_t>(place)], sums[c].value,
                   sums[c].error + store_error(activation, sums[c].value), "output", place);
    }
  }
  return check;
}

// Lists that calls cycle over: enough that their experts together fill the working set.
std::vector<ExpertCall> draw_calls(const BenchContext& context, ExpertListSource& source,
                                   const ExpertInputs& inputs, std::int64_t rows,
                                   std::int64_t expert_bytes) {
  std::vector<ExpertCall> calls;
  std::int64_t bytes = 0;
  const bool same = context.options.histogram == ExpertHistogram::kOne;
  do {
    ExpertCall call{.ids = source.draw(rows, inputs.k), .device_ids = {}};
    call.device_ids = upload_indices(context.backend, Shape{rows, inputs.k}, call.ids);
    bytes += num_distinct_slots(call.ids, inputs.logical_to_slot) * expert_bytes;
    calls.push_back(std::move(call));
  } while (!same && (bytes < context.working_set_bytes || calls.size() < 4) &&
           calls.size() < kMostLists);
  return calls;
}

// Means over the calls: of the experts that a call reads, and of the entries that it computes.
struct ExpertLoad {
  double distinct = 0;
  double pairs = 0;
};

ExpertLoad mean_load(const std::vector<ExpertCall>& calls, const ExpertInputs& inputs) {
  ExpertLoad load;
  for (const ExpertCall& call : calls) {
    const auto share = 1 / static_cast<double>(calls.size());
    load.distinct +=
        share * static_cast<double>(num_distinct_slots(call.ids, inputs.logical_to_slot));
    load.pairs += share * static_cast<double>(num_local_pairs(call.ids, inputs.logical_to_slot));
  }
  return load;
}

const char* histogram_name(ExpertHistogram histogram) {
  switch (histogram) {
    case ExpertHistogram::kUniform:
      return "uniform";
    case ExpertHistogram::kZipf:
      return "zipf";
    case ExpertHistogram::kOne:
      return "one";
  }
  return "?";
}

}  // namespace

void bench_experts(const BenchContext& context) {
  const ModelConfig& config = context.config;
  if (config.n_routed_experts == 0) {
    return;
  }
  Backend& backend = context.backend;
  const ExpertSizes sizes{
      .hidden = config.hidden_size,
      .intermediate = config.moe_intermediate_size,
      .group_size = config.quantization ? config.quantization->group_size : kDefaultGroupSize};
  const ExpertPlacement linear =
      ExpertPlacement::linear(config.n_routed_experts, static_cast<int>(context.options.num_ranks));
  const LayerPlacement& placement = linear.layer(0);
  const auto num_slots = static_cast<std::int64_t>(placement.experts_of(0).size());
  if (num_slots == 0) {
    return;
  }
  // All of a GPU's slots where they fit; a host is not filled with them.
  const std::int64_t room =
      backend.name() == "cuda" && context.options.working_set_bytes == 0
          ? context.memory_bytes
          : std::min(context.memory_bytes, context.working_set_bytes + sizes.bytes());
  const std::int64_t num_stored = std::clamp<std::int64_t>(room / sizes.bytes(), 1, num_slots);
  const std::uint64_t seed = context.seed("experts");
  const BenchExperts experts(backend, sizes, num_slots, num_stored, seed);

  const DType activation = context.activation();
  const std::int64_t most = context.max_rows();
  BenchRandom random(context.seed("experts x"));
  ExpertInputs inputs{
      .k = config.num_experts_per_tok,
      .x = random.floats(most * sizes.hidden, -1, 1, activation),
      .weights = random.floats(most * config.num_experts_per_tok, 0.1, 0.5, DType::kFloat32),
      .logical_to_slot = placement.slots_on(0)};
  const DeviceTensor all_x =
      upload_floats(backend, activation, Shape{most, sizes.hidden}, inputs.x);
  const DeviceTensor all_weights =
      upload_floats(backend, DType::kFloat32, Shape{most, inputs.k}, inputs.weights);
  const DeviceTensor slots =
      upload_indices(backend, Shape{config.n_routed_experts}, inputs.logical_to_slot);
  const DeviceTensor all_y(backend, activation, Shape{most, sizes.hidden});
  const DeviceTensor workspace(
      backend, DType::kUInt8,
      Shape{backend.experts_workspace_bytes(most, inputs.k, sizes.hidden, sizes.intermediate)});
  ExpertListSource source(context.options.histogram, config.n_routed_experts,
                          context.seed("experts lists"));
  for (const std::int64_t rows : context.options.rows) {
    const std::vector<ExpertCall> calls = draw_calls(context, source, inputs, rows, sizes.bytes());
    const ExpertLoad load = mean_load(calls, inputs);
    const TensorView y = all_y.rows(rows);
    const auto list_bytes = rows * inputs.k * 8;  // ids and weights
    context.measure(
        {.kernel = "experts",
         .shape = {{"hidden_size", sizes.hidden},
                   {"moe_intermediate_size", sizes.intermediate},
                   {"group_size", sizes.group_size},
                   {"experts_of_rank", num_slots},
                   {"experts_stored", num_stored},
                   {"num_experts_per_tok", inputs.k},
                   {"histogram", histogram_name(context.options.histogram)},
                   {"mean_distinct_experts", load.distinct},
                   {"mean_expert_rows", load.pairs}},
         .rows = rows,
         .weight_bytes =
             static_cast<std::int64_t>(load.distinct * static_cast<double>(sizes.bytes())),
         .activation_bytes = 2 * y.bytes() + list_bytes,
         .flops = 2.0 * load.pairs * kMatricesOfExpert *
                  static_cast<double>(sizes.hidden * sizes.intermediate),
         .num_copies = static_cast<std::int64_t>(calls.size()),
         .run =
             [&](std::int64_t copy) {
               backend.experts(
                   {.experts = experts.set(),
                    .x = all_x.rows(rows),
                    .expert_ids = calls[static_cast<std::size_t>(copy)].device_ids.view(),
                    .expert_weights = all_weights.rows(rows),
                    .logical_to_slot = slots.view(),
                    .output = y,
                    .workspace = workspace.view()});
             },
         .check =
             [&] {
               return check_experts(experts, inputs, calls[0].ids,
                                    download_rows(backend, y, 0, rows), activation);
             }});
  }
}

}  // namespace kdtree
