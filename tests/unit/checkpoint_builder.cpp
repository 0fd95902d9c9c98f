#include "tests/unit/checkpoint_builder.h"

#include <xxhash.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string_view>
#include <utility>

#include "core/check.h"
#include "weights/file.h"
#include "weights/kdtr.h"
#include "weights/number_formats.h"
#include "weights/safetensors.h"
#include "weights/tensor_spec.h"

namespace kdtree {

namespace {

// Splitmix64 (Steele, Lea, Flood 2014).
class Random {
 public:
  Random(std::uint64_t seed, std::string_view name) : state_(seed) {
    for (const char letter : name) {
      state_ = (state_ ^ static_cast<unsigned char>(letter)) * 0x100000001b3ULL;
    }
  }

  // About normal: the sum of four uniform numbers, with mean 0 and deviation 1.
  float normal() {
    constexpr std::uint64_t kPart = 0xffff;
    const std::uint64_t bits = next();
    const std::uint64_t sum =
        (bits & kPart) + ((bits >> 16) & kPart) + ((bits >> 32) & kPart) + ((bits >> 48) & kPart);
    return (static_cast<float>(sum) / 65536.0F - 2.0F) * std::sqrt(3.0F);
  }

 private:
  std::uint64_t next() {
    state_ += 0x9e3779b97f4a7c15ULL;
    std::uint64_t mixed = (state_ ^ (state_ >> 30)) * 0xbf58476d1ce4e5b9ULL;
    mixed = (mixed ^ (mixed >> 27)) * 0x94d049bb133111ebULL;
    return mixed ^ (mixed >> 31);
  }

  std::uint64_t state_;
};

struct Distribution {
  float mean = 0;
  float deviation = 1;
};

Distribution distribution_of(const TensorSpec& spec) {
  constexpr float kSmall = 0.1F;
  if (spec.is_vector()) {
    return {spec.name.ends_with("bias") ? 0.0F : 1.0F, kSmall};
  }
  const float gain = spec.name == "lm_head.weight" ? 4.0F : 1.5F;
  return {0, gain / std::sqrt(static_cast<float>(spec.shape[1]))};
}

std::vector<float> values_of(const TensorSpec& spec, std::uint64_t seed) {
  const Distribution distribution = distribution_of(spec);
  Random random(seed, spec.name);
  std::vector<float> values(static_cast<std::size_t>(spec.shape.num_elements()));
  for (float& value : values) {
    value = distribution.mean + distribution.deviation * random.normal();
  }
  return values;
}

BuiltTensor floats(std::string name, const Shape& shape, DType dtype,
                   const std::vector<float>& values) {
  BuiltTensor tensor{{std::move(name), dtype, shape}, {}};
  tensor.data.resize(static_cast<std::size_t>(tensor.info.bytes()));
  narrow(values, dtype, tensor.data.data());
  return tensor;
}

template <class T>
BuiltTensor integers(std::string name, const Shape& shape, DType dtype,
                     const std::vector<T>& values) {
  BuiltTensor tensor{{std::move(name), dtype, shape}, {}};
  tensor.data.resize(values.size() * sizeof(T));
  std::memcpy(tensor.data.data(), values.data(), tensor.data.size());
  return tensor;
}

class TensorList {
 public:
  TensorList(const CheckpointRecipe& recipe, BuiltNames names) : recipe_(recipe), names_(names) {}

  void add(const TensorSpec& spec, const std::string& prefix) {
    if (spec.tied) {
      return;
    }
    const std::vector<float> values = values_of(spec, recipe_.seed);
    const bool wanted = spec.expert >= 0 || (recipe_.quantize_all && spec.may_be_quantized);
    const bool packed = recipe_.group_size > 0 && wanted && spec.shape[1] % recipe_.group_size == 0;
    if (packed) {
      add_packed(prefix + spec.name, spec.shape, values);
    }
    if (!packed || recipe_.keep_originals) {
      const bool bias = spec.name.ends_with("bias");
      tensors_.push_back(floats(prefix + spec.name, spec.shape,
                                bias ? DType::kFloat32 : recipe_.weight_dtype, values));
    }
  }
  std::vector<BuiltTensor> take() { return std::move(tensors_); }

 private:
  void add_packed(const std::string& name, const Shape& shape, const std::vector<float>& values) {
    const bool bundle = names_ == BuiltNames::kBundle;
    const Int4Matrix matrix =
        quantize_int4(values, shape[1], recipe_.group_size, recipe_.scale_dtype);
    tensors_.push_back(integers(name + (bundle ? ".qw" : "_packed"),
                                {shape[0], shape[1] / kInt4PerWord}, DType::kInt32, matrix.words));
    tensors_.push_back(floats(name + (bundle ? ".sc" : "_scale"),
                              {shape[0], shape[1] / recipe_.group_size}, recipe_.scale_dtype,
                              matrix.scales));
    if (!bundle) {
      tensors_.push_back(integers(name + "_shape", {2}, DType::kInt64,
                                  std::vector<std::int64_t>{shape[0], shape[1]}));
    }
  }

