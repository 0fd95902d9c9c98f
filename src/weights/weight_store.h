// The weights of one rank, in the memory of its device, by name.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "comm/expert_placement.h"
#include "comm/parallel_grid.h"
#include "core/buffer.h"
#include "core/partition.h"
#include "core/tensor_view.h"
#include "kernels/backend.h"
#include "weights/checkpoint.h"
#include "weights/load_statistics.h"
#include "weights/tensor_spec.h"

namespace kdtree {

// Which of a bundle's two copies of a quantised matrix to use.
enum class WeightsChoice : std::uint8_t {
  kAuto,       // quantised where there is a quantised copy
  kOriginal,   // the FP32 / bf16 copy; InputError if a matrix has none
  kQuantized,  // InputError if the checkpoint holds no quantised matrix at all
  // As kAuto, but routed experts that are stored as floats or fp8 are rounded to INT4 groups of
  // LoadOptions::int4_group_size with bf16 scales (quantize_rows) while they are loaded.
  kInt4,
};
inline constexpr std::int64_t kLoadGroupSize = 32;

struct LoadOptions {
  int rank = 0;
  int world_size = 1;
  ParallelGrid grid = {};
  WeightsChoice weights = WeightsChoice::kAuto;
  std::int64_t int4_group_size = kLoadGroupSize;  // of WeightsChoice::kInt4
  // Matrices that come as FP32 (stored so, widened from FP16, or dequantised) are rounded to bf16;
  // bf16 ones are never widened: that loses nothing and costs memory. The router, norms and biases
  // are never rounded.
  bool round_to_bfloat16 = false;
  // Every expert group holds the whole shared experts (all-to-all exchange), a slice of their width
  // a rank, rather than all ranks together (all-reduce).
  bool replicate_shared_experts = false;
  // Of bundles, whose tensors have checksums: what this rank reads whole, and its share of the
  // tensors that the ranks read in parts.
  bool verify_checksums = true;
  // Threads that read and convert; the backend is only called from the calling thread.
  int num_threads = 1;
  // Bytes of a piece on its way to the device, at least 4 * group_size; max_staging_bytes()
  // follows.
  std::int64_t piece_bytes = std::int64_t{4} << 20;
  std::string progress_label = {};  // of load_target's progress; empty: "loading the target"
};

// Owns the device memory; views stay valid for its lifetime.
class WeightStore {
 public:
  // Matrix `name` ("model.layers.0.mlp.gate_proj.weight"): this rank's part. Error if it was not
  // loaded.
  const WeightView& matrix(const std::string& name) const;
  // Vector `name` as float32.
  ConstTensorView vector(const std::string& name) const;
  bool contains(const std::string& name) const;
  std::int64_t bytes() const { return bytes_; }
  // Of load_target() or load_drafter(); zeros for a store that was filled otherwise.
  const LoadStatistics& load_statistics() const { return load_statistics_; }
  void set_load_statistics(const LoadStatistics& statistics) { load_statistics_ = statistics; }

  // `memory` is what the view points into; empty if add_memory() was given it.
  void add_matrix(const std::string& name, WeightView view, std::vector<Buffer> memory);
  void add_vector(const std::string& name, ConstTensorView view, Buffer memory);
  // Matrix `name` is called `new_name` from now on; its memory stays where it is. Errors if there
  // is no such matrix, or one of that name.
  void rename_matrix(const std::string& name, const std::string& new_name);
  // Memory that several views share.
  void add_memory(Buffer memory);

 private:
  std::map<std::string, WeightView> matrices_;
  std::map<std::string, ConstTensorView> vectors_;
  std::vector<Buffer> memory_;
  std::int64_t bytes_ = 0;
  LoadStatistics load_statistics_;
};

// The parts of a model that a rank holds; the single place where they are computed.
struct TargetPartition {
  Range heads;         // of num_attention_heads
  Range intermediate;  // of intermediate_size (dense layers)
  // of n_shared_experts * moe_intermediate_size, over all ranks; over an expert group's under
  // replicate_shared_experts
  Range shared_intermediate;
  Range expert_intermediate;  // of moe_intermediate_size, in whole groups of INT4
  Range vocabulary;           // rows of embedding and head
};
// `config` as open_target() gave it. InputError if there are more ranks (of an attention group)
// than attention heads, or more slices of an expert than there is to cut.
TargetPartition target_partition(const ModelConfig& config, const LoadOptions& options);

struct DrafterPartition {
  Range heads;  // query heads; may be empty
  // those that the query heads read; neighbouring ranks may hold the same one
  Range key_value_heads;
  Range intermediate;
  Range context;  // rows of fc.weight
};
DrafterPartition drafter_partition(const DrafterConfig& config, const LoadOptions& options);

// Checks the tensors against the table of what the model must have (nothing missing, nothing left
// over, every shape and dtype right), on every rank for the whole model, then reads this rank's
// parts; the placement's "ranks" are expert groups (ParallelGrid). InputError names file, tensor,
// what was expected and found. Vectors are FP32; kv_b_proj and embed_tokens are never INT4; with
// tie_word_embeddings lm_head.weight is the embedding.
WeightStore load_target(const TargetCheckpoint& checkpoint, const ExpertPlacement& placement,
                        const LoadOptions& options, Backend& backend);
// From one placement to another, which is kept_in_place of it.
struct ExpertMove {
  const ExpertPlacement& before;
  const ExpertPlacement& after;
};
// Gives this rank its experts of `after` instead of those of `before`, for which `store` was loaded
// with these options: what comes to this rank is read from the checkpoint again, into the memory of
// the slots that become free, so that views keep their places and nothing is allocated on the
// device. InputError as load_target; after one the store is of no use. Returns what was read.
LoadStatistics move_experts(const TargetCheckpoint& checkpoint, const ExpertMove& move,
                            const LoadOptions& options, Backend& backend, WeightStore& store);
WeightStore load_drafter(const DrafterCheckpoint& checkpoint, const LoadOptions& options,
                         Backend& backend);

// Bytes of device memory that load_target / load_drafter will take on options.rank. The same
// errors, but for those in the tensors' data.
std::int64_t target_bytes(const TargetCheckpoint& checkpoint, const ExpertPlacement& placement,
                          const LoadOptions& options);
std::int64_t drafter_bytes(const DrafterCheckpoint& checkpoint, const LoadOptions& options);

// The same by WeightKind.
using WeightBytes = std::array<std::int64_t, kNumWeightKinds>;
WeightBytes target_bytes_by_kind(const TargetCheckpoint& checkpoint,
                                 const ExpertPlacement& placement, const LoadOptions& options);

}  // namespace kdtree
