#include "weights/kdtr.h"

#include <xxhash.h>

#include <array>
#include <cstring>
#include <optional>
#include <utility>

#include "core/check.h"
#include "core/json_text.h"
#include "weights/file.h"

namespace kdtree {

namespace {

constexpr std::string_view kMagic = "KDTR";
constexpr std::int64_t kPrefixBytes = 32;
constexpr std::int64_t kPageBytes = 4096;
constexpr std::int64_t kAlignment = 64;
constexpr std::int64_t kLargeTensorBytes = std::int64_t{64} * 1024;
constexpr std::uint64_t kMaxKdtrHeaderBytes = std::uint64_t{1} << 32;

struct Prefix {
  std::array<char, 4> magic{};
  std::uint32_t version = 0;
  std::uint64_t header_bytes = 0;
  std::uint64_t header_checksum = 0;
  std::uint64_t reserved = 0;
};
static_assert(sizeof(Prefix) == kPrefixBytes);

constexpr std::int64_t round_up(std::int64_t value, std::int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

constexpr std::int64_t alignment_of(std::int64_t bytes) {
  return bytes >= kLargeTensorBytes ? kPageBytes : kAlignment;
}

// Four bytes as text, what is not printable as \x...
std::string printable(std::string_view bytes) {
  std::string text;
  for (const char byte : bytes) {
    const bool plain = byte >= 0x20 && byte < 0x7f;
    text +=
        plain ? std::string(1, byte) : fmt::format("\\x{:02x}", static_cast<unsigned char>(byte));
  }
  return text;
}

Prefix read_prefix(const InputFile& file) {
  const std::string& path = file.path();
  Prefix prefix;
  const std::int64_t available = std::min(file.size(), kPrefixBytes);
  file.read(0, available, &prefix);
  const std::string_view magic(prefix.magic.data(), prefix.magic.size());
  require_input(magic == kMagic, "{}: not a KDTR bundle: begins with '{}', expected '{}'", path,
                printable(magic.substr(0, static_cast<std::size_t>(std::min<std::int64_t>(
                                              available, std::ssize(magic))))),
                kMagic);
  require_input(available == kPrefixBytes, "{}: truncated: {} bytes, a bundle has at least {}",
                path, file.size(), kPrefixBytes);
  require_input(prefix.version == kKdtrVersion,
                "{}: format version {}; this program reads up to {}", path, prefix.version,
                kKdtrVersion);
  require_input(prefix.reserved == 0, "{}: bytes 24 to 31 hold {:#x}, expected zero", path,
                prefix.reserved);
  require_input(prefix.header_bytes <= kMaxKdtrHeaderBytes,
                "{}: header of {} bytes, at most {} expected", path, prefix.header_bytes,
                kMaxKdtrHeaderBytes);
  const auto end = kPrefixBytes + static_cast<std::int64_t>(prefix.header_bytes);
  require_input(end <= file.size(), "{}: truncated: the header ends at byte {}, the file has {}",
                path, end, file.size());
  return prefix;
}

nlohmann::json read_header_json(const InputFile& file, const Prefix& prefix) {
  std::string text(prefix.header_bytes, '\0');
  file.read(kPrefixBytes, static_cast<std::int64_t>(text.size()), text.data());
  const std::uint64_t checksum = XXH3_64bits(text.data(), text.size());
  require_input(checksum == prefix.header_checksum,
                "{}: header checksum is {:016x}, expected {:016x}: the file is damaged",
                file.path(), checksum, prefix.header_checksum);
  nlohmann::json json = parse_json(text, file.path());
  require_input(json.is_object(), "{}: the header is not a JSON object", file.path());
  return json;
}

std::uint64_t read_checksum(const nlohmann::json& entry, const std::string& place) {
  constexpr std::size_t kDigits = 16;
  constexpr int kHexadecimal = 16;
  const std::string text = header_text(entry, "checksum", place);
  const bool good =
      text.size() == kDigits && text.find_first_not_of("0123456789abcdef") == std::string::npos;
  require_input(good, "{}: checksum is {}, expected 16 lower-case hexadecimal digits", place,
                describe_json(text));
  return std::stoull(text, nullptr, kHexadecimal);
}

std::int64_t read_integer(const nlohmann::json& entry, const char* key, const std::string& place) {
  const auto found = entry.find(key);
  require_input(found != entry.end(), "{}: {} is missing", place, key);
  return header_integer(*found, key, place);
}

std::vector<std::int64_t> read_pair(const nlohmann::json& slice, const char* key,
                                    const std::string& place) {
  const bool good =
      slice.is_object() && slice.contains(key) && slice[key].is_array() && slice[key].size() == 2;
  require_input(good,
                "{}: slice is {}, expected \"of\": [rows, columns] and \"first\": [row, "
                "column]",
                place, describe_json(slice));
  return {header_integer(slice[key][0], key, place), header_integer(slice[key][1], key, place)};
}

// The block of a matrix that a shard stores.
void read_slice(const nlohmann::json& slice, RawTensor& tensor, const std::string& place) {
  tensor.full_shape = read_pair(slice, "of", place);
  tensor.first = read_pair(slice, "first", place);
  require_input(tensor.shape.size() == 2, "{}: a slice with {} dimensions, expected 2", place,
                tensor.shape.size());
  for (const std::size_t dim : {0U, 1U}) {
    require_input(tensor.shape[dim] <= tensor.full_shape[dim] &&
                      tensor.first[dim] <= tensor.full_shape[dim] - tensor.shape[dim],
                  "{}: slice {} of {} from {} on lies outside of it", place, tensor.shape[dim],
                  tensor.full_shape[dim], tensor.first[dim]);
  }
}

RawTensor read_kdtr_entry(const nlohmann::json& entry, std::int64_t data_start,
                          const std::string& place) {
  require_input(entry.is_object(), "{}: header entry is {}, expected an object", place,
                describe_json(entry));
  RawTensor tensor;
  tensor.dtype = header_text(entry, "dtype", place);
  tensor.bytes = read_integer(entry, "bytes", place);
  tensor.shape = read_shape(entry, tensor.dtype, tensor.bytes, place);
  tensor.checksum = read_checksum(entry, place);
  const std::int64_t offset = read_integer(entry, "offset", place);
  require_input(offset % alignment_of(tensor.bytes) == 0, "{}: offset {} is not a multiple of {}",
                place, offset, alignment_of(tensor.bytes));
  tensor.file_offset = data_start + offset;
  if (const auto slice = entry.find("slice"); slice != entry.end()) {
    read_slice(*slice, tensor, place);
  }
  return tensor;
}

nlohmann::json table_entry(const OutputTensor& tensor, std::int64_t offset) {
  nlohmann::json entry = {{"dtype", tensor.dtype},
                          {"shape", tensor.shape},
                          {"offset", offset},
                          {"bytes", tensor.bytes},
                          {"checksum", std::string(16, '0')}};
  if (!tensor.full_shape.empty()) {
    entry["slice"] = {{"of", tensor.full_shape}, {"first", tensor.first}};
  }
  return entry;
}

}  // namespace

KdtrHeader read_kdtr_header(const std::string& path) {
  const InputFile file(path);
  const Prefix prefix = read_prefix(file);
  KdtrHeader header{.json = read_header_json(file, prefix), .tensors = {}};
  const auto table = header.json.find("tensors");
  require_input(table != header.json.end() && table->is_object(),
                "{}: the header holds no tensor table", path);
  const std::int64_t data_start =
      round_up(kPrefixBytes + static_cast<std::int64_t>(prefix.header_bytes), kPageBytes);
  for (const auto& [name, entry] : table->items()) {
    header.tensors.emplace(name, read_kdtr_entry(entry, data_start, tensor_place(path, name)));
  }
  check_extents(header.tensors,
                {.data_start = data_start, .file_bytes = file.size(), .dense = false}, path);
  header.json.erase(table);
  return header;
}

KdtrLayout kdtr_layout(nlohmann::json header, const std::vector<OutputTensor>& tensors) {
  KdtrLayout layout{.header = std::move(header), .offsets = {}};
  nlohmann::json table = nlohmann::json::object();
  std::int64_t end = 0;
  for (const OutputTensor& tensor : tensors) {
    const std::int64_t offset = round_up(end, alignment_of(tensor.bytes));
    check(table.emplace(tensor.name, table_entry(tensor, offset)).second, "{} is named twice",
          tensor.name);
    layout.offsets.push_back(offset);
    end = offset + tensor.bytes;
  }
  layout.header["tensors"] = std::move(table);
  // Checksums have a fixed length: the header has its final size before they are known.
  const auto header_bytes = static_cast<std::int64_t>(layout.header.dump().size());
  const std::int64_t data_start = round_up(kPrefixBytes + header_bytes, kPageBytes);
  for (std::int64_t& offset : layout.offsets) {
    offset += data_start;
  }
  layout.file_bytes = data_start + end;
  return layout;
}

std::string kdtr_head(const KdtrLayout& layout, const std::vector<OutputTensor>& tensors,
                      const std::vector<std::uint64_t>& checksums) {
  nlohmann::json header = layout.header;
  for (std::size_t index = 0; index < tensors.size(); ++index) {
    header["tensors"][tensors[index].name]["checksum"] = fmt::format("{:016x}", checksums[index]);
  }
  const std::string text = header.dump();
  Prefix prefix;
  std::memcpy(prefix.magic.data(), kMagic.data(), kMagic.size());
  prefix.version = kKdtrVersion;
  prefix.header_bytes = text.size();
  prefix.header_checksum = XXH3_64bits(text.data(), text.size());
  std::string head(sizeof(prefix), '\0');
  std::memcpy(head.data(), &prefix, sizeof(prefix));
  return head + text;
}

}  // namespace kdtree
