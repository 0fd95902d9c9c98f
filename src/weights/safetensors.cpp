#include "weights/safetensors.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <nlohmann/json.hpp>
#include <numeric>

#include "core/check.h"
#include "core/json_text.h"
#include "weights/file.h"

namespace kdtree {

namespace {

static_assert(std::endian::native == std::endian::little, "containers are read in place");

constexpr std::int64_t kSizeBytes = 8;
constexpr std::int64_t kMaxSafetensorsHeaderBytes = 100'000'000;  // the format's own limit
constexpr std::int64_t kHeaderAlignment = 8;
constexpr const char* kMetadata = "__metadata__";

nlohmann::json read_header_json(const InputFile& file, std::int64_t& header_bytes) {
  const std::string& path = file.path();
  require_input(file.size() >= kSizeBytes, "{}: {} bytes are too few for a safetensors file", path,
                file.size());
  std::uint64_t stored_bytes = 0;
  file.read(0, kSizeBytes, &stored_bytes);
  require_input(stored_bytes <= static_cast<std::uint64_t>(kMaxSafetensorsHeaderBytes),
                "{}: header of {} bytes, safetensors allows {}", path, stored_bytes,
                kMaxSafetensorsHeaderBytes);
  header_bytes = static_cast<std::int64_t>(stored_bytes);
  require_input(kSizeBytes + header_bytes <= file.size(),
                "{}: truncated: the header ends at byte {}, the file has {}", path,
                kSizeBytes + header_bytes, file.size());
  std::string text(static_cast<std::size_t>(header_bytes), '\0');
  file.read(kSizeBytes, header_bytes, text.data());
  require_input(!text.empty() && text.front() == '{', "{}: the header does not begin with '{{'",
                path);
  nlohmann::json header = parse_json(text, path);
  require_input(header.is_object(), "{}: the header is not a JSON object", path);
  return header;
}

RawTensor read_safetensors_entry(const nlohmann::json& entry, std::int64_t data_start,
                                 const std::string& place) {
  require_input(entry.is_object(), "{}: header entry is {}, expected an object", place,
                describe_json(entry));
  RawTensor tensor;
  tensor.dtype = header_text(entry, "dtype", place);
  const auto offsets = entry.find("data_offsets");
  require_input(offsets != entry.end() && offsets->is_array() && offsets->size() == 2,
                "{}: data_offsets is {}, expected [begin, end]", place,
                offsets == entry.end() ? "missing" : describe_json(*offsets));
  const std::int64_t begin = header_integer((*offsets)[0], "data_offsets[0]", place);
  const std::int64_t end = header_integer((*offsets)[1], "data_offsets[1]", place);
  require_input(begin <= end, "{}: data_offsets [{}, {}] run backwards", place, begin, end);
  tensor.bytes = end - begin;
  tensor.shape = read_shape(entry, tensor.dtype, tensor.bytes, place);
  tensor.file_offset = data_start + begin;
  return tensor;
}

void check_metadata(const nlohmann::json& metadata, const std::string& path) {
  const bool good = metadata.is_object() &&
                    std::all_of(metadata.begin(), metadata.end(),
                                [](const nlohmann::json& value) { return value.is_string(); });
  require_input(good, "{}: __metadata__ is {}, expected strings only", path,
                describe_json(metadata));
}

}  // namespace

RawTable read_safetensors_header(const std::string& path) {
  const InputFile file(path);
  std::int64_t header_bytes = 0;
  const nlohmann::json header = read_header_json(file, header_bytes);
  const std::int64_t data_start = kSizeBytes + header_bytes;
  RawTable table;
  for (const auto& [name, entry] : header.items()) {
    if (name == kMetadata) {
      check_metadata(entry, path);
    } else {
      table.emplace(name, read_safetensors_entry(entry, data_start, tensor_place(path, name)));
    }
  }
  check_extents(table, {.data_start = data_start, .file_bytes = file.size(), .dense = true}, path);
  return table;
}

SafetensorsLayout safetensors_layout(const std::vector<OutputTensor>& tensors) {
  std::vector<std::size_t> order(tensors.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::sort(order.begin(), order.end(), [&tensors](std::size_t left, std::size_t right) {
    return std::pair(-*dtype_bits(tensors[left].dtype), tensors[left].name) <
           std::pair(-*dtype_bits(tensors[right].dtype), tensors[right].name);
  });
  SafetensorsLayout layout{.head = {}, .offsets = std::vector<std::int64_t>(tensors.size())};
  nlohmann::json header = {{kMetadata, {{"format", "pt"}}}};
  std::int64_t end = 0;
  for (const std::size_t index : order) {
    const OutputTensor& tensor = tensors[index];
    header[tensor.name] = {{"dtype", tensor.dtype},
                           {"shape", tensor.shape},
                           {"data_offsets", {end, end + tensor.bytes}}};
    layout.offsets[index] = end;
    end += tensor.bytes;
  }
  std::string text = header.dump();
  text.resize((text.size() + kHeaderAlignment - 1) / kHeaderAlignment * kHeaderAlignment, ' ');
  const std::uint64_t header_bytes = text.size();
  layout.head.resize(kSizeBytes);
  std::memcpy(layout.head.data(), &header_bytes, kSizeBytes);
  layout.head += text;
  const auto data_start = static_cast<std::int64_t>(layout.head.size());
  for (std::int64_t& offset : layout.offsets) {
    offset += data_start;
  }
  layout.file_bytes = data_start + end;
  return layout;
}

}  // namespace kdtree
