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
// group_size]). Tensors of the drafter carry the prefix "drafter.".
#pragma once

#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "weights/raw_tensor.h"

namespace kdtree {

inline constexpr std::uint32_t kKdtrVersion = 1;
inline constexpr const char* kDrafterPrefix = "drafter.";

struct KdtrHeader {
  nlohmann::json json;  // without "tensors"
  RawTable tensors;     // every one with a checksum
};

// Reads and checks the header of a bundle, no tensor data. InputError names the file and what was
// found: wrong magic, a newer version, a wrong header checksum, a truncated file, bad JSON, tensors
// that overlap, are misaligned or do not fit their shape.
KdtrHeader read_kdtr_header(const std::string& path);

// Writes a bundle tensor by tensor. `header` is the JSON without "tensors".
class KdtrWriter {
 public:
  // Error if the file cannot be made. The tensors keep the order of `infos`; names are unique.
  KdtrWriter(const std::string& path, nlohmann::json header, std::vector<TensorInfo> infos);
  ~KdtrWriter();
  KdtrWriter(const KdtrWriter&) = delete;
  KdtrWriter& operator=(const KdtrWriter&) = delete;

  // Writes all bytes of infos[index]; each exactly once, in any order.
  void write(std::size_t index, const void* data);
  // Writes the header and gives the file its name; before that nothing is at `path`.
  void finish();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace kdtree
