// What one rank reads of a checkpoint, and where in device memory each part goes.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "core/partition.h"
#include "weights/storage.h"
#include "weights/tensor_spec.h"
#include "weights/weight_store.h"

namespace kdtree {

// A block of a stored tensor on its way to the device, row after row without gaps.
struct LoadRegion {
  enum class Decode : std::uint8_t {
    kCopy,    // the stored elements as they are
    kWiden,   // plain floats to `output`
    kInt4,    // packed words times scales to `output`
    kFloat8,  // fp8 times block scales to `output`
  };

  Decode decode = Decode::kCopy;
  const StoredTensor* values = nullptr;  // [rows, columns]; a vector counts as one row
  const StoredTensor* scales = nullptr;  // kInt4 and kFloat8 only
  std::int64_t group_size = 0;           // kInt4 only
  // Of the logical matrix, except for kCopy: there columns count stored elements.
  Range rows;
  Range columns;
  std::int64_t total_columns = 0;  // of the tensor, in the unit of `columns`
  DType output = DType::kFloat32;
  std::int64_t device_offset = 0;
  // > 0: `output` is FP32 and only passes through the host: the device gets INT4 words at
  // device_offset and bf16 scales of groups of this size at device_scales_offset.
  std::int64_t quantize_group = 0;
  std::int64_t device_scales_offset = 0;
  bool is_scales = false;  // kCopy only: scales of groups, whose values are checked

  // As read, before any rounding to INT4.
  std::int64_t row_bytes() const { return columns.size() * dtype_bytes(output); }
  // Of a row at device_offset.
  std::int64_t device_row_bytes() const {
    return quantize_group > 0 ? columns.size() / 2 : row_bytes();
  }
  std::int64_t device_bytes() const { return rows.size() * device_row_bytes(); }
  // Of a row at device_scales_offset.
  std::int64_t scale_row_bytes() const {
    return quantize_group > 0 ? columns.size() / quantize_group * dtype_bytes(DType::kBFloat16) : 0;
  }
};

// Elements of `values` or `scales` that a rank reads: rows, and columns in stored elements.
StoredSlice stored_values(const LoadRegion& region);
// Of a region with group or block scales; block scales are read whole.
StoredSlice stored_scales(const LoadRegion& region);
// All that is stored of a tensor: its slice, or the whole of it. A vector counts as one row.
StoredSlice stored_extent(const StoredTensor& tensor);

// A matrix once its regions are in place. view.data and view.scales are not set yet.
struct PlannedMatrix {
  std::string name;
  WeightView view;
  std::int64_t data_offset = 0;
  std::int64_t scales_offset = 0;
};

struct PlannedVector {
  std::string name;
  std::int64_t size = 0;
  std::int64_t offset = 0;
};

// weight_shape beside packed words: must hold (rows, columns).
struct ShapeCheck {
  const StoredTensor* tensor = nullptr;
  std::int64_t rows = 0;
  std::int64_t columns = 0;
};

struct LoadPlan {
  std::vector<LoadRegion> regions;  // none is empty
  std::vector<PlannedMatrix> matrices;
  std::vector<PlannedVector> vectors;
  std::vector<ShapeCheck> shape_checks;
  // Read whole for their checksum only, because no rank reads all of them.
  std::vector<const StoredTensor*> checksum_only;
  std::vector<std::pair<std::string, std::string>> aliases;  // name, name that it stands for
  std::int64_t device_bytes = 0;
  WeightBytes kind_bytes{};  // of device_bytes
};

// The ranges of this rank, by PartOf (kNothing is not used).
using PartTable = std::array<Range, kNumParts>;

struct PlanInput {
  const TensorTable& tensors;  // must outlive the plan
  const std::string& origin;
  std::string name_prefix;  // of tensor names in the container
  const std::vector<TensorSpec>& specs;
  std::optional<QuantizationConfig> quantization;
  PartTable parts;
  const LoadOptions& options;
  const ExpertPlacement* placement = nullptr;  // needed if there are routed experts
  bool is_shard = false;                       // `tensors` is no more than what options.rank needs
  // Set: only routed experts are planned, and of those only what this rank does not hold there. The
  // tensors were checked before.
  const ExpertPlacement* held = nullptr;
};

// Checks every tensor of the checkpoint (of a shard, what this rank needs) against the specs, then
// plans what options.rank reads. InputError as load_target.
LoadPlan make_load_plan(const PlanInput& input);

// The plan of load_target / load_drafter, which points into the checkpoint; `held` as PlanInput's.
LoadPlan plan_target(const TargetCheckpoint& checkpoint, const ExpertPlacement& placement,
                     const LoadOptions& options, const ExpertPlacement* held = nullptr);
LoadPlan plan_drafter(const DrafterCheckpoint& checkpoint, const LoadOptions& options);

}  // namespace kdtree
