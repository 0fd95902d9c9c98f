#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <span>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>

#include "core/check.h"
#include "core/progress.h"
#include "weights/load_plan.h"
#include "weights/number_formats.h"
#include "weights/raw_tensor.h"
#include "weights/region_reader.h"
#include "weights/upload_queue.h"
#include "weights/weight_store.h"

namespace kdtree {

namespace {

PartTable part_table(const TargetPartition& part) {
  PartTable table{};
  table[static_cast<std::size_t>(PartOf::kHeads)] = part.heads;
  table[static_cast<std::size_t>(PartOf::kIntermediate)] = part.intermediate;
  table[static_cast<std::size_t>(PartOf::kSharedIntermediate)] = part.shared_intermediate;
  table[static_cast<std::size_t>(PartOf::kExpertIntermediate)] = part.expert_intermediate;
  table[static_cast<std::size_t>(PartOf::kVocabulary)] = part.vocabulary;
  return table;
}

PartTable part_table(const DrafterPartition& part) {
  PartTable table{};
  table[static_cast<std::size_t>(PartOf::kHeads)] = part.heads;
  table[static_cast<std::size_t>(PartOf::kKeyValueHeads)] = part.key_value_heads;
  table[static_cast<std::size_t>(PartOf::kIntermediate)] = part.intermediate;
  table[static_cast<std::size_t>(PartOf::kContext)] = part.context;
  return table;
}

std::int64_t read_stored_integer(const StoredTensor& tensor, const std::byte* data,
                                 std::size_t index) {
  const auto* place = data + index * static_cast<std::size_t>(dtype_bytes(tensor.dtype));
  std::int64_t value = 0;
  if (tensor.dtype == DType::kInt64) {
    std::memcpy(&value, place, sizeof(value));
    return value;
  }
  std::int32_t narrow_value = 0;
  std::memcpy(&narrow_value, place, sizeof(narrow_value));
  return narrow_value;
}

void run_shape_check(const FileSet& files, const ShapeCheck& shape) {
  std::array<std::byte, 2 * sizeof(std::int64_t)> data{};
  files.read(*shape.tensor, 0, shape.tensor->bytes, data.data());
  const std::int64_t rows = read_stored_integer(*shape.tensor, data.data(), 0);
  const std::int64_t columns = read_stored_integer(*shape.tensor, data.data(), 1);
  require_input(rows == shape.rows && columns == shape.columns,
                "{} holds [{}, {}], expected [{}, {}]", tensor_place(*shape.tensor), rows, columns,
                shape.rows, shape.columns);
}

// Carries a plan out: reads on threads, uploads on the calling one.
class PlanRunner {
 public:
  PlanRunner(LoadPlan& plan, const LoadOptions& options, Backend& backend, std::byte* device)
      : plan_(plan),
        options_(options),
        device_(device),
        files_(plan),
        num_threads_(std::max(options.num_threads, 1)),
        backend_(backend),
        queue_(backend, num_threads_ * static_cast<int>(kSlotsPerThread), options.piece_bytes) {
    // In the order of the files, as far as threads keep it.
    std::sort(plan_.regions.begin(), plan_.regions.end(), [](const auto& left, const auto& right) {
      return std::tie(left.values->file, left.values->file_offset) <
             std::tie(right.values->file, right.values->file_offset);
    });
  }

  LoadStatistics run(const std::string& label) {
    const auto start = std::chrono::steady_clock::now();
    const std::int64_t own = own_bytes(plan_);
    std::int64_t bytes = 0;
    for (const LoadRegion& region : plan_.regions) {
      bytes += region.device_bytes() + region.rows.size() * region.scale_row_bytes();
    }
    Progress progress(label, bytes);
    draw_random(progress);
    queue_.run(
        num_threads_, [this] { work(); }, backend_,
        [&progress](std::int64_t done) { progress.add(done); });
    progress.finish();
    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
    return {.bytes_read = files_.bytes_read(),
            .checksum_bytes = files_.checksum_bytes(),
            .own_bytes = own,
            .seconds = elapsed.count(),
            .staging_bytes = queue_.slot_bytes() + scratch_bytes_};
  }

