#include "weights/random_checkpoint.h"

#include <xxhash.h>

#include <cmath>
#include <filesystem>
#include <vector>

#include "core/check.h"
#include "core/json_text.h"
#include "weights/number_formats.h"
#include "weights/tensor_spec.h"

namespace kdtree {

namespace {

// Root mean square of the sixteen INT4 values -8 to 7.
const double kInt4Deviation = std::sqrt(344.0 / 16);
constexpr float kScaleSpread = 0.5F;  // scales lie within this share of their mean
constexpr float kBiasRange = 0.01F;

class RandomTable {
 public:
  RandomTable(std::uint64_t seed, std::string origin) : seed_(seed), origin_(std::move(origin)) {}

  void add(const TensorSpec& spec, const std::optional<QuantizationConfig>& quantization) {
    if (spec.tied) {
      return;
    }
    if (spec.is_vector()) {
      const bool bias = spec.name.ends_with("bias");
      add_floats(spec.name, spec.shape, bias ? -kBiasRange : 1, bias ? kBiasRange : 1);
      return;
    }
    const auto columns = static_cast<double>(spec.shape[1]);
    if (spec.expert >= 0 && quantization) {
      const std::int64_t group = quantization->group_size;
      require_input(spec.shape[1] % group == 0,
                    "{}: INT4 groups of {} do not divide the {} columns of {}", origin_, group,
                    spec.shape[1], spec.name);
      add_stored(spec.name + "_packed", DType::kInt32,
                 Shape{spec.shape[0], spec.shape[1] / kInt4PerWord},
                 RandomFill{.kind = RandomFill::Kind::kBits});
      const auto scale = static_cast<float>(1 / (kInt4Deviation * std::sqrt(columns)));
      add_floats(spec.name + "_scale", Shape{spec.shape[0], spec.shape[1] / group},
                 scale * (1 - kScaleSpread), scale * (1 + kScaleSpread));
      return;
    }
    // A uniform value within [-a, a] has the variance a^2 / 3.
    const bool embedding = spec.name == "model.embed_tokens.weight";
    const auto range = static_cast<float>(std::sqrt(3 / (embedding ? 1 : columns)));
    add_floats(spec.name, spec.shape, -range, range);
  }

  // An fp8 matrix as its checkpoint stores it, without a rule to draw it.
  void add_float8(const TensorSpec& spec) {
    const auto blocks = [&spec](std::size_t dim) {
      return (spec.shape[dim] + kFloat8Block - 1) / kFloat8Block;
    };
    add_stored(spec.name, DType::kFloat8E4M3, spec.shape, std::nullopt);
    add_stored(spec.name + "_scale_inv", DType::kFloat32, Shape{blocks(0), blocks(1)},
               std::nullopt);
  }

  TensorTable take() { return std::move(table_); }

 private:
  void add_floats(const std::string& name, Shape shape, float low, float high) {
    add_stored(name, DType::kBFloat16, shape,
               RandomFill{.kind = RandomFill::Kind::kBFloat16, .low = low, .high = high});
  }
  void add_stored(const std::string& name, DType dtype, Shape shape,
                  std::optional<RandomFill> fill) {
    if (fill) {
      fill->seed = XXH3_64bits_withSeed(name.data(), name.size(), seed_);
    }
    StoredTensor stored;
    stored.dtype = dtype;
    stored.shape = shape;
    stored.file = origin_;
    stored.name = name;
    stored.bytes = shape.num_elements() * dtype_bytes(dtype);
    stored.random = fill;
    table_.emplace(name, std::move(stored));
  }

  std::uint64_t seed_;
  std::string origin_;
  TensorTable table_;
};

std::string config_path(const std::string& path) {
  namespace fs = std::filesystem;
  std::error_code status;
  const bool directory = fs::is_directory(path, status);
  std::string file = directory ? (fs::path(path) / "config.json").string() : path;
  require_input(fs::exists(file, status), "{}: no such file: random weights need a config.json",
                file);
  return file;
}

// The tensors that a checkpoint of checkpoint.config stores.
TensorTable target_table(const TargetCheckpoint& checkpoint, std::uint64_t seed, bool with_float8) {
  RandomTable table(seed, checkpoint.origin);
  for (const TensorSpec& spec : target_tensor_specs(checkpoint.config)) {
    // Published fp8 checkpoints keep embedding and head in bf16.
    const bool float8 = with_float8 && checkpoint.config.float8_blocks && spec.may_be_quantized &&
                        spec.kind != WeightKind::kVocabulary;
    if (float8) {
      table.add_float8(spec);
    } else {
      table.add(spec, checkpoint.config.quantization);
    }
  }
  return table.take();
}

TargetCheckpoint make_target(const std::string& path, std::uint64_t seed, bool with_float8) {
  TargetCheckpoint checkpoint;
  checkpoint.origin = config_path(path);
  checkpoint.config_json = read_json_file(checkpoint.origin);
  checkpoint.config = parse_model_config(checkpoint.config_json, checkpoint.origin);
  checkpoint.tensors = target_table(checkpoint, seed, with_float8);
  return checkpoint;
}

}  // namespace

TargetCheckpoint random_target(const std::string& path, std::uint64_t seed) {
  return make_target(path, seed, /*with_float8=*/false);
}

TargetCheckpoint random_target(const ModelConfig& config, std::uint64_t seed) {
  TargetCheckpoint checkpoint;
  checkpoint.origin = "random weights";
  checkpoint.config = config;
  checkpoint.tensors = target_table(checkpoint, seed, /*with_float8=*/false);
  return checkpoint;
}

TargetCheckpoint planned_target(const std::string& path) {
  return make_target(path, 0, /*with_float8=*/true);
}

DrafterCheckpoint random_drafter(const std::string& path, std::uint64_t seed) {
  DrafterCheckpoint checkpoint;
  checkpoint.origin = config_path(path);
  checkpoint.config_json = read_json_file(checkpoint.origin);
  checkpoint.config = parse_drafter_config(checkpoint.config_json, checkpoint.origin);
  RandomTable table(seed, checkpoint.origin);
  for (const TensorSpec& spec : drafter_tensor_specs(checkpoint.config)) {
    table.add(spec, std::nullopt);
  }
  checkpoint.tensors = table.take();
  return checkpoint;
}

}  // namespace kdtree
