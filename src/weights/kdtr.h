// The KDTR bundle, format version 1, little-endian:
//   bytes 0-3    "KDTR"
//   bytes 4-7    u32 version
//   bytes 8-15   u64 header_bytes
//   bytes 16-23  u64 XXH3-64 (seed 0) of the header JSON
//   bytes 24-31  u64 zero
//   then         header_bytes of UTF-8 JSON, zeros up to data_start = round_up(32 + header_bytes,
//                4096), then each tensor at data_start + offset; an offset is a multiple of 64, and
//                of 4096 for a tensor of 64 KiB or more; the file ends with the last tensor.
// JSON: {"target": {"config"}, "drafter": {"config"}, "quantization": {"format": "w4a16",
// "group_size"}, "tensors": {name: {"dtype", "shape", "offset", "bytes", "checksum"}}, "goldens"}.
// A quantised matrix NAME is NAME.qw (I32 [out, in / 8]) and NAME.sc (F32 or BF16 [out, in /
// group_size]). Tensors of the drafter carry the prefix "drafter.". A tensor "files/NAME" (U8) is a
// file of the model's directory, the tokenizer's among them. Written by kdtree convert only:
//   "directory": {"shape_dtype", "drafter_prefix"}: how the directory that the bundle was made of
//     stored what a bundle does not (convert.h)
//   "shard": {"rank", "ranks"}: the bundle holds what this one of so many ranks reads. A block of a
//     matrix has "slice": {"of": [rows, columns] of the matrix, "first": [row, column]} beside its
//     own "shape".
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "weights/raw_tensor.h"

namespace kdtree {

inline constexpr std::uint32_t kKdtrVersion = 1;
inline constexpr const char* kDrafterPrefix = "drafter.";
inline constexpr const char* kFilesPrefix = "files/";

struct KdtrHeader {
  nlohmann::json json;  // without "tensors"
  RawTable tensors;     // every one with a checksum
};

// Reads and checks the header of a bundle, no tensor data. InputError names the file and what was
// found: wrong magic, a newer version, a wrong header checksum, a truncated file, bad JSON, tensors
// that overlap, are misaligned or do not fit their shape.
KdtrHeader read_kdtr_header(const std::string& path);

// Where everything of a bundle to be written goes.
struct KdtrLayout {
  nlohmann::json header;              // with "tensors", their checksums not set yet
  std::vector<std::int64_t> offsets;  // of the tensors, in the file
  std::int64_t file_bytes = 0;
};
// The tensors keep their order. `header` is the JSON without "tensors". Error for a name twice.
KdtrLayout kdtr_layout(nlohmann::json header, const std::vector<OutputTensor>& tensors);
// The bytes before the first tensor. `checksums` (XXH3-64) in the order of `tensors`, which are
// those that the layout was made for.
std::string kdtr_head(const KdtrLayout& layout, const std::vector<OutputTensor>& tensors,
                      const std::vector<std::uint64_t>& checksums);

}  // namespace kdtree