 private:
  // Drawn in place, by the device; only what has to be read is left in the plan.
  void draw_random(Progress& progress) {
    for (const LoadRegion& region : plan_.regions) {
      if (region.values->random) {
        check(region.quantize_group == 0 && region.decode != LoadRegion::Decode::kInt4 &&
                  region.decode != LoadRegion::Decode::kFloat8,
              "{}: random weights are drawn in the form that they are stored in",
              region.values->name);
        backend_.fill_random(*region.values->random,
                             {.first_row = region.rows.begin,
                              .first_column = region.columns.begin,
                              .total_columns = region.total_columns},
                             TensorView(device_ + region.device_offset, region.output,
                                        Shape{region.rows.size(), region.columns.size()}));
        backend_.synchronize();
        progress.add(region.device_bytes());
      }
    }
    std::erase_if(plan_.regions,
                  [](const LoadRegion& region) { return region.values->random.has_value(); });
  }

  void work() {
    const std::size_t num_regions = plan_.regions.size();
    const std::size_t num_checksums = plan_.checksum_only.size();
    const std::size_t num_items = num_regions + num_checksums + plan_.shape_checks.size();
    for (std::size_t item = next_++; item < num_items && !queue_.failed(); item = next_++) {
      if (item < num_regions) {
        load(plan_.regions[item]);
      } else if (item < num_regions + num_checksums) {
        verify_tensor(files_, *plan_.checksum_only[item - num_regions], options_.piece_bytes);
      } else {
        run_shape_check(files_, plan_.shape_checks[item - num_regions - num_checksums]);
      }
    }
  }

  void load(const LoadRegion& region) {
    RegionReader reader(files_, region, options_.verify_checksums);
    if (region.quantize_group > 0) {
      load_quantized(region, reader);
      return;
    }
    const std::int64_t element = dtype_bytes(region.output);
    const std::vector<RegionPiece> pieces = cut_region(region, options_.piece_bytes);
    for (std::size_t i = 0; i < pieces.size(); ++i) {
      const RegionPiece& piece = pieces[i];
      will_need(region, pieces, i);
      auto slot = queue_.acquire(piece.rows.size() * piece.columns.size() * element);
      if (slot == nullptr) {
        return;
      }
      slot->device = device_ + region.device_offset + piece.rows.begin * region.row_bytes() +
                     piece.columns.begin * element;
      reader.read(piece, slot->memory.data());
      queue_.submit(std::move(slot));
    }
    reader.finish();
    note_scratch(reader.scratch_bytes());
  }

  // Before piece `next` is read: the one behind it too, so that the disk works meanwhile.
  void will_need(const LoadRegion& region, const std::vector<RegionPiece>& pieces,
                 std::size_t next) const {
    for (std::size_t i = next == 0 ? 0 : next + 1; i < pieces.size() && i < next + 2; ++i) {
      files_.will_need(region, pieces[i]);
    }
  }

  void load_quantized(const LoadRegion& region, RegionReader& reader) {
    const std::int64_t group = region.quantize_group;
    std::vector<float> values;
    std::vector<std::byte> scales;
    const std::vector<RegionPiece> pieces = cut_region(region, options_.piece_bytes);
    for (std::size_t i = 0; i < pieces.size(); ++i) {
      const RegionPiece& piece = pieces[i];
      will_need(region, pieces, i);
      const Int4Matrix packed = reader.read_rounded(piece, values);
      scales.resize(packed.scales.size() * sizeof(std::uint16_t));
      narrow(packed.scales, DType::kBFloat16, scales.data());
      // Two codes a byte, one scale a group.
      const std::int64_t word_offset =
          piece.rows.begin * region.device_row_bytes() + piece.columns.begin / 2;
      const std::int64_t scale_offset = piece.rows.begin * region.scale_row_bytes() +
                                        piece.columns.begin / group * dtype_bytes(DType::kBFloat16);
      // One after the other: a thread that kept one slot while it waits for another could starve
      // the rest.
      const bool sent = send(std::as_bytes(std::span(packed.words)),
                             device_ + region.device_offset + word_offset) &&
                        send(scales, device_ + region.device_scales_offset + scale_offset);
      if (!sent) {
        return;
      }
    }
    reader.finish();
    // Words take half a byte a value.
    note_scratch(reader.scratch_bytes() +
                 static_cast<std::int64_t>(values.capacity() * sizeof(float) +
                                           values.capacity() / 2 + 3 * scales.capacity()));
  }

  // The most of any thread counts for all of them.
  void note_scratch(std::int64_t bytes) {
    const std::int64_t all = bytes * num_threads_;
    std::int64_t most = scratch_bytes_;
    while (all > most && !scratch_bytes_.compare_exchange_weak(most, all)) {
    }
  }

