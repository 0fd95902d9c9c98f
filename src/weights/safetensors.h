// The safetensors container: u64 header size, JSON header, tensors without gaps.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "weights/raw_tensor.h"

namespace kdtree {

// Reads the header of a safetensors file and checks all of it against the format and the file's
// size: header size, JSON, keys, shapes against bytes, no overlap, no gap, nothing behind the end.
// InputError names the file and the tensor.
RawTable read_safetensors_header(const std::string& path);

// Where everything of a file to be written goes.
struct SafetensorsLayout {
  std::string head;                   // the bytes before the first tensor
  std::vector<std::int64_t> offsets;  // of the tensors, in the file
  std::int64_t file_bytes = 0;
};
// Tensors with wider elements come first, then by name: each is aligned to its element.
SafetensorsLayout safetensors_layout(const std::vector<OutputTensor>& tensors);

}  // namespace kdtree
