// The work of a conversion, tensor by tensor.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "weights/convert.h"
#include "weights/load_plan.h"
#include "weights/partial_output.h"
#include "weights/raw_tensor.h"

namespace kdtree {

// One tensor, or the two of a quantised matrix, and where its content comes from: one of three.
struct ConvertItem {
  std::vector<OutputTensor> outputs;
  const StoredTensor* source = nullptr;  // copied: the elements of `block`, row after row
  StoredSlice block = {};
  std::optional<LoadRegion> quantize = std::nullopt;  // outputs: words, scales
  std::string literal = {};

  // The tensors that it reads.
  std::vector<const StoredTensor*> sources() const;
};

// An item and where its outputs go.
struct PlacedItem {
  const ConvertItem* item = nullptr;
  std::size_t file = 0;
  std::vector<std::int64_t> offsets;
};

struct ItemResults {
  std::vector<std::uint64_t> checksums;  // XXH3-64 of all outputs, in their order
  std::vector<QuantizedTensor> quantized;
  std::int64_t num_resumed = 0;  // outputs that were there already
};

struct WriteOptions {
  int num_threads = 1;
  std::int64_t piece_bytes = 0;
};

// Writes the items that `output` does not hold yet; those that its journal lists are read and held
// against their checksums. Logs progress. InputError for damaged sources, Error if writing fails.
ItemResults write_items(std::span<const PlacedItem> items, PartialOutput& output,
                        const WriteOptions& options);

// XXH3-64 as 16 hexadecimal digits.
std::string checksum_text(std::string_view bytes);

}  // namespace kdtree