  const CheckpointRecipe& recipe_;
  BuiltNames names_;
  std::vector<BuiltTensor> tensors_;
};

std::vector<OutputTensor> outputs_of(const std::vector<BuiltTensor>& tensors) {
  std::vector<OutputTensor> outputs;
  for (const BuiltTensor& tensor : tensors) {
    check(static_cast<std::int64_t>(tensor.data.size()) == tensor.info.bytes(),
          "{}: {} bytes of data", tensor.info.name, tensor.data.size());
    outputs.push_back(output_tensor(tensor.info.name, tensor.info.dtype, tensor.info.shape));
  }
  return outputs;
}

void write_parts(const std::string& path, const std::string& head,
                 const std::vector<std::int64_t>& offsets, std::int64_t file_bytes,
                 const std::vector<BuiltTensor>& tensors) {
  OutputFile file(path);
  file.resize(0);
  file.write(0, head.data(), std::ssize(head));
  for (std::size_t index = 0; index < tensors.size(); ++index) {
    file.write(offsets[index], tensors[index].data.data(), tensors[index].info.bytes());
  }
  file.resize(file_bytes);
}

template <class Config>
void write_part(Config config, const CheckpointRecipe& recipe,
                const std::vector<BuiltTensor>& tensors, const std::string& path) {
  config.quantization.reset();
  if (recipe.group_size > 0) {
    config.quantization = QuantizationConfig{.group_size = recipe.group_size};
  }
  std::filesystem::create_directories(path);
  std::ofstream(path + "/config.json") << to_json(config).dump(1) << "\n";
  write_built_safetensors(tensors, path + "/model.safetensors");
}

}  // namespace

std::vector<BuiltTensor> build_tensors(const CheckpointRecipe& recipe, BuiltNames names) {
  TensorList list(recipe, names);
  for (const TensorSpec& spec : target_tensor_specs(recipe.target)) {
    list.add(spec, "");
  }
  if (recipe.drafter) {
    for (const TensorSpec& spec : drafter_tensor_specs(*recipe.drafter)) {
      list.add(spec, kDrafterPrefix);
    }
  }
  return list.take();
}

nlohmann::json build_bundle_header(const CheckpointRecipe& recipe) {
  ModelConfig target = recipe.target;
  target.quantization.reset();
  nlohmann::json header = {{"target", {{"config", to_json(target)}}}};
  if (recipe.drafter) {
    header["drafter"] = {{"config", to_json(*recipe.drafter)}};
  }
  if (recipe.group_size > 0) {
    header["quantization"] = {{"format", "w4a16"}, {"group_size", recipe.group_size}};
  }
  return header;
}

void write_built_bundle(const nlohmann::json& header, const std::vector<BuiltTensor>& tensors,
                        const std::string& path) {
  const std::vector<OutputTensor> outputs = outputs_of(tensors);
  const KdtrLayout layout = kdtr_layout(header, outputs);
  std::vector<std::uint64_t> checksums;
  checksums.reserve(tensors.size());
  for (const BuiltTensor& tensor : tensors) {
    checksums.push_back(XXH3_64bits(tensor.data.data(), tensor.data.size()));
  }
  write_parts(path, kdtr_head(layout, outputs, checksums), layout.offsets, layout.file_bytes,
              tensors);
}

void write_built_safetensors(const std::vector<BuiltTensor>& tensors, const std::string& path) {
  const SafetensorsLayout layout = safetensors_layout(outputs_of(tensors));
  write_parts(path, layout.head, layout.offsets, layout.file_bytes, tensors);
}

void write_bundle(const CheckpointRecipe& recipe, const std::string& path) {
  write_built_bundle(build_bundle_header(recipe), build_tensors(recipe, BuiltNames::kBundle), path);
}

void write_directory(const CheckpointRecipe& recipe, const std::string& path) {
  check(!recipe.keep_originals, "Hugging Face directories hold one copy of a matrix");
  std::vector<BuiltTensor> target;
  std::vector<BuiltTensor> drafter;
  const std::string_view prefix = kDrafterPrefix;
  for (BuiltTensor& tensor : build_tensors(recipe, BuiltNames::kHuggingFace)) {
    if (tensor.info.name.starts_with(prefix)) {
      tensor.info.name.erase(0, prefix.size());
      drafter.push_back(std::move(tensor));
    } else {
      target.push_back(std::move(tensor));
    }
  }
  write_part(recipe.target, recipe, target, path);
  if (recipe.drafter) {
    write_part(*recipe.drafter, recipe, drafter, path + "/draft");
  }
}

}  // namespace kdtree
