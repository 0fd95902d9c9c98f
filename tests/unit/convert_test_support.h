// What the tests of conversions share.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "kernels/backend.h"
#include "tests/unit/checkpoint_builder.h"
#include "tests/unit/weights_test_support.h"
#include "weights/container.h"
#include "weights/convert.h"
#include "weights/weight_store.h"

namespace kdtree {

inline ConvertReport convert_to(const std::string& model, const std::string& output,
                                ConvertOptions options = {}) {
  options.model = model;
  options.output = output;
  options.num_threads = 3;
  options.piece_bytes = 512;
  return convert(options);
}

// dtype, shape and bytes of every tensor by name.
using TensorContents =
    std::map<std::string, std::tuple<std::string, std::vector<std::int64_t>, std::string>>;
inline TensorContents contents_of(const std::string& model) {
  TensorContents contents;
  for (const FileTable& table : read_container(model, std::nullopt).files) {
    const std::string file = read_file(table.file);
    for (const auto& [name, raw] : table.tensors) {
      contents[name] = {raw.dtype, raw.shape,
                        file.substr(static_cast<std::size_t>(raw.file_offset),
                                    static_cast<std::size_t>(raw.bytes))};
    }
  }
  return contents;
}

inline std::map<std::string, std::string> small_files(const std::string& directory) {
  std::map<std::string, std::string> files;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(directory)) {
    const std::string name = std::filesystem::relative(entry.path(), directory).string();
    if (entry.is_regular_file() && !name.ends_with(".safetensors") &&
        !name.ends_with(".index.json")) {
      files[name] = read_file(entry.path().string());
    }
  }
  return files;
}

inline void expect_same_directory(const std::string& left, const std::string& right) {
  EXPECT_EQ(contents_of(left), contents_of(right));
  EXPECT_EQ(small_files(left), small_files(right));
}

inline CheckpointRecipe recipe_of(std::int64_t group_size) {
  return {.target = tiny_target(),
          .drafter = tiny_drafter(),
          .seed = 17,
          .group_size = group_size,
          .scale_dtype = DType::kBFloat16,
          .weight_dtype = DType::kBFloat16};
}

// A view's data and scales as bytes.
inline std::pair<std::string, std::string> view_bytes(const WeightView& view) {
  const std::int64_t count = view.out_features * view.in_features;
  const auto text = [](const void* data, std::int64_t bytes) {
    return data == nullptr
               ? std::string()
               : std::string(static_cast<const char*>(data), static_cast<std::size_t>(bytes));
  };
  switch (view.format) {
    case WeightFormat::kInt4Group:
      return {text(view.data, count / 2),
              text(view.scales, count / view.group_size * dtype_bytes(view.scale_dtype))};
    case WeightFormat::kBFloat16:
      return {text(view.data, count * 2), ""};
    default:
      return {text(view.data, count * 4), ""};
  }
}

inline void expect_same_weights(const WeightStore& left, const WeightStore& right,
                                const std::vector<TensorSpec>& specs) {
  for (const TensorSpec& spec : specs) {
    SCOPED_TRACE(spec.name);
    ASSERT_EQ(left.contains(spec.name), right.contains(spec.name));
    if (!left.contains(spec.name)) {
      continue;
    }
    if (spec.is_vector()) {
      const ConstTensorView one = left.vector(spec.name);
      EXPECT_EQ(std::memcmp(one.data<float>(), right.vector(spec.name).data<float>(),
                            static_cast<std::size_t>(spec.shape[0]) * sizeof(float)),
                0);
      continue;
    }
    const WeightView one = left.matrix(spec.name);
    const WeightView other = right.matrix(spec.name);
    EXPECT_EQ(one.format, other.format);
    EXPECT_EQ(one.out_features, other.out_features);
    EXPECT_EQ(one.in_features, other.in_features);
    EXPECT_EQ(one.group_size, other.group_size);
    EXPECT_EQ(view_bytes(one), view_bytes(other));
  }
}

}  // namespace kdtree
