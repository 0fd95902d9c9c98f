#include "weights/directory_tensors.h"

#include <algorithm>
#include <array>
#include <utility>

#include "core/check.h"
#include "weights/number_formats.h"

namespace kdtree {

namespace {

constexpr const char* kGenericTensorPrefix = "model.";

}  // namespace

ContentTensor content_tensor(const std::string& file, const std::string& name, const RawTensor& raw,
                             std::string bundle_name) {
  return {.output = {.name = std::move(bundle_name),
                     .dtype = raw.dtype,
                     .shape = raw.shape,
                     .bytes = raw.bytes},
          .stored = stored_bytes(file, name, raw)};
}

bool take_ending(std::string& name, std::string_view ending) {
  if (!name.ends_with(ending)) {
    return false;
  }
  name.resize(name.size() - ending.size());
  return true;
}

DirectoryTensors::DirectoryTensors(const Container& container, std::string prefix)
    : container_(container), prefix_(std::move(prefix)) {
  for (const FileTable& file : container.files) {
    for (const auto& [name, raw] : file.tensors) {
      all_.emplace(name, &raw);
    }
  }
}

void DirectoryTensors::add_to(std::vector<ContentTensor>& tensors,
                              const std::string& dropped_prefix) {
  for (const FileTable& file : container_.files) {
    for (const auto& [name, raw] : file.tensors) {
      const std::string bundle = bundle_name(name);
      if (is_shape(name)) {
        check_shape(file.file, name, raw);
        continue;
      }
      if (bundle.ends_with(".qw")) {
        shape_of_.try_emplace(prefix_ + bundle.substr(0, bundle.size() - 3), "none");
      }
      tensors.push_back(
          content_tensor(file.file, name, raw, prefix_ + bundle.substr(dropped_prefix.size())));
    }
  }
}

std::string DirectoryTensors::common_prefix() const {
  const bool all = std::all_of(all_.begin(), all_.end(), [](const auto& item) {
    return item.first.starts_with(kGenericTensorPrefix);
  });
  return all ? kGenericTensorPrefix : "";
}

bool DirectoryTensors::is_packed(const std::string& base) const {
  return all_.contains(base + "_packed") && all_.contains(base + "_scale");
}

bool DirectoryTensors::is_shape(std::string name) const {
  return take_ending(name, "_shape") && is_packed(name);
}

std::string DirectoryTensors::bundle_name(const std::string& name) const {
  std::string base = name;
  if (take_ending(base, "_packed") && is_packed(base)) {
    return base + ".qw";
  }
  base = name;
  if (take_ending(base, "_scale") && is_packed(base)) {
    return base + ".sc";
  }
  return name;
}

void DirectoryTensors::check_shape(const std::string& file, std::string name,
                                   const RawTensor& raw) {
  const StoredTensor stored = to_stored(file, name, raw);
  const bool wide = stored.dtype == DType::kInt64;
  require_input((wide || stored.dtype == DType::kInt32) && stored.shape == Shape{2},
                "{} is {} {}, expected I64 or I32 [2]", tensor_place(stored), raw.dtype,
                stored.shape.to_string());
  std::array<std::int64_t, 2> values{};
  std::array<std::int32_t, 2> narrow_values{};
  read_tensor_bytes(stored, 0, stored.bytes,
                    wide ? static_cast<void*>(values.data()) : narrow_values.data());
  if (!wide) {
    values = {narrow_values[0], narrow_values[1]};
  }
  take_ending(name, "_shape");
  const std::vector<std::int64_t>& packed = all_.at(name + "_packed")->shape;
  require_input(
      packed.size() == 2 && values[0] == packed[0] && values[1] == packed[1] * kInt4PerWord,
      "{} holds [{}, {}], which '{}_packed' does not fit", tensor_place(stored), values[0],
      values[1], name);
  shape_of_[prefix_ + name] = raw.dtype;
}

}  // namespace kdtree
