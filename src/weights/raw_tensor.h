// A tensor as the header of a container lists it, before its name and type are judged.
#pragma once

#include <cstdint>
#include <map>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/dtype.h"
#include "core/tensor_view.h"
#include "weights/checkpoint.h"

namespace kdtree {

struct RawTensor {
  std::string dtype;  // "BF16"; may be one that the engine does not compute with
  std::vector<std::int64_t> shape;
  std::int64_t file_offset = 0;
  std::int64_t bytes = 0;
  std::optional<std::uint64_t> checksum;
  // Of a shard, where only a block of a matrix is stored: the matrix's whole shape and the row and
  // column of the block's first element; empty otherwise. `shape` is the block's.
  std::vector<std::int64_t> full_shape;
  std::vector<std::int64_t> first;
};

using RawTable = std::map<std::string, RawTensor>;

// What a container's header is to say about a tensor.
struct OutputTensor {
  std::string name;
  std::string dtype;
  std::vector<std::int64_t> shape;
  std::int64_t bytes = 0;
  std::vector<std::int64_t> full_shape = {};  // as RawTensor's; KDTR bundles only
  std::vector<std::int64_t> first = {};
};
OutputTensor output_tensor(std::string name, DType dtype, const Shape& shape);

// "`file`: tensor '`name`'": how every error about a tensor begins.
std::string tensor_place(std::string_view file, std::string_view name);

std::string tensor_place(const StoredTensor& tensor);

// The tensor for use. InputError if the dtype is none of DType or the rank exceeds Shape's.
StoredTensor to_stored(const std::string& file, const std::string& name, const RawTensor& raw);

// The tensor as bytes, for what only copies or verifies it, whatever its dtype.
StoredTensor stored_bytes(const std::string& file, const std::string& name, const RawTensor& raw);

// Bits of an element, or none for a name that safetensors does not know.
std::optional<std::int64_t> dtype_bits(std::string_view dtype);

// Reads a shape (a list of sizes) and checks that elements of `dtype` in it take `bytes` bytes,
// without any overflow. InputError beginning with `place`.
std::vector<std::int64_t> read_shape(const nlohmann::json& entry, std::string_view dtype,
                                     std::int64_t bytes, const std::string& place);

// entry[key] as a string or as an integer of [0, 2^60]. InputError beginning with `place`.
std::string header_text(const nlohmann::json& entry, const char* key, const std::string& place);
std::int64_t header_integer(const nlohmann::json& value, std::string_view key,
                            const std::string& place);

// InputError if two tensors of the table overlap; `dense` also forbids gaps, and both forbid that
// the last one ends elsewhere than at file_bytes. Offsets are of the file, from data_start on.
struct DataExtent {
  std::int64_t data_start = 0;
  std::int64_t file_bytes = 0;
  bool dense = false;
};
void check_extents(const RawTable& table, const DataExtent& extent, const std::string& file);

}  // namespace kdtree
