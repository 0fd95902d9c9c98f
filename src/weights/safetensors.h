// The safetensors container: u64 header size, JSON header, tensors without gaps.
#pragma once

#include <functional>
#include <span>
#include <string>
#include <vector>

#include "weights/raw_tensor.h"

namespace kdtree {

// Reads the header of a safetensors file and checks all of it against the format and the file's
// size: header size, JSON, keys, shapes against bytes, no overlap, no gap, nothing behind the end.
// InputError names the file and the tensor.
RawTable read_safetensors_header(const std::string& path);

// Writes a file of these tensors. data(i) gives the bytes of infos[i], exactly infos[i].bytes(),
// valid until the next call. Error if writing fails; a half-written file never takes the name.
void write_safetensors(const std::string& path, const std::vector<TensorInfo>& infos,
                       const std::function<std::span<const std::byte>(std::size_t)>& data);

}  // namespace kdtree
