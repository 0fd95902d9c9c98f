// Random weight matrices of every format, with their exact values.
#pragma once

#include <string>
#include <vector>

#include "kernels/weight_view.h"
#include "tests/unit/op_test.h"

namespace kdtree::ops_test {

struct WeightKind {
  WeightFormat format = WeightFormat::kFloat32;
  std::int64_t group_size = 0;
  DType scale_dtype = DType::kFloat32;

  std::string name() const {
    switch (format) {
      case WeightFormat::kFloat32:
        return "f32";
      case WeightFormat::kBFloat16:
        return "bf16";
      case WeightFormat::kInt4Group:
        return "int4 group " + std::to_string(group_size) +
               (scale_dtype == DType::kFloat32 ? " f32 scales" : " bf16 scales");
    }
    return "?";
  }
};

inline std::vector<WeightKind> all_weight_kinds() {
  std::vector<WeightKind> kinds = {{WeightFormat::kFloat32}, {WeightFormat::kBFloat16}};
  for (const std::int64_t group_size : {8, 16, 32, 128}) {
    kinds.push_back({WeightFormat::kInt4Group, group_size, DType::kFloat32});
    kinds.push_back({WeightFormat::kInt4Group, group_size, DType::kBFloat16});
  }
  return kinds;
}

// A matrix on a backend's device and its values on the host.
class RandomWeight {
 public:
  RandomWeight(Backend& backend, const WeightKind& kind, std::int64_t out, std::int64_t in,
               Random& random)
      : in_(in),
        data_(backend, data_dtype(kind.format),
              Shape{out, kind.format == WeightFormat::kInt4Group ? in / 8 : in}),
        scales_(backend, kind.scale_dtype, Shape{out, num_groups(kind, in)}) {
    view_ = {.format = kind.format,
             .out_features = out,
             .in_features = in,
             .data = data_.view().raw(),
             .scales = kind.format == WeightFormat::kInt4Group ? scales_.view().raw() : nullptr,
             .scale_dtype = kind.scale_dtype,
             .group_size = kind.group_size};
    if (kind.format == WeightFormat::kInt4Group) {
      fill_int4(kind, out, random);
      backend.prepare(view_);
      return;
    }
    const bool narrow = kind.format == WeightFormat::kBFloat16;
    const auto values =
        rounded_to(narrow ? DType::kBFloat16 : DType::kFloat32, random.floats(out * in));
    values_.assign(values.begin(), values.end());
    if (narrow) {
      data_.upload(to_bfloat16(values));
    } else {
      data_.upload(values);
    }
  }

  const WeightView& view() const { return view_; }
  double at(std::int64_t out, std::int64_t in) const {
    return values_[static_cast<std::size_t>(out * in_ + in)];
  }

 private:
  static DType data_dtype(WeightFormat format) {
    return format == WeightFormat::kFloat32    ? DType::kFloat32
           : format == WeightFormat::kBFloat16 ? DType::kBFloat16
                                               : DType::kInt32;
  }
  static std::int64_t num_groups(const WeightKind& kind, std::int64_t in) {
    return kind.format == WeightFormat::kInt4Group ? in / kind.group_size : 0;
  }

  void fill_int4(const WeightKind& kind, std::int64_t out, Random& random) {
    const auto scales =
        rounded_to(kind.scale_dtype, random.floats(out * num_groups(kind, in_), 0.01, 0.2));
    std::vector<std::int32_t> words(static_cast<std::size_t>(out * in_ / 8));
    for (std::int64_t k = 0; k < out * in_; ++k) {
      const std::int64_t code = random.below(16);
      const auto word = static_cast<std::size_t>(k / 8);
      words[word] = static_cast<std::int32_t>(static_cast<std::uint32_t>(words[word]) |
                                              static_cast<std::uint32_t>(code) << (4 * (k % 8)));
      values_.push_back(static_cast<double>(code - 8) *
                        scales[static_cast<std::size_t>(k / kind.group_size)]);
    }
    data_.upload(words);
    if (kind.scale_dtype == DType::kFloat32) {
      scales_.upload(scales);
    } else {
      scales_.upload(to_bfloat16(scales));
    }
  }

  std::int64_t in_;
  GuardedTensor data_;
  GuardedTensor scales_;
  WeightView view_;
  std::vector<double> values_;
};

}  // namespace kdtree::ops_test
