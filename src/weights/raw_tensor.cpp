#include "weights/raw_tensor.h"

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <utility>

#include "core/check.h"
#include "core/json_text.h"

namespace kdtree {

namespace {

constexpr std::int64_t kMaxHeaderInteger = std::int64_t{1} << 60;
constexpr std::int64_t kBitsPerByte = 8;

struct NamedBits {
  std::string_view name;
  std::int64_t bits;
};
constexpr std::array<NamedBits, 22> kDtypeBits = {{
    {"BOOL", 8},        {"F4", 4},      {"F6_E2M3", 6}, {"F6_E3M2", 6}, {"U8", 8},
    {"I8", 8},          {"F8_E5M2", 8}, {"F8_E4M3", 8}, {"F8_E8M0", 8}, {"F8_E4M3FNUZ", 8},
    {"F8_E5M2FNUZ", 8}, {"I16", 16},    {"U16", 16},    {"F16", 16},    {"BF16", 16},
    {"I32", 32},        {"U32", 32},    {"F32", 32},    {"C64", 64},    {"F64", 64},
    {"I64", 64},        {"U64", 64},
}};

constexpr std::array kUsableDtypes = {DType::kFloat32,    DType::kBFloat16, DType::kFloat16,
                                      DType::kFloat8E4M3, DType::kInt64,    DType::kInt32,
                                      DType::kUInt8};

// Bits of all elements, or none on overflow.
std::optional<std::int64_t> total_bits(const std::vector<std::int64_t>& shape, std::int64_t bits) {
  if (std::find(shape.begin(), shape.end(), 0) != shape.end()) {
    return 0;
  }
  std::int64_t total = bits;
  for (const std::int64_t size : shape) {
    if (__builtin_mul_overflow(total, size, &total)) {
      return std::nullopt;
    }
  }
  return total;
}

}  // namespace

std::string tensor_place(std::string_view file, std::string_view name) {
  return fmt::format("{}: tensor {}", file, describe_json(name));
}

std::string tensor_place(const StoredTensor& tensor) {
  return tensor_place(tensor.file, tensor.name);
}

OutputTensor output_tensor(std::string name, DType dtype, const Shape& shape) {
  std::vector<std::int64_t> sizes;
  for (std::size_t dim = 0; dim < shape.rank(); ++dim) {
    sizes.push_back(shape[dim]);
  }
  return {.name = std::move(name),
          .dtype = std::string(dtype_name(dtype)),
          .shape = std::move(sizes),
          .bytes = shape.num_elements() * dtype_bytes(dtype)};
}

StoredTensor to_stored(const std::string& file, const std::string& name, const RawTensor& raw) {
  const auto dtype =
      std::find_if(kUsableDtypes.begin(), kUsableDtypes.end(),
                   [&raw](DType candidate) { return dtype_name(candidate) == raw.dtype; });
  require_input(dtype != kUsableDtypes.end(), "{} is of dtype {}, which is not supported",
                tensor_place(file, name), raw.dtype);
  require_input(raw.shape.size() <= Shape::kMaxRank, "{} has {} dimensions, expected at most {}",
                tensor_place(file, name), raw.shape.size(), Shape::kMaxRank);
  std::optional<StoredSlice> slice;
  if (!raw.full_shape.empty()) {
    slice = {.rows = {raw.first[0], raw.first[0] + raw.shape[0]},
             .columns = {raw.first[1], raw.first[1] + raw.shape[1]}};
  }
  const std::vector<std::int64_t>& shape = slice ? raw.full_shape : raw.shape;
  return {.dtype = *dtype,
          .shape = Shape(std::span<const std::int64_t>(shape)),
          .file = file,
          .name = name,
          .file_offset = raw.file_offset,
          .bytes = raw.bytes,
          .checksum = raw.checksum,
          .slice = slice,
          .random = std::nullopt};
}

StoredTensor stored_bytes(const std::string& file, const std::string& name, const RawTensor& raw) {
  return {.dtype = DType::kUInt8,
          .shape = Shape{raw.bytes},
          .file = file,
          .name = name,
          .file_offset = raw.file_offset,
          .bytes = raw.bytes,
          .checksum = raw.checksum,
          .slice = std::nullopt,
          .random = std::nullopt};
}

std::optional<std::int64_t> dtype_bits(std::string_view dtype) {
  for (const NamedBits& known : kDtypeBits) {
    if (known.name == dtype) {
      return known.bits;
    }
  }
  return std::nullopt;
}

std::vector<std::int64_t> read_shape(const nlohmann::json& entry, std::string_view dtype,
                                     std::int64_t bytes, const std::string& place) {
  const auto found = entry.find("shape");
  require_input(found != entry.end() && found->is_array(), "{}: shape is {}, expected a list",
                place, found == entry.end() ? "missing" : describe_json(*found));
  std::vector<std::int64_t> shape;
  for (const nlohmann::json& size : *found) {
    shape.push_back(header_integer(size, "a size of shape", place));
  }
  const auto bits = dtype_bits(dtype);
  require_input(bits.has_value(), "{}: unknown dtype {}", place, describe_json(dtype));
  const auto total = total_bits(shape, *bits);
  require_input(total && *total % kBitsPerByte == 0 && *total / kBitsPerByte == bytes,
                "{}: holds {} bytes, but shape {} of {} takes {}", place, bytes,
                describe_json(*found), dtype,
                total ? std::to_string(*total / kBitsPerByte) : "more than any file");
  return shape;
}

std::string header_text(const nlohmann::json& entry, const char* key, const std::string& place) {
  const auto found = entry.find(key);
  require_input(found != entry.end() && found->is_string(), "{}: {} is {}, expected a string",
                place, key, found == entry.end() ? "missing" : describe_json(*found));
  return found->get<std::string>();
}

std::int64_t header_integer(const nlohmann::json& value, std::string_view key,
                            const std::string& place) {
  const bool good = value.is_number_unsigned() &&
                    value.get<std::uint64_t>() <= static_cast<std::uint64_t>(kMaxHeaderInteger);
  require_input(good, "{}: {} is {}, expected an integer from 0 to 2^60", place, key,
                describe_json(value));
  return value.get<std::int64_t>();
}

void check_extents(const RawTable& table, const DataExtent& extent, const std::string& file) {
  std::vector<const RawTable::value_type*> order;
  order.reserve(table.size());
  for (const auto& item : table) {
    order.push_back(&item);
  }
  std::sort(order.begin(), order.end(), [](const auto* left, const auto* right) {
    return std::pair(left->second.file_offset, left->second.bytes) <
           std::pair(right->second.file_offset, right->second.bytes);
  });
  std::int64_t end = extent.data_start;
  for (const auto* item : order) {
    const RawTensor& tensor = item->second;
    require_input(tensor.file_offset >= end, "{} begins at byte {}, inside the one before it",
                  tensor_place(file, item->first), tensor.file_offset);
    require_input(!extent.dense || tensor.file_offset == end,
                  "{} begins at byte {}, expected {} (no gaps)", tensor_place(file, item->first),
                  tensor.file_offset, end);
    end = tensor.file_offset + tensor.bytes;
  }
  require_input(end <= extent.file_bytes, "{}: truncated: expected {} bytes, the file has {}", file,
                end, extent.file_bytes);
  require_input(end == extent.file_bytes,
                "{}: expected {} bytes, the file has {}: something follows the last tensor", file,
                end, extent.file_bytes);
}

}  // namespace kdtree