  // Copies the bytes into a slot; false once another thread has failed.
  bool send(std::span<const std::byte> bytes, void* device) {
    auto slot = queue_.acquire(std::ssize(bytes));
    if (slot == nullptr) {
      return false;
    }
    std::memcpy(slot->memory.data(), bytes.data(), bytes.size());
    slot->device = device;
    queue_.submit(std::move(slot));
    return true;
  }

  LoadPlan& plan_;
  const LoadOptions& options_;
  std::byte* device_;
  FileSet files_;
  int num_threads_;
  Backend& backend_;
  UploadQueue queue_;
  std::atomic<std::size_t> next_{0};
  std::atomic<std::int64_t> scratch_bytes_{0};
};

// Views into the device memory of a plan that was carried out.
void add_views(const LoadPlan& plan, const std::byte* device, WeightStore& store) {
  for (const PlannedMatrix& matrix : plan.matrices) {
    WeightView view = matrix.view;
    if (view.out_features > 0 && view.in_features > 0) {
      view.data = device + matrix.data_offset;
      view.scales =
          view.format == WeightFormat::kInt4Group ? device + matrix.scales_offset : nullptr;
    }
    store.add_matrix(matrix.name, view, {});
  }
  for (const PlannedVector& vector : plan.vectors) {
    store.add_vector(vector.name,
                     ConstTensorView(device + vector.offset, DType::kFloat32, Shape{vector.size}),
                     {});
  }
  for (const auto& [name, original] : plan.aliases) {
    store.add_matrix(name, store.matrix(original), {});
  }
}

// "model.layers.3.mlp.experts.5.": what the names of an expert's tensors begin with.
std::string expert_prefix(std::int64_t layer, std::int64_t expert) {
  return fmt::format("model.layers.{}.mlp.experts.{}.", layer, expert);
}

// An expert that comes to this rank, and the one whose slot it takes.
struct MovedExpert {
  std::int64_t layer = 0;
  std::int64_t from = 0;
  std::int64_t to = 0;
};

std::vector<MovedExpert> moved_experts(const ModelConfig& config, const ExpertMove& move,
                                       int group) {
  std::vector<MovedExpert> moved;
  for (std::int64_t layer = 0; layer < config.num_hidden_layers; ++layer) {
    if (!config.is_moe_layer(layer)) {
      continue;
    }
    const LayerPlacement& before = move.before.layer(layer);
    const std::vector<std::int64_t>& from = before.experts_of(group);
    const std::vector<std::int64_t>& to = move.after.layer(layer).experts_of(group);
    check(from.size() == to.size(), "layer {}: {} slots become {}", layer, from.size(), to.size());
    for (std::size_t slot = 0; slot < from.size(); ++slot) {
      if (from[slot] != to[slot]) {
        check(!before.holds(group, to[slot]), "expert {} changes its slot in group {}", to[slot],
              group);
        moved.push_back({layer, from[slot], to[slot]});
      }
    }
  }
  return moved;
}

// Renames the matrices of experts that go to what takes their place.
void rename_moved(const std::vector<MovedExpert>& moved, WeightStore& store) {
  for (const MovedExpert& expert : moved) {
    for (const char* matrix : {"gate_proj.weight", "up_proj.weight", "down_proj.weight"}) {
      store.rename_matrix(expert_prefix(expert.layer, expert.from) + matrix,
                          expert_prefix(expert.layer, expert.to) + matrix);
    }
  }
}

bool same_storage(const WeightView& left, const WeightView& right) {
  return left.format == right.format && left.out_features == right.out_features &&
         left.in_features == right.in_features && left.group_size == right.group_size &&
         left.scale_dtype == right.scale_dtype;
}

// Sends the plan's regions to the memory of the store's matrices of the same names; device offsets
// then count from the address that is returned.
std::byte* place_regions(const WeightStore& store, LoadPlan& plan) {
  auto* base =
      static_cast<std::byte*>(const_cast<void*>(store.matrix(plan.matrices.front().name).data));
  std::unordered_map<std::int64_t, std::int64_t> places;  // of planned offsets
  const auto place = [&](std::int64_t planned, const void* memory) {
    places.emplace(planned, static_cast<const std::byte*>(memory) - base);
  };
  for (const PlannedMatrix& matrix : plan.matrices) {
    const WeightView& view = store.matrix(matrix.name);
    require_input(same_storage(view, matrix.view),
                  "{} is stored otherwise than another expert of its layer: such experts cannot be "
                  "moved",
                  matrix.name);
    place(matrix.data_offset, view.data);
    if (view.format == WeightFormat::kInt4Group) {
      place(matrix.scales_offset, view.scales);
    }
  }
  for (LoadRegion& region : plan.regions) {
    region.device_offset = places.at(region.device_offset);
    if (region.quantize_group > 0) {
      region.device_scales_offset = places.at(region.device_scales_offset);
    }
  }
  return base;
}

WeightStore carry_out(LoadPlan plan, const LoadOptions& options, Backend& backend,
                      const std::string& label) {
  // One block: thousands of small ones would waste device memory on their granularity.
  Buffer memory = backend.allocate(plan.device_bytes);
  auto* device = static_cast<std::byte*>(memory.data());
  WeightStore store;
  store.set_load_statistics(PlanRunner(plan, options, backend, device).run(label));
  add_views(plan, device, store);
  for (const PlannedMatrix& matrix : plan.matrices) {
    backend.prepare(store.matrix(matrix.name));
  }
  store.add_memory(std::move(memory));
  return store;
}

}  // namespace

LoadPlan plan_target(const TargetCheckpoint& checkpoint, const ExpertPlacement& placement,
                     const LoadOptions& options, const ExpertPlacement* held) {
  const ModelConfig& config = checkpoint.config;
  check(config.n_routed_experts == 0 || placement.n_routed_experts() == config.n_routed_experts,
        "placement of {} experts for a model of {}", placement.n_routed_experts(),
        config.n_routed_experts);
  check(placement.world_size() == options.grid.moe_ep(options.world_size),
        "a placement on {} expert groups of {} ranks with moe_tp {}", placement.world_size(),
        options.world_size, options.grid.moe_tp);
  const std::vector<TensorSpec> specs = target_tensor_specs(config);
  return make_load_plan({.tensors = checkpoint.tensors,
                         .origin = checkpoint.origin,
                         .name_prefix = "",
                         .specs = specs,
                         .quantization = config.quantization,
                         .parts = part_table(target_partition(config, options)),
                         .options = options,
                         .placement = &placement,
                         .is_shard = checkpoint.shard.has_value(),
                         .held = held});
}

LoadPlan plan_drafter(const DrafterCheckpoint& checkpoint, const LoadOptions& options) {
  const std::vector<TensorSpec> specs = drafter_tensor_specs(checkpoint.config);
  return make_load_plan({.tensors = checkpoint.tensors,
                         .origin = checkpoint.origin,
                         .name_prefix = checkpoint.name_prefix,
                         .specs = specs,
                         .quantization = checkpoint.config.quantization,
                         .parts = part_table(drafter_partition(checkpoint.config, options)),
                         .options = options,
                         .placement = nullptr,
                         .is_shard = checkpoint.shard.has_value(),
                         .held = nullptr});
}

WeightStore load_target(const TargetCheckpoint& checkpoint, const ExpertPlacement& placement,
                        const LoadOptions& options, Backend& backend) {
  return carry_out(plan_target(checkpoint, placement, options), options, backend,
                   options.progress_label.empty() ? "loading the target" : options.progress_label);
}

LoadStatistics move_experts(const TargetCheckpoint& checkpoint, const ExpertMove& move,
                            const LoadOptions& options, Backend& backend, WeightStore& store) {
  const std::vector<MovedExpert> moved =
      moved_experts(checkpoint.config, move, options.grid.expert_group(options.rank));
  if (moved.empty()) {
    return {};
  }
  LoadPlan plan = plan_target(checkpoint, move.after, options, &move.before);
  rename_moved(moved, store);
  std::byte* base = place_regions(store, plan);
  const LoadStatistics read = PlanRunner(plan, options, backend, base).run("moving experts");
  for (const PlannedMatrix& matrix : plan.matrices) {
    backend.prepare(store.matrix(matrix.name));
  }
  backend.synchronize();
  return read;
}

WeightStore load_drafter(const DrafterCheckpoint& checkpoint, const LoadOptions& options,
                         Backend& backend) {
  return carry_out(plan_drafter(checkpoint, options), options, backend, "loading the drafter");
}

std::int64_t target_bytes(const TargetCheckpoint& checkpoint, const ExpertPlacement& placement,
                          const LoadOptions& options) {
  return plan_target(checkpoint, placement, options).device_bytes;
}

WeightBytes target_bytes_by_kind(const TargetCheckpoint& checkpoint,
                                 const ExpertPlacement& placement, const LoadOptions& options) {
  return plan_target(checkpoint, placement, options).kind_bytes;
}

std::int64_t drafter_bytes(const DrafterCheckpoint& checkpoint, const LoadOptions& options) {
  return plan_drafter(checkpoint, options).device_bytes;
}

}  // namespace kdtree
