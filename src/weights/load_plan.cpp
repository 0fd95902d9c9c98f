#include "weights/load_plan.h"

#include <unordered_map>

#include "core/check.h"
#include "weights/number_formats.h"
#include "weights/quantize.h"
#include "weights/raw_tensor.h"

namespace kdtree {

namespace {

constexpr std::int64_t kDeviceAlignment = 256;

class Planner {
 public:
  explicit Planner(const PlanInput& input)
      : input_(input),
        resolver_(input.tensors, input.origin, input.name_prefix, input.quantization) {
    std::int64_t number = 0;
    for (const auto& [name, tensor] : input.tensors) {
      if (tensor.checksum) {
        number_of_.emplace(&tensor, number);
      }
      ++number;
    }
  }

  LoadPlan run() {
    bool any_quantized = false;
    for (const TensorSpec& spec : input_.specs) {
      if ((input_.is_shard && is_elsewhere(spec)) ||
          (input_.held != nullptr && (spec.expert < 0 || holds(*input_.held, spec)))) {
        continue;
      }
      const StoredCopies copies = resolver_.resolve(spec);
      any_quantized = any_quantized || copies.quantized.has_value();
      if (spec.tied) {
        plan_.aliases.emplace_back(spec.name, "model.embed_tokens.weight");
      } else {
        plan_tensor(spec, choose(spec, copies));
      }
    }
    if (input_.held != nullptr) {
      return std::move(plan_);
    }
    resolver_.require_nothing_left();
    require_input(input_.options.weights != WeightsChoice::kQuantized || any_quantized,
                  "{}: quantised weights were asked for, but it holds none", input_.origin);
    return std::move(plan_);
  }

 private:
  // Whether this rank has the routed expert that the tensor belongs to.
  bool holds(const ExpertPlacement& placement, const TensorSpec& spec) const {
    return placement.layer(spec.layer)
        .holds(input_.options.grid.expert_group(input_.options.rank), spec.expert);
  }

  const StoredCopy& choose(const TensorSpec& spec, const StoredCopies& copies) const {
    const bool original = input_.options.weights == WeightsChoice::kOriginal || !copies.quantized;
    require_input(!original || copies.original,
                  "{} is stored as INT4 only, but original weights were asked for",
                  resolver_.place_of(spec));
    return original ? *copies.original : *copies.quantized;
  }

  void plan_tensor(const TensorSpec& spec, const StoredCopy& copy) {
    check_cuts(spec, copy);
    if (is_elsewhere(spec)) {
      return;
    }
    if (spec.is_vector()) {
      plan_vector(spec, copy);
    } else {
      plan_matrix(spec, copy);
    }
  }

  // Whether it belongs to a routed expert of other ranks alone.
  bool is_elsewhere(const TensorSpec& spec) const {
    if (spec.expert < 0) {
      return false;
    }
    check(input_.placement != nullptr, "routed experts without a placement");
    return !holds(*input_.placement, spec);
  }

  // Columns of packed rows can be divided between groups only.
  void check_cuts(const TensorSpec& spec, const StoredCopy& copy) const {
    if (copy.form != StorageForm::kInt4 || !spec.split.by_columns ||
        input_.options.world_size == 1) {
      return;
    }
    const Range part = part_of(spec);
    const bool heads = spec.split.part == PartOf::kHeads;
    require_input(!heads || spec.split.unit % copy.group_size == 0,
                  "{}: INT4 groups of {} columns span attention heads of {} columns: it cannot be "
                  "divided over {} ranks",
                  resolver_.place_of(spec), copy.group_size, spec.split.unit,
                  input_.options.world_size);
    check(part.begin % copy.group_size == 0 && part.end % copy.group_size == 0,
          "{}: columns [{}, {}) cut groups of {}", spec.name, part.begin, part.end,
          copy.group_size);
  }

  // This rank's rows or columns.
  Range part_of(const TensorSpec& spec) const {
    const Range part = input_.parts[static_cast<std::size_t>(spec.split.part)];
    return {part.begin * spec.split.unit, part.end * spec.split.unit};
  }

  void plan_vector(const TensorSpec& spec, const StoredCopy& copy) {
    const std::int64_t size = spec.shape[0];
    LoadRegion region = make_region(*copy.values, {0, 1}, {0, size});
    region.total_columns = size;
    set_float_output(region, DType::kFloat32);
    plan_.vectors.push_back({spec.name, size, add_region(spec, region)});
  }

  void plan_matrix(const TensorSpec& spec, const StoredCopy& copy) {
    Range rows{0, spec.shape[0]};
    Range columns{0, spec.shape[1]};
    if (spec.split.part != PartOf::kNothing) {
      (spec.split.by_columns ? columns : rows) = part_of(spec);
    }
    PlannedMatrix matrix{.name = spec.name, .view = {}};
    matrix.view.out_features = rows.size();
    matrix.view.in_features = columns.size();
    if (copy.form == StorageForm::kInt4 && !spec.dequantize) {
      plan_packed(spec, copy, {rows, columns}, matrix);
    } else if (input_.options.weights == WeightsChoice::kInt4 &&
               spec.kind == WeightKind::kRoutedExperts) {
      plan_quantized(spec, copy, {rows, columns}, matrix);
    } else {
      plan_floats(spec, copy, {rows, columns}, matrix);
    }
    if (copy.packed_shape != nullptr) {
      plan_.shape_checks.push_back({copy.packed_shape, spec.shape[0], spec.shape[1]});
    }
    plan_.matrices.push_back(std::move(matrix));
  }

  void plan_packed(const TensorSpec& spec, const StoredCopy& copy,
                   const std::pair<Range, Range>& block, PlannedMatrix& matrix) {
    const auto& [rows, columns] = block;
    matrix.view.format = WeightFormat::kInt4Group;
    matrix.view.scale_dtype = copy.scales->dtype;
    matrix.view.group_size = copy.group_size;
    LoadRegion words =
        make_region(*copy.values, rows, {columns.begin / kInt4PerWord, columns.end / kInt4PerWord});
    words.total_columns = spec.shape[1] / kInt4PerWord;
    words.output = copy.values->dtype;
    matrix.data_offset = add_region(spec, words);
    LoadRegion scales = make_region(
        *copy.scales, rows, {columns.begin / copy.group_size, columns.end / copy.group_size});
    scales.total_columns = spec.shape[1] / copy.group_size;
    scales.output = copy.scales->dtype;
    scales.is_scales = true;
    matrix.scales_offset = add_region(spec, scales);
  }

  void plan_floats(const TensorSpec& spec, const StoredCopy& copy,
                   const std::pair<Range, Range>& block, PlannedMatrix& matrix) {
    LoadRegion region = make_region(*copy.values, block.first, block.second);
    region.total_columns = spec.shape[1];
    const bool round = input_.options.round_to_bfloat16 && !spec.keep_float32;
    const bool narrow =
        round || (copy.form == StorageForm::kPlain && copy.values->dtype == DType::kBFloat16);
    set_float_output(region, narrow ? DType::kBFloat16 : DType::kFloat32);
    if (copy.form != StorageForm::kPlain) {
      region.decode =
          copy.form == StorageForm::kInt4 ? LoadRegion::Decode::kInt4 : LoadRegion::Decode::kFloat8;
      region.scales = copy.scales;
      region.group_size = copy.group_size;
    }
    matrix.view.format = narrow ? WeightFormat::kBFloat16 : WeightFormat::kFloat32;
    matrix.data_offset = add_region(spec, region);
  }

  // Floats or fp8 that become INT4 on their way.
  void plan_quantized(const TensorSpec& spec, const StoredCopy& copy,
                      const std::pair<Range, Range>& block, PlannedMatrix& matrix) {
    const std::int64_t group = input_.options.int4_group_size;
    check_group_size(spec.shape[1], group, tensor_place(*copy.values));
    LoadRegion region = make_region(*copy.values, block.first, block.second);
    region.total_columns = spec.shape[1];
    set_float_output(region, DType::kFloat32);
    if (copy.form == StorageForm::kFloat8) {
      region.decode = LoadRegion::Decode::kFloat8;
      region.scales = copy.scales;
    }
    region.quantize_group = group;
    region.device_scales_offset = reserve(spec, region.rows.size() * region.scale_row_bytes());
    matrix.view.format = WeightFormat::kInt4Group;
    matrix.view.scale_dtype = DType::kBFloat16;
    matrix.view.group_size = group;
    matrix.data_offset = add_region(spec, region);
    matrix.scales_offset = region.device_scales_offset;
  }

  static LoadRegion make_region(const StoredTensor& values, Range rows, Range columns) {
    LoadRegion region;
    region.values = &values;
    region.rows = rows;
    region.columns = columns;
    return region;
  }

  static void set_float_output(LoadRegion& region, DType output) {
    region.output = output;
    region.decode =
        region.values->dtype == output ? LoadRegion::Decode::kCopy : LoadRegion::Decode::kWiden;
  }

  // Room for `bytes` in device memory; its offset.
  std::int64_t reserve(const TensorSpec& spec, std::int64_t bytes) {
    const std::int64_t offset = plan_.device_bytes;
    const std::int64_t aligned =
        (bytes + kDeviceAlignment - 1) / kDeviceAlignment * kDeviceAlignment;
    plan_.device_bytes += aligned;
    plan_.kind_bytes[static_cast<std::size_t>(spec.kind)] += aligned;
    return offset;
  }

  // Gives the region its place in device memory, which is returned.
  std::int64_t add_region(const TensorSpec& spec, LoadRegion& region) {
    region.device_offset = reserve(spec, region.device_bytes());
    if (region.device_bytes() > 0 && region.values->slice) {
      require_stored(*region.values, stored_values(region));
    }
    if (region.device_bytes() > 0 && region.scales != nullptr && region.scales->slice) {
      require_stored(*region.scales, stored_scales(region));
    }
    if (spec.split.part != PartOf::kNothing) {
      share_checksums(spec, region);
    }
    if (region.device_bytes() > 0) {
      plan_.regions.push_back(region);
    }
    return region.device_offset;
  }

  // A shard that was made for other parts than this rank's.
  void require_stored(const StoredTensor& tensor, const StoredSlice& wanted) const {
    const StoredSlice& slice = *tensor.slice;
    const bool inside =
        wanted.rows.begin >= slice.rows.begin && wanted.rows.end <= slice.rows.end &&
        wanted.columns.begin >= slice.columns.begin && wanted.columns.end <= slice.columns.end;
    require_input(
        inside,
        "{}: the shard holds rows {} to {} and columns {} to {}, rank {} of {} needs rows "
        "{} to {} and columns {} to {}: convert the checkpoint again for this run",
        tensor_place(tensor), slice.rows.begin, slice.rows.end, slice.columns.begin,
        slice.columns.end, input_.options.rank, input_.options.world_size, wanted.rows.begin,
        wanted.rows.end, wanted.columns.begin, wanted.columns.end);
  }

  // Tensors that the ranks read in parts: each is read whole by one of them. Who reads all of it
  // anyway verifies it on the way.
  void share_checksums(const TensorSpec& spec, const LoadRegion& region) {
    if (!input_.options.verify_checksums || input_.options.world_size == 1) {
      return;
    }
    const bool whole = stored_values(region) == stored_extent(*region.values);
    // Block scales are always read whole; group scales go with the rows.
    const bool scales_whole = region.decode == LoadRegion::Decode::kFloat8 || whole;
    add_checksum(spec, region.values, whole);
    add_checksum(spec, region.scales, scales_whole && region.device_bytes() > 0);
  }

  void add_checksum(const TensorSpec& spec, const StoredTensor* tensor, bool read_anyway) {
    // Nobody else reads this rank's shard.
    if (tensor != nullptr && tensor->checksum && !read_anyway &&
        (input_.is_shard || is_to_verify(spec, *tensor))) {
      plan_.checksum_only.push_back(tensor);
    }
  }

  // Whether it is this rank's among those that read parts of the tensor: all ranks, or those of an
  // expert group that holds the expert.
  bool is_to_verify(const TensorSpec& spec, const StoredTensor& tensor) const {
    const LoadOptions& options = input_.options;
    const std::int64_t number = number_of_.at(&tensor);
    return spec.expert >= 0
               ? number % options.grid.moe_tp == options.grid.expert_slice(options.rank)
               : number % options.world_size == options.rank;
  }

  const PlanInput& input_;
  StorageResolver resolver_;
  std::unordered_map<const StoredTensor*, std::int64_t> number_of_;  // that have a checksum
  LoadPlan plan_;
};

}  // namespace

StoredSlice stored_values(const LoadRegion& region) {
  const std::int64_t packed = region.decode == LoadRegion::Decode::kInt4 ? kInt4PerWord : 1;
  return {.rows = region.rows,
          .columns = {region.columns.begin / packed, region.columns.end / packed}};
}

StoredSlice stored_scales(const LoadRegion& region) {
  if (region.decode == LoadRegion::Decode::kFloat8) {
    return stored_extent(*region.scales);
  }
  return {.rows = region.rows,
          .columns = {region.columns.begin / region.group_size,
                      region.columns.end / region.group_size}};
}

StoredSlice stored_extent(const StoredTensor& tensor) {
  if (tensor.slice) {
    return *tensor.slice;
  }
  const bool vector = tensor.shape.rank() == 1;
  return {.rows = {0, vector ? 1 : tensor.shape[0]},
          .columns = {0, vector ? tensor.shape[0] : tensor.shape[1]}};
}

LoadPlan make_load_plan(const PlanInput& input) {
  return Planner(input).run();
}

}  // namespace kdtree
